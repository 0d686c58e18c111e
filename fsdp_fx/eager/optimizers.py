"""Refuses an optimizer step in the middle of a window.

Before the close gradients may still be on their way, some may not be reduced at all, and
parameters that are gathered would go stale. Nothing else would notice a
``finish_grad_sync()`` that was forgotten.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..window import Window

__all__ = ["guard_optimizers"]


def guard_optimizers(window: Window) -> Callable[[], None]:
    """Make every optimizer raise that steps parameters of an open window.

    Args:
        window: where it is seen whether a window is open, and whose units count.

    Returns:
        A function that ends it. The window is held weakly.
    """
    reference = weakref.ref(window)

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        window = reference()
        if window is not None:
            window.close_if_overdue()
        if window is None or not window.is_open:
            return
        ours = {id(parameter) for unit in window.units for parameter in unit.sharded_parameters}
        groups = optimizer.param_groups
        if any(id(parameter) in ours for group in groups for parameter in group["params"]):
            name, number = type(optimizer).__name__, window.number
            if (call := window.awaits_backward()) is not None:
                raise RuntimeError(
                    f"{name}.step() in the middle of window {number}, in which the backward of {call} "
                    "is missing: run it, or abort(); a forward that was an evaluation belongs under "
                    "evaluation() or torch.no_grad()"
                )
            raise RuntimeError(
                f"{name}.step() in the middle of window {number}: call finish_grad_sync() after the "
                "last backward, before the step (or abort())"
            )

    return register_optimizer_step_pre_hook(before_step).remove
