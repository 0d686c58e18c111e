"""What a timeline shows, and in which formats it can be saved."""

from __future__ import annotations

import json
import sys
from bisect import bisect_right
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_fx.occupancy import outline_of, resident_bytes
from fsdp_fx.passes import PassOptions, plan
from fsdp_fx.planning.durations import Durations
from fsdp_fx.planning.simulation import resident_steps
from fsdp_fx.program import Program, operation, unit_of
from fsdp_fx.timeline import Segment, save_timeline, segments
from fsdp_fx.timeline.lanes import Collective, Kept, Memory, lanes_of, rows_of
from fsdp_fx.timeline.perfetto import chrome_trace
from fsdp_fx.trace import Trace
from test_passes import traces
from traces import TWO_CHUNKS, trace

PER_WINDOW = PassOptions(reduce_gradients="per_window")


def steady(window: Trace, compute: int = 100, gather: int = 60, reduction: int = 250) -> Durations:
    """Durations, in microseconds, that do not differ between events or between units."""
    return Durations(
        (1000 * compute,) * len(window),
        {unit.name: 1000 * gather for unit in window.units},
        {unit.name: 1000 * reduction for unit in window.units},
    )


def carrying(program: Program, *units: str) -> Program:
    """The program with frozen units that stay resident from one window to the next."""
    graph = program.copy_graph()
    for unit in units:
        *_, last = (
            node for node in graph.nodes if operation(node) == "free" and unit_of(node) == unit
        )
        graph.erase_node(last)
    carried = replace(program.with_graph(graph), carried=frozenset(units))
    carried.verify()
    return carried


@st.composite
def planned(draw: st.DrawFn) -> tuple[Program, Durations | None]:
    """The program of any trace, some with units that are carried, and durations or none."""
    window = draw(traces())
    lookahead = st.sampled_from([None, 0, 10, 1000])
    when = draw(st.sampled_from(["per_backward", "per_window"]))
    program = plan(window, PassOptions(draw(lookahead), draw(lookahead), when))
    frozen = [unit.name for unit in window.units if not unit.trainable]
    if frozen:
        used = {event.unit for event in window}
        program = carrying(program, *(draw(st.sets(st.sampled_from(frozen))) & used))
    if draw(st.booleans()):
        return program, None
    time = st.integers(0, 5000)
    return program, Durations(
        tuple(draw(time) for _ in window),
        {unit.name: draw(time) for unit in window.units},
        {unit.name: draw(time) for unit in window.units},
    )


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


def test_gathers_last_from_issue_to_wait_and_on_demand_no_time() -> None:
    program = plan(trace("m F0: a b c; m B0: c b a"), PassOptions(200, 0))
    assert lanes_of(program).gathers == (
        Collective("m.a", "on demand", 0, 0, 0),
        Collective("m.b", "ahead", 1, 0, 1),
        Collective("m.c", "ahead", 2, 0, 2),
    )


def test_reductions_last_the_event_after_the_end_of_the_use() -> None:
    window = trace("m F0: *(a); m B0: *(a); m F1: *(a); m B1: *(a)", replicas={"m.a": 2})
    lanes = lanes_of(plan(window))
    assert lanes.reductions == (
        Collective("m.a", "partial", 3, 4, 5),
        Collective("m", "full", 2, 4, 5),
        Collective("m.a", "full", 7, 8, 9),
        Collective("m", "full", 6, 8, 9),
    )
    assert lanes.stop == 9


def test_full_gradients_are_kept_from_a_use_without_reduction_to_the_next_with_one() -> None:
    window = trace("m F0: *(a b); m B0: *(b a); m F1: *(a b); m B1: *(b a)", frozen={"m.b"})
    lanes = lanes_of(plan(window, PER_WINDOW))
    assert sorted(lanes.kept, key=lambda each: each.unit) == [Kept("m", 6, 12), Kept("m.a", 6, 12)]
    assert [each.gradients for each in lanes.memory] == [0] * 6 + [800] * 6 + [0]
    assert lanes_of(plan(window)).kept == ()


def test_a_contribution_that_is_missing_keeps_nothing() -> None:
    lanes = lanes_of(plan(trace("m F0: a b; m B0: b- a-; m B0: b a"), PER_WINDOW))
    assert lanes.kept == ()


