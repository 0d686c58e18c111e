"""Schedules of torch.distributed.pipelining on a context, against an unsharded reference."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
from torch.distributed.pipelining.schedules import BACKWARD_INPUT
from torch.torch_version import TorchVersion

import fsdp_fx
from fsdp_fx.compile.backend import fsdp_fx as backend
from fsdp_fx.pipelining import StageShell, bind
from ranks import RankPools

DIM = 8
BLOCKS = 8
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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Chunk(nn.Module):
    """Some blocks, and a norm that is the chunk's own unit."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


@functools.cache  # the threads of process groups last as long as the rank, and do not sleep
def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))


class Job:
    """One rank of PP 2 × FSDP 2, and the reference that it is compared with.

    Args:
        schedule: class of the schedule.
        scale_grads: whether the schedule divides gradients by the microbatches.
        compiled: whether the chunks are compiled, without Inductor.
        context: options of the context.
    """

    def __init__(
        self, schedule: Any, scale_grads: bool = True, compiled: bool = False, **context: Any
    ) -> None:
        self.compiled = compiled
        mesh = _mesh()
        self.pp, self.dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
        per_rank = 1 if schedule in ONE_STAGE else 2
        stages = 2 * per_rank
        torch.manual_seed(0)
        self.reference = [Chunk(BLOCKS // stages) for _ in range(stages)]
        self.owned = [self.pp + 2 * i for i in range(per_rank)]
        if schedule in V_SHAPED:
            self.owned = [self.pp, stages - 1 - self.pp]
        self.has_last = stages - 1 in self.owned
        self.chunks = [copy.deepcopy(self.reference[index]) for index in self.owned]
        for chunk in self.chunks:
            shard(chunk, mesh["dp"])
        self.context = fsdp_fx.FSDPContext(mode="recorded", **context)
        self.context.adopt(*self.chunks)
        modules: list[Any] = list(self.chunks)
        compiler: dict[str, Any] = {"backend": backend, "options": {"region_compiler": "eager"}}
        if compiled and schedule in SPLIT_BACKWARD:
            for chunk in self.chunks:
                chunk.compile(**compiler)  # torch refuses what torch.compile() returns
        elif compiled:
            modules = [torch.compile(chunk, **compiler) for chunk in self.chunks]
        pipeline_stages = [
            PipelineStage(
                module,
                index,
                stages,
                torch.device("cpu"),
                group=mesh.get_group("pp"),
            )
            for module, index in zip(modules, self.owned, strict=True)
        ]
        self.schedule = schedule(
            pipeline_stages[0] if per_rank == 1 else pipeline_stages,
            n_microbatches=MICROBATCHES,
            loss_fn=F.mse_loss,
            scale_grads=scale_grads,
        )
        self.scale = 1 / (MICROBATCHES if scale_grads else 1)
        bind(self.schedule, self.context)
        self.parameters = [p for chunk in self.chunks for p in chunk.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, LEARNING_RATE, momentum=0.9)
        self.reference_optimizer = torch.optim.SGD(
            [p for chunk in self.reference for p in chunk.parameters()], LEARNING_RATE, momentum=0.9
        )

    @property
    def input_halves(self) -> int:
        """How many backward events of a step are those of input halves."""
        if self.compiled or not hasattr(self.schedule, "pipeline_order_with_comms"):
            return 0
        units = {
            stage: len(chunk.blocks) + 1
            for stage, chunk in zip(self.owned, self.chunks, strict=True)
        }
        return sum(
            units[action.stage_index]
            for action in self.schedule.pipeline_order_with_comms[self.pp]
            if action.computation_type == BACKWARD_INPUT and action.stage_index > 0
        )

    def data(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of every FSDP rank."""
        generator = torch.Generator().manual_seed(100 + step)
        inputs, targets = torch.randn(2, 2, MICROBATCHES * ROWS, DIM, generator=generator)
        return inputs, targets

    def run(self, step: int) -> torch.Tensor | None:
        """A step of the schedule; the mean loss on the ranks that have the last stage."""
        inputs, targets = self.data(step)
        losses: list[torch.Tensor] = []
        first = (inputs[self.dp],) if self.pp == 0 else ()
        last = {"target": targets[self.dp], "losses": losses} if self.has_last else {}
        self.schedule.step(*first, **last)
        return torch.stack(losses).mean().detach() if losses else None

    def run_reference(self, step: int) -> torch.Tensor:
        """The same step unsharded and unpipelined; the mean loss of this rank's rows."""
        inputs, targets = self.data(step)
        own = torch.zeros(())
        for rank in range(2):
            for x, target in zip(
                inputs[rank].chunk(MICROBATCHES), targets[rank].chunk(MICROBATCHES), strict=True
            ):
                for chunk in self.reference:
                    x = chunk(x)
                loss = F.mse_loss(x, target)
                (loss * self.scale / 2).backward()
                if rank == self.dp:
                    own += loss.detach() / MICROBATCHES
        return own

    def pairs(self) -> Iterator[tuple[Any, nn.Parameter]]:
        """Each parameter of this rank with the reference's."""
        for chunk, index in zip(self.chunks, self.owned, strict=True):
            yield from zip(chunk.parameters(), self.reference[index].parameters(), strict=True)

    def check_gradients(self) -> None:
        for parameter, reference in self.pairs():
            torch.testing.assert_close(parameter.grad.full_tensor(), reference.grad)

    def check_weights(self) -> None:
        for parameter, reference in self.pairs():
            torch.testing.assert_close(parameter.full_tensor(), reference.detach())

    def update(self) -> None:
        for optimizer in (self.optimizer, self.reference_optimizer):
            optimizer.step()
            optimizer.zero_grad()


def shard(chunk: Chunk, mesh: DeviceMesh) -> None:
    for block in chunk.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(chunk, mesh=mesh)


def _train(schedule: Any, compiled: bool) -> dict[str, list[int]]:
    job = Job(schedule, compiled=compiled)
    counters: dict[str, list[int]] = {"gathers": [], "on_demand_gathers": [], "reductions": []}
    for step in range(3):
        before = copy.copy(job.context.stats)
        loss = job.run(step)
        job.context.finish_grad_sync()
        job.context.finish_grad_sync()  # once per chunk, as some trainers do
        expected = job.run_reference(step)
        if loss is not None:
            torch.testing.assert_close(loss, expected)
        job.check_gradients()
        job.update()
        job.check_weights()
        for name, values in counters.items():
            values.append(getattr(job.context.stats, name) - getattr(before, name))
    stats, trace = job.context.stats, job.context.trace
    assert (stats.windows, stats.recorded_windows, stats.replayed_windows) == (3, 1, 2)
    assert stats.divergences == stats.dropped_gathers == stats.resident_bytes == 0
    assert trace is not None
    assert len(trace) == 2 * MICROBATCHES * len(job.context.units) + job.input_halves
    # One unit per block and the norm of each chunk, every one reduced per backward.
    assert counters["reductions"] == [MICROBATCHES * len(job.context.units)] * 3
    whole = [str(fallback) for fallback in job.context.fallbacks]
    if schedule in SPLIT_BACKWARD and compiled:
        # The first stage has no inputs to differentiate: torch runs it whole, too.
        assert len(whole) == sum(stage > 0 for stage in job.owned)
        assert all("the whole backward runs in its input half" in each for each in whole)
    else:
        assert not whole
    return counters


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "schedule",
    [
        *ONE_STAGE,
        *TWO_STAGES,
        ScheduleInterleavedZeroBubble,
        *(pytest.param(each, marks=SENDS_TO_ITSELF) for each in V_SHAPED),
    ],
)
def test_gradients_weights_and_losses_equal_the_reference(
    ranks: RankPools, schedule: Any, compiled: bool
) -> None:
    for counters in ranks(4).run(_train, schedule, compiled):
        recorded, *replayed = counters["on_demand_gathers"]
        assert recorded > 1
        # Only the window's first gather is on demand; phase and chunk changes are prefetched.
        assert replayed == [1, 1]


def _keep_earlier_gradients(compiled: bool) -> None:
    job = Job(ScheduleInterleaved1F1B, scale_grads=False, compiled=compiled)
    for parameter, reference in job.pairs():
        parameter.grad = torch.ones_like(parameter)
        reference.grad = torch.ones_like(reference)
    job.run(0)  # infers shapes before its first microbatch
    job.context.finish_grad_sync()
    job.run_reference(0)
    # The reference has gradients of every stage; those that the ones were not added to
    # belong to other ranks and are not compared.
    job.check_gradients()
    assert len(job.context.trace or ()) == 2 * MICROBATCHES * len(job.context.units)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_shape_inference_adds_no_gradient_and_no_event(ranks: RankPools, compiled: bool) -> None:
    ranks(4).run(_keep_earlier_gradients, compiled)


def _evaluate_between_windows(compiled: bool) -> None:
    job = Job(ScheduleInterleaved1F1B, compiled=compiled)
    for step in range(2):
        job.run(step)
        job.context.finish_grad_sync()
        job.run_reference(step)
        job.check_gradients()
        before = copy.copy(job.context.stats)
        inputs, targets = job.data(step)
        if job.pp == 0:
            output = job.schedule.eval(inputs[job.dp])
        else:
            output = job.schedule.eval(target=targets[job.dp], losses=[])
            x = inputs[job.dp]
            with torch.no_grad():
                for chunk in job.reference:
                    x = chunk(x)
            torch.testing.assert_close(output, x)
        job.check_gradients()  # untouched, although evaluation infers shapes anew
        stats = job.context.stats
        assert (stats.windows, stats.reductions) == (before.windows, before.reductions)
        assert stats.resident_bytes == 0
        assert not job.context.window.is_open
        job.update()
        job.check_weights()
    assert job.context.stats.replayed_windows == 1
    assert job.context.stats.divergences == 0


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_evaluation_of_the_schedule_is_no_window(ranks: RankPools, compiled: bool) -> None:
    ranks(4).run(_evaluate_between_windows, compiled)


# Refusals: no rank computes anything, so a group of one process will do.


def _stage(index: int, mesh: DeviceMesh) -> tuple[PipelineStage, Chunk]:
    chunk = Chunk(2)
    shard(chunk, mesh["dp"])
    stage = PipelineStage(chunk, index, 4, torch.device("cpu"), group=mesh.get_group("pp"))
    return stage, chunk


@pytest.fixture
def mesh(fake_group: dist.ProcessGroup) -> DeviceMesh:
    return init_device_mesh("cpu", (2, fake_group.size() // 2), mesh_dim_names=("pp", "dp"))


@pytest.fixture
def stages(mesh: DeviceMesh) -> list[PipelineStage]:
    return [_stage(0, mesh)[0], _stage(2, mesh)[0]]


@pytest.fixture
def schedule(stages: list[PipelineStage]) -> ScheduleInterleaved1F1B:
    return ScheduleInterleaved1F1B(stages, MICROBATCHES, F.mse_loss)


of_four = pytest.mark.parametrize("fake_group", [4], indirect=True)


@of_four
def test_registration_mode_is_refused(
    schedule: ScheduleInterleaved1F1B, stages: list[PipelineStage]
) -> None:
    context = fsdp_fx.FSDPContext(mode="registration")
    context.adopt(*(stage.submod for stage in stages))
    with pytest.raises(ValueError, match=r'build the context with FSDPContext\(mode="recorded"\)'):
        bind(schedule, context)
    assert not any(isinstance(stage.submod, StageShell) for stage in stages)


@of_four
def test_a_stage_that_is_not_adopted_is_refused(
    schedule: ScheduleInterleaved1F1B, stages: list[PipelineStage]
) -> None:
    context = fsdp_fx.FSDPContext(mode="recorded")
    context.adopt(stages[0].submod)
    with pytest.raises(ValueError, match=r"stage 2 is not adopted: call context\.adopt\(\)"):
        bind(schedule, context)
    # Nothing is half bound: adopting the other stage and binding again works.
    assert not any(isinstance(stage.submod, StageShell) for stage in stages)
    context.adopt(stages[1].submod)
    bind(schedule, context)


@of_four
def test_binding_twice_is_refused(
    schedule: ScheduleInterleaved1F1B, stages: list[PipelineStage]
) -> None:
    context = fsdp_fx.FSDPContext(mode="recorded")
    context.adopt(*(stage.submod for stage in stages))
    bind(schedule, context)
    with pytest.raises(ValueError, match="stage 0 is bound already: bind a schedule once"):
        bind(schedule, context)


def test_what_is_no_schedule_is_refused() -> None:
    context = fsdp_fx.FSDPContext(mode="recorded")
    with pytest.raises(TypeError, match=r"a torch\.distributed\.pipelining schedule, not Linear"):
        bind(nn.Linear(2, 2), context)  # type: ignore[arg-type]


def test_a_shell_shows_the_parameters_but_not_the_modules() -> None:
    chunk = Chunk(1)
    shell = StageShell(chunk)
    assert list(shell.modules()) == [shell]
    assert list(shell.parameters()) == list(chunk.parameters())
    assert [name for name, _ in shell.named_parameters()] == [
        name for name, _ in chunk.named_parameters()
    ]
    shell.eval()
    assert not chunk.training
    x = torch.randn(3, DIM)
    torch.testing.assert_close(shell(x), chunk(x))
