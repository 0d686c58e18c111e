"""What a context refuses, what users see of the parameters, and what it leaves behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_fx import FSDPContext
from fsdp_fx.units import Unit
from models import DIM, Chunk, cpu_mesh, linears, shard

pytestmark = pytest.mark.usefixtures("fake_group")


def refusal(kind: type[Exception], act: Callable[[], Any]) -> str:
    """The message of what ``act`` raises: one line."""
    with pytest.raises(kind) as error:
        act()
    message = str(error.value)
    assert "\n" not in message
    return message


def batch() -> torch.Tensor:
    return torch.ones(2, DIM)


def adopted(*chunks: nn.Module, mode: Any = "recorded") -> FSDPContext:
    context = FSDPContext(mode=mode)
    context.adopt(*chunks)
    return context


def step(context: FSDPContext, *chunks: nn.Module) -> None:
    x = batch()
    for chunk in chunks:
        x = chunk(x)
    x.sum().backward()
    context.finish_grad_sync()


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "replay"}, 'mode=\'replay\' is unknown: use "registration" or "recorded"'),
        ({"mode": None}, 'mode=None is unknown: use "registration" or "recorded"'),
        (
            {"reduce_gradients": "never"},
            "reduce_gradients='never' is unknown: "
            'use "per_backward" or "per_window" or "planned"',
        ),
        *(
            (
                {name: value},
                f"{name}={value!r} is not a number of elements: "
                "use None for one event ahead, 0 for none, a positive int, "
                'or "timed" for as early as measured durations ask for',
            )
            for name in ("forward_prefetch", "backward_prefetch")
            for value in (-1, 1.5, True, "all")
        ),
    ],
)
def test_unknown_option_is_refused_with_the_choices(options: dict[str, Any], message: str) -> None:
    assert refusal(ValueError, lambda: FSDPContext(**options)) == message


def test_unknown_option_name_is_refused() -> None:
    options: dict[str, Any] = {"prefetch": 1}
    assert "prefetch" in refusal(TypeError, lambda: FSDPContext(**options))


# Adoption


def test_adopting_nothing_is_refused() -> None:
    assert "at least one module" in refusal(ValueError, lambda: FSDPContext().adopt())


@pytest.mark.parametrize("thing", [None, [Chunk()], torch.ones(1), Chunk], ids=str)
def test_adopting_what_is_not_a_module_is_refused(thing: Any) -> None:
    message = refusal(TypeError, lambda: FSDPContext().adopt(thing))
    assert message == f"adopt() takes modules, not {type(thing).__name__}: adopt(*chunks)"


def test_adopting_a_module_without_units_is_refused() -> None:
    message = refusal(ValueError, lambda: FSDPContext().adopt(Chunk()))
    assert "Chunk has no FSDP2 units: call fully_shard()" in message


def test_adopting_a_module_twice_is_refused() -> None:
    chunk = shard(Chunk())
    context = adopted(chunk)
    assert "adopt each chunk once" in refusal(ValueError, lambda: context.adopt(chunk))
    assert context.units[0].spec.name == "c0"
    assert len(context.units) == 3


@pytest.mark.parametrize("pick", [lambda c: c, lambda c: c.blocks[0]], ids=["itself", "its child"])
@pytest.mark.parametrize("turned", [False, True], ids=["", "the other way round"])
def test_adopting_overlapping_modules_in_one_call_is_refused(
    pick: Callable[[Any], nn.Module], turned: bool
) -> None:
    chunk = shard(Chunk())
    modules = [chunk, pick(chunk)]
    context = FSDPContext()
    message = refusal(ValueError, lambda: context.adopt(*(modules[::-1] if turned else modules)))
    assert "adopt each chunk once" in message
    assert not context.units
    context.adopt(chunk)


def test_adopting_a_child_of_another_contexts_module_is_refused() -> None:
    chunk: Any = shard(Chunk())
    owner = adopted(chunk)
    message = refusal(ValueError, lambda: FSDPContext().adopt(chunk.blocks[0]))
    assert "Block is or contains a module that another context has adopted" in message
    assert "adopt each chunk once, in one context" in message
    assert len(owner.units) == 3


def test_adopting_a_parent_of_another_contexts_module_is_refused() -> None:
    chunk: Any = shard(Chunk())
    owner = adopted(chunk.blocks[0])
    message = refusal(ValueError, lambda: FSDPContext().adopt(chunk))
    assert "Chunk is or contains a module that another context has adopted (FSDPBlock)" in message
    message = refusal(ValueError, lambda: owner.adopt(chunk))
    assert "Chunk is or contains a module that this context has adopted (FSDPBlock)" in message


def test_chunk_of_a_context_that_is_gone_can_be_adopted_again() -> None:
    chunk = shard(Chunk())
    context = adopted(chunk)
    step(context, chunk)
    del context
    gc.collect()
    again = adopted(chunk)
    step(again, chunk)
    assert again.trace is not None
    assert len(again.trace) == 6


@pytest.mark.parametrize("mode", ["recorded", "registration"])
def test_adopting_after_the_first_forward_is_refused(mode: str) -> None:
    first, second = shard(Chunk()), shard(Chunk())
    context = adopted(first, mode=mode)
    context_open = first(batch())
    message = refusal(RuntimeError, lambda: context.adopt(second))
    assert "adopt every chunk before the first forward" in message
    context_open.sum().backward()
    context.finish_grad_sync()
    assert "before the first forward" in refusal(RuntimeError, lambda: context.adopt(second))


def test_adopting_in_the_middle_of_a_plain_fsdp2_forward_is_refused() -> None:
    chunk: Any = shard(Chunk())
    messages: list[str] = []

    def adopt(*_: Any) -> None:
        messages.append(refusal(RuntimeError, lambda: FSDPContext().adopt(chunk)))

    handle = chunk.norm.register_forward_hook(adopt)
    chunk(batch()).sum().backward()
    handle.remove()
    (message,) = messages
    assert "adopt modules before their first forward, or between steps" in message
    step(adopted(chunk), chunk)


def test_refused_chunk_leaves_the_others_of_its_call_free() -> None:
    good, bad = shard(Chunk()), nn.Linear(4, 4)
    fully_shard(bad, mesh=cpu_mesh()).set_unshard_in_backward(False)
    context = FSDPContext(mode="recorded")
    refusal(ValueError, lambda: context.adopt(good, bad))
    assert not context.units
    context.adopt(good)
    step(context, good)


def test_adopting_in_several_calls_shares_the_communication() -> None:
    first, second = shard(Chunk()), shard(Chunk())
    context = adopted(first)
    context.adopt(second)
    assert len({id(unit.communication) for unit in context.units}) == 1
    assert context.chunk_name(first) == "c0"
    assert context.chunk_name(second) == "c1"
    assert context.chunk_name(nn.Linear(1, 1)) is None


def test_what_torch_compile_returns_can_be_adopted() -> None:
    chunk = shard(Chunk())
    context = adopted(torch.compile(chunk, backend="eager"))  # type: ignore[arg-type]
    assert context.chunk_name(chunk) == "c0"


# A closed process group


def test_adopting_after_the_process_group_was_closed_is_refused() -> None:
    chunk = shard(Chunk())
    dist.destroy_process_group()
    try:
        message = refusal(RuntimeError, lambda: FSDPContext().adopt(chunk))
    finally:
        reopen()
    assert "the process group is closed: call torch.distributed.init_process_group()" in message


def test_forward_after_the_process_group_was_closed_is_refused() -> None:
    chunk = shard(Chunk())
    context = adopted(chunk)
    step(context, chunk)
    dist.destroy_process_group()
    try:
        message = refusal(RuntimeError, lambda: chunk(batch()))
    finally:
        reopen()
    assert "the process group is closed: unit c0 cannot be gathered" in message
    assert "destroy the group after the last step" in message


def reopen() -> None:
    """A group again, for the fixture to close."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)


