"""Hooks on the modules that share a tied parameter, so that it is reduced once.

A unit whose embedding and head are one parameter gets a gradient from each. Where the
chunk's forward cuts its graph between them, the halves come from separate autograd
passes, and only the last reaches an output of the unit's own module. The hooks here
count each use of the parameter as a contribution of its own, and begin a backward use
of the unit when a pass reaches one of the modules alone.

Modules that a schedule calls one by one are :mod:`fsdp_fx.eager.owners`' business, and
those given to one ``fully_shard`` call have hooks of their own. A parameter that a
module uses without having it under a name is not noticed.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..calls import ForwardCall
from ..torch_internals import (
    add_forward_hook,
    current_graph_task,
    remove_forward_hooks,
    skip_code,
)
from ..units import Unit
from .backward import accumulates, watch_output
from .hooks import BackwardOf, ModuleHooks
from .tensors import differentiable_tensors

__all__ = ["TieHooks"]

_KEY = "fsdp_fx.tie"


class _Contribution:
    """What one use of the tied parameters adds to their gradients.

    Args:
        units: the units that have them.
        around: the backward of the forward that it was used in.
    """

    __slots__ = ("_around", "_counted", "_units")

    def __init__(self, units: tuple[Unit, ...], around: BackwardOf) -> None:
        self._units = units
        self._around = around
        self._counted = False

    def begin(self) -> None:
        """A gradient of the module's output has arrived."""
        around = self._around
        hooks, call = around.hooks, around.call
        if not any(use.open for use in around.uses):
            hooks.begin_backward(around, self._units, contributes=False)
        if self._counted or not all([accumulates(hooks.window, unit) for unit in self._units]):
            return
        self._counted = True
        _count(self._units, call, -1)

    def end(self) -> None:
        """Nothing: the backward around ends by itself."""


def _count(units: Sequence[Unit], call: ForwardCall, number: int) -> None:
    for unit in units:
        call.outstanding[unit] = call.outstanding.get(unit, 0) + number


class TieHooks:
    """The hooks on the modules inside of one module that share its tied parameters.

    Args:
        own: the hooks of the module whose units have the parameters.
        units: the units.
        modules: the modules that use them.
    """

    def __init__(
        self, own: ModuleHooks, units: Sequence[Unit], modules: Sequence[nn.Module]
    ) -> None:
        self._own = own
        self._units = tuple(units)
        self._modules = [weakref.ref(module) for module in modules]
        for module in modules:
            self._install(module)

    def remove(self) -> None:
        """Take the hooks off the modules."""
        for reference in self._modules:
            module = reference()
            if module is not None:
                remove_forward_hooks(module, _KEY)

    def _install(self, module: nn.Module) -> None:
        # Dynamo must neither trace this nor compile its frame on its own.
        after = torch._dynamo.disable(self._after_forward)

        def post_hook(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            after(output)

        add_forward_hook(module, _KEY, post_hook)
        skip_code(post_hook.__code__)

    def _after_forward(self, output: Any) -> None:
        around = self._own.backward_to_come
        if around is None or current_graph_task() != -1 or not torch.is_grad_enabled():
            return
        tensors = differentiable_tensors(output)
        if not tensors:
            return
        _count(self._units, around.call, 1)
        contribution = _Contribution(self._units, around)
        for tensor in tensors:
            watch_output(contribution, tensor)
