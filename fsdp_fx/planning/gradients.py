"""What full gradients that are kept take under a recorded room, event by event.

The memory of a recorded window already has gradients in it. Each backward there left a full
gradient, which was reduced at once, and from the first reduction of a unit on its reduced
gradients, the shards. A plan that keeps the gradient has it instead of these:

- between two backwards it takes its bytes. If the unit has not been reduced before, its shards
  are not there yet;
- at a backward that it is kept before or after, once: what one backward leaves the next adds
  to. Products write it where it is kept, so what they wrote in the recorded window
  (:attr:`RecordedGradients.written`) does not come on top of it. A new gradient grows as that
  did; one that was kept before is there in whole from the beginning, so that only counts what
  was written when the backward took the most (:attr:`RecordedGradients.spared`). What autograd
  computes does come on top: it is there until it has been added;
- at the end of a backward that it is kept after, also where none was kept before: there it is
  brought into the dtype that it is kept in, beside the buffer of the reduction before.

And it may have the input of another reduction: that of the last one stays until the next. Where
a gradient is kept that was reduced when recorded, an earlier one stays, of at most the largest
unit so far.

What a choice takes thus depends on the choices before and after it for the same unit, and is
never more beside others than alone. Which gradients to keep is decided by
:mod:`fsdp_fx.planning.selection`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from fsdp_fx.planning.memory import contributions
from fsdp_fx.trace import Trace

__all__ = ["Chain", "Part", "RecordedGradients", "chains"]

Part = tuple[int, int, int]  # first event, the event after the last, bytes


@dataclass(frozen=True)
class RecordedGradients:
    """What a recorded window had of gradients that a plan which keeps them does without.

    Args:
        written: by the position of a backward event after which its unit was reduced: bytes of
            the full gradient that products wrote, which where it is kept they add to instead.
        spared: of these, by how much less memory the event would have taken without them: they
            may not have been there yet when it took the most.
        shards: by unit, bytes of the reduced gradients that were there when the window closed
            and not when it opened.
    """

    written: Mapping[int, int] = field(default_factory=dict)
    spared: Mapping[int, int] = field(default_factory=dict)
    shards: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Chain:
    """The backwards of one unit after which it can be reduced, in order.

    Choice ``i`` is to keep the gradient from backward ``i`` to backward ``i + 1``.

    Args:
        kept: bytes of the full gradient, in the dtype that it is kept in.
        saved: bytes of the full gradient, in the dtype that it is reduced in: what a reduction
            that is saved communicates.
        positions: of the backwards' events.
        begins: where each begins to count: at its event, or where the one before has ended.
        ends: the last event that had begun when it ended.
        written: of each, as in :class:`RecordedGradients`.
        spared: of each, as there; no more than was written.
        shards: bytes of the unit's reduced gradients.
        inputs: of each but the last, what an earlier reduction's input may take beyond that of
            this backward's, if there is none.
    """

    kept: int
    saved: int
    positions: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    written: tuple[int, ...]
    spared: tuple[int, ...]
    shards: int
    inputs: tuple[Part, ...]

    @property
    def choices(self) -> range:
        """What can be chosen: the gradient of the last backward is reduced at any rate."""
        return range(len(self.positions) - 1)

    def gap(self, index: int) -> tuple[int, int]:
        """The events between backward ``index`` and the next, half-open."""
        return self.ends[index] + 1, max(self.ends[index] + 1, self.begins[index + 1])

    def lead(self, index: int) -> Part:
        """What a kept gradient takes at a backward before its end."""
        return self.begins[index], max(self.begins[index], self.ends[index]), self.kept

    def end(self, index: int) -> Part:
        """What a kept gradient takes at the end of a backward."""
        return (self.ends[index], self.ends[index] + 1, self.kept - self.written[index])

    def rest(self, index: int) -> Part:
        """What it takes there besides if it was kept before."""
        return (self.ends[index], self.ends[index] + 1, self.written[index] - self.spared[index])

    def whole(self, index: int) -> tuple[int, int]:
        """The events of a backward, half-open."""
        return min(self.begins[index], self.ends[index]), self.ends[index] + 1

    def held(self, chosen: Collection[int]) -> list[Part]:
        """What the choices take together. A negative part gives room that was recorded as taken.

        Args:
            chosen: the choices.
        """
        parts: list[Part] = []
        unreduced = True  # so far
        for index in range(len(self.positions)):
            before, after = index - 1 in chosen, index in chosen
            if before or (after and self.written[index]):
                parts.append(self.lead(index))
            if before or after:
                parts.append(self.end(index))
            if before:
                parts.append(self.rest(index))
            unreduced = unreduced and after
            if unreduced and before:
                parts.append((*self.whole(index), -self.shards))
            if after:
                parts.append((*self.gap(index), self.kept - self.shards * unreduced))
                parts.append(self.inputs[index])
        return [part for part in parts if part[0] < part[1]]

    def added(self, index: int, chosen: Collection[int]) -> list[Part]:
        """What a choice takes beside others: never less than it adds to :meth:`held`.

        Args:
            index: the choice.
            chosen: those made already.
        """
        before, after = index - 1 in chosen, index + 1 in chosen
        unreduced = all(each in chosen for each in range(index))
        parts: list[Part] = []
        if not before:
            if self.written[index]:
                parts.append(self.lead(index))
            parts.append(self.end(index))
        parts.append((*self.gap(index), self.kept - self.shards * unreduced))
        if not (after and self.written[index + 1]):
            parts.append(self.lead(index + 1))
        if not after:
            parts.append(self.end(index + 1))
        parts.append(self.rest(index + 1))
        parts.append(self.inputs[index])
        return [(start, stop, max(0, size)) for start, stop, size in parts if start < stop]


def chains(trace: Trace, recorded: RecordedGradients) -> list[Chain]:
    """The chain of each trainable unit with more than one backward, in the order of units.

    Args:
        trace: the window.
        recorded: what its recording had.
    """
    positions: dict[str, list[int]] = {}
    for position in contributions(trace):
        positions.setdefault(trace[position].unit, []).append(position)
    inputs = _inputs(trace)
    result = []
    for unit in trace.units:
        own = positions.get(unit.name, [])
        if len(own) < 2:
            continue
        ends = [trace.ends[position] for position in own]
        before = [-1, *ends]
        written = [min(recorded.written.get(at, 0), unit.kept_gradient_bytes) for at in own]
        result.append(
            Chain(
                kept=unit.kept_gradient_bytes,
                saved=unit.gradient_bytes,
                positions=tuple(own),
                begins=tuple(max(at, last + 1) for at, last in zip(own, before, strict=False)),
                ends=tuple(ends),
                written=tuple(written),
                spared=tuple(
                    min(recorded.spared.get(at, 0), most)
                    for at, most in zip(own, written, strict=True)
                ),
                shards=recorded.shards.get(unit.name, 0),
                inputs=tuple(inputs[position] for position in own[:-1]),
            )
        )
    return result


def _inputs(trace: Trace) -> dict[int, Part]:
    """From the end of each backward to that of the next: by how much an input may be larger."""
    order = contributions(trace)
    result: dict[int, Part] = {}
    largest = 0
    for position, following in pairwise(order):
        size = trace.unit(trace[position].unit).gradient_bytes
        result[position] = (
            trace.ends[position],
            trace.ends[following] + 1,
            max(0, largest - size),
        )
        largest = max(largest, size)
    return result
