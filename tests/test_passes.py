"""What each pass does, and that together they write programs that are safe to run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_fx.occupancy import intervals, peak_resident_bytes, resident_bytes
from fsdp_fx.passes import PASSES, Measurements, Pass, PassOptions, plan, run_passes
from fsdp_fx.passes.frees import insert_frees
from fsdp_fx.passes.gathers import insert_gathers
from fsdp_fx.passes.prefetch import hoist_gathers
from fsdp_fx.passes.reductions import insert_reductions
from fsdp_fx.planning.lookahead import reach
from fsdp_fx.planning.memory import Interval, format_bytes, needed_bytes
from fsdp_fx.program import Program
from fsdp_fx.trace import Event, Phase, Trace, UnitSpec
from traces import TWO_CHUNKS, trace

PHASES: tuple[Phase, Phase] = ("F", "B")


def names(program: Program) -> list[str]:
    """The node names of a program in order, without the output's."""
    return [node.name for node in program.graph.nodes][:-1]


def ahead(program: Program) -> dict[str, tuple[str, ...]]:
    """Units gathered ahead, by the event at which they are; events without are left out."""
    return {str(step.event): step.prefetches for step in program.steps if step.prefetches}


def gathered(window: Trace) -> Program:
    return insert_gathers(Program.from_trace(window))


# Gathers


def test_gather_and_wait_stand_directly_before_their_compute() -> None:
    assert names(gathered(trace("m F0: a b"))) == [
        "gather_m_a_F0",
        "wait_m_a_F0",
        "compute_m_a_F0",
        "gather_m_b_F0",
        "wait_m_b_F0",
        "compute_m_b_F0",
    ]


def test_use_inside_a_use_of_the_same_unit_shares_its_value() -> None:
    program = gathered(trace("m F0: a(b a) a"))
    computes = [node for node in program.graph.nodes if "event" in node.kwargs]
    assert [node.args[0].name for node in computes] == [
        "wait_m_a_F0",
        "wait_m_b_F0",
        "wait_m_a_F0",
        "wait_m_a_F2",
    ]


def test_value_is_shared_until_the_longest_of_overlapping_uses_ends() -> None:
    window = replace(trace("m F0: a a b a"), ends=(3, 1, 2, 3))
    assert [name for name in names(gathered(window)) if "gather" in name] == [
        "gather_m_a_F0",
        "gather_m_b_F0",
    ]


# Prefetch


def test_default_lookahead_is_one_event_whatever_its_size() -> None:
    program = plan(trace("m F0: a b c", {"m.b": 10**9}))
    assert ahead(program) == {"m.a F0": ("m.b",), "m.b F0": ("m.c",)}


def test_gather_ahead_stands_after_the_wait_and_before_the_compute() -> None:
    program = hoist_gathers(gathered(trace("m F0: a b")), None, None)
    assert names(program) == [
        "gather_m_a_F0",
        "wait_m_a_F0",
        "gather_m_b_F0",
        "compute_m_a_F0",
        "wait_m_b_F0",
        "compute_m_b_F0",
    ]


def test_zero_budget_gathers_nothing_ahead() -> None:
    program = plan(trace(TWO_CHUNKS, {"c0.a": 0}), PassOptions(0, 0))
    assert ahead(program) == {}


def test_budget_takes_as_many_successors_as_fit() -> None:
    window = trace("m F0: a b c d", {"m.a": 1, "m.b": 30, "m.c": 20, "m.d": 50})
    assert reach(window, 29, 0) == [0, 2, 2, 3]
    assert reach(window, 50, 0) == [2, 2, 3, 3]
    assert reach(window, 100, 0) == [3, 3, 3, 3]


def test_budget_counts_a_unit_once_and_its_own_not_at_all() -> None:
    window = trace("m F0: a b a b c", default=10)
    assert reach(window, 10, 0) == [3, 3, 3, 4, 4]


def test_gathers_ahead_are_issued_in_the_order_of_their_use() -> None:
    program = plan(trace("m F0: a b c d"), PassOptions(300, 0))
    assert ahead(program) == {"m.a F0": ("m.b", "m.c", "m.d")}


