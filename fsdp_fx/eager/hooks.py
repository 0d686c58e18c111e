"""Hooks on modules and tensors that tell the window what compute does.

For each module that ``fully_shard`` was called on, and for each chunk:

- the forward pre-hook begins a use of the module's units and lets the modules show
  the unsharded parameters; the forward hook ends it;
- a hook on each differentiable output begins the backward use, when the first
  gradient arrives; an identity on the differentiable inputs ends it, when the
  module's gradients have all been computed; the end of the autograd pass ends what
  is left (inputs that need no gradient, outputs that were not in the loss).

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
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..torch_internals import (
    active_compile_callback,
    add_forward_hook,
    add_forward_pre_hook,
    compile_backend,
    current_graph_task,
    queue_callback,
    remove_forward_hooks,
    skip_code,
)
from ..units import ShardedModule, Unit, unit_of_tensor
from ..window import ForwardCall, Use, Window

__all__ = ["ModuleHooks", "differentiable_tensors"]

_KEY = "fsdp_fx"
_CAST_KEY = "fsdp_fx.cast"


def _map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply ``function`` to every tensor in nested containers and dataclasses.

    A container in which nothing changes stays the same object: a module may be given a
    list to append to.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {}
        for field in dataclasses.fields(value):
            old = getattr(value, field.name)
            new = _map_tensors(function, old)
            if new is not old:
                changes[field.name] = new
        return dataclasses.replace(value, **changes) if changes else value
    if isinstance(value, tuple) and type(value) is tuple:
        # The arguments themselves: each keeps its identity on its own.
        return tuple(_map_tensors(function, item) for item in value)
    if type(value) is dict:
        return {key: _map_tensors(function, item) for key, item in value.items()}
    leaves, structure = pytree.tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return value
    mapped = [_map_tensors(function, leaf) for leaf in leaves]
    if all(new is old for new, old in zip(mapped, leaves, strict=True)):
        return value
    return pytree.tree_unflatten(mapped, structure)


def differentiable_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value`` that need a gradient: nested containers, dataclasses."""
    found: list[torch.Tensor] = []

    def visit(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            if item.requires_grad:
                found.append(item)
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            for field in dataclasses.fields(item):
                visit(getattr(item, field.name))
        elif isinstance(item, (list, tuple)):
            for each in item:
                visit(each)
        elif isinstance(item, dict):
            for each in item.values():
                visit(each)
        else:
            leaves = pytree.tree_leaves(item)
            if not (len(leaves) == 1 and leaves[0] is item):
                for leaf in leaves:
                    visit(leaf)

    visit(value)
    return found


class BackwardOf:
    """The backward of one forward through a module, shared by its tensor hooks.

    Args:
        hooks: the module's hooks.
        call: the forward call it belongs to.
        counted: whether the forward counts as outstanding until the backward ends.
    """

    __slots__ = ("call", "counted", "hooks", "uses")

    def __init__(self, hooks: ModuleHooks, call: ForwardCall, counted: bool) -> None:
        self.hooks = hooks
        self.call = call
        self.counted = counted
        self.uses: list[Use] = []

    def begin(self) -> None:
        """The first gradient of an output has arrived."""
        if not any(use.open for use in self.uses):
            self.uses.clear()
            self.hooks.begin_backward(self)

    def end(self) -> None:
        """The gradients of the inputs have been computed."""
        window = self.hooks.window
        uses, self.uses = self.uses, []
        for use in uses:
            if use.open:
                window.end(use)


class _OutputHook:
    """The hook on one differentiable tensor, for every module whose output it is.

    A parent that returns what its child returned has the same tensor as output. The
    parent's backward begins first, as it would if they differed. A parent that has
    changed it in place has another: the gradient of what the tensor was comes later.
    """

    __slots__ = ("backwards", "version")
    _ATTRIBUTE = "_fsdp_fx_output_hook"

    def __init__(self, version: int) -> None:
        self.backwards: list[BackwardOf] = []
        self.version = version

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _OutputHook:
        """The tensor's hook; registered if it has none, as it is now."""
        hook: _OutputHook | None = getattr(tensor, cls._ATTRIBUTE, None)
        if hook is None or hook.version != tensor._version:
            hook = cls(tensor._version)
            setattr(tensor, cls._ATTRIBUTE, hook)
            tensor.register_hook(hook)
        return hook

    def __call__(self, gradient: torch.Tensor) -> None:
        for backward in reversed(self.backwards):
            backward.begin()


class _EndOfBackward(torch.autograd.Function):
    """The identity on a module's inputs; its backward is the end of the module's."""

    @staticmethod
    def forward(ctx: Any, backward: BackwardOf, *tensors: torch.Tensor) -> Any:
        ctx.backward_of = backward
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.backward_of.end()
        return (None, *gradients)


@dataclasses.dataclass(eq=False, slots=True)
class _Entry:
    """One forward of a module that is running."""

    call: ForwardCall
    opened_call: bool
    recomputation: bool
    uses: tuple[Use, ...]
    backward: BackwardOf | None
    exposed: tuple[Unit, ...]
    handling: BaseException | None  # what the caller of the forward is handling


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
        is_chunk: whether the module is the chunk, whose forward is a call.
        pass_end: called when an outermost autograd pass ends.
        ran_eagerly: called with a unit's and a chunk's name when the unit's hooks fire
            inside of a chunk that is compiled; with None where nothing was captured.
    """

    def __init__(
        self,
        window: Window,
        module: nn.Module,
        chunk: str,
        units: Sequence[Unit],
        inner_units: Sequence[Unit],
        sharded: ShardedModule | None,
        is_chunk: bool,
        pass_end: Callable[[], None],
        ran_eagerly: Callable[[str | None, str], None],
    ) -> None:
        self.window = window
        self.module = weakref.ref(module)
        self.chunk = chunk
        self.units = tuple(units)
        self.inner_units = tuple(inner_units)
        self.is_chunk = is_chunk
        self._pass_end = pass_end
        self._ran_eagerly = ran_eagerly
        self._entries: list[_Entry] = []
        self._warned_of_view = False
        self._install(module, sharded)

    def remove(self) -> None:
        """Take the hooks off the module."""
        module = self.module()
        if module is not None:
            for key in (_KEY, _CAST_KEY):
                remove_forward_hooks(module, key)
            if getattr(module.__dict__.get("forward"), "__func__", None) is _forward_frame:
                del module.forward

    def forget(self) -> None:
        """Forget the forwards that are running: an exception crossed them."""
        self._entries.clear()

    def _install(self, module: nn.Module, sharded: ShardedModule | None) -> None:
        if self.is_chunk and type(module).forward.__module__.startswith("torch.nn."):
            # torch.compile does not capture the frame of a forward of torch's own and would
            # inline the call instead, with the hooks, which must run outside of the graph.
            module.forward = MethodType(_forward_frame, module)
        before, after = self._before_forward, self._after_forward
        # Dynamo must neither trace these nor compile their frames on their own.
        before = torch._dynamo.disable(before)
        after = torch._dynamo.disable(after)

        is_chunk = self.is_chunk

        def pre_hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                if is_chunk or _shows_sharded(module):
                    # The capture began outside: nobody has shown it the unsharded parameters.
                    torch._dynamo.graph_break(
                        "fsdp_fx: the hooks of a module that a context schedules run outside of "
                        "graphs; compile the chunk itself instead of a function around it"
                    )
                return None
            return before(module, args, kwargs, active_compile_callback())

        def post_hook(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            after(module, output)

        # The hooks run in this order: pre_hook, cast_inputs, forward, post_hook, cast_outputs.
        if sharded is not None and sharded.input_dtype is not None:
            add_forward_pre_hook(module, _CAST_KEY, _input_cast(sharded.input_dtype))
        add_forward_pre_hook(module, _KEY, pre_hook)
        add_forward_hook(module, _KEY, post_hook)
        if sharded is not None and sharded.output_dtype is not None:
            add_forward_hook(module, _CAST_KEY, _output_cast(sharded.output_dtype))
        skip_code(pre_hook.__code__)
        skip_code(post_hook.__code__)

    # Forward

    def _before_forward(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compile_callback: Callable[..., object] | None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        window = self.window
        recomputation = current_graph_task() != -1
        if recomputation:
            opened_call = False
            uses = tuple(window.begin_recomputation(unit) for unit in self.units)
            call = window.backward_call or ForwardCall(self.chunk, window.number, -1, False)
        else:
            opened_call = self.is_chunk or not window.current
            if opened_call:
                training = module.training and torch.is_grad_enabled()
                call = window.open_call(self.chunk, training, compile_callback is not None)
            else:
                call = window.current[-1]
                if call.compiled and self.units:
                    self._ran_eagerly(self.units[0].spec.name, self.chunk)
            uses = tuple(window.begin(unit, "F", call) for unit in self.units)
        exposed = self.units
        if compile_callback is not None and self.inner_units:
            self._require_our_backend(module, compile_callback)
            exposed = self.units + self.inner_units
        for unit in exposed:
            unit.expose()
        handling = sys.exc_info()[1]
        entry = _Entry(call, opened_call, recomputation, uses, None, exposed, handling)
        self._entries.append(entry)
        if not torch.is_grad_enabled():
            return None
        entry.backward = BackwardOf(self, call, counted=not recomputation)
        if not self.units:
            return None
        tensors = differentiable_tensors((args, kwargs))
        if not tensors:
            return None
        marked = iter(_EndOfBackward.apply(entry.backward, *tensors))
        result: tuple[tuple[Any, ...], dict[str, Any]] = _map_tensors(
            lambda tensor: next(marked) if tensor.requires_grad else tensor, (args, kwargs)
        )
        return result

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
        entry = self._entries.pop()
        window = self.window
        for unit in entry.exposed:
            unit.conceal()
        for use in reversed(entry.uses):
            window.end(use)
        failed = output is None and sys.exc_info()[1] is not entry.handling
        if failed and not entry.recomputation and entry.call.training:
            # Early-stopping recomputation also ends in an exception, by design.
            window.fail(f"an exception crossed the forward of {type(module).__name__}")
        tensors = differentiable_tensors(output) if entry.backward is not None else []
        if entry.opened_call:
            window.close_call(entry.call, needs_backward=bool(tensors))
            if entry.call.compiled and not entry.call.captured and not failed:
                self._ran_eagerly(None, self.chunk)
        for tensor in tensors:
            owner = unit_of_tensor(tensor)
            if owner is not None and owner in self.units:
                raise RuntimeError(
                    f"{type(module).__name__} returns a parameter of unit {owner.spec.name}, or a "
                    "view of one, and its memory is given back now: return a copy (.clone())"
                )
        if not tensors:
            return
        backward = entry.backward
        assert backward is not None
        if backward.counted:
            outstanding = entry.call.outstanding
            for unit in self.units:
                outstanding[unit] = outstanding.get(unit, 0) + 1
        for tensor in tensors:
            if tensor._base is not None:
                self._warn_of_view(module)
            _OutputHook.of(tensor).backwards.append(backward)

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

    def begin_backward(self, backward: BackwardOf) -> None:
        """Begin the backward use of each unit, and hear of the autograd pass's end."""
        window = self.window
        window.enter_backward(backward.call)
        self._watch_pass()
        for unit in self.units:
            use = window.begin(unit, "B", backward.call)
            use.contributes = backward.counted
            window.track_backward(use)
            backward.uses.append(use)

    def _watch_pass(self) -> None:
        task = current_graph_task()
        window, pass_end = self.window, self._pass_end
        if not window.enter_pass(task):
            return

        def ended() -> None:
            if window.leave_pass(task):
                pass_end()

        queue_callback(ended)


def _forward_frame(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _shows_sharded(module: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor


def _input_cast(dtype: torch.dtype) -> Callable[..., Any]:
    """FSDP2's cast of floating-point inputs to ``param_dtype``, in a form that is traced."""

    def cast_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (
            _map_tensors(lambda tensor: _cast(tensor, dtype), args),
            _map_tensors(lambda tensor: _cast(tensor, dtype), kwargs),
        )

    skip_code(cast_inputs.__code__)
    return cast_inputs


def _output_cast(dtype: torch.dtype) -> Callable[..., Any]:
    """FSDP2's cast of floating-point outputs to ``output_dtype``, in a form that is traced."""

    def cast_outputs(module: nn.Module, args: Any, output: Any) -> Any:
        return _map_tensors(lambda tensor: _cast(tensor, dtype), output)

    skip_code(cast_outputs.__code__)
    return cast_outputs
