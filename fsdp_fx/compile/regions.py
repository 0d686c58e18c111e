"""Cuts a graph at the first use of each slot, and compiles each distinct piece once.

A *slot* is one FSDP unit as it is bound when the graph is called; graphs never name units.
:func:`split` cuts an AOTAutograd graph (forward, backward or inference) into regions and says
where each slot's parameters are first and last needed and where its gradients are ready.
:class:`RegionCompiler` compiles regions, identical ones once.

Cutting only at first uses (not at last ones) makes the regions of identical layers identical.
Nothing that is made from parameters alone passes from one region to another: each region makes
its own views and casts, right before their use. So a slot is needed exactly from the region
that begins it to the last region that takes one of its parameters as an input.

This module gathers, frees and reduces nothing, and knows no process group.
"""

from __future__ import annotations

import hashlib
import inspect
import operator
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from . import torch_internals
from .capture import ParameterOutputError, RegionCompilerName
from .partition import (
    is_alias,
    is_gradient_mark,
    is_pure,
    parameter_chains,
    refuse_parameter_writes,
)

__all__ = [
    "CompiledRegion",
    "ParameterOutputError",
    "Region",
    "RegionCompiler",
    "SplitGraph",
    "region_key",
    "split",
]

CompiledRegion: TypeAlias = Callable[[list[Any]], Sequence[Any]]
"""Takes one list, clears it, returns a tuple; has ``_boxed_call = True``."""

# Changes when regions are built differently, so that Inductor's cache forgets old ones.
_CACHE_KEY_TAG = "fsdp_fx.regions.2"

_aten = torch.ops.aten

# How AOTAutograd names what a graph is given, apart from what was saved for it.
_GIVEN = ("primals_", "tangents_", "fwd_rng_state", "bwd_rng_state")

# Views that show every element of their input once.
_REARRANGING = frozenset(
    {
        _aten._unsafe_view.default,
        _aten.alias.default,
        _aten.detach.default,
        _aten.permute.default,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.t.default,
        _aten.transpose.int,
        _aten.unsqueeze.default,
        _aten.view.default,
    }
)

# What a region's nodes keep of their meta. Names, stack traces and module paths differ from
# layer to layer; ``original_aten`` names kernels.
_KEPT_META = ("val", "tensor_meta", "eager_input_vals", "unbacked_bindings", "original_aten")


@dataclass(frozen=True)
class Region:
    """A piece of a graph that runs without a gather in between.

    Args:
        graph_module: the piece, under canonical names; placeholders as in ``inputs``.
        inputs: names in the original graph of what it takes.
        outputs: names in the original graph of what it returns.
        begins: the slots that are first used here, in order.
        freed: positions of inputs whose memory is gone when the region drops them: an order of
            operators that drops them early is then better. In backward graphs, where memory
            falls from its peak. Inductor goes by names: such an input is ``inN``, another
            one ``argN``.
        donated: those of ``freed`` whose memory the region may write to. Never of what was
            saved for the backward, so that it can be run twice.
    """

    graph_module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    begins: tuple[int, ...]
    freed: tuple[int, ...] = ()
    donated: tuple[int, ...] = ()


@dataclass(frozen=True)
class SplitGraph:
    """A graph as a sequence of regions. Values go by their names in the original graph.

    Args:
        placeholders: the inputs, in order.
        regions: run them in order, each on the values that it names.
        outputs: what the graph returns: value names, None and constants, in the original
            structure; None for the gradient of a managed parameter.
        last_region: slot to the last region that needs the slot's parameters. A slot that
            no region reads is absent.
        gradients: slot to its (parameter placeholder, gradient value) pairs. One value may
            be the gradient of two parameters: never accumulate into it in place.
        accumulators: slot to its (parameter placeholder, accumulator) pairs: gradients that
            regions add to themselves (:mod:`fsdp_fx.compile.products`), in what they are given
            under that name. No inputs of the graph.
        last_gradient_region: slot to the region after which all its gradients exist; 0 if
            they are inputs of the graph.
        gradient_positions: parameter placeholder to its gradient's place among the outputs.
        last_use: value to the last region that takes or makes it. A value that the graph
            returns, or that is a gradient, is needed beyond that.
    """

    placeholders: tuple[str, ...]
    regions: tuple[Region, ...]
    outputs: Any
    last_region: Mapping[int, int]
    gradients: Mapping[int, Sequence[tuple[str, str]]]
    last_gradient_region: Mapping[int, int]
    gradient_positions: Mapping[str, int]
    last_use: Mapping[str, int]
    accumulators: Mapping[int, Sequence[tuple[str, str]]] = field(default_factory=dict)


