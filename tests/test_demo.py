"""The demo, its model and text, and the scripts that the documentation shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_fx.demo.display import EXPLANATION
from fsdp_fx.demo.launch import RankError, run_ranks
from fsdp_fx.demo.model import BYTES, ModelShape, Stage, next_byte_loss
from fsdp_fx.demo.observe import Observer
from fsdp_fx.demo.text import Text
from fsdp_fx.demo.training import FILES, Options
from ranks import RankPools

ROOT = Path(__file__).parent.parent


def _run(*command: str, cwd: Path, timeout: float = 110.0) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100", "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


# The whole of it


@pytest.mark.slow
def test_the_demo_ends_with_a_table_and_leaves_its_files(tmp_path: Path) -> None:
    arguments = ["--region-compiler", "eager", "--steps", "2", "--layers", "4", "--output", "out"]
    done = _run("-m", "fsdp_fx", "demo", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {
        cells[0]: cells[1:]
        for line in done.stdout.splitlines()
        if len(cells := [cell.strip() for cell in line.strip("│").split("│")]) == 4
    }
    assert [len(cells) for cells in rows.values()] == [3] * len(rows)
    losses = [float(cell) for cell in rows["final loss"]]
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-3)
    assert 0 < losses[0] < 6
    assert [float(cell) < 1e-3 for cell in rows["loss difference, largest"][1:]] == [True, True]
    for column in range(3):
        gathers, ahead, demanded = (
            float(rows[name][column]) for name in ("gathers", "ahead of need", "on demand")
        )
        assert gathers == pytest.approx(ahead + demanded, abs=0.2)  # each is rounded
        assert float(rows["seconds per step"][column]) > 0
    assert rows["on demand"][1:] == ["1", "1"]
    assert all(float(cell) >= 0 for cell in rows["start and compile, s"])
    # Two ranks have units layer, layer, embedding or head: 3, each reduced once.
    assert rows["reductions"] == ["3", "3", "3"]
    peaks = [float(cell) for cell in rows["peak full parameters, KiB"]]
    assert peaks[0] >= peaks[1] == peaks[2] > 0  # a stage of one layer is hardly more than a unit
    assert EXPLANATION in " ".join(done.stdout.split())
    output = tmp_path / "out"
    assert {path.name for path in output.iterdir()} == set(FILES)
    listing = done.stdout[done.stdout.index("Written to out") :].splitlines()
    assert "compiled run on rank 0" in listing[0]
    assert [line.split()[0] for line in listing[1:]] == list(FILES)
    texts = {name: (output / name).read_text() for name in FILES if name.endswith(".txt")}
    for text in texts.values():
        assert text.startswith("# rank 0, compiled run: ")
    assert "# program: 48 events" in texts["program.txt"]
    assert re.search(r"\n# variant +slice \d+: ", texts["graph.py.txt"])
    assert "residency.acquire(" in texts["graph.py.txt"]
    assert "counts are for all 2 steps" in texts["explain.txt"]
    assert "fallbacks: none" in texts["explain.txt"]
    assert "chunk c0: compiled" in texts["explain.txt"]
    assert (output / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_the_documents_have_the_table_and_say_what_it_shows() -> None:
    page = (ROOT / "docs" / "demo.md").read_text(encoding="utf-8").replace("`", "")
    assert EXPLANATION in " ".join(page.split())
    rows = re.findall(r"^\| ([a-z][\w ,]*?) \|.*\|.*\|.*\|$", page, re.MULTILINE)
    assert {"gathers", "reductions", "peak full parameters, KiB", "start and compile, s"} <= {*rows}


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others_and_is_quoted(tmp_path: Path) -> None:
    # Rank 0 alone cannot write; the other one goes on and would wait for it.
    options = Options(2, 4, 2, "cpu", tmp_path / "missing", "eager")
    with pytest.raises(RankError, match=r"(?s)rank 0 failed:\nTraceback.*FileNotFoundError"):
        for _ in run_ranks(options):
            pass


@pytest.mark.slow
def test_the_pipelined_example_runs(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "pipelined.py")
    done = _run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", example),
        *("--steps", "2"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1: loss" in done.stdout
    assert re.search(r"windows: 2 closed\W+1 recorded\b.*\b1 replayed", done.stdout)


# Its parts


def test_stages_make_up_the_model_and_do_not_depend_on_their_number() -> None:
    shape = ModelShape(layers=4, width=16, heads=2, context=8)
    stages = [Stage(shape, index, 4) for index in range(4)]
    again = Stage(shape, 2, 4)
    for parameter, other in zip(stages[2].parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=0, atol=0)
    tokens = torch.randint(BYTES, (2, 8))
    logits = tokens
    for stage in stages:
        logits = stage(logits)
    assert logits.shape == (2, 8, BYTES)
    # Causal: a token changes nothing before it.
    tokens[:, 5] = (tokens[:, 5] + 1) % BYTES
    changed = tokens
    for stage in stages:
        changed = stage(changed)
    same = (changed == logits).all(dim=-1).all(dim=0)
    assert same.tolist() == [True] * 5 + [False] * 3
    with pytest.raises(ValueError, match="4 layers do not divide into 3 stages"):
        Stage(shape, 0, 3)


def test_a_batch_is_text_and_what_follows_it() -> None:
    text = Text(size=10_000)
    inputs, targets = text.batch(rows=3, length=16, step=1, rank=0)
    assert inputs.shape == targets.shape == (3, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert bytes(inputs[0].tolist()) in bytes(text.content.tolist())
    again, _ = text.batch(rows=3, length=16, step=1, rank=0)
    assert torch.equal(inputs, again)
    for step, rank in ((2, 0), (1, 1)):
        other, _ = text.batch(rows=3, length=16, step=step, rank=rank)
        assert not torch.equal(inputs, other)
    loss = next_byte_loss(torch.zeros(3, 16, BYTES), targets)
    assert loss.item() == pytest.approx(torch.tensor(float(BYTES)).log().item())


def _observe() -> tuple[dict[str, int], dict[str, int], int]:
    """Counters of a step of plain FSDP2 and after it, and the bytes of one unit."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with Observer() as observer:
        model(torch.randn(2, 8)).sum().backward()
        inside = dict(vars(observer.stats))
    model(torch.randn(2, 8)).sum().backward()
    return inside, dict(vars(observer.stats)), 8 * 8 * 4


def test_the_observer_counts_what_fsdp2_does(ranks: RankPools) -> None:
    for inside, after, size in ranks(2).run(_observe):
        # Each layer is gathered for its forward and its backward; the backward
        # prefetches all but its first.
        assert (inside["gathers"], inside["on_demand_gathers"]) == (6, 4)
        assert inside["prefetched_gathers"] == 2
        assert inside["reductions"] == 3
        assert inside["peak_resident_bytes"] == 2 * size
        assert inside["resident_bytes"] == 0
        assert after == inside, "it counts while it is entered only"