def test_budget_is_that_of_the_phase_of_the_issuing_event() -> None:
    window = trace("m F0: a b; m B0: c d")
    assert ahead(plan(window, PassOptions(None, 0))) == {"m.a F0": ("m.b",), "m.b F0": ("m.c",)}
    assert ahead(plan(window, PassOptions(0, None))) == {"m.c B0": ("m.d",)}


def test_last_event_of_a_chunk_gathers_the_first_of_the_next() -> None:
    program = plan(trace("c0 F0: a b; c1 F0: a b"))
    assert ahead(program)["c0.b F0"] == ("c1.a",)


def test_lookahead_never_passes_the_last_event() -> None:
    assert reach(trace("m F0: a b"), None, None) == [1, 1]
    assert reach(trace("m F0: a b"), 10**9, None) == [1, 1]


def test_unit_that_is_the_next_event_is_not_freed_in_between() -> None:
    program = plan(trace("m F0: a b; m B0: b a"))
    assert [interval for interval in intervals(program) if interval.unit == "m.b"] == [
        Interval("m.b", gathered=0, waited=1, uses=(1, 2), freed=2)
    ]


def test_unit_freed_before_the_lookahead_reaches_it_is_gathered_again() -> None:
    program = plan(trace("m F0: a b; m B0: b a"))
    assert [interval for interval in intervals(program) if interval.unit == "m.a"] == [
        Interval("m.a", gathered=0, waited=0, uses=(0,), freed=0),
        Interval("m.a", gathered=2, waited=3, uses=(3,), freed=3),
    ]


def test_lookahead_that_reaches_the_next_use_in_time_keeps_the_unit() -> None:
    program = plan(trace("m F0: a b; m B0: b a"), PassOptions(100, 100))
    assert [interval.uses for interval in intervals(program)] == [(0, 3), (1, 2)]


def test_parent_in_use_when_its_backward_is_next_is_kept() -> None:
    program = plan(trace("m F0: *(a); m B0: *(a)"))
    assert [interval.uses for interval in intervals(program)] == [(0, 2), (1,), (3,)]


# Frees


def test_free_names_the_use_that_ends_last_and_stands_where_it_ends() -> None:
    program = plan(trace("m F0: *(a b)"))
    assert names(program)[-2:] == ["free_m_b_F0", "free_m_F0"]


def test_free_of_nested_uses_of_one_unit_waits_for_the_enclosing_one() -> None:
    program = insert_frees(hoist_gathers(gathered(trace("m F0: a(b a)")), 0, 0))
    (free,) = [node for node in program.graph.nodes if node.name.startswith("free_m_a")]
    assert free.kwargs == {"after": "m.a F0"}


def test_inner_uses_are_freed_before_the_use_around_them() -> None:
    program = plan(trace("m F0: *(a(b(c)))"), PassOptions(0, 0))
    assert names(program)[-4:] == [
        "free_m_c_F0",
        "free_m_b_F0",
        "free_m_a_F0",
        "free_m_F0",
    ]


# Reductions


def reductions(program: Program) -> list[str]:
    nodes = program.graph.nodes
    return [node.kwargs["after"] for node in nodes if node.name.startswith("reduce")]


ACCUMULATION = "m F0: a b; m B0: b a; m F1: a b; m B1: b a"


def test_per_backward_reduces_after_every_contribution() -> None:
    program = plan(trace(ACCUMULATION))
    assert reductions(program) == ["m.b B0", "m.a B0", "m.b B1", "m.a B1"]


