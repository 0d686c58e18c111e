"""Schedules that call submodules: hooks on those act for the unit around them.

Every window is compared with the same layers whole: gradients, then weights after an
optimizer step; and every unit must be sharded at its end.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from fsdp_fx import FSDPContext, IncompleteWindowError
from fsdp_fx.residency import Residency, Stats
from fsdp_fx.units import Unit
from models import DIM, cpu_mesh
from ranks import RankPools
from test_semantics import Twin, assert_replayed, at_rest, counting, data, events, refused

NODES = ("attention", "dispatch", "experts", "combine")


@dataclass
class Dispatched:
    """What goes to the experts."""

    tokens: torch.Tensor
    gates: torch.Tensor


class Attention(nn.Module):
    """Parameters, of which the output needs two."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.linear = nn.Linear(DIM, DIM)
        self.reentrant: bool | None = None  # how a part is checkpointed

    def part(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(self.norm(x))
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return x + self.part(x)
        if not x.requires_grad:
            x = x.detach().requires_grad_()
        y: torch.Tensor = checkpoint(self.part, x, use_reentrant=self.reentrant)
        return x + y


class Dispatch(nn.Module):
    """No parameters, and an output that is no tensor."""

    def forward(self, x: torch.Tensor) -> Dispatched:
        return Dispatched(torch.tanh(x), torch.sigmoid(x[..., :1]))


class DelayedLinear(nn.Module):
    """A linear whose weight gradient may come by a call of its own, later."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / DIM)
        self.bias = nn.Parameter(torch.zeros(DIM))
        self.delayed = self.assigns = False
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.delayed:
            return F.linear(x, self.weight, self.bias)
        result: torch.Tensor = WithoutWeightGradient.apply(x, self.weight, self.pending)
        return result + self.bias

    def backward_weight(self) -> None:
        x, gradient = self.pending.pop(0)
        weight = gradient.flatten(0, -2).T @ x.flatten(0, -2)
        if self.assigns or self.weight.grad is None:
            self.weight.grad = weight
        else:
            self.weight.grad += weight


class WithoutWeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, pending: list[Any]) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.pending = pending
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        ctx.pending.append((x.detach(), gradients[0]))
        return gradients[0] @ weight, None, None


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = DelayedLinear()

    def forward(self, dispatched: Dispatched) -> torch.Tensor:
        return self.linear(dispatched.tokens) * dispatched.gates


class Combine(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"output": x + torch.tanh(y)}


class Layer(nn.Module):
    """A layer that a schedule takes apart."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.dispatch = Dispatch()
        self.experts = Experts()
        self.combine = Combine()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x)
        output: torch.Tensor = self.combine(x, self.experts(self.dispatch(x)))["output"]
        return output


@dataclass(eq=False)
class Value:
    """A tensor between nodes, and what those that read it have in its place."""

    tensor: torch.Tensor
    read: list[torch.Tensor] = field(default_factory=list)


