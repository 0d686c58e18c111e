"""Small models on which systems of this kind have failed, run through the compile backend.

Each is a numbered case, and :data:`CASES` says where it is tested. Every window is compared with
the same chunks whole: gradients, then weights after an optimizer step; every unit must be sharded
at its end, and the counters must have gone up by what the program says. Graphs and regions are
torch's own operators (``region_compiler="eager"``); what Inductor adds is tested elsewhere.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from fsdp_fx import IncompleteWindowError
from fsdp_fx.compile.backend import fsdp_fx as backend
from fsdp_fx.units import unit_of_tensor
from models import DIM, Block, Chunk, cpu_mesh, linears
from test_gradients import Pair, Plain, Tied, _train, in_passes
from test_owner_hooks import Layer as LayerOfNodes
from test_recomputation import Block as FourLinears
from test_recomputation import Grouped, Squared
from test_semantics import (
    EVALUATIONS,
    SCHEDULES,
    Before,
    Branching,
    Checkpointed,
    LowRank,
    Structured,
    Sum,
    Twin,
    Wrapped,
    assert_replayed,
    at_rest,
    counting,
    data,
    events,
    first_tensor,
    full_state,
    on_two_ranks,
    refused,
    resident,
    warnings_of,
)
from test_shared_context import BLOCK, laps
from training import VOCABULARY, AcquireSpy, Setup, interleaved, make_chunks, set_up

HERE = "test_compiled_cases"

CASES: dict[int, tuple[str, ...]] = {
    1: (f"{HERE}::test_case_1_evaluations_leave_cursor_trace_and_residency_as_they_were",),
    2: (f"{HERE}::test_case_2_second_backward_gathers_again_unless_it_is_the_next_event",),
    3: (f"{HERE}::test_cases_3_and_5_any_order_over_chunks_that_share_a_context",),
    4: (
        f"{HERE}::test_case_4_branch_diverges_once_and_is_known_after",
        "test_compiled::test_a_branch_in_a_compiled_chunk_diverges_once_and_is_known_after",
    ),
    5: (f"{HERE}::test_cases_3_and_5_any_order_over_chunks_that_share_a_context",),
    6: (f"{HERE}::test_case_6_two_laps_over_four_chunks_with_at_most_three_units_resident",),
    7: (f"{HERE}::test_case_7_shape_inference_before_the_first_step_is_no_event",),
    8: (f"{HERE}::test_case_8_retry_after_an_exception_equals_the_reference",),
    9: (f"{HERE}::test_case_9_recomputation_is_no_event",),
    10: (f"{HERE}::test_case_10_block_that_is_recomputed_twice_has_one_gather",),
    11: (f"{HERE}::test_case_11_checkpointed_layer_has_an_exact_number_of_gathers",),
    12: (f"{HERE}::test_case_12_tied_weights_are_reduced_once_after_all_contributions",),
    13: (f"{HERE}::test_case_13_frozen_units_are_gathered_and_freed_but_never_reduced",),
    14: (f"{HERE}::test_case_14_all_frozen_at_first_and_trained_later",),
    15: (f"{HERE}::test_case_15_delayed_weight_gradients",),
    16: (
        f"{HERE}::test_case_16_identical_chunks_call_the_backend_once_and_use_their_own_units",
        "test_compiled::test_three_identical_chunks_share_one_graph_and_gather_their_own_units",
    ),
    17: (f"{HERE}::test_case_17_backward_is_compiled_after_several_forwards",),
    18: (
        f"{HERE}::test_case_18_views_and_casts_of_parameters_are_not_saved",
        "test_partition::test_nothing_made_from_parameters_is_saved",
        "test_compiled::test_no_saved_value_is_or_copies_a_full_parameter",
    ),
    19: (
        f"{HERE}::test_case_19_collectives_and_casts_in_the_graph",
        f"{HERE}::test_case_19_sharded_parameter_that_was_not_adopted_is_named",
    ),
    20: (
        f"{HERE}::test_case_20_module_called_twice_with_a_view_saved",
        "test_regions::test_the_last_region_covers_views_and_later_uses",
    ),
    21: (
        f"{HERE}::test_case_21_lengths_compile_a_bounded_number_of_graphs_in_one_order",
        f"{HERE}::"
        "test_case_21_lengths_beyond_the_limit_of_recompilations_run_eagerly_and_are_named",
    ),
    22: (f"{HERE}::test_case_22_one_rank_alone_recompiles",),
    23: (f"{HERE}::test_case_23_running_statistics_equal_the_reference",),
    24: (f"{HERE}::test_case_24_backward_events_of_structured_outputs_are_seen",),
    25: (
        "test_compiled::test_what_the_backend_cannot_do_is_an_error_that_says_what_to_do",
        "test_misuse::test_capture_into_a_cuda_graph_is_refused_before_anything_is_gathered",
        "gpu/test_cuda_graphs::"
        "test_a_step_that_is_captured_is_refused_and_ten_ordinary_ones_follow",
    ),
}


def test_every_case_is_tested_where_the_table_says() -> None:
    assert sorted(CASES) == list(range(1, 26))
    for number, places in CASES.items():
        for place in places:
            module, name = place.split("::")
            tree = ast.parse((Path(__file__).parent / f"{module}.py").read_text())
            names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert name in names, f"case {number}: {place}"


# How chunks are compiled

captures: list[int] = []
"""Of each graph that Dynamo has handed over, the number of its nodes."""


def counted(gm: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """The backend; counts its calls in :data:`captures`."""
    captures.append(len(gm.graph.nodes))
    return backend(gm, inputs, **options)


counted.schedules_units = True  # type: ignore[attr-defined]


def compile_chunk(chunk: nn.Module, fullgraph: bool = True, dynamic: bool | None = False) -> None:
    """Have calls of ``chunk`` go through the backend."""
    chunk.compile(
        backend=counted,
        options={"region_compiler": "eager"},
        fullgraph=fullgraph,
        dynamic=dynamic,
    )


class Eager(Twin):
    """A twin whose first chunk's input may need a gradient.

    Args:
        differentiable: whether it does.
        **options: of the twin.
    """

    def __init__(self, *chunks: nn.Module, differentiable: bool = False, **options: Any) -> None:
        super().__init__(*chunks, **options)
        self.differentiable = differentiable

    def forward(self, place: int, microbatch: int) -> None:
        if place or not self.differentiable:
            super().forward(place, microbatch)
            return
        x = data(self.seed, microbatch)[dist.get_rank()].requires_grad_()
        self.inputs[place, microbatch] = x
        self.outputs[place, microbatch] = self.chunks[place](x)


class Compiled(Eager):
    """A twin whose sharded chunks are compiled.

    Args:
        fullgraph: whether a graph break is an error.
        dynamic: as of ``torch.compile``.
        **options: of the twin.
    """

    def __init__(
        self,
        *chunks: nn.Module,
        fullgraph: bool = True,
        dynamic: bool | None = False,
        **options: Any,
    ) -> None:
        super().__init__(*chunks, **options)
        for chunk in self.chunks:
            compile_chunk(chunk, fullgraph, dynamic)


def assert_all_captured(twin: Twin) -> None:
    """Every chunk ran as a graph, and nothing fell back."""
    assert {key.chunk for key in twin.context.compiled_graphs} == {
        f"c{place}" for place in range(len(twin.chunks))
    }
    assert not twin.context.fallbacks


# Order and windows


@on_two_ranks(mode=["recorded", "registration"])
def test_case_1_evaluations_leave_cursor_trace_and_residency_as_they_were(mode: str) -> None:
    twin = Compiled(linears(2), mode=mode)
    context = twin.context

    def evaluate(kind: str) -> None:
        before = resident(context), context.window.cursor, context.window.number, context.trace
        x = data(7, 7)[dist.get_rank()]
        found = EVALUATIONS[kind](context, twin.chunks[0], x)
        with torch.no_grad():
            whole = copy.deepcopy(twin.whole[0])
            whole.load_state_dict(full_state(twin.chunks[0]))
            torch.testing.assert_close(found, whole(x))
        after = resident(context), context.window.cursor, context.window.number, context.trace
        assert after == before, kind

    kinds = [kind for kind in EVALUATIONS if kind != "failing"]
    for step in range(3):
        with counting(context) as spent:
            twin.run("F0")
            for kind in kinds:
                evaluate(kind)
            twin.run("B0")
            context.finish_grad_sync()
        twin.check()
        assert spent.dropped_gathers == 0
        assert spent.replayed_windows == (step > 0 or mode == "registration")
        for kind in kinds:
            evaluate(kind)
        assert at_rest(context)
    assert len(context.programs) == 1
    assert_all_captured(twin)


@on_two_ranks()
def test_case_2_second_backward_gathers_again_unless_it_is_the_next_event() -> None:
    for prefetch, gathers in ((0, 4), (None, 1)):
        twin = Compiled(linears(1), forward_prefetch=prefetch, backward_prefetch=prefetch)
        assert twin.window("F0 F1 B0 B1").gathers == 4
        spent = twin.window("F0 F1 B0 B1")
        assert spent.gathers == gathers
        assert_replayed(twin, spent, on_demand=gathers)
        assert spent.reductions == 2


ORDERS = {**SCHEDULES, "three microbatches": "F0 c0F1 c1B0 c1F1 c0F2 c1F2 c1B1 c0B0 c1B2 c0B1 c0B2"}


@on_two_ranks(kind=["nested units", "units side by side"])
def test_cases_3_and_5_any_order_over_chunks_that_share_a_context(kind: str) -> None:
    """Each unit but the first is there, or on its way, before its event; gradients are sums."""
    for calls in ORDERS.values():
        if kind == "nested units":
            twin: Twin = Compiled(Chunk(1), Chunk(1), units=(Block, Chunk))
            eager = Twin(Chunk(1), Chunk(1), units=(Block, Chunk))
        else:
            twin, eager = Compiled(linears(2), linears(2)), Twin(linears(2), linears(2))
        eager.window(calls)
        recorded = twin.window(calls)
        assert events(twin.context) == events(eager.context)
        assert recorded.on_demand_gathers == recorded.gathers == len(twin.context.trace or ())
        with AcquireSpy() as spy:
            assert_replayed(twin, twin.window(calls))
        assert [name for name, _ in spy.uses] == [e.unit for e in twin.context.trace or ()]
        assert [there for _, there in spy.uses] == [False] + [True] * (len(spy.uses) - 1)
        assert_all_captured(twin)


@on_two_ranks(last=[False, True])
def test_case_4_branch_diverges_once_and_is_known_after(last: bool) -> None:
    twin = Compiled(Branching(last))
    for step, flag in enumerate([True, True, False, False, True, True, False]):
        for chunk in twin.both():
            chunk.flag = flag
        with warnings_of() as messages, counting(twin.context) as spent:
            twin.run("F0 B0")
            assert not messages, "the message comes at the close"
            assert resident(twin.context) == [], "the wrong prefetch is freed, too"
            twin.context.finish_grad_sync()
        twin.check()
        assert spent.divergences == len(messages) == (step == 2)
        assert spent.recorded_windows == (step in (0, 2))
        assert spent.switches == (step in (4, 6))
        if step == 2:
            assert "expected c0.fc2 F0, found c0.fc3 " + ("B" if last else "F") in messages[0]
            assert events(twin.context) == "fc1F0 fc3F0 fc3B0 fc1B0"
        if step in (1, 3, 5):
            assert_replayed(twin, spent)
    assert len(twin.context.programs) == 2


@on_two_ranks(budget=[None, BLOCK])
def test_case_6_two_laps_over_four_chunks_with_at_most_three_units_resident(
    budget: int | None,
) -> None:
    calls = laps(4, [[0, 1], [2, 3]])
    options = {"forward_prefetch": budget, "backward_prefetch": budget}
    twin = Compiled(*(Chunk() for _ in range(4)), units=(Block, Chunk), **options)
    twin.window(calls)
    assert_replayed(twin, twin.window(calls))
    largest = max(unit.spec.bytes for unit in twin.context.units)
    assert twin.context.stats.peak_resident_bytes <= 3 * largest
    assert_all_captured(twin)


@on_two_ranks()
def test_case_7_shape_inference_before_the_first_step_is_no_event() -> None:
    twin = Compiled(Chunk(), Chunk(), units=(Block, Chunk))
    x = data(7, 7)[dist.get_rank()]
    with counting(twin.context) as spent, torch.no_grad():
        for chunk in twin.chunks:
            x = chunk(x)
    assert spent.gathers == spent.frees == 6
    assert at_rest(twin.context)
    assert not twin.context.window.is_open
    assert twin.context.stats.windows == 0
    twin.window("F0 B0")
    assert_replayed(twin, twin.window("F0 B0"))


_armed: list[str] = []


@torch.library.custom_op("fsdp_fx_tests::pass_on", mutates_args=())
def pass_on(x: torch.Tensor, where: str) -> torch.Tensor:
    """The identity; raises once if it is armed."""
    if where in _armed:
        _armed.remove(where)
        raise ArithmeticError("by intention")
    return x.clone()


@pass_on.register_fake
def _(x: torch.Tensor, where: str) -> torch.Tensor:
    return torch.empty_like(x)


def _keep_place(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.where = inputs[1]


def _pass_on_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return pass_on(gradient, ctx.where + " backward"), None


pass_on.register_autograd(_pass_on_backward, setup_context=_keep_place)


class Fragile(nn.Module):
    """Two linears with a place between them that can be made to raise."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.fc1(x))
        if self.raises:
            raise ArithmeticError("by intention")
        return self.fc2(pass_on(x, "region"))