# What users see


def watch(chunk: nn.Module) -> Callable[[], None]:
    """A check that ``chunk`` shows the parameters that it shows now, sharded."""
    parameters = dict(chunk.named_parameters())
    assert parameters

    def check() -> None:
        assert all(isinstance(parameter, DTensor) for parameter in parameters.values())
        now = dict(chunk.named_parameters())
        assert now.keys() == parameters.keys()
        assert all(now[name] is parameters[name] for name in parameters)
        assert all(isinstance(tensor, DTensor) for tensor in chunk.state_dict().values())
        assert all(tensor._local_tensor.numel() > 0 for tensor in now.values())
        optimizer = torch.optim.SGD(chunk.parameters(), lr=0.1)
        (group,) = optimizer.param_groups
        assert {id(p) for p in group["params"]} == {id(p) for p in parameters.values()}

    return check


@pytest.mark.parametrize("mode", ["recorded", "registration"])
def test_parameters_state_dict_and_optimizers_are_sharded_between_calls(mode: str) -> None:
    chunk: Any = shard(Chunk())
    context = adopted(chunk, mode=mode)
    check = watch(chunk)
    for _ in range(3):  # recording and replaying
        check()
        output = chunk(batch())
        check()
        with context.evaluation():
            evaluated = chunk(batch())
            check()
        evaluated.sum()
        with torch.no_grad():
            chunk(batch())
        check()
        # Inside of a unit's own forward and backward its modules show the full ones: a
        # checkpoint of a part of a module runs that part again, without any hook.
        output.sum().backward()
        check()
        context.finish_grad_sync()
        check()
        assert all(parameter.grad is not None for parameter in chunk.parameters())
        chunk.zero_grad()


