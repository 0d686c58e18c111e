"""What a user's hooks on saved tensors see of a compiled forward.

AOTAutograd saves the inputs of a backward when its forward graph has run. The units that the
graph has gathered are freed by then, and hooks that pack what is saved, to move activations
to the host for example, would read memory that is gone. Parameters are therefore handed
through; the backward graph gathers them anyway. Activations reach the hooks as always.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from ..torch_internals import saved_tensors_hooks
from ..units import unit_of_tensor

__all__ = ["spare_parameters"]


def spare_parameters() -> AbstractContextManager[Any] | None:
    """Keeps the hooks on saved tensors that are active from the parameters of units.

    Returns:
        To be entered around a forward; None if there are no such hooks, or only those of a
        checkpoint, which read nothing.
    """
    hooks = saved_tensors_hooks()
    if hooks is None:
        return None
    pack, unpack = hooks
    if getattr(pack, "__module__", None) == "torch.utils.checkpoint":
        return None

    def pack_activation(tensor: torch.Tensor) -> tuple[bool, Any]:
        spared = unit_of_tensor(tensor) is not None
        return spared, tensor if spared else pack(tensor)

    def unpack_activation(packed: tuple[bool, Any]) -> Any:
        spared, value = packed
        return value if spared else unpack(value)

    return torch.autograd.graph.saved_tensors_hooks(pack_activation, unpack_activation)
