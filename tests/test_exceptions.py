"""Exceptions anywhere in a window, then ``abort()`` and a clean retry; nested autograd passes.

Every rank raises at the same place. What follows is compared with the reference: nothing
of the failed window may be left.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import re
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_fx import IncompleteWindowError
from fsdp_fx.torch_internals import current_graph_task
from fsdp_fx.units import Unit
from models import DIM, Block, Chunk, linears
from test_recomputation import Layers
from test_semantics import (
    Twin,
    assert_replayed,
    at_rest,
    counting,
    data,
    events,
    full_state,
    on_two_ranks,
    resident,
)


class Intended(ArithmeticError):
    """What the tests raise."""


def fail(*_: Any) -> None:
    raise Intended("by intention")


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


class Failure(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise Intended("by intention")


def at_time(n: int, action: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that does nothing but for its ``n``-th call."""
    calls = [0]

    def hook(*arguments: Any) -> Any:
        calls[0] += 1
        return action(*arguments) if calls[0] == n + 1 else None

    return hook


def nested_twin() -> Twin:
    """Two chunks of units in units, whose chunk units have a norm of their own."""
    return Twin(Chunk(), Chunk(), units=(Block, Chunk))


Install = Callable[[Any, int], Any]  # on a module, for its n-th forward: the hook's handle


def before_ours(module: nn.Module, n: int) -> Any:
    return module.register_forward_pre_hook(at_time(n, fail), prepend=True)


def after_ours(module: nn.Module, n: int) -> Any:
    return module.register_forward_pre_hook(at_time(n, fail))


def forward_hook(module: nn.Module, n: int) -> Any:
    return module.register_forward_hook(at_time(n, fail))


def forward_hook_before_ours(module: nn.Module, n: int) -> Any:
    return module.register_forward_hook(at_time(n, fail), prepend=True)


def keyboard(module: nn.Module, n: int) -> Any:
    return module.register_forward_pre_hook(at_time(n, interrupt))


def backward_of_a_function(module: nn.Module, n: int) -> Any:
    return module.register_forward_hook(at_time(n, lambda module, args, out: Failure.apply(out)))


