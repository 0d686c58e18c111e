"""State dicts and checkpoints of adopted models are those of FSDP2 alone.

What is saved on one side is loaded on the others (whole, under FSDP2 alone, with a context,
on another number of ranks), and training goes on as if it had not been interrupted.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor

from fsdp_fx import FSDPContext
from models import Chunk
from parity import (
    UNCOMPILED,
    Trio,
    assert_same,
    assert_same_models,
    batch,
    built,
    mean_square,
    sharded,
)
from ranks import RankPools
from test_semantics import at_rest, on_two_ranks


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


class Side:
    """A model and its optimizer in training.

    Args:
        kind: "whole", "plain" (FSDP2 alone), "ours" or "compiled" (with a context).
        seed: of its weights.
    """

    def __init__(self, kind: str, seed: int = 3) -> None:
        self.model: Any = built(Chunk, seed)
        self.context: FSDPContext | None = None
        if kind != "whole":
            sharded(self.model)
        if kind in ("ours", "compiled"):
            self.context = FSDPContext(mode="recorded")
            self.context.adopt(self.model)
        self.call: Any = self.model
        if kind == "compiled":
            self.call = torch.compile(self.model, backend="fsdp_fx", options=UNCOMPILED)
        self.optimizer = adam(self.model)

    def train(self, *steps: int) -> list[float]:
        """The steps with these numbers: every rank's data is the same, so that losses are too."""
        losses = []
        for step in steps:
            loss = mean_square(self.call, batch(step)[0])
            loss.backward()
            if self.context is not None:
                self.context.finish_grad_sync()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def save(self, path: str) -> None:
        model, optimizer = get_state_dict(self.call, self.optimizer)
        save({"model": model, "optimizer": optimizer}, checkpoint_id=path)

    def load(self, path: str) -> None:
        """Load in place, as torch's documentation of checkpoints does."""
        model, optimizer = get_state_dict(self.call, self.optimizer)
        load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        set_state_dict(
            self.call, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )

    def state(self) -> dict[str, torch.Tensor]:
        """Weights and optimizer states."""
        state: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            state[name] = parameter
            for key, value in self.optimizer.state[parameter].items():
                state[f"{name} {key}"] = value
        return state


def assert_equal(found: Side, wanted: Side) -> None:
    """Bit for bit; a side that is whole, within a tolerance."""
    mine, theirs = found.state(), wanted.state()
    assert list(mine) == list(theirs)
    for name, value in mine.items():
        expected = theirs[name]
        if isinstance(value, DTensor) or not isinstance(expected, DTensor):
            assert_same(value, expected, name)
        else:
            torch.testing.assert_close(
                value.detach(), expected.full_tensor(), msg=f"{name}: {{}}".format
            )


# State dicts


@on_two_ranks()
def test_state_dicts_are_those_of_fsdp2_alone_at_any_time() -> None:
    trio = Trio(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2), tolerance=1e-3)

    def compare() -> None:
        mine: Any
        theirs: Any
        mine, theirs = (model.state_dict() for model in trio.both())
        assert type(mine) is type(theirs)
        assert_same(dict(mine), dict(theirs))
        for options in (
            StateDictOptions(),
            StateDictOptions(full_state_dict=True),
            StateDictOptions(full_state_dict=True, cpu_offload=True),
            StateDictOptions(ignore_frozen_params=True),
        ):
            mine, theirs = (get_model_state_dict(model, options=options) for model in trio.both())
            assert_same(mine, theirs)
            if trio.steps and not trio.context.window.is_open:
                sides = zip(trio.both(), trio.optimizers, strict=False)
                states = (get_optimizer_state_dict(*side, options=options) for side in sides)
                assert_same(next(states), next(states))

    compare()
    trio.ours.norm.weight.requires_grad_(False)
    trio.plain.norm.weight.requires_grad_(False)
    trio.whole.norm.weight.requires_grad_(False)
    for _ in range(2):
        trio.step()
        compare()
    # Between a forward and its backward, where units are gathered, and after the backward.
    before = copy.deepcopy(dict(trio.plain.state_dict()))
    loss = mean_square(trio.ours, batch(7)[dist.get_rank()])
    assert any(unit.unsharded or unit.in_flight for unit in trio.context.units)
    compare()
    loss.backward()
    compare()
    trio.context.finish_grad_sync()
    assert_same(dict(trio.ours.state_dict()), before)


