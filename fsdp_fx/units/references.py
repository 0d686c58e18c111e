"""FSDP2's references to modules, made weak while a context schedules them.

A deleted model is then gone at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, overload

from torch import nn

from .private_names import FSDPParamGroup, FSDPState, ParamModuleInfo

__all__ = ["hold_modules_strongly", "hold_modules_weakly"]


class _WeakModules(Sequence[nn.Module]):
    """The modules of one ``fully_shard`` call, in the place of FSDP2's tuple of them."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._references = tuple(weakref.ref(module) for module in modules)

    def __len__(self) -> int:
        return len(self._references)

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[nn.Module]: ...
    def __getitem__(self, index: int | slice) -> nn.Module | Sequence[nn.Module]:
        if isinstance(index, slice):
            return tuple(_alive(reference) for reference in self._references[index])
        return _alive(self._references[index])


class _WeakModuleInfo:
    """Where a parameter is shown, in the place of FSDP2's ``ParamModuleInfo``.

    Args:
        module: a module that shows the parameter.
        param_name: its name there.
        shared_modules: the other modules that show it.
        shared_param_names: its name in each.
    """

    def __init__(
        self,
        module: nn.Module,
        param_name: str,
        shared_modules: Sequence[nn.Module],
        shared_param_names: Sequence[str],
    ) -> None:
        self._module = weakref.ref(module)
        self.param_name = param_name
        self._shared_modules = tuple(weakref.ref(shared) for shared in shared_modules)
        self.shared_param_names = list(shared_param_names)

    @property
    def module(self) -> nn.Module:
        """The module."""
        return _alive(self._module)

    @property
    def shared_modules(self) -> list[nn.Module]:
        """The other modules."""
        return [_alive(reference) for reference in self._shared_modules]


def _alive(reference: weakref.ref[nn.Module]) -> nn.Module:
    # A module that was taken out of the tree is nobody's: what is set on it is lost.
    module = reference()
    return nn.Module() if module is None else module


def hold_modules_weakly(state: FSDPState, groups: Sequence[FSDPParamGroup]) -> None:
    """Undo FSDP2's reference cycles through ``state``, which each of its modules holds.

    Otherwise a deleted model would keep its memory until Python next collects garbage.
    Nothing that is dropped here is used while FSDP2's hooks are off.
    """
    private: Any = state
    private._modules = _WeakModules(private._modules)
    private._modules_to_run_forward.clear()
    private._state_ctx.all_states.clear()
    private._states_to_forward_prefetch.clear()
    private._states_to_backward_prefetch.clear()
    for group in groups:
        private_group: Any = group
        private_group.modules = private._modules
        # Its length tells FSDP2 that the hooks, which have been removed, were registered.
        for name in (
            "_module_to_pre_save_state_dict_hook_handle",
            "_module_to_pre_load_state_dict_hook_handle",
        ):
            handles = getattr(group, name)
            setattr(group, name, weakref.WeakKeyDictionary(handles))
        for parameter in group.fsdp_params:
            info: Any = parameter._module_info
            private_parameter: Any = parameter
            private_parameter._module_info = _WeakModuleInfo(
                info.module, info.param_name, info.shared_modules, info.shared_param_names
            )


def hold_modules_strongly(state: FSDPState, groups: Sequence[FSDPParamGroup]) -> None:
    """Undo :func:`hold_modules_weakly`, for a state that is initialised again."""
    private: Any = state
    private._modules = tuple(private._modules)
    for group in groups:
        private_group: Any = group
        private_group.modules = private._modules
        private_group._module_to_pre_save_state_dict_hook_handle = {}
        private_group._module_to_pre_load_state_dict_hook_handle = {}
        for parameter in group.fsdp_params:
            info: Any = parameter._module_info
            private_parameter: Any = parameter
            private_parameter._module_info = ParamModuleInfo(
                info.module, info.param_name, info.shared_modules, list(info.shared_param_names)
            )
