"""Which gradients are reduced when, whoever has them: every rank does the same, and sums are right.

Every window is compared with the same chunks whole, run on each rank's data in turn. What
a forward does may depend on the data, and so on the rank.
"""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param

from fsdp_fx import FSDPContext
from fsdp_fx.residency import Residency
from fsdp_fx.units import Unit
from ranks import RankPools

DIM = 6
LONG = 240.0
POLICIES = {
    "as they are": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
REDUCTIONS = ("per_backward", "per_window")
PREFETCHES: tuple[dict[str, Any], ...] = (
    {},
    {"forward_prefetch": 0, "backward_prefetch": 0},
)

Run = Callable[[Any, torch.Tensor], None]


def combinations(**cases: Sequence[Any]) -> list[dict[str, Any]]:
    return [dict(zip(cases, each, strict=True)) for each in product(*cases.values())]


def each(body: Callable[..., None], cases: Sequence[dict[str, Any]]) -> None:
    """Runs ``body`` for every case, in one job: starting one takes longer than most cases."""
    for arguments in cases:
        try:
            body(**arguments)
        except BaseException as error:
            error.add_note(f"case: {arguments}")
            raise


def batch(seed: int, rank: int) -> torch.Tensor:
    """Data whose first element tells on which side of a branch it goes: even ranks are positive."""
    x = torch.randn(3, DIM, generator=torch.Generator().manual_seed(100 * seed + rank))
    x[0, 0] = 1.0 if rank % 2 == 0 else -1.0
    return x


def branch(x: torch.Tensor) -> bool:
    """Whether this microbatch takes the branch."""
    return bool(x.flatten()[0] > 0)


def once(chunk: Any, x: torch.Tensor) -> None:
    chunk(x).float().square().mean().backward()


class Pair:
    """A chunk on a context, and the same chunk whole."""

    def __init__(
        self,
        chunk: nn.Module,
        units: Sequence[nn.Module | list[nn.Module]] = (),
        policy: MixedPrecisionPolicy | None = None,
        compiled: bool = False,
        root: bool = True,
        **options: Any,
    ) -> None:
        self.whole = copy.deepcopy(chunk)
        self.policy = policy or MixedPrecisionPolicy()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for unit in units:
            fully_shard(unit, mesh=mesh, mp_policy=self.policy)
        if root:
            fully_shard(chunk, mesh=mesh, mp_policy=self.policy)
        self.chunk: Any = chunk
        self.context = FSDPContext(**{"mode": "recorded", **options})
        self.context.adopt(chunk)
        self.model: Any = chunk
        if compiled:
            settings: Any = {"region_compiler": "eager"}
            self.model = torch.compile(chunk, backend="fsdp_fx", options=settings)
        self.optimizers = [
            torch.optim.SGD(module.parameters(), 0.1) for module in (self.chunk, self.whole)
        ]
        self.step = 0

    def both(self) -> tuple[Any, Any]:
        return self.chunk, self.whole

    def unit(self, name: str) -> Unit:
        return next(unit for unit in self.context.units if unit.spec.name == name)

    def window(self, run: Run = once, microbatches: int = 2) -> int:
        """Runs, closes and compares a window, then the optimizers; returns its reductions."""
        before = self.context.stats.reductions
        seeds = [10 * self.step + microbatch for microbatch in range(microbatches)]
        for seed in seeds:
            run(self.model, batch(seed, dist.get_rank()))
        self.context.finish_grad_sync()
        for seed in seeds:
            self.reference(run, seed)
        self.compare()
        spent = self.context.stats.reductions - before
        self.update()
        return spent

    def reference(self, run: Run, seed: int) -> None:
        world_size = dist.get_world_size()
        for rank in range(world_size):
            working = copy.deepcopy(self.whole)
            dtype = self.policy.param_dtype
            for parameter in working.parameters():
                parameter.grad = None
                if dtype is not None:
                    parameter.data = parameter.data.to(dtype)
            x = batch(seed, rank)
            run(working, x if dtype is None else x.to(dtype))
            for mine, worked in zip(self.whole.parameters(), working.parameters(), strict=True):
                if worked.grad is not None:
                    share = (worked.grad.float() / world_size).to(mine.dtype)
                    mine.grad = share if mine.grad is None else mine.grad + share

    def compare(self) -> None:
        """Zeros stand for None where the rule says so: trainable, in a unit with a backward."""
        trace = self.context.trace
        assert trace is not None
        reached = {event.unit for event in trace if event.phase == "B"}
        units = {id(p): u for u in self.context.units for p in u.sharded_parameters}
        wanted = dict(self.whole.named_parameters())
        for name, mine in self.chunk.named_parameters():
            expected = wanted[name].grad
            if expected is None:
                if mine.requires_grad and units[id(mine)].spec.name in reached:
                    expected = torch.zeros_like(wanted[name])
                else:
                    assert mine.grad is None, name
                    continue
            assert mine.grad is not None, name
            assert mine.grad.dtype == mine.dtype, name
            self.close(mine.grad.full_tensor(), expected, name)

    def close(self, found: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
        dtypes = {parameter.dtype for parameter in self.whole.parameters()}
        exact = self.policy.param_dtype is None and dtypes == {torch.float32}
        options: dict[str, Any] = {} if exact else {"rtol": 3e-2, "atol": 1e-2}
        torch.testing.assert_close(found, wanted, msg=f"{name}: {{}}".format, **options)

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        wanted = dict(self.whole.named_parameters())
        for name, mine in self.chunk.named_parameters():
            self.close(mine.full_tensor(), wanted[name], name)
        for unit in self.context.units:
            assert (unit.unsharded, unit.in_flight, unit.holds) == (False, False, 0), unit
            assert not unit.has_gradients, unit
            assert not unit.contributed, unit
        self.step += 1


# Gradients on some ranks only


class Gated(nn.Module):
    """A layer with a part that only some microbatches use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.gate = nn.Parameter(torch.randn(DIM))
        self.never = nn.Parameter(torch.randn(DIM))

    def forward(self, x: torch.Tensor, takes: bool) -> torch.Tensor:
        x = self.linear(x)
        return torch.tanh(x * self.gate if takes else x)


class Skipped(nn.Module):
    """A layer that some microbatches pass by unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, takes: bool) -> torch.Tensor:
        return torch.tanh(self.linear(x)) if takes else x


class First(nn.Module):
    """A layer that every microbatch uses: behind it, all that is passed on needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, takes: bool) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Branches(nn.Module):
    """A chunk with a part of its own that only some microbatches use."""

    def __init__(self, *layers: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for layer in layers)
        self.scale = nn.Parameter(torch.randn(DIM))
        self.takes = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        takes = self.takes
        for layer in self.layers:
            x = layer(x, takes)
        return x * self.scale if takes else x.clone()


def branching(chunk: Any, x: torch.Tensor) -> None:
    module = getattr(chunk, "_orig_mod", chunk)
    module.takes = branch(x)
    once(chunk, x)


STACKS = {
    "gated": (Gated, Gated),
    "one gated": (Gated,),
    "skipped": (First, Skipped, Gated, Skipped),
}


def _branches(stack: str, reduce: str, prefetch: dict[str, Any], compiled: bool) -> None:
    torch.manual_seed(1)
    chunk = Branches(*STACKS[stack])
    pair = Pair(chunk, list(chunk.layers), compiled=compiled, reduce_gradients=reduce, **prefetch)
    per_window = (2 if reduce == "per_backward" else 1) * len(pair.context.units)
    for _ in range(3):
        assert pair.window(branching) == per_window
    assert pair.context.stats.recorded_windows == 1


def test_unit_is_reduced_on_every_rank_whichever_rank_has_gradients(ranks: RankPools) -> None:
    cases = combinations(
        stack=["gated", "skipped"], reduce=REDUCTIONS, prefetch=PREFETCHES, compiled=[False]
    )
    ranks(2).run(each, _branches, cases, timeout=LONG)


def test_compiled_unit_is_reduced_on_every_rank_whichever_rank_has_gradients(
    ranks: RankPools,
) -> None:
    # Of one layer: the graphs of a branch may gather and reduce several in another order.
    cases = combinations(stack=["one gated"], reduce=REDUCTIONS, prefetch=[{}], compiled=[True])
    ranks(2).run(each, _branches, cases, timeout=LONG)


def _kept_in_one_dtype(reduce: str) -> None:
    """One parameter's gradient was kept from before, another's is new."""
    torch.manual_seed(1)
    chunk = Branches(Gated, Gated)
    pair = Pair(chunk, list(chunk.layers), policy=POLICIES["bf16"], reduce_gradients=reduce)
    takes = iter(range(10**6))

    def alternating(model: Any, x: torch.Tensor) -> None:
        x[0, 0] = 1.0 if pattern[next(takes) % len(pattern)] else -1.0
        branching(model, x)

    world_size = dist.get_world_size()
    for order in ((False, True, True), (True, False, False), (False, False, True)):
        # Both sides run the microbatches in turn: ours once each, the whole's for each rank.
        pattern = [*order, *(taken for taken in order for _ in range(world_size))]
        takes = iter(range(10**6))
        pair.window(alternating, microbatches=3)


def test_kept_and_new_gradients_of_one_unit_are_reduced_in_one_dtype(ranks: RankPools) -> None:
    ranks(2).run(each, _kept_in_one_dtype, combinations(reduce=REDUCTIONS), timeout=LONG)


def _kept_on_some_ranks(kept: torch.dtype, policy: MixedPrecisionPolicy) -> None:
    """One rank keeps a unit's gradients where the other has none."""
    torch.manual_seed(1)
    chunk = Branches(*STACKS["skipped"])
    pair = Pair(
        chunk,
        list(chunk.layers),
        policy=policy,
        reduce_gradients="per_window",
        kept_gradient_dtype=kept,
    )
    for _ in range(2):
        pair.window(branching)


def test_gradients_kept_in_another_dtype_are_reduced_in_their_own(ranks: RankPools) -> None:
    cases = combinations(
        kept=(torch.bfloat16, torch.float32, torch.float64),
        # Without a reduction dtype FSDP2 reduces in the dtype of what it is given.
        policy=(MixedPrecisionPolicy(torch.bfloat16), POLICIES["bf16"]),
    )
    ranks(2).run(each, _kept_on_some_ranks, cases, timeout=LONG)


class Added(nn.Module):
    """A layer that adds parameters: one tensor is the gradient of two."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(DIM, DIM) / DIM) for _ in range(2))
        self.first, self.second = (nn.Parameter(torch.zeros(DIM)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ (self.left + self.right) + self.first + self.second)


class Shift(nn.Module):
    """A layer whose gradient is that of the next one too."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros_like(batch(0, 0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


def _one_gradient_of_two(kept: torch.dtype | None, compiled: str) -> None:
    torch.manual_seed(1)
    chunk = nn.Sequential(Added(), Shift(), Shift(), Added())
    pair = Pair(
        chunk,
        list(chunk),
        compiled=True,
        reduce_gradients="per_window",
        kept_gradient_dtype=kept,
    )
    ways = iter(range(10**6))

    def run(model: Any, x: torch.Tensor) -> None:
        if model is pair.model and compiled[next(ways) % len(compiled)] == "e":
            model = pair.chunk
        once(model, x)

    for _ in range(2):
        pair.window(run, microbatches=4)


def test_gradient_of_two_parameters_is_added_to_as_that_of_each(ranks: RankPools) -> None:
    cases = combinations(kept=(None, torch.float32), compiled=("c", "ce", "ec", "ccee"))
    ranks(2).run(each, _one_gradient_of_two, cases, timeout=LONG)


def _inputs_only(stack: str, reduce: str) -> None:
    torch.manual_seed(1)
    chunk = Branches(*STACKS[stack])
    pair = Pair(chunk, list(chunk.layers), reduce_gradients=reduce)
    units = len(pair.context.units)

    def adversarial(model: Any, x: torch.Tensor) -> None:
        model.takes = branch(x)
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().mean(), x)
        model(x).square().mean().backward(inputs=[x])
        once(model, (x + gradient.sign()).detach())

    for _ in range(3):
        spent = pair.window(adversarial)
        assert spent == (2 * units if reduce == "per_backward" else units)

    def inputs_alone(model: Any, x: torch.Tensor) -> None:
        model.takes = branch(x)
        x = x.clone().requires_grad_()
        model(x).square().mean().backward(inputs=[x])

    before = pair.context.stats.reductions
    inputs_alone(pair.chunk, batch(0, dist.get_rank()))
    pair.context.finish_grad_sync()
    assert pair.context.stats.reductions == before
    assert all(parameter.grad is None for parameter in pair.chunk.parameters())


