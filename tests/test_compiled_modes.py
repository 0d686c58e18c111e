"""The modes in which a compiled chunk runs: training or not, frozen or not, one backward or more.

Windows are compared with the same chunks whole, as in :mod:`test_semantics`; where the eager
hooks have to do the same, they are run on the same calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from models import DIM, linears
from test_compiled_cases import (
    Compiled,
    Eager,
    Tokens,
    assert_all_captured,
    captures,
    compiled_setup,
)
from test_gradients import POLICIES, Pair, Plain, _train
from test_semantics import (
    Heads,
    assert_replayed,
    at_rest,
    counting,
    data,
    events,
    full_state,
    mean_square,
    on_two_ranks,
    refused,
    warnings_of,
)
from training import VOCABULARY, interleaved

EXECUTORS: dict[str, type[Eager]] = {"eager": Eager, "compiled": Compiled}


# Training and evaluation


class Dropped(nn.Module):
    """Dropout between two linears, which an evaluation leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.dropout, self.fc2 = nn.Linear(DIM, DIM), nn.Dropout(0.5), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.dropout(torch.tanh(self.fc1(x))))


@on_two_ranks()
def test_every_mode_has_its_own_result_and_gathers_on_demand() -> None:
    twin = Compiled(Dropped())
    chunk, whole, rank = twin.chunks[0], twin.whole[0], dist.get_rank()

    def run(module: nn.Module, mode: str) -> torch.Tensor:
        x = data(5, 5)[rank]
        torch.manual_seed(11)
        module.train(mode.startswith("train"))
        try:
            if mode.endswith("no_grad"):
                with torch.no_grad():
                    return module(x)
            if mode.endswith("inference_mode"):
                with torch.inference_mode():
                    return module(x)
            return module(x).detach()
        finally:
            module.train()

    modes = ["eval", "eval no_grad", "eval inference_mode", "train no_grad", "train inference_mode"]
    for step in range(3):
        with counting(twin.context) as spent:
            whole.load_state_dict(full_state(chunk))
            for mode in modes:
                torch.testing.assert_close(run(chunk, mode), run(whole, mode), msg=mode)
                assert at_rest(twin.context), mode
            x = data(step, 0)[rank]
            torch.manual_seed(step)
            chunk(x).square().mean().backward()
            twin.context.finish_grad_sync()
        torch.manual_seed(step)
        whole(x).square().mean().backward()
        for mine, theirs in zip(chunk.parameters(), whole.parameters(), strict=True):
            assert theirs.grad is not None
            dist.all_reduce(theirs.grad)
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad / dist.get_world_size())
            mine.grad = theirs.grad = None
        assert spent.reductions == 2
        assert spent.replayed_windows == (step > 0)
        assert spent.on_demand_gathers == 2 * len(modes) + (1 if step else 4)
    assert_all_captured(twin)


@on_two_ranks(how=["evaluation()", "eval()"])
def test_backward_of_an_evaluation_adds_its_gradients_and_is_no_event(how: str) -> None:
    twin = Compiled(linears(2))
    for step in range(3):
        if how == "eval()":
            twin.chunks[0].eval()
            twin.run("F1")
            twin.chunks[0].train()
        else:
            with twin.context.evaluation():
                twin.run("F1")
        with counting(twin.context) as spent:
            twin.run("F0 B0 B1")
            twin.context.finish_grad_sync()
        twin.check()
        assert events(twin.context) == "0F0 2F0 2B0 0B0"
        assert spent.reductions == 4
        assert spent.replayed_windows == (step > 0)


# Frozen and not


PARTS: dict[str, Callable[[Any], list[nn.Parameter]]] = {
    "nothing": lambda module: [],
    "a parameter": lambda module: [module.layers[1].weight],
    "the middle unit": lambda module: list(module.layers[1].parameters()),
    "the first unit": lambda module: list(module.layers[0].parameters()),
    "all but the root": lambda module: list(module.layers.parameters()),
    "everything": lambda module: list(module.parameters()),
}


# No more than what Dynamo compiles of a function.
STATES = [
    ("nothing", False),
    ("a parameter", False),
    ("the middle unit", True),
    ("the first unit", False),
    ("all but the root", False),
    ("everything", True),
    ("everything", False),
    ("nothing", True),
]


