"""Ranks that differ find out, all of them, in bounded time, and say where."""

from __future__ import annotations

import contextlib
import copy
import datetime
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fsdp_fx import Event, FSDPContext, IncompleteWindowError, RanksDisagreeError
from fsdp_fx.agreement import Agreement, Agreements
from fsdp_fx.passes import PassOptions, plan
from fsdp_fx.schedule import Schedule, events_so_far, schedule_of
from ranks import RankPool, RankPools
from traces import trace

GROUP_TIMEOUT = 60.0  # seconds
EAGER = {"region_compiler": "eager"}
STEP = "c0 F0: a b; c0 B0: b a"
OTHER = "c0 F0: a c; c0 B0: c a"


def schedule(text: str, **options: Any) -> Schedule:
    shared = {"c0.a", "c0.b", "c0.c"}
    return schedule_of(plan(trace(text), PassOptions(**options)), shared)


def begun(text: str) -> Schedule:
    window = trace(text)
    return events_so_far((), window.events, {event.unit for event in window})


class Counting:
    """A store that counts what it is asked."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self._store, name)


def run_ranks(
    *bodies: Callable[[Agreement], object], timeout: float = 10.0, store: Any = None
) -> list[str]:
    """Runs a body for each rank, in threads that share a store; returns what each raised."""
    store = store or dist.HashStore()
    raised = [""] * len(bodies)

    def run(rank: int) -> None:
        agreement = Agreement(range(len(bodies)), rank, store, timeout)
        agreement.begin()
        try:
            bodies[rank](agreement)
        except RanksDisagreeError as error:
            raised[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return raised


# What is compared


def test_schedules_survive_the_way_through_the_store() -> None:
    for each in (schedule(STEP), begun(STEP), Schedule((), ())):
        assert Schedule.unpack(each.pack().encode()) == each


def test_schedule_has_only_what_the_ranks_share() -> None:
    program = plan(trace("c0 F0: a b; c0 B0: b a"), PassOptions())
    shared = schedule_of(program, {"c0.b"})
    assert shared.events == ("c0.b F0", "c0.b B0")
    assert shared.operations == (
        "a gather of c0.b",
        "c0.b F0",
        "c0.b B0",
        "a reduction of c0.b",
    )


def test_difference_names_the_first_event_that_differs() -> None:
    here, there = schedule(STEP), schedule(OTHER)
    longer = schedule("c0 F0: a b; c0 B0: b a; c0 F1: a b; c0 B1: b a")
    # The same units, so that it is the events that differ.
    there = Schedule(here.units, there.events, there.operations)
    assert here.difference(here, "me", "you") is None
    assert here.difference(there, "me", "you") == (
        "event 1 of the units they share is c0.b F0 on me and c0.c F0 on you"
    )
    assert here.difference(longer, "me", "you") == (
        "event 4 of the units they share is nothing more on me and c0.a F1 on you"
    )


def test_difference_of_options_says_after_which_event() -> None:
    found = schedule(STEP).difference(schedule(STEP, forward_prefetch=0), "me", "you")
    assert found is not None
    assert found.startswith("their events are the same, but after event 1 (c0.b F0) there is")
    assert found.endswith("give every rank's FSDPContext the same options")


def test_difference_of_units_is_told_before_their_events() -> None:
    here = schedule(STEP)
    there = Schedule(
        (here.units[0], "c0.b (7 elements, 1 replicas, trains parameters none)"), ("c0.b F0",)
    )
    assert here.difference(there, "me", "you") == (
        "they have other units or options: c0.b (100 elements, 1 replicas, trains parameters none) on me and c0.b (7 elements, 1 replicas, trains parameters none) on you"
    )


# Numbers


def test_ranks_take_the_least_of_their_numbers_one_by_one() -> None:
    measured = [[5, 1 << 40, 0, 7], [3, 1 << 50, 2, 7], [4, 1 << 45, 1, 6]]
    found: dict[tuple[int, int], list[int]] = {}

    def body(rank: int) -> Callable[[Agreement], object]:
        def run(agreement: Agreement) -> None:
            found[rank, 0] = agreement.least(begun(STEP), measured[rank])
            # Another window, in which another rank is the least and there are fewer.
            found[rank, 1] = agreement.least(begun(OTHER), [10 - rank])

        return run

    store = dist.HashStore()
    assert run_ranks(*map(body, range(3)), store=store) == ["", "", ""]
    assert [found[rank, 0] for rank in range(3)] == [[3, 1 << 40, 0, 6]] * 3
    assert [found[rank, 1] for rank in range(3)] == [[8]] * 3


def test_numbers_that_were_exchanged_are_not_left_in_the_store() -> None:
    def keys_after(exchanges: int) -> int:
        store = dist.HashStore()

        def body(agreement: Agreement) -> None:
            for _ in range(exchanges):
                agreement.least(begun(STEP), [1, 2, 3])

        assert run_ranks(body, body, store=store) == ["", ""]
        return store.num_keys()

    assert keys_after(20) == keys_after(2)


@pytest.mark.parametrize(
    ("other", "numbers", "message"),
    [
        (OTHER, 3, "event 1 of the units they share is c0.b F0 on rank"),
        (STEP, 2, "3 numbers measured in a window on rank"),
    ],
)
def test_ranks_that_measured_something_else_all_raise_the_same(
    other: str, numbers: int, message: str
) -> None:
    raised = run_ranks(
        lambda agreement: agreement.least(begun(STEP), [1, 2, 3]),
        lambda agreement: agreement.least(begun(STEP), [1, 2, 3]),
        lambda agreement: agreement.least(begun(other), [1, 2, 3][:numbers]),
    )
    assert len(set(raised)) == 1
    assert message in raised[0]


def test_rank_that_measures_nothing_is_named_after_the_deadline() -> None:
    def measures(agreement: Agreement) -> None:
        agreement.least(begun(STEP), [1, 2, 3])

    began = time.monotonic()
    raised = run_ranks(measures, lambda agreement: None, measures, timeout=0.3)
    assert time.monotonic() - began < 5
    assert raised[0] == raised[2]
    assert "rank 1 did not within 0.3 s" in raised[0]
    assert raised[1] == ""


# Commits


def test_ranks_with_the_same_program_commit_it() -> None:
    step = schedule(STEP)
    assert run_ranks(*[lambda agreement: agreement.commit(step)] * 3) == ["", "", ""]


def test_ranks_with_other_programs_all_raise_the_same() -> None:
    def body(text: str) -> Callable[[Agreement], object]:
        return lambda agreement: agreement.commit(begun(text))

    raised = run_ranks(body(STEP), body(STEP), body(OTHER))
    assert len(set(raised)) == 1
    assert "event 1 of the units they share is" in raised[0]
    assert "c0.b F0 on rank" in raised[0]
    assert "c0.c F0 on rank" in raised[0]


def test_rank_that_does_not_come_is_named_after_the_deadline() -> None:
    def comes(agreement: Agreement) -> None:
        agreement.commit(schedule(STEP))

    began = time.monotonic()
    raised = run_ranks(comes, lambda agreement: None, comes, timeout=0.3)
    assert time.monotonic() - began < 5
    assert raised[0] == raised[2]
    assert (
        "closed a window that was new to it and ended with event 3, c0.a B0, and rank 1"
        in raised[0]
    )
    assert "did not within 0.3 s" in raised[0]
    assert raised[1] == ""


def test_rank_that_comes_after_the_deadline_raises_too() -> None:
    gone = threading.Event()

    def punctual(agreement: Agreement) -> None:
        try:
            agreement.commit(schedule(STEP))
        finally:
            gone.set()

    def late(agreement: Agreement) -> None:
        assert gone.wait(10)
        agreement.commit(schedule(STEP))

    raised = run_ranks(punctual, late, timeout=0.2)
    assert raised[0] == raised[1] != ""


def test_program_that_was_agreed_on_is_not_compared_again() -> None:
    store = Counting()
    counts: list[int] = []

    def body(agreement: Agreement) -> None:
        agreement.commit(schedule(STEP))
        counts.append(store.requests)
        agreement.commit(schedule(STEP))

    assert run_ranks(body, store=store) == [""]
    assert store.requests == counts[0]


def test_ranks_can_agree_again_after_they_did_not() -> None:
    def body(text: str) -> Callable[[Agreement], object]:
        def run(agreement: Agreement) -> None:
            with pytest.raises(RanksDisagreeError):
                agreement.commit(begun(text))
            agreement.abort()
            agreement.begin()
            agreement.resume(("c0.a 2 times",))
            agreement.commit(schedule(STEP))

        return run

    assert run_ranks(body(STEP), body(OTHER)) == ["", ""]


# While a window is written down


def test_events_that_all_ranks_write_down_pass() -> None:
    def body(agreement: Agreement) -> None:
        for event in trace(STEP):
            agreement.record(str(event))

    assert run_ranks(body, body) == ["", ""]


def test_rank_that_comes_second_to_another_event_raises_before_it_goes_on() -> None:
    first = threading.Event()

    def one(agreement: Agreement) -> None:
        for event in trace(STEP):
            agreement.record(str(event))
        first.set()

    def two(agreement: Agreement) -> None:
        assert first.wait(10)
        reached: list[str] = []
        try:
            for event in trace(OTHER):
                agreement.record(str(event))
                reached.append(str(event))
        finally:
            assert reached == ["c0.a F0"]

    raised = run_ranks(one, two)
    assert raised[0] == ""
    assert "event 1 written down" in raised[1]
    assert "is c0.c F0 on rank 1 and c0.b F0 on rank 0" in raised[1]


def test_graphs_that_hold_a_unit_for_other_events_differ() -> None:
    event = Event("c0.a", "B", 0)

    def body(held_for: int) -> Callable[[Agreement], object]:
        return lambda agreement: Agreements([(agreement, frozenset({"c0.a"}))]).record(
            event, held_for
        )

    assert run_ranks(body(1), body(1)) == ["", ""]
    assert sorted(map(bool, run_ranks(body(0), body(1)))) == [False, True]


def test_what_an_aborted_window_wrote_down_is_not_compared_with_the_next() -> None:
    def body(agreement: Agreement) -> None:
        agreement.record("c0.a F0")
        agreement.record("c0.b F0")
        agreement.begin()
        agreement.record("c0.b F0")

    assert run_ranks(body, body) == ["", ""]


# Leaving a program


def test_ranks_that_leave_their_program_at_the_same_event_go_on() -> None:
    def body(agreement: Agreement) -> None:
        agreement.depart(begun("c0 F0: a"))
        agreement.depart(begun("c0 F0: a b"))
        agreement.look()

    assert run_ranks(body, body, body) == ["", "", ""]


def test_ranks_that_leave_their_program_for_other_events_all_raise() -> None:
    def body(text: str) -> Callable[[Agreement], object]:
        return lambda agreement: agreement.depart(begun(text))

    raised = run_ranks(body("c0 F0: a b"), body("c0 F0: a c"))
    assert raised[0] == raised[1]
    assert "c0.b F0 on rank" in raised[0]


def with_windows_that_ranks_ended_differently() -> None:
    """One closed the window and one discarded it, or discarded it twice: all have aborted."""
    model, context = experts(fails=False, agreement_timeout=30.0)
    for _ in range(2):
        train(model, context)
    model(torch.ones(2, 8)).sum().backward()
    if dist.get_rank() == 0:
        context.finish_grad_sync()
    else:
        context.abort()
    context.abort()
    train(model, context, microbatches=2)
    train(model, context, chosen=1)
    train(model, context)
    assert context.stats.recorded_windows == 3


def test_ranks_go_on_after_an_abort_whatever_each_had_closed(ranks: RankPools) -> None:
    ranks(2).run(with_windows_that_ranks_ended_differently)


def test_exception_on_every_rank_can_be_undone(ranks: RankPools) -> None:
    ranks(2).run(with_an_exception_on_every_rank)


def with_another_number_of_microbatches() -> None:
    model, context = experts()
    train(model, context, microbatches=2)
    with disagreeing("rank 1 left its program at event 6, the window's end in the place of"):
        train(model, context, microbatches=2 - dist.get_rank())
    context.abort()


def with_other_options() -> None:
    model, context = experts(backward_prefetch=100_000 * dist.get_rank())
    with disagreeing(
        "other units or options: backward_prefetch=0 on ", "backward_prefetch=100000 on "
    ):
        train(model, context)
    context.abort()


def with_other_frozen_parameters(windows: int, mode: str) -> None:
    """Of the same size: the collectives would pair up, with each other's gradients."""
    model, context = experts(mode=mode)
    for _ in range(windows):
        train(model, context)
    layer = model.before
    (layer.weight if dist.get_rank() == 0 else layer.bias).requires_grad_(False)
    with disagreeing(
        "c0.before", "trains parameters 1) on rank 0", "trains parameters 0) on rank 1"
    ):
        train(model, context)
    context.abort()


