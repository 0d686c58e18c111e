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

import torch

from fsdp_fx.passes.after_forward import keep_after_forward
from fsdp_fx.passes.frees import insert_frees
from fsdp_fx.passes.gathers import insert_gathers
from fsdp_fx.passes.prefetch import hoist_gathers
from fsdp_fx.passes.reductions import ReduceGradients, insert_reductions
from fsdp_fx.passes.residency import MemoryBudget, keep_resident
from fsdp_fx.planning.lookahead import Lookahead
from fsdp_fx.planning.measurements import Measurements
from fsdp_fx.planning.room import bytes_beyond_peak
from fsdp_fx.program import Program
from fsdp_fx.trace import Trace

__all__ = [
    "PASSES",
    "Measurements",
    "MemoryBudget",
    "Pass",
    "PassOptions",
    "PassResult",
    "pass_results",
    "plan",
    "run_passes",
]


@dataclass(frozen=True)
class PassOptions:
    """What the user may choose about a program.

    Args:
        forward_prefetch: lookahead of forward events: ``None`` for exactly one event
            ahead, 0 for none, ``N`` for as many successors as fit in ``N`` elements,
            ``"timed"`` for as early as the measured durations ask for, within the budget,
            and at least one event ahead.
        backward_prefetch: the same for backward events.
        reduce_gradients: ``"per_backward"`` to reduce after every microbatch,
            ``"per_window"`` to keep full gradients and reduce once, ``"planned"`` to keep
            those that the memory budget has room for.
        memory_budget: bytes of full parameters and full gradients that may stay resident at
            an event, beyond the units in use and those that the lookahead covers; ``"auto"``
            for what fits under the recorded peak, ``"auto+4GiB"`` for what fits under a peak
            that is so much higher; ``None`` to plan nothing.
        keep_frozen: whether frozen units may stay resident from one window to the next,
            within the budget.
        kept_gradient_dtype: what full gradients are kept in between backwards; the passes see
            it in the units' sizes. None for the reduction dtype.

    Raises:
        ValueError: a value is none of these, or an option has no effect without another.
    """

    forward_prefetch: Lookahead = None
    backward_prefetch: Lookahead = None
    reduce_gradients: ReduceGradients = "per_backward"
    memory_budget: MemoryBudget = None
    keep_frozen: bool = False
    kept_gradient_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("forward_prefetch", "backward_prefetch"):
            value = getattr(self, name)
            _require_number(
                name,
                value,
                "timed",
                "not a number of elements: use None for one event ahead, 0 for none, a positive "
                'int, or "timed" for as early as measured durations ask for',
            )
        if bytes_beyond_peak(self.memory_budget) is None:
            _require_number(
                "memory_budget",
                self.memory_budget,
                "auto",
                "not a number of bytes: use None to plan nothing, 0 to keep what costs nothing, a "
                'positive int, "auto" for what fits under the recorded peak, or "auto+4GiB" for '
                "what fits with so much more",
            )
        known = get_args(ReduceGradients)
        if self.reduce_gradients not in known:
            choices = " or ".join(f'"{choice}"' for choice in known)
            raise ValueError(
                f"reduce_gradients={self.reduce_gradients!r} is unknown: use {choices}"
            )
        if self.keep_frozen and not isinstance(self.memory_budget, int):
            raise ValueError(
                f"keep_frozen=True has no effect with memory_budget={self.memory_budget!r}: give "
                "bytes to keep frozen units in, which stay through the optimizer step as well"
            )
        dtype = self.kept_gradient_dtype
        if dtype is not None and not (
            isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
        ):
            raise ValueError(
                f"kept_gradient_dtype={dtype!r} is no dtype to add gradients up in: use None for the "
                "reduction dtype, or torch.bfloat16, torch.float16, torch.float32 or torch.float64"
            )
        if dtype is not None and self.reduce_gradients == "per_backward":
            raise ValueError(
                f"kept_gradient_dtype={dtype} has no effect with "
                'reduce_gradients="per_backward", which keeps none: use "per_window" or "planned"'
            )
        if self.memory_budget is None:
            if self.reduce_gradients == "planned":
                raise ValueError(
                    'reduce_gradients="planned" needs a memory_budget to keep gradients in: give '
                    'bytes or "auto"'
                )
            for name in ("forward_prefetch", "backward_prefetch"):
                if getattr(self, name) == "timed":
                    raise ValueError(
                        f'{name}="timed" needs a memory_budget to gather ahead in: give bytes or '
                        '"auto"'
                    )

    @property
    def fills_memory(self) -> bool:
        """Whether the budget is what a recorded window left free."""
        return bytes_beyond_peak(self.memory_budget) is not None

    @property
    def measures(self) -> bool:
        """Whether a program can only be planned from the measurements of a recorded window."""
        return bool(self.measured_choice)

    @property
    def measured_choice(self) -> str:
        """The choice that needs measurements, as code; empty if none does."""
        for name in ("memory_budget", "forward_prefetch", "backward_prefetch"):
            value = getattr(self, name)
            if isinstance(value, str):
                return f'{name}="{value}"'
        return ""


