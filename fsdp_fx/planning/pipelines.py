"""What each rank of a pipeline calls, in which order, and the traces of it.

Plans for pipelines that nobody has at hand start here: a schedule's name and its sizes become
calls of stages (:func:`pipeline_calls`), the calls become one trace per rank
(:func:`pipeline_traces`), and what stages wait for becomes transfers
(:func:`pipeline_transfers`).

The orders are those of ``torch.distributed.pipelining``. Its schedules of several stages per
rank compute the order of every rank when they are built; all that they read of their stages is
their place, so that no process group is needed. Those of one stage per rank decide while they
run; what they do is written down here, and a test runs them.

Nothing here gathers, reduces or takes time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from fsdp_fx.planning.simulation import Transfer
from fsdp_fx.trace import Event, Phase, Trace, UnitSpec

__all__ = [
    "SCHEDULES",
    "CallKind",
    "PipelineCall",
    "default_chunks",
    "pipeline_calls",
    "pipeline_traces",
    "pipeline_transfers",
    "schedule_name",
]

CallKind = Literal["F", "B", "I", "W"]
_KINDS: tuple[CallKind, ...] = ("F", "B", "I", "W")

_SINGLE: dict[str, type[Any]] = {
    schedule.__name__: schedule for schedule in (ScheduleGPipe, Schedule1F1B)
}
_LOOPED: dict[str, type[Any]] = {
    schedule.__name__: schedule
    for schedule in (ScheduleInterleaved1F1B, ScheduleLoopedBFS, ScheduleInterleavedZeroBubble)
}
_V_SHAPED: dict[str, type[Any]] = {
    schedule.__name__: schedule for schedule in (ScheduleZBVZeroBubble, ScheduleDualPipeV)
}
_CLASSES = {**_SINGLE, **_LOOPED, **_V_SHAPED}

SCHEDULES: tuple[str, ...] = tuple(_CLASSES)
"""The names of the schedules that are known here: torch's class names."""


@dataclass(frozen=True, slots=True)
class PipelineCall:
    """One call of a stage.

    Args:
        stage: index of the stage in the pipeline.
        kind: ``"F"`` a forward, ``"B"`` a whole backward, ``"I"`` the half of a backward that
            computes the gradients of the inputs, ``"W"`` the half for those of the weights.
        microbatch: index of the microbatch.
    """

    stage: int
    kind: CallKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, microbatch {self.microbatch}"


class _Place:
    """Stands in for a pipeline stage where only its place is asked for."""

    submod = None

    def __init__(self, stage: int, stages: int, ranks: int) -> None:
        self.stage_index = stage
        self.num_stages = stages
        self.group_size = ranks
        self.group_rank = 0
        self.is_first = stage == 0
        self.is_last = stage == stages - 1


def schedule_name(schedule: str) -> str:
    """The class name of a schedule of ``torch.distributed.pipelining``.

    Args:
        schedule: the class name, with or without ``Schedule`` in front, in any case.

    Raises:
        ValueError: it is not known; names those that are.
    """
    wanted = schedule.lower().removeprefix("schedule")
    for name in SCHEDULES:
        if name.lower().removeprefix("schedule") == wanted:
            return name
    known = ", ".join(name.removeprefix("Schedule") for name in SCHEDULES)
    raise ValueError(f"unknown schedule {schedule!r}: use one of {known}")


def default_chunks(schedule: str) -> int:
    """The fewest chunks per rank that ``schedule`` is made for: 1 or 2.

    Raises:
        ValueError: an unknown schedule.
    """
    return 1 if schedule_name(schedule) in _SINGLE else 2


def pipeline_calls(
    schedule: str, ranks: int, chunks: int, microbatches: int
) -> tuple[tuple[PipelineCall, ...], ...]:
    """What each pipeline rank calls in one step, in order.

    A forward and a backward that torch runs as one overlapped action are two calls, the forward
    first, as its schedules run them without a function of the user's.

    Args:
        schedule: name of a schedule, see :func:`schedule_name`.
        ranks: ranks of the pipeline.
        chunks: stages per rank.
        microbatches: microbatches of the step.

    Returns:
        The calls of each rank.

    Raises:
        ValueError: an unknown schedule, sizes below 1, or sizes that the schedule refuses.
    """
    name = schedule_name(schedule)
    for what, size in (("ranks", ranks), ("chunks", chunks), ("microbatches", microbatches)):
        if size < 1:
            raise ValueError(f"{name} with {size} {what}: use 1 or more")
    if name in _SINGLE and chunks != 1:
        raise ValueError(
            f"{name} has one stage per rank, not {chunks}: use ScheduleInterleaved1F1B or "
            "ScheduleLoopedBFS for several"
        )
    places = [_Place(chunk * ranks, ranks * chunks, ranks) for chunk in range(chunks)]
    try:
        built = _CLASSES[name](places[0] if name in _SINGLE else places, microbatches)
    except (ValueError, AssertionError, RuntimeError) as error:
        message = " ".join(str(error).split())
        raise ValueError(
            f"{name} refuses {ranks} ranks × {chunks} chunks, {microbatches} microbatches: "
            f"{message}"
        ) from error
    if name == "ScheduleGPipe":
        calls = tuple(tuple(_gpipe(rank, microbatches)) for rank in range(ranks))
    elif name == "Schedule1F1B":
        calls = tuple(
            tuple(_one_forward_one_backward(rank, ranks, microbatches)) for rank in range(ranks)
        )
    else:
        calls = tuple(tuple(_flattened(built.pipeline_order[rank])) for rank in range(ranks))
    _require_complete(name, calls, ranks * chunks, microbatches)
    return calls


