"""Which items to take along a line of capacities: an integer program, solved by SciPy's HiGHS.

An item takes up room over some stretches of the line and saves something if it is taken.
Taking the most valuable ones that fit at every place is *interval packing* (also known as
unsplittable flow on a path). With items of one size the matrix has consecutive ones and the
linear relaxation is integral already; with several sizes it is a small integer program, which
HiGHS solves to optimality up to some hundred items. Beyond that (:data:`EXACT_ITEMS`) mixed
sizes are improved block by block, each block solved to optimality with everything else fixed,
and :attr:`Packing.unproven` says by how much the optimum could be better at most.

The result depends on nothing but the arguments: no time limit, no random choice, so that all
ranks that pack the same items take the same ones.

It knows nothing of units and gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array

__all__ = ["EXACT_ITEMS", "Item", "Packing", "pack"]

EXACT_ITEMS = 300
"""Up to so many items of mixed sizes that compete with each other are packed at once."""

_BLOCK = 64  # items, by where they start; half of them again in the next block
_SWEEPS = 2
_BLOCK_NODES = 1  # of branch and bound; a block that needs more keeps the best found

_Bools = NDArray[np.bool_]
_Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Item:
    """Something that may be taken.

    Args:
        size: how much room it takes at every place of its stretches.
        value: what taking it saves; positive.
        stretches: half-open ranges of places, in order and disjoint; none for an item that
            takes no room.
    """

    size: int
    value: int
    stretches: tuple[tuple[int, int], ...]


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


def pack(items: Sequence[Item], capacity: Sequence[int]) -> Packing:
    """The most valuable items that fit.

    Args:
        items: the items.
        capacity: room at each place of the line; negative is as good as none.

    Returns:
        A choice that fits at every place. Ties are broken in a way that depends on nothing
        but the arguments.
    """
    line = _Line(items, capacity)
    free = [index for index, stretches in enumerate(line.places) if not len(stretches)]
    fitting = [
        index
        for index, places in enumerate(line.places)
        if len(places) and items[index].size <= int(line.room[places].min())
    ]
    taken, unproven = set(free), 0
    for component in line.components(fitting):
        chosen, missing = line.solve(component)
        taken.update(chosen)
        unproven += missing
    return Packing(frozenset(taken), unproven)


class _Line:
    """The items over the line of capacities, as arrays."""

    def __init__(self, items: Sequence[Item], capacity: Sequence[int]) -> None:
        self.items = items
        self.room: _Ints = np.maximum(np.asarray(capacity, dtype=np.int64), 0)
        self.size: _Ints = np.array([item.size for item in items], dtype=np.int64)
        self.value: _Ints = np.array([item.value for item in items], dtype=np.int64)
        self.places: list[_Ints] = [
            np.concatenate([np.arange(start, stop) for start, stop in item.stretches])
            if any(start < stop for start, stop in item.stretches)
            else np.empty(0, dtype=np.int64)
            for item in items
        ]

    def components(self, indices: Sequence[int]) -> list[list[int]]:
        """Groups of items that share no place with those of another, each in order of places."""
        ordered = sorted(indices, key=lambda i: (self.places[i][0], self.places[i][-1], i))
        groups: list[list[int]] = []
        reached = -1
        for index in ordered:
            if self.places[index][0] > reached:
                groups.append([])
            groups[-1].append(index)
            reached = max(reached, int(self.places[index][-1]))
        return groups

    def solve(self, component: list[int]) -> tuple[list[int], int]:
        """The best of one component, and by how much that is not proven."""
        matrix, room = self._rows(component, self.room)
        if matrix.shape[0] == 0:
            return component, 0
        if len(component) <= EXACT_ITEMS or self._divide(component):
            taken = self._exact(component, matrix, room, nodes=None)
            assert taken is not None
            return [index for index, take in zip(component, taken, strict=True) if take], 0
        return self._by_blocks(component, matrix, room)

    def _divide(self, component: list[int]) -> bool:
        """Whether there are at most two sizes and the larger is a multiple of the smaller.

        Parameters and gradients of equal units; the relaxation is as good as integral.
        """
        sizes = sorted(set(self.size[component].tolist()))
        return len(sizes) == 1 or (len(sizes) == 2 and sizes[1] % sizes[0] == 0)

    def _rows(self, indices: Sequence[int], room: _Ints) -> tuple[csr_array, _Ints]:
        """The places at which not all of the items fit, those alike once.

        Returns:
            Sizes by place and item, and the room at each of these places.
        """
        places = [self.places[index] for index in indices]
        low = min(int(each[0]) for each in places)
        high = max(int(each[-1]) for each in places) + 1
        columns = np.repeat(np.arange(len(indices)), [len(each) for each in places])
        rows = np.concatenate(places) - low
        sizes = self.size[np.asarray(indices)][columns]
        matrix = csr_array((sizes, (rows, columns)), shape=(high - low, len(indices)))
        room = room[low:high]
        binding = np.flatnonzero(np.asarray(matrix.sum(axis=1)).ravel() > room)
        if not len(binding):
            return csr_array((0, len(indices))), room[:0]
        matrix, room = matrix[binding].tocsr(), room[binding]
        matrix.sort_indices()
        kept: list[int] = []
        least: list[int] = []
        before: bytes | None = None
        for row in range(matrix.shape[0]):
            present = matrix.indices[matrix.indptr[row] : matrix.indptr[row + 1]].tobytes()
            if present == before:
                least[-1] = min(least[-1], int(room[row]))
            else:
                kept.append(row)
                least.append(int(room[row]))
            before = present
        return matrix[kept].tocsr(), np.array(least, dtype=np.int64)

    def _exact(
        self, indices: Sequence[int], matrix: csr_array, room: _Ints, nodes: int | None
    ) -> _Bools | None:
        """Solve for some items; None if ``nodes`` did not do to find anything that fits."""
        options: dict[str, float] = {"mip_rel_gap": 0.0}
        if nodes is not None:
            options["node_limit"] = nodes
        value = self.value[np.asarray(indices)]
        # Sizes of at most 1 suit HiGHS's absolute tolerances. Divided by what all of them
        # are multiples of, room is rounded down to what can be filled.
        unit = reduce(gcd, (int(size) for size in self.size[np.asarray(indices)]))
        largest = int(self.size[np.asarray(indices)].max()) // unit
        scaled = _divided(matrix, unit * largest)
        limit = (room // unit) / largest
        for _ in range(3):
            found = milp(
                -value / value.max(),
                constraints=LinearConstraint(scaled, -np.inf, limit),
                integrality=np.ones(len(indices)),
                bounds=Bounds(0, 1),
                options=options,
            )
            if found.x is None:
                return None
            taken: _Bools = found.x > 0.5
            over = matrix @ taken > room
            if not over.any():
                return taken
            # Within HiGHS's tolerance, but not within the room.
            limit = np.where(over, limit - 1e-6, limit)
        return None

    def _by_blocks(
        self, component: list[int], matrix: csr_array, room: _Ints
    ) -> tuple[list[int], int]:
        value = self.value[np.asarray(component)]
        largest = int(self.size[np.asarray(component)].max())
        relaxed = linprog(
            -value / value.max(),
            A_ub=_divided(matrix, largest),
            b_ub=room / largest,
            bounds=(0, 1),
            method="highs-ds",
        )
        share: dict[int, float] = dict(zip(component, relaxed.x.tolist(), strict=True))
        used = np.zeros_like(self.room)
        taken: set[int] = set()
        for index in sorted(component, key=lambda i: (-share[i], len(self.places[i]), i)):
            places = self.places[index]
            if (used[places] + self.size[index] <= self.room[places]).all():
                used[places] += self.size[index]
                taken.add(index)
        starts = range(0, len(component), _BLOCK // 2)
        pending = set(starts)
        for _ in range(_SWEEPS):
            changed: set[int] = set()
            for start in starts:
                if start in pending:
                    block = component[start : start + _BLOCK]
                    if self._improve(block, taken, used):
                        changed.update((start - _BLOCK // 2, start + _BLOCK // 2))
            pending = changed
        bound = -relaxed.fun * float(value.max())
        worth = int(self.value[np.asarray(sorted(taken))].sum()) if taken else 0
        return sorted(taken), max(0, int(bound + 1e-6 * bound) - worth)

    def _improve(self, block: list[int], taken: set[int], used: _Ints) -> bool:
        """Choose anew among the items of a block; whether that is worth more."""
        before = [index in taken for index in block]
        for index, had in zip(block, before, strict=True):
            if had:
                used[self.places[index]] -= self.size[index]
        matrix, room = self._rows(block, self.room - used)
        chosen: _Bools | None = np.ones(len(block), dtype=np.bool_)
        if matrix.shape[0]:
            chosen = self._exact(block, matrix, room, nodes=_BLOCK_NODES)
        value = self.value[np.asarray(block)]
        better = chosen is not None and int(value[chosen].sum()) > int(value[before].sum())
        after = chosen.tolist() if better and chosen is not None else before
        for index, take in zip(block, after, strict=True):
            (taken.add if take else taken.discard)(index)
            if take:
                used[self.places[index]] += self.size[index]
        return better


def _divided(matrix: csr_array, divisor: int) -> csr_array:
    return csr_array((matrix.data / divisor, matrix.indices, matrix.indptr), shape=matrix.shape)