def _require_number(name: str, value: object, word: str, choices: str) -> None:
    if value is None or value == word:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}={value!r} is {choices}")


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
    run: Callable[[Program, PassOptions, Measurements], Program]


@dataclass(frozen=True)
class PassResult:
    """A program between two passes.

    Args:
        name: the pass that wrote it; ``"trace"`` for the one that nothing is planned in yet.
        program: the program.
    """

    name: str
    program: Program


PASSES: tuple[Pass, ...] = (
    Pass(
        "gathers",
        needs=frozenset({"computes"}),
        provides=frozenset({"gathered"}),
        run=lambda program, options, measurements: insert_gathers(program),
    ),
    Pass(
        "reductions",
        needs=frozenset({"computes"}),
        provides=frozenset({"reduced"}),
        run=lambda program, options, measurements: insert_reductions(
            program, options.reduce_gradients
        ),
    ),
    Pass(
        "after_forward",
        needs=frozenset({"gathered"}),
        provides=frozenset({"kept after forward"}),
        run=lambda program, options, measurements: keep_after_forward(program),
    ),
    # What the user keeps is not chosen again.
    Pass(
        "residency",
        needs=frozenset({"gathered", "reduced", "kept after forward"}),
        provides=frozenset({"kept"}),
        run=lambda program, options, measurements: keep_resident(
            program,
            options.memory_budget,
            options.forward_prefetch,
            options.backward_prefetch,
            options.reduce_gradients == "planned",
            options.keep_frozen,
            measurements,
        ),
    ),
    # Gathers ahead take the memory that is left by what is kept.
    Pass(
        "prefetch",
        needs=frozenset({"gathered", "kept"}),
        provides=frozenset({"hoisted"}),
        run=lambda program, options, measurements: hoist_gathers(
            program, options.forward_prefetch, options.backward_prefetch, measurements
        ),
    ),
    # Merging intervals, as those before do, would leave the frees between them behind.
    Pass(
        "frees",
        needs=frozenset({"gathered", "kept", "hoisted"}),
        provides=frozenset({"freed"}),
        run=lambda program, options, measurements: insert_frees(program),
    ),
)


def run_passes(
    program: Program,
    passes: Sequence[Pass],
    options: PassOptions,
    measurements: Measurements | None = None,
    on_result: Callable[[PassResult], None] | None = None,
) -> Program:
    """Run ``passes`` in order, holding each to its contract.

    Args:
        program: where to start.
        passes: the passes, in order.
        options: given to every pass.
        measurements: given to every pass; of nothing, if not given.
        on_result: called with what each pass wrote.

    Returns:
        The program after the last pass, not verified.

    Raises:
        ValueError: a pass needs a property that no earlier one provides, or would
            provide one again.
    """
    measurements = measurements or Measurements()
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
        program = replace(step.run(program, options, measurements), provides=provides)
        if on_result is not None:
            on_result(PassResult(step.name, program))
    return program


def pass_results(
    trace: Trace,
    options: PassOptions | None = None,
    measurements: Measurements | None = None,
) -> tuple[PassResult, ...]:
    """What :func:`plan` does, pass by pass: ``results[1].program.diff(results[0].program)``.

    Args:
        trace: the window.
        options: the user's choices.
        measurements: what was measured of the window.

    Returns:
        The bare trace as a program, then what each pass wrote, in order.
    """
    bare = Program.from_trace(trace)
    results = [PassResult("trace", bare)]
    run_passes(bare, PASSES, options or PassOptions(), measurements, results.append)
    return tuple(results)


def plan(
    trace: Trace,
    options: PassOptions | None = None,
    measurements: Measurements | None = None,
) -> Program:
    """The verified program of a window.

    Args:
        trace: the window.
        options: the user's choices; by default one event ahead, and a reduction per
            backward.
        measurements: what was measured of the window, equal on all ranks.

    Raises:
        ValueError: the options ask for measurements that are not given.
        ProgramError: the passes wrote a program that breaks a rule: a defect in them.
    """
    options = options or PassOptions()
    program = run_passes(Program.from_trace(trace), PASSES, options, measurements)
    program.verify()
    return program
