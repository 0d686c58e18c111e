"""Traces as files, for planning on a machine without the model.

A file holds one :class:`~fsdp_fx.trace.Trace` as JSON, and how long its events and
collectives take if that was measured. Units and events stand one on a line, so that a file
can be read, compared and written by hand. Programs are not saved: planning makes them again.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from fsdp_fx.json_files import Place, read
from fsdp_fx.planning.durations import Durations
from fsdp_fx.trace import Event, Phase, Trace, UnitSpec

__all__ = ["load_trace", "save_trace"]

FORMAT = "fsdp_fx trace"
VERSION = 1

_FIELDS = ("format", "version", "units", "events", "ends", "reduces", "ending", "durations")


def save_trace(
    trace: Trace, path: str | os.PathLike[str], durations: Durations | None = None
) -> None:
    """Write a trace into a JSON file.

    Args:
        trace: the trace.
        path: the file; one that is there is replaced.
        durations: how long the trace's events and its units' collectives take, if known.

    Raises:
        OSError: the file cannot be written.
    """
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "units": [asdict(unit) for unit in trace.units],
        "events": [asdict(event) for event in trace],
        "ends": trace.ends,
        "reduces": sorted(trace.reduces),
        "ending": trace.ending,
    }
    if durations is not None:
        document["durations"] = {
            "compute": durations.compute,
            "gathers": dict(durations.gathers),
            "reductions": dict(durations.reductions),
        }
    Path(path).write_text("\n".join(_lines(document)) + "\n", encoding="utf-8")


def load_trace(path: str | os.PathLike[str]) -> tuple[Trace, Durations | None]:
    """Read a trace from a JSON file.

    Args:
        path: a file that :func:`save_trace` wrote, or that looks like it.

    Returns:
        The trace, and its durations if the file has them.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no such trace; one line that names the file, the place in it
            and what is wrong.
    """
    document = read(path)
    name = document.field("format")
    if name.text() != FORMAT:
        name.fail(f'is {name.shown}, not "{FORMAT}"')
    version = document.field("version")
    if version.integer(1) > VERSION:
        version.fail(f"is {version.shown}; this fsdp_fx reads up to version {VERSION}")
    document.only(*_FIELDS)
    units = _units(document.field("units"))
    events = _events(document.field("events"), {unit.name for unit in units})
    ends = _ends(document.field("ends"), len(events))
    trace = Trace(
        units=units,
        events=events,
        ends=ends,
        reduces=_reduces(document.field("reduces"), events),
        ending=_ending(document.optional("ending"), ends),
    )
    measured = document.optional("durations")
    return trace, None if measured is None else _durations(measured, trace)


def _lines(document: dict[str, Any]) -> Iterator[str]:
    """The JSON of a document: fields on a line of their own, objects in lists, too."""
    opening = "{"
    for name, value in document.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n  " + ",\n  ".join(json.dumps(item) for item in value) + "]"
        yield f"{opening}{json.dumps(name)}: {text}" + ("," if name != list(document)[-1] else "}")
        opening = " "


def _units(place: Place) -> tuple[UnitSpec, ...]:
    units: dict[str, UnitSpec] = {}
    for item in place.items():
        item.only(*(field.name for field in fields(UnitSpec)))
        name = item.field("name").text()
        if name in units:
            item.field("name").fail(f"{item.field('name').shown} is the name of another unit")
        replicas, trained = item.optional("replicas"), item.optional("trained")
        kept = item.optional("kept_after_forward")
        kept_gradients = item.optional("kept_gradient_bytes")
        units[name] = UnitSpec(
            name=name,
            chunk=item.field("chunk").text(),
            elements=item.field("elements").integer(),
            bytes=item.field("bytes").integer(),
            gradient_bytes=item.field("gradient_bytes").integer(),
            trainable=item.field("trainable").truth(),
            replicas=1 if replicas is None else replicas.integer(1),
            trained=() if trained is None else tuple(i.integer() for i in trained.items()),
            kept_after_forward=kept is not None and kept.truth(),
            kept_gradient_bytes=-1 if kept_gradients is None else kept_gradients.integer(),
        )
    return tuple(units.values())


def _events(place: Place, units: Set[str]) -> tuple[Event, ...]:
    events: list[Event] = []
    seen: Counter[tuple[str, Phase]] = Counter()
    for item in place.items():
        item.only(*(field.name for field in fields(Event)))
        unit = _known(item.field("unit"), units)
        phase = _phase(item.field("phase"))
        microbatch = item.optional("microbatch")
        occurrence = item.field("occurrence")
        if occurrence.integer() != seen[unit, phase]:
            occurrence.fail(
                f"is {occurrence.shown}, but {seen[unit, phase]} events of "
                f"{unit} {phase} come before it"
            )
        seen[unit, phase] += 1
        events.append(
            Event(
                unit, phase, occurrence.integer(), 0 if microbatch is None else microbatch.integer()
            )
        )
    return tuple(events)


def _known(place: Place, units: Set[str]) -> str:
    name = place.text()
    if name not in units:
        place.fail(f"{place.shown} is not the name of a unit in this file")
    return name


def _phase(place: Place) -> Phase:
    match place.text():
        case "F":
            return "F"
        case "B":
            return "B"
        case _:
            place.fail(f'is {place.shown}; it must be "F" or "B"')


def _ends(place: Place, events: int) -> tuple[int, ...]:
    items = list(place.items())
    if len(items) != events:
        place.fail(f"has {len(items)} numbers for {events} events")
    return tuple(item.integer(position, events - 1) for position, item in enumerate(items))


def _reduces(place: Place, events: tuple[Event, ...]) -> frozenset[int]:
    positions: set[int] = set()
    for item in place.items():
        position = item.integer(0, len(events) - 1)
        if events[position].phase != "B":
            item.fail(f"is {position}, but event {position} ({events[position]}) is no backward")
        if position in positions:
            item.fail(f"is {position}, which stands before it already")
        positions.add(position)
    return frozenset(positions)


def _ending(place: Place | None, ends: tuple[int, ...]) -> tuple[int, ...]:
    if place is None:
        return ()
    order = tuple(item.integer(0, len(ends) - 1) for item in place.items())
    if not order:
        return ()
    if sorted(order) != list(range(len(ends))):
        place.fail(f"does not have each of the {len(ends)} positions once")
    items = list(place.items())
    for before, after, item in zip(order, order[1:], items[1:], strict=False):
        if ends[after] < ends[before]:
            item.fail(
                f"is {after}, whose use ends at {ends[after]}, before that of {before} "
                f"at {ends[before]}"
            )
    return order


def _durations(place: Place, trace: Trace) -> Durations:
    place.only("compute", "gathers", "reductions")
    compute = place.field("compute")
    items = list(compute.items())
    if len(items) != len(trace):
        compute.fail(f"has {len(items)} numbers for {len(trace)} events")
    known = {unit.name for unit in trace.units}
    trainable = {unit.name for unit in trace.units if unit.trainable}
    reduced = {trace[position].unit for position in trace.reduces} & trainable
    return Durations(
        compute=tuple(item.integer() for item in items),
        gathers=_by_unit(place.field("gathers"), known, {event.unit for event in trace}),
        reductions=_by_unit(place.field("reductions"), known, reduced),
    )


def _by_unit(place: Place, known: Set[str], needed: Set[str]) -> dict[str, int]:
    result: dict[str, int] = {}
    for name, value in place.fields():
        if name not in known:
            value.fail("is not the name of a unit in this file")
        result[name] = value.integer()
    for name in sorted(needed - set(result)):
        place.fail(f"has no duration for {name}")
    return result
