"""Every model of the table trains compiled as it does whole.

Each row of :data:`compiled_models.ROWS` is one chunk of two; the other is a simple one that
runs eagerly, takes a list and returns a list. The pair trains under three orders and three
budgets. After every window gradients, weights after the optimizer step, buffers, outputs and
losses are those of the same chunks whole, every unit is sharded, and what was gathered and
reduced is what the program says.

One context meets the orders one after the other. What is recorded of an order is planned under
each budget, and each plan is replayed.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from compiled_models import ROWS, WIDTH, Arguments, Row
from fsdp_fx import FSDPContext
from fsdp_fx.compile.backend import fsdp_fx as backend
from fsdp_fx.occupancy import outline_of
from models import cpu_mesh
from ranks import RankPools, clean_up
from test_memory_budget import EVERYTHING, assert_replayed_as_predicted, measuring, replan
from training import ORDERS, Action, one_by_one

MICROBATCHES = {"one_by_one": 2, "chunk_by_chunk": 2, "interleaved": 3}
BY_NAME = {row.name: row for row in ROWS}


# Values that are nested in any way


def leaves(value: Any) -> list[Any]:
    """What is in nested containers and dataclasses, in order, and the types around it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts: Iterable[Any] = [getattr(value, each.name) for each in dataclasses.fields(value)]
    elif isinstance(value, dict):
        parts = [item for pair in value.items() for item in pair]
    elif isinstance(value, list | tuple):
        parts = value
    else:
        return [value]
    return [type(value), *(leaf for part in parts for leaf in leaves(part))]


def tensors_of(value: Any, wanted: Callable[[torch.Tensor], bool]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor) and wanted(leaf)]


