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
    list to append to. One that changes is copied.
    """
    return _map(function, value)[0]


def _map(function: Callable[[torch.Tensor], Any], value: Any) -> tuple[Any, bool]:
    """The mapped value, and whether it is another object.

    Traced by torch.compile, which compares tensors by identity, but not containers.
    """
    if isinstance(value, torch.Tensor):
        new = function(value)
        return new, new is not value
    if value is None or isinstance(value, bool | int | float | str):
        # The compiler of torch 2.11 does not trace what is asked of others below.
        return value, False
    if type(value) is tuple or type(value) is dict:
        # The arguments themselves: each keeps its identity on its own.
        items = value.values() if type(value) is dict else value
        mapped = [_map(function, item) for item in items]
        if not any([changed for _, changed in mapped]):
            return value, False
        news = [new for new, _ in mapped]
        return (dict(zip(value, news, strict=True)) if type(value) is dict else tuple(news)), True
    leaves, structure = pytree.tree_flatten(value)
    if not structure.is_leaf():
        mapped = [_map(function, leaf) for leaf in leaves]
        if not any([changed for _, changed in mapped]):
            return value, False
        return pytree.tree_unflatten([new for new, _ in mapped], structure), True
    # Not where pytree knows the class: its fields may not be all that there is to it.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {}
        for field in dataclasses.fields(value):
            new, changed = _map(function, getattr(value, field.name))
            if changed:
                changes[field.name] = new
        return (_with_fields(value, changes), True) if changes else (value, False)
    return value, False


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
