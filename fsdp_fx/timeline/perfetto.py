"""A timeline in the Chrome trace format, for Perfetto and ``chrome://tracing``.

Spans of one thread are nested or disjoint, as the format wants it: gathers that overlap, as
they may where time is counted in events, are spread over several threads. Gradients that are
kept have threads of their own beside those of their units.

``otherData``, which viewers ignore, says what the program does in numbers; it is what
:mod:`fsdp_fx.view` reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any

from fsdp_fx.timeline.lanes import Lanes, lanes_of, rows_of, title

__all__ = ["FORMAT", "VERSION", "chrome_trace"]

FORMAT = "fsdp_fx timeline"
VERSION = 1

_EVENT_MICROSECONDS = 1000

Row = dict[str, Any]


def chrome_trace(lanes: Lanes, caption: str | None = None) -> Row:
    """The document.

    Args:
        lanes: what it shows.
        caption: what its name begins with.
    """
    writer = _Writer(lanes)
    rows = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title(lanes, caption)}},
        *writer.computes(),
        *writer.collectives(),
        *writer.units(),
        *writer.counters(),
    ]
    return {
        "traceEvents": rows,
        "displayTimeUnit": "ms",
        "otherData": _numbers(lanes, caption),
    }


class _Writer:
    """Rows of the format, with a number for each thread."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._trace = lanes.program.trace
        self._threads = 0

    def computes(self) -> Iterator[Row]:
        """A span for each event."""
        lanes = self._lanes
        thread = yield from self._thread("compute")
        for position, event in enumerate(self._trace):
            args = {"microbatch": event.microbatch, "position": position}
            start, stop = lanes.starts[position], lanes.ends[position]
            yield self._span(thread, str(event), event.phase, start, stop, args)

    def collectives(self) -> Iterator[Row]:
        """A span for each gather and each reduction; marks for gathers that take no time."""
        lanes, units = self._lanes, {unit.name: unit for unit in self._trace.units}
        marks = [each for each in lanes.gathers if each.start == each.stop]
        spans = [each for each in lanes.gathers if each.start < each.stop]
        for name, rows in (("gathers", rows_of(spans)), ("reductions", rows_of(lanes.reductions))):
            for index, row in enumerate(rows or [[]]):
                thread = yield from self._thread(f"{name} ({index + 1})" if index else name)
                for each in row:
                    unit = units[each.unit]
                    size = unit.bytes if name == "gathers" else unit.gradient_bytes
                    label = f"{each.unit} (partial)" if each.kind == "partial" else each.unit
                    event = str(self._trace[each.event])
                    args = {"kind": each.kind, "event": event, "bytes": size}
                    yield self._span(thread, label, each.kind, each.start, each.stop, args)
                for mark in marks if name == "gathers" and not index else ():
                    yield self._mark(thread, f"{mark.unit} {mark.kind}", mark.start)

    def units(self) -> Iterator[Row]:
        """Spans of residency, with marks for gathers on demand and reductions; kept gradients."""
        lanes = self._lanes
        for unit in self._trace.units:
            thread = yield from self._thread(unit.name)
            for segment in lanes.segments:
                if segment.unit == unit.name:
                    name = "in use" if segment.state in ("F", "B") else segment.state
                    args = {"unit": unit.name, "bytes": unit.bytes}
                    yield self._span(thread, name, segment.state, segment.start, segment.stop, args)
            for each in lanes.gathers:
                if each.unit == unit.name and each.kind == "on demand":
                    yield self._mark(thread, "gather on demand", lanes.boundary(each.event))
            for each in lanes.reductions:
                if each.unit == unit.name:
                    mark = "reduce" if each.kind == "full" else "reduce, partial"
                    yield self._mark(thread, mark, lanes.ends[self._trace.ends[each.event]])
            kept = [each for each in lanes.kept if each.unit == unit.name]
            if kept:
                thread = yield from self._thread(f"{unit.name} gradient")
            for waiting in kept:
                args = {"unit": unit.name, "bytes": unit.gradient_bytes}
                yield self._span(thread, "kept", "gradient", waiting.start, waiting.stop, args)

    def counters(self) -> Iterator[Row]:
        """The curves: full parameters, kept full gradients, what is allowed."""
        lanes = self._lanes
        for each in lanes.memory:
            yield self._counter("resident bytes", each.start, each.parameters)
        for each in lanes.memory if lanes.kept else ():
            yield self._counter("kept gradient bytes", each.start, each.gradients)
        for position, value in enumerate(lanes.program.capacity or ()):
            yield self._counter("capacity bytes", lanes.boundary(position), value)

    def _thread(self, name: str) -> Generator[Row, None, int]:
        thread = self._threads
        self._threads += 1
        yield _row("M", thread, name="thread_name", args={"name": name})
        yield _row("M", thread, name="thread_sort_index", args={"sort_index": thread})
        return thread

    def _span(self, thread: int, name: str, category: str, start: int, stop: int, args: Row) -> Row:
        begin, end = self._microseconds(start), self._microseconds(stop)
        return _row("X", thread, name=name, cat=category, ts=begin, dur=end - begin, args=args)

    def _mark(self, thread: int, name: str, time: int) -> Row:
        return _row("i", thread, name=name, ts=self._microseconds(time), s="t")

    def _counter(self, name: str, time: int, value: int) -> Row:
        return _row("C", 0, name=name, ts=self._microseconds(time), args={"bytes": value})

    def _microseconds(self, time: int) -> int:
        # Whole ones: fractions that are rounded apart would make spans overlap.
        if self._lanes.simulated is None:
            return time * _EVENT_MICROSECONDS
        return time // 1000


def _row(phase: str, thread: int, **fields: Any) -> Row:
    return {"ph": phase, "pid": 0, "tid": thread, **fields}


def _numbers(lanes: Lanes, caption: str | None) -> Row:
    program, simulated = lanes.program, lanes.simulated
    trace = program.trace
    # Curves are by event, whatever the time is measured in.
    memory = (lanes if simulated is None else lanes_of(program)).memory[: len(trace)]
    kinds = Counter(each.kind for each in (*lanes.gathers, *lanes.reductions))
    numbers: Row = {
        "format": FORMAT,
        "version": VERSION,
        "caption": caption,
        "time": "1 ms per event; schedule order, not measured time"
        if simulated is None
        else "simulated from given durations",
        "chunks": len({unit.chunk for unit in trace.units}),
        "microbatches": len({event.microbatch for event in trace}),
        "events": [str(event) for event in trace],
        "gathers": {
            "ahead": kinds["ahead"],
            "on demand": kinds["on demand"],
            "units": _by_unit(lanes, [each.unit for each in lanes.gathers]),
        },
        "reductions": {
            "full": kinds["full"],
            "partial": kinds["partial"],
            "units": _by_unit(lanes, [each.unit for each in lanes.reductions]),
        },
        "carried": sorted(program.carried),
        "parameters": [each.parameters for each in memory],
        "gradients": [each.gradients for each in memory],
        "capacity": None if program.capacity is None else list(program.capacity),
    }
    if simulated is not None:
        numbers["nanoseconds"] = {
            "step": simulated.stop,
            "compute": simulated.compute,
            "exposed gathers": simulated.exposed_gathers,
            "exposed reductions": simulated.exposed_reductions,
        }
    return numbers


def _by_unit(lanes: Lanes, units: list[str]) -> dict[str, int]:
    """How often each unit occurs; also those that do not."""
    counts = Counter(units)
    return {unit.name: counts[unit.name] for unit in lanes.program.trace.units}