@on_two_ranks(settings=[("as they are", "per_backward"), ("bf16", "per_window")])
def test_freezing_between_windows_with_inputs_that_need_a_gradient_or_not(
    settings: tuple[str, str],
) -> None:
    policy, reduce = settings
    torch._dynamo.reset()
    torch.manual_seed(3)
    chunk = Plain()
    pair = Pair(
        chunk,
        list(chunk.layers),
        policy=POLICIES[policy],
        compiled=True,
        reduce_gradients=reduce,
    )
    microbatches = 2 if reduce == "per_backward" else 1
    regions = []
    for part, differentiable in (*STATES, *STATES):
        _train(pair, lambda module: list(module.parameters()), True)
        _train(pair, PARTS[part], False)

        trained = sum(
            any(p.requires_grad for p in unit.sharded_parameters) for unit in pair.context.units
        )

        def run(
            model: Any, x: torch.Tensor, differentiable: bool = differentiable, some: int = trained
        ) -> None:
            x = x.clone().requires_grad_(differentiable)
            output = model(x)
            assert output.requires_grad == (differentiable or some > 0)
            if output.requires_grad:
                output.float().square().mean().backward()
            assert (x.grad is not None) == differentiable

        assert pair.window(run) == trained * microbatches, (part, differentiable)
        regions.append(pair.context.report.region_uses)
    assert regions[len(STATES) - 1] == regions[-1] > 0, "each state is compiled once"
    assert not [
        f for f in pair.context.fallbacks if f.what in ("ran eagerly", "ran from its hooks")
    ]


# More than one backward, and backwards of a part


@on_two_ranks()
def test_second_backward_through_a_retained_graph_adds_its_gradients() -> None:
    reductions = {}
    for name, executor in EXECUTORS.items():
        twin = executor(linears(2))
        for step in range(3):
            with counting(twin.context) as spent:
                twin.run("F0")
                twin.backward(0, 0, retain_graph=True)
                twin.backward(0, 0)
                twin.context.finish_grad_sync()
            twin.check()
            assert spent.replayed_windows == (step > 0)
        reductions[name] = spent.reductions
        assert_replayed(twin, spent)
        assert events(twin.context) == "0F0 2F0 2B0 0B0 2B1 0B1"
    assert reductions["eager"] == reductions["compiled"] == 4


@on_two_ranks()
def test_separate_backwards_of_one_forward_add_up() -> None:
    twin = Compiled(Heads(), loss=lambda output: output[0].square().mean() + output[1].sum())
    for step in range(3):
        with counting(twin.context) as spent:
            twin.run("F0")
            left, right = twin.outputs[0, 0]
            left.square().mean().backward(retain_graph=True)
            right.sum().backward()
            twin.context.finish_grad_sync()
        twin.done = [0]
        twin.check()
        assert spent.replayed_windows == (step > 0)
    # One graph: each pass goes through all of it.
    assert spent.reductions == 6
    assert_replayed(twin, spent)


@on_two_ranks()
def test_gradient_of_the_inputs_alone_reduces_nothing_and_a_real_backward_may_follow() -> None:
    """First of the same forward, then in a forward of its own."""
    for executor in EXECUTORS.values():
        twin = executor(linears(2), differentiable=True)
        for step in range(3):
            twin.run("F0")
            output, x = twin.outputs[0, 0], twin.inputs[0, 0]
            with counting(twin.context) as spent:
                (first,) = torch.autograd.grad(mean_square(output), x, retain_graph=True)
                mean_square(output).backward(inputs=[x], retain_graph=True)
            assert x.grad is not None
            torch.testing.assert_close(first, x.grad)
            assert spent.reductions == 0
            assert not any(unit.has_gradients for unit in twin.context.units)
            x.grad = None
            with counting(twin.context) as spent:
                twin.run("B0")
                twin.context.finish_grad_sync()
            torch.testing.assert_close(first, x.grad)
            assert spent.reductions == 2
            twin.check()
            assert twin.context.stats.replayed_windows == step
        assert not twin.context.fallbacks


