"""What the simulation predicts for steps that are then run and timed, on two ranks.

Compute is mostly sleep, which is as long on a busy machine and leaves the cores to gloo, so
that gathers ahead do overlap with it. Durations are measured apart from any step: of the model
without FSDP, and of collectives alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_fx import FSDPContext
from fsdp_fx.occupancy import outline_of
from fsdp_fx.planning.durations import Durations
from fsdp_fx.planning.simulation import simulate
from ranks import RankPools

LAYERS, WIDTH = 4, 512
STEPS, TRIES = 3, 4  # a try is repeated where another process took the cores
TOLERANCE = 0.2


@dataclass(frozen=True)
class Setting:
    """What is run.

    Args:
        inner: width inside of a layer, which has 2 KiB of parameters for each.
        forward: seconds that the forward of a layer sleeps.
        backward: seconds that its backward sleeps.
        link: seconds that a gather takes at least.
    """

    inner: int
    forward: float
    backward: float
    link: float


class Sleep(torch.autograd.Function):
    """Passes a tensor on after a while, and its gradient after another."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, setting: Setting) -> torch.Tensor:
        ctx.setting = setting
        time.sleep(setting.forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(ctx.setting.backward)
        return gradient, None


class Layer(nn.Module):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, setting.inner, bias=False)
        self.setting = setting

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.linear(x).sum(1, keepdim=True)
        slept: torch.Tensor = Sleep.apply(inner.expand(-1, WIDTH), self.setting)
        return slept


class SlowWork(dist.Work):
    """A collective that is done when gloo is and no earlier than ``done``."""

    def __init__(self, work: dist.Work, done: float) -> None:
        super().__init__()
        self._work, self._done = work, done

    def is_completed(self) -> bool:
        return self._work.is_completed() and time.perf_counter() >= self._done

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait()
        time.sleep(max(0.0, self._done - time.perf_counter()))
        return True


class SlowLink:
    """All-gathers that occupy a link one after the other, for ``seconds`` each."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._free = 0.0

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool
    ) -> dist.Work:
        assert async_op
        work = dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=True)
        assert work is not None
        self._free = max(self._free, time.perf_counter()) + self._seconds
        return SlowWork(work, self._free)


def seconds(call: Callable[[], object], before: Callable[[], object] = dist.barrier) -> float:
    """The median time of a call, begun on all ranks at once, on the slower rank."""
    samples = []
    for _ in range(STEPS):
        before()
        began = time.perf_counter()
        call()
        samples.append(time.perf_counter() - began)
    median = torch.tensor(statistics.median(samples))
    dist.all_reduce(median, dist.ReduceOp.MAX)
    return median.item()


def layers(setting: Setting) -> nn.Sequential:
    return nn.Sequential(*(Layer(setting) for _ in range(LAYERS)))


def replayed(setting: Setting, **options: Any) -> tuple[FSDPContext, Callable[[], None]]:
    """A context that has a program, and what runs a step of it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, link = layers(setting), SlowLink(setting.link)
    for layer in model:
        # The method is FSDPModule's, which fully_shard makes of a module.
        fully_shard(layer, mesh=mesh).set_custom_all_gather(link)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh)
    context = FSDPContext(mode="recorded", **options)
    context.adopt(model)

    def step() -> None:
        model(torch.ones(1, WIDTH)).sum().backward()
        context.finish_grad_sync()

    step()
    return context, step


def measured_durations(setting: Setting) -> Callable[[FSDPContext], Durations]:
    """How long the events of a context's trace and its collectives take."""
    bare = layers(setting)
    loss = bare(torch.ones(1, WIDTH)).sum()

    def forward() -> None:
        nonlocal loss
        loss = bare(torch.ones(1, WIDTH)).sum()

    forward_time = seconds(forward) / LAYERS
    backward_time = seconds(lambda: loss.backward(), before=forward) / LAYERS
    full = torch.ones(WIDTH * setting.inner)
    shard = torch.ones(full.numel() // dist.get_world_size())

    # As in FSDP2, collectives have buffers of their own, which are copied from or to.
    def gather() -> None:
        gathered = torch.empty_like(full)
        dist.all_gather_into_tensor(gathered, shard.clone())
        gathered.clone()

    def reduce() -> None:
        dist.reduce_scatter_tensor(torch.empty_like(shard), full.clone())

    gather_time = max(seconds(gather), setting.link)
    # On the CPU FSDP2 waits for a reduction where it issues it: that is compute.
    backward_time += seconds(reduce)
    phases = {"F": round(1e9 * forward_time), "B": round(1e9 * backward_time)}

    def durations(context: FSDPContext) -> Durations:
        assert context.trace is not None
        units = [unit.name for unit in context.trace.units]
        return Durations(
            tuple(phases[event.phase] for event in context.trace),
            dict.fromkeys(units, round(1e9 * gather_time)),
            dict.fromkeys(units, 0),
        )

    return durations


@dataclass(frozen=True)
class Try:
    """Seconds of a step, predicted and measured, gathered ahead and on demand."""

    predicted: tuple[float, float]
    measured: tuple[float, float]

    @property
    def error(self) -> float:
        """The larger of the two, relative to what was measured."""
        pairs = zip(self.predicted, self.measured, strict=True)
        return max(abs(predicted - measured) / measured for predicted, measured in pairs)


def predict_and_measure(setting: Setting) -> list[Try]:
    """Tries until one is within the tolerance, the same on every rank."""
    runs = [replayed(setting), replayed(setting, forward_prefetch=0, backward_prefetch=0)]
    tries: list[Try] = []
    while not tries or (tries[-1].error > TOLERANCE and len(tries) < TRIES):
        durations = measured_durations(setting)
        predicted, measured = [], []
        for context, step in runs:
            assert context.program is not None
            simulated = simulate([outline_of(context.program)], [durations(context)])
            predicted.append(simulated.nanoseconds / 1e9)
            measured.append(seconds(step))
            assert context.stats.recorded_windows == 1
        tries.append(Try((predicted[0], predicted[1]), (measured[0], measured[1])))
    return tries


def check(tries: list[Try], name: str, capsys: pytest.CaptureFixture[str]) -> Try:
    best = min(tries, key=lambda each: each.error)
    with capsys.disabled():
        print(
            f"\n{name}: step predicted {best.predicted[0]:.3f} s, measured {best.measured[0]:.3f} s; "
            f"on demand {best.predicted[1]:.3f} s and {best.measured[1]:.3f} s "
            f"({len(tries)} tries)"
        )
    assert best.error <= TOLERANCE, tries
    return best


def test_step_over_a_slow_link_takes_as_long_as_simulated(
    ranks: RankPools, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = Setting(inner=128, forward=0.03, backward=0.04, link=0.04)
    tries, _ = ranks(2).run(predict_and_measure, setting, timeout=120)
    best = check(tries, "slow link", capsys)
    # The two schedules differ by more than the tolerance: one figure would not do for both.
    assert best.predicted[1] > (1 + TOLERANCE) / (1 - TOLERANCE) * best.predicted[0]


def test_step_over_gloo_takes_as_long_as_simulated(
    ranks: RankPools, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = Setting(inner=1024, forward=0.04, backward=0.06, link=0.0)
    tries, _ = ranks(2).run(predict_and_measure, setting, timeout=120)
    best = check(tries, "gloo", capsys)
    assert best.predicted[1] > best.predicted[0]
