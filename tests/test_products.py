"""Weight gradients that the products add up: the operator, the pass, and whole windows."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fsdp_fx
from fsdp_fx import context
from fsdp_fx.compile.backend import fsdp_fx as backend
from fsdp_fx.compile.capture import placeholder_inputs
from fsdp_fx.compile.products import accumulate_products
from fsdp_fx.compile.regions import RegionCompiler, region_key, split
from fsdp_fx.units import Unit
from fsdp_fx.units.accumulators import is_fresh, mark_written, new_accumulator
from ranks import RankPools
from region_executor import Graph, RegionBackend, slots_by_child
from training import POLICIES

LONG = 240.0

accumulate_product = torch.ops.fsdp_fx.accumulate_product.default


# --- the operator ---------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("operands", "gradient"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float64),
    ],
)
def test_products_add_up_as_the_sum_of_whole_gradients_does(
    operands: torch.dtype, gradient: torch.dtype, transposed: bool
) -> None:
    torch.manual_seed(0)
    buffer = new_accumulator(torch.Size((4, 6)), gradient, torch.empty(0))
    total: torch.Tensor | None = None
    for _ in range(3):
        left, right = torch.randn(5, 4, dtype=operands).t(), torch.randn(5, 6, dtype=operands)
        if transposed:
            right = torch.randn(6, 5, dtype=operands).t()
        accumulate_product(left, right, buffer)
        product = torch.mm(left, right).to(gradient)
        total = product if total is None else total + torch.mm(left, right)
        total = total.to(gradient)
        # Bit by bit on the CPU.
        assert torch.equal(buffer, total)


def test_gradient_takes_memory_when_the_first_product_is_added() -> None:
    buffer = new_accumulator(torch.Size((4, 6)), torch.float32, torch.empty(0))
    assert buffer.untyped_storage().nbytes() == 0
    assert buffer.is_contiguous()
    storage = buffer.untyped_storage()._cdata
    accumulate_product(torch.ones(4, 2), torch.ones(2, 6), buffer)
    assert buffer.untyped_storage()._cdata == storage
    assert buffer.untyped_storage().nbytes() == 4 * 6 * 4


def test_gradient_that_is_there_already_is_added_to() -> None:
    gradient = mark_written(torch.full((4, 6), 3.0))
    accumulate_product(torch.ones(4, 2), torch.ones(2, 6), gradient)
    assert torch.equal(gradient, torch.full((4, 6), 5.0))


def test_gradient_whose_first_product_failed_holds_nothing() -> None:
    buffer = new_accumulator(torch.Size((4, 6)), torch.float32, torch.empty(0))
    with pytest.raises(RuntimeError):
        accumulate_product(torch.ones(4, 2), torch.ones(3, 6), buffer)
    assert is_fresh(buffer)
    accumulate_product(torch.ones(4, 2), torch.ones(2, 6), buffer)
    assert torch.equal(buffer, torch.full((4, 6), 2.0))


def test_copy_of_a_gradient_is_refused() -> None:
    gradient = mark_written(torch.zeros(4, 6))
    with pytest.raises(RuntimeError, match="given a copy of a gradient"):
        accumulate_product(torch.ones(4, 2), torch.ones(2, 6), gradient.clone())


# --- the pass -------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Twice(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


class Transposed(nn.Module):
    """Its weight's gradient is a product transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.t().contiguous())


class Sum(nn.Module):
    """One product is the gradient of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.one + self.other)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight * 3)


class Reshaped(nn.Module):
    """The product has another shape than the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.flatten(0, 1))


