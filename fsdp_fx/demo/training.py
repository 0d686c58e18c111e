"""What one rank of the demo does: the same training steps, three times.

Each run builds the same two stages of the model, shards them with FSDP2 and trains
them under ``ScheduleInterleaved1F1B``. The runs differ in who schedules gathers and
reductions: FSDP2 with the pipeline schedule, a context from hooks, or a context
inside compiled graphs. All three reduce a unit's gradients once a step, as the pipeline
schedule does with FSDP2; what is left to compare is gathers and resident parameters.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from ..context import FSDPContext
from ..pipelining import bind
from ..report import GraphKey
from ..residency import Stats
from .model import ModelShape, Stage, next_byte_loss
from .observe import Observer
from .text import Text

__all__ = ["FILES", "MICROBATCHES", "RUNS", "STAGES", "Options", "RunName", "RunResult", "train"]

RunName = Literal["FSDP2", "recorded", "compiled"]
RUNS: tuple[RunName, ...] = get_args(RunName)

PIPELINE_RANKS = 2
STAGES_PER_RANK = 2
STAGES = PIPELINE_RANKS * STAGES_PER_RANK
MICROBATCHES = 8
ROWS = 4  # sequences in a microbatch of one FSDP rank
LEARNING_RATE = 3e-3
WARM_UP = 2  # steps that record, compile or first replay
FILES = {  # what the compiled run leaves, and what it is
    "program.txt": "one step of rank 0, operation by operation",
    "timeline.png": "the same step as a picture",
    "graph.py.txt": "one graph of torch.compile with the program's operations in it",
    "explain.txt": "what ran how; its counts are for all steps",
}


@dataclass(frozen=True)
class Options:
    """What a person may choose.

    Args:
        ranks: number of processes: 2 pipeline ranks times ranks / 2 FSDP ranks.
        layers: transformer layers of the whole model.
        steps: training steps of each run.
        device: ``"cpu"`` or ``"cuda"``.
        output: folder that is written to.
        region_compiler: what compiles the regions of compiled graphs.
    """

    ranks: int
    layers: int
    steps: int
    device: str
    output: Path
    region_compiler: Literal["inductor", "eager"]

    @property
    def warm_up(self) -> int:
        """Steps that are left out of the step time."""
        return min(WARM_UP, self.steps - 1)


@dataclass(frozen=True)
class RunResult:
    """What one rank has to say about one run.

    Attributes:
        losses: loss of each step, the mean over all FSDP ranks; empty on ranks
            without the last stage.
        last_step: what the counters grew by in the last step.
        peak_resident_bytes: most bytes of full parameters at any time of the run.
        step_seconds: mean time of a step after the warm-up.
    """

    losses: tuple[float, ...]
    last_step: Stats
    peak_resident_bytes: int
    step_seconds: float


def train(
    name: RunName, options: Options, on_step: Callable[[int, float | None], None]
) -> RunResult:
    """Train the model from its initial weights.

    Args:
        name: who schedules gathers and reductions.
        options: sizes.
        on_step: called after each step, with the number of steps done and the loss;
            None on ranks without the last stage.
    """
    device = torch.device(options.device)
    shape = ModelShape(layers=options.layers)
    mesh = init_device_mesh(
        device.type,
        (PIPELINE_RANKS, options.ranks // PIPELINE_RANKS),
        mesh_dim_names=("pipeline", "shard"),
    )
    pipeline_rank, shard_rank = mesh.get_coordinate() or (0, 0)
    indices = [pipeline_rank + PIPELINE_RANKS * i for i in range(STAGES_PER_RANK)]
    stages = [Stage(shape, index, STAGES).to(device) for index in indices]
    for stage in stages:
        _shard(stage, mesh["shard"])

    context = None
    chunks: list[nn.Module] = list(stages)
    if name != "FSDP2":
        context = FSDPContext(mode="recorded", reduce_gradients="per_window")
        context.adopt(*stages)
    if name == "compiled":
        chunks = [_compile(stage, options.region_compiler) for stage in stages]
    group = mesh.get_group("pipeline")
    schedule = ScheduleInterleaved1F1B(
        [
            PipelineStage(chunk, index, STAGES, device, group=group)
            for chunk, index in zip(chunks, indices, strict=True)
        ],
        MICROBATCHES,
        loss_fn=next_byte_loss,
    )
    if context is not None:
        bind(schedule, context)
    optimizer = torch.optim.AdamW(
        [parameter for stage in stages for parameter in stage.parameters()], LEARNING_RATE
    )

    text = Text()
    losses: list[float] = []
    seconds = 0.0
    with _counting(context) as stats:
        for step in range(options.steps):
            before = copy.copy(stats)
            inputs, targets = text.batch(
                ROWS * MICROBATCHES, shape.context, step, shard_rank, device
            )
            dist.barrier()
            began = time.perf_counter()
            microbatch_losses: list[torch.Tensor] = []
            if pipeline_rank == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=targets, losses=microbatch_losses)
            if context is not None:
                context.finish_grad_sync()
            optimizer.step()
            optimizer.zero_grad()
            if device.type != "cpu":
                torch.accelerator.synchronize()
            if step >= options.warm_up:
                seconds += time.perf_counter() - began
            if microbatch_losses:
                losses.append(_mean_loss(microbatch_losses, mesh["shard"]))
            on_step(step + 1, losses[-1] if losses else None)
    if context is not None and name == "compiled" and dist.get_rank() == 0:
        write_files(context, options)
    return RunResult(
        tuple(losses),
        _growth(before, stats),
        stats.peak_resident_bytes,
        seconds / (options.steps - options.warm_up),
    )


def _shard(stage: Stage, mesh: DeviceMesh) -> None:
    for layer in stage.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(stage, mesh=mesh)


def _compile(stage: nn.Module, region_compiler: str) -> nn.Module:
    compiled = torch.compile(stage, backend="fsdp_fx", options={"region_compiler": region_compiler})
    return cast(nn.Module, compiled)


@contextmanager
def _counting(context: FSDPContext | None) -> Iterator[Stats]:
    """The counters of the run: the context's own, or those of an observer of FSDP2."""
    with Observer() if context is None else nullcontext(context) as counted:
        yield counted.stats


