"""The planner against exhaustive search, its rules, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_fx.occupancy import outline_of, resident_bytes
from fsdp_fx.passes import Measurements, PassOptions, plan
from fsdp_fx.planning.durations import Durations
from fsdp_fx.planning.gradients import RecordedGradients
from fsdp_fx.planning.memory import kept_gradient_bytes, needed_bytes
from fsdp_fx.planning.outline import Outline
from fsdp_fx.planning.planner import outline
from fsdp_fx.program import Program
from fsdp_fx.trace import Trace
from traces import TWO_CHUNKS, interleaved, trace, windows

EVERYTHING = 10**9

LOOKAHEADS = st.sampled_from((0, None, 10, 40, 200))
BUDGETS = st.sampled_from((0, 20, 40, 60, 100, 160, 300, EVERYTHING))
REDUCTIONS = st.sampled_from(("per_backward", "per_window", "planned"))
OPTIONS = st.builds(PassOptions, LOOKAHEADS, LOOKAHEADS, REDUCTIONS, BUDGETS, st.booleans())


def communicated(program: Program) -> int:
    """Bytes gathered and reduced in every window but the first."""
    done = outline_of(program)
    return done.bytes_gathered + done.bytes_reduced


# What may be kept, worked out from the meaning of the options alone.


def covers(window: Trace, options: PassOptions, issuing: int, use: int) -> bool:
    """Whether the lookahead of one event covers all events up to a use."""
    own = window[issuing]
    budget = options.forward_prefetch if own.phase == "F" else options.backward_prefetch
    if budget is None:
        return use <= issuing + 1
    assert isinstance(budget, int)
    units = {event.unit for event in window[issuing + 1 : use + 1]} - {own.unit}
    return budget > 0 and sum(window.unit(unit).elements for unit in units) <= budget


def in_use(window: Trace, unit: str, position: int) -> bool:
    return any(
        window[use].unit == unit and use <= position <= window.ends[use]
        for use in range(position + 1)
    )


def awaited(window: Trace, options: PassOptions, unit: str, position: int) -> bool:
    """Whether the lookahead of this or an earlier event covers the unit's next use."""
    later = (use for use in range(position + 1, len(window)) if window[use].unit == unit)
    use = next(later, None)
    return use is not None and any(
        covers(window, options, issuing, use) for issuing in range(position + 1)
    )


def contributions(window: Trace) -> dict[str, list[int]]:
    """The backwards of each trainable unit that can be reduced after, by when they end."""
    found: dict[str, list[int]] = {}
    for position in sorted(window.reduces, key=lambda each: window.end_order(each)):
        if window.unit(window[position].unit).trainable:
            found.setdefault(window[position].unit, []).append(position)
    return found


def gradient_bytes(
    window: Trace, recorded: RecordedGradients, own: Sequence[int], kept: Sequence[bool]
) -> list[int]:
    """What a unit's gradients take at each event beyond what was recorded.

    Args:
        window: the window.
        recorded: what its recording had of gradients.
        own: the unit's backwards.
        kept: for all but the last, whether the gradient is kept until the next.
    """
    unit = window.unit(window[own[0]].unit)
    there = [0] * len(window)
    ended = -1
    for index, position in enumerate(own):
        end = window.ends[position]
        before, after = index > 0 and kept[index - 1], index < len(kept) and kept[index]
        written = min(recorded.written.get(position, 0), unit.kept_gradient_bytes)
        spared = min(recorded.spared.get(position, 0), written)
        unreduced = all(kept[: index + 1]) and after
        first = max(position, ended + 1)
        for event in range(first, end):
            there[event] += unit.kept_gradient_bytes * (before or (after and written > 0))
        if before or after:
            there[end] += unit.kept_gradient_bytes - (spared if before else written)
        if unreduced and before:
            for event in range(min(first, end), end + 1):
                there[event] -= recorded.shards.get(unit.name, 0)
        if after:
            for event in range(end + 1, own[index + 1]):
                there[event] += unit.kept_gradient_bytes
                there[event] -= recorded.shards.get(unit.name, 0) * unreduced
            # An earlier reduction's input stays until the next one.
            order = sorted(
                (p for p in window.reduces if window.unit(window[p].unit).trainable),
                key=window.end_order,
            )
            place = order.index(position)
            sizes = [window.unit(window[p].unit).gradient_bytes for p in order]
            more = max(0, max(sizes[:place], default=0) - unit.gradient_bytes)
            for event in range(end, window.ends[order[place + 1]] + 1):
                there[event] += more
        ended = end
    return there


