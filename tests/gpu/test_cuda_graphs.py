"""A step is not captured into a CUDA graph: it is refused, and an ordinary one may follow."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_fx import FSDPContext

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_that_is_captured_is_refused_and_ten_ordinary_ones_follow(compiled: bool) -> None:
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("nccl", store=dist.FileStore(store.name, 1), rank=0, world_size=1)
        try:
            _capture(compiled)
        finally:
            dist.destroy_process_group()


def _capture(compiled: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
    mesh = init_device_mesh("cuda", (1,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    context = FSDPContext(mode="recorded")
    context.adopt(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = model
    if compiled:
        options: dict[str, str] = {"region_compiler": "eager"}
        run = torch.compile(model, backend="fsdp_fx", options=options)
    x = torch.randn(8, 64, device="cuda")

    def step() -> float:
        loss = run(x).square().mean()
        loss.backward()
        context.finish_grad_sync()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    first = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    gathers = context.stats.gathers
    with (
        pytest.raises(RuntimeError, match=r"captured into a CUDA graph.*torch\.cuda\.graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        run(x)
    torch.cuda.synchronize()
    assert context.stats.gathers == gathers
    context.abort()
    losses = [step() for _ in range(10)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < first
