"""The cursor, divergence and residency, on units that only write down what is asked of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fsdp_fx.calls import ForwardCall, Use
from fsdp_fx.library import BoundProgram, ProgramLibrary
from fsdp_fx.passes import PassOptions, plan
from fsdp_fx.residency import Residency, Stats
from fsdp_fx.trace import Phase, Trace
from fsdp_fx.window import IncompleteWindowError, Window
from traces import trace


class Unit:
    """Stands for a unit: notes gathers, waits, frees and reductions."""

    is_alive = True

    def __init__(self, spec: Any, notes: list[str]) -> None:
        self.spec = spec
        self.notes = notes
        self.holds = self.collectives = 0
        self.reduced = False
        self.free_at_release = self.in_flight = self.unsharded = False
        self.contributed = self.has_gradients = self.has_reduced_gradients = False
        self.trainable = spec.trainable
        self.has_partial_sums = False
        self.reduced_gradient_bytes = 0

    def _note(self, what: str) -> None:
        self.notes.append(f"{what} {self.spec.name.removeprefix('m.')}")

    def gather(self) -> None:
        assert not self.in_flight
        assert not self.unsharded
        self._note("gather")
        self.in_flight = True

    def wait(self, on_waiting: Any = None) -> None:
        assert self.in_flight
        self._note("wait")
        self.in_flight, self.unsharded = False, True

    def free(self) -> None:
        assert not self.holds
        self._note("free")
        self.in_flight = self.unsharded = False

    def reset(self, deadline: float = 0.0) -> None:
        self.holds = 0
        self.free_at_release = self.in_flight = self.unsharded = False
        self.contributed = self.has_gradients = False

    def clear_reduced_gradients(self) -> None:
        self.has_reduced_gradients = False

    def reduce(self, all_reduce: bool = True) -> None:
        self._note("reduce")
        self.contributed = self.has_gradients = False

    def keep_gradients(self) -> None:
        self._note("keep")


class Run:
    """A window over the units of a trace, and events to send it."""

    def __init__(self, like: str = "m F0: a b c", **options: Any) -> None:
        self.notes: list[str] = []
        self.options = PassOptions(**options)
        self.units: dict[str, Any] = {
            spec.name: Unit(spec, self.notes) for spec in trace(like).units
        }
        self.stats = Stats()
        self.library = ProgramLibrary()
        self.window = Window(Residency(self.stats), self.library, self.options.reduce_gradients)
        self.window.units = list(self.units.values())

    def know(self, text: str) -> BoundProgram:
        bound = BoundProgram(plan(trace(text), self.options), self.units)
        self.library.add(bound)
        return bound

    def __getitem__(self, name: str) -> Any:
        return self.units[f"m.{name}"]

    def call(self, training: bool = True) -> ForwardCall:
        call = self.window.open_call("m", training, compiled=False)
        self.window.close_call(call, needs_backward=training)
        return call

    def begin(self, name: str, phase: Phase, call: ForwardCall) -> Use:
        return self.window.begin(self[name], phase, call)

    def use(self, name: str, phase: Phase, call: ForwardCall) -> None:
        """An event and the end of its use; in a backward, with a gradient."""
        use = self.begin(name, phase, call)
        if phase == "F":
            call.outstanding[self[name]] = call.outstanding.get(self[name], 0) + 1
        else:
            use.contributes = True
            self[name].has_gradients = True
        self.window.end(use)

    def forward(self, names: str) -> ForwardCall:
        call = self.call()
        for name in names:
            self.use(name, "F", call)
        return call

    def backward(self, names: str, call: ForwardCall) -> None:
        for name in names:
            self.use(name, "B", call)

    def step(self, names: str) -> Trace | None:
        self.backward(names[::-1], self.forward(names))
        return self.window.close().trace

    def take(self) -> list[str]:
        """The notes since the last time."""
        notes, self.notes[:] = list(self.notes), []
        return notes


SHORT = "m F0: a b; m B0: b a"


# Recording and replaying


def test_recording_gathers_on_demand_and_frees_after_use() -> None:
    run = Run()
    run.step("ab")
    assert run.take() == [
        *("gather a", "wait a", "free a", "gather b", "wait b", "free b"),
        *("gather b", "wait b", "free b", "reduce b", "gather a", "wait a", "free a", "reduce a"),
    ]


def test_recorded_window_is_the_trace_of_its_events() -> None:
    run = Run()
    found = run.step("ab")
    wanted = trace(SHORT)
    assert found is not None
    assert (found.events, found.ends, found.reduces) == (
        wanted.events,
        wanted.ends,
        wanted.reduces,
    )


def test_replay_waits_for_its_own_gather_before_it_issues_those_ahead() -> None:
    run = Run()
    run.know(SHORT)
    assert run.step("ab") is None
    assert run.take() == [
        *("gather a", "wait a", "gather b", "free a", "wait b"),
        *("gather a", "free b", "reduce b", "wait a", "free a", "reduce a"),
    ]
    assert run.stats.on_demand_gathers == 1
    assert run.stats.prefetched_gathers == 2
    assert run.stats.replayed_windows == 1


def test_use_that_contains_others_ends_after_them() -> None:
    run = Run()
    call = run.call()
    outer = run.begin("a", "F", call)
    run.use("b", "F", call)
    run.window.end(outer)
    run.use("c", "F", call)
    call.has_backward = True
    found = run.window.close().trace
    assert found is not None
    assert found.ends == (1, 1, 2)
    assert found == trace("m F0: a(b) c")


def test_reduction_waits_for_every_contribution_of_the_microbatch() -> None:
    run = Run()
    call = run.forward("aab")
    run.backward("ba", call)
    assert run.notes.count("reduce a") == 0
    run.backward("a", call)
    assert run.notes.count("reduce a") == 1
    found = run.window.close().trace
    assert found is not None
    assert found.reduces == {3, 5}


def test_gradients_that_no_event_completed_are_reduced_at_the_close() -> None:
    run = Run()
    call = run.forward("ab")
    run.backward("b", call)
    run["a"].has_gradients = True
    run.take()
    run.window.close()
    assert run.take() == ["reduce a"]


def test_close_without_events_does_nothing() -> None:
    run = Run()
    assert run.window.close() == (None, None)
    assert run.stats.windows == run.window.number == 0


def test_windows_are_numbered_by_closes_and_aborts() -> None:
    run = Run()
    run.step("ab")
    run.forward("a")
    assert run.window.number == 1
    assert run.window.is_open
    run.window.abort()
    assert run.window.number == 2
    assert not run.window.is_open


def test_window_with_a_failure_is_refused_until_it_is_aborted() -> None:
    run = Run()
    run.backward("a", run.forward("a"))
    run.window.fail("something happened")
    run.window.fail("and then something else")
    for _ in range(2):
        with pytest.raises(IncompleteWindowError, match="is not whole: something happened"):
            run.window.close()
    run.window.abort()
    assert run.step("a") is not None


def test_window_of_forwards_without_events_is_refused() -> None:
    run = Run()
    call = run.call()
    call.has_backward = True
    with pytest.raises(IncompleteWindowError, match="it has no compute event"):
        run.window.close()


def test_end_of_a_use_from_before_an_abort_is_ignored() -> None:
    run = Run()
    use = run.begin("a", "F", run.call())
    run.window.abort()
    run.window.end(use)
    assert run["a"].holds == 0


# Leaving a program


def test_divergence_frees_what_was_prefetched_in_vain() -> None:
    run = Run()
    run.know(SHORT)
    call = run.forward("a")
    run.take()
    run.use("c", "F", call)
    assert run.take() == ["free b", "gather c", "wait c", "free c"]
    assert run.stats.dropped_gathers == run.stats.divergences == 1


def test_divergence_says_where_and_the_whole_window_is_the_trace() -> None:
    run = Run()
    run.know(SHORT)
    call = run.forward("ac")
    run.backward("ca", call)
    closed = run.window.close()
    assert closed.divergence is not None
    assert "event 1: expected m.b F0, found m.c F" in closed.divergence
    found = closed.trace
    assert found is not None
    wanted = trace("m F0: a c; m B0: c a")
    assert (found.events, found.ends, found.reduces) == (
        wanted.events,
        wanted.ends,
        wanted.reduces,
    )


@pytest.mark.parametrize(("names", "place"), [("a", 1), ("abc", 2)])
def test_divergence_in_the_middle_of_a_window_keeps_the_uses_that_are_open(
    names: str, place: int
) -> None:
    run = Run()
    run.know("m F0: a(b) ; m B0: a(b)")
    call = run.call()
    outer = run.begin("a", "F", call)
    for name in names[1:]:
        run.use(name, "F", call)
    run.window.end(outer)
    if names == "a":
        run.use("c", "F", call)
    call.has_backward = True
    closed = run.window.close()
    assert f"at event {place}" in str(closed.divergence)
    assert closed.trace is not None
    assert closed.trace.ends == ((0, 1) if names == "a" else (2, 1, 2))


def test_window_that_ends_early_is_a_divergence_at_its_end() -> None:
    run = Run()
    run.know("m F0: a b; m B0: b a; m F1: a b; m B1: b a")
    run.backward("ba", run.forward("ab"))
    closed = run.window.close()
    assert "at event 4: expected m.a F1, found the window's end" in str(closed.divergence)
    assert closed.trace is not None
    assert len(closed.trace) == 4
    assert not any(unit.in_flight or unit.unsharded for unit in run.units.values())


def test_window_that_goes_on_is_a_divergence_at_the_programs_end() -> None:
    run = Run()
    run.know(SHORT)
    for _ in range(2):
        run.backward("ba", run.forward("ab"))
    closed = run.window.close()
    assert "at event 4: expected the window's end, found m.a F" in str(closed.divergence)
    assert closed.trace is not None
    assert [event.occurrence for event in closed.trace] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_known_program_is_switched_to_and_what_it_does_not_want_is_freed() -> None:
    run = Run()
    other = run.know("m F0: a c; m B0: c a")
    run.know(SHORT)
    call = run.forward("a")
    run.take()
    run.use("c", "F", call)
    assert run.take() == ["free b", "gather c", "wait c"]
    run.backward("ca", call)
    assert run.window.close() == (None, None)
    assert run.stats.switches == run.stats.replayed_windows == 1
    assert run.stats.divergences == 0
    assert run.library.latest is other


def test_backward_through_an_earlier_window_is_refused() -> None:
    run = Run()
    call = run.forward("a")
    run.backward("a", call)
    run.window.close()
    with pytest.raises(RuntimeError, match=r"a forward of window 0.*closed or aborted"):
        run.begin("a", "B", call)


# Slices of compiled calls


def begin_slice(run: Run, names: str, phase: Phase, call: ForwardCall) -> int | None:
    units = [run[name] for name in names]
    return run.window.begin_slice(units, phase, list(range(len(units))), call)


def test_slice_that_the_program_expects_is_replayed_from_its_position() -> None:
    run = Run()
    run.know(SHORT)
    call = run.call()
    assert begin_slice(run, "ab", "F", call) == 0
    call.has_backward = True
    assert begin_slice(run, "ba", "B", call) == 2
    assert run.window.close() == (None, None)


def test_slice_while_recording_is_written_down_and_runs_on_demand() -> None:
    run = Run(SHORT)
    call = run.call()
    assert begin_slice(run, "ab", "F", call) is None
    call.has_backward = True
    assert begin_slice(run, "ba", "B", call) is None
    run.window.note_reductions(2, [0, 1])
    assert run.window.close().trace == trace(SHORT)


def test_slice_that_differs_in_its_middle_is_a_divergence_named_there() -> None:
    run = Run()
    run.know("m F0: a b c; m B0: c b a")
    call = run.call()
    assert begin_slice(run, "acb", "F", call) is None
    call.has_backward = True
    assert "at event 1: expected m.b F0, found m.c F" in str(run.window.close().divergence)


def test_slice_of_an_evaluation_is_no_event() -> None:
    run = Run()
    run.know(SHORT)
    assert begin_slice(run, "ab", "F", run.call(training=False)) is None
    assert run.window.cursor == 0
    assert not run.window.is_open


# Residency


def unit() -> tuple[Residency, Any, list[str]]:
    notes: list[str] = []
    residency = Residency(Stats())
    return residency, Unit(trace("m F0: a").units[0], notes), notes


def test_free_is_put_off_while_the_unit_is_in_use() -> None:
    residency, a, notes = unit()
    residency.acquire(a)
    residency.acquire(a)
    residency.free(a)
    residency.release(a)
    assert notes == ["gather a", "wait a"]
    residency.release(a)
    assert notes == ["gather a", "wait a", "free a"]


@pytest.mark.parametrize("again", ["prefetch", "acquire"])
def test_unit_wanted_again_before_its_free_happened_is_not_freed(again: str) -> None:
    residency, a, notes = unit()
    residency.acquire(a)
    residency.free(a)
    getattr(residency, again)(a)
    for _ in range(a.holds):
        residency.release(a)
    assert notes == ["gather a", "wait a"]
    assert a.unsharded


def test_gather_and_free_of_a_unit_that_is_there_or_gone_do_nothing() -> None:
    residency, a, notes = unit()
    residency.free(a)
    for _ in range(2):
        residency.prefetch(a)
    assert residency.acquire(a) is False
    residency.release(a)
    for _ in range(2):
        residency.free(a)
    assert notes == ["gather a", "wait a", "free a"]
    stats = residency.stats
    assert (stats.gathers, stats.prefetched_gathers, stats.on_demand_gathers) == (1, 1, 0)
    assert (stats.frees, stats.dropped_gathers) == (1, 0)


def test_gather_freed_before_its_use_counts_as_dropped() -> None:
    residency, a, _ = unit()
    residency.prefetch(a)
    residency.free(a)
    assert residency.stats.dropped_gathers == 1


def test_resident_bytes_count_gathers_until_they_are_freed() -> None:
    residency = Residency(Stats())
    a, b = (Unit(spec, []) for spec in trace("m F0: a b", elements={"m.b": 7}).units)
    for each in (a, b):
        residency.prefetch(each)  # type: ignore[arg-type]
    assert residency.stats.resident_bytes == 200 + 14
    residency.free(a)  # type: ignore[arg-type]
    assert residency.stats.resident_bytes == 14
    residency.reset([b])  # type: ignore[list-item]
    assert residency.stats.resident_bytes == 0
    assert residency.stats.peak_resident_bytes == residency.stats.bytes_gathered == 214


def test_use_by_an_evaluation_frees_only_what_it_brought_in() -> None:
    run = Run()
    run.know(SHORT)
    call = run.forward("a")
    run.take()
    evaluation = run.call(training=False)
    for name in "abc":
        run.window.end(run.begin(name, "F", evaluation))
    assert run.take() == ["gather a", "wait a", "free a", "wait b", "gather c", "wait c", "free c"]
    run.use("b", "F", call)
    assert run.take() == []


def names(units: Sequence[Any]) -> list[str]:
    return [each.spec.name for each in units]


def test_abort_frees_resets_and_names_the_units_whose_gradients_were_there_before() -> None:
    run = Run()
    run["a"].has_reduced_gradients = run["c"].has_reduced_gradients = True
    run.forward("ab")
    run["b"].has_reduced_gradients = True
    run["a"].reduced = run["b"].reduced = True  # c holds no part of the window
    run.begin("c", "F", run.call())
    assert names(run.window.abort()) == ["m.a"]
    assert not run["b"].has_reduced_gradients
    assert run["c"].has_reduced_gradients
    assert not any(unit.unsharded or unit.in_flight or unit.holds for unit in run.units.values())
    assert run.stats.aborts == 1
    assert run.window.abort() == []
    assert run.stats.aborts == 1
