"""Trains chunks on this rank and compares every step with an unsharded reference.

The reference holds the same chunks whole. For each microbatch it computes every rank's
gradient on that rank's data, averages over the ranks in the reduction dtype, and adds
the microbatches up in the order of their backwards: the arithmetic of FSDP2, so that
where the kernels are the same the results are, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fsdp_fx
from fsdp_fx.compile.backend import fsdp_fx as backend
from fsdp_fx.residency import Residency
from fsdp_fx.units import Unit

DEVICE = "cuda" if dist.is_nccl_available() and torch.cuda.is_available() else "cpu"
WIDTH = 16
VOCABULARY = 24

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


class Block(nn.Module):
    """A pre-norm transformer layer with one head."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.squeeze(1))
        return x + self.down(torch.relu(self.up(x)))


class Chunk(nn.Module):
    """A pipeline stage: layers, an embedding before the first, a head after the last."""

    def __init__(self, layers: int, first: bool, last: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if first else None
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY) if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


def make_chunks(count: int = 2, layers: int = 2) -> list[nn.Module]:
    torch.manual_seed(17)
    return [Chunk(layers, i == 0, i == count - 1).to(DEVICE) for i in range(count)]


def make_data(step: int, microbatches: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per microbatch, inputs and targets of every rank: [ranks, batch, length]."""
    generator = torch.Generator().manual_seed(1000 + step)
    size = (dist.get_world_size(), 2, 6)

    def draw() -> torch.Tensor:
        return torch.randint(0, VOCABULARY, size, generator=generator).to(DEVICE)

    return [(draw(), draw()) for _ in range(microbatches)]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.float().flatten(0, 1), target.flatten())


Action = tuple[str, int, int]  # "F" or "B", chunk, microbatch


def one_by_one(chunks: int, microbatches: int) -> Iterator[Action]:
    """F B F B: plain gradient accumulation."""
    for microbatch in range(microbatches):
        yield from (("F", chunk, microbatch) for chunk in range(chunks))
        yield from (("B", chunk, microbatch) for chunk in reversed(range(chunks)))


def chunk_by_chunk(chunks: int, microbatches: int) -> Iterator[Action]:
    """F F B B: every microbatch through a chunk before the next chunk."""
    for chunk in range(chunks):
        yield from (("F", chunk, microbatch) for microbatch in range(microbatches))
    for chunk in reversed(range(chunks)):
        yield from (("B", chunk, microbatch) for microbatch in range(microbatches))


def interleaved(chunks: int, microbatches: int) -> Iterator[Action]:
    """One forward, one backward, with as many microbatches in flight as chunks."""
    forwards = [("F", c, m) for m in range(microbatches) for c in range(chunks)]
    backwards = [("B", c, m) for m in range(microbatches) for c in reversed(range(chunks))]
    warm_up = min(chunks * chunks, len(forwards))
    yield from forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        yield backward
        yield forward
    yield from backwards[len(forwards) - warm_up :]


ORDERS: dict[str, Callable[[int, int], Iterator[Action]]] = {
    "one_by_one": one_by_one,
    "chunk_by_chunk": chunk_by_chunk,
    "interleaved": interleaved,
}


def run_actions(
    chunks: Sequence[Callable[..., torch.Tensor]],
    actions: Sequence[Action],
    data: Sequence[tuple[torch.Tensor, torch.Tensor]],
    rank: int,
) -> list[float]:
    """Runs a schedule in one process, as pipeline stages would: graphs end at chunks."""
    inputs: dict[tuple[int, int], torch.Tensor] = {}
    outputs: dict[tuple[int, int], torch.Tensor] = {}
    losses = []
    for kind, chunk, microbatch in actions:
        here, before, after = (chunk, microbatch), (chunk - 1, microbatch), (chunk + 1, microbatch)
        if kind == "F":
            if chunk == 0:
                inputs[here] = data[microbatch][0][rank]
            else:
                inputs[here] = outputs[before].detach().requires_grad_()
            outputs[here] = chunks[chunk](inputs[here])
        elif chunk == len(chunks) - 1:
            loss = loss_of(outputs.pop(here), data[microbatch][1][rank])
            losses.append(loss.item())
            loss.backward()
        else:
            outputs.pop(here).backward(inputs.pop(after).grad)
    return losses


class Reference:
    """The chunks whole, on every rank's data."""

    def __init__(self, chunks: Sequence[nn.Module], policy: MixedPrecisionPolicy) -> None:
        self.chunks = [copy.deepcopy(chunk) for chunk in chunks]
        self.policy = policy

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for chunk in self.chunks for p in chunk.parameters()]

    def accumulate(self, data: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Adds the gradients of the microbatches, in order."""
        world_size = dist.get_world_size()
        for microbatch in data:
            averages: list[torch.Tensor | None] | None = None
            for rank in range(world_size):
                local = self._gradients(microbatch, rank)
                if averages is None:
                    averages = local
                else:
                    for total, gradient in zip(averages, local, strict=True):
                        assert (total is None) == (gradient is None), "ranks differ"
                        if total is not None:
                            total += gradient
            assert averages is not None
            for parameter, total in zip(self.parameters, averages, strict=True):
                if total is None:
                    continue  # not used in this microbatch
                gradient = total / world_size
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad += gradient

    def _gradients(
        self, microbatch: tuple[torch.Tensor, torch.Tensor], rank: int
    ) -> list[torch.Tensor | None]:
        dtype = self.policy.param_dtype or torch.float32
        reduce_dtype = self.policy.reduce_dtype or dtype
        working = [copy.deepcopy(chunk).to(dtype) for chunk in self.chunks]
        for parameter in (p for chunk in working for p in chunk.parameters()):
            parameter.grad = None
        run_actions(working, list(one_by_one(len(working), 1)), [microbatch], rank)
        gradients: list[torch.Tensor | None] = []
        for parameter in (p for chunk in working for p in chunk.parameters()):
            gradient = parameter.grad
            gradients.append(gradient if gradient is None else gradient.to(reduce_dtype))
        return gradients


@dataclass
class Setup:
    """Sharded chunks on a context beside their reference."""

    context: fsdp_fx.FSDPContext
    chunks: list[nn.Module]
    callables: list[Callable[..., torch.Tensor]]
    reference: Reference
    optimizer: torch.optim.Optimizer
    reference_optimizer: torch.optim.Optimizer
    truth: Reference
    truth_optimizer: torch.optim.Optimizer

    def step(
        self,
        actions: Sequence[Action],
        data: Sequence[tuple[torch.Tensor, torch.Tensor]],
        exact: bool,
        tolerance: float | None = 1e-5,
    ) -> list[float]:
        """One training step, compared with the reference; returns the losses.

        Exactly; or within ``tolerance``, relative by norm; or, where that is None, no
        further from the same training in fp32 than twice what eager bf16 is in all, and
        in no parameter further than eight times.
        """
        losses = run_actions(self.callables, actions, data, dist.get_rank())
        self.context.finish_grad_sync()
        self.reference.accumulate(data)
        if tolerance is None:
            self.truth.accumulate(data)
        self.compare("gradient", lambda p: p.grad, exact, tolerance)
        for optimizer in (self.optimizer, self.reference_optimizer, self.truth_optimizer):
            optimizer.step()
            optimizer.zero_grad()
        self.compare("weight", lambda p: p, exact, tolerance)
        for unit in self.context.units:
            assert not any((unit.unsharded, unit.in_flight, unit.holds)), unit
        return losses

    @staticmethod
    def _shard(whole: torch.Tensor) -> torch.Tensor:
        """This rank's part, as FSDP2 cuts a parameter: in dimension 0, the last may be empty."""
        parts = torch.chunk(whole, dist.get_world_size(), dim=0)
        rank = dist.get_rank()
        return parts[rank] if rank < len(parts) else whole[:0]

    def compare(
        self, what: str, read: Callable[[Any], Any], exact: bool, tolerance: float | None
    ) -> None:
        squares = allowed_squares = 0.0
        named = [item for chunk in self.chunks for item in chunk.named_parameters()]
        for (name, parameter), expected, true in zip(
            named, self.reference.parameters, self.truth.parameters, strict=True
        ):
            value, wanted = read(parameter), read(expected)
            assert (value is None) == (wanted is None), f"{what} of {name}: {value} for {wanted}"
            if value is None:
                continue
            mine, wanted = value.to_local(), self._shard(wanted)
            if exact:
                assert torch.equal(mine, wanted), f"{what} of {name} differs: {mine - wanted}"
                continue
            # By norm: single elements near zero, sums that cancel, say little.
            scale = wanted.norm() + 1e-2 * wanted.numel() ** 0.5
            if tolerance is None:
                goal = self._shard(read(true))
                reference_error = (wanted - goal).norm()
                allowed = 8 * reference_error + 1e-3 * scale
                allowed_squares += (2 * reference_error + 1e-3 * scale).item() ** 2
            else:
                goal, allowed = wanted, tolerance * scale
            error = (mine - goal).norm()
            assert error <= allowed, f"{what} of {name} is off by {error}, {allowed} allowed"
            squares += error.item() ** 2
        if tolerance is None and not exact:
            total, allowed = squares**0.5, allowed_squares**0.5
            assert total <= allowed, f"{what}s are off by {total}, {allowed} allowed"


def set_up(
    chunks: list[nn.Module],
    policy: str = "fp32",
    region_compiler: Any = None,
    fullgraph: bool = True,
    shard: Callable[[nn.Module], Sequence[nn.Module]] = lambda chunk: chunk.layers,
    **options: Any,
) -> Setup:
    """Shards, adopts and, with a ``region_compiler``, compiles the chunks."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    reference, truth = Reference(chunks, POLICIES[policy]), Reference(chunks, POLICIES["fp32"])
    for chunk in chunks:
        for layer in shard(chunk):
            fully_shard(layer, mesh=mesh, mp_policy=POLICIES[policy])
        fully_shard(chunk, mesh=mesh, mp_policy=POLICIES[policy])
    context = fsdp_fx.FSDPContext(**{"mode": "recorded", **options})
    context.adopt(*chunks)
    callables: list[Callable[..., torch.Tensor]] = list(chunks)
    if region_compiler is not None:
        callables = [
            torch.compile(
                chunk,
                backend=backend,
                options={"region_compiler": region_compiler},
                fullgraph=fullgraph,
                dynamic=False,
            )
            for chunk in chunks
        ]
    parameters = [p for chunk in chunks for p in chunk.parameters()]

    def optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    return Setup(
        context,
        chunks,
        callables,
        reference,
        optimizer(parameters),
        optimizer(reference.parameters),
        truth,
        optimizer(truth.parameters),
    )


class AcquireSpy:
    """Writes down, for every use of a unit, whether it was there or on its way before."""

    def __init__(self) -> None:
        self.uses: list[tuple[str, bool]] = []

    def __enter__(self) -> AcquireSpy:
        self._acquire = acquire = Residency.acquire

        def spy(residency: Residency, unit: Unit) -> bool:
            self.uses.append((unit.spec.name, unit.unsharded or unit.in_flight))
            return acquire(residency, unit)

        Residency.acquire = spy  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Residency.acquire = self._acquire  # type: ignore[method-assign]
