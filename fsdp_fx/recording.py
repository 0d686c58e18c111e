"""The events of a window as they are written down.

Filled by :mod:`fsdp_fx.window` while no program is followed, and turned into a trace at
the close. It gathers nothing and checks nothing: whether the window is whole is the
window's question.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from .library import BoundProgram, Key
from .trace import Event, Phase, Trace
from .units import Unit

__all__ = ["Recording"]


class Recording:
    """A trace in the making."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._events: list[Event] = []
        self._ends: list[int] = []
        self._reduces: set[int] = set()
        # Positions in the order in which end() was called for them.
        self._ended: dict[int, None] = {}
        self._occurrences: dict[Key, int] = {}

    @classmethod
    def beginning_of(cls, bound: BoundProgram, microbatches: Sequence[int]) -> Recording:
        """What a window has recorded that followed ``bound`` so far and leaves it.

        Uses that are under way write their end down when it comes.

        Args:
            bound: the program.
            microbatches: the microbatch of each event so far. The program's may be others
                in the same order of units.
        """
        trace = bound.program.trace
        position = len(microbatches)
        recording = cls()
        recording._keys = list(bound.keys[:position])
        recording._events = [
            replace(event, microbatch=microbatch)
            for event, microbatch in zip(trace.events, microbatches, strict=False)
        ]
        recording._ends = [min(end, position - 1) for end in trace.ends[:position]]
        recording._reduces = {index for index in trace.reduces if index < position}
        ended = sorted(range(position), key=lambda index: trace.end_order(index))
        recording._ended = {index: None for index in ended if trace.ends[index] < position}
        for key in recording._keys:
            recording._occurrences[key] = recording._occurrences.get(key, 0) + 1
        return recording

    def add(self, unit: Unit, phase: Phase, microbatch: int, end: int) -> Event:
        """Write an event down.

        Args:
            unit: the unit.
            phase: ``"F"`` or ``"B"``.
            microbatch: index of the chunk's forward call.
            end: position of the last event that will have begun when its use ends, as
                far as is known.

        Returns:
            The event.
        """
        key = (unit, phase)
        occurrence = self._occurrences.get(key, 0)
        self._occurrences[key] = occurrence + 1
        self._keys.append(key)
        event = Event(unit.spec.name, phase, occurrence, microbatch)
        self._events.append(event)
        self._ends.append(end)
        return event

    @property
    def events(self) -> Sequence[Event]:
        """The events so far."""
        return self._events

    def end(self, position: int, last: int) -> None:
        """The use of event ``position`` ended when event ``last`` was the last begun."""
        self._ends[position] = last
        self._ended.pop(position, None)
        self._ended[position] = None

    def contributions_complete(self, positions: Iterable[int]) -> None:
        """After these events every contribution of the unit's microbatch was in."""
        self._reduces.update(positions)

    def complete_at_close(self, unit: Unit) -> None:
        """The unit's gradients are reduced although contributions were missing.

        Its last backward of each microbatch is then where the gradient was complete.
        """
        last: dict[int, int] = {}
        complete: set[int] = set()
        for position, (event, key) in enumerate(zip(self._events, self._keys, strict=True)):
            if key == (unit, "B"):
                last[event.microbatch] = position
                if position in self._reduces:
                    complete.add(event.microbatch)
        self._reduces.update(at for batch, at in last.items() if batch not in complete)

    def trace(self, units: Sequence[Unit]) -> Trace:
        """The trace of the whole window.

        Args:
            units: the context's units, in adoption order.
        """
        return Trace(
            units=tuple(unit.spec for unit in units),
            events=tuple(self._events),
            ends=tuple(self._ends),
            reduces=frozenset(self._reduces),
            ending=self._ending(),
        )

    def _ending(self) -> tuple[int, ...]:
        # A compiled slice has its ends from the start: before those of the uses around it.
        ranks = {position: rank for rank, position in enumerate(self._ended)}
        return tuple(
            sorted(
                range(len(self._ends)),
                key=lambda position: (self._ends[position], ranks.get(position, -1), -position),
            )
        )
