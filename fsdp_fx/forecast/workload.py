"""What is planned for: the trace of every pipeline rank, and how long things take.

Simple on purpose. A collective takes a latency and its bytes over a bandwidth. Compute is given
for each unit; a backward is a multiple of its forward, and each half of a split one takes half
of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_fx.planning.durations import Durations
from fsdp_fx.planning.pipelines import (
    CallKind,
    PipelineCall,
    pipeline_traces,
    pipeline_transfers,
)
from fsdp_fx.planning.simulation import Transfer
from fsdp_fx.trace import Trace, UnitSpec

__all__ = ["Collectives", "Workload", "of_schedule", "of_trace"]


@dataclass(frozen=True)
class Collectives:
    """How long it takes to move bytes.

    Args:
        shards: how many ranks shard each unit.
        bandwidth: bytes per second that a rank receives, or sends.
        latency: nanoseconds before the first byte.
    """

    shards: int
    bandwidth: float
    latency: int

    def gather(self, unit: UnitSpec) -> int:
        """Nanoseconds of the gather of a unit."""
        return self._collective(unit.bytes)

    def reduction(self, unit: UnitSpec) -> int:
        """Nanoseconds of the reduction of a unit, in the dtype that it accumulates in."""
        return self._collective(unit.gradient_bytes)

    def transfer(self, size: int) -> int:
        """Nanoseconds from one rank to another."""
        return self.latency + round(1e9 * size / self.bandwidth)

    def _collective(self, size: int) -> int:
        # A rank has its own shard already.
        share = (self.shards - 1) / self.shards
        return self.latency + round(1e9 * share * size / self.bandwidth)


@dataclass(frozen=True)
class Workload:
    """A step to plan: one trace per pipeline rank, for all ranks that shard its units.

    Args:
        title: what it is, in one line.
        traces: one per pipeline rank.
        durations: how long things take on each.
        transfers: what waits for what between them.
    """

    title: str
    traces: tuple[Trace, ...]
    durations: tuple[Durations, ...]
    transfers: tuple[Transfer, ...] = ()


def of_schedule(
    title: str,
    calls: Sequence[Sequence[PipelineCall]],
    stage_units: Sequence[Sequence[UnitSpec]],
    forwards: Mapping[str, int],
    backward: float,
    collectives: Collectives,
    activation_bytes: int = 0,
) -> Workload:
    """The workload of a pipeline schedule.

    Args:
        title: what it is, in one line.
        calls: what each rank calls.
        stage_units: the units of each stage.
        forwards: nanoseconds of one forward of each unit, by name.
        backward: how many forwards a backward takes.
        collectives: how long it takes to move bytes.
        activation_bytes: what a stage hands to the next for one microbatch.
    """
    traces = pipeline_traces(calls, stage_units)
    durations = []
    for own, trace in zip(calls, traces, strict=True):
        compute: list[int] = []
        for call in own:
            units = stage_units[call.stage]
            compute += (
                _compute(call.kind, forwards[unit.name], backward)
                for unit in (units if call.kind == "F" else reversed(units))
            )
        durations.append(_with_collectives(trace, tuple(compute), collectives))
    transfers = pipeline_transfers(
        calls, [len(units) for units in stage_units], collectives.transfer(activation_bytes)
    )
    return Workload(title, traces, tuple(durations), transfers)


def of_trace(
    title: str,
    trace: Trace,
    measured: Durations | None,
    forwards: Mapping[str, int] | None,
    backward: float,
    collectives: Collectives | None,
) -> Workload:
    """The workload of one trace.

    Args:
        title: what it is, in one line.
        trace: the trace.
        measured: how long things took, for what is not given.
        forwards: nanoseconds of one forward of each unit, by name.
        backward: how many of them a backward takes.
        collectives: how long it takes to move bytes.

    Raises:
        ValueError: something is neither given nor measured.
    """
    if measured is None and (forwards is None or collectives is None):
        raise ValueError("nothing was measured: give compute and collectives")
    compute = measured.compute if measured is not None else ()
    if forwards is not None:
        compute = tuple(_compute(event.phase, forwards[event.unit], backward) for event in trace)
    if collectives is not None:
        durations = _with_collectives(trace, compute, collectives)
    else:
        assert measured is not None
        durations = Durations(compute, measured.gathers, measured.reductions)
    return Workload(title, (trace,), (durations,))


def _compute(kind: CallKind, forward: int, backward: float) -> int:
    whole = round(forward * backward)
    match kind:
        case "F":
            return forward
        case "B":
            return whole
        case "I":
            return whole // 2
        case "W":
            return whole - whole // 2


def _with_collectives(
    trace: Trace, compute: tuple[int, ...], collectives: Collectives
) -> Durations:
    return Durations(
        compute=compute,
        gathers={unit.name: collectives.gather(unit) for unit in trace.units},
        reductions={
            unit.name: collectives.reduction(unit) for unit in trace.units if unit.trainable
        },
    )
