"""The same pipeline schedules by torch alone and on a context: what each gathers and reduces.

    python tests/pipeline_table.py

prints the table of ``docs/pipelining.md``: four CPU processes, PP 2 × FSDP 2, eight equal
blocks, each a unit, four microbatches, one step after the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.torch_version import TorchVersion

from fsdp_fx.demo.observe import Observer
from pipeline_jobs import V_SHAPED, Blocks, Job, shard
from ranks import RankPools

SCHEDULES = (
    ScheduleGPipe,
    Schedule1F1B,
    ScheduleLoopedBFS,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    ScheduleDualPipeV,
)
RUNNABLE = SCHEDULES if TorchVersion(torch.__version__) >= "2.13" else SCHEDULES[:-2]
TORCH = {
    "torch, resharding": True,
    "torch, not resharding": False,
}
CONTEXT: dict[str, dict[str, Any]] = {
    "context, nothing ahead": {"forward_prefetch": 0, "backward_prefetch": 0},
    "context": {},
    "context, everything kept": {"memory_budget": 1 << 30, "reduce_gradients": "planned"},
}


@dataclass(frozen=True)
class Counted:
    """A step of one rank.

    Attributes:
        gathers: all-gathers.
        reductions: reduce-scatters.
        peak: the most units that were unsharded or in flight at once.
        missing: parameters without a gradient.
        different: parameters whose gradient is not the reference's.
    """

    gathers: int
    reductions: int
    peak: int
    missing: int
    different: int

    @property
    def right(self) -> bool:
        """Whether all gradients are the reference's."""
        return not (self.missing or self.different)


def torch_alone(schedule: Any, reshard: bool) -> Counted:
    """A second step without a context."""

    def sharding(chunk: Any, mesh: Any) -> None:
        shard(chunk, mesh, reshard_after_forward=reshard)

    job = Job(schedule, make_chunk=Blocks, shard=sharding, bound=False)
    unit = sum(parameter.numel() for parameter in job.reference[0].blocks[0].parameters()) * 4
    for step in range(2):
        job.optimizer.zero_grad()
        with Observer() as observer:
            job.run(step)
    stats = observer.stats
    job.reference_optimizer.zero_grad()
    job.run_reference(1)
    peak = stats.peak_resident_bytes // unit
    return Counted(stats.gathers, stats.reductions, peak, *job.wrong_gradients())


def on_a_context(schedule: Any, options: dict[str, Any]) -> Counted:
    """A second step with a context, which replays the first."""
    job = Job(schedule, make_chunk=Blocks, **options)
    stats = job.context.stats
    job.check_step(0)
    gathers, reductions = stats.gathers, stats.reductions
    stats.peak_resident_bytes = 0
    job.run(1)
    job.context.finish_grad_sync()
    job.run_reference(1)
    assert stats.replayed_windows == 1
    (unit,) = {unit.spec.bytes for unit in job.context.units}
    return Counted(
        stats.gathers - gathers,
        stats.reductions - reductions,
        stats.peak_resident_bytes // unit,
        *job.wrong_gradients(),
    )


def measure(schedule: Any) -> dict[str, Counted]:
    """Each way of running ``schedule`` on one rank."""
    alone = {name: torch_alone(schedule, reshard) for name, reshard in TORCH.items()}
    return alone | {name: on_a_context(schedule, options) for name, options in CONTEXT.items()}


def measure_all(schedules: Sequence[Any]) -> list[dict[str, Counted]]:
    """All of ``schedules`` on one rank."""
    return [measure(schedule) for schedule in schedules]


def table(measured: Sequence[Sequence[dict[str, Counted]]]) -> str:
    """The table, from what each rank has measured of each of :data:`SCHEDULES`."""
    columns = [*TORCH, *CONTEXT]
    lines = [
        "| gathers / reductions / peak units | " + " | ".join(columns) + " |",
        "| --- |" + " --- |" * len(columns),
    ]
    for index, schedule in enumerate(SCHEDULES):
        cells = []
        for column in columns:
            of_ranks = [rank[index][column] for rank in measured]
            cells.append(
                " / ".join(
                    _range([getattr(counted, name) for counted in of_ranks])
                    for name in ("gathers", "reductions", "peak")
                )
            )
            if not all(counted.right for counted in of_ranks):
                cells[-1] += ", **wrong gradients**"
        lines.append(f"| {schedule.__name__.removeprefix('Schedule')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _range(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return str(least) if least == most else f"{least} to {most}"


def main() -> None:
    """Print the table."""
    import pipeline_table  # the ranks look for functions here, not in __main__

    pools = RankPools()
    try:
        print(
            pipeline_table.table(pools(4).run(pipeline_table.measure_all, SCHEDULES, timeout=280))
        )
    finally:
        pools.close()


if __name__ == "__main__":
    assert not set(V_SHAPED) - set(RUNNABLE), "V-shaped schedules need torch 2.13 on the CPU"
    main()
