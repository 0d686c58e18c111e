"""The private torch names that the compile backend needs, in one place.

Every other module of :mod:`fsdp_fx.compile` imports them from here, so an unsupported
torch says once, by name, what is missing. Inductor is imported only when it is used:
the "eager" region compiler works without it.

This module decides nothing: no graph is changed here except by torch's own passes.
Supported: torch 2.11 to 2.14.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

__all__ = [
    "SUPPORTED_TORCH",
    "CacheCounts",
    "aot_autograd",
    "base_symbol",
    "boxed_codegen",
    "cache_counts",
    "clear_donated_buffers",
    "compile_with_inductor",
    "flat_input_index",
    "free_symbol_names",
    "gradient_input_index",
    "inductor_decompositions",
    "is_static_input",
    "min_cut_rematerialization_partition",
    "mutated_input_index",
    "parameter_alias_outputs",
    "run_joint_graph_passes",
    "shape_env_of",
    "tracing_of_its_own",
    "unknown_inductor_options",
]

SUPPORTED_TORCH = "2.11 to 2.14"


@contextlib.contextmanager
def _named_on_failure() -> Iterator[None]:
    """Turns a failed import of a private name into one that says what is supported."""
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"fsdp_fx.compile supports torch {SUPPORTED_TORCH}, this is torch "
            f"{torch.__version__}, which lacks a name that it needs: {error}",
            name=error.name,
            path=error.path,
        ) from error


with _named_on_failure():
    # AOTAutograd as a Dynamo backend.
    from torch._dynamo.backends.common import aot_autograd

    # What torch.compile counts.
    from torch._dynamo.utils import counters

    # What a placeholder or an output of an AOTAutograd graph stands for.
    from torch._functorch._aot_autograd.descriptors import (
        GradAOTOutput,
        InputMutationAOTOutput,
        PlainAOTInput,
        SubclassGetAttrAOTInput,
        SubclassGetAttrAOTOutput,
    )

    # The partitioner that weighs saving against recomputing.
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    # What AOTAutograd knows of the graph that is being compiled.
    from torch._guards import TracingContext, tracing

    # The symbols that sizes, strides and SymInts are made of.
    from torch.fx.experimental.symbolic_shapes import free_symbols

    # The calling convention in which a graph takes one list and clears it.
    from torch.fx.graph import CodeGen, _BoxedCodeGen


# --- what placeholders and outputs stand for ------------------------------------------


def flat_input_index(placeholder: fx.Node) -> int | None:
    """The flat index of the AOTAutograd input that a placeholder is (or is a part of)."""
    desc = placeholder.meta.get("desc")
    while isinstance(desc, SubclassGetAttrAOTInput):
        desc = desc.base
    return desc.idx if isinstance(desc, PlainAOTInput) else None


def gradient_input_index(output_desc: object) -> int | None:
    """The flat index of the input whose gradient an output of a joint graph is."""
    while isinstance(output_desc, SubclassGetAttrAOTOutput):
        output_desc = output_desc.base
    if not isinstance(output_desc, GradAOTOutput):
        return None
    grad_of: object = output_desc.grad_of
    while isinstance(grad_of, SubclassGetAttrAOTInput):
        grad_of = grad_of.base
    return grad_of.idx if isinstance(grad_of, PlainAOTInput) else None


def mutated_input_index(output_desc: object) -> int | None:
    """The flat index of the input whose new value an output of a joint graph is."""
    if not isinstance(output_desc, InputMutationAOTOutput):
        return None
    mutated: object = output_desc.mutated_input
    return mutated.idx if isinstance(mutated, PlainAOTInput) else None


def is_static_input(value: object) -> bool:
    """Whether Dynamo lifted this example input from a module (a parameter or a buffer)."""
    return getattr(value, "_dynamo_static_input_type", None) is not None


def parameter_alias_outputs(parameter_inputs: Mapping[int, int]) -> list[int]:
    """Positions of user outputs that alias a managed parameter; call it in a compiler.

    Such an output cannot work: the storage that it views is freed after the call.
    """
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return []
    return [
        position
        for position, info in enumerate(context.fw_metadata.output_info)
        if info.output_type.name in ("alias_of_input", "is_input")
        and info.base_idx in parameter_inputs
    ]


def clear_donated_buffers() -> None:
    """Forgets which saved tensors the backward may overwrite; call it in a forward compiler.

    The indices count the inputs of the whole backward, so they mean nothing to a region,
    and a backward with donated buffers refuses ``retain_graph=True``.
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


# --- symbolic shapes ------------------------------------------------------------------


def free_symbol_names(value: object) -> list[str]:
    """The sorted names of the symbols in a SymInt or in the sizes and strides of a tensor."""
    return sorted(str(symbol) for symbol in free_symbols(value))


