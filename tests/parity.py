"""Trains a model three ways: whole, under FSDP2 alone, and under FSDP2 with a context.

What FSDP2 does alone is what has to happen with a context. Both compute the same sums in the
same order, so losses, gradients and weights of the two are equal bit for bit. The whole model
sees every rank's data and says, within a tolerance, that they are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fsdp_fx import FSDPContext
from models import DIM, Block, Chunk, cpu_mesh
from test_semantics import at_rest

Build = Callable[[], nn.Module]
Units = Callable[[Any], Iterable[Any]]
Loss = Callable[[Any, torch.Tensor], torch.Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

FP32 = MixedPrecisionPolicy()
UNCOMPILED: Any = {"region_compiler": "eager"}  # options of the backend


def batch(seed: int) -> torch.Tensor:
    """A microbatch of every rank: [ranks, batch, DIM]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dist.get_world_size(), 3, DIM, generator=generator)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model: what most tests make units of."""
    return [module for module in model.modules() if isinstance(module, Block)]


def mean_square(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).float().square().mean()
    return loss


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def built(build: Build, seed: int = 3) -> Any:
    torch.manual_seed(seed)
    return build()


def sharded(
    model: Any, units: Units = blocks, mesh: DeviceMesh | None = None, **options: Any
) -> Any:
    """The model, sharded by FSDP2."""
    mesh = mesh or cpu_mesh(dist.get_world_size())
    for unit in units(model):
        fully_shard(unit, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def assert_same(found: Any, wanted: Any, name: str = "") -> None:
    """Bit for bit the same: values, types, dtypes, and how they are sharded."""
    assert type(found) is type(wanted), (name, found, wanted)
    if isinstance(found, DTensor):
        assert found.placements == wanted.placements, name
        found, wanted = found.to_local(), wanted.to_local()
    if isinstance(found, torch.Tensor):
        torch.testing.assert_close(
            found, wanted, rtol=0, atol=0, equal_nan=True, msg=f"{name}: {{}}".format
        )
    elif isinstance(found, dict):
        assert list(found) == list(wanted), name
        for key in found:
            assert_same(found[key], wanted[key], f"{name}.{key}")
    elif isinstance(found, list | tuple):
        assert len(found) == len(wanted), name
        for index, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
            assert_same(mine, theirs, f"{name}[{index}]")
    else:
        assert found == wanted, (name, found, wanted)


def assert_same_models(
    ours: nn.Module, plain: nn.Module, read: Callable[[Any], Any] = lambda parameter: parameter
) -> None:
    """The parameters, or what ``read`` gives of each, are the same."""
    named = list(plain.named_parameters())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in named]
    for (name, mine), (_, theirs) in zip(ours.named_parameters(), named, strict=True):
        assert_same(read(mine), read(theirs), name)


class Trio:
    """The same model whole, under FSDP2 alone, and under FSDP2 with a context.

    Args:
        build: makes it; called with the same seed each time.
        units: which of its modules are units, besides the root.
        policy: for mixed precision.
        optimizer: makes an optimizer of a side's parameters.
        prepare: done to every side before it is sharded.
        configure: done to both sharded sides before the context adopts its own.
        compiled: whether the side with the context is compiled.
        tolerance: of the comparison with the whole model, relative by norm; None: there is
            no such comparison.
        sharding: further arguments of ``fully_shard``, from the model.
        options: of the context.
    """

    def __init__(
        self,
        build: Build = Chunk,
        units: Units = blocks,
        *,
        policy: MixedPrecisionPolicy = FP32,
        optimizer: MakeOptimizer = momentum,
        prepare: Callable[[Any], object] = lambda model: None,
        configure: Callable[[Any], object] = lambda model: None,
        compiled: bool = False,
        tolerance: float | None = 1e-5,
        sharding: Callable[[Any], dict[str, Any]] = lambda model: {},
        **options: Any,
    ) -> None:
        self.whole, self.plain, self.ours = (built(build) for _ in range(3))
        for model in (self.whole, self.plain, self.ours):
            prepare(model)
        for model in (self.plain, self.ours):
            sharded(model, units, mp_policy=policy, **sharding(model))
            configure(model)
        self.context = FSDPContext(**{"mode": "recorded", **options})
        self.context.adopt(self.ours)
        self.compiled = compiled
        self.call: Any = self.ours
        if compiled:
            self.call = torch.compile(self.ours, backend="fsdp_fx", options=UNCOMPILED)
        self.optimizers = [
            optimizer(list(model.parameters())) for model in (self.ours, self.plain, self.whole)
        ]
        self.keeps = options.get("reduce_gradients", "per_backward") != "per_backward"
        self.tolerance = tolerance
        # Never used, in a unit that is: zeros here (docs/gradients.md), None in FSDP2.
        self.zeros: set[str] = set()
        # FSDP2 leaves them alone: their gradients are this rank's, and not compared with the whole.
        self.local: set[str] = set()
        # What becomes of a gradient in both sharded sides, as against the mean over the ranks.
        self.factor = 1.0
        self.steps = 0

    def both(self) -> tuple[Any, Any]:
        """The sharded sides: ours, and FSDP2 alone."""
        return self.ours, self.plain

    def step(self, loss: Loss = mean_square, microbatches: int = 1) -> list[float]:
        """One training step of each side, compared; returns the losses."""
        losses = self.backwards(loss, microbatches)
        self.update()
        return losses

    def backwards(
        self,
        loss: Loss = mean_square,
        microbatches: int = 1,
        scale: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss,
    ) -> list[float]:
        """The forwards and backwards of a step on each side; compares losses and gradients."""
        self.steps += 1
        batches = [batch(100 * self.steps + index) for index in range(microbatches)]
        rank, ranks = dist.get_rank(), dist.get_world_size()
        losses: tuple[list[float], list[float]] = ([], [])
        for x in batches:
            value = loss(self.call, x[rank])
            losses[0].append(value.item())
            scale(value / microbatches).backward()
        if self.context.mode == "recorded":
            self.context.finish_grad_sync()
        for index, x in enumerate(batches):
            if self.keeps:
                self.plain.set_requires_gradient_sync(index == microbatches - 1)
            value = loss(self.plain, x[rank])
            losses[1].append(value.item())
            scale(value / microbatches).backward()
        if self.tolerance is not None:
            for x in batches:
                for part in x:
                    value = loss(self.whole, part) * self.factor
                    scale(value / microbatches / ranks).backward()
        assert losses[0] == losses[1], losses
        self.compare(lambda parameter: parameter.grad)
        return losses[0]

    def update(self) -> None:
        """The optimizers' steps; compares the weights."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.compare(lambda parameter: parameter)
        assert at_rest(self.context)

    def compare(self, read: Callable[[Any], Any]) -> None:
        """Compare what ``read`` gives of each parameter on the three sides."""
        theirs, whole = (dict(model.named_parameters()) for model in (self.plain, self.whole))
        assert [name for name, _ in self.ours.named_parameters()] == list(theirs)
        for name, mine in self.ours.named_parameters():
            found, wanted = read(mine), read(theirs[name])
            if name in self.zeros and wanted is None:
                assert found is not None, name
                assert not found.full_tensor().any(), name
                continue
            assert_same(found, wanted, name)
            if self.tolerance is not None and name not in self.local:
                self._close(found, read(whole[name]), name)

    def _close(self, found: Any, right: torch.Tensor | None, name: str) -> None:
        assert self.tolerance is not None
        assert (found is None) == (right is None), (name, found, right)
        if found is not None and right is not None:
            full = found.full_tensor() if isinstance(found, DTensor) else found
            error = (full - right).norm().item()
            scale = right.norm().item() + 1e-2 * right.numel() ** 0.5
            assert error <= self.tolerance * scale, (name, error, scale)
