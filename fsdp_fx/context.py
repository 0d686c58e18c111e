"""FSDPContext: what a training loop holds.

One per rank, shared by every model chunk on it. It adopts the chunks, owns the
window and the programs, closes windows, and says what happened. The work is done
elsewhere: events in :mod:`fsdp_fx.window`, hooks in :mod:`fsdp_fx.eager`, planning in
:mod:`fsdp_fx.passes`, graphs in :mod:`fsdp_fx.compile`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, Concatenate, Literal, NoReturn, ParamSpec, get_args

import torch
import torch.distributed as dist
from torch import fx, nn

from .agreement import agreements_of
from .calls import ForwardCall
from .eager.casts import install_casts, remove_casts
from .eager.fsdp_methods import restore_methods, shadow_methods
from .eager.hooks import ModuleHooks
from .eager.optimizers import guard_optimizers
from .eager.owners import OwnerHooks
from .eager.ties import TieHooks
from .inspection import show
from .library import BoundProgram, ProgramLibrary
from .metering import Metered, flatten, measurements_of, unflatten
from .passes import MemoryBudget, PassOptions, PassResult, pass_results, plan
from .planning.durations import Durations
from .planning.lookahead import Lookahead
from .planning.measurements import Measurements
from .program import Program
from .report import Fallback, GraphKey, Report
from .residency import Residency, Stats
from .torch_internals import inside_autograd_node
from .trace import Trace, UnitSpec, registration_trace
from .units import (
    ShardedModule,
    Unit,
    attach,
    detach,
    find_sharded_modules,
    require_detachable,
    require_memory_statistics,
    require_supported,
    require_unshared,
)
from .window import ReduceGradients, Window

__all__ = ["FSDPContext", "context_of_unit"]

logger = logging.getLogger("fsdp_fx")

Mode = Literal["registration", "recorded"]
Arguments = ParamSpec("Arguments")

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
            elements; ``"timed"``: as early as the durations measured while recording
            ask for, at least one event, and no earlier than the budget has room.
        backward_prefetch: the same at backward events.
        memory_budget: bytes of full parameters and full gradients that may stay resident
            at an event beyond the units in use there and those that the lookahead of events
            or elements covers. What stays is chosen so that the fewest bytes are gathered
            and reduced in the window. ``"auto"``: what fits under the peak of allocated
            memory that the recorded window had, event by event, lookahead included;
            ``"auto+4GiB"``: what fits if the peak may rise by so much. None: nothing is
            planned.
        reduce_gradients: ``"per_backward"`` reduces a unit's gradients after each of
            its backwards; ``"per_window"`` keeps them full, in the reduction dtype,
            and reduces after the window's last, outside of any budget; ``"planned"``
            keeps those that the budget has room for.
        keep_frozen: whether frozen units may stay resident from one window to the next,
            within a budget in bytes. Their weights must then only be changed in ways that
            PyTorch counts (:attr:`fsdp_fx.units.Unit.is_stale`), or be followed by
            :meth:`abort`.
        kept_gradient_dtype: what full gradients are kept and added up in between the backwards
            that ``reduce_gradients`` does not reduce after. None: the reduction dtype, as FSDP2
            does. A smaller one takes less memory, and rounds each sum to it; the reduction
            itself stays in its own.
        agreement_timeout: seconds that a rank waits for the others of its shard group where
            their order of events is compared: in a window that is written down, and where
            one leaves its program.

    Attributes:
        stats: counters since the context was made, a :class:`~fsdp_fx.Stats`.

    Raises:
        ValueError: an unknown mode or option value, or an option that has no
            effect with the others.
    """

    def __init__(
        self,
        mode: Mode = "registration",
        *,
        forward_prefetch: Lookahead = None,
        backward_prefetch: Lookahead = None,
        memory_budget: MemoryBudget = None,
        reduce_gradients: ReduceGradients = "per_backward",
        keep_frozen: bool = False,
        kept_gradient_dtype: torch.dtype | None = None,
        agreement_timeout: float = 300.0,
    ) -> None:
        _require_choice("mode", mode, get_args(Mode))
        options = PassOptions(
            forward_prefetch=forward_prefetch,
            backward_prefetch=backward_prefetch,
            reduce_gradients=reduce_gradients,
            memory_budget=memory_budget,
            keep_frozen=keep_frozen,
            kept_gradient_dtype=kept_gradient_dtype,
        )
        if not agreement_timeout > 0:
            raise ValueError(f"agreement_timeout={agreement_timeout!r} is not a number of seconds")
        self._agreement_timeout = agreement_timeout
        if mode == "registration" and reduce_gradients != "per_backward":
            raise ValueError(
                f'reduce_gradients="{reduce_gradients}" has no effect in registration mode, where a '
                'window is one backward: use mode="recorded"'
            )
        if mode == "registration" and options.measures:
            raise ValueError(
                f"{options.measured_choice} has no effect in registration mode, where no window is "
                'recorded: use mode="recorded"'
            )
        self.mode: Mode = mode
        self._options = options
        self.stats = Stats()
        self._library = ProgramLibrary()
        residency = Residency(self.stats)
        residency.on_failure = self._weak(FSDPContext._collective_failed)
        residency.on_waiting = self._weak(FSDPContext._check_ranks)
        self._window = Window(residency, self._library, reduce_gradients)
        self._window.closes_itself = mode == "registration"
        self._window.options = tuple(
            f"{field.name}={getattr(options, field.name)!r}" for field in fields(options)
        )
        self._window.meters_memory = options.fills_memory
        self._window.on_open = self._weak(FSDPContext._begin_window)
        self._window.on_pass_end = self._weak(FSDPContext._pass_ended)
        self._window.on_unscheduled = self._weak(FSDPContext._trained_unscheduled)
        self._report = Report()
        self._guard: weakref.finalize[[], FSDPContext] | None = None
        self._units: dict[str, Unit] = {}
        self._specified: tuple[UnitSpec, ...] = ()
        self._chunks: dict[str, weakref.ref[nn.Module]] = {}
        self._hooks: list[ModuleHooks] = []
        self._owners: list[OwnerHooks] = []
        self._ties: list[TieHooks] = []
        self._on_release: list[Callable[[], None]] = []
        self._released = False
        self._called_directly: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __repr__(self) -> str:
        return (
            f"FSDPContext(mode={self.mode!r}, chunks={len(self._chunks)}, "
            f"units={len(self._units)}, programs={len(self._library)})"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "an FSDPContext cannot be copied or pickled: build another one for other modules"
        )

    # Adoption

    def adopt(self, *chunks: nn.Module, together: Sequence[nn.Module] = ()) -> None:
        """Take over the scheduling of ``chunks``, in the order given.

        Args:
            chunks: modules with ``fully_shard`` calls in their trees; what
                ``torch.compile`` returned for such a module will do. May be called
                more than once, before the first forward.
            together: modules inside of the chunks whose units, with those below them, are
                gathered, freed and reduced together, as if they were one unit: for a
                block in which the data decides what is used, a mixture of experts, so
                that ranks may use different parts of it.

        Raises:
            TypeError: not a module.
            ValueError: no FSDP2 units; adopted before; inside or around a module of
                another context; an FSDP2 option that has no effect here; a tied
                parameter that was sharded twice.
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
        if self._released:
            raise RuntimeError("adopt() after release(): build another FSDPContext")
        if self._window.is_open or self.stats.windows:
            raise RuntimeError(
                "adopt() after training has begun: adopt every chunk before the first forward"
            )
        for index, module in enumerate(modules):
            self._require_adoptable(module, modules[:index])
        adopted = [chunk for chunk in (ref() for ref in self._chunks.values()) if chunk is not None]
        require_unshared([*adopted, *modules])
        together = [getattr(module, "_orig_mod", module) for module in together]
        self._require_together(together, modules)
        if self._options.fills_memory:
            require_memory_statistics(modules)
        for module in modules:
            self._adopt(module, together)
        self._specify()
        self._window.agreements = agreements_of(self.units, self._agreement_timeout)
        if self._options.measures:
            self._window.agreements.require_common_ranks(self._options.measured_choice)
        if self._guard is None:
            self._guard = weakref.finalize(self, guard_optimizers(self._window))

    def _specify(self) -> None:
        self._specified = tuple(unit.spec for unit in self._window.units)
        self._library.specify(self._specified)

    def _require_adoptable(self, module: nn.Module, before: list[nn.Module]) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"adopt() takes modules, not {type(module).__name__}: adopt(*chunks)")
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

    def _require_together(self, together: Sequence[nn.Module], chunks: Sequence[nn.Module]) -> None:
        inside = {below for chunk in chunks for below in chunk.modules()}
        for index, module in enumerate(together):
            name = type(module).__name__
            if module not in inside:
                raise ValueError(f"together: {name} is not inside of a chunk of this call")
            if next(find_sharded_modules(module), None) is None:
                raise ValueError(
                    f"together: {name} has no FSDP2 units: call fully_shard() on it or below"
                )
            around = [other for other in together[:index] if module in set(other.modules())]
            within = [other for other in together[:index] if other in set(module.modules())]
            if around or within:
                other = (around or within)[0]
                raise ValueError(
                    f"together: {name} and {type(other).__name__} lie inside of one another, or are "
                    "the same: name the outer one"
                )

    def _adopt(self, module: nn.Module, together: Sequence[nn.Module]) -> None:
        chunk = f"c{len(self._chunks)}"
        window = self._window
        sharded, communication = attach(module, chunk, window.communication)
        window.communication = communication
        self._chunks[chunk] = weakref.ref(module)
        for each in sharded:
            for unit in each.units:
                unit.keep_gradients_in(self._options.kept_gradient_dtype)
                self._units[unit.spec.name] = unit
                window.units.append(unit)
                _context_by_unit[unit] = weakref.ref(self)
        for other in module.modules():
            _chunks_by_module[other] = weakref.ref(self)
        below = set(module.modules())
        self._install_hooks(module, chunk, sharded, [each for each in together if each in below])

    def _install_hooks(
        self,
        chunk: nn.Module,
        name: str,
        sharded: list[ShardedModule],
        together: Sequence[nn.Module],
    ) -> None:
        owners: dict[nn.Module, ShardedModule] = {}
        for each in sharded:
            for reference in each.modules:
                module = reference()
                if module is not None:
                    owners[module] = each
        for module, each in owners.items():
            shadow_methods(module, each.units, self._window)
        inside = {below for each in together for below in each.modules() if below is not each}
        for module in dict.fromkeys((chunk, *owners, *together)):
            own = owners.get(module)
            if module in inside:
                if own is not None:
                    install_casts(module, own)
                continue
            units = dict.fromkeys(own.units if own is not None else ())
            inner: dict[Unit, None] = {}
            for below in module.modules():
                each_below = owners.get(below)
                if below is not module and each_below is not None and each_below is not own:
                    inner.update(dict.fromkeys(each_below.units))
            if module in together:
                units.update(inner)
                inner.clear()
            hooks = ModuleHooks(
                self._window,
                module,
                name,
                tuple(units),
                tuple(inner),
                own,
                chunk,
                self._weak(FSDPContext._pass_ended),
                self._report,
                together=module in together,
            )
            self._hooks.append(hooks)
            within = set(module.modules()).difference(owners)
            ties = {unit: [m for m in unit.tied_modules if m in within] for unit in units}
            tied_units = [unit for unit, sharing in ties.items() if sharing]
            if tied_units:
                sharing = dict.fromkeys(m for unit in tied_units for m in ties[unit])
                self._ties.append(TieHooks(hooks, tied_units, list(sharing)))

    def release(self) -> None:
        """Give the modules back to plain FSDP2, between two windows.

        FSDP2's own hooks and methods act again, with what ``fully_shard`` was given;
        parameters, gradients and optimizers stay as they are. Pipeline schedules that were
        bound are as they were before. What was compiled with ``backend="fsdp_fx"`` is to be
        compiled again, with another backend. Programs and counters can still be read; new
        modules need another context.

        Raises:
            RuntimeError: a window is open, or a forward or backward is running; or plain
                FSDP2 could not go on with a module.
        """
        if self._window.is_open:
            raise RuntimeError(
                f"release() in the middle of window {self._window.number}: close it with "
                "finish_grad_sync(), or discard it with abort()"
            )
        if self._window.is_running:
            raise RuntimeError(
                "release() inside of a forward or backward of an evaluation: call it when that is "
                "over; if an exception has crossed it, after abort()"
            )
        chunks = [chunk for chunk in (ref() for ref in self._chunks.values()) if chunk is not None]
        for chunk in chunks:
            require_detachable(chunk)
        self._released = True
        for undo in self._on_release:
            undo()
        for owner in self._owners:
            owner.end_evaluations()
        self._window.close()  # the current stream waits for reductions, if any are under way
        self._window.released = True
        alive = [unit for unit in self.units if unit.is_alive]
        self._window.residency.free_idle(alive)  # frozen units that stayed
        removable: list[ModuleHooks | OwnerHooks | TieHooks] = [
            *self._hooks,
            *self._owners,
            *self._ties,
        ]
        for hooks in removable:
            hooks.remove()
        for chunk in chunks:
            for module in chunk.modules():
                restore_methods(module)
                remove_casts(module)
                _chunks_by_module.pop(module, None)
            detach(chunk)
        for unit in alive:
            unit.let_go()
            _context_by_unit.pop(unit, None)
        if self._guard is not None:
            self._guard()
        for held in (self._hooks, self._owners, self._ties, self._on_release, self._window.units):
            held.clear()
        self._chunks.clear()
        self._units.clear()

    def when_released(self, undo: Callable[[], None]) -> None:
        """Have :meth:`release` call ``undo``: for integrations, not for training loops."""
        self._on_release.append(undo)

    # Schedules that call submodules

    def hook_owner(
        self,
        owner: nn.Module,
        submodules: Sequence[nn.Module] = (),
        release_after: nn.Module | None = None,
        delayed_weight_gradients: bool = False,
    ) -> None:
        """Let a schedule call the submodules of a unit's module in place of the module itself.

        Hooks on the submodules act for ``owner``, whose own hooks then never fire. Its
        units are needed from the first submodule's forward of a microbatch to that of
        ``release_after``, and from the first gradient that reaches a submodule to the end
        of the last submodule's backward: one event each, in however many calls and
        autograd passes, with those of other microbatches in between. The forward of
        ``owner`` itself can still be used.

        Args:
            owner: a module of an adopted chunk that ``fully_shard`` was called on.
            submodules: modules inside of it, in the order in which a microbatch goes
                through them. ``owner`` must be the nearest unit around each. Modules
                without parameters may be left out, if they stand at either end.
            release_after: the submodule after whose forward the parameters are not
                needed; the last if not given. Those behind it must have none.
            delayed_weight_gradients: whether the gradients of weights are computed after
                the backward: inside of :meth:`weight_gradients`, which then ends it.

        Raises:
            TypeError: something is not a module.
            ValueError: ``owner`` was not adopted or has no units; a submodule is not in
                it, belongs to a nearer unit, is inside of another, or is given twice;
                ``release_after`` is none of them; there is nothing to do.
            RuntimeError: registration mode, or training has begun.
        """
        own = self._hooks_of(owner, "hook_owner()")
        if self.mode == "registration":
            raise RuntimeError(
                "hook_owner() in registration mode, where the order is that of whole modules: build "
                'the context with mode="recorded"'
            )
        if self._window.is_open or self.stats.windows:
            raise RuntimeError(
                f"hook_owner() of {own.name} after training has begun: call it between adopt() "
                "and the first forward"
            )
        module = own.module()
        assert module is not None
        if any(hooks.units == own.units for hooks in self._owners):
            raise ValueError(
                f"{own.name} is hooked already: give all of its submodules to one hook_owner()"
            )
        if own.delays_weight_gradients:
            raise ValueError(f"{own.name} is hooked already: call hook_owner() once for it")
        paths = self._submodule_paths(own.name, module, submodules)
        modules = list(paths.values())
        last = len(modules) - 1
        if release_after is not None:
            last = _index_of(getattr(release_after, "_orig_mod", release_after), modules)
            if last < 0:
                raise ValueError(
                    f"release_after, {type(release_after).__name__}, is none of the submodules of "
                    f"{own.name}: give one of {', '.join(paths) or 'them'}"
                )
        parameters = {id(p) for unit in own.units for p in unit.sharded_parameters}
        for path, behind in list(paths.items())[last + 1 :]:
            if any(id(parameter) in parameters for parameter in behind.parameters()):
                raise ValueError(
                    f"{path} of {own.name} comes behind release_after and has parameters of the "
                    "unit, which are freed by then: release after it"
                )
        if not paths and not delayed_weight_gradients:
            raise ValueError(
                f"hook_owner() of {own.name} without submodules has no effect: give those that the "
                "schedule calls, or delayed_weight_gradients=True"
            )
        for hooks in self._hooks:
            if hooks.units == own.units:
                hooks.delays_weight_gradients = delayed_weight_gradients
        if paths:
            self._called_directly.update(modules)
            self._owners.append(
                OwnerHooks(self._window, own, paths, last, self._weak(FSDPContext._pass_ended))
            )

    @contextlib.contextmanager
    def weight_gradients(self, owner: nn.Module) -> Iterator[None]:
        """The delayed weight gradients of one backward of ``owner`` are computed inside.

        A context manager: ``with ctx.weight_gradients(layer): layer.backward_dw()``.

        The oldest one that is waiting for them. Inside, the modules show the full
        parameters, and what is assigned or added to their ``grad`` is the contribution of
        this microbatch. At the end the unit is freed and its gradients are reduced.

        Args:
            owner: what :meth:`hook_owner` was given with ``delayed_weight_gradients=True``.

        Raises:
            TypeError, ValueError: ``owner`` is no such module.
            RuntimeError: no backward of it is waiting.
        """
        own = self._hooks_of(owner, "weight_gradients()")
        if not own.delays_weight_gradients:
            raise ValueError(
                f"the weight gradients of {own.name} are not delayed: call hook_owner() with "
                "delayed_weight_gradients=True before the first forward"
            )
        with self._window.weight_gradients(own.units, own.name):
            yield

    def _hooks_of(self, owner: nn.Module, where: str) -> ModuleHooks:
        module = getattr(owner, "_orig_mod", owner)
        if not isinstance(module, nn.Module):
            raise TypeError(f"{where} takes a module as owner, not {type(module).__name__}")
        name = type(module).__name__
        for hooks in self._hooks:
            if hooks.module() is module and hooks.units:
                return hooks
        reference = _chunks_by_module.get(module)
        if reference is None or reference() is not self:
            raise ValueError(f"{where}: {name} is in no chunk of this context: adopt() that first")
        raise ValueError(
            f"{where}: {name} has no unit of its own: call fully_shard() on it before adopt(), or "
            "give the module around it that has one"
        )

    def _submodule_paths(
        self, name: str, owner: nn.Module, submodules: Sequence[nn.Module]
    ) -> dict[str, nn.Module]:
        """The submodules by their path in ``owner``, in the order given."""
        sharded = {hooks.module(): hooks for hooks in self._hooks if hooks.units}
        inside = {module: path for path, module in owner.named_modules() if path}
        paths: dict[str, nn.Module] = {}
        for given in submodules:
            module = getattr(given, "_orig_mod", given)
            if not isinstance(module, nn.Module):
                raise TypeError(
                    f"hook_owner() of {name} takes submodules, not {type(module).__name__}"
                )
            path = inside.get(module)
            if path is None:
                raise ValueError(
                    f"{type(module).__name__} is not inside of {name}: give submodules of the owner"
                )
            if path in paths or module in self._called_directly:
                raise ValueError(
                    f"{path} of {name} is given twice, or to another owner: give it once"
                )
            at, nearest = owner, None
            for part in path.split("."):
                at = getattr(at, part)
                nearest = sharded.get(at, nearest)
            if nearest is not None:
                raise ValueError(
                    f"{path} of {name} belongs to a nearer unit, {nearest.name}, whose own hooks "
                    "act: leave it out, or hook that owner"
                )
            paths[path] = module
        for path in paths:
            for around in paths:
                if path.startswith(around + "."):
                    raise ValueError(
                        f"{path} is inside of {around}, both of {name}: give what the schedule calls"
                    )
        return paths

    def _weak(
        self, method: Callable[Concatenate[FSDPContext, Arguments], None]
    ) -> Callable[Arguments, None]:
        """A call of ``method`` that does not keep the context alive."""
        reference = weakref.ref(self)

        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
            context = reference()
            if context is None:
                raise ReferenceError(
                    "the FSDPContext of these modules was deleted: keep it as long as they train"
                )
            method(context, *args, **kwargs)

        return call

    def _check_ranks(self) -> None:
        self._window.agreements.check()

    def _collective_failed(self, what: str, unit: Unit, error: Exception) -> None:
        self._window.collective_failed(what, unit, error)

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
        for owner in self._owners:
            owner.end_evaluations()
        inputs_only = self._window.inputs_only()
        _, divergence = self._window.close(every_forward, self._commit)
        if self._window.number > number:
            self._report.window_closed()
        if divergence is not None:
            self._report.leave_program(number, divergence)
        if inputs_only is not None:
            # Right for whoever wants just that; to others the gradient would be missing.
            self._report.fall_back(
                Fallback(
                    f"chunk {inputs_only.chunk}",
                    "its parameters have no gradient of some of its forwards",
                    f"window {number}, {inputs_only} was differentiated for its inputs only; "
                    "parameters() are sharded and in no autograd graph: where their gradient is "
                    "wanted, run backward() without inputs=",
                )
            )

    def _commit(
        self,
        trace: Trace,
        metered: Metered | None = None,
        left: BoundProgram | None = None,
    ) -> None:
        measurements = Measurements()
        if metered is not None:
            measurements = measurements_of(
                trace,
                metered,
                per_window=self._options.reduce_gradients == "per_window",
                memory=self._window.meters_memory,
                left=(left.program.trace, left.measurements) if left is not None else None,
            )
            if self._options.measures:
                least = self._window.agreements.least(
                    trace.units, trace.events, flatten(trace, measurements)
                )
                measurements = unflatten(trace, least, measurements)
        program = plan(trace, self._options, measurements)
        self._window.agreements.commit(program)
        provisional = left is not None and self._options.fills_memory
        self._library.add(BoundProgram(program, self._units, measurements, provisional))
        logger.info("recorded %d events; the next window replays them", len(trace))
        name = f"program {trace.fingerprint[:12]}"
        show("programs", name, lambda: program.print_readable(print_output=False))
        show("programs", f"{name} pass by pass", lambda: self._diffs(trace, measurements))

    def _diffs(self, trace: Trace, measurements: Measurements) -> str:
        results = pass_results(trace, self._options, measurements)
        return "\n\n".join(
            f"# pass {after.name}\n{after.program.diff(before.program) or '(nothing changed)'}"
            for before, after in itertools.pairwise(results)
        )

    def _pass_ended(self) -> None:
        # A pass inside a forward (a gradient as part of the model) ends no window.
        window = self._window
        if self.mode == "registration" and window.is_open and not window.current:
            if inside_autograd_node():
                window.put_off_close()
            else:
                self._close(every_forward=False)

    def _trained_unscheduled(self, call: ForwardCall) -> None:
        self._report.fall_back(
            Fallback(
                f"chunk {call.chunk}",
                "it trains with gathers on demand, a reduction after each backward, and no window",
                "its forward was an evaluation: call train() on the chunk, whatever is in eval mode "
                "inside of it, and run what trains outside of evaluation()",
            )
        )

    def _begin_window(self) -> None:
        self._report.window_opened()
        units = self._window.units
        # Frozen or not may have changed since the window before.
        changed = any([unit.respecify() for unit in units])
        if changed or len(units) != len(self._specified):
            self._specify()
            self._window.respecified = True
        if self._library.latest is None:
            self._require_useful_budget()
            if self.mode == "registration":
                self._commit(registration_trace([unit.spec for unit in units]))

    def _require_useful_budget(self) -> None:
        budget = self._options.memory_budget
        if not isinstance(budget, int) or budget == 0:
            return
        sizes = {f"unit {spec.name}": spec.bytes for spec in self._specified}
        if self._options.reduce_gradients == "planned":
            sizes |= {
                f"the gradients of unit {spec.name}": spec.kept_gradient_bytes
                for spec in self._specified
                if spec.trainable
            }
        name, least = min(sizes.items(), key=lambda item: item[1])
        if budget < least:
            raise ValueError(
                f"memory_budget={budget} bytes is less than anything that could be kept, of which "
                f"{name} is the smallest with {least} bytes: give more, or 0 to keep nothing"
            )

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Forwards inside are evaluations: no event, no cursor move, no lookahead.

        A context manager: ``with ctx.evaluation(): ...``.

        A chunk in eval mode, or entered with gradients off, is one without this. A
        backward through such a forward is not an event either.
        """
        with self._window.evaluation():
            yield

    def abort(self) -> None:
        """Discard the window after an exception, on every rank.

        The next window begins with a comparison of what the ranks have issued: after an
        exception on some ranks only their collectives are out of step, which is an error.

        Every unit is freed and reset, gradients of the window are cleared, the cursor
        goes to 0; the programs stay. Units that had gradients before the window began
        keep a partial sum: one warning names them.
        """
        tainted = self._window.abort()
        for hooks in self._hooks:
            hooks.forget()
        for owner in self._owners:
            owner.forget()
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

    def why_whole_backwards(self, chunk: str) -> str | None:
        """Why backwards of ``chunk`` cannot be split into halves, as far as hooks know.

        Args:
            chunk: its name.
        """
        for hooks in self._hooks:
            if hooks.chunk == chunk and hooks.delays_weight_gradients:
                return f"the weight gradients of {hooks.name} are delayed by themselves"
        for owner in self._owners:
            if owner.own.chunk == chunk:
                return f"the submodules of {owner.own.name} are called one by one"
        return None

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

    def pass_results(self) -> tuple[PassResult, ...]:
        """How the program used last was planned, pass by pass; empty before one is known.

        To see what a pass did: ``results[2].program.diff(results[1].program)``.
        """
        latest = self._library.latest
        if latest is None:
            return ()
        return pass_results(latest.program.trace, self._options, latest.measurements)

    @property
    def durations(self) -> Durations | None:
        """How long events and collectives took while the program used last was recorded.

        This rank's own, or with a lookahead of ``"timed"`` or a budget of ``"auto"`` the
        least of all ranks. None before a window was recorded.
        """
        latest = self._library.latest
        return latest.measurements.durations if latest is not None else None

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
        """What did not run as part of a compiled graph or of a program: where, what ran, and why."""
        return tuple(self._report.fallbacks)

    def explain(self) -> str:
        """What ran how, and why anything fell back: text for a person."""
        return self._report.explain(
            self.mode,
            self._options,
            self.stats,
            tuple(self._chunks),
            self.programs,
            [bound.measurements.peak for bound in self._library],
            {unit.spec.name: unit.obstacles for unit in self.units if unit.is_alive},
        )

    @property
    def window(self) -> Window:
        """The window under way: for executors, not for training loops."""
        return self._window

    @property
    def report(self) -> Report:
        """What executors write down for :meth:`explain`: not for training loops."""
        return self._report


def _index_of(module: nn.Module, modules: Sequence[nn.Module]) -> int:
    return next((index for index, other in enumerate(modules) if other is module), -1)


def _require_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        options = " or ".join(f'"{choice}"' for choice in choices)
        raise ValueError(f"{name}={value!r} is unknown: use {options}")
