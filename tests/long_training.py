"""One training run whose scheduling changes all the time, compared at every step.

Two chunks of a small transformer are trained from one start to one end, their optimizer with
them, while who schedules them changes: one context after the other with other options, each
released before the next adopts the same modules, and FSDP2 alone in between. Within the life
of a context the order, and the number of microbatches, change; windows have evaluations in
their middle, or are aborted there and begun anew.

After every step losses, gradients and weights are those of an unsharded model that has made
the same steps. Memory at rest is the same after each step of a stretch, and so is what there
is of tensors, events and objects of this package: what a window leaves behind, the next one
would add to.
"""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fsdp_fx
from fsdp_fx.compile.backend import fsdp_fx as backend
from fsdp_fx.occupancy import outline_of
from fsdp_fx.program import Program
from training import ORDERS, POLICIES, Action, loss_of

VOCABULARY = 509  # odd: the units of what has so many rows cannot be gathered in place
LEARNING_RATE, MOMENTUM = 0.02, 0.9
# Relative by norm: of gradients, and of all else.
TOLERANCES = {"fp32": (1e-4, 1e-4), "bf16": (6e-2, 1e-2)}

Data = list[tuple[torch.Tensor, torch.Tensor]]  # of each microbatch, [ranks, rows, length]


# The model


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.before(x)).view(rows, length, self.heads, -1).transpose(1, 2)
        attended = F.scaled_dot_product_attention(*qkv.chunk(3, dim=-1), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Chunk(nn.Module):
    """Layers, an embedding before the first, a head after the last."""

    def __init__(self, size: Size, first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width) if first else None
        self.layers = nn.ModuleList(Layer(size.width, size.heads) for _ in range(size.layers))
        self.head = None if first else nn.Linear(size.width, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


@dataclass(frozen=True)
class Size:
    """How large the model and its data are.

    Args:
        width: of the model.
        layers: of each chunk.
        rows: sequences in a microbatch of one rank.
        length: of each.
    """

    width: int
    layers: int
    rows: int
    length: int

    @property
    def heads(self) -> int:
        return max(1, self.width // 64)

    @property
    def layer_elements(self) -> int:
        return sum(p.numel() for p in Layer(self.width, self.heads).parameters())


# What is to happen


@dataclass(frozen=True)
class Stretch:
    """Steps of one order of events, whose memory is compared.

    Args:
        order: of :data:`training.ORDERS`, or "whole": no graph ends at a chunk.
        microbatches: of each step.
        steps: how many; of the first three, the second has an evaluation in its middle, and
            the third is aborted and begun anew.
    """

    order: str
    microbatches: int
    steps: int

    @property
    def actions(self) -> list[Action]:
        return list(ORDERS[self.order](2, self.microbatches)) if self.order != "whole" else []


@dataclass(frozen=True)
class Life:
    """Who schedules some stretches.

    Args:
        options: of a context; None: FSDP2 alone. A budget in float, or an option that says
            how far to look ahead, counts layers.
        stretches: in their order.
    """

    options: dict[str, Any] | None
    stretches: tuple[Stretch, ...]

    def context(self, size: Size, policy: str) -> fsdp_fx.FSDPContext:
        """A context with these options."""
        options = {"mode": "recorded", **(self.options or {})}
        itemsize = (POLICIES[policy].param_dtype or torch.float32).itemsize
        for name, scale in (
            ("memory_budget", itemsize * size.layer_elements),
            ("forward_prefetch", size.layer_elements),
            ("backward_prefetch", size.layer_elements),
        ):
            if isinstance(options.get(name), float):
                options[name] = int(options[name] * scale)
        return fsdp_fx.FSDPContext(**options)


EVERYTHING = 1 << 40


def lives(stretches: tuple[Stretch, ...], device: str, policy: str) -> list[Life]:
    """Contexts of every kind, and FSDP2 alone between them."""
    half = {"kept_gradient_dtype": torch.bfloat16} if policy == "bf16" else {}
    planned = {"reduce_gradients": "planned"}
    timed = {"forward_prefetch": "timed", "backward_prefetch": "timed"}
    ahead = {"forward_prefetch": 2.5, "backward_prefetch": 1.5}
    none = {"forward_prefetch": 0, "backward_prefetch": 0}
    fills = device == "cuda"  # a CPU does not say how much memory is allocated
    whole = (Stretch("whole", 1, stretches[0].steps),)
    alone = (Stretch("one_by_one", stretches[0].microbatches, stretches[0].steps),)
    return [
        Life({}, stretches),
        Life({"memory_budget": 0, **none}, stretches),
        Life({"memory_budget": 3.2, **planned}, stretches),
        Life(None, alone),
        Life({"memory_budget": "auto" if fills else 6.5, **planned}, stretches),
        Life({"mode": "registration", "memory_budget": 2.1}, whole),
        Life({"memory_budget": "auto+1MiB" if fills else 1.1, **planned, **timed}, stretches),
        Life({"memory_budget": EVERYTHING, **planned, **ahead}, stretches),
        Life({"memory_budget": 1.2, "reduce_gradients": "per_window", **ahead}, stretches),
        Life({"memory_budget": EVERYTHING, **planned, **half}, stretches),
    ]


# The reference


class Whole:
    """The same chunks, unsharded, on the data of every rank.

    Args:
        chunks: copied.
        policy: in which arithmetic.
        rank: whose losses are wanted.
        part: which shard is this rank's.
        parts: how many shards there are.
        repeats: whether there is one rank alone, see `gpu/slow_ranks.py`: the whole of a
            parameter is then the shard of that rank over and over.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        policy: str,
        rank: int,
        part: int,
        parts: int,
        repeats: bool,
    ) -> None:
        self.chunks = [copy.deepcopy(chunk) for chunk in chunks]
        self._working = [
            copy.deepcopy(chunk).to(POLICIES[policy].param_dtype or torch.float32)
            for chunk in chunks
        ]
        self._copies = [p for chunk in self._working for p in chunk.parameters()]
        self._rank, self._part, self._parts, self._repeats = rank, part, parts, repeats
        self.parameters = [p for chunk in self.chunks for p in chunk.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, LEARNING_RATE, MOMENTUM)

    def shard(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part, as FSDP2 cuts a parameter."""
        return whole.chunk(self._parts)[self._part]

    @torch.no_grad()
    def _refresh(self) -> None:
        torch._foreach_copy_(self._copies, self.parameters)

    @torch.no_grad()
    def evaluate(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the model makes of some rows now."""
        self._refresh()
        return self._forward(tokens)

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        value = tokens
        for chunk in self._working:
            value = chunk(value)
        return value

    def accumulate(self, data: Data) -> list[torch.Tensor]:
        """Sets the gradients of a step; the losses of this rank."""
        self._refresh()
        losses = []
        for tokens, targets in data:
            if self._repeats:
                tokens, targets = (each[self._rank :][:1] for each in (tokens, targets))
            outputs = self._forward(tokens.flatten(0, 1)).unflatten(0, tokens.shape[:2])
            # Each rank has as many rows: the mean over all of them is that of the ranks.
            loss_of(outputs.flatten(0, 1), targets.flatten(0, 1)).backward()
            own = 0 if self._repeats else self._rank
            losses.append(loss_of(outputs[own].detach(), targets[own]))
            for parameter, copied in zip(self.parameters, self._copies, strict=True):
                assert copied.grad is not None
                gradient, copied.grad = copied.grad.float(), None
                if self._repeats:
                    gradient = self._folded(gradient)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return losses

    def _folded(self, gradient: torch.Tensor) -> torch.Tensor:
        parts = gradient.chunk(self._parts)
        mean = torch.zeros_like(parts[0])
        for part in parts:
            mean[: len(part)] += part / self._parts
        return torch.cat([mean] * self._parts)[: len(gradient)]

    def update(self) -> None:
        """The step of the optimizer."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def _repeated(chunk: nn.Module, ranks: int) -> None:
    with torch.no_grad():
        for parameter in chunk.parameters():
            first = parameter.chunk(ranks)[0]
            parameter.copy_(torch.cat([first] * ranks)[: len(parameter)])


# The run


class Intended(Exception):
    """Raised in the middle of a window."""


def _raise(*_: object) -> None:
    raise Intended


@dataclass
class Training:
    """The run of one rank.

    Args:
        device: of this rank.
        mesh: to shard over; of two dimensions, to replicate and to shard over.
        size: of the model.
        policy: of :data:`training.POLICIES`.
        rank: of this process.
        alone: whether the other ranks are made of this one.
        pause: called before every call of a chunk, on the stream of compute.
    """

    device: torch.device
    mesh: DeviceMesh
    size: Size
    policy: str
    rank: int
    alone: bool = False
    pause: Callable[[], None] = lambda: None
    step: int = 0
    aborts: int = 0
    worst: dict[str, float] = field(default_factory=dict)
    rest: int | None = None

    def __post_init__(self) -> None:
        torch.manual_seed(5)
        chunks = [Chunk(self.size, first).to(self.device) for first in (True, False)]
        if self.alone:
            for chunk in chunks:
                _repeated(chunk, self.mesh.size())
        last = self.mesh.ndim - 1
        part, parts = self.mesh.get_local_rank(last), self.mesh.size(last)
        self.whole = Whole(chunks, self.policy, self.rank, part, parts, self.alone)
        self.chunks: list[Any] = chunks
        for chunk in self.chunks:
            for each in (*chunk.layers, chunk):
                fully_shard(each, mesh=self.mesh, mp_policy=POLICIES[self.policy])
        self.parameters = [p for chunk in chunks for p in chunk.parameters()]
        self.names = [name for chunk in chunks for name, _ in chunk.named_parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, LEARNING_RATE, MOMENTUM)
        self.context: fsdp_fx.FSDPContext | None = None
        self.callables: list[Any] = self.chunks
        self.compiler: str | None = None
        self.known: set[tuple[str, int]] = set()

    # Lives and stretches

    def live(self, life: Life, compiler: str | None) -> None:
        """Trains under one context, and gives the modules back.

        Args:
            life: what is to happen.
            compiler: of regions; None: nothing is compiled. What is compiled is kept: the
                next context is served by the graphs of the one before.
        """
        self.known, self.compiler = set(), compiler
        if life.options is not None:
            self.context = life.context(self.size, self.policy)
            self.context.adopt(*self.chunks)
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
        for stretch in life.stretches:
            self.go(stretch)
        context, self.context, self.callables = self.context, None, self.chunks
        if context is None:
            return
        ran = {(graph.chunk, graph.direction) for graph in context.compiled_graphs}
        both = {(chunk, way) for chunk in ("c0", "c1") for way in ("forward", "backward")}
        assert ran >= both if compiler is not None else not ran, context.explain()
        context.release()
        gone = weakref.ref(context)
        del context
        # There is what there was: shards, and the optimizer's state.
        size = self.look().size
        assert gone() is None
        assert self.rest in (None, size), f"{size} bytes after {life}, {self.rest} before"
        self.rest = size

    def go(self, stretch: Stretch) -> None:
        """The steps of a stretch; what is at rest after each is what was after the first two."""
        peaks: list[int] = []
        sizes: list[int] = []
        before: Rest | None = None
        for index in range(stretch.steps):
            peak = self.one_step(stretch, index)
            if index == 1:
                before = self.look()
            if index >= 1 and self.device.type == "cuda":
                sizes.append(_requested("current"))
            if index not in (0, 1, 2):  # with what belongs to no step in them
                peaks.append(peak)
        if before is not None:
            after = self.look()
            sizes = [before.size, *sizes, after.size]
            assert len(set(sizes)) == 1, f"bytes between the steps of {stretch}: {sizes}"
            grown = after.things - before.things
            assert not grown, f"{stretch} leaves behind {grown}"
        third = len(peaks) // 3
        if third:
            assert max(peaks[-third:]) <= max(peaks[:third]), f"peaks of {stretch}: {peaks}"
        self.known.add((stretch.order, stretch.microbatches))

    # A step

    def one_step(self, stretch: Stretch, index: int) -> int:
        """Trains a step and compares it; the peak of its memory."""
        context, data = self.context, self.data(stretch.microbatches)
        recorded = context is not None and context.mode == "recorded"
        actions = stretch.actions
        if recorded and index == 2:
            self.abort(actions, data)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = copy.copy(context.stats) if context is not None else None
        if stretch.order == "whole":
            losses = self.run_whole(data)
        else:
            middle = len(actions) // 2 if context is not None and index == 1 else None
            losses = self.run(actions, data, evaluate_at=middle)
        if recorded:
            assert context is not None
            context.finish_grad_sync()
        peak = self.peak()
        if recorded:
            self.check_counts(stretch, index, before)
        self.compare(losses, data)
        self.step += 1
        return peak

    def data(self, microbatches: int) -> Data:
        generator = torch.Generator().manual_seed(self.step)
        shape = (2, microbatches, self.mesh.size(), self.size.rows, self.size.length)
        tokens = torch.randint(0, VOCABULARY, shape, generator=generator).to(self.device)
        return list(zip(*tokens, strict=True))

    def run_whole(self, data: Data) -> list[torch.Tensor]:
        losses = []
        for tokens, targets in data:
            value = tokens[self.rank]
            for call in self.callables:
                self.pause()
                value = call(value)
            loss = loss_of(value, targets[self.rank])
            self.pause()
            loss.backward()
            losses.append(loss.detach())
        return losses

    def run(
        self,
        actions: Sequence[Action],
        data: Data,
        evaluate_at: int | None = None,
        fail_at: tuple[int, str] | None = None,
    ) -> list[torch.Tensor]:
        """The forwards and backwards of a step, as pipeline stages would have them.

        Args:
            actions: in their order.
            data: of each microbatch.
            evaluate_at: before which of them the model is evaluated.
            fail_at: before or in which of them an exception is raised, and where.
        """
        inputs: dict[tuple[int, int], torch.Tensor] = {}
        outputs: dict[tuple[int, int], torch.Tensor] = {}
        losses = []
        for place, (kind, chunk, microbatch) in enumerate(actions):
            if place == evaluate_at:
                self.evaluate(data)
            where = fail_at[1] if fail_at is not None and fail_at[0] == place else None
            if where == "between":
                raise Intended
            here, after = (chunk, microbatch), (chunk + 1, microbatch)
            self.pause()
            if kind == "F":
                if chunk == 0:
                    inputs[here] = data[microbatch][0][self.rank]
                else:
                    inputs[here] = outputs[chunk - 1, microbatch].detach().requires_grad_()
                with _failing(self.chunks[chunk].layers[-1], where):
                    outputs[here] = self.callables[chunk](inputs[here])
                continue
            output = outputs.pop(here)
            if where == "backward":
                output.register_hook(_raise)
            if chunk == 1:
                loss = loss_of(output, data[microbatch][1][self.rank])
                losses.append(loss.detach())
                loss.backward()
            else:
                output.backward(inputs.pop(after).grad)
        return losses

    @torch.no_grad()
    def evaluate(self, data: Data) -> None:
        """The model without gradients, in the middle of a window."""
        tokens = data[0][0][self.rank]
        value = tokens
        for call in self.callables:
            value = call(value)
        expected = self.whole.evaluate(tokens)
        self.check("evaluation", ["output"], [value], [expected])

    def abort(self, actions: Sequence[Action], data: Data) -> None:
        """Begins a window that an exception ends, elsewhere every time."""
        assert self.context is not None
        draw = random.Random(self.aborts)
        # Every other time late, when there are gradients of earlier microbatches.
        place = draw.randrange(2 * len(actions) // 3 if self.aborts % 2 else 0, len(actions))
        where = "between"
        if actions[place][0] == "B":
            where = draw.choice(("between", "backward"))
        elif self.compiler is None:
            where = draw.choice(("between", "forward"))
        try:
            self.run(actions, data, fail_at=(place, where))
        except Intended:
            pass
        else:
            raise AssertionError(f"no exception {where} action {place}")
        self.context.abort()
        self.aborts += 1
        left = [n for n, p in zip(self.names, self.parameters, strict=True) if p.grad is not None]
        assert not left, f"after abort() {left} have gradients"

    # What is checked

    def check_counts(self, stretch: Stretch, index: int, before: Any) -> None:
        """A window that is known gathers and reduces what its program says."""
        context = self.context
        assert context is not None
        stats, program = context.stats, context.program
        assert isinstance(program, Program)
        assert stats.resident_bytes == stats.kept_gradient_bytes == 0
        known = (stretch.order, stretch.microbatches) in self.known
        new = stats.recorded_windows - before.recorded_windows
        where = f"step {index} of {stretch}"
        assert new == (index == 0 and not known), f"{new} new programs at {where}"
        if index < 2:  # another order before, or an evaluation in the middle
            return
        outline = outline_of(program)
        found = tuple(
            getattr(stats, name) - getattr(before, name)
            for name in ("replayed_windows", "gathers", "reductions")
        )
        expected = 1, len(outline.gathers), len(outline.reductions)
        assert found == expected, f"replays, gathers and reductions of {where}"

    def compare(self, losses: Sequence[torch.Tensor], data: Data) -> None:
        """Losses, gradients and weights are the reference's; both optimizers step."""
        expected = self.whole.accumulate(data)
        self.check("losses", ["loss"] * len(losses), losses, expected)
        gradients = []
        for parameter in self.parameters:
            gradient: Any = parameter.grad
            assert isinstance(gradient, DTensor)
            gradients.append(gradient.to_local())
        whole: list[Any] = [p.grad for p in self.whole.parameters]
        self.check("gradient", self.names, gradients, [self.whole.shard(g) for g in whole])
        del gradients, gradient, whole
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.whole.update()
        shards: list[Any] = self.parameters
        weights = [self.whole.shard(p.detach()) for p in self.whole.parameters]
        self.check("weight", self.names, [p.detach().to_local() for p in shards], weights)

    def check(
        self,
        what: str,
        names: Sequence[str],
        found: Sequence[torch.Tensor],
        expected: Sequence[torch.Tensor],
    ) -> None:
        """Each of what was found is what was expected, but for the rounding."""
        wanted = [each.float() for each in expected]
        norms = torch.stack([each.norm() for each in wanted])
        counts = torch.tensor([each.numel() for each in wanted], device=norms.device)
        # Of what is small beside the others, as biases that began as zeros, little is known.
        common = norms.norm() * (counts / counts.sum()).sqrt()
        off = torch.stack([(a.float() - b).norm() for a, b in zip(found, wanted, strict=True)])
        errors = (off / (norms + common)).tolist()
        allowed = TOLERANCES[self.policy][what != "gradient"]
        for name, error in zip(names, errors, strict=True):
            assert error <= allowed, f"step {self.step}: {what} of {name} is off by {error:.2g}"
            self.worst[what] = max(self.worst.get(what, 0.0), error)

    # Memory

    def peak(self) -> int:
        """The most bytes since the counter was set back; 0 where none are counted."""
        return _requested("peak") if self.device.type == "cuda" else 0

    def look(self) -> Rest:
        """What there is between two steps."""
        gc.collect()
        objects = gc.get_objects()
        counts = Counter(map(type, objects))
        kinds = (torch.Tensor, torch.Event, torch.Stream, torch.cuda.Event, fx.Node, fx.Graph)
        things = {
            f"{kind.__module__}.{kind.__qualname__}": count
            for kind, count in counts.items()
            if issubclass(kind, kinds) or str(kind.__module__).startswith("fsdp_fx")
        }
        if self.device.type == "cuda":
            return Rest(_requested("current"), Counter(things))
        tensors = {kind for kind in counts if issubclass(kind, torch.Tensor)} - {FakeTensor}
        sizes: dict[int, int] = {}
        for each in objects:
            if type(each) in tensors:
                storage = (each.to_local() if isinstance(each, DTensor) else each).untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
        return Rest(sum(sizes.values()), Counter(things))


@dataclass(frozen=True)
class Rest:
    """What there is between two steps.

    Args:
        size: bytes of tensors: those that the allocator has given out, or on the CPU those
            that Python knows.
        things: how many there are of what a window might leave behind, by type.
    """

    size: int
    things: Counter[str]


def _requested(which: str) -> int:
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])


class _failing:
    """A forward of ``module`` inside raises, if that is where."""

    def __init__(self, module: nn.Module, where: str | None) -> None:
        self._module, self._where = module, where

    def __enter__(self) -> None:
        if self._where == "forward":
            self._handle = self._module.register_forward_pre_hook(_raise)

    def __exit__(self, *_: object) -> None:
        if self._where == "forward":
            self._handle.remove()
