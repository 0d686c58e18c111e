"""``fsdp-fx view``: what a saved timeline, trace or plan says, in a few lines of text.

Reads the JSON that :func:`fsdp_fx.timeline.save_timeline`, :func:`fsdp_fx.saved.save_trace`
and ``fsdp-fx plan --json`` write. Which of them a file holds, it says itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import cast, get_args

from fsdp_fx.forecast.comparison import EVERYTHING, Budget, Forecast, Policy, RankForecast
from fsdp_fx.forecast.display import budget_text, by_policy, table_lines
from fsdp_fx.forecast.quantities import format_time
from fsdp_fx.forecast.record import FORMAT as PLAN
from fsdp_fx.forecast.record import VERSION as PLAN_VERSION
from fsdp_fx.json_files import Place, read
from fsdp_fx.planning.memory import format_bytes, needed_bytes
from fsdp_fx.saved import FORMAT as TRACE
from fsdp_fx.saved import load_trace
from fsdp_fx.timeline.perfetto import FORMAT as TIMELINE
from fsdp_fx.timeline.perfetto import VERSION as TIMELINE_VERSION

__all__ = ["ViewError", "summary"]

# What a line says, and the line.
Line = tuple[str, str]

_CURVE = 64  # columns
_BLOCKS = "▁▂▃▄▅▆▇█"
_PLAIN = "_.-~=+*#"
_LISTED = 6


class ViewError(ValueError):
    """A file cannot be viewed. The message names it and what is wrong, in one line."""


def summary(path: str | os.PathLike[str], encoding: str = "utf-8") -> str:
    """What a file holds, as text.

    Args:
        path: a timeline, a trace or a plan that was saved as JSON.
        encoding: of where the text is shown: without blocks in it, curves are drawn in ASCII.

    Raises:
        ViewError: the file cannot be read, or holds none of them.
    """
    try:
        lines = list(_summarise(read(path), _blocks(encoding)))
    except OSError as error:
        raise ViewError(f"{os.fspath(path)}: {error.strerror or error}") from error
    except ValueError as error:
        raise ViewError(str(error)) from error
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}".rstrip() for name, text in lines)


def _summarise(document: Place, blocks: str) -> Iterator[Line]:
    place = document
    if document.optional("traceEvents") is not None:
        other = document.optional("otherData")
        if other is None or other.optional("format") is None:
            document.fail("holds a Chrome trace that fsdp_fx has not written")
        place = other
    name = place.field("format")
    match name.text():
        case kind if kind in _KINDS:
            return _KINDS[kind](place, blocks)
        case _:
            known = " or ".join(f'"{kind}"' for kind in _KINDS)
            name.fail(f"is {name.shown}, not {known}")


def _trace(document: Place, blocks: str) -> Iterator[Line]:
    trace, durations = load_trace(document.file)
    units = trace.units
    sizes = [unit.bytes for unit in units]
    yield "trace", document.file
    yield (
        "window",
        _window(
            len(trace),
            len(units),
            len({unit.chunk for unit in units}),
            len({event.microbatch for event in trace}),
        ),
    )
    if units:
        yield (
            "units",
            f"{format_bytes(min(sizes))} to {format_bytes(max(sizes))}, "
            f"{format_bytes(sum(sizes))} in all; "
            f"{sum(not unit.trainable for unit in units)} frozen, "
            f"{sum(unit.replicas > 1 for unit in units)} replicated",
        )
    calls = [f"{call.chunk} {call.phase}{call.microbatch}" for call in trace.calls]
    yield "calls", f"{len(calls)}{_listed(calls)}"
    yield "contributions", f"{_count(len(trace.reduces), 'backward')} after which to reduce"
    yield from _curve("in use", needed_bytes(trace), [str(event) for event in trace], blocks)
    if durations is None:
        yield "durations", "none"
        return
    yield "compute", format_time(sum(durations.compute))
    for name, times in (("gather", durations.gathers), ("reduction", durations.reductions)):
        if times:
            shortest, longest = min(times.values()), max(times.values())
            yield f"a {name}", f"{format_time(shortest)} to {format_time(longest)}"


def _timeline(document: Place, blocks: str) -> Iterator[Line]:
    _require_version(document, TIMELINE_VERSION)
    events = [item.text() for item in document.field("events").items()]
    parameters = _values(document.field("parameters"), len(events))
    gradients = _values(document.field("gradients"), len(events))
    gathers, reductions = document.field("gathers"), document.field("reductions")
    ahead, demanded = (gathers.field(name).integer() for name in ("ahead", "on demand"))
    full, partial = (reductions.field(name).integer() for name in ("full", "partial"))
    by_unit = _numbers(gathers.field("units"))
    caption = document.field("caption")
    named = "" if caption.value is None else f" ({caption.text()})"
    yield "timeline", f"{document.file}{named}"
    yield "time", document.field("time").text()
    yield (
        "window",
        _window(
            len(events),
            len(by_unit),
            document.field("chunks").integer(),
            document.field("microbatches").integer(),
        ),
    )
    yield "gathers", f"{ahead + demanded}: {ahead} ahead, {demanded} on demand"
    yield "reductions", f"{full + partial}" + (f": {partial} partial" if partial else "")
    carried = [item.text() for item in document.field("carried").items()]
    if carried:
        yield "carried", f"{len(carried)}{_listed(carried)}"
    most = sorted(by_unit.items(), key=lambda item: -item[1])
    if most and most[0][1]:
        yield "gathered most", _listed([f"{unit} {count}" for unit, count in most], "")
    times = document.optional("nanoseconds")
    if times is not None:
        step = format_time(times.field("step").integer())
        parts = [
            f"{name} {format_time(times.field(name).integer())}"
            for name in ("compute", "exposed gathers", "exposed reductions")
        ]
        yield "step", f"{step}: {', '.join(parts)}"
    yield from _curve("parameters", parameters, events, blocks)
    if any(gradients):
        yield from _curve("kept gradients", gradients, events, blocks)
        both = [sum(pair) for pair in zip(parameters, gradients, strict=True)]
        yield from _curve("both", both, events, blocks)
    capacity = document.field("capacity")
    if capacity.value is not None:
        yield from _curve("capacity", _values(capacity, len(events)), events, blocks)


def _plan(document: Place, blocks: str) -> Iterator[Line]:
    _require_version(document, PLAN_VERSION)
    ranks = list(document.field("ranks").items())
    events = [rank.field("events").integer() for rank in ranks]
    units = [len(list(rank.field("units").items())) for rank in ranks]
    plans = document.field("plans")
    forecasts = [_forecast(item, len(ranks)) for item in plans.items()]
    if not forecasts or not ranks:
        plans.fail("has nothing that was planned")
    yield "plan", document.file
    yield "for", document.field("title").text()
    yield (
        "ranks",
        f"{len(ranks)}: {_range(events)} events, {_range(units)} units on each",
    )
    without = document.field("without_communication_nanoseconds").integer()
    yield "no communication", format_time(without)
    name = "policies"
    for line in table_lines(*by_policy(forecasts)):
        yield name, line
        name = ""
    fastest = min(forecasts, key=lambda forecast: forecast.nanoseconds)
    budget = "" if fastest.budget is None else f" with {budget_text(fastest.budget)}"
    yield "fastest", f"{fastest.policy}{budget}, {format_time(fastest.nanoseconds)}"
    rank = max(range(len(ranks)), key=lambda rank: fastest.ranks[rank].peak_bytes)
    fullest = fastest.ranks[rank]
    yield "its memory", f"at most {format_bytes(fullest.peak_bytes)}, on rank {rank}"
    yield "", _sparkline(_sampled(fullest.resident, fastest.nanoseconds), blocks)


def _forecast(place: Place, ranks: int) -> Forecast:
    policy = place.field("policy")
    if policy.text() not in get_args(Policy):
        policy.fail(f"is {policy.shown}, not one of {', '.join(get_args(Policy))}")
    budget = place.field("budget")
    given: Budget | None = EVERYTHING if budget.value == EVERYTHING else None
    if given is None and budget.value is not None:
        given = budget.integer()
    found = tuple(_rank_forecast(item) for item in place.field("ranks").items())
    if len(found) != ranks:
        place.field("ranks").fail(f"is of {len(found)} ranks, but there are {ranks}")
    return Forecast(
        cast(Policy, policy.text()), given, place.field("step_nanoseconds").integer(), found
    )


def _rank_forecast(place: Place) -> RankForecast:
    def number(name: str) -> int:
        return place.field(name).integer()

    resident: list[tuple[int, int]] = []
    for item in place.field("resident_bytes").items():
        pair = [value.integer() for value in item.items()]
        if len(pair) != 2:
            item.fail(f"has {len(pair)} numbers; it must have a time and a number of bytes")
        if pair[0] < (resident[-1][0] if resident else 0):
            item.fail(f"is at {pair[0]}, before the one before it")
        resident.append((pair[0], pair[1]))
    return RankForecast(
        gathers=number("gathers"),
        bytes_gathered=number("bytes_gathered"),
        reductions=number("reductions"),
        bytes_reduced=number("bytes_reduced"),
        compute=number("compute_nanoseconds"),
        exposed=number("exposed_nanoseconds"),
        bubble=number("bubble_nanoseconds"),
        resident=tuple(resident),
    )


_KINDS: Mapping[str, Callable[[Place, str], Iterator[Line]]] = {
    TIMELINE: _timeline,
    TRACE: _trace,
    PLAN: _plan,
}


def _require_version(document: Place, known: int) -> None:
    version = document.field("version")
    if version.integer(1) > known:
        version.fail(f"is {version.shown}; this fsdp_fx reads up to version {known}")


def _sampled(steps: Sequence[tuple[int, int]], stop: int) -> list[int]:
    """What a curve in time is at most in each of some equal parts of it.

    Args:
        steps: pairs of a time and the value from then on.
        stop: the end of the time.
    """
    parts = [0] * _CURVE
    for (start, value), (end, _) in pairwise([*steps, (stop, 0)]):
        if start < end and stop:
            first, last = (start * _CURVE // stop, (end * _CURVE - 1) // stop)
            for part in range(first, min(last + 1, _CURVE)):
                parts[part] = max(parts[part], value)
    return parts


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _window(events: int, units: int, chunks: int, microbatches: int) -> str:
    return ", ".join(
        (
            _count(events, "event"),
            _count(units, "unit"),
            _count(chunks, "chunk"),
            _count(microbatches, "microbatch", "microbatches"),
        )
    )


def _values(place: Place, events: int) -> list[int]:
    values = [item.integer() for item in place.items()]
    if len(values) != events:
        place.fail(f"has {len(values)} numbers for {events} events")
    return values


def _numbers(place: Place) -> dict[str, int]:
    return {name: value.integer() for name, value in place.fields()}


def _curve(name: str, values: Sequence[int], events: Sequence[str], blocks: str) -> Iterator[Line]:
    """The highest value and where it is first reached; below it the curve."""
    if not values:
        return
    peak = max(values)
    position = values.index(peak)
    yield name, f"at most {format_bytes(peak)}, at {events[position]} (event {position})"
    yield "", _sparkline(values, blocks)


def _sparkline(values: Sequence[int], blocks: str) -> str:
    """A curve in a line of blocks: each the highest of some values, blank for 0."""
    columns = min(len(values), _CURVE)
    peak = max(values, default=0)
    line = ""
    for column in range(columns):
        start, stop = (len(values) * each // columns for each in (column, column + 1))
        value = max(values[start:stop])
        # Rounded up, so that what is there is seen.
        line += blocks[-(-value * len(blocks) // peak) - 1] if value else " "
    return line


def _blocks(encoding: str) -> str:
    try:
        _BLOCKS.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return _PLAIN
    return _BLOCKS


def _listed(names: Sequence[str], introduction: str = ": ") -> str:
    """Some names, and how many more there are."""
    more = len(names) - _LISTED
    shown = [*names[:_LISTED], *([f"{more} more"] if more > 0 else [])]
    return introduction + ", ".join(shown) if shown else ""


def _count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"
