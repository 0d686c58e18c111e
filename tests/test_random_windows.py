"""Random models and random windows against the same chunks whole.

A :class:`Scenario` is a model and what is done with it, as plain text. A :class:`Run` does it,
on the sharded chunks and on the whole ones alike, and checks after every call: outputs, one
cursor, what is resident, the counters; at a close also gradients and the program; after a step
the weights. Three tests draw scenarios: a state machine on one rank, one for registration mode,
and one on two ranks. What they have found stays in :data:`FOUND`.

`--examples 5000` draws that many, and others every time.

The calls of a scenario, separated by spaces:

- ``c1F0``, ``c1B0``: forward and backward of microbatch 0 through chunk 1; where one autograd
  graph goes through all chunks, the backward is written as that of the last;
- ``c1F0!3``: the same, and its third computation raises; then the close must be refused, and the
  window is aborted;
- ``c1E:no_grad``: an evaluation of chunk 1, one of :data:`EVALUATIONS`; also with ``!3``;
- ``close``: ``finish_grad_sync()``, which must be refused while the window is not whole;
- ``abort``; ``look``: parameters and state dict are read; ``step``: the optimizer, which must be
  refused in a window; ``zero``: ``zero_grad()``, between windows only;
- ``flip3``: the third parameter is frozen, or trained again if it was frozen; ``change3``: it is
  changed in place; ``load3``: another value is loaded for it. All of them between windows only.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_fx import FSDPContext, IncompleteWindowError
from fsdp_fx.occupancy import outline_of, resident_bytes
from fsdp_fx.planning.memory import kept_gradient_bytes
from fsdp_fx.program import Program
from fsdp_fx.residency import Stats
from fsdp_fx.units import unit_of_tensor
from models import cpu_mesh
from random_models import DTYPE, EVERYTHING, WIDTH, Block, Node, Probe, Setup, Use, setups
from ranks import RankPools, clean_up

MICROBATCHES = 3
EVALUATIONS = ("no_grad", "evaluation", "eval", "inference")


@dataclass(frozen=True)
class Scenario:
    """A model and what is done with it."""

    setup: Setup
    calls: str


class Planned(ArithmeticError):
    """Raised in a computation, by intention."""


# Running


class Reference:
    """The chunks whole, and what their hooks tell: uses of units, and units with a backward."""

    def __init__(self, chunks: Sequence[Block]) -> None:
        self.chunks = list(chunks)
        self.totals: dict[nn.Parameter, torch.Tensor] = {}
        self.events = 0
        self.uses: Counter[str] = Counter()  # forwards of the call under way, by unit
        self.with_backward: set[str] = set()
        self.contributions: set[tuple[str, int]] = set()  # units and microbatches with a backward
        self.microbatch = 0
        self.counting: str | None = None  # "F", "B" or "E": what is under way

    def watch(self, units: Sequence[str]) -> None:
        """Count the uses of the modules whose units have these names."""
        for index, chunk in enumerate(self.chunks):
            for path, module in chunk.named_modules():
                name = f"c{index}.{path}" if path else f"c{index}"
                if name in units:
                    self._watch(name, module)

    def _watch(self, name: str, module: nn.Module) -> None:
        def before(module: nn.Module, args: Any) -> None:
            self.uses[name] += 1
            self.events += self.counting == "F"

        def after(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if torch.is_grad_enabled() and output.requires_grad and self.counting != "E":
                output.register_hook(arrived)

        def arrived(gradient: torch.Tensor) -> None:
            self.events += 1
            self.with_backward.add(name)
            self.contributions.add((name, self.microbatch))

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for chunk in self.chunks for parameter in chunk.parameters()]

    def gather_gradients(self) -> None:
        """Add the window's gradients, the mean over ranks, to the totals."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
                total = self.totals.get(parameter)
                self.totals[parameter] = parameter.grad if total is None else total + parameter.grad
                parameter.grad = None

    def drop_gradients(self) -> None:
        """Forget the gradients of the window."""
        for parameter in self.parameters:
            parameter.grad = None


class Plan:
    """What a program promises.

    Args:
        program: a program, which must verify.

    Attributes:
        outline: its outline.
        resident: bytes of full parameters at each event.
        kept: bytes of full gradients that wait at each event.
        capacity: what both together may be at most, or None.
    """

    def __init__(self, program: Program) -> None:
        program.verify()
        self.outline = outline_of(program)
        self.resident = resident_bytes(program)
        self.kept = kept_gradient_bytes(program.trace, self.outline.reductions)
        self.capacity = program.capacity
        last = {interval.unit: interval for interval in self.outline.intervals}
        self._to_the_end = {id(last[unit]) for unit in self.outline.carried}
        gathers = {id(interval) for interval in self.outline.gathers}
        self._from_the_start = {
            id(interval) for interval in self.outline.intervals if id(interval) not in gathers
        }

    def after(self, cursor: int, carried: set[str]) -> set[str]:
        """The units that are there once the uses of the first ``cursor`` events have ended.

        Args:
            cursor: how many.
            carried: the units that had stayed from the window before.
        """
        there = set()
        for interval in self.outline.intervals:
            stays = id(interval) in self._to_the_end or cursor <= interval.freed
            begins = interval.gathered
            if id(interval) in self._from_the_start:
                begins = -1 if interval.unit in carried else interval.waited
            if begins < cursor and stays:
                there.add(interval.unit)
        return there


