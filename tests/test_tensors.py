"""Which tensors are found in what modules take and return, and what stays as it was."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fsdp_fx.eager.tensors import differentiable_tensors, map_tensors


@dataclasses.dataclass
class Derived:
    x: torch.Tensor
    doubled: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.doubled = 2 * self.x


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