@on_two_ranks(executor=list(EXECUTORS), depth=["the chunk", "a layer"])
def test_backward_to_be_differentiated_is_refused_before_any_reduction(
    executor: str, depth: str
) -> None:
    units: Any = nn.Linear if depth == "a layer" else nn.Sequential
    twin = EXECUTORS[executor](linears(2), differentiable=True, units=units)
    for step in range(3):
        twin.run("F0")
        with counting(twin.context) as spent, refused(RuntimeError, "create_graph"):
            torch.autograd.grad(
                mean_square(twin.outputs[0, 0]), twin.inputs[0, 0], create_graph=True
            )
        assert spent.reductions == 0
        twin.context.abort()
        assert at_rest(twin.context)
        twin.forget()
        spent = twin.window("F0 F1 B0 B1")
        if step:
            assert_replayed(twin, spent)


# Shapes and orders


@on_two_ranks()
def test_batch_sizes_and_lengths_compile_a_bounded_number_of_graphs() -> None:
    torch._dynamo.reset()
    setup = compiled_setup([Tokens()], dynamic=None)
    generator = torch.Generator().manual_seed(1)
    captures.clear()
    counts = []
    for size, length in ((2, 5), (3, 7), (4, 6), (5, 9), (3, 4), (2, 8)):
        shape = (2, dist.get_world_size(), size, length)
        tokens = torch.randint(VOCABULARY, shape, generator=generator)
        actions = list(interleaved(1, 1))
        setup.step(actions, [(tokens[0], tokens[1])], exact=False, tolerance=1e-5)
        counts.append(len(captures))
    assert counts[-1] == counts[1] == 2, counts
    assert setup.context.stats.recorded_windows == 1
    assert setup.context.stats.divergences == 0
    assert not setup.context.fallbacks


@on_two_ranks(
    calls=[
        "F1 F2 F3 B2 B3 B1",
        "F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7",
        "F0 F1 F2 F3 F4 F5 F6 F7 B7 B6 B5 B4 B3 B2 B1 B0",
    ]
)
def test_backwards_in_any_order_with_many_microbatches_in_flight(calls: str) -> None:
    eager, twin = Eager(linears(2)), Compiled(linears(2))
    microbatches = calls.count("F")
    for step in range(3):
        wanted, spent = eager.window(calls), twin.window(calls)
        assert spent.reductions == wanted.reductions == 2 * microbatches
        if step:
            assert_replayed(twin, spent)
    assert events(twin.context) == events(eager.context)
    found = [(event.phase, event.microbatch) for event in twin.context.trace or ()]
    assert found == [(event.phase, event.microbatch) for event in eager.context.trace or ()]


@on_two_ranks(reduce=["per_backward", "per_window"])
def test_one_pass_through_several_microbatches_is_a_backward_of_each(reduce: str) -> None:
    eager = Eager(linears(2), linears(2), reduce_gradients=reduce)
    twin = Compiled(linears(2), linears(2), reduce_gradients=reduce)
    for step in range(3):
        for each in (eager, twin):
            with counting(each.context) as spent:
                total = torch.zeros(())
                for microbatch in range(3):
                    x = data(each.seed, microbatch)[dist.get_rank()]
                    for chunk in each.chunks:
                        x = chunk(x)
                    total = total + mean_square(x)
                total.backward()
                each.context.finish_grad_sync()
            each.done = [0, 1, 2]
            each.check()
            assert spent.reductions == (12 if reduce == "per_backward" else 4)
            assert spent.replayed_windows == (step > 0)
    found = [(event.unit, event.phase, event.microbatch) for event in twin.context.trace or ()]
    wanted = [(event.unit, event.phase, event.microbatch) for event in eager.context.trace or ()]
    assert found == wanted