# --- cutting --------------------------------------------------------------------------


def split(
    gm: fx.GraphModule,
    slots: Mapping[str, int],
    *,
    neutral: Collection[str] = (),
    accumulators: Collection[str] = (),
) -> SplitGraph:
    """Cuts a graph before each node that first uses a parameter of a slot.

    A view of a parameter counts as a use where it is used itself. What precedes the first use
    of any slot is a region of its own if it computes anything.

    Args:
        gm: a forward, backward or inference graph of AOTAutograd; it is left as it is.
        slots: placeholder name to slot, of the managed parameters in this graph.
        neutral: placeholder names of buffers and unmanaged parameters. What is computed from
            parameters and these alone is computed again in each region that needs it.
        accumulators: placeholder names of gradients that the graph adds to.

    Raises:
        ParameterOutputError: the graph returns a view of a managed parameter, or writes to one.
    """
    return _Splitter(gm, slots, neutral, accumulators).split()


class _Splitter:
    """The steps of :func:`split`, which share the graph's classification.

    An *anchor* is a node that runs exactly once, in its place. All other nodes are repeated in
    each region that needs them: chains (see ``parameter_chains``) and ``get_attr``.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        slots: Mapping[str, int],
        neutral: Collection[str],
        accumulators: Collection[str],
    ):
        self.gm = gm
        placeholders = {node.name: node for node in gm.graph.find_nodes(op="placeholder")}
        unknown = [name for name in (*slots, *neutral) if name not in placeholders]
        if unknown:
            raise ValueError(
                f"no placeholder is named {', '.join(unknown)}; the graph has "
                f"{', '.join(placeholders)}"
            )
        self.accumulators = {placeholders[name] for name in accumulators}
        self.placeholders = tuple(n for n in placeholders.values() if n not in self.accumulators)
        self.slot_of = {placeholders[name]: slot for name, slot in slots.items()}
        refuse_parameter_writes(gm, self.slot_of)
        self.chains = parameter_chains(
            gm.graph, list(self.slot_of), [placeholders[name] for name in neutral]
        )
        self.output = gm.graph.output_node()
        self.marks = [n for n in gm.graph.nodes if _is_managed_gradient(n, self.slot_of)]

    def split(self) -> SplitGraph:
        anchors, begins = self._cut(self._anchors())
        pieces = [_Piece(self, region_anchors) for region_anchors in anchors]
        self._append_base_symbols(pieces)

        needed: set[fx.Node] = {self._peeled(node) for node in self.output.all_input_nodes}
        self._refuse_parameter_views()
        freed = self._freed(pieces)
        donated = self._donated(pieces, freed)
        built: list[Region] = []
        for index, piece in reversed(list(enumerate(pieces))):
            outputs = [node for node in piece.anchors if node in needed]
            needed.update(piece.inputs)
            built.append(piece.build(outputs, begins[index], freed[index], donated[index]))
        regions = tuple(reversed(built))

        made_in = {name: i for i, region in enumerate(regions) for name in region.outputs}
        names = {node.name for node in self.accumulators}
        for index, region in enumerate(regions):
            made_in.update({name: index for name in region.inputs if name in names})
        pairs = self._gradients()
        return SplitGraph(
            placeholders=tuple(node.name for node in self.placeholders),
            regions=regions,
            outputs=fx.node.map_arg(self.output.args[0], self._output_name),
            last_region=self._last_regions(pieces),
            gradients=self._selected(pairs, accumulated=False),
            last_gradient_region={
                slot: max(made_in.get(value, 0) for _, value in own) for slot, own in pairs.items()
            },
            gradient_positions=self._gradient_positions(),
            last_use={
                name: index
                for index, region in enumerate(regions)
                for name in (*region.inputs, *region.outputs)
            },
            accumulators=self._selected(pairs, accumulated=True),
        )

    def _peeled(self, node: fx.Node) -> fx.Node:
        if is_gradient_mark(node):
            gradient = node.args[0]
            assert isinstance(gradient, fx.Node)
            return gradient
        return node

    def _output_name(self, node: fx.Node) -> str | None:
        return None if _is_managed_gradient(node, self.slot_of) else self._peeled(node).name

    def _anchors(self) -> list[fx.Node]:
        """The nodes that run once: no chain, unless the graph itself returns it."""
        returned = {self._peeled(node) for node in self.output.all_input_nodes}
        anchors = [
            node
            for node in self.gm.graph.nodes
            if node.op == "call_function"
            and not is_gradient_mark(node)
            and (node not in self.chains or node in returned)
        ]
        # Inductor numbers its random seeds over the whole graph; read in advance, the number
        # does not make a region of an identical layer differ.
        lookups = [node for node in anchors if _is_seed_lookup(node)]
        if not lookups:
            return anchors
        rest = [node for node in anchors if not _is_seed_lookup(node)]
        ready = {node for lookup in lookups for node in lookup.all_input_nodes}
        place = 1 + max((i for i, node in enumerate(rest) if node in ready), default=-1)
        return rest[:place] + lookups + rest[place:]

    def _slots_used(self, anchor: fx.Node) -> Iterable[int]:
        """The slots that a node reads, in order, be it through views and casts."""
        for node in (anchor, *anchor.all_input_nodes):
            for parameter in (node, *self.chains.get(node, ())):
                if parameter in self.slot_of:
                    yield self.slot_of[parameter]

    def _cut(self, anchors: Sequence[fx.Node]) -> tuple[list[list[fx.Node]], list[tuple[int, ...]]]:
        """Groups the anchors into regions; also the slots that each region begins."""
        regions: list[list[fx.Node]] = []
        begins: list[tuple[int, ...]] = []
        seen: set[int] = set()
        for anchor in anchors:
            new = tuple(dict.fromkeys(s for s in self._slots_used(anchor) if s not in seen))
            seen.update(new)
            if new and len(regions) == 1 and not begins[0] and not any(map(_computes, regions[0])):
                begins[0] = new
            elif new or not regions:
                regions.append([])
                begins.append(new)
            regions[-1].append(anchor)
        if not self.marks:
            self._advance_saved_values(regions)
        return regions, begins

    def _advance_saved_values(self, regions: list[list[fx.Node]]) -> None:
        """Moves what only the graph's outputs need into the region that has its inputs.

        The partitioner puts values that it computes for the backward alone at the end of the
        forward: the last region would take something from every layer. Not in a backward
        graph, where such values are gradients and stand where autograd would compute them.
        """
        for_output: set[fx.Node] = set()
        for node in reversed(self.gm.graph.nodes):
            if is_pure(node) and all(u in for_output or u is self.output for u in node.users):
                for_output.add(node)
        home = {node: index for index, region in enumerate(regions) for node in region}
        first_use: dict[int, int] = {}
        for index, region in enumerate(regions):
            moved: set[fx.Node] = set()
            for anchor in region:
                slots = set(self._slots_used(anchor))
                begins_slot = any(first_use.setdefault(slot, index) == index for slot in slots)
                if anchor not in for_output or begins_slot:
                    continue
                ready = [home[n] for n in self._sources(anchor) if n in home]
                ready += [first_use[slot] for slot in slots]
                target = max(ready, default=index)
                if target < index:
                    regions[target].append(anchor)
                    home[anchor] = target
                    moved.add(anchor)
            region[:] = [anchor for anchor in region if anchor not in moved]

    def _sources(self, node: fx.Node) -> set[fx.Node]:
        """The anchors and placeholders that a node's inputs, repeated if chains, stand on."""
        sources: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        pending = list(node.all_input_nodes)
        while pending:
            entry = pending.pop()
            if entry in seen:
                continue
            seen.add(entry)
            if entry in self.chains or entry.op == "get_attr":
                pending.extend(entry.all_input_nodes)
            else:
                sources.add(entry)
        return sources

    def _append_base_symbols(self, pieces: Sequence[_Piece]) -> None:
        """Gives each region the SymInts that its sizes are made of.

        Inductor's cache needs the value of every symbol to look a region up.
        """
        sources: dict[str, fx.Node] = {}
        for node in self.placeholders:
            symbol = torch_internals.base_symbol(node.meta.get("val"))
            if symbol is not None:
                sources.setdefault(symbol, node)
        for piece in pieces:
            for symbol in piece.missing_symbols():
                if symbol in sources:
                    piece.inputs[sources[symbol]] = None
            for node in piece.anchors:
                symbol = torch_internals.base_symbol(node.meta.get("val"))
                if symbol is not None:
                    sources.setdefault(symbol, node)

    def _freed(self, pieces: Sequence[_Piece]) -> list[tuple[int, ...]]:
        """For each region of a backward, the positions of inputs that it is the last to read.

        Of what the graph is given, only what was saved for it: the caller keeps the rest.
        """
        if not self.marks:
            return [() for _ in pieces]
        kept = {self._peeled(node) for node in self.output.all_input_nodes}
        last_use = {node: index for index, piece in enumerate(pieces) for node in piece.inputs}
        return [
            tuple(
                position
                for position, node in enumerate(piece.inputs)
                if last_use[node] == index
                and node not in kept
                and isinstance(node.meta.get("val"), torch.Tensor)
                and (node.op == "call_function" or not node.name.startswith(_GIVEN))
            )
            for index, piece in enumerate(pieces)
        ]

    def _donated(
        self, pieces: Sequence[_Piece], freed: Sequence[tuple[int, ...]]
    ) -> list[tuple[int, ...]]:
        """Those of ``freed`` that are a region's own to overwrite.

        What an earlier region has made, if no other value that passes between regions shares
        its memory.
        """
        bases = self._bases()
        passed = {node: None for piece in pieces for node in piece.inputs}
        sharing: dict[fx.Node, set[fx.Node]] = {}
        for node in (*self.placeholders, *passed, *map(self._peeled, self.output.all_input_nodes)):
            for base in bases.get(node, (node,)):
                sharing.setdefault(base, set()).add(node)

        def is_own(node: fx.Node) -> bool:
            return (
                node.op == "call_function"
                and _owns_its_memory(node)
                and all(sharing[base] == {node} for base in bases.get(node, (node,)))
            )

        return [
            tuple(position for position in positions if is_own(inputs[position]))
            for inputs, positions in zip((list(p.inputs) for p in pieces), freed, strict=True)
        ]

    def _bases(self) -> dict[fx.Node, set[fx.Node]]:
        """The nodes that may share storage with others, and the values that these are views of."""
        bases: dict[fx.Node, set[fx.Node]] = {}
        for node in self.gm.graph.nodes:
            if _shares_memory(node):
                bases[node] = {b for e in node.all_input_nodes for b in bases.get(e, (e,))}
        return bases

    def _aliases(self) -> dict[fx.Node, set[int]]:
        """The nodes that may share storage with a parameter, and the slots it belongs to."""
        aliases: dict[fx.Node, set[int]] = {node: {slot} for node, slot in self.slot_of.items()}
        for node in self.gm.graph.nodes:
            if is_alias(node):
                owners = {s for entry in node.all_input_nodes for s in aliases.get(entry, ())}
                if owners:
                    aliases[node] = owners
        return aliases

    def _refuse_parameter_views(self) -> None:
        aliases = self._aliases()
        for node in self.output.all_input_nodes:
            value = self._peeled(node)
            if value in aliases and value not in self.slot_of:
                raise ParameterOutputError(
                    f"the graph returns {value.name}, a view of a managed parameter; its storage "
                    "is freed after the call. Return a copy (`.clone()`) instead"
                )

    def _last_regions(self, pieces: Sequence[_Piece]) -> dict[int, int]:
        aliases = self._aliases()
        return {
            slot: index
            for index, piece in enumerate(pieces)
            for node in piece.inputs
            for slot in sorted(aliases.get(node, ()))
        }

    def _gradients(self) -> dict[int, list[tuple[str, str]]]:
        gradients: dict[int, list[tuple[str, str]]] = {}
        for mark in self.marks:
            parameter = _marked_parameter(mark)
            pair = (parameter.name, self._peeled(mark).name)
            gradients.setdefault(self.slot_of[parameter], []).append(pair)
        return gradients

    def _selected(
        self, pairs: Mapping[int, Sequence[tuple[str, str]]], *, accumulated: bool
    ) -> dict[int, list[tuple[str, str]]]:
        """Those pairs of parameters and gradients whose gradient is an accumulator, or is not."""
        names = {node.name for node in self.accumulators}
        chosen = {
            slot: [pair for pair in own if (pair[1] in names) is accumulated]
            for slot, own in pairs.items()
        }
        return {slot: own for slot, own in chosen.items() if own}

    def _gradient_positions(self) -> dict[str, int]:
        values = self.output.args[0]
        places = enumerate(values if isinstance(values, list | tuple) else [values])
        return {
            _marked_parameter(node).name: place
            for place, node in places
            if isinstance(node, fx.Node) and _is_managed_gradient(node, self.slot_of)
        }