@on_two_ranks(windows=[0, 1], place=["code", "region", "region backward"])
def test_case_8_retry_after_an_exception_equals_the_reference(windows: int, place: str) -> None:
    twin = Compiled(linears(1), Fragile(), fullgraph=False)
    for _ in range(windows):
        twin.window("F0 B0 F1 B1 F2 B2 F3 B3")
    twin.run("F0 B0")
    if place == "code":
        twin.chunks[1].raises = True
    else:
        _armed.append(place)
    with pytest.raises(ArithmeticError):
        twin.run("F1 B1")
    twin.chunks[1].raises = False
    assert not _armed
    problem = "an autograd pass has not ended" if "backward" in place else "an exception crossed"
    with refused(IncompleteWindowError, problem):
        twin.context.finish_grad_sync()
    assert len(twin.context.programs) == windows
    twin.context.abort()
    assert at_rest(twin.context)
    assert all(parameter.grad is None for parameter in twin.parameters())
    twin.forget()
    assert twin.window("F0 B0 F1 B1").recorded_windows == 1
    assert_replayed(twin, twin.window("F0 B0 F1 B1"))


# Recomputation, ties, freezing


@on_two_ranks(reentrant=[True, False], calls=["F0 B0", "F0 F1 B0 B1"])
def test_case_9_recomputation_is_no_event(reentrant: bool, calls: str) -> None:
    """A graph recomputes within the backward use of each unit.

    A checkpoint around several units begins the backward uses of all of them with its first
    recomputation, in the order of the forward.
    """
    backward = {1: ["fc.1", "fc.0"], 2: ["fc.0", "fc.1"]}
    for group in (1, 2):
        twin = Compiled(Checkpointed(2, group, reentrant), differentiable=True)
        twin.window(calls)
        for _ in range(2):
            spent = twin.window(calls)
            assert_replayed(twin, spent)
            assert spent.reductions == 2 * calls.count("B")
        wanted = []
        for call in calls.split():
            units = ["fc.0", "fc.1"] if call[0] == "F" else backward[group]
            wanted += [f"{unit}{call}" for unit in units]
        assert events(twin.context) == " ".join(wanted)
        assert_all_captured(twin)


