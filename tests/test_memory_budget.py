"""Memory budgets on real ranks: what a plan promises is what a window does, and trains right.

Every window is compared with the same chunks whole, as in :mod:`test_semantics` and
:mod:`training`. What is chosen under a budget is :mod:`test_policies`' and
:mod:`test_passes`' question; here it is whether replay does it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import operator
import re
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import distribute_tensor

from fsdp_fx import FSDPContext, Program, RanksDisagreeError
from fsdp_fx.calls import Use
from fsdp_fx.compile.backend import fsdp_fx as backend
from fsdp_fx.occupancy import outline_of, resident_bytes
from fsdp_fx.passes import PassOptions
from fsdp_fx.planning.memory import kept_gradient_bytes
from fsdp_fx.residency import Stats
from models import DIM, Block, cpu_mesh, linears, shard
from ranks import RankPools
from test_meshes import Training, replicated
from test_owner_hooks import Nodes, both_in_the_same_layer, combined, two_forwards_at_once
from test_pipelining import Job
from test_recomputation import Layers
from test_semantics import LINEAR, Twin, counting, data, mean_square, on_two_ranks, resident
from test_simulation_measured import SlowLink
from training import (
    ORDERS,
    Action,
    Setup,
    make_chunks,
    make_data,
    one_by_one,
    run_actions,
    set_up,
)

EVERYTHING = 1 << 40
BUDGETS = (0, 1, 2, 4, EVERYTHING)  # in layers, but for the last
REDUCTIONS = ("per_backward", "per_window", "planned")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What a window moved and held: predicted from a program, or measured."""

    gathers: int
    on_demand: int
    bytes_gathered: int
    reductions: int
    peak_resident_bytes: int
    peak_kept_gradient_bytes: int


def predicted(program: Program | None) -> Traffic:
    """Of every window but the first, which has to gather what is carried."""
    assert program is not None
    outline = outline_of(program)
    return Traffic(
        len(outline.gathers),
        sum(interval.gathered == interval.waited for interval in outline.gathers),
        outline.bytes_gathered,
        len(outline.reductions),
        max(resident_bytes(program)),
        max(kept_gradient_bytes(program.trace, outline.reductions)),
    )


@contextlib.contextmanager
def measuring(context: FSDPContext) -> Iterator[list[Traffic]]:
    """The traffic of the block, once it has ended."""
    stats = context.stats
    stats.peak_resident_bytes = stats.resident_bytes
    stats.peak_kept_gradient_bytes = stats.kept_gradient_bytes
    before = dataclasses.replace(stats)
    measured: list[Traffic] = []
    yield measured
    measured.append(
        Traffic(
            stats.gathers - before.gathers,
            stats.on_demand_gathers - before.on_demand_gathers,
            stats.bytes_gathered - before.bytes_gathered,
            stats.reductions - before.reductions,
            stats.peak_resident_bytes,
            stats.peak_kept_gradient_bytes,
        )
    )


def layer_bytes() -> int:
    """Bytes of a layer of :func:`training.make_chunks`."""
    layers: Any = make_chunks(1, 1)[0].layers
    return sum(4 * parameter.numel() for parameter in layers.parameters())


def in_bytes(budget: int) -> int:
    return budget if budget == EVERYTHING else budget * layer_bytes()


def communicated(program: Program | None) -> int:
    """The bytes that a budget is spent on saving."""
    assert program is not None
    outline = outline_of(program)
    return outline.bytes_gathered + outline.bytes_reduced


def replan(context: FSDPContext, **options: Any) -> None:
    """Have the next windows follow another plan of the same trace.

    As if it had been recorded with other options: to record and to compile takes longer.
    """
    assert context.trace is not None
    context._options = PassOptions(**options)
    context._commit(context.trace)


def assert_replayed_as_predicted(
    context: FSDPContext, before: Stats, measured: Sequence[Traffic]
) -> None:
    wanted, (found,) = predicted(context.program), measured
    assert found == wanted, f"{found} where {wanted} was predicted: {context.program}"
    stats = context.stats
    assert stats.replayed_windows == before.replayed_windows + 1
    assert stats.dropped_gathers == before.dropped_gathers
    assert (stats.divergences, stats.switches) == (before.divergences, before.switches)


def replay(setup: Setup, actions: Sequence[Action], step: int, microbatches: int = 3) -> None:
    """A replayed window as predicted; it and the optimizer step after it are right."""
    before = dataclasses.replace(setup.context.stats)
    with measuring(setup.context) as measured:
        setup.step(actions, make_data(step, microbatches), exact=False)
    assert_replayed_as_predicted(setup.context, before, measured)