def test_only_the_last_reduction_of_a_replicated_unit_all_reduces() -> None:
    window = trace("c0 F0: *(a b); c0 B0: *(b a); c0 F1: *(a); c0 B1: *(a)", replicas={"c0.a": 2})
    program = plan(window)
    lines = [line.split("#") for line in str(program).splitlines() if "reduce(" in line]
    assert [code.strip() for code, _ in lines] == [
        'reduce("c0.b", after="c0.b B0")',
        'reduce("c0.a", after="c0.a B0", all_reduce=False)',
        'reduce("c0", after="c0 B0")',
        'reduce("c0.a", after="c0.a B1")',
        'reduce("c0", after="c0 B1")',
    ]
    comments = [comment for code, comment in lines if '"c0.a"' in code]
    assert comments[0].endswith(", partial sums")
    assert comments[1].endswith(", over 2 replicas")
    assert "5 reductions (1 over replicas)" in str(program)
    steps = {str(step.event): step for step in program.steps}
    assert steps["c0.a B0"].reduces == ("c0.a",)
    assert steps["c0.a B0"].partial == {"c0.a"}
    assert not any(step.partial for label, step in steps.items() if label != "c0.a B0")


def test_per_window_all_reduces_at_its_one_reduction() -> None:
    window = trace("c0 F0: a; c0 F1: a; c0 B0: a; c0 B1: a", replicas={"c0.a": 2})
    program = plan(window, PassOptions(reduce_gradients="per_window"))
    assert [(step.reduces, step.partial) for step in program.steps if step.reduces] == [
        (("c0.a",), frozenset())
    ]


# One unit in the backward of a microbatch and in the forward of the next: the backward
# begins first and ends first, and both end before there is another event.
CROSSING = Trace(
    trace("m F0: a; m B0: a").units,
    tuple(Event("m.a", phase, number, number) for number in (0, 1) for phase in PHASES),
    (0, 2, 2, 3),
    frozenset({1, 3}),
    (0, 1, 2, 3),
)


def test_uses_of_a_unit_that_cross_are_one_interval_and_end_in_their_own_order() -> None:
    program = plan(CROSSING, PassOptions(0, 0))
    assert names(program) == [
        *("gather_m_a_F0", "wait_m_a_F0", "compute_m_a_F0", "free_m_a_F0"),
        *("gather_m_a_B0", "wait_m_a_B0", "compute_m_a_B0", "compute_m_a_F1"),
        *("reduce_m_a_B0", "free_m_a_F1"),
        *("gather_m_a_B1", "wait_m_a_B1", "compute_m_a_B1", "free_m_a_B1", "reduce_m_a_B1"),
    ]


def test_per_window_reduces_after_the_backward_that_ends_last() -> None:
    units = trace("m F0: a; m B0: a").units
    events = tuple(Event("m.a", phase, number, number) for phase in PHASES for number in (0, 1))
    ends, reduces = (0, 1, 3, 3), frozenset({2, 3})
    for ending, last in (((0, 1, 2, 3), "m.a B1"), ((0, 1, 3, 2), "m.a B0")):
        window = Trace(units, events, ends, reduces, ending)
        program = plan(window, PassOptions(reduce_gradients="per_window"))
        assert reductions(program) == [last]


def test_per_window_reduces_once_after_the_last_contribution() -> None:
    program = plan(trace(ACCUMULATION), PassOptions(reduce_gradients="per_window"))
    assert reductions(program) == ["m.b B1", "m.a B1"]


def test_per_window_takes_the_contribution_that_ends_last() -> None:
    # The use that began first ends last: its gradients are the last to come in.
    program = plan(trace("m B0: a(b a)"), PassOptions(reduce_gradients="per_window"))
    assert reductions(program) == ["m.b B0", "m.a B0"]


def test_free_comes_before_the_reduction_at_the_same_place() -> None:
    program = plan(trace("m B0: *(a)"))
    assert names(program)[-4:] == ["free_m_a_B0", "reduce_m_a_B0", "free_m_B0", "reduce_m_B0"]


def test_missing_contributions_defer_the_reduction() -> None:
    assert reductions(plan(trace("m B0: a- b; m B1: a"))) == ["m.b B0", "m.a B1"]


def test_frozen_units_are_gathered_and_freed_but_not_reduced() -> None:
    window = trace("m F0: a b; m B0: b a", frozen={"m.a"})
    # Even if the recording names them.
    window = replace(window, reduces=frozenset({2, 3}))
    program = plan(window)
    assert reductions(program) == ["m.b B0"]
    assert "m.a" in {interval.unit for interval in intervals(program)}