def base_symbol(value: object) -> str | None:
    """The name of the symbol that a SymInt *is*, or None if it is an expression or no SymInt."""
    if not isinstance(value, torch.SymInt):
        return None
    expression = value.node.expr
    return str(expression) if expression.is_Symbol else None


def shape_env_of(value: object) -> object | None:
    """The shape environment that a SymInt or a tensor with symbolic sizes lives in."""
    if isinstance(value, torch.Tensor):
        candidates: Sequence[object] = (*value.shape, *_strides(value))
    else:
        candidates = (value,)
    for candidate in candidates:
        if isinstance(candidate, torch.SymInt | torch.SymFloat | torch.SymBool):
            return candidate.node.shape_env
    return None


def _strides(value: torch.Tensor) -> Sequence[object]:
    return value.stride() if value.layout is torch.strided else ()


# --- code -----------------------------------------------------------------------------


def boxed_codegen() -> CodeGen:
    """The code generation by which a graph's function takes one list and clears it."""
    return _BoxedCodeGen()


# --- Inductor -------------------------------------------------------------------------


def inductor_decompositions(*, fallback_random: bool) -> dict[Any, Callable[..., Any]]:
    """The decompositions that Inductor wants AOTAutograd to apply.

    With ``fallback_random`` random operators stay whole, which eager's numbers need.
    """
    with _named_on_failure():
        from torch._inductor import config
        from torch._inductor.decomposition import select_decomp_table
    with config.patch(fallback_random=fallback_random):
        return dict(select_decomp_table())


def unknown_inductor_options(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that Inductor's configuration does not have."""
    names = list(names)
    if not names:
        return []
    with _named_on_failure():
        from torch._inductor import config
    known = config.get_config_copy()
    return [name for name in names if name not in known]


def run_joint_graph_passes(gm: fx.GraphModule, *, fallback_random: bool) -> fx.GraphModule:
    """Inductor's passes over a whole joint (or inference) graph, before it is partitioned.

    Without them Inductor refuses operators such as dropout in the regions.
    """
    with _named_on_failure():
        from torch._guards import detect_fake_mode
        from torch._inductor import config
        from torch._inductor.compile_fx import _recursive_joint_graph_passes
        from torch._inductor.virtualized import V

    values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    fake_mode = detect_fake_mode(tensors)
    with V.set_fake_mode(fake_mode), config.patch(fallback_random=fallback_random):
        return _recursive_joint_graph_passes(
            gm,
            skip_invoke_subgraph=True,
            input_device=tensors[0].device if tensors else None,
        )


class CacheCounts(NamedTuple):
    """What Inductor's persistent cache has been asked for in this process."""

    hits: int
    misses: int
    bypasses: int


def cache_counts() -> CacheCounts:
    """How often graphs were found in Inductor's cache, were not, or could not be kept there."""
    inductor = counters["inductor"]
    return CacheCounts(*(inductor[f"fxgraph_cache_{what}"] for what in ("hit", "miss", "bypass")))


@contextlib.contextmanager
def tracing_of_its_own(example_inputs: Sequence[Any]) -> Iterator[None]:
    """Keeps what AOTAutograd knows of the whole graph from a compiler of one region."""
    with _named_on_failure():
        from torch._guards import detect_fake_mode

    with tracing(TracingContext(detect_fake_mode(example_inputs))):
        yield


def compile_with_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    fallback_random: bool,
    donated: Sequence[int],
    cache_key_tag: str,
    options: Mapping[str, Any],
) -> Callable[[list[Any]], Sequence[Any]]:
    """Compiles one region with Inductor; the graph is consumed.

    - A fresh tracing context: the outer one describes the whole graph, and Inductor would
      read strides and donated buffers from it by the region's own indices.
    - Of inputs, only the donated ones may be overwritten, which Inductor does in a backward:
      it is told of one only if some are.
    - Every output is user-visible, so that its strides are those that the next region expects.
    - The tag, with what is donated, is part of the key of Inductor's cache, which knows nothing
      of the above.
    """
    with _named_on_failure():
        from torch._guards import detect_fake_mode
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.utils import BoxedBool

    output = gm.graph.output_node()
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # type: ignore[arg-type]
    patches = {"fallback_random": fallback_random, **options}
    context = TracingContext(detect_fake_mode(example_inputs))
    if donated:
        # Inductor reads no more of AOTAutograd's metadata than this.
        metadata: Any = types.SimpleNamespace(
            bw_donated_idxs=list(donated), static_input_indices=[]
        )
        context.fw_metadata = metadata
        cache_key_tag = f"{cache_key_tag} donated {','.join(map(str, donated))}"
    with (
        torch.compiler.config.patch(cache_key_tag=cache_key_tag),  # type: ignore[attr-defined]
        config.patch(patches),
        tracing(context),
    ):
        return compile_fx_inner(
            gm, example_inputs, cudagraphs=BoxedBool(False), is_backward=bool(donated)
        )
