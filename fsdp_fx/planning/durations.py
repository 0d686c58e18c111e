"""How long the compute of each event and the collectives of each unit take.

Measured while a window is recorded (:mod:`fsdp_fx.metering`), or assumed for machines that
nobody has at hand. Read by the simulation and by the lookahead by time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Durations"]


@dataclass(frozen=True)
class Durations:
    """How long things take, in nanoseconds.

    Args:
        compute: for each event of a trace, from the moment its unit is there to the moment
            at which compute is ready for the next event: an event's own time, without that
            of the events inside of its use.
        gathers: of each unit, by name.
        reductions: of each unit, by name; frozen units have none.
    """

    compute: tuple[int, ...]
    gathers: Mapping[str, int]
    reductions: Mapping[str, int]
