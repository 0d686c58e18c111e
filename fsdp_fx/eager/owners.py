"""Hooks on submodules that a schedule calls one by one, acting for the units around them.

A schedule that interleaves the forward of one microbatch with the backward of another,
node by node, calls attention, dispatch, experts and combine itself. The layer's forward
never runs, and with it the hooks of :mod:`fsdp_fx.eager.hooks` on the layer, the *owner*
of the parameters. The hooks here act in their place:

- A *round* is one microbatch's pass over the owner's submodules. The first submodule's
  forward begins one use of each of the owner's units, the last one's ends it. The
  modules show the unsharded parameters only while a submodule runs.
- The first gradient that reaches any submodule's output begins one backward use. It
  lasts, over as many autograd passes as the schedule makes of it, until the backward of
  each submodule has run, or until the weight gradients that were delayed are there.

Several rounds may be under way at once, in either direction: the uses are counted
(:mod:`fsdp_fx.residency`). Where the owner's own forward runs, its own hooks act and
these do nothing.

What order the submodules are called in, and on which data, is the schedule's business: a
call belongs to the oldest round that still lacks it.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..calls import ForwardCall, Use
from ..torch_internals import (
    add_forward_hook,
    add_forward_pre_hook,
    current_graph_task,
    differentiated_function,
    remove_forward_hooks,
    skip_code,
)
from ..units import Unit
from ..window import Window
from .backward import (
    accumulates,
    mark_inputs,
    refuse_double_backward,
    watch_output,
    watch_pass,
)
from .hooks import ModuleHooks, refuse_parameter, shows_sharded
from .tensors import differentiable_tensors

__all__ = ["OwnerHooks"]

_KEY = "fsdp_fx.owner"


class _Round:
    """One microbatch's pass over an owner's submodules, forward and backward.

    Args:
        owner: the owner's hooks.
        call: the forward call it belongs to.
        whole: whether the call is the round, not the forward of a chunk around it.
    """

    def __init__(self, owner: OwnerHooks, call: ForwardCall, whole: bool) -> None:
        self.owner = owner
        self.call = call
        self.whole = whole
        self.called: set[int] = set()
        self.released = False
        self.forward_uses: list[Use] = []
        self.backward_uses: list[Use] = []
        # Of submodules, by index: whose backward is still to end, and has begun.
        self._awaited: set[int] = set()
        self._running: set[int] = set()
        self._counted = False

    def accepts(self, index: int) -> bool:
        """Whether the submodule is still to be called in this round."""
        return index not in self.called and not (self.released and index <= self.owner.last)

    @property
    def is_over(self) -> bool:
        """Whether every submodule has been called, or will not be."""
        return self.released and all(index in self.called for index in self.owner.after_last)

    def begin_forward(self) -> None:
        """The owner's units are needed from here on."""
        window = self.owner.window
        for unit in self.owner.units:
            self.forward_uses.append(window.begin(unit, "F", self.call))

    def end_forward(self) -> None:
        """The owner's units are no longer needed in this forward."""
        window = self.owner.window
        self.released = True
        uses, self.forward_uses = self.forward_uses, []
        for use in reversed(uses):
            window.end(use)
        if self.whole:
            window.close_call(self.call, self.call.needs_backward)

    def expect(self, visit: _Visit) -> None:
        """The submodule's forward can be differentiated: its backward belongs to the round."""
        call = self.call
        if self.whole:
            call.needs_backward = True
        if not self._counted:
            self._counted = True
            for unit in self.owner.units:
                call.outstanding[unit] = call.outstanding.get(unit, 0) + 1
        self._awaited.add(visit.index)
        if call.training:
            call.awaited.append(self.owner.names[visit.index])

    def begin_backward(self, visit: _Visit) -> None:
        """A gradient has reached an output of a submodule."""
        if visit.index in self._running:
            return
        owner, window = self.owner, self.owner.window
        refuse_double_backward(self.call, owner.units[0].spec.name)
        window.enter_backward(self.call)
        watch_pass(window, owner.pass_end)
        window.track_backward(visit)
        self._running.add(visit.index)
        if not any(use.open for use in self.backward_uses):
            self.backward_uses = []
            for unit in owner.units:
                use = window.begin(unit, "B", self.call)
                use.contributes = True
                use.accumulates = False
                self.backward_uses.append(use)
        if len(self._running) == 1:
            # A checkpoint may run parts of a submodule again that have no hooks of their own.
            for unit in owner.units:
                unit.expose()
        for use in self.backward_uses:
            use.accumulates = use.accumulates or accumulates(window, use.unit)

    def end_backward(self, visit: _Visit) -> None:
        """The backward of a submodule has run."""
        if visit.index not in self._running:
            return
        self._running.remove(visit.index)
        owner, window = self.owner, self.owner.window
        window.untrack_backward(visit)
        if not self._running and (self.call.window == window.number or not self.call.training):
            for unit in owner.units:
                unit.conceal()
        if visit.index in self._awaited:
            self._awaited.remove(visit.index)
            if self.call.training:
                self.call.awaited.remove(owner.names[visit.index])
        if self._running or self._awaited:
            return
        uses, self.backward_uses = [use for use in self.backward_uses if use.open], []
        if owner.own.delays_weight_gradients and self.call.training:
            window.delay(owner.units, self.call, uses)
            return
        for use in uses:
            window.end(use)


