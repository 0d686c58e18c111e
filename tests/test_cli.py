"""The fsdp-fx command: what it refuses and how."""

from __future__ import annotations

import errno
import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_fx import cli, demo, forecast
from fsdp_fx.planning.durations import Durations
from fsdp_fx.saved import save_trace
from traces import trace


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(options: demo.Options) -> None:
        raise AssertionError(f"started ranks with {options}")

    monkeypatch.setattr(demo, "run_ranks", refuse)


def _refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which the command refuses `arguments`."""
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments)
    assert raised.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.rstrip()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "fsdp-fx: error: the following arguments are required: COMMAND"),
        (("nothing",), "invalid choice: 'nothing'"),
        (("demo", "--colour"), "fsdp-fx: error: unrecognized arguments: --colour"),
        (("demo", "--ranks", "many"), "argument --ranks: invalid int value: 'many'"),
        (("demo", "--ranks", "3"), "--ranks 3: use an even number"),
        (("demo", "--ranks", "0"), "--ranks 0: use an even number"),
        (("demo", "--layers", "6"), "--layers 6: use a multiple of the 4 stages"),
        (("demo", "--layers", "-4"), "--layers -4: use a multiple of the 4 stages"),
        (("demo", "--steps", "1"), "--steps 1: use 2 or more"),
        (("demo", "--device", "tpu"), "argument --device: invalid choice: 'tpu'"),
        (("demo", "--region-compiler", "x"), "argument --region-compiler: invalid choice: 'x'"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert message in _refusal(capsys, *arguments)


def test_an_output_that_is_a_file_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert f"--output {file}: is not a folder" in _refusal(capsys, "demo", "--output", str(file))


@pytest.mark.parametrize(
    ("gpus", "arguments", "message"),
    [
        (0, (), "at least 2 GPUs are needed, found 0"),
        (1, (), "at least 2 GPUs are needed, found 1"),
        (2, ("--ranks", "4"), "4 ranks need as many GPUs, found 2"),
    ],
)
def test_too_few_gpus_are_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert message in _refusal(capsys, "demo", "--device", "cuda", *arguments)


def test_by_default_there_is_a_rank_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 7)
    assert demo.default_ranks("cpu") == 4
    assert demo.default_ranks("cuda") == 6


def test_without_the_extra_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "rich" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    assert "needs rich: pip install 'fsdp-fx[viz]'" in _refusal(capsys, "demo")


def test_a_missing_c_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert demo.missing_compiler("cpu") == "a C++ compiler (no-such-compiler)"


PLAN = ("plan", "--layers", "4", "--hidden", "64")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan",), "give --layers and --hidden, or --unit-bytes, or --trace"),
        ((*PLAN, "--schedule", "1F2B"), "argument --schedule: unknown schedule '1F2B': use one of"),
        ((*PLAN, "--schedule", "1F1B", "--virtual", "2"), "Schedule1F1B has one stage per rank"),
        (
            (*PLAN, "--schedule", "DualPipeV", "--microbatches", "1"),
            "at least as many microbatches",
        ),
        ((*PLAN, "--pipeline", "3"), "4 layers over 3 stages (3 pipeline ranks × 1): use a mult"),
        ((*PLAN, "--pipeline", "8"), "use a multiple of 8 --layers"),
        ((*PLAN, "--pipeline", "2", "--ranks", "7"), "--ranks 7 over --pipeline 2: use 2 or more"),
        ((*PLAN, "--pipeline", "2", "--ranks", "2"), "--ranks 2 over --pipeline 2: use 2 or more"),
        ((*PLAN, "--microbatches", "0"), "argument --microbatches: '0': use a whole number, 1 or"),
        ((*PLAN, "--microbatches", "many"), "'many': use a whole number"),
        ((*PLAN, "--microbatches", "1000000000"), "of 8,000,000,000 events on a rank, more than"),
        ((*PLAN, "--budget", "-1GiB"), "argument --budget"),
        ((*PLAN, "--budget=-1GiB"), "argument --budget: -1GiB is negative"),
        ((*PLAN, "--budget", "0,some"), "'some' is no size: write everything, 400MiB, 1.5GB or a"),
        ((*PLAN, "--budget", "1e30"), "argument --budget: 1e30 is more than any machine has"),
        ((*PLAN, "--budget", "nan"), "'nan' is no size"),
        ((*PLAN, "--budget", ""), "'' is no size"),
        (
            (*PLAN, "--budget", "1000"),
            "--budget 1000 B keeps nothing: the smallest unit is 128.2 Ki",
        ),
        ((*PLAN, "--bandwidth", "50GB"), "argument --bandwidth: '50GB' is no rate: write 50GB/s"),
        ((*PLAN, "--latency", "3"), "argument --latency: '3' is no time"),
        ((*PLAN, "--tflops", "0"), "argument --tflops: '0': use a number above 0"),
        ((*PLAN, "--backward", "inf"), "argument --backward: 'inf': use a number above 0"),
        ((*PLAN, "--prefetch", "two"), "'two': use one, none, timed, or a number of elements"),
        ((*PLAN, "--reduce-gradients", "never"), "argument --reduce-gradients: invalid choice"),
        ((*PLAN, "--picture", "plan.pdf"), "--picture plan.pdf: use .png or .svg"),
        ((*PLAN, "--picture", "nowhere/plan.png"), "there is no folder nowhere"),
        ((*PLAN, "--json", "."), "--json .: is a folder"),
        # Options that have no effect.
        ((*PLAN, "--heads", "8"), "--heads has no effect without --key-value-heads"),
        ((*PLAN, "--key-value-heads", "8"), "--key-value-heads has no effect without --heads"),
        ((*PLAN, "--heads", "8", "--key-value-heads", "3"), "each must divide the one before it"),
        ((*PLAN, "--unit-bytes", "1MiB"), "--hidden has no effect with --unit-bytes"),
        ((*PLAN, "--compute", "3ms", "--tokens", "8"), "--tokens has no effect with --compute"),
        ((*PLAN, "--compute", "3ms", "--tflops", "8"), "--tflops has no effect with --compute"),
        (("plan", "--unit-bytes", "1MiB"), "--unit-bytes with one size needs --layers"),
        (("plan", "--unit-bytes", "1MiB,2MiB", "--layers", "3"), "has 2 sizes for --layers 3"),
        (("plan", "--unit-bytes", "3,4"), "--unit-bytes 3: is no whole number of bfloat16 elem"),
        (("plan", "--unit-bytes", "0", "--layers", "2"), "0 is nothing: use more than 0"),
        (("plan", "--trace", "t", "--pipeline", "2"), "--pipeline has no effect with --trace"),
        (("plan", "--trace", "t", "--hidden", "2"), "--hidden has no effect with --trace"),
        (("plan", "--trace", "nowhere"), "--trace nowhere: No such file or directory"),
    ],
)
def test_plan_refuses_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert message in _refusal(capsys, *arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON"),
        ('{"format": "something"}', "trace.json: format: is"),
        ('{"format": "fsdp_fx trace", "version": 1}', 'trace.json: has no field "units"'),
    ],
)
def test_plan_refuses_a_malformed_trace(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, message: str
) -> None:
    file = tmp_path / "trace.json"
    file.write_text(content)
    assert message in _refusal(capsys, "plan", "--trace", str(file))


def test_plan_takes_from_a_trace_only_what_it_uses(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "trace.json"
    window = trace("c0 F0: a; c0 B0: a")
    save_trace(window, file, Durations((1, 2), {"c0.a": 3}, {"c0.a": 4}))
    refused = partial(_refusal, capsys, "plan", "--trace", str(file))
    assert "--backward has no effect on compute that was measured" in refused("--backward", "3")
    assert "give --ranks" in refused("--bandwidth", "1GB/s")
    assert "--ranks 1: nothing is sharded" in refused("--ranks", "1")
    save_trace(replace(window, events=(), ends=(), reduces=frozenset()), file)
    assert "has no events" in refused()


def test_plan_says_what_cannot_be_saved(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "plan.json")

    monkeypatch.setattr(forecast, "save_record", full)
    file = str(tmp_path / "plan.json")
    message = _refusal(capsys, *PLAN, "--json", file)
    assert message == "fsdp-fx: error: cannot save plan.json: No space left on device"


def test_plan_shows_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PLAN, "--pipeline", "2", "--microbatches", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("1F1B, 16 GPUs: 2 pipeline ranks, sharded over 8; 2 microbatches")
    assert shown.count("optimum") == shown.count("least recently used") > 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--help",), ("demo", "plan", "view", "--version")),
        (("plan", "--help"), ("--schedule", "--trace", "--budget", "--picture", "ZBVZeroBubble")),
        (("demo", "--help"), ("--ranks", "--layers", "--steps", "--device", "--output")),
        (("--version",), ("fsdp-fx 0.",)),
    ],
)
def test_help_and_version(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments)
    assert raised.value.code == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in words)


def test_an_interruption_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(options: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupt)
    assert cli.main(["demo"]) == 130


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--layers 99999999999 --hidden 64", "--layers 99999999999: more than the 100,000"),
        ("--layers 4 --hidden 999999999999999", "has units of more bytes than any machine has"),
        ("--layers=-- --hidden 64", "argument --layers: "),  # Python says why, each in its way
        (f"--layers 4 --hidden 64 --json {'a' * 5000}", "File name too long"),
    ],
)
def test_plan_of_an_absurd_size_is_refused_at_once(
    arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in _refusal(capsys, "plan", *arguments.split())


def test_output_that_nobody_reads_to_its_end_is_no_traceback(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    save_trace(trace("m F0: a; m B0: a"), file)
    for arguments in (["plan", "--layers", "4", "--hidden", "64"], ["view", str(file)]):
        reading, writing = os.pipe()
        os.close(reading)
        command = [sys.executable, "-m", "fsdp_fx", *arguments]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE)
        os.close(writing)
        assert (done.returncode, done.stderr) == (1, b"")