def gradients(setup: Setup, actions: Sequence[Action]) -> list[torch.Tensor]:
    """This rank's part of the gradients of a window of 3 microbatches, the same every time."""
    run_actions(setup.callables, actions, make_data(0, 3), dist.get_rank())
    setup.context.finish_grad_sync()
    parameters: list[Any] = [p for chunk in setup.chunks for p in chunk.parameters()]
    found = [parameter.grad.to_local() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return found


@on_two_ranks(compiler=[None, "eager"])
def test_replay_moves_and_holds_exactly_what_is_predicted_under_every_budget(
    compiler: str | None,
) -> None:
    setup = set_up(make_chunks(2, 2), region_compiler=compiler)
    context = setup.context
    # Right by the reference, which the tests below have at every step.
    setup.step(list(one_by_one(2, 3)), make_data(0, 3), exact=False)
    wanted = gradients(setup, list(one_by_one(2, 3)))
    for order in ORDERS.values():
        actions = list(order(2, 3))
        gradients(setup, actions)  # recorded, but for the first
        for reductions in REDUCTIONS:
            moved: list[int] = []
            for budget in BUDGETS if reductions == "planned" else BUDGETS[::2]:
                replan(context, memory_budget=in_bytes(budget), reduce_gradients=reductions)
                before = dataclasses.replace(context.stats)
                with measuring(context) as measured:
                    found = gradients(setup, actions)
                assert_replayed_as_predicted(context, before, measured)
                torch.testing.assert_close(found, wanted)
                moved.append(communicated(context.program))
            assert moved == sorted(moved, reverse=True), "more room moves no more"
            assert moved[0] > moved[1] > moved[2], moved


@on_two_ranks(
    case=[
        ("one_by_one", "per_backward", 1, None),
        ("chunk_by_chunk", "per_window", 2, None),
        ("interleaved", "planned", 1, None),
        ("interleaved", "planned", 4, "eager"),
    ]
)
def test_context_with_a_budget_trains_as_the_reference_does(
    case: tuple[str, Any, int, str | None],
) -> None:
    order, reductions, budget, compiler = case
    chunks = 1 if order == "one_by_one" else 2
    actions = list(ORDERS[order](chunks, 3))
    setup = set_up(
        make_chunks(chunks),
        memory_budget=in_bytes(budget),
        reduce_gradients=reductions,
        region_compiler=compiler,
    )
    setup.step(actions, make_data(0, 3), exact=False)
    assert setup.context.stats.recorded_windows == 1
    for step in range(1, 4):
        replay(setup, actions, step)


@on_two_ranks(budget=[0, LINEAR, 2 * LINEAR, EVERYTHING])
def test_window_of_registration_mode_keeps_what_fits(budget: int) -> None:
    twin = Twin(linears(4), mode="registration", memory_budget=budget)
    context = twin.context
    for _ in range(3):
        before = dataclasses.replace(context.stats)
        with measuring(context) as measured:
            twin.run("F0 B0")
        assert_replayed_as_predicted(context, before, measured)
        twin.check()
    assert measured[0].on_demand == 1, "the lookahead has room of its own"
    # The last layer needs no room: its backward follows its forward.
    assert measured[0].gathers == 7 - min(budget // LINEAR, 3)
    assert measured[0].peak_resident_bytes <= budget + 2 * LINEAR


@on_two_ranks()
def test_compiled_window_of_registration_mode_keeps_what_fits() -> None:
    setup = set_up(
        make_chunks(1, 3), mode="registration", memory_budget=in_bytes(1), region_compiler="eager"
    )
    for step in range(2):
        replay(setup, list(one_by_one(1, 1)), step, microbatches=1)


# In which dtype


class Plain:
    """A model under FSDP2 alone."""

    def __init__(self, chunk: nn.Module, policy: MixedPrecisionPolicy) -> None:
        self.chunk: Any = shard(copy.deepcopy(chunk), nn.Linear, mp_policy=policy)
        fully_shard(self.chunk, mesh=cpu_mesh(), mp_policy=policy)

    def gradients(self, inputs: Sequence[torch.Tensor], every_time: bool) -> list[torch.Tensor]:
        for x in inputs:
            self.chunk.set_requires_gradient_sync(every_time or x is inputs[-1])
            mean_square(self.chunk(x)).backward()
        return local_gradients(self.chunk)


def local_gradients(chunk: nn.Module) -> list[torch.Tensor]:
    """This rank's part of the gradients, which are cleared."""
    found = [parameter.grad.to_local() for parameter in cast(Any, chunk).parameters()]
    chunk.zero_grad()
    return found


@on_two_ranks(
    case=[
        ("planned", torch.bfloat16, None),
        ("per_window", torch.bfloat16, None),
        ("planned", torch.bfloat16, "eager"),
        ("planned", torch.float32, None),
    ]
)
def test_kept_gradients_add_up_in_the_reduction_dtype_as_without_gradient_sync(
    case: tuple[Any, torch.dtype, str | None],
) -> None:
    reductions, dtype, compiler = case
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    chunk = linears(3)
    plain = Plain(chunk, policy)
    twin = Twin(chunk, policy=policy, memory_budget=EVERYTHING, reduce_gradients=reductions)
    run = twin.chunks[0]
    if compiler is not None:
        options: Any = {"region_compiler": compiler}
        run = torch.compile(run, backend=backend, options=options, dynamic=False)
    for step in range(3):
        inputs = [data(step, microbatch)[dist.get_rank()] for microbatch in range(4)]
        with counting(twin.context) as spent:
            for x in inputs:
                mean_square(run(x)).backward()
            twin.context.finish_grad_sync()
        found = local_gradients(twin.chunks[0])
        # While it records, "planned" does not know yet what it could keep.
        every_time = step == 0 and reductions == "planned"
        assert spent.reductions == (12 if every_time else 3)
        for same, wanted in zip(found, plain.gradients(inputs, every_time), strict=True):
            assert same.dtype == wanted.dtype == torch.float32
            assert torch.equal(same, wanted)
        # What would be the same in another dtype or order of sums tells nothing.
        if dtype == torch.float32:
            others = plain.gradients(inputs, not every_time)
        else:
            others = [same.bfloat16().float() for same in found]
        assert not all(map(torch.equal, found, others))
    assert twin.context.stats.peak_kept_gradient_bytes == 3 * LINEAR


@on_two_ranks(
    case=[
        ("planned", None),
        ("per_window", None),
        ("planned", "eager"),
    ]
)
def test_kept_gradients_add_up_in_the_dtype_asked_for_and_are_reduced_in_their_own(
    case: tuple[Any, str | None],
) -> None:
    reductions, compiler = case
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    chunk = linears(3)
    whole = copy.deepcopy(chunk).bfloat16()
    options: dict[str, Any] = {
        "policy": policy,
        "reduce_gradients": reductions,
        "kept_gradient_dtype": torch.bfloat16,
    }
    if reductions == "planned":
        options["memory_budget"] = EVERYTHING
    twin = Twin(chunk, **options)
    run = twin.chunks[0]
    if compiler is not None:
        region: Any = {"region_compiler": compiler}
        run = torch.compile(run, backend=backend, options=region, dynamic=False)
    for step in range(3):
        inputs = [data(step, microbatch)[dist.get_rank()] for microbatch in range(4)]
        with counting(twin.context) as spent:
            for x in inputs:
                mean_square(run(x)).backward()
            twin.context.finish_grad_sync()
        for x in inputs:
            mean_square(whole(x.bfloat16())).backward()
        assert spent.reductions == (12 if step == 0 and reductions == "planned" else 3)
        for ours, theirs in zip(chunk.parameters(), whole.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            wanted = theirs.grad.float()  # added up in bf16, as autograd does
            dist.all_reduce(wanted, dist.ReduceOp.AVG)
            found = cast(Any, ours.grad).full_tensor()
            assert found.dtype == torch.float32
            if spent.reductions == 3:
                assert torch.equal(found, wanted)
            ours.grad = theirs.grad = None
    assert twin.context.stats.peak_kept_gradient_bytes == 3 * LINEAR // 2


# Frozen units


def frozen_twin(compiled: bool = False, **options: Any) -> Twin:
    """Three linears of which the one in the middle is frozen, with room for everything."""
    chunk = linears(3)
    chunk[2].requires_grad_(False)
    twin = Twin(chunk, **{"memory_budget": EVERYTHING, "keep_frozen": True, **options})
    if compiled:
        region: Any = {"region_compiler": "eager"}
        twin.chunks[0] = torch.compile(chunk, backend=backend, options=region, dynamic=False)
    return twin


def replayed_as_predicted(twin: Twin, calls: str, regathered: int = 0) -> None:
    """A window that gathers what is predicted, and of the carried units some again."""
    context = twin.context
    before = dataclasses.replace(context.stats)
    with measuring(context) as measured:
        twin.window(calls)
    again = measured[0]
    assert context.program is not None
    assert context.program.carried == {"c0.2"}
    if regathered:
        wanted = predicted(context.program)
        assert again.gathers == wanted.gathers + regathered
        assert again.bytes_gathered == wanted.bytes_gathered + regathered * LINEAR
    else:
        assert_replayed_as_predicted(context, before, measured)


@on_two_ranks(
    case=[
        ("recorded", "F0 B0", False),
        ("recorded", "F0 F1 B0 B1", False),
        ("registration", "F0 B0", False),
        ("recorded", "F0 F1 B0 B1", True),
    ]
)
def test_frozen_unit_is_gathered_once_and_stays_from_window_to_window(
    case: tuple[str, str, bool],
) -> None:
    mode, calls, compiled = case
    twin = frozen_twin(compiled, mode=mode)
    context = twin.context
    if mode == "recorded":
        twin.window(calls)
        assert resident(context) == []  # recorded on demand
    replayed_as_predicted(twin, calls, regathered=1)
    for _ in range(3):
        assert resident(context) == ["c0.2"]
        replayed_as_predicted(twin, calls)
    assert context.stats.resident_bytes == LINEAR
    context.abort()
    assert resident(context) == []
    assert context.stats.resident_bytes == 0
    replayed_as_predicted(twin, calls, regathered=1)
    # Also where compute is compiled, a change is seen, first of all by an evaluation.
    with torch.no_grad():
        for parameters in (twin.parameters(), twin.expected()):
            parameters[2].mul_(-1.0)
        x = data(7, 0)[dist.get_rank()]
        torch.testing.assert_close(twin.chunks[0](x), twin.whole[0](x))
    replayed_as_predicted(twin, calls, regathered=1)


@on_two_ranks()
def test_without_asking_or_room_no_unit_stays_over_the_end() -> None:
    for options in (
        {"memory_budget": None, "keep_frozen": False},
        {"memory_budget": EVERYTHING, "keep_frozen": False},
        {"memory_budget": 0},
    ):
        twin = frozen_twin(**options)
        for _ in range(3):
            twin.window("F0 B0")
            assert resident(twin.context) == []


def copied(parameter: Any, value: Any, twin: Twin) -> None:
    with torch.no_grad():
        parameter.copy_(value)


def copied_in_inference_mode(parameter: Any, value: Any, twin: Twin) -> None:
    with torch.inference_mode():
        parameter.copy_(value)


def copied_to_the_local_tensor(parameter: Any, value: Any, twin: Twin) -> None:
    with torch.no_grad():
        parameter.to_local().copy_(value.to_local())


def loaded(parameter: Any, value: Any, twin: Twin) -> None:
    twin.chunks[0].load_state_dict({**twin.chunks[0].state_dict(), "2.weight": value})


def loaded_by_assignment(parameter: Any, value: Any, twin: Twin) -> None:
    twin.chunks[0].load_state_dict({**twin.chunks[0].state_dict(), "2.weight": value}, assign=True)


def loaded_for_distributed_checkpoints(parameter: Any, value: Any, twin: Twin) -> None:
    set_model_state_dict(twin.chunks[0], {**twin.chunks[0].state_dict(), "2.weight": value})


CHANGES = [
    copied,
    copied_in_inference_mode,
    copied_to_the_local_tensor,
    loaded,
    loaded_by_assignment,
    loaded_for_distributed_checkpoints,
]


@on_two_ranks(change=CHANGES, evaluates=[False, True])
def test_change_of_a_frozen_weight_between_windows_is_seen(change: Any, evaluates: bool) -> None:
    twin = frozen_twin()
    for _ in range(2):
        twin.window("F0 B0")
    for round_ in range(2):
        parameter = twin.chunks[0][2].weight
        value = torch.full((DIM, DIM), 0.1 * (1 + round_))
        change(
            parameter,
            distribute_tensor(value, parameter.device_mesh, parameter.placements),
            twin,
        )
        with torch.no_grad():
            twin.expected()[2].copy_(value)
        if evaluates:
            x = data(7, round_)[dist.get_rank()]
            with torch.no_grad():
                torch.testing.assert_close(twin.chunks[0](x), twin.whole[0](x))
        twin.optimizers[0] = torch.optim.SGD(twin.parameters(), 0.1)
        replayed_as_predicted(twin, "F0 B0", regathered=1)
        replayed_as_predicted(twin, "F0 B0")


@on_two_ranks()
def test_evaluation_between_windows_uses_what_stays_and_leaves_it() -> None:
    twin = frozen_twin()
    for _ in range(2):
        twin.window("F0 B0")
    x = data(7, 0)[dist.get_rank()]
    with counting(twin.context) as spent, torch.no_grad():
        torch.testing.assert_close(twin.chunks[0](x), twin.whole[0](x))
    assert (spent.gathers, spent.frees) == (2, 2)
    assert resident(twin.context) == ["c0.2"]
    replayed_as_predicted(twin, "F0 B0")


@on_two_ranks()
def test_unit_that_is_unfrozen_between_windows_is_freed_and_trained() -> None:
    twin = frozen_twin()
    for _ in range(2):
        twin.window("F0 B0")
    for _ in range(2):
        for chunk in twin.both():
            chunk[2].requires_grad_(True)
        for _ in range(2):
            twin.window("F0 B0")
            assert resident(twin.context) == []
        for chunk in twin.both():
            chunk[2].requires_grad_(False)
        replayed_as_predicted(twin, "F0 B0", regathered=1)
        replayed_as_predicted(twin, "F0 B0")


class Branch(nn.Module):
    """Three linears; a flag leaves the frozen one in the middle out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = (nn.Linear(DIM, DIM) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.through = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if self.through:
            x = torch.tanh(self.frozen(x))
        output: torch.Tensor = self.last(x)
        return output


@on_two_ranks()
def test_window_that_goes_on_without_a_frozen_unit_frees_it() -> None:
    twin = Twin(Branch(), memory_budget=EVERYTHING, keep_frozen=True)
    for _ in range(2):
        twin.window("F0 B0")
    assert resident(twin.context) == ["c0.frozen"]
    for known in (False, True):
        for chunk in twin.both():
            chunk.through = False
        spent = twin.window("F0 B0")
        assert (spent.divergences, spent.switches) == (not known, known)
        assert resident(twin.context) == []
        assert twin.window("F0 B0").gathers == 2
        for chunk in twin.both():
            chunk.through = True
        assert twin.window("F0 B0").switches == 1
        assert resident(twin.context) == ["c0.frozen"]
        assert twin.window("F0 B0").gathers == 2  # the trained ones


@on_two_ranks()
def test_frozen_unit_stays_where_a_window_goes_on_with_another_program() -> None:
    twin = Twin(linears(2), linears(2), memory_budget=EVERYTHING, keep_frozen=True)
    for chunk in (twin.chunks[1], twin.whole[1]):
        chunk.requires_grad_(False)
    # They part before the frozen units are first used.
    windows = ["c0F0 c1F0 c1B0 c0B0", "c0F0 c0F1 c1F0 c1F1 c1B0 c1B1 c0B0 c0B1"]
    for calls in (*windows, windows[0]):
        twin.window(calls)
    frozen = [unit for unit in twin.context.units if unit.spec.chunk == "c1"]
    assert all(unit.unsharded for unit in frozen)
    gathered = [unit.collectives for unit in frozen]
    for calls in reversed(2 * windows):
        assert twin.window(calls).switches == 1
        assert [unit.collectives for unit in frozen] == gathered


@on_two_ranks()
def test_deleted_chunk_takes_what_stayed_of_it_along() -> None:
    twin = Twin(linears(2), linears(2), memory_budget=EVERYTHING, keep_frozen=True)
    context = twin.context
    chunk: Any
    for chunk in (twin.chunks[1], twin.whole[1]):
        chunk[0].requires_grad_(False)
    for _ in range(2):
        twin.window("F0 B0")
    assert resident(context) == ["c1.0"]
    assert context.stats.resident_bytes == LINEAR
    (unit,) = (unit for unit in context.units if unit.spec.name == "c1.0")
    full = [weakref.ref(p._unsharded_param) for p in unit.group.fsdp_params]
    del twin.chunks[1], twin.whole[1], chunk, unit
    twin.optimizers = [torch.optim.SGD(p, 0.1) for p in (twin.parameters(), twin.expected())]
    gc.collect()
    assert not any(reference() for reference in full)
    for _ in range(2):
        twin.window("F0 B0")
    assert context.stats.resident_bytes == 0


# Windows that are not as recorded


@contextlib.contextmanager
def holding(context: FSDPContext) -> Iterator[list[int]]:
    """Bytes of full parameters and waiting gradients at each event of the block."""
    window, stats = context.window, context.stats
    begin = window.begin
    curve: list[int] = []

    def noted(*arguments: Any) -> Use:
        use = begin(*arguments)
        curve.append(stats.resident_bytes + stats.kept_gradient_bytes)
        return use

    window.begin = noted  # type: ignore[assignment, method-assign]
    try:
        yield curve
    finally:
        del window.begin


def limits(context: FSDPContext) -> list[int]:
    """The capacity at each event of the latest window, of any program that it may have followed."""
    assert context.trace is not None
    events = context.trace.events
    return [
        max(
            program.capacity[position]
            for program in context.programs
            if program.capacity is not None
            and program.trace.events[: position + 1] == events[: position + 1]
        )
        for position in range(len(events))
    ]


@on_two_ranks(
    case=[
        (0, "per_backward"),
        (LINEAR, "per_window"),
        (0, "planned"),
        (2 * LINEAR, "planned"),
        (EVERYTHING, "planned"),
    ]
)
def test_window_that_leaves_its_program_stays_right_and_within_the_budget(
    case: tuple[int, Any],
) -> None:
    budget, reductions = case
    twin = Twin(linears(3), memory_budget=budget, reduce_gradients=reductions)
    context = twin.context
    windows = [
        "F0 F1 B0 B1",
        "F0 B0 F1 B1 F2 B2",  # left in the middle
        "F0 B0 F1 B1",  # ends early
        "F0 F1 B0 F2 B1 B2",
        "F0 B0",
        "F0 F1 B0 B1",
        "F0 F1 B0 F2 B1 B2",
        "F0 F1 B0 F2 B1 B2",
    ]
    for step in range(2):
        for calls in windows:
            with holding(context) as curve:
                spent = twin.window(calls)
            program = context.program
            assert program is not None
            if spent.recorded_windows:
                # Before the divergence one unit more was there, ahead of its use.
                unplanned = 3 * LINEAR if reductions == "per_window" else 0
                assert max(curve) <= budget + 2 * LINEAR + unplanned
                assert step == 0
            else:
                assert all(map(operator.le, curve, limits(context))), (calls, curve)
                assert spent.replayed_windows == 1
            if not (spent.recorded_windows or spent.switches):
                kept = kept_gradient_bytes(program.trace, outline_of(program).reductions)
                assert curve == list(map(operator.add, resident_bytes(program), kept))
            assert context.stats.resident_bytes == context.stats.kept_gradient_bytes == 0
    assert len(context.programs) == 5


def assert_clean(context: FSDPContext) -> None:
    assert not any(
        (unit.unsharded, unit.in_flight, unit.holds, unit.has_gradients, unit.contributed)
        != (0,) * 5
        for unit in context.units
    )
    assert context.stats.resident_bytes == context.stats.kept_gradient_bytes == 0


def raise_error(*_: object) -> None:
    raise ZeroDivisionError


@on_two_ranks(where=["between calls", "forward", "backward"])
def test_abort_frees_kept_units_and_gradients_and_the_retry_is_right(where: str) -> None:
    twin = frozen_twin(reduce_gradients="planned")
    context = twin.context
    calls = "F0 B0 F1 B1 F2 B2"
    for _ in range(2):
        twin.window(calls)
    for _ in range(2):
        twin.run("F0 B0 F1")
        # All that the window has gathered, and what it has reduced nothing of.
        assert resident(context) == ["c0.0", "c0.2", "c0.4"]
        assert context.stats.kept_gradient_bytes == 2 * LINEAR
        module = twin.chunks[0][4]
        if where == "forward":
            handle = module.register_forward_pre_hook(raise_error)
            with pytest.raises(ZeroDivisionError):
                twin.run("F2")
            handle.remove()
        elif where == "backward":
            twin.outputs[0, 1].grad_fn.next_functions[0][0].register_hook(raise_error)
            with pytest.raises(ZeroDivisionError):
                twin.run("B1")
        context.abort()
        assert_clean(context)
        assert all(parameter.grad is None for parameter in twin.parameters())
        twin.forget()
        replayed_as_predicted(twin, calls, regathered=1)
    replayed_as_predicted(twin, calls)


@on_two_ranks(
    mode=["non-reentrant", "reentrant"],
    around=["each unit", "each layer"],
    budget=[0, LINEAR, EVERYTHING],
)
def test_recomputation_keeps_to_the_budget(mode: str, around: str, budget: int) -> None:
    twin = Twin(Layers(mode, around), memory_budget=budget, reduce_gradients="planned")
    context = twin.context
    calls = "F0 F1 B0 B1"
    twin.window(calls)
    for _ in range(2):
        with measuring(context) as measured:
            twin.window(calls)
        program = predicted(context.program)
        found = measured[0]
        assert found.reductions == program.reductions
        assert found.peak_kept_gradient_bytes == program.peak_kept_gradient_bytes
        if around == "each unit" or budget == EVERYTHING:
            # A unit is recomputed in its own backward, where it is.
            assert found == program
        else:
            # A layer is recomputed in the backward of its last unit.
            assert found.peak_resident_bytes <= program.peak_resident_bytes + LINEAR
            assert found.gathers <= program.gathers + 2


class Tied(nn.Module):
    """A linear that is used again behind a block, with its weight transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.last.weight = self.first.weight
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.block(torch.tanh(self.first(x))))
        return output


@on_two_ranks(budget=[0, 600, EVERYTHING], reductions=REDUCTIONS)
def test_tied_weights_are_kept_and_reduced_as_predicted(budget: int, reductions: Any) -> None:
    twin = Twin(Tied(), units=(Block, Tied), memory_budget=budget, reduce_gradients=reductions)
    context = twin.context
    assert twin.chunks[0].first.weight is twin.chunks[0].last.weight
    twin.window("F0 F1 B0 B1")
    for _ in range(2):
        before = dataclasses.replace(context.stats)
        with measuring(context) as measured:
            twin.window("F0 F1 B0 B1")
        assert_replayed_as_predicted(context, before, measured)
    if reductions != "planned" or budget in (0, EVERYTHING):
        once = reductions == "per_window" or (reductions, budget) == ("planned", EVERYTHING)
        assert measured[0].reductions == (2 if once else 4)


def replicas(*cases: tuple[int, int]) -> None:
    for budget, most_reductions in cases:
        training = Training(replicated, memory_budget=budget, reduce_gradients="planned")
        context = training.context
        units = len(context.units)
        training.window("interleaved", 3)
        before = dataclasses.replace(context.stats)
        with measuring(context) as measured:
            spent = training.window("interleaved", 3)
        assert_replayed_as_predicted(context, before, measured)
        assert spent.all_reductions == units
        assert units <= spent.reductions <= most_reductions
    # Gradients that were kept for the last microbatch, which does not come now.
    assert training.window("interleaved", 2).divergences == 1
    assert training.window("interleaved", 3).switches == 1
    assert context.stats.kept_gradient_bytes == 0


def test_replicated_units_with_kept_gradients_are_all_reduced_once(ranks: RankPools) -> None:
    ranks(4).run(replicas, (5 * layer_bytes(), 17), (EVERYTHING, 6), timeout=120)


def pipeline(schedule: Any, budget: int) -> None:
    job = Job(schedule, memory_budget=budget, reduce_gradients="planned")
    context = job.context
    for step in range(3):
        before = dataclasses.replace(context.stats)
        with measuring(context) as measured:
            job.run(step)
            context.finish_grad_sync()
        if step:
            assert_replayed_as_predicted(context, before, measured)
        job.run_reference(step)
        job.check_gradients()
        job.update()
        job.check_weights()


@pytest.mark.parametrize(
    ("schedule", "budget"),
    [
        (Schedule1F1B, EVERYTHING),
        (ScheduleInterleaved1F1B, 1 << 11),  # a block has just over 1 KiB
    ],
)
def test_pipeline_schedule_does_what_is_predicted_under_a_budget(
    ranks: RankPools, schedule: Any, budget: int
) -> None:
    ranks(4).run(pipeline, schedule, budget, timeout=120)


@on_two_ranks(schedule=[combined, both_in_the_same_layer, two_forwards_at_once])
def test_units_whose_submodules_are_called_are_kept_as_predicted(schedule: Any) -> None:
    for budget in (0, 1 << 9, EVERYTHING):
        twin = Nodes(layers=3, memory_budget=budget, reduce_gradients="planned")
        context = twin.context
        twin.step(schedule)
        for _ in range(2):
            before = dataclasses.replace(context.stats)
            with measuring(context) as measured:
                twin.step(schedule)
            assert_replayed_as_predicted(context, before, measured)


# By time


class Pause(nn.Module):
    """Takes a while in forward, on rank 1 longer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01 + 0.02 * dist.get_rank())
        return torch.tanh(x)


def paused(count: int) -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(DIM, DIM), Pause())))


def everywhere(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def assert_alike(context: FSDPContext) -> None:
    """An event has the duration of all events of its unit and phase."""
    assert context.trace is not None
    assert context.durations is not None
    times: dict[tuple[str, str], set[int]] = {}
    for event, spent in zip(context.trace, context.durations.compute, strict=True):
        times.setdefault((event.unit, event.phase), set()).add(spent)
    assert all(len(different) == 1 for different in times.values())
    names = {unit.name for unit in context.trace.units}
    for collectives in (context.durations.gathers, context.durations.reductions):
        assert collectives.keys() == names
        assert min(collectives.values()) > 0


@on_two_ranks(budget=[0, 2 * LINEAR])
def test_ranks_agree_on_durations_and_gather_as_early_as_slow_gathers_ask_for(
    budget: int,
) -> None:
    twin = Twin(
        paused(6),
        memory_budget=budget,
        forward_prefetch="timed",
        backward_prefetch="timed",
        reduce_gradients="planned",
    )
    context = twin.context
    for module in twin.chunks[0]:
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(SlowLink(0.03))  # type: ignore[arg-type]
    twin.window("F0 F1 B0 B1")
    assert context.durations is not None
    assert everywhere(context.durations) == [context.durations] * 2
    assert everywhere(str(context.program)) == [str(context.program)] * 2
    assert_alike(context)
    assert context.trace is not None
    for event, spent in zip(context.trace, context.durations.compute, strict=True):
        if event.phase == "F":
            assert 9e6 < spent < 29e6, "rank 0 is the faster one"
    assert min(context.durations.gathers.values()) > 28e6
    before = dataclasses.replace(context.stats)
    with measuring(context) as measured:
        twin.window("F0 F1 B0 B1")
    assert_replayed_as_predicted(context, before, measured)
    assert context.program is not None
    context.program.verify()
    ahead = [each.waited - each.gathered for each in outline_of(context.program).gathers]
    assert max(ahead) <= 1 + budget // LINEAR
    assert (max(ahead) > 1) == (budget > 0), ahead
    assert measured[0].peak_resident_bytes <= budget + 2 * LINEAR


@on_two_ranks()
def test_durations_are_this_ranks_own_where_nothing_is_planned_with_them() -> None:
    twin = Twin(paused(2))
    twin.window("F0 F1 B0 B1")
    assert_alike(twin.context)
    assert twin.context.durations is not None
    first = twin.context.durations
    slow = everywhere(first.compute[0])
    assert slow[0] < 29e6 < slow[1]
    twin.window("F0 F1 B0 B1")
    assert twin.context.durations == first  # nothing is measured in replay
    # Leaving the program goes on to measure; what it does not meet is known from before.
    twin.window("F0 F1 B0 B1 F2 B2")
    assert_alike(twin.context)
    assert twin.context.durations is not None
    assert len(twin.context.durations.compute) == 12


# Options


@on_two_ranks()
def test_budgets_that_differ_between_ranks_are_refused_at_the_opening() -> None:
    twin = Twin(linears(2), memory_budget=LINEAR * (1 + dist.get_rank()))
    with pytest.raises(RanksDisagreeError, match=r"memory_budget=168.* memory_budget=336"):
        twin.run("F0")
    assert resident(twin.context) == []


@on_two_ranks()
def test_timed_lookahead_on_one_rank_is_refused_at_the_opening() -> None:
    lookahead: Any = "timed" if dist.get_rank() else None
    twin = Twin(linears(2), memory_budget=LINEAR, forward_prefetch=lookahead)
    with pytest.raises(RanksDisagreeError, match="forward_prefetch='timed'"):
        twin.run("F0")


@pytest.mark.parametrize(
    "budget", [-1, 1.5, True, "lots", "auto+", "auto+4", "auto+4GB", "4GiB", [1]]
)
def test_what_is_no_number_of_bytes_is_refused(budget: Any) -> None:
    with pytest.raises(
        ValueError, match=f"memory_budget={re.escape(repr(budget))} is not a number"
    ) as e:
        FSDPContext(mode="recorded", memory_budget=budget)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduce_gradients": "planned"}, 'reduce_gradients="planned" needs a memory_budget'),
        ({"keep_frozen": True}, "keep_frozen=True has no effect with memory_budget=None"),
        (
            {"keep_frozen": True, "memory_budget": "auto"},
            "keep_frozen=True has no effect with memory_budget='auto'",
        ),
        ({"forward_prefetch": "timed"}, 'forward_prefetch="timed" needs a memory_budget'),
        (
            {"kept_gradient_dtype": torch.bfloat16},
            'kept_gradient_dtype=torch.bfloat16 has no effect with reduce_gradients="per_backward"',
        ),
        (
            {"kept_gradient_dtype": torch.int32, "reduce_gradients": "per_window"},
            "kept_gradient_dtype=torch.int32 is no dtype to add gradients up in",
        ),
        ({"backward_prefetch": "timed"}, 'backward_prefetch="timed" needs a memory_budget'),
        ({"backward_prefetch": "soon", "memory_budget": 1}, "backward_prefetch='soon' is not"),
        (
            {"mode": "registration", "memory_budget": "auto"},
            'memory_budget="auto" has no effect in registration mode',
        ),
        (
            {"mode": "registration", "memory_budget": 1, "forward_prefetch": "timed"},
            'forward_prefetch="timed" has no effect in registration mode',
        ),
        (
            {"mode": "registration", "memory_budget": 1, "reduce_gradients": "planned"},
            'reduce_gradients="planned" has no effect in registration mode',
        ),
    ],
)
def test_option_without_effect_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        FSDPContext(**{"mode": "recorded", **options})
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("fake_group")
def test_auto_on_the_cpu_is_refused_and_says_what_to_do() -> None:
    context = FSDPContext(mode="recorded", memory_budget="auto")
    with pytest.raises(ValueError, match=r"module '0' is on the CPU.*give memory_budget in bytes"):
        context.adopt(shard(linears(2), nn.Linear))
    assert context.units == ()


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("mode", ["recorded", "registration"])
def test_budget_that_nothing_fits_in_is_refused_and_names_the_smallest(mode: Any) -> None:
    chunk = shard(nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, 2)), nn.Linear)
    least = 4 * (2 * DIM + 2)
    context = FSDPContext(mode=mode, memory_budget=least - 1)
    context.adopt(chunk)
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=f"memory_budget={least - 1} bytes.*unit c0.1 is the smallest with {least} bytes",
        ):
            chunk(torch.ones(1, DIM))
        assert not context.window.is_open
    # Gradients of less than the parameters may be what fits.
    half = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    for budget in (LINEAR // 2 - 1, LINEAR // 2):
        context = FSDPContext(mode="recorded", memory_budget=budget, reduce_gradients="planned")
        context.adopt(gradients_only := shard(linears(1), nn.Linear, mp_policy=half))
        if budget < LINEAR // 2:
            with pytest.raises(ValueError, match=r"the gradients of unit c0\.0 is the"):
                gradients_only(torch.ones(1, DIM))
        else:
            gradients_only(torch.ones(1, DIM)).sum().backward()
            context.finish_grad_sync()
