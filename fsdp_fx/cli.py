"""The ``fsdp-fx`` command.

Each subcommand is a parser and a function from its arguments to an exit code. What
cannot be done as asked exits with 2 and one line on stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from . import __version__, demo, forecast, view

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: without the program's name; those of this process if None.

    Returns:
        The exit code.
    """
    parser = _Parser(prog="fsdp-fx", description="Training steps under FSDP2 as scheduled graphs.")
    parser.add_argument("--version", action="version", version=f"fsdp-fx {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_plan(commands)
    _add_view(commands)
    parsed = parser.parse_args(arguments)
    for name, value in vars(parsed).items():
        if value == []:  # what argparse makes of "--name=--"
            parser.error(f"argument --{name.replace('_', '-')}: expected one argument")
    execute: Callable[[argparse.Namespace], int] = parsed.execute
    try:
        code = execute(parsed)
        sys.stdout.flush()
        return code
    except (demo.DemoError, forecast.ForecastError, view.ViewError) as error:
        parser.error(str(error))
    except BrokenPipeError:  # whoever reads, `head` for one, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1  # as rich does
    except KeyboardInterrupt:
        return 130


def _add_demo(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "demo",
        help="train a small pipelined transformer with FSDP2, eager and compiled",
        description="Trains a small transformer on the source of Python's standard library: "
        "PP 2 × FSDP, interleaved 1F1B, the same steps with plain FSDP2, with fsdp_fx "
        "eager, and with fsdp_fx compiled. Needs no download.",
    )
    parser.add_argument("--ranks", type=int, help="processes (default: 4; as many as GPUs)")
    parser.add_argument("--layers", type=int, default=8, help="transformer layers (default: 8)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each run (default: 20)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, default=Path("fsdp_fx_demo"), help="folder to fill")
    parser.add_argument(
        "--region-compiler",
        choices=("inductor", "eager"),
        default="inductor",
        help="what compiles the regions of the compiled run (default: inductor)",
    )
    parser.set_defaults(execute=_demo)


def _demo(parsed: argparse.Namespace) -> int:
    ranks = demo.default_ranks(parsed.device) if parsed.ranks is None else parsed.ranks
    return demo.run(
        demo.Options(
            ranks=ranks,
            layers=parsed.layers,
            steps=parsed.steps,
            device=parsed.device,
            output=parsed.output,
            region_compiler=parsed.region_compiler,
        )
    )


def _add_plan(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="predict the communication, memory and step time of a pipeline schedule",
        description="Plans one training step for each memory budget, simulates it, and compares "
        "it with gathering one ahead, with evicting what was least recently used and with keeping "
        "everything. Needs no GPU. Example: fsdp-fx plan --ranks 128 --pipeline 8 --virtual 4 "
        "--microbatches 32 --layers 64 --hidden 8192 --budget 0,2GiB,8GiB,everything "
        "--reduce-gradients planned",
    )
    forecast.add_arguments(parser)
    parser.set_defaults(execute=forecast.run)


def _add_view(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "view",
        help="summarise a saved timeline, trace or plan",
        description="Says in a few lines what a file holds: a timeline that save_timeline() has "
        "written as .json, a trace that fsdp_fx.saved.save_trace() has written, or a plan of "
        "fsdp-fx plan --json.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the JSON file")
    parser.set_defaults(execute=_view)


def _view(parsed: argparse.Namespace) -> int:
    print(view.summary(parsed.file, sys.stdout.encoding or "ascii"))
    return 0
