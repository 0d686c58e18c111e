"""Orders of one's own, read from CSV files by torch's schedule runtime."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from torch.distributed.pipelining.schedules import (
    OVERLAP_F_B,
    REDUCE_GRAD,
    RESHARD,
    UNSHARD,
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    _PipelineScheduleRuntime,
)

from pipeline_jobs import SENDS_TO_ITSELF, Job, Order
from ranks import RankPools

# Two stages on each of two ranks; no class of torch's has this order.
MINE = Order(
    (
        "0F0,0F1,2F0,,0F2,2F1,2I0,2F2,2W0,2I1,0B0,2I2,2W1,0I1,0W1,2W2,0B2",
        "1F0,,1F1,3F0,3B0,1F2,3F1,3I1,1I0,3F2,3W1,3B2,1W0,1B1,1I2,1W2",
    )
)


def _run(order: Order) -> None:
    job = Job(order)
    units = len(job.context.units)
    kinds = {action.computation_type for action in job.actions}
    assert {UNSHARD, RESHARD, REDUCE_GRAD} <= kinds  # torch has added them
    job.check_step(0)
    for step in (1, 2):
        counted = job.counted(step)
        job.check_counts(counted)
        assert counted["reductions"] == order.microbatches * units
    trace = job.context.trace
    assert trace is not None
    assert len(trace) == 2 * order.microbatches * units + job.input_halves
    assert job.context.fallbacks == ()

    # The same with communication and FSDP's actions written down; what the context does is
    # the same, as it is where those actions are left out.
    with_comms = Order(_rows(job.schedule.pipeline_order_with_comms), "compute_comms")
    without = Order(
        tuple(
            ",".join(a for a in row.split(",") if "SHARD" not in a and "REDUCE" not in a)
            for row in with_comms.rows
        ),
        "compute_comms",
    )
    for other in (with_comms, without):
        again = Job(other, scale_grads=other is with_comms)
        assert {UNSHARD, RESHARD, REDUCE_GRAD}.isdisjoint(
            {action.computation_type for action in again.actions}
        ) == (other is without)
        again.check_step(0)
        again.check_counts(again.counted(1))
        assert again.context.trace == trace


def _rows(order: dict[int, list[object]]) -> tuple[str, ...]:
    return tuple(",".join(str(action) for action in order[rank]) for rank in sorted(order))


def test_an_order_from_a_file_equals_the_reference_with_or_without_fsdp_actions(
    ranks: RankPools,
) -> None:
    ranks(4).run(_run, MINE)


def _dump(schedule: type[_PipelineScheduleRuntime], compiled: bool) -> None:
    """What a schedule writes down is run as it is itself."""
    microbatches = 6  # enough for DualPipeV to overlap forwards and backwards
    job = Job(schedule, microbatches=microbatches, compiled=compiled)
    overlapped = [
        action
        for action in job.schedule.pipeline_order_with_comms[job.pp]
        if action.computation_type == OVERLAP_F_B
    ]
    assert bool(overlapped) == (schedule is ScheduleDualPipeV)
    job.check_step(0)
    job.check_counts(job.counted(1))
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "order.csv"
        job.schedule._dump_csv(str(file), format="compute_comms")
        order = Order(tuple(file.read_text().splitlines()), "compute_comms")
    assert order.microbatches == microbatches
    again = Job(order, compiled=compiled)
    assert again.owned == sorted(job.owned)
    again.check_step(0)
    again.check_counts(again.counted(1))
    first, second = job.context.trace, again.context.trace
    assert first is not None
    assert second is not None
    assert len(first) == len(second)


@pytest.mark.parametrize(
    ("schedule", "compiled"),
    [
        pytest.param(ScheduleDualPipeV, False, marks=SENDS_TO_ITSELF),
        pytest.param(ScheduleDualPipeV, True, marks=[SENDS_TO_ITSELF, pytest.mark.soak]),
        pytest.param(ScheduleInterleavedZeroBubble, False, marks=pytest.mark.soak),
    ],
)
def test_a_schedule_that_was_written_to_a_file_runs_from_it(
    ranks: RankPools, schedule: type[_PipelineScheduleRuntime], compiled: bool
) -> None:
    ranks(4).run(_dump, schedule, compiled)


def test_the_order_of_this_file_has_every_action_once() -> None:
    actions = [action for row in MINE.rows for action in row.split(",") if action]
    assert len(actions) == len(set(actions))
    assert MINE.microbatches == 3
    assert MINE.stages == [[0, 2], [1, 3]]
    for stage in range(4):
        own = [action[1:] for action in actions if action[0] == str(stage)]
        for microbatch in range(3):
            of_microbatch = sorted(a[0] for a in own if a[1:] == str(microbatch))
            assert of_microbatch in (["B", "F"], ["F", "I", "W"])
