"""The programs that a context knows, bound to its units.

A training run meets a few kinds of windows: the full one, the shorter last batch
of an epoch, a branch that is taken now and then. Each is recorded once and kept
here; :mod:`fsdp_fx.window` looks up which of them goes on as the present one does.

Bounded: the least recently used program leaves first.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .program import Program
from .trace import Phase
from .units import Unit

__all__ = ["BoundProgram", "BoundStep", "ProgramLibrary"]

Key = tuple[Unit, Phase]


@dataclass(frozen=True, slots=True)
class BoundStep:
    """A step of a program with units in the place of their names.

    Attributes:
        unit: the unit that the event needs.
        phase: ``"F"`` or ``"B"``.
        gathers: gathers to issue before the event waits for its unit.
        prefetches: gathers to issue after that wait.
        frees: units to free when the event's use ends.
        reduces: units to reduce when the event's use ends, after the frees.
    """

    unit: Unit
    phase: Phase
    gathers: tuple[Unit, ...]
    prefetches: tuple[Unit, ...]
    frees: tuple[Unit, ...]
    reduces: tuple[Unit, ...]


class BoundProgram:
    """A verified program and its steps, bound to units.

    Args:
        program: a verified program.
        units: the context's units by name.

    Attributes:
        slices: what compiled calls looked up in this program, by graph and place. Filled
            by :mod:`fsdp_fx.compile`; here because it is valid as long as the program and
            the graph are.
    """

    def __init__(self, program: Program, units: Mapping[str, Unit]) -> None:
        def bind(names: Iterable[str]) -> tuple[Unit, ...]:
            return tuple(units[name] for name in names)

        self.program = program
        self.steps = tuple(
            BoundStep(
                units[step.event.unit],
                step.event.phase,
                bind(step.gathers),
                bind(step.prefetches),
                bind(step.frees),
                bind(step.reduces),
            )
            for step in program.steps
        )
        self.keys: tuple[Key, ...] = tuple((step.unit, step.phase) for step in self.steps)
        self.slices: weakref.WeakKeyDictionary[object, dict[Hashable, object]] = (
            weakref.WeakKeyDictionary()
        )

    def resident_before(self, position: int) -> set[Unit]:
        """The units that the program has gathered when event ``position`` begins."""
        resident: set[Unit] = set()
        for step in self.steps[:position]:
            resident.update(step.gathers)
            resident.update(step.prefetches)
            resident.difference_update(step.frees)
        return resident


class ProgramLibrary:
    """Known programs, the most recently used last.

    Args:
        capacity: how many are kept.
    """

    def __init__(self, capacity: int = 16) -> None:
        self._capacity = capacity
        self._programs: list[BoundProgram] = []

    def __len__(self) -> int:
        return len(self._programs)

    def __iter__(self) -> Iterator[BoundProgram]:
        return iter(self._programs)

    @property
    def latest(self) -> BoundProgram | None:
        """The program used last, or None."""
        return self._programs[-1] if self._programs else None

    def add(self, bound: BoundProgram) -> None:
        """Keep ``bound``; forget the least recently used if there are too many."""
        self._programs.append(bound)
        del self._programs[: -self._capacity]

    def touch(self, bound: BoundProgram) -> None:
        """Note that ``bound`` was used."""
        self._programs.remove(bound)
        self._programs.append(bound)

    def going_on(self, prefix: Sequence[Key], following: Sequence[Key]) -> BoundProgram | None:
        """The latest program that begins with ``prefix`` and goes on with ``following``."""
        wanted = (*prefix, *following)
        for bound in reversed(self._programs):
            if bound.keys[: len(wanted)] == wanted:
                return bound
        return None

    def exactly(self, keys: Sequence[Key]) -> BoundProgram | None:
        """The program with these events and no others."""
        wanted = tuple(keys)
        for bound in reversed(self._programs):
            if bound.keys == wanted:
                return bound
        return None