def test_pass_that_accumulates_nothing_reduces_nothing_on_any_rank(ranks: RankPools) -> None:
    cases = combinations(stack=["gated", "skipped"], reduce=REDUCTIONS)
    ranks(2).run(each, _inputs_only, cases, timeout=LONG)


class Weighted(nn.Module):
    """Takes the gradient of its own weight inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.fc1(x))
        (gradient,) = torch.autograd.grad(inner.square().sum(), self.fc1.bias, retain_graph=True)
        return self.fc2(inner * gradient.tanh())


def _own_weight() -> None:
    chunk = Weighted()
    pair = Pair(chunk)
    for _ in range(3):
        assert pair.window() == 2


def test_gradient_of_a_parameter_taken_inside_the_forward_is_no_contribution(
    ranks: RankPools,
) -> None:
    ranks(2).run(_own_weight)


class Uses(nn.Module):
    """Uses ``fc`` twice; the second use is not in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head, self.other = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.fc(x))
        self.fc(x)
        return self.head(x)


def _one_use_in_the_loss(reduce: str) -> None:
    chunk = Uses()
    pair = Pair(chunk, [chunk.fc, chunk.head, chunk.other], root=False, reduce_gradients=reduce)
    for _ in range(3):
        pair.window()


def test_unit_of_which_a_use_is_not_in_the_loss_is_reduced_by_the_close(ranks: RankPools) -> None:
    ranks(2).run(each, _one_use_in_the_loss, combinations(reduce=REDUCTIONS))


