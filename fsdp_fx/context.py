"""FSDPContext: what a training loop holds.

One per rank, shared by every model chunk on it. It adopts the chunks, owns the
window and the programs, closes windows, and says what happened. The work is done
elsewhere: events in :mod:`fsdp_fx.window`, hooks in :mod:`fsdp_fx.eager`, planning in
:mod:`fsdp_fx.passes`, graphs in :mod:`fsdp_fx.compile`.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch import fx, nn

from .eager.hooks import ModuleHooks
from .eager.optimizers import guard_optimizers
from .library import BoundProgram, ProgramLibrary
from .passes import PassOptions, plan
from .program import Program
from .report import Fallback, GraphKey, Report
from .residency import Residency, Stats
from .trace import Trace, registration_trace
from .units import ShardedModule, Unit, attach, find_sharded_modules, require_supported
from .window import ReduceGradients, Window

__all__ = ["FSDPContext", "context_of_unit"]

logger = logging.getLogger("fsdp_fx")

Mode = Literal["registration", "recorded"]

_context_by_unit: weakref.WeakKeyDictionary[Unit, weakref.ref[FSDPContext]] = (
    weakref.WeakKeyDictionary()
)
_chunks_by_module: weakref.WeakKeyDictionary[nn.Module, weakref.ref[FSDPContext]] = (
    weakref.WeakKeyDictionary()
)


def context_of_unit(unit: Unit) -> FSDPContext | None:
    """The context that adopted ``unit``; None if it is gone."""
    reference = _context_by_unit.get(unit)
    return reference() if reference is not None else None


class FSDPContext:
    """Schedules the gathers, frees and reductions of every chunk that it adopts.

    Args:
        mode: ``"recorded"``: the first window runs with gathers on demand and is
            written down, later windows replay its program; the caller closes each
            window with :meth:`finish_grad_sync`. ``"registration"``: the order is
            taken from the module order before anything runs, and a window closes by
            itself when the outermost autograd pass ends; for ordinary training with
            one forward and one backward per step.
        forward_prefetch: how far ahead gathers are issued at forward events. None:
            exactly one event; 0: not at all; N: as many successors as fit in N
            elements.
        backward_prefetch: the same at backward events.
        reduce_gradients: ``"per_backward"`` reduces a unit's gradients after each of
            its backwards; ``"per_window"`` keeps them full, in the reduction dtype,
            and reduces after the window's last.

    Raises:
        ValueError: an unknown mode or option value.
    """

    def __init__(
        self,
        mode: Mode = "registration",
        *,
        forward_prefetch: int | None = None,
        backward_prefetch: int | None = None,
        reduce_gradients: ReduceGradients = "per_backward",
    ) -> None:
        _require_choice("mode", mode, get_args(Mode))
        _require_choice("reduce_gradients", reduce_gradients, get_args(ReduceGradients))
        _require_elements("forward_prefetch", forward_prefetch)
        _require_elements("backward_prefetch", backward_prefetch)
        if mode == "registration" and reduce_gradients != "per_backward":
            raise ValueError(
                f'reduce_gradients="{reduce_gradients}" has no effect in registration mode, where a '
                'window is one backward: use mode="recorded"'
            )
        self.mode: Mode = mode
        self._options = PassOptions(
            forward_prefetch=forward_prefetch,
            backward_prefetch=backward_prefetch,
            reduce_gradients=reduce_gradients,
        )
        self.stats = Stats()
        self._library = ProgramLibrary()
        self._window = Window(Residency(self.stats), self._library, reduce_gradients)
        self._window.closes_itself = mode == "registration"
        self._window.on_open = self._weak(FSDPContext._begin_registration)
        self._report = Report()
        self._guard: weakref.finalize[[], FSDPContext] | None = None
        self._units: dict[str, Unit] = {}
        self._chunks: dict[str, weakref.ref[nn.Module]] = {}
        self._hooks: list[ModuleHooks] = []

    def __repr__(self) -> str:
        return (
            f"FSDPContext(mode={self.mode!r}, {len(self._chunks)} chunks, "
            f"{len(self._units)} units, {len(self._library)} programs)"
        )

    # Adoption

    def adopt(self, *chunks: nn.Module) -> None:
        """Take over the scheduling of ``chunks``, in the order given.

        Args:
            chunks: modules with ``fully_shard`` calls in their trees; what
                ``torch.compile`` returned for such a module will do. May be called
                more than once, before the first forward.

        Raises:
            TypeError: not a module.
            ValueError: no FSDP2 units; adopted before; inside or around a module of
                another context; an FSDP2 option that has no effect here.
            RuntimeError: the window is open, or the process group is closed.
        """
        modules = [getattr(chunk, "_orig_mod", chunk) for chunk in chunks]
        if not modules:
            raise ValueError("adopt() needs at least one module: ctx.adopt(*chunks)")
        if not dist.is_initialized():
            raise RuntimeError(
                "the process group is closed: call torch.distributed.init_process_group() and "
                "fully_shard() before adopt()"
            )
        if self._window.is_open or self.stats.windows:
            raise RuntimeError(
                "adopt() after training has begun: adopt every chunk before the first forward"
            )
        for index, module in enumerate(modules):
            self._require_adoptable(module, modules[:index])
        for module in modules:
            self._adopt(module)
        if self._guard is None:
            self._guard = weakref.finalize(self, guard_optimizers(self._window))

    def _require_adoptable(self, module: nn.Module, before: list[nn.Module]) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"adopt() takes modules, not {type(module).__name__}")
        name = type(module).__name__
        if next(find_sharded_modules(module), None) is None:
            raise ValueError(
                f"{name} has no FSDP2 units: call fully_shard() on its layers and on it "
                "before adopt()"
            )
        for other in module.modules():
            owner = _chunks_by_module.get(other)
            if owner is None or owner() is None:
                continue
            whose = "this context" if owner() is self else "another context"
            if other is module and module in (ref() for ref in self._chunks.values()):
                raise ValueError(f"{name} is adopted already: adopt each chunk once")
            raise ValueError(
                f"{name} is or contains a module that {whose} has adopted "
                f"({type(other).__name__}): adopt each chunk once, in one context"
            )
        inside = set(module.modules())
        for earlier in before:
            if not inside.isdisjoint(earlier.modules()):
                raise ValueError(
                    f"{name} shares modules with {type(earlier).__name__}, given in the same "
                    "call: adopt each chunk once"
                )
        require_supported(module)

    def _adopt(self, module: nn.Module) -> None:
        chunk = f"c{len(self._chunks)}"
        window = self._window
        sharded, communication = attach(module, chunk, window.communication)
        window.communication = communication
        self._chunks[chunk] = weakref.ref(module)
        for each in sharded:
            for unit in each.units:
                self._units[unit.spec.name] = unit
                window.units.append(unit)
                _context_by_unit[unit] = weakref.ref(self)
        for other in module.modules():
            _chunks_by_module[other] = weakref.ref(self)
        self._install_hooks(module, chunk, sharded)

    def _install_hooks(self, chunk: nn.Module, name: str, sharded: list[ShardedModule]) -> None:
        owners: dict[nn.Module, ShardedModule] = {}
        for each in sharded:
            for reference in each.modules:
                module = reference()
                if module is not None:
                    owners[module] = each
        for module in (chunk, *(m for m in owners if m is not chunk)):
            own = owners.get(module)
            inner: dict[Unit, None] = {}
            for below in module.modules():
                each_below = owners.get(below)
                if below is not module and each_below is not None and each_below is not own:
                    inner.update(dict.fromkeys(each_below.units))
            self._hooks.append(
                ModuleHooks(
                    self._window,
                    module,
                    name,
                    own.units if own is not None else (),
                    tuple(inner),
                    own,
                    module is chunk,
                    self._weak(FSDPContext._pass_ended),
                    self._report.ran_eagerly,
                )
            )

    def _weak(self, method: Callable[[FSDPContext], None]) -> Callable[[], None]:
        """A call of ``method`` that does not keep the context alive."""
        reference = weakref.ref(self)

        def call() -> None:
            context = reference()
            if context is None:
                raise ReferenceError(
                    "the FSDPContext of these modules was deleted: keep it as long as they train"
                )
            method(context)

        return call

    # The window

    def finish_grad_sync(self) -> None:
        """Close the window.

        The current stream waits for outstanding reductions, every unit is freed, the
        cursor goes to 0. In recorded mode a new order of events becomes a program.
        Calling it again in the same window (once per chunk, as some trainers do) does
        nothing.

        Raises:
            IncompleteWindowError: a forward has had no backward, a unit is in use, or
                an exception crossed the window. The window stays open: run what is
                missing, or :meth:`abort`.
        """
        self._close(every_forward=True)

    def _close(self, every_forward: bool) -> None:
        number = self._window.number
        trace, divergence = self._window.close(every_forward)
        if divergence is not None:
            self._report.fall_back(
                Fallback(
                    f"window {number}", "left its program and was recorded as a new one", divergence
                )
            )
        if trace is not None:
            self._commit(trace)

    def _commit(self, trace: Trace) -> None:
        program = plan(trace, self._options)
        self._library.add(BoundProgram(program, self._units))
        logger.info("recorded %d events; the next window replays them", len(trace))

    def _pass_ended(self) -> None:
        # A pass inside a forward (a gradient as part of the model) ends no window.
        window = self._window
        if self.mode == "registration" and window.is_open and not window.current:
            self._close(every_forward=False)

    def _begin_registration(self) -> None:
        if self.mode == "registration" and not len(self._library):
            self._commit(registration_trace([unit.spec for unit in self._units.values()]))

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Forwards inside are evaluations: no event, no cursor move, no lookahead.

        A chunk in eval mode, or entered with gradients off, is one without this. A
        backward through such a forward is not an event either.
        """
        with self._window.evaluation():
            yield

    def abort(self) -> None:
        """Discard the window after an exception.

        Every unit is freed and reset, gradients of the window are cleared, the cursor
        goes to 0; the programs stay. Units that had gradients before the window began
        keep a partial sum: one warning names them.
        """
        tainted = self._window.abort()
        for hooks in self._hooks:
            hooks.forget()
        if tainted:
            logger.warning(
                "abort(): %d units (%s, ...) had gradients before the window began, which now "
                "hold a part of it: call zero_grad() before the retry",
                len(tainted),
                tainted[0].spec.name,
            )

    def chunk_name(self, chunk: nn.Module) -> str | None:
        """The name by which messages and programs call ``chunk``; None if not adopted."""
        module = getattr(chunk, "_orig_mod", chunk)
        return next((name for name, ref in self._chunks.items() if ref() is module), None)

    # What happened

    @property
    def trace(self) -> Trace | None:
        """The trace of the program used last; None before one is known."""
        program = self.program
        return program.trace if program is not None else None

    @property
    def program(self) -> Program | None:
        """The program used last; None before one is known."""
        latest = self._library.latest
        return latest.program if latest is not None else None

    @property
    def programs(self) -> tuple[Program, ...]:
        """Every program known, the most recently used last."""
        return tuple(bound.program for bound in self._library)

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units, in adoption order."""
        return tuple(self._units.values())

    @property
    def compiled_graphs(self) -> dict[GraphKey, fx.GraphModule]:
        """The transformed graphs that ran, by chunk, direction and variant."""
        return dict(self._report.graphs)

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """What ran eagerly inside a compiled chunk, where and why."""
        return tuple(self._report.fallbacks)

    def explain(self) -> str:
        """What ran how, and why anything fell back: text for a person."""
        return self._report.explain(self.mode, self.stats, tuple(self._chunks), self.programs)

    @property
    def window(self) -> Window:
        """The window under way: for executors, not for training loops."""
        return self._window

    @property
    def report(self) -> Report:
        """What executors write down for :meth:`explain`: not for training loops."""
        return self._report


def _require_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        options = " or ".join(f'"{choice}"' for choice in choices)
        raise ValueError(f"{name}={value!r} is unknown: use {options}")


def _require_elements(name: str, value: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(
            f"{name}={value!r} is not a number of elements: use None for one event ahead, 0 for "
            "none, or a positive int"
        )
