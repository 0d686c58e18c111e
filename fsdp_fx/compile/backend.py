"""The ``torch.compile`` backend: ``torch.compile(chunk, backend="fsdp_fx")``.

It is given a captured graph and the parameters that it works on, finds the units and
their context from these, and returns code that follows the context's program. Units
that eager hooks hold when the capture begins (the chunk's own, of which the graph is a
part) stay with the hooks; the graph schedules the units below.
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from ..context import FSDPContext, context_of_unit
from ..inspection import show
from ..units import Unit, unit_of_tensor
from .capture import (
    RegionCompilerName,
    aot_backend,
    decomposition_table,
    inference_graph,
    placeholder_inputs,
    static_inputs,
)
from .execution import Direction, ScheduledGraph
from .host_graph import region_texts
from .partition import make_partition_fn
from .products import accumulate_products
from .regions import CompiledRegion, RegionCompiler, split
from .torch_internals import unknown_inductor_options

__all__ = ["fsdp_fx"]

logger = logging.getLogger("fsdp_fx")

_OPTIONS = ("region_compiler", "fallback_random", "accumulate_in_products", "inductor")

_graph_numbers: weakref.WeakKeyDictionary[FSDPContext, itertools.count[int]] = (
    weakref.WeakKeyDictionary()
)
_region_compilers: weakref.WeakKeyDictionary[FSDPContext, dict[str, RegionCompiler]] = (
    weakref.WeakKeyDictionary()
)


def fsdp_fx(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a captured graph into regions scheduled by the program.

    Args:
        gm: the graph that Dynamo captured.
        example_inputs: its inputs, parameters included.
        options: ``region_compiler``: ``"inductor"`` (default), ``"eager"``, or a callable
            from graph and example inputs to a callable; ``fallback_random``: whether
            Inductor follows eager's random numbers (default True);
            ``accumulate_in_products``: whether weight gradients are added up by the matrix
            products that compute them (default True; False if ``region_compiler`` is a
            callable); ``inductor``: a dict of Inductor configuration.
        mode: must be None or ``"default"``.

    Raises:
        ValueError: an unknown option, or a mode.
        RuntimeError: a parameter is sharded but belongs to no adopted module, or is
            tensor-parallel or of another tensor subclass.
    """
    given = _read_options(options, mode)
    region_compiler, fallback_random = given.region_compiler, given.fallback_random
    units = {
        index: unit
        for index, value in enumerate(example_inputs)
        if isinstance(value, torch.Tensor) and (unit := unit_of_tensor(value)) is not None
    }
    _refuse_sharded(gm, example_inputs, units)
    context = context_of_unit(next(iter(units.values()))) if units else None
    managed: dict[Unit, int] = {}
    for unit in units.values():
        # What a hook holds by now, the hook frees.
        if not unit.holds:
            managed.setdefault(unit, len(managed))
    compiler = _region_compiler(context, region_compiler, fallback_random, given.inductor)
    parameter_slots = {index: managed[unit] for index, unit in units.items() if unit in managed}
    borrowed = {index for index, unit in units.items() if unit not in managed}
    # In which each gradient may be added up.
    dtypes = {
        index: units[index].gradient_dtype(example_inputs[index])
        for index in parameter_slots
        if given.accumulate_in_products and example_inputs[index].requires_grad
    }
    neutral = static_inputs(example_inputs) - parameter_slots.keys()
    number = next(_graph_numbers.setdefault(context, itertools.count())) if context else -1
    if context is not None:
        context.report.captured_graphs += 1
    # The backward is compiled later: until then nothing here may keep the model alive.
    weak_context = weakref.ref(context) if context is not None else lambda: None
    del units, managed, context

    def compile_graph(
        graph: fx.GraphModule, direction: Direction, differentiable: bool
    ) -> Callable[..., Any]:
        began = time.perf_counter()
        inputs = placeholder_inputs(graph)
        slots = {name: parameter_slots[i] for name, i in inputs.items() if i in parameter_slots}
        # A backward may see fewer slots than its forward: count them anew.
        order = {slot: place for place, slot in enumerate(sorted(set(slots.values())))}
        slots = {name: order[slot] for name, slot in slots.items()}
        accumulators: Collection[str] = ()
        if direction == "backward":
            named = {name: dtypes[index] for name, index in inputs.items() if index in dtypes}
            graph, accumulators = accumulate_products(graph, named)
        pieces = split(
            graph,
            slots,
            neutral=[name for name, index in inputs.items() if index in neutral],
            accumulators=accumulators,
        )
        before = compiler.distinct_regions, compiler.cache_hits
        runs = _name_regions([compiler(region) for region in pieces.regions])
        distinct, cached = compiler.distinct_regions - before[0], compiler.cache_hits - before[1]
        title = f"graph {number} {direction}"
        logger.info(
            "%s: %d regions, %d of them new, %d of these from the cache, %.2f s",
            title,
            len(runs),
            distinct,
            cached,
            time.perf_counter() - began,
        )
        names = [run.__name__ for run in runs]
        show("regions", f"{title} regions", lambda: "\n\n".join(region_texts(pieces, names)))
        context = weak_context()
        if context is not None:
            report = context.report
            report.distinct_regions += distinct
            report.cached_regions += cached
            report.region_uses += len(runs)
            report.compile_seconds += time.perf_counter() - began
        scheduled = ScheduledGraph(
            number,
            direction,
            pieces,
            runs,
            slots,
            [name for name, index in inputs.items() if index in borrowed],
            differentiable,
        )

        def run(arguments: list[Any]) -> Sequence[Any]:
            return scheduled(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return aot_backend(
        gm,
        example_inputs,
        partition_fn=make_partition_fn(
            parameter_slots,
            region_compiler=region_compiler,
            fallback_random=fallback_random,
            neutral_inputs=neutral,
        ),
        fw_compiler=lambda graph, inputs: compile_graph(graph, "forward", True),
        bw_compiler=lambda graph, inputs: compile_graph(graph, "backward", False),
        inference_compiler=lambda graph, inputs: compile_graph(
            inference_graph(graph, region_compiler, fallback_random=fallback_random),
            "inference",
            False,
        ),
        decompositions=decomposition_table(region_compiler, fallback_random=fallback_random),
        parameter_inputs=parameter_slots,
    )


fsdp_fx.schedules_units = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Options:
    """What a user may set; see :func:`fsdp_fx`."""

    region_compiler: RegionCompilerName
    fallback_random: bool
    accumulate_in_products: bool
    inductor: Mapping[str, Any]


def _read_options(options: Mapping[str, Any] | None, mode: str | None) -> _Options:
    if mode not in (None, "default"):
        raise ValueError(
            f"mode={mode!r} has no effect on backend fsdp_fx, which cannot use CUDA graphs: pass "
            'other settings of Inductor as options={"inductor": {...}}'
        )
    given = dict(options or {})
    unknown = [name for name in given if name not in _OPTIONS]
    if unknown:
        raise ValueError(
            f"option {unknown[0]!r} of backend fsdp_fx is unknown: use {', '.join(_OPTIONS)}"
        )
    region_compiler = given.get("region_compiler", "inductor")
    if not callable(region_compiler) and region_compiler not in ("inductor", "eager"):
        raise ValueError(
            f'region_compiler={region_compiler!r} is unknown: use "inductor", "eager", or a '
            "callable"
        )
    for name in ("inductor", "fallback_random"):
        if name in given and region_compiler != "inductor":
            raise ValueError(
                f"option {name!r} has no effect with region_compiler={region_compiler!r}: remove it"
            )
    inductor = given.get("inductor", {})
    for name, kind, words in (
        ("fallback_random", bool, "True or False"),
        ("accumulate_in_products", bool, "True or False"),
        ("inductor", Mapping, "a dict of Inductor's configuration"),
    ):
        if name in given and not isinstance(given[name], kind):
            raise ValueError(f"option {name!r} is {words}, not {given[name]!r}")
    if strange := unknown_inductor_options(inductor):
        raise ValueError(
            f"options={{'inductor': {{{strange[0]!r}: ...}}}}: torch._inductor.config has no "
            f"{strange[0]!r}"
        )
    if any(name.startswith("triton.cudagraph") and value for name, value in inductor.items()):
        raise ValueError(
            "CUDA graphs are not supported: a region's parameters are at another address after "
            "each gather; remove the triton.cudagraphs option"
        )
    return _Options(
        region_compiler,
        given.get("fallback_random", True),
        # A compiler of one's own may hand operators copies of a graph's inputs.
        given.get("accumulate_in_products", not callable(region_compiler)),
        inductor,
    )


def _refuse_sharded(
    gm: fx.GraphModule, example_inputs: Sequence[Any], units: Mapping[int, Unit]
) -> None:
    parameters = 0
    # Dynamo's names say where in the module an input comes from.
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    for index, value in enumerate(example_inputs):
        if not isinstance(value, nn.Parameter):
            continue
        parameters += 1
        if isinstance(value, DTensor) and index not in units:
            raise RuntimeError(
                f"parameter {names[index]} of the captured graph, of shape "
                f"{tuple(value.shape)}, is a "
                "sharded DTensor that belongs to no adopted module: call adopt() with the module "
                "before its first forward, and compile the adopted module itself, not a function "
                "around it"
            )
        if isinstance(value, DTensor):
            raise RuntimeError(
                f"parameter {names[index]} of unit {units[index].spec.name} is tensor-parallel (a "
                f"DTensor on mesh {value.device_mesh.mesh_dim_names or value.device_mesh}), which "
                "no captured graph can be scheduled with yet: leave the chunk eager, or compile "
                "modules without units of their own inside of it with another backend"
            )
        if index in units and hasattr(value, "__tensor_flatten__"):
            # AOTAutograd takes it apart; the storages of its parts name no unit.
            raise RuntimeError(
                f"parameter {names[index]} of unit {units[index].spec.name} is a "
                f"{type(value).__name__}, made by its fsdp_post_all_gather(), and no captured graph "
                "can be scheduled with a tensor subclass yet: leave the chunk eager, or have "
                "fsdp_post_all_gather() make an ordinary tensor"
            )
    if parameters and not units:
        logger.warning(
            "a captured graph with %d parameters has none of an adopted module: it is compiled "
            "without a schedule; call adopt() before the first forward, or, after release(), compile "
            "with another backend",
            parameters,
        )


def _region_compiler(
    context: FSDPContext | None,
    region_compiler: RegionCompilerName,
    fallback_random: bool,
    inductor: Mapping[str, Any],
) -> RegionCompiler:
    """The context's compiler for these options: chunks share what it has compiled."""
    if context is None:
        return RegionCompiler(region_compiler, fallback_random=fallback_random, options=inductor)
    known = _region_compilers.setdefault(context, {})
    key = repr((region_compiler, fallback_random, sorted(inductor.items())))
    if key not in known:
        known[key] = RegionCompiler(
            region_compiler, fallback_random=fallback_random, options=inductor
        )
    return known[key]


def _name_regions(runs: Sequence[CompiledRegion]) -> list[CompiledRegion]:
    """Functions with names to print, one per distinct region: region_0, region_1, ..."""
    named: dict[int, CompiledRegion] = {}
    for run in runs:
        if id(run) not in named:
            named[id(run)] = _named(run, f"region_{len(named)}")
    return [named[id(run)] for run in runs]


def _named(run: CompiledRegion, name: str) -> CompiledRegion:
    def call(inputs: list[Any]) -> Sequence[Any]:
        return run(inputs)

    call.__name__ = call.__qualname__ = name
    call.__module__ = "fsdp_fx"
    return call