class Kept(nn.Module):
    """Keeps a hidden value, from which a backward of its own begins."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = torch.tanh(self.fc1(x))
        torch._dynamo.graph_break()
        return self.fc2(self.hidden.detach())


@on_two_ranks(reduce=["per_backward", "per_window"])
def test_backward_that_begins_inside_a_chunk_is_one_of_its_microbatch(reduce: str) -> None:
    """The pass through a graph begins at no output of a module that has hooks."""
    eager = Eager(Kept(), reduce_gradients=reduce)
    twin = Compiled(Kept(), fullgraph=False, reduce_gradients=reduce)
    for step in range(3):
        for each in (eager, twin):
            with counting(each.context) as spent:
                kept = []
                for microbatch in range(2):
                    each.run(f"F{microbatch}")
                    kept.append(each.chunks[0].hidden)
                for microbatch in range(2):
                    kept[microbatch].square().mean().backward()
                    each.run(f"B{microbatch}")
                each.context.finish_grad_sync()
            for microbatch in range(2):
                for x in data(each.seed, microbatch):
                    each.whole[0](x)
                    (each.whole[0].hidden.square().mean() / dist.get_world_size()).backward()
            each.check()
            if step:
                assert_replayed(each, spent)
            assert spent.reductions == (4 if reduce == "per_backward" else 2)
        assert events(twin.context) == events(eager.context)
    found = [event.microbatch for event in twin.context.trace or ()]
    assert found == [event.microbatch for event in eager.context.trace or ()]


@on_two_ranks()
def test_backward_that_begins_inside_a_chunk_of_a_closed_window_is_refused() -> None:
    twin = Compiled(Kept(), fullgraph=False)
    twin.run("F0")
    hidden = twin.chunks[0].hidden
    twin.run("B0")
    twin.context.finish_grad_sync()
    with refused(RuntimeError, "microbatch 0, a forward of window 0, but that window is closed"):
        hidden.sum().backward()


# Split backwards


@on_two_ranks(executor=list(EXECUTORS))
def test_backward_split_by_hand_has_its_weight_gradients_from_the_second_half(
    executor: str,
) -> None:
    """The first half is for the input; the second goes through the whole graph once more."""
    twin = EXECUTORS[executor](linears(2), linears(2), differentiable=True)
    for step in range(3):
        with counting(twin.context) as spent:
            halves: list[tuple[torch.Tensor, torch.Tensor | None]] = []
            for microbatch in range(2):
                twin.run(f"F{microbatch}")
                loss = mean_square(twin.outputs[1, microbatch])
                entered, hidden = twin.inputs[1, microbatch], twin.outputs[0, microbatch]
                loss.backward(inputs=[entered], retain_graph=True)
                assert entered.grad is not None
                gradient = entered.grad.clone()
                hidden.backward(gradient, inputs=[twin.inputs[0, microbatch]], retain_graph=True)
                halves += [(loss, None), (hidden, gradient)]
            reduced = twin.context.stats.reductions
            for output, gradient in halves:
                output.backward(gradient)
            assert twin.context.stats.reductions - reduced == 8
            twin.context.finish_grad_sync()
        assert spent.reductions == 8, "none in the first halves"
        assert spent.replayed_windows == (step > 0)
        twin.done = [0, 1]
        twin.check()
    assert not twin.context.fallbacks


def by_parameters(twin: Any) -> None:
    loss, x = mean_square(twin.outputs[0, 0]), twin.inputs[0, 0]
    loss.backward(inputs=[x], retain_graph=True)
    loss.backward(inputs=twin.parameters())


def by_torch(twin: Any) -> None:
    loss, x = mean_square(twin.outputs[0, 0]), twin.inputs[0, 0]
    _, groups = stage_backward_input([loss], None, [x], iter(twin.parameters()))
    stage_backward_weight(iter(twin.parameters()), groups)


HALVES = {"backward() of the parameters": by_parameters, "torch's halves": by_torch}


@on_two_ranks(executor=list(EXECUTORS), half=list(HALVES))
def test_weight_half_that_names_the_sharded_parameters_is_warned_of(
    executor: str, half: str
) -> None:
    """They are in no graph: torch finds nothing to differentiate, and says nothing."""
    twin = EXECUTORS[executor](linears(2), differentiable=True)
    with warnings_of() as messages:
        for _ in range(2):
            twin.run("F0")
            HALVES[half](twin)
            twin.context.finish_grad_sync()
            assert all(parameter.grad is None for parameter in twin.parameters())
            assert at_rest(twin.context)
            twin.forget()
    assert len(messages) == 1
    assert "chunk c0: its parameters have no gradient of some of its forwards" in messages[0]
    assert "run backward() without inputs=" in messages[0]
    assert "(2 times)" in twin.context.explain()
    twin.window("F0 B0")