class _Piece:
    """A region being built: what it runs, in order, and what it takes."""

    def __init__(self, splitter: _Splitter, anchors: Sequence[fx.Node]):
        self.gm = splitter.gm
        self.anchors = anchors
        self.inputs: dict[fx.Node, None] = {}
        self.nodes: dict[fx.Node, None] = {}
        own = set(anchors)

        def add(node: fx.Node) -> None:
            if node in self.nodes:
                return
            if node.op == "get_attr" or node in splitter.chains or node in own:
                for entry in node.all_input_nodes:
                    add(entry)
                self.nodes[node] = None
            else:
                self.inputs[node] = None

        for anchor in anchors:
            add(anchor)

    def missing_symbols(self) -> list[str]:
        """The symbols in the values of this region that no input of it *is*."""
        present: set[str | None] = set()
        used: set[str] = set()
        for node in (*self.inputs, *self.nodes):
            value = node.meta.get("val")
            if node in self.inputs:
                present.add(torch_internals.base_symbol(value))
            for entry in value if isinstance(value, list | tuple) else (value,):
                if isinstance(entry, torch.Tensor | torch.SymInt):
                    used.update(torch_internals.free_symbol_names(entry))
        return sorted(used - present)

    def build(
        self,
        outputs: Sequence[fx.Node],
        begins: tuple[int, ...],
        freed: tuple[int, ...],
        donated: tuple[int, ...],
    ) -> Region:
        """The region under canonical names, which are part of the key of Inductor's cache."""
        graph = fx.Graph()
        attributes: dict[str, Any] = {}
        copies: dict[fx.Node, fx.Node] = {}
        for position, node in enumerate(self.inputs):
            kind = "in" if position in freed else "arg"
            copies[node] = graph.placeholder(f"{kind}{position}")
        for position, node in enumerate(self.nodes):
            if node.op == "get_attr":
                target = f"constant{len(attributes)}"
                attributes[target] = operator.attrgetter(str(node.target))(self.gm)
                copies[node] = graph.create_node("get_attr", target, name=f"v{position}")
            else:
                copies[node] = graph.create_node(
                    node.op,
                    node.target,
                    fx.node.map_arg(node.args, copies.__getitem__),
                    fx.node.map_arg(node.kwargs, copies.__getitem__),
                    name=f"v{position}",
                )
        for node, copy in copies.items():
            copy.meta = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
        for node in self.inputs:
            copies[node].meta.pop("unbacked_bindings", None)  # another region binds these symbols
        graph.output(tuple(copies[node] for node in outputs))
        return Region(
            graph_module=fx.GraphModule(attributes, graph, class_name="Region"),
            inputs=tuple(node.name for node in self.inputs),
            outputs=tuple(node.name for node in outputs),
            begins=begins,
            freed=freed,
            donated=donated,
        )


