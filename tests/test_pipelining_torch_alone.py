"""Where torch alone is silently wrong, side by side with a context. Run it yourself:

    python -m pytest -s tests/test_pipelining_torch_alone.py

What a context does has to be right with every torch. That torch alone is wrong is asserted for
the versions with which it was seen; with others the test prints what it found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard, share_comm_ctx

import fsdp_fx
import pipeline_table
from models import cpu_mesh
from pipeline_jobs import DIM, SPLIT_BACKWARD, Blocks
from pipeline_table import CONTEXT, RUNNABLE, SCHEDULES, TORCH, Counted
from ranks import RankPools

VERSION = ".".join(torch.__version__.split(".")[:2])
SEEN = VERSION in ("2.11", "2.13", "2.14")
PAGE = Path(__file__).parent.parent / "docs" / "pipelining.md"


@pytest.fixture(scope="module")
def measured(ranks: RankPools) -> list[list[dict[str, Counted]]]:
    """What each rank has measured of each schedule that this torch can run on the CPU."""
    return ranks(4).run(pipeline_table.measure_all, RUNNABLE, timeout=280)


@pytest.mark.parametrize("schedule", RUNNABLE)
def test_torch_alone_loses_gradients_of_zero_bubble_schedules_and_a_context_does_not(
    measured: list[list[dict[str, Counted]]], schedule: Any
) -> None:
    of_ranks = [rank[RUNNABLE.index(schedule)] for rank in measured]
    print(f"\n{schedule.__name__}, torch {torch.__version__}, of all ranks together:")
    for name in (*TORCH, *CONTEXT):
        missing = sum(rank[name].missing for rank in of_ranks)
        different = sum(rank[name].different for rank in of_ranks)
        print(f"  {name}: {missing} gradients missing, {different} wrong")
    for name in CONTEXT:
        assert all(rank[name].right for rank in of_ranks), name
    if SEEN:
        # No exception says so.
        reshards, stays = TORCH
        assert all(rank[stays].right for rank in of_ranks)
        assert all(rank[reshards].right for rank in of_ranks) == (schedule not in SPLIT_BACKWARD)


def test_the_page_has_the_table_that_is_measured(
    measured: list[list[dict[str, Counted]]],
) -> None:
    if VERSION != "2.13":
        pytest.skip("the table was made with torch 2.13")
    assert RUNNABLE == SCHEDULES
    table = pipeline_table.table(measured)
    assert table in PAGE.read_text(), f"python tests/pipeline_table.py gives another:\n{table}"


class _TwoChunks:
    """Two chunks that share streams, and an unsharded copy of them."""

    def __init__(self, context: bool) -> None:
        torch.manual_seed(0)
        self.reference = [Blocks(2), Blocks(2)]
        self.chunks: list[Any] = [Blocks(2), Blocks(2)]
        for chunk, reference in zip(self.chunks, self.reference, strict=True):
            chunk.load_state_dict(reference.state_dict())
            for block in chunk.blocks:
                fully_shard(block, mesh=cpu_mesh())
            fully_shard(chunk, mesh=cpu_mesh())
        self.context = None
        if context:
            self.context = fsdp_fx.FSDPContext(mode="recorded")
            self.context.adopt(*self.chunks)
        else:
            share_comm_ctx(self.chunks)

    def step(self, step: int, flags: bool) -> float:
        """Forwards of both chunks, then their backwards; how far gradients are off, of 1."""
        self.run(self.chunks, step, flags)
        if self.context is not None:
            self.context.finish_grad_sync()
        self.run(self.reference, step, False)
        off = 0.0
        for chunk, reference in zip(self.chunks, self.reference, strict=True):
            for parameter, expected in zip(chunk.parameters(), reference.parameters(), strict=True):
                assert expected.grad is not None
                error = (parameter.grad.full_tensor() - expected.grad).norm()
                off = max(off, float(error / expected.grad.norm()))
        for models in (self.chunks, self.reference):
            for model in models:
                for parameter in model.parameters():
                    with torch.no_grad():
                        parameter -= 0.5 * parameter.grad
                    parameter.grad = None
        return off

    @staticmethod
    def run(chunks: list[Any], step: int, flags: bool) -> None:
        x, target = torch.randn(2, 4, DIM, generator=torch.Generator().manual_seed(step))
        inputs, outputs = [], []
        for chunk in chunks:
            inputs.append(x.detach().requires_grad_())
            x = chunk(inputs[-1])
            outputs.append(x)
        gradient = None
        outputs[-1] = F.mse_loss(outputs[-1], target)
        for index in reversed(range(len(chunks))):
            for chunk in chunks if flags else ():
                chunk.set_is_last_backward(index == 0)
            outputs[index].backward(gradient)
            gradient = inputs[index].grad


def _share_streams() -> dict[str, object]:
    found: dict[str, object] = {}
    try:
        _TwoChunks(context=False).step(0, flags=False)
        found["default flags"] = "ran"
    except Exception as error:
        found["default flags"] = type(error).__name__
    for name, chunks in {
        "is_last_backward set": _TwoChunks(context=False),
        "a context": _TwoChunks(context=True),
    }.items():
        try:
            flags = chunks.context is None
            found[name] = [chunks.step(step, flags) for step in range(3)]
        except Exception as error:
            found[name] = type(error).__name__
    return found


def test_torch_alone_trains_on_stale_weights_with_shared_streams_and_a_context_does_not(
    ranks: RankPools,
) -> None:
    for found in ranks(2).run(_share_streams):
        print(f"\nshare_comm_ctx(), two backwards, torch {torch.__version__}: {found}")
        ours, alone = found["a context"], found["is_last_backward set"]
        assert isinstance(ours, list)
        assert max(ours) < 1e-4
        if SEEN:
            assert found["default flags"] == "IndexError"
            assert isinstance(alone, list)
            assert alone[0] < 1e-4  # the first step is right, the second one's weights are old
            assert max(alone[1:]) > 0.01
