"""What a timeline shows, and in which formats it can be saved."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_fx.passes import PassOptions, plan
from fsdp_fx.planning.memory import resident_bytes
from fsdp_fx.program import Program
from fsdp_fx.timeline import Segment, save_timeline, segments
from traces import TWO_CHUNKS, trace


@pytest.fixture
def program() -> Program:
    return plan(trace(TWO_CHUNKS))


def test_segments_tell_flight_use_and_holding_apart() -> None:
    program = plan(trace("m F0: a b; m B0: b a"), PassOptions(100, 100))
    assert segments(program) == (
        Segment("m.a", "F", 0, 1),
        Segment("m.a", "held", 1, 3),
        Segment("m.a", "B", 3, 4),
        Segment("m.b", "in flight", 0, 1),
        Segment("m.b", "F", 1, 2),
        Segment("m.b", "B", 2, 3),
    )


def test_parent_is_in_use_for_as_long_as_its_children() -> None:
    program = plan(trace("m F0: *(a b)"), PassOptions(0, 0))
    assert segments(program)[0] == Segment("m", "F", 0, 3)


def test_segments_of_a_unit_are_disjoint_and_cover_what_is_resident(program: Program) -> None:
    size = {unit.name: unit.bytes for unit in program.trace.units}
    covered = [0] * len(program.trace)
    seen: set[tuple[str, int]] = set()
    for segment in segments(program):
        for position in range(segment.start, segment.stop):
            assert (segment.unit, position) not in seen
            seen.add((segment.unit, position))
            covered[position] += size[segment.unit]
    assert covered == resident_bytes(program)


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_picture_is_written_in_the_format_of_its_suffix(
    program: Program, tmp_path: Path, suffix: str, magic: bytes
) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / f"timeline{suffix}"
    program.save_timeline(target)
    assert target.read_bytes().startswith(magic)


def texts(program: Program, caption: str | None = None) -> list[str]:
    """Every text of the picture."""
    pytest.importorskip("matplotlib")
    from matplotlib.text import Text

    from fsdp_fx.timeline import _figure

    return [text.get_text() for text in _figure(program, caption).findobj(Text)]


def test_picture_names_units_calls_and_its_unit_of_time(program: Program) -> None:
    found = texts(program)
    assert {unit.name for unit in program.trace.units} <= set(found)
    assert {"c0 F0", "c0 F1", "c1 B0", "c1 B1"} <= set(found)
    assert "event (schedule order, not measured time)" in found
    assert {"gather in flight", "gather on demand", "reduction starts"} <= set(found)


def test_title_has_the_caption_and_the_numbers(program: Program) -> None:
    assert "24 events, 6 units, 2 chunks" in texts(program)
    assert "rank 0: 24 events, 6 units, 2 chunks" in texts(program, "rank 0")
    assert "1 event, 1 unit, 1 chunk" in texts(plan(trace("m F0: a")))


@pytest.mark.parametrize("lookahead", [0, 100])
def test_legend_has_what_occurs_and_nothing_else(lookahead: int) -> None:
    program = plan(trace("m F0: a b; m B0: b a"), PassOptions(lookahead, lookahead))
    entries = {
        "gather in flight",
        "in use, forward",
        "in use, backward",
        "held, not in use",
        "gather on demand",
        "reduction starts",
    }
    missing = set() if lookahead else {"gather in flight", "held, not in use"}
    assert entries & set(texts(program)) == entries - missing


@pytest.mark.parametrize(("layers", "microbatches"), [(2, 2), (4, 8)])
def test_labels_in_a_picture_do_not_overlap(layers: int, microbatches: int) -> None:
    pytest.importorskip("matplotlib")
    from fsdp_fx.timeline import _figure

    names = [f"l{index}" for index in range(layers)]
    window = "; ".join(
        f"c{chunk} {phase}{microbatch}: {' '.join(names)}"
        for phase in "FB"
        for microbatch in range(microbatches)
        for chunk in range(2)
    )
    figure = _figure(plan(trace(window)))
    figure.canvas.draw()
    labels = [text for axes in figure.axes for text in [*axes.texts, *axes.get_yticklabels()]]
    boxes = [(text.get_text(), text.get_window_extent()) for text in labels if text.get_text()]
    assert len(boxes) >= 4 * microbatches
    for index, (name, box) in enumerate(boxes):
        for other, other_box in boxes[index + 1 :]:
            assert not box.overlaps(other_box), f"{name!r} overlaps {other!r}"


def test_program_without_events_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    window = trace("m F0: a")
    empty = plan(type(window)(window.units, (), (), frozenset()))
    empty.save_timeline(tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 0


def rows(program: Program, path: Path) -> list[dict[str, Any]]:
    save_timeline(program, path)
    loaded = json.loads(path.read_text())
    assert isinstance(loaded["traceEvents"], list)
    return list(loaded["traceEvents"])


def test_json_has_a_named_lane_for_compute_and_for_every_unit(
    program: Program, tmp_path: Path
) -> None:
    names = [
        row["args"]["name"]
        for row in rows(program, tmp_path / "t.json")
        if row["name"] == "thread_name"
    ]
    assert names == ["compute", *(unit.name for unit in program.trace.units)]


def test_json_names_its_process_as_the_picture_its_title(program: Program, tmp_path: Path) -> None:
    save_timeline(program, tmp_path / "t.json", caption="rank 0")
    (name,) = (
        row["args"]["name"]
        for row in json.loads((tmp_path / "t.json").read_text())["traceEvents"]
        if row["name"] == "process_name"
    )
    assert name == "rank 0: 24 events, 6 units, 2 chunks"


def test_json_has_a_span_per_event_on_the_compute_lane(program: Program, tmp_path: Path) -> None:
    spans = [row for row in rows(program, tmp_path / "t.json") if row["ph"] == "X"]
    computes = [row for row in spans if row["tid"] == 0]
    assert [row["name"] for row in computes] == [str(event) for event in program.trace]
    assert [row["ts"] for row in computes] == [1000 * p for p in range(len(program.trace))]
    assert {row["dur"] for row in computes} == {1000}
    assert [row["cat"] for row in computes] == [event.phase for event in program.trace]


def test_json_has_segments_gathers_on_demand_and_reductions(tmp_path: Path) -> None:
    program = plan(trace("m F0: a; m B0: a"))
    found = [
        (row["ph"], row["name"], row["ts"])
        for row in rows(program, tmp_path / "t.json")
        if row["ph"] in ("X", "i") and row["tid"] == 1
    ]
    assert found == [
        ("X", "in use", 0),
        ("X", "in use", 1000),
        ("i", "gather on demand", 0),
        ("i", "reduce", 2000),
    ]


def test_json_counter_is_the_resident_curve_and_ends_at_zero(
    program: Program, tmp_path: Path
) -> None:
    counter = [row for row in rows(program, tmp_path / "t.json") if row["ph"] == "C"]
    assert [row["args"]["bytes"] for row in counter] == [*resident_bytes(program), 0]


@pytest.mark.parametrize("name", ["timeline.pdf", "timeline"])
def test_unknown_suffix_is_refused(program: Program, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"use \.png, \.svg or \.json"):
        program.save_timeline(tmp_path / name)
    assert not (tmp_path / name).exists()


def test_missing_matplotlib_says_what_to_install(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install fsdp-fx\[viz\]"):
        program.save_timeline(tmp_path / "timeline.png")


def test_json_needs_no_matplotlib(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert rows(program, tmp_path / "timeline.json")
