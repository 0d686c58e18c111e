"""``fsdp-fx plan``: sizes of models, times of machines, what policies cost, and how it is shown."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_fx import forecast
from fsdp_fx.forecast.comparison import (
    Forecast,
    compare,
    everything,
    without_communication,
)
from fsdp_fx.forecast.display import budget_text, table_lines
from fsdp_fx.forecast.quantities import bandwidth, byte_count, format_time, nanoseconds
from fsdp_fx.forecast.shape import Decoder, Layers, stage_units, unit_specs
from fsdp_fx.forecast.workload import Collectives, Workload, of_schedule, of_trace
from fsdp_fx.planning.durations import Durations
from fsdp_fx.planning.memory import format_bytes
from fsdp_fx.planning.pipelines import pipeline_calls
from fsdp_fx.saved import save_trace
from traces import trace

# Quantities.


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("4096", 4096),
        ("400MiB", 400 * 2**20),
        ("1.5 GB", 1_500_000_000),
        ("2e3", 2000),
        (".5KiB", 512),
        ("1kB", 1000),
        ("1TiB", 2**40),
    ],
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert byte_count(text) == count


@pytest.mark.parametrize(
    ("text", "rate"), [("50GB/s", 50e9), ("400Gb/s", 50e9), ("8Mbit/s", 1e6), ("1GiB/s", 2.0**30)]
)
def test_rates_are_read(text: str, rate: float) -> None:
    assert bandwidth(text) == rate


@pytest.mark.parametrize(
    ("text", "duration"),
    [("3ms", 3_000_000), ("20us", 20_000), ("20µs", 20_000), ("1.5s", 15 * 10**8)],
)
def test_times_are_read(text: str, duration: int) -> None:
    assert nanoseconds(text) == duration


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (byte_count, "many", "'many' is no size: write 400MiB"),
        (byte_count, "", "'' is no size"),
        (byte_count, "1Gb", "'1Gb' is no size"),
        (byte_count, "1GiB/s", "is no size"),
        (byte_count, "nan", "'nan' is no size"),
        (byte_count, "inf", "'inf' is no size"),
        (byte_count, "-1GiB", "-1GiB is negative"),
        (byte_count, "1e400", "1e400 is more than any machine has"),
        (byte_count, "1048576TiB", "is more than any machine has"),
        (bandwidth, "50GB", "'50GB' is no rate: write 50GB/s"),
        (bandwidth, "0GB/s", "0GB/s is nothing: use more than 0"),
        (bandwidth, "-1GB/s", "-1GB/s is negative"),
        (nanoseconds, "3", "'3' is no time: write 3ms"),
        (nanoseconds, "3 minutes", "is no time"),
    ],
)
def test_what_is_no_quantity_is_refused(read: Any, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(text)


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1000, "1.00 µs"),
        (12_345, "12.3 µs"),
        (999_600, "1.00 ms"),
        (123_456_789, "123 ms"),
        (1_500_000_000, "1.50 s"),
        (1_234_000_000_000, "1,234 s"),
    ],
)
def test_times_are_written_with_three_digits(duration: int, text: str) -> None:
    assert format_time(duration) == text


# Models.


@pytest.mark.parametrize(
    ("decoder", "parameters"),
    [
        (Decoder(32, 4096, 11008, 4096, 32000), 6_738_415_616),  # Llama 2 7B
        (Decoder(32, 4096, 14336, 1024, 128256), 8_030_261_248),  # Llama 3 8B
    ],
)
def test_a_decoder_has_the_parameters_of_llama(decoder: Decoder, parameters: int) -> None:
    assert sum(unit.elements for unit in decoder.units) == parameters
    embedding, *layers, head = decoder.units
    assert (embedding.name, embedding.multiplied, head.name) == ("embedding", 0, "head")
    assert head.elements == head.multiplied == embedding.elements + 4096
    assert [unit.name for unit in layers] == [f"layer{index}" for index in range(32)]


def test_without_a_vocabulary_there_are_only_layers() -> None:
    assert all(unit.is_layer for unit in Decoder(4, 8, 16, 8).units)


def test_stages_have_equally_many_layers_and_what_is_beside_them() -> None:
    stages = stage_units(Decoder(4, 8, 16, 8, 10).units, 2)
    assert [[unit.name for unit in stage] for stage in stages] == [
        ["embedding", "layer0", "layer1"],
        ["layer2", "layer3", "head"],
    ]


@pytest.mark.parametrize("stages", [3, 8])
def test_layers_that_do_not_divide_are_refused(stages: int) -> None:
    with pytest.raises(ValueError, match=f"4 layers do not divide over {stages} stages"):
        stage_units(Layers((1,) * 4).units, stages)


def test_units_have_bytes_in_their_dtypes() -> None:
    ((spec,),) = unit_specs(((Layers((10,)).units[0],),), torch.bfloat16, torch.float32)
    assert (spec.name, spec.chunk, spec.bytes, spec.gradient_bytes) == (
        "stage0.layer0",
        "stage0",
        20,
        40,
    )


# Times.


def test_a_collective_moves_what_a_rank_does_not_have() -> None:
    ((spec,),) = unit_specs(((Layers((500,)).units[0],),), torch.bfloat16, torch.float32)
    collectives = Collectives(shards=4, bandwidth=1e9, latency=10)
    assert collectives.gather(spec) == 10 + 750
    assert collectives.reduction(spec) == 10 + 1500
    assert collectives.transfer(1000) == 10 + 1000


def layered(
    schedule: str = "GPipe",
    ranks: int = 1,
    chunks: int = 1,
    microbatches: int = 2,
    elements: Sequence[int] = (500, 500),
    shards: int = 2,
    forward: int = 1000,
    backward: float = 2.0,
) -> Workload:
    """Layers of bfloat16 over stages, gathered at 1 byte a nanosecond without latency."""
    stages = stage_units(Layers(tuple(elements)).units, ranks * chunks)
    specs = unit_specs(stages, torch.bfloat16, torch.float32)
    forwards = {spec.name: forward for stage in specs for spec in stage}
    calls = pipeline_calls(schedule, ranks, chunks, microbatches)
    collectives = Collectives(shards, 1e9, 0)
    return of_schedule("layers", calls, specs, forwards, backward, collectives)


def test_a_backward_is_a_multiple_of_its_forward_and_its_halves_add_up() -> None:
    (durations,) = layered().durations
    assert durations.compute == (1000,) * 4 + (2000,) * 4
    assert durations.gathers == {"stage0.layer0": 500, "stage0.layer1": 500}
    assert durations.reductions == {"stage0.layer0": 1000, "stage0.layer1": 1000}
    work = layered("ZBVZeroBubble", 2, 2, 4, (500,) * 4, backward=2.501)
    for rank in work.durations:
        assert sum(rank.compute) == 2 * 4 * (1000 + 2501)
        assert set(rank.compute) >= {1000, 1250, 1251}


def test_events_of_a_backward_take_the_times_of_their_units() -> None:
    stages = unit_specs((Layers((10, 20)).units,), torch.bfloat16, torch.float32)
    forwards = {"stage0.layer0": 100, "stage0.layer1": 300}
    calls = pipeline_calls("GPipe", 1, 1, 1)
    work = of_schedule("layers", calls, stages, forwards, 2.0, Collectives(2, 1e9, 0))
    assert work.durations[0].compute == (100, 300, 600, 200)


def test_a_trace_keeps_what_was_measured_where_nothing_else_is_given() -> None:
    window = trace("c0 F0: a; c0 B0: a")
    measured = Durations((1, 2), {"c0.a": 3}, {"c0.a": 4})
    collectives = Collectives(2, 1e9, 0)
    assert of_trace("t", window, measured, None, 2, None).durations == (measured,)
    (computed,) = of_trace("t", window, measured, {"c0.a": 10}, 3, None).durations
    assert computed == Durations((10, 30), {"c0.a": 3}, {"c0.a": 4})
    (moved,) = of_trace("t", window, measured, None, 2, collectives).durations
    assert moved == Durations((1, 2), {"c0.a": 100}, {"c0.a": 200})
    with pytest.raises(ValueError, match="nothing was measured: give compute and collectives"):
        of_trace("t", window, None, {"c0.a": 10}, 2, None)


# What policies cost.


def by_policy(forecasts: Sequence[Forecast]) -> dict[tuple[str, Any], Forecast]:
    return {(each.policy, each.budget): each for each in forecasts}


def test_a_step_is_as_long_as_worked_out_by_hand() -> None:
    # a and b of 1000 bytes are gathered in 500 and reduced in 1000; F 1000, B 2000 each.
    found = by_policy(list(compare(layered(), [0, "everything"])))
    ahead = found["one ahead", None]
    # Only the first gather is waited for, and the last reduction after the last compute.
    assert ahead.nanoseconds == 500 + 4 * 1000 + 4 * 2000 + 1000
    (rank,) = ahead.ranks
    # a b a b, then b stays for its backward: b a b a.
    assert (rank.gathers, rank.bytes_gathered) == (7, 7000)
    assert (rank.reductions, rank.bytes_reduced) == (4, 8000)
    assert (rank.compute, rank.exposed, rank.bubble) == (12_000, 1500, 0)
    # One in use and the next.
    assert rank.peak_bytes == 2000
    kept = found["keep everything", None].ranks[0]
    # Both units, and the full gradients of both after the first backward, in fp32.
    assert (kept.gathers, kept.reductions, kept.peak_bytes) == (2, 2, 2000 + 4000)
    optimum = found["optimum", "everything"].ranks[0]
    assert (optimum.gathers, optimum.reductions, optimum.peak_bytes) == (2, 4, 2000)


def test_a_rank_waits_for_the_others_until_the_step_ends() -> None:
    (forecast, *_) = compare(layered("1F1B", 2, 1, 2), [0])
    for rank in forecast.ranks:
        assert rank.compute + rank.exposed + rank.bubble == forecast.nanoseconds
    assert all(rank.bubble > 0 for rank in forecast.ranks)


def test_without_communication_a_step_is_compute_and_bubble() -> None:
    # Two ranks of one layer: F0 F1 on each, shifted by one forward, and back.
    assert without_communication(layered("GPipe", 2, 1, 2)) == 3 * 1000 + 3 * 2000


@pytest.mark.parametrize("reduce_gradients", ["per_backward", "per_window", "planned"])
@pytest.mark.parametrize(
    ("schedule", "chunks"), [("Interleaved1F1B", 2), ("LoopedBFS", 2), ("DualPipeV", 2)]
)
def test_the_optimum_gathers_no_more_bytes_than_least_recently_used(
    schedule: str, chunks: int, reduce_gradients: Any
) -> None:
    sizes = (500, 700) * 4
    work = layered(schedule, 2, chunks, 8, sizes)
    budgets = [0, 1000, 2400, 5000, "everything"]
    found = by_policy(list(compare(work, budgets, reduce_gradients)))
    floor = without_communication(work)
    previous = None
    for budget in budgets:
        optimum, cached = found["optimum", budget], found["least recently used", budget]
        for best, other, durations in zip(optimum.ranks, cached.ranks, work.durations, strict=True):
            moved, others = (each.bytes_gathered + each.bytes_reduced for each in (best, other))
            assert moved <= others
            assert best.compute == sum(durations.compute)
        total = sum(rank.bytes_gathered + rank.bytes_reduced for rank in optimum.ranks)
        assert previous is None or total <= previous
        previous = total
        assert optimum.nanoseconds >= floor
    for rank, own in zip(found["optimum", "everything"].ranks, work.traces, strict=True):
        assert rank.gathers == len(own.units)
        if reduce_gradients == "planned":
            assert rank.reductions == len(own.units)


def test_planned_reductions_are_the_optimums_only() -> None:
    found = by_policy(list(compare(layered(), ["everything"], "planned")))
    assert found["optimum", "everything"].ranks[0].reductions == 2
    assert found["least recently used", "everything"].ranks[0].reductions == 4
    assert found["one ahead", None].ranks[0].reductions == 4


@pytest.mark.parametrize(("prefetch", "exposed"), [(0, 7), (None, 1), ("timed", 1)])
def test_prefetch_says_how_far_ahead_gathers_start(prefetch: Any, exposed: int) -> None:
    found = by_policy(list(compare(layered(), [0], prefetch=prefetch)))
    rank = found["optimum", 0].ranks[0]
    # Gathers that compute waits for, of those without lookahead; and the last reduction.
    assert rank.exposed == exposed * 500 + 1000


def test_everything_is_parameters_and_gradients() -> None:
    (window,) = layered().traces
    assert everything(window) == 2 * (1000 + 2000)


# From arguments.


def options(*arguments: str) -> forecast.Options:
    parser = argparse.ArgumentParser()
    forecast.add_arguments(parser)
    return forecast.options_of(parser.parse_args(arguments))


def test_two_numbers_are_enough() -> None:
    asked = options("--layers", "4", "--hidden", "1024")
    assert asked.workload.title == (
        "1F1B, 8 GPUs: 1 pipeline rank, sharded over 8; 8 microbatches, 4 layers, 51.4M parameters"
    )
    assert len(asked.workload.traces[0]) == 2 * 4 * 8
    # 2 × elements × 4096 tokens at 400 TFLOP/s; 7/8 of 2 bytes at 50 GB/s and 20 µs.
    elements = 4 * 1024**2 + 3 * 1024 * 2816 + 2 * 1024
    (durations,) = asked.workload.durations
    assert durations.compute[0] == round(2 * elements * 4096 / 400e12 * 1e9)
    assert durations.gathers["stage0.layer0"] == 20_000 + round(7 / 8 * 2 * elements / 50)
    layer = 2 * elements
    assert asked.budgets == (0, layer, 2 * layer, "everything")


def test_virtual_stages_make_it_interleaved() -> None:
    asked = options("--layers", "8", "--hidden", "64", "--pipeline", "2", "--virtual", "2")
    assert asked.workload.title.startswith("Interleaved1F1B, 16 GPUs: 2 pipeline ranks × 2 stages")
    assert [len(own.units) for own in asked.workload.traces] == [4, 4]
    v_shaped = options(
        "--layers", "4", "--hidden", "64", "--pipeline", "2", "--schedule", "DualPipeV"
    )
    assert [unit.name for unit in v_shaped.workload.traces[0].units] == [
        "stage0.layer0",
        "stage3.layer3",
    ]


def test_sizes_of_units_and_compute_are_taken_as_given() -> None:
    asked = options(
        *("--unit-bytes", "1MB,2MB", "--compute", "3ms", "--backward", "2.5", "--ranks", "4"),
        *("--bandwidth", "1GB/s", "--latency", "0us", "--microbatches", "1"),
        *("--parameter-dtype", "float32", "--reduction-dtype", "bfloat16"),
    )
    (own,), (durations,) = asked.workload.traces, asked.workload.durations
    assert [(unit.bytes, unit.gradient_bytes) for unit in own.units] == [
        (1_000_000, 500_000),
        (2_000_000, 1_000_000),
    ]
    assert durations.compute == (3_000_000, 3_000_000, 7_500_000, 7_500_000)
    assert durations.gathers == {"stage0.layer0": 750_000, "stage0.layer1": 1_500_000}


def test_a_stage_hands_activations_to_the_next() -> None:
    arguments = ("--layers", "2", "--hidden", "1000", "--pipeline", "2", "--bandwidth", "1GB/s")
    by_tokens = options(*arguments, "--tokens", "100", "--latency", "1us")
    assert {each.nanoseconds for each in by_tokens.workload.transfers} == {1000 + 100 * 1000 * 2}
    by_compute = options(*arguments, "--compute", "3ms", "--latency", "1us")
    assert {each.nanoseconds for each in by_compute.workload.transfers} == {1000}


def test_the_head_computes_by_its_size_and_the_embedding_not_at_all() -> None:
    asked = options(
        *("--layers", "1", "--hidden", "64", "--vocabulary", "1000", "--compute", "3ms"),
        *("--feed-forward", "100", "--heads", "8", "--key-value-heads", "2"),
    )
    layer = 2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 100 + 2 * 64
    (own,), (durations,) = asked.workload.traces, asked.workload.durations
    assert [unit.elements for unit in own.units] == [64_000, layer, 64_064]
    assert durations.compute[:3] == (0, 3_000_000, round(3_000_000 * 64_064 / layer))


def test_budgets_and_lookahead_are_read() -> None:
    arguments = ("--layers", "2", "--hidden", "64")
    asked = options(*arguments, "--budget", "0,1GiB,everything,0", "--prefetch", "timed")
    assert asked.budgets == (0, 2**30, "everything")
    assert asked.prefetch == "timed"
    assert options(*arguments).prefetch is None
    assert options(*arguments, "--prefetch", "one").prefetch is None
    assert options(*arguments, "--prefetch", "none").prefetch == 0
    assert options(*arguments, "--prefetch", "1,000").prefetch == 1000


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A trace with durations."""
    window = trace("c0 F0: *(a b); c0 B0: *(b a)")
    names = ("c0", "c0.a", "c0.b")
    file = tmp_path / "recorded.json"
    save_trace(
        window,
        file,
        Durations((1, 2, 3, 4, 5, 6), dict.fromkeys(names, 7), dict.fromkeys(names, 8)),
    )
    return file