def tensor_hook(module: nn.Module, n: int, action: Callable[..., Any] = fail) -> Any:
    def install(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(action)

    return module.register_forward_hook(at_time(n, install))


def keyboard_in_a_backward(module: nn.Module, n: int) -> Any:
    return tensor_hook(module, n, interrupt)


def tensor_hook_before_ours(module: nn.Module, n: int) -> Any:
    def install(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    return module.register_forward_hook(at_time(n, install), prepend=True)


def backward_hook(module: nn.Module, n: int) -> Any:
    return module.register_full_backward_hook(at_time(n, fail))


PLACES: dict[str, Callable[[Twin], nn.Module]] = {
    "the first unit": lambda twin: twin.chunks[0],
    "a unit in a unit": lambda twin: twin.chunks[0].blocks[1],
    "inside of a unit": lambda twin: twin.chunks[1].blocks[0].down,
    "the last unit": lambda twin: twin.chunks[1],
}
IN_FORWARD: list[Install] = [
    before_ours,
    after_ours,
    forward_hook,
    forward_hook_before_ours,
    keyboard,
]
IN_BACKWARD: list[Install] = [
    backward_of_a_function,
    tensor_hook,
    tensor_hook_before_ours,
    backward_hook,
    keyboard_in_a_backward,
]

CALLS = "c0F0 c0F1 c1F0 c1B0 c1F1 c0B0 c1B1 c0B1"
SHORT = "F0 B0"


def fails(twin: Twin, calls: str) -> str:
    """Run a window that raises, and abort it; what the close said in between."""
    context = twin.context
    windows, programs = context.stats.windows, context.programs
    with pytest.raises((Intended, KeyboardInterrupt)):
        twin.run(calls)
    message = ""
    if context.window.is_open:  # something happened before the exception
        with pytest.raises(IncompleteWindowError, match="is not whole") as error:
            context.finish_grad_sync()
        message = str(error.value)
        assert "\n" not in message
    assert context.stats.windows == windows
    assert context.mode == "registration" or context.programs == programs, "no trace is kept"
    context.abort()
    assert at_rest(context)
    assert context.stats.resident_bytes == 0
    assert all(isinstance(parameter, DTensor) for parameter in twin.parameters())
    assert all(parameter.grad is None for parameter in twin.parameters())
    twin.forget()
    return message


def retried(twin: Twin, calls: str) -> None:
    """A window equals the reference, and again when it is replayed."""
    twin.window(calls)
    assert_replayed(twin, twin.window(calls))


@on_two_ranks(install=IN_FORWARD, replay=[False, True])
def test_exception_in_a_forward_then_abort_and_a_clean_retry(
    install: Install, replay: bool
) -> None:
    twin = nested_twin()
    if replay:
        twin.window(CALLS)
    for (name, place), microbatch in zip(PLACES.items(), (0, 1, 1, 0), strict=True):
        handle = install(place(twin), microbatch)
        try:
            fails(twin, CALLS)
        except BaseException as error:
            error.add_note(f"in {name}, microbatch {microbatch}")
            raise
        handle.remove()
    retried(twin, SHORT if replay else CALLS)


@on_two_ranks(install=IN_BACKWARD, replay=[False, True])
def test_exception_in_a_backward_then_abort_and_a_clean_retry(
    install: Install, replay: bool
) -> None:
    twin = nested_twin()
    if replay:
        twin.window(CALLS)
    for (name, place), microbatch in zip(PLACES.items(), (0, 1, 1, 0), strict=True):
        handle = install(place(twin), microbatch)
        try:
            fails(twin, CALLS)
        except BaseException as error:
            error.add_note(f"in {name}, microbatch {microbatch}")
            raise
        handle.remove()
    retried(twin, SHORT if replay else CALLS)


@on_two_ranks(replay=[False, True])
def test_refused_close_names_the_exception_its_unit_and_where_it_crossed_the_window(
    replay: bool,
) -> None:
    twin = nested_twin()
    if replay:
        twin.window(CALLS)

    def message(install: Install, module: nn.Module) -> str:
        handle = install(module, 1)
        said = fails(twin, CALLS)
        handle.remove()
        return said

    found = message(after_ours, twin.chunks[0].blocks[1])
    assert "Block (unit c0.blocks.1) of chunk c0, microbatch 1" in found, found
    assert "(Intended: by intention)" in found, found
    found = message(tensor_hook, twin.chunks[0].blocks[0])
    assert "an exception crossed it after c0.blocks.0 B1" in found, found


@on_two_ranks(mode=["non-reentrant", "reentrant"], around=["each layer", "the whole layers"])
def test_exception_inside_a_recomputation_then_abort_and_a_clean_retry(
    mode: str, around: str
) -> None:
    for action in (fail, interrupt):
        for replay in (False, True):
            twin = Twin(Layers(mode, around if around == "each layer" else "each unit"))
            if replay:
                twin.window("F0 F1 B0 B1")

            def in_recomputation(*_: Any, action: Any = action) -> None:
                if current_graph_task() != -1:
                    action()

            for name in ("up", "down"):
                module = getattr(twin.chunks[0].layers[0], name)
                handle = module.register_forward_pre_hook(in_recomputation)
                fails(twin, "F0 F1 B0 B1")
                handle.remove()
            twin.window("F0 F1 B0 B1")
            assert twin.window("F0 F1 B0 B1").replayed_windows == 1


@on_two_ranks(replay=[False, True])
def test_exception_in_an_evaluation_leaves_the_window_whole(replay: bool) -> None:
    twin = nested_twin()
    context = twin.context
    if replay:
        twin.window(CALLS)
    x = data(3, 3)[dist.get_rank()]

    def evaluate() -> None:
        chunk = twin.chunks[0]
        for install in (before_ours, after_ours, forward_hook, forward_hook_before_ours):
            for module in (chunk, chunk.blocks[1], chunk.blocks[1].down):
                handle = install(module, 0)
                before = resident(context), context.window.cursor
                with pytest.raises(Intended), context.evaluation():
                    chunk(x)
                handle.remove()
                assert (resident(context), context.window.cursor) == before
                assert not any(unit.holds for unit in context.units if unit.spec.chunk == "c0")

    evaluate()
    for call in CALLS.split():
        twin.run(call)
        evaluate()
    context.finish_grad_sync()
    twin.check()
    assert context.stats.replayed_windows == replay


# Collectives


@contextlib.contextmanager
def failing_collective(owner: Any, name: str, n: int) -> Iterator[list[int]]:
    """Make the ``n``-th call raise; the list says how many there were."""
    original = getattr(owner, name)
    calls = [0]

    def call(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == n + 1:
            raise Intended("by intention")
        return original(*arguments, **options)

    with mock.patch.object(owner, name, call):
        yield calls


COLLECTIVES = {
    "gather": (Unit, "gather"),
    "wait": (Unit, "wait"),
    "all-gather": (dist.ProcessGroup, "allgather_into_tensor_coalesced"),
    "reduction": (Unit, "reduce"),
    "reduce-scatter": (dist.ProcessGroup, "reduce_scatter_tensor_coalesced"),
}


@on_two_ranks(kind=list(COLLECTIVES), replay=[False, True])
def test_exception_in_any_collective_then_abort_and_a_clean_retry(kind: str, replay: bool) -> None:
    """The n-th of the window, for every n: in a forward, in a backward, in a prefetch."""
    owner, name = COLLECTIVES[kind]
    twin = Twin(Chunk(1), linears(1), units=(Block, Chunk, nn.Linear))
    if replay:
        twin.window(CALLS)
    with failing_collective(owner, name, -1) as calls:
        twin.window(CALLS)
    assert calls[0] >= 6
    if not replay:
        twin = Twin(Chunk(1), linears(1), units=(Block, Chunk, nn.Linear))
    for n in range(calls[0]):
        with failing_collective(owner, name, n):
            found = fails(twin, CALLS)
        assert re.search(r"the (gather|reduction) of unit c[01]\S* failed", found), found
    retried(twin, CALLS)
    with failing_collective(owner, name, 1):
        fails(twin, CALLS)
    retried(twin, SHORT)


# Memory


@on_two_ranks(install=[after_ours, forward_hook, tensor_hook], replay=[False, True])
def test_memory_of_a_failed_window_is_dropped_after_abort(install: Install, replay: bool) -> None:
    twin = nested_twin()
    if replay:
        twin.window(CALLS)
    activations: list[weakref.ref[torch.Tensor]] = []

    def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        activations.append(weakref.ref(output))

    handles = [
        module.register_forward_hook(note, prepend=prepend)
        for chunk in twin.chunks
        for module in (chunk, *chunk.blocks)
        for prepend in (True, False)
    ]
    handles.append(install(twin.chunks[1].blocks[1], 1))
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(Intended):
            twin.run(CALLS)
        assert len(activations) > 12
        assert any(each() is not None for each in activations)
        twin.context.abort()
        twin.forget()
        assert all(each() is None for each in activations)
    finally:
        gc.enable()
    for handle in handles:
        handle.remove()
    retried(twin, CALLS)


# Nested autograd passes


class Inside(torch.autograd.Function):
    """Runs modules with a graph of their own, whose backward is a pass inside of another."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            ctx.input = x.detach().requires_grad_()
            ctx.output = function(ctx.input)
        return ctx.output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        torch.autograd.backward(ctx.output, gradient)
        return None, ctx.input.grad


def plain(function: Callable[..., Any], x: torch.Tensor) -> Any:
    return function(x)


def inside(function: Callable[..., Any], x: torch.Tensor) -> Any:
    return Inside.apply(function, x if x.requires_grad else x.clone().requires_grad_())


def inside_twice(function: Callable[..., Any], x: torch.Tensor) -> Any:
    return inside(partial(inside, function), x)


class Joined(nn.Module):
    """Chunks in one graph, each perhaps inside of a pass of its own; it is not adopted."""

    def __init__(self, chunks: list[Any], how: list[Callable[..., Any]]) -> None:
        super().__init__()
        self.inner = nn.ModuleList(chunks)
        self.how = how

    def forward(self, x: torch.Tensor) -> Any:
        for chunk, how in zip(self.inner, self.how, strict=True):
            x = how(chunk, x)
        return x


NESTINGS: dict[str, list[Callable[..., Any]]] = {
    "the outer pass has had no event, and has some later": [plain, inside],
    "the outer pass has had no event, and has some later, twice": [plain, inside_twice],
    "the outer pass has events before": [inside, plain],
    "the outer pass has none": [inside, inside],
    "the outer pass has events before and after": [plain, inside, plain],
    "the inner passes are twice inside": [inside_twice, plain, inside_twice],
}


def joined_twin(how: list[Callable[..., Any]], mode: str) -> Twin:
    twin = Twin(*(linears(2) for _ in how), mode=mode)
    for side in (twin.chunks, twin.whole):
        side[:] = [Joined(list(side), how)]
    return twin


@on_two_ranks(mode=["recorded", "registration"], nesting=list(NESTINGS))
def test_autograd_pass_inside_of_another_ends_neither_the_window_nor_its_uses(
    mode: str, nesting: str
) -> None:
    twin = joined_twin(NESTINGS[nesting], mode)
    for step in range(3):
        with counting(twin.context) as spent:
            twin.run("F0 B0" if mode == "registration" else "F0 F1 B0 B1")
            assert resident(twin.context) == []
            if mode == "recorded":
                twin.context.finish_grad_sync()
            elif any(how is plain for how in NESTINGS[nesting]):
                assert not twin.context.window.is_open, "closed by itself"
            else:
                # Nothing told of the outermost pass's end; the step closes the window.
                twin.optimizers[0].step()
                twin.optimizers[0].param_groups[0]["lr"] = 0.0
                assert not twin.context.window.is_open
        assert spent.windows == 1
        assert spent.divergences == spent.dropped_gathers == 0
        assert spent.replayed_windows == (step > 0 or mode == "registration")
        if twin.optimizers[0].param_groups[0]["lr"] == 0.0:
            twin.optimizers[0].param_groups[0]["lr"] = 0.1
            undo_step(twin)
        twin.check()


def undo_step(twin: Twin) -> None:
    """Take a step of plain gradient descent back, so that the comparison can make it."""
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.grad is not None:
                parameter += 0.1 * parameter.grad


@on_two_ranks()
def test_close_that_was_put_off_comes_with_the_next_forward() -> None:
    twin = joined_twin([inside], "registration")
    twin.run("F0 B0")
    assert twin.context.window.is_open
    assert twin.context.stats.windows == 0
    twin.run("F1 B1")  # gradients accumulate over windows
    assert twin.context.stats.windows == 1
    twin.context.finish_grad_sync()
    assert twin.context.stats.windows == 2
    assert twin.context.stats.replayed_windows == 2
    twin.check()


@on_two_ranks(mode=["recorded", "registration"])
def test_exception_in_an_inner_pass_then_abort_and_a_clean_retry(mode: str) -> None:
    for how in NESTINGS.values():
        twin = joined_twin(how, mode)
        for place in range(len(how)):
            handle = tensor_hook(twin.chunks[0].inner[place][0], 0)
            fails(twin, "F0 B0")
            handle.remove()
        for _ in range(2):
            twin.window("F0 B0")


# Evaluation


class Teacher(nn.Module):
    """Takes a gradient of its own forward inside of it: a gradient penalty."""

    def __init__(self, create_graph: bool) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.create_graph = create_graph

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        hidden = torch.tanh(self.fc1(x))
        (gradient,) = torch.autograd.grad(
            self.fc2(hidden).sum(), x, create_graph=self.create_graph, retain_graph=True
        )
        return self.fc2(hidden) + gradient


@on_two_ranks(mode=["recorded", "registration"])
def test_gradient_penalty_inside_a_forward_keeps_the_window_open(mode: str) -> None:
    twin = Twin(Teacher(create_graph=False), mode=mode)
    for step in range(3):
        spent = twin.window("F0 B0")
        assert spent.windows == 1
        assert spent.replayed_windows == (step > 0)
        assert resident(twin.context) == []


@on_two_ranks(kind=["inference mode", "no grad", "evaluation"], replay=[False, True])
def test_unit_called_alone_for_an_evaluation_is_no_call_of_the_window(
    kind: str, replay: bool
) -> None:
    twin = nested_twin()
    context = twin.context
    if replay:
        twin.window(CALLS)
    x = data(3, 3)[dist.get_rank()]
    modes: dict[str, Callable[[], Any]] = {
        "inference mode": torch.inference_mode,
        "no grad": torch.no_grad,
        "evaluation": context.evaluation,
    }

    def evaluate() -> None:
        before = resident(context), context.window.cursor, context.window.is_open
        block = twin.chunks[1].blocks[0]
        whole = Block()
        whole.load_state_dict(full_state(block))
        with modes[kind]():
            torch.testing.assert_close(block(x), whole(x))
        assert (resident(context), context.window.cursor, context.window.is_open) == before

    evaluate()
    for call in CALLS.split():
        twin.run(call)
        evaluate()
    context.finish_grad_sync()
    twin.check()
    evaluate()
    assert context.stats.replayed_windows == replay
    assert len(context.trace or ()) == 24


@on_two_ranks(kind=["no grad", "evaluation", "eval mode"], replay=[False, True])
def test_evaluation_inside_a_backward_hook_gathers_on_demand_and_frees_after_use(
    kind: str, replay: bool
) -> None:
    twin = nested_twin()
    context = twin.context
    if replay:
        twin.window(CALLS)
    x = data(3, 3)[dist.get_rank()]
    checked: list[str] = []
    whole = [copy.deepcopy(chunk) for chunk in twin.whole]

    def evaluate(gradient: torch.Tensor) -> None:
        for chunk, expected in zip(twin.chunks, whole, strict=True):
            before = resident(context), context.window.cursor
            holds = [unit.holds for unit in context.units]
            if kind == "no grad":
                with torch.no_grad():
                    found = chunk(x)
            elif kind == "evaluation":
                with context.evaluation(), torch.enable_grad():
                    found = chunk(x)
            else:
                chunk.eval()
                with torch.enable_grad():
                    found = chunk(x)
                chunk.train()
            assert (resident(context), context.window.cursor) == before
            assert [unit.holds for unit in context.units] == holds
            torch.testing.assert_close(found.detach(), expected(x).detach())
            checked.append(kind)

    def install(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad and current_graph_task() == -1 and not context.window.evaluating:
            output.register_hook(evaluate)

    handles = [
        chunk.blocks[1].register_forward_hook(install) for chunk in twin.chunks if chunk.training
    ]
    spent = twin.window(CALLS)
    for handle in handles:
        handle.remove()
    assert len(checked) == 2 * 4
    assert spent.replayed_windows == replay
    assert spent.divergences == spent.dropped_gathers == 0


@on_two_ranks(mode=["recorded", "registration"])
def test_forward_and_backward_of_an_evaluation_before_the_first_step_add_gradients_only(
    mode: str,
) -> None:
    twin = nested_twin() if mode == "recorded" else Twin(Chunk(), units=(Block, Chunk), mode=mode)
    context = twin.context
    for _ in range(2):  # the second with gradients there
        with context.evaluation():
            twin.run("F1 B1")
        assert at_rest(context)
        assert not context.window.is_open
        assert context.stats.windows == 0
    assert all(parameter.grad is not None for parameter in twin.parameters())
    for step in range(3):
        with counting(context) as spent:
            twin.run("F0 B0")
            context.finish_grad_sync()
        twin.check()  # with the gradients of the evaluations before the first step
        assert spent.windows == 1
        assert spent.replayed_windows == (step > 0 or mode == "registration")
    assert len(events(context).split()) == (12 if mode == "recorded" else 6)
