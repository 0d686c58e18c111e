"""Stages of a pipeline whose backwards can, or cannot, be computed in two halves."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from pipeline_jobs import DIM, Block, Chunk
from test_owner_hooks import DelayedLinear


class Checkpointed(Chunk):
    """Each block but the first is run again in its backward."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.blocks
        x = first(x)
        for block in others:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.norm(x)


class Reentrant(Checkpointed):
    reentrant = True


class TwiceInBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


class Twice(Chunk):
    """A weight is used in two places of its block."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.blocks[0] = TwiceInBlock()


class TiedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.down.weight = self.up.weight


class Tied(Chunk):
    """Two linears of a block share their weight."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.blocks[0] = TiedBlock()


class Submodules(Chunk):
    """Calls what is in its first block itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.blocks
        x = x + first.down(torch.relu(first.up(x)))
        for block in others:
            x = block(x)
        return self.norm(x)


class PassesOn(Chunk):
    """One of its outputs is one of its inputs."""

    def forward(self, x: torch.Tensor, skipped: torch.Tensor | None = None) -> Any:
        y = super().forward(x)
        return (y, y * 1.5) if skipped is None else (y + skipped, skipped)


class TwoOfEach(Chunk):
    """Two inputs, two outputs; its blocks take both, and a keyword."""

    def __init__(self, blocks: int) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(TwoOfEachBlock() for _ in range(blocks))

    def forward(self, x: torch.Tensor, second: torch.Tensor | None = None) -> Any:
        second = x * 2 if second is None else second
        for block in self.blocks:
            x, second = block(x, scale=0.5, second=second)
        return self.norm(x + second), second * 2


class TwoOfEachBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, *, scale: float, second: torch.Tensor) -> Any:
        return x + self.left(second) * scale, second + torch.tanh(self.right(x))


class FrozenWeights(Chunk):
    """In every block one linear is frozen."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        for block in self.blocks:
            block.up.requires_grad_(False)


class FrozenBlocks(Chunk):
    """Every other block is frozen, and the norm."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        for block in self.blocks[::2]:
            block.requires_grad_(False)
        self.norm.requires_grad_(False)


class Adapted(nn.Module):
    """A frozen linear with a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM).requires_grad_(False)
        self.down, self.up = nn.Linear(DIM, 2, bias=False), nn.Linear(2, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.base(x) + self.up(self.down(x)))


class LowRank(Chunk):
    """LoRA: base and adapter in one unit; the norm is frozen."""

    def __init__(self, blocks: int) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(Adapted() for _ in range(blocks))
        self.norm.requires_grad_(False)


class Unused(Chunk):
    """The output of a block, and the weights of a linear, are not used."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.aside = Block()
        self.never = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aside(x)
        return super().forward(x)


class TwoDtypes(Chunk):
    """A unit with frozen weights in float64 and trained ones in float32."""

    def __init__(self, blocks: int) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(TwoDtypesBlock() for _ in range(blocks))


class TwoDtypesBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(DIM, DIM).double().requires_grad_(False)
        self.trained = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.trained(self.frozen(x.double()).float())


class Nested(Chunk):
    """The linears of a block are units inside of the block's."""

    def __init__(self, blocks: int) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(NestedBlock() for _ in range(blocks))


class NestedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class Apart(Chunk):
    """Hands on what comes of a weight alone, past all inputs; the third of them ends with it."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.table = nn.Parameter(torch.randn(DIM))

    def forward(self, x: torch.Tensor, *made: torch.Tensor) -> Any:
        y = super().forward(x)
        for each in made:
            y = y * each
        if len(made) == 2:
            return y
        return y, *(torch.sin(self.table).expand_as(y) * 2 for _ in range(1 + len(made)))


class Made(Chunk):
    """The weight of a block is made by a unit that no input goes through."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.maker = Block()
        self.seed = nn.Parameter(torch.randn(DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.tanh(F.linear(x, self.maker(self.seed))))


class _TwoResults(torch.autograd.Function):
    """Two products of its inputs, and nothing of the third; counts its backwards."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, other: torch.Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        return x * weight, x + 3 * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        first, second = gradients
        return first * weight + second, (first * x + 3 * second).sum(0), None


class TwoResultsBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.rand(DIM)), nn.Parameter(torch.rand(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = _TwoResults.apply(x, self.weight, self.other)
        return first + 2 * second


class TwoResults(Chunk):
    """A custom Function with two outputs, and a weight that it gives no gradient."""

    def __init__(self, blocks: int) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(TwoResultsBlock() for _ in range(blocks))


class Delayed(Chunk):
    """Its second block is a linear that can delay its weight gradient."""

    def __init__(self, blocks: int) -> None:
        super().__init__(2)
        linear = DelayedLinear()
        linear.weight = nn.Parameter(torch.randn(DIM, DIM) / DIM)
        linear.bias = nn.Parameter(torch.zeros(DIM))
        self.blocks[1] = linear


def shard_in_pairs(chunk: Any, mesh: DeviceMesh) -> None:
    """Two blocks are one unit."""
    fully_shard([chunk.blocks[0], chunk.blocks[1]], mesh=mesh)
    fully_shard(chunk, mesh=mesh)


def shard_linears(chunk: Any, mesh: DeviceMesh) -> None:
    """Linears are units inside of those of their blocks."""
    for block in chunk.blocks:
        for linear in (block.up, block.down, block):
            fully_shard(linear, mesh=mesh)
    fully_shard(chunk, mesh=mesh)


def shard_aside(chunk: Any, mesh: DeviceMesh) -> None:
    """What is beside the blocks is a unit, too."""
    for block in (*chunk.blocks, getattr(chunk, "aside", None) or chunk.maker):
        fully_shard(block, mesh=mesh)
    fully_shard(chunk, mesh=mesh)
