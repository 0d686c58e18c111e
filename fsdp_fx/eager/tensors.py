"""The tensors in what a module takes and returns: nested containers, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["differentiable_tensors", "map_tensors"]


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
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
            new = map_tensors(function, old)
            if new is not old:
                changes[field.name] = new
        return _with_fields(value, changes) if changes else value
    if isinstance(value, tuple) and type(value) is tuple:
        # The arguments themselves: each keeps its identity on its own.
        return tuple(map_tensors(function, item) for item in value)
    if type(value) is dict:
        items = {key: map_tensors(function, item) for key, item in value.items()}
        return value if all(items[key] is value[key] for key in value) else items
    leaves, structure = pytree.tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return value
    mapped = [map_tensors(function, leaf) for leaf in leaves]
    if all(new is old for new, old in zip(mapped, leaves, strict=True)):
        return value
    return pytree.tree_unflatten(mapped, structure)


def _with_fields(value: Any, changes: dict[str, Any]) -> Any:
    # Not by dataclasses.replace(), which refuses fields that __init__ does not take.
    result = copy.copy(value)
    for name, item in changes.items():
        object.__setattr__(result, name, item)
    return result


def differentiable_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value`` that need a gradient: nested containers, dataclasses."""
    # A nested function that calls itself would be a reference cycle, and keep the tensors.
    found: list[torch.Tensor] = []
    _find_differentiable(value, found)
    return found


def _find_differentiable(item: Any, found: list[torch.Tensor]) -> None:
    if isinstance(item, torch.Tensor):
        if item.requires_grad:
            found.append(item)
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        for field in dataclasses.fields(item):
            _find_differentiable(getattr(item, field.name), found)
    elif isinstance(item, (list, tuple)):
        for each in item:
            _find_differentiable(each, found)
    elif isinstance(item, dict):
        for each in item.values():
            _find_differentiable(each, found)
    else:
        leaves = pytree.tree_leaves(item)
        if not (len(leaves) == 1 and leaves[0] is item):
            for leaf in leaves:
                _find_differentiable(leaf, found)