class Microbatch:
    """One microbatch on its way through the nodes of some layers, each a graph of its own.

    Args:
        layers: the layers.
        x: the input.
        cut: whether graphs end between nodes.
        wrap: how a node is called.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        x: torch.Tensor,
        cut: bool = True,
        wrap: Callable[..., Any] = lambda node, *args: node(*args),
    ) -> None:
        self.nodes = [(layer, name) for layer in layers for name in NODES]
        self.cut = cut
        self.wrap = wrap
        self.values: dict[str, Value] = {"x": Value(x)}
        self.outputs: list[list[Value]] = []

    def forward(self, count: int | None = None) -> Microbatch:
        """Run the next nodes; all that are left if not said how many."""
        for layer, name in self.nodes[: len(self.nodes) if count is None else count]:
            del self.nodes[0]
            node = getattr(layer, name)
            read, values = self._read, self.values
            if name == "attention":
                values["x"] = Value(self.wrap(node, read("x")))
                outputs = [values["x"]]
            elif name == "dispatch":
                dispatched = self.wrap(node, read("x"))
                values["tokens"] = Value(dispatched.tokens)
                values["gates"] = Value(dispatched.gates)
                outputs = [values["tokens"], values["gates"]]
            elif name == "experts":
                values["y"] = Value(self.wrap(node, Dispatched(read("tokens"), read("gates"))))
                outputs = [values["y"]]
            else:
                values["x"] = Value(self.wrap(node, read("x"), read("y"))["output"])
                outputs = [values["x"]]
            self.outputs.append(outputs)
        return self

    def _read(self, name: str) -> torch.Tensor:
        value = self.values[name]
        tensor = value.tensor
        if self.cut and tensor.requires_grad:
            tensor = tensor.detach().requires_grad_()
        value.read.append(tensor)
        return tensor

    def backward(self, count: int | None = None) -> Microbatch:
        """Differentiate the last nodes that were run; the loss with the very last."""
        if not self.cut:
            self.values["x"].tensor.square().mean().backward()
            self.outputs.clear()
            return self
        for _ in range(len(self.outputs) if count is None else count):
            tensors, gradients = [], []
            for value in self.outputs.pop():
                if not value.read:
                    value.read.append(value.tensor.detach().requires_grad_())
                    value.read[0].square().mean().backward()
                tensors.append(value.tensor)
                gradients.append(sum(tensor.grad for tensor in value.read))  # type: ignore[misc]
            torch.autograd.backward(tensors, gradients)  # type: ignore[arg-type]
        return self


class Nodes(Twin):
    """Layers of one chunk whose submodules are called, beside the same layers whole."""

    def __init__(
        self,
        layers: int = 2,
        release: str | None = "experts",
        delayed: bool = False,
        prepare: Callable[[nn.Module], Any] = lambda chunk: None,
        **options: Any,
    ) -> None:
        chunk = nn.Sequential(*(Layer() for _ in range(layers)))
        prepare(chunk)
        super().__init__(chunk, units=Layer, **options)
        self.layers = list(self.chunks[0])
        for layer in self.layers:
            layer.experts.linear.delayed = delayed
            self.context.hook_owner(
                layer,
                [getattr(layer, name) for name in NODES],
                release_after=None if release is None else getattr(layer, release),
                delayed_weight_gradients=delayed,
            )

    def microbatch(self, number: int, **options: Any) -> Microbatch:
        """A microbatch that is about to begin; the reference takes part in it too."""
        self.done.append(number)
        return Microbatch(self.layers, data(self.seed, number)[dist.get_rank()], **options)

    def step(self, schedule: Callable[[Nodes], None]) -> Stats:
        """Run, close and compare a window; returns what its counters went up by."""
        with counting(self.context) as spent:
            schedule(self)
            assert shows_sharded(self)
            self.context.finish_grad_sync()
        self.check()
        return spent

    def train(self, schedule: Callable[[Nodes], None], windows: int = 3) -> None:
        """Record a window and follow its program in others."""
        recorded = self.step(schedule)
        assert recorded.on_demand_gathers == recorded.gathers
        for _ in range(windows - 1):
            assert_replayed(self, self.step(schedule))


def shows_sharded(twin: Twin) -> bool:
    return all(hasattr(parameter, "full_tensor") for parameter in twin.parameters())


# Schedules


def one_by_one(twin: Nodes, **options: Any) -> None:
    for number in range(2):
        twin.microbatch(number, **options).forward().backward()


def in_one_pass(twin: Nodes) -> None:
    one_by_one(twin, cut=False)


def combined(twin: Nodes, microbatches: int = 3) -> None:
    """The forward of one microbatch and the backward of the one before, node by node."""
    before = twin.microbatch(0).forward()
    for number in range(1, microbatches):
        after = twin.microbatch(number)
        for _ in range(len(NODES) * len(twin.layers)):
            before.backward(1)
            after.forward(1)
            assert shows_sharded(twin)
        before = after
    before.backward()


def both_in_the_same_layer(twin: Nodes) -> None:
    """Forward and backward of two microbatches meet in each owner."""
    before, after = twin.microbatch(0).forward(), twin.microbatch(1)
    for _ in twin.layers:
        before.backward(2)
        after.forward(2)
        before.backward(1)
        after.forward(1)
        before.backward(1)
        after.forward(1)
    after.backward()


def backward_inside_a_forward(twin: Nodes) -> None:
    """A microbatch is in the middle of the first layer while another goes all the way back."""
    before, after = twin.microbatch(0).forward(), twin.microbatch(1).forward(1)
    before.backward()
    after.forward().backward()


def two_forwards_at_once(twin: Nodes) -> None:
    first, second = twin.microbatch(0), twin.microbatch(1)
    for _ in range(len(NODES) * len(twin.layers)):
        first.forward(1)
        second.forward(1)
    for _ in range(len(NODES) * len(twin.layers)):
        first.backward(1)
        second.backward(1)


SCHEDULES: tuple[Callable[[Nodes], None], ...] = (
    one_by_one,
    in_one_pass,
    combined,
    both_in_the_same_layer,
    backward_inside_a_forward,
    two_forwards_at_once,
)


def _every_schedule(reduce_gradients: str, release: str | None) -> None:
    for schedule in SCHEDULES:
        try:
            Nodes(release=release, reduce_gradients=reduce_gradients).train(schedule)
        except BaseException as error:
            error.add_note(schedule.__name__)
            raise


@pytest.mark.parametrize(
    ("reduce_gradients", "release"), [("per_backward", "experts"), ("per_window", None)]
)
def test_every_order_of_nodes_trains_as_the_whole_layers_do(
    ranks: RankPools, reduce_gradients: str, release: str | None
) -> None:
    ranks(2).run(_every_schedule, reduce_gradients, release, timeout=150)


def _combined() -> None:
    Nodes(layers=3).train(combined, windows=4)


@pytest.mark.parametrize("world_size", [2, 8])
def test_combined_1f1b_trains_as_the_whole_layers_do(ranks: RankPools, world_size: int) -> None:
    ranks(world_size).run(_combined)


def _events() -> None:
    twin = Nodes()
    twin.step(one_by_one)
    assert events(twin.context) == "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"
    trace = twin.context.trace
    assert trace is not None
    assert [event.microbatch for event in trace] == [0, 0, 0, 0, 1, 1, 1, 1]

    def crossing(twin: Nodes) -> None:
        before, after = twin.microbatch(0).forward(), twin.microbatch(1).forward(1)
        before.backward(2)
        after.forward()
        before.backward()
        after.backward()

    twin = Nodes(layers=1)
    twin.step(crossing)
    assert events(twin.context) == "0F0 0F1 0B0 0B1"
    trace = twin.context.trace
    assert trace is not None
    # F1 begins before B0 and ends before it, without an event in between.
    assert (trace.ends, trace.ending) == ((0, 2, 2, 3), (0, 1, 2, 3))
    assert_replayed(twin, twin.step(crossing))


def test_submodules_of_one_round_are_one_event(ranks: RankPools) -> None:
    ranks(2).run(_events)


def _residency() -> None:
    twin = Nodes(layers=1)
    twin.step(one_by_one)
    unit = twin.context.units[0]
    for _ in range(2):
        microbatch = twin.microbatch(0)
        held = []
        for _node in NODES:
            microbatch.forward(1)
            held.append(unit.holds)
        assert held == [1, 1, 0, 0]
        held = []
        for _node in NODES:
            microbatch.backward(1)
            held.append(unit.holds)
        assert held == [1, 1, 1, 0]
        twin.context.finish_grad_sync()
        twin.check()


def test_unit_is_held_until_the_release_and_until_the_last_backward(ranks: RankPools) -> None:
    ranks(2).run(_residency)


# Delayed weight gradients


def delayed(twin: Nodes) -> None:
    for number in range(2):
        twin.microbatch(number).forward().backward()
        for layer in reversed(twin.layers):
            with twin.context.weight_gradients(layer):
                assert isinstance(layer.experts.linear.weight, nn.Parameter)
                assert layer.experts.linear.weight.shape == (DIM, DIM)
                layer.experts.linear.backward_weight()


def delayed_to_the_end(twin: Nodes) -> None:
    combined(twin)
    for layer in reversed(twin.layers):
        for _ in range(3):
            with twin.context.weight_gradients(layer):
                layer.experts.linear.backward_weight()


def delayed_after_the_next(twin: Nodes) -> None:
    """Forward, backward and weight gradients of three microbatches meet in each owner."""
    ready: list[Microbatch] = [twin.microbatch(0).forward()]
    for number in range(1, 4):
        after = twin.microbatch(number)
        for place in range(len(twin.layers)):
            ready[0].backward(4)
            after.forward(4)
            if number > 1:
                with twin.context.weight_gradients(twin.layers[place]):
                    twin.layers[place].experts.linear.backward_weight()
        ready = [after]
    ready[0].backward()
    for layer in twin.layers:
        while layer.experts.linear.pending:
            with twin.context.weight_gradients(layer):
                layer.experts.linear.backward_weight()


def _delayed(reduce_gradients: str) -> None:
    for schedule in (delayed, delayed_to_the_end, delayed_after_the_next):
        for assigns in (True, False):
            twin = Nodes(delayed=True, reduce_gradients=reduce_gradients)
            for layer in twin.layers:
                layer.experts.linear.assigns = assigns
            try:
                twin.train(schedule)
            except BaseException as error:
                error.add_note(f"{schedule.__name__}, assigns: {assigns}")
                raise


@pytest.mark.parametrize("reduce_gradients", ["per_backward", "per_window"])
def test_delayed_weight_gradients_add_up(ranks: RankPools, reduce_gradients: str) -> None:
    ranks(2).run(_delayed, reduce_gradients)


class WholeLayers(Twin):
    """Layers that are called whole, and whose weight gradients are delayed all the same."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(Layer(), Layer()), units=Layer)
        for layer in self.chunks[0]:
            layer.experts.linear.delayed = True
            layer.experts.linear.assigns = True
            self.context.hook_owner(layer, delayed_weight_gradients=True)


