"""How far ahead gathers are issued: by events, by elements and by time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_fx.occupancy import outline_of, resident_bytes
from fsdp_fx.passes import Measurements, PassOptions, plan
from fsdp_fx.planning.durations import Durations
from fsdp_fx.planning.lookahead import (
    Lookahead,
    covered_from,
    hoist,
    latest_starts,
    reach,
)
from fsdp_fx.planning.memory import needed_bytes, on_demand
from fsdp_fx.planning.outline import Outline
from fsdp_fx.planning.planner import outline
from fsdp_fx.trace import Trace
from traces import SIZES, trace, windows

EVERYTHING = 10**9


def took(window: Trace, compute: list[int], gathers: Mapping[str, int]) -> Durations:
    """Durations by the last part of a unit's name; reductions take nothing."""
    return Durations(
        tuple(compute),
        {unit.name: gathers[unit.name.rpartition(".")[2]] for unit in window.units},
        {unit.name: 0 for unit in window.units},
    )


def timed(window: Trace, measured: Durations, budget: int) -> Outline:
    options = PassOptions("timed", "timed", memory_budget=budget, keep_frozen=True)
    program = plan(window, options, Measurements(measured))
    return outline_of(program)


def places(outline: Outline) -> list[tuple[str, int, int]]:
    """Of each interval, without the chunk's name: unit, event of the gather, first use."""
    return [(each.unit[2:], each.gathered, each.waited) for each in outline.intervals]


# By events and elements


def test_an_event_is_covered_from_the_first_whose_lookahead_reaches_it() -> None:
    window = trace("m F0: a b c d", {"m.b": 10, "m.c": 20, "m.d": 40})
    # a reaches c, and b no further: what a has covered stays covered.
    assert reach(window, 30, 0) == [2, 2, 2, 3]
    assert covered_from(window, 30, 0) == [0, 0, 0, 3]
    assert covered_from(window, None, 0) == [0, 0, 1, 2]
    assert covered_from(window, 0, None) == [0, 1, 2, 3]


def test_a_lookahead_by_time_covers_one_event_at_any_rate() -> None:
    window = trace("m F0: a b; m B0: b a")
    assert reach(window, "timed", "timed") == reach(window, None, None)
    assert covered_from(window, "timed", 0) == [0, 0, 1, 3]


def test_a_trace_without_events_has_no_lookahead() -> None:
    window = Trace((), (), (), frozenset())
    for lookahead in (None, 0, 5):
        assert reach(window, lookahead, lookahead) == []
        assert covered_from(window, lookahead, lookahead) == []


# By time


def test_a_gather_is_issued_at_the_last_event_that_leaves_it_its_time() -> None:
    # Events of 10 begin at 0, 10, 20, 30, 40. A gather of 25 for the one at 40 must begin by 15.
    window = trace("m F0: a b c d e")
    durations = took(window, [10] * 5, {"a": 1, "b": 1, "c": 1, "d": 1, "e": 25})
    starts = latest_starts(window, on_demand(window), durations, frozenset())
    # Those before it in the stream must be done by 15: d by then, c by 14, b by 10.
    assert starts == {0: 0, 1: 0, 2: 1, 3: 1, 4: 1}
    assert places(timed(window, durations, EVERYTHING)) == [
        ("a", 0, 0),
        ("b", 0, 1),
        ("c", 1, 2),
        ("d", 1, 3),
        ("e", 1, 4),
    ]


def test_a_gather_that_fits_its_time_exactly_is_in_time() -> None:
    window = trace("m F0: a b c d")
    for gather, place in ((20, 1), (21, 0), (10, 2), (11, 1), (0, 2), (1000, 0)):
        durations = took(window, [10] * 4, {"a": 0, "b": 0, "c": 0, "d": gather})
        assert places(timed(window, durations, EVERYTHING))[-1] == ("d", place, 3)


def test_a_gather_makes_room_for_those_behind_it_in_the_stream() -> None:
    # d needs the stream from 10 to 30, so that c, which is needed at 20, is done by 10.
    window = trace("m F0: a b c d")
    durations = took(window, [10] * 4, {"a": 0, "b": 0, "c": 8, "d": 20})
    assert places(timed(window, durations, EVERYTHING)) == [
        ("a", 0, 0),
        ("b", 0, 1),
        ("c", 0, 2),
        ("d", 1, 3),
    ]


def test_a_gather_is_issued_one_event_ahead_at_least() -> None:
    window = trace("m F0: a b c")
    durations = took(window, [10**6] * 3, {"a": 1, "b": 1, "c": 1})
    assert places(timed(window, durations, 0)) == [("a", 0, 0), ("b", 0, 1), ("c", 1, 2)]