# Units that stay after their forward (reshard_after_forward=False)


def test_unit_that_stays_after_its_forward_is_gathered_again_after_a_backward() -> None:
    text = "m F0: a b; m F1: a b; m B0: b a; m F2: a b; m B1: b a; m B2: b a"
    program = plan(trace(text, kept={"m.b"}), PassOptions(0, 0))
    uses = [interval.uses for interval in intervals(program) if interval.unit == "m.b"]
    assert [[str(program.trace[use]) for use in each] for each in uses] == [
        ["m.b F0", "m.b F1", "m.b B0"],
        ["m.b F2", "m.b B1"],
        ["m.b B2"],
    ]


def test_what_stays_after_its_forward_is_outside_of_the_budget() -> None:
    text = "m F0: a b c; m B0: c b a"
    window = trace(text, kept={"m.b"})
    program = plan(window, PassOptions(0, 0, memory_budget=200))
    # The budget is for one of the others: c is used twice in a row, and needs none.
    assert [interval.unit for interval in intervals(program)] == ["m.a", "m.b", "m.c"]
    assert len(intervals(plan(window, PassOptions(0, 0, memory_budget=0)))) == 4


def test_what_stays_after_its_forward_takes_from_the_recorded_room() -> None:
    window = trace("m F0: a b c; m B0: c b a", kept={"m.b"})
    options = PassOptions(0, 0, memory_budget="auto")
    little, more = (plan(window, options, Measurements(room=(size,) * 6)) for size in (200, 400))
    assert [interval.unit for interval in intervals(little)] == ["m.a", "m.b", "m.c", "m.a"]
    assert [interval.unit for interval in intervals(more)] == ["m.a", "m.b", "m.c"]


def test_what_an_automatic_budget_adds_is_added_to_the_recorded_room() -> None:
    window = trace("m F0: a b c; m B0: c b a")
    measurements = Measurements(room=(100,) * 6)

    def planned(budget: str) -> Program:
        return plan(window, PassOptions(0, 0, memory_budget=budget), measurements)

    plain, more = planned("auto"), planned("auto+0.125KiB")
    assert more.capacity == tuple(capacity + 128 for capacity in plain.capacity or ())
    assert [len(intervals(each)) for each in (plain, more)] == [5, 4]


# The list


def test_passes_do_not_change_the_program_that_they_are_given() -> None:
    program = Program.from_trace(trace(TWO_CHUNKS, kept={"c0.b"}))
    for step in PASSES:
        before = str(program)
        after = step.run(program, PassOptions(memory_budget=300), Measurements())
        assert str(program) == before
        assert str(after) != before
        program = after


def test_passes_in_the_wrong_order_are_refused() -> None:
    program = Program.from_trace(trace("m F0: a"))
    frees = next(step for step in PASSES if step.name == "frees")
    with pytest.raises(ValueError, match="pass frees needs gathered, hoisted, kept, which no ear"):
        run_passes(program, [frees], PassOptions())


def test_every_pass_stands_behind_those_that_it_needs() -> None:
    assert [step.name for step in PASSES] == [
        *("gathers", "reductions", "after_forward", "residency", "prefetch", "frees"),
    ]
    for index, step in enumerate(PASSES):
        if step.needs - {"computes"}:
            with pytest.raises(ValueError, match="which no earlier pass provides"):
                run_passes(Program.from_trace(trace("m F0: a")), PASSES[index:], PassOptions())


def test_pass_that_has_run_is_not_run_again() -> None:
    program = plan(trace("m F0: a"))
    with pytest.raises(ValueError, match="pass gathers provides gathered, which the program has"):
        run_passes(program, PASSES, PassOptions())


def test_program_carries_what_its_passes_provide() -> None:
    provided = frozenset().union(*(step.provides for step in PASSES))
    assert plan(trace("m F0: a")).provides == provided | {"computes"}


