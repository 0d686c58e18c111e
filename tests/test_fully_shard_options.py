"""What ``fully_shard`` was given, on a context: CPU offload, ``reshard_after_forward``."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fsdp_fx import FSDPContext
from fsdp_fx.compile.backend import fsdp_fx as backend
from models import DIM, cpu_mesh, linears
from test_semantics import at_rest, on_two_ranks


class Pair:
    """A model on a context, and the same model whole, trained alike.

    Args:
        shard: calls ``fully_shard``.
        options: of the context.
    """

    def __init__(self, shard: Callable[[Any], None], **options: Any) -> None:
        torch.manual_seed(0)
        self.whole = linears(4)
        self.model: Any = copy.deepcopy(self.whole)
        shard(self.model)
        self.context = FSDPContext(mode="recorded", **options)
        self.context.adopt(self.model)
        self.models = (self.model, self.whole)
        self.optimizers = [torch.optim.AdamW(each.parameters(), 0.01) for each in self.models]
        self.seed = 0

    def window(self, calls: str) -> None:
        """Run a window in this order, compare, and step."""
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        microbatches = calls.count("F")
        inputs = torch.randn(dist.get_world_size(), microbatches, 3, DIM, generator=generator)
        losses: dict[str, torch.Tensor] = {}
        for call in calls.split():
            phase, index = call
            if phase == "F":
                output = self.model(inputs[dist.get_rank(), int(index)])
                losses[index] = output.square().mean()
            else:
                losses.pop(index).backward()
        self.context.finish_grad_sync()
        for x in inputs.flatten(0, 1):
            (self.whole(x).square().mean() / dist.get_world_size()).backward()
        self.compare(lambda parameter: parameter.grad)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.compare(lambda parameter: parameter.detach())

    def compare(self, part: Callable[[Any], Any]) -> None:
        for one, expected in zip(self.model.parameters(), self.whole.parameters(), strict=True):
            tensor = part(one)
            assert isinstance(tensor, DTensor)
            torch.testing.assert_close(tensor.full_tensor(), part(expected))


# reshard_after_forward=False


def gathers(context: FSDPContext) -> Counter[str]:
    """How often the program gathers each unit."""
    assert context.program is not None
    nodes = context.program.graph.nodes
    return Counter(node.args[0] for node in nodes if node.name.startswith("gather"))


def some_stay(model: Any) -> None:
    for index in (0, 2, 4, 6):
        fully_shard(model[index], mesh=cpu_mesh(), reshard_after_forward=index not in (0, 4))


@on_two_ranks(budget=[None, 0, 10_000], compiled=[False, True])
def test_a_unit_that_is_not_resharded_after_its_forward_stays_until_its_next_use(
    budget: int | None, compiled: bool
) -> None:
    pair = Pair(some_stay, memory_budget=budget, forward_prefetch=0, backward_prefetch=0)
    if compiled:
        pair.model.compile(backend=backend, options={"region_compiler": "eager"})
    for calls in ("F0 F1 B0 B1", "F0 B0 F1 B1"):
        for _ in range(2):
            pair.window(calls)
        counts = gathers(pair.context)
        if budget == 10_000:
            assert set(counts.values()) == {1}
        else:
            # The first is also used twice in a row, which a budget of 0 makes use of.
            assert counts["c0.4"] == 2, counts
            assert counts["c0.0"] == (1 if budget == 0 and calls == "F0 B0 F1 B1" else 2), counts
            assert counts["c0.2"] == 4, counts
        assert pair.context.stats.resident_bytes == 0
    at_rest(pair.context)


def test_a_root_without_a_choice_is_not_kept(fake_group: dist.ProcessGroup) -> None:
    model = linears()
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=cpu_mesh())
    context = FSDPContext(mode="recorded")
    context.adopt(model)
    assert not any(unit.spec.kept_after_forward for unit in context.units)


def test_a_choice_made_after_fully_shard_counts(fake_group: dist.ProcessGroup) -> None:
    model: Any = linears()
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=cpu_mesh())
    model.set_reshard_after_forward(False)
    context = FSDPContext(mode="recorded")
    context.adopt(model)
    assert all(unit.spec.kept_after_forward for unit in context.units)


# CPU offload: here the device is the CPU, too; tests/gpu has the copies


@on_two_ranks(
    options=[
        {},
        {"memory_budget": 10_000, "reduce_gradients": "planned"},
        {"reduce_gradients": "per_window"},
    ],
    compiled=[False, True],
)
def test_offloaded_units_train_as_others(options: dict[str, Any], compiled: bool) -> None:
    def shard(model: Any) -> None:
        for module in (*(model[index] for index in (0, 2, 4, 6)), model):
            fully_shard(
                module,
                mesh=cpu_mesh(),
                offload_policy=CPUOffloadPolicy(pin_memory=False),
                mp_policy=MixedPrecisionPolicy(),
            )

    pair = Pair(shard, **options)
    if compiled:
        pair.model.compile(backend=backend, options={"region_compiler": "eager"})
    for calls in ("F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"):
        pair.window(calls)
    at_rest(pair.context)


@pytest.mark.usefixtures("fake_group")
def test_units_that_are_only_replicated_are_refused() -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    model = nn.Linear(DIM, DIM)
    replicate(model, mesh=cpu_mesh())
    with pytest.raises(ValueError, match="'root' is replicated and not sharded"):
        FSDPContext().adopt(model)


@pytest.mark.usefixtures("fake_group")
def test_a_part_of_a_model_that_plain_fsdp2_has_run_as_a_whole_is_refused() -> None:
    model: Any = nn.Sequential(linears(), nn.Linear(DIM, DIM))
    for module in (model[0][0], model[0], model):
        fully_shard(module, mesh=cpu_mesh())
    model(torch.ones(2, DIM)).sum().backward()
    context = FSDPContext(mode="recorded")
    with pytest.raises(ValueError, match="is inside of FSDPSequential, which plain FSDP2 has run"):
        context.adopt(model[0])
    model(torch.ones(2, DIM)).sum().backward()  # nothing was changed
    context.adopt(model)
    model(torch.ones(2, DIM)).sum().backward()
    context.finish_grad_sync()
    at_rest(context)
    context.release()
    FSDPContext(mode="recorded").adopt(model)
