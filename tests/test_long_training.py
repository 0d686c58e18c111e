"""A model goes from context to context, eager and compiled, and trains on as if it were one.

What the options of one context do, other tests hold; here the modules, the optimizer and the
compiled graphs outlive it. `gpu/test_stress.py` has the same for longer, on streams.
"""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from long_training import Size, Stretch, Training, lives
from ranks import RankPools

SHORT = (
    Stretch("interleaved", 3, 3),
    Stretch("chunk_by_chunk", 2, 1),
    Stretch("interleaved", 3, 1),
)
LONG = (
    Stretch("interleaved", 4, 6),
    Stretch("one_by_one", 3, 4),
    Stretch("chunk_by_chunk", 4, 4),
    Stretch("interleaved", 4, 5),
)


FEW = (0, 2, 3, 5, 6, 8)  # of the lives


def _train(
    stretches: tuple[Stretch, ...],
    policy: str,
    compilers: tuple[str | None, ...],
    which: tuple[int, ...] | None = None,
) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    size = Size(width=16, layers=1, rows=1, length=6)
    training = Training(torch.device("cpu"), mesh, size, policy, dist.get_rank())
    all_lives = lives(stretches, "cpu", policy)
    chosen = all_lives if which is None else [all_lives[index] for index in which]
    for life, compiler in zip(chosen, cycle(compilers), strict=False):
        training.live(life, compiler)


def test_training_goes_on_from_context_to_context(ranks: RankPools) -> None:
    ranks(2).run(_train, SHORT, "fp32", (None, "eager"), FEW, timeout=240)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("compiler", [None, "eager", "inductor"])
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_long_training_goes_on_from_context_to_context(
    ranks: RankPools, policy: str, compiler: str | None
) -> None:
    ranks(2).run(_train, LONG, policy, (compiler,), timeout=1100)