@on_two_ranks(mode=["non-reentrant", "reentrant", "selective"], prefetch=[None, 0])
def test_case_10_block_that_is_recomputed_twice_has_one_gather(
    mode: str, prefetch: int | None
) -> None:
    twin = Compiled(
        Squared(mode),
        differentiable=True,
        loss=torch.sum,
        forward_prefetch=prefetch,
        backward_prefetch=prefetch,
    )
    for step in range(3):
        spent = twin.window("F0 B0")
        assert spent.reductions == 1
        # Two uses and both recomputations lie within a use of each graph.
        assert spent.gathers == (1 if step and prefetch is None else 2)
    assert events(twin.context) == "fc1F0 fc1B0"
    assert_all_captured(twin)


@on_two_ranks(own=[False, True], mode=["non-reentrant", "reentrant"])
def test_case_11_checkpointed_layer_has_an_exact_number_of_gathers(mode: str, own: bool) -> None:
    units = (nn.Linear, FourLinears) if own else nn.Linear
    twin = Compiled(Grouped(mode, own), units=units, differentiable=True)
    assert twin.window("F0 B0").gathers == 2 * (4 + own)
    for _ in range(2):
        spent = twin.window("F0 B0")
        assert_replayed(twin, spent)
        # Each unit once forward and once for its recomputation and its backward together. The
        # layer's own, last in the forward, comes after the others in the backward.
        assert spent.gathers == 2 * (4 + own)
        assert spent.reductions == 4 + own
    assert_all_captured(twin)


