"""Which tensors are found in what modules take and return, and what stays as it was."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fsdp_fx.eager.backward import mark_inputs
from fsdp_fx.eager.tensors import differentiable_tensors, map_tensors


@dataclasses.dataclass
class Derived:
    x: torch.Tensor
    doubled: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.doubled = 2 * self.x


@dataclasses.dataclass
class Output(OrderedDict[str, torch.Tensor]):
    """Fields that are keys as well, as in the outputs of ``transformers``."""

    x: torch.Tensor

    def __post_init__(self) -> None:
        self["x"] = self.x


pytree.register_pytree_node(
    Output,
    lambda output: (list(output.values()), None),
    lambda values, _: Output(*values),
)


class Opaque(dict[str, torch.Tensor]):
    """A container that nobody has registered."""


class Unheard:
    def begin(self) -> None: ...

    def end(self) -> None: ...


def identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def test_container_in_which_nothing_changes_stays_the_same_object() -> None:
    tensor = torch.ones(2)
    containers: list[Any] = [{"a": tensor}, [tensor], Derived(tensor), {"a": [tensor]}, {}, []]
    for container in containers:
        assert map_tensors(identity, container) is container
        assert map_tensors(identity, (container,))[0] is container


def test_fields_that_a_dataclass_computes_itself_are_mapped_too() -> None:
    before = Derived(torch.ones(2))
    after = map_tensors(lambda tensor: tensor + 1, before)
    assert torch.equal(after.x, torch.full((2,), 2.0))
    assert torch.equal(after.doubled, torch.full((2,), 3.0))
    assert torch.equal(before.doubled, torch.full((2,), 2.0))


def test_differentiable_tensors_are_found_in_nested_containers_in_order() -> None:
    a, b, c = (torch.ones(1, requires_grad=True) for _ in range(3))
    found = differentiable_tensors({"x": [a, torch.ones(1)], "y": (Derived(b), {"z": c})})
    assert found[0] is a
    assert found[1] is b
    assert found[-1] is c
    assert len(found) == 4  # and what the dataclass computed


def test_dataclass_that_pytree_knows_is_mapped_as_it_was_registered() -> None:
    before = Output(torch.ones(2))
    assert map_tensors(identity, before) is before
    after = map_tensors(lambda tensor: tensor + 1, before)
    assert isinstance(after, Output)
    assert after["x"] is after.x
    assert torch.equal(after.x, torch.full((2,), 2.0))


def test_marked_inputs_stay_in_their_places_beside_a_container_that_is_left_alone() -> None:
    hidden, a, b = (torch.full((1,), value, requires_grad=True) for value in (1.0, 2.0, 3.0))
    marked = mark_inputs(Unheard(), (Opaque(x=hidden), a), {"b": Output(b)})
    assert marked is not None
    (container, first), keywords = marked
    assert container["x"] is hidden
    assert first is not a
    assert torch.equal(first, a)
    assert torch.equal(keywords["b"].x, b)
    assert keywords["b"]["x"] is keywords["b"].x