def test_a_gather_waits_for_the_end_of_the_use_before() -> None:
    # Room for one unit: a cannot stay beside the units in use and covered, nor begin in its use.
    window = trace("m F0: a b c a")
    durations = took(window, [10] * 4, {"a": 1000, "b": 0, "c": 0})
    assert places(timed(window, durations, 0))[-1] == ("a", 2, 3)
    parent = trace("m F0: *(b c) d e *")
    durations = Durations((10,) * 6, {unit.name: 1000 for unit in parent.units}, {})
    result = outline(
        parent,
        forward_prefetch="timed",
        backward_prefetch="timed",
        memory_budget=0,
        durations=durations,
    )
    assert [each for each in result.intervals if each.unit == "m"][1].gathered == 4


def test_a_gather_is_not_issued_while_its_unit_is_there_whatever_room_there_is() -> None:
    window = trace("m F0: *(a) b *")
    durations = Durations((10,) * 4, {unit.name: 1000 for unit in window.units}, {})
    hoisting = hoist(
        window, on_demand(window), "timed", "timed", room=[10**6] * 4, durations=durations
    )
    assert dict(hoisting.issued) == {0: 0, 1: 0, 2: 0, 3: 2}
    assert hoisting.merged == frozenset()


def test_a_gather_begins_no_earlier_than_there_is_room() -> None:
    # 200 bytes each. Beside an event and the one ahead there is room for one unit more.
    window = trace("m F0: a b c d e")
    durations = took(window, [10] * 5, {"a": 0, "b": 0, "c": 0, "d": 0, "e": 1000})
    for budget, place in ((0, 3), (199, 3), (200, 2), (400, 1), (600, 0)):
        assert places(timed(window, durations, budget))[-1] == ("e", place, 4)


def test_no_gather_overtakes_one_that_is_needed_before() -> None:
    # c is larger and has no room at a; b and d would, and d waits for c.
    window = trace("m F0: a b c d", {"m.a": 10, "m.b": 10, "m.c": 100, "m.d": 10})
    durations = took(window, [10] * 4, {"a": 0, "b": 0, "c": 1000, "d": 1000})
    assert places(timed(window, durations, 40)) == [
        ("a", 0, 0),
        ("b", 0, 1),
        ("c", 1, 2),
        ("d", 1, 3),
    ]


def test_only_events_of_a_phase_by_time_issue_further_ahead() -> None:
    window = trace("m F0: a b; m B0: c d e")
    durations = took(window, [10] * 5, {"a": 0, "b": 0, "c": 0, "d": 0, "e": 1000})

    def issued(forward: Lookahead, backward: Lookahead) -> int:
        program = plan(
            window,
            PassOptions(forward, backward, memory_budget=EVERYTHING),
            Measurements(durations),
        )
        return outline_of(program).intervals[-1].gathered

    assert issued("timed", "timed") == 0
    assert issued("timed", None) == 0
    assert issued("timed", 0) == 0
    assert issued(None, "timed") == 2
    assert issued(None, None) == 3


def test_a_unit_that_is_carried_needs_no_gather_in_the_stream() -> None:
    # Before b the stream would be busy with a for too long.
    window = trace("m F0: c a b; m B0: b", frozen={"m.a"})
    durations = took(window, [10] * 4, {"a": 1000, "b": 5, "c": 0})
    starts = latest_starts(window, on_demand(window), durations, frozenset({"m.a"}))
    assert starts[2] == 1
    assert 1 not in starts
    result = timed(window, durations, EVERYTHING)
    assert result.carried == {"m.a"}
    assert [(each.unit, each.gathered) for each in result.gathers] == [("m.c", 0), ("m.b", 1)]


def test_places_without_a_limit_do_not_depend_on_the_sizes() -> None:
    window = trace("m F0: a b c", {"m.c": 10**9})
    hoisting = hoist(window, on_demand(window), None, None)
    assert (dict(hoisting.issued), hoisting.merged) == ({0: 0, 1: 0, 2: 1}, frozenset())


def test_a_unit_wanted_before_it_is_freed_stays_if_there_is_no_limit() -> None:
    window = trace("m F0: a b; m B0: b a")
    assert hoist(window, on_demand(window), None, None).merged == {2}
    assert hoist(window, on_demand(window), 0, 0).merged == frozenset()