def test_with_durations_lanes_have_the_times_of_the_simulation() -> None:
    window = trace("m F0: a b; m B0: b a", {"m.b": 50})
    program = plan(window)
    lanes = lanes_of(
        program, Durations((10, 20, 30, 40), {"m.a": 15, "m.b": 12}, {"m.a": 5, "m.b": 50})
    )
    assert lanes.gathers == (
        Collective("m.a", "on demand", 0, 0, 15),
        Collective("m.b", "ahead", 1, 15, 27),
        Collective("m.a", "ahead", 3, 47, 62),
    )
    assert lanes.starts == (15, 27, 47, 77)
    assert lanes.ends == (25, 47, 77, 117)
    assert lanes.segments == (
        Segment("m.a", "in flight", 0, 15),
        Segment("m.a", "F", 15, 25),
        Segment("m.a", "in flight", 47, 77),
        Segment("m.a", "B", 77, 117),
        Segment("m.b", "in flight", 15, 27),
        Segment("m.b", "F", 27, 47),
        Segment("m.b", "B", 47, 77),
    )
    assert lanes.reductions == (
        Collective("m.b", "full", 2, 77, 127),
        Collective("m.a", "full", 3, 127, 132),
    )
    assert lanes.stop == 132
    assert lanes.memory == (
        Memory(0, 200, 0),
        Memory(15, 300, 0),
        Memory(25, 100, 0),
        Memory(47, 300, 0),
        Memory(77, 200, 0),
        Memory(117, 0, 0),
    )


def kept_after_each_event(program: Program) -> list[int]:
    """Bytes of full gradients kept at every event, counted event by event."""
    window = program.trace
    size = {unit.name: unit.gradient_bytes for unit in window.units}
    order = window.ending or sorted(
        range(len(window)), key=lambda position: (window.ends[position], -position)
    )
    kept: set[str] = set()
    curve: list[int] = []
    for position in range(len(window)):
        curve.append(sum(size[unit] for unit in kept))
        for use in order:
            if window.ends[use] == position:
                unit = window[use].unit
                if unit in program.steps[use].reduces:
                    kept.discard(unit)
                elif use in window.reduces:
                    kept.add(unit)
    return curve


@given(planned())
@settings(max_examples=30)
def test_memory_is_what_is_gathered_and_kept_at_every_event(
    case: tuple[Program, Durations | None],
) -> None:
    program, _ = case
    memory = lanes_of(program).memory
    count = len(program.trace)
    assert [each.start for each in memory[: count + 1]] == list(range(count + 1))
    assert [each.parameters for each in memory[:count]] == resident_bytes(program)
    assert [each.gradients for each in memory[:count]] == kept_after_each_event(program)


@given(planned())
@settings(max_examples=30)
def test_memory_in_time_is_that_of_the_simulation(case: tuple[Program, Durations | None]) -> None:
    program, durations = case
    lanes = lanes_of(program, durations or steady(program.trace))
    assert lanes.simulated is not None
    steps = resident_steps(outline_of(program), lanes.simulated)
    times = [time for time, _ in steps]
    for each in lanes.memory:
        expected = steps[bisect_right(times, each.start) - 1][1]
        assert each.parameters + each.gradients == expected
    assert {time for time, _ in steps} <= {each.start for each in lanes.memory}


@given(planned())
@settings(max_examples=30)
def test_segments_of_a_unit_never_overlap_in_time(case: tuple[Program, Durations | None]) -> None:
    lanes = lanes_of(*case)
    for unit in lanes.program.trace.units:
        found = [segment for segment in lanes.segments if segment.unit == unit.name]
        assert all(segment.start < segment.stop for segment in found)
        assert all(a.stop <= b.start for a, b in pairwise(found))


def test_a_carried_unit_is_held_at_both_ends_and_not_gathered_for() -> None:
    window = trace("m F0: b a b; m F1: b a b; m B1: b; m B0: b", frozen={"m.a"})
    program = carrying(plan(window, PassOptions(0, 0)), "m.a")
    for durations in (None, steady(window)):
        lanes = lanes_of(program, durations)
        assert [each.event for each in lanes.gathers if each.unit == "m.a"] == [4]
        mine = [segment for segment in lanes.segments if segment.unit == "m.a"]
        assert [segment.state for segment in mine if segment.state != "in flight"] == [
            *("held", "F", "F", "held")
        ]
        assert mine[0].start == 0
        # Until the last reduction, which outlasts compute.
        assert mine[-1].stop == lanes.stop > lanes.ends[-1]
        assert lanes.memory[0].parameters == 400
        assert lanes.memory[-1] == Memory(lanes.ends[-1], 200, 0)