def test_failed_gather_says_which_unit_after_which_event_of_which_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunk = shard(Chunk())
    context = adopted(chunk)
    step(context, chunk)
    gather, calls = Unit.gather, iter(range(100))

    def fails(unit: Unit) -> None:
        if next(calls) == 2:
            raise RuntimeError("the network is gone")
        gather(unit)

    monkeypatch.setattr(Unit, "gather", fails)
    with pytest.raises(RuntimeError, match="the network is gone") as error:
        step(context, chunk)
    (note,) = error.value.__notes__
    # Event 1 issues the gather of the one after it.
    assert context.trace is not None
    unit, event = context.trace[2].unit, context.trace[1]
    assert f"the gather of unit {unit} failed in window 1 after {event} (event 1)" in note
    assert "call abort() on every rank" in note


def test_parameters_are_sharded_after_an_exception_in_a_forward() -> None:
    chunk: Any = shard(Chunk())
    context = adopted(chunk)
    check = watch(chunk)
    handle = chunk.blocks[1].down.register_forward_pre_hook(raise_error)
    with pytest.raises(ZeroDivisionError):
        chunk(batch())
    check()
    handle.remove()
    context.abort()
    check()
    assert not any(unit.unsharded or unit.in_flight for unit in context.units)
    step(context, chunk)


def raise_error(*_: Any) -> None:
    raise ZeroDivisionError


# Explaining


def test_explain_tells_of_windows_gathers_programs_and_chunks() -> None:
    chunks = [shard(Chunk()), shard(Chunk())]
    context = adopted(*chunks)
    for _ in range(2):
        step(context, *chunks)
    text = context.explain()
    assert "recorded mode, 2 chunks, 1 program known" in text
    assert "windows: 2 closed (1 recorded, 1 replayed)" in text
    assert "program 0: 12 events in 4 calls" in text
    assert "chunk c1: eager, scheduled from hooks" in text
    assert "fallbacks: none" in text
    assert "chunks=2" in repr(context)


def test_trace_and_program_are_none_before_one_is_known() -> None:
    context = adopted(shard(Chunk()))
    assert context.trace is None
    assert context.program is None
    assert context.programs == ()
    context.finish_grad_sync()
    context.abort()
    assert context.trace is None
    assert context.stats.windows == context.stats.aborts == 0


# Deleting


@pytest.mark.parametrize("mode", ["recorded", "registration"])
def test_deleting_the_model_frees_it_while_the_context_lives(mode: str) -> None:
    chunk: Any = shard(Chunk())
    context = adopted(chunk, mode=mode)
    for _ in range(2):
        step(context, chunk)
    references = [weakref.ref(chunk), weakref.ref(chunk.blocks[0].up.weight)]
    del chunk
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert context.program is not None


def test_deleting_a_chunk_leaves_the_others_training() -> None:
    kept, gone = shard(Chunk()), shard(Chunk())
    context = adopted(kept, gone)
    for _ in range(3):
        step(context, kept, gone)
    del gone
    gc.collect()
    for _ in range(3):
        step(context, kept)
    assert context.stats.recorded_windows == 2
    assert context.stats.replayed_windows == 4
    trace = context.trace
    assert trace is not None
    assert {unit.chunk for unit in trace.units} == {"c0"}


def test_deleting_the_context_frees_it_while_the_model_lives() -> None:
    chunk = shard(linears(), nn.Linear)
    context = adopted(chunk)
    step(context, chunk)
    reference = weakref.ref(context)
    del context
    gc.collect()
    assert reference() is None
