"""The ordered list of passes that turns a trace into a program.

A pass is a pure function from program to program, one per file. :data:`PASSES` is the
one place that says in which order they run; each states which properties it needs and
which it provides, and :func:`run_passes` holds them to it. The result is verified
(:mod:`fsdp_fx.passes.verify`) before anyone gets it.

To add a pass: write it in a file of its own, and give it a line in :data:`PASSES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from fsdp_fx.passes.frees import insert_frees
from fsdp_fx.passes.gathers import insert_gathers
from fsdp_fx.passes.prefetch import hoist_gathers
from fsdp_fx.passes.reductions import ReduceGradients, insert_reductions
from fsdp_fx.program import Program
from fsdp_fx.trace import Trace

__all__ = ["PASSES", "Pass", "PassOptions", "plan", "run_passes"]


@dataclass(frozen=True)
class PassOptions:
    """What the user may choose about a program.

    Args:
        forward_prefetch: lookahead of forward events: ``None`` for exactly one event
            ahead, 0 for none, ``N`` for as many successors as fit in ``N`` elements.
        backward_prefetch: the same for backward events.
        reduce_gradients: ``"per_backward"`` to reduce after every microbatch,
            ``"per_window"`` to keep full gradients and reduce once.

    Raises:
        ValueError: a budget is negative, or ``reduce_gradients`` is neither of the two.
    """

    forward_prefetch: int | None = None
    backward_prefetch: int | None = None
    reduce_gradients: ReduceGradients = "per_backward"

    def __post_init__(self) -> None:
        for name in ("forward_prefetch", "backward_prefetch"):
            budget = getattr(self, name)
            if budget is not None and budget < 0:
                raise ValueError(f"{name} is {budget}; it must be None or at least 0 elements")
        known = get_args(ReduceGradients)
        if self.reduce_gradients not in known:
            raise ValueError(
                f"reduce_gradients is {self.reduce_gradients!r}; it must be one of {known}"
            )


@dataclass(frozen=True)
class Pass:
    """One pass and its contract.

    Args:
        name: what messages call it.
        needs: properties that the program must have before.
        provides: properties that it has after; they are never taken away.
        run: the pass; must not change the program that it is given.
    """

    name: str
    needs: frozenset[str]
    provides: frozenset[str]
    run: Callable[[Program, PassOptions], Program]


PASSES: tuple[Pass, ...] = (
    Pass(
        "gathers",
        needs=frozenset({"computes"}),
        provides=frozenset({"gathered"}),
        run=lambda program, options: insert_gathers(program),
    ),
    Pass(
        "prefetch",
        needs=frozenset({"gathered"}),
        provides=frozenset({"hoisted"}),
        run=lambda program, options: hoist_gathers(
            program, options.forward_prefetch, options.backward_prefetch
        ),
    ),
    # Merging intervals, as prefetch does, would leave the frees between them behind.
    Pass(
        "frees",
        needs=frozenset({"gathered", "hoisted"}),
        provides=frozenset({"freed"}),
        run=lambda program, options: insert_frees(program),
    ),
    Pass(
        "reductions",
        needs=frozenset({"freed"}),
        provides=frozenset({"reduced"}),
        run=lambda program, options: insert_reductions(program, options.reduce_gradients),
    ),
)


def run_passes(program: Program, passes: Sequence[Pass], options: PassOptions) -> Program:
    """Run ``passes`` in order, holding each to its contract.

    Args:
        program: where to start.
        passes: the passes, in order.
        options: given to every pass.

    Returns:
        The program after the last pass, not verified.

    Raises:
        ValueError: a pass needs a property that no earlier one provides, or would
            provide one again.
    """
    for step in passes:
        if missing := step.needs - program.provides:
            raise ValueError(
                f"pass {step.name} needs {', '.join(sorted(missing))}, "
                f"which no earlier pass provides"
            )
        if again := step.provides & program.provides:
            raise ValueError(
                f"pass {step.name} provides {', '.join(sorted(again))}, "
                f"which the program has already"
            )
        provides = program.provides | step.provides
        program = replace(step.run(program, options), provides=provides)
    return program


def plan(trace: Trace, options: PassOptions | None = None) -> Program:
    """The verified program of a window.

    Args:
        trace: the window.
        options: the user's choices; by default one event ahead, and a reduction per
            backward.

    Raises:
        ProgramError: the passes wrote a program that breaks a rule: a defect in them.
    """
    options = options or PassOptions()
    program = run_passes(Program.from_trace(trace), PASSES, options)
    program.verify()
    return program
