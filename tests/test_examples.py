"""The examples train as the model whole does, and an FSDP2 script needs three lines of them.

Each runs as a script and compares itself: it exits with an error if a gradient or a weight is
not the whole model's. What is checked here besides is what it prints about the schedule.
"""

from __future__ import annotations

import ast
import difflib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ranks import run_script

EXAMPLES = Path(__file__).parents[1] / "examples"
EQUAL = "equal to the model whole\n"


def run(name: str, *arguments: str, ranks: int, cwd: Path) -> str:
    printed = run_script(EXAMPLES / f"{name}.py", *arguments, world_size=ranks, cwd=cwd)
    assert printed.endswith(f"\n{EQUAL}"), printed
    return printed


def steps(printed: str, *counters: str) -> list[tuple[int, ...]]:
    """The counters of each step, which are printed as `12 gathers`."""
    lines = re.findall(r"(?m)^step \d+: .*$", printed)
    rows = []
    for line in lines:
        found = [re.search(rf"\b(\d+) {counter}\b", line) for counter in counters]
        rows.append(tuple(int(match[1]) for match in found if match))
    return rows


# Training


@pytest.mark.parametrize(
    "arguments",
    [
        ("--plain",),
        ("--memory-budget", "500000", "--reduce-gradients", "planned", "--dtype", "bfloat16"),
        ("--compile", "eager"),
    ],
    ids=lambda arguments: arguments[0].strip("-"),
)
def test_gradient_accumulation(arguments: Sequence[str], tmp_path: Path) -> None:
    printed = run("grad_accumulation", *arguments, "--steps", "2", ranks=2, cwd=tmp_path)
    if "--plain" in arguments:
        assert "recorded mode" not in printed
        return
    assert re.search(r"windows: 2 closed\W+1 recorded\b.*\b1 replayed", printed)
    assert "fallbacks: none" in printed
    # Four layers and what is around them, forward and backward of four microbatches, less one
    # gather wherever the same layer is next.
    gathers = 5 if "--memory-budget" in arguments else 33
    assert re.search(rf"program 0: 40 events .*; {gathers} gathers", printed)
    assert ("compiled, graph" in printed) is ("--compile" in arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--plain",),
        ("--order", "grouped"),
        pytest.param(("--order", "grouped", "--compile", "eager"), marks=pytest.mark.soak),
    ],
    ids=" ".join,
)
def test_megatron_style(arguments: Sequence[str], tmp_path: Path) -> None:
    options = ("--microbatches", "4", "--steps", "2")
    printed = run("megatron_style", *arguments, *options, ranks=4, cwd=tmp_path)
    rows = steps(printed, "gathers", "on demand", "reductions")
    if "--plain" in arguments:
        # Each unit once a step: two layers of each chunk, and the embedding.
        assert [row[2] for row in rows] == [5, 5]
        return
    # Two chunks of four microbatches, forward and backward. In the grouped order each unit of a
    # chunk is followed by another, but at the turn from forward to backward.
    assert rows == [(40, 40, 5), (33, 1, 5)]


def test_megatron_style_under_torchrun(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "4", str(EXAMPLES / "megatron_style.py")),
            *("--microbatches", "4", "--steps", "2", "--memory-budget", "1000000"),
            *("--reduce-gradients", "planned"),
        ],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(EQUAL)
    # With room for everything each unit is gathered and reduced once.
    rows = steps(done.stdout, "gathers", "on demand", "reductions")
    assert rows == [(40, 40, 20), (5, 1, 5)]


def test_lora(tmp_path: Path) -> None:
    printed = run("lora", "--steps", "3", ranks=2, cwd=tmp_path)
    (without, keeping) = re.split(r"(?m)^keep_frozen=.*\n", printed)[1:]
    # Without: four frozen layers, what is around them, and the adapters.
    assert [row[0] for row in steps(without, "gathers")][1:] == [6, 6]
    # With: only the adapters, which the optimizer has changed.
    assert [row[0] for row in steps(keeping, "gathers")][1:] == [6, 1]
    assert {row[0] for row in steps(printed, "reductions")} == {1}
    assert "gathers in the last step: 6 and 1\n" in printed


