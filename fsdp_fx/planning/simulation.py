"""How long a step takes: one training step of several ranks, simulated event by event.

Reads an :class:`~fsdp_fx.planning.outline.Outline` and
:class:`~fsdp_fx.planning.durations.Durations` per rank and tells when everything
starts and ends. A rank stands for all ranks that shard its units: those of a pipeline differ, so
there is one outline for each stage's rank. Nothing here decides anything.

The model. Every rank has three streams, which run what they are given one after the other:
compute, gathers and reductions.

- Compute runs the events in the order of the trace. Event ``i`` is *reached* when the compute of
  ``i - 1`` has ended and every :class:`Transfer` to it has arrived.
- When it is reached, the gather that is on demand at ``i`` is issued: in a pipeline a stage's
  forward starts after its input was received, so its hooks run after that wait, while gathers
  ahead were issued before it.
- Compute waits for the gathers that ``i`` waits for. Then the gathers ahead at ``i`` are issued,
  in the order of the outline, and the compute of ``i`` runs.
- A gather starts when it is issued and the gathers before it are done, whoever waits for them.
- The reduction after position ``r`` is issued when the compute of event ``trace.ends[r]`` has
  ended, and starts when the reductions before it are done.
- The step ends when every stream of every rank is done.
- Gathers of units that are there at the beginning (:attr:`Outline.carried`) do not happen.

Since streams run in a fixed order, no duration can be made longer and the step shorter.

What is not in it:

- the host: it is always ahead of the device. Where launching is what takes the time, event
  durations that were measured contain it;
- contention: gathers, reductions, transfers and compute slow each other down in reality, and
  two transfers never queue for a link here;
- the allocator: memory that is freed can be used at once, and nobody waits for it. That a gather
  may not start before the memory of another is free is a matter of the plan;
- other ranks of a shard group: a collective starts when this rank has issued it. Stragglers are
  not simulated;
- what lies around a step, such as the optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fsdp_fx.planning.durations import Durations
from fsdp_fx.planning.outline import Outline

__all__ = ["RankSimulation", "Simulation", "Span", "Transfer", "resident_steps", "simulate"]


@dataclass(frozen=True)
class Transfer:
    """What one event computes and another needs: activations or gradients.

    Args:
        source: rank and position of the event that computes it.
        target: rank and position of the event that may not begin before it is there. The rank
            may be the source's: the next stage may be there.
        nanoseconds: from the end of the source's compute to the arrival.
    """

    source: tuple[int, int]
    target: tuple[int, int]
    nanoseconds: int


@dataclass(frozen=True, slots=True)
class Span:
    """A gather or a reduction. Times are nanoseconds since the beginning of the step.

    Args:
        unit: name of the unit.
        position: of a gather the event that waits for it; of a reduction the backward event
            after whose use it comes.
        issued: when it was handed to its stream.
        start: when the stream began with it.
        stop: when it was done.
    """

    unit: str
    position: int
    issued: int
    start: int
    stop: int


@dataclass(frozen=True)
class RankSimulation:
    """What one rank did, in nanoseconds.

    From the beginning to :attr:`stop` the rank computes, or waits in one of three ways:
    ``compute + exposed_gathers + exposed_reductions + bubble == stop``.

    Args:
        starts: when the compute of each event began.
        ends: when it ended.
        gathers: one per interval in :attr:`Outline.gathers`, in that order.
        reductions: one per position in :attr:`Outline.reductions`, in that order.
        exposed_gathers: how long compute waited for gathers, after its transfers were there.
        exposed_reductions: how long reductions went on after the last compute.
        bubble: how long compute waited for transfers.
        compute: how long it computed.
    """

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    gathers: tuple[Span, ...]
    reductions: tuple[Span, ...]
    exposed_gathers: int
    exposed_reductions: int
    bubble: int
    compute: int

    @property
    def exposed_communication(self) -> int:
        """How long the rank did nothing but wait for its gathers and reductions."""
        return self.exposed_gathers + self.exposed_reductions

    @property
    def stop(self) -> int:
        """When every stream of the rank was done. Other ranks may go on."""
        return self.compute + self.exposed_communication + self.bubble


@dataclass(frozen=True)
class Simulation:
    """A simulated step.

    Args:
        nanoseconds: how long it takes, until the last rank is done.
        ranks: what each rank did.
    """

    nanoseconds: int
    ranks: tuple[RankSimulation, ...]


def simulate(
    outlines: Sequence[Outline],
    durations: Sequence[Durations],
    transfers: Sequence[Transfer] = (),
) -> Simulation:
    """Run one step of every rank; see the module for the model.

    Args:
        outlines: the plan of each rank.
        durations: how long things take on each rank.
        transfers: what events of other chunks wait for, on any rank.

    Returns:
        When everything happened.

    Raises:
        ValueError: durations do not fit their outline or are negative, a position does not
            exist, or transfers wait for each other.
    """
    if len(outlines) != len(durations):
        raise ValueError(
            f"{len(outlines)} outlines have {len(durations)} durations: give one for each rank"
        )
    ranks = [
        _Rank(rank, outline, times)
        for rank, (outline, times) in enumerate(zip(outlines, durations, strict=True))
    ]
    for transfer in transfers:
        _require_transfer(transfer, outlines)
        rank, position = transfer.target
        ranks[rank].incoming[position].append(transfer)

    # A rank runs until it needs what is not computed yet; whoever computes that wakes it.
    waiting: list[dict[int, Transfer]] = [{} for _ in ranks]  # by source, by waiting rank
    runnable = list(range(len(ranks)))
    while runnable:
        index = runnable.pop()
        needed = ranks[index].run(ranks)
        if needed is not None:
            waiting[needed.source[0]][index] = needed
        computed = len(ranks[index].ends)
        for other, transfer in list(waiting[index].items()):
            if transfer.source[1] < computed:
                del waiting[index][other]
                runnable.append(other)
    blocked = {rank: transfer for each in waiting for rank, transfer in each.items()}
    if blocked:
        raise ValueError(_deadlock(blocked, outlines))
    results = tuple(rank.result() for rank in ranks)
    return Simulation(max((rank.stop for rank in results), default=0), results)


def resident_steps(outline: Outline, simulated: RankSimulation) -> tuple[tuple[int, int], ...]:
    """How many bytes of full parameters and kept full gradients are there, over time.

    A unit counts from the issue of its gather until the compute of the event after which it is
    freed has ended; a carried one also before its first gather and after its last. A full
    gradient counts from the end of a use whose reduction is put off (a position in
    ``trace.reduces``) until the next reduction of its unit is issued. Gradients while they are
    computed, activations and the buffers of collectives are not in it.

    Args:
        outline: the plan of the rank.
        simulated: what came of it.

    Returns:
        Pairs of a time in nanoseconds and the bytes from then on, the first at 0. What comes and
        goes within one instant is not seen.

    Raises:
        ValueError: the simulation is not one of this outline.
    """
    trace = outline.trace
    gathers = outline.gathers
    if (len(simulated.ends), len(simulated.gathers)) != (len(trace), len(gathers)):
        raise ValueError(
            f"a simulation of {len(simulated.ends)} events and {len(simulated.gathers)} gathers "
            f"is not of an outline of {len(trace)} events and {len(gathers)} gathers"
        )
    units = {unit.name: unit for unit in trace.units}
    changes: defaultdict[int, int] = defaultdict(int, {0: 0})
    last = {interval.unit: interval for interval in outline.intervals}
    issued = {id(i): span.issued for i, span in zip(gathers, simulated.gathers, strict=True)}
    for interval in outline.intervals:
        size = units[interval.unit].bytes
        changes[issued.get(id(interval), 0)] += size
        if interval.unit not in outline.carried or interval is not last[interval.unit]:
            changes[simulated.ends[interval.freed]] -= size

    reduced = set(outline.reductions)
    kept: set[str] = set()
    for position in sorted(reduced | trace.reduces, key=lambda place: trace.end_order(place)):
        unit = units[trace[position].unit]
        time = simulated.ends[trace.ends[position]]
        if position in reduced:
            if unit.name in kept:
                kept.remove(unit.name)
                changes[time] -= unit.kept_gradient_bytes
        elif unit.name not in kept:
            kept.add(unit.name)
            changes[time] += unit.kept_gradient_bytes

    steps: list[tuple[int, int]] = []
    resident = 0
    for time, change in sorted(changes.items()):
        resident += change
        if not steps or change:
            steps.append((time, resident))
    return tuple(steps)


# What a queue ends with.
_NOTHING = (-1, -1, "", -1)


class _Stream:
    """Collectives of one kind: each begins when it is issued and those before it are done.

    Args:
        queue: of each collective, in the order of issue: the event at which it is issued, the
            event that it belongs to, its unit, and its index in the outline.
        durations: nanoseconds, by unit.

    Attributes:
        place: the event at which the next collective is issued; -1 if there is none left.
        position: the event that it belongs to: a gather's waits for it.
        done: when the last one so far is done.
    """

    def __init__(
        self, queue: Iterable[tuple[int, int, str, int]], durations: Mapping[str, int]
    ) -> None:
        self._queue = iter(queue)
        self._durations = durations
        self._spans: dict[int, Span] = {}
        self.done = 0
        self.place, self.position, self._unit, self._index = next(self._queue, _NOTHING)

    def issue(self, now: int) -> None:
        """Issue the next collective."""
        done = self.done
        start = now if now > done else done
        self.done = done = start + self._durations[self._unit]
        self._spans[self._index] = Span(self._unit, self.position, now, start, done)
        self.place, self.position, self._unit, self._index = next(self._queue, _NOTHING)

    @property
    def spans(self) -> tuple[Span, ...]:
        """What has been issued, in the order of the outline."""
        return tuple(self._spans[index] for index in range(len(self._spans)))


class _Rank:
    """One rank on its way through its trace.

    Attributes:
        incoming: transfers by the position of their target.
        ends: when the compute of each event so far ended.
    """

    def __init__(self, rank: int, outline: Outline, durations: Durations) -> None:
        _require_outline(rank, outline)
        _require_durations(rank, outline, durations)
        trace = outline.trace
        self.incoming: defaultdict[int, list[Transfer]] = defaultdict(list)
        self.ends: list[int] = []
        self._starts: list[int] = []
        self._compute = durations.compute
        gathers, reductions = outline.gathers, outline.reductions
        # At one event the gather on demand comes first.
        gather_order = sorted(
            range(len(gathers)),
            key=lambda i: (gathers[i].gathered, gathers[i].gathered != gathers[i].waited),
        )
        self._gathers = _Stream(
            ((gathers[i].gathered, gathers[i].waited, gathers[i].unit, i) for i in gather_order),
            durations.gathers,
        )
        reduction_order = sorted(range(len(reductions)), key=lambda i: trace.ends[reductions[i]])
        self._reductions = _Stream(
            (
                (trace.ends[reductions[i]], reductions[i], trace[reductions[i]].unit, i)
                for i in reduction_order
            ),
            durations.reductions,
        )
        self._there = [0] * len(trace)  # when what each event waits for has been gathered
        self._exposed_gathers = self._bubble = 0

    def run(self, ranks: Sequence[_Rank]) -> Transfer | None:
        """Run events until the last, or until one needs what no rank has computed yet.

        Returns:
            The transfer whose source has to be computed first.
        """
        incoming, compute, starts, ends = self.incoming, self._compute, self._starts, self.ends
        gathers, reductions, there = self._gathers, self._reductions, self._there
        now = ends[-1] if ends else 0
        for position in range(len(ends), len(compute)):
            arrived = now
            for transfer in incoming.get(position, ()):
                source, computed = transfer.source
                if computed >= len(ranks[source].ends):
                    return transfer
                arrival = ranks[source].ends[computed] + transfer.nanoseconds
                if arrival > arrived:
                    arrived = arrival
            while gathers.place == gathers.position == position:
                gathers.issue(arrived)
                there[position] = gathers.done
            ready = there[position] if there[position] > arrived else arrived
            while gathers.place == position:
                waited = gathers.position
                gathers.issue(ready)
                there[waited] = gathers.done
            self._bubble += arrived - now
            self._exposed_gathers += ready - arrived
            now = ready + compute[position]
            starts.append(ready)
            ends.append(now)
            while reductions.place == position:
                reductions.issue(now)
        return None

    def result(self) -> RankSimulation:
        """What the rank did, once it has run to its end."""
        # Every gather is waited for by some compute, so only reductions can come later.
        end = self.ends[-1] if self.ends else 0
        return RankSimulation(
            starts=tuple(self._starts),
            ends=tuple(self.ends),
            gathers=self._gathers.spans,
            reductions=self._reductions.spans,
            exposed_gathers=self._exposed_gathers,
            exposed_reductions=max(0, self._reductions.done - end),
            bubble=self._bubble,
            compute=sum(self._compute),
        )


def _require_outline(rank: int, outline: Outline) -> None:
    """Raise for intervals and reductions that are not of the outline's trace."""
    count = len(outline.trace)
    known = {unit.name for unit in outline.trace.units}
    for interval in outline.intervals:
        if interval.unit not in known:
            raise ValueError(f"rank {rank}: {interval} is of a unit that the trace does not have")
        if not 0 <= interval.gathered <= interval.waited <= interval.freed < count:
            raise ValueError(
                f"rank {rank}: {interval} is out of order, or outside of the {count} events"
            )
    for position in outline.reductions:
        if not 0 <= position < count:
            raise ValueError(
                f"rank {rank}: there is no position {position} to reduce after, only {count} events"
            )