@on_two_ranks(reduce=["per_backward", "per_window"], cut=[True, False])
def test_case_12_tied_weights_are_reduced_once_after_all_contributions(
    reduce: str, cut: bool
) -> None:
    """Cut, the backward is three autograd passes. Dynamo captures no ``requires_grad_()``.

    The chunk's own unit is not scheduled by graphs but by the chunk's hooks, which hear of one
    pass only: the close reduces what comes after it.
    """
    for shared in (False, True):
        torch.manual_seed(5)
        chunk = Tied(cut)
        units: list[Any] = [chunk.body]
        if shared:
            units.append([chunk.embedding, chunk.head])
        pair = Pair(chunk, units, compiled=True, reduce_gradients=reduce)

        def run(model: Any, x: torch.Tensor) -> None:
            in_passes(model, x, lambda _: None)

        for step in range(3):
            late = cut and not shared and (step > 0 or reduce == "per_backward")
            assert pair.window(run) == 2 * (2 if reduce == "per_backward" else 1) + late
            assert pair.context.stats.replayed_windows == step
            assert chunk.head.weight is chunk.embedding.weight
        assert pair.context.compiled_graphs


@on_two_ranks(mode=["recorded", "registration"])
def test_case_13_frozen_units_are_gathered_and_freed_but_never_reduced(mode: str) -> None:
    twin = Compiled(LowRank(), mode=mode)
    calls = "F0 F1 B0 B1" if mode == "recorded" else "F0 B0"
    for step in range(3):
        with counting(twin.context) as spent:
            twin.run(calls)
            assert resident(twin.context) == []
            twin.context.finish_grad_sync()
        twin.check()
        assert spent.reductions == calls.count("B")
        if step:
            assert_replayed(twin, spent)
    assert {event.unit for event in twin.context.trace or () if event.phase == "B"} == {
        "c0.low",
        "c0.last",
    }


