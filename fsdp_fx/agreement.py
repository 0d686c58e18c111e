"""Do all ranks run the same collectives in the same order?

Ranks that shard a unit together must gather and reduce it together. :class:`Agreement`
compares what they are about to do where it is not known yet that they agree:

- while a window is written down, each event with what the first rank to reach it found
  there, before anything is gathered for it;
- where a window leaves its program, for another known one or for none, all ranks wait
  for each other;
- when a trace is committed, all ranks wait for each other and compare what becomes of it; if
  that depends on what each of them measured, they take the least of their numbers first;
- after an abort they wait for each other and compare how many collectives they have issued.

In replay nothing is exchanged. A rank that closes its window only looks whether another
has left the program that it followed itself.

It all goes through the store of the process group (the rendezvous), not through
collectives: those are in disorder where ranks differ, and a store can be waited for with
a deadline of one's own. What is compared is text (:mod:`fsdp_fx.schedule`); when, is
decided in :mod:`fsdp_fx.window`.
"""

from __future__ import annotations

import base64
import collections
import hashlib
import time
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # no stubs

from .program import Program
from .schedule import Schedule, events_so_far, schedule_of
from .torch_internals import default_store
from .trace import Event, UnitSpec
from .units import Unit

__all__ = [
    "Agreement",
    "Agreements",
    "RanksDisagreeError",
    "agreements_of",
]

_LONGEST_PAUSE = 1.0  # seconds between two looks at the store
_SCHEDULES_KEPT = 16
_AGREED = "agreed"
_LEFT = "left its program at"
_CLOSED = "closed a window that was new to it and ended with"
_RESUMED = "goes on after abort()"
_ABORT = "Call abort() on every rank after an exception on one"
_OPENING = "a window to write down"
_RESTART = (
    "An exception that not every rank runs into leaves their collectives out of step: start the "
    "processes again"
)
_REMEDY = (
    "Every rank that shards a unit must use the same units in the same order; where the data "
    "decides (a branch, an expert), shard the block as a whole or adopt(..., together=[block])"
)

# How many agreements this process has made among the same ranks. The other ranks count
# alike, so that contexts find each other.
_made: collections.Counter[tuple[int, ...]] = collections.Counter()


class RanksDisagreeError(RuntimeError):
    """Ranks that share units do not run the same events. The message names the first."""


class Agreements:
    """The agreements of one context: one for each set of ranks that its units lie on.

    Args:
        members: each agreement with the names of the units that its ranks share. Every
            rank of a set lists them in the same order.
    """

    def __init__(self, members: Sequence[tuple[Agreement, frozenset[str]]] = ()) -> None:
        self._members = tuple(members)

    def begin(self) -> None:
        """A window opens. See :meth:`Agreement.begin`."""
        for agreement, _ in self._members:
            agreement.begin()

    def open(self, units: Sequence[UnitSpec], options: Sequence[str]) -> None:
        """A window opens that knows no program, or whose units have changed.

        See :meth:`Agreement.depart`.

        Args:
            units: every unit of the context.
            options: what programs are planned with, one by one.
        """
        for agreement, shared in self._members:
            schedule = events_so_far(units, (), shared)
            schedule = replace(schedule, units=(*schedule.units, *options), events=(_OPENING,))
            agreement.depart(schedule)

    def record(self, event: Event, held_for: int = 0) -> None:
        """An event is written down. See :meth:`Agreement.record`.

        Args:
            event: the event.
            held_for: how many events more its unit is held for, where that is known: graphs
                that differ in it free and reduce at other places.
        """
        label = f"{event} (held for {held_for} events)" if held_for else str(event)
        for agreement, shared in self._members:
            if event.unit in shared:
                agreement.record(label)

    def depart(
        self, units: Sequence[UnitSpec], events: Sequence[Event], found: Event | str, expected: str
    ) -> None:
        """A window leaves its program. See :meth:`Agreement.depart`.

        Args:
            units: every unit of the context.
            events: the window's events so far.
            found: the event that the program did not have next, or in words what was
                found in the place of an event; all ranks are concerned then.
            expected: what the program had next.
        """
        for agreement, shared in self._members:
            if isinstance(found, str) or found.unit in shared:
                so_far = events_so_far(units, events, shared)
                last = f"{found} in the place of {expected}"
                agreement.depart(replace(so_far, events=(*so_far.events, last)))

    def look(self) -> None:
        """A window that followed its program closes. See :meth:`Agreement.look`."""
        for agreement, _ in self._members:
            agreement.look()

    def commit(self, program: Program) -> None:
        """A program is about to be kept. See :meth:`Agreement.commit`."""
        for agreement, shared in self._members:
            agreement.commit(schedule_of(program, shared))

    def least(
        self, units: Sequence[UnitSpec], events: Sequence[Event], numbers: Sequence[int]
    ) -> list[int]:
        """The least of every rank's numbers, one by one. See :meth:`Agreement.least`.

        Args:
            units: every unit of the context.
            events: the window's events.
            numbers: what was measured in it, in an order that is the same on every rank.
        """
        if not self._members:
            return list(numbers)
        agreement, shared = max(self._members, key=lambda member: len(member[0].ranks))
        return agreement.least(events_so_far(units, events, shared), numbers)

    def abort(self) -> None:
        """This rank discards its window. See :meth:`Agreement.abort`."""
        for agreement, _ in self._members:
            agreement.abort()

    def resume(self, issued: Mapping[str, int]) -> None:
        """The first window after an abort opens. See :meth:`Agreement.resume`.

        Args:
            issued: how many collectives of each unit this rank has issued.
        """
        for agreement, shared in self._members:
            counts = (f"{name} {count} times" for name, count in issued.items() if name in shared)
            agreement.resume(tuple(counts))

    def check(self, aborts: bool = True) -> None:
        """Raise what another rank has found out. See :meth:`Agreement.check`."""
        for agreement, _ in self._members:
            agreement.check(aborts)

    def require_common_ranks(self, what: str) -> None:
        """Raise unless one set of ranks holds all others, and so can agree on numbers.

        Args:
            what: the option that needs it.

        Raises:
            ValueError: the units lie on sets of ranks that only overlap.
        """
        if not self._members:
            return
        sets = [set(agreement.ranks) for agreement, _ in self._members]
        largest = max(sets, key=len)
        apart = next((each for each in sets if not each <= largest), None)
        if apart is not None:
            raise ValueError(
                f"{what} needs all ranks of a model to agree on what they measure, and its units "
                f"lie on ranks {sorted(largest)} and on {sorted(apart)}: give memory_budget in "
                "bytes and lookaheads in elements, or shard some unit over all of these ranks"
            )


