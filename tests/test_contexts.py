"""Several contexts in one process, whose windows and autograd passes cross.

Each model is compared with the same model whole.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_fx import FSDPContext
from models import linears, shard
from test_semantics import Twin, assert_replayed, at_rest, counting, data, on_two_ranks


class Model:
    """A sharded model on a context of its own beside the same model whole."""

    def __init__(self, **options: Any) -> None:
        model = linears(2)
        self.whole: nn.Module = copy.deepcopy(model)
        self.sharded: Any = shard(model, nn.Linear)
        self.context = FSDPContext(**{"mode": "recorded", **options})
        self.context.adopt(model)
        self.optimizers = [
            torch.optim.SGD(each.parameters(), 0.1) for each in (self.sharded, self.whole)
        ]

    def check(self) -> None:
        """Compare gradients, step, and compare weights."""
        self._compare(lambda parameter: parameter.grad)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self._compare(lambda parameter: parameter)
        assert at_rest(self.context)

    def _compare(self, read: Any) -> None:
        theirs = self.whole.parameters()
        for mine, expected in zip(self.sharded.parameters(), theirs, strict=True):
            found, wanted = read(mine), read(expected)
            assert (found is None) == (wanted is None)
            if found is not None:
                torch.testing.assert_close(found.full_tensor(), wanted)


def mean(loss: Any) -> torch.Tensor:
    """The loss of the whole models: ``loss(rank)``, averaged over the ranks."""
    world = dist.get_world_size()
    return torch.stack([loss(rank) for rank in range(world)]).mean()


@on_two_ranks()
def test_windows_of_two_contexts_interleave_in_time() -> None:
    first, second = Twin(linears(2)), Twin(linears(2), linears(1))
    for step in range(3):
        first.run("F0 F1")
        second.run("F0 B0 F1")
        first.run("B0")
        with counting(second.context) as spent:
            second.run("B1")
            second.context.finish_grad_sync()  # while the window of the first is open
        second.check()
        assert (spent.recorded_windows, spent.replayed_windows) == ((1, 0) if step == 0 else (0, 1))
        assert first.context.window.is_open
        first.run("B1")
        first.context.finish_grad_sync()
        first.check()
    assert first.context.stats.replayed_windows == second.context.stats.replayed_windows == 2
    assert first.context.stats.divergences == second.context.stats.divergences == 0


@on_two_ranks()
def test_evaluation_of_one_context_inside_the_window_of_another() -> None:
    first, second = Twin(linears(2)), Twin(linears(2))
    second.window("F0 B0")
    for step in range(3):
        before = second.context.stats.windows
        x = data(step, 5)[dist.get_rank()]
        first.run("F0")
        with torch.no_grad():
            found = second.chunks[0](x)
        torch.testing.assert_close(found, second.whole[0](x))
        first.run("F1")
        with second.context.evaluation():
            # Only the second context evaluates.
            second.chunks[0](x)
            first.run("B0 B1")
        assert second.context.stats.windows == before
        assert at_rest(second.context)
        first.context.finish_grad_sync()
        first.check()
        assert_replayed(second, second.window("F0 B0"))
    assert first.context.stats.replayed_windows == 2


@on_two_ranks(frozen=[False, True])
def test_teacher_in_a_context_of_its_own_inside_the_loss(frozen: bool) -> None:
    student, teacher = Model(), Model()
    teacher.sharded.eval()
    if frozen:
        for each in (teacher.sharded, teacher.whole):
            each.requires_grad_(False)
    rank = dist.get_rank()
    for step in range(3):
        for microbatch in range(2):
            x = data(step, microbatch)
            # Gradients flow through the teacher into the student.
            output = student.sharded(x[rank])
            (teacher.sharded(output) - x[rank]).square().mean().backward()

            def loss(of: int, x: torch.Tensor = x) -> torch.Tensor:
                return (teacher.whole(student.whole(x[of])) - x[of]).square().mean()

            mean(loss).backward()
        assert teacher.context.stats.windows == 0
        student.context.finish_grad_sync()
        teacher.context.finish_grad_sync()
        student.check()
        teacher.check()
    assert student.context.stats.replayed_windows == 2
    assert teacher.context.stats.windows == 0


@on_two_ranks(mode=["recorded", "registration"])
def test_gradients_flow_through_the_chunks_of_two_contexts(mode: str) -> None:
    first, second = Model(mode=mode), Model(mode=mode)
    rank = dist.get_rank()
    for step in range(3):
        x = data(step, 0)
        second.sharded(first.sharded(x[rank])).square().mean().backward()
        mean(lambda of, x=x: second.whole(first.whole(x[of])).square().mean()).backward()
        for each in (first, second):
            if mode == "recorded":
                each.context.finish_grad_sync()
            each.check()
    for each in (first, second):
        assert each.context.stats.windows == 3
        assert each.context.stats.divergences == 0


@on_two_ranks()
def test_generator_and_discriminator_train_against_each_other() -> None:
    generator, discriminator = Model(), Model()
    rank = dist.get_rank()
    for step in range(4):
        noise, real = data(step, 0), data(step, 1)
        # The discriminator: real, and made without gradients.
        with torch.no_grad():
            made = generator.sharded(noise[rank])
        spread = discriminator.sharded(made).mean() - discriminator.sharded(real[rank]).mean()
        spread.backward()
        discriminator.context.finish_grad_sync()

        def judge(of: int, noise: torch.Tensor = noise, real: torch.Tensor = real) -> torch.Tensor:
            made = generator.whole(noise[of]).detach()
            return discriminator.whole(made).mean() - discriminator.whole(real[of]).mean()

        mean(judge).backward()
        discriminator.check()
        # The generator, through both; what the discriminator gets of it is thrown away.
        (-discriminator.sharded(generator.sharded(noise[rank]))).mean().backward()
        generator.context.finish_grad_sync()
        discriminator.context.finish_grad_sync()

        def fool(of: int, noise: torch.Tensor = noise) -> torch.Tensor:
            return (-discriminator.whole(generator.whole(noise[of]))).mean()

        mean(fool).backward()
        for each in (discriminator.sharded, discriminator.whole):
            each.zero_grad()
        generator.check()
    assert generator.context.stats.divergences == 0
    # Two kinds of windows alternate: each is recorded once.
    assert len(discriminator.context.programs) == 2
    assert discriminator.context.stats.recorded_windows == 2