def _require_durations(rank: int, outline: Outline, durations: Durations) -> None:
    """Raise for durations that do not fit the outline."""
    trace = outline.trace
    if len(durations.compute) != len(trace):
        raise ValueError(
            f"rank {rank}: a trace of {len(trace)} events has {len(durations.compute)} durations "
            "of compute"
        )
    if min(durations.compute, default=0) < 0:
        position = next(i for i, duration in enumerate(durations.compute) if duration < 0)
        raise ValueError(
            f"rank {rank}: the compute of event {position} ({trace[position]}) takes "
            f"{durations.compute[position]} ns; it must be at least 0"
        )
    gathered = {interval.unit for interval in outline.gathers}
    reduced = {trace[position].unit for position in outline.reductions}
    _require_collectives(rank, outline, "gather", durations.gathers, gathered)
    _require_collectives(rank, outline, "reduction", durations.reductions, reduced)


def _require_collectives(
    rank: int, outline: Outline, what: str, durations: Mapping[str, int], needed: set[str]
) -> None:
    known = {unit.name for unit in outline.trace.units}
    for unit, duration in durations.items():
        if unit not in known:
            raise ValueError(
                f"rank {rank}: there is a duration for the {what} of {unit}, which is no unit of "
                "the trace"
            )
        if duration < 0:
            raise ValueError(
                f"rank {rank}: the {what} of {unit} takes {duration} ns; it must be at least 0"
            )
    if missing := sorted(needed - durations.keys()):
        raise ValueError(f"rank {rank}: no duration for the {what} of {', '.join(missing)}")


