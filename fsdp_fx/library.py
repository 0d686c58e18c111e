"""The programs that a context knows, bound to its units.

A training run meets a few kinds of windows: the full one, the shorter last batch
of an epoch, a branch that is taken now and then. Each is recorded once and kept
here, in a tree that branches at the first event that tells two of them apart;
:mod:`fsdp_fx.window` looks up which of them goes on as the present one does.

Bounded: the least recently used program leaves first, and with it the branch that only
it needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .planning.measurements import Measurements
from .planning.memory import contributions
from .program import Program
from .trace import Phase, UnitSpec
from .units import Unit

__all__ = ["BoundProgram", "BoundStep", "ProgramLibrary"]

Key = tuple[Unit, Phase]
Specification = tuple[UnitSpec, ...]


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
        partial: those of ``reduces`` that are not all-reduced over their replicas yet.
        contributed: whether all contributions to the unit's gradient are in when the event's
            use ends: what is not reduced then is kept.
    """

    unit: Unit
    phase: Phase
    gathers: tuple[Unit, ...]
    prefetches: tuple[Unit, ...]
    frees: tuple[Unit, ...]
    reduces: tuple[Unit, ...]
    partial: frozenset[Unit] = frozenset()
    contributed: bool = False


class BoundProgram:
    """A verified program and its steps, bound to units.

    Args:
        program: a verified program.
        units: the context's units by name.
        measurements: what it was planned with, equal on all ranks as far as that matters.
        provisional: whether the memory it was planned with was measured in a window that had
            begun with another program. The next window that would begin with it is recorded.

    Attributes:
        carried: the units that stay resident from one window to the next.
        slices: what compiled calls looked up in this program, by graph and place. Filled
            by :mod:`fsdp_fx.compile`; here because it is valid as long as the program and
            the graph are.
    """

    def __init__(
        self,
        program: Program,
        units: Mapping[str, Unit],
        measurements: Measurements | None = None,
        provisional: bool = False,
    ) -> None:
        def bind(names: Iterable[str]) -> tuple[Unit, ...]:
            return tuple(units[name] for name in names)

        self.program = program
        self.measurements = measurements or Measurements()
        self.provisional = provisional
        self.carried = frozenset(bind(program.carried))
        contributed = frozenset(contributions(program.trace))
        self.steps = tuple(
            BoundStep(
                units[step.event.unit],
                step.event.phase,
                bind(step.gathers),
                bind(step.prefetches),
                bind(step.frees),
                bind(step.reduces),
                frozenset(bind(step.partial)),
                position in contributed,
            )
            for position, step in enumerate(program.steps)
        )
        self.keys: tuple[Key, ...] = tuple((step.unit, step.phase) for step in self.steps)
        self.slices: weakref.WeakKeyDictionary[object, dict[Hashable, object]] = (
            weakref.WeakKeyDictionary()
        )

    def resident_before(self, position: int) -> set[Unit]:
        """The units that the program has gathered when event ``position`` begins."""
        resident: set[Unit] = set(self.carried)
        for step in self.steps[:position]:
            resident.update(step.gathers)
            resident.update(step.prefetches)
            resident.difference_update(step.frees)
        return resident

    def kept_before(self, position: int) -> set[Unit]:
        """The units whose full gradients wait for a reduction when event ``position`` begins."""
        trace = self.program.trace
        kept: set[Unit] = set()
        for at in contributions(trace):
            if trace.ends[at] < position:
                unit = self.steps[at].unit
                (kept.discard if unit in self.steps[at].reduces else kept.add)(unit)
        return kept


@dataclass(eq=False, slots=True)
class _Branch:
    """A node of the prefix tree: a run of events that nothing tells apart.

    Attributes:
        keys: the run, from where the parent's ends.
        following: the branches that go on from its end, by their first key.
        program: the program that ends here, if one does.
    """

    keys: tuple[Key, ...]
    following: dict[Key, _Branch] = field(default_factory=dict)
    program: BoundProgram | None = None

    def programs(self) -> Iterator[BoundProgram]:
        """Every program that begins with what leads here."""
        if self.program is not None:
            yield self.program
        for branch in self.following.values():
            yield from branch.programs()


