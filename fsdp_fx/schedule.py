"""What ranks that shard some units together must have in common, as text.

Lines that can be sent, compared and shown to a person. Who compares them, and when, is
:mod:`fsdp_fx.agreement`'s business.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .program import Program
from .trace import Event, UnitSpec

__all__ = ["Schedule", "events_so_far", "schedule_of"]


@dataclass(frozen=True)
class Schedule:
    """What ranks that share some units must have in common, as lines of text.

    Args:
        units: the shared units and their sizes.
        events: the events of these units, in order.
        operations: the events with the gathers and reductions around them.
        issued: how many collectives of each unit there have been.
    """

    units: tuple[str, ...]
    events: tuple[str, ...]
    operations: tuple[str, ...] = ()
    issued: tuple[str, ...] = ()

    def pack(self) -> str:
        """The schedule as short text, for :meth:`unpack`."""
        parts = (self.units, self.events, self.operations, self.issued)
        text = "\n\n".join("\n".join(part) for part in parts)
        return base64.b64encode(zlib.compress(text.encode())).decode()

    @classmethod
    def unpack(cls, packed: bytes) -> Schedule:
        """What :meth:`pack` made text of, as the store returns it."""
        parts = zlib.decompress(base64.b64decode(packed)).decode().split("\n\n")
        return cls(*(tuple(part.split("\n")) if part else () for part in parts))

    def difference(self, other: Schedule, mine: str, theirs: str) -> str | None:
        """The first difference, in a sentence; None if there is none.

        Args:
            other: another rank's.
            mine: who this one is.
            theirs: who the other is.
        """

        def sides(left: str, right: str) -> str:
            return f"{left} on {mine} and {right} on {theirs}"

        if self.units != other.units:
            _, left, right = _first_difference(self.units, other.units)
            return f"they have other units or options: {sides(left, right)}"
        if self.events != other.events:
            at, left, right = _first_difference(self.events, other.events)
            return f"event {at} of the units they share is {sides(left, right)}"
        if self.operations != other.operations:
            at, left, right = _first_difference(self.operations, other.operations)
            labels = set(self.events)
            done = [line for line in self.operations[:at] if line in labels]
            where = (
                f"after event {len(done) - 1} ({done[-1]})" if done else "before the first event"
            )
            return (
                f"their events are the same, but {where} there is {sides(left, right)}: give every "
                "rank's FSDPContext the same options"
            )
        if self.issued != other.issued:
            _, left, right = _first_difference(self.issued, other.issued)
            return f"collectives after abort(): of unit {sides(left, right)}"
        return None


def _first_difference(one: Sequence[str], other: Sequence[str]) -> tuple[int, str, str]:
    length = min(len(one), len(other))
    at = next((i for i in range(length) if one[i] != other[i]), length)
    left, right = (side[at] if at < len(side) else "nothing more" for side in (one, other))
    return at, left, right


def schedule_of(program: Program, shared: Collection[str]) -> Schedule:
    """What ``program`` does with the units called ``shared``."""
    operations: list[str] = []
    for step in program.steps:
        operations += (f"a gather of {name}" for name in step.gathers if name in shared)
        if step.event.unit in shared:
            operations.append(str(step.event))
        operations += (f"a gather of {name}" for name in step.prefetches if name in shared)
        operations += (
            f"{'partial sums' if name in step.partial else 'a reduction'} of {name}"
            for name in step.reduces
            if name in shared
        )
    so_far = events_so_far(program.trace.units, program.trace.events, shared)
    return Schedule(so_far.units, so_far.events, tuple(operations))


def events_so_far(
    units: Sequence[UnitSpec], events: Sequence[Event], shared: Collection[str]
) -> Schedule:
    """The schedule of a window, or of its beginning, of which only the events are known."""
    return Schedule(
        tuple(
            f"{unit.name} ({unit.elements} elements, {unit.replicas} replicas, "
            f"trains parameters {', '.join(map(str, unit.trained)) or 'none'}"
            f"{', stays after its forward' if unit.kept_after_forward else ''})"
            for unit in units
            if unit.name in shared
        ),
        tuple(str(event) for event in events if event.unit in shared),
    )
