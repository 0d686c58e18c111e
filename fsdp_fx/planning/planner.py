"""The plan of a window without its graph.

:func:`outline` decides what the passes decide, in their order and with the same functions, on
intervals alone: for thousands of events and many ranks a graph that nobody runs is not worth
its time. A test holds the two to each other.
"""

from __future__ import annotations

from typing import Literal

from fsdp_fx.planning.durations import Durations
from fsdp_fx.planning.lookahead import Lookahead, covered_from, hoist
from fsdp_fx.planning.memory import contributions, kept_gradient_bytes, on_demand
from fsdp_fx.planning.outline import Outline
from fsdp_fx.planning.residency import (
    Kept,
    after_forward,
    carry,
    keep,
    lookahead_bytes,
    merge,
    move,
)
from fsdp_fx.planning.room import budgeted_room, interval_bytes
from fsdp_fx.trace import Trace

__all__ = ["outline"]


def outline(
    trace: Trace,
    *,
    forward_prefetch: Lookahead = None,
    backward_prefetch: Lookahead = None,
    memory_budget: int | None = None,
    reduce_gradients: Literal["per_backward", "per_window", "planned"] = "per_backward",
    keep_frozen: bool = False,
    durations: Durations | None = None,
) -> Outline:
    """What the program of a window would do.

    Args:
        trace: the window.
        forward_prefetch: see :class:`fsdp_fx.passes.PassOptions`, as for the others.
        backward_prefetch: lookahead of backward events.
        memory_budget: bytes, or None to keep nothing.
        reduce_gradients: when gradients are reduced.
        keep_frozen: whether frozen units may stay for the next window.
        durations: for a lookahead of ``"timed"``.

    Raises:
        ValueError: ``"timed"`` without durations.
    """
    if durations is None and "timed" in (forward_prefetch, backward_prefetch):
        raise ValueError('a lookahead of "timed" needs durations')
    reductions = contributions(trace)
    if reduce_gradients == "per_window":
        last = {trace[position].unit: position for position in reductions}
        reductions = [at for at in reductions if last[trace[at].unit] == at]
    there = on_demand(trace)
    there = merge(there, after_forward(trace, there))
    kept, room = Kept(), None
    if memory_budget is not None:
        covered = covered_from(trace, forward_prefetch, backward_prefetch)
        needed = interval_bytes(trace, there)
        room = budgeted_room(memory_budget, lookahead_bytes(trace, there, covered))
        kept = keep(
            trace,
            there,
            covered,
            room,
            gradients=reduce_gradients == "planned",
            carries=keep_frozen,
        )
        forced = kept_gradient_bytes(trace, reductions)
        reductions = [position for position in reductions if position not in kept.reductions]
        there = merge(there, kept.gathers)
        room = [
            left + used + before - resident - after
            for left, used, before, resident, after in zip(
                room,
                needed,
                forced,
                interval_bytes(trace, carry(trace, there, kept.carried)),
                kept_gradient_bytes(trace, reductions),
                strict=True,
            )
        ]
    hoisting = hoist(
        trace,
        there,
        forward_prefetch,
        backward_prefetch,
        room=room,
        durations=durations,
        carried=kept.carried,
    )
    there = carry(trace, move(merge(there, hoisting.merged), hoisting.issued), kept.carried)
    return Outline(trace, there, tuple(reductions), kept.carried)
