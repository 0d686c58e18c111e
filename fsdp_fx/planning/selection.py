"""Which items and which gradients to keep, where these share what they take.

What a gradient takes depends on what else of it is kept (:mod:`fsdp_fx.planning.gradients`), so
that the whole is no interval packing. Three steps:

1. Packing in rounds: each packs (:mod:`fsdp_fx.planning.packing`) what is not taken yet, at what
   it takes beside that which is, until nothing fits any more. Once with everything, and once
   with the gradients first that are kept from the window's beginning, which take less the longer
   they are kept. The better of the two counts.
2. If there are not too many choices, the integer program itself, by SciPy's HiGHS.
3. Else packing at the least that each could take, which bounds what any choice can be worth.

As in packing, the result depends on nothing but the arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import LinearConstraint
from scipy.sparse import csr_array

from fsdp_fx.planning.gradients import Chain, Part
from fsdp_fx.planning.packing import Item, most_valuable, pack

__all__ = ["Selection", "select"]

_PROGRAM_CHOICES = 300
_NODES = 200  # of branch and bound

_Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Selection:
    """What is kept.

    Args:
        items: indices of the items.
        gradients: of each chain, its choices.
        unproven: the most by which another selection could be worth more; 0 if this one is
            proven to be the best.
    """

    items: frozenset[int]
    gradients: tuple[frozenset[int], ...]
    unproven: int


@dataclass
class _Taken:
    items: set[int] = field(default_factory=set)
    gradients: list[set[int]] = field(default_factory=list)


def select(items: Sequence[Item], chains: Sequence[Chain], capacity: Sequence[int]) -> Selection:
    """The most valuable items and gradients that fit.

    Args:
        items: the items.
        chains: the units' gradients.
        capacity: room at each event; negative is as good as none.

    Returns:
        A selection that fits at every event.
    """
    problem = _Problem(items, chains, np.maximum(np.asarray(capacity, dtype=np.int64), 0))
    best = problem.in_rounds(problem.nothing())
    if any(chain.shards for chain in chains):
        other = problem.in_rounds(problem.in_rounds(problem.nothing(), first=True))
        best = max(best, other, key=problem.worth)
    choices = len(items) + sum(len(chain.choices) for chain in chains)
    if choices <= _PROGRAM_CHOICES:
        best, bound = problem.integer_program(best)
    else:
        bound = problem.bound()
    return Selection(
        frozenset(best.items),
        tuple(map(frozenset, best.gradients)),
        max(0, bound - problem.worth(best)),
    )


class _Problem:
    def __init__(self, items: Sequence[Item], chains: Sequence[Chain], room: _Ints) -> None:
        self._items = items
        self._chains = chains
        self._room = room

    def nothing(self) -> _Taken:
        return _Taken(set(), [set() for _ in self._chains])

    def worth(self, taken: _Taken) -> int:
        gradients = zip(self._chains, taken.gradients, strict=True)
        return sum(self._items[index].value for index in taken.items) + sum(
            chain.saved * len(chosen) for chain, chosen in gradients
        )

    def left(self, taken: _Taken) -> _Ints:
        """The room that is left at each event."""
        change = np.zeros(len(self._room) + 1, dtype=np.int64)
        parts: list[Part] = [part for index in taken.items for part in self._items[index].parts]
        for chain, chosen in zip(self._chains, taken.gradients, strict=True):
            parts += chain.held(chosen)
        for start, stop, size in parts:
            change[start] += size
            change[stop] -= size
        return self._room - np.cumsum(change[:-1])

    def in_rounds(self, taken: _Taken, first: bool = False) -> _Taken:
        """Take more until nothing fits.

        Args:
            taken: what is taken already.
            first: whether to take nothing but gradients that are kept from their first
                backward on.
        """
        taken = _Taken(set(taken.items), [set(chosen) for chosen in taken.gradients])
        while True:
            # Of each candidate its item, or its chain and choice.
            candidates: list[tuple[int, int | None]] = []
            offered: list[Item] = []
            for place, (chain, chosen) in enumerate(
                zip(self._chains, taken.gradients, strict=True)
            ):
                for index in chain.choices:
                    if index in chosen or (first and index > len(chosen)):
                        continue
                    candidates.append((place, index))
                    offered.append(_item(chain.added(index, chosen), chain.saved))
            if not first:
                for index, item in enumerate(self._items):
                    if index not in taken.items:
                        candidates.append((index, None))
                        offered.append(item)
            found = pack(offered, self.left(taken).tolist()).taken
            if not found:
                return taken
            for each in found:
                place, choice = candidates[each]
                if choice is None:
                    taken.items.add(place)
                else:
                    taken.gradients[place].add(choice)

    def bound(self) -> int:
        """What no selection can be worth more than."""
        relief = np.zeros(len(self._room) + 1, dtype=np.int64)
        offered = list(self._items)
        for chain in self._chains:
            for index in chain.choices:
                parts: list[Part] = []
                for start, stop, size in (
                    (*chain.gap(index), chain.kept - chain.shards),
                    _less(chain.lead(index + 1), chain.shards),
                    _less(chain.end(index + 1), chain.shards),
                    chain.rest(index + 1),
                    chain.inputs[index],
                ):
                    if size > 0 and start < stop:
                        parts.append((start, stop, size))
                    elif start < stop:
                        relief[start] -= size
                        relief[stop] += size
                offered.append(_item(parts, chain.saved))
        room = self._room + np.cumsum(relief[:-1])
        packing = pack(offered, room.tolist())
        return sum(offered[index].value for index in packing.taken) + packing.unproven

    def integer_program(self, best: _Taken) -> tuple[_Taken, int]:
        """The better of ``best`` and what the integer program finds, and its bound."""
        program = _Program(len(self._room))
        for item in self._items:
            program.choose(item.value, item.parts)
        variables = [
            [program.choose(chain.saved, ()) for _ in chain.choices] for chain in self._chains
        ]
        for chain, own in zip(self._chains, variables, strict=True):
            unreduced: int | None = None
            for index in range(len(chain.positions)):
                around = own[max(0, index - 1) : index + 1]
                # There if the gradient is kept before or after.
                end = program.choose(0, [chain.end(index)])
                for each in around:
                    program.at_most(each, end)
                if chain.written[index]:
                    program.occupy(end, [chain.lead(index)])
                elif index:
                    program.occupy(own[index - 1], [chain.lead(index)])
                if index:
                    program.occupy(own[index - 1], [chain.rest(index)])
                if index in chain.choices:
                    program.occupy(own[index], [(*chain.gap(index), chain.kept)])
                    program.occupy(own[index], [chain.inputs[index]])
                    relieved: list[Part] = [(*chain.gap(index), -chain.shards)]
                    if index:
                        relieved.append((*chain.whole(index), -chain.shards))
                    before, unreduced = unreduced, program.choose(0, relieved)
                    program.at_most(unreduced, own[index])
                    if before is not None:
                        program.at_most(unreduced, before)
        worth = self.worth(best)
        solved = program.solve(self._room)
        if solved is None:
            return best, self.bound()
        taken, bound = solved
        found = _Taken(
            {index for index in range(len(self._items)) if index in taken},
            [{i for i, variable in enumerate(own) if variable in taken} for own in variables],
        )
        # What HiGHS finds is within its tolerance, which is not quite the room.
        if self.worth(found) > worth and bool((self.left(found) >= 0).all()):
            best, worth = found, self.worth(found)
        return best, max(worth, bound)


class _Program:
    """An integer program: what is chosen, and what follows from it and is worth nothing."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._values: list[int] = []
        self._parts: list[tuple[int, Part]] = []
        self._orders: list[tuple[int, int]] = []

    def choose(self, value: int, parts: Iterable[Part]) -> int:
        """Add a variable, and what it takes."""
        self._values.append(value)
        self.occupy(len(self._values) - 1, parts)
        return len(self._values) - 1

    def occupy(self, variable: int, parts: Iterable[Part]) -> None:
        """What a variable takes besides."""
        self._parts += [(variable, part) for part in parts if part[0] < part[1] and part[2]]

    def at_most(self, one: int, other: int) -> None:
        """Where ``one`` is, ``other`` is."""
        self._orders.append((one, other))

    def solve(self, room: _Ints) -> tuple[tuple[int, ...], int] | None:
        """The variables that are chosen, and a bound of their worth; None if none were found."""
        if not any(self._values):
            return None
        sizes = [abs(size) for _, (*_, size) in self._parts] or [1]
        unit = int(np.gcd.reduce(sizes))
        largest = max(sizes) // unit
        taken = [
            (place, variable, size // unit / largest)
            for variable, (start, stop, size) in self._parts
            for place in range(start, stop)
        ]
        constraints = [
            LinearConstraint(self._matrix(taken, self._places), -np.inf, room // unit / largest)
        ]
        if self._orders:
            ordered = [
                (row, variable, sign)
                for row, order in enumerate(self._orders)
                for variable, sign in zip(order, (1.0, -1.0), strict=True)
            ]
            constraints.append(
                LinearConstraint(self._matrix(ordered, len(self._orders)), -np.inf, 0)
            )
        return most_valuable(np.array(self._values, dtype=np.int64), constraints, _NODES)

    def _matrix(self, entries: Sequence[tuple[int, int, float]], rows: int) -> csr_array:
        row, column, value = zip(*entries, strict=True) if entries else ((), (), ())
        return csr_array((value, (row, column)), shape=(rows, len(self._values)))


def _less(part: Part, size: int) -> Part:
    return part[0], part[1], part[2] - size


def _item(parts: Sequence[Part], value: int) -> Item:
    """An item that takes the parts together: two backwards of a unit may end at one event."""
    cuts = sorted({cut for start, stop, _ in parts for cut in (start, stop)})
    parts = [
        (low, high, sum(size for start, stop, size in parts if start <= low and high <= stop))
        for low, high in pairwise(cuts)
    ]
    return Item(0, value, tuple((a, b) for a, b, _ in parts), tuple(size for *_, size in parts))
