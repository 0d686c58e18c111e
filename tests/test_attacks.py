"""Small models and orders that broke something once; each test names the rule that it broke."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fsdp_fx
from ranks import RankPools

DIM = 8
LONG = 180.0


def compiled(module: Any, name: Any = "fsdp_fx") -> Any:
    """The module, or a function, through ``torch.compile``; ours without Inductor."""
    options: Any = {"region_compiler": "eager"} if name == "fsdp_fx" else None
    return torch.compile(module, backend=name, options=options)


def batch(rank: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(10 * seed + rank))


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def once(chunk: Any, rank: int, seed: int = 0) -> None:
    """One microbatch."""
    mean_square(chunk(batch(rank, seed))).backward()


class Stack(nn.Module):
    """Units in a row."""

    def __init__(self, make: Callable[[], nn.Module] = lambda: nn.Linear(DIM, DIM)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Pair:
    """A chunk on a context and the same chunk whole."""

    def __init__(self, chunk: nn.Module, units: Sequence[nn.Module], **options: Any) -> None:
        self.whole = copy.deepcopy(chunk)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for unit in units:
            fully_shard(unit, mesh=mesh)
        self.chunk: Any = fully_shard(chunk, mesh=mesh)
        self.context = fsdp_fx.FSDPContext(**{"mode": "recorded", **options})
        self.context.adopt(chunk)

    def window(self, run: Callable[..., None] = once, on: Any = None) -> None:
        """Runs, closes, and compares the gradients with those of all ranks' data."""
        run(self.chunk if on is None else on, dist.get_rank())
        self.context.finish_grad_sync()
        for rank in range(dist.get_world_size()):
            run(self.whole, rank)
        for mine, theirs in zip(self.chunk.parameters(), self.whole.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                wanted = theirs.grad / dist.get_world_size()
                torch.testing.assert_close(mine.grad.full_tensor(), wanted)
            mine.grad = theirs.grad = None
        for unit in self.context.units:
            assert (unit.unsharded, unit.in_flight, unit.holds) == (False, False, 0), unit


class Scaled(nn.Module):
    """Changes what its child returned in place, and returns that."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.randn(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        y *= self.scale
        return y


def _scales_in_place() -> None:
    chunk = Stack(Scaled)
    units = [m for m in reversed(list(chunk.modules())) if isinstance(m, nn.Linear | Scaled)]
    pair = Pair(chunk, units)
    for _ in range(3):
        pair.window()


def test_backward_of_a_module_that_changes_its_childs_output_in_place_begins_first(
    ranks: RankPools,
) -> None:
    ranks(2).run(_scales_in_place)


class Silent(nn.Module):
    """A unit that returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM), requires_grad=False)

    def forward(self, x: torch.Tensor) -> None:
        self.seen = (x.detach() * self.weight).sum().item()


class Watched(nn.Module):
    """A unit beside one that returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.watch = Silent()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.watch(x)
        return x


def _retries_in_a_handler() -> None:
    chunk = Watched()
    pair = Pair(chunk, [chunk.linear, chunk.watch])
    try:
        raise ValueError("the first attempt")
    except ValueError:
        pair.window()


def test_forward_that_returns_none_in_an_exception_handler_has_not_failed(
    ranks: RankPools,
) -> None:
    ranks(2).run(_retries_in_a_handler)


def _input_gradients(reduce: str) -> None:
    chunk = Stack()
    pair = Pair(chunk, list(chunk.layers), reduce_gradients=reduce)

    def adversarial(chunk: Any, rank: int) -> None:
        for seed in range(2):
            x = batch(rank, seed).requires_grad_()
            (gradient,) = torch.autograd.grad(mean_square(chunk(x)), x)
            mean_square(chunk((x + gradient.sign()).detach())).backward()
            mean_square(chunk(x)).backward(inputs=[x])

    faster = compiled(chunk)
    for _ in range(3):
        pair.window(adversarial, on=faster)


@pytest.mark.parametrize("reduce", ["per_backward", "per_window"])
def test_compiled_gradients_of_inputs_alone_add_nothing_to_the_parameters(
    ranks: RankPools, reduce: str
) -> None:
    ranks(2).run(_input_gradients, reduce, timeout=LONG)


def _recompiles() -> None:
    chunk = Stack()
    pair = Pair(chunk, list(chunk.layers))
    faster = compiled(chunk)
    for _ in range(4):
        pair.window(on=faster)
        pair.window(on=faster)
        torch._dynamo.reset()
        gc.collect()
    assert pair.context.stats.recorded_windows == 1
    assert pair.context.stats.replayed_windows == 7


def test_graphs_captured_anew_follow_the_program_that_is_known(ranks: RankPools) -> None:
    ranks(2).run(_recompiles, timeout=LONG)


def _function_around() -> None:
    chunk = Stack()
    pair = Pair(chunk, list(chunk.layers))
    around = compiled(lambda x: chunk(x) * 2)

    def run(model: Any, rank: int) -> None:
        mean_square(around(batch(rank)) if model is chunk else model(batch(rank)) * 2).backward()

    for _ in range(3):
        pair.window(run)
    assert pair.context.compiled_graphs
    wrong = compiled(lambda x: chunk(x), "aot_eager")
    with pytest.raises(RuntimeError, match="is compiled with backend aot_eager"):
        wrong(batch(0))
    whole = torch.compile(lambda x: chunk(x), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="compile the chunk itself"):
        whole(batch(0))


def test_function_around_a_chunk_is_captured_up_to_the_chunk(ranks: RankPools) -> None:
    ranks(2).run(_function_around, timeout=LONG)


def _torch_layers() -> None:
    chunk = Stack(lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()))
    pair = Pair(chunk, list(chunk.layers))
    for index, layer in enumerate(chunk.layers):
        chunk.layers[index] = compiled(layer, "aot_eager")
    for _ in range(2):
        pair.window()


def test_layers_of_torchs_own_classes_can_be_compiled_one_by_one(ranks: RankPools) -> None:
    ranks(2).run(_torch_layers, timeout=LONG)


class Table(nn.Module):
    """Returns its parameter, or a view of it."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, DIM))
        self.view = view

    def forward(self) -> torch.Tensor:
        return self.weight[:2] if self.view else self.weight


