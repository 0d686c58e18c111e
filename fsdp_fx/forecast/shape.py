"""A model as the units of its pipeline stages.

Either by the widths of a decoder like Llama's (:class:`Decoder`), or by the bytes of each layer
(:class:`Layers`). Every layer is a unit; so are the embedding and the head, if there is a
vocabulary. No unit lies inside of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fsdp_fx.trace import UnitSpec

__all__ = ["Decoder", "Layers", "Unit", "stage_units", "unit_specs"]


@dataclass(frozen=True)
class Unit:
    """A unit before it has a stage.

    Args:
        name: in the model.
        elements: number of elements of its parameters.
        multiplied: how many of them every token is multiplied with: 0 for an embedding.
        is_layer: whether it is one of the model's layers.
    """

    name: str
    elements: int
    multiplied: int
    is_layer: bool = True


@dataclass(frozen=True)
class Decoder:
    """A decoder of equal layers: attention, a gated feed-forward, two norms.

    Args:
        layers: number of layers.
        hidden: width of a token between layers.
        feed_forward: width inside the feed-forward.
        key_value_width: width of the keys, and of the values, of all heads together.
        vocabulary: rows of the embedding and of the head, which do not share weights; 0 for
            neither.
    """

    layers: int
    hidden: int
    feed_forward: int
    key_value_width: int
    vocabulary: int = 0

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units in the order of the forward."""
        hidden = self.hidden
        attention = 2 * hidden * hidden + 2 * hidden * self.key_value_width
        layer = attention + 3 * hidden * self.feed_forward + 2 * hidden
        units = [Unit(f"layer{index}", layer, layer) for index in range(self.layers)]
        if self.vocabulary:
            table = self.vocabulary * hidden
            units.insert(0, Unit("embedding", table, 0, is_layer=False))
            units.append(Unit("head", table + hidden, table + hidden, is_layer=False))
        return tuple(units)


@dataclass(frozen=True)
class Layers:
    """Layers of which only the sizes are known.

    Args:
        elements: elements of each layer, in the order of the forward.
    """

    elements: tuple[int, ...]

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units in the order of the forward."""
        return tuple(
            Unit(f"layer{index}", elements, elements)
            for index, elements in enumerate(self.elements)
        )


def stage_units(units: Sequence[Unit], stages: int) -> tuple[tuple[Unit, ...], ...]:
    """The units of each stage: equally many layers, the others beside their neighbours.

    Args:
        units: in the order of the forward.
        stages: number of stages.

    Raises:
        ValueError: the layers do not divide.
    """
    layers = sum(unit.is_layer for unit in units)
    if layers < stages or layers % stages:
        raise ValueError(f"{layers} layers do not divide over {stages} stages")
    per_stage = layers // stages
    result: list[list[Unit]] = [[] for _ in range(stages)]
    seen = 0
    for unit in units:
        # What follows the last layer of a stage, and is none, stays there.
        stage = seen // per_stage if unit.is_layer else max(0, seen - 1) // per_stage
        result[stage].append(unit)
        seen += unit.is_layer
    return tuple(tuple(stage) for stage in result)


def unit_specs(
    stages: Sequence[Sequence[Unit]], parameter_dtype: torch.dtype, reduction_dtype: torch.dtype
) -> tuple[tuple[UnitSpec, ...], ...]:
    """What planning needs to know of the units of each stage.

    Args:
        stages: the units of each stage.
        parameter_dtype: in which parameters are gathered.
        reduction_dtype: in which gradients are accumulated and reduced.
    """
    return tuple(
        tuple(
            UnitSpec(
                name=f"stage{index}.{unit.name}",
                chunk=f"stage{index}",
                elements=unit.elements,
                bytes=unit.elements * parameter_dtype.itemsize,
                gradient_bytes=unit.elements * reduction_dtype.itemsize,
                trainable=True,
            )
            for unit in units
        )
        for index, units in enumerate(stages)
    )