def with_other_units(mode: str) -> None:
    model, context = experts((8, 8 + 2 * dist.get_rank()), mode=mode)
    with disagreeing(
        "they have other units or options: c0.experts.1.0 (72 elements, 1 replicas, trains parameters 0, 1) on rank 0"
    ):
        train(model, context)
    context.abort()


def taken_together(compiled: bool) -> None:
    """Each rank uses another expert: the block is one unit, and the gradients are averages."""
    model, context = experts(fails=False, together=True)
    whole = copy.deepcopy(model_of(model))
    forward = torch.compile(model, backend="fsdp_fx", options=EAGER) if compiled else model
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for window in range(3):
        for microbatch in range(2):
            model.chosen = (rank + microbatch) % 2
            forward(torch.full((2, 8), 1.0 + rank + window)).sum().backward()
        context.finish_grad_sync()
        for each, microbatch in itertools.product(range(ranks), range(2)):
            whole.chosen = (each + microbatch) % 2
            (whole(torch.full((2, 8), 1.0 + each + window)).sum() / ranks).backward()
        for found, wanted in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(found.grad.full_tensor(), wanted.grad)
        for parameter in (*model.parameters(), *whole.parameters()):
            parameter.data.sub_(0.1 * parameter.grad)
            parameter.grad = None
    assert context.stats.divergences == 0
    assert context.stats.replayed_windows == 2


