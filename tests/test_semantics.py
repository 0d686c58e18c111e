"""What the schedule means, rule by rule, on real ranks and from eager hooks.

Every window is compared with the same chunks whole: gradients, then weights after an
optimizer step; and every unit must be sharded at its end.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp_fx import FSDPContext, IncompleteWindowError, Program
from fsdp_fx.program import operation
from fsdp_fx.residency import Stats
from fsdp_fx.units import Unit, find_sharded_modules
from models import DIM, Block, Chunk, cpu_mesh, linears, shard
from ranks import RankPools

LINEAR = 4 * (DIM * DIM + DIM)  # bytes of a square linear

_bodies: dict[tuple[str, str], Callable[..., None]] = {}


def on_two_ranks(**cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a function that runs on each of two ranks, for every combination of cases.

    They share one job: starting one takes longer than most of them.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        job = _job(body, cases)

        def test(ranks: RankPools) -> None:
            ranks(2).run(_perform, *job, timeout=120.0)

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return decorate


def on_ranks(
    *sizes: int, **cases: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like :func:`on_two_ranks`, once for each of these numbers of ranks."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        job = _job(body, cases)

        @pytest.mark.parametrize("world_size", sizes)
        def test(ranks: RankPools, world_size: int) -> None:
            ranks(world_size).run(_perform, *job, timeout=120.0)

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return decorate


def _job(
    body: Callable[..., None], cases: dict[str, Iterable[Any]]
) -> tuple[str, str, list[dict[str, Any]]]:
    """What :func:`_perform` needs to find the body and run it on every combination."""
    _bodies[body.__module__, body.__name__] = body
    combinations = [dict(zip(cases, each, strict=True)) for each in product(*cases.values())]
    return body.__module__, body.__name__, combinations


def _perform(module: str, name: str, combinations: list[dict[str, Any]]) -> None:
    importlib.import_module(module)
    for arguments in combinations:
        try:
            _bodies[module, name](**arguments)
        except BaseException as error:
            error.add_note(f"case: {arguments}")
            raise


def data(seed: int, microbatch: int) -> torch.Tensor:
    """A microbatch of every rank."""
    generator = torch.Generator().manual_seed(1000 * seed + microbatch)
    return torch.randn(dist.get_world_size(), 3, DIM, generator=generator)


def mean_square(output: Any) -> torch.Tensor:
    return output.float().square().mean()


class Twin:
    """Sharded chunks on a context, and the same chunks whole, driven alike.

    A window is written as its calls: ``F0`` is the forward of microbatch 0 through every
    chunk, ``c1B0`` the backward of microbatch 0 through chunk 1 only. Autograd graphs end
    at the chunks, as a pipeline's do.
    """

    def __init__(
        self,
        *chunks: nn.Module,
        units: Any = nn.Linear,
        policy: MixedPrecisionPolicy | None = None,
        loss: Callable[[Any], torch.Tensor] = mean_square,
        **options: Any,
    ) -> None:
        self.whole = [copy.deepcopy(chunk) for chunk in chunks]
        self.policy = policy or MixedPrecisionPolicy()
        mesh = cpu_mesh(dist.get_world_size())
        self.chunks: list[Any] = [shard(c, units, mesh=mesh, mp_policy=self.policy) for c in chunks]
        self.loss = loss
        self.context = FSDPContext(**{"mode": "recorded", **options})
        self.context.adopt(*chunks)
        self.optimizers = [torch.optim.SGD(p, 0.1) for p in (self.parameters(), self.expected())]
        self.seed = 0
        self.forget()

    def forget(self) -> None:
        """Drop what the calls so far left: outputs, and what the reference has to run."""
        self.inputs: dict[tuple[int, int], torch.Tensor] = {}
        self.outputs: dict[tuple[int, int], Any] = {}
        self.done: list[int] = []

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for chunk in self.chunks for parameter in chunk.parameters()]

    def expected(self) -> list[nn.Parameter]:
        return [parameter for chunk in self.whole for parameter in chunk.parameters()]

    def both(self) -> list[Any]:
        """The chunks of both sides."""
        return [*self.chunks, *self.whole]

    # Calls

    def run(self, calls: str) -> None:
        """Run the calls on the sharded side."""
        for call in calls.split():
            match = re.fullmatch(r"(?:c(\d))?([FB])(\d)", call)
            assert match, call
            microbatch = int(match[3])
            places = list(range(len(self.chunks))) if match[1] is None else [int(match[1])]
            for place in places if match[2] == "F" else reversed(places):
                (self.forward if match[2] == "F" else self.backward)(place, microbatch)

    def forward(self, place: int, microbatch: int) -> None:
        if place == 0:
            x = data(self.seed, microbatch)[dist.get_rank()]
        else:
            x = self.outputs[place - 1, microbatch].detach().requires_grad_()
        self.inputs[place, microbatch] = x
        self.outputs[place, microbatch] = self.chunks[place](x)

    def backward(self, place: int, microbatch: int, **options: Any) -> None:
        output = self.outputs[place, microbatch]
        if place == len(self.chunks) - 1:
            self.loss(output).backward(**options)
            self.done.append(microbatch)
        else:
            output.backward(self.inputs[place + 1, microbatch].grad, **options)

    # Comparisons

    def check(self) -> None:
        """Compare the window just closed; step the optimizers; begin with new data."""
        for microbatch in self.done:
            for x in data(self.seed, microbatch):
                working = self.whole
                if self.policy.param_dtype is not None:
                    working = [copy.deepcopy(c).to(self.policy.param_dtype) for c in self.whole]
                    x = x.to(self.policy.param_dtype)
                for chunk in working:
                    x = chunk(x)
                loss = self.loss(x) / dist.get_world_size()
                if working is self.whole:
                    loss.backward()
                    continue
                parameters = [p for chunk in working for p in chunk.parameters()]
                for p, gradient in zip(
                    self.expected(), torch.autograd.grad(loss, parameters), strict=True
                ):
                    gradient = gradient.to(self.policy.reduce_dtype or gradient.dtype)
                    p.grad = gradient if p.grad is None else p.grad + gradient
        self.compare(lambda parameter: parameter.grad)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.compare(lambda parameter: parameter)
        assert at_rest(self.context)
        self.seed += 1
        self.forget()

    def compare(self, read: Callable[[Any], Any]) -> None:
        names = [name for chunk in self.chunks for name, _ in chunk.named_parameters()]
        for name, mine, theirs in zip(names, self.parameters(), self.expected(), strict=True):
            assert isinstance(mine, DTensor), name
            found, wanted = read(mine), read(theirs)
            assert (found is None) == (wanted is None), (name, found, wanted)
            if found is not None:
                torch.testing.assert_close(found.full_tensor(), wanted, msg=f"{name}: {{}}".format)

    def window(self, calls: str) -> Stats:
        """Run, close and compare a window; returns what its counters went up by."""
        with counting(self.context) as spent:
            self.run(calls)
            self.context.finish_grad_sync()
        self.check()
        return spent


@contextlib.contextmanager
def counting(context: FSDPContext) -> Iterator[Stats]:
    """Counters of the block, once it has ended."""
    before, spent = dataclasses.replace(context.stats), Stats()
    yield spent
    for field in dataclasses.fields(Stats):
        name = field.name
        setattr(spent, name, getattr(context.stats, name) - getattr(before, name))


def at_rest(context: FSDPContext) -> bool:
    """Whether the cursor is at the start, and every unit unused and sharded.

    But for those that the program keeps for the next window.
    """
    carried = context.program.carried if context.program is not None else ()
    return context.window.cursor == 0 and not any(
        unit.in_flight or unit.holds or (unit.unsharded and unit.spec.name not in carried)
        for unit in context.units
    )


def resident(context: FSDPContext) -> list[str]:
    """Names of the units that are unsharded or on their way."""
    return [unit.spec.name for unit in context.units if unit.unsharded or unit.in_flight]


def events(context: FSDPContext) -> str:
    """The trace, without the chunk's name where there is but one."""
    assert context.trace is not None
    single = len({unit.chunk for unit in context.trace.units}) == 1
    texts = (str(event) for event in context.trace)
    return " ".join(
        (text.removeprefix("c0.") if single else text).replace(" ", "") for text in texts
    )


