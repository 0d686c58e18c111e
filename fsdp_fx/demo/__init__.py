"""``fsdp-fx demo``: a pipelined transformer on real text, with and without a context.

It trains the same steps three times, shows how equal the losses are and how different
the schedules, and leaves the program, a transformed graph and a picture in a folder.
Imports of what only the demo needs (rich, matplotlib) wait until :func:`run`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path

import torch

from .launch import Finished, RankError, run_ranks
from .training import FILES, RUNS, STAGES, Options, RunName, RunResult

__all__ = ["DemoError", "Options", "run"]


class DemoError(ValueError):
    """The demo cannot run as asked. The message says what to change, in one line."""


def check(options: Options) -> None:
    """Refuse what cannot work before any process starts.

    Raises:
        DemoError: says what to change.
    """
    missing = [name for name in ("rich", "matplotlib") if not importlib.util.find_spec(name)]
    if missing:
        raise DemoError(f"the demo needs {' and '.join(missing)}: pip install 'fsdp-fx[viz]'")
    if options.ranks < 2 or options.ranks % 2:
        raise DemoError(f"--ranks {options.ranks}: use an even number, 2 pipeline ranks × N")
    if options.layers < 1 or options.layers % STAGES:
        raise DemoError(f"--layers {options.layers}: use a multiple of the {STAGES} stages")
    if options.steps < 2:
        raise DemoError(f"--steps {options.steps}: use 2 or more; the first is recorded")
    if options.output.exists() and not options.output.is_dir():
        raise DemoError(f"--output {options.output}: is not a folder")
    if options.device == "cuda":
        gpus = torch.cuda.device_count()
        if gpus < options.ranks:
            raise DemoError(f"--device cuda: {options.ranks} ranks need as many GPUs, found {gpus}")


def default_ranks(device: str) -> int:
    """How many ranks to start if nobody says: 4, or as many as there are GPUs.

    Raises:
        DemoError: there are fewer than two GPUs.
    """
    if device == "cpu":
        return 4
    gpus = torch.cuda.device_count()
    if gpus < 2:
        raise DemoError(f"--device cuda: at least 2 GPUs are needed, found {gpus}")
    return gpus - gpus % 2


def missing_compiler(device: str) -> str | None:
    """What Inductor lacks on this machine, if anything."""
    if device == "cuda":
        return None if importlib.util.find_spec("triton") else "Triton"
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"a C++ compiler ({compiler})"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python's C headers"
    return None


def run(options: Options) -> int:
    """Run the demo.

    Returns:
        The exit code: 1 if a rank failed.

    Raises:
        DemoError: it cannot run as asked.
    """
    check(options)
    from rich.console import Console

    from .display import EXPLANATION, Bars, comparison

    console = Console()
    missing = missing_compiler(options.device) if options.region_compiler == "inductor" else None
    if missing is not None:
        console.print(f"Inductor needs {missing}, which is not here: using --region-compiler eager")
        options = replace(options, region_compiler="eager")
    options.output.mkdir(parents=True, exist_ok=True)
    for file in FILES:
        (options.output / file).unlink(missing_ok=True)  # of an earlier demo
    results: dict[RunName, list[RunResult]] = {name: [] for name in RUNS}
    seconds: dict[RunName, float] = {}
    began = time.monotonic()
    try:
        with Bars(console, options) as bars:
            bars.begin(RUNS[0])
            for _, message in run_ranks(options):
                name = message.run
                if isinstance(message, Finished):
                    results[name].append(message.result)
                    if len(results[name]) == options.ranks:
                        bars.end(name)
                        seconds[name] = time.monotonic() - began
                        began = time.monotonic()
                        following = RUNS.index(name) + 1
                        if following < len(RUNS):
                            bars.begin(RUNS[following])
                elif message.loss is not None:
                    bars.advance(name, message.steps, message.loss)
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    console.print(comparison(results, seconds, options))
    console.print(EXPLANATION, highlight=False)
    console.print(f"\nWritten to {options.output}, from the compiled run on rank 0:")
    for file, content in FILES.items():
        if (options.output / file).exists():
            console.print(f"  {file:<13} {content}", highlight=False)
    return 0