def _gpipe(stage: int, microbatches: int) -> Iterator[PipelineCall]:
    for microbatch in range(microbatches):
        yield PipelineCall(stage, "F", microbatch)
    for microbatch in range(microbatches):
        yield PipelineCall(stage, "B", microbatch)


def _one_forward_one_backward(stage: int, stages: int, microbatches: int) -> Iterator[PipelineCall]:
    # Not the order that torch's Schedule1F1B describes itself with, whose last rank leaves
    # microbatch 0 out, but the one that it runs.
    ahead = min(microbatches, stages - stage)
    for microbatch in range(ahead):
        yield PipelineCall(stage, "F", microbatch)
    for microbatch in range(microbatches):
        yield PipelineCall(stage, "B", microbatch)
        if microbatch + ahead < microbatches:
            yield PipelineCall(stage, "F", microbatch + ahead)


def _flattened(actions: Iterable[Any]) -> Iterator[PipelineCall]:
    """The calls of torch's actions: without pauses, overlapped ones one after the other."""
    for action in actions:
        if action is None:
            continue
        for each in action.sub_actions or (action,):
            yield PipelineCall(each.stage_index, each.computation_type.value, each.microbatch_index)


def _require_complete(
    name: str, calls: Sequence[Sequence[PipelineCall]], stages: int, microbatches: int
) -> None:
    """Raise unless every stage has every microbatch's forward and one backward, whole or split."""
    seen = Counter(call for rank in calls for call in rank)
    ranks_of = defaultdict(set)
    for rank, own in enumerate(calls):
        for call in own:
            ranks_of[call.stage].add(rank)
    for stage in range(stages):
        for microbatch in range(microbatches):
            counts = tuple(seen.pop(PipelineCall(stage, kind, microbatch), 0) for kind in _KINDS)
            if counts not in ((1, 1, 0, 0), (1, 0, 1, 1)) or len(ranks_of[stage]) != 1:
                raise ValueError(
                    f"{name}: torch's order has stage {stage}, microbatch {microbatch} on ranks "
                    f"{sorted(ranks_of[stage])} with {counts} calls of kinds F, B, I, W"
                )
    if seen:
        raise ValueError(f"{name}: torch's order has {next(iter(seen))}, which does not exist")


def pipeline_traces(
    calls: Sequence[Sequence[PipelineCall]], stage_units: Sequence[Sequence[UnitSpec]]
) -> tuple[Trace, ...]:
    """The trace of each pipeline rank.

    A call reaches the units of its stage one after the other, a forward in the order given, a
    backward in the reverse; none lies inside of another. A whole backward reduces what can be
    trained, of a split one the half for the weights.

    Args:
        calls: see :func:`pipeline_calls`.
        stage_units: the units of each stage, in the order of its forward. Names are unique in
            the pipeline.

    Returns:
        One trace per rank. Its units are those of its stages.

    Raises:
        ValueError: a stage that is called has no units, or two units share a name.
    """
    names = Counter(unit.name for units in stage_units for unit in units)
    if names and (most := names.most_common(1)[0])[1] > 1:
        raise ValueError(f"{most[1]} units are named {most[0]}: give each its own name")
    return tuple(_trace(own, stage_units) for own in calls)


def _trace(calls: Sequence[PipelineCall], stage_units: Sequence[Sequence[UnitSpec]]) -> Trace:
    events: list[Event] = []
    reduces: set[int] = set()
    seen: Counter[tuple[str, Phase]] = Counter()
    # In the order in which the schedule was given the stages: by index.
    stages = sorted({call.stage for call in calls})
    for stage in stages:
        if stage >= len(stage_units) or not stage_units[stage]:
            raise ValueError(f"stage {stage} has no units")
    for call in calls:
        phase: Phase = "F" if call.kind == "F" else "B"
        units = stage_units[call.stage]
        for unit in units if phase == "F" else reversed(units):
            if call.kind in ("B", "W") and unit.trainable:
                reduces.add(len(events))
            events.append(Event(unit.name, phase, seen[unit.name, phase], call.microbatch))
            seen[unit.name, phase] += 1
    return Trace(
        units=tuple(unit for stage in stages for unit in stage_units[stage]),
        events=tuple(events),
        ends=tuple(range(len(events))),
        reduces=frozenset(reduces),
    )


def pipeline_transfers(
    calls: Sequence[Sequence[PipelineCall]],
    unit_counts: Sequence[int],
    nanoseconds: int = 0,
) -> tuple[Transfer, ...]:
    """What calls wait for: activations of the stage before, gradients of the stage after.

    The forward of a stage waits for that of the stage before, and its backward (of a split one
    the half for the inputs) for that of the stage after, of the same microbatch. Nothing is
    said of what a rank has computed itself: its calls come one after the other.

    Args:
        calls: see :func:`pipeline_calls`.
        unit_counts: how many units each stage has.
        nanoseconds: how long one transfer takes.

    Returns:
        Transfers between events of the traces that :func:`pipeline_traces` makes.
    """
    # Of each call: its rank, and the positions of its first and its last event.
    spans: dict[tuple[int, str, int], tuple[int, int, int]] = {}
    for rank, own in enumerate(calls):
        position = 0
        for call in own:
            count = unit_counts[call.stage]
            direction = {"F": "F", "W": "W"}.get(call.kind, "B")
            spans[call.stage, direction, call.microbatch] = (rank, position, position + count - 1)
            position += count
    transfers = []
    for (stage, direction, microbatch), (rank, first, _) in spans.items():
        neighbour = {"F": stage - 1, "B": stage + 1}.get(direction)
        source = None if neighbour is None else spans.get((neighbour, direction, microbatch))
        if source is not None and source[0] != rank:
            transfers.append(Transfer((source[0], source[2]), (rank, first), nanoseconds))
    return tuple(transfers)