def test_lora_with_fsdp2_alone(tmp_path: Path) -> None:
    printed = run("lora", "--plain", "--steps", "2", ranks=2, cwd=tmp_path)
    assert len(steps(printed, "gathers")) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("--schedule", "InterleavedZeroBubble"),
        ("--schedule", "1F1B", "--compile", "eager"),
    ],
    ids=" ".join,
)
def test_pipelined(arguments: Sequence[str], tmp_path: Path) -> None:
    compiled = "--compile" in arguments
    printed = run("pipelined", *arguments, "--steps", "2", ranks=2 if compiled else 4, cwd=tmp_path)
    assert len(steps(printed)) == 2
    assert re.search(r"windows: 2 closed\W+1 recorded\b.*\b1 replayed", printed)
    assert ("compiled, graph" in printed) is compiled
    assert "fallbacks: none" in printed


def test_pipelined_says_that_torch_alone_is_wrong_with_split_backwards(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="NOT equal to the model whole"):
        run(
            "pipelined",
            "--schedule",
            "InterleavedZeroBubble",
            "--plain",
            "--steps",
            "1",
            ranks=4,
            cwd=tmp_path,
        )


def test_combined_1f1b(tmp_path: Path) -> None:
    options = ("--layers", "2", "--microbatches", "2", "--steps", "2")
    run("combined_1f1b", *options, "--delay-weight-gradients", ranks=4, cwd=tmp_path)


# How much of an FSDP2 script changes


def _switches(source: str) -> Iterator[tuple[ast.If, bool]]:
    """Each `if` that decides by an option, and the value of the option where it holds."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If):
            test, value = node.test, True
            if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
                test, value = test.operand, False
            if ast.unparse(test) in ("arguments.plain", "arguments.compile"):
                yield node, value


def _side(source: str, plain: bool) -> list[str]:
    """The lines of the script with fsdp_fx or of that without; it does not compile."""
    lines = source.splitlines()
    switches = sorted(_switches(source), key=lambda switch: switch[0].lineno, reverse=True)
    for node, value in switches:
        holds = value is (plain if "plain" in ast.unparse(node.test) else False)
        assert node.end_lineno is not None
        first, last = node.lineno + 1, node.end_lineno  # of the side that holds
        if node.orelse:
            separator = node.body[-1].end_lineno
            assert separator is not None
            while lines[separator].strip() != "else:":
                separator += 1
            first, last = (first, separator) if holds else (separator + 2, last)
        kept = lines[first - 1 : last] if holds or node.orelse else []
        lines[node.lineno - 1 : node.end_lineno] = [line.removeprefix("    ") for line in kept]
    return lines


def diff(name: str) -> list[str]:
    """From FSDP2 alone to fsdp_fx, without what only the example needs."""
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    sides = [_side(source, plain) for plain in (True, False)]
    return list(difflib.unified_diff(*sides, "FSDP2 alone", "with fsdp_fx", n=2, lineterm=""))


@pytest.mark.parametrize("name", ["grad_accumulation", "megatron_style", "lora", "pipelined"])
def test_at_most_three_lines_change_besides_the_context(name: str) -> None:
    changes = 0
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    for node, value in _switches(source):
        if ast.unparse(node.test).endswith("plain"):
            plain, scheduled = (node.body, node.orelse) if value else (node.orelse, node.body)
            scheduled = [each for each in scheduled if not ast.unparse(each).startswith("ctx = ")]
            assert all(each.lineno == each.end_lineno for each in (*plain, *scheduled))
            changes += max(len(plain), len(scheduled))
    assert 2 <= changes <= 3
    added = [line for line in diff(name) if line.startswith("+")]
    assert any("ctx.adopt(" in line for line in added)
    assert any("ctx.finish_grad_sync" in line for line in added)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print("\n".join(diff(each)))