def test_spans_that_overlap_have_rows_of_their_own() -> None:
    a, b, c, d = (
        Collective("m.a", "ahead", 0, start, stop)
        for start, stop in ((0, 3), (0, 1), (1, 2), (3, 4))
    )
    assert rows_of([a, b, c, d]) == [[a, d], [b, c]]
    assert rows_of([]) == []


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_picture_is_written_in_the_format_of_its_suffix(
    program: Program, tmp_path: Path, suffix: str, magic: bytes
) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / f"timeline{suffix}"
    program.save_timeline(target)
    assert target.read_bytes().startswith(magic)


def texts(
    program: Program, caption: str | None = None, durations: Durations | None = None
) -> list[str]:
    """Every text of the picture."""
    pytest.importorskip("matplotlib")
    from matplotlib.text import Text

    from fsdp_fx.timeline.picture import figure

    drawn = figure(lanes_of(program, durations), caption)
    return [text.get_text() for text in drawn.findobj(Text)]


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


def test_picture_in_time_names_its_unit(program: Program) -> None:
    window = program.trace
    assert "ms (simulated from given durations)" in texts(program, durations=steady(window))
    assert "µs (simulated from given durations)" in texts(
        program, durations=steady(window, 10, 1, 1)
    )


def test_legend_has_partial_reductions_gradients_capacity_and_carried_units_if_there() -> None:
    more = {
        "partial reduction starts",
        "full gradient kept",
        "capacity, up to 1.0 KiB",
        "carried between windows",
    }
    window = trace("m F0: a b; m F1: a b; m B0: a b; m B1: a b", frozen={"m.a"})
    assert not more & set(texts(plan(window)))
    kept = replace(carrying(plan(window, PER_WINDOW), "m.a"), capacity=(1024,) * len(window))
    assert more & set(texts(kept)) == more - {"partial reduction starts"}
    replicated = trace("m F0: a; m B0: a; m F1: a; m B1: a", replicas={"m.a": 2})
    assert "partial reduction starts" in texts(plan(replicated))


def test_a_capacity_far_above_the_curve_does_not_flatten_it() -> None:
    pytest.importorskip("matplotlib")
    from fsdp_fx.timeline.picture import figure

    program = plan(trace("m F0: a b; m B0: b a"))
    peak = max(resident_bytes(program))
    for capacity, top in ((2 * peak, 2 * peak), (100 * peak, peak)):
        with_capacity = replace(program, capacity=(capacity,) * len(program.trace))
        assert figure(lanes_of(with_capacity)).axes[-1].get_ylim()[1] == pytest.approx(1.15 * top)
    assert any("beyond the top" in text for text in texts(with_capacity))


@pytest.mark.parametrize("durations", [False, True])
def test_lanes_of_collectives_show_their_spans(durations: bool) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.collections import PolyCollection

    from fsdp_fx.timeline.picture import figure

    window = trace(TWO_CHUNKS, replicas={"c0.a": 2})
    lanes = lanes_of(plan(window, PassOptions(200, 200)), steady(window) if durations else None)
    _, gathers, reductions, *_ = figure(lanes).axes
    for axes, found in ((gathers, lanes.gathers), (reductions, lanes.reductions)):
        drawn = Counter(
            (round(path.vertices[:, 0].min(), 9), round(path.vertices[:, 0].max(), 9))
            for collection in axes.collections
            if isinstance(collection, PolyCollection) and collection.get_alpha() is None
            for path in collection.get_paths()
        )
        unit = 1e6 if durations else 1
        wanted = Counter((each.start / unit, each.stop / unit) for each in found)
        assert len(wanted) > 3
        # A gather on demand takes no time in events.
        assert drawn == {span: count for span, count in wanted.items() if span[0] < span[1]}


