"""Input and weight halves of backwards on streams equal an unsharded reference.

Two ranks that share one GPU, or have one each. What a schedule calls is called by hand, so
that no rank sends anything to another.
"""

from __future__ import annotations

import copy
import tempfile
from collections import deque
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from staged import use_staged_collectives
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from fsdp_fx import FSDPContext
from fsdp_fx.pipelining import bind

GPUS = torch.cuda.device_count()
WORLD = 2
DIM = 1024
ROWS = 64
MICROBATCHES = 4
pytestmark = [
    pytest.mark.skipif(not GPUS, reason="needs a GPU"),
    pytest.mark.timeout(300),
]

# Forwards, input halves and weight halves, as a zero-bubble schedule may have them.
ORDER = "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _rank(rank: int, store: str, options: dict[str, Any]) -> None:
    device = torch.device("cuda", rank % GPUS)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if WORLD <= GPUS else "cpu:gloo,cuda:gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORLD,
    )
    mesh = init_device_mesh("cuda", (WORLD,))
    torch.manual_seed(0)
    whole = nn.Sequential(*(Block() for _ in range(6))).to(device)
    model: Any = copy.deepcopy(whole)
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    if WORLD > GPUS:
        use_staged_collectives(model)
    context = FSDPContext(mode="recorded", **options)
    context.adopt(model)
    alone = [dist.new_group([each]) for each in range(WORLD)][rank]
    stage: Any = PipelineStage(model, 0, 1, device, group=alone)
    bind(Schedule1F1B(stage, MICROBATCHES), context)
    optimizers = [torch.optim.SGD(each.parameters(), 1e-4) for each in (model, whole)]
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        inputs, gradients = torch.randn(2, WORLD, MICROBATCHES, ROWS, DIM, generator=generator).to(
            device
        )
        waiting: dict[str, Any] = {}
        halves: deque[Any] = deque()
        for action in ORDER.split():
            index = action[1]
            if action[0] == "F":
                x = inputs[rank, int(index)].clone().requires_grad_()
                waiting[index] = x, model(x)
            elif action[0] == "I":
                x, output = waiting.pop(index)
                (found,), half = stage.backward_maybe_with_nosync(
                    "input",
                    {
                        "stage_output": (output,),
                        "output_grads": (gradients[rank, int(index)],),
                        "input_values": [x],
                    },
                )
                assert half is not None
                assert found.shape == x.shape
                halves.append(half)
            else:
                stage.backward_maybe_with_nosync("weight", {"param_groups": halves.popleft()})
        context.finish_grad_sync()
        for x, gradient in zip(inputs.flatten(0, 1), gradients.flatten(0, 1), strict=True):
            whole(x).backward(gradient / WORLD)
        for one, expected in zip(model.parameters(), whole.parameters(), strict=True):
            shard = expected.grad.chunk(WORLD)[rank]
            torch.testing.assert_close(one.grad.to_local(), shard, atol=5e-3, rtol=1e-3)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert not context.fallbacks
    assert context.stats.replayed_windows == 5
    assert context.stats.resident_bytes == 0
    assert context.trace is not None
    assert len(context.trace) == 3 * MICROBATCHES * 6
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"memory_budget": "auto", "reduce_gradients": "planned"},
        {"reduce_gradients": "per_window"},
    ],
    ids=["default", "auto", "per_window"],
)
def test_split_backwards_on_streams_equal_the_reference(options: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (f"{folder}/store", options), nprocs=WORLD)
