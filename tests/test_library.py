"""Which program goes on as the window does, and how many are kept."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_fx.library import BoundProgram, Key, ProgramLibrary
from fsdp_fx.passes import PassOptions, plan
from fsdp_fx.program import Program
from traces import trace


class Stub:
    """Stands for a unit: programs are bound to whatever the names lead to."""

    def __init__(self, name: str) -> None:
        self.name = name


NAMES = ("c0.a", "c0.b", "c0.c")
UNITS: dict[str, Any] = {name: Stub(name) for name in NAMES}


@functools.cache
def planned(text: str, **options: Any) -> Program:
    return plan(trace(text), PassOptions(**options))


def bound(text: str, **options: Any) -> BoundProgram:
    return BoundProgram(planned(text, **options), UNITS)


def keys(text: str) -> tuple[Key, ...]:
    return tuple((UNITS[event.unit], event.phase) for event in trace(text))


def library(*programs: BoundProgram, capacity: int = 16) -> ProgramLibrary:
    result = ProgramLibrary(capacity)
    for program in programs:
        result.add(program)
    return result


LONG = "c0 F0: a b; c0 F1: a b; c0 B0: b a; c0 B1: b a"
SHORT = "c0 F0: a b; c0 B0: b a"
BRANCH = "c0 F0: a c; c0 B0: c a"


def test_library_without_programs_knows_nothing() -> None:
    empty = library()
    assert len(empty) == 0
    assert empty.latest is None
    assert empty.going_on((), keys(SHORT)) is None
    assert empty.exactly(keys(SHORT)) is None


def test_going_on_finds_the_program_with_this_beginning_and_continuation() -> None:
    short, branch = bound(SHORT), bound(BRANCH)
    known = library(short, branch)
    prefix = keys("c0 F0: a")
    assert known.going_on(prefix, keys("c0 F0: b")) is short
    assert known.going_on(prefix, keys("c0 F0: c")) is branch
    assert known.going_on(prefix, keys("c0 F0: b; c0 B0: b")) is short
    assert known.going_on(prefix, keys("c0 F0: b; c0 B0: a")) is None
    assert known.going_on(keys("c0 F0: b"), keys("c0 F0: c")) is None


def test_going_on_distinguishes_phases() -> None:
    known = library(bound(SHORT))
    assert known.going_on(keys("c0 F0: a b"), keys("c0 F0: b")) is None
    assert known.going_on(keys("c0 F0: a b"), keys("c0 B0: b")) is not None


def test_going_on_past_a_programs_end_is_not_a_match() -> None:
    known = library(bound(SHORT))
    assert known.going_on(keys(SHORT), keys("c0 F1: a")) is None


def test_going_on_prefers_the_program_used_last() -> None:
    short, long = bound(SHORT), bound(LONG)
    known = library(short, long)
    assert known.going_on((), keys("c0 F0: a")) is long
    known.touch(short)
    assert known.going_on((), keys("c0 F0: a")) is short


def test_exactly_wants_all_events_and_no_others() -> None:
    short, long = bound(SHORT), bound(LONG)
    known = library(short, long)
    assert known.exactly(keys(SHORT)) is short
    assert known.exactly(keys(LONG)) is long
    assert known.exactly(keys(LONG)[:-1]) is None


def test_program_used_last_is_the_latest() -> None:
    short, long = bound(SHORT), bound(LONG)
    known = library(short, long)
    assert known.latest is long
    known.touch(short)
    assert known.latest is short
    assert list(known) == [long, short]


def test_least_recently_used_program_leaves_first() -> None:
    short, long, branch = bound(SHORT), bound(LONG), bound(BRANCH)
    known = library(short, long, capacity=2)
    known.touch(short)
    known.add(branch)
    assert list(known) == [short, branch]
    assert known.exactly(keys(LONG)) is None


@pytest.mark.parametrize("count", [1, 16, 40])
def test_number_of_programs_kept_is_bounded(count: int) -> None:
    longer = ["; ".join(f"c0 F{i}: a" for i in range(length)) for length in range(1, count + 1)]
    known = library(*map(bound, longer))
    assert len(known) == min(count, 16)
    assert all(
        (known.exactly(keys(text)) is None) == (i < count - 16) for i, text in enumerate(longer)
    )


def test_program_with_the_same_events_takes_the_place_of_the_one_before() -> None:
    short, again = bound(SHORT), bound(SHORT, forward_prefetch=0)
    known = library(short, bound(LONG), again)
    assert len(known) == 2
    assert known.exactly(keys(SHORT)) is again


def test_programs_are_found_for_units_as_they_are_now() -> None:
    short, long = bound(SHORT), bound(LONG)
    known = library(short)
    known.specify(trace("c0 F0: a").units)
    assert known.latest is None
    assert known.exactly(keys(SHORT)) is known.going_on((), keys("c0 F0: a")) is None
    known.add(long)
    assert known.latest is long
    known.specify(trace("c0 F0: b").units)
    assert known.latest is None
    known.specify(trace("c0 F0: a").units)
    assert known.latest is long
    assert list(known) == [short, long]


@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.sampled_from("abc"), min_size=1, max_size=5)),
        max_size=25,
    ),
    st.lists(st.sampled_from("abc"), max_size=6),
)
def test_tree_finds_what_a_search_through_all_programs_finds(
    actions: list[tuple[bool, list[str]]], wanted: list[str]
) -> None:
    """Against a plain list of the programs, in the order of their use."""
    known, plain = library(capacity=4), list[BoundProgram]()
    sought = tuple((UNITS[f"c0.{name}"], "F") for name in wanted)
    for is_new, names in actions:
        text = "c0 F0: " + " ".join(names)
        present = next((p for p in plain if p.keys == keys(text)), None)
        if is_new or present is None:
            added = bound(text)
            known.add(added)
            plain = [p for p in plain if p is not present][-3 if present is None else -4 :]
            plain.append(added)
        else:
            known.touch(present)
            plain.remove(present)
            plain.append(present)
        assert list(known) == plain
        for length in range(len(sought) + 1):
            begun = [p for p in plain if p.keys[:length] == sought[:length]]
            half = length // 2
            assert known.going_on(sought[:half], sought[half:length]) is (
                begun[-1] if begun else None
            )
            exact = [p for p in plain if p.keys == sought[:length]]
            assert known.exactly(sought[:length]) is (exact[-1] if exact else None)


# A program bound to units


def names(units: Sequence[Any]) -> list[str]:
    return [unit.name for unit in units]


def test_bound_steps_hold_units_in_the_place_of_names() -> None:
    first = bound(SHORT).steps[0]
    assert first.unit is UNITS["c0.a"]
    assert first.phase == "F"
    assert names(first.gathers) == ["c0.a"]
    assert names(first.prefetches) == ["c0.b"]
    assert names(first.frees) == ["c0.a"]
    last = bound(SHORT).steps[-1]
    assert names(last.frees) == names(last.reduces) == ["c0.a"]


def test_resident_before_an_event_is_what_was_gathered_and_not_freed() -> None:
    program = bound(SHORT)
    residents = [sorted(names(list(program.resident_before(position)))) for position in range(5)]
    # b stays from its forward to its backward, which is the next event.
    assert residents == [[], ["c0.b"], ["c0.b"], ["c0.a"], []]
    on_demand = bound(SHORT, forward_prefetch=0, backward_prefetch=0)
    assert not any(on_demand.resident_before(position) for position in range(5))
