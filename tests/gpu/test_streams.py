"""Training on GPUs, on streams, equals an unsharded reference.

Two ranks: over NCCL where there are two GPUs, through the host where they share one.
"""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from staged import use_staged_collectives

import training

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.skipif(not GPUS, reason="needs a GPU"),
    pytest.mark.timeout(600),
]


def _rank(rank: int, world_size: int, store: str, order: str, policy: str, compiler: str) -> None:
    torch.cuda.set_device(rank % GPUS)
    dist.init_process_group(
        "nccl" if world_size <= GPUS else "cpu:gloo,cuda:gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
    )
    setup = training.set_up(
        training.make_chunks(2, 3), policy, None if compiler == "hooks" else compiler
    )
    if world_size > GPUS:
        for chunk in setup.chunks:
            use_staged_collectives(chunk)
    context = setup.context
    tolerance = 1e-4 if policy == "fp32" else None
    actions = list(training.ORDERS[order](2, 4))
    for step in range(4):
        before = context.stats.on_demand_gathers
        setup.step(actions, training.make_data(step, 4), exact=False, tolerance=tolerance)
        if step:
            assert context.stats.on_demand_gathers == before + 1
    assert context.stats.replayed_windows == 3
    dist.destroy_process_group()


@pytest.mark.parametrize("compiler", ["hooks", "eager", "inductor"])
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
@pytest.mark.parametrize("order", ["chunk_by_chunk", "interleaved"])
def test_training_on_streams_equals_the_reference(order: str, policy: str, compiler: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (2, f"{folder}/store", order, policy, compiler), nprocs=2)
