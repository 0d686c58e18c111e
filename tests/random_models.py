"""Random module trees, as plain data, and the modules that are built of them.

A :class:`Setup` is a whole model and the options of its context; its repr can be copied into a
list of examples. A :class:`Block` is one module of a tree. It looks at the storage of every
parameter that it computes with, forwards and backwards: where one rank computes alone, a gather
that is missing would otherwise go unnoticed or end the process.

What is run on these models, and what must hold then, is in `test_random_windows.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_fx.planning.lookahead import Lookahead
from fsdp_fx.window import ReduceGradients

__all__ = ["EVERYTHING", "WIDTH", "Block", "Node", "Probe", "Setup", "Use", "setups"]

WIDTH = 4
DTYPE = torch.float64
EVERYTHING = 1 << 40

Own = Literal["none", "first", "last", "both", "unused"]


class _Short:
    """A repr without the fields that have their default."""

    def __repr__(self) -> str:
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Use(_Short):
    """One call of a child.

    Args:
        child: its index.
        checkpoint: how the call is recomputed in the backward; None if it is not.
        dropped: whether the output is thrown away instead of added.
    """

    child: int
    checkpoint: Literal["reentrant", "non-reentrant"] | None = None
    dropped: bool = False


@dataclass(frozen=True, repr=False)
class Node(_Short):
    """One module of a tree.

    Args:
        own: when its own linear computes: before its children, after them, both, or never;
            "none" for a module without parameters of its own.
        unit: whether ``fully_shard`` is called on it.
        frozen: which of its own parameters are frozen.
        tied: whether its weight is that of the module whose unit it belongs to.
        children: the modules below it; one that no use names is not called.
        uses: its calls of them, in order.
    """

    own: Own = "none"
    unit: bool = False
    frozen: Literal["nothing", "bias", "all"] = "nothing"
    tied: bool = False
    children: tuple[Node, ...] = ()
    uses: tuple[Use, ...] = ()


@dataclass(frozen=True, repr=False)
class Setup(_Short):
    """A model and the options of its context.

    Args:
        chunks: the chunks, in order.
        mode: of the context.
        connected: whether one autograd graph goes through all chunks; if not, each chunk's ends
            at the chunk, as in a pipeline.
        input_gradient: whether the first chunk's input needs a gradient.
        forward_prefetch: of the context.
        backward_prefetch: of the context.
        memory_budget: of the context.
        keep_frozen: of the context.
        reduce_gradients: of the context.
    """

    chunks: tuple[Node, ...]
    mode: Literal["recorded", "registration"] = "recorded"
    connected: bool = False
    input_gradient: bool = False
    forward_prefetch: Lookahead = None
    backward_prefetch: Lookahead = None
    memory_budget: int | None = None
    keep_frozen: bool = False
    reduce_gradients: ReduceGradients = "per_backward"

    @property
    def options(self) -> dict[str, Any]:
        """What the context is made with."""
        lookaheads = ("forward_prefetch", "backward_prefetch")
        names = ("mode", *lookaheads, "memory_budget", "keep_frozen", "reduce_gradients")
        return {name: getattr(self, name) for name in names}

    @property
    def recomputes(self) -> bool:
        """Whether anything is checkpointed."""
        return any(use.checkpoint for chunk in self.chunks for use in _uses(chunk))


def _uses(node: Node) -> Iterator[Use]:
    yield from node.uses
    for child in node.children:
        yield from _uses(child)


# Modules


class Probe:
    """Hears of every computation of the blocks that it is given to.

    Attributes:
        on_compute: called with each block that begins its forward.
        on_read: called with the weight of each linear that computes, forwards and backwards.
    """

    def __init__(self) -> None:
        self.on_compute: Callable[[Block], None] | None = None
        self.on_read: Callable[[torch.Tensor], None] | None = None


class _Linear(torch.autograd.Function):
    """A linear that shows its weight to the probe before it reads it."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, probe: Probe
    ) -> torch.Tensor:
        ctx.probe = probe
        if probe.on_read is not None:
            probe.on_read(weight)
        ctx.save_for_backward(x, weight)
        return torch.addmm(bias, x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if ctx.probe.on_read is not None:
            ctx.probe.on_read(weight)
        return (
            gradient @ weight.T if needs_x else None,
            x.T @ gradient if needs_weight else None,
            gradient.sum(0) if needs_bias else None,
            None,
        )


class Block(nn.Module):
    """The module of a node: a residual linear, if it has one, around residual children.

    Args:
        node: what to build.
        above: the block whose unit it belongs to, for a tied weight.
    """

    def __init__(self, node: Node, above: Block | None = None) -> None:
        super().__init__()
        self.node = node
        self.probe = Probe()
        if node.own != "none":
            shared = getattr(above, "weight", None) if node.tied and not node.unit else None
            self.weight = shared
            if shared is None:
                weight = 0.5 * torch.randn(WIDTH, WIDTH, dtype=DTYPE)
                self.weight = nn.Parameter(weight, requires_grad=node.frozen != "all")
            bias = 0.5 * torch.randn(WIDTH, dtype=DTYPE)
            self.bias = nn.Parameter(bias, requires_grad=node.frozen == "nothing")
        around = self if node.unit or above is None else above
        self.inner = nn.ModuleList(Block(child, around) for child in node.children)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.probe.on_compute is not None:
            self.probe.on_compute(self)
        given = x
        if self.node.own in ("first", "both"):
            x = self._linear(x)
        for use in self.node.uses:
            child = self.inner[use.child]
            if use.checkpoint is None:
                y = child(x)
            else:
                reentrant = use.checkpoint == "reentrant"
                y = checkpoint(child, x, use_reentrant=reentrant, preserve_rng_state=False)
            if not use.dropped:
                x = x + y
        if self.node.own in ("last", "both"):
            x = self._linear(x)
        # A gradient that reaches the input is not one that reaches the output.
        return x.clone() if x is given else x

    def _linear(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Linear.apply(x, self.weight, self.bias, self.probe)
        return x + torch.tanh(y)


# Strategies


@st.composite
def _nodes(draw: st.DrawFn, depth: int) -> Node:
    children: tuple[Node, ...] = ()
    if depth:
        children = tuple(draw(st.lists(_nodes(depth - 1), max_size=2)))
    uses: list[Use] = []
    again: list[Use] = []
    for index in range(len(children)):
        times = draw(st.sampled_from((1, 1, 2, 1, 2, 0)))
        for target in (uses, again)[:times]:
            recomputed: Any = draw(
                st.sampled_from((None, None, None, "non-reentrant", "reentrant"))
            )
            dropped = draw(st.sampled_from((False, False, False, False, True)))
            target.append(Use(index, recomputed, dropped))
    own: Own = draw(st.sampled_from(("first", "first", "none", "last", "both", "unused")))
    return Node(
        own=own,
        unit=draw(st.sampled_from((True, True, False))),
        frozen=draw(st.sampled_from(("nothing", "nothing", "nothing", "nothing", "bias", "all"))),
        tied=draw(st.sampled_from((False, False, True))),
        children=children,
        uses=tuple(uses + again),
    )


def _covered(node: Node, inside: bool = False) -> Node:
    """The node, with every parameter in a unit."""
    unit = node.unit or (node.own != "none" and not inside)
    children = tuple(_covered(child, inside or unit) for child in node.children)
    return dataclasses.replace(node, unit=unit, children=children)


def _has_parameters(node: Node) -> bool:
    return node.own != "none" or any(_has_parameters(child) for child in node.children)


def _chunk(node: Node) -> Node:
    """The node as a chunk: there must be a unit in it."""
    if not _has_parameters(node):
        node = dataclasses.replace(node, own="first")
    return _covered(node)


@st.composite
def setups(
    draw: st.DrawFn, mode: Literal["recorded", "registration"] = "recorded", chunks: int = 4
) -> Setup:
    """Models of up to ``chunks`` chunks, and options that ``mode`` allows."""
    elements = WIDTH * WIDTH + WIDTH  # of a linear
    size = elements * DTYPE.itemsize
    recorded = mode == "recorded"
    budget = draw(st.sampled_from((None, None, 0, size, 2 * size, 3 * size, 5 * size, EVERYTHING)))
    lookaheads: list[Lookahead] = [None, None, 0, elements, 2 * elements, 4 * elements]
    reductions: list[ReduceGradients] = ["per_backward"]
    if recorded:
        reductions.append("per_window")
        if budget is not None:
            lookaheads.append("timed")
            reductions.append("planned")
    lookahead = st.sampled_from(lookaheads)
    count = draw(st.sampled_from([n for n in (1, 2, 1, 2, 3, 4) if n <= chunks]))
    # The more chunks, the shallower they are.
    trees = st.builds(_chunk, _nodes(2 if count < 3 else 1))
    return Setup(
        chunks=tuple(draw(trees) for _ in range(count)),
        mode=mode,
        connected=draw(st.booleans()) if recorded else True,
        input_gradient=draw(st.booleans()),
        forward_prefetch=draw(lookahead),
        backward_prefetch=draw(lookahead),
        memory_budget=budget,
        keep_frozen=budget is not None and draw(st.sampled_from((True, True, False))),
        reduce_gradients=draw(st.sampled_from(reductions)),
    )