# Several dtypes


class Mixed(nn.Module):
    """A layer with parameters of several dtypes, of which the gate is not always used."""

    def __init__(self, half: bool = False) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(DIM))
        self.linear = nn.Linear(DIM, DIM, dtype=torch.bfloat16)
        self.shift = nn.Parameter(torch.randn(DIM, dtype=torch.float16)) if half else None

    def forward(self, x: torch.Tensor, takes: bool = True) -> torch.Tensor:
        x = self.linear(x.to(self.linear.weight.dtype)).to(self.gate.dtype)
        if self.shift is not None:
            x = x + self.shift
        return torch.tanh(x * self.gate if takes else x)


class MixedStack(nn.Module):
    def __init__(self, half: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixed(half) for _ in range(2))
        self.takes = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.takes)
        return x


def _mixed_dtypes(policy: str, reduce: str, compiled: bool) -> None:
    torch.manual_seed(2)
    chunk = MixedStack()
    names = [name for name, _ in chunk.named_parameters()]
    pair = Pair(
        chunk,
        list(chunk.layers),
        policy=POLICIES[policy],
        compiled=compiled,
        reduce_gradients=reduce,
        root=False,
    )
    assert [unit.spec.name for unit in pair.context.units] == [
        f"c0.layers.{index}[{dtype}]" for index in range(2) for dtype in ("bfloat16", "float32")
    ]
    assert [name for name, _ in pair.chunk.named_parameters()] == names
    numbers = iter(range(10**6))

    def third(model: Any, x: torch.Tensor) -> None:
        module = getattr(model, "_orig_mod", model)
        module.takes = pattern[next(numbers)]
        once(model, x)

    world_size = dist.get_world_size()
    order = (False, False, True)
    pattern = [*order, *(taken for taken in order for _ in range(world_size))]
    for step in range(3):
        numbers = iter(range(10**6))
        spent = pair.window(third, microbatches=3)
        # A graph that does not use a unit's parameters has no event of the unit.
        gates = 1 if compiled else 3
        assert spent == (2 * 3 + 2 * gates if reduce == "per_backward" else 4)
        for name, parameter in pair.chunk.named_parameters():
            assert parameter.dtype == (torch.bfloat16 if "linear" in name else torch.float32), name
        assert pair.context.stats.replayed_windows == step
    whole = pair.chunk.state_dict()
    assert list(whole) == names
    assert all(torch.isfinite(value.full_tensor()).all() for value in whole.values())