def most_bytes_saved(
    window: Trace,
    options: PassOptions,
    room: Sequence[int],
    recorded: RecordedGradients | None = None,
) -> int:
    """Exhaustive search over what is kept beyond the working set at each event."""
    choices: list[tuple[int, list[int]]] = []  # bytes, and the events that pay for them
    for unit in window.units:
        idle = [p for p in range(len(window)) if not in_use(window, unit.name, p)]
        paid = [p for p in idle if not awaited(window, options, unit.name, p)]
        uses = [p for p, event in enumerate(window) if event.unit == unit.name]
        gathers = [p for p in uses if all(window.ends[q] < p for q in uses if q < p)]
        for before, after in pairwise(gathers):
            choices.append((unit.bytes, [p for p in paid if before < p < after]))
        if gathers and not unit.trainable and options.keep_frozen:
            outside = [p for p in paid if p < gathers[0] or p > gathers[-1]]
            choices.append((unit.bytes, outside))
        if options.reduce_gradients == "planned" and recorded is None:
            own = contributions(window).get(unit.name, [])
            for first, second in pairwise(own):
                span = range(window.ends[first] + 1, window.ends[second] + 1)
                choices.append((unit.gradient_bytes, list(span)))
    if options.reduce_gradients == "planned" and recorded is not None:
        chains = [own for own in contributions(window).values() if len(own) > 1]
        every = [product((False, True), repeat=len(own) - 1) for own in chains]
        best = 0
        for kept in product(*every):
            left, saved = list(room), 0
            for own, chosen in zip(chains, kept, strict=True):
                saved += window.unit(window[own[0]].unit).gradient_bytes * sum(chosen)
                taken = gradient_bytes(window, recorded, own, chosen)
                left = [there - more for there, more in zip(left, taken, strict=True)]
            if min(left, default=0) >= 0:
                rest = replace(options, reduce_gradients="per_backward")
                best = max(best, saved + most_bytes_saved(window, rest, left))
        return best

    def search(index: int, left: list[int]) -> int:
        if index == len(choices):
            return 0
        size, events = choices[index]
        without = search(index + 1, left)
        if any(left[event] < size for event in events):
            return without
        after = list(left)
        for event in events:
            after[event] -= size
        return max(without, size + search(index + 1, after))

    # The choices that cost nothing need no search.
    free = sum(size for size, events in choices if not events or size == 0)
    choices = [(size, events) for size, events in choices if events and size]
    return free + search(0, list(room))


@st.composite
def recordings(draw: st.DrawFn, window: Trace) -> RecordedGradients:
    """What the recording of a window may have had of gradients."""
    written, spared = (
        {
            position: draw(st.integers(0, window.unit(window[position].unit).gradient_bytes))
            for position in window.reduces
            if draw(st.booleans())
        }
        for _ in range(2)
    )
    shards = {
        unit.name: draw(st.integers(0, unit.gradient_bytes))
        for unit in window.units
        if draw(st.booleans())
    }
    return RecordedGradients(written, spared, shards)


@settings(max_examples=70)
@given(windows(), OPTIONS)
def test_the_fewest_bytes_are_communicated_of_all_that_could_be_kept(
    window: Trace, options: PassOptions
) -> None:
    assert isinstance(options.memory_budget, int)
    everything = communicated(
        plan(window, PassOptions(0, 0, options.reduce_gradients.replace("planned", "per_backward")))
    )
    program = plan(window, options)
    saved = most_bytes_saved(window, options, [options.memory_budget] * len(window))
    assert communicated(program) == everything - saved
    assert program.unproven == 0


@settings(max_examples=150)
@given(windows(calls=9), REDUCTIONS, st.data())
def test_the_fewest_bytes_are_communicated_under_any_recorded_room(
    window: Trace, reductions: str, data: st.DataObject
) -> None:
    options = PassOptions(0, 0, reductions, "auto")
    size = st.integers(0, 300)
    room = data.draw(st.lists(size, min_size=len(window), max_size=len(window)))
    recorded = data.draw(recordings(window))
    everything = communicated(
        plan(window, PassOptions(0, 0, reductions.replace("planned", "per_backward")))
    )
    program = plan(window, options, Measurements(room=tuple(room), gradients=recorded))
    assert communicated(program) == everything - most_bytes_saved(window, options, room, recorded)
    assert program.unproven == 0
    assert program.carried == frozenset()