def model_of(model: Any) -> Experts:
    """The same weights, whole and without hooks."""
    whole = Experts()
    for mine, theirs in zip(whole.parameters(), model.parameters(), strict=True):
        mine.data.copy_(theirs.full_tensor())
    return whole


def test_block_whose_units_are_taken_together_trains_with_another_expert_on_each_rank(
    ranks: RankPools,
) -> None:
    ranks(2).run(taken_together, False)
    ranks(2).run(taken_together, True)


def refusals_of_together() -> None:
    mesh = DeviceMesh("cpu", range(dist.get_world_size()))
    model = Experts()
    fully_shard(model, mesh=mesh)
    context = FSDPContext(mode="recorded")
    with pytest.raises(ValueError, match="Linear is not inside of a chunk of this call"):
        context.adopt(model, together=[nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="Linear has no FSDP2 units"):
        context.adopt(model, together=[model.before])
    with pytest.raises(ValueError, match="FSDPExperts and FSDPExperts lie inside of one another"):
        context.adopt(model, together=[model, model])
    context.adopt(model, together=[model])


def test_modules_that_cannot_be_taken_together_are_refused(ranks: RankPools) -> None:
    ranks(2).run(refusals_of_together)


def replays(microbatches: int) -> int:
    model, context = experts(fails=False)
    for _ in range(4):  # the last clears away what the first wrote down
        train(model, context, microbatches=microbatches)
    requests = 0
    methods = ("set", "get", "add", "check", "compare_set", "delete_key", "wait")
    with pytest.MonkeyPatch.context() as patch:
        for name in methods:
            original = getattr(dist.PrefixStore, name)

            def counted(self: Any, *args: Any, original: Any = original) -> Any:
                nonlocal requests
                requests += 1
                return original(self, *args)

            patch.setattr(dist.PrefixStore, name, counted)
        train(model, context, microbatches=microbatches)
    assert context.stats.replayed_windows == 4
    return requests


def test_replay_looks_at_the_store_twice_a_window_whatever_its_length(ranks: RankPools) -> None:
    assert ranks(2).run(replays, 1) == ranks(2).run(replays, 3) == [2, 2]


# Last: what they leave in flight would disturb other tests on these ranks.


@pytest.fixture(scope="module")
def wrecked(ranks: RankPools) -> Iterator[RankPool]:
    """Two ranks that are not used again."""
    yield ranks(2)
    ranks(2).close()


@pytest.mark.parametrize("windows", [1, 2])
def test_rank_that_stays_in_its_program_sees_that_another_has_left(windows: int) -> None:
    left = threading.Event()

    def leaves(agreement: Agreement) -> None:
        left.set()
        agreement.depart(begun("c0 F0: a c"))

    def stays(agreement: Agreement) -> None:
        if windows == 2:  # it has closed its window before the other leaves
            agreement.look()
        assert left.wait(10)
        time.sleep(0.1)
        if windows == 2:
            agreement.begin()
        agreement.look()

    raised = run_ranks(leaves, stays)
    assert raised[0] == raised[1]
    assert "rank 0 left its program at event 1, c0.c F0, and rank 1 did not" in raised[0]


def test_rank_that_leaves_alone_raises_after_the_deadline() -> None:
    raised = run_ranks(
        lambda agreement: agreement.depart(begun("c0 F0: a c")), lambda _: None, timeout=0.2
    )
    assert "rank 0 left its program at event 1, c0.c F0, and rank 1 did not within" in raised[0]


# After an abort


def goes_on_after_abort(aborted: threading.Event) -> Callable[[Agreement], object]:
    """A rank that discards its window, says so, and opens the next one."""

    def run(agreement: Agreement) -> None:
        agreement.abort()
        aborted.set()
        agreement.begin()
        agreement.resume(("c0.a 3 times",))
        agreement.check()

    return run


def test_ranks_that_have_issued_the_same_go_on_after_an_abort() -> None:
    def body(agreement: Agreement) -> None:
        agreement.abort()
        agreement.begin()
        agreement.resume(("c0.a 3 times", "c0.b 2 times"))
        agreement.check()

    assert run_ranks(body, body) == ["", ""]


def test_ranks_that_are_out_of_step_after_an_abort_all_raise() -> None:
    def body(count: int) -> Callable[[Agreement], object]:
        def run(agreement: Agreement) -> None:
            agreement.abort()
            agreement.begin()
            agreement.resume((f"c0.a {count} times",))

        return run

    raised = run_ranks(body(3), body(2))
    assert raised[0] == raised[1]
    assert (
        "collectives after abort(): of unit c0.a 3 times on rank 0 and c0.a 2 times on rank 1"
        in (raised[0])
    )
    assert raised[0].endswith("start the processes again")


def test_rank_that_waits_in_a_window_that_another_has_discarded_raises() -> None:
    aborted = threading.Event()

    def waits(agreement: Agreement) -> None:
        assert aborted.wait(10)
        agreement.check()

    raised = run_ranks(goes_on_after_abort(aborted), waits, timeout=1.0)
    assert (
        "rank 0 has discarded its window with abort(), and rank 1 waits for it there" in (raised[1])
    )
    assert "the ranks disagree: rank 0 goes on after abort()" in raised[0]
    assert "and rank 1 did not within 1 s" in raised[0]


def test_rank_that_has_discarded_its_window_waits_for_one_that_was_told_to() -> None:
    aborted = threading.Event()

    def waits(agreement: Agreement) -> None:
        assert aborted.wait(10)
        with pytest.raises(RanksDisagreeError, match="Call abort"):
            agreement.check()
        time.sleep(0.3)  # the other one looks many times meanwhile
        agreement.abort()
        agreement.begin()
        agreement.resume(("c0.a 3 times",))
        agreement.check()

    assert run_ranks(goes_on_after_abort(aborted), waits) == ["", ""]


def test_rank_that_has_discarded_its_window_is_told_what_else_was_wrong_in_it() -> None:
    aborted = threading.Event()

    def aborts(agreement: Agreement) -> None:
        agreement.record("c0.a F0")
        goes_on_after_abort(aborted)(agreement)

    def differs(agreement: Agreement) -> None:
        assert aborted.wait(10)
        agreement.record("c0.b F0")

    raised = run_ranks(aborts, differs)
    assert raised[0] == raised[1]
    assert "event 0 written down" in raised[0]


def test_rank_that_closes_after_the_process_with_the_store_has_ended_closes() -> None:
    # Rank 0 of env:// holds it, and is done with the last window first.
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    held: Any = dist.TCPStore("localhost", port, is_master=True)
    agreement = Agreement((0, 1), 1, dist.TCPStore("localhost", port, is_master=False), 10.0)
    agreement.begin()
    agreement.look()
    del held
    with pytest.raises(dist.DistNetworkError):
        agreement.check()
    agreement.look()


@settings(max_examples=25)
@given(st.lists(st.sampled_from(["record", "depart", "commit"]), max_size=8), st.integers(1, 3))
def test_ranks_that_do_the_same_never_raise(actions: list[str], count: int) -> None:
    def body(agreement: Agreement) -> None:
        for number, action in enumerate(actions):
            agreement.begin()
            if action == "record":
                agreement.record(f"c0.a F{number}")
            elif action == "depart":
                agreement.depart(begun(STEP))
            else:
                agreement.commit(schedule("; ".join(f"c0 F{i}: a" for i in range(number + 1))))
            agreement.look()
        agreement.check()

    assert run_ranks(*[body] * count) == [""] * count


def test_store_does_not_grow_with_the_number_of_windows() -> None:
    stores = []
    for windows in (6, 24):
        store = dist.HashStore()

        def body(agreement: Agreement, windows: int = windows) -> None:
            for number in range(windows):
                agreement.begin()
                agreement.depart(begun("c0 F0: a b"))
                agreement.record("c0.a F0")
                agreement.commit(schedule("; ".join(f"c0 F{i}: a" for i in range(number + 1))))

        assert run_ranks(body, body, store=store) == ["", ""]
        stores.append(store.num_keys())
    assert stores[0] == stores[1]


# Whole windows


class Experts(nn.Module):
    """Runs one of its experts, the same for the whole batch."""

    def __init__(self, sizes: tuple[int, ...] = (8, 8)) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, size), nn.Linear(size, 8)) for size in sizes
        )
        self.chosen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[self.chosen](self.before(x))


