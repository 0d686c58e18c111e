"""Activation checkpointing in every mode and placement: what is gathered when, right gradients.

The table of ``docs/recomputation.md`` is what the counts are compared with.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fsdp_fx.torch_internals import current_graph_task
from models import DIM
from test_semantics import Twin, at_rest, count, counting, data, events, on_two_ranks, resident

Row = tuple[str, str, int, int, int]


def rows_of_the_document() -> list[Row]:
    """The table: checkpoint, around what, gathers in recording, in replay, on demand."""
    document = Path(__file__).parents[1] / "docs" / "recomputation.md"
    pattern = r"^\| ([^|]+) \| ([^|]+) \| (\d+) \| (\d+) \| (\d+) \|$"
    found = re.findall(pattern, document.read_text(), flags=re.MULTILINE)
    return [(mode, around, int(a), int(b), int(c)) for mode, around, a, b, c in found]


MODES = ["none", "non-reentrant", "non-reentrant, no early stop", "reentrant", "selective"]
PLACEMENTS = ["each unit", "each layer", "the whole chunk"]


def keep_matmuls(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def keep_everything(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def under(
    mode: str, function: Callable[..., Any], x: torch.Tensor, policy: Any = keep_matmuls
) -> Any:
    """Run ``function`` under a checkpoint of this mode."""
    if mode == "none":
        return function(x)
    if mode == "reentrant":
        return checkpoint(function, x, use_reentrant=True)
    options: dict[str, Any] = {}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    if mode == "non-reentrant, no early stop":
        options["early_stop"] = False
    return checkpoint(function, x, use_reentrant=False, **options)


def differentiable(x: torch.Tensor) -> torch.Tensor:
    """What a reentrant checkpoint needs as input."""
    return x if x.requires_grad else x.clone().requires_grad_()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Layers(nn.Module):
    """The model of the document: two layers with two units each."""

    def __init__(self, mode: str = "none", around: str = "nothing", layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.mode, self.around = mode, around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = differentiable(x)
        for layer in self.layers:
            if self.around == "each layer":
                x = under(self.mode, layer, x)
            elif self.around == "each unit":
                hidden = torch.tanh(under(self.mode, layer.up, x))
                x = x + under(self.mode, layer.down, hidden)
            else:
                x = layer(x)
        return x


class Around(nn.Module):
    """A checkpoint around modules; it is not adopted itself."""

    def __init__(self, mode: str, *modules: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*modules)
        self.mode = mode

    def forward(self, x: torch.Tensor) -> Any:
        return under(self.mode, self.inner, differentiable(x))


class Watch:
    """What the recomputations of a twin's units did: how often they ran, and prefetched."""

    def __init__(self, twin: Twin) -> None:
        self.runs: list[str] = []
        self.prefetched = 0
        self.context = twin.context
        for chunk in twin.chunks:
            for path, module in chunk.named_modules():
                if isinstance(module, nn.Linear):
                    module.register_forward_pre_hook(partial(self.before, path), prepend=True)
                    module.register_forward_hook(self.after, always_call=True)

    def before(self, path: str, *_: Any) -> None:
        self.start = self.context.stats.prefetched_gathers
        if current_graph_task() != -1:
            self.runs.append(path)

    def after(self, *_: Any) -> None:
        if current_graph_task() != -1:
            self.prefetched += self.context.stats.prefetched_gathers - self.start


def document_twin(mode: str, around: str, chunks: int = 1) -> Twin:
    """The model of the document under this checkpoint."""
    twin = Twin(*(Layers(mode, around) for _ in range(chunks)))
    if around == "the whole chunk":
        for side in (twin.chunks, twin.whole):
            side[:] = [Around(mode, chunk) for chunk in side]
    return twin


def test_document_has_every_mode_in_every_placement() -> None:
    expected = [("none", "nothing")]
    expected += [(mode, around) for mode in MODES[1:] for around in PLACEMENTS]
    assert [(mode, around) for mode, around, *_ in rows_of_the_document()] == expected