class Autocast(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Tied(Layers):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(16, 8), nn.Linear(8, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) @ self.layers[0].weight.t()


def rows() -> torch.Tensor:
    return torch.randn(4, 3, 8)


def tokens() -> torch.Tensor:
    return torch.randint(16, (4, 3))


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def backward_of(model: Layers, x: torch.Tensor, region_compiler: str = "eager") -> Graph:
    captured = RegionBackend(slots_by_child(model, list(model.layers)), region_compiler)  # type: ignore[arg-type]
    torch.compile(model, backend=captured, fullgraph=True)(x).float().sum().backward()
    return captured.only("backward")


def shapes_of(names: Sequence[str], gm: fx.GraphModule) -> list[tuple[int, ...]]:
    values = {node.name: node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")}
    return sorted(tuple(values[name].shape) for name in names)


class Unmarked(fx.Interpreter):
    """Runs a backward graph whose gradients are marked."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.fsdp_fx.reduce_grad.default:
            return args[0]
        return super().call_function(target, args, kwargs)


def some_values(gm: fx.GraphModule) -> dict[str, torch.Tensor]:
    values = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        like = node.meta["val"]
        floating = like.dtype.is_floating_point
        values[node.name] = (torch.randn if floating else torch.zeros)(like.shape).to(like.dtype)
    return values


CASES: dict[str, tuple[Callable[[], Layers], Callable[[], torch.Tensor], list[tuple[int, ...]]]] = {
    "weights, no biases": (
        lambda: Layers(nn.Linear(8, 12), nn.Linear(12, 8)),
        rows,
        [(8, 12), (12, 8)],
    ),
    "no norms, no embeddings": (
        lambda: Layers(nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 12, bias=False)),
        tokens,
        [(12, 8)],
    ),
    "transposed": (lambda: Layers(Transposed()), rows, [(8, 12)]),
    "not what is cast": (lambda: Autocast(nn.Linear(8, 12), nn.Linear(12, 8)), rows, []),
    "no sum over two uses": (lambda: Twice(nn.Linear(8, 8)), rows, []),
    "no tied weight": (Tied, tokens, [(8, 8)]),
    "not for two parameters": (lambda: Layers(Sum()), rows, []),
    "not what is scaled": (lambda: Layers(Scaled()), rows, []),
    "not what is reshaped": (lambda: Layers(Reshaped()), rows, []),
    "no convolution": (lambda: Layers(nn.Conv1d(3, 3, 3)), rows, []),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_added_up_in_a_product(case: str) -> None:
    make, inputs, expected = CASES[case]
    graph = backward_of(make(), inputs())
    before = str(graph.gm.graph)
    changed, accumulators = accumulate_products(graph.gm, dict.fromkeys(graph.slots, torch.float64))
    assert str(graph.gm.graph) == before, "the graph that was given is left as it is"
    assert shapes_of(accumulators, changed) == expected
    calls = changed.graph.find_nodes(op="call_function", target=accumulate_product)
    assert len(calls) == len(expected)
    for call in calls:
        left, right, accumulator = (node.meta["val"] for node in call.args)
        assert accumulator.shape == (left.shape[0], right.shape[1])
        assert accumulator.dtype is torch.float64
    products = changed.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    of_before = graph.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert len(products) == len(of_before) - len(expected)
    # Nothing else has changed: the graph takes what it did, and what it returns is the same.
    assert placeholder_inputs(changed) == placeholder_inputs(graph.gm)
    given = some_values(graph.gm)
    like = {node.name: node.meta["val"] for node in changed.graph.find_nodes(op="placeholder")}
    lent = [new_accumulator(like[n].shape, like[n].dtype, torch.empty(0)) for n in accumulators]
    placeholders = [node.name for node in changed.graph.find_nodes(op="placeholder")]
    everything = {**given, **dict(zip(accumulators, lent, strict=True))}
    mine = Unmarked(changed).run(*(everything[name] for name in placeholders))
    wanted = Unmarked(graph.gm).run(*given.values())
    # A product is added up as the gradient is laid out. Of one that was transposed afterwards
    # the operands change places, and a BLAS library may add up what they give in another order.
    tolerance = 1e-5 if case == "transposed" else 0.0
    for one, other in zip(mine, wanted, strict=True):
        if one is not other:
            torch.testing.assert_close(one.to(other.dtype), other, rtol=tolerance, atol=tolerance)


def test_only_gradients_that_may_be_added_to_are() -> None:
    graph = backward_of(Layers(nn.Linear(8, 12), nn.Linear(12, 8)), rows())
    values = {n.name: n.meta["val"] for n in graph.gm.graph.find_nodes(op="placeholder")}
    chosen = [name for name in graph.slots if tuple(values[name].shape) == (8, 12)]
    changed, accumulators = accumulate_products(graph.gm, dict.fromkeys(chosen, torch.float32))
    assert shapes_of(accumulators, changed) == [(8, 12)]
    assert accumulate_products(graph.gm, {})[1] == ()


def test_regions_of_identical_layers_that_add_up_are_identical() -> None:
    model = Layers(
        *(
            nn.Sequential(nn.Linear(8, 12, bias=False), nn.GELU(), nn.Linear(12, 8, bias=False))
            for _ in range(6)
        )
    )
    graph = backward_of(model, rows())
    changed, accumulators = accumulate_products(graph.gm, dict.fromkeys(graph.slots, torch.float32))
    pieces = split(changed, graph.slots, neutral=graph.neutral, accumulators=accumulators)
    assert len(accumulators) == 12
    keys = Counter(region_key(region.graph_module) for region in pieces.regions)
    assert len(pieces.regions) >= 6
    # All but the first and the last are the same.
    assert max(keys.values()) >= 4
    assert not set(accumulators) & set(pieces.placeholders), "no inputs of the graph"
    assert {name for own in pieces.accumulators.values() for _, name in own} == set(accumulators)
    assert {value for own in pieces.gradients.values() for _, value in own}.isdisjoint(accumulators)
    for index, region in enumerate(pieces.regions):
        owned = [place for place, name in enumerate(region.inputs) if name in accumulators]
        assert not set(owned) & {*region.freed, *region.donated}
        for place in owned:
            slot = next(
                s
                for s, own in pieces.accumulators.items()
                if region.inputs[place] in dict((name, parameter) for parameter, name in own)
            )
            assert pieces.last_gradient_region[slot] >= index
    # What the products alone are ready for is not waited for any longer.
    plain = split(graph.gm, graph.slots, neutral=graph.neutral)
    assert pieces.last_gradient_region == plain.last_gradient_region
    assert pieces.gradient_positions == plain.gradient_positions
    assert pieces.outputs == plain.outputs


def test_region_without_results_is_compiled() -> None:
    # The only thing that it computes is a gradient that it adds to.
    graph = backward_of(Layers(nn.Linear(8, 12, bias=False)), rows(), "inductor")
    changed, accumulators = accumulate_products(graph.gm, dict.fromkeys(graph.slots, torch.float32))
    pieces = split(changed, graph.slots, neutral=graph.neutral, accumulators=accumulators)
    assert [region.outputs for region in pieces.regions] == [()]


# --- whole windows --------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 12)
        self.down = nn.Linear(12, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


@contextlib.contextmanager
def spying() -> Iterator[Counter[str]]:
    """How many gradients are lent to products: new ones, those that are there, and for nothing.

    And those that are reduced at once, in another dtype than they would be kept in.
    """
    seen: Counter[str] = Counter()
    accumulators, scratch = Unit.accumulators, Unit.scratch_gradients
    transient = Unit.transient_gradients

    def spy(unit: Unit, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        lent = accumulators(unit, parameters)
        seen.update("new" if is_fresh(gradient) else "there" for gradient in lent)
        return lent

    def spy_scratch(unit: Unit, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        seen["scratch"] += len(parameters)
        return scratch(unit, parameters)

    def spy_transient(unit: Unit, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        before = seen["new"] + seen["there"]
        lent = transient(unit, parameters)
        seen["transient"] += len(lent) - (seen["new"] + seen["there"] - before)
        return lent

    with (
        mock.patch.object(Unit, "accumulators", spy),
        mock.patch.object(Unit, "scratch_gradients", spy_scratch),
        mock.patch.object(Unit, "transient_gradients", spy_transient),
    ):
        yield seen


@dataclass
class Run:
    """Two sharded chunks of identical blocks, compiled with products that add up, or without."""

    accumulate: bool
    policy: str = "fp32"
    region_compiler: Any = "eager"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(5)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.chunks = [Layers(Block(), Block()) for _ in range(2)]
        for chunk in self.chunks:
            for layer in chunk.layers:
                fully_shard(layer, mesh=mesh, mp_policy=POLICIES[self.policy])
            fully_shard(chunk, mesh=mesh, mp_policy=POLICIES[self.policy])
        self.context = fsdp_fx.FSDPContext("recorded", **self.options)
        self.context.adopt(*self.chunks)
        self.compiled = [
            torch.compile(
                chunk,
                backend=backend,
                options={
                    "region_compiler": self.region_compiler,
                    "accumulate_in_products": self.accumulate,
                },
                fullgraph=True,
            )
            for chunk in self.chunks
        ]
        self.parameters = [p for chunk in self.chunks for p in chunk.parameters()]
        self.seed = 100 + dist.get_rank()

    def inputs(self) -> torch.Tensor:
        self.seed += 10
        generator = torch.Generator().manual_seed(self.seed)
        dtype = POLICIES[self.policy].param_dtype or torch.float32
        return torch.randn(3, 8, generator=generator).to(dtype).requires_grad_()

    def forward(self, number: int = 0, eager: bool = False) -> torch.Tensor:
        chunk = self.chunks[number] if eager else self.compiled[number]
        return chunk(self.inputs()).float().square().mean()

    def close(self) -> list[torch.Tensor | None]:
        """Ends the window; the gradients of this rank's shards."""
        self.context.finish_grad_sync()
        for unit in self.context.units:
            assert not unit.has_gradients
        gradients = []
        for parameter in self.parameters:
            gradient, parameter.grad = parameter.grad, None
            gradients.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
        with torch.no_grad():
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                if gradient is not None:
                    parameter.to_local().add_(gradient, alpha=-0.1)  # type: ignore[attr-defined]
        return gradients

    def window(self, microbatches: int = 3) -> list[torch.Tensor | None]:
        losses = []
        for _ in range(microbatches):
            losses += [self.forward(0), self.forward(1)]
            if len(losses) > 2:
                losses.pop(0).backward()
        while losses:
            losses.pop(0).backward()
        return self.close()


def equal(one: Sequence[Any], other: Sequence[Any]) -> None:
    assert len(one) == len(other)
    for mine, wanted in zip(one, other, strict=True):
        assert (mine is None) == (wanted is None)
        assert mine is None or torch.equal(mine, wanted), f"{mine}\n{wanted}"


PLANNED = {"reduce_gradients": "planned", "memory_budget": 1 << 20}
WINDOWS: list[tuple[str, dict[str, Any]]] = [
    ("fp32", {"reduce_gradients": "per_window"}),
    ("bf16", {"reduce_gradients": "per_backward"}),
    ("bf16", {"reduce_gradients": "per_window"}),
    ("bf16", PLANNED),
    ("fp32", {**PLANNED, "kept_gradient_dtype": torch.bfloat16}),
]
WEIGHTS = 8  # of two chunks of two blocks


def _windows() -> None:
    for policy, options in WINDOWS:
        runs = [Run(accumulate, policy, options=dict(options)) for accumulate in (True, False)]
        for step in range(3):
            with spying() as seen:
                mine = runs[0].window()
            kept = options["reduce_gradients"] != "per_backward" and (
                step or options["reduce_gradients"] == "per_window"
            )
            assert +seen == (
                {"new": WEIGHTS, "there": 2 * WEIGHTS} if kept else {"transient": 3 * WEIGHTS}
            ), f"{policy} {options} step {step}: {seen}"
            with spying() as seen:
                wanted = runs[1].window()
            assert not +seen
            equal(mine, wanted)
            assert all(gradient is not None for gradient in mine)
        stats = runs[0].context.stats
        assert stats.replayed_windows == 2
        assert stats.reductions == runs[1].context.stats.reductions
        numbers = {k.graph for k in runs[0].context.compiled_graphs if k.direction == "backward"}
        assert len(numbers) == 1, "two chunks share their graphs"


def test_windows_are_bit_by_bit_what_they_are_without(ranks: RankPools) -> None:
    ranks(2).run(_windows, timeout=LONG)


def _measured() -> None:
    """What the plan subtracts is what was there, where it was there."""
    for accumulate, options in ((True, {}), (True, PLANNED), (False, PLANNED)):
        run = Run(accumulate, "bf16", options=dict(options))
        with mock.patch(
            "fsdp_fx.context.measurements_of", side_effect=context.measurements_of
        ) as seen:
            run.window()
        (window, metered), _ = seen.call_args
        blocks = [unit for unit in window.units if unit.trainable]
        assert len(blocks) == WEIGHTS // 2
        backwards = {(window[position].unit, window.ends[position]) for position in window.reduces}
        assert len(backwards) == 3 * len(blocks)
        size = 2 * (8 * 12 + 12 * 8)  # of two weights in bf16, without norm and bias
        assert metered.written == dict.fromkeys(backwards, size if accumulate else 0)
        assert metered.shards == {
            unit.name: 4 * unit.elements // dist.get_world_size() for unit in window.units
        }
        # Gradients that were there before the window belong to every plan.
        run.forward().backward()
        run.context.finish_grad_sync()
        with mock.patch(
            "fsdp_fx.context.measurements_of", side_effect=context.measurements_of
        ) as seen:
            run.window(2)
        (_, metered), _ = seen.call_args
        assert set(metered.shards) == {
            unit.name for unit in window.units if unit.chunk == window.units[-1].chunk
        }


def test_gradients_that_a_plan_does_without_are_measured(ranks: RankPools) -> None:
    ranks(2).run(_measured, timeout=LONG)


class Failing:
    """Runs regions as they are; the one that is asked for fails, after all but its last operator."""

    def __init__(self) -> None:
        self.countdown: int | None = None

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        adds = accumulate_product in {node.target for node in gm.graph.nodes}

        def run(arguments: list[Any]) -> Sequence[Any]:
            values = tuple(arguments)
            arguments.clear()
            fails = False
            if adds and self.countdown is not None:
                self.countdown -= 1
                fails = self.countdown == 0
            if fails and self.early:
                raise ValueError("before any product")
            result = gm.forward(*values)
            if fails:
                raise ValueError("after the products")
            return tuple(result)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    early = False


def _failures() -> None:
    for early in (False, True):
        failing = Failing()
        failing.early = early
        options = {"reduce_gradients": "per_window"}
        run, plain = Run(True, "bf16", failing, dict(options)), Run(False, "bf16", options=options)
        for step in range(3):
            # In the second microbatch's backward: some gradients are kept, some half added to.
            if step:
                run.forward().backward()
                seed = run.seed
                loss = run.forward()
                failing.countdown = 2
                with pytest.raises(ValueError, match="product"):
                    loss.backward()
                failing.countdown = None
                assert any(unit.has_gradients for unit in run.context.units)
                run.context.abort()
                assert not any(unit.has_gradients for unit in run.context.units)
                run.seed = seed - 10
            equal(run.window(), plain.window())
        # Nobody aborts an evaluation: what it has not written nobody reads.
        for each in (run, plain):
            for chunk in each.chunks:
                chunk.eval()
        seed = run.seed
        loss = run.forward()
        failing.countdown = 1
        with pytest.raises(ValueError, match="product"):
            loss.backward()
        failing.countdown = None
        written = [unit for unit in run.context.units if unit.has_gradients]
        assert bool(written) is not early
        if early:
            run.seed = seed
            for each in (run, plain):
                each.forward().backward()
            equal(run.close(), plain.close())


def test_gradients_of_a_backward_that_failed_are_gone(ranks: RankPools) -> None:
    ranks(2).run(_failures, timeout=LONG)


def _other_ways(reduce_gradients: str) -> None:
    for policy in ("fp32", "bf16"):
        runs = [
            Run(accumulate, policy, options={"reduce_gradients": reduce_gradients})
            for accumulate in (True, False)
        ]
        kept = reduce_gradients == "per_window"
        new = "new" if kept or policy == "fp32" else "transient"

        def same(
            what: Callable[[Run], Any], runs: Sequence[Run] = runs
        ) -> tuple[Any, Counter[str]]:
            with spying() as seen:
                mine = what(runs[0])
            equal(mine, what(runs[1]))
            return mine, seen

        def gradient_of_inputs(run: Run) -> list[torch.Tensor | None]:
            run.forward().backward()
            x = run.inputs()
            (gradient,) = torch.autograd.grad(run.compiled[0](x).float().square().mean(), x)
            run.forward().backward()
            return [gradient, *run.close()]

        _, seen = same(gradient_of_inputs)
        assert +seen == ({new: 4, "there": 4, "scratch": 4} if kept else {new: 8, "scratch": 4})

        def frozen_in_between(run: Run) -> list[torch.Tensor | None]:
            run.forward().backward()
            loss = run.forward()
            weight = run.chunks[0].layers[1].up.weight  # type: ignore[union-attr]
            weight.requires_grad_(False)  # type: ignore[operator]
            loss.backward()
            weight.requires_grad_(True)  # type: ignore[operator]
            return run.close()

        _, seen = same(frozen_in_between)
        assert seen["scratch"] == 1

        def eager_in_between(run: Run) -> list[torch.Tensor | None]:
            for eager in (True, False, True, False):
                run.forward(eager=eager).backward()
            return run.close()

        same(eager_in_between)

        def both_in_one_backward(run: Run) -> list[torch.Tensor | None]:
            (run.forward() + run.forward(eager=True)).backward()
            return run.close()

        if policy == "fp32":  # in bf16 the two are added up in fp32 here, and in bf16 there
            same(both_in_one_backward)
        same(lambda run: run.window())


@pytest.mark.parametrize("reduce_gradients", ["per_window", "per_backward"])
def test_other_ways_to_gradients_add_up_with_products(
    ranks: RankPools, reduce_gradients: str
) -> None:
    ranks(2).run(_other_ways, reduce_gradients, timeout=LONG)


def _inductor() -> None:
    # The operator refuses a copy of a gradient: what runs has none.
    options = {"reduce_gradients": "per_window"}
    run, plain = Run(True, "bf16", "inductor", dict(options)), Run(False, "bf16", options=options)
    for _ in range(2):
        with spying() as seen:
            mine = run.window()
        assert +seen == {"new": WEIGHTS, "there": 2 * WEIGHTS}
        for gradient, other in zip(mine, plain.window(), strict=True):
            torch.testing.assert_close(gradient, other, rtol=3e-2, atol=1e-3)


@pytest.mark.slow
def test_inductor_adds_to_the_gradients_themselves(ranks: RankPools) -> None:
    ranks(2).run(_inductor, timeout=LONG)


def test_regions_are_compiled_once_whether_gradients_are_there_or_not() -> None:
    compiler = RegionCompiler("eager")
    model = Layers(*(nn.Linear(8, 8) for _ in range(4)))
    graph = backward_of(model, rows())
    for _ in range(2):
        changed, accumulators = accumulate_products(
            graph.gm, dict.fromkeys(graph.slots, torch.float32)
        )
        pieces = split(changed, graph.slots, neutral=graph.neutral, accumulators=accumulators)
        distinct = [compiler(region) for region in pieces.regions] and compiler.distinct_regions
        assert distinct == len({region_key(region.graph_module) for region in pieces.regions})
