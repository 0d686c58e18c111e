"""Chunks that share one context: one window over any order of their calls, on 2 and on 8 ranks.

One theme a test, its checks in one job. :mod:`test_semantics` has the rules one by one.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_fx import FSDPContext, IncompleteWindowError, Program
from fsdp_fx.program import operation
from models import Block, Chunk, linears
from test_recomputation import Layers
from test_semantics import (
    Arrivals,
    Twin,
    assert_replayed,
    at_rest,
    count,
    counting,
    data,
    events,
    mean_square,
    on_ranks,
    refused,
    resident,
    warnings_of,
)

SEQUENCES = {
    "grouped": "c0F0 c0F1 c0F2 c1F0 c1F1 c1F2 c1B0 c1B1 c1B2 c0B0 c0B1 c0B2",
    "interleaved": "F1 F2 B1 F3 B2 B3",
    "interleaved chunks": (
        "c0F0 c0F1 c1F0 c1F1 c1B0 c0F2 c1B1 c0F3 c0B0 c1F2 c0B1 c1B2 c1F3 c0B2 c1B3 c0B3"
    ),
    "backward of another chunk and microbatch": "c0F0 c1F0 c0F1 c1B0 c1F1 c0B0 c1B1 c0B1",
}


def expected_events(calls: str, units: list[list[str]]) -> list[str]:
    """The events of a window over chunks with these units, in the order of their forwards."""
    result: list[str] = []
    seen: Counter[str] = Counter()
    for call in calls.split():
        places = [int(call[1])] if call[0] == "c" else list(range(len(units)))
        phase = call.lstrip("c0123456789")[0]
        for place in places if phase == "F" else reversed(places):
            # A parent comes before its children in both phases.
            parent, children = units[place][:1], units[place][1:]
            order = children if phase == "F" else children[::-1]
            for unit in [f"c{place}{name}" for name in parent + order]:
                result.append(f"{unit}{phase}{seen[unit + phase]}")
                seen[unit + phase] += 1
    return result


def nested_chunks(count: int, blocks: int = 2) -> Twin:
    return Twin(*(Chunk(blocks) for _ in range(count)), units=(Block, Chunk))


NESTED = ["", ".blocks.0", ".blocks.1"]  # the units of a chunk of `nested_chunks`


@on_ranks(2, 8, calls=list(SEQUENCES.values()))
def test_any_order_of_calls_over_two_chunks_is_one_window_and_replays_exactly(calls: str) -> None:
    twin = nested_chunks(2, blocks=1)
    context = twin.context
    recorded = twin.window(calls)  # over several backwards, of distinct microbatches
    expected = expected_events(calls, [NESTED[:2]] * 2)
    assert events(context).split() == expected
    assert recorded.recorded_windows == recorded.windows == 1
    assert recorded.gathers == recorded.on_demand_gathers == len(expected)
    backwards = sum("B" in event for event in expected)
    assert recorded.reductions == backwards == count(context.program, "reduce")
    for step in range(2):
        if step:
            arrivals = Arrivals(twin)
        spent = twin.window(calls)
        assert_replayed(twin, spent)
        assert spent.gathers < recorded.gathers
    arrivals.check(context)  # whatever changed: the phase, the chunk, or both
    assert events(context).split() == expected
    assert len(context.programs) == 1


@on_ranks(2, 8)
def test_first_backward_and_first_forward_of_a_chunk_are_there_at_each_change() -> None:
    """The forwards of the first chunk, then the backwards of the second."""
    changes = "c0F0 c1F0 c0F1 c1B0 c0B0 c1F1 c1B1 c0B1"
    twin = Twin(linears(2), linears(2))
    twin.window(changes)
    there: dict[str, bool] = {}
    handles = []

    def look(name: str) -> None:
        there[name] = name[:4] in resident(twin.context)

    for index, chunk in enumerate(twin.chunks):
        handles.append(
            chunk[0].register_forward_pre_hook(
                lambda *_, name=f"c{index}.0 F": look(name), prepend=True
            )
        )
        handles.append(
            chunk[2].register_forward_hook(
                lambda module, args, output, name=f"c{index}.2 B": (
                    output.register_hook(lambda gradient: look(name)) and None
                ),
                prepend=True,
            )
        )
    first: dict[str, dict[str, bool]] = {}
    for call in changes.split():
        there.clear()
        twin.run(call)
        first[call] = dict(there)
    twin.context.finish_grad_sync()
    twin.check()
    assert first == {
        "c0F0": {"c0.0 F": False},  # nothing is gathered before the window
        "c1F0": {"c1.0 F": True},
        "c0F1": {"c0.0 F": True},
        "c1B0": {"c1.2 B": True},
        "c0B0": {"c0.2 B": True},
        "c1F1": {"c1.0 F": True},
        "c1B1": {"c1.2 B": True},
        "c0B1": {"c0.2 B": True},
    }


@on_ranks(2, 8)
def test_window_that_is_not_whole_is_refused_by_name_and_can_be_completed() -> None:
    twin = Twin(linears(1), linears(1))
    context = twin.context
    close = context.finish_grad_sync
    for step, expected in enumerate(("", r"; the next event expected is c1\.0 B1 \(event 6\)")):
        twin.run("c0F0 c0F1 c1F0 c1B0 c1F1 c0B0")
        missing = f"the backward of chunk c0, microbatch 1 is missing{expected}"
        with refused(IncompleteWindowError, missing):
            close()
        twin.run("c1B1")
        with refused(IncompleteWindowError, "the backward of chunk c0, microbatch 1 is missing"):
            close()
        assert len(context.programs) == context.stats.windows == step, "no partial trace is kept"
        twin.run("c0B1")
        close()
        close()  # once per chunk, as some trainers do
        assert context.stats.windows == step + 1
        twin.check()
    twin.run("c0F0")
    with refused(IncompleteWindowError, "the backward of chunk c0, microbatch 0 is missing"):
        close()
    context.abort()
    twin.forget()
    assert_replayed(twin, twin.window("c0F0 c0F1 c1F0 c1B0 c1F1 c0B0 c1B1 c0B1"))


@on_ranks(2, 8)
def test_evaluations_between_training_passes_change_nothing() -> None:
    twin = nested_chunks(2, blocks=1)
    context = twin.context

    def evaluate(windows: int) -> None:
        x = data(9, 9)[dist.get_rank()]
        before = resident(context), context.window.cursor, context.stats.windows
        with torch.no_grad():
            for chunk in twin.chunks:
                x = chunk(x)
        with context.evaluation():
            twin.chunks[0](data(9, 9)[dist.get_rank()])
        assert (resident(context), context.window.cursor, context.stats.windows) == before
        assert context.stats.windows == windows

    evaluate(0)  # shape inference, before anything is known
    assert at_rest(context)
    assert not context.window.is_open
    gathers = []
    for step in range(3):
        with counting(context) as spent:
            for call in ["c0F0", "c0F1", "c1F0", "c1B0", "c1F1", "c0B0", "c1B1", "c0B1"]:
                twin.run(call)
                if call in ("c0F1", "c1B0"):
                    evaluate(step)
            context.finish_grad_sync()
        twin.check()
        evaluate(step + 1)
        assert spent.replayed_windows == (step > 0)
        assert spent.divergences == spent.dropped_gathers == 0
        gathers.append(spent.prefetched_gathers)
    assert gathers == [0, *2 * [count(context.program, "gather") - 1]]


@on_ranks(2, 8, mode=["reentrant", "non-reentrant"])
def test_recomputation_between_the_calls_of_two_chunks_is_no_event(mode: str) -> None:
    calls = "c0F0 c0F1 c1F0 c1B0 c1F1 c0B0 c1B1 c0B1"
    layer = [".layers.0.up", ".layers.0.down"]
    twin = Twin(*(Layers(mode, "each layer", layers=1) for _ in range(2)))
    assert twin.window(calls).gathers == 16
    # No unit is around the layers here.
    expected = expected_events(calls, [["!", *layer]] * 2)
    assert events(twin.context).split() == [event for event in expected if "!" not in event]
    for _ in range(2):
        spent = twin.window(calls)
        assert spent.replayed_windows == 1
        assert spent.divergences == spent.dropped_gathers == 0
        assert spent.gathers == spent.frees == count(twin.context.program, "gather")
        assert spent.reductions == 8


@on_ranks(2, 8)
def test_gradient_over_microbatches_with_distinct_data_is_the_sum_not_the_last() -> None:
    for reduce in ("per_backward", "per_window"):
        twin = Twin(linears(1), linears(1), reduce_gradients=reduce)
        alone: list[torch.Tensor] = []
        for microbatch in range(3):
            # Each microbatch in a window of its own, by the reference.
            chunks = [copy.deepcopy(chunk) for chunk in twin.whole]
            for x in data(0, microbatch):
                for chunk in chunks:
                    x = chunk(x)
                (mean_square(x) / dist.get_world_size()).backward()
            alone.append(chunks[0][0].weight.grad)
        twin.run("c0F0 c0F1 c1F0 c0F2 c1F1 c1B0 c1F2 c0B0 c1B1 c1B2 c0B2 c0B1")
        twin.context.finish_grad_sync()
        found = twin.chunks[0][0].weight.grad.full_tensor()
        torch.testing.assert_close(found, torch.stack(alone).sum(0))
        assert not any(torch.allclose(found, each) for each in alone)
        twin.check()
        spent = twin.window("c0F0 c0F1 c1F0 c0F2 c1F1 c1B0 c1F2 c0B0 c1B1 c1B2 c0B2 c0B1")
        assert_replayed(twin, spent)
        assert spent.reductions == (6 if reduce == "per_backward" else 2)


@on_ranks(2, 8)
def test_other_number_of_microbatches_diverges_once_on_every_rank_and_is_then_known() -> None:
    twin = Twin(linears(1), linears(1))
    two, three = "c0F0 c0F1 c1F0 c1B0 c1F1 c0B0 c1B1 c0B1", SEQUENCES["grouped"]
    for calls, known, messages_expected in ((two, 0, 0), (three, 0, 1), (two, 1, 0), (three, 1, 0)):
        with warnings_of() as messages:
            spent = twin.window(calls)
        assert spent.replayed_windows == known
        assert spent.recorded_windows == 1 - known
        assert len(messages) == messages_expected
    assert_replayed(twin, twin.window(three))


# Four chunks, at most three units at once

BLOCK = sum(parameter.numel() for parameter in Block().parameters())


def laps(chunks: int, microbatches: list[list[int]]) -> str:
    """Every chunk's forwards, then every chunk's backwards, lap after lap."""
    calls: list[str] = []
    for lap in microbatches:
        calls += [f"c{c}F{m}" for c in range(chunks) for m in lap]
        calls += [f"c{c}B{m}" for c in reversed(range(chunks)) for m in lap]
    return " ".join(calls)


class Counts:
    """The most units resident at once, looked at after each event has begun."""

    def __init__(self, twin: Twin) -> None:
        self.context = twin.context
        self.most = 0
        for chunk in twin.chunks:
            for module in chunk.modules():
                if isinstance(module, (Block, Chunk)):
                    module.register_forward_pre_hook(self.look)
                    module.register_forward_hook(self.after)

    def look(self, *_: Any) -> None:
        self.most = max(self.most, len(resident(self.context)))

    def after(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(self.look)


def gathers_by_unit(program: Program | None) -> Counter[str]:
    assert program is not None
    nodes = program.graph_module.graph.nodes
    return Counter(str(node.args[0]) for node in nodes if operation(node) == "gather")


@on_ranks(2, 8)
def test_four_chunks_in_two_laps_with_at_most_three_units_resident() -> None:
    calls = laps(4, [[0, 1], [2, 3]])
    for budget in (None, BLOCK):
        twin = Twin(
            *(Chunk() for _ in range(4)),
            units=(Block, Chunk),
            forward_prefetch=budget,
            backward_prefetch=budget,
        )
        context: FSDPContext = twin.context
        twin.window(calls)
        assert events(context).split() == expected_events(calls, [NESTED] * 4)
        counts = Counts(twin)
        assert_replayed(twin, twin.window(calls))
        assert counts.most == 3
        peak = max(unit.spec.bytes for unit in context.units) * 3
        assert context.stats.peak_resident_bytes <= peak
        gathers = gathers_by_unit(context.program)
        assert len(gathers) == 12
        assert min(gathers.values()) >= 2, "gathered and freed several times in a window"
