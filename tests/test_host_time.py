"""What an event costs on the host, beside FSDP2's own hooks.

Both run in one process, step by step in turn, on one rank, so that the collectives cost
next to nothing. The time of the same model without FSDP is taken off either.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_fx import FSDPContext
from ranks import RankPools

LAYERS, WIDTH, MICROBATCHES, STEPS = 12, 8, 2, 40
TRIES = 3  # repeated where another process took the cores


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def step(model: Callable[[torch.Tensor], torch.Tensor], close: Callable[[], None]) -> float:
    """Seconds of this process that a step of F B F B takes."""
    x = torch.ones(2, WIDTH)
    began = time.process_time()
    for _ in range(MICROBATCHES):
        model(x).sum().backward()
    close()
    return time.process_time() - began


def measure() -> tuple[float, float, float]:
    """Seconds per event of FSDP2 and of a replay, and the median of their ratios."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    bare = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    theirs, ours = copy.deepcopy(bare), copy.deepcopy(bare)
    for model in (theirs, ours):
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    context = FSDPContext(mode="recorded")
    context.adopt(ours)
    samples = [
        (
            step(theirs, lambda: None),
            step(ours, context.finish_grad_sync),
            step(bare, lambda: None),
        )
        for _ in range(STEPS + 3)
    ][3:]
    assert context.stats.recorded_windows == 1
    assert context.trace is not None
    events = len(context.trace)
    fsdp2 = statistics.median(theirs - bare for theirs, _, bare in samples) / events
    replay = statistics.median(ours - bare for _, ours, bare in samples) / events
    ratio = statistics.median((ours - bare) / (theirs - bare) for theirs, ours, bare in samples)
    return fsdp2, replay, ratio


def test_event_of_a_replay_costs_no_more_host_time_than_fsdp2s_hooks(
    ranks: RankPools, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(TRIES):
        ((fsdp2, replay, ratio),) = ranks(1).run(measure)
        with capsys.disabled():
            print(
                f"\nhost time per event: FSDP2 {fsdp2:.2e} s, replay {replay:.2e} s, ratio {ratio:.2f}"
            )
        if ratio <= 1:
            break
    assert ratio <= 1