@on_two_ranks()
def test_compiled_models_have_the_keys_that_they_have_under_torch_alone() -> None:
    plain, ours = sharded(built(Chunk)), sharded(built(Chunk))
    context = FSDPContext(mode="recorded")
    context.adopt(ours)
    mine: Any = torch.compile(ours, backend="fsdp_fx", options=UNCOMPILED)
    theirs: Any = torch.compile(plain, backend="eager")
    for _ in range(2):
        mean_square(mine, batch(1)[dist.get_rank()]).backward()
        context.finish_grad_sync()
    assert all(name.startswith("_orig_mod.") for name in theirs.state_dict())
    assert_same(dict(mine.state_dict()), dict(theirs.state_dict()))
    # Checkpoints are without the prefix.
    assert_same(get_model_state_dict(mine), get_model_state_dict(plain))
    assert_same(dict(ours.state_dict()), dict(plain.state_dict()))
    for model in (plain, ours):
        model.compile(backend="fsdp_fx" if model is ours else "eager")
        assert "norm.weight" in model.state_dict()
    other = sharded(built(Chunk, seed=5))
    for model in (mine, theirs):
        model.load_state_dict({f"_orig_mod.{k}": v for k, v in other.state_dict().items()})
    assert_same_models(ours, other)
    assert_same_models(plain, other)


# Full state dicts


@on_two_ranks(kind=["ours", "compiled", "plain"], broadcast=[False, True])
def test_full_state_dicts_go_from_side_to_side(kind: str, broadcast: bool) -> None:
    uninterrupted = Side(kind)
    uninterrupted.train(0, 1)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = get_state_dict(uninterrupted.call, uninterrupted.optimizer, options=options)
    # Only rank 0 is given them with cpu_offload.
    assert bool(model) == (dist.get_rank() == 0)
    sides = [Side("plain" if kind != "plain" else "ours", seed=5), Side("ours", seed=6)]
    sides[1].train(9, 10)  # in the middle of a training
    for side in sides:
        whole_model, whole_optimizer = copy.deepcopy((model, optimizer))
        if not broadcast:
            everybody: list[Any] = [whole_model, whole_optimizer]
            dist.broadcast_object_list(everybody)
            whole_model, whole_optimizer = everybody
        loading = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        # Not set_state_dict(): torch's does not take an empty one on the other ranks.
        set_model_state_dict(side.call, whole_model, options=loading)
        set_optimizer_state_dict(side.call, side.optimizer, whole_optimizer, options=loading)
        assert_equal(side, uninterrupted)
    expected = uninterrupted.train(2, 3)
    for side in sides:
        assert side.train(2, 3) == expected
        assert_equal(side, uninterrupted)


# torch.distributed.checkpoint


def _interrupt(kind: str, path: str) -> None:
    uninterrupted = Side(kind)
    uninterrupted.train(0, 1)
    uninterrupted.save(path)
    resumed = {
        "ours": Side("ours", seed=5),
        "plain": Side("plain", seed=6),
        "whole": Side("whole", seed=7),
        "compiled": Side("compiled", seed=8),
        "in the middle of a training": Side("ours", seed=9),
    }
    resumed["in the middle of a training"].train(8, 9)
    for side in resumed.values():
        side.load(path)
        assert_equal(side, uninterrupted)
    expected = uninterrupted.train(2, 3)
    for name, side in resumed.items():
        losses = side.train(2, 3)
        assert losses == pytest.approx(expected, rel=1e-5 if name == "whole" else 0), name
        assert_equal(side, uninterrupted)
        if side.context is not None:
            assert at_rest(side.context)


def test_checkpoint_of_any_side_is_loaded_on_every_other(ranks: RankPools, tmp_path: Path) -> None:
    for kind in ("ours", "plain", "compiled"):
        ranks(2).run(_interrupt, kind, str(tmp_path / kind), timeout=120)


def _save_and_go_on(path: str) -> list[float]:
    side = Side("ours")
    side.train(0, 1)
    side.save(path)
    return side.train(2, 3)


def _load_and_go_on(path: str) -> list[float]:
    side = Side("ours", seed=5)
    side.load(path)
    return side.train(2, 3)


def test_checkpoint_is_loaded_on_another_number_of_ranks(ranks: RankPools, tmp_path: Path) -> None:
    for few, many in ((2, 4), (4, 2)):
        path = str(tmp_path / f"of {few}")
        expected = ranks(few).run(_save_and_go_on, path, timeout=120)
        found = ranks(many).run(_load_and_go_on, path, timeout=120)
        torch.testing.assert_close(found[0], expected[0])


def _save_while_training(path: str) -> None:
    side, uninterrupted = Side("ours"), Side("ours")
    side.train(0, 1)
    uninterrupted.train(0, 1)
    model, optimizer = get_state_dict(side.model, side.optimizer)
    # Its collectives run in a thread: not among those of the training.
    group: Any = dist.new_group(backend="gloo")
    saving: Any = async_save(
        {"model": model, "optimizer": optimizer}, checkpoint_id=path, process_group=group
    )
    losses = side.train(2, 3, 4)
    saving.result()
    dist.destroy_process_group(group)
    side.load(path)
    assert_equal(side, uninterrupted)
    assert side.train(2, 3, 4) == losses == uninterrupted.train(2, 3, 4)


def test_training_goes_on_while_a_checkpoint_is_saved(ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(_save_while_training, str(tmp_path))