class Run:
    """A scenario under way.

    Args:
        setup: the model.
        mesh: what it is sharded over.
    """

    def __init__(self, setup: Setup, mesh: DeviceMesh) -> None:
        self.setup = setup
        torch.manual_seed(0)
        whole = [Block(node) for node in setup.chunks]
        self.chunks = [copy.deepcopy(chunk) for chunk in whole]
        self.reference = Reference(whole)
        self.probe = Probe()
        for chunk in self.chunks:
            _shard(chunk, mesh)
            for block in _blocks(chunk):
                block.probe = self.probe
        options = setup.options
        if setup.memory_budget:
            # What is too little for any unit is refused.
            sizes = [size for chunk in whole for size in _unit_sizes(chunk)]
            options["memory_budget"] = max(setup.memory_budget, min(sizes))
        self.context = FSDPContext(**options)
        self.context.adopt(*self.chunks)
        self.units = {unit.spec.name: unit for unit in self.context.units}
        self.sizes = {name: unit.spec.bytes for name, unit in self.units.items()}
        self.reference.watch(tuple(self.units))
        self.blocks = {
            module: f"c{index}.{path}".rstrip(".")
            for index, chunk in enumerate(self.chunks)
            for path, module in chunk.named_modules()
        }
        self.names = [
            (f"c{index}.{name}", parameter)
            for index, chunk in enumerate(self.chunks)
            for name, parameter in chunk.named_parameters()
        ]
        self.unit_of = {
            id(parameter): unit
            for unit in self.context.units
            for parameter in unit.sharded_parameters
        }
        self.optimizers = [
            torch.optim.SGD(parameters, 1e-4)
            for parameters in ([p for _, p in self.names], self.reference.parameters)
        ]
        # By what is trained: the events of windows by their calls.
        self.known: dict[tuple[bool, ...], dict[tuple[str, ...], tuple[str, ...]]] = {}
        self.staying: set[str] = set()  # units that have stayed from the window before
        self.changed: set[str] = set()  # those that have been changed since
        self.weights: dict[int, torch.Tensor] = {}  # full weights that computed
        self.data = torch.Generator().manual_seed(1 + dist.get_rank())
        self.plans: dict[Program, Plan] = {}
        self.fuse = 0
        self._begin()

    def _begin(self) -> None:
        self.window: list[str] = []
        self.inputs: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.outputs: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.missing: set[tuple[int, int]] = set()
        self.reference.events = 0
        self.reference.contributions.clear()
        self.recomputations = 0
        self.evaluated = Stats()
        self.context.stats.peak_kept_gradient_bytes = 0
        self.at_begin = dataclasses.replace(self.context.stats)
        self.had_gradients = {
            unit.spec.name for unit in self.context.units if unit.has_reduced_gradients
        }

    def play(self, call: str) -> None:
        """Do one call and check what must hold after it.

        Raises:
            AssertionError: something does not hold.
        """
        name, _, fuse = call.partition("!")
        self.fuse = int(fuse or 0)
        self.reading = ""
        self.probe.on_read = self._read
        self.probe.on_compute = self._compute
        blown = False
        try:
            if match := re.fullmatch(r"c(\d)([FB])(\d)", name):
                self.reading = match[2]
                act = self._forward if match[2] == "F" else self._backward
                act(int(match[1]), int(match[3]))
            elif match := re.fullmatch(r"c(\d)E:(\w+)", name):
                self.reading = "E"
                self._evaluate(int(match[1]), match[2])
            elif match := re.fullmatch(r"(flip|change|load)(\d+)", name):
                self._alter(match[1], int(match[2]))
            else:
                {
                    "close": self._close,
                    "abort": self._abort,
                    "look": self._look,
                    "step": self._step,
                    "zero": self._zero,
                }[name]()
        except Planned:
            blown = True
        self.probe.on_read = self.probe.on_compute = None
        self.fuse = 0
        if blown:
            with pytest.raises(IncompleteWindowError, match="exception crossed"):
                self.context.finish_grad_sync()
            self._abort()
        self._check_between_calls()

    # Calls

    def _forward(self, place: int, microbatch: int) -> None:
        if place and (place - 1, microbatch) not in self.outputs:
            return  # a close in between was none too early
        if place == 0:
            x = torch.randn(2, WIDTH, dtype=DTYPE, generator=self.data)
            pair = (x, x.clone())
            if self.setup.input_gradient:
                pair = (pair[0].requires_grad_(), pair[1].requires_grad_())
        elif self.setup.connected:
            pair = self.outputs[place - 1, microbatch]
        else:
            above = self.outputs[place - 1, microbatch]
            pair = tuple(y.detach().requires_grad_(y.requires_grad) for y in above)  # type: ignore[assignment]
        self.inputs[place, microbatch] = pair
        if not self.window:
            self._drop_changed()
        self.window.append(f"c{place}F{microbatch}")
        expected = self._refer("F", lambda: self.reference.chunks[place](pair[1]))
        y = self.chunks[place](pair[0])
        _assert_close(y, expected, "the output")
        assert y.requires_grad == expected.requires_grad
        self.outputs[place, microbatch] = y, expected
        if y.requires_grad:
            self.missing.add((place, microbatch))

    def _refer(self, counting: str, act: Any) -> Any:
        """Do something on the reference, with its hooks counting."""
        reference = self.reference
        reference.counting = counting
        reference.uses.clear()
        try:
            return act()
        finally:
            reference.counting = None

    def _backward(self, place: int, microbatch: int) -> None:
        if (place, microbatch) not in self.outputs:
            return
        outputs = self.outputs[place, microbatch]
        registration = self.setup.mode == "registration"
        if not outputs[0].requires_grad:
            if registration:  # no pass ends the window
                self._close()
                if self.window:
                    self._abort()
            return

        def backward(side: int) -> None:
            if place == len(self.chunks) - 1:
                outputs[side].square().mean().backward()
            else:
                outputs[side].backward(self.inputs[place + 1, microbatch][side].grad)

        self.window.append(f"c{place}B{microbatch}")
        self.reference.microbatch = microbatch
        self._refer("B", lambda: backward(1))
        self.recomputations += self.reference.uses.total()
        backward(0)
        if registration and self.reference.events:
            self._closed()
        elif registration:
            self._emptied()
            return
        places = range(place + 1) if self.setup.connected else (place,)
        self.missing.difference_update((each, microbatch) for each in places)

    def _evaluate(self, place: int, kind: str) -> None:
        x = torch.randn(2, WIDTH, dtype=DTYPE, generator=self.data)
        before, resident = dataclasses.replace(self.context.stats), self.resident()
        if not self.window:
            self._drop_changed()
            resident &= self.staying
        dropped = len(self.resident() - resident)
        modes: dict[str, Any] = {
            "no_grad": torch.no_grad,
            "evaluation": self.context.evaluation,
            "eval": contextlib.nullcontext,
            "inference": torch.inference_mode,
        }
        with torch.no_grad():
            expected = self._refer("E", lambda: self.reference.chunks[place](x))
        chunk = self.chunks[place].train(kind != "eval")
        try:
            with modes[kind]():
                y = chunk(x)
        except Planned:
            y = None  # an evaluation that fails leaves the window alone
        finally:
            chunk.train()
        assert self.resident() == resident, "an evaluation has changed what is resident"
        spent = _difference(self.context.stats, before)
        assert spent.gathers == spent.on_demand_gathers == spent.frees - dropped, spent
        assert spent.reductions == spent.prefetched_gathers == spent.dropped_gathers == 0, spent
        for field in dataclasses.fields(Stats):
            total = getattr(self.evaluated, field.name) + getattr(spent, field.name)
            setattr(self.evaluated, field.name, total)
        if y is not None:
            _assert_close(y, expected, "the output")
            absent = {n: c for n, c in self.reference.uses.items() if n not in resident}
            assert spent.gathers == sum(absent.values()), (spent, absent)

    def _close(self) -> None:
        before = dataclasses.replace(self.context.stats)
        if not self.window:
            self.context.finish_grad_sync()
            assert self.context.stats == before, "a close between windows does nothing"
            return
        if self.missing or not self.reference.events:
            with pytest.raises(IncompleteWindowError) as error:
                self.context.finish_grad_sync()
            assert ("is missing" if self.missing else "no compute event") in str(error.value)
            assert self.context.stats == before, "a close that is refused does nothing"
            return
        self.context.finish_grad_sync()
        self._closed()

    def _closed(self) -> None:
        context, reference = self.context, self.reference
        spent = _difference(context.stats, self.at_begin)
        mine = Stats(
            **{f.name: getattr(spent, f.name) - getattr(self.evaluated, f.name) for f in _FIELDS}
        )
        assert mine.windows == mine.recorded_windows + mine.replayed_windows == 1, mine
        program = context.program
        assert program is not None
        calls, found = tuple(self.window), tuple(map(str, program.trace))
        assert len(found) == reference.events
        known = self.known.setdefault(self.trained(), {})
        if calls in known:
            assert known[calls] == found
            assert mine.recorded_windows == mine.divergences == 0, f"known, and recorded: {mine}"
        elif mine.recorded_windows:
            assert found not in known.values(), "recorded a second time"
            first = not known and self.setup.mode == "recorded"
            assert mine.divergences == (not first), mine
        known[calls] = found
        self._check_counts(program, mine)
        reference.gather_gradients()
        self._check_gradients()
        stays = set() if mine.recorded_windows else set(program.carried)
        self._begin()
        assert not context.window.is_open
        assert context.window.cursor == 0
        self.staying = self.resident()
        assert self.staying <= stays if mine.switches else self.staying == stays
        # An optimizer may go on changing what has a gradient from before it was frozen.
        self.changed = {self.unit_of[id(p)].spec.name for _, p in self.names if p.grad is not None}

    def _emptied(self) -> None:
        """A window has closed by itself in which no unit computed."""
        assert self.context.stats.windows == self.at_begin.windows
        self.reference.gather_gradients()
        self._check_gradients()
        self._begin()
        assert not self.context.window.is_open
        self.staying &= self.resident()

    def _abort(self) -> None:
        self.context.abort()
        self.staying.clear()
        self.reference.drop_gradients()
        if self.window:
            tainted = self.had_gradients
            for name, parameter in self.names:
                if self.unit_of[id(parameter)].spec.name not in tainted:
                    assert parameter.grad is None, f"abort() left a gradient of {name}"
            self._begin()
            if tainted:
                self._zero()
        assert not self.context.window.is_open
        assert not self.resident()

    def _look(self) -> None:
        for chunk, whole in zip(self.chunks, self.reference.chunks, strict=True):
            saved = chunk.state_dict()
            for name, tensor in whole.state_dict().items():
                _assert_close(_full(saved[name]), tensor, name)

    def _step(self) -> None:
        if self.window:
            with pytest.raises(RuntimeError, match="in the middle of window"):
                self.optimizers[0].step()
            return
        for parameter, total in self.reference.totals.items():
            parameter.grad = total
        for optimizer in self.optimizers:
            optimizer.step()
        self.reference.drop_gradients()
        for (name, parameter), theirs in zip(self.names, self.reference.parameters, strict=True):
            _assert_close(_full(parameter), theirs, name)

    def _zero(self) -> None:
        if self.window:
            return
        self.optimizers[0].zero_grad()
        self.reference.totals.clear()
        self.reference.with_backward.clear()
        self._begin()

    def _alter(self, how: str, number: int) -> None:
        if self.window:
            return
        number %= len(self.names)
        (name, mine), theirs = self.names[number], self.reference.parameters[number]
        if how == "flip":
            for parameter in (mine, theirs):
                parameter.requires_grad_(not parameter.requires_grad)
            return
        self.changed.add(self.unit_of[id(mine)].spec.name)
        with torch.no_grad():
            theirs.mul_(-0.8)
            if how == "change":
                mine.mul_(-0.8)
            else:
                chunk, _, path = name.partition(".")
                values = {path: mine * -0.8}
                self.chunks[int(chunk[1:])].load_state_dict(values, strict=False)

    # What must hold

    def trained(self) -> tuple[bool, ...]:
        """Which parameters require a gradient."""
        return tuple(parameter.requires_grad for _, parameter in self.names)

    def _drop_changed(self) -> None:
        """A window opens, or an evaluation between windows: what has changed does not stay."""
        self.staying -= self.changed

    def resident(self) -> set[str]:
        """The units that are there or on their way."""
        return {name for name, unit in self.units.items() if unit.unsharded or unit.in_flight}

    def _compute(self, block: Block) -> None:
        self._tick()
        window = self.context.window
        if self.reading != "F" or window.following is None:
            return
        plan = self.plan(window.following.program)
        resident = self.context.stats.resident_bytes
        expected = sum(self.sizes[name] for name in self.staying)
        if window.cursor:
            expected = plan.resident[window.cursor - 1]
        assert resident == sum(self.sizes[name] for name in self.resident())
        assert resident <= expected, f"{resident} B resident at event {window.cursor - 1}"
        self._check_kept(self.blocks[block])

    def _check_kept(self, name: str) -> None:
        """Where the unit of this name computes: the gradients that wait are as planned."""
        window, stats = self.context.window, self.context.stats
        if window.following is None:
            return
        program, position = window.following.program, window.cursor - 1
        if position < 0 or program.trace[position].unit != name:
            return  # in the middle of an event, or between two
        plan, kept = self.plan(program), stats.kept_gradient_bytes
        problem = f"{kept} B of gradients wait at event {position}, {program.trace[position]}"
        assert kept <= plan.kept[position], problem
        if stats.switches == self.at_begin.switches:
            assert kept == plan.kept[position], problem
        if plan.capacity is not None:
            assert stats.resident_bytes + kept <= plan.capacity[position], "beyond the capacity"

    def _read(self, weight: torch.Tensor) -> None:
        assert not isinstance(weight, DTensor), "computes with a sharded parameter"
        assert weight.untyped_storage().size(), "computes with a parameter that is freed"
        self.weights[id(weight)] = weight
        if self.reading == "B":
            unit = unit_of_tensor(weight)
            assert unit is not None
            if not self.setup.recomputes:  # a recomputation reads before its unit's event
                self._check_kept(unit.spec.name)
            self._tick()

    def _tick(self) -> None:
        if self.fuse:
            self.fuse -= 1
            if not self.fuse:
                raise Planned("by intention")

    def plan(self, program: Program) -> Plan:
        """What a program promises."""
        if program not in self.plans:
            self.plans[program] = Plan(program)
        return self.plans[program]

    def _check_between_calls(self) -> None:
        context, window = self.context, self.context.window
        assert window.is_open == bool(self.window)
        assert window.cursor == self.reference.events, "one cursor: one step for each event"
        held = [name for name, unit in self.units.items() if unit.holds]
        assert not held, f"in use between calls: {held}"
        resident = self.resident()
        following = window.following
        planned = set() if window.is_open else self.staying
        if following is not None:
            planned = self.plan(following.program).after(window.cursor, self.staying)
        # What another known program would have kept from before is gathered when it is needed.
        # A registered program takes a parent's use to last until those of all its children.
        at_most = self.setup.mode == "registration" or (
            context.stats.switches > self.at_begin.switches
        )
        assert resident <= planned if at_most else resident == planned, (
            f"resident {sorted(resident)}, the program has {sorted(planned)}"
        )
        assert context.stats.resident_bytes == sum(self.sizes[name] for name in resident)
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                assert isinstance(parameter, DTensor), f"{name} is shown unsharded between calls"
        if not resident:
            full = [w for w in self.weights.values() if w.untyped_storage().size()]
            assert not full, "full parameters are left although no unit is resident"

    def _check_counts(self, program: Program, spent: Stats) -> None:
        context, outline = self.context, self.plan(program).outline
        assert context.stats.kept_gradient_bytes == 0
        assert spent.gathers == spent.on_demand_gathers + spent.prefetched_gathers
        # Once all contributions of a microbatch, or of the window, are in.
        trainable = {name for name, unit in self.units.items() if unit.spec.trainable}
        reduced = {each for each in self.reference.contributions if each[0] in trainable}
        least = {(name, 0) for name, _ in reduced}
        if self.setup.reduce_gradients == "per_window":
            reduced = least
        elif self.setup.reduce_gradients == "per_backward":
            least = reduced
        planned = len(outline.reductions)
        assert len(least) <= planned <= len(reduced), (sorted(reduced), str(program))
        if spent.recorded_windows:
            return
        if spent.switches:
            return
        assert spent.dropped_gathers == 0, spent
        assert spent.reductions == planned, (spent, str(program))
        peak = max(self.plan(program).kept)
        assert context.stats.peak_kept_gradient_bytes == peak, str(program)
        first = outline.carried - self.staying
        gathers = len(outline.gathers) + len(first)
        # A recomputation gathers what no event has brought in.
        most = gathers + self.recomputations
        assert gathers <= spent.gathers <= most, (spent, str(program))
        if not self.recomputations:
            demanded = sum(each.gathered == each.waited for each in outline.gathers)
            assert spent.on_demand_gathers == demanded + len(first), (spent, str(program))
            size = outline.bytes_gathered + sum(self.sizes[name] for name in first)
            assert spent.bytes_gathered == size, (spent, str(program))

    def _check_gradients(self) -> None:
        totals = self.reference.totals
        for (name, parameter), theirs in zip(self.names, self.reference.parameters, strict=True):
            found, wanted = parameter.grad, totals.get(theirs)
            if wanted is not None:
                assert found is not None, f"{name} has no gradient"
                _assert_close(_full(found), wanted, name)
            elif found is not None:
                unit = self.unit_of[id(parameter)].spec.name
                assert unit in self.reference.with_backward, f"{name} has a gradient: {found}"
                assert not _full(found).any(), f"{name} has a gradient: {found}"