@on_two_ranks(row=rows_of_the_document())
def test_gathers_per_window_are_those_of_the_document(row: Row) -> None:
    mode, around, recorded, replayed, on_demand = row
    twin = document_twin(mode, around)
    watch = Watch(twin)
    spent = twin.window("F0 B0")
    assert spent.recorded_windows == 1
    assert spent.gathers == spent.on_demand_gathers == spent.frees == recorded
    up_down = [f"layers.{i}.{name}" for i in (0, 1) for name in ("up", "down")]
    backwards = [f"{name}B0" for name in reversed(up_down)]
    assert events(twin.context).split() == [f"{name}F0" for name in up_down] + backwards
    for _ in range(2):
        spent = twin.window("F0 B0")
        assert spent.replayed_windows == 1
        assert spent.gathers == spent.frees == replayed == count(twin.context.program, "gather")
        assert spent.on_demand_gathers == on_demand
        assert spent.divergences == spent.dropped_gathers == 0
        assert spent.reductions == 4
    assert bool(watch.runs) == (mode != "none")
    assert watch.prefetched == 0


@on_two_ranks(mode=MODES, around=PLACEMENTS)
def test_recomputation_of_several_microbatches_and_chunks_is_no_event(
    mode: str, around: str
) -> None:
    if (mode == "selective" or "no early" in mode) and around == "each unit":
        return  # as non-reentrant
    for calls in ("F0 F1 B0 B1", "c0F0 c1F0 c0F1 c1B0 c1F1 c0B0 c1B1 c0B1"):
        twin = document_twin(mode, around, chunks=2)
        watch = Watch(twin)
        for step in range(3):
            spent = twin.window(calls)
            assert spent.replayed_windows == (step > 0)
            assert spent.divergences == spent.dropped_gathers == 0
            assert spent.reductions == 16
            assert spent.gathers == (count(twin.context.program, "gather") if step else 32)
        trace = twin.context.trace
        assert trace is not None
        assert [e.microbatch for e in trace if e.unit == "c0.layers.0.up"] == [0, 1, 0, 1]
        assert watch.prefetched == 0


def wholly(twin: Twin, mode: str) -> None:
    """One checkpoint around both chunks, one call after the other, on both sides."""
    for side in (twin.chunks, twin.whole):
        side[:] = [Around(mode, *side)]


@on_two_ranks(mode=MODES[1:])
def test_one_checkpoint_around_two_chunks_repeats_the_calls_of_both(mode: str) -> None:
    twin = Twin(Layers(), Layers())
    wholly(twin, mode)
    for step in range(3):
        spent = twin.window("F0 F1 B1 B0")
        assert spent.replayed_windows == (step > 0)
        assert spent.divergences == 0
        assert spent.reductions == 16
    trace = twin.context.trace
    assert trace is not None
    assert [e.microbatch for e in trace if e.unit == "c1.layers.0.up"] == [0, 1, 1, 0]


