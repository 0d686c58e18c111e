"""What one window recorded: its compute events, in order.

A :class:`Trace` is plain data: it names units, it does not hold them, so it can
be compared, hashed, saved and planned for on a machine without the model. It is
written by :mod:`fsdp_fx.window` and read by :mod:`fsdp_fx.program`.

This module knows nothing of gathers, frees or streams.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, overload

__all__ = ["Call", "Event", "Phase", "Trace", "UnitSpec", "registration_trace"]

Phase = Literal["F", "B"]


@dataclass(frozen=True)
class UnitSpec:
    """What planning needs to know of a unit.

    Args:
        name: unique in the context: chunk name, then the module's path in it.
        chunk: name of the chunk (adopted root) that the unit belongs to.
        elements: number of elements of the full parameters.
        bytes: bytes of the full parameters in the dtype that they are gathered in.
        gradient_bytes: bytes of the full gradients in the dtype that they are
            reduced in; 0 for a frozen unit.
        trainable: whether any parameter requires a gradient.
        replicas: how many groups of ranks hold the same shards, and so have their
            reduced gradients all-reduced; 1 for a unit that is only sharded.
        trained: indices of the parameters that require a gradient.
        kept_after_forward: whether the user wants it to stay from each forward to the use
            that comes next (``reshard_after_forward=False``).
        kept_gradient_bytes: bytes of the full gradients in the dtype that they are kept in
            between backwards; as many as ``gradient_bytes`` if not given.
    """

    name: str
    chunk: str
    elements: int
    bytes: int
    gradient_bytes: int
    trainable: bool
    replicas: int = 1
    trained: tuple[int, ...] = ()
    kept_after_forward: bool = False
    kept_gradient_bytes: int = -1

    def __post_init__(self) -> None:
        if self.kept_gradient_bytes == -1:
            object.__setattr__(self, "kept_gradient_bytes", self.gradient_bytes)


@dataclass(frozen=True)
class Event:
    """The instant compute first needs a unit's full parameters.

    Args:
        unit: name of the unit.
        phase: ``"F"`` or ``"B"``.
        occurrence: how many events of this unit and phase came before it in the
            window.
        microbatch: which forward call of the chunk in this window it belongs to.
            For display; two events are equal without it.
    """

    unit: str
    phase: Phase
    occurrence: int
    microbatch: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"{self.unit} {self.phase}{self.occurrence}"


@dataclass(frozen=True)
class Call:
    """A run of events of one chunk, phase and microbatch.

    Args:
        chunk: name of the chunk.
        phase: ``"F"`` or ``"B"``.
        microbatch: index of the chunk's forward call in the window.
        start: position of its first event in the trace.
        stop: position after its last event.
    """

    chunk: str
    phase: Phase
    microbatch: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.chunk} {self.phase} microbatch {self.microbatch}"


@dataclass(frozen=True)
class Trace(Sequence[Event]):
    """The ordered events of one whole window.

    Args:
        units: every unit of the context, in adoption order.
        events: the events, in the order in which compute reached them.
        ends: for each event, the position of the last event that had begun when
            its use of the unit ended; at least the event's own position. A parent
            unit's use ends after its children's events.
        reduces: positions of the backward events after which every contribution
            of the unit's microbatch was in, so that its gradients may be reduced.
        ending: every position, in the order in which the uses ended. Left empty where
            of uses that end at the same place the one that began later ended first, as
            nested ones do.
    """

    units: tuple[UnitSpec, ...]
    events: tuple[Event, ...]
    ends: tuple[int, ...]
    reduces: frozenset[int]
    ending: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.ends) != len(self.events):
            raise ValueError(f"a trace of {len(self.events)} events has {len(self.ends)} ends")
        known = {unit.name for unit in self.units}
        for position, (event, end) in enumerate(zip(self.events, self.ends, strict=True)):
            if event.unit not in known:
                raise ValueError(f"event {position} ({event}) names an unknown unit")
            if not position <= end < len(self.events):
                raise ValueError(
                    f"event {position} ({event}) ends at {end}, "
                    f"outside of {position} to {len(self.events) - 1}"
                )
        for position in self.reduces:
            if not 0 <= position < len(self.events) or self.events[position].phase != "B":
                raise ValueError(f"position {position} reduces but is not a backward event")
        if not self.ending:
            return
        nested = tuple(
            sorted(range(len(self.ends)), key=lambda position: (self.ends[position], -position))
        )
        if sorted(self.ending) != list(range(len(self.ends))) or [
            self.ends[position] for position in self.ending
        ] != [self.ends[position] for position in nested]:
            raise ValueError(f"the order of ending {self.ending} contradicts the ends {self.ends}")
        if self.ending == nested:  # so that equal traces are equal
            object.__setattr__(self, "ending", ())

    def __len__(self) -> int:
        return len(self.events)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | Sequence[Event]:
        return self.events[index]

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    @cached_property
    def end_ranks(self) -> tuple[int, ...]:
        """For each event, its rank among the uses that end at the same place."""
        if not self.ending:
            return tuple(-position for position in range(len(self.ends)))
        ranks = [0] * len(self.ends)
        for rank, position in enumerate(self.ending):
            ranks[position] = rank
        return tuple(ranks)

    def end_order(self, position: int) -> tuple[int, int]:
        """Sorts the uses of the trace by when they end.

        Of uses that end at the same place, the enclosing one, which began earlier, ends
        last, unless the trace says otherwise (:attr:`ending`).

        Args:
            position: of the event.
        """
        return self.ends[position], self.end_ranks[position]

    @property
    def calls(self) -> tuple[Call, ...]:
        """The window's calls: runs of events of one chunk, phase and microbatch."""
        chunk_of = {unit.name: unit.chunk for unit in self.units}
        calls: list[Call] = []
        for position, event in enumerate(self.events):
            key = (chunk_of[event.unit], event.phase, event.microbatch)
            last = calls[-1] if calls else None
            if last is not None and (last.chunk, last.phase, last.microbatch) == key:
                calls[-1] = Call(*key, last.start, position + 1)
            else:
                calls.append(Call(*key, position, position + 1))
        return tuple(calls)

    def unit(self, name: str) -> UnitSpec:
        """The specification of the unit called ``name``.

        Raises:
            KeyError: no unit of the trace has that name.
        """
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, UnitSpec]:
        return {unit.name: unit for unit in self.units}

    @property
    def fingerprint(self) -> str:
        """A digest that is equal on two ranks if, and only if, their events are.

        SHA-256 over the events, their ends and reductions; independent of
        PYTHONHASHSEED and of unit sizes, which uneven shards may change.
        """
        digest = hashlib.sha256()
        for position, (event, end) in enumerate(zip(self.events, self.ends, strict=True)):
            digest.update(f"{event}|{end}|{position in self.reduces}\n".encode())
        if self.ending:
            digest.update(f"{self.ending}\n".encode())
        return digest.hexdigest()