def test_parameters_of_several_dtypes_in_one_layer_are_a_unit_each(ranks: RankPools) -> None:
    cases = combinations(policy=list(POLICIES), reduce=REDUCTIONS, compiled=[False])
    ranks(2).run(each, _mixed_dtypes, cases, timeout=LONG)


def test_compiled_parameters_of_several_dtypes_in_one_layer_are_a_unit_each(
    ranks: RankPools,
) -> None:
    cases = combinations(policy=list(POLICIES), reduce=REDUCTIONS, compiled=[True])
    ranks(2).run(each, _mixed_dtypes, cases, timeout=LONG)


def _registration() -> None:
    torch.manual_seed(2)
    chunk = MixedStack()
    pair = Pair(chunk, list(chunk.layers), mode="registration", root=False)
    for _ in range(3):
        assert pair.window(microbatches=1) == 4
    assert pair.context.stats.replayed_windows == 3
    assert pair.context.stats.divergences == 0


def test_units_of_one_layer_are_in_the_order_known_before_anything_runs(ranks: RankPools) -> None:
    ranks(2).run(_registration)


RANK_OF_ITS_OWN = """
import datetime, os, sys
sys.path.insert(0, {tests!r})
import torch, torch.distributed as dist
rank = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group(
    "gloo",
    store=dist.FileStore({store!r}, 2),
    rank=rank,
    world_size=2,
    timeout=datetime.timedelta(seconds=30),
)
import test_gradients
torch.manual_seed(2)
chunk = test_gradients.MixedStack(half=True)
pair = test_gradients.Pair(chunk, list(chunk.layers), root=False)
collectives = test_gradients.Collectives()
with collectives:
    for _ in range(2):
        assert pair.window() == 2 * 6
print(hash("a string"), "|", *(unit.spec.name for unit in pair.context.units), *collectives.seen)
sys.stdout.flush()
os._exit(0)  # a thread of gloo that lets go of its last tensor meanwhile would abort the process
"""