def test_every_pass_gets_the_options_and_the_measurements() -> None:
    seen: list[tuple[PassOptions, Measurements]] = []

    def note(program: Program, options: PassOptions, measurements: Measurements) -> Program:
        seen.append((options, measurements))
        return program

    options, measurements = PassOptions(forward_prefetch=7), Measurements(room=(5,))
    note_pass = Pass("note", frozenset(), frozenset({"noted"}), note)
    start = Program.from_trace(trace("m F0: a"))
    program = run_passes(start, [note_pass], options, measurements)
    run_passes(start, [note_pass], options)
    assert seen == [(options, measurements), (options, Measurements())]
    assert "noted" in program.provides


def test_negative_budget_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="forward_prefetch=-1 is not"):
        PassOptions(forward_prefetch=-1)
    with pytest.raises(ValueError, match="backward_prefetch=-1 is not"):
        PassOptions(backward_prefetch=-1)


def test_unknown_choice_of_reductions_is_refused() -> None:
    with pytest.raises(ValueError, match="reduce_gradients='never' is unknown"):
        PassOptions(reduce_gradients="never")  # type: ignore[arg-type]


def test_trace_without_events_has_an_empty_program() -> None:
    program = plan(Trace((), (), (), frozenset()))
    assert program.steps == ()
    assert peak_resident_bytes(program) == 0


# Memory


def test_resident_bytes_count_a_unit_from_its_gather_to_its_free() -> None:
    window = trace("m F0: *(a b)", {"m": 1, "m.a": 10, "m.b": 100})
    assert resident_bytes(plan(window, PassOptions(0, 0))) == [2, 22, 202]
    assert resident_bytes(plan(window)) == [22, 222, 202]
    assert peak_resident_bytes(plan(window)) == 222


def test_needed_bytes_are_those_of_the_units_in_use() -> None:
    window = trace("m F0: *(a(a) b)", {"m": 1, "m.a": 10, "m.b": 100})
    assert needed_bytes(window) == [2, 22, 22, 202]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (3 * 2**29, "1.5 GiB"),
        (5 * 2**40, "5.0 TiB"),
    ],
)
def test_bytes_are_printed_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text