@st.composite
def measured_windows(draw: st.DrawFn, sizes: Sequence[int] = SIZES) -> tuple[Trace, Durations]:
    window = draw(windows(calls=8, sizes=sizes))
    time_of = st.integers(0, 30)
    gathers = {unit.name: draw(time_of) for unit in window.units}
    return window, Durations(tuple(draw(time_of) for _ in window), gathers, {})


def lateness(result: Outline, issued: Mapping[int, int], durations: Durations) -> int:
    """How late the latest gather is, in a stream that runs them one after the other.

    But for that of the first event: compute begins when it is done.
    """
    begins = [0, *accumulate(durations.compute)]
    done = worst = 0
    ahead = [each for each in result.gathers if each.waited]
    for each in sorted(ahead, key=lambda each: each.waited):
        done = max(done, begins[issued[each.waited]]) + durations.gathers[each.unit]
        worst = max(worst, done - begins[each.waited])
    return worst


@settings(max_examples=80)
@given(measured_windows())
def test_gathers_with_room_are_as_late_as_possible_and_in_time(
    drawn: tuple[Trace, Durations],
) -> None:
    window, durations = drawn
    result = timed(window, durations, EVERYTHING)
    # What is late from the first event on is late at any place: faster gathers are not.
    while lateness(result, {each.waited: 0 for each in result.gathers}, durations):
        gathers = {name: each // 2 for name, each in durations.gathers.items()}
        durations = dataclasses.replace(durations, gathers=gathers)
        result = timed(window, durations, EVERYTHING)
    issued = {each.waited: each.gathered for each in result.gathers}
    assert all(place < use or use == 0 for use, place in issued.items())
    assert lateness(result, issued, durations) == 0
    for use, place in issued.items():
        if place < use - 1:
            assert lateness(result, {**issued, use: place + 1}, durations) > 0


@given(measured_windows(), st.sampled_from((0, 20, 40, 100, 300, EVERYTHING)))
def test_gathers_by_time_are_in_order_and_after_their_units_last_use(
    drawn: tuple[Trace, Durations], budget: int
) -> None:
    window, durations = drawn
    program = plan(
        window,
        PassOptions("timed", "timed", memory_budget=budget),
        Measurements(durations),
    )
    ahead = outline_of(plan(window, PassOptions(None, None, memory_budget=budget)))
    result = outline_of(program)
    # What is kept does not depend on it, and no gather is later than one event ahead.
    assert [(each.waited, each.freed) for each in result.gathers] == [
        (each.waited, each.freed) for each in ahead.gathers
    ]
    for early, one in zip(result.gathers, ahead.gathers, strict=True):
        assert early.gathered <= one.gathered
    order = [each.waited for each in result.gathers]
    assert order == sorted(order)
    until: dict[str, int] = {}
    for each in result.intervals:
        assert each.gathered > until.get(each.unit, -1)
        until[each.unit] = each.freed
    assert program.capacity is not None
    assert all(
        there <= limit
        for there, limit in zip(resident_bytes(program), program.capacity, strict=True)
    )


@given(measured_windows(sizes=SIZES[1:]))  # units without bytes have room anywhere
def test_by_time_with_a_budget_of_nothing_is_one_event_ahead(
    drawn: tuple[Trace, Durations],
) -> None:
    window, durations = drawn
    ahead = outline_of(plan(window, PassOptions(None, None, memory_budget=0, keep_frozen=True)))
    assert timed(window, durations, 0) == ahead


@given(measured_windows(), st.data())
def test_gathers_ahead_never_pass_the_room(
    drawn: tuple[Trace, Durations], data: st.DataObject
) -> None:
    window, durations = drawn
    lookahead = st.sampled_from((None, 0, 40, "timed"))
    size = st.sampled_from((0, 20, 60, 200))
    room = data.draw(st.lists(size, min_size=len(window), max_size=len(window)))
    program = plan(
        window,
        PassOptions(data.draw(lookahead), data.draw(lookahead), memory_budget="auto"),
        Measurements(durations, tuple(room)),
    )
    for there, needed, left in zip(
        resident_bytes(program), needed_bytes(window), room, strict=True
    ):
        assert there <= needed + left


@pytest.mark.parametrize("forward", [None, 0, 300])
def test_durations_that_nobody_asks_for_change_nothing(forward: int | None) -> None:
    window = trace("m F0: a b c; m B0: c b a")
    durations = took(window, [1] * 6, {"a": 90, "b": 90, "c": 90})
    options = PassOptions(forward, None, memory_budget=400)
    assert outline_of(plan(window, options, Measurements(durations))) == outline_of(
        plan(window, options)
    )
