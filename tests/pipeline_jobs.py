"""One rank's part of a pipelined training job, and the reference that it is compared with.

A :class:`Job` has some stages of a pipeline, each sharded with FSDP2, and all stages once more
unsharded. Both train on the same data.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import BACKWARD_INPUT, _PipelineScheduleRuntime
from torch.torch_version import TorchVersion

import fsdp_fx
from fsdp_fx.compile.backend import fsdp_fx as backend
from fsdp_fx.occupancy import outline_of
from fsdp_fx.pipelining import bind

DIM = 8
BLOCKS = 8  # of all stages together
MICROBATCHES = 4
ROWS = 2  # of one microbatch of one FSDP rank
LEARNING_RATE = 0.05

ONE_STAGE = (ScheduleGPipe, Schedule1F1B)
TWO_STAGES = (ScheduleInterleaved1F1B, ScheduleLoopedBFS)
V_SHAPED = (ScheduleZBVZeroBubble, ScheduleDualPipeV)
SPLIT_BACKWARD = (ScheduleInterleavedZeroBubble, *V_SHAPED)
SENDS_TO_ITSELF = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13",
    reason="this torch has a rank with two stages in a row send to itself, which gloo refuses",
)
SCHEDULES = [
    *ONE_STAGE,
    *TWO_STAGES,
    ScheduleInterleavedZeroBubble,
    *(pytest.param(each, marks=SENDS_TO_ITSELF) for each in V_SHAPED),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Blocks(nn.Module):
    """Some blocks, and nothing else: all units are of one size."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Chunk(Blocks):
    """Some blocks, and a norm that is the chunk's own unit."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x))


def shard(chunk: nn.Module, mesh: DeviceMesh, **policy: Any) -> None:
    """Each block of ``chunk`` is a unit, and what is left of it another."""
    assert isinstance(chunk.blocks, nn.ModuleList)
    for block in chunk.blocks:
        fully_shard(block, mesh=mesh, **policy)
    fully_shard(chunk, mesh=mesh, **policy)


def loss_of(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    """Of everything that the last stage returns."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.stack([F.mse_loss(each.to(target.dtype), target) for each in outputs]).sum()


@dataclass(frozen=True)
class Order:
    """A schedule from a CSV file, one row a pipeline rank.

    Attributes:
        rows: the file's.
        format: what is in it: compute actions, or communication as well.
    """

    rows: tuple[str, ...]
    format: Literal["compute_only", "compute_comms"] = "compute_only"

    @property
    def stages(self) -> list[list[int]]:
        """The stages of each rank."""
        actions = [row.replace("(", "").replace(";", ",").split(",") for row in self.rows]
        return [sorted({int(a[: a.index("F")]) for a in row if _is_forward(a)}) for row in actions]

    @property
    def microbatches(self) -> int:
        """How many microbatches there are."""
        return sum(_is_forward(a) and a.strip("(").startswith("0F") for a in self._actions())

    def _actions(self) -> list[str]:
        return [a for row in self.rows for a in row.replace(";", ",").split(",")]

    def __call__(self, stages: list[PipelineStage], **options: Any) -> _PipelineScheduleRuntime:
        schedule = _PipelineScheduleRuntime(stages, **options)
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "order.csv"
            file.write_text("\n".join(self.rows) + "\n")
            schedule._load_csv(str(file), format=self.format)
        return schedule


def _is_forward(action: str) -> bool:
    stage, _, microbatch = action.strip(" ()").partition("F")
    return stage.isdigit() and microbatch.split(")")[0].isdigit()


@dataclass(frozen=True)
class Layout:
    """How many ranks there are of what."""

    pp: int = 2
    replicas: int = 1
    shards: int = 2


@functools.cache  # the threads of process groups last as long as the rank, and do not sleep
def mesh_of(layout: Layout) -> DeviceMesh:
    sizes = (layout.pp, layout.replicas, layout.shards)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "replicate", "shard"))


