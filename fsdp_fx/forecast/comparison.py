"""What each policy costs: its plans, simulated.

The planner's plans (the optimum) and the least recently used ones are made for each budget;
one ahead and keep everything know none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from fsdp_fx.forecast.workload import Workload
from fsdp_fx.planning.durations import Durations
from fsdp_fx.planning.outline import Outline
from fsdp_fx.planning.planner import outline
from fsdp_fx.planning.policies import keep_everything, least_recently_used
from fsdp_fx.planning.simulation import RankSimulation, resident_steps, simulate
from fsdp_fx.trace import Trace

__all__ = [
    "EVERYTHING",
    "Budget",
    "Forecast",
    "Policy",
    "Prefetch",
    "Progress",
    "RankForecast",
    "ReduceGradients",
    "compare",
    "everything",
    "without_communication",
]

Policy = Literal["one ahead", "least recently used", "optimum", "keep everything"]
Prefetch = int | None | Literal["timed"]
ReduceGradients = Literal["per_backward", "per_window", "planned"]

EVERYTHING: Literal["everything"] = "everything"
Budget = int | Literal["everything"]

Progress = Callable[[Policy, Budget | None, int], None]
"""What is planned now: the policy, its budget, the pipeline rank."""

_Planner = Callable[[Trace, Durations], Outline]


@dataclass(frozen=True)
class RankForecast:
    """What one pipeline rank does in a step. Times are nanoseconds.

    Args:
        gathers: how many gathers.
        bytes_gathered: bytes of full parameters that they produce.
        reductions: how many reductions.
        bytes_reduced: bytes of full gradients that they take.
        compute: how long it computes.
        exposed: how long it does nothing but wait for gathers and reductions.
        bubble: how long it waits for other pipeline ranks, those that are done later included.
        resident: pairs of a time and the bytes of full parameters and of kept full gradients
            from then on.
    """

    gathers: int
    bytes_gathered: int
    reductions: int
    bytes_reduced: int
    compute: int
    exposed: int
    bubble: int
    resident: tuple[tuple[int, int], ...]

    @property
    def peak_bytes(self) -> int:
        """The most that is resident."""
        return max((count for _, count in self.resident), default=0)


@dataclass(frozen=True)
class Forecast:
    """A policy's step.

    Args:
        policy: name of the policy.
        budget: what it may keep; None if it knows no budget.
        nanoseconds: how long the step takes.
        ranks: what each pipeline rank does.
    """

    policy: Policy
    budget: Budget | None
    nanoseconds: int
    ranks: tuple[RankForecast, ...]


def everything(trace: Trace) -> int:
    """Bytes of all full parameters and full gradients: a budget that keeps everything."""
    return sum(unit.bytes + unit.gradient_bytes for unit in trace.units)


def without_communication(workload: Workload) -> int:
    """Nanoseconds of a step in which gathers and reductions take no time: none is shorter."""
    free = [
        Durations(
            durations.compute,
            dict.fromkeys(durations.gathers, 0),
            dict.fromkeys(durations.reductions, 0),
        )
        for durations in workload.durations
    ]
    outlines = [keep_everything(trace) for trace in workload.traces]
    return simulate(outlines, free, workload.transfers).nanoseconds


def compare(
    workload: Workload,
    budgets: Sequence[Budget],
    reduce_gradients: ReduceGradients = "per_backward",
    prefetch: Prefetch = None,
    progress: Progress | None = None,
) -> Iterator[Forecast]:
    """Plan and simulate every policy, one after the other.

    Args:
        workload: what to plan for.
        budgets: bytes that may stay resident beyond what an event needs, on each rank.
        reduce_gradients: when the optimum reduces. The others reduce per backward or per
            window, and the first where it is ``"planned"``; keep everything per window.
        prefetch: lookahead of the optimum and of least recently used, in elements; None for
            one event. ``"timed"`` is the optimum's only, the other then looks one event ahead.
        progress: told of every plan that is begun.

    Yields:
        One ahead, for each budget least recently used and the optimum, keep everything.
    """
    others: Literal["per_backward", "per_window"] = (
        "per_window" if reduce_gradients == "per_window" else "per_backward"
    )
    untimed = None if prefetch == "timed" else prefetch

    def forecast(policy: Policy, budget: Budget | None, plan: _Planner) -> Forecast:
        return _forecast(workload, policy, budget, plan, progress)

    def one_ahead(trace: Trace, durations: Durations) -> Outline:
        return outline(trace, reduce_gradients=others)

    def cached(budget: Budget) -> _Planner:
        def plan(trace: Trace, durations: Durations) -> Outline:
            return least_recently_used(
                trace,
                everything(trace) if budget == EVERYTHING else budget,
                forward_prefetch=untimed,
                backward_prefetch=untimed,
                reduce_gradients=others,
            )

        return plan

    def best(budget: Budget) -> _Planner:
        def plan(trace: Trace, durations: Durations) -> Outline:
            return outline(
                trace,
                forward_prefetch=prefetch,
                backward_prefetch=prefetch,
                memory_budget=everything(trace) if budget == EVERYTHING else budget,
                reduce_gradients=reduce_gradients,
                durations=durations,
            )

        return plan

    yield forecast("one ahead", None, one_ahead)
    for budget in budgets:
        yield forecast("least recently used", budget, cached(budget))
        yield forecast("optimum", budget, best(budget))
    yield forecast("keep everything", None, lambda trace, durations: keep_everything(trace))


def _forecast(
    workload: Workload,
    policy: Policy,
    budget: Budget | None,
    plan: _Planner,
    progress: Progress | None,
) -> Forecast:
    outlines = []
    for rank, trace in enumerate(workload.traces):
        if progress is not None:
            progress(policy, budget, rank)
        outlines.append(plan(trace, workload.durations[rank]))
    simulated = simulate(outlines, workload.durations, workload.transfers)
    return Forecast(
        policy,
        budget,
        simulated.nanoseconds,
        tuple(
            _of_rank(each, rank, simulated.nanoseconds)
            for each, rank in zip(outlines, simulated.ranks, strict=True)
        ),
    )


def _of_rank(planned: Outline, rank: RankSimulation, step: int) -> RankForecast:
    return RankForecast(
        gathers=len(planned.gathers),
        bytes_gathered=planned.bytes_gathered,
        reductions=len(planned.reductions),
        bytes_reduced=planned.bytes_reduced,
        compute=rank.compute,
        exposed=rank.exposed_communication,
        # Until the step ends on every rank, this one waits for the others.
        bubble=rank.bubble + step - rank.stop,
        resident=resident_steps(planned, rank),
    )