def _reduced_after() -> None:
    reduced: list[str] = []
    reduce = Residency.reduce

    def spy(residency: Residency, unit: Unit, *more: Any) -> None:
        reduced.append(unit.spec.name)
        reduce(residency, unit, *more)

    Residency.reduce = spy  # type: ignore[method-assign, assignment]
    try:
        for twin in (WholeLayers(), Nodes(delayed=True)):
            for _ in range(3):
                for number in range(2):
                    if isinstance(twin, Nodes):
                        twin.microbatch(number).forward().backward()
                    else:
                        twin.run(f"F{number} B{number}")
                    assert reduced == []
                    assert [unit.holds for unit in twin.context.units] == [1, 1]
                    for index in (1, 0):
                        layer = twin.chunks[0][index]
                        with twin.context.weight_gradients(layer):
                            layer.experts.linear.backward_weight()
                            assert reduced == []
                        assert reduced == [f"c0.{index}"]
                        assert twin.context.units[index].holds == 0
                        reduced.clear()
                twin.context.finish_grad_sync()
                assert reduced == []
                twin.check()
            assert twin.context.stats.replayed_windows == 2
    finally:
        Residency.reduce = reduce  # type: ignore[method-assign]


def test_unit_is_reduced_after_its_delayed_weight_gradients(ranks: RankPools) -> None:
    ranks(2).run(_reduced_after)