class Collectives:
    """Writes down which units are gathered and reduced, in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __enter__(self) -> Collectives:
        self._patches = contextlib.ExitStack()
        for name in ("gather", "reduce"):
            self._watch(name)
        return self

    def _watch(self, name: str) -> None:
        original = getattr(Unit, name)

        def spy(unit: Unit, *arguments: Any) -> Any:
            self.seen.append(f"{name}:{unit.spec.name}")
            return original(unit, *arguments)

        setattr(Unit, name, spy)
        self._patches.callback(setattr, Unit, name, original)

    def __exit__(self, *_: object) -> None:
        self._patches.close()


def test_units_and_collectives_are_in_one_order_under_any_hash_seed(tmp_path: Path) -> None:
    script = RANK_OF_ITS_OWN.format(tests=str(Path(__file__).parent), store=str(tmp_path / "store"))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONHASHSEED": str(11 + rank),
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
            },
        )
        for rank in range(2)
    ]
    try:
        answers = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, answers, strict=True):
        assert process.returncode == 0, errors
    hashes, orders = zip(*(output.strip().split(" | ") for output, _ in answers), strict=True)
    assert hashes[0] != hashes[1]
    assert orders[0] == orders[1]
    assert orders[0].split()[:3] == [
        f"c0.layers.0[{dtype}]" for dtype in ("bfloat16", "float32", "float16")
    ]
    assert orders[0].count("reduce:") == 2 * 2 * 6


# Freezing and unfreezing


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.scale = nn.Parameter(torch.randn(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale


def _train(pair: Pair, which: Callable[[Any], Sequence[nn.Parameter]], flag: bool) -> None:
    for module in pair.both():
        for parameter in which(module):
            parameter.requires_grad_(flag)


PARTS: dict[str, Callable[[Any], Sequence[nn.Parameter]]] = {
    "a parameter": lambda module: [module.layers[1].weight],
    "a unit": lambda module: list(module.layers[1].parameters()),
    "the first unit": lambda module: list(module.layers[0].parameters()),
    "all but one unit": lambda module: [p for m in module.layers[:2] for p in m.parameters()],
}


def _freezes(part: str, policy: str, reduce: str, frozen_first: bool) -> None:
    torch.manual_seed(3)
    chunk = Plain()
    which = PARTS[part]
    if frozen_first:
        for parameter in which(chunk):
            parameter.requires_grad_(False)
    pair = Pair(chunk, list(chunk.layers), policy=POLICIES[policy], reduce_gradients=reduce)
    microbatches = 2 if reduce == "per_backward" else 1
    for frozen in (frozen_first, not frozen_first, frozen_first, frozen_first, not frozen_first):
        _train(pair, which, not frozen)
        trained = sum(
            any(p.requires_grad for p in unit.sharded_parameters) for unit in pair.context.units
        )
        assert pair.window() == trained * microbatches
        assert all(unit.spec.trainable == unit.trainable for unit in pair.context.units)


def test_freezing_and_unfreezing_between_windows_reduces_what_is_trained(
    ranks: RankPools,
) -> None:
    cases = combinations(
        part=list(PARTS), policy=list(POLICIES), reduce=REDUCTIONS, frozen_first=[False, True]
    )
    ranks(2).run(each, _freezes, cases, timeout=LONG)


def _all_frozen(policy: str, reduce: str) -> None:
    torch.manual_seed(3)
    chunk = Plain().to(torch.bfloat16)
    chunk.requires_grad_(False)
    pair = Pair(chunk, list(chunk.layers), policy=POLICIES[policy], reduce_gradients=reduce)

    def by_input(model: Any, x: torch.Tensor) -> None:
        once(model, x.to(torch.bfloat16).requires_grad_())

    for trains, reductions in ((False, 0), (True, 4), (False, 0), (True, 4)):
        _train(pair, lambda module: list(module.parameters()), trains)
        spent = pair.window(by_input)
        assert spent == (2 * reductions if reduce == "per_backward" else reductions)


def test_model_that_was_all_frozen_at_adoption_trains_once_it_is_not(ranks: RankPools) -> None:
    ranks(2).run(each, _all_frozen, combinations(policy=list(POLICIES), reduce=REDUCTIONS))


def _in_the_middle(part: str, policy: str, reduce: str, frozen_first: bool) -> None:
    torch.manual_seed(3)
    chunk = Plain()
    which = PARTS[part]
    pair = Pair(chunk, list(chunk.layers), policy=POLICIES[policy], reduce_gradients=reduce)
    for _ in range(3):
        _train(pair, which, not frozen_first)
        for seed in range(2):
            if seed:
                _train(pair, which, frozen_first)
            once(pair.chunk, batch(seed, dist.get_rank()))
            pair.reference(once, seed)
        pair.context.finish_grad_sync()
        for unit in pair.context.units:
            assert not unit.has_gradients
        wanted = dict(pair.whole.named_parameters())
        for name, mine in pair.chunk.named_parameters():
            expected = wanted[name].grad
            assert mine.grad is not None, name
            assert expected is not None, name
            pair.close(mine.grad.full_tensor(), expected, name)
        pair.update()


def test_freezing_and_unfreezing_inside_a_window_reduces_by_its_close(ranks: RankPools) -> None:
    cases = combinations(
        part=list(PARTS), policy=list(POLICIES), reduce=REDUCTIONS, frozen_first=[False, True]
    )
    ranks(2).run(each, _in_the_middle, cases, timeout=LONG)


def _unfreezes_another_dtype() -> None:
    chunk = Mixed()
    chunk.gate.requires_grad_(False)
    pair = Pair(chunk)
    assert [unit.spec.name for unit in pair.context.units] == ["c0"]
    pair.window()
    pair.chunk.gate.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"unit c0: .*float32.*before adopt\(\)") as error:
        pair.window()
    assert "\n" not in str(error.value)


def test_unfreezing_a_parameter_of_another_dtype_says_what_to_do(ranks: RankPools) -> None:
    ranks(2).run(_unfreezes_another_dtype)


# Uneven and empty shards


class Odd(nn.Module):
    """Dimensions that no number of ranks divides, and parameters of a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 13)
        self.down = nn.Linear(13, DIM, bias=False)
        self.one = nn.Parameter(torch.randn(1))
        self.three = nn.Parameter(torch.randn(3, 1, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.down(torch.tanh(self.up(x)))) * self.one
        return x + self.three.mean(dim=(0, 1))


def _uneven(policy: str, reduce: str) -> None:
    torch.manual_seed(4)
    chunk = nn.Sequential(Odd(), nn.Linear(DIM, DIM), Odd())
    pair = Pair(chunk, [chunk[0], chunk[2]], policy=POLICIES[policy], reduce_gradients=reduce)
    sizes = {name: p.to_local().numel() for name, p in pair.chunk.named_parameters()}
    if dist.get_rank() == dist.get_world_size() - 1:
        assert sizes["0.one"] == 0
    for _ in range(3):
        assert pair.window() == 3 * (2 if reduce == "per_backward" else 1)


@pytest.mark.parametrize("world_size", [2, 8])
def test_uneven_and_empty_shards_train(ranks: RankPools, world_size: int) -> None:
    cases = combinations(policy=list(POLICIES), reduce=REDUCTIONS)
    if world_size > 2:  # each of both once
        cases = cases[::3]
    ranks(world_size).run(each, _uneven, cases, timeout=LONG)


@pytest.mark.usefixtures("fake_group")
def test_scalar_parameters_are_refused_by_fsdp2_itself() -> None:
    module = nn.Module()
    module.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="scalar"):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))


