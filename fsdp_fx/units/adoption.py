"""From ``fully_shard`` calls to units and back: how FSDP2's hooks are taken off, and put on again.

What a context would silently ignore or get wrong is refused before anything is changed.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from .private_names import (
    FSDPCommContext,
    FSDPMeshInfo,
    FSDPModule,
    FSDPParam,
    FSDPParamGroup,
    FSDPState,
    FSDPStateContext,
    TrainingState,
    _get_module_fsdp_state,
    _register_group_forward_hooks,
)
from .references import hold_modules_strongly, hold_modules_weakly
from .unit import Communication, Unit, specify

__all__ = [
    "ShardedModule",
    "attach",
    "detach",
    "find_sharded_modules",
    "redirect_forward_methods",
    "require_detachable",
    "require_memory_statistics",
    "require_supported",
    "require_unshared",
]


@dataclass(frozen=True)
class ShardedModule:
    """One ``fully_shard`` call: its modules, its units, and its casts.

    Args:
        modules: weak references to the modules that were given to ``fully_shard``.
        units: its units; none if nested calls took every parameter, several if the
            parameters were placed on several meshes.
        input_dtype: floating-point inputs are cast to it, if given.
        output_dtype: floating-point outputs are cast to it, if given.
    """

    modules: tuple[weakref.ref[nn.Module], ...]
    units: tuple[Unit, ...]
    input_dtype: torch.dtype | None
    output_dtype: torch.dtype | None


def find_sharded_modules(root: nn.Module) -> Iterator[tuple[str, FSDPModule]]:
    """The modules under ``root`` on which ``fully_shard`` was called, by path, in order."""
    for path, module in root.named_modules():
        if isinstance(module, FSDPModule):
            yield path, module


# Where a group keeps its ``post_forward_mesh_info`` from before adoption.
_BEFORE = "_fsdp_fx_before"

# Where a state of torch 2.11, which knows one group, keeps the others.
_FURTHER_GROUPS = "_fsdp_fx_further_groups"


def _param_groups(state: FSDPState) -> list[FSDPParamGroup]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group
    return [] if group is None else [group, *getattr(state, _FURTHER_GROUPS, ())]


def _initialise(states: Sequence[FSDPState]) -> dict[FSDPParamGroup, str]:
    """Run FSDP2's lazy initialisation, with one group per dtype where it wants that.

    Args:
        states: of each ``fully_shard`` call in a tree, parents first.

    Returns:
        What is to be added to the name of each group that is one of several of its call.
    """
    suffixes: dict[FSDPParamGroup, str] = {}
    for state in states:
        groups: list[FSDPParamGroup] = []
        before = _param_groups(state)
        for index, group in enumerate(before):
            parts = _by_dtype(group) if state._is_root is None else [group]
            for part in parts:
                marks = [str(index)] if len(before) > 1 else []
                if len(parts) > 1:
                    dtype = _shown(part.fsdp_params[0]).dtype
                    marks.append(str(dtype).removeprefix("torch."))
                suffixes[part] = f"[{', '.join(marks)}]" if marks else ""
            groups += parts
        if len(groups) > len(before):
            if hasattr(state, "_fsdp_param_groups"):
                state._fsdp_param_groups[:] = groups
            else:
                setattr(state, _FURTHER_GROUPS, groups[1:])
    for state in states:
        # Modules come parents first, so this initialises each topmost one; the
        # states below it are then initialised already.
        if state._is_root is None:
            state._lazy_init()
    for state in states:
        for group in getattr(state, _FURTHER_GROUPS, ()):
            group.comm_ctx = state._comm_ctx
            group._module_fqn = _param_groups(state)[0]._module_fqn
            group.lazy_init()
    return suffixes


def _by_dtype(group: FSDPParamGroup) -> list[FSDPParamGroup]:
    """The group, cut into one for each dtype if it trains parameters of several.

    FSDP2 refuses such a group: it reduces in one dtype. Dtypes are in the order of
    the parameters, which is the same on every rank.
    """
    parts: dict[torch.dtype, list[FSDPParam]] = {}
    trained: set[torch.dtype] = set()
    for parameter in group.fsdp_params:
        shown = _shown(parameter)
        parts.setdefault(shown.dtype, []).append(parameter)
        if shown.requires_grad:
            trained.add(shown.dtype)
    if len(trained) < 2:
        return [group]
    groups = [group, *(copy.copy(group) for _ in range(len(parts) - 1))]
    for part, parameters in zip(groups, parts.values(), strict=True):
        part.fsdp_params = parameters
        # These belong to one group each, and nothing is in them before the initialisation.
        part._module_to_pre_save_state_dict_hook_handle = {}
        part._module_to_pre_load_state_dict_hook_handle = {}
        part._post_forward_indices = []
    return groups


def _shown(parameter: FSDPParam) -> nn.Parameter:
    """What the module shows; FSDP2 takes that over at its lazy initialisation."""
    info = parameter._module_info
    shown: nn.Parameter = getattr(info.module, info.param_name)
    return shown


def require_supported(root: nn.Module) -> None:
    """Raise for what a context would otherwise silently ignore or get wrong.

    Args:
        root: a module with at least one ``fully_shard`` call in its tree.

    Raises:
        RuntimeError: a module is in the middle of a forward or backward under plain FSDP2.
        ValueError: a module uses an FSDP2 option that has no effect here; ``root`` is inside of
            a module that plain FSDP2 schedules.
    """
    states = _states(root)
    if not any(_param_groups(state) for _, state in states):
        raise ValueError(
            f"{type(root).__name__} has no parameters that fully_shard() manages: call it on "
            "modules with parameters"
        )
    _refuse_inner(root, [state for _, state in states])
    for path, state in states:
        _refuse_unsupported(path, state)
        around = any(
            not other or path.startswith(other + ".") for other, _ in states if other != path
        )
        if len(state._modules) > 1 and not around:
            raise ValueError(
                f"module {path!r} shares one fully_shard() call with others and no unit is "
                f"around them: call fully_shard() on {type(root).__name__} too, after them"
            )


def require_memory_statistics(chunks: Sequence[nn.Module]) -> None:
    """Raise where nobody can say how much memory is allocated.

    Args:
        chunks: modules with ``fully_shard`` calls in their trees.

    Raises:
        ValueError: a unit is on the CPU.
    """
    for chunk in chunks:
        for path, state in _states(chunk):
            for group in _param_groups(state):
                if group.device.type == "cpu":
                    raise ValueError(
                        f'memory_budget="auto" fills the room under the recorded peak of allocated '
                        f"memory, and module {path or 'root'!r} is on the CPU, which reports none: "
                        "give memory_budget in bytes"
                    )


def require_unshared(chunks: Sequence[nn.Module]) -> None:
    """Raise for a tied parameter that became two: each would be trained on its own.

    Torch 2.11 does not say what a sharded parameter was before, and cannot be asked.

    Args:
        chunks: every chunk of the context, in the order of their names.

    Raises:
        ValueError: a parameter was sharded in two ``fully_shard`` calls.
    """
    seen: dict[int, str] = {}
    for index, chunk in enumerate(chunks):
        for path, state in _states(chunk):
            unit = ".".join((f"c{index}", path)) if path else f"c{index}"
            for group in _param_groups(state):
                for parameter in group.fsdp_params:
                    original = getattr(parameter, "_orig_param_uid", None)
                    if original is None:
                        continue
                    name = f"{parameter._module_info.param_name!r} of unit {unit}"
                    if original in seen:
                        raise ValueError(
                            f"parameter {name} was tied to {seen[original]}, and fully_shard() "
                            "made two of it: give the modules that share it to one "
                            "fully_shard([...]) call, in one chunk"
                        )
                    seen[original] = name


def _states(root: nn.Module) -> list[tuple[str, FSDPState]]:
    """FSDP2's state of each ``fully_shard`` call under ``root``, by its first module's path."""
    states: list[tuple[str, FSDPState]] = []
    for path, module in find_sharded_modules(root):
        state = _get_module_fsdp_state(cast(nn.Module, module))
        if state is not None and all(state is not known for _, known in states):
            states.append((path, state))
    return states


def _refuse_inner(root: nn.Module, states: Sequence[FSDPState]) -> None:
    # FSDP2's end of a backward is that of a root, for every state it has found below.
    for state in states:
        outer = next((each for each in state._state_ctx.all_states if each._is_root), None)
        if outer is not None and outer not in states:
            raise ValueError(
                f"{type(root).__name__} is inside of {type(outer._modules[0]).__name__}, which "
                "plain FSDP2 has run as a whole and would go on to schedule: adopt that, or call "
                "fully_shard() on nothing around the chunks"
            )


def _refuse_unsupported(path: str, state: FSDPState) -> None:
    where = f"module {path or 'root'!r}"
    if state._training_state is not TrainingState.IDLE:
        raise RuntimeError(
            f"{where} is in the middle of a forward or backward under plain FSDP2; "
            "adopt modules before their first forward, or between steps"
        )
    for phase, prefetched in (
        ("forward", state._states_to_forward_prefetch),
        ("backward", state._states_to_backward_prefetch),
    ):
        if prefetched:
            raise ValueError(
                f"{where}: set_modules_to_{phase}_prefetch() has no effect here, the program "
                f"prefetches; remove it ({phase}_prefetch of the context says how far ahead)"
            )
    if state._state_ctx.post_optim_event is not None:
        raise ValueError(
            f"{where}: set_post_optim_event() has no effect here, a window's gathers wait for the "
            "stream that it begins on; remove it"
        )
    for group in _param_groups(state):
        if not isinstance(group.mesh_info, FSDPMeshInfo):
            raise ValueError(
                f"{where} is replicated and not sharded, so that there is nothing to gather; leave "
                "it to DistributedDataParallel, or give fully_shard() a mesh dimension to shard over"
            )
        unmaterialised = next(
            (each for each in group.fsdp_params if _shown(each).device.type == "meta"), None
        )
        if unmaterialised is not None:
            raise ValueError(
                f"{where}: parameter {unmaterialised._module_info.param_name!r} is on the meta "
                "device; call to_empty() and initialise or load the weights before adopt()"
            )
        if not group.unshard_in_backward:
            raise ValueError(
                f"{where}: set_unshard_in_backward(False) has no effect here; remove it"
            )
        # A context that is gone has left it so.
        if not (group.reshard_after_backward or hasattr(group, _BEFORE)):
            raise ValueError(
                f"{where}: set_reshard_after_backward(False) has no effect here; remove it, and "
                "give memory_budget to the context, which keeps what is worth keeping"
            )
        if group.unshard_async_op:
            raise ValueError(
                f"{where}: _set_unshard_async_op(True) has no effect here, the program says when "
                "a gather starts; remove it"
            )
        if not group.reduce_grads:
            raise ValueError(
                f"{where}: set_requires_gradient_sync(False) has no effect here; remove it, or "
                'build the context with reduce_gradients="per_window"'
            )
        if not group.all_reduce_grads:
            raise ValueError(
                f"{where}: set_requires_all_reduce(False) has no effect here, a window all-reduces "
                "once; remove it"
            )
        mesh = group.post_forward_mesh_info
        if mesh is not None and mesh is not group.mesh_info and mesh != group.mesh_info:
            raise ValueError(
                f"{where}: reshard_after_forward as an int has no effect here, the program "
                "decides when a unit is freed; leave it out"
            )


def redirect_forward_methods(
    module: nn.Module,
    enter: Callable[[nn.Module, Any, Any], tuple[Any, Any]],
    leave: Callable[[nn.Module, Any, Any], Any],
) -> None:
    """Have methods that ``register_fsdp_forward_method`` wraps call these and not FSDP2's hooks.

    Whether they were wrapped before or will be later.

    Args:
        module: a module that ``fully_shard`` was called on.
        enter: called with the module, arguments and keyword arguments; returns both.
        leave: called with the module, arguments and output; returns the output.
    """
    state: Any = _get_module_fsdp_state(module)
    # Looked up on the state at each call; those of the class are underneath.
    state._pre_forward, state._post_forward = enter, leave


def attach(
    root: nn.Module, chunk: str, communication: Communication | None
) -> tuple[list[ShardedModule], Communication]:
    """Take FSDP2's own hooks off the modules under ``root`` and make units of its groups.

    Args:
        root: a module with at least one ``fully_shard`` call in its tree.
        chunk: the chunk's name; unit names start with it.
        communication: what the context's other chunks share, or None for the first.

    Returns:
        The sharded modules in module order, and the communication they now share.

    Raises:
        RuntimeError, ValueError: see :func:`require_supported`.
    """
    require_supported(root)
    states = _states(root)
    kept = {
        state: not state._auto_reshard_after_forward
        and all(group.post_forward_mesh_info is None for group in _param_groups(state))
        for _, state in states
    }
    for _, state in states:
        for group in _param_groups(state):
            if state._is_root is None or not hasattr(group, _BEFORE):
                # FSDP2's initialisation changes that of a root. Groups that it cuts have it, too.
                setattr(group, _BEFORE, group.post_forward_mesh_info)
    suffixes = _initialise([state for _, state in states])
    result: list[ShardedModule] = []
    for path, state in states:
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        units = []
        for group in _param_groups(state):
            if communication is None:
                communication = Communication(group.comm_ctx, group.device)
            group.comm_ctx = communication._comm_context
            # The program says when a unit is freed, also after its backward.
            group.reshard_after_backward = False
            group._to_sharded()
            # Saving and loading would free a unit that is in use or prefetched. Modules
            # show the sharded parameters at those times anyway.
            for handle in (
                *group._module_to_pre_save_state_dict_hook_handle.values(),
                *group._module_to_pre_load_state_dict_hook_handle.values(),
            ):
                handle.remove()
            name = (f"{chunk}.{path}" if path else chunk) + suffixes[group]
            units.append(Unit(group, specify(group, name, chunk, kept[state]), communication))
        if communication is not None:
            state._comm_ctx = communication._comm_context
        hold_modules_weakly(state, _param_groups(state))
        policy = state._mp_policy
        result.append(
            ShardedModule(
                modules=tuple(weakref.ref(module) for module in state._modules),
                units=tuple(units),
                input_dtype=policy.param_dtype if policy.cast_forward_inputs else None,
                output_dtype=policy.output_dtype,
            )
        )
    for _, module in find_sharded_modules(root):
        # Dynamo treats modules with this mark specially (it traces their hooks
        # together with the call); units have hooks of their own.
        cast(Any, module)._is_fsdp_managed_module = False
    assert communication is not None
    communication.keep_reduction_inputs(
        getattr(group, "reduce_scatter_max_input_buffers", 1)
        for _, state in states
        for group in _param_groups(state)
    )
    return result, communication


def require_detachable(root: nn.Module) -> None:
    """Raise where plain FSDP2 could not go on with what :func:`detach` would leave.

    Raises:
        RuntimeError: a unit's module trains parameters of several dtypes, on a torch whose
            FSDP2 reduces one per ``fully_shard`` call.
    """
    for path, state in _states(root):
        if hasattr(state, _FURTHER_GROUPS):
            raise RuntimeError(
                f"module {path or 'root'!r} trains parameters of several dtypes, which FSDP2 of "
                f"torch {torch.__version__} refuses by itself: it stays with its context"
            )


def detach(root: nn.Module) -> None:
    """Undo :func:`attach`: FSDP2's own hooks act again, from its lazy initialisation on.

    Args:
        root: what :func:`attach` was given, with every unit at rest.
    """
    for _, state in _states(root):
        groups = _param_groups(state)
        hold_modules_strongly(state, groups)
        private: Any = state
        for group in groups:
            group.post_forward_mesh_info = group.__dict__.pop(_BEFORE)
            group.comm_ctx = FSDPCommContext()
            group.reshard_after_backward = True
            group._module_fqn = None
            group._training_state = TrainingState.IDLE
        for name in ("_pre_forward", "_post_forward"):
            private.__dict__.pop(name, None)
        private._is_root = None
        private._state_ctx = FSDPStateContext()
        private._comm_ctx = FSDPCommContext()
        _register_hooks(state)
    for _, module in find_sharded_modules(root):
        cast(Any, module)._is_fsdp_managed_module = True


def _register_hooks(state: Any) -> None:
    modules = state._modules
    if len(modules) == 1:
        state._pre_forward_hook_handle = modules[0].register_forward_pre_hook(
            state._pre_forward, prepend=True, with_kwargs=True
        )
        state._post_forward_hook_handle = modules[0].register_forward_hook(state._post_forward)
        return
    arguments = [modules, state._pre_forward, state._post_forward, state._modules_to_run_forward]
    if len(inspect.signature(_register_group_forward_hooks).parameters) > len(arguments):
        arguments.append(state._cast_output_dtype)  # since torch 2.13
    handle = _register_group_forward_hooks(*arguments)
    state._pre_forward_hook_handle = state._post_forward_hook_handle = handle
