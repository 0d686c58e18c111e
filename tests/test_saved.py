"""Traces as files: what is written comes back, and what is wrong in a file is named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp_fx.planning.durations import Durations
from fsdp_fx.saved import load_trace, save_trace
from fsdp_fx.trace import Event, Trace
from test_passes import CROSSING, traces
from traces import TWO_CHUNKS, trace

WINDOW = trace("m F0: *(a b); m B0: *(b a)", frozen={"m.b"}, replicas={"m.a": 2})
DURATIONS = Durations((1, 2, 3, 4, 5, 6), {"m": 7, "m.a": 8, "m.b": 9}, {"m": 10, "m.a": 11})


@st.composite
def measured(draw: st.DrawFn) -> tuple[Trace, Durations | None]:
    """Any trace, with durations or without."""
    window = draw(traces())
    if draw(st.booleans()):
        return window, None
    time = st.integers(0, 10**12)
    return window, Durations(
        tuple(draw(time) for _ in window),
        {unit.name: draw(time) for unit in window.units},
        {unit.name: draw(time) for unit in window.units if unit.trainable},
    )


@given(measured())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_what_is_saved_comes_back(tmp_path: Path, saved: tuple[Trace, Durations | None]) -> None:
    window, durations = saved
    save_trace(window, tmp_path / "trace.json", durations)
    loaded, loaded_durations = load_trace(tmp_path / "trace.json")
    assert loaded == window
    # Equality of events leaves these out.
    assert [event.microbatch for event in loaded] == [event.microbatch for event in window]
    assert loaded.end_ranks == window.end_ranks
    assert loaded.fingerprint == window.fingerprint
    assert loaded_durations == durations


@pytest.mark.parametrize("window", [WINDOW, CROSSING, trace(TWO_CHUNKS)])
def test_a_file_has_its_units_and_events_one_on_a_line(tmp_path: Path, window: Trace) -> None:
    path = tmp_path / "trace.json"
    save_trace(window, path)
    assert load_trace(path) == (window, None)
    lines = path.read_text().splitlines()
    for unit in window.units:
        assert sum(f'"name": "{unit.name}"' in line for line in lines) == 1
    assert sum('"occurrence"' in line for line in lines) == len(window)


def test_a_window_without_events_comes_back(tmp_path: Path) -> None:
    window = Trace(WINDOW.units, (), (), frozenset())
    save_trace(window, tmp_path / "trace.json", Durations((), {}, {}))
    assert load_trace(tmp_path / "trace.json") == (window, Durations((), {}, {}))


def test_what_has_a_default_may_be_left_out(tmp_path: Path) -> None:
    document = {
        "format": "fsdp_fx trace",
        "version": 1,
        "units": [
            {
                "name": "a",
                "chunk": "a",
                "elements": 1,
                "bytes": 2,
                "gradient_bytes": 4,
                "trainable": True,
            }
        ],
        "events": [{"unit": "a", "phase": "F", "occurrence": 0}],
        "ends": [0],
        "reduces": [],
    }
    (tmp_path / "trace.json").write_text(json.dumps(document))
    loaded, durations = load_trace(tmp_path / "trace.json")
    assert loaded.units[0].replicas == 1
    assert loaded.units[0].trained == ()
    assert loaded.events == (Event("a", "F", 0),)
    assert durations is None


Edit = Callable[[dict[str, Any]], object]


def put(*path: str | int, value: object) -> Edit:
    """Replaces the value at a place of the document."""

    def edit(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = value

    return edit


def drop(*path: str | int) -> Edit:
    """Removes the value at a place of the document."""

    def edit(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        del document[path[-1]]

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (put("format", value="fsdp_fx plan"), 'format: is "fsdp_fx plan", not "fsdp_fx trace"'),
        (put("format", value=3), "format: is 3, not a text"),
        (drop("format"), 'has no field "format"'),
        (put("version", value=2), "version: is 2; this fsdp_fx reads up to version 1"),
        (put("version", value=0), "version: is 0; it must be at least 1"),
        (put("version", value="1"), 'version: is "1", not an integer'),
        (put("version", value=True), "version: is true, not an integer"),
        (drop("version"), 'has no field "version"'),
        (put("evnets", value=[]), 'has an unknown field "evnets"; there are format, version, '),
        (drop("events"), 'has no field "events"'),
        (put("events", value={}), "events: is an object, not a list"),
        (put("events", 3, value=7), "events[3]: is 7, not an object"),
        (put("events", 3, "unit", value="m.c"), 'events[3].unit: "m.c" is not the name of a unit'),
        (put("events", 3, "unit", value=None), "events[3].unit: is null, not a text"),
        (put("events", 3, "phase", value="W"), 'events[3].phase: is "W"; it must be "F" or "B"'),
        (drop("events", 3, "phase"), 'events[3]: has no field "phase"'),
        (
            put("events", 3, "occurrence", value=1),
            "events[3].occurrence: is 1, but 0 events of m B come before it",
        ),
        (
            put("events", 3, "microbatch", value=-1),
            "events[3].microbatch: is -1; it must be at least 0",
        ),
        (put("events", 3, "micro", value=1), 'events[3]: has an unknown field "micro"'),
        (drop("units"), 'has no field "units"'),
        (put("units", value="m"), 'units: is "m", not a list'),
        (drop("units", 1, "bytes"), 'units[1]: has no field "bytes"'),
        (put("units", 1, "bytes", value=-8), "units[1].bytes: is -8; it must be at least 0"),
        (put("units", 1, "bytes", value=1.5), "units[1].bytes: is 1.5, not an integer"),
        (put("units", 1, "bytes", value=10**60), None),
        (put("units", 1, "bytes", value=-(10**60)), "units[1].bytes: is a very large integer"),
        (put("units", 1, "gradient_bytes", value=-1), "units[1].gradient_bytes: is -1"),
        (put("units", 1, "elements", value=-1), "units[1].elements: is -1"),
        (put("units", 1, "replicas", value=0), "units[1].replicas: is 0; it must be at least 1"),
        (put("units", 1, "trainable", value=1), "units[1].trainable: is 1, not true or false"),
        (put("units", 1, "trained", value=[0, "1"]), 'units[1].trained[1]: is "1", not an integer'),
        (put("units", 1, "name", value="m"), 'units[1].name: "m" is the name of another unit'),
        (put("units", 1, "chunk", value=["m"]), "units[1].chunk: is a list, not a text"),
        (put("units", 1, "size", value=1), 'units[1]: has an unknown field "size"'),
        (put("ends", value=[0, 1, 2, 3, 4]), "ends: has 5 numbers for 6 events"),
        (put("ends", 1, value=6), "ends[1]: is 6; it must be 1 to 5"),
        (put("ends", 1, value=0), "ends[1]: is 0; it must be 1 to 5"),
        (put("ends", 1, value=None), "ends[1]: is null, not an integer"),
        (put("reduces", value=[9]), "reduces[0]: is 9; it must be 0 to 5"),
        (put("reduces", value=[1]), "reduces[0]: is 1, but event 1 (m.a F0) is no backward"),
        (put("reduces", value=[5, 3, 5]), "reduces[2]: is 5, which stands before it already"),
        (put("ending", value=[0, 1]), "ending: does not have each of the 6 positions once"),
        (
            put("ending", value=[2, 1, 0, 4, 5, 3]),
            "ending[1]: is 1, whose use ends at 1, before that of 2 at 2",
        ),
        (put("durations", "compute", value=[1]), "durations.compute: has 1 numbers for 6 events"),
        (put("durations", "compute", 2, value=-3), "durations.compute[2]: is -3"),
        (put("durations", "compute", 2, value=3.5), "durations.compute[2]: is 3.5, not an integer"),
        (drop("durations", "gathers"), 'durations: has no field "gathers"'),
        (drop("durations", "gathers", "m.a"), "durations.gathers: has no duration for m.a"),
        (drop("durations", "reductions", "m.a"), "durations.reductions: has no duration for m.a"),
        (
            put("durations", "gathers", "m.c", value=1),
            'durations.gathers["m.c"]: is not the name of a unit',
        ),
        (put("durations", "gathers", "m.a", value="1"), 'durations.gathers["m.a"]: is "1", not'),
        (put("durations", "speed", value=1), 'durations: has an unknown field "speed"'),
        (put("durations", value=[]), "durations: is a list, not an object"),
        (
            put("events", 3, "unit", value="x" * 500),
            "is not the name of a unit in this file",
        ),
    ],
)
def test_a_mistake_in_a_file_is_named_in_one_line(
    tmp_path: Path, edit: Edit, message: str | None
) -> None:
    path = tmp_path / "trace.json"
    save_trace(WINDOW, path, DURATIONS)
    document = json.loads(path.read_text())
    document["ending"] = [1, 2, 0, 4, 5, 3]
    assert_loads(path, document)
    edit(document)
    if message is None:
        return assert_loads(path, document)
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        load_trace(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < len(str(path)) + 200
    return None


def assert_loads(path: Path, document: object) -> None:
    path.write_text(json.dumps(document))
    load_trace(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON: line 1, column 1: Expecting value"),
        (b'{"format":\n nothing}', "is not JSON: line 2, column 2: Expecting value"),
        (b"\xff\xfe\xfa", "is not JSON: it is not UTF-8 text"),
        (b"[" * 200_000, "is nested too deeply"),
        (b"[1, 2]", "is a list, not an object"),
        (b"1" * 5000, "Exceeds the limit"),
        (b"null", "is null, not an object"),
    ],
)
def test_a_file_that_holds_no_trace_at_all_is_named(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        load_trace(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_trace(tmp_path / "nothing.json")
