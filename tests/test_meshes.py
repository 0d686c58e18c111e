"""Replicas and meshes: what is all-reduced when, and units that not all ranks share.

Every window is compared with the same chunks whole: a copy for each rank, trained on its
data, whose gradients are averaged over the ranks that share a unit.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from fsdp_fx import FSDPContext
from fsdp_fx.compile.backend import fsdp_fx as backend
from fsdp_fx.residency import Stats
from ranks import RankPools
from test_semantics import at_rest, counting
from training import ORDERS, Action, make_chunks, make_data, run_actions

# Which ranks share a unit of each kind, and so its gradients' average.
GROUPS = {
    "all": ((0, 1, 2, 3),),
    "pairs": ((0, 1), (2, 3)),
    "strides": ((0, 2), (1, 3)),
    "replicated": ((0, 1, 2, 3),),
}

Placement = Callable[[str], str]


@functools.cache  # the threads of process groups last as long as the rank, and do not sleep
def meshes() -> dict[str, DeviceMesh]:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    return {
        "all": init_device_mesh("cpu", (4,)),
        "pairs": grid["inner"],
        "strides": grid["outer"],
        "replicated": grid,
    }


def replicated(name: str) -> str:
    return "replicated"


class Training:
    """Chunks whose units are on the meshes that ``place`` names, beside whole ones."""

    def __init__(
        self, place: Placement, compiler: str | None = None, chunks: int = 2, **options: Any
    ) -> None:
        self.place = place
        self.rank = dist.get_rank()
        self.chunks = make_chunks(chunks)
        self.whole = [copy.deepcopy(self.chunks) for _ in range(dist.get_world_size())]
        mesh = meshes()
        for index, chunk in enumerate(self.chunks):
            layers: Any = chunk.layers
            for number, layer in enumerate(layers):
                fully_shard(layer, mesh=mesh[place(f"c{index}.layers.{number}")])
            fully_shard(chunk, mesh=mesh[place(f"c{index}")])
        self.context = FSDPContext(**{"mode": "recorded", **options})
        self.context.adopt(*self.chunks)
        self.callables: list[Any] = list(self.chunks)
        if compiler is not None:
            self.callables = [
                torch.compile(
                    chunk,
                    backend=backend,
                    options={"region_compiler": compiler},
                    fullgraph=True,
                    dynamic=False,
                )
                for chunk in self.chunks
            ]
        self.optimizers = [
            torch.optim.SGD(
                [p for chunk in chunks for p in chunk.parameters()], lr=0.1, momentum=0.9
            )
            for chunks in (self.chunks, *self.whole)
        ]
        self.steps = 0
        self.data: list[tuple[torch.Tensor, torch.Tensor]] = []

    def run(self, order: str, microbatches: int) -> None:
        """The forwards and backwards of a window, on the sharded side."""
        self.steps += 1
        self.data = make_data(self.steps, microbatches)
        run_actions(self.callables, self.actions(order), self.data, self.rank)

    def actions(self, order: str) -> list[Action]:
        return list(ORDERS[order](len(self.chunks), len(self.data)))

    def window(self, order: str, microbatches: int) -> Stats:
        """Run, close and compare a window; returns what its counters went up by."""
        with counting(self.context) as spent, counting_all_reduces() as calls:
            self.run(order, microbatches)
            if self.context.mode == "recorded":
                self.context.finish_grad_sync()
        assert len(calls) == spent.all_reductions
        self.check()
        return spent

    def check(self) -> None:
        """Compare the window just closed, and the weights after an optimizer step."""
        for rank, chunks in enumerate(self.whole):
            run_actions(
                chunks, list(ORDERS["one_by_one"](len(chunks), len(self.data))), self.data, rank
            )
        self._average()
        self._compare("gradient", lambda parameter: parameter.grad)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self._compare("weight", lambda parameter: parameter)
        assert at_rest(self.context)

    def _named(self, chunks: Sequence[nn.Module]) -> Iterator[tuple[str, str, Any]]:
        for index, chunk in enumerate(chunks):
            for name, parameter in chunk.named_parameters():
                head, _, rest = name.partition(".")
                unit = f"c{index}.layers.{rest[0]}" if head == "layers" else f"c{index}"
                yield f"c{index}.{name}", unit, parameter

    def _average(self) -> None:
        copies = [list(self._named(chunks)) for chunks in self.whole]
        for same in zip(*copies, strict=True):
            parameters = [parameter for _, _, parameter in same]
            for group in GROUPS[self.place(same[0][1])]:
                mean = torch.stack([parameters[rank].grad for rank in group]).mean(0)
                for rank in group:
                    parameters[rank].grad = mean.clone()

    def _compare(self, what: str, read: Callable[[Any], Any]) -> None:
        mine, theirs = self._named(self.chunks), self._named(self.whole[self.rank])
        for (name, _, found), (_, _, wanted) in zip(mine, theirs, strict=True):
            assert isinstance(found, DTensor), name
            torch.testing.assert_close(
                read(found).full_tensor(), read(wanted), msg=f"{what} of {name}: {{}}".format
            )


@contextlib.contextmanager
def counting_all_reduces() -> Iterator[list[Any]]:
    """The process groups of the all-reduces of the block."""
    groups: list[Any] = []
    real = dist.all_reduce

    def spy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        groups.append(kwargs.get("group"))
        return real(tensor, *args, **kwargs)

    dist.all_reduce = spy
    try:
        yield groups
    finally:
        dist.all_reduce = real


def assert_captured(context: FSDPContext) -> None:
    """Only windows fell back, none of the chunks."""
    assert context.compiled_graphs
    assert all(fallback.where.startswith("window") for fallback in context.fallbacks)


# Replicas


def once_per_unit(compiler: str | None, order: str) -> None:
    training = Training(replicated, compiler)
    units = len(training.context.units)
    for microbatches in (3, 1, 4, 2):
        spent = training.window(order, microbatches)
        assert spent.recorded_windows == 1
        if microbatches == 3:
            # One more reduction for each unit, of nothing, brings the all-reduce.
            assert (spent.reductions, spent.all_reductions) == (4 * units, units)
        else:
            # What was the last reduction in a program that the window left was one too.
            assert units <= spent.all_reductions <= microbatches * units
        for _ in range(1 if compiler else 2):
            replayed = training.window(order, microbatches)
            assert replayed.replayed_windows == 1
            assert (replayed.reductions, replayed.all_reductions) == (units * microbatches, units)
    if compiler is not None:
        assert_captured(training.context)


@pytest.mark.parametrize(
    ("compiler", "order"),
    [
        *(
            pytest.param(None, order, marks=() if order == "one_by_one" else pytest.mark.soak)
            for order in ORDERS
        ),
        ("eager", "interleaved"),
    ],
)
def test_replicated_units_are_all_reduced_once_per_window(
    ranks: RankPools, compiler: str | None, order: str
) -> None:
    ranks(4).run(once_per_unit, compiler, order, timeout=200)


def other_options() -> None:
    # Kept full until the window's last reduction: there is no other.
    training = Training(replicated, reduce_gradients="per_window")
    units = len(training.context.units)
    for _ in range(3):
        spent = training.window("interleaved", 3)
        assert (spent.reductions, spent.all_reductions) == (units, units)
    # A window of one backward.
    training = Training(replicated, mode="registration", chunks=1)
    units = len(training.context.units)
    for _ in range(3):
        spent = training.window("one_by_one", 1)
        assert (spent.reductions, spent.all_reductions) == (units, units)
        assert spent.divergences == 0


def leaving() -> None:
    training = Training(replicated)
    units = len(training.context.units)
    training.window("one_by_one", 3)
    # Fewer microbatches: what would have been partial at the last of them is outstanding.
    spent = training.window("one_by_one", 2)
    assert (spent.divergences, spent.all_reductions) == (1, units)
    # The other way round, into a known program: its last reductions add to an all-reduce.
    training.window("one_by_one", 2)
    spent = training.window("one_by_one", 3)
    assert (spent.switches, spent.divergences) == (1, 0)
    # Another order from the middle on, which no program knows.
    spent = training.window("chunk_by_chunk", 3)
    assert spent.divergences == 1
    spent = training.window("chunk_by_chunk", 3)
    assert (spent.replayed_windows, spent.all_reductions) == (1, units)


def aborting() -> None:
    training = Training(replicated)
    for known in (False, True):
        training.run("one_by_one", 2)
        x = make_data(99, 1)[0][0][training.rank]
        training.chunks[0](x)
        assert any(unit.has_partial_sums for unit in training.context.units) is not known
        training.context.abort()
        assert not any(unit.has_partial_sums for unit in training.context.units)
        training.window("one_by_one", 2)
    # In the middle of a replay, with sums of the first microbatch kept back.
    training.data = make_data(7, 2)
    run_actions(
        training.callables, training.actions("one_by_one")[:4], training.data, training.rank
    )
    assert all(unit.has_partial_sums for unit in training.context.units)
    training.context.abort()
    spent = training.window("one_by_one", 2)
    assert spent.replayed_windows == 1


def evaluations() -> None:
    training = Training(replicated)
    for _ in range(2):
        training.run("one_by_one", 2)
        training.context.finish_grad_sync()
        training.check()
    # The gradient of an evaluation is there at once, between windows and inside of one.
    x = make_data(50, 1)[0][0][training.rank]
    first = training.chunks[0]

    def evaluate() -> None:
        with training.context.evaluation(), counting(training.context) as spent:
            first(x).sum().backward()
        assert spent.all_reductions == spent.reductions == 3

    evaluate()
    training.steps += 1
    training.data = make_data(training.steps, 2)
    actions = training.actions("one_by_one")
    run_actions(training.callables, actions[:4], training.data[:1], training.rank)
    evaluate()
    shifted = [(kind, chunk, 0) for kind, chunk, _ in actions[4:]]
    run_actions(training.callables, shifted, training.data[1:], training.rank)
    training.context.finish_grad_sync()
    for rank, chunks in enumerate(training.whole):
        for _ in range(2):
            chunks[0](make_data(50, 1)[0][0][rank]).sum().backward()
    training.check()


def refusing() -> None:
    chunk: Any = make_chunks(1)[0]
    fully_shard(chunk, mesh=meshes()["replicated"])
    assert isinstance(chunk, FSDPModule)
    chunk.set_requires_all_reduce(False)
    context = FSDPContext(mode="recorded")
    with pytest.raises(ValueError, match=r"set_requires_all_reduce\(False\) has no effect"):
        context.adopt(chunk)
    chunk.set_requires_all_reduce(True)
    context.adopt(chunk)
    assert [unit.spec.replicas for unit in context.units] == [2]
    chunk.set_requires_all_reduce(False)  # as a window does by itself
    FSDPModule.set_requires_all_reduce(chunk, False)  # past what the adopted module says to it
    with pytest.raises(RuntimeError, match=r"unit c0: set_requires_all_reduce\(False\)"):
        run_actions([chunk], [("F", 0, 0), ("B", 0, 0)], make_data(0, 1), dist.get_rank())


def run_each(cases: Sequence[Callable[[], None]]) -> None:
    for case in cases:
        try:
            case()
        except BaseException as error:
            error.add_note(f"case: {case.__name__}")
            raise


def test_replicated_units_with_other_options_programs_and_endings(ranks: RankPools) -> None:
    cases = (other_options, leaving, aborting, evaluations, refusing)
    ranks(4).run(run_each, cases, timeout=200)


# Several meshes


def by_chunk(name: str) -> str:
    return "all" if name.startswith("c0") else "pairs"


def by_unit(name: str) -> str:
    """In each chunk, its own unit and its layers are on different meshes."""
    return {"0": "pairs", "1": "strides"}.get(name[-1] if "layers" in name else "", "all")


def with_replicas(name: str) -> str:
    return "replicated" if name.endswith(".0") else by_unit(name)


def on_several_meshes(place: Placement, compiler: str | None, order: str) -> None:
    training = Training(place, compiler)
    replicas = sum(unit.spec.replicas > 1 for unit in training.context.units)
    for microbatches in (2, 2, 2):
        spent = training.window(order, microbatches)
        assert spent.all_reductions == replicas
    assert spent.replayed_windows == 1
    if compiler is not None:
        assert_captured(training.context)


@pytest.mark.parametrize(
    "place",
    [*(pytest.param(each, marks=pytest.mark.soak) for each in (by_chunk, by_unit)), with_replicas],
)
def test_units_on_different_meshes_train_like_whole_ones(
    ranks: RankPools, place: Placement
) -> None:
    for compiler, order in ((None, "one_by_one"), (None, "interleaved"), ("eager", "interleaved")):
        ranks(4).run(on_several_meshes, place, compiler, order, timeout=200)