def replaced(value: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same with other floating-point tensors, in the order of :func:`leaves`."""
    if isinstance(value, torch.Tensor):
        return replace(value) if value.is_floating_point() else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [each.name for each in dataclasses.fields(value)]
        return type(value)(**{name: replaced(getattr(value, name), replace) for name in fields})
    if isinstance(value, dict):
        return {key: replaced(item, replace) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [replaced(item, replace) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


# The two chunks


class Other(nn.Module):
    """The second chunk: takes tensors of any sizes and returns tensors of the same sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        results = []
        for x in tensors:
            x = x.float()
            y = self.norm(x.reshape(-1, WIDTH))
            for layer in self.layers:
                y = torch.tanh(layer(y))
            results.append(x + y.reshape(x.shape))
        return results


OTHER = Row("other", Other, inputs=lambda generator: ((), {}))


def pair_of(row: Row) -> tuple[Row, Row]:
    return (row, OTHER) if row.placed == "first" else (OTHER, row)


def build(row: Row) -> list[nn.Module]:
    torch.manual_seed(17)
    return [each.build() for each in pair_of(row)]


def units_of(row: Row, model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that become units, those inside of others first, the chunk last."""

    def matches(pattern: str, path: str) -> bool:
        wanted, parts = pattern.split("."), path.split(".")
        return len(wanted) == len(parts) and all(
            want in ("*", part) for want, part in zip(wanted, parts, strict=True)
        )

    paths = dict(model.named_modules())
    below = [path for path in paths if any(matches(pattern, path) for pattern in row.units)]
    assert bool(below) == bool(row.units), f"{row.name}: no module is meant by {row.units}"
    return [(path, paths[path]) for path in (*reversed(below), "")]


def draw(row: Row, window: int, microbatches: int) -> list[list[Arguments]]:
    """What the model is called with: by microbatch and rank, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 + window)
    ranks = range(dist.get_world_size())
    return [[row.inputs(generator) for _ in ranks] for _ in range(microbatches)]


# A window in one process


@dataclasses.dataclass
class Ran:
    """What the calls of a window returned, by microbatch."""

    outputs: dict[int, list[Any]] = dataclasses.field(default_factory=dict)
    losses: dict[int, float] = dataclasses.field(default_factory=dict)


def run(
    row: Row,
    chunks: Sequence[Callable[..., Any]],
    actions: Iterable[Action],
    data: Sequence[Sequence[Arguments]],
    rank: int,
    seed: int,
) -> Ran:
    """Runs a schedule as pipeline stages would: graphs end at chunks."""
    model = 0 if row.placed == "first" else 1
    received: dict[tuple[int, int], list[torch.Tensor]] = {}
    outputs: dict[tuple[int, int], Any] = {}
    ran = Ran()

    def arguments(chunk: int, microbatch: int) -> Arguments:
        drawn = data[microbatch][rank]
        if chunk == 0:
            floats = tensors_of(drawn, torch.Tensor.is_floating_point)
            return drawn if chunk == model else ((floats,), {})
        before = tensors_of(outputs[0, microbatch], lambda tensor: tensor.requires_grad)
        own = [tensor.detach().requires_grad_() for tensor in before]
        received[chunk, microbatch] = own
        if chunk != model:
            return (own,), {}
        following = iter(own)
        return replaced(drawn, lambda _: next(following))

    for kind, chunk, microbatch in actions:
        here = (chunk, microbatch)
        if kind == "F":
            args, kwargs = arguments(chunk, microbatch)
            # Whoever computes it, in whatever order, draws the same random numbers.
            torch.manual_seed(((seed * 16 + microbatch) * 2 + chunk) * 16 + rank)
            outputs[here] = chunks[chunk](*args, **kwargs)
            if chunk == model:
                ran.outputs[microbatch] = [
                    leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
                    for leaf in leaves(outputs[here])
                ]
            continue
        results = tensors_of(outputs.pop(here), lambda tensor: tensor.requires_grad)
        assert results, "the chunk returned nothing to differentiate"
        if chunk == 1:
            loss = torch.stack([(result.float() - 0.3).square().mean() for result in results]).sum()
            ran.losses[microbatch] = loss.item()
            loss.backward()
        else:
            pairs = zip(results, received.pop((1, microbatch)), strict=True)
            reached = [(result, own.grad) for result, own in pairs if own.grad is not None]
            torch.autograd.backward(*zip(*reached, strict=True))
    return ran


# The reference


@dataclasses.dataclass
class Expected:
    """What a window leaves, of what this rank has."""

    ran: Ran
    gradients: list[torch.Tensor | None]
    weights: list[torch.Tensor]
    buffers: list[torch.Tensor]


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def parameters_of(chunks: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [parameter for chunk in chunks for parameter in chunk.parameters()]


def part_of(whole: torch.Tensor) -> torch.Tensor:
    """This rank's part, as FSDP2 cuts a parameter."""
    parts = torch.chunk(whole.detach(), dist.get_world_size(), dim=0)
    rank = dist.get_rank()
    return (parts[rank] if rank < len(parts) else whole[:0]).clone()


def cast_floats(value: Any, dtype: torch.dtype | None) -> Any:
    return value if dtype is None else replaced(value, lambda tensor: tensor.to(dtype))


class Whole:
    """The chunks on one rank's data, not sharded: parameters in the policies' dtypes.

    Buffers stay from window to window, as they do on that rank.
    """

    def __init__(self, row: Row) -> None:
        self.chunks = build(row)
        self.parameters = parameters_of(self.chunks)
        self._dtypes: dict[nn.Parameter, torch.dtype] = {}
        self.reduction_dtypes: dict[nn.Parameter, torch.dtype] = {}
        for each, chunk in zip(pair_of(row), self.chunks, strict=True):
            for path, module in units_of(each, chunk):
                self._follow(module, each.policies.get(path, each.policy))

    def _follow(self, module: nn.Module, policy: MixedPrecisionPolicy) -> None:
        """Do what a policy says of a unit; its inner units have been seen to."""
        for parameter in module.parameters():
            if parameter not in self._dtypes:
                dtype = policy.param_dtype or parameter.dtype
                self._dtypes[parameter] = dtype
                self.reduction_dtypes[parameter] = policy.reduce_dtype or dtype
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            module.register_forward_pre_hook(
                lambda _, args, kwargs: cast_floats((args, kwargs), policy.param_dtype),
                with_kwargs=True,
            )
        if policy.output_dtype is not None:
            module.register_forward_hook(
                lambda _, args, output: cast_floats(output, policy.output_dtype)
            )

    def load(self, weights: Sequence[torch.Tensor]) -> None:
        for parameter, weight in zip(self.parameters, weights, strict=True):
            parameter.grad = None
            parameter.data = weight.detach().to(self._dtypes[parameter])

    def gradients(self) -> list[torch.Tensor | None]:
        return [
            None if (gradient := each.grad) is None else gradient.to(self.reduction_dtypes[each])
            for each in self.parameters
        ]


class Reference:
    """The training of a row's chunks whole, on every rank's data, window by window."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self._chunks = build(row)
        self._parameters = parameters_of(self._chunks)
        self._optimizer = sgd(self._parameters)
        self._wholes = [Whole(row) for _ in range(dist.get_world_size())]
        self.reduction_dtypes = set(self._wholes[0].reduction_dtypes.values())

    def window(self, number: int, data: Sequence[Sequence[Arguments]]) -> Expected:
        """One window and the optimizer step after it."""
        mine = Ran()
        for microbatch in range(len(data)):
            actions = [(kind, chunk, microbatch) for kind, chunk, _ in one_by_one(2, 1)]
            contributions = []
            for rank, whole in enumerate(self._wholes):
                whole.load(self._parameters)
                ran = run(self._row, whole.chunks, actions, data, rank, seed=number)
                contributions.append(whole.gradients())
                if rank == dist.get_rank():
                    mine.outputs.update(ran.outputs)
                    mine.losses.update(ran.losses)
            for parameter, of_ranks in zip(
                self._parameters, zip(*contributions, strict=True), strict=True
            ):
                present = [gradient for gradient in of_ranks if gradient is not None]
                if not present:
                    continue
                # Ranks that have none contribute zeros.
                average = (sum(present[1:], start=present[0]) / len(of_ranks)).to(parameter.dtype)
                before = parameter.grad
                parameter.grad = average if before is None else before + average
        gradients = [None if p.grad is None else part_of(p.grad) for p in self._parameters]
        self._optimizer.step()
        self._optimizer.zero_grad()
        whole = self._wholes[dist.get_rank()]
        return Expected(
            mine,
            gradients,
            [part_of(parameter) for parameter in self._parameters],
            [buffer.clone() for chunk in whole.chunks for buffer in chunk.buffers()],
        )


# The training that is tested


class Training:
    """A row's chunks sharded, adopted and compiled, in one context."""

    def __init__(
        self, row: Row, region_compiler: str = "eager", tolerance: float | None = None
    ) -> None:
        self.row = row
        self.reference = Reference(row)
        self.tolerance = row.tolerance if tolerance is None else tolerance
        self.chunks = build(row)
        mesh = cpu_mesh(dist.get_world_size())
        for each, chunk in zip(pair_of(row), self.chunks, strict=True):
            for path, module in units_of(each, chunk):
                fully_shard(module, mesh=mesh, mp_policy=each.policies.get(path, each.policy))
        self.context = FSDPContext(mode="recorded")
        self.context.adopt(*self.chunks)
        self.callables: list[Callable[..., Any]] = list(self.chunks)
        model = 0 if row.placed == "first" else 1
        self.callables[model] = torch.compile(
            self.chunks[model],
            backend=backend,
            options={"region_compiler": region_compiler},
            fullgraph=row.fullgraph,
            # The number that .item() gives differs from call to call.
            dynamic=False if row.fullgraph else None,
        )
        self.optimizer = sgd(parameters_of(self.chunks))
        self.windows = 0

    def window(self, order: str) -> None:
        """One window and the optimizer step after it, compared with the reference."""
        number, self.windows = self.windows, self.windows + 1
        data = draw(self.row, number, MICROBATCHES[order])
        expected = self.reference.window(number, data)
        actions = ORDERS[order](2, len(data))
        ran = run(self.row, self.callables, actions, data, dist.get_rank(), seed=number)
        self.context.finish_grad_sync()
        for microbatch in range(len(data)):
            self._compare_outputs(ran.outputs[microbatch], expected.ran.outputs[microbatch])
            self._compare("loss", ran.losses[microbatch], expected.ran.losses[microbatch])
        names = [
            f"c{index}.{name}"
            for index, chunk in enumerate(self.chunks)
            for name, _ in chunk.named_parameters()
        ]
        parameters: list[Any] = parameters_of(self.chunks)
        for name, parameter, wanted in zip(names, parameters, expected.gradients, strict=True):
            gradient = parameter.grad
            if wanted is not None:
                assert gradient is not None, f"{name} has no gradient"
                self._compare(f"gradient of {name}", gradient.to_local(), wanted)
            elif gradient is not None:
                # Not used; but its unit was reduced.
                assert not gradient.to_local().any(), f"gradient of {name}: {gradient}"
        self.optimizer.step()
        self.optimizer.zero_grad()
        for name, parameter, weight in zip(names, parameters, expected.weights, strict=True):
            self._compare(f"weight {name}", parameter.to_local(), weight)
        buffers = [buffer for chunk in self.chunks for buffer in chunk.buffers()]
        for index, (buffer, wanted) in enumerate(zip(buffers, expected.buffers, strict=True)):
            self._compare(f"buffer {index}", buffer, wanted)
        for unit in self.context.units:
            assert not any((unit.unsharded, unit.in_flight, unit.holds)), unit
        assert self.context.stats.resident_bytes == 0

    def replay(self, order: str) -> None:
        """One window that is to do what the program of the one before says."""
        context = self.context
        before = dataclasses.replace(context.stats)
        with measuring(context) as measured:
            self.window(order)
        assert_replayed_as_predicted(context, before, measured)

    def _compare_outputs(self, found: Sequence[Any], wanted: Sequence[Any]) -> None:
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            self._compare(f"output {index}", one, other)

    def _compare(self, what: str, found: Any, wanted: Any) -> None:
        if isinstance(wanted, float):
            found, wanted = torch.tensor(found), torch.tensor(wanted)
        if not isinstance(wanted, torch.Tensor):
            assert found == wanted, f"{what}: {found} for {wanted}"
            return
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), what
        if not self.tolerance or not wanted.is_floating_point():
            assert torch.equal(found, wanted), f"{what} differs: {found - wanted}"
            return
        found, wanted = found.float(), wanted.float()
        scale = wanted.norm() + 1e-2 * wanted.numel() ** 0.5
        error = (found - wanted).norm()
        assert error <= self.tolerance * scale, f"{what} is off by {error} of {scale}"


def check_fallbacks(training: Training) -> None:
    """What ran eagerly is what the row says."""
    context, row = training.context, training.row
    chunk = f"c{0 if row.placed == 'first' else 1}"
    ran_eagerly = [each.where for each in context.fallbacks if each.what == "ran from its hooks"]
    wanted = {f"unit {chunk}.{unit} in compiled chunk {chunk}" for unit in row.eager}
    assert set(ran_eagerly) == wanted, context.explain()
    explanation = context.explain()
    for where in wanted:
        assert where in explanation
    assert "torch.compile did not capture it" not in explanation, "no reason is given"
    if not row.eager:
        left = [each for each in context.fallbacks if "left its program" not in each.what]
        in_parts = [each for each in left if each.what.startswith("was captured in parts")]
        assert len(left) == len(in_parts) == (0 if row.fullgraph else 1), context.explain()
    graphs = {key.graph for key in context.compiled_graphs if key.chunk == chunk}
    assert len(graphs) == 1 or not row.fullgraph, context.explain()
    assert len(graphs) > 1 or row.fullgraph or row.eager, context.explain()


def reductions_of(context: FSDPContext) -> Counter[str]:
    """How often the program reduces each unit that it reduces at all."""
    assert context.program is not None
    trace = context.program.trace
    return Counter(trace[position].unit for position in outline_of(context.program).reductions)


def train_under_orders_and_budgets(name: str) -> None:
    row = BY_NAME[name]
    training = Training(row)
    context = training.context
    stats = context.stats
    sizes = [unit.spec.bytes for unit in context.units]
    budgets = [None, 3 * sum(sizes) // (2 * len(sizes)), EVERYTHING]
    for index, order in enumerate(ORDERS):
        # The first of an order is written down, on leaving the program of the order before.
        training.window(order)
        assert (stats.recorded_windows, stats.divergences) == (index + 1, index)
        assert set(reductions_of(context).values()) == {MICROBATCHES[order]}, context.program
        training.replay(order)  # under the budget that was planned with last
        for _ in budgets[1:]:
            budgets.append(budgets.pop(0))
            replan(context, memory_budget=budgets[0])
            training.replay(order)
    # The first order again, planned under its last budget.
    first, switches = next(iter(ORDERS)), stats.switches
    training.window(first)
    assert stats.switches == switches + 1
    assert len(context.programs) == stats.recorded_windows == len(ORDERS)
    assert stats.divergences == len(ORDERS) - 1
    # Kept gradients are added up before the ranks are averaged, not after: another rounding.
    half = torch.bfloat16 in training.reference.reduction_dtypes
    training.tolerance = max(row.tolerance, 2e-2 if half else 1e-5)
    replan(context, memory_budget=EVERYTHING, reduce_gradients="planned")
    training.replay(first)
    assert set(reductions_of(context).values()) == {1}, context.program
    check_fallbacks(training)


# Rows that others of the table are near to: `-m soak` trains these as well.
NEAR_OTHERS = (
    *("moe_expert_units", "gru_cell", "embedding_bag", "one_element_parameters"),
    *("tied_across_a_break", "around_breaks", "called_twice_around_a_break", "weight_products"),
    *("weight_norm", "two_dtypes_in_a_layer", "full_gate", "cast_inputs_false", "named_tuple"),
    *("tuple_output", "list_of_views_output", "checkpoint_in_a_layer", "custom_function"),
    *("skipped_layer", "detached_layer", "nested_units", "statistics_around_a_break"),
    *("item_in_a_layer", "break_in_nested_units"),
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.soak if name in NEAR_OTHERS else ()) for name in BY_NAME],
)
def test_model_trains_compiled_as_it_does_whole(ranks: RankPools, name: str) -> None:
    ranks(2).run(train_under_orders_and_budgets, name, timeout=120)


def train_through_inductor(*names: str) -> None:
    for name in names:
        clean_up()
        training = Training(BY_NAME[name], "inductor", tolerance=1e-4)
        training.window("interleaved")
        training.replay("interleaved")
        check_fallbacks(training)


@pytest.mark.soak
def test_models_of_several_kinds_train_through_inductor(ranks: RankPools) -> None:
    names = ("moe_capacity", "around_breaks", "statistics", "checkpoint_in_a_layer")
    ranks(2).run(train_through_inductor, *names, timeout=280)


def test_the_table_has_a_name_for_each_row() -> None:
    assert len(BY_NAME) == len(ROWS)
    assert set(NEAR_OTHERS) < set(BY_NAME)