def agreements_of(units: Sequence[Unit], timeout: float) -> Agreements:
    """An agreement for each set of ranks that some of ``units`` lie on.

    Args:
        units: the units of a context.
        timeout: seconds that a rank waits for the others.
    """
    shared: dict[tuple[int, ...], list[str]] = {}
    for unit in units:
        if len(unit.ranks) > 1:
            shared.setdefault(unit.ranks, []).append(unit.spec.name)
    if not shared or not _others_exist():
        return Agreements()
    members = []
    for ranks in sorted(shared):
        # A digest: ten thousand ranks would make a long key.
        who = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        store = PrefixStore(f"fsdp_fx/{who}/{_made[ranks]}", default_store())
        _made[ranks] += 1
        agreement = Agreement(ranks, dist.get_rank(), store, timeout)
        members.append((agreement, frozenset(shared[ranks])))
    return Agreements(members)


def _others_exist() -> bool:
    """Whether any process answers: where one rank of many is simulated, nobody does."""
    store = default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return dist.get_backend() != "fake" and not isinstance(store, dist.HashStore)  # type: ignore[attr-defined]


class Agreement:
    """Compares the schedules of the ranks that shard some units together.

    Made at the same place of the program on each of them. What they compare is found by
    how often they have gone on after an abort, and the windows since then.

    Args:
        ranks: the ranks, by their number in the default process group.
        rank: this one's.
        store: what they share, and nobody else uses.
        timeout: seconds that a rank waits for the others.
    """

    def __init__(self, ranks: Sequence[int], rank: int, store: Store, timeout: float) -> None:
        self.ranks = tuple(ranks)
        self._rank = rank
        self._timeout = timeout
        self._store = store
        self._commits = 0
        self._resumes = 0
        self._exchanges = 0
        self._discarded: str | None = None  # the window that abort() has discarded
        self._told: str | None = None  # the window of which this rank has raised
        self._agreed: dict[Schedule, None] = {}
        self._window = -1
        self._departures = 0
        self._departures_before = 0  # in the window before
        self._recorded = 0
        self._begun = 0
        self._written: collections.deque[tuple[int, str, int]] = collections.deque()
        self._kept: collections.deque[str] = collections.deque()

    def begin(self) -> None:
        """A window opens."""
        self._begun += 1
        if self._recorded:
            self._written.append((self._begun, self._place(0), self._recorded))
        # A rank that is two windows behind would find nothing to compare with, no more.
        while self._written and self._written[0][0] < self._begun - 1:
            _, place, count = self._written.popleft()
            self._forget_recorded(place, count)
        self._departures_before = self._departures
        self._window += 1
        self._departures = self._recorded = 0

    def _place(self, back: int) -> str:
        """What this window, or one before it, is called in the store."""
        return f"{self._resumes}/{self._window - back}"

    def record(self, label: str) -> None:
        """Compare the next event that is written down with that of the first rank there.

        Raises:
            RanksDisagreeError: it was another.
        """
        place = self._recorded
        self._recorded += 1
        key = f"recorded/{self._place(0)}/{place}"
        found = self._store.compare_set(key, "", f"{self._rank} {label}").decode()
        rank, other = found.split(" ", 1)
        if other != label:
            self._disagree(
                f"the ranks disagree: event {place} written down of the units they share is {label} "
                f"on rank {self._rank} and {other} on rank {rank}. {_REMEDY}"
            )

    def depart(self, schedule: Schedule) -> None:
        """Wait until every rank has left its program here.

        Args:
            schedule: the window's events up to and with the first that the program did
                not have here.

        Raises:
            RanksDisagreeError: on every rank, if one left elsewhere or not at all.
        """
        key = f"departure/{self._place(0)}/{self._departures}"
        self._departures += 1
        self._compare(key, schedule, _LEFT, _REMEDY)

    def look(self) -> None:
        """See whether another rank has left its program where this one did not.

        A rank that has left waits for the others. So where the store is gone, with the process
        that held it, nobody has: that process was done with the same windows, its last ones.

        Raises:
            RanksDisagreeError: one has, in this window or in the one before.
        """
        for back, departures in ((0, self._departures), (1, self._departures_before)):
            key = f"departure/{self._place(back)}/{departures}"
            try:
                left = self._window >= back and self._store.check([f"{key}/first"])
            except dist.DistNetworkError:
                return
            if left:
                self._disagree(
                    f"{self._first_to(key, _LEFT)}, and rank {self._rank} did not. {_REMEDY}", key
                )

    def commit(self, schedule: Schedule) -> None:
        """Wait for the other ranks and compare what they will all replay.

        Args:
            schedule: this rank's.

        Raises:
            RanksDisagreeError: on every rank, if some schedule differs from another, or
                a rank did not come before the deadline.
        """
        if schedule in self._agreed:
            return  # what differs from the programs before is none of these ranks' units
        key = f"commit/{self._resumes}/{self._commits}"
        self._commits += 1
        self._compare(key, schedule, _CLOSED, _REMEDY)
        self._agreed[schedule] = None
        if len(self._agreed) > _SCHEDULES_KEPT:
            del self._agreed[next(iter(self._agreed))]

    def least(self, schedule: Schedule, numbers: Sequence[int]) -> list[int]:
        """Wait for the other ranks and take the least of their numbers, one by one.

        Args:
            schedule: the events of the window that they were measured in.
            numbers: this rank's.

        Raises:
            RanksDisagreeError: on every rank, if their events or how many numbers they have
                differ, or a rank did not come before the deadline.
        """
        store, me = self._store, self._rank
        key = f"least/{self._resumes}/{self._exchanges}"
        self._exchanges += 1
        store.set(f"{key}/numbers {me}", _pack(numbers))
        count = f"{len(numbers)} numbers measured in a window"
        self._compare(key, replace(schedule, units=(*schedule.units, count)), _CLOSED, _REMEDY)
        if me == self.ranks[0]:
            least = list(numbers)
            for rank in self.ranks[1:]:
                theirs = _unpack(store.get(f"{key}/numbers {rank}"))
                least = [min(pair) for pair in zip(least, theirs, strict=True)]
            store.set(f"{key}/least", _pack(least))
        else:
            self._await(f"{key}/least", lambda: f"rank {self.ranks[0]} did not answer")
            least = _unpack(store.get(f"{key}/least"))
        store.delete_key(f"{key}/numbers {me}")
        if store.add(f"{key}/read", 1) == len(self.ranks):
            store.delete_key(f"{key}/least")
            store.delete_key(f"{key}/read")
        return least

    def abort(self) -> None:
        """Let ranks know that wait for this one in the window that it discards."""
        text = f"rank {self._rank} has discarded its window with abort()"
        self._store.compare_set(f"aborted/{self._place(0)}", "", text)

    def resume(self, issued: tuple[str, ...]) -> None:
        """Wait until every rank has discarded its window, and compare what they have issued.

        Args:
            issued: the collectives of this rank so far, as lines of text.

        Raises:
            RanksDisagreeError: on every rank, if one has issued others, or did not abort.
        """
        key = f"resume/{self._resumes}"
        self._discarded = self._place(1)  # the window before this one
        self._resumes += 1
        self._commits = self._departures = self._departures_before = self._recorded = 0
        self._window = self._exchanges = 0
        self._compare(key, Schedule((), (), issued=issued), _RESUMED, _RESTART)
        self._discarded = None

    def check(self, aborts: bool = True) -> None:
        """See whether another rank has found out that the ranks differ.

        A rank that has called abort() is not told that ranks waited for it in the window that
        it discarded: it has done what that asks for.

        Args:
            aborts: whether to look for ranks that have discarded this window, too.

        Raises:
            RanksDisagreeError: one has.
        """
        for place in (self._place(0), self._place(1), self._discarded):
            key = f"disagreement/{place}"
            if place in (None, self._told) or not self._store.check([key]):
                continue
            verdict = self._store.get(key).decode()
            if place != self._discarded or not verdict.endswith(_ABORT):
                self._told = place
                raise RanksDisagreeError(verdict)
        key = f"aborted/{self._place(0)}"
        if aborts and self._store.check([key]):
            aborted = self._store.get(key).decode()
            self._disagree(f"{aborted}, and rank {self._rank} waits for it there. {_ABORT}")

    def _compare(self, key: str, schedule: Schedule, what: str, remedy: str) -> None:
        store, me = self._store, self._rank
        packed = schedule.pack()
        mine = f"{me} {hashlib.sha256(packed.encode()).hexdigest()}"
        first = store.compare_set(f"{key}/first", "", mine).decode()
        if first == mine:
            store.set(f"{key}/schedule", packed)
        elif first.split()[1] != mine.split()[1]:
            theirs = Schedule.unpack(store.get(f"{key}/schedule"))
            sides = sorted([(me, schedule), (int(first.split()[0]), theirs)], key=lambda s: s[0])
            (low, one), (high, other) = sides
            found = one.difference(other, f"rank {low}", f"rank {high}")
            if found is not None:
                self._conclude(key, f"the ranks disagree: {found}. {remedy}")
        store.set(f"{key}/arrived {me}", "yes")
        if store.add(f"{key}/arrived", 1) == len(self.ranks):
            self._conclude(key, _AGREED)
            self._forget_comparison()
        self._await_verdict(key, what, remedy)
        if self._kept:
            store.delete_key(f"{self._kept.popleft()}/arrived {me}")
        self._kept.append(key)

    def _await_verdict(self, key: str, what: str, remedy: str) -> None:
        store = self._store

        def too_late() -> str:
            missing = [
                str(rank) for rank in self.ranks if not store.check([f"{key}/arrived {rank}"])
            ]
            return f"{self._first_to(key, what)}, and rank {', '.join(missing)} did not"

        self._await(f"{key}/verdict", too_late, remedy, verdict_of=key)
        verdict = store.get(f"{key}/verdict").decode()
        if verdict != _AGREED:
            self._disagree(verdict)

    def _await(
        self,
        awaited: str,
        too_late: Callable[[], str],
        remedy: str = _REMEDY,
        verdict_of: str | None = None,
    ) -> None:
        """Wait until something is in the store; conclude or raise what is wrong if it is not."""
        began = time.monotonic()
        while not self._store.check([awaited]):
            waited = time.monotonic() - began
            if waited > self._timeout:
                problem = f"{too_late()} within {self._timeout:g} s. {remedy}"
                if verdict_of is None:
                    self._disagree(problem)
                self._conclude(verdict_of, problem)
            self.check()
            # Ten thousand ranks that wait for one must not keep the store busy.
            time.sleep(min(waited / 4 + 1e-4, _LONGEST_PAUSE))

    def _first_to(self, key: str, what: str) -> str:
        rank = self._store.get(f"{key}/first").decode().split()[0]
        events = Schedule.unpack(self._store.get(f"{key}/schedule")).events
        last = f" event {len(events) - 1}, {events[-1]}" if events else ""
        return f"the ranks disagree: rank {rank} {what}{last}"

    def _disagree(self, verdict: str, *waiting: str) -> NoReturn:
        """Raise here, where ranks wait under the keys ``waiting``, and after failures elsewhere."""
        for key in waiting:
            self._conclude(key, verdict)
        self._told = self._place(0)
        self._store.compare_set(f"disagreement/{self._told}", "", verdict)
        raise RanksDisagreeError(verdict)

    def _conclude(self, key: str, verdict: str) -> None:
        # The first verdict stays.
        self._store.compare_set(f"{key}/verdict", "", verdict)

    def _forget_recorded(self, window: str, count: int) -> None:
        # Each rank removes a part.
        for place in range(self.ranks.index(self._rank), count, len(self.ranks)):
            self._store.delete_key(f"recorded/{window}/{place}")

    def _forget_comparison(self) -> None:
        # All ranks have come to this comparison, so none reads the one before any more.
        for key in self._kept:
            for name in ("first", "schedule", "arrived", "verdict"):
                self._store.delete_key(f"{key}/{name}")


def _pack(numbers: Sequence[int]) -> str:
    return base64.b64encode(zlib.compress(array("q", numbers).tobytes())).decode()


def _unpack(packed: bytes) -> list[int]:
    return array("q", zlib.decompress(base64.b64decode(packed))).tolist()