def _is_managed_gradient(node: fx.Node, managed: Collection[fx.Node]) -> bool:
    return is_gradient_mark(node) and _marked_parameter(node) in managed


def _marked_parameter(mark: fx.Node) -> fx.Node:
    parameter = mark.args[1]
    assert isinstance(parameter, fx.Node)
    return parameter


def _is_seed_lookup(node: fx.Node) -> bool:
    # By name: the operator exists only once Inductor has been imported.
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.name() == (
        "prims::inductor_lookup_seed"
    )


def _shares_memory(node: fx.Node) -> bool:
    """Like ``is_alias``, where the parts of an operator's several results are apart."""
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return is_alias(source) or not isinstance(source.target, torch._ops.OpOverload)
    return is_alias(node)


def _owns_its_memory(node: fx.Node) -> bool:
    """Whether a value is a new one that an operator has made, each element in its own place."""
    while node.target in _REARRANGING:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return isinstance(node.target, torch._ops.OpOverload) and not is_alias(node)


def _computes(node: fx.Node) -> bool:
    """Whether a node is worth a region before the first gather has arrived."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return isinstance(node.target, torch._ops.HigherOrderOperator)
    if is_alias(node):
        return False
    return not is_pure(node) or any(
        isinstance(entry.meta.get("val"), torch.Tensor) for entry in node.all_input_nodes
    )


# --- identity -------------------------------------------------------------------------


def region_key(gm: fx.GraphModule) -> str:
    """A hash that two regions share if and only if one's code can run the other.

    It covers operators, the structure of their arguments, and dtype, device, sizes and
    strides of every value, symbols by name: regions with symbols are comparable only within
    one shape environment, which the caller adds. Constants count by identity, so the key holds
    as long as the graph module lives. Without constants and symbols it is the same in every
    process: a region compiler of one's own may keep what it has compiled under it.
    """
    digest = hashlib.sha256()
    for line in _describe_graph(gm):
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _describe_graph(gm: fx.GraphModule) -> Iterable[str]:
    positions: dict[fx.Node, int] = {}
    for node in gm.graph.nodes:
        positions[node] = len(positions)
        if node.op == "get_attr":
            constant = operator.attrgetter(str(node.target))(gm)
            if isinstance(constant, fx.GraphModule):
                yield "get_attr subgraph"
                yield from _describe_graph(constant)
            else:
                yield f"get_attr {type(constant).__qualname__} {id(constant)}"
        else:
            target = _describe_target(node.target) if node.op == "call_function" else ""
            arguments = (
                "" if node.op == "placeholder" else _describe((node.args, node.kwargs), positions)
            )
            yield f"{node.op} {target} {arguments}"
        yield _describe_value(node.meta.get("val"), placeholder=node.op == "placeholder")


def _constants(gm: fx.GraphModule) -> Iterable[Any]:
    for node in gm.graph.find_nodes(op="get_attr"):
        constant = operator.attrgetter(str(node.target))(gm)
        if isinstance(constant, fx.GraphModule):
            yield from _constants(constant)
        else:
            yield constant


def _describe_target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target.name()
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", repr(target))
    return f"{getattr(target, '__module__', '')}.{name}"


def _describe(argument: Any, positions: Mapping[fx.Node, int]) -> str:
    if isinstance(argument, fx.Node):
        return f"%{positions[argument]}"
    if isinstance(argument, Mapping):
        entries = (f"{key!r}:{_describe(value, positions)}" for key, value in argument.items())
        return "{" + ",".join(entries) + "}"
    if isinstance(argument, list | tuple):
        # fx's immutable lists and plain ones mean the same.
        kind = "l" if isinstance(argument, list) else "t"
        return kind + "(" + ",".join(_describe(entry, positions) for entry in argument) + ")"
    if isinstance(argument, slice):
        return "slice" + _describe((argument.start, argument.stop, argument.step), positions)
    return f"{type(argument).__qualname__}:{argument!r}"


def _describe_value(value: Any, *, placeholder: bool) -> str:
    if isinstance(value, torch.Tensor):
        strides = tuple(value.stride()) if value.layout is torch.strided else ()
        parts = (type(value).__qualname__, value.dtype, value.device, value.layout)
        described = " ".join(map(str, (*parts, tuple(value.shape), strides)))
        if placeholder and value.layout is torch.strided:
            # Inductor assumes the alignment that an input's offset allows.
            described += f" at {value.storage_offset()}"
        if value.is_conj() or value.is_neg():
            described += f" conj={value.is_conj()} neg={value.is_neg()}"
        return described
    if isinstance(value, list | tuple):
        return "(" + ",".join(_describe_value(v, placeholder=placeholder) for v in value) + ")"
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool):
        return f"{type(value).__qualname__}:{value}"
    return type(value).__qualname__


# --- compiling ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Compiled:
    """A cache entry. It holds the constants, which the key names by identity, but not the graph:
    that would keep the shape environment alive.
    """

    constants: tuple[Any, ...]
    run: CompiledRegion


class RegionCompiler:
    """Compiles regions, identical ones once.

    Call it inside AOTAutograd's compilers: Inductor needs the fake tensors of the graph.

    Args:
        region_compiler: "inductor"; "eager", which runs the operators as they are; or any
            ``(gm, example_inputs) -> callable``, given a copy of the graph. Such a callable
            may take its inputs one by one, or as one list if it has ``_boxed_call = True``.
        fallback_random: whether Inductor keeps eager's random numbers.
        options: further Inductor configuration.

    Attributes:
        region_uses: how many regions have been asked for.
        distinct_regions: how many of them were different.
        cache_hits: how many of those Inductor found in its persistent cache.
        cache_misses: how many it did not find there.
        cache_bypasses: how many it cannot keep there; its log says why.
    """

    def __init__(
        self,
        region_compiler: RegionCompilerName = "inductor",
        *,
        fallback_random: bool = True,
        options: Mapping[str, Any] | None = None,
    ):
        if not callable(region_compiler) and region_compiler not in ("inductor", "eager"):
            raise ValueError(
                f'region_compiler is "inductor", "eager" or a callable, not {region_compiler!r}'
            )
        self.region_compiler = region_compiler
        self.fallback_random = fallback_random
        self.options = dict(options or {})
        self.region_uses = 0
        self.distinct_regions = 0
        self.cache_hits = 0
        self.cache_misses = 0
        self.cache_bypasses = 0
        self._static: dict[str, _Compiled] = {}
        # Symbols mean something only in their own shape environment.
        self._dynamic: weakref.WeakKeyDictionary[Any, dict[str, _Compiled]] = (
            weakref.WeakKeyDictionary()
        )
        # Backward graphs may be compiled in an autograd thread.
        self._lock = threading.RLock()

    @property
    def compiled_regions(self) -> int:
        """How many distinct regions were compiled, and not found in a persistent cache."""
        return self.distinct_regions - self.cache_hits

    def __call__(self, region: Region) -> CompiledRegion:
        """The code of a region: takes one list, clears it, returns a tuple."""
        graph_module = region.graph_module
        with self._lock:
            self.region_uses += 1
            cache = self._cache_for(graph_module)
            key = region_key(graph_module)
            donated: tuple[int, ...] = ()
            if self.region_compiler == "inductor":
                donated = region.donated
                key += f" {region.freed} {donated}"
            if key not in cache:
                constants = tuple(_constants(graph_module))
                cache[key] = _Compiled(constants, self._compile(graph_module, donated))
                self.distinct_regions += 1
            return cache[key].run

    def _cache_for(self, gm: fx.GraphModule) -> dict[str, _Compiled]:
        for node in gm.graph.nodes:
            shape_env = torch_internals.shape_env_of(node.meta.get("val"))
            if shape_env is not None:
                return self._dynamic.setdefault(shape_env, {})
        return self._static

    def _compile(self, gm: fx.GraphModule, donated: Sequence[int]) -> CompiledRegion:
        # Compilers change the graph that they are given.
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.output(graph.graph_copy(gm.graph, copies))
        own = fx.GraphModule(gm, graph, class_name="Region")
        if self.region_compiler == "eager":
            return _run_as_is(own)
        example_inputs = [n.meta["val"] for n in graph.find_nodes(op="placeholder")]
        if self.region_compiler == "inductor":
            before = torch_internals.cache_counts()
            compiled: Callable[..., Any] = torch_internals.compile_with_inductor(
                own,
                example_inputs,
                fallback_random=self.fallback_random,
                donated=donated,
                cache_key_tag=_CACHE_KEY_TAG,
                options=self.options,
            )
            after = torch_internals.cache_counts()
            self.cache_hits += after.hits - before.hits
            self.cache_misses += after.misses - before.misses
            self.cache_bypasses += after.bypasses - before.bypasses
        else:
            with torch_internals.tracing_of_its_own(example_inputs):
                compiled = self.region_compiler(own, example_inputs)
            if not callable(compiled):
                raise TypeError(
                    f"region_compiler={_describe_target(self.region_compiler)} returned "
                    f"{type(compiled).__name__}: it takes an fx.GraphModule and example inputs and "
                    "returns a callable"
                )
        return compiled if _takes_one_list(compiled) else _boxed(compiled)


def _run_as_is(gm: fx.GraphModule) -> CompiledRegion:
    """Runs a graph's operators one by one, dropping each value at its last use."""
    for node in gm.graph.nodes:
        node.meta.clear()
    if not gm.graph.find_nodes(op="placeholder"):
        return _boxed(gm.forward)
    gm.graph.set_codegen(torch_internals.boxed_codegen())
    gm.recompile()
    forward = gm.forward

    def run(inputs: list[Any]) -> Sequence[Any]:
        return forward(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _takes_one_list(function: Callable[..., Any]) -> bool:
    """Whether a compiled function has the boxed convention; some of torch's only say so."""
    if not getattr(function, "_boxed_call", False):
        return False
    try:
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):  # of C code
        return True
    return all(each.kind is not inspect.Parameter.VAR_POSITIONAL for each in parameters)


def _boxed(function: Callable[..., Any]) -> CompiledRegion:
    def run(inputs: list[Any]) -> Sequence[Any]:
        arguments = tuple(inputs)
        inputs.clear()
        return tuple(function(*arguments))

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
