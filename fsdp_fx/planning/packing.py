"""Which items to take along a line of capacities.

An item takes up room over some stretches of the line and saves something if it is taken.
Taking the most valuable ones that fit at every place is *interval packing* (also known as
unsplittable flow on a path). Items of one size and value are taken from left to right; where
too many meet, the one that ends last is left out, which is optimal (a cache that knows the
future: Belady, 1966). Otherwise there are three steps, each of SciPy's HiGHS or on top of it:

1. The linear relaxation (``linprog``). Its dual values price the room at each place, and any
   prices give an upper bound of what a choice can be worth (Lagrange).
2. Dynamic programming along the line. A state is the set of items taken whose stretches are
   not over; states that cannot beat the best choice known are dropped by that bound, and of
   equal sets all but the best. Exact if the states never have to be cut to a width.
3. Where they were cut, the integer program itself (``milp``), if there are not too many items
   for it: more of sizes of which one is a multiple of the other, where the relaxation is as
   good as integral, than of others.

Whatever is left open is in :attr:`Packing.unproven`. The result depends on nothing but the
arguments: no time limit, no random choice, so that all ranks that pack the same items take the
same ones.

It knows nothing of units and gathers.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array

__all__ = ["Item", "Packing", "most_valuable", "pack"]

_WIDTHS = 256, 4096  # states: the second is tried where the first had to cut
_STATES = 24_000_000  # in all, over the items, which bounds memory
_PROGRAM_ITEMS = 300  # of any sizes
_PROGRAM_MULTIPLES = 4000  # of sizes of which one is a multiple of the other
_NODES = 1000  # of branch and bound

_Parts = list[tuple[int, int, int]]  # start, end and size of an item's stretches
_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Item:
    """Something that may be taken.

    Args:
        size: how much room it takes at every place of its stretches.
        value: what taking it saves; positive.
        stretches: half-open ranges of places, in order and disjoint; none for an item that
            takes no room.
        sizes: how much room it takes in each stretch, where that differs from ``size``.
    """

    size: int
    value: int
    stretches: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...] = ()

    @property
    def parts(self) -> list[tuple[int, int, int]]:
        """Start, end and size of each stretch that takes room."""
        sizes = self.sizes or (self.size,) * len(self.stretches)
        return [
            (start, stop, size)
            for (start, stop), size in zip(self.stretches, sizes, strict=True)
            if start < stop and size > 0
        ]


@dataclass(frozen=True)
class Packing:
    """Which items are taken.

    Args:
        taken: their indices.
        unproven: the most by which another choice could be worth more; 0 if this one is
            proven to be the best.
    """

    taken: frozenset[int]
    unproven: int


@dataclass(frozen=True)
class _Choice:
    """Items of a component, what they are worth, and what any choice is worth at most."""

    taken: tuple[int, ...]
    worth: int
    bound: int


def pack(items: Sequence[Item], capacity: Sequence[int]) -> Packing:
    """The most valuable items that fit.

    Args:
        items: the items.
        capacity: room at each place of the line; negative is as good as none.

    Returns:
        A choice that fits at every place. Ties are broken in a way that depends on nothing
        but the arguments.
    """
    room = np.maximum(np.asarray(capacity, dtype=np.int64), 0)
    taken: set[int] = set()
    fitting: list[int] = []
    parts = [item.parts for item in items]
    for index, own in enumerate(parts):
        if not own:
            taken.add(index)
        elif all(int(room[a:b].min(initial=size)) >= size for a, b, size in own):
            fitting.append(index)
    unproven = 0
    for component in _components(parts, fitting):
        values = [items[index].value for index in component]
        choice = _Component([parts[index] for index in component], values, room).solve()
        taken.update(component[index] for index in choice.taken)
        unproven += choice.bound - choice.worth
    return Packing(frozenset(taken), unproven)


def most_valuable(
    values: _Ints, constraints: Sequence[LinearConstraint], nodes: int
) -> tuple[tuple[int, ...], int] | None:
    """The most valuable choice that some constraints allow, by SciPy's HiGHS.

    Args:
        values: what each variable, 0 or 1, is worth. Not all are 0.
        constraints: of the variables, with coefficients of at most 1, which suits HiGHS's
            absolute tolerances: the choice keeps to them within these.
        nodes: of branch and bound, at most.

    Returns:
        The variables that are 1, and what no choice is worth more than; None if nothing was
        found.
    """
    # Variables between 0 and 1, where they would do, make HiGHS print what it tries.
    found = milp(
        -values / values.max(),
        constraints=constraints,
        integrality=np.ones(len(values)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0, "node_limit": nodes},
    )
    if found.x is None:
        return None
    # HiGHS stops at an absolute gap of 1e-6. The bound is rounded down to a sum of values.
    step = int(np.gcd.reduce(values))
    bound = (1e-6 - found.mip_dual_bound) * float(values.max())
    limit = int((bound * (1 + 1e-9) + 1e-3 * step) // step) * step
    return tuple(np.flatnonzero(found.x > 0.5).tolist()), limit


def _components(parts: Sequence[_Parts], indices: Sequence[int]) -> list[list[int]]:
    """Groups of items that share no place with those of another, each by where they start."""
    ordered = sorted(indices, key=lambda i: (parts[i][0][0], parts[i][-1][1], i))
    groups: list[list[int]] = []
    reached = -1
    for index in ordered:
        if parts[index][0][0] >= reached:
            groups.append([])
        groups[-1].append(index)
        reached = max(reached, parts[index][-1][1])
    return groups


class _Component:
    """Items that compete with each other, by where they start, and the line under them."""

    def __init__(self, parts: Sequence[_Parts], values: Sequence[int], room: _Ints) -> None:
        self.low = parts[0][0][0]
        high = max(own[-1][1] for own in parts)
        self.room = room[self.low : high]
        self.value: _Ints = np.array(values, dtype=np.int64)
        self.parts: list[_Parts] = [
            [(start - self.low, stop - self.low, size) for start, stop, size in own]
            for own in parts
        ]
        self.sizes = sorted({size for own in self.parts for _, _, size in own})
        flat = [(column, *part) for column, own in enumerate(self.parts) for part in own]
        lengths = [stop - start for _, start, stop, _ in flat]
        self.matrix = csr_array(
            (
                np.repeat(np.array([size for *_, size in flat], dtype=np.int64), lengths),
                (
                    np.concatenate([np.arange(start, stop) for _, start, stop, _ in flat]),
                    np.repeat([column for column, *_ in flat], lengths),
                ),
            ),
            shape=(len(self.room), len(parts)),
        )
        # Where all items fit together there is nothing to choose.
        self.binding = np.flatnonzero(np.asarray(self.matrix.sum(axis=1)).ravel() > self.room)

    def solve(self) -> _Choice:
        """The best choice, as far as it can be found."""
        everything = int(self.value.sum())
        if not len(self.binding):
            return _Choice(tuple(range(len(self.value))), everything, everything)
        if len(self.sizes) == len({*self.value.tolist()}) == 1 and all(
            len(own) == 1 for own in self.parts
        ):
            return self._furthest_out()
        relaxed = self._relax()
        best = self._greedy(relaxed.x)
        prices = self._prices(relaxed.ineqlin.marginals)
        best = _Table(self, prices, best, _WIDTHS[0]).choice()
        sizes = self.sizes
        multiples = len(sizes) == 1 or (len(sizes) == 2 and sizes[1] % sizes[0] == 0)
        if best.bound > best.worth and not (multiples and len(self.value) <= _PROGRAM_MULTIPLES):
            width = max(_WIDTHS[0], min(_WIDTHS[1], _STATES // len(self.value)))
            best = _Table(self, prices, best, width).choice()
        if best.bound > best.worth and len(self.value) <= (
            _PROGRAM_MULTIPLES if multiples else _PROGRAM_ITEMS
        ):
            best = self._integer_program(best)
        return best

    def fits(self, taken: Sequence[int]) -> bool:
        """Whether there is room for some items together."""
        chosen = np.zeros(len(self.value), dtype=np.int64)
        chosen[list(taken)] = 1
        return bool((self.matrix @ chosen <= self.room).all())

    def _furthest_out(self) -> _Choice:
        """The most items of one size: those that end last are left out."""
        size, starting = self.sizes[0], 0
        ends: list[tuple[int, int]] = []  # of the items that are taken and not over, in order
        taken: set[int] = set()
        for place, room in enumerate((self.room // size).tolist()):
            while ends and ends[0][0] == place:
                taken.add(ends.pop(0)[1])
            while starting < len(self.parts) and self.parts[starting][0][0] == place:
                insort(ends, (self.parts[starting][0][1], starting))
                starting += 1
            del ends[room:]
        taken.update(index for _, index in ends)
        worth = int(self.value[0]) * len(taken)
        return _Choice(tuple(sorted(taken)), worth, worth)

    def _relax(self) -> Any:
        # Sizes and values of at most 1 suit HiGHS's absolute tolerances.
        largest = self.sizes[-1]
        return linprog(
            -self.value / self.value.max(),
            A_ub=self._rows() / largest,
            b_ub=self.room[self.binding] / largest,
            bounds=(0, 1),
            method="highs-ds",
        )

    def _rows(self) -> csr_array:
        return self.matrix[self.binding].tocsr().astype(np.float64)

    def _prices(self, marginals: _Floats) -> _Floats:
        """What a unit of room costs at each place."""
        prices = np.zeros(len(self.room))
        prices[self.binding] = np.maximum(-marginals, 0) * self.value.max() / self.sizes[-1]
        return prices

    def _greedy(self, share: _Floats) -> _Choice:
        """The items that the relaxation takes, then those that it takes in part, if they fit."""
        used = np.zeros_like(self.room)
        taken = []
        for index in np.lexsort((np.arange(len(share)), -np.round(share, 6))).tolist():
            if all((used[a:b] + s <= self.room[a:b]).all() for a, b, s in self.parts[index]):
                for start, stop, size in self.parts[index]:
                    used[start:stop] += size
                taken.append(index)
        worth = int(self.value[taken].sum())
        return _Choice(tuple(sorted(taken)), worth, int(self.value.sum()))

    def _integer_program(self, best: _Choice) -> _Choice:
        # Divided by what all sizes are multiples of, room is rounded down to what can be filled.
        unit = int(np.gcd.reduce(self.sizes))
        largest = self.sizes[-1] // unit
        room = LinearConstraint(
            self._rows() / (unit * largest), -np.inf, self.room[self.binding] // unit / largest
        )
        found = most_valuable(self.value, [room], _NODES)
        if found is None:
            return best
        taken, limit = found
        worth = int(self.value[list(taken)].sum())
        # What HiGHS finds is within its tolerance, which is not quite the room.
        if worth > best.worth and self.fits(taken):
            best = _Choice(taken, worth, best.bound)
        return _Choice(best.taken, best.worth, max(best.worth, min(best.bound, limit)))


class _Table:
    """Dynamic programming along the line.

    Args:
        component: the items and the room.
        prices: of a unit of room at each place; any that are not negative.
        best: a choice to beat.
        width: the most states that are kept.
    """

    def __init__(self, component: _Component, prices: _Floats, best: _Choice, width: int) -> None:
        self._component = component
        self._prices = prices
        self._best = best
        self._width = width
        paid = np.concatenate([[0.0], np.cumsum(prices)])
        charged = np.array(
            [sum(size * (paid[b] - paid[a]) for a, b, size in own) for own in component.parts]
        )
        # What taking an item is worth beyond the price of its room.
        self._gain = component.value - charged
        rest = np.cumsum((prices * component.room)[::-1])[::-1]
        self._open = np.concatenate([rest, [0.0]])  # what the room from each place on is worth
        self._coming = float(np.maximum(self._gain, 0).sum())  # of items that are not reached
        # Only what is better by the least possible step is of interest.
        self._step = int(np.gcd.reduce(component.value))
        self._lost = -np.inf
        # Of each item, of which state each state is made, and whether it takes the item.
        self._history: list[tuple[int, NDArray[np.uint16], NDArray[np.bool_]]] = []
        self._held: NDArray[np.uint64] = np.zeros((1, 1), dtype=np.uint64)
        self._used: _Ints = np.zeros(1, dtype=np.int64)
        self._worth: _Ints = np.zeros(1, dtype=np.int64)
        self._score: _Floats = np.zeros(1)

    def choice(self) -> _Choice:
        """The better of the choice to beat and what the table finds, with its bound."""
        component, best = self._component, self._best
        begins: dict[int, list[tuple[int, int]]] = {}
        ends: dict[int, list[tuple[int, int]]] = {}
        for index, own in enumerate(component.parts):
            for start, stop, size in own:
                begins.setdefault(start, []).append((index, size))
                ends.setdefault(stop, []).append((index, size))
        slots: dict[int, int] = {}
        free: list[int] = []
        for place in range(len(component.room)):
            finished = False
            for index, size in ends.get(place, ()):
                has = self._holds(slots[index])
                self._used = self._used - has * size
                if component.parts[index][-1][1] == place:
                    slot = slots.pop(index)
                    self._held[:, slot // 64] &= ~_bit(slot)
                    free.append(slot)
                    finished = True
            if finished:
                self._drop_equal()
            for index, size in begins.get(place, ()):
                if index in slots:  # a later stretch of an item that was decided on
                    self._used = self._used + self._holds(slots[index]) * size
                else:
                    slots[index] = free.pop() if free else len(slots)
                    self._branch(index, size, slots[index], place)
            self._keep(self._used <= component.room[place])
            self._score = self._score + self._prices[place] * self._used
        if len(self._worth) and int(self._worth.max()) > best.worth:
            taken = self._trace_back(int(np.argmax(self._worth)))
            best = _Choice(taken, int(self._worth.max()), best.bound)
        bound = best.worth
        if self._lost > best.worth:
            bound = max(bound, int(self._lost * (1 + 1e-9) // self._step) * self._step)
        return _Choice(best.taken, best.worth, min(best.bound, bound))

    def _holds(self, slot: int) -> NDArray[np.bool_]:
        return (self._held[:, slot // 64] & _bit(slot)) != 0

    def _branch(self, index: int, size: int, slot: int, place: int) -> None:
        """Each state goes on without the item, and with it where there is room."""
        component = self._component
        value = component.value[index]
        if slot // 64 >= self._held.shape[1]:
            more = np.zeros((len(self._held), 1), dtype=np.uint64)
            self._held = np.concatenate([self._held, more], axis=1)
        self._coming -= max(float(self._gain[index]), 0.0)
        able = np.flatnonzero(self._used + size <= component.room[place])
        count = len(self._used)
        parents = np.concatenate([np.arange(count, dtype=np.uint16), able.astype(np.uint16)])
        takes = np.arange(len(parents)) >= count
        held = self._held[able]
        held[:, slot // 64] |= _bit(slot)
        self._held = np.concatenate([self._held, held])
        self._used = np.concatenate([self._used, self._used[able] + size])
        self._worth = np.concatenate([self._worth, self._worth[able] + value])
        self._score = np.concatenate([self._score, self._score[able] + self._gain[index]])
        self._history.append((index, parents, takes))
        ahead = float(self._open[place]) + self._coming
        better = self._best.worth + self._step
        self._keep(self._score + ahead >= better * (1 - 1e-9))
        if len(self._used) > self._width:
            order = np.argpartition(-self._score, self._width)
            self._lost = max(self._lost, float(self._score[order[self._width :]].max()) + ahead)
            keep = np.zeros(len(self._used), dtype=np.bool_)
            keep[order[: self._width]] = True
            self._keep(keep)

    def _drop_equal(self) -> None:
        """Of states that hold the same items only the best goes on."""
        if len(self._used) < 2:
            return
        order = np.lexsort((-self._worth, *self._held.T))
        held = self._held[order]
        first = np.ones(len(order), dtype=np.bool_)
        first[1:] = (held[1:] != held[:-1]).any(axis=1)
        if not first.all():
            keep = np.zeros(len(order), dtype=np.bool_)
            keep[order[first]] = True
            self._keep(keep)

    def _keep(self, keep: NDArray[np.bool_]) -> None:
        if keep.all():
            return
        self._held, self._used = self._held[keep], self._used[keep]
        self._worth, self._score = self._worth[keep], self._score[keep]
        index, parents, takes = self._history[-1]
        self._history[-1] = index, parents[keep], takes[keep]

    def _trace_back(self, state: int) -> tuple[int, ...]:
        taken = []
        for index, parents, takes in reversed(self._history):
            if takes[state]:
                taken.append(index)
            state = int(parents[state])
        return tuple(sorted(taken))


def _bit(slot: int) -> np.uint64:
    return np.uint64(1 << (slot % 64))