def _path(name: str) -> str:
    """A unit's name without the mark that tells units of one module apart."""
    return name.rpartition("[")[0] if name.endswith("]") else name


def registration_trace(units: Sequence[UnitSpec]) -> Trace:
    """The order that ordinary training has, known before anything runs.

    Forward in the order given (depth first, chunks in adoption order); backward
    visits the chunks reversed, each in pre-order with its children reversed. A
    unit's parent is the one whose name, read as a path, is its longest prefix; of
    several units of one module, each is inside the one before.

    Args:
        units: the context's units, in adoption order, each chunk's in module order.

    Returns:
        A trace with one forward and one backward event per unit.
    """
    names = [unit.name for unit in units]
    children: dict[str | None, list[str]] = {None: []}
    parents: dict[str, str | None] = {}
    paths = {name: _path(name) for name in names}
    for index, name in enumerate(names):
        path = paths[name]
        above = [n for n in names[:index] if path == paths[n] or path.startswith(paths[n] + ".")]
        # Of those with the same path the last.
        parent = max(reversed(above), key=lambda other: len(paths[other]), default=None)
        parents[name] = parent
        children.setdefault(parent, []).append(name)
        children.setdefault(name, [])

    events: list[Event] = []
    ends: dict[int, int] = {}

    def visit(name: str, phase: Phase) -> None:
        position = len(events)
        events.append(Event(name, phase, 0))
        order = children[name] if phase == "F" else list(reversed(children[name]))
        for child in order:
            visit(child, phase)
        ends[position] = len(events) - 1

    for name in children[None]:
        visit(name, "F")
    for name in reversed(children[None]):
        visit(name, "B")
    trainable = {unit.name for unit in units if unit.trainable}
    return Trace(
        units=tuple(units),
        events=tuple(events),
        ends=tuple(ends[position] for position in range(len(events))),
        reduces=frozenset(
            position
            for position, event in enumerate(events)
            if event.phase == "B" and event.unit in trainable
        ),
    )