def _growth(before: Stats, after: Stats) -> Stats:
    return Stats(**{name: value - vars(before)[name] for name, value in vars(after).items()})


def _mean_loss(losses: list[torch.Tensor], mesh: DeviceMesh) -> float:
    mean = torch.stack([loss.detach() for loss in losses]).mean()
    dist.all_reduce(mean, group=mesh.get_group())
    return mean.item() / mesh.size()


def write_files(context: FSDPContext, options: Options) -> None:
    """Write what the context of the compiled run on rank 0 knows: :data:`FILES`."""
    program = context.program
    assert program is not None
    run = f"rank {dist.get_rank()}, compiled run"
    steps = f"{options.steps} steps"
    _write(
        options.output / "program.txt",
        f"{run}: one step. Each rank has a program of its own; the counts of the demo's",
        "table are means over the ranks.",
        text=str(program),
    )
    program.save_timeline(options.output / "timeline.png", caption=run)
    _write(
        options.output / "explain.txt",
        f"{run}: counts are for all {steps}, the recorded one included.",
        text=context.explain(),
    )
    # The forward of the first chunk; of its variants one that a program was combined with.
    graphs = context.compiled_graphs
    keys = [key for key in graphs if key.direction == "forward"]
    if keys:
        key = min(keys, key=lambda key: (key.chunk, not key.variant.startswith("slice"), key))
        _write(
            options.output / "graph.py.txt",
            *_graph_heading(run, key),
            text=graphs[key].print_readable(print_output=False),
        )


def _graph_heading(run: str, key: GraphKey) -> list[str]:
    return [
        f"{run}: one transformed graph.",
        "",
        f"chunk      {key.chunk}: chunks are numbered in the order of adoption",
        f"direction  {key.direction}",
        f"graph      {key.graph}: number of the captured graph; identical chunks share one, a graph",
        "           break gives a chunk several",
        f'variant    {key.variant}: "slice N" is the graph as it runs at one place of the program,',
        '           one N for each distinct place; "on demand" is the graph while recording',
        "",
        "region_N is compiled compute. residency.acquire waits for a unit, and gathers it if it is",
        "absent; prefetch starts a gather ahead; release ends a use; free frees the unit.",
        "A chunk's own unit (here embedding or head) is gathered and freed outside of its graph.",
    ]


def _write(path: Path, *heading: str, text: str) -> None:
    lines = [f"# {line}".rstrip() for line in heading]
    path.write_text("\n".join([*lines, "", text.rstrip(), ""]), encoding="utf-8")
