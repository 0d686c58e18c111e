"""What the demo shows: a progress bar for each run, and the table at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .training import RUNS, Options, RunName, RunResult

__all__ = ["EXPLANATION", "Bars", "comparison"]

_LABELS: dict[RunName, str] = {
    "FSDP2": "FSDP2",
    "recorded": "fsdp_fx, eager",
    "compiled": "fsdp_fx, compiled",
}


# docs/demo.md has it too.
EXPLANATION = (
    "FSDP2: torch's pipelining leaves a layer gathered after every backward but the last, so "
    "that all parameters of a rank are there at once, and reduces once a step. fsdp_fx frees a "
    "unit after each use unless it is the next one needed (ZeRO-3 within the pipeline): less "
    'memory for more gathers. Here it also reduces once a step (reduce_gradients="per_window"): '
    "all three runs keep the full gradients of a step until then, as large as the full "
    "parameters in fp32, and the peak does not count them."
)


class Bars:
    """One progress bar a run.

    Args:
        console: where they are shown.
        options: of the demo.
    """

    def __init__(self, console: Console, options: Options) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<18}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]:<14}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks = {
            name: self._progress.add_task(
                _LABELS[name], start=False, total=options.steps, note="waiting"
            )
            for name in RUNS
        }

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def begin(self, name: RunName) -> None:
        """The run has begun; its first step may take long."""
        self._progress.start_task(self._tasks[name])
        note = "compiling" if name == "compiled" else "starting"
        self._progress.update(self._tasks[name], note=note)

    def advance(self, name: RunName, steps: int, loss: float) -> None:
        """So many steps are done."""
        self._progress.update(self._tasks[name], completed=steps, note=f"loss {loss:.4f}")

    def end(self, name: RunName) -> None:
        """Every rank has finished the run."""
        self._progress.stop_task(self._tasks[name])


def comparison(
    results: dict[RunName, list[RunResult]], seconds: dict[RunName, float], options: Options
) -> Table:
    """The runs side by side.

    Args:
        results: of each run, what each rank had to say.
        seconds: of each run, how long it took.
        options: of the demo.
    """
    first = "the first step" if options.warm_up == 1 else f"the first {options.warm_up} steps"
    table = Table(
        title=f"{options.steps} steps on {options.ranks} ranks",
        caption="Counts: one step, mean over the ranks. Peak: largest over ranks and steps. "
        f"Seconds per step: mean after {first}. Start and compile: the rest of the run, with "
        "these. Times compare these runs only.",
    )
    table.add_column("")
    for name in RUNS:
        table.add_column(_LABELS[name], justify="right")
    losses = {name: _losses(results[name]) for name in RUNS}

    def row(label: str, cell: Callable[[RunName], str]) -> None:
        table.add_row(label, *(cell(name) for name in RUNS))

    def count(label: str, counter: str) -> None:
        row(
            label,
            lambda name: _number(fmean(getattr(r.last_step, counter) for r in results[name])),
        )

    row("final loss", lambda name: f"{losses[name][-1]:.6f}")
    row(
        "loss difference, largest",
        lambda name: "" if name == "FSDP2" else _distance(losses[name], losses["FSDP2"]),
    )
    count("gathers", "gathers")
    count("  ahead of need", "prefetched_gathers")
    count("  on demand", "on_demand_gathers")
    count("reductions", "reductions")
    row(
        "peak full parameters, KiB",
        lambda name: f"{max(r.peak_resident_bytes for r in results[name]) / 1024:,.0f}",
    )
    step = {name: max(r.step_seconds for r in results[name]) for name in RUNS}
    timed = options.steps - options.warm_up
    row("seconds per step", lambda name: f"{step[name]:.2f}")
    row(
        "start and compile, s",
        lambda name: f"{max(0.0, seconds[name] - timed * step[name]):.0f}",
    )
    return table


def _losses(results: Sequence[RunResult]) -> tuple[float, ...]:
    return next(result.losses for result in results if result.losses)


def _distance(losses: Sequence[float], others: Sequence[float]) -> str:
    distance = max(abs(a - b) for a, b in zip(losses, others, strict=True))
    return f"{distance:.1e}" if distance else "0"


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"
