"""Plans to compare the planner's with: what they keep, and the table of what that saves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import pytest

from fsdp_fx.occupancy import outline_of
from fsdp_fx.passes.frees import insert_frees
from fsdp_fx.passes.gathers import insert_gathers
from fsdp_fx.passes.reductions import insert_reductions
from fsdp_fx.planning.lookahead import reach
from fsdp_fx.planning.memory import Interval
from fsdp_fx.planning.outline import Outline
from fsdp_fx.planning.pipelines import pipeline_calls, pipeline_traces
from fsdp_fx.planning.planner import outline
from fsdp_fx.planning.policies import keep_everything, least_recently_used, on_demand
from fsdp_fx.program import Program
from fsdp_fx.trace import Event, Trace, UnitSpec
from traces import TWO_CHUNKS, trace

UNIT_BYTES = 100

# One chunk of three layers under a parent, forward and backward of two microbatches in turn.
NESTED = "c0 F0: *(a b c); c0 F1: *(a b c); c0 B0: *(c b a); c0 B1: *(c b a)"


def interleaved(ranks: int, microbatches: int = 32) -> tuple[Trace, ...]:
    """Interleaved 1F1B with four chunks of four units, all of one size, on each rank."""
    stages = [
        [
            UnitSpec(f"s{stage}.u{index}", f"s{stage}", 50, UNIT_BYTES, 2 * UNIT_BYTES, True)
            for index in range(4)
        ]
        for stage in range(4 * ranks)
    ]
    return pipeline_traces(pipeline_calls("Interleaved1F1B", ranks, 4, microbatches), stages)


def random_trace(seed: int) -> Trace:
    """Four units of different sizes, two of them children of the first, in any legal order."""
    generator = random.Random(seed)
    calls = []
    waiting: list[tuple[int, int]] = []
    started = [0, 0]
    while len(calls) < 14:
        if waiting and (started == [4, 4] or generator.random() < 0.5):
            chunk, microbatch = waiting.pop(generator.randrange(len(waiting)))
            calls.append(("B", chunk, microbatch))
        elif started != [4, 4]:
            chunk = generator.choice([chunk for chunk in (0, 1) if started[chunk] < 4])
            waiting.append((chunk, started[chunk]))
            calls.append(("F", chunk, started[chunk]))
            started[chunk] += 1
        else:
            break
    units = {("F", 0): "*(a b)", ("B", 0): "*(b a)", ("F", 1): "x y", ("B", 1): "y x"}
    text = "; ".join(f"c{chunk} {phase}{mb}: {units[phase, chunk]}" for phase, chunk, mb in calls)
    sizes = {name: generator.choice([50, 100, 150]) for name in ("c0", "c0.a", "c0.b", "c1.x")}
    return trace(text, sizes)


def resident(outline: Outline) -> list[int]:
    """Bytes of full parameters at each event."""
    size = {unit.name: unit.bytes for unit in outline.trace.units}
    curve = [0] * len(outline.trace)
    for interval in outline.intervals:
        for position in range(interval.gathered, interval.freed + 1):
            curve[position] += size[interval.unit]
    return curve


def working_set(window: Trace, furthest: Sequence[int]) -> list[int]:
    """Bytes of the units in use at each event, and of those that the lookahead covers."""
    size = {unit.name: unit.bytes for unit in window.units}
    curve = []
    for position in range(len(window)):
        needed = {
            window[other].unit
            for other in range(len(window))
            if other <= position <= window.ends[other] or position < other <= furthest[position]
        }
        curve.append(sum(size[unit] for unit in needed))
    return curve


def require_valid(outline: Outline) -> None:
    """Every event has its unit, no unit is there twice, gathers are in order of issue."""
    window = outline.trace
    used = [position for interval in outline.intervals for position in interval.uses]
    assert sorted(used) == list(range(len(window)))
    before: dict[str, Interval] = {}
    for interval in outline.intervals:
        assert interval.gathered <= interval.waited == interval.uses[0]
        assert max(window.ends[use] for use in interval.uses) <= interval.freed < len(window)
        assert {window[use].unit for use in interval.uses} == {interval.unit}
        if interval.unit in before:
            assert before[interval.unit].freed < interval.gathered
        before[interval.unit] = interval
    issued = [interval.gathered for interval in outline.intervals]
    assert issued == sorted(issued)


def belady(window: Trace, kept: int) -> int:
    """The fewest gathers of units of one size: drop what is needed furthest in the future."""
    units = [event.unit for event in window]
    following: list[float] = [0.0] * len(units)
    upcoming: dict[str, float] = {}
    for position in reversed(range(len(units))):
        following[position] = upcoming.get(units[position], float("inf"))
        upcoming[units[position]] = position
    held: dict[str, float] = {}
    gathers = 0
    for position, unit in enumerate(units):
        gathers += unit not in held
        held[unit] = following[position]
        while len(held) > kept + 1:
            del held[max((each for each in held if each != unit), key=lambda each: held[each])]
    return gathers


# Interleaved 1F1B, four chunks of four units, 32 microbatches: gathers of the pipeline's first
# rank in one step, by how many units may be kept beyond the one in use.
KEPT = (0, 1, 2, 4, 8)
LEAST_RECENTLY_USED = {
    2: (995, 966, 937, 845, 243),
    4: (959, 894, 829, 637, 131),
    8: (959, 894, 829, 485, 75),
}
EXACT = {
    2: (995, 830, 731, 539, 233),
    4: (959, 774, 601, 355, 121),
    8: (959, 732, 525, 255, 65),
}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_table_of_gathers_on_demand_and_least_recently_used(ranks: int) -> None:
    window = interleaved(ranks)[0]
    assert len(on_demand(window).gathers) == 1024
    gathers = tuple(
        len(
            least_recently_used(
                window, kept * UNIT_BYTES, forward_prefetch=0, backward_prefetch=0
            ).gathers
        )
        for kept in KEPT
    )
    assert gathers == LEAST_RECENTLY_USED[ranks]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_table_of_the_fewest_gathers(ranks: int) -> None:
    window = interleaved(ranks)[0]
    gathers = tuple(
        len(
            outline(
                window, forward_prefetch=0, backward_prefetch=0, memory_budget=kept * UNIT_BYTES
            ).gathers
        )
        for kept in KEPT
    )
    assert gathers == EXACT[ranks]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_planner_gathers_no_more_than_one_that_drops_the_furthest_use(ranks: int) -> None:
    for window in interleaved(ranks, 16):
        for kept in KEPT:
            budget = kept * UNIT_BYTES
            planned = outline(window, forward_prefetch=0, backward_prefetch=0, memory_budget=budget)
            assert len(planned.gathers) == belady(window, kept)
            assert all(there <= budget + UNIT_BYTES for there in resident(planned))


@pytest.mark.parametrize("reduce_gradients", ["per_backward", "per_window"])
@pytest.mark.parametrize("text", [TWO_CHUNKS, NESTED])
def test_on_demand_is_what_the_passes_make_without_lookahead(
    text: str, reduce_gradients: Literal["per_backward", "per_window"]
) -> None:
    window = trace(text, frozen={"c0.b"})
    program = insert_frees(insert_gathers(Program.from_trace(window)))
    expected = outline_of(insert_reductions(program, reduce_gradients))
    assert on_demand(window, reduce_gradients=reduce_gradients) == expected


def test_on_demand_shares_the_gather_of_a_use_inside_of_another() -> None:
    window = trace("c0 F0: a(b a); c0 B0: a(b a)")
    assert on_demand(window).intervals == (
        Interval("c0.a", 0, 0, (0, 2), 2),
        Interval("c0.b", 1, 1, (1,), 1),
        Interval("c0.a", 3, 3, (3, 5), 5),
        Interval("c0.b", 4, 4, (4,), 4),
    )


LOOKAHEADS = [(0, 0), (None, None), (100, 50), (0, 250)]


@pytest.mark.parametrize(("forward", "backward"), LOOKAHEADS)
@pytest.mark.parametrize("budget", [0, 100, 250, 500, 10_000])
@pytest.mark.parametrize("seed", range(8))
def test_least_recently_used_stays_within_its_budget(
    seed: int, budget: int, forward: int | None, backward: int | None
) -> None:
    window = random_trace(seed)
    outline = least_recently_used(
        window, budget, forward_prefetch=forward, backward_prefetch=backward
    )
    require_valid(outline)
    furthest = list(accumulate(reach(window, forward, backward), max))
    needed = working_set(window, furthest)
    curve = resident(outline)
    assert all(0 <= there - need <= budget for there, need in zip(curve, needed, strict=True))
    if budget == 10_000:
        assert len(outline.gathers) == len(window.units)
    issued = {interval.waited: interval.gathered for interval in outline.intervals}
    for waited, gathered in issued.items():
        assert gathered == min(place for place, far in enumerate(furthest) if far >= waited)


def test_least_recently_used_drops_what_was_used_first() -> None:
    window = trace("c0 F0: a b c a b; c0 B0: b a c", default=50)
    # One unit beyond the one in use: at c the room is b's, at the second a it is c's.
    outline = least_recently_used(window, 100, forward_prefetch=0, backward_prefetch=0)
    assert outline.intervals == (
        Interval("c0.a", 0, 0, (0,), 1),
        Interval("c0.b", 1, 1, (1,), 2),
        Interval("c0.c", 2, 2, (2,), 3),
        Interval("c0.a", 3, 3, (3, 6), 7),
        Interval("c0.b", 4, 4, (4, 5), 6),
        Interval("c0.c", 7, 7, (7,), 7),
    )


def test_a_unit_in_use_is_not_in_the_budget_and_is_used_last() -> None:
    # A parent's use ends after its children's, so that they go before it.
    window = trace("c0 F0: *(a b); c1 F0: x; c0 B0: *(b a); c1 B0: x")
    outline = least_recently_used(window, 200, forward_prefetch=0, backward_prefetch=0)
    assert [(each.unit, each.gathered, each.freed) for each in outline.intervals] == [
        ("c0", 0, 7),
        ("c0.a", 1, 2),
        ("c0.b", 2, 2),
        ("c1.x", 3, 5),
        ("c0.b", 5, 6),
        ("c0.a", 6, 6),
        ("c1.x", 7, 7),
    ]


def test_least_recently_used_refuses_a_negative_budget() -> None:
    with pytest.raises(ValueError, match="a budget of -1 bytes: use 0 or more"):
        least_recently_used(trace(NESTED), -1)


@pytest.mark.parametrize(("forward", "backward"), LOOKAHEADS)
@pytest.mark.parametrize("seed", range(4))
def test_keeping_everything_gathers_each_unit_once(
    seed: int, forward: int | None, backward: int | None
) -> None:
    window = random_trace(seed)
    outline = keep_everything(window, forward_prefetch=forward, backward_prefetch=backward)
    require_valid(outline)
    assert [each.unit for each in outline.intervals] == list(
        dict.fromkeys(event.unit for event in window)
    )
    # Freed after its last use, not at the end of the window.
    for interval in outline.intervals:
        assert interval.freed == max(window.ends[use] for use in interval.uses)
    # Reduced after its last backward, once.
    assert [window[position].unit for position in outline.reductions] == list(
        reversed(list(dict.fromkeys(event.unit for event in reversed(ended(window)))))
    )


def ended(window: Trace) -> list[Event]:
    """The backward events that reduce, in the order in which their uses end."""
    positions = sorted(window.reduces, key=lambda position: window.end_order(position))
    return [window[position] for position in positions]


def test_keeping_everything_begins_as_early_as_the_lookahead_allows() -> None:
    window = trace("c0 F0: a b; c0 B0: b a")
    assert keep_everything(window).intervals == (
        Interval("c0.a", 0, 0, (0, 3), 3),
        Interval("c0.b", 0, 1, (1, 2), 2),
    )
    assert keep_everything(window, reduce_gradients="per_backward").reductions == (2, 3)