def test_a_trace_is_planned_with_what_was_measured(recorded: Path) -> None:
    asked = options("--trace", str(recorded))
    assert asked.workload.title == "recorded.json: 6 events of 3 units"
    (durations,) = asked.workload.durations
    assert durations.compute == (1, 2, 3, 4, 5, 6)
    assert durations.reductions == {"c0": 8, "c0.a": 8, "c0.b": 8}


def test_what_is_given_replaces_what_was_measured(recorded: Path) -> None:
    asked = options(
        *("--trace", str(recorded), "--compute", "1us", "--ranks", "2"),
        *("--bandwidth", "1GB/s", "--latency", "0ns"),
    )
    (durations,) = asked.workload.durations
    assert durations.compute == (1000,) * 3 + (2000,) * 3
    assert durations.gathers == {"c0": 100, "c0.a": 100, "c0.b": 100}
    tokens = options("--trace", str(recorded), "--tokens", "10", "--tflops", "0.001")
    assert tokens.workload.durations[0].compute == (2000,) * 3 + (4000,) * 3
    assert tokens.workload.durations[0].gathers["c0"] == 7


def test_a_trace_without_durations_needs_a_machine(tmp_path: Path) -> None:
    file = tmp_path / "plain.json"
    save_trace(trace("c0 F0: a; c0 B0: a"), file)
    with pytest.raises(forecast.ForecastError, match="has no measured durations: give --ranks"):
        options("--trace", str(file))
    asked = options("--trace", str(file), "--ranks", "2")
    assert asked.workload.title == "plain.json: 2 events of 1 unit, sharded over 2"
    (durations,) = asked.workload.durations
    assert durations.gathers == {"c0.a": 20_000 + round(100 / 50)}