@contextlib.contextmanager
def disagreeing(*patterns: str) -> Iterator[None]:
    """The block raises, within seconds, and every pattern is in the message."""
    began = time.monotonic()
    with pytest.raises(RanksDisagreeError) as error:
        yield
    # Long before the group would give up.
    assert time.monotonic() - began < GROUP_TIMEOUT / 2
    for pattern in patterns:
        assert pattern in str(error.value), str(error.value)


def experts(
    sizes: tuple[int, ...] = (8, 8), fails: bool = True, **options: Any
) -> tuple[Any, FSDPContext]:
    if fails:
        # A group of the test's own: it is of no use after ranks have run into each other.
        group = dist.new_group(timeout=datetime.timedelta(seconds=GROUP_TIMEOUT))
        mesh = DeviceMesh.from_group(group, "cpu")
        options.setdefault("agreement_timeout", 1.0)
    else:
        mesh = DeviceMesh("cpu", range(dist.get_world_size()))
    model = Experts(sizes)
    for layer in (model.before, *(layer for expert in model.experts for layer in expert)):
        fully_shard(layer, mesh=mesh)
    together = [model] if options.pop("together", False) else []
    context = FSDPContext(**{"mode": "recorded", **options})
    context.adopt(model, together=together)
    return model, context


def train(model: Any, context: FSDPContext, chosen: int = 0, microbatches: int = 1) -> None:
    model.chosen = chosen
    for _ in range(microbatches):
        model(torch.ones(2, 8)).sum().backward()
    context.finish_grad_sync()