class ProgramLibrary:
    """Known programs in a tree of their common beginnings, the most recently used last.

    A program is for units as they were when it was recorded: one that was frozen then
    and is trained now has other reductions. Only programs that fit the present
    specification are found.

    Args:
        capacity: how many are kept.
    """

    def __init__(self, capacity: int = 16) -> None:
        self._capacity = capacity
        self._specification: Specification | None = None
        # In the order of use, each with the units that it is for.
        self._programs: dict[BoundProgram, Specification | None] = {}
        self._roots: dict[Specification | None, _Branch] = {}

    def __len__(self) -> int:
        return len(self._programs)

    def __iter__(self) -> Iterator[BoundProgram]:
        return iter(self._programs)

    def specify(self, units: Specification) -> None:
        """Add and find programs for units of this specification, from here on."""
        self._specification = units

    @property
    def latest(self) -> BoundProgram | None:
        """The program used last that fits, or None."""
        return self._most_recent(self._root())

    def add(self, bound: BoundProgram) -> None:
        """Keep ``bound``, in the place of one with the same events.

        Forgets the least recently used program if there are too many.
        """
        replaced = self._insert(self._roots.setdefault(self._specification, _Branch(())), bound)
        if replaced is not None:
            del self._programs[replaced]
        self._programs[bound] = self._specification
        if len(self._programs) > self._capacity:
            self._forget(next(iter(self._programs)))

    def touch(self, bound: BoundProgram) -> None:
        """Note that ``bound`` was used."""
        self._programs[bound] = self._programs.pop(bound)

    def going_on(self, prefix: Sequence[Key], following: Sequence[Key]) -> BoundProgram | None:
        """The latest program that begins with ``prefix`` and goes on with ``following``."""
        found = self._walk((*prefix, *following))
        return self._most_recent(found[0]) if found is not None else None

    def exactly(self, keys: Sequence[Key]) -> BoundProgram | None:
        """The program with these events and no others."""
        found = self._walk(tuple(keys))
        if found is None or found[1]:
            return None
        return found[0].program

    def _root(self) -> _Branch | None:
        return self._roots.get(self._specification)

    def _most_recent(self, branch: _Branch | None) -> BoundProgram | None:
        if branch is None:
            return None
        found = set(branch.programs())
        return next((bound for bound in reversed(self._programs) if bound in found), None)

    def _walk(self, keys: tuple[Key, ...]) -> tuple[_Branch, int] | None:
        """The branch in which ``keys`` end, and how many of its own keys are beyond them."""
        branch = self._root()
        at = 0
        while branch is not None and at < len(keys):
            branch = branch.following.get(keys[at])
            if branch is None:
                return None
            stop = at + len(branch.keys)
            if branch.keys[: len(keys) - at] != keys[at:stop]:
                return None
            at = stop
        return (branch, at - len(keys)) if branch is not None else None

    @staticmethod
    def _insert(root: _Branch, bound: BoundProgram) -> BoundProgram | None:
        """Put ``bound`` into the tree; returns the program that was in its place."""
        branch, rest = root, bound.keys
        while rest:
            below = branch.following.get(rest[0])
            if below is None:
                below = branch.following[rest[0]] = _Branch(rest)
            common = _common_length(below.keys, rest)
            if common < len(below.keys):
                # They part inside of the run: cut it there.
                upper = _Branch(below.keys[:common])
                below.keys = below.keys[common:]
                upper.following[below.keys[0]] = below
                branch.following[rest[0]] = below = upper
            branch, rest = below, rest[common:]
        replaced, branch.program = branch.program, bound
        return replaced

    def _forget(self, bound: BoundProgram) -> None:
        units = self._programs.pop(bound)
        path = [self._roots[units]]
        at = 0
        while at < len(bound.keys):
            branch = path[-1].following[bound.keys[at]]
            path.append(branch)
            at += len(branch.keys)
        path[-1].program = None
        while len(path) > 1 and path[-1].program is None and not path[-1].following:
            leaf = path.pop()
            del path[-1].following[leaf.keys[0]]
        if len(path) == 1 and path[0].program is None and not path[0].following:
            del self._roots[units]
        elif len(path) > 1 and path[-1].program is None and len(path[-1].following) == 1:
            # Nothing is left to tell apart here: one run again.
            (below,) = path[-1].following.values()
            below.keys = path[-1].keys + below.keys
            path[-2].following[below.keys[0]] = below


def _common_length(one: Sequence[Key], other: Sequence[Key]) -> int:
    length = min(len(one), len(other))
    return next((index for index in range(length) if one[index] != other[index]), length)