def count(program: Program | None, kind: str) -> int:
    """How many nodes of a kind the program has."""
    assert program is not None
    return sum(operation(node) == kind for node in program.graph_module.graph.nodes)


def assert_replayed(twin: Twin, spent: Stats, on_demand: int = 1) -> None:
    """The window followed its program: its gathers and reductions, and one on demand."""
    program = twin.context.program
    assert (spent.windows, spent.replayed_windows, spent.recorded_windows) == (1, 1, 0), spent
    assert spent.divergences == spent.switches == spent.dropped_gathers == 0, spent
    assert spent.gathers == spent.frees == count(program, "gather"), (spent, str(program))
    assert spent.reductions == count(program, "reduce"), (spent, str(program))
    assert spent.on_demand_gathers == on_demand, (spent, str(program))
    assert spent.prefetched_gathers == spent.gathers - on_demand


@contextlib.contextmanager
def warnings_of(logger: str = "fsdp_fx") -> Iterator[list[str]]:
    """The messages that are logged as warnings."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger(logger).removeHandler(handler)


@contextlib.contextmanager
def refused(kind: type[Exception], pattern: str) -> Iterator[None]:
    """Like pytest.raises, and the message is one line."""
    with pytest.raises(kind, match=pattern) as error:
        yield
    assert "\n" not in str(error.value)


class Arrivals:
    """Notes for every event, before the package's own hooks run, whether its unit is there."""

    def __init__(self, twin: Twin) -> None:
        self.seen: list[tuple[str, bool]] = []
        units = {unit.spec.name: unit for unit in twin.context.units}
        for index, chunk in enumerate(twin.chunks):
            for path, module in find_sharded_modules(chunk):
                self._watch(module, units[f"c{index}.{path}".rstrip(".")])

    def _watch(self, module: Any, unit: Unit) -> None:
        def note(phase: str) -> None:
            self.seen.append((f"{unit.spec.name} {phase}", unit.unsharded or unit.in_flight))

        def before(module: nn.Module, args: Any) -> None:
            note("F")

        def after(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda gradient: note("B"))

        module.register_forward_pre_hook(before, prepend=True)
        module.register_forward_hook(after, prepend=True)

    def check(self, context: FSDPContext) -> None:
        """Only the window's first event found its unit absent."""
        assert context.trace is not None
        assert [name for name, _ in self.seen] == [f"{e.unit} {e.phase}" for e in context.trace]
        assert [there for _, there in self.seen] == [False] + [True] * (len(self.seen) - 1), (
            self.seen
        )


