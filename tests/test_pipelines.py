"""Orders of pipeline schedules, against what torch's schedules run, and the traces of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed.pipelining as pipelining

from fsdp_fx.planning import pipelines
from fsdp_fx.planning.durations import Durations
from fsdp_fx.planning.pipelines import (
    SCHEDULES,
    PipelineCall,
    default_chunks,
    pipeline_calls,
    pipeline_traces,
    pipeline_transfers,
    schedule_name,
)
from fsdp_fx.planning.policies import on_demand
from fsdp_fx.planning.simulation import simulate
from fsdp_fx.trace import UnitSpec

SINGLE = ("ScheduleGPipe", "Schedule1F1B")
SPLIT = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")


class Stage:
    """A stage that writes down what a schedule calls, and exchanges nothing."""

    submod = None

    def __init__(self, rank: int, ranks: int, index: int, stages: int, log: list[Any]) -> None:
        self.group_rank, self.group_size = rank, ranks
        self.stage_index, self.num_stages = index, stages
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.log = log

    def nothing(self, *args: Any, **kwargs: Any) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = nothing
    set_local_fwd_input = set_local_bwd_input = get_local_bwd_output = nothing
    perform_reduce_grad = nothing

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.log.append(PipelineCall(self.stage_index, "F", microbatch))

    def backward_one_chunk(
        self, microbatch: int, full_backward: bool = True, **kwargs: Any
    ) -> None:
        self.log.append(PipelineCall(self.stage_index, "B" if full_backward else "I", microbatch))

    def backward_weight_one_chunk(self, microbatch: int, **kwargs: Any) -> None:
        self.log.append(PipelineCall(self.stage_index, "W", microbatch))


def executed(
    name: str, rank: int, ranks: int, stages: list[int], microbatches: int
) -> list[PipelineCall]:
    """What a schedule of torch calls on one rank when it runs a step."""
    log: list[PipelineCall] = []
    made = [Stage(rank, ranks, index, ranks * len(stages), log) for index in stages]
    schedule: Any = getattr(pipelining, name)(
        made[0] if name in SINGLE else made, microbatches, loss_fn=lambda output, target: None
    )
    schedule._initialize_stage = schedule._initialize_stages = lambda *args, **kwargs: None
    schedule._step_microbatches([()] * microbatches, [{}] * microbatches, [None] * microbatches)
    return log


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 4), (3, 6), (4, 8), (4, 16)])
def test_the_calls_are_those_that_torch_runs(name: str, ranks: int, microbatches: int) -> None:
    chunks = default_chunks(name)
    for rank, calls in enumerate(pipeline_calls(name, ranks, chunks, microbatches)):
        stages = sorted({call.stage for call in calls})
        assert list(calls) == executed(name, rank, ranks, stages, microbatches)


@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleLoopedBFS"])
def test_the_calls_are_those_that_torch_runs_with_four_chunks(name: str) -> None:
    for rank, calls in enumerate(pipeline_calls(name, 2, 4, 6)):
        stages = [rank + 2 * chunk for chunk in range(4)]
        assert list(calls) == executed(name, rank, 2, stages, 6)


def text(calls: tuple[PipelineCall, ...]) -> str:
    return " ".join(f"{call.stage}{call.kind}{call.microbatch}" for call in calls)


def test_the_last_rank_of_one_forward_one_backward_begins_with_the_first_microbatch() -> None:
    first, last = pipeline_calls("1F1B", 2, 1, 3)
    assert text(first) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert text(last) == "1F0 1B0 1F1 1B1 1F2 1B2"


def test_looped_breadth_first_goes_back_from_the_last_microbatch() -> None:
    assert text(pipeline_calls("LoopedBFS", 1, 2, 2)[0]) == "0F0 0F1 1F0 1F1 1B1 1B0 0B1 0B0"


def test_an_overlapped_forward_and_backward_are_two_calls() -> None:
    calls = pipeline_calls("DualPipeV", 2, 2, 4)
    kinds = {call.kind for own in calls for call in own}
    assert kinds == {"F", "B", "I", "W"}
    # In a V, the first and the last stage are one rank's.
    assert [sorted({call.stage for call in own}) for own in calls] == [[0, 3], [1, 2]]


@pytest.mark.parametrize("given", ["Interleaved1F1B", "ScheduleInterleaved1F1B", "interleaved1f1b"])
def test_a_schedule_is_named_as_torch_names_it(given: str) -> None:
    assert schedule_name(given) == "ScheduleInterleaved1F1B"
    assert pipeline_calls(given, 2, 2, 4) == pipeline_calls("Interleaved1F1B", 2, 2, 4)


def test_every_public_schedule_of_torch_is_known() -> None:
    public = {
        name
        for name in dir(pipelining)
        if name.startswith("Schedule") and isinstance(getattr(pipelining, name), type)
    }
    assert public == set(SCHEDULES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1F2B", 2, 1, 4), r"unknown schedule '1F2B': use one of GPipe, 1F1B, Interleaved1F1B"),
        (("", 2, 1, 4), "unknown schedule ''"),
        (("GPipe", 0, 1, 4), "ScheduleGPipe with 0 ranks: use 1 or more"),
        (("GPipe", 2, -1, 4), "ScheduleGPipe with -1 chunks: use 1 or more"),
        (("GPipe", 2, 1, 0), "ScheduleGPipe with 0 microbatches: use 1 or more"),
        (("1F1B", 2, 2, 4), "Schedule1F1B has one stage per rank, not 2: use ScheduleInter"),
        (("1F1B", 4, 1, 3), r"Schedule1F1B refuses 4 ranks × 1 chunks, 3 microbatches: Number of"),
        (("Interleaved1F1B", 2, 2, 5), r"multiple of the number of rounds \(2\), but got 5"),
        (("ZBVZeroBubble", 2, 3, 4), "requires exactly 2 stages per rank, but got 3"),
        (("DualPipeV", 2, 2, 3), "at least as many microbatches as stages"),
    ],
)
def test_what_cannot_be_scheduled_is_refused_in_one_line(
    arguments: tuple[str, int, int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        pipeline_calls(*arguments)
    assert "\n" not in str(raised.value)


def units(stages: int, count: int, frozen: bool = False) -> list[list[UnitSpec]]:
    return [
        [
            UnitSpec(f"s{stage}.u{index}", f"s{stage}", 10, 20, 0 if frozen else 40, not frozen)
            for index in range(count)
        ]
        for stage in range(stages)
    ]


def test_a_forward_reaches_units_in_order_and_a_backward_in_reverse() -> None:
    (trace,) = pipeline_traces(pipeline_calls("GPipe", 1, 1, 2), units(1, 2))
    assert [str(event) for event in trace] == [
        "s0.u0 F0",
        "s0.u1 F0",
        "s0.u0 F1",
        "s0.u1 F1",
        "s0.u1 B0",
        "s0.u0 B0",
        "s0.u1 B1",
        "s0.u0 B1",
    ]
    assert [event.microbatch for event in trace] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert trace.ends == tuple(range(8))
    assert trace.reduces == {4, 5, 6, 7}


def test_only_the_half_for_the_weights_reduces() -> None:
    calls = (
        PipelineCall(0, "F", 0),
        PipelineCall(0, "F", 1),
        PipelineCall(0, "I", 1),
        PipelineCall(0, "W", 1),
        PipelineCall(0, "B", 0),
    )
    (trace,) = pipeline_traces((calls,), units(1, 1))
    assert [str(event) for event in trace] == [
        "s0.u0 F0",
        "s0.u0 F1",
        "s0.u0 B0",
        "s0.u0 B1",
        "s0.u0 B2",
    ]
    assert trace.reduces == {3, 4}


def test_frozen_units_reduce_nothing() -> None:
    (trace,) = pipeline_traces(pipeline_calls("GPipe", 1, 1, 2), units(1, 2, frozen=True))
    assert trace.reduces == frozenset()


def test_a_rank_has_the_units_of_its_stages() -> None:
    traces = pipeline_traces(pipeline_calls("Interleaved1F1B", 2, 2, 4), units(4, 1))
    assert [[unit.name for unit in trace.units] for trace in traces] == [
        ["s0.u0", "s2.u0"],
        ["s1.u0", "s3.u0"],
    ]


def test_a_stage_without_units_is_refused() -> None:
    calls = pipeline_calls("GPipe", 2, 1, 2)
    with pytest.raises(ValueError, match="stage 1 has no units"):
        pipeline_traces(calls, units(1, 2))
    with pytest.raises(ValueError, match="stage 1 has no units"):
        pipeline_traces(calls, [*units(1, 2), []])


def test_two_units_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 units are named s0\.u0"):
        pipeline_traces(pipeline_calls("GPipe", 2, 1, 2), units(1, 1) * 2)


def test_a_call_waits_for_its_microbatch_on_the_neighbouring_stage() -> None:
    calls = pipeline_calls("GPipe", 2, 1, 2)
    transfers = pipeline_transfers(calls, [2, 1], 7)
    # Rank 0: F0 at 0 to 1, F1 at 2 to 3, B0 at 4 to 5, B1 at 6 to 7; rank 1: F0 F1 B0 B1.
    assert {(each.source, each.target) for each in transfers} == {
        ((0, 1), (1, 0)),
        ((0, 3), (1, 1)),
        ((1, 2), (0, 4)),
        ((1, 3), (0, 6)),
    }
    assert {each.nanoseconds for each in transfers} == {7}


def test_a_backward_waits_for_the_half_for_the_inputs() -> None:
    first = (PipelineCall(0, "F", 0), PipelineCall(0, "B", 0))
    last = (PipelineCall(1, "F", 0), PipelineCall(1, "I", 0), PipelineCall(1, "W", 0))
    transfers = pipeline_transfers((first, last), [1, 1])
    assert [(each.source, each.target) for each in transfers] == [
        ((1, 1), (0, 1)),
        ((0, 0), (1, 0)),
    ]


def test_a_rank_does_not_wait_for_itself() -> None:
    # Of the four stages in a V the middle two are the last rank's.
    calls = pipeline_calls("ZBVZeroBubble", 2, 2, 4)
    transfers = pipeline_transfers(calls, [1] * 4, 5)
    assert {(each.source[0], each.target[0]) for each in transfers} == {(0, 1), (1, 0)}
    assert len(transfers) == 4 * 4  # per microbatch 0 to 1 and 2 to 3, and back


def test_an_order_that_lacks_a_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown_torch(stage: int, microbatches: int) -> Iterator[PipelineCall]:
        yield PipelineCall(stage, "F", 0)
        yield PipelineCall(stage, "I", 0)

    monkeypatch.setattr(pipelines, "_gpipe", unknown_torch)
    message = r"stage 0, microbatch 0 on ranks \[0\] with \(1, 0, 1, 0\) calls of kinds F, B, I, W"
    with pytest.raises(ValueError, match=message):
        pipeline_calls("GPipe", 1, 1, 1)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_schedule_runs_to_its_end_without_communication(name: str, ranks: int) -> None:
    chunks, microbatches = default_chunks(name), 2 * ranks + 2 * (ranks == 1)
    calls = pipeline_calls(name, ranks, chunks, microbatches)
    traces = pipeline_traces(calls, units(ranks * chunks, 2))
    # Neighbouring stages of one rank wait for each other by their order alone.
    place = {
        call: (rank, index) for rank, own in enumerate(calls) for index, call in enumerate(own)
    }
    for call, (rank, index) in place.items():
        before = place.get(PipelineCall(call.stage - 1, "F", call.microbatch))
        if call.kind == "F" and before is not None and before[0] == rank:
            assert before[1] < index
        after = place.get(PipelineCall(call.stage + 1, "B", call.microbatch)) or place.get(
            PipelineCall(call.stage + 1, "I", call.microbatch)
        )
        if call.kind in "BI" and after is not None and after[0] == rank:
            assert after[1] < index
    outlines = [on_demand(trace) for trace in traces]
    durations = []
    for trace in traces:
        at_once = {unit.name: 0 for unit in trace.units}
        durations.append(Durations((1,) * len(trace), at_once, at_once))
    simulated = simulate(outlines, durations, pipeline_transfers(calls, [2] * ranks * chunks))
    for rank in simulated.ranks:
        assert rank.exposed_communication == 0
    assert simulated.nanoseconds >= max(len(trace) for trace in traces)
    if ranks > 1 and name not in SPLIT:
        assert all(rank.bubble > 0 for rank in simulated.ranks[1:])
