"""What stays resident: which gathers and reductions a window can do without.

Between two intervals of a unit lies a gap. Keeping the unit through the gap saves a gather and
costs its bytes at every event inside; keeping its full gradient between two backwards saves a
reduction and costs the gradient's bytes. Every choice saves as many bytes of communication as
it holds of memory, so the two compete for the same room: :func:`keep` takes the most
valuable ones that fit, with :mod:`fsdp_fx.planning.packing`.

A unit that the lookahead would gather at some event of its gap anyway costs nothing from there
on: where the lookahead has its own room, only the events before count.

Under a recorded room a gradient takes less than its bytes, beside what the recorded window had
in its place: see :mod:`fsdp_fx.planning.gradients`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from fsdp_fx.planning.gradients import Chain, Part, RecordedGradients, chains
from fsdp_fx.planning.memory import Interval, contributions
from fsdp_fx.planning.packing import Item, pack
from fsdp_fx.planning.selection import select
from fsdp_fx.trace import Trace

__all__ = ["Kept", "after_forward", "carry", "keep", "lookahead_bytes", "merge", "move"]


@dataclass(frozen=True)
class Kept:
    """What stays resident.

    Args:
        gathers: first uses of intervals whose gather is saved: the unit stays from its
            interval before.
        reductions: events that could be reduced after, and are not: the gradient is kept
            until the unit's next backward.
        carried: frozen units that stay from one window to the next.
        unproven: bytes that another choice might save more, at most.
        gradient_bytes: what the gradients that are kept take at each event of the room; empty
            if none are. Negative where the recorded window had more in their place.
    """

    gathers: frozenset[int] = frozenset()
    reductions: frozenset[int] = frozenset()
    carried: frozenset[str] = frozenset()
    unproven: int = 0
    gradient_bytes: tuple[int, ...] = ()


def after_forward(trace: Trace, intervals: Sequence[Interval]) -> frozenset[int]:
    """What the user wants to stay from a forward to the use that comes next, whatever it costs.

    Args:
        trace: the window.
        intervals: gathered on demand.

    Returns:
        First uses of the intervals that their unit's interval before takes in.
    """
    wanted = {unit.name for unit in trace.units if unit.kept_after_forward}
    gathers: set[int] = set()
    before: dict[str, Interval] = {}
    for interval in intervals:
        name = interval.unit
        if name in wanted:
            if name in before:
                last = max(before[name].uses, key=trace.end_order)
                if trace[last].phase == "F":
                    gathers.add(interval.waited)
            before[name] = interval
    return frozenset(gathers)


def lookahead_bytes(
    trace: Trace, intervals: Sequence[Interval], covered: Sequence[int]
) -> list[int]:
    """Bytes of the units that the lookahead covers at each event and that are not in use.

    Args:
        trace: the window.
        intervals: gathered on demand, with nothing kept.
        covered: the first event whose lookahead covers each event.

    Returns:
        One value per event, in bytes.
    """
    size = {unit.name: unit.bytes for unit in trace.units}
    change = [0] * (len(trace) + 1)
    until: dict[str, int] = {}
    for interval in intervals:
        start = max(until.get(interval.unit, -1) + 1, covered[interval.waited])
        if start < interval.waited:
            change[start] += size[interval.unit]
            change[interval.waited] -= size[interval.unit]
        until[interval.unit] = interval.freed
    return list(accumulate(change[:-1]))


def keep(
    trace: Trace,
    intervals: Sequence[Interval],
    covered: Sequence[int],
    room: Sequence[int],
    *,
    gradients: bool = False,
    recorded: RecordedGradients | None = None,
    carries: bool = False,
) -> Kept:
    """Choose what stays resident, so that the fewest bytes are gathered and reduced.

    Args:
        trace: the window.
        intervals: gathered on demand, with nothing kept.
        covered: the first event whose lookahead covers each event.
        room: bytes that may be resident at each event beyond the units in use there and the
            gradients that are kept at any rate.
        gradients: whether full gradients may be kept between two backwards of their unit.
        recorded: what the recorded window had of gradients, if room is what an allocator had
            left there; None if it is a budget, of which gradients take what waits between two
            events.
        carries: whether frozen units may stay from one window to the next.

    Returns:
        The choice.
    """
    reserved = lookahead_bytes(trace, intervals, covered)
    # Where there is less room than the lookahead wants, it takes what is left by the rest.
    tight = [left < wanted for left, wanted in zip(room, reserved, strict=True)]
    capacity = [
        left if short else left - wanted
        for left, wanted, short in zip(room, reserved, tight, strict=True)
    ]
    options = _units_to_keep(trace, intervals, covered, tight, carries)
    own: list[Chain] = []
    if gradients and recorded is not None:
        own = chains(trace, recorded)
    elif gradients:
        options += _gradients_to_keep(trace)
    items = [option.item for option in options]
    if own:
        selection = select(items, own, capacity)
        taken, unproven = [options[index] for index in selection.items], selection.unproven
    else:
        packing = pack(items, capacity)
        taken, unproven = [options[index] for index in packing.taken], packing.unproven
    reductions = {option.reduction for option in taken if option.reduction is not None}
    parts = [part for option in taken if option.reduction is not None for part in option.item.parts]
    for chain, chosen in zip(own, selection.gradients if own else (), strict=True):
        reductions.update(chain.positions[index] for index in chosen)
        parts += chain.held(chosen)
    return Kept(
        frozenset(option.gather for option in taken if option.gather is not None),
        frozenset(reductions),
        frozenset(option.carried for option in taken if option.carried is not None),
        unproven,
        tuple(_bytes_at_events(parts, len(trace))) if reductions else (),
    )


@dataclass(frozen=True)
class _Option:
    """Something that may be kept, and which gather or reduction that saves."""

    item: Item
    gather: int | None = None
    reduction: int | None = None
    carried: str | None = None


def _units_to_keep(
    trace: Trace,
    intervals: Sequence[Interval],
    covered: Sequence[int],
    tight: Sequence[bool],
    carries: bool,
) -> list[_Option]:
    size = {unit.name: unit.bytes for unit in trace.units}
    options: list[_Option] = []

    def stretches(start: int, stop: int, charged: int) -> list[tuple[int, int]]:
        """The events from ``start`` to ``stop`` that count: to ``charged``, and tight ones."""
        found = [(start, min(stop, charged))] if start < min(stop, charged) else []
        for position in range(max(start, charged), stop):
            if tight[position]:
                if found and found[-1][1] == position:
                    found[-1] = found[-1][0], position + 1
                else:
                    found.append((position, position + 1))
        return found

    first: dict[str, Interval] = {}
    before: dict[str, int] = {}
    for interval in intervals:
        name, use = interval.unit, interval.waited
        if name in before:
            gap = tuple(stretches(before[name] + 1, use, covered[use]))
            options.append(_Option(Item(size[name], size[name], gap), gather=use))
        else:
            first[name] = interval
        before[name] = max(before.get(name, -1), interval.freed)
    for name, interval in first.items():
        if carries and not trace.unit(name).trainable:
            use = interval.waited
            gap = tuple(
                stretches(0, use, covered[use])
                + stretches(before[name] + 1, len(trace), len(trace))
            )
            options.append(_Option(Item(size[name], size[name], gap), carried=name))
    return options


def _gradients_to_keep(trace: Trace) -> list[_Option]:
    options: list[_Option] = []
    last: dict[str, int] = {}
    for position in contributions(trace):
        unit = trace.unit(trace[position].unit)
        if unit.name in last:
            # What a backward adds to is there in the whole of it.
            gap = ((trace.ends[last[unit.name]] + 1, trace.ends[position] + 1),)
            item = Item(unit.kept_gradient_bytes, unit.gradient_bytes, gap)
            options.append(_Option(item, reduction=last[unit.name]))
        last[unit.name] = position
    return options


def _bytes_at_events(parts: Iterable[Part], events: int) -> Iterator[int]:
    change = [0] * (events + 1)
    for start, stop, size in parts:
        change[start] += size
        change[stop] -= size
    return accumulate(change[:-1])


def merge(intervals: Sequence[Interval], gathers: frozenset[int]) -> tuple[Interval, ...]:
    """The intervals in which the gathers for some uses are saved.

    Args:
        intervals: gathered on demand, in order.
        gathers: first uses of the intervals that their unit's interval before takes in.
    """
    result: list[Interval] = []
    last: dict[str, int] = {}
    for interval in intervals:
        if interval.waited in gathers:
            index = last[interval.unit]
            one = result[index]
            result[index] = replace(
                one, uses=one.uses + interval.uses, freed=max(one.freed, interval.freed)
            )
        else:
            last[interval.unit] = len(result)
            result.append(interval)
    return tuple(result)


def move(intervals: Sequence[Interval], issued: Mapping[int, int]) -> tuple[Interval, ...]:
    """The intervals with their gathers issued elsewhere, in the order of the gathers.

    Args:
        intervals: gathered on demand.
        issued: where the gather of each is issued, by its first use.
    """
    moved = [replace(interval, gathered=issued[interval.waited]) for interval in intervals]
    # At one event the gather on demand comes first, then those ahead by their use.
    return tuple(sorted(moved, key=lambda each: (each.gathered, each.waited)))


def carry(
    trace: Trace, intervals: Sequence[Interval], carried: frozenset[str]
) -> tuple[Interval, ...]:
    """The intervals in which some units stay from one window to the next.

    Args:
        trace: the window.
        intervals: in the order of their gathers.
        carried: the units: their first interval begins with the window and their last ends
            with it.
    """
    result = list(intervals)
    for name in carried:
        own = [index for index, interval in enumerate(result) if interval.unit == name]
        result[own[0]] = replace(result[own[0]], gathered=0)
        result[own[-1]] = replace(result[own[-1]], freed=len(trace) - 1)
    return tuple(result)
