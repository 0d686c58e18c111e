"""CPU offload, inputs from the host, and modules that are given back, on streams.

Two ranks that share one GPU, or have one each.
"""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from staged import use_staged_collectives
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fsdp_fx import FSDPContext
from fsdp_fx.compile.backend import fsdp_fx as backend

GPUS = torch.cuda.device_count()
WORLD = 2
DIM = 512
MICROBATCHES = 3
pytestmark = [
    pytest.mark.skipif(not GPUS, reason="needs a GPU"),
    pytest.mark.timeout(300),
]


def _rank(rank: int, store: str, offload: bool, compiler: str | None) -> None:
    torch.cuda.set_device(rank % GPUS)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if WORLD <= GPUS else "cpu:gloo,cuda:gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORLD,
    )
    mesh = init_device_mesh("cuda", (WORLD,))
    torch.manual_seed(0)
    whole = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
            for _ in range(4)
        )
    )
    model: Any = copy.deepcopy(whole).cuda()
    policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    if WORLD > GPUS:
        use_staged_collectives(model)
    context = FSDPContext(mode="recorded", memory_budget="auto", reduce_gradients="planned")
    context.adopt(model)
    if compiler is not None:
        model.compile(backend=backend, options={"region_compiler": compiler})
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-3) for each in (model, whole)]

    def step(seed: int, finish: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(WORLD, MICROBATCHES, 16, DIM, generator=generator)
        losses = [model(x).square().mean() for x in inputs[rank]]  # the inputs are on the host
        for loss in reversed(losses):
            assert loss.is_cuda
            loss.backward()
        if finish:
            context.finish_grad_sync()
        for x in inputs.flatten(0, 1):
            (whole(x).square().mean() / WORLD).backward()
        for one, expected in zip(model.parameters(), whole.parameters(), strict=True):
            assert isinstance(one.grad, DTensor)
            assert one.grad.device.type == ("cpu" if offload else "cuda")
            # Shards are compared: gloo cannot bring together what is on one GPU.
            shard = expected.grad.chunk(WORLD)[rank]
            torch.testing.assert_close(one.grad.to_local().cpu(), shard, atol=1e-5, rtol=1e-3)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    for seed in range(5):
        step(seed, finish=True)
    stats = context.stats
    assert stats.replayed_windows == 4
    assert stats.resident_bytes == 0
    if compiler is None:
        context.release()
        step(5, finish=False)
        assert stats.windows == 5
    dist.destroy_process_group()


@pytest.mark.parametrize("compiler", [None, "eager", "inductor"])
@pytest.mark.parametrize("offload", [False, True], ids=["resident", "offloaded"])
def test_training_equals_the_reference(offload: bool, compiler: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (f"{folder}/store", offload, compiler), nprocs=WORLD)