def windows_to_look_at() -> dict[str, tuple[Program, Durations | None]]:
    """Pictures that have much to say in little room."""

    def calls(layers: int, microbatches: int) -> Trace:
        names = [f"l{index}" for index in range(layers)]
        return trace(
            "; ".join(
                f"c{chunk} {phase}{microbatch}: {' '.join(names)}"
                for phase in "FB"
                for microbatch in range(microbatches)
                for chunk in range(2)
            )
        )

    small, large, narrow = calls(2, 2), calls(4, 8), calls(1, 20)
    everything = trace(TWO_CHUNKS, frozen={"c0.a"}, replicas={f"c{chunk}": 2 for chunk in (0, 1)})
    full = replace(carrying(plan(everything, PER_WINDOW), "c0.a"), capacity=(2500,) * 24)
    return {
        "small": (plan(small), None),
        "small in time": (plan(small), steady(small)),
        "large": (plan(large, PER_WINDOW), None),
        "large in time": (plan(large, PER_WINDOW), steady(large, gather=150)),
        "narrow calls": (plan(narrow), None),
        "narrow calls in time": (plan(narrow), steady(narrow, gather=150)),
        "everything": (full, None),
        "everything in time": (full, steady(everything, gather=130)),
        "far ahead": (plan(small, PassOptions(1000, 1000)), None),
        "one event": (plan(trace("m F0: a")), None),
    }


@pytest.mark.parametrize("name", windows_to_look_at())
def test_labels_in_a_picture_do_not_overlap(name: str) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.text import Text

    from fsdp_fx.timeline.picture import figure

    program, durations = windows_to_look_at()[name]
    drawn = figure(lanes_of(program, durations), "rank 0 of 1024, after 20 steps")
    drawn.draw_without_rendering()
    labels = [text for text in drawn.findobj(Text) if text.get_text() and text.get_visible()]
    inside = drawn.bbox.padded(100)  # left of the axes names may be long
    boxes = [
        (text.get_text(), box)
        for text in labels
        if inside.overlaps(box := text.get_window_extent())
    ]
    assert {unit.name for unit in program.trace.units} <= {label for label, _ in boxes}
    for index, (label, box) in enumerate(boxes):
        for other, other_box in boxes[index + 1 :]:
            assert not box.overlaps(other_box), f"{label!r} overlaps {other!r}"