# Windows


@on_two_ranks()
def test_window_closes_only_at_finish_grad_sync() -> None:
    twin = Twin(linears(1))
    twin.run("F0 F1 B0 F2 B1 B2")
    assert twin.context.trace is None
    twin.context.finish_grad_sync()
    assert events(twin.context) == "0F0 0F1 0B0 0F2 0B1 0B2"
    microbatches = [event.microbatch for event in twin.context.trace or ()]
    assert microbatches == [0, 1, 0, 2, 1, 2]
    twin.check()
    assert_replayed(twin, twin.window("F0 F1 B0 F2 B1 B2"))


@on_two_ranks()
def test_finishing_again_in_the_same_window_does_nothing() -> None:
    twin = Twin(linears(1), linears(1))
    twin.context.finish_grad_sync()
    for _ in range(3):  # recorded, replayed, replayed
        twin.run("F0 B0")
        number = twin.context.stats.windows
        for _chunk in twin.chunks:
            twin.context.finish_grad_sync()
            assert twin.context.stats.windows == number + 1
        twin.check()
    assert len(twin.context.programs) == 1


@on_two_ranks()
def test_window_without_a_backward_is_refused_and_can_be_completed() -> None:
    twin = Twin(linears(1), linears(1))
    for expected in ("", r"; the next event expected is c0\.0 B0 \(event 5\)"):
        twin.run("c0F0 c1F0 c1B0 c0F1 c1F1")
        problem = f"the backward of chunk c0, microbatch 0 is missing{expected}"
        with refused(IncompleteWindowError, problem):
            twin.context.finish_grad_sync()
        twin.run("c0B0")
        with refused(IncompleteWindowError, "the backward of chunk c0, microbatch 1 is missing"):
            twin.context.finish_grad_sync()
        assert len(twin.context.programs) == twin.context.stats.windows
        assert twin.context.window.is_open
        twin.run("c1B1 c0B1")
        twin.context.finish_grad_sync()
        twin.check()
    assert events(twin.context) == "c0.0F0 c1.0F0 c1.0B0 c0.0F1 c1.0F1 c0.0B0 c1.0B1 c0.0B1"


@on_two_ranks()
def test_refusal_in_a_replay_names_the_next_event_expected() -> None:
    twin = Twin(linears(2))
    twin.window("F0 F1 B0 B1")
    twin.run("F0 F1 B0")
    with refused(
        IncompleteWindowError,
        "microbatch 1 is missing; the next event expected is c0.2 B1 .event 6.",
    ):
        twin.context.finish_grad_sync()
    twin.run("B1")
    twin.context.finish_grad_sync()
    twin.check()
    assert twin.context.stats.replayed_windows == 1


@on_two_ranks()
def test_window_cannot_be_closed_inside_a_forward_or_a_backward() -> None:
    twin = Twin(linears(2))
    twin.window("F0 B0")
    close = twin.context.finish_grad_sync
    messages: list[str] = []

    def close_too_early(*_: Any) -> None:
        with pytest.raises(IncompleteWindowError) as error:
            close()
        messages.append(str(error.value))

    handle = twin.chunks[0][2].register_forward_hook(close_too_early)
    twin.run("F0")
    handle.remove()
    twin.outputs[0, 0].register_hook(close_too_early)
    twin.run("B0")
    close()
    twin.check()
    assert "the forward of chunk c0, microbatch 0 did not return" in messages[0]
    assert "finish_grad_sync() was called inside of an autograd pass" in messages[1]
    assert twin.context.stats.replayed_windows == 1


@on_two_ranks()
def test_backward_through_a_closed_window_is_refused() -> None:
    twin = Twin(linears(1))
    twin.run("F0")
    twin.backward(0, 0, retain_graph=True)
    twin.context.finish_grad_sync()
    with refused(RuntimeError, "microbatch 0, a forward of window 0, but that window is closed"):
        twin.run("B0")


@on_two_ranks()
def test_accumulated_gradients_are_the_sum_over_microbatches_and_chunks() -> None:
    twin = Twin(Chunk(1), Chunk(1), units=(Block, Chunk))
    calls = "c0F0 c0F1 c1F0 c1F1 c1B0 c0F2 c1F2 c1B1 c0B0 c1B2 c0B1 c0B2"
    recorded = twin.window(calls)
    assert recorded.on_demand_gathers == recorded.gathers == len(twin.context.trace or ())
    assert_replayed(twin, twin.window(calls))
    assert_replayed(twin, twin.window(calls))


# Exceptions


def fail_once(module: nn.Module, after: int) -> None:
    """Make the forward of ``module`` raise once, after it has run so many times."""
    runs = [0]

    def hook(*_: Any) -> None:
        runs[0] += 1
        if runs[0] == after + 1:
            raise ArithmeticError("by intention")

    module.register_forward_hook(hook)


