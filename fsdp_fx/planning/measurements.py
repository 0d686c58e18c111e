"""What a recorded window was measured to take, as planning reads it.

Written by :mod:`fsdp_fx.metering`, made equal on all ranks by :mod:`fsdp_fx.agreement`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp_fx.planning.durations import Durations
from fsdp_fx.planning.gradients import RecordedGradients

__all__ = ["Measurements"]


@dataclass(frozen=True)
class Measurements:
    """What was measured of a window; nothing of what was not.

    Args:
        durations: how long events and collectives took.
        room: for each event, bytes that were free under the window's peak of allocated
            memory, beyond what the scheduler needs there at any rate; see
            :func:`fsdp_fx.planning.room.recorded_room`.
        peak: the most bytes allocated at any time in the window.
        gradients: what of the allocated memory were gradients that a plan which keeps them does
            without.
    """

    durations: Durations | None = None
    room: tuple[int, ...] | None = None
    peak: int | None = None
    gradients: RecordedGradients = field(default_factory=RecordedGradients)