class _Visit:
    """The forward of one submodule in a round, and the backward of it.

    Args:
        round: the round.
        index: which submodule.
    """

    __slots__ = ("index", "round")

    def __init__(self, round: _Round, index: int) -> None:
        self.round = round
        self.index = index

    def begin(self) -> None:
        """A gradient of an output has arrived."""
        self.round.begin_backward(self)

    def end(self) -> None:
        """The gradients of the inputs have been computed, or the autograd pass has ended."""
        self.round.end_backward(self)

    def repeat(self, gradients: Any) -> None:
        """A reentrant checkpoint around the submodule is about to run it again."""
        self.round.begin_backward(self)


@dataclasses.dataclass(eq=False, slots=True)
class _Entry:
    """One forward of a submodule that is running.

    Attributes:
        index: which submodule.
        idle: whether other hooks act: the owner's own, or those of a submodule around it.
        handling: what the caller of the forward is handling.
        round: the round it belongs to; None in a recomputation.
        recomputations: the uses of a recomputation.
        exposed: the units whose parameters the modules show.
        visit: where its backward is told to begin and end; None if it has none.
        repeated: whether a reentrant checkpoint's backward runs it again.
    """

    index: int
    idle: bool
    handling: BaseException | None
    round: _Round | None = None
    recomputations: list[Use] = dataclasses.field(default_factory=list)
    exposed: list[Unit] = dataclasses.field(default_factory=list)
    visit: _Visit | None = None
    repeated: bool = False


