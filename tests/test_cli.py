"""The fsdp-fx command: what it refuses and how."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_fx import cli, demo


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--help",), ("demo", "--version")),
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
