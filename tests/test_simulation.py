"""How long a simulated step takes: examples computed by hand, and what holds for any plan."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_fx.occupancy import intervals, outline_of, peak_resident_bytes
from fsdp_fx.passes import PassOptions, plan
from fsdp_fx.planning.durations import Durations
from fsdp_fx.planning.memory import Interval
from fsdp_fx.planning.outline import Outline
from fsdp_fx.planning.simulation import (
    RankSimulation,
    Simulation,
    Span,
    Transfer,
    resident_steps,
    simulate,
)
from fsdp_fx.program import Program
from fsdp_fx.trace import Trace
from test_passes import OPTIONS
from test_passes import traces as windows
from traces import trace


def on_demand(text: str) -> Outline:
    return outline_of(plan(trace(text), PassOptions(0, 0)))


def one_ahead(text: str) -> Outline:
    return outline_of(plan(trace(text)))


def by_hand(text: str, *gathers: tuple[str, int, int, int]) -> Outline:
    """An outline without reductions; per interval its unit, gathered, waited and freed."""
    return Outline(
        trace(text),
        tuple(
            Interval(unit, gathered, waited, (waited,), freed)
            for unit, gathered, waited, freed in gathers
        ),
        (),
    )


def alone(
    outline: Outline,
    compute: Sequence[int],
    gathers: int | Mapping[str, int] = 0,
    reductions: int | Mapping[str, int] = 0,
) -> RankSimulation:
    """The simulation of one rank; a number stands for the same duration of every unit."""
    names = [unit.name for unit in outline.trace.units]
    durations = Durations(
        tuple(compute),
        dict.fromkeys(names, gathers) if isinstance(gathers, int) else gathers,
        dict.fromkeys(names, reductions) if isinstance(reductions, int) else reductions,
    )
    return simulate([outline], [durations]).ranks[0]


def times(spans: Sequence[Span]) -> list[tuple[str, int, int, int]]:
    return [(span.unit, span.issued, span.start, span.stop) for span in spans]


# Two ranks

MICROSECOND = 1000


def micro(**values: int) -> dict[str, int]:
    return {name.replace("_", "."): value * MICROSECOND for name, value in values.items()}


def test_two_ranks_of_a_pipeline_are_as_computed_by_hand() -> None:
    # Two microbatches. Rank 0 runs its forwards first and gathers one event ahead in both
    # phases; rank 1 alternates and gathers ahead in forwards only. In microseconds:
    #
    # rank 0: a: forward 40, backward 80, gather 30, reduction 60
    #         b: forward 50, backward 100, gather 20, reduction 120
    # rank 1: a: forward 40, backward 70, gather 30, reduction 60
    #         b: forward 30, backward 60, gather 45, reduction 90
    # transfers: 15 from rank 0 to rank 1, 25 back.
    first = one_ahead("c0 F0: a b; c0 F1: a b; c0 B0: b a; c0 B1: b a")
    second = outline_of(
        plan(trace("c1 F0: a b; c1 B0: b a; c1 F1: a b; c1 B1: b a"), PassOptions(None, 0))
    )
    durations = [
        Durations(
            tuple(t * MICROSECOND for t in (40, 50, 40, 50, 100, 80, 100, 80)),
            micro(c0_a=30, c0_b=20),
            micro(c0_a=60, c0_b=120),
        ),
        Durations(
            tuple(t * MICROSECOND for t in (40, 30, 60, 70, 40, 30, 60, 70)),
            micro(c1_a=30, c1_b=45),
            micro(c1_a=60, c1_b=90),
        ),
    ]
    transfers = [
        Transfer((0, 1), (1, 0), 15 * MICROSECOND),  # the end of a forward to the next stage's
        Transfer((0, 3), (1, 4), 15 * MICROSECOND),
        Transfer((1, 3), (0, 4), 25 * MICROSECOND),  # and of a backward to the one before
        Transfer((1, 7), (0, 6), 25 * MICROSECOND),
    ]
    # Rank 0, forwards. Everything but the first gather is hidden.
    #   a F0: gather a 0-30, compute waits 30; gather b issued at 30: 30-50. Compute 30-70.
    #   b F0: gather a issued at 70: 70-100. Compute 70-120. Arrives on rank 1 at 135.
    #   a F1: gather b issued at 120: 120-140. Compute 120-160.
    #   b F1: the next event is b's too. Compute 160-210. Arrives on rank 1 at 225.
    # Rank 1, first microbatch.
    #   a F0: bubble until 135; gather a 135-165, wait 30; gather b issued at 165: 165-210.
    #         Compute 165-205.
    #   b F0: waits 5 until 210. Compute 210-240.
    #   b B0: b is there. Compute 240-300. Reduction b 300-390.
    #   a B0: gather a 300-330, wait 30. Compute 330-400. Arrives on rank 0 at 425. Reduction a
    #         400-460.
    # Rank 1, second microbatch: it had arrived at 225, before it was reached.
    #   a F1: gather a 400-430, wait 30; gather b issued at 430: 430-475. Compute 430-470.
    #   b F1: waits 5 until 475. Compute 475-505.
    #   b B1: Compute 505-565. Reduction b 565-655.
    #   a B1: gather a 565-595, wait 30. Compute 595-665. Arrives on rank 0 at 690. Reduction a
    #         issued at 665, after b's: 665-725. The last compute ended 60 before.
    # Rank 0, backwards.
    #   b B0: reached at 210, bubble of 215 until 425. Gather a issued at 425: 425-455. Compute
    #         425-525. Reduction b 525-645.
    #   a B0: gather b issued at 525: 525-545. Compute 525-605. Reduction a issued at 605, in
    #         line behind b's: 645-705.
    #   b B1: reached at 605, bubble of 85 until 690. Gather a issued at 690: 690-720. Compute
    #         690-790. Reduction b 790-910.
    #   a B1: Compute 790-870. Reduction a issued at 870: 910-970. The last compute ended 100
    #         before.
    step = simulate([first, second], durations, transfers)

    def micros(values: Sequence[int]) -> list[float]:
        return [value / MICROSECOND for value in values]

    def micro_times(spans: Sequence[Span]) -> list[tuple[str, float, float, float]]:
        return [(unit, *(micros(moments))) for unit, *moments in times(spans)]  # type: ignore[misc]

    assert step.nanoseconds == 970_000
    rank0, rank1 = step.ranks
    assert micros(rank0.starts) == [30, 70, 120, 160, 425, 525, 690, 790]
    assert micros(rank0.ends) == [70, 120, 160, 210, 525, 605, 790, 870]
    assert micro_times(rank0.gathers) == [
        ("c0.a", 0, 0, 30),
        ("c0.b", 30, 30, 50),
        ("c0.a", 70, 70, 100),
        ("c0.b", 120, 120, 140),
        ("c0.a", 425, 425, 455),
        ("c0.b", 525, 525, 545),
        ("c0.a", 690, 690, 720),
    ]
    assert micro_times(rank0.reductions) == [
        ("c0.b", 525, 525, 645),
        ("c0.a", 605, 645, 705),
        ("c0.b", 790, 790, 910),
        ("c0.a", 870, 910, 970),
    ]
    assert (rank0.exposed_gathers, rank0.exposed_reductions) == (30_000, 100_000)
    assert rank0.exposed_communication == 130_000
    assert (rank0.compute, rank0.bubble, rank0.stop) == (540_000, 300_000, 970_000)

    assert micros(rank1.starts) == [165, 210, 240, 330, 430, 475, 505, 595]
    assert micros(rank1.ends) == [205, 240, 300, 400, 470, 505, 565, 665]
    assert micro_times(rank1.gathers) == [
        ("c1.a", 135, 135, 165),
        ("c1.b", 165, 165, 210),
        ("c1.a", 300, 300, 330),
        ("c1.a", 400, 400, 430),
        ("c1.b", 430, 430, 475),
        ("c1.a", 565, 565, 595),
    ]
    assert micro_times(rank1.reductions) == [
        ("c1.b", 300, 300, 390),
        ("c1.a", 400, 400, 460),
        ("c1.b", 565, 565, 655),
        ("c1.a", 665, 665, 725),
    ]
    assert (rank1.exposed_gathers, rank1.exposed_reductions) == (130_000, 60_000)
    assert (rank1.compute, rank1.bubble, rank1.stop) == (400_000, 135_000, 725_000)


# One rank


def test_gather_ahead_is_hidden_by_the_compute_before_it() -> None:
    rank = alone(one_ahead("m F0: a b"), (20, 20), gathers=15)
    assert rank.starts == (15, 35)
    assert rank.exposed_gathers == 15  # only the first, for which nothing computes


def test_gather_longer_than_the_compute_before_it_shows_by_the_difference() -> None:
    rank = alone(one_ahead("m F0: a b"), (20, 20), gathers={"m.a": 15, "m.b": 27})
    assert times(rank.gathers) == [("m.a", 0, 0, 15), ("m.b", 15, 15, 42)]
    assert rank.starts == (15, 42)
    assert rank.exposed_gathers == 15 + 7


def test_gathers_on_demand_show_whole() -> None:
    rank = alone(on_demand("m F0: a b a"), (20, 20, 20), gathers=15)
    assert rank.ends == (35, 70, 105)
    assert rank.exposed_gathers == 45


def test_gather_waits_for_those_issued_before_it_whoever_needs_them() -> None:
    # c is not needed before event 2, but its long gather is issued first.
    outline = by_hand("m F0: a b c", ("m.a", 0, 0, 0), ("m.c", 0, 2, 2), ("m.b", 1, 1, 1))
    rank = alone(outline, (10, 10, 10), gathers={"m.a": 5, "m.b": 5, "m.c": 100})
    assert times(rank.gathers) == [("m.a", 0, 0, 5), ("m.c", 5, 5, 105), ("m.b", 15, 105, 110)]
    assert rank.starts == (5, 110, 120)
    assert rank.exposed_gathers == 5 + 95


def test_gathers_ahead_are_issued_after_the_one_on_demand_has_come_in_the_outlines_order() -> None:
    outline = by_hand("m F0: a b c", ("m.c", 0, 2, 2), ("m.b", 0, 1, 1), ("m.a", 0, 0, 0))
    rank = alone(outline, (10, 10, 10), gathers=4)
    assert times(rank.gathers) == [("m.c", 4, 4, 8), ("m.b", 4, 8, 12), ("m.a", 0, 0, 4)]


def test_event_of_a_unit_that_stayed_waits_for_nothing() -> None:
    outline = by_hand("m F0: a b a", ("m.a", 0, 0, 2), ("m.b", 1, 1, 1))
    rank = alone(outline, (10, 10, 10), gathers=5)
    assert rank.starts == (5, 20, 30)


def test_reductions_after_the_last_compute_lengthen_the_step() -> None:
    rank = alone(on_demand("m B0: b a"), (10, 10), reductions=30)
    assert times(rank.reductions) == [("m.b", 10, 10, 40), ("m.a", 20, 40, 70)]
    assert (rank.exposed_reductions, rank.stop) == (50, 70)


def test_reductions_under_compute_cost_nothing() -> None:
    rank = alone(on_demand("m B0: b a; n F0: x"), (10, 10, 50), reductions=30)
    assert times(rank.reductions)[-1] == ("m.a", 20, 40, 70)
    assert (rank.exposed_reductions, rank.stop) == (0, 70)


def test_reduction_of_a_parent_follows_the_end_of_its_use_behind_those_inside() -> None:
    rank = alone(one_ahead("m B0: *(b a)"), (10, 10, 10), reductions={"m": 7, "m.a": 3, "m.b": 5})
    assert times(rank.reductions) == [("m.b", 20, 20, 25), ("m.a", 30, 30, 33), ("m", 30, 33, 40)]


def test_reductions_are_issued_where_their_uses_end_and_there_in_the_outlines_order() -> None:
    # a at 0 ends with b at 1; c at 2.
    outline = replace(on_demand("m B0: a(b) c"), reductions=(2, 0, 1))
    rank = alone(outline, (10, 10, 10), reductions=3)
    assert times(rank.reductions) == [("m.c", 30, 30, 33), ("m.a", 20, 20, 23), ("m.b", 20, 23, 26)]


def test_reductions_that_wait_for_the_window_come_once() -> None:
    program = plan(trace("m B0: a; m B1: a"), PassOptions(reduce_gradients="per_window"))
    rank = alone(outline_of(program), (10, 10), reductions=30)
    assert times(rank.reductions) == [("m.a", 20, 20, 50)]


def test_carried_unit_is_there_when_the_step_begins() -> None:
    outline = by_hand("m F0: a b a", ("m.a", 0, 0, 0), ("m.b", 1, 1, 1), ("m.a", 2, 2, 2))
    assert alone(outline, (10, 10, 10), gathers=5).starts == (5, 20, 35)
    carried = replace(outline, carried=frozenset({"m.a"}))
    rank = alone(carried, (10, 10, 10), gathers=5)
    assert rank.starts == (0, 15, 30)
    assert times(rank.gathers) == [("m.b", 10, 10, 15), ("m.a", 25, 25, 30)]


def test_carried_unit_that_is_never_gathered_needs_no_duration() -> None:
    outline = replace(by_hand("m F0: a", ("m.a", 0, 0, 0)), carried=frozenset({"m.a"}))
    assert alone(outline, (10,), gathers={}, reductions={}).stop == 10


def test_transfers_come_before_the_gather_on_demand_and_not_before_those_ahead() -> None:
    text = "m F0: a b"
    durations = Durations((10, 10), {"m.a": 5, "m.b": 5}, {})
    transfers = [Transfer((0, 0), (0, 1), 100)]
    (late,) = simulate([on_demand(text)], [durations], transfers).ranks
    assert times(late.gathers)[1] == ("m.b", 115, 115, 120)
    assert (late.bubble, late.exposed_gathers, late.stop) == (100, 10, 130)
    (early,) = simulate([one_ahead(text)], [durations], transfers).ranks
    assert times(early.gathers)[1] == ("m.b", 5, 5, 10)
    assert (early.bubble, early.exposed_gathers, early.stop) == (100, 5, 125)


def test_event_waits_for_the_last_of_its_transfers() -> None:
    outline, durations = on_demand("m F0: a b c"), Durations((10, 10, 10), {}, {})
    outline = replace(outline, intervals=())
    transfers = [Transfer((0, 0), (0, 2), 30), Transfer((0, 1), (0, 2), 3)]
    (rank,) = simulate([outline], [durations], transfers).ranks
    assert (rank.starts, rank.bubble) == ((0, 10, 40), 20)


def test_step_ends_with_its_last_rank() -> None:
    outlines = [on_demand("m F0: a"), on_demand("n F0: a")]
    durations = [Durations((10,), {"m.a": 1}, {}), Durations((50,), {"n.a": 1}, {})]
    step = simulate(outlines, durations)
    assert ([rank.stop for rank in step.ranks], step.nanoseconds) == ([11, 51], 51)


def test_nothing_takes_no_time() -> None:
    assert simulate([], []) == Simulation(0, ())
    rank = alone(Outline(Trace((), (), (), frozenset()), (), ()), ())
    assert (rank.stop, rank.ends) == (0, ())


# Memory over time


def test_resident_bytes_follow_issues_and_frees() -> None:
    outline = one_ahead("m F0: a b")  # 200 bytes each
    rank = alone(outline, (20, 20), gathers=15)
    # a from 0; b issued at 15; a freed at 35, b at 55.
    assert resident_steps(outline, rank) == ((0, 200), (15, 400), (35, 200), (55, 0))


def test_gradient_that_is_put_off_is_resident_until_its_reduction_is_issued() -> None:
    program = plan(trace("m B0: a; m B1: a"), PassOptions(0, 0, "per_window"))
    outline = outline_of(program)
    rank = alone(outline, (10, 10), gathers=5, reductions=30)
    # Full parameters take 200, gradients 400. a 0-15; its gradient from 15; a again 15-30.
    assert resident_steps(outline, rank) == ((0, 200), (15, 600), (30, 0))


def test_gradient_of_two_backwards_is_resident_once() -> None:
    program = plan(trace("m B0: a; m B1: a; m B2: a"), PassOptions(0, 0, "per_window"))
    outline = replace(outline_of(program), intervals=())
    rank = alone(outline, (10, 10, 10))
    assert resident_steps(outline, rank) == ((0, 0), (10, 400), (30, 0))


def test_gradient_is_kept_from_the_use_that_ends_first_not_the_one_that_begins_first() -> None:
    # The inner use of a contributes before the outer one, after which a is reduced.
    program = plan(trace("m B0: a(a b)"), PassOptions(reduce_gradients="per_window"))
    outline = replace(outline_of(program), intervals=())
    assert resident_steps(outline, alone(outline, (10, 10, 10))) == ((0, 0), (20, 400), (30, 0))


def test_gradients_of_missing_contributions_and_of_frozen_units_are_not_counted() -> None:
    window = trace("m B0: a- b; m B1: a b", frozen={"m.b"})
    outline = replace(
        outline_of(plan(window, PassOptions(reduce_gradients="per_window"))), intervals=()
    )
    assert resident_steps(outline, alone(outline, (10, 10, 10, 10))) == ((0, 0),)


def test_carried_unit_is_resident_at_both_ends_of_the_step() -> None:
    outline = replace(
        by_hand("m F0: a b a", ("m.a", 0, 0, 0), ("m.b", 1, 1, 1), ("m.a", 2, 2, 2)),
        carried=frozenset({"m.a"}),
    )
    rank = alone(outline, (10, 10, 10), gathers=5)
    # a until 10; b 10-25 and a again from 25 on: one of them at any time.
    assert resident_steps(outline, rank) == ((0, 200),)
    assert resident_steps(
        replace(outline, intervals=outline.intervals[:2]), without_last(rank)
    ) == (
        (0, 200),
        (10, 400),
        (25, 200),
    )


def without_last(rank: RankSimulation) -> RankSimulation:
    """The same, of an outline whose last gather is left out."""
    return replace(rank, gathers=rank.gathers[:-1])


def test_memory_of_another_outline_is_refused() -> None:
    rank = alone(one_ahead("m F0: a b"), (20, 20))
    with pytest.raises(ValueError, match="of 2 events and 2 gathers is not of an outline of 1 ev"):
        resident_steps(one_ahead("m F0: a"), rank)


# Bad input

AB = "m F0: a b"
RIGHT = Durations((10, 10), {"m.a": 1, "m.b": 1}, {})


@pytest.mark.parametrize(
    ("durations", "message"),
    [
        (Durations((10,), RIGHT.gathers, {}), "rank 0: a trace of 2 events has 1 durations"),
        (
            Durations((10, -3), RIGHT.gathers, {}),
            r"rank 0: the compute of event 1 \(m.b F0\) takes -3 ns",
        ),
        (Durations((10, 10), {"m.a": 1}, {}), "rank 0: no duration for the gather of m.b$"),
        (
            Durations((10, 10), {**RIGHT.gathers, "m.x": 1}, {}),
            "rank 0: there is a duration for the gather of m.x, which is no unit",
        ),
        (
            Durations((10, 10), RIGHT.gathers, {"x": 1}),
            "rank 0: there is a duration for the reduction of x, which is no unit",
        ),
        (
            Durations((10, 10), {**RIGHT.gathers, "m.a": -1}, {}),
            "rank 0: the gather of m.a takes -1 ns",
        ),
        (
            Durations((10, 10), RIGHT.gathers, {"m.a": -1}),
            "rank 0: the reduction of m.a takes -1 ns",
        ),
    ],
)
def test_durations_that_do_not_fit_are_refused(durations: Durations, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate([on_demand(AB)], [durations])


def test_missing_duration_of_a_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 0: no duration for the reduction of m.a, m.b$"):
        simulate([on_demand("m B0: a b")], [RIGHT])


def test_every_rank_needs_durations() -> None:
    with pytest.raises(ValueError, match="2 outlines have 1 durations"):
        simulate([on_demand(AB), on_demand(AB)], [RIGHT])


@pytest.mark.parametrize(
    ("transfer", "message"),
    [
        (Transfer((0, 2), (0, 1), 1), "the source of .* is position 2 of rank 0, which has 2 ev"),
        (Transfer((0, 0), (0, -1), 1), "the target of .* is position -1 of rank 0"),
        (Transfer((1, 0), (0, 1), 1), "the source of .* is on rank 1 of 1"),
        (Transfer((0, 0), (-1, 1), 1), "the target of .* is on rank -1 of 1"),
        (Transfer((0, 0), (0, 1), -1), "takes -1 ns"),
    ],
)
def test_transfers_that_cannot_be_are_refused(transfer: Transfer, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate([on_demand(AB)], [RIGHT], [transfer])


@pytest.mark.parametrize(
    ("outline", "message"),
    [
        (by_hand(AB, ("m.x", 0, 0, 0)), "is of a unit that the trace does not have"),
        (by_hand(AB, ("m.a", 1, 0, 1)), "is out of order, or outside of the 2 events"),
        (by_hand(AB, ("m.a", 0, 1, 2)), "is out of order, or outside of the 2 events"),
        (by_hand(AB, ("m.a", -1, 1, 1)), "is out of order, or outside of the 2 events"),
        (replace(on_demand(AB), reductions=(2,)), "no position 2 to reduce after, only 2 events"),
    ],
)
def test_outlines_that_cannot_be_are_refused(outline: Outline, message: str) -> None:
    with pytest.raises(ValueError, match=f"rank 0: .*{message}"):
        simulate([outline], [RIGHT])


def test_deadlock_names_the_events_that_wait_for_each_other() -> None:
    # Ranks 1 and 2 wait for each other, and rank 0 for rank 1.
    transfers = [
        Transfer((1, 0), (0, 0), 1),
        Transfer((2, 1), (1, 0), 1),
        Transfer((1, 1), (2, 1), 1),
    ]
    with pytest.raises(ValueError) as caught:
        simulate([on_demand(AB)] * 3, [RIGHT] * 3, transfers)
    assert str(caught.value).endswith(
        "event 0 of rank 1 (m.a F0) waits for event 1 of rank 2 (m.b F0); "
        "event 1 of rank 2 (m.b F0) waits for event 1 of rank 1 (m.b F0)"
    )


def test_event_that_waits_for_a_later_one_of_its_rank_is_a_deadlock() -> None:
    with pytest.raises(ValueError, match=r"event 0 of rank 0 .* waits for event 1 of rank 0 "):
        simulate([on_demand(AB)], [RIGHT], [Transfer((0, 1), (0, 0), 1)])


# Any plan

Case = tuple[list[Program], list[Durations], list[Transfer]]
NANOSECONDS = st.integers(0, 40)

# Nested uses, a unit twice in a row, missing contributions; planned once, for speed.
SOME_PROGRAMS = [
    plan(trace(text, frozen={"m.f"}), options)
    for text in (
        "m F0: *(a b); m B0: *(b a)",
        "m F0: a b c; m F1: a b c; m B0: c b a; m B1: c b a",
        "m F0: a(b a) f a; m B0: a- f a(b)",
        "m F0: a; n F0: b; n B0: b; m B0: a; m F1: a; n F1: b; n B1: b; m B1: a",
    )
    for options in (
        PassOptions(),
        PassOptions(0, 0),
        PassOptions(250, 0, "per_window"),
        PassOptions(None, 1000),
    )
]
SOME = st.sampled_from(SOME_PROGRAMS)
ANY = st.builds(plan, windows(), OPTIONS)


@st.composite
def cases(draw: st.DrawFn, programs_of: st.SearchStrategy[Program] = SOME) -> Case:
    """Some ranks with these programs, and transfers none of which goes back in position."""
    programs = draw(st.lists(programs_of, min_size=1, max_size=3))
    durations = []
    for program in programs:
        names = [unit.name for unit in program.trace.units]
        durations.append(
            Durations(
                tuple(draw(NANOSECONDS) for _ in program.trace),
                {name: draw(NANOSECONDS) for name in names},
                {name: draw(NANOSECONDS) for name in names},
            )
        )
    transfers = []
    for _ in range(draw(st.integers(0, 6))):
        source, target = (draw(st.integers(0, len(programs) - 1)) for _ in range(2))
        if len(programs[target].trace) > 1:
            position = draw(st.integers(1, len(programs[target].trace) - 1))
            before = draw(st.integers(0, min(position, len(programs[source].trace)) - 1))
            transfers.append(Transfer((source, before), (target, position), draw(NANOSECONDS)))
    return programs, durations, transfers


def run(case: Case) -> Simulation:
    programs, durations, transfers = case
    return simulate([outline_of(program) for program in programs], durations, transfers)


def longest_paths(case: Case) -> list[tuple[list[int], list[int], list[int]]]:
    """When computes, gathers and reductions end: longest paths in the graph of what waits.

    The graph has a node per operation, with its duration, and an edge for each thing that it
    waits for. It is built from the program's own steps, not from an outline.
    """
    programs, durations, transfers = case
    takes: dict[object, int] = {}
    after: dict[object, dict[object, int]] = {}  # by node: what it waits for, and how long then

    def add(node: object, duration: int, *waits: object) -> None:
        takes[node] = duration
        after.setdefault(node, {}).update(dict.fromkeys((w for w in waits if w is not None), 0))

    counts = []
    for rank, (program, times_of) in enumerate(zip(programs, durations, strict=True)):
        gathers = reductions = 0
        pending: dict[str, object] = {}  # a unit's last gather

        def last(what: str, count: int, rank: int = rank) -> object | None:
            return (rank, what, count - 1) if count else None

        for position, step in enumerate(program.steps):
            reached, ready = (rank, "reached", position), (rank, "ready", position)
            add(reached, 0, last("compute", position))
            for unit in step.gathers:
                gather = (rank, "gather", gathers)
                add(gather, times_of.gathers[unit], reached, last("gather", gathers))
                pending[unit] = gather
                gathers += 1
            add(ready, 0, reached, pending[step.event.unit] if step.wait else None)
            for unit in step.prefetches:
                gather = (rank, "gather", gathers)
                add(gather, times_of.gathers[unit], ready, last("gather", gathers))
                pending[unit] = gather
                gathers += 1
            add((rank, "compute", position), times_of.compute[position], ready)
            ended = sorted(
                (program.trace.end_ranks[place], place)
                for place, end in enumerate(program.trace.ends)
                if end == position
            )
            for _, place in ended:
                for unit in program.steps[place].reduces:
                    compute, duration = (rank, "compute", position), times_of.reductions[unit]
                    add((rank, "reduce", reductions), duration, compute, last("reduce", reductions))
                    reductions += 1
        counts.append((len(program.trace), gathers, reductions))
    for transfer in transfers:
        (source, computed), (target, position) = transfer.source, transfer.target
        waits = after[target, "reached", position]
        key = (source, "compute", computed)
        waits[key] = max(waits.get(key, 0), transfer.nanoseconds)
    done: dict[object, int] = {}
    for node in TopologicalSorter(after).static_order():
        begin = max((done[other] + delay for other, delay in after[node].items()), default=0)
        done[node] = begin + takes[node]
    return [
        (
            [done[rank, "compute", i] for i in range(computes)],
            [done[rank, "gather", i] for i in range(gathers)],
            [done[rank, "reduce", i] for i in range(reductions)],
        )
        for rank, (computes, gathers, reductions) in enumerate(counts)
    ]


@given(st.one_of(cases(), cases(ANY)))
@settings(max_examples=60)
def test_everything_ends_at_the_end_of_the_longest_path_to_it(case: Case) -> None:
    simulated = [
        (
            list(rank.ends),
            [span.stop for span in rank.gathers],
            [span.stop for span in rank.reductions],
        )
        for rank in run(case).ranks
    ]
    assert simulated == longest_paths(case)


@given(cases())
def test_a_rank_computes_or_waits_and_no_stream_does_two_things_at_once(case: Case) -> None:
    programs, durations, transfers = case
    step = run(case)
    for program, times_of, rank in zip(programs, durations, step.ranks, strict=True):
        streams = (
            rank.ends,
            *([s.stop for s in spans] for spans in (rank.gathers, rank.reductions)),
        )
        assert rank.stop == max((end for stream in streams for end in stream), default=0)
        assert min(rank.bubble, rank.exposed_gathers, rank.exposed_reductions) >= 0
        assert [end - start for start, end in zip(rank.starts, rank.ends, strict=True)] == list(
            times_of.compute
        )
        gathered = [times_of.gathers[interval.unit] for interval in intervals(program)]
        assert [span.stop - span.start for span in rank.gathers] == gathered
        for spans in (rank.gathers, rank.reductions):
            for before, span in pairwise(spans):
                assert before.stop <= span.start
            assert all(span.issued <= span.start for span in spans)
        reduced = [span.stop - span.start for span in rank.reductions]
        assert step.nanoseconds >= max(
            rank.stop, sum(times_of.compute), sum(gathered), sum(reduced)
        )
    # One thing after the other takes no less.
    assert step.nanoseconds <= sum(transfer.nanoseconds for transfer in transfers) + sum(
        rank.compute + sum(s.stop - s.start for s in (*rank.gathers, *rank.reductions))
        for rank in step.ranks
    )


@st.composite
def longer(draw: st.DrawFn) -> tuple[Case, Case]:
    """A case, and the same with some durations longer."""
    programs, durations, transfers = case = draw(cases())

    def more(value: int) -> int:
        return value + draw(st.sampled_from((0, 0, 0, 1, 25)))

    return case, (
        programs,
        [
            Durations(
                tuple(more(value) for value in each.compute),
                {unit: more(value) for unit, value in each.gathers.items()},
                {unit: more(value) for unit, value in each.reductions.items()},
            )
            for each in durations
        ],
        [replace(transfer, nanoseconds=more(transfer.nanoseconds)) for transfer in transfers],
    )


@given(longer())
def test_nothing_ends_earlier_where_things_take_longer(pair: tuple[Case, Case]) -> None:
    short, long = (run(case) for case in pair)
    assert short.nanoseconds <= long.nanoseconds
    for before, after in zip(short.ranks, long.ranks, strict=True):
        assert all(a <= b for a, b in zip(before.ends, after.ends, strict=True))
        assert before.stop <= after.stop


@given(cases())
def test_communication_that_takes_no_time_is_never_waited_for(case: Case) -> None:
    programs, durations, transfers = case
    free = [
        replace(
            each,
            gathers=dict.fromkeys(each.gathers, 0),
            reductions=dict.fromkeys(each.reductions, 0),
        )
        for each in durations
    ]
    for rank in run((programs, free, transfers)).ranks:
        assert rank.exposed_communication == 0
    for each, rank in zip(durations, run((programs, free, [])).ranks, strict=True):
        assert (rank.bubble, rank.stop) == (0, sum(each.compute))


@given(cases())
def test_peak_over_time_is_that_of_the_program(case: Case) -> None:
    programs, durations, transfers = case
    # Where compute takes no time its frees and the next gathers are one instant.
    durations = [
        replace(each, compute=tuple(value + 1 for value in each.compute)) for each in durations
    ]
    for program, rank in zip(programs, run((programs, durations, transfers)).ranks, strict=True):
        # Every contribution is reduced at once: no gradients are kept.
        outline = replace(outline_of(program), reductions=tuple(sorted(program.trace.reduces)))
        curve = resident_steps(outline, rank)
        assert max(resident for _, resident in curve) == peak_resident_bytes(program)
        assert curve[-1][1] == 0
        assert curve[0][0] == 0
        assert [moment for moment, _ in curve] == sorted({moment for moment, _ in curve})


def test_sixteen_ranks_of_a_thousand_events_take_little_time() -> None:
    stage = "; ".join(f"c F{m}: a b c d; c B{m}: d c b a" for m in range(128))
    outline = one_ahead(stage)
    units = [unit.name for unit in outline.trace.units]
    durations = Durations((10,) * 1024, dict.fromkeys(units, 11), dict.fromkeys(units, 12))
    transfers = [
        transfer
        for rank in range(15)
        for start in range(0, 1024, 8)
        for transfer in (
            Transfer((rank, start + 3), (rank + 1, start), 5),
            Transfer((rank + 1, start + 7), (rank, start + 4), 5),
        )
    ]
    began = time.process_time()
    step = simulate([outline] * 16, [durations] * 16, transfers)
    assert time.process_time() - began < 1  # measured: 0.06 s
    # Rank 0 cannot begin the next microbatch before its backward: nothing overlaps.
    assert step.ranks[0].bubble > 15 * 8 * 10 * 128
