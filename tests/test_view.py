"""What `fsdp-fx view` says of a file, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_fx import cli
from fsdp_fx.forecast.comparison import Forecast, RankForecast
from fsdp_fx.forecast.record import save_record
from fsdp_fx.forecast.workload import Workload
from fsdp_fx.passes import PassOptions, plan
from fsdp_fx.planning.durations import Durations
from fsdp_fx.program import Program
from fsdp_fx.saved import save_trace
from fsdp_fx.timeline import save_timeline
from fsdp_fx.trace import Trace
from fsdp_fx.view import summary
from test_timeline import carrying
from traces import TWO_CHUNKS, trace

PER_WINDOW = PassOptions(reduce_gradients="per_window")


def lines_of(text: str) -> dict[str, str]:
    """The lines by what stands in front; those of curves by what they are of."""
    lines: dict[str, str] = {}
    name = ""
    for line in text.split("\n"):
        head, _, rest = line.partition("  ")
        name = head if head else f"{name} curve"
        lines[name] = rest.strip() if head else line.removeprefix(" " * indent(text))
    return lines


def indent(text: str) -> int:
    """The column at which lines say something."""
    return len(text) - len(re.sub(r"^\S+( \S+)* +", "", text))


def viewed(program: Program, path: Path, **options: Any) -> dict[str, str]:
    save_timeline(program, path / "timeline.json", **options)
    return lines_of(summary(path / "timeline.json"))


def test_timeline_says_what_is_gathered_and_reduced(tmp_path: Path) -> None:
    window = trace(TWO_CHUNKS, replicas={"c0.a": 2})
    program = plan(window)
    lines = viewed(program, tmp_path, caption="rank 0")
    assert lines["timeline"] == f"{tmp_path / 'timeline.json'} (rank 0)"
    assert lines["time"] == "1 ms per event; schedule order, not measured time"
    assert lines["window"] == "24 events, 6 units, 2 chunks, 2 microbatches"
    gathers = sum(len(step.gathers) + len(step.prefetches) for step in program.steps)
    ahead = sum(len(step.prefetches) for step in program.steps)
    assert lines["gathers"] == f"{gathers}: {ahead} ahead, {gathers - ahead} on demand"
    assert lines["reductions"] == "12: 1 partial"
    assert lines["gathered most"] == "c0.a 4, c0.b 4, c1.a 4, c1.b 4, c0 2, c1 1"
    assert not {"carried", "kept gradients", "both", "capacity", "step"} & set(lines)


def test_peaks_have_their_event_and_curves_their_shape(tmp_path: Path) -> None:
    sizes = {"m.a": 50, "m.b": 100, "m.c": 400}
    window = trace("m F0: a b c; m B0: c b a; m B1: c b a", sizes)
    program = plan(window, PassOptions(0, 0, "per_window"))
    lines = viewed(replace(program, capacity=(0, 512, *(1024,) * 7)), tmp_path)
    assert lines["parameters"] == "at most 800 B, at m.c F0 (event 2)"
    assert lines["parameters curve"] == "▁▂██▂▁█▂▁"
    assert lines["kept gradients"] == "at most 2.1 KiB, at m.c B1 (event 6)"
    assert lines["kept gradients curve"] == "    ▆██▃▁"
    assert lines["both"] == "at most 2.9 KiB, at m.c B1 (event 6)"
    assert lines["capacity"] == "at most 1.0 KiB, at m.c F0 (event 2)"
    assert lines["capacity curve"] == " ▄███████"


def test_curve_of_a_long_window_shows_the_peaks_in_a_line_of_it(tmp_path: Path) -> None:
    calls = [f"m F{index}: a" for index in range(500)]
    calls[250] = "m F250: b"
    lines = viewed(
        plan(trace("; ".join(calls), {"m.a": 10, "m.b": 80}), PassOptions(0, 0)), tmp_path
    )
    curve = lines["parameters curve"]
    assert len(curve) == 64
    assert curve.count("█") == 1
    assert curve.index("█") == 32
    assert set(curve) == {"█", "▁"}
    assert lines["parameters"] == "at most 160 B, at m.b F0 (event 250)"


def test_most_gathered_units_come_first_and_the_rest_is_counted(tmp_path: Path) -> None:
    names = [f"u{index}" for index in range(9)]
    window = trace(f"m F0: {' '.join(names)}; m F1: {' '.join(names[4:])}; m F2: u8")
    lines = viewed(plan(window, PassOptions(0, 0)), tmp_path)
    assert lines["gathered most"] == "m.u8 3, m.u4 2, m.u5 2, m.u6 2, m.u7 2, m.u0 1, 3 more"


def test_timeline_in_time_says_how_long_the_step_takes(tmp_path: Path) -> None:
    window = trace("m F0: a; m B0: a")
    durations = Durations((1_000_000, 3_000_000), {"m.a": 500_000}, {"m.a": 2_500_000})
    lines = viewed(plan(window), tmp_path, durations=durations)
    assert lines["time"] == "simulated from given durations"
    assert (
        lines["step"]
        == "7.00 ms: compute 4.00 ms, exposed gathers 500 µs, exposed reductions 2.50 ms"
    )


def test_curves_are_by_event_also_in_time(tmp_path: Path) -> None:
    program = plan(trace(TWO_CHUNKS), PER_WINDOW)
    window = program.trace
    times = {unit.name: 70_000 for unit in window.units}
    in_time = viewed(program, tmp_path, durations=Durations((50_000,) * 24, times, times))
    in_events = viewed(program, tmp_path)
    for name in ("parameters", "kept gradients", "both"):
        assert in_time[name] == in_events[name]
        assert in_time[f"{name} curve"] == in_events[f"{name} curve"]


def test_carried_units_are_listed_and_not_gathered(tmp_path: Path) -> None:
    window = trace("m F0: a b; m F1: a b", frozen={"m.a"})
    lines = viewed(carrying(plan(window, PassOptions(0, 0)), "m.a"), tmp_path)
    assert lines["carried"] == "1: m.a"
    assert lines["gathers"] == "3: 0 ahead, 3 on demand"


def test_timeline_without_events_can_be_viewed(tmp_path: Path) -> None:
    units = trace("m F0: a").units
    lines = viewed(plan(Trace(units, (), (), frozenset())), tmp_path)
    assert lines["window"] == "0 events, 1 unit, 1 chunk, 0 microbatches"
    assert lines["gathers"] == "0: 0 ahead, 0 on demand"


def test_trace_says_what_the_window_needs(tmp_path: Path) -> None:
    window = trace(
        "c0 F0: *(a b); c0 B0: *(b a)", {"c0.b": 1000}, frozen={"c0.a"}, replicas={"c0": 2}
    )
    path = tmp_path / "trace.json"
    save_trace(window, path)
    lines = lines_of(summary(path))
    assert lines["trace"] == str(path)
    assert lines["window"] == "6 events, 3 units, 1 chunk, 1 microbatch"
    assert lines["units"] == "200 B to 2.0 KiB, 2.3 KiB in all; 1 frozen, 1 replicated"
    assert lines["calls"] == "2: c0 F0, c0 B0"
    assert lines["contributions"] == "2 backwards after which to reduce"
    assert lines["in use"] == "at most 2.1 KiB, at c0.b F0 (event 2)"
    assert lines["in use curve"] == "▁▂█▁█▂"
    assert lines["durations"] == "none"


def test_trace_with_durations_says_how_long_things_take(tmp_path: Path) -> None:
    window = trace("m F0: a b; m B0: b a", frozen={"m.b"})
    path = tmp_path / "trace.json"
    save_trace(window, path, Durations((1000,) * 4, {"m.a": 10, "m.b": 2000}, {"m.a": 30}))
    lines = lines_of(summary(path))
    assert lines["compute"] == "4.00 µs"
    assert lines["a gather"] == "10 ns to 2.00 µs"
    assert lines["a reduction"] == "30 ns to 30 ns"


def test_curves_are_ascii_where_there_are_no_blocks(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    save_timeline(plan(trace(TWO_CHUNKS)), path)
    assert summary(path, "ascii").isascii()
    assert summary(path, "no such encoding").isascii()
    assert not summary(path).isascii()


def refusal(capsys: pytest.CaptureFixture[str], file: Path) -> str:
    with pytest.raises(SystemExit) as raised:
        cli.main(["view", str(file)])
    assert raised.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.rstrip()


def test_command_prints_the_summary(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    save_timeline(plan(trace(TWO_CHUNKS)), path)
    assert cli.main(["view", str(path)]) == 0
    assert capsys.readouterr().out == summary(path) + "\n"


def test_command_refuses_what_is_no_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = tmp_path / "nothing.json"
    assert refusal(capsys, missing) == f"fsdp-fx: error: {missing}: No such file or directory"
    assert refusal(capsys, tmp_path) == f"fsdp-fx: error: {tmp_path}: Is a directory"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON: line 1, column 1"),
        ("[]", "is a list, not an object"),
        ("{}", 'has no field "format"'),
        ('{"format": 3}', "format: is 3, not a text"),
        (
            '{"format": "other"}',
            'format: is "other", not "fsdp_fx timeline" or "fsdp_fx trace" or "fsdp_fx plan"',
        ),
        ('{"format": "fsdp_fx trace"}', 'has no field "version"'),
        ('{"traceEvents": []}', "holds a Chrome trace that fsdp_fx has not written"),
        ('{"traceEvents": [], "otherData": {}}', "holds a Chrome trace that fsdp_fx has not"),
        ('{"traceEvents": [], "otherData": []}', "otherData: is a list, not an object"),
        (
            '{"traceEvents": [], "otherData": {"format": "fsdp_fx timeline", "version": 2}}',
            "otherData.version: is 2; this fsdp_fx reads up to version 1",
        ),
    ],
)
def test_command_refuses_other_files_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    assert f"{path}: {message}" in refusal(capsys, path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: data.pop("events"), 'otherData: has no field "events"'),
        (lambda data: data["events"].append(4), "otherData.events[24]: is 4, not a text"),
        (lambda data: data["parameters"].pop(), "otherData.parameters: has 23 numbers for 24"),
        (lambda data: data.update(gradients="none"), 'otherData.gradients: is "none", not a list'),
        (lambda data: data.update(capacity=[1]), "otherData.capacity: has 1 numbers for 24 events"),
        (lambda data: data["gathers"].update(ahead=-1), "otherData.gathers.ahead: is -1"),
        (lambda data: data["gathers"]["units"].update(x=""), 'otherData.gathers.units["x"]: is ""'),
        (lambda data: data.update(nanoseconds={}), 'otherData.nanoseconds: has no field "step"'),
    ],
)
def test_command_refuses_a_timeline_that_was_damaged(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    edit: Callable[[dict[str, Any]], object],
    message: str,
) -> None:
    path = tmp_path / "timeline.json"
    save_timeline(plan(trace(TWO_CHUNKS)), path)
    document = json.loads(path.read_text())
    edit(document["otherData"])
    path.write_text(json.dumps(document))
    assert f"{path}: {message}" in refusal(capsys, path)


def test_command_names_the_place_in_a_damaged_trace(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    save_trace(trace(TWO_CHUNKS), path)
    document = json.loads(path.read_text())
    document["events"][3]["unit"] = "c7"
    path.write_text(json.dumps(document))
    assert f"{path}: events[3].unit: " in refusal(capsys, path)


def rank_of_plan(gathers: int, resident: tuple[tuple[int, int], ...]) -> RankForecast:
    return RankForecast(gathers, 100 * gathers, 2, 800, 4_000_000, 1_000_000, 0, resident)


def saved_plan(path: Path) -> Path:
    """A plan of two ranks: of three policies one is fastest."""
    windows = (trace("m F0: a b; m B0: b a"), trace("n F0: a; n B0: a"))
    durations = tuple(
        Durations(
            (1_000_000,) * len(window),
            {unit.name: 5 for unit in window.units},
            {unit.name: 6 for unit in window.units},
        )
        for window in windows
    )
    low, high = ((0, 512),), ((0, 512), (2_000_000, 1024), (3_000_000, 0))
    forecasts = [
        Forecast("one ahead", None, 6_000_000, (rank_of_plan(4, low), rank_of_plan(2, low))),
        Forecast("optimum", 2048, 4_000_000, (rank_of_plan(3, low), rank_of_plan(1, high))),
        Forecast(
            "keep everything", "everything", 4_000_000, (rank_of_plan(2, low), rank_of_plan(1, low))
        ),
    ]
    save_record(
        path, Workload("two stages", windows, durations), forecasts, 3_500_000, "planned", None
    )
    return path


def test_plan_says_what_each_policy_costs_and_which_is_fastest(tmp_path: Path) -> None:
    path = saved_plan(tmp_path / "plan.json")
    text = summary(path)
    lines = lines_of(text)
    assert lines["plan"] == str(path)
    assert lines["for"] == "two stages"
    assert lines["ranks"] == "2: 2 to 4 events, 1 to 2 units on each"
    assert lines["no communication"] == "3.50 ms"
    assert lines["fastest"] == "optimum with 2.0 KiB, 4.00 ms"
    assert lines["its memory"] == "at most 1.0 KiB, on rank 1"
    assert lines["its memory curve"] == "▄" * 32 + "█" * 16
    rows = [line.split() for line in text.split("\n")]
    assert any(row[:2] == ["policies", "policy"] for row in rows)
    (optimum,) = (row for row in rows if row[0] == "optimum")
    assert optimum[1:5] == ["2.0", "KiB", "3", "300"]
    assert optimum[-2:] == ["4.00", "ms"]
    assert sum("everything" in row for row in rows) == 1


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda plan: plan.update(version=9), "version: is 9; this fsdp_fx reads up to version 1"),
        (lambda plan: plan.update(plans=[]), "plans: has nothing that was planned"),
        (lambda plan: plan["ranks"].pop(), "plans[0].ranks: is of 2 ranks, but there are 1"),
        (
            lambda plan: plan["plans"][1].update(policy="luck"),
            'plans[1].policy: is "luck", not one',
        ),
        (lambda plan: plan["plans"][1].update(budget="all"), 'plans[1].budget: is "all", not an'),
        (lambda plan: plan["plans"][1].pop("step_nanoseconds"), "plans[1]: has no field"),
        (
            lambda plan: plan["plans"][0]["ranks"][1].update(gathers=-2),
            "plans[0].ranks[1].gathers: is -2; it must be at least 0",
        ),
        (
            lambda plan: plan["plans"][0]["ranks"][1].update(resident_bytes=[[0, 1], [2]]),
            "plans[0].ranks[1].resident_bytes[1]: has 1 numbers",
        ),
        (
            lambda plan: plan["plans"][0]["ranks"][1].update(resident_bytes=[[5, 1], [2, 3]]),
            "plans[0].ranks[1].resident_bytes[1]: is at 2, before the one before it",
        ),
    ],
)
def test_command_refuses_a_plan_that_was_damaged(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    edit: Callable[[dict[str, Any]], object],
    message: str,
) -> None:
    path = saved_plan(tmp_path / "plan.json")
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))
    assert f"{path}: {message}" in refusal(capsys, path)