def test_under_a_recorded_room_a_kept_gradient_counts_where_its_backward_ends() -> None:
    # There the buffer of the reduction before is still held. Events: F0 B0 F1 B1.
    window = trace("m F0: a; m B0: a; m F1: a; m B1: a")
    options = PassOptions(0, 0, "planned", "auto")
    for at_the_backward, reductions in ((400, 1), (399, 2)):
        room = (0, at_the_backward, 400, 400)
        program = plan(window, options, Measurements(room=room))
        assert len(outline_of(program).reductions) == reductions


def working_set(window: Trace, options: PassOptions) -> list[int]:
    return [
        sum(
            unit.bytes
            for unit in window.units
            if in_use(window, unit.name, p) or awaited(window, options, unit.name, p)
        )
        for p in range(len(window))
    ]


@given(windows(), OPTIONS)
def test_what_is_resident_stays_within_the_working_set_and_the_budget(
    window: Trace, options: PassOptions
) -> None:
    assert isinstance(options.memory_budget, int)
    program = plan(window, options)
    reductions = outline_of(program).reductions
    kept = kept_gradient_bytes(window, reductions)
    forced = [0] * len(window)
    if options.reduce_gradients == "per_window":
        forced = kept  # outside of the budget
    for there, gradients, outside, needed in zip(
        resident_bytes(program), kept, forced, working_set(window, options), strict=True
    ):
        assert there + gradients - outside <= needed + options.memory_budget


@given(windows(keeps=True), OPTIONS, BUDGETS)
def test_more_budget_never_communicates_more(
    window: Trace, options: PassOptions, other: int
) -> None:
    assert isinstance(options.memory_budget, int)
    less, more = sorted((options.memory_budget, other))
    assert communicated(plan(window, replace(options, memory_budget=more))) <= communicated(
        plan(window, replace(options, memory_budget=less))
    )


@given(windows(), LOOKAHEADS, LOOKAHEADS)
def test_a_budget_for_everything_gathers_and_reduces_each_unit_once(
    window: Trace, forward: int | None, backward: int | None
) -> None:
    options = PassOptions(forward, backward, "planned", EVERYTHING, keep_frozen=True)
    program = plan(window, options)
    used = {event.unit for event in window}
    frozen = {unit.name for unit in window.units if not unit.trainable}
    assert program.carried == used & frozen
    assert sorted(interval.unit for interval in outline_of(program).gathers) == sorted(
        used - frozen
    )
    reduced = [unit for step in program.steps for unit in step.reduces]
    assert sorted(reduced) == sorted(contributions(window))


@given(windows(), LOOKAHEADS, LOOKAHEADS)
def test_a_budget_of_nothing_holds_what_no_budget_holds(
    window: Trace, forward: int | None, backward: int | None
) -> None:
    free = plan(window, PassOptions(forward, backward))
    none = plan(window, PassOptions(forward, backward, memory_budget=0))
    assert all(
        kept <= there
        for kept, there in zip(
            resident_bytes(none), working_set(window, PassOptions(forward, backward)), strict=True
        )
    )
    assert communicated(none) <= communicated(free)


def test_a_budget_of_nothing_keeps_a_unit_that_is_used_twice_in_a_row() -> None:
    window = trace("m F0: a b; m B0: b a")
    program = plan(window, PassOptions(0, 0, memory_budget=0))
    assert [interval.uses for interval in outline_of(program).intervals] == [(0,), (1, 2), (3,)]


def test_gradients_of_the_whole_window_are_outside_of_the_budget() -> None:
    window = trace(TWO_CHUNKS)
    for budget in (0, 200, 600):
        per_window = plan(window, PassOptions(0, 0, "per_window", budget))
        per_backward = plan(window, PassOptions(0, 0, "per_backward", budget))
        assert outline_of(per_window).intervals == outline_of(per_backward).intervals
        assert per_window.capacity != per_backward.capacity


