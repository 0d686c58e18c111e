"""Weight gradients that are added up inside of the matrix product that computes them.

The gradient of a linear layer's weight is one product. Its result would be written, read
again to be added to the gradient that is kept, and cast to the dtype that is reduced in; as
part of the product all that costs little. So :func:`accumulate_products` puts, in a
backward graph, ``accumulate_product(left, right, accumulator)`` in the place of such a
product. The accumulators are inputs that the graph does not have by itself: the host code
(:mod:`fsdp_fx.compile.lowering`) gets them of the unit.

What is no single product of two matrices (an embedding's gradient, a bias's, a sum over
several uses of a weight) is left to be added as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from ..units import allocate, is_fresh, mark_written

__all__ = ["accumulate_products"]

_aten = torch.ops.aten

# Kept: an operator is there as long as its library is.
_library = torch.library.Library("fsdp_fx", "FRAGMENT")
_library.define(
    "accumulate_product(Tensor left, Tensor right, Tensor(a!) gradient) -> ()",
    # A product takes operands of any strides.
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)


def _accumulate_product(left: torch.Tensor, right: torch.Tensor, gradient: torch.Tensor) -> None:
    """``gradient = left @ right`` if it holds nothing yet, else ``gradient += left @ right``."""
    fresh = is_fresh(gradient)
    if fresh is None:
        raise RuntimeError(
            "fsdp_fx::accumulate_product was given a copy of a gradient, which it cannot add to: a "
            "region_compiler must pass a graph's inputs to operators as they are; if it does not, "
            'set options={"accumulate_in_products": False}'
        )
    if not fresh:
        _add_product(left, right, gradient)
        return
    allocate(gradient)
    if left.dtype == gradient.dtype:
        torch.mm(left, right, out=gradient)
    elif _multiplies_into_fp32(left, gradient):
        torch.mm(left, right, out_dtype=torch.float32, out=gradient)
    else:
        gradient.copy_(torch.mm(left, right))
    mark_written(gradient)


def _add_product(left: torch.Tensor, right: torch.Tensor, gradient: torch.Tensor) -> None:
    if gradient.device.type == "cpu":
        gradient.add_(torch.mm(left, right))  # as without this operator, bit by bit
    elif left.dtype == gradient.dtype:
        torch.addmm(gradient, left, right, out=gradient)
    elif _multiplies_into_fp32(left, gradient):
        torch.addmm(gradient, left, right, out_dtype=torch.float32, out=gradient)
    else:
        gradient.add_(torch.mm(left, right))


def _multiplies_into_fp32(left: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether there is a kernel for it: with CUDA, unless operators are tuned."""
    return (
        gradient.dtype is torch.float32
        and left.dtype in (torch.bfloat16, torch.float16)
        and gradient.device.type == "cuda"
        and torch.version.hip is None
        and not torch.cuda.tunable.is_enabled()
    )


_library.impl("accumulate_product", _accumulate_product, "CompositeExplicitAutograd")


@torch.library.register_fake("fsdp_fx::accumulate_product", lib=_library)
def _(left: torch.Tensor, right: torch.Tensor, gradient: torch.Tensor) -> None:
    return None


# --- the pass -------------------------------------------------------------------------


def accumulate_products(
    gm: fx.GraphModule, dtypes: Mapping[str, torch.dtype]
) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """Lets the products in a backward graph add to the gradients that they are.

    A gradient fits if it is one ``aten.mm``, be it transposed, that nothing else reads. One
    that is cast (autocast) is left: without the cast Inductor orders operators so that
    activations live longer.

    Args:
        gm: a backward graph of AOTAutograd, with its gradients marked; it is left as it is.
        dtypes: of those parameters' gradients that may be added to, by placeholder: the
            dtype in which they are kept until they are reduced.

    Returns:
        The graph, and the placeholders that it has besides its own: the gradients.
    """
    graph = fx.Graph()
    output = graph.output(graph.graph_copy(gm.graph, {}))
    output.meta = dict(gm.graph.output_node().meta)
    accumulators = []
    last = graph.find_nodes(op="placeholder")[-1:]
    for mark in graph.find_nodes(op="call_function", target=torch.ops.fsdp_fx.reduce_grad.default):
        gradient, parameter = mark.args
        assert isinstance(parameter, fx.Node)
        dtype = dtypes.get(parameter.name)
        product = _product_of(gradient, parameter) if dtype is not None else None
        if product is None:
            continue
        with graph.inserting_after(last[0]):
            accumulator = graph.placeholder(f"accumulator_{parameter.name}")
        last = [accumulator]
        accumulator.meta["val"] = torch.empty_like(
            parameter.meta["val"],
            dtype=dtype,
            memory_format=torch.contiguous_format,
            requires_grad=False,
        )
        left, right = product.node.args
        with graph.inserting_before(product.node):
            if product.transposed:
                left, right = (_transposed(graph, operand) for operand in (right, left))
            accumulate = graph.call_function(
                torch.ops.fsdp_fx.accumulate_product.default, (left, right, accumulator)
            )
        accumulate.meta = {**product.node.meta, "val": None}
        accumulate.meta.pop("tensor_meta", None)
        mark.replace_input_with(gradient, accumulator)
        for node in product.chain:
            graph.erase_node(node)
        accumulators.append(accumulator.name)
    return fx.GraphModule(gm, graph), tuple(accumulators)


class _Product(NamedTuple):
    """A gradient that is one product.

    Attributes:
        node: the product.
        chain: what makes the gradient of it, itself included, the last node first.
        transposed: whether the gradient is the product transposed.
    """

    node: fx.Node
    chain: tuple[fx.Node, ...]
    transposed: bool


def _product_of(gradient: Any, parameter: fx.Node) -> _Product | None:
    chain: list[fx.Node] = []
    transposed = False
    node = gradient
    while isinstance(node, fx.Node) and len(node.users) == 1:
        chain.append(node)
        if node.target is _aten.mm.default:
            fits = _is_matrix(gradient) and _shape(gradient) == _shape(parameter)
            return _Product(node, tuple(chain), transposed) if fits and _is_float(node) else None
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not _is_matrix(source):
            return None
        if node.target not in _VIEWS:
            return None
        if _transposes(node):
            transposed = not transposed
        elif _shape(node) != _shape(source):
            return None
        node = source
    return None


_TRANSPOSING = frozenset({_aten.t.default, _aten.permute.default, _aten.transpose.int})
_VIEWS = _TRANSPOSING | {
    _aten.alias.default,
    _aten.detach.default,
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.reshape.default,
}


def _transposes(view: fx.Node) -> bool:
    """Whether a view of a matrix is the matrix transposed."""
    dimensions: Any = view.args[1:]
    if view.target is _aten.permute.default:
        return [dimension % 2 for dimension in dimensions[0]] == [1, 0]
    if view.target is _aten.transpose.int:
        return bool((dimensions[0] - dimensions[1]) % 2)
    return view.target is _aten.t.default


def _transposed(graph: fx.Graph, operand: Any) -> fx.Node:
    node = graph.call_function(_aten.permute.default, (operand, [1, 0]))
    node.meta["val"] = operand.meta["val"].permute(1, 0)
    return node


def _shape(node: fx.Node) -> tuple[Any, ...]:
    return tuple(node.meta["val"].shape)


def _is_matrix(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 2


def _is_float(node: fx.Node) -> bool:
    return bool(node.meta["val"].is_floating_point())