def in_the_first_window(sizes: tuple[int, ...]) -> None:
    model, context = experts(sizes)
    with disagreeing("event 1", "c0.experts.0.0 F0 on rank 0", "c0.experts.1.0 F0 on rank 1"):
        train(model, context, chosen=dist.get_rank())
    context.abort()


def in_a_replay(sizes: tuple[int, ...], known: bool) -> None:
    model, context = experts(sizes)
    train(model, context)
    if known:
        train(model, context, chosen=1)
        train(model, context)
    with disagreeing(
        "rank 1 left its program at event 1, c0.experts.1.0 F0 in the place of c0.experts.0.0 F0, "
        "and rank 0 did not"
    ):
        train(model, context, chosen=dist.get_rank())
    context.abort()


def with_an_exception_on_one_rank(windows: int) -> None:
    """It cannot be undone: the other rank has issued collectives that this one has not."""
    model, context = experts(agreement_timeout=30.0)
    for _ in range(windows):
        train(model, context)
    if dist.get_rank() == 1:
        handle = model.experts[0].register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            train(model, context)
        handle.remove()
        context.abort()
    else:
        with disagreeing("rank 1 has discarded its window", "and rank 0 waits for it there"):
            train(model, context)
    context.abort()
    with disagreeing("collectives after abort(): of unit c0.", "start the processes again"):
        train(model, context)