class Looks(nn.Module):
    """Uses what a unit returns of its parameters."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.table = Table(view)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.table().t()


def _returns_parameter(view: bool) -> None:
    chunk = Looks(view)
    pair = Pair(chunk, [chunk.table])
    with pytest.raises(RuntimeError, match=r"returns a parameter of unit c0\.table.*clone"):
        once(chunk, 0)
    pair.context.abort()


@pytest.mark.parametrize("view", [False, True])
def test_module_that_returns_its_parameter_is_refused_by_name(ranks: RankPools, view: bool) -> None:
    ranks(2).run(_returns_parameter, view)


def _converts_late(steps: int, compile_it: bool) -> None:
    chunk = Stack()
    pair = Pair(chunk, list(chunk.layers))
    model = compiled(chunk) if compile_it else chunk
    for _ in range(steps):
        pair.window(on=model)
    chunk.to(torch.float64)
    with pytest.raises(RuntimeError, match="convert a model before adopt"):
        model(batch(0).double())


@pytest.mark.parametrize("compile_it", [False, True])
@pytest.mark.parametrize("steps", [0, 1])
def test_model_converted_after_its_adoption_is_refused(
    ranks: RankPools, steps: int, compile_it: bool
) -> None:
    ranks(2).run(_converts_late, steps, compile_it, timeout=LONG)


def _second_backward() -> None:
    chunk = Stack()
    pair = Pair(chunk, list(chunk.layers), mode="registration")
    output = pair.chunk(batch(0))
    mean_square(output).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r'FSDPContext\(mode="recorded"\)'):
        mean_square(output).backward()


def test_second_backward_in_registration_mode_is_refused_with_the_remedy(ranks: RankPools) -> None:
    ranks(2).run(_second_backward)


def _forgets_the_context(mode: str) -> None:
    chunk = Stack()
    pair = Pair(chunk, list(chunk.layers), mode=mode)
    del pair.context
    gc.collect()
    with pytest.raises(ReferenceError, match="keep it as long as they train"):
        once(chunk, 0)


@pytest.mark.parametrize("mode", ["registration", "recorded"])
def test_training_after_the_context_was_deleted_is_refused(ranks: RankPools, mode: str) -> None:
    ranks(2).run(_forgets_the_context, mode)


class Twice(nn.Module):
    """Uses its only layer twice, and throws one result away."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer(x)
        result: torch.Tensor = self.layer(x)
        return result


def _keeps_in_the_reduction_dtype(reductions: Any) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    chunk: Any = Twice()
    weight = chunk.layer.weight.detach().bfloat16()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(chunk.layer, mesh=mesh, mp_policy=policy)
    context = fsdp_fx.FSDPContext(
        "recorded", memory_budget=1 << 40, reduce_gradients=reductions, forward_prefetch=0
    )
    context.adopt(chunk)
    rank = dist.get_rank()
    for _ in range(2):
        chunk.zero_grad()
        for seed in range(4):
            once(chunk, rank, seed)
        context.finish_grad_sync()
    total = torch.zeros(DIM, DIM)
    for seed in range(4):
        full = weight.clone().requires_grad_()
        mean_square(batch(rank, seed).bfloat16() @ full.T).backward()
        assert full.grad is not None
        total += full.grad.float()
    dist.all_reduce(total)
    found = chunk.layer.weight.grad.full_tensor()
    assert torch.equal(found, total / dist.get_world_size())
    assert context.stats.peak_kept_gradient_bytes == 4 * DIM * DIM


@pytest.mark.parametrize("reductions", ["planned", "per_window"])
def test_kept_gradients_of_a_unit_with_a_use_that_is_not_in_the_loss_are_in_the_reduction_dtype(
    ranks: RankPools, reductions: str
) -> None:
    ranks(2).run(_keeps_in_the_reduction_dtype, reductions)


def _optimizer_goes_on_with_a_frozen_unit() -> None:
    chunk = Stack()
    pair = Pair(chunk, list(chunk.layers), memory_budget=1 << 40, keep_frozen=True)
    sides: list[Any] = [pair.chunk, pair.whole]
    for side in sides:
        side.layers[1].requires_grad_(False)
        for parameter in side.layers[1].parameters():
            parameter.grad = torch.ones_like(parameter)
    for _ in range(4):
        output = pair.chunk(batch(dist.get_rank()))
        torch.testing.assert_close(output, pair.whole(batch(dist.get_rank())))
        mean_square(output).backward()
        pair.context.finish_grad_sync()
        for side in sides:
            # It leaves no trace in the version counters of sharded parameters.
            torch.optim.SGD(side.layers[1].parameters(), 0.1, foreach=True).step()
    assert pair.context.program is not None
    assert pair.context.program.carried == {"c0.layers.1"}


def test_frozen_unit_that_has_gradients_from_before_does_not_stay_over_an_optimizer_step(
    ranks: RankPools,
) -> None:
    ranks(2).run(_optimizer_goes_on_with_a_frozen_unit)