def _evaluated() -> None:
    twin = WholeLayers()
    x = torch.randn(3, DIM, requires_grad=True)
    for _ in range(2):
        twin.run("F0")
        with twin.context.evaluation():  # as a pipeline's shape inference does
            (gradient,) = torch.autograd.grad(twin.chunks[0](x).sum(), x)
        assert gradient.abs().sum() > 0
        for layer in twin.chunks[0]:
            layer.experts.linear.pending.pop()
        twin.run("B0")
        for layer in reversed(twin.chunks[0]):
            with twin.context.weight_gradients(layer):
                layer.experts.linear.backward_weight()
        twin.context.finish_grad_sync()
        twin.check()


def test_backward_of_an_evaluation_delays_nothing(ranks: RankPools) -> None:
    ranks(2).run(_evaluated)


def enter(context: FSDPContext, layer: nn.Module) -> None:
    with context.weight_gradients(layer):
        pass


def _delayed_refusals() -> None:
    twin = Nodes(delayed=True)
    context, layers = twin.context, twin.layers
    with refused(RuntimeError, r"no weight gradients of c0\.1 are delayed"):
        enter(context, layers[1])
    for _ in range(2):
        microbatch = twin.microbatch(0).forward().backward(3)
        with refused(RuntimeError, r"no weight gradients of c0\.1 are delayed: run its backward"):
            enter(context, layers[1])
        microbatch.backward()
        message = r"of unit c0\.1, microbatch 0 are missing: .*ctx\.weight_gradients\(owner\)"
        with refused(IncompleteWindowError, message):
            context.finish_grad_sync()
        with context.weight_gradients(layers[1]):
            layers[1].experts.linear.backward_weight()
        with pytest.raises(ArithmeticError), context.weight_gradients(layers[0]):
            raise ArithmeticError("by intention")
        with refused(IncompleteWindowError, r"crossed the weight gradients of c0\.0, microbatch 0"):
            context.finish_grad_sync()
        assert shows_sharded(twin)
        context.abort()
        assert at_rest(context)
        for layer in layers:
            layer.experts.linear.pending.clear()
        twin.forget()
        twin.step(delayed)