# How it is shown.


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    forecast.add_arguments(parser)
    return forecast.run(parser.parse_args(arguments))


SMALL = (
    *("--layers", "8", "--hidden", "512", "--pipeline", "2", "--virtual", "2"),
    *("--microbatches", "4", "--budget", "0,8MiB,everything"),
)


def test_the_table_has_a_row_for_each_policy_and_budget(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("Interleaved1F1B, 16 GPUs")
    rows = [line.split() for line in shown]
    starts = [" ".join(row[:-1])[:30] for row in rows if row]
    for beginning in (
        "one ahead –",
        "least recently used 0 B",
        "optimum 0 B",
        "least recently used 8.0 MiB",
        "optimum 8.0 MiB",
        "least recently used everything",
        "optimum everything",
        "keep everything –",
    ):
        assert sum(start.startswith(beginning) for start in starts) == 1
    assert not any("…" in line for line in shown)
    assert any("without communication takes" in line for line in shown)


def test_the_table_has_the_worst_rank_and_the_mean_of_times(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    # The embedding makes the first rank's units more and larger.
    arguments = ("--layers", "2", "--hidden", "64", "--vocabulary", "5000", "--pipeline", "2")
    run(*arguments, "--microbatches", "3", "--budget", "0", "--json", str(file))
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "one ahead" in line)
    ranks = json.loads(file.read_text())["plans"][0]["ranks"]
    exposed = [rank["exposed_nanoseconds"] for rank in ranks]
    assert len({rank["gathers"] for rank in ranks}) == 2
    assert row.split()[3] == str(max(rank["gathers"] for rank in ranks))
    assert format_bytes(max(rank["peak_bytes"] for rank in ranks)) in row
    assert f"{format_time(max(exposed))} ({format_time(sum(exposed) / 2)})" in row


def test_per_rank_has_a_row_for_each_pipeline_rank(capsys: pytest.CaptureFixture[str]) -> None:
    run(*SMALL, "--per-rank")
    rows = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    for rank in "01":
        assert rows.count(["optimum", "8.0", "MiB", rank]) == 1


def test_without_rich_the_table_is_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(*SMALL)
    with_rich = capsys.readouterr().out.split()
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "rich" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    run(*SMALL)
    plain = capsys.readouterr().out
    words = [word for word in plain.split() if set(word) != {"-"}]
    assert words == [word for word in with_rich if set(word) != {"─"}]
    table = plain.splitlines()[1:10]
    assert len({len(line) for line in table}) == 1  # columns to the right end together


def test_a_terminal_is_told_what_is_planned_and_a_file_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(*SMALL)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    run(*SMALL)
    told = capsys.readouterr().err.split("\r\x1b[K")
    assert "planning optimum, budget 8.0 MiB, rank 1" in told
    assert told[-1] == ""


def test_columns_of_a_table_line_up() -> None:
    assert table_lines(("what", "count"), [("a", "10"), ("longer", "1,000")]) == [
        "what    count",
        "------  -----",
        "a          10",
        "longer  1,000",
    ]
    assert [budget_text(each) for each in (None, 0, 2**30, "everything")] == [
        "–",
        "0 B",
        "1.0 GiB",
        "everything",
    ]


def test_the_file_has_the_numbers_and_the_memory_over_time(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    run(*SMALL, "--json", str(file), "--reduce-gradients", "planned", "--prefetch", "none")
    found = json.loads(file.read_text())
    assert (found["format"], found["version"]) == ("fsdp_fx plan", 1)
    assert (found["reduce_gradients"], found["prefetch"]) == ("planned", 0)
    assert [len(rank["units"]) for rank in found["ranks"]] == [4, 4]
    plans = {(plan["policy"], plan["budget"]): plan for plan in found["plans"]}
    assert list(plans) == [
        ("one ahead", None),
        ("least recently used", 0),
        ("optimum", 0),
        ("least recently used", 8 * 2**20),
        ("optimum", 8 * 2**20),
        ("least recently used", "everything"),
        ("optimum", "everything"),
        ("keep everything", None),
    ]
    for plan in plans.values():
        assert plan["step_nanoseconds"] >= found["without_communication_nanoseconds"]
        for rank in plan["ranks"]:
            curve = rank["resident_bytes"]
            assert curve[0][0] == 0
            assert [time for time, _ in curve] == sorted({time for time, _ in curve})
            assert max(count for _, count in curve) == rank["peak_bytes"]
            assert curve[-1][1] == 0
            waits = rank["exposed_nanoseconds"] + rank["bubble_nanoseconds"]
            assert rank["compute_nanoseconds"] + waits == plan["step_nanoseconds"]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_picture_is_written_in_the_format_of_its_name(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"plan{suffix}"
    run(*SMALL, "--picture", str(file))
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    if suffix == ".svg":
        drawn = content.decode()
        for label in ("keep everything", "least recently used", "8.0 MiB", "without communication"):
            assert f"<!-- {label}" in drawn


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(forecast.ForecastError, match=r"pip install 'fsdp-fx\[viz\]'"):
        run(*SMALL, "--picture", str(tmp_path / "plan.png"))


ROOT = Path(__file__).parents[1]


def _commands() -> list[str]:
    """The plan commands that documents and the help show, but for those of a recorded trace."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    parser = subprocess.run(
        [sys.executable, "-m", "fsdp_fx", "plan", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "10000"},
    )
    texts.append(parser.stdout)
    found = [line for text in texts for line in re.findall(r"fsdp-fx plan (--.*)", text)]
    return [line for line in found if "--trace " not in line]


def test_commands_in_the_documents_and_the_help_are_accepted() -> None:
    commands = _commands()
    assert len(commands) >= 3
    for command in commands:
        asked = options(*shlex.split(command))
        assert len(asked.budgets) == 4
        assert asked.reduce_gradients == "planned"