class OwnerHooks:
    """The hooks on one owner's submodules.

    Args:
        window: where the events go.
        own: the hooks of the owner, for whose units these act.
        submodules: the submodules by their path in the owner, in the order in which a
            microbatch goes through them.
        last: index of the submodule after whose forward the units are not needed.
        pass_end: called when an outermost autograd pass ends.
    """

    def __init__(
        self,
        window: Window,
        own: ModuleHooks,
        submodules: dict[str, nn.Module],
        last: int,
        pass_end: Callable[[], None],
    ) -> None:
        self.window = window
        self.own = own
        self.units: tuple[Unit, ...] = own.units
        self.names = tuple(submodules)
        self.last = last
        self.after_last = range(last + 1, len(submodules))
        self.pass_end = pass_end
        self._rounds: list[_Round] = []
        self._number = window.number
        self._entries: list[_Entry] = []
        self._modules = [weakref.ref(module) for module in submodules.values()]
        for index, module in enumerate(submodules.values()):
            self._install(index, module)

    def remove(self) -> None:
        """Take the hooks off the submodules."""
        for reference in self._modules:
            module = reference()
            if module is not None:
                remove_forward_hooks(module, _KEY)

    def forget(self) -> None:
        """Forget every round: the window was discarded."""
        self._entries.clear()
        self._rounds.clear()

    def end_evaluations(self) -> None:
        """Free what an evaluation holds that did not call every submodule."""
        for each in [each for each in self._rounds if not each.call.training]:
            self._rounds.remove(each)
            each.end_forward()

    def _install(self, index: int, module: nn.Module) -> None:
        # Dynamo must neither trace these nor compile their frames on their own.
        before = torch._dynamo.disable(self._before_forward)
        after = torch._dynamo.disable(self._after_forward)

        def pre_hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                if shows_sharded(module):
                    torch._dynamo.graph_break(
                        "fsdp_fx: the hooks of a submodule that a schedule calls directly run "
                        "outside of graphs; compile what it calls instead"
                    )
                return None
            return before(index, module, args, kwargs)

        def post_hook(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            after(module, output)

        add_forward_pre_hook(module, _KEY, pre_hook)
        add_forward_hook(module, _KEY, post_hook)
        skip_code(pre_hook.__code__)
        skip_code(post_hook.__code__)

    # Forward

    def _before_forward(
        self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        window = self.window
        around = window.current[-1] if window.current else None
        idle = self.own.running or any(not entry.idle for entry in self._entries)
        # A compiled chunk gathers its units itself.
        idle = idle or (around is not None and around.compiled)
        # From here on the forward hook undoes what has been done, should a gather raise.
        entry = _Entry(index, idle, sys.exc_info()[1])
        self._entries.append(entry)
        if idle:
            return None
        if current_graph_task() != -1:
            watch_pass(window, self.pass_end)
            for unit in self.units:
                entry.recomputations.append(window.begin_recomputation(unit))
            self._expose(entry)
            return None
        evaluates = (
            window.evaluating
            or not self.own.is_training(module)
            or (around is not None and not around.training)
        )
        # With gradients off it is an evaluation, or what a reentrant checkpoint runs again.
        checkpoint = None
        if not (evaluates or torch.is_grad_enabled()):
            checkpoint = differentiated_function()
        trains = not evaluates and (torch.is_grad_enabled() or checkpoint is not None)
        each = entry.round = self._round(index, around, trains, evaluates)
        each.called.add(index)
        if each.whole:
            window.resume_call(each.call)
        if not each.released:
            self._expose(entry)
        if checkpoint is not None:
            entry.repeated = True
            visit = _Visit(each, index)
            each.expect(visit)
            checkpoint.register_prehook(visit.repeat)
            return None
        if not torch.is_grad_enabled():
            return None
        entry.visit = _Visit(each, index)
        return mark_inputs(entry.visit, args, kwargs)

    def _expose(self, entry: _Entry) -> None:
        for unit in self.units:
            unit.expose()
            entry.exposed.append(unit)

    def _round(
        self, index: int, around: ForwardCall | None, trains: bool, evaluates: bool
    ) -> _Round:
        """The round that a call of a submodule belongs to: the oldest that lacks it, or a new one.

        Args:
            index: the submodule.
            around: the forward of a chunk that calls it, if one does.
            trains: whether a new round would be one of training.
            evaluates: whether it cannot belong to one of training.
        """
        window = self.window
        if self._number != window.number:
            self.end_evaluations()
            self._rounds.clear()
            self._number = window.number
        # With gradients off it is part of an evaluation, or a step of a round that
        # nothing is differentiated through.
        for training in (True,) if trains else (False,) if evaluates else (False, True):
            for each in self._rounds:
                in_call = each.whole if around is None else each.call is around
                if in_call and each.call.training == training and each.accepts(index):
                    return each
        if trains:
            self.end_evaluations()  # their next call begins another
        if around is None:
            call = window.open_call(self.own.chunk, trains, False, self.own.name)
            window.suspend_call(call)
            call.last = self.names[self.last]
            each = _Round(self, call, whole=True)
        else:
            each = _Round(self, around, whole=False)
        self._rounds.append(each)
        each.begin_forward()
        return each

    def _after_forward(self, module: nn.Module, output: Any) -> None:
        if not self._entries:
            return  # forgotten by abort()
        entry = self._entries.pop()
        if entry.idle:
            return
        window, each, visit = self.window, entry.round, entry.visit
        for unit in entry.exposed:
            unit.conceal()
        for use in reversed(entry.recomputations):
            window.end(use)
        if each is None:
            return
        if each.whole:
            window.suspend_call(each.call)
        if output is None and sys.exc_info()[1] is not entry.handling:
            self._failed(entry.index, each)
            return
        tensors = differentiable_tensors(output) if visit is not None else []
        for tensor in tensors:
            refuse_parameter(module, tensor, self.units)
        if visit is not None and tensors:
            each.expect(visit)
        if entry.index == self.last:
            each.end_forward()
        if each.is_over:
            self._rounds.remove(each)
        if visit is not None:
            for tensor in tensors:
                watch_output(visit, tensor)

    def _failed(self, index: int, each: _Round) -> None:
        error = sys.exc_info()[1]
        if each.call.training:
            text = "".join(f": {line}" for line in str(error).splitlines()[:1])
            self.window.fail(
                f"an exception crossed the forward of {self.names[index]} of {each.call} "
                f"({type(error).__name__}{text})"
            )
        else:
            self._rounds.remove(each)
            each.end_forward()