@on_two_ranks(windows=[0, 1])
def test_retry_with_half_the_batch_after_abort_equals_the_reference(windows: int) -> None:
    twin = Twin(linears(2), linears(2))
    for _ in range(windows):
        twin.window("F0 B0 F1 B1 F2 B2 F3 B3")
    fail_once(twin.chunks[1][2], after=1)
    with pytest.raises(ArithmeticError):
        twin.run("F0 B0 F1 B1")
    with refused(IncompleteWindowError, "an exception crossed the forward of"):
        twin.context.finish_grad_sync()
    assert len(twin.context.programs) == windows
    assert all(isinstance(parameter, DTensor) for parameter in twin.parameters())
    twin.context.abort()
    assert at_rest(twin.context)
    assert all(parameter.grad is None for parameter in twin.parameters())
    twin.forget()
    spent = twin.window("F0 B0 F1 B1")
    assert spent.recorded_windows == 1
    assert twin.context.stats.aborts == 1
    assert_replayed(twin, twin.window("F0 B0 F1 B1"))


@on_two_ranks(windows=[0, 1])
def test_retry_after_an_exception_in_a_backward_equals_the_reference(windows: int) -> None:
    twin = Twin(linears(3))
    for _ in range(windows):
        twin.window("F0 B0")
    hidden: list[torch.Tensor] = []
    handle = twin.chunks[0][1].register_forward_hook(lambda *args: hidden.append(args[2]))
    twin.run("F0")
    handle.remove()

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError("by intention")

    hidden[0].register_hook(fail)
    with pytest.raises(ArithmeticError):
        twin.run("B0")
    with refused(IncompleteWindowError, "an autograd pass has not ended"):
        twin.context.finish_grad_sync()
    twin.context.abort()
    assert at_rest(twin.context)
    twin.forget()
    twin.window("F0 B0")
    assert_replayed(twin, twin.window("F0 B0"))


@on_two_ranks()
def test_abort_warns_once_of_gradients_that_hold_a_part_of_the_window() -> None:
    twin = Twin(linears(2))
    twin.run("F0 B0")
    twin.context.finish_grad_sync()  # and the gradients stay
    twin.run("F1 B1")
    with warnings_of() as messages:
        twin.context.abort()
    assert len(messages) == 1
    assert "2 units (c0.0, ...)" in messages[0]
    assert "zero_grad() before the retry" in messages[0]
    twin.optimizers[0].zero_grad()
    twin.forget()
    twin.window("F0 B0")


@on_two_ranks()
def test_backward_through_an_aborted_window_is_refused() -> None:
    twin = Twin(linears(1))
    twin.run("F0")
    twin.context.abort()
    with refused(RuntimeError, "closed or aborted"):
        twin.run("B0")
    twin.context.abort()
    twin.forget()
    twin.window("F0 B0")


# Divergence


class Branching(nn.Module):
    """Three linears, of which one is used only if ``flag`` is set."""

    def __init__(self, branch_last: bool) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = (nn.Linear(DIM, DIM) for _ in range(3))
        self.branch_last = branch_last
        self.flag = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc1(x)
        if self.flag and not self.branch_last:
            x = self.fc2(x)
        x = self.fc3(torch.tanh(x))
        return self.fc2(x) if self.flag and self.branch_last else x


@on_two_ranks(last=[False, True])
def test_divergence_gives_a_right_step_one_message_and_a_new_trace(last: bool) -> None:
    twin = Twin(Branching(last))

    def window(flag: bool) -> tuple[Stats, list[str]]:
        for chunk in twin.both():
            chunk.flag = flag
        with warnings_of() as messages, counting(twin.context) as spent:
            twin.run("F0 B0")
            assert not messages  # the message comes at the close
            assert resident(twin.context) == []  # the wrong prefetch too
            twin.context.finish_grad_sync()
        twin.check()
        return spent, messages

    window(True)
    spent, messages = window(True)
    assert_replayed(twin, spent)
    assert not messages

    spent, messages = window(False)
    assert spent.divergences == spent.recorded_windows == 1
    assert spent.replayed_windows == 0
    assert spent.dropped_gathers == 1
    assert len(messages) == 1
    found = "expected c0.fc2 F0, found c0.fc3 " + ("B" if last else "F")
    assert found in messages[0]
    assert twin.context.fallbacks
    assert found in twin.context.explain()
    assert events(twin.context) == "fc1F0 fc3F0 fc3B0 fc1B0"
    assert_replayed(twin, window(False)[0])

    spent, messages = window(True)
    assert spent.switches == spent.replayed_windows == 1
    assert spent.recorded_windows == spent.divergences == 0
    assert not messages
    assert_replayed(twin, window(True)[0])
    spent, _ = window(False)
    assert spent.switches == 1
    assert spent.recorded_windows == 0
    assert len(twin.context.programs) == 2


@on_two_ranks()
def test_another_number_of_microbatches_is_recorded_once_and_then_known() -> None:
    twin = Twin(linears(2))
    long, short, longer = "F0 B0 F1 B1 F2 B2", "F0 B0", "F0 B0 F1 B1 F2 B2 F3 B3"
    for calls in (long, short, longer):
        with warnings_of() as messages:
            spent = twin.window(calls)
        assert spent.recorded_windows == 1
        assert len(messages) == (calls != long)
        assert_replayed(twin, twin.window(calls))
    for calls in (short, long, short, longer, long):
        with warnings_of() as messages:
            spent = twin.window(calls)
        assert spent.recorded_windows == 0, calls
        assert spent.replayed_windows == 1
        assert not messages
        assert len(twin.context.trace or ()) == 2 * len(calls.split())
    assert len(twin.context.programs) == 3


# Evaluation