# Any trace


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Any trace at all: uses may nest, overlap or cross, contributions may be missing."""
    units = tuple(
        UnitSpec(f"m.u{index}", "m", size, 2 * size, 4 * size if trainable else 0, trainable)
        for index, (size, trainable) in enumerate(
            draw(st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=4))
        )
    )
    count = draw(st.integers(1, 16))
    events: list[Event] = []
    for _ in range(count):
        unit = draw(st.sampled_from(units)).name
        phase = draw(st.sampled_from(PHASES))
        occurrence = sum(event.unit == unit and event.phase == phase for event in events)
        events.append(Event(unit, phase, occurrence, draw(st.integers(0, 2))))
    ends = tuple(
        draw(st.one_of(st.just(start), st.integers(start, count - 1))) for start in range(count)
    )
    backward = [position for position, event in enumerate(events) if event.phase == "B"]
    reduces = draw(st.sets(st.sampled_from(backward))) if backward else set()
    # Uses that end at the same place end in any order, not only inner ones first.
    ending = sorted(draw(st.permutations(range(count))), key=lambda position: ends[position])
    return Trace(units, tuple(events), ends, frozenset(reduces), tuple(ending))


BUDGETS = st.one_of(st.none(), st.integers(0, 50))
OPTIONS = st.builds(
    PassOptions, BUDGETS, BUDGETS, reduce_gradients=st.sampled_from(("per_backward", "per_window"))
)


@given(traces(), OPTIONS)
def test_any_trace_gives_a_program_that_verifies_runs_and_prints(
    window: Trace, options: PassOptions
) -> None:
    program = plan(window, options)
    assert program.graph_module() == ()
    assert [step.event for step in program.steps] == list(window)
    # A heading per call, and a line per node.
    nodes = len(program.graph.nodes) - 1
    assert len(str(program).splitlines()) == 1 + 2 * len(window.calls) + nodes


def fits(window: Trace, options: PassOptions, issuing: int, last: int) -> bool:
    """Whether the lookahead of one event covers all events up to ``last``."""
    own = window[issuing]
    budget = options.forward_prefetch if own.phase == "F" else options.backward_prefetch
    if budget is None:
        return last <= issuing + 1
    units = {event.unit for event in window[issuing + 1 : last + 1]} - {own.unit}
    return budget > 0 and sum(window.unit(unit).elements for unit in units) <= budget


@given(traces(), OPTIONS)
def test_prefetch_budgets_are_honoured_and_used(window: Trace, options: PassOptions) -> None:
    for interval in intervals(plan(window, options)):
        issued, first = interval.gathered, interval.uses[0]
        if issued < first:
            assert fits(window, options, issued, first)
        # No event before could have issued it.
        assert not any(fits(window, options, earlier, first) for earlier in range(issued))


def replay(window: Trace, options: PassOptions) -> list[tuple[int, str]]:
    """What a runtime would gather, and at which event, working from semantics alone."""
    count = len(window)
    resident: set[str] = set()
    gathers: list[tuple[int, str]] = []

    def bring(position: int, unit: str) -> None:
        if unit not in resident:
            resident.add(unit)
            gathers.append((position, unit))

    for position, event in enumerate(window):
        bring(position, event.unit)
        wanted = [
            later for later in range(position + 1, count) if fits(window, options, position, later)
        ]
        for later in wanted:
            bring(position, window[later].unit)
        running = {window[p].unit for p in range(position + 1) if window.ends[p] > position}
        # Brought in or kept by the lookahead of any event so far, and not used yet.
        awaited = {
            window[later].unit
            for later in range(position + 1, count)
            if any(fits(window, options, earlier, later) for earlier in range(position + 1))
        }
        resident &= running | awaited
    assert not resident
    return gathers


@given(traces(), OPTIONS)
def test_gathers_are_those_of_an_exact_replay(window: Trace, options: PassOptions) -> None:
    planned = [
        (position, unit)
        for position, step in enumerate(plan(window, options).steps)
        for unit in step.gathers + step.prefetches
    ]
    assert planned == replay(window, options)


@given(traces(), OPTIONS)
def test_following_the_steps_is_safe(window: Trace, options: PassOptions) -> None:
    """An executor that sees only steps, and the ends of uses as they happen."""
    program = plan(window, options)
    state: dict[str, str] = {}
    owed: dict[str, set[int]] = {}
    for position, step in enumerate(program.steps):
        for unit in step.gathers:
            assert unit not in state
            state[unit] = "in flight"
        if step.wait:
            assert state[step.event.unit] == "in flight"
            state[step.event.unit] = "resident"
        assert state[step.event.unit] == "resident"
        for unit in step.prefetches:
            assert unit not in state
            state[unit] = "in flight"
        running = {window[p].unit for p in range(position + 1) if window.ends[p] > position}
        ending = [p for p in range(position + 1) if window.ends[p] == position]
        for ended in sorted(ending, key=lambda p: window.end_ranks[p]):
            if ended in window.reduces and window.unit(window[ended].unit).trainable:
                owed.setdefault(window[ended].unit, set()).add(ended)
            for unit in program.steps[ended].frees:
                assert state.pop(unit) == "resident"
                assert unit not in running
            for unit in program.steps[ended].reduces:
                assert owed.pop(unit)
    assert not state
    assert not owed


@given(traces())
def test_per_window_reduces_every_unit_with_contributions_once(window: Trace) -> None:
    program = plan(window, PassOptions(reduce_gradients="per_window"))
    reduced = [unit for step in program.steps for unit in step.reduces]
    wanted = {window[p].unit for p in window.reduces if window.unit(window[p].unit).trainable}
    assert sorted(reduced) == sorted(wanted)


@given(traces())
def test_end_order_has_no_ties(window: Trace) -> None:
    keys = {window.end_order(position) for position in range(len(window))}
    assert len(keys) == len(window)


def test_reductions_alone_can_follow_frees_of_another_pass() -> None:
    window = trace("m B0: a")
    program = insert_frees(hoist_gathers(gathered(window), None, None))
    assert names(insert_reductions(program, "per_backward")) == [
        *names(program),
        "reduce_m_a_B0",
    ]