@on_two_ranks(reduce=["per_backward", "per_window"])
def test_case_14_all_frozen_at_first_and_trained_later(reduce: str) -> None:
    torch.manual_seed(3)
    chunk = Plain().to(torch.bfloat16)
    chunk.requires_grad_(False)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    pair = Pair(chunk, list(chunk.layers), policy=policy, compiled=True, reduce_gradients=reduce)

    def by_input(model: Any, x: torch.Tensor) -> None:
        model(x.to(torch.bfloat16).requires_grad_()).float().square().mean().backward()

    for trains, reductions in ((False, 0), (True, 4), (False, 0), (True, 4)):
        _train(pair, lambda module: list(module.parameters()), trains)
        spent = pair.window(by_input)
        assert spent == (2 * reductions if reduce == "per_backward" else reductions)


class Delayed(Compiled):
    """Layers of which one linear's weight gradient comes by a call of its own, later."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(LayerOfNodes(), LayerOfNodes()), units=LayerOfNodes, fullgraph=False
        )
        for layer in self.chunks[0]:
            layer.experts.linear.delayed = True
            layer.experts.linear.assigns = True
            self.context.hook_owner(layer, delayed_weight_gradients=True)


@on_two_ranks()
def test_case_15_delayed_weight_gradients() -> None:
    twin = Delayed()
    for _ in range(3):
        for number in range(2):
            with counting(twin.context) as spent:
                twin.run(f"F{number} B{number}")
            assert spent.reductions == 0
            for index in (1, 0):
                layer = twin.chunks[0][index]
                with counting(twin.context) as spent, twin.context.weight_gradients(layer):
                    layer.experts.linear.backward_weight()
                assert spent.reductions == 1
        twin.context.finish_grad_sync()
        twin.check()
    assert twin.context.stats.replayed_windows == 2


# Compiled


@on_two_ranks()
def test_case_16_identical_chunks_call_the_backend_once_and_use_their_own_units() -> None:
    twin = Compiled(linears(2), linears(2), linears(2), differentiable=True)
    captures.clear()
    for step in range(3):
        with AcquireSpy() as spy:
            spent = twin.window("F0 F1 B0 B1")
        chunks = [name.split(".")[0] for name, _ in spy.uses]
        once = ["c0"] * 2 + ["c1"] * 2 + ["c2"] * 2
        assert chunks == 2 * once + 2 * once[::-1]
        if step:
            assert_replayed(twin, spent)
    assert len(captures) == 1
    assert_all_captured(twin)


@on_two_ranks()
def test_case_17_backward_is_compiled_after_several_forwards() -> None:
    twin = Compiled(linears(3))
    twin.run("F0 F1 F2")
    assert {key.direction for key in twin.context.compiled_graphs} == {"forward"}
    twin.run("B0")
    assert {key.direction for key in twin.context.compiled_graphs} == {"forward", "backward"}
    twin.run("F3 B1 B3 B2")
    twin.context.finish_grad_sync()
    twin.check()
    assert_replayed(twin, twin.window("F0 F1 F2 B0 F3 B1 B3 B2"))
    # Once more with a program that is known before the backward is compiled.
    torch._dynamo.reset()
    assert_replayed(twin, twin.window("F0 F1 F2 B0 F3 B1 B3 B2"))


class Derived(nn.Module):
    """A layer that multiplies by something made from its weight."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, 1, DIM) / DIM)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "permute":
            return x @ self.weight.permute(2, 1, 0)[:, 0]
        if self.kind == "cast":
            cast = self.weight.to(torch.bfloat16).squeeze(1)
            return F.linear(x.to(torch.bfloat16), cast).float()
        return F.linear(x, self.weight.reshape(DIM * DIM).contiguous().view(DIM, DIM).clone())