def no_grad(context: FSDPContext, chunk: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return chunk(x)


def inference(context: FSDPContext, chunk: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return chunk(x).clone()


def evaluation(context: FSDPContext, chunk: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with context.evaluation():
        return chunk(x).detach()


def eval_mode(context: FSDPContext, chunk: nn.Module, x: torch.Tensor) -> torch.Tensor:
    chunk.eval()
    try:
        return chunk(x).detach()
    finally:
        chunk.train()


def input_gradient(context: FSDPContext, chunk: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    with context.evaluation():
        output = chunk(x)
    torch.autograd.grad(output.sum(), x)
    return output.detach()


def failing(context: FSDPContext, chunk: Any, x: torch.Tensor) -> torch.Tensor:
    def fail(*_: Any) -> None:
        raise ArithmeticError("by intention")

    with torch.no_grad():
        handle = chunk.blocks[1].register_forward_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            chunk(x)
        handle.remove()
        return chunk(x)


EVALUATIONS: dict[str, Callable[[FSDPContext, Any, torch.Tensor], torch.Tensor]] = {
    f.__name__: f for f in (no_grad, inference, evaluation, eval_mode, input_gradient, failing)
}


@on_two_ranks(mode=["recorded", "registration"], kind=list(EVALUATIONS))
def test_evaluation_leaves_cursor_trace_and_residency_as_they_were(kind: str, mode: str) -> None:
    twin = Twin(Chunk(), Chunk(), units=(Block, Chunk), mode=mode)
    context = twin.context

    def evaluate() -> None:
        before = resident(context), context.window.cursor, context.window.number, context.trace
        x = data(7, 7)[dist.get_rank()]
        expected = x
        for chunk, whole in zip(twin.chunks, twin.whole, strict=True):
            x = EVALUATIONS[kind](context, chunk, x)
            with torch.no_grad():
                whole.load_state_dict(full_state(chunk))
                expected = whole(expected)
        torch.testing.assert_close(x, expected)
        assert not any(unit.holds for unit in context.units)
        after = resident(context), context.window.cursor, context.window.number, context.trace
        assert after == before

    evaluate()  # shape inference
    assert at_rest(context)
    assert not context.window.is_open
    assert context.stats.windows == 0
    for step in range(3):
        with counting(context) as spent:
            x = data(step, 0)[dist.get_rank()]
            for chunk in twin.chunks:
                x = chunk(x)
                evaluate()
            mean_square(x).backward()
            if mode == "recorded":
                evaluate()
            context.finish_grad_sync()
        twin.done = [0]
        twin.check()
        assert spent.windows == 1
        assert spent.dropped_gathers == 0
        evaluate()
        assert at_rest(context)
        if step or mode == "registration":
            assert spent.replayed_windows == 1
            assert spent.prefetched_gathers == count(context.program, "gather") - 1
    assert len(context.programs) == 1
    assert context.stats.recorded_windows == (mode == "recorded")


def full_state(chunk: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.full_tensor() for name, tensor in chunk.state_dict().items()}


@on_two_ranks()
def test_evaluation_gathers_on_demand_and_frees_after_each_use() -> None:
    twin = Twin(linears(3))
    twin.window("F0 B0")
    seen: list[list[str]] = []
    for layer in twin.chunks[0]:
        layer.register_forward_pre_hook(lambda *_: seen.append(resident(twin.context)))
    with counting(twin.context) as spent, torch.no_grad():
        twin.chunks[0](torch.ones(2, DIM))
    assert seen == [["c0.0"], [], ["c0.2"], [], ["c0.4"], []]
    assert spent.on_demand_gathers == spent.frees == 3
    assert spent.prefetched_gathers == 0


@on_two_ranks()
def test_backward_of_an_evaluation_gathers_on_demand_and_adds_its_gradients() -> None:
    twin = Twin(linears(2))
    for _ in range(3):
        with twin.context.evaluation():
            twin.run("F1")
        twin.run("F0 B0 B1")
        twin.context.finish_grad_sync()
        twin.check()
        assert events(twin.context) == "0F0 2F0 2B0 0B0"
    assert twin.context.stats.replayed_windows == 2


# Residency and lookahead


@on_two_ranks()
def test_second_backward_of_a_unit_gathers_again_unless_it_was_the_next_event() -> None:
    for prefetch, gathers in ((0, 4), (None, 1)):
        twin = Twin(linears(1), forward_prefetch=prefetch, backward_prefetch=prefetch)
        assert twin.window("F0 F1 B0 B1").gathers == 4
        spent = twin.window("F0 F1 B0 B1")
        assert spent.gathers == gathers
        assert_replayed(twin, spent, on_demand=gathers)


SCHEDULES = {
    "chunk after chunk": "c0F0 c0F1 c1F0 c1F1 c1B0 c1B1 c0B0 c0B1",
    "microbatch after microbatch": "F0 B0 F1 B1",
    "interleaved": "c0F0 c1F0 c0F1 c1B0 c1F1 c0B0 c1B1 c0B1",
    "backward of the first, then of the last": "F0 c1B0 c0F1 c1F1 c1B1 c0B1 c0B0",
}


@on_two_ranks(kind=["nested units", "units side by side"], calls=list(SCHEDULES.values()))
def test_next_unit_is_there_before_its_own_hook_at_every_change_of_phase_and_chunk(
    calls: str, kind: str
) -> None:
    if kind == "nested units":
        twin = Twin(Chunk(), Chunk(), units=(Block, Chunk))
    else:
        twin = Twin(linears(2), linears(2))
    twin.window(calls)
    arrivals = Arrivals(twin)
    assert_replayed(twin, twin.window(calls))
    arrivals.check(twin.context)


@on_two_ranks()
def test_last_event_of_a_window_prefetches_nothing() -> None:
    twin = Twin(linears(3), linears(3))
    twin.window("F0 B0")
    twin.run("F0 B0")
    assert resident(twin.context) == []
    twin.context.finish_grad_sync()
    twin.check()
    assert twin.context.stats.dropped_gathers == 0


UNIT = DIM * DIM + DIM  # elements of a square linear


BUDGETS = [  # forward, backward, gathers of a replay, and how many of them on demand
    (None, None, 5, 1),  # the last unit stays for its backward
    (0, 0, 6, 6),
    (None, 0, 5, 3),
    (0, None, 6, 4),
    (UNIT, UNIT, 4, 1),  # a unit's own next use costs nothing
    (2 * UNIT, 2 * UNIT, 3, 1),
    (UNIT - 1, UNIT - 1, 5, 5),  # not even one unit fits
]


@on_two_ranks(budget=BUDGETS)
def test_prefetch_budget_decides_how_many_gathers_are_on_demand(
    budget: tuple[int | None, int | None, int, int],
) -> None:
    forward, backward, gathers, on_demand = budget
    twin = Twin(linears(3), forward_prefetch=forward, backward_prefetch=backward)
    assert twin.window("F0 B0").on_demand_gathers == 6
    spent = twin.window("F0 B0")
    assert spent.gathers == gathers
    assert_replayed(twin, spent, on_demand=on_demand)


@on_two_ranks()
def test_prefetch_budget_in_elements_lets_that_many_units_be_resident() -> None:
    peaks = []
    for units in (0, 1, 2):
        twin = Twin(linears(4), forward_prefetch=units * UNIT)
        twin.window("F0 B0")
        seen: list[int] = []
        for layer in twin.chunks[0]:
            layer.register_forward_pre_hook(
                lambda *_, twin=twin, seen=seen: seen.append(len(resident(twin.context)))
            )
        twin.window("F0 B0")
        peaks.append(seen[0])
        assert twin.context.stats.resident_bytes == 0
        assert twin.context.stats.peak_resident_bytes == max(units + 1, 2) * LINEAR
    assert peaks == [1, 2, 3]


# Recomputation


class Checkpointed(nn.Module):
    """Layers that are recomputed in the backward, in groups."""

    def __init__(self, count: int, group: int, reentrant: bool) -> None:
        super().__init__()
        self.fc = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(count))
        self.group = group
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.requires_grad:  # a reentrant checkpoint needs it
            x = x.clone().requires_grad_()
        for start in range(0, len(self.fc), self.group):
            x = checkpoint(self.part, start, x, use_reentrant=self.reentrant)
        return x

    def part(self, start: int, x: torch.Tensor) -> torch.Tensor:
        for layer in self.fc[start : start + self.group]:
            x = torch.tanh(layer(x))
        return x


@on_two_ranks(reentrant=[True, False], group=[1, 2], calls=["F0 B0", "F0 F1 B0 B1"])
def test_recomputation_is_no_event_and_leaves_every_unit_sharded(
    calls: str, group: int, reentrant: bool
) -> None:
    twin = Twin(Checkpointed(2, group, reentrant))
    twin.window(calls)
    assert events(twin.context).startswith("fc.0F0 fc.1F0")
    assert len(twin.context.trace or ()) == 2 * len(calls.split())
    for _ in range(2):
        spent = twin.window(calls)
        assert spent.replayed_windows == 1
        assert spent.divergences == spent.dropped_gathers == 0
        assert spent.gathers == spent.frees
        # The recomputation of a group begins with its first unit, which no event expects
        # there; the unit stays for its backward.
        recomputed = 0 if group == 1 else calls.count("B")
        planned = count(twin.context.program, "gather")
        assert spent.prefetched_gathers + spent.on_demand_gathers <= planned + recomputed
        assert spent.on_demand_gathers <= 1 + recomputed


class Squared(nn.Module):
    """A checkpointed block of which only ``fc1`` is a unit."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(DIM, DIM)
        self.scale = nn.Tanh()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()

        def part(x: torch.Tensor) -> torch.Tensor:
            return self.scale(self.fc1(x))

        first = checkpoint(part, x, use_reentrant=self.reentrant)
        return first * checkpoint(part, x, use_reentrant=self.reentrant)


@on_two_ranks(reentrant=[True, False])
def test_second_recomputation_of_a_unit_gathers_it_again(reentrant: bool) -> None:
    for prefetch in (None, 0):
        twin = Twin(Squared(reentrant), forward_prefetch=prefetch, backward_prefetch=prefetch)
        for _ in range(3):
            twin.window("F0 B0")
        assert events(twin.context) == "fc1F0 fc1F1 fc1B0 fc1B1"
        assert twin.context.stats.divergences == 0


# What is not in the loss, used again, or frozen


class Sum(nn.Module):
    """Uses ``fc`` twice, and ``unused`` for an output that is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.unused = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.unused(x)
        return self.fc(torch.tanh(self.fc(x)))


@on_two_ranks(reduce=["per_backward", "per_window"])
def test_unit_used_twice_is_reduced_once_and_one_not_in_the_loss_is_freed(reduce: str) -> None:
    twin = Twin(Sum(), reduce_gradients=reduce)
    recorded = twin.window("F0 F1 B0 B1")
    assert events(twin.context) == ("unusedF0 fcF0 fcF1 unusedF1 fcF2 fcF3 fcB0 fcB1 fcB2 fcB3")
    spent = twin.window("F0 F1 B0 B1")
    assert_replayed(twin, spent)
    expected = 2 if reduce == "per_backward" else 1
    assert recorded.reductions == spent.reductions == expected
    assert twin.chunks[0].unused.weight.grad is None


@on_two_ranks(mode=["recorded", "registration"])
def test_backward_of_a_part_of_the_units_frees_what_it_touched(mode: str) -> None:
    """Of two outputs only one is in the loss: the other's units are freed with the pass."""
    twin = Twin(Heads(), mode=mode, loss=lambda output: output[0].square().mean())
    for _ in range(3):
        twin.run("F0 B0")
        if mode == "recorded":
            assert resident(twin.context) == []
            twin.context.finish_grad_sync()
        twin.check()
    assert events(twin.context) == "trunkF0 leftF0 rightF0 leftB0 trunkB0"


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.trunk(x))
        return self.left(x), self.right(x)


@on_two_ranks()
def test_second_backward_through_a_retained_graph_adds_its_gradients() -> None:
    twin = Twin(linears(2))
    for step in range(3):
        twin.run("F0")
        twin.backward(0, 0, retain_graph=True)
        twin.backward(0, 0)
        twin.context.finish_grad_sync()
        twin.check()
        assert twin.context.stats.replayed_windows == step
    assert events(twin.context) == "0F0 2F0 2B0 0B0 2B1 0B1"


@on_two_ranks()
def test_separate_backwards_of_one_forward_add_up() -> None:
    twin = Twin(Heads(), loss=lambda output: output[0].square().mean() + output[1].sum())
    for step in range(3):
        twin.run("F0")
        left, right = twin.outputs[0, 0]
        left.square().mean().backward(retain_graph=True)
        right.sum().backward()
        twin.done = [0]
        twin.context.finish_grad_sync()
        twin.check()
        assert twin.context.stats.replayed_windows == step


class LowRank(nn.Module):
    """A frozen layer, a trainable low-rank one, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM).requires_grad_(False)
        self.low = nn.Linear(DIM, 2, bias=False)
        self.last = nn.Linear(2, DIM).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.low(self.first(x))))


@on_two_ranks(mode=["recorded", "registration"])
def test_frozen_units_are_gathered_and_freed_but_never_reduced(mode: str) -> None:
    twin = Twin(LowRank(), mode=mode)
    calls = "F0 F1 B0 B1" if mode == "recorded" else "F0 B0"
    microbatches = calls.count("B")
    with counting(twin.context) as spent:
        twin.run(calls)
        assert resident(twin.context) == []
        twin.context.finish_grad_sync()
    twin.check()
    assert spent.reductions == microbatches
    spent = twin.window(calls)
    assert_replayed(twin, spent)
    assert spent.reductions == microbatches
    assert {event.unit for event in twin.context.trace or () if event.phase == "B"} == {
        "c0.low",
        "c0.last",
    }


# Outputs of any kind


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    extra: dict[str, list[torch.Tensor]]
    note: str = "a note"


class Structured(nn.Module):
    """A unit whose output is not a tensor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc = nn.Linear(DIM, DIM)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        x = self.fc(x)
        return {
            "dict": {"x": x, "n": 1},
            "list": [x, x.detach()],
            "tuple": (None, x),
            "nested": {"a": [{"b": (x,)}]},
            "dataclass": Output(x, {"l": [x.detach()]}),
        }[self.kind]


def first_tensor(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Output):
        return output.hidden
    values = output.values() if isinstance(output, dict) else output
    return first_tensor(next(value for value in values if value is not None))


class Before(nn.Linear):
    """A unit of its own, where not every linear is one."""


class Wrapped(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.before, self.structured = Before(DIM, DIM), Structured(kind)
        self.after = Before(DIM, DIM)

    def forward(self, x: torch.Tensor) -> Any:
        output = self.structured(self.before(x))
        return {"y": self.after(first_tensor(output)), "x": output}


@on_two_ranks(kind=["dict", "list", "tuple", "nested", "dataclass"])
def test_backward_events_of_structured_outputs_are_seen(kind: str) -> None:
    twin = Twin(
        Wrapped(kind),
        units=(Structured, Before),
        loss=lambda output: output["y"].square().mean() + first_tensor(output["x"]).mean(),
    )
    for _ in range(2):
        spent = twin.window("F0 B0")
    assert_replayed(twin, spent)
    assert events(twin.context) == "beforeF0 structuredF0 afterF0 afterB0 structuredB0 beforeB0"


class Takes(nn.Module):
    """A unit whose inputs are not tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(DIM, DIM)

    def forward(self, inputs: dict[str, Any], *, more: list[torch.Tensor]) -> torch.Tensor:
        return self.fc(inputs["x"] + more[0])


class Gives(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.takes = Before(DIM, DIM), Takes()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        return self.takes({"x": x, "n": 3}, more=[x])


@on_two_ranks()
def test_structured_inputs_end_the_backward_use_before_the_next_event() -> None:
    twin = Twin(Gives(), units=(Takes, Before))
    twin.window("F0 B0")
    trace = twin.context.trace
    assert trace is not None
    assert events(twin.context) == "beforeF0 takesF0 takesB0 beforeB0"
    assert trace.ends == (0, 1, 2, 3)


# What users see


@on_two_ranks(mode=["recorded", "registration"])
def test_optimizer_and_state_dict_between_forward_and_backward_are_of_the_sharded_view(
    mode: str,
) -> None:
    twin = Twin(Chunk(), units=(Block, Chunk), mode=mode)
    for step in range(3):
        twin.run("F0")
        twin.optimizers[0] = torch.optim.SGD(twin.parameters(), 0.1)
        saved = twin.chunks[0].state_dict()
        assert all(isinstance(tensor, DTensor) for tensor in saved.values())
        for name, tensor in twin.whole[0].state_dict().items():
            torch.testing.assert_close(saved[name].full_tensor(), tensor)
        twin.run("B0")
        twin.context.finish_grad_sync()
        twin.check()
        assert twin.context.stats.replayed_windows == step + (mode == "registration")


@on_two_ranks()
def test_weights_loaded_between_windows_are_the_ones_that_are_gathered() -> None:
    twin = Twin(linears(2))
    twin.window("F0 B0")
    start = copy.deepcopy(twin.chunks[0].state_dict())
    whole = copy.deepcopy(twin.whole[0].state_dict())
    twin.window("F0 B0")
    twin.chunks[0].load_state_dict(start)
    twin.whole[0].load_state_dict(whole)
    assert_replayed(twin, twin.window("F0 B0"))


# Registration mode


@on_two_ranks()
def test_registration_mode_knows_the_program_before_anything_runs() -> None:
    twin = Twin(Chunk(), Chunk(), units=(Block, Chunk), mode="registration")
    assert twin.context.program is None
    known: list[int] = []

    def look(*_: Any) -> None:
        known.append(count(twin.context.program, "compute"))

    handle = twin.chunks[0].blocks[0].register_forward_pre_hook(look, prepend=True)
    arrivals = Arrivals(twin)
    with counting(twin.context) as spent:
        twin.run("c0F0")
        handle.remove()
        twin.outputs.clear()
        twin.context.abort()
    assert known == [12]
    assert spent.on_demand_gathers == 1
    arrivals.seen.clear()
    for _ in range(2):
        with counting(twin.context) as spent:
            x = data(twin.seed, 0)[dist.get_rank()]
            for chunk in twin.chunks:
                x = chunk(x)
            mean_square(x).backward()
        assert at_rest(twin.context)
        assert not twin.context.window.is_open
        assert_replayed(twin, spent)
        arrivals.check(twin.context)
        arrivals.seen.clear()
        twin.context.finish_grad_sync()  # nothing is left to do
        twin.done = [0]
        twin.check()
    assert twin.context.stats.windows == 2
    assert twin.context.stats.recorded_windows == 0


@on_two_ranks()
def test_registration_mode_follows_another_order_after_one_divergence() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc1(torch.tanh(self.fc2(x)))

    twin = Twin(Backwards(), mode="registration")
    with warnings_of() as messages:
        spent = twin.window("F0 B0")
    assert spent.divergences == len(messages) == 1
    assert "expected c0.fc1 F0, found c0.fc2 F" in messages[0]
    assert events(twin.context) == "fc2F0 fc1F0 fc1B0 fc2B0"
    assert_replayed(twin, twin.window("F0 B0"))


class Penalised(nn.Module):
    """Takes the gradient of a part of itself inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(torch.tanh(self.fc1(x)).sum(), x)
        return self.fc2(torch.tanh(self.fc1(x)) + gradient)


@on_two_ranks(mode=["recorded", "registration"])
def test_autograd_pass_inside_a_forward_does_not_close_the_window(mode: str) -> None:
    twin = Twin(Penalised(), mode=mode)
    for _ in range(3):
        twin.window("F0 B0")
    assert events(twin.context) == "fc1F0 fc1B0 fc1F1 fc2F0 fc2B0 fc1B1"
    assert twin.context.stats.windows == 3
    assert twin.context.stats.recorded_windows == 1


# Reductions


POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


@on_two_ranks(policy=list(POLICIES))
def test_reducing_per_window_gives_the_same_gradients_with_fewer_reductions(policy: str) -> None:
    calls = "F0 F1 B0 F2 B1 B2"
    for reduce, reductions in (("per_backward", 3 * 3), ("per_window", 3)):
        twin = Twin(Chunk(), units=(Block, Chunk), policy=POLICIES[policy], reduce_gradients=reduce)
        for step in range(3):
            spent = twin.window(calls)
            assert spent.reductions == reductions, (reduce, spent)
            if step:
                assert_replayed(twin, spent)
        short = twin.window("F0 B0")
        assert short.divergences == 1
        assert short.reductions == 3
        assert twin.window(calls).reductions == reductions


@on_two_ranks(policy=list(POLICIES))
def test_gradients_of_several_windows_accumulate_until_they_are_cleared(policy: str) -> None:
    for reduce in ("per_backward", "per_window"):
        twin = Twin(linears(2), policy=POLICIES[policy], reduce_gradients=reduce)
        for _ in range(2):
            for calls in ("F0 B0", "F1 B1"):
                twin.run(calls)
                twin.context.finish_grad_sync()
            twin.check()
        assert twin.context.stats.recorded_windows == 1
