"""The comparison as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_fx.forecast.comparison import Forecast, Prefetch, RankForecast, ReduceGradients
from fsdp_fx.forecast.workload import Workload

__all__ = ["FORMAT", "VERSION", "save_record"]

FORMAT = "fsdp_fx plan"
VERSION = 1


def save_record(
    path: str | os.PathLike[str],
    workload: Workload,
    forecasts: Sequence[Forecast],
    floor: int,
    reduce_gradients: ReduceGradients,
    prefetch: Prefetch,
) -> None:
    """Write the comparison into a JSON file.

    Args:
        path: the file; one that is there is replaced.
        workload: what was planned for.
        forecasts: what each policy costs.
        floor: nanoseconds of a step without communication.
        reduce_gradients: when the optimum reduces.
        prefetch: how far ahead its gathers start.

    Raises:
        OSError: the file cannot be written.
    """
    document = {
        "format": FORMAT,
        "version": VERSION,
        "title": workload.title,
        "without_communication_nanoseconds": floor,
        "reduce_gradients": reduce_gradients,
        "prefetch": "one" if prefetch is None else prefetch,
        "ranks": [
            {
                "rank": rank,
                "events": len(trace),
                "units": [
                    {
                        "name": unit.name,
                        "bytes": unit.bytes,
                        "gradient_bytes": unit.gradient_bytes,
                        "gather_nanoseconds": durations.gathers[unit.name],
                        "reduction_nanoseconds": durations.reductions.get(unit.name),
                    }
                    for unit in trace.units
                ],
            }
            for rank, (trace, durations) in enumerate(
                zip(workload.traces, workload.durations, strict=True)
            )
        ],
        "plans": [
            {
                "policy": forecast.policy,
                "budget": forecast.budget,
                "step_nanoseconds": forecast.nanoseconds,
                "ranks": [_rank(index, rank) for index, rank in enumerate(forecast.ranks)],
            }
            for forecast in forecasts
        ],
    }
    # The curves are long: without spaces between their numbers.
    Path(path).write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")


def _rank(index: int, rank: RankForecast) -> dict[str, Any]:
    return {
        "rank": index,
        "gathers": rank.gathers,
        "bytes_gathered": rank.bytes_gathered,
        "reductions": rank.reductions,
        "bytes_reduced": rank.bytes_reduced,
        "compute_nanoseconds": rank.compute,
        "exposed_nanoseconds": rank.exposed,
        "bubble_nanoseconds": rank.bubble,
        "peak_bytes": rank.peak_bytes,
        # Pairs: a time, and what is resident from then on.
        "resident_bytes": rank.resident,
    }
