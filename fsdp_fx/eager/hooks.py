"""Hooks on modules and tensors that tell the window what compute does.

For each module that ``fully_shard`` was called on, and for each chunk:

- the forward pre-hook begins a use of the module's units and lets the modules show
  the unsharded parameters; the forward hook ends it;
- the first gradient of an output begins the backward use; it ends when those of the
  inputs have been computed, or with the autograd pass (:mod:`fsdp_fx.eager.backward`).

Under torch.compile the hooks inside a captured graph leave no trace, and the same
hooks fire where code runs eagerly. A module that is entered from eager code while
torch.compile is active shows the unsharded parameters of every unit below it, so
that the capture sees plain tensors; who gathers them is the graph's business then.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..calls import ForwardCall, MethodCall, Use
from ..report import Report
from ..torch_internals import (
    active_compile_callback,
    add_forward_hook,
    add_forward_pre_hook,
    compile_backend,
    current_graph_task,
    differentiated_function,
    remove_forward_hooks,
    skip_code,
)
from ..units import ShardedModule, Unit, unit_of_tensor
from ..window import Window
from .backward import (
    accumulates,
    is_marked,
    mark_inputs,
    refuse_double_backward,
    watch_output,
    watch_pass,
)
from .casts import install_input_cast, install_output_cast, remove_casts
from .saved_tensors import spare_parameters
from .tensors import differentiable_tensors

__all__ = ["HOOKS_KEY", "BackwardOf", "ModuleHooks", "refuse_parameter", "shows_sharded"]

HOOKS_KEY = "fsdp_fx"
_FRAMED = "_fsdp_fx_framed"
# Looked up on the module itself: its class has others that do the same.
_REFUSED = ("__deepcopy__", "__reduce_ex__")


class BackwardOf:
    """The backward of one forward through a module, shared by its tensor hooks.

    Args:
        hooks: the module's hooks.
        call: the forward call it belongs to.
    """

    __slots__ = ("_is_split", "_owes_weights", "call", "exposed", "hooks", "uses")

    def __init__(self, hooks: ModuleHooks, call: ForwardCall) -> None:
        self.hooks = hooks
        self.call = call
        self.uses: list[Use] = []
        self.exposed: list[Unit] = []
        self._is_split = self._owes_weights = False

    def begin(self) -> None:
        """The first gradient of an output has arrived."""
        # What is left of a split backward, the weight half, is begun and ended by name.
        if not (self._is_split or any(use.open for use in self.uses)):
            self.uses.clear()
            self.hooks.begin_backward(self, self.hooks.units)

    def end(self) -> None:
        """The gradients of the inputs have been computed."""
        if not self._is_split:
            self.hooks.end_backward(self)

    # In two halves (fsdp_fx.eager.split_backward)

    def split(self) -> None:
        """What has run was the input half only."""
        self._is_split = self._owes_weights = True
        if self.call.training:
            self.call.awaited.append(self._weights)

    def begin_weights(self) -> None:
        """Gradients of weights are computed from here on."""
        if self._owes_weights and not any(use.open for use in self.uses):
            self.uses.clear()
            self.hooks.begin_weights(self)

    def end_weights(self) -> None:
        """They have been computed."""
        if self._owes_weights:
            self._owes_weights = False
            if self.call.training:
                self.call.awaited.remove(self._weights)
            self.hooks.end_backward(self)

    @property
    def _weights(self) -> str:
        return f"the weights of {self.hooks.name}"


def refuse_parameter(module: nn.Module, output: torch.Tensor, units: Sequence[Unit]) -> None:
    """Raise if ``output`` is a parameter of ``units`` or a view of one.

    Raises:
        RuntimeError: it is; names the module and the unit.
    """
    owner = unit_of_tensor(output)
    if owner is not None and owner in units:
        raise RuntimeError(
            f"{type(module).__name__} returns a parameter of unit {owner.spec.name}, or a "
            "view of one, and its memory is given back now: return a copy (.clone())"
        )


class _Repetition:
    """The calls that a reentrant checkpoint around whole chunks runs again in its backward.

    Before that backward begins it tells the window so, and which forwards come again.
    """

    __slots__ = ("calls", "hooks")
    _ATTRIBUTE = "_fsdp_fx_repetition"

    def __init__(self, hooks: ModuleHooks) -> None:
        self.calls: list[tuple[object, ForwardCall]] = []
        self.hooks = hooks

    @classmethod
    def of(cls, function: Any, hooks: ModuleHooks) -> _Repetition:
        """The one of an autograd Function, by its ``ctx``; registered if it has none."""
        repetition: _Repetition | None = getattr(function, cls._ATTRIBUTE, None)
        if repetition is None:
            repetition = cls(hooks)
            setattr(function, cls._ATTRIBUTE, repetition)
            function.register_prehook(repetition)
        return repetition

    def __call__(self, gradients: Any) -> None:
        self.hooks.begin_repetition(self.calls)


@dataclasses.dataclass(eq=False, slots=True)
class _Entry:
    """One forward of a module that is running."""

    hooks: ModuleHooks
    call: ForwardCall
    opened_call: bool
    recomputation: bool
    repeated: bool  # whether a reentrant checkpoint's backward runs it again
    handling: BaseException | None  # what the caller of the forward is handling
    method: MethodCall | None  # where the module was entered by one
    uses: list[Use] = dataclasses.field(default_factory=list)
    exposed: list[Unit] = dataclasses.field(default_factory=list)
    backward: BackwardOf | None = None
    spared: AbstractContextManager[Any] | None = None

    def abandon(self) -> None:
        """An exception has ended the method that this is the forward of."""
        self.hooks.abandon(self)


class ModuleHooks:
    """The hooks of one module.

    Args:
        window: where the events go.
        module: the module that the hooks are put on.
        chunk: name of the chunk that it belongs to.
        units: the module's own units.
        inner_units: the units of the sharded modules below it.
        sharded: the ``fully_shard`` call it comes from, for its casts; None for a
            chunk that is not itself sharded.
        root: the chunk; where the module is it, its forward is a call.
        pass_end: called when an outermost autograd pass ends.
        report: told what ran how when a forward of a compiled chunk is over.
        together: whether ``units`` has those of the sharded modules below, whose own
            hooks are left out.
    """

    def __init__(
        self,
        window: Window,
        module: nn.Module,
        chunk: str,
        units: Sequence[Unit],
        inner_units: Sequence[Unit],
        sharded: ShardedModule | None,
        root: nn.Module,
        pass_end: Callable[[], None],
        report: Report,
        together: bool = False,
    ) -> None:
        self.window = window
        self.module = weakref.ref(module)
        self.chunk = chunk
        self.units = tuple(units)
        self.inner_units = tuple(inner_units)
        self.is_chunk = module is root
        self._root = weakref.ref(root)
        self._pass_end = pass_end
        self._report = report
        self._entries: list[_Entry] = []
        self._warned_of_view = False
        self.delays_weight_gradients = False
        self._together = together
        self._install(module, sharded)

    def remove(self) -> None:
        """Take the hooks off the module."""
        module = self.module()
        if module is not None:
            remove_forward_hooks(module, HOOKS_KEY)
            remove_casts(module)
            for guard in self._state_dict_guards:
                guard.remove()
            for name in _REFUSED:
                module.__dict__.pop(name, None)
            framed = type(module)
            if framed.__dict__.get(_FRAMED, False):
                module.__class__ = framed.__bases__[0]

    @property
    def backward_to_come(self) -> BackwardOf | None:
        """The backward of the forward that is running, if there is such a forward and it has one."""
        return self._entries[-1].backward if self._entries else None

    def forget(self) -> None:
        """Forget the forwards that are running: an exception crossed them."""
        self._entries.clear()

    def _install(self, module: nn.Module, sharded: ShardedModule | None) -> None:
        # A generated forward, that of an fx.GraphModule, is of no Python module.
        origin = getattr(type(module).forward, "__module__", None) or ""
        if self.is_chunk and origin.startswith("torch.nn."):
            # torch.compile does not capture the frame of a forward of torch's own and would
            # inline the call instead, with the hooks, which must run outside of the graph.
            module.__class__ = _framed(type(module))
        # The hooks lead to the window, and with it to everything that is scheduled.
        module.__dict__.update(dict.fromkeys(_REFUSED, _refuse_copy))
        self._state_dict_guards = (
            module.register_load_state_dict_pre_hook(self._before_loading),
            module.register_state_dict_pre_hook(self._before_saving),
        )
        before, after = self._before_forward, self._after_forward
        # Dynamo must neither trace these nor compile their frames on their own.
        before = torch._dynamo.disable(before)
        after = torch._dynamo.disable(after)

        is_chunk, together = self.is_chunk, self._together

        def pre_hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                if is_chunk or shows_sharded(module):
                    # The capture began outside: nobody has shown it the unsharded parameters.
                    torch._dynamo.graph_break(
                        "fsdp_fx: the hooks of a module that a context schedules run outside of "
                        "graphs; compile the chunk itself instead of a function around it"
                    )
                elif together:
                    # A graph would schedule each unit of the module on its own.
                    torch._dynamo.graph_break(
                        "fsdp_fx: a module that was adopted with together=[...] is entered outside "
                        "of graphs; compile the chunk without fullgraph=True"
                    )
                return None
            return before(module, args, kwargs, active_compile_callback())

        def post_hook(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            after(module, output)

        # The hooks run in this order: pre_hook, cast_inputs, forward, post_hook, cast_outputs.
        communication = self.window.communication
        device = communication.device if self.is_chunk and communication is not None else None
        install_input_cast(module, sharded, device)
        add_forward_pre_hook(module, HOOKS_KEY, pre_hook)
        add_forward_hook(module, HOOKS_KEY, post_hook)
        install_output_cast(module, sharded)
        skip_code(pre_hook.__code__)
        skip_code(post_hook.__code__)

    def _before_loading(self, module: nn.Module, *_: object) -> None:
        window = self.window
        if window.is_open:
            raise RuntimeError(
                f"load_state_dict() of {self.name} in the middle of window {window.number}: what is "
                "gathered would keep the weights of before; load between windows, after "
                "finish_grad_sync() or abort()"
            )

    def _before_saving(self, *_: object) -> None:
        # A method that an exception has ended may have left full parameters to be seen.
        self.window.abandon_methods()

    # Forward

    @property
    def running(self) -> bool:
        """Whether a forward of the module is running."""
        return bool(self._entries)

    @property
    def name(self) -> str:
        """What messages call the module: by its unit."""
        return self.units[0].spec.name.partition("[")[0] if self.units else self.chunk

    def is_training(self, module: nn.Module) -> bool:
        """Whether the chunk is in training mode, also where its modules are called without it.

        Args:
            module: the module, for where the chunk is gone.
        """
        root = self._root()
        return (module if root is None else root).training

    def _before_forward(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compile_callback: Callable[..., object] | None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        window = self.window
        evaluates = window.evaluating or bool(window.current and not window.current[-1].training)
        # With gradients off it is an evaluation, or what a reentrant checkpoint runs again.
        checkpoint = None
        if not (evaluates or torch.is_grad_enabled()):
            checkpoint = differentiated_function()
        opens_call = self.is_chunk or not window.current
        trains = self.is_training(module) and (torch.is_grad_enabled() or checkpoint is not None)
        recomputation = (
            current_graph_task() != -1 and not evaluates and (trains or not self.is_chunk)
        )
        if recomputation:
            opens_call = False
            self._watch_pass()
            again = window.repeat_call(self)
            whole = again is not None
            call = (
                again or window.backward_call or ForwardCall(self.chunk, window.number, -1, False)
            )
        elif opens_call:
            whole = True
            name = None if self.is_chunk else self.name
            call = window.open_call(self.chunk, trains, compile_callback is not None, name)
        else:
            whole = False
            call = window.current[-1]
            if call.compiled and self.units:
                call.ran_eagerly.append(self.units[0].spec.name)
        repeated = checkpoint is not None and call.training
        if repeated and whole:
            _Repetition.of(checkpoint, self).calls.append((self, call))
        # From here on the forward hook undoes what has been done, should a gather raise.
        handling, method = sys.exc_info()[1], window.method
        entry = _Entry(self, call, opens_call, recomputation, repeated, handling, method)
        self._entries.append(entry)
        if method is not None:
            window.method = None
            window.by_method.append(entry)
        for unit in self.units:
            # Before the gather: it need not hide what it would show.
            self._expose(unit, entry.exposed)
            entry.uses.append(
                window.begin_recomputation(unit) if recomputation else window.begin(unit, "F", call)
            )
        if compile_callback is not None and self.inner_units:
            self._require_our_backend(module, compile_callback)
            for unit in self.inner_units:
                if unit.is_alive:
                    self._expose(unit, entry.exposed)
            entry.spared = spare_parameters()
            if entry.spared is not None:
                entry.spared.__enter__()
        if not torch.is_grad_enabled():
            return None
        entry.backward = BackwardOf(self, call)
        if not self.units:
            return None
        return mark_inputs(entry.backward, args, kwargs)

    @staticmethod
    def _expose(unit: Unit, exposed: list[Unit]) -> None:
        unit.expose()
        exposed.append(unit)

    def _require_our_backend(
        self, module: nn.Module, compile_callback: Callable[..., object]
    ) -> None:
        # Another backend would compute with parameters that nobody has gathered.
        backend = compile_backend(compile_callback)
        if not getattr(backend, "schedules_units", False):
            name = getattr(backend, "__name__", type(backend).__name__)
            raise RuntimeError(
                f"{type(module).__name__} holds other units ({self.inner_units[0].spec.name}, "
                f'...) and is compiled with backend {name}: use torch.compile(backend="fsdp_fx"), '
                "or compile the units' modules one by one"
            )

    def _after_forward(self, module: nn.Module, output: Any) -> None:
        if not self._entries:
            return  # forgotten by abort()
        entry = self._entries[-1]
        self._leave(entry)
        window = self.window
        failed = output is None and sys.exc_info()[1] is not entry.handling
        if failed and not entry.recomputation and entry.call.training:
            # Early-stopping recomputation also ends in an exception, by design.
            window.fail(self._failure(module, entry.call))
        tensors = differentiable_tensors(output) if entry.backward is not None else []
        if entry.opened_call:
            window.close_call(entry.call, needs_backward=bool(tensors) or entry.repeated)
            if entry.call.compiled and not failed:
                self._report.compiled_call(entry.call)
        for tensor in tensors:
            refuse_parameter(module, tensor, self.units)
        if not entry.recomputation and (tensors or (entry.repeated and not failed)):
            outstanding = entry.call.outstanding
            for unit in self.units:
                outstanding[unit] = outstanding.get(unit, 0) + 1
        backward = entry.backward
        if backward is None:
            return
        for tensor in tensors:
            if tensor._base is not None and not is_marked(tensor):
                self._warn_of_view(module)
            watch_output(backward, tensor)

    def _leave(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        if entry.method is not None:
            self.window.by_method.remove(entry)
        if entry.spared is not None:
            entry.spared.__exit__(None, None, None)
        for unit in entry.exposed:
            unit.conceal()
        for use in reversed(entry.uses):
            self.window.end(use)

    def abandon(self, entry: _Entry) -> None:
        """Undo what a forward by a method began: an exception has ended it."""
        self._leave(entry)
        window, call = self.window, entry.call
        if entry.opened_call:
            window.suspend_call(call)
        # A recomputation that stops early also ends in an exception, by design.
        if call.training and not entry.recomputation and call.window == window.number:
            window.fail(f"an exception crossed a method of {self.name} in {call}")

    def _failure(self, module: nn.Module, call: ForwardCall) -> str:
        error = sys.exc_info()[1]
        unit = f" (unit {self.units[0].spec.name})" if self.units else ""
        text = "".join(f": {line}" for line in str(error).splitlines()[:1])
        return (
            f"an exception crossed the forward of {type(module).__name__}{unit} of {call} "
            f"({type(error).__name__}{text})"
        )

    def _warn_of_view(self, module: nn.Module) -> None:
        if self._warned_of_view or not self.units:
            return
        self._warned_of_view = True
        warnings.warn(
            f"{type(module).__name__} (unit {self.units[0].spec.name}) returned a view. Changing "
            "it in place (y += 1) would drop the hook that gathers the unit for its backward, "
            "which then fails: use y = y + 1, or return a clone",
            UserWarning,
            stacklevel=2,
        )

    # Backward

    def begin_repetition(self, calls: Sequence[tuple[object, ForwardCall]]) -> None:
        """The backward of a checkpoint around these calls begins; it runs them again."""
        for _, call in calls:
            refuse_double_backward(call, self.name)
        self.window.begin_repetition(calls)
        self._watch_pass()

    def begin_backward(
        self, backward: BackwardOf, units: Sequence[Unit], contributes: bool = True
    ) -> None:
        """Begin the backward use of each unit, and hear of the autograd pass's end.

        Args:
            backward: the backward.
            units: of the module's units those that it needs.
            contributes: whether its end completes the forward use of the module.

        Raises:
            RuntimeError: the backward is to be differentiated.
        """
        refuse_double_backward(backward.call, self.name)
        window = self.window
        window.enter_backward(backward.call)
        self._watch_pass()
        window.track_backward(backward)
        if window.input_half_of is not None:
            window.input_half_of[backward] = None
        for unit in units:
            # A checkpoint may run parts of the module again that have no hooks of their own.
            self._expose(unit, backward.exposed)
            use = window.begin(unit, "B", backward.call)
            use.contributes = contributes
            use.accumulates = accumulates(window, unit)
            backward.uses.append(use)

    def begin_weights(self, backward: BackwardOf) -> None:
        """Begin another backward use of each trainable unit: for the gradients of its weights."""
        window = self.window
        window.enter_backward(backward.call)
        for unit in self.units:
            if unit.spec.trainable:
                self._expose(unit, backward.exposed)
                use = window.begin(unit, "B", backward.call)
                use.contributes = True
                backward.uses.append(use)

    def end_backward(self, backward: BackwardOf) -> None:
        """End the backward use of each unit, or let it go on until its weight gradients."""
        window = self.window
        window.untrack_backward(backward)
        window.abandon_methods()
        uses, backward.uses = [use for use in backward.uses if use.open], []
        exposed, backward.exposed = backward.exposed, []
        if backward.call.window == window.number or not backward.call.training:
            for unit in exposed:
                unit.conceal()
        if self.delays_weight_gradients and backward.call.training:
            window.delay(self.units, backward.call, uses)
            return
        for use in uses:
            window.end(use)

    def _watch_pass(self) -> None:
        watch_pass(self.window, self._pass_end)


_framed_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _framed(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass whose forward is ours and calls that of ``cls``."""
    if cls in _framed_classes:
        return _framed_classes[cls]
    original = cls.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    def new(_: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        return cls(*args, **kwargs)  # a slice of a Sequential: without hooks, so without frame

    attributes = {
        "forward": forward,
        "__new__": new,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        _FRAMED: True,
    }
    framed = _framed_classes[cls] = type(cls.__name__, (cls,), attributes)
    return framed


def _refuse_copy(*_: object) -> NoReturn:
    raise TypeError(
        "a module that a context schedules cannot be copied or pickled: copy the model before "
        "fully_shard(), or build another one, shard it alike and load this one's state_dict()"
    )


def shows_sharded(module: nn.Module) -> bool:
    """Whether some parameter in ``module`` is shown as it is at rest."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())
