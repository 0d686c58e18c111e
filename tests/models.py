"""Small models and how tests shard them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

DIM = 6


class Block(nn.Module):
    """Two linears and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Chunk(nn.Module):
    """Some blocks, and a norm that belongs to the chunk's own unit."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def linears(count: int = 2) -> nn.Sequential:
    """Linears with an activation after each: smooth, so that sums compare well."""
    layers: list[nn.Module] = []
    for _ in range(count):
        layers += [nn.Linear(DIM, DIM), nn.Tanh()]
    return nn.Sequential(*layers)


def cpu_mesh(size: int = 2) -> DeviceMesh:
    """The mesh of a default group of this size."""
    return init_device_mesh("cpu", (size,))


def shard(
    module: nn.Module,
    types: type[nn.Module] | tuple[type[nn.Module], ...] = (Block, Chunk),
    **options: Any,
) -> nn.Module:
    """Call ``fully_shard`` on every module of these types in ``module``, children first."""
    options.setdefault("mesh", cpu_mesh())
    for child in reversed(list(module.modules())):
        if isinstance(child, types):
            fully_shard(child, **options)
    return module