_FIELDS = dataclasses.fields(Stats)


def _difference(after: Stats, before: Stats) -> Stats:
    return Stats(**{f.name: getattr(after, f.name) - getattr(before, f.name) for f in _FIELDS})


def _assert_close(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    if not torch.equal(found, expected):  # which is much faster, and mostly enough
        torch.testing.assert_close(found, expected, msg=f"{name}: {{}}".format)


def _full(tensor: Any) -> torch.Tensor:
    assert isinstance(tensor, DTensor), "shows an unsharded parameter or gradient"
    full: torch.Tensor = tensor.full_tensor().detach()
    return full


def _unit_sizes(chunk: Block) -> list[int]:
    """Bytes of the units of a chunk that is not sharded yet."""
    sizes = []
    for block in _blocks(chunk):
        if block.node.unit:
            inner = {
                parameter
                for below in _blocks(block)
                if below.node.unit and below is not block
                for parameter in below.parameters()
            }
            own = set(block.parameters()) - inner
            sizes.append(sum(parameter.nbytes for parameter in own))
    return [size for size in sizes if size]


def _blocks(chunk: Block) -> Iterator[Block]:
    return (module for module in chunk.modules() if isinstance(module, Block))


def _shard(block: Block, mesh: DeviceMesh) -> None:
    for child in block.inner:
        assert isinstance(child, Block)
        _shard(child, mesh)
    if block.node.unit:
        fully_shard(block, mesh=mesh)


def run_scenarios(scenarios: Sequence[Scenario], mesh: DeviceMesh | None = None) -> None:
    """Run each scenario from its first call to its last, over all ranks if no mesh is given."""
    mesh = mesh or cpu_mesh(dist.get_world_size())
    with _quiet():
        for scenario in scenarios:
            run = Run(scenario.setup, mesh)
            for position, call in enumerate(scenario.calls.split()):
                try:
                    run.play(call)
                except BaseException as error:
                    error.add_note(f"at call {position}, {call}, of {scenario}")
                    raise


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of reentrant checkpoints, of windows that diverge and of aborts."""
    logger = logging.getLogger("fsdp_fx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
            yield
    finally:
        logger.setLevel(level)


# Drawing

Calls = tuple[str, ...]


@st.composite
def orders(draw: st.DrawFn, setup: Setup, beginning: Calls = ()) -> Calls:
    """The calls of one whole window, in a legal order, after those of ``beginning``."""
    chunks = len(setup.chunks)
    calls = list(beginning)
    done = set(beginning)
    begun = 1 + max((int(call[-1]) for call in beginning), default=0)
    if setup.mode == "registration":
        return (*(f"c{place}F0" for place in range(chunks)), f"c{chunks - 1}B0")
    microbatches = max(begun, draw(st.sampled_from((1, 2, 2, MICROBATCHES))))
    last = chunks - 1

    def legal(place: int, phase: str, microbatch: int) -> bool:
        if f"c{place}{phase}{microbatch}" in done:
            return False
        if phase == "F":
            return place == 0 or f"c{place - 1}F{microbatch}" in done
        if place == last:
            return f"c{last}F{microbatch}" in done
        return not setup.connected and f"c{place + 1}B{microbatch}" in done

    while True:
        choices = [
            f"c{place}{phase}{microbatch}"
            for microbatch in range(microbatches)
            for phase, places in (("B", range(chunks)), ("F", reversed(range(chunks))))
            for place in places
            if legal(place, phase, microbatch)
        ]
        if not choices:
            return tuple(calls)
        call = draw(st.sampled_from(choices)) if len(choices) > 1 else choices[0]
        calls.append(call)
        done.add(call)


@st.composite
def interrupted(draw: st.DrawFn, setup: Setup, calls: Calls) -> Calls:
    """The calls, with something in between that must leave the window alone."""
    result = list(calls)
    for _ in range(draw(st.sampled_from((0, 0, 1, 2)))):
        result.insert(draw(st.integers(0, len(calls))), draw(interruptions(setup)))
    return tuple(result)


@st.composite
def interruptions(draw: st.DrawFn, setup: Setup) -> str:
    kind = draw(st.sampled_from((*EVALUATIONS, "close", "look", "step")))
    if kind not in EVALUATIONS:
        return kind
    place = draw(st.integers(0, len(setup.chunks) - 1))
    return f"c{place}E:{kind}{draw(st.sampled_from(('', '', '', '!1', '!2', '!3')))}"


ENDINGS: tuple[Calls, ...] = (
    ("close", "step", "zero"),
    ("close", "close", "step", "zero"),
    ("close", "step"),
    ("close", "zero"),
    ("close",),
)


@st.composite
def endings(draw: st.DrawFn) -> Calls:
    """The close of a window, and what may come before the next one."""
    calls = draw(st.sampled_from(ENDINGS))
    alteration = draw(alterations() | st.none())
    return calls if alteration is None else (*calls, alteration)


@st.composite
def alterations(draw: st.DrawFn) -> str:
    """A parameter is frozen, trained again, or changed."""
    return f"{draw(st.sampled_from(('flip', 'change', 'load')))}{draw(st.integers(0, 11))}"


@st.composite
def windows(draw: st.DrawFn, setup: Setup, calls: Calls) -> Calls:
    """The window of these calls, once or several times, to its close and what follows that."""
    result: Calls = ()
    for _ in range(draw(st.sampled_from((1, 2, 2)))):
        result += draw(interrupted(setup, calls)) + draw(endings())
    return result


@st.composite
def abandoned(draw: st.DrawFn, setup: Setup, calls: Calls) -> Calls:
    """A window that is begun with these calls, and aborted or lost to an exception."""
    stop = draw(st.integers(1, len(calls)))
    some = draw(interrupted(setup, calls[:stop]))
    fuse = draw(st.integers(0, 6))
    if not fuse:
        return (*some, "abort")
    # If the call has fewer computations than that, nothing has been lost.
    return (*some[:-1], f"{some[-1].partition('!')[0]}!{fuse}", "abort")


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Whole scenarios of recorded mode."""
    setup = draw(setups(chunks=3))
    known = [draw(orders(setup))]
    calls = draw(windows(setup, known[0]))
    for _ in range(draw(st.integers(0, 3))):
        match draw(st.sampled_from(("again", "other", "abandoned"))):
            case "again":
                calls += draw(windows(setup, draw(st.sampled_from(known))))
            case "abandoned":
                calls += draw(abandoned(setup, draw(st.sampled_from(known))))
            case "other":
                before = draw(st.sampled_from(known))
                known.append(draw(orders(setup, before[: draw(st.integers(0, len(before)))])))
                calls += draw(windows(setup, known[-1]))
    return Scenario(setup, " ".join(calls))


# Machines


@pytest.fixture(scope="module")
def alone() -> Iterator[DeviceMesh]:
    """A mesh of this process alone, over a real group."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield cpu_mesh(1)
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)
        clean_up()


def _settings(examples: int | None, default: int, **more: Any) -> settings:
    """Always the same examples, unless a number was asked for."""
    return settings(
        max_examples=examples or default,
        derandomize=examples is None,
        print_blob=True,
        report_multiple_bugs=False,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        **more,
    )


class RandomWindows(RuleBasedStateMachine):
    """Windows of known and of new orders on one model, in recorded mode."""

    mesh: DeviceMesh
    mode: Any = "recorded"
    known: Bundle[Calls] = Bundle("known")

    @initialize(target=known, data=st.data())
    def begin(self, data: st.DataObject) -> Calls:
        setup = data.draw(setups(self.mode), label="setup")
        self.played: list[str] = []
        self.run = Run(setup, self.mesh)
        calls = data.draw(orders(setup))
        self.play(data.draw(windows(setup, calls), label="calls"))
        return calls

    def play(self, calls: Calls) -> None:
        for call in calls:
            self.played.append(call)
            try:
                self.run.play(call)
            except BaseException as error:
                error.add_note(
                    f"at the last call of {Scenario(self.run.setup, ' '.join(self.played))}"
                )
                raise

    @rule(calls=known, data=st.data())
    def repeat(self, calls: Calls, data: st.DataObject) -> None:
        self.play(data.draw(windows(self.run.setup, calls), label="calls"))

    @rule(target=known, before=known, data=st.data())
    def vary(self, before: Calls, data: st.DataObject) -> Calls:
        keep = data.draw(st.integers(0, len(before)))
        calls = data.draw(orders(self.run.setup, before[:keep]))
        self.play(data.draw(windows(self.run.setup, calls), label="calls"))
        return calls

    @rule(calls=known, data=st.data())
    def abandon(self, calls: Calls, data: st.DataObject) -> None:
        self.play(data.draw(abandoned(self.run.setup, calls), label="calls"))

    @rule(data=st.data())
    def interrupt(self, data: st.DataObject) -> None:
        """Between windows."""
        self.play((data.draw(interruptions(self.run.setup), label="call"),))

    @rule(call=st.sampled_from(("abort", "zero")) | alterations())
    def between(self, call: str) -> None:
        self.play((call,))


def _run_machine(machine: type[RandomWindows], config: settings) -> None:
    with _quiet():
        run_state_machine_as_test(machine, settings=config)


@pytest.mark.slow
@pytest.mark.timeout(600)  # of which hypothesis takes 300 at most to shrink what failed
def test_random_windows_equal_the_reference(alone: DeviceMesh, examples: int | None) -> None:
    class Machine(RandomWindows):
        mesh = alone

    _run_machine(Machine, _settings(examples, 200, stateful_step_count=3))


@pytest.mark.slow
@pytest.mark.timeout(600)  # of which hypothesis takes 300 at most to shrink what failed
def test_random_steps_in_registration_mode_equal_the_reference(
    alone: DeviceMesh, examples: int | None
) -> None:
    class Machine(RandomWindows):
        mesh = alone
        mode = "registration"

    _run_machine(Machine, _settings(examples, 70, stateful_step_count=3))


@pytest.mark.slow
@pytest.mark.timeout(600)  # of which hypothesis takes 300 at most to shrink what failed
def test_random_windows_on_two_ranks_equal_the_reference(
    ranks: RankPools, examples: int | None
) -> None:
    drawn: list[Scenario] = []

    @_settings(examples and max(1, examples // 10), 40, phases=[Phase.generate], database=None)
    @given(scenarios())
    def draw(scenario: Scenario) -> None:
        drawn.append(scenario)

    draw()
    assert drawn
    for start in range(0, len(drawn), 40):
        ranks(2).run(run_scenarios, drawn[start : start + 40], timeout=200)


# What was found

BOTH_WINDOWS = "c0F0 c0F1 c0B0 c0B1 close step zero"

FOUND = {
    "a checkpoint around a part of a unit": Scenario(
        Setup(
            (
                Node(
                    own="first",
                    unit=True,
                    children=(Node(own="first"),),
                    uses=(Use(0, "non-reentrant"), Use(0, "reentrant")),
                ),
            ),
            input_gradient=True,
        ),
        f"{BOTH_WINDOWS} {BOTH_WINDOWS}",
    ),
    "another order of backwards, left for fewer microbatches": Scenario(
        Setup(
            (
                Node(
                    own="first",
                    unit=True,
                    children=(Node(own="first", unit=True),),
                    uses=(Use(child=0), Use(child=0, dropped=True)),
                ),
                Node(own="first", unit=True),
            ),
        ),
        "c0F0 c1F0 c1B0 c0F1 c1F1 c1B1 c0B1 c0F2 c0B0 c1F2 c1B2 c0B2 close step zero "
        "c0F0 c1F0 c1B0 c0F1 c1F1 c1B1 c0B0 c0B1 close",
    ),
    "a registration window in which no unit computes": Scenario(
        Setup(
            (Node(unit=True, children=(Node(own="first", unit=True),)),),
            mode="registration",
            connected=True,
            input_gradient=True,
        ),
        "c0F0 c0B0 close step zero",
    ),
    "a use that is not in the loss, of a unit that is": Scenario(
        Setup(
            (
                Node(
                    children=(Node(own="first", unit=True),),
                    uses=(Use(0, dropped=True), Use(0)),
                ),
            ),
        ),
        f"{BOTH_WINDOWS} {BOTH_WINDOWS}",
    ),
    "a use that is not in the loss, of a unit whose gradient is kept": Scenario(
        Setup(
            (
                Node(
                    children=(Node(own="first", unit=True),),
                    uses=(Use(0, dropped=True), Use(0)),
                ),
            ),
            memory_budget=EVERYTHING,
            reduce_gradients="planned",
        ),
        f"{BOTH_WINDOWS} {BOTH_WINDOWS}",
    ),
}


# What the draws seldom reach: each is the only one to notice a certain fault.

SELDOM = {
    "a frozen unit that stays is changed, by an optimizer too, trained, and frozen again": Scenario(
        Setup(
            (
                Node(
                    children=(Node(own="first", unit=True), Node(own="first", unit=True)),
                    uses=(Use(0), Use(1)),
                ),
            ),
            memory_budget=EVERYTHING,
            keep_frozen=True,
        ),
        f"{BOTH_WINDOWS.removesuffix(' zero')} flip0 flip1 {BOTH_WINDOWS} {BOTH_WINDOWS} change0 "
        f"c0E:eval {BOTH_WINDOWS} load1 {BOTH_WINDOWS} flip0 {BOTH_WINDOWS} flip0 {BOTH_WINDOWS} "
        f"c0F0 c0B0 close c0E:no_grad {BOTH_WINDOWS} c0F0 abort {BOTH_WINDOWS}",
    ),
    "an abort while contributions are missing": Scenario(
        Setup(
            (
                Node(
                    children=(Node(own="first", unit=True),),
                    uses=(Use(0, dropped=True), Use(0)),
                ),
            ),
        ),
        f"c0F0 c0F1 c0B0 abort {BOTH_WINDOWS}",
    ),
    "a unit that is recomputed and has no backward": Scenario(
        Setup(
            (
                Node(
                    own="first",
                    unit=True,
                    children=(
                        Node(
                            own="last",
                            children=(Node(own="first", unit=True),),
                            uses=(Use(0, dropped=True),),
                        ),
                    ),
                    uses=(Use(0, "reentrant"), Use(0, "non-reentrant")),
                ),
            ),
            forward_prefetch=0,
            backward_prefetch=0,
        ),
        f"{BOTH_WINDOWS} {BOTH_WINDOWS}",
    ),
}


@pytest.mark.parametrize("name", [*FOUND, *SELDOM])
def test_kept_scenarios_equal_the_reference(name: str, alone: DeviceMesh) -> None:
    run_scenarios([(FOUND | SELDOM)[name]], alone)