class Job:
    """One rank of a pipeline, and the reference that it is compared with.

    Args:
        schedule: class of the schedule, or an order.
        scale_grads: whether the schedule divides gradients by the microbatches.
        compiled: whether the chunks are compiled, without Inductor.
        layout: what the ranks are.
        make_chunk: makes a stage's module with so many blocks.
        shard: shards one over a mesh.
        prepare: called with the context and the chunks before the schedule is bound.
        adopt: options of ``adopt()``, from the chunks.
        bound: whether there is a context at all; torch alone if not.
        infer_shapes: whether the schedule finds out what stages hand on.
        microbatches: how many.
        context: options of the context.
    """

    def __init__(
        self,
        schedule: Any,
        scale_grads: bool = True,
        compiled: bool = False,
        layout: Layout = Layout(),
        make_chunk: Callable[[int], nn.Module] = Chunk,
        shard: Callable[[Any, DeviceMesh], None] = shard,
        prepare: Callable[[fsdp_fx.FSDPContext, list[Any]], None] | None = None,
        adopt: Callable[[list[Any]], dict[str, Any]] = lambda chunks: {},
        bound: bool = True,
        infer_shapes: bool = True,
        microbatches: int = MICROBATCHES,
        **context: Any,
    ) -> None:
        self.compiled = compiled
        mesh = mesh_of(layout)
        self.pp = mesh.get_local_rank("pp")
        self.dp = mesh.get_local_rank("replicate") * layout.shards + mesh.get_local_rank("shard")
        self.dp_size = layout.replicas * layout.shards
        if isinstance(schedule, Order):
            self.owned = schedule.stages[self.pp]
            stages = sum(len(each) for each in schedule.stages)
            microbatches = schedule.microbatches
        else:
            stages = layout.pp * (1 if schedule in ONE_STAGE else 2)
            self.owned = list(range(self.pp, stages, layout.pp))
            if schedule in V_SHAPED:
                self.owned = [self.pp, stages - 1 - self.pp]
        self.microbatches = microbatches
        torch.manual_seed(0)
        self.reference = [make_chunk(BLOCKS // stages) for _ in range(stages)]
        self.has_last = stages - 1 in self.owned
        self.chunks: list[Any] = [copy.deepcopy(self.reference[index]) for index in self.owned]
        data_mesh = mesh["shard"] if layout.replicas == 1 else mesh["replicate", "shard"]
        for chunk in self.chunks:
            shard(chunk, data_mesh)
        if bound:
            self.context = fsdp_fx.FSDPContext(mode="recorded", **context)
            self.context.adopt(*self.chunks, **adopt(self.chunks))
        if prepare is not None:
            prepare(self.context, self.chunks)
        modules = list(self.chunks)
        compiler: dict[str, Any] = {"backend": backend, "options": {"region_compiler": "eager"}}
        if compiled and schedule in SPLIT_BACKWARD:
            for chunk in self.chunks:
                chunk.compile(**compiler)  # torch refuses what torch.compile() returns
        elif compiled:
            modules = [torch.compile(chunk, **compiler) for chunk in self.chunks]
        self._modules = modules
        self._infer_shapes = infer_shapes
        self._scale_grads = scale_grads
        self._mesh = mesh
        self._bound = bound
        self.set_schedule(schedule)
        self.parameters = [p for chunk in self.chunks for p in chunk.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, LEARNING_RATE, momentum=0.9)
        self.reference_optimizer = torch.optim.SGD(
            [p for chunk in self.reference for p in chunk.parameters()], LEARNING_RATE, momentum=0.9
        )

    def set_schedule(self, schedule: Any) -> None:
        """Go on with another schedule of the same stages, or with the same one anew."""
        given, handed_on = torch.zeros(ROWS, DIM), torch.zeros(ROWS, DIM, requires_grad=True)
        self.stages = [
            PipelineStage(
                module,
                index,
                len(self.reference),
                torch.device("cpu"),
                input_args=None if self._infer_shapes else ((handed_on if index else given),),
                output_args=None if self._infer_shapes else (handed_on,),
                group=self._mesh["pp"].get_group(),
            )
            for module, index in zip(self._modules, self.owned, strict=True)
        ]
        if isinstance(schedule, Order):
            self.microbatches = schedule.microbatches
        self.schedule = schedule(
            self.stages[0] if schedule in ONE_STAGE else self.stages,
            n_microbatches=self.microbatches,
            loss_fn=loss_of,
            scale_grads=self._scale_grads,
        )
        self.scale = 1 / (self.microbatches if self._scale_grads else 1)
        if self._bound:
            bind(self.schedule, self.context)

    @property
    def actions(self) -> list[Any]:
        """What this rank's schedule does; empty for a schedule that has no such list."""
        order = getattr(self.schedule, "pipeline_order_with_comms", {self.pp: []})
        return [part for action in order[self.pp] for part in (action.sub_actions or (action,))]

    @property
    def input_halves(self) -> int:
        """How many backward events of a step are those of input halves."""
        if self.compiled:
            return 0
        units = {
            stage: sum(unit.spec.chunk == f"c{index}" for unit in self.context.units)
            for index, stage in enumerate(self.owned)
        }
        return sum(
            units[action.stage_index]
            for action in self.actions
            if action.computation_type == BACKWARD_INPUT and action.stage_index > 0
        )

    def data(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of every FSDP rank."""
        generator = torch.Generator().manual_seed(100 + step)
        shape = (2, self.dp_size, self.microbatches * ROWS, DIM)
        inputs, targets = torch.randn(shape, generator=generator)
        return inputs, targets

    def run(self, step: int) -> torch.Tensor | None:
        """A step of the schedule; the mean loss on the ranks that have the last stage."""
        inputs, targets = self.data(step)
        losses: list[torch.Tensor] = []
        first = (inputs[self.dp],) if 0 in self.owned else ()
        last = {"target": targets[self.dp], "losses": losses} if self.has_last else {}
        self.schedule.step(*first, **last)
        return torch.stack(losses).mean().detach() if losses else None

    def run_reference(self, step: int) -> torch.Tensor:
        """The same step unsharded and unpipelined; the mean loss of this rank's rows."""
        inputs, targets = self.data(step)
        own = torch.zeros(())
        count = self.microbatches
        for rank in range(self.dp_size):
            for x, target in zip(
                inputs[rank].chunk(count), targets[rank].chunk(count), strict=True
            ):
                values: Any = (x,)
                for chunk in self.reference:
                    output = chunk(*values)
                    values = output if isinstance(output, tuple) else (output,)
                loss = loss_of(values, target)
                (loss * self.scale / self.dp_size).backward()
                if rank == self.dp:
                    own += loss.detach() / count
        return own

    def pairs(self) -> Iterator[tuple[Any, nn.Parameter]]:
        """Each parameter of this rank with the reference's."""
        for chunk, index in zip(self.chunks, self.owned, strict=True):
            yield from zip(chunk.parameters(), self.reference[index].parameters(), strict=True)

    def wrong_gradients(self) -> tuple[int, int]:
        """How many parameters lack their gradient, and how many have another."""
        missing = different = 0
        for parameter, reference in self.pairs():
            if parameter.grad is None:
                missing += 1
            elif not torch.allclose(parameter.grad.full_tensor(), reference.grad, 1e-4, 1e-6):
                different += 1
        return missing, different

    def check_gradients(self) -> None:
        for parameter, reference in self.pairs():
            assert parameter.requires_grad == reference.requires_grad
            if reference.grad is None or parameter.grad is None:
                assert parameter.grad is None or not parameter.grad.full_tensor().any()
                assert reference.grad is None or not reference.grad.any()
            else:
                torch.testing.assert_close(parameter.grad.full_tensor(), reference.grad)

    def check_weights(self) -> None:
        for parameter, reference in self.pairs():
            torch.testing.assert_close(parameter.full_tensor(), reference.detach())

    def check_step(self, step: int) -> None:
        """A whole step: losses, gradients, and weights after the optimizer are the reference's."""
        loss = self.run(step)
        self.context.finish_grad_sync()
        self.compare(step, loss)

    def compare(self, step: int, loss: torch.Tensor | None) -> None:
        """What a step has left is what the reference leaves; the optimizers step."""
        expected = self.run_reference(step)
        if loss is not None:
            torch.testing.assert_close(loss, expected)
        self.check_gradients()
        self.update()
        self.check_weights()

    def counted(self, step: int) -> dict[str, int]:
        """Like :meth:`check_step`; how far it moved the context's counters."""
        before = copy.copy(self.context.stats)
        self.check_step(step)
        return {
            name: value - getattr(before, name) for name, value in vars(self.context.stats).items()
        }

    def check_counts(self, counted: dict[str, int]) -> None:
        """A replayed step has gathered and reduced what its program says."""
        program = self.context.program
        assert program is not None
        outline = outline_of(program)
        assert counted["replayed_windows"] == counted["windows"] == 1
        assert counted["gathers"] == len(outline.gathers)
        assert counted["reductions"] == len(outline.reductions)
        assert counted["dropped_gathers"] == counted["divergences"] == 0
        assert self.context.stats.resident_bytes == self.context.stats.kept_gradient_bytes == 0

    def update(self) -> None:
        for optimizer in (self.optimizer, self.reference_optimizer):
            optimizer.step()
            optimizer.zero_grad()


def events_of(job: Job, unit: str, phase: str) -> Sequence[int]:
    """The microbatches of the events of ``unit`` in that phase, in the program's order."""
    trace = job.context.trace
    assert trace is not None
    return [event.microbatch for event in trace if event.unit == unit and event.phase == phase]
