"""FSDP2 over tensor parallelism: units whose parameters are spread over other ranks, too."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fsdp_fx import FSDPContext
from fsdp_fx.compile.backend import fsdp_fx as backend
from ranks import RankPools

DIM = 8
ROWS = 4
MICROBATCHES = 3


@functools.cache  # the threads of process groups last as long as the rank, and do not sleep
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


class Block(nn.Module):
    def __init__(self, sequence: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)
        # Of no tensor-parallel module: each rank has the gradient of its rows only.
        self.scale = nn.Parameter(torch.ones(DIM), requires_grad=not sequence)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, sequence: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(sequence) for _ in range(3))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parallelize(model: Model, sequence: bool) -> None:
    """Tensor parallelism of each block, with its rows spread over the ranks if ``sequence``."""
    for block in model.blocks:
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            plan = {
                "norm": SequenceParallel(sequence_dim=0, use_local_output=True),
                "up": ColwiseParallel(input_layouts=Shard(0)),
                "down": RowwiseParallel(output_layouts=Shard(0)),
            }
            rows, whole = Shard(0), Replicate()
            inputs = PrepareModuleInput(
                input_layouts=whole, desired_input_layouts=rows, use_local_output=True
            )
            parallelize_module(block, mesh()["tp"], inputs)
            outputs = PrepareModuleOutput(output_layouts=rows, desired_output_layouts=whole)
            parallelize_module(block, mesh()["tp"], outputs)
        parallelize_module(block, mesh()["tp"], plan)


def shard(model: Model, policy: MixedPrecisionPolicy) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh()["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh()["dp"], mp_policy=policy)


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets by data-parallel rank and microbatch."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, 2, MICROBATCHES, ROWS, DIM, generator=generator)
    return inputs, targets


def full(tensor: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def _train(sequence: bool, options: dict[str, Any], orders: list[str]) -> None:
    torch.manual_seed(0)
    reference = Model(sequence)
    model = copy.deepcopy(reference)
    parallelize(model, sequence)
    shard(model, MixedPrecisionPolicy())
    context = FSDPContext(mode="recorded", **options)
    context.adopt(model)
    # A tensor-parallel unit gathers this rank's part of the parameters only.
    part = sum(p.numel() for p in reference.blocks[0].parameters())
    sizes = {unit.spec.name: unit.spec.elements for unit in context.units}
    assert sizes["c0.blocks.0"] < part
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, reference)]
    own = mesh().get_local_rank("dp")
    for step, order in enumerate(orders):
        inputs, targets = data(step)
        losses: list[torch.Tensor] = []
        for x, target in zip(inputs[own], targets[own], strict=True):
            losses.append(F.mse_loss(model(x), target))
            if order == "FBFB":
                losses.pop().backward()
        for loss in reversed(losses):
            loss.backward()
        context.finish_grad_sync()
        for rank in range(2):
            for x, target in zip(inputs[rank], targets[rank], strict=True):
                (F.mse_loss(reference(x), target) / 2).backward()
        for (name, parameter), expected in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            if parameter.requires_grad:
                torch.testing.assert_close(full(parameter.grad), expected.grad, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(parameter), expected.detach())
        assert context.stats.resident_bytes == 0
    assert context.stats.divergences == (0 if len(set(orders)) == 1 else 1)
    program = context.program
    assert program is not None
    with torch.no_grad():
        torch.testing.assert_close(model(data(0)[0][0, 0]), reference(data(0)[0][0, 0]))


@pytest.mark.parametrize("sequence", [False, True], ids=["rows", "sequence"])
def test_gradients_and_weights_equal_the_reference(ranks: RankPools, sequence: bool) -> None:
    fbfb = ["FBFB"] * 3
    ranks(4).run(_train, sequence, {}, fbfb)
    ranks(4).run(
        _train,
        sequence,
        {"memory_budget": 10_000, "reduce_gradients": "planned"},
        ["FFBB", "FFBB", "FBFB", "FBFB"],
    )
    ranks(4).run(_train, sequence, {"reduce_gradients": "per_window"}, fbfb)


def _compile() -> str:
    model = Model()
    parallelize(model, sequence=False)
    shard(model, MixedPrecisionPolicy())
    context = FSDPContext(mode="recorded")
    context.adopt(model)
    called: Any = torch.compile(model, backend=backend, options={"region_compiler": "eager"})
    x = data(0)[0][0, 0]
    with pytest.raises(Exception) as error:
        called(x)
    context.abort()
    # Eagerly the same model trains.
    model(x).sum().backward()
    context.finish_grad_sync()
    return str(error.value)


def test_a_captured_graph_with_tensor_parallel_parameters_is_refused_by_name(
    ranks: RankPools,
) -> None:
    for error in ranks(4).run(_compile):
        assert "of unit c0.blocks.0 is tensor-parallel" in error
        assert "leave the chunk eager" in error
