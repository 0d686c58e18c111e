"""Schedules of torch.distributed.pipelining on a context, against an unsharded reference."""

from __future__ import annotations

import copy
import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.stage import _PipelineStageBase

import fsdp_fx
from fsdp_fx import pipelining
from fsdp_fx.pipelining import PRIVATE_NAMES, StageShell, bind
from fsdp_fx.units import missing_private_names
from pipeline_jobs import (
    DIM,
    MICROBATCHES,
    SCHEDULES,
    SPLIT_BACKWARD,
    Chunk,
    Job,
    shard,
)
from ranks import RankPools

EVERYTHING = 1 << 30  # bytes
PAGE = Path(__file__).parent.parent / "docs" / "pipelining.md"


@functools.cache
def pp_dp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))


def _train(schedule: Any, compiled: bool) -> None:
    """Trains without a budget, and with one for everything."""
    job = Job(schedule, compiled=compiled, memory_budget=0)
    units, stats = len(job.context.units), job.context.stats
    recorded, *replayed = [job.counted(step) for step in range(3)]
    assert recorded["on_demand_gathers"] == recorded["gathers"] > 1
    assert recorded["reductions"] == MICROBATCHES * units
    for counted in replayed:
        job.check_counts(counted)
        # Only the window's first gather is on demand; phase and chunk changes are prefetched.
        assert counted["on_demand_gathers"] == 1
        # One unit per block and the norm of each chunk, every one reduced per backward.
        assert counted["reductions"] == MICROBATCHES * units
    job.context.finish_grad_sync()  # once per chunk, as some trainers do
    assert (stats.windows, stats.recorded_windows, stats.replayed_windows) == (3, 1, 2)
    trace = job.context.trace
    assert trace is not None
    assert len(trace) == 2 * MICROBATCHES * units + job.input_halves
    _check_fallbacks(job, schedule)

    kept = Job(schedule, compiled=compiled, memory_budget=EVERYTHING, reduce_gradients="planned")
    kept.check_step(0)
    counted = kept.counted(1)
    kept.check_counts(counted)
    assert counted["gathers"] == counted["reductions"] == units
    assert kept.context.trace == trace
    _check_fallbacks(kept, schedule)


def _check_fallbacks(job: Job, schedule: Any) -> None:
    whole = [str(fallback) for fallback in job.context.fallbacks]
    if schedule in SPLIT_BACKWARD and job.compiled:
        # The first stage has no inputs to differentiate: torch runs it whole, too.
        assert len(whole) == sum(stage > 0 for stage in job.owned)
        assert all("the whole backward runs in its input half" in each for each in whole)
    else:
        assert not whole


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_weights_and_losses_equal_the_reference_with_any_budget(
    ranks: RankPools, schedule: Any, compiled: bool
) -> None:
    ranks(4).run(_train, schedule, compiled)


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


# The page


def _release(schedule: Any) -> None:
    job = Job(schedule)
    for step in range(4):
        job.run(step)
        job.context.finish_grad_sync()
        job.run_reference(step)
        job.check_gradients()
        job.update()
        job.check_weights()
        if step == 1:
            job.context.release()  # from here on torch gathers, frees and reduces
    assert job.context.stats.windows == 2


@pytest.mark.parametrize("schedule", [Schedule1F1B, ScheduleInterleaved1F1B])
def test_a_schedule_of_a_released_context_is_torchs_own_again(
    ranks: RankPools, schedule: Any
) -> None:
    ranks(4).run(_release, schedule)


def _run_the_page(side: str) -> list[torch.Tensor]:
    """The weights that one side of the diff in docs/pipelining.md ends with."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line[1:] for line in diff.splitlines() if line[0] in (" ", side)]
    mesh = pp_dp_mesh()
    torch.manual_seed(0)
    chunks = [Chunk(2) for _ in range(4)]
    names: dict[str, Any] = {
        "mesh": mesh,
        "indices": (indices := [mesh["pp"].get_local_rank() + 2 * i for i in range(2)]),
        "chunks": [chunks[index] for index in indices],
        "num_stages": 4,
        "device": torch.device("cpu"),
        "loss_fn": F.mse_loss,
        "batches": [torch.randn(2, 2 * MICROBATCHES, DIM) for _ in range(3)],
        "torch": torch,
        "fully_shard": fully_shard,
        "PipelineStage": PipelineStage,
        "ScheduleInterleaved1F1B": ScheduleInterleaved1F1B,
    }
    exec(compile("\n".join(lines), str(PAGE), "exec"), names)
    if side == "+":
        assert names["ctx"].stats.replayed_windows == 2
    return [p.full_tensor() for chunk in names["chunks"] for p in chunk.parameters()]


def _run_both_sides() -> None:
    for plain, bound in zip(_run_the_page("-"), _run_the_page("+"), strict=True):
        torch.testing.assert_close(bound, plain)


def test_both_sides_of_the_diff_on_the_page_train_to_the_same_weights(ranks: RankPools) -> None:
    ranks(4).run(_run_both_sides)


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


def test_a_shell_shows_the_buffers_that_torch_restores_after_shape_inference() -> None:
    chunk = nn.Sequential(nn.BatchNorm1d(DIM))
    shell = StageShell(chunk)
    assert [name for name, _ in shell.named_buffers()] == [
        name for name, _ in chunk.named_buffers()
    ]
    assert list(shell.buffers()) == list(chunk.buffers())


# torch's private names, one test for each

NAMES = [
    pytest.param(owner, name, id=f"{owner.__name__}.{name if isinstance(name, str) else name[0]}")
    for owner, attributes in PRIVATE_NAMES.items()
    for name in attributes
]


@of_four
@pytest.mark.parametrize(("owner", "name"), NAMES)
def test_torch_has_the_private_name(
    owner: type, name: str | tuple[str, str], schedule: ScheduleInterleaved1F1B, mesh: DeviceMesh
) -> None:
    assert missing_private_names({owner: (name,)}) == []
    stage = PipelineStage(Chunk(1), 0, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    instances: list[object] = [schedule, Schedule1F1B(stage, MICROBATCHES, F.mse_loss), stage]
    instance = next(each for each in instances if isinstance(each, owner))
    choices = (name,) if isinstance(name, str) else name
    assert any(hasattr(instance, choice) for choice in choices)


def test_a_torch_without_a_private_name_is_named_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pipelining.__file__ is not None
    # A module of its own: the one that is imported stays what it is.
    spec = importlib.util.spec_from_file_location("fsdp_fx.pipelining_anew", pipelining.__file__)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    monkeypatch.delattr(_PipelineStageBase, "scale_grads")
    with pytest.raises(ImportError, match=r"torch \S+ lacks _PipelineStageBase\.scale_grads$"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