def test_a_gradient_and_a_unit_compete_for_the_same_bytes() -> None:
    # 200 bytes of parameters, 400 of gradients. Room for one gradient, or for two units.
    window = trace("m F0: a b; m B0: b a; m F1: a b; m B1: b a")
    program = plan(window, PassOptions(0, 0, "planned", 400))
    kept = kept_gradient_bytes(window, outline_of(program).reductions)
    assert communicated(program) == 8 * 200 + 4 * 400 - most_bytes_saved(
        window, PassOptions(0, 0, "planned", 400), [400] * 8
    )
    assert max(kept) <= 400
    assert communicated(plan(window, PassOptions(0, 0, "planned", 1200))) == 2 * 200 + 2 * 400


def test_a_frozen_unit_stays_from_window_to_window_where_it_is_worth_it() -> None:
    # All but the event of its use, 200 bytes.
    window = trace("m F0: a b; m B0: b", frozen={"m.a"})
    assert plan(window, PassOptions(0, 0, memory_budget=200)).carried == frozenset()
    options = PassOptions(0, 0, memory_budget=199, keep_frozen=True)
    assert plan(window, options).carried == frozenset()
    program = plan(window, replace(options, memory_budget=200))
    assert program.carried == {"m.a"}
    assert [interval.unit for interval in outline_of(program).gathers] == ["m.b"]
    # b and its two uses back to back cost nothing; beyond its use a costs its bytes.
    assert resident_bytes(program) == [200, 400, 400]


def test_a_unit_that_trains_is_never_carried() -> None:
    window = trace(TWO_CHUNKS)
    assert plan(window, PassOptions(0, 0, "planned", EVERYTHING, True)).carried == frozenset()


def test_a_frozen_unit_competes_with_gaps_for_the_same_bytes() -> None:
    # At d there is room for c, for its next use, or for a, for the next window.
    for elements, carried in ((150, frozenset()), (80, frozenset({"m.a"}))):
        window = trace("m F0: a c d c", {"m.c": elements}, frozen={"m.a"})
        budget = max(200, 2 * elements)
        program = plan(window, PassOptions(0, 0, memory_budget=budget, keep_frozen=True))
        assert program.carried == carried
        assert communicated(program) == 200 + 4 * elements + 200 - budget


# The plan without its graph


@st.composite
def durations(draw: st.DrawFn, window: Trace) -> Durations:
    time_of = st.integers(0, 20)
    return Durations(
        tuple(draw(time_of) for _ in window),
        {unit.name: draw(time_of) for unit in window.units},
        {unit.name: draw(time_of) for unit in window.units},
    )


def outlined(window: Trace, options: PassOptions, measured: Durations | None = None) -> Outline:
    assert options.memory_budget != "auto"
    return outline(
        window,
        forward_prefetch=options.forward_prefetch,
        backward_prefetch=options.backward_prefetch,
        memory_budget=options.memory_budget,
        reduce_gradients=options.reduce_gradients,
        keep_frozen=options.keep_frozen,
        durations=measured,
    )


TIMED = st.sampled_from((0, None, 10, 40, 200, "timed"))
TIMED_OPTIONS = st.builds(PassOptions, TIMED, TIMED, REDUCTIONS, BUDGETS, st.booleans())


@settings(max_examples=70)
@given(windows(calls=10, keeps=True), TIMED_OPTIONS, st.data())
def test_the_plan_without_its_graph_is_that_of_the_passes(
    window: Trace, options: PassOptions, data: st.DataObject
) -> None:
    measured = data.draw(durations(window))
    program = plan(window, options, Measurements(durations=measured))
    assert outlined(window, options, measured) == outline_of(program)


@given(windows(keeps=True), LOOKAHEADS, LOOKAHEADS, st.sampled_from(("per_backward", "per_window")))
def test_without_a_budget_the_plan_without_its_graph_is_that_of_the_passes(
    window: Trace, forward: int | None, backward: int | None, reductions: str
) -> None:
    options = PassOptions(forward, backward, reductions)
    assert outlined(window, options) == outline_of(plan(window, options))


# By the memory of a recorded window

AUTO_OPTIONS = st.builds(PassOptions, TIMED, TIMED, REDUCTIONS, st.just("auto"))


