"""How many bytes may be resident at each event beyond the units in use there.

From a budget (:func:`budgeted_room`), or from the memory that a recorded window had allocated
(:func:`recorded_room`). Gradients that are kept at any rate (``reduce_gradients="per_window"``)
are outside of both: whoever asks for them has the memory.

What is recorded contains what the scheduler itself held while it recorded: units gathered on
demand, what was cast or copied for that, and gradients. The first two are in use in any plan
alike; what differs is gradients, and the input of the reduction before, which stays until the
next one: see :mod:`fsdp_fx.planning.gradients`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

from fsdp_fx.planning.memory import Interval, contributions
from fsdp_fx.trace import Trace

__all__ = [
    "budgeted_room",
    "bytes_beyond_peak",
    "interval_bytes",
    "recorded_room",
    "reduction_buffers",
]

_AUTOMATIC = re.compile(r"auto(?:\+(\d+(?:\.\d+)?)(KiB|MiB|GiB))?")


def bytes_beyond_peak(budget: object) -> int | None:
    """How far a plan may rise above the recorded peak.

    Args:
        budget: a memory budget. ``"auto"`` stays under the peak, ``"auto+4GiB"`` may rise 4 GiB
            above it.

    Returns:
        Bytes; None if the budget is not one that the recorded peak decides.
    """
    match = _AUTOMATIC.fullmatch(budget) if isinstance(budget, str) else None
    if match is None:
        return None
    size, unit = match.groups()
    return int(float(size) * 1024 ** (1 + ("KiB", "MiB", "GiB").index(unit))) if size else 0


def budgeted_room(budget: int, lookahead: Sequence[int]) -> list[int]:
    """The room under a budget, which is for what is kept: the lookahead has its own.

    Args:
        budget: bytes.
        lookahead: bytes that the lookahead covers at each event.
    """
    return [budget + covered for covered in lookahead]


def recorded_room(trace: Trace, allocated: Sequence[int], peak: int, per_window: bool) -> list[int]:
    """The room under the recorded peak.

    Args:
        trace: the recorded window: gathers on demand, units freed after use.
        allocated: the most bytes allocated at any time from each event to the next.
        peak: the most bytes allocated at any time in the window, its close included.
        per_window: whether gradients were kept in the window and reduced at its close, where
            a plan reduces each after its last backward; otherwise each was reduced as soon as
            it could be.

    Returns:
        One value per event, in bytes, not negative.

    Raises:
        ValueError: not one value per event, or one above the peak.
    """
    if len(allocated) != len(trace):
        raise ValueError(f"{len(allocated)} values of allocated memory for {len(trace)} events")
    if allocated and max(allocated) > peak:
        at = max(range(len(allocated)), key=lambda position: allocated[position])
        raise ValueError(
            f"{allocated[at]} bytes allocated at event {at} ({trace[at]}) are more than the "
            f"peak of {peak}"
        )
    inputs = list(accumulate(reduction_buffers(trace), max)) if per_window else [0] * len(trace)
    return [max(0, peak - there - held) for there, held in zip(allocated, inputs, strict=True)]


def reduction_buffers(trace: Trace) -> list[int]:
    """Bytes of the input that the reduction before each event still holds.

    The input of a reduce-scatter is kept until the next one is issued. The event in which
    a reduction is issued counts as holding it.

    Returns:
        One value per event, in bytes: of a window that reduces as soon as it can.
    """
    size = {unit.name: unit.gradient_bytes for unit in trace.units}
    buffers = [0] * len(trace)
    issued = sorted(
        (trace.ends[position], trace.end_ranks[position], position)
        for position in contributions(trace)
    )
    held, index = 0, 0
    for position in range(len(trace)):
        largest = held
        while index < len(issued) and issued[index][0] == position:
            held = size[trace[issued[index][2]].unit]
            largest = max(largest, held)
            index += 1
        buffers[position] = largest
    return buffers


def interval_bytes(trace: Trace, intervals: Sequence[Interval]) -> list[int]:
    """Bytes of full parameters resident at each event, from the intervals alone."""
    size = {unit.name: unit.bytes for unit in trace.units}
    change = [0] * (len(trace) + 1)
    for interval in intervals:
        change[interval.gathered] += size[interval.unit]
        change[interval.freed + 1] -= size[interval.unit]
    return list(accumulate(change[:-1]))
