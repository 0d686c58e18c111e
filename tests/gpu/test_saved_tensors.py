"""Activations that are moved to the host on a GPU, where a parameter's memory is really gone."""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_fx import FSDPContext

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _gradients(region_compiler: str, offloads: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))).cuda()
    mesh = init_device_mesh("cuda", (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    context = FSDPContext(mode="recorded")
    context.adopt(model)
    options: Any = {"region_compiler": region_compiler}
    run = torch.compile(model, backend="fsdp_fx", options=options)
    x = torch.randn(32, 64, device="cuda")
    for _ in range(3):
        model.zero_grad()
        with torch.autograd.graph.save_on_cpu() if offloads else contextlib.nullcontext():
            loss = run(x).square().mean()
        loss.backward()
        context.finish_grad_sync()
    assert context.stats.replayed_windows == 2
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


@pytest.mark.parametrize("region_compiler", ["eager", "inductor"])
def test_activations_on_the_host_give_the_same_gradients(region_compiler: str) -> None:
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("nccl", store=dist.FileStore(store.name, 1), rank=0, world_size=1)
        try:
            expected = _gradients(region_compiler, offloads=False)
            for found, wanted in zip(
                _gradients(region_compiler, offloads=True), expected, strict=True
            ):
                assert torch.equal(found, wanted)
        finally:
            dist.destroy_process_group()