def test_delayed_weight_gradients_that_are_missing_are_named(ranks: RankPools) -> None:
    ranks(2).run(_delayed_refusals)


# Windows that are not whole


def _incomplete() -> None:
    twin = Nodes(release=None)
    close = twin.context.finish_grad_sync
    for _ in range(2):
        microbatch = twin.microbatch(0).forward(3)
        with refused(
            IncompleteWindowError, r"the forward of c0\.0, microbatch 0 did not reach combine"
        ):
            close()
        microbatch.forward()
        with refused(IncompleteWindowError, r"the backward of c0\.0, microbatch 0 is missing"):
            close()
        microbatch.backward(7)
        with refused(
            IncompleteWindowError, r"the backward of attention in c0\.0, microbatch 0 is missing"
        ):
            close()
        microbatch.backward()
        close()
        twin.check()


def test_what_is_missing_of_a_round_is_named(ranks: RankPools) -> None:
    ranks(2).run(_incomplete)


def _aborted() -> None:
    for recorded in (False, True):
        for forwards in (1, 2, 3, 4, 6):
            twin = Nodes()
            if recorded:
                twin.step(combined)
            microbatch = twin.microbatch(0).forward().backward(3)
            other = twin.microbatch(1).forward(forwards)
            # In the first layer, in the second, or between two nodes.
            handle = other.nodes[0][0].dispatch.register_forward_pre_hook(_raise)
            with pytest.raises(ArithmeticError) if forwards in (1, 4) else nullcontext():
                other.forward()
            handle.remove()
            twin.context.abort()
            assert at_rest(twin.context)
            assert shows_sharded(twin)
            with refused(RuntimeError, r"is closed or aborted"):
                microbatch.backward(1)
            twin.forget()
            twin.context.abort()  # what the refused backward has left
            twin.train(combined, windows=2) if not recorded else assert_replayed(
                twin, twin.step(combined)
            )


def _raise(*_: Any) -> None:
    raise ArithmeticError("by intention")


def test_retry_after_abort_equals_the_reference(ranks: RankPools) -> None:
    ranks(2).run(_aborted)


# Evaluation


def _evaluate(twin: Nodes, how: str) -> None:
    """Run an evaluation in the middle of a window; its result is right and nothing is kept."""
    context, chunk = twin.context, twin.chunks[0]
    x = data(99, 0)[dist.get_rank()]
    with torch.no_grad():
        wanted = twin.whole[0](x)
    cursor, held = context.window.cursor, [unit.holds for unit in context.units]
    if how == "evaluation":
        with context.evaluation():
            found = Microbatch(twin.layers, x).forward().values["x"].tensor
    elif how == "no_grad":
        with torch.no_grad():
            found = Microbatch(twin.layers, x).forward().values["x"].tensor
    elif how == "eval":
        chunk.eval()
        found = Microbatch(twin.layers, x).forward().values["x"].tensor
        chunk.train()
    elif how == "part":  # the rest never comes
        with context.evaluation():
            Microbatch(twin.layers, x).forward(6)
        found = wanted
    elif how == "failure":
        handle = twin.layers[1].experts.register_forward_pre_hook(_raise)
        with pytest.raises(ArithmeticError), torch.no_grad():
            Microbatch(twin.layers, x).forward()
        handle.remove()
        found = wanted
    else:
        with torch.no_grad():
            found = chunk(x)
    torch.testing.assert_close(found, wanted)
    assert context.window.cursor == cursor
    if how != "part":
        assert [unit.holds for unit in context.units] == held


def _evaluations() -> None:
    for how in ("evaluation", "no_grad", "eval", "part", "failure", "plain"):

        def schedule(twin: Nodes, how: str = how) -> None:
            _evaluate(twin, how)
            first, second = twin.microbatch(0).forward(5), twin.microbatch(1)
            _evaluate(twin, how)
            second.forward(1)
            first.forward().backward(3)
            _evaluate(twin, how)
            first.backward()
            second.forward().backward()
            _evaluate(twin, how)

        def without(twin: Nodes) -> None:
            first, second = twin.microbatch(0).forward(5), twin.microbatch(1)
            second.forward(1)
            first.forward().backward(3)
            first.backward()
            second.forward().backward()

        twin = Nodes()
        try:
            twin.step(schedule)
            assert (twin.context.stats.recorded_windows, len(twin.context.trace or ())) == (1, 8)
            twin.step(schedule)
            assert_replayed(twin, twin.step(without))
            assert twin.context.stats.replayed_windows == 2
        except BaseException as error:
            error.add_note(how)
            raise