@given(windows(), AUTO_OPTIONS, st.data())
def test_the_recorded_room_is_never_passed(
    window: Trace, options: PassOptions, data: st.DataObject
) -> None:
    size = st.sampled_from((0, 0, 20, 40, 100, 400))
    room = data.draw(st.lists(size, min_size=len(window), max_size=len(window)))
    measured = data.draw(durations(window))
    program = plan(window, options, Measurements(measured, tuple(room)))
    assert program.carried == frozenset()
    kept = kept_gradient_bytes(window, outline_of(program).reductions)
    if options.reduce_gradients == "per_window":
        kept = [0] * len(window)
    for there, gradients, needed, left in zip(
        resident_bytes(program), kept, needed_bytes(window), room, strict=True
    ):
        assert there + gradients <= needed + left


@given(windows(), st.data())
def test_without_room_everything_is_gathered_on_demand(window: Trace, data: st.DataObject) -> None:
    # Units without bytes always have room.
    window = replace(
        window, units=tuple(replace(unit, bytes=unit.bytes + 2) for unit in window.units)
    )
    forward, backward = data.draw(TIMED), data.draw(TIMED)
    measured = Measurements(data.draw(durations(window)), (0,) * len(window))
    program = plan(window, PassOptions(forward, backward, "planned", "auto"), measured)
    on_demand = plan(window, PassOptions(0, 0, memory_budget=0))
    assert all(interval.gathered == interval.waited for interval in outline_of(program).intervals)
    assert resident_bytes(program) == needed_bytes(window)
    free = sum(
        window.unit(interval.unit).bytes
        for interval in outline_of(on_demand).intervals
        if interval.unit in on_demand.carried
    )
    assert outline_of(program).bytes_gathered <= outline_of(on_demand).bytes_gathered + free


def test_where_there_is_less_room_than_the_lookahead_wants_gathers_are_on_demand() -> None:
    window = trace("m F0: a b c d")
    measured = Measurements(room=(200, 0, 199, 200))
    program = plan(window, PassOptions(None, None, memory_budget="auto"), measured)
    assert [(each.unit, each.gathered) for each in outline_of(program).intervals] == [
        ("m.a", 0),
        ("m.b", 0),
        ("m.c", 2),
        ("m.d", 3),
    ]


def test_a_recorded_room_is_needed_for_auto() -> None:
    with pytest.raises(ValueError, match="needs the memory of a recorded window"):
        plan(trace("m F0: a"), PassOptions(memory_budget="auto"))


def test_measured_durations_are_needed_for_a_lookahead_by_time() -> None:
    options = PassOptions("timed", None, memory_budget=0)
    with pytest.raises(ValueError, match="needs the durations of a recorded window"):
        plan(trace("m F0: a"), options)
    with pytest.raises(ValueError, match="needs durations"):
        outline(trace("m F0: a"), backward_prefetch="timed", memory_budget=0)


# How long it takes, in seconds of this process: other work on the machine does not count.


def planning_time(window: Trace, options: PassOptions) -> float:
    start = time.process_time()
    plan(window, options)
    return time.process_time() - start


def test_planning_takes_seconds_and_grows_gently() -> None:
    options = PassOptions(None, None, "planned", 400)
    plan(interleaved(256), options)  # what is imported and set up once
    curve = {
        events: planning_time(interleaved(events), options)
        for events in (256, 512, 1024, 2048, 4096)
    }
    print()
    for events, seconds in curve.items():
        print(f"{events:5} events with gradients: {seconds:5.2f} s")
    assert curve[2048] < 5
    # Quadratic would be 16 times as long for four times as many.
    assert curve[4096] < 32 * max(curve[1024], 0.1)


@pytest.mark.parametrize("budget", [200, 400, 800, 1600])
def test_planning_units_of_one_size_is_proven_at_any_budget(budget: int) -> None:
    window = interleaved(1024)
    done = plan(window, PassOptions(0, 0, "planned", budget))
    assert done.unproven == 0


@pytest.mark.parametrize("budget", [400, 800])
def test_planning_with_one_larger_unit_takes_seconds(budget: int) -> None:
    options = PassOptions(None, None, "planned", budget)
    window = interleaved(2048, larger=3)
    start = time.process_time()
    program = plan(window, options)
    seconds = time.process_time() - start
    done = communicated(program)
    print(
        f"\n2048 events, one larger unit, {budget}: {seconds:.2f} s, unproven {program.unproven} of {done}"
    )
    assert seconds < 15
    assert program.unproven <= done // 50
