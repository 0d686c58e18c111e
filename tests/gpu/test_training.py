"""Training on GPUs, over NCCL and streams, equals an unsharded reference.

Run ``python -m pytest tests/gpu`` on a machine with two GPUs or more.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parent.parent))

import training

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
    pytest.mark.timeout(600),
]


def _rank(rank: int, world_size: int, store: str, order: str, policy: str, compiler: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=world_size
    )
    torch.backends.cuda.matmul.allow_tf32 = False
    setup = training.set_up(
        training.make_chunks(2, 3), policy, None if compiler == "hooks" else compiler
    )
    context = setup.context
    tolerance = 1e-4 if policy == "fp32" else 2e-2
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
def test_training_over_nccl_equals_the_reference(order: str, policy: str, compiler: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (2, f"{folder}/store", order, policy, compiler), nprocs=2)