def test_program_without_events_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    window = trace("m F0: a")
    empty = plan(type(window)(window.units, (), (), frozenset()))
    empty.save_timeline(tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 0


def rows(program: Program, path: Path, durations: Durations | None = None) -> list[dict[str, Any]]:
    save_timeline(program, path, durations=durations)
    loaded = json.loads(path.read_text())
    assert isinstance(loaded["traceEvents"], list)
    return list(loaded["traceEvents"])


def threads(found: list[dict[str, Any]]) -> dict[str, int]:
    """Numbers of threads by their name."""
    names = [(row["args"]["name"], row["tid"]) for row in found if row["name"] == "thread_name"]
    assert len(dict(names)) == len(names)
    return dict(names)


def on(found: list[dict[str, Any]], thread: str) -> list[dict[str, Any]]:
    """The spans and marks of a thread."""
    number = threads(found)[thread]
    return [row for row in found if row["ph"] in ("X", "i") and row["tid"] == number]


def test_json_has_a_named_lane_for_compute_collectives_and_every_unit(
    program: Program, tmp_path: Path
) -> None:
    names = threads(rows(program, tmp_path / "t.json"))
    # Two reductions start at one place, where a parent ends with its last child.
    units = [unit.name for unit in program.trace.units]
    assert list(names) == ["compute", "gathers", "reductions", "reductions (2)", *units]
    assert list(names.values()) == list(range(len(names)))


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
    found = rows(plan(trace("m F0: a; m B0: a")), tmp_path / "t.json")
    assert [(row["ph"], row["name"], row["ts"]) for row in on(found, "m.a")] == [
        ("X", "in use", 0),
        ("X", "in use", 1000),
        ("i", "gather on demand", 0),
        ("i", "reduce", 2000),
    ]
    assert [(row["ph"], row["name"], row["ts"]) for row in on(found, "gathers")] == [
        ("i", "m.a on demand", 0)
    ]
    (reduction,) = on(found, "reductions")
    assert (reduction["name"], reduction["ts"], reduction["dur"]) == ("m.a", 2000, 1000)
    assert reduction["args"] == {"kind": "full", "event": "m.a B0", "bytes": 400}


def test_json_tells_partial_reductions_from_full_ones(tmp_path: Path) -> None:
    window = trace("m F0: a; m B0: a; m F1: a; m B1: a", replicas={"m.a": 2})
    found = rows(plan(window), tmp_path / "t.json")
    assert [(row["name"], row["cat"]) for row in on(found, "reductions")] == [
        ("m.a (partial)", "partial"),
        ("m.a", "full"),
    ]
    marks = [row["name"] for row in on(found, "m.a") if row["ph"] == "i"]
    assert marks == ["gather on demand", "reduce, partial", "reduce"]


def test_json_has_a_lane_for_gradients_that_are_kept(tmp_path: Path) -> None:
    window = trace("m F0: a b; m B0: b a; m F1: a b; m B1: b a", frozen={"m.b"})
    found = rows(plan(window, PER_WINDOW), tmp_path / "t.json")
    (kept,) = on(found, "m.a gradient")
    assert (kept["name"], kept["ts"], kept["dur"]) == ("kept", 4000, 4000)
    assert kept["args"] == {"unit": "m.a", "bytes": 400}
    assert "m.b gradient" not in threads(found)


def counter(found: list[dict[str, Any]], name: str) -> list[tuple[int, int]]:
    return [
        (row["ts"], row["args"]["bytes"])
        for row in found
        if row["ph"] == "C" and row["name"] == name
    ]


def test_json_counter_is_the_resident_curve_and_ends_at_zero(
    program: Program, tmp_path: Path
) -> None:
    found = rows(program, tmp_path / "t.json")
    curve = [*resident_bytes(program), 0]
    assert counter(found, "resident bytes") == [(1000 * p, v) for p, v in enumerate(curve)]
    assert counter(found, "kept gradient bytes") == []
    assert counter(found, "capacity bytes") == []


def test_json_counters_of_gradients_and_capacity_are_there_if_they_are(tmp_path: Path) -> None:
    window = trace("m F0: a; m B0: a; m F1: a; m B1: a")
    program = replace(plan(window, PER_WINDOW), capacity=(100, 200, 300, 400))
    found = rows(program, tmp_path / "t.json")
    assert [value for _, value in counter(found, "kept gradient bytes")] == [0, 0, 400, 400, 0]
    assert counter(found, "capacity bytes") == [(0, 100), (1000, 200), (2000, 300), (3000, 400)]


def test_json_of_a_carried_unit_begins_and_ends_with_it(tmp_path: Path) -> None:
    window = trace("m F0: b a b; m F1: b a b", frozen={"m.a"})
    program = carrying(plan(window, PassOptions(0, 0)), "m.a")
    found = rows(program, tmp_path / "t.json")
    spans = [(row["name"], row["ts"]) for row in on(found, "m.a") if row["ph"] == "X"]
    assert spans == [("held", 0), ("in use", 1000), ("in use", 4000), ("held", 5000)]
    assert counter(found, "resident bytes")[0] == (0, 400)
    assert counter(found, "resident bytes")[-1] == (6000, 200)


def test_json_in_time_is_in_microseconds(tmp_path: Path) -> None:
    window = trace("m F0: a b; m B0: b a", {"m.b": 50})
    durations = Durations(
        (10_000, 20_000, 30_000, 40_000), {"m.a": 15_000, "m.b": 12_400}, {"m.a": 5000, "m.b": 0}
    )
    found = rows(plan(window), tmp_path / "t.json", durations)
    spans = [(row["name"], row["ts"], row["dur"]) for row in on(found, "compute")]
    assert spans == [("m.a F0", 15, 10), ("m.b F0", 27, 20), ("m.b B0", 47, 30), ("m.a B0", 77, 40)]
    assert [(row["name"], row["ts"], row["dur"]) for row in on(found, "gathers")] == [
        ("m.a", 0, 15),
        ("m.b", 15, 12),
        ("m.a", 47, 15),
    ]


@given(planned())
@settings(max_examples=50)
def test_spans_of_a_json_thread_are_nested_or_disjoint(
    case: tuple[Program, Durations | None],
) -> None:
    document = json.loads(json.dumps(chrome_trace(lanes_of(*case))))
    found = document["traceEvents"]
    assert set(threads(found).values()) >= {row["tid"] for row in found if row["ph"] in ("X", "i")}
    for row in found:
        for field in ("ts", "dur"):
            assert isinstance(row.get(field, 0), int)
            assert row.get(field, 0) >= 0
    for thread in threads(found):
        spans = [row for row in on(found, thread) if row["ph"] == "X"]
        open_until: list[int] = []
        for row in sorted(spans, key=lambda row: (row["ts"], -row["dur"])):
            while open_until and open_until[-1] <= row["ts"]:
                open_until.pop()
            assert not open_until or row["ts"] + row["dur"] <= open_until[-1]
            open_until.append(row["ts"] + row["dur"])


def test_durations_of_another_window_are_refused(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with pytest.raises(ValueError, match="a trace of 24 events has 2 durations"):
        save_timeline(program, path, durations=steady(trace("m F0: a b")))
    assert not path.exists()


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