def fail(*_: Any) -> None:
    raise ZeroDivisionError


def with_an_exception_on_every_rank() -> None:
    model, context = experts(fails=False)
    for _ in range(3):
        handle = model.experts[0].register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            train(model, context)
        handle.remove()
        with pytest.raises(
            IncompleteWindowError, match=r"ZeroDivisionError.*Discard it with abort"
        ):
            model(torch.ones(2, 8))
        context.abort()
        train(model, context)
    assert context.stats.recorded_windows == 1


@pytest.mark.parametrize("windows", [0, 2], ids=["recording", "replaying"])
def test_exception_on_one_rank_only_is_an_error_on_every_rank(
    wrecked: RankPool, windows: int
) -> None:
    wrecked.run(with_an_exception_on_one_rank, windows)


@pytest.mark.parametrize("sizes", [(8, 8), (8, 16)], ids=["same size", "other size"])
def test_other_experts_are_an_error_on_every_rank(
    wrecked: RankPool, sizes: tuple[int, ...]
) -> None:
    wrecked.run(in_the_first_window, sizes)
    wrecked.run(in_a_replay, sizes, False)
    wrecked.run(in_a_replay, sizes, True)


def test_ranks_that_differ_otherwise_are_an_error_on_every_rank(wrecked: RankPool) -> None:
    wrecked.run(with_another_number_of_microbatches)
    wrecked.run(with_other_options)
    wrecked.run(with_other_frozen_parameters, 0, "recorded")
    wrecked.run(with_other_frozen_parameters, 2, "recorded")
    wrecked.run(with_other_frozen_parameters, 0, "registration")
    wrecked.run(with_other_units, "recorded")
    wrecked.run(with_other_units, "registration")