class Nested(nn.Module):
    """A checkpoint around a layer whose units are under a checkpoint each."""

    def __init__(self, outer: str, inner: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.outer, self.inner = outer, inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = differentiable(x)
        for layer in self.layers:
            x = under(self.outer, partial(self.part, layer), x)
        return x

    def part(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(under(self.inner, layer.up, x))
        return x + under(self.inner, layer.down, hidden)


@on_two_ranks(outer=["non-reentrant", "reentrant"], inner=["non-reentrant", "reentrant"])
def test_nested_checkpoints_keep_the_events_and_the_number_of_gathers(
    outer: str, inner: str
) -> None:
    twin = Twin(Nested(outer, inner))
    watch = Watch(twin)
    assert twin.window("F0 F1 B0 B1").gathers == 16
    for _ in range(2):
        spent = twin.window("F0 F1 B0 B1")
        assert spent.replayed_windows == 1
        assert spent.gathers == count(twin.context.program, "gather")
        assert spent.reductions == 8
        assert spent.dropped_gathers == 0
    assert len(watch.runs) > 3 * 8, "the inner checkpoints run again too"
    assert watch.prefetched == 0


@on_two_ranks(mode=["non-reentrant", "reentrant"])
def test_nested_checkpoints_around_a_whole_chunk_repeat_its_call(mode: str) -> None:
    twin = Twin(Layers())
    for side in (twin.chunks, twin.whole):
        side[:] = [Around("reentrant", Around(mode, chunk)) for chunk in side]
    for step in range(3):
        spent = twin.window("F0 F1 B0 B1")
        assert spent.replayed_windows == (step > 0)
        assert spent.divergences == 0
        assert spent.reductions == 8


class Grouped(nn.Module):
    """A layer that holds four layers' units, checkpointed as a whole."""

    def __init__(self, mode: str, own: bool) -> None:
        super().__init__()
        self.block = Block(own)
        self.mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return under(self.mode, self.block, differentiable(x))


class Block(nn.Module):
    """Four linears, each a unit, and perhaps parameters of its own."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.fc = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(DIM)) if own else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.fc:
            x = torch.tanh(layer(x))
        return x if self.scale is None else x * self.scale


@on_two_ranks(own=[False, True], mode=["non-reentrant", "reentrant"])
def test_checkpointed_layer_gathers_its_child_units_once_more_and_no_oftener(
    mode: str, own: bool
) -> None:
    twin = Twin(Grouped(mode, own), units=(nn.Linear, Block) if own else nn.Linear)
    assert twin.window("F0 B0").gathers == 2 * (4 + own)
    for _ in range(2):
        spent = twin.window("F0 B0")
        # The last unit's forward and backward share a gather; so do those of the block,
        # whose backward is the next event after the last forward.
        assert spent.gathers == 2 * (4 + own) - 1 == count(twin.context.program, "gather")
        # With parameters of its own, the block and not its last linear stays for the backward.
        # Only without reentrance does that begin, and gather ahead, before the recomputation.
        assert spent.on_demand_gathers == 4 + (own and mode == "reentrant")
        assert spent.reductions == 4 + own


class Squared(nn.Module):
    """A checkpointed block of which only ``fc1`` is a unit; its output is used twice."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.fc1 = nn.Linear(DIM, DIM)
        self.mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = differentiable(x)
        return under(self.mode, self.part, x) * under(self.mode, self.part, x)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.fc1(x))


@on_two_ranks(mode=MODES[1:], prefetch=[None, 0])
def test_second_recomputation_finds_its_unit_freed_and_gathers_it(
    mode: str, prefetch: int | None
) -> None:
    twin = Twin(
        Squared(mode),
        loss=torch.sum,
        forward_prefetch=prefetch,
        backward_prefetch=prefetch,
    )
    watch = Watch(twin)
    there: list[bool] = []
    twin.chunks[0].fc1.register_forward_pre_hook(
        lambda *_: there.append(bool(resident(twin.context))), prepend=True
    )
    for step in range(3):
        there.clear()
        spent = twin.window("F0 B0")
        assert spent.divergences == spent.dropped_gathers == 0
        assert spent.reductions == 1, "once, after both contributions"
        if step and prefetch is None:
            assert spent.gathers == 1
            assert there == [False, True, True, True]
        else:
            assert spent.gathers == spent.on_demand_gathers == 4
            assert there == [False] * 4
    assert events(twin.context) == "fc1F0 fc1F1 fc1B0 fc1B1"
    assert watch.runs == ["fc1"] * 6


@on_two_ranks(policy=[keep_matmuls, keep_everything], around=["each unit", "each layer"])
def test_what_a_selective_checkpoint_keeps_is_not_what_a_gather_did(
    policy: Any, around: str
) -> None:
    """The policy is asked about the operations of the model only."""
    asked: set[str] = set()

    def ask(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.add(str(operator))
        return policy(context, operator, *args, **kwargs)

    class Selective(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                if around == "each layer":
                    x = under("selective", layer, x, ask)
                else:
                    hidden = torch.tanh(under("selective", layer.up, x, ask))
                    x = x + under("selective", layer.down, hidden, ask)
            return x

    twin = Twin(Selective())
    for _ in range(3):
        twin.run("F0 F1 B0 B1")
        assert not any("c10d" in each or "fsdp" in each for each in asked), asked
        twin.context.finish_grad_sync()
        twin.check()


@on_two_ranks(mode=["non-reentrant", "reentrant"])
def test_checkpointed_evaluation_is_no_call_of_the_window(mode: str) -> None:
    twin = document_twin(mode, "the whole chunk")
    chunk, context = twin.chunks[0], twin.context
    x = data(5, 5)[dist.get_rank()]

    def evaluate() -> None:
        with torch.no_grad():
            chunk(x)
        with context.evaluation():
            chunk(x)
        if mode == "reentrant":
            checkpoint(chunk.inner, x, use_reentrant=True)  # no input needs a gradient
        chunk.eval()
        chunk(x)
        chunk.train()

    evaluate()
    assert at_rest(context)
    assert not context.window.is_open
    for _ in range(2):
        with counting(context) as spent:
            twin.run("F0")
            before = resident(context)
            evaluate()
            assert resident(context) == before
            twin.run("B0")
            context.finish_grad_sync()
        twin.check()
    assert spent.replayed_windows == 1


@on_two_ranks(mode=["non-reentrant", "reentrant"])
def test_backward_of_an_evaluation_that_is_checkpointed_adds_its_gradients(mode: str) -> None:
    for around in PLACEMENTS:
        twin = document_twin(mode, around)
        for _ in range(2):
            with twin.context.evaluation():
                twin.run("F1")
            twin.run("F0 B0 B1")
            twin.context.finish_grad_sync()
            twin.check()
        assert len(twin.context.trace or ()) == 8


@on_two_ranks(mode=["registration"])
def test_registration_mode_schedules_a_chunk_under_a_reentrant_checkpoint(mode: str) -> None:
    twin = Twin(Layers(), mode=mode)
    for side in (twin.chunks, twin.whole):
        side[:] = [Around("reentrant", *side)]
    for _ in range(3):
        with counting(twin.context) as spent:
            twin.run("F0 B0")
        assert spent.windows == spent.replayed_windows == 1
        assert not twin.context.window.is_open
        twin.check()


@on_two_ranks()
def test_missing_backward_of_a_chunk_under_a_reentrant_checkpoint_is_named() -> None:
    from fsdp_fx import IncompleteWindowError
    from test_semantics import refused

    twin = document_twin("reentrant", "the whole chunk")
    for _ in range(2):
        twin.run("F0 F1 B0")
        with refused(IncompleteWindowError, "the backward of chunk c0, microbatch 1 is missing"):
            twin.context.finish_grad_sync()
        twin.run("B1")
        twin.context.finish_grad_sync()
        twin.check()


@on_two_ranks()
def test_module_called_alone_under_a_reentrant_checkpoint_is_scheduled() -> None:
    """A unit entered without its chunk: its call is repeated like a chunk's."""
    twin = Twin(Layers())
    chunks = [*twin.both()]
    for side, chunk in zip((twin.chunks, twin.whole), chunks, strict=True):
        side[:] = [nn.Sequential(*(Around("reentrant", layer.up) for layer in chunk.layers))]
    for step in range(3):
        spent = twin.window("F0 F1 B0 B1")
        assert spent.replayed_windows == (step > 0)
        assert spent.divergences == 0
        assert spent.reductions == 4