def test_evaluation_by_submodules_is_no_event(ranks: RankPools) -> None:
    ranks(2).run(_evaluations)


def _plain_forward() -> None:
    def schedule(twin: Nodes) -> None:
        """One microbatch by nodes, another by the whole model, in one window."""
        twin.microbatch(0).forward().backward()
        twin.run("F1 B1")

    twin = Nodes()
    twin.train(schedule)
    assert events(twin.context) == "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"


def test_forward_of_the_owner_itself_goes_by_its_own_hooks(ranks: RankPools) -> None:
    ranks(2).run(_plain_forward)


class ByNodes(nn.Sequential):
    """A chunk whose forward calls the submodules of its layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        microbatch = Microbatch(list(self), x, cut=False)
        return microbatch.forward().values["x"].tensor


def _inside_a_chunk() -> None:
    twin = Twin(ByNodes(Layer(), Layer()), units=Layer)
    for layer in twin.chunks[0]:
        twin.context.hook_owner(layer, [getattr(layer, name) for name in NODES])
    twin.window("F0 F1 B0 B1")
    assert events(twin.context) == "0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1"
    for _ in range(2):
        with torch.no_grad():
            twin.chunks[0](data(7, 0)[dist.get_rank()])
        assert_replayed(twin, twin.window("F0 F1 B0 B1"))


def test_chunk_whose_forward_calls_submodules_is_one_call(ranks: RankPools) -> None:
    ranks(2).run(_inside_a_chunk)


class Skipping(nn.Module):
    """A layer of which a microbatch may leave a submodule out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.extra = nn.Linear(DIM, DIM)
        self.second = nn.Linear(DIM, DIM)
        self.last = nn.Tanh()


def _skipped() -> None:
    twin = Twin(Skipping(), units=Skipping)
    layer = twin.chunks[0]
    whole: Any = twin.whole[0]
    nodes = [layer.first, layer.extra, layer.second, layer.last]
    twin.context.hook_owner(layer, nodes, release_after=layer.second)
    for window in range(3):
        with counting(twin.context) as spent:
            x0, x1 = (data(window, number)[dist.get_rank()] for number in (0, 1))
            x0 = layer.second(layer.first(x0))  # released, and `last` is still to come
            x1 = layer.extra(layer.first(x1))
            x0 = layer.last(x0)
            x1 = layer.last(layer.second(x1))
            for x in (x0, x1):
                x.square().mean().backward()
            twin.context.finish_grad_sync()
        for x0, x1 in zip(data(window, 0), data(window, 1), strict=True):
            x0 = whole.last(whole.second(whole.first(x0)))
            x1 = whole.last(whole.second(whole.extra(whole.first(x1))))
            ((x0.square().mean() + x1.square().mean()) / dist.get_world_size()).backward()
        twin.check()
        assert events(twin.context) == "c0F0 c0F1 c0B0 c0B1"
    assert_replayed(twin, spent)


def test_submodule_left_out_of_a_round_is_not_taken_from_the_next(ranks: RankPools) -> None:
    ranks(2).run(_skipped)


# Frozen units, recomputation, modules of their own


def _frozen() -> None:
    def freeze(chunk: Any) -> None:
        chunk[1].requires_grad_(False)

    twin = Nodes(layers=3, prepare=freeze)
    twin.train(combined)
    assert {event.unit for event in twin.context.trace or ()} == {"c0.0", "c0.1", "c0.2"}

    def freeze_first(chunk: Any) -> None:
        chunk[0].requires_grad_(False)

    def schedule(twin: Nodes) -> None:
        for number in range(2):
            # Nothing of the first layer can be differentiated.
            twin.microbatch(number).forward().backward(4)

    twin = Nodes(prepare=freeze_first)
    twin.train(schedule)
    assert events(twin.context) == "0F0 1F0 1B0 0F1 1F1 1B1"


def test_frozen_owner_is_gathered_and_freed_and_not_reduced(ranks: RankPools) -> None:
    ranks(2).run(_frozen)