# Tied weights


class Tied(nn.Module):
    """Embedding and head are one parameter; the graph is cut at both ends of the body."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, DIM)
        self.body = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.cut = cut

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.embedded = self.embedding(tokens)
        self.taken = self.embedded.detach().requires_grad_() if self.cut else self.embedded
        self.hidden = torch.tanh(self.body(self.taken))
        self.given = self.hidden.detach().requires_grad_() if self.cut else self.hidden
        return self.head(self.given)


def tokens_of(x: torch.Tensor) -> torch.Tensor:
    return (x.bfloat16() * 10).long() % 8  # the reference may be given them in bf16


def in_passes(model: Any, x: torch.Tensor, note: Callable[[str], None]) -> None:
    tokens = tokens_of(x)
    loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
    note("head")
    loss.backward()
    if model.cut:
        note("body")
        model.hidden.backward(model.given.grad)
        note("embedding")
        model.embedded.backward(model.taken.grad)


class Order:
    """Writes down the reductions of a unit, among what else is noted."""

    def __init__(self, pair: Pair, name: str) -> None:
        self.seen: list[str] = []
        self._unit = pair.unit(name)

    def __enter__(self) -> Order:
        self._reduce = reduce = Residency.reduce

        def spy(residency: Residency, unit: Unit, *arguments: Any) -> None:
            if unit is self._unit:
                self.seen.append("reduce")
            reduce(residency, unit, *arguments)

        Residency.reduce = spy  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        Residency.reduce = self._reduce  # type: ignore[method-assign]


def _tied(cut: bool, how: str, reduce: str, microbatches: int, policy: str) -> None:
    torch.manual_seed(5)
    chunk = Tied(cut)
    units: list[Any] = [chunk.body]
    if how == "one fully_shard call for both":
        units.append([chunk.embedding, chunk.head])
    pair = Pair(chunk, units, policy=POLICIES[policy], reduce_gradients=reduce)
    name = next(u.spec.name for u in pair.context.units if u.spec.elements == 8 * DIM)
    model = pair.chunk
    assert model.head.weight is model.embedding.weight
    passes = ["head", "body", "embedding"] if cut else ["head"]
    if reduce == "per_backward":
        expected = [*passes, "reduce"] * microbatches
    else:
        expected = [*(passes * microbatches), "reduce"]
    for step in range(3):
        order = Order(pair, name)

        def watched(model: Any, x: torch.Tensor, order: Order = order) -> None:
            in_passes(model, x, order.seen.append if model is pair.chunk else lambda _: None)

        with order:
            spent = pair.window(watched, microbatches)
        assert order.seen == expected
        assert spent == 2 * (microbatches if reduce == "per_backward" else 1)
        assert pair.context.stats.replayed_windows == step
        assert model.head.weight is model.embedding.weight


HOWS = ("the root's own", "one fully_shard call for both")


def test_tied_weights_are_reduced_once_after_all_contributions(ranks: RankPools) -> None:
    cases = combinations(
        cut=[True, False],
        how=HOWS,
        reduce=REDUCTIONS,
        microbatches=[1, 3],
        policy=list(POLICIES),
    )
    ranks(2).run(each, _tied, cases, timeout=LONG)


def knows_originals() -> bool:
    """Whether this torch tells which parameter a sharded one was."""
    return hasattr(_fsdp_param, "_get_orig_param_uid")


@pytest.mark.usefixtures("fake_group")
@pytest.mark.skipif(not knows_originals(), reason="torch does not tell what was tied")
@pytest.mark.parametrize("together", [True, False], ids=["in one adopt()", "in two"])
def test_parameter_tied_across_chunks_is_refused_by_name(together: bool) -> None:
    mesh = init_device_mesh("cpu", (2,))
    first, middle, last = nn.Embedding(8, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 8, bias=False)
    last.weight = first.weight
    chunks = [nn.Sequential(module) for module in (first, middle, last)]
    for chunk in chunks:
        fully_shard(chunk, mesh=mesh)
    context = FSDPContext(mode="recorded")
    before, after = ([], chunks) if together else (chunks[:2], chunks[2:])
    if before:
        context.adopt(*before)
    with pytest.raises(ValueError, match=r"'weight' of unit c2 was tied to 'weight' of") as error:
        context.adopt(*after)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.skipif(not knows_originals(), reason="torch does not tell what was tied")
def test_parameter_tied_across_units_of_a_chunk_is_refused_by_name() -> None:
    mesh = init_device_mesh("cpu", (2,))
    chunk = Tied(cut=False)
    fully_shard(chunk.embedding, mesh=mesh)
    fully_shard(chunk, mesh=mesh)
    with pytest.raises(
        ValueError, match=r"'weight' of unit c0.embedding was tied to 'weight' of unit c0,"
    ):
        FSDPContext(mode="recorded").adopt(chunk)