class DerivedLayers(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Derived(kind) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@on_two_ranks(kind=["permute", "cast", "reshape"])
def test_case_18_views_and_casts_of_parameters_are_not_saved(kind: str) -> None:
    twin = Compiled(DerivedLayers(kind), units=Derived)
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    for _ in range(2):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            twin.run("F0")
        assert saved
        # Parameters themselves are handed past such hooks.
        assert all(unit_of_tensor(tensor) is None for tensor in saved), "a view?"
        assert all(tensor.numel() < DIM * DIM for tensor in saved), "a copy?"
        twin.run("B0")
        twin.context.finish_grad_sync()
        twin.check()
    wanted = "layers.0F0 layers.1F0 layers.2F0 layers.2B0 layers.1B0 layers.0B0"
    assert events(twin.context) == wanted
    assert_replayed(twin, twin.window("F0 B0"))


class Communicating(nn.Module):
    """Sums a value over the ranks between two layers, one of which casts its weight."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM, bias=False)
        self.register_buffer("share", torch.full((), float(dist.get_rank() + 1)))
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicating:
        whole = Communicating(self.group)  # a process group cannot be copied
        whole.load_state_dict(self.state_dict())
        return whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.fc1(x))
        scale = functional_collectives.all_reduce(self.share, "sum", self.group)
        return cast_linear(x * scale, self.fc2)


def cast_linear(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    return F.linear(x.to(torch.bfloat16), layer.weight.to(torch.bfloat16)).float()


@on_two_ranks(group=["process group", "mesh"])
def test_case_19_collectives_and_casts_in_the_graph(group: str) -> None:
    mesh = cpu_mesh(dist.get_world_size())
    twin = Compiled(Communicating(mesh.get_group() if group == "process group" else mesh))
    for step in range(3):
        spent = twin.window("F0 F1 B0 B1")
        if step:
            assert_replayed(twin, spent)
    assert events(twin.context) == "fc1F0 fc2F0 fc1F1 fc2F1 fc2B0 fc1B0 fc2B1 fc1B1"
    assert_all_captured(twin)


class Borrowing(nn.Module):
    """Scales by the weight of a module that is sharded, but is not in the chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(DIM, DIM)
        self.lender = (nn.Linear(DIM, DIM, bias=False),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.lender[0].weight
        return self.fc(x) * weight.to_local().sum()


@on_two_ranks()
def test_case_19_sharded_parameter_that_was_not_adopted_is_named() -> None:
    twin = Compiled(Borrowing())
    fully_shard(twin.chunks[0].lender[0], mesh=cpu_mesh(dist.get_world_size()))
    with pytest.raises(
        Exception, match=r"lender.*weight.*of shape \(6, 6\), is a sharded DTensor.*adopt\(\)"
    ):
        twin.run("F0")
    twin.context.abort()
    assert at_rest(twin.context)


class Twice(nn.Module):
    """Calls a layer twice, reads the transpose of another's weight before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.late, self.last = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        transposed = self.late.weight.t()
        x = torch.tanh(self.fc(torch.tanh(self.fc(x))))
        return self.last(torch.tanh(x @ transposed) + self.late.bias)


@on_two_ranks(reduce=["per_backward", "per_window"])
def test_case_20_module_called_twice_with_a_view_saved(reduce: str) -> None:
    for chunk, backward in ((Twice(), "lastB0 lateB0 fcB0"), (Sum(), "fcB0")):
        twin = Compiled(chunk, reduce_gradients=reduce)
        for step in range(3):
            spent = twin.window("F0 B0 F1 B1")
            units = len(backward.split())
            assert spent.reductions == (2 * units if reduce == "per_backward" else units)
            if step:
                assert_replayed(twin, spent)
            else:
                # One gather and one free for each graph, however often the unit is used in it.
                assert spent.gathers == spent.frees == 4 * units
        assert backward in events(twin.context)
        assert_all_captured(twin)


def batches(lengths: Sequence[int], step: int, microbatches: int = 2) -> list[Any]:
    """Per microbatch, inputs and targets of every rank, which may be of different lengths."""
    generator = torch.Generator().manual_seed(1000 + step)

    def draw() -> list[torch.Tensor]:
        longest = torch.randint(VOCABULARY, (len(lengths), 2, 16), generator=generator)
        return [tokens[:, :length] for tokens, length in zip(longest, lengths, strict=True)]

    return [(draw(), draw()) for _ in range(microbatches)]


class Tokens(nn.Module):
    """An embedding, two blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def compiled_setup(chunks: list[nn.Module], dynamic: bool | None, fullgraph: bool = True) -> Setup:
    setup = set_up(chunks)
    for chunk in setup.chunks:
        compile_chunk(chunk, fullgraph, dynamic)
    setup.callables = list(setup.chunks)
    return setup


@on_two_ranks(marked=[False, True])
def test_case_21_lengths_compile_a_bounded_number_of_graphs_in_one_order(marked: bool) -> None:
    """Training and evaluation in turn; dimensions become dynamic with the second length."""
    torch._dynamo.reset()
    setup = compiled_setup([Tokens()], dynamic=None)
    context, rank = setup.context, dist.get_rank()
    captures.clear()
    counts: list[tuple[int, int]] = []
    fingerprints = set()
    for step, length in enumerate([7, 9, 11, 7, 13]):
        data = batches([length] * dist.get_world_size(), step)
        if marked:
            for inputs, _ in data:
                torch._dynamo.mark_dynamic(inputs[rank], 1)
        setup.step(list(interleaved(1, 2)), data, exact=False, tolerance=1e-5)
        assert context.trace is not None
        fingerprints.add(context.trace.fingerprint)
        setup.chunks[0].eval()
        with torch.no_grad():
            found = setup.chunks[0](data[0][0][rank])
            expected = setup.reference.chunks[0](data[0][0][rank])
        torch.testing.assert_close(found, expected)
        setup.chunks[0].train()
        counts.append((len(captures), context.report.region_uses))
    # Training and evaluation: once each, and once more each where nothing was marked.
    assert counts[-1][0] == (2 if marked else 4)
    assert counts[1] == counts[-1], counts
    assert not marked or counts[0] == counts[-1], counts
    assert len(fingerprints) == 1
    assert (context.stats.recorded_windows, context.stats.divergences) == (1, 0)
    assert context.stats.switches == 0
    assert not context.fallbacks


@on_two_ranks()
def test_case_21_lengths_beyond_the_limit_of_recompilations_run_eagerly_and_are_named() -> None:
    torch._dynamo.reset()
    setup = compiled_setup([Tokens()], dynamic=False, fullgraph=False)
    with warnings_of() as messages, torch._dynamo.config.patch(recompile_limit=2):
        for step, length in enumerate([7, 9, 11, 7, 13]):
            data = batches([length] * dist.get_world_size(), step)
            setup.step(list(interleaved(1, 2)), data, exact=True)
    assert setup.context.stats.recorded_windows == 1
    assert setup.context.stats.divergences == 0
    eager = [message for message in messages if "compiled chunk c0: ran eagerly" in message]
    assert len(eager) == 1, messages
    assert "limit" in eager[0]


@on_two_ranks()
def test_case_22_one_rank_alone_recompiles() -> None:
    torch._dynamo.reset()
    setup = compiled_setup(make_chunks(2, layers=1), dynamic=False)
    counts = []
    for step, length in enumerate([8, 8, 9]):
        captures.clear()
        lengths = [length, *[8] * (dist.get_world_size() - 1)]
        data = batches(lengths, step)
        setup.step(list(interleaved(2, 2)), data, exact=True)
        counts.append(len(captures))
    assert counts == ([2, 0, 2] if dist.get_rank() == 0 else [2, 0, 0])
    assert setup.context.stats.replayed_windows == 2
    assert setup.context.stats.divergences == 0
    assert not setup.context.fallbacks


class Normalised(nn.Module):
    """Linears with batch normalisation between them, recomputed in the backward."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.norm = nn.BatchNorm1d(DIM)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            hidden: torch.Tensor = checkpoint(self.part, x, use_reentrant=False)
        else:
            hidden = self.part(x)
        return self.fc2(hidden)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.fc1(x)))


@on_two_ranks(recompute=[False, True])
def test_case_23_running_statistics_equal_the_reference(recompute: bool) -> None:
    chunk = Normalised(recompute).to(torch.bfloat16)
    once = copy.deepcopy(chunk)
    once.recompute = False
    twin = Compiled(chunk, fullgraph=False, units=(nn.Linear, nn.BatchNorm1d))
    for step in range(3):
        with counting(twin.context) as spent:
            for microbatch in range(4):
                x = data(step, microbatch)[dist.get_rank()].to(torch.bfloat16)
                twin.chunks[0](x).float().square().mean().backward()
                once(x).float().square().mean().backward()
            twin.context.finish_grad_sync()
        assert at_rest(twin.context)
        assert spent.reductions == 4 * 3
        if step:
            assert_replayed(twin, spent)
        for (name, found), wanted in zip(chunk.named_buffers(), once.buffers(), strict=True):
            assert torch.equal(found, wanted), name
        for mine, whole in zip(chunk.parameters(), once.parameters(), strict=True):
            assert whole.grad is not None
            dist.all_reduce(whole.grad)
            whole.grad /= dist.get_world_size()
            torch.testing.assert_close(mine.grad.full_tensor(), whole.grad, rtol=3e-2, atol=3e-3)
            mine.grad = whole.grad = None


@on_two_ranks(kind=["dict", "list", "tuple", "nested", "dataclass"])
def test_case_24_backward_events_of_structured_outputs_are_seen(kind: str) -> None:
    twin = Compiled(
        Wrapped(kind),
        units=(Structured, Before),
        loss=lambda output: output["y"].square().mean() + first_tensor(output["x"]).mean(),
    )
    for _ in range(2):
        spent = twin.window("F0 B0")
    assert_replayed(twin, spent)
    assert events(twin.context) == "beforeF0 structuredF0 afterF0 afterB0 structuredB0 beforeB0"
    assert_all_captured(twin)
