"""A backward in two halves, as zero-bubble schedules run it: for the inputs, later for the weights.

Each half is a use of a unit, and an event, of its own: between the two the unit is free
to go. The input half is a pass of ``autograd.grad`` that the hooks of
:mod:`fsdp_fx.eager.hooks` hear of as of any other; it accumulates nothing, so nothing is
reduced after it. :class:`SplitBackward` remembers which modules it went through. The
weight half runs piece by piece: a unit's use begins before the first piece that needs it
and ends, with the reduction, after the last.

What computes the halves, and which backwards can be split, is the schedule's business
(:mod:`fsdp_fx.pipelining`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..units import Unit
from ..window import Window
from .hooks import BackwardOf

__all__ = ["SplitBackward", "WeightGradients"]


@dataclass(frozen=True)
class WeightGradients:
    """A piece of a weight half.

    Attributes:
        units: those whose parameters get a gradient.
        compute: adds the gradients to the ``grad`` of the unsharded parameters.
    """

    units: frozenset[Unit]
    compute: Callable[[], None]


class SplitBackward:
    """The backward of one forward of a chunk, in two halves.

    Args:
        window: where the events go.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self._begun: list[BackwardOf] = []

    @contextlib.contextmanager
    def input_half(self) -> Iterator[None]:
        """The gradients of the inputs are computed inside."""
        begun: dict[BackwardOf, None] = {}  # of those that owners hook, nothing is known
        with self._window.input_half(begun):
            yield
        for backward in begun:
            if any(unit.spec.trainable for unit in backward.hooks.units):
                backward.split()
                self._begun.append(backward)

    def weight_half(self, pieces: Sequence[WeightGradients]) -> None:
        """Compute the gradients of the weights, and reduce them.

        Args:
            pieces: all of them. A unit that the input half did not reach is gathered by
                the hooks of its module.
        """
        left = {backward: 0 for backward in self._begun}
        concerned: list[list[BackwardOf]] = []
        for piece in pieces:
            concerned.append([b for b in left if not piece.units.isdisjoint(b.hooks.units)])
            for backward in concerned[-1]:
                left[backward] += 1
        waiting = list(zip(pieces, concerned, strict=True))
        with self._window.weight_half():
            for backward in self._begun:
                backward.begin_weights()
                own = [each for each in waiting if backward in each[1]]
                for piece, others in own:
                    waiting.remove((piece, others))
                    for other in others:
                        other.begin_weights()
                    piece.compute()
                    for other in others:
                        left[other] -= 1
                        if not left[other]:
                            other.end_weights()
                backward.end_weights()
            for piece, _ in waiting:
                piece.compute()
        self._begun.clear()
