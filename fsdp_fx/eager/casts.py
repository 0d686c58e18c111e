"""FSDP2's casts and moves of inputs, and casts of outputs, in a form that is traced.

They go with its hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..torch_internals import (
    add_forward_hook,
    add_forward_pre_hook,
    remove_forward_hooks,
    skip_code,
)
from ..units import ShardedModule
from .tensors import map_tensors

__all__ = [
    "CAST_KEY",
    "install_casts",
    "install_input_cast",
    "install_output_cast",
    "remove_casts",
]

CAST_KEY = "fsdp_fx.cast"


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor


def install_casts(module: nn.Module, sharded: ShardedModule) -> None:
    """Cast inputs and outputs as FSDP2 does, and nothing else: others schedule the units."""
    install_input_cast(module, sharded)
    install_output_cast(module, sharded)


def install_input_cast(
    module: nn.Module, sharded: ShardedModule | None, device: torch.device | None = None
) -> None:
    """Cast and move the inputs, if FSDP2 would: before the hooks that are there already.

    Args:
        module: the module.
        sharded: its ``fully_shard`` call; without one nothing is done.
        device: of a root, whose inputs FSDP2 moves to it unless it is the CPU.
    """
    if sharded is None:
        return
    if device is not None and device.type == "cpu":
        device = None
    if device is not None or sharded.input_dtype is not None:
        add_forward_pre_hook(module, CAST_KEY, _input_cast(sharded.input_dtype, device))


def install_output_cast(module: nn.Module, sharded: ShardedModule | None) -> None:
    """Cast the outputs, if FSDP2 would: after the hooks that are there already."""
    if sharded is not None and sharded.output_dtype is not None:
        add_forward_hook(module, CAST_KEY, _output_cast(sharded.output_dtype))


def remove_casts(module: nn.Module) -> None:
    """Undo what this module's functions installed."""
    remove_forward_hooks(module, CAST_KEY)


def _input_cast(dtype: torch.dtype | None, device: torch.device | None) -> Callable[..., Any]:
    """FSDP2's move of inputs and cast of floating-point ones, in a form that is traced."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if device is not None and tensor.device != device:
            tensor = tensor.to(device)
        return tensor if dtype is None else _cast(tensor, dtype)

    def cast_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return map_tensors(convert, args), map_tensors(convert, kwargs)

    skip_code(cast_inputs.__code__)
    return cast_inputs


def _output_cast(dtype: torch.dtype) -> Callable[..., Any]:
    """FSDP2's cast of floating-point outputs to ``output_dtype``, in a form that is traced."""

    def cast_outputs(module: nn.Module, args: Any, output: Any) -> Any:
        return map_tensors(lambda tensor: _cast(tensor, dtype), output)

    skip_code(cast_outputs.__code__)
    return cast_outputs