def _require_transfer(transfer: Transfer, outlines: Sequence[Outline]) -> None:
    for name, (rank, position) in (("source", transfer.source), ("target", transfer.target)):
        if not 0 <= rank < len(outlines):
            raise ValueError(f"the {name} of {transfer} is on rank {rank} of {len(outlines)}")
        if not 0 <= position < len(outlines[rank].trace):
            raise ValueError(
                f"the {name} of {transfer} is position {position} of rank {rank}, which has "
                f"{len(outlines[rank].trace)} events"
            )
    if transfer.nanoseconds < 0:
        raise ValueError(f"{transfer} takes {transfer.nanoseconds} ns; it must be at least 0")


def _deadlock(blocked: Mapping[int, Transfer], outlines: Sequence[Outline]) -> str:
    """Names a ring of events none of which can begin.

    Args:
        blocked: by rank, what its next event waits for. The source's rank is among them.
        outlines: the plan of each rank.
    """
    path: list[int] = []
    rank = min(blocked)
    while rank not in path:
        path.append(rank)
        rank = blocked[rank].source[0]
    waits = "; ".join(
        f"{_place(blocked[waiter].target, outlines)} waits for "
        f"{_place(blocked[waiter].source, outlines)}"
        for waiter in path[path.index(rank) :]
    )
    return f"deadlock, change the order of events or the transfers between them: {waits}"


def _place(place: tuple[int, int], outlines: Sequence[Outline]) -> str:
    rank, position = place
    return f"event {position} of rank {rank} ({outlines[rank].trace[position]})"