def _recomputed_in_part() -> None:
    for reentrant in (False, True):

        def prepare(chunk: Any, reentrant: bool = reentrant) -> None:
            for layer in chunk:
                layer.attention.reentrant = reentrant

        for schedule in (combined, in_one_pass):
            try:
                Nodes(prepare=prepare).train(schedule)
            except BaseException as error:
                error.add_note(f"{schedule.__name__}, reentrant: {reentrant}")
                raise


def test_part_of_a_submodule_can_be_recomputed(ranks: RankPools) -> None:
    ranks(2).run(_recomputed_in_part)


def _recomputed() -> None:
    for reentrant in (False, True):

        def wrap(node: Any, *args: Any, reentrant: bool = reentrant) -> Any:
            if not isinstance(node, Attention):
                return node(*args)
            if reentrant and not args[0].requires_grad:
                args = (args[0].detach().requires_grad_(),)
            return checkpoint(node, *args, use_reentrant=reentrant)

        def schedule(twin: Nodes, wrap: Any = wrap) -> None:
            before = twin.microbatch(0, wrap=wrap).forward()
            after = twin.microbatch(1, wrap=wrap)
            for _ in range(8):
                before.backward(1)
                after.forward(1)
            after.backward()

        twin = Nodes()
        try:
            twin.train(schedule)
        except BaseException as error:
            error.add_note(f"reentrant: {reentrant}")
            raise
        assert len(twin.context.trace or ()) == 8


def test_recomputation_of_a_submodule_is_no_event(ranks: RankPools) -> None:
    ranks(2).run(_recomputed)


class Outer(nn.Module):
    """A layer whose experts are a unit of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.experts = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.experts(self.attention(x))
        return output


def _nodes_of_outer(twin: Twin, number: int) -> Iterator[None]:
    """Forward, then backward of a microbatch, node by node."""
    graphs: list[tuple[torch.Tensor, torch.Tensor]] = []
    x = data(twin.seed, number)[dist.get_rank()]
    for layer in twin.chunks[0]:
        for node in (layer.attention, layer.experts):
            x = x.detach().requires_grad_(bool(graphs))
            y = node(x)
            graphs.append((x, y))
            x = y
            yield
    x = x.detach().requires_grad_()
    twin.loss(x).backward()
    gradient = x.grad
    for x, y in reversed(graphs):
        y.backward(gradient)
        gradient = x.grad
        yield
    twin.done.append(number)


def _sharded_submodules() -> None:
    twin = Twin(nn.Sequential(Outer(), Outer()), units=(nn.Linear, Outer))
    for layer in twin.chunks[0]:
        twin.context.hook_owner(layer, [layer.attention])
    for window in range(3):
        with counting(twin.context) as spent:
            passes = [_nodes_of_outer(twin, number) for number in range(3)]
            for _ in range(4):
                next(passes[0])
            for before, after in itertools.pairwise(passes):
                for _ in range(4):
                    next(before)
                    next(after)
                assert next(before, "over") == "over"
            if window == 1:
                with torch.no_grad():  # an evaluation of one unit, called without its chunk
                    twin.chunks[0][0].experts(torch.zeros(1, DIM))
                with refused(
                    IncompleteWindowError,
                    r"the backward of c0\.0, microbatch 2 is missing; the next event",
                ):
                    twin.context.finish_grad_sync()
            for _ in passes[2]:
                pass
            twin.context.finish_grad_sync()
        twin.check()
        if window == 2:
            assert_replayed(twin, spent)
    numbers: dict[str, list[int]] = {}
    for event in twin.context.trace or ():
        if event.phase == "F":
            numbers.setdefault(event.unit, []).append(event.microbatch)
    assert numbers
    assert set(map(tuple, numbers.values())) == {(0, 1, 2)}


def test_units_that_are_called_without_their_chunk_count_their_own_microbatches(
    ranks: RankPools,
) -> None:
    ranks(2).run(_sharded_submodules)


@functools.cache  # with its meshes: the threads of process groups last as long as the rank
def _example() -> ModuleType:
    path = Path(__file__).parents[1] / "examples" / "combined_1f1b.py"
    specification = importlib.util.spec_from_file_location("combined_1f1b", path)
    assert specification is not None
    assert specification.loader is not None
    module: Any = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # its dataclasses look there
    specification.loader.exec_module(module)
    module.init_device_mesh = functools.cache(module.init_device_mesh)
    return module


def _mixture_of_experts(delayed: bool) -> None:
    example = _example()
    options = example.Options(layers=2, microbatches=3, delay_weight_gradients=delayed)
    recorded, *replayed = example.train(options)
    for row in (recorded, *replayed):
        assert row.gradient_error < 1e-5, row
        assert row.loss_error < 1e-5, row
        # Per microbatch, two units for each of two layers, one at each end of them.
        assert (row.events, row.reductions) == (36, 18), row
    assert recorded.on_demand == recorded.gathers
    assert [row.on_demand for row in replayed] == [1, 1]


def test_mixture_of_experts_example_equals_the_model_whole(ranks: RankPools) -> None:
    for delayed in (False, True):
        ranks(4).run(_mixture_of_experts, delayed)


# What is refused, and what is left behind


@pytest.mark.usefixtures("fake_group")
def test_owner_and_submodules_must_fit() -> None:
    layers = [Layer(), Layer()]
    chunk = nn.Sequential(*layers, nn.Linear(DIM, DIM))
    for layer in layers:
        fully_shard(layer.experts, mesh=cpu_mesh())
        fully_shard(layer, mesh=cpu_mesh())
    context = FSDPContext(mode="recorded")
    context.adopt(chunk)
    first, second = layers
    nodes = [first.attention, first.dispatch, first.combine]
    hook = context.hook_owner
    with refused(TypeError, "takes a module as owner, not str"):
        hook("layer", nodes)  # type: ignore[arg-type]
    with refused(ValueError, r"Layer is in no chunk of this context: adopt\(\)"):
        hook(Layer(), nodes)
    with refused(ValueError, "Sequential has no unit of its own"):
        hook(chunk, nodes)
    with refused(ValueError, "Attention has no unit of its own"):
        hook(first.attention, [first.attention.linear])
    with refused(TypeError, r"of c0\.0 takes submodules, not str"):
        hook(first, ["attention"])  # type: ignore[list-item]
    with refused(ValueError, r"Attention is not inside of c0\.0"):
        hook(first, [second.attention])
    with refused(ValueError, r"Layer is not inside of c0\.0"):
        hook(first, [first])
    for inside in (first.experts, first.experts.linear):
        with refused(ValueError, r"experts.* belongs to a nearer unit, c0\.0\.experts"):
            hook(first, [first.attention, inside])
    with refused(ValueError, r"attention of c0\.0 is given twice"):
        hook(first, [first.attention, first.attention])
    with refused(ValueError, r"attention\.norm is inside of attention"):
        hook(first, [first.attention, first.attention.norm])
    with refused(ValueError, r"release_after, .*Layer, is none of .*: give one of attention, disp"):
        hook(first, nodes, release_after=first)
    with refused(ValueError, r"attention of c0\.0 comes behind release_after and has parameters"):
        hook(first, [first.dispatch, first.attention], release_after=first.dispatch)
    with refused(ValueError, r"of c0\.0 without submodules has no effect"):
        hook(first)
    with refused(ValueError, r"of c0\.0 are not delayed: call hook_owner\(\) with"):
        enter(context, first)
    hook(first, nodes)
    with refused(ValueError, r"c0\.0 is hooked already"):
        hook(first, nodes)
    hook(first.experts, delayed_weight_gradients=True)
    with refused(ValueError, r"c0\.0\.experts is hooked already"):
        hook(first.experts, delayed_weight_gradients=True)
    first.attention(torch.ones(1, DIM))
    with refused(RuntimeError, r"of c0\.1 after training has begun"):
        hook(second, [second.attention])


@pytest.mark.usefixtures("fake_group")
def test_registration_mode_refuses_owners() -> None:
    layer = Layer()
    fully_shard(layer, mesh=cpu_mesh())
    context = FSDPContext()
    context.adopt(layer)
    with refused(RuntimeError, 'in registration mode.*build the context with mode="recorded"'):
        context.hook_owner(layer, [layer.attention])


@pytest.mark.usefixtures("fake_group")
def test_hooked_model_is_gone_when_it_is_deleted() -> None:
    layer = Layer()
    fully_shard(layer, mesh=cpu_mesh())
    context = FSDPContext(mode="recorded")
    context.adopt(layer)
    context.hook_owner(layer, [getattr(layer, name) for name in NODES])
    for _ in range(2):
        Microbatch([layer], torch.ones(1, DIM)).forward().backward()
        context.finish_grad_sync()
    gone = [weakref.ref(module) for module in layer.modules()]
    gc.disable()
    try:
        del layer
        assert [reference() for reference in gone] == [None] * len(gone)
    finally:
        gc.enable()
