"""What is scheduled: units over FSDP2's parameter groups.

The only module that touches private attributes of
``torch.distributed.fsdp._fully_shard``. The rest of the package sees
:class:`Unit` (gather, wait, free, reduce) and :class:`ShardedModule` (which
module a unit belongs to and how its inputs and outputs are cast).

A unit does what it is told when it is told. Whether it *should* be gathered or
freed, and who still uses it, is :mod:`fsdp_fx.residency`'s business; the order is
the program's.

Supported: torch 2.11 to 2.14. On another torch the import fails and names the
attribute that is missing.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import inspect
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast, overload

import torch
import torch.distributed as dist
from torch import nn

from .torch_internals import (
    accumulates_gradient,
    inside_dispatch_mode,
    outside_of_selective_checkpoints,
)
from .trace import UnitSpec

__all__ = [
    "Communication",
    "ShardedModule",
    "Unit",
    "attach",
    "find_sharded_modules",
    "require_supported",
    "require_unshared",
    "storage_key",
    "unit_of_tensor",
]

_PATIENCE = datetime.timedelta(seconds=4)

SUPPORTED_TORCH = "2.11 to 2.14"

try:
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import (
        FSDPCommContext,
        FSDPParamGroup,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_state import (
        FSDPState,
        _get_module_fsdp_state,
    )
except ImportError as error:
    raise ImportError(
        f"fsdp_fx supports torch {SUPPORTED_TORCH}; torch {torch.__version__} lacks a name "
        f"that fsdp_fx.units needs: {error}"
    ) from error

# Every private name that this module uses. Methods and class attributes are looked
# up on the class; instance attributes among the names that its ``__init__`` (or the
# method given) stores. A tuple holds alternatives: any one of them will do.
PRIVATE_NAMES: dict[type, tuple[str | tuple[str, str], ...]] = {
    FSDPState: (
        "_lazy_init",
        ("_fsdp_param_groups", "_fsdp_param_group"),
        "_comm_ctx",
        "_training_state",
        "_is_root",
        "_modules",
        "_modules_to_run_forward",
        "_state_ctx",
        "_states_to_forward_prefetch",
        "_states_to_backward_prefetch",
        "_mp_policy",
        "_pre_forward_hook_handle",
        "_post_forward_hook_handle",
    ),
    FSDPParamGroup: (
        "unshard",
        "wait_for_unshard",
        "_to_sharded",
        "post_backward",
        "finalize_backward",
        "use_training_state",
        "is_unsharded",
        "fsdp_params",
        "comm_ctx",
        "device",
        "mesh_info",
        "modules",
        "reduce_grads",
        "all_reduce_grads",
        "mesh_info",
        "reshard_after_backward",
        "unshard_in_backward",
        "offload_policy",
        "post_forward_mesh_info",
        "_all_gather_result",
        "_sharded_state",
        "_orig_dtype",
        "_partial_reduce_output",
        "_post_forward_indices",
        "_reduce_dtype",
        "mp_policy",
        "_module_fqn",
        "_training_state",
        "_module_to_pre_save_state_dict_hook_handle",
        "_module_to_pre_load_state_dict_hook_handle",
    ),
    FSDPParam: (
        "sharded_param",
        "_sharded_param_data",
        "_sharded_local_tensor",
        "_orig_size",
        "param_dtype",
        "orig_dtype",
        "reduce_dtype",
        "init_all_gather_outputs",
        "init_unsharded_param",
        "free_unsharded_param",
        "sharded_state",
        "unsharded_accumulated_grad",
        "accumulate_unsharded_grad_if_needed",
        "to_accumulated_grad_if_needed",
        "_setattr_on_modules",
        "_module_info",
        "mesh_info",
    ),
    FSDPCommContext: (
        "all_gather_copy_in_stream",
        "all_gather_stream",
        "all_gather_state",
        "post_forward_order",
        "reduce_scatter_stream",
        ("reduce_scatter_states", "reduce_scatter_state"),
    ),
}


def missing_private_names(names: dict[type, tuple[str | tuple[str, str], ...]]) -> list[str]:
    """Which of ``names`` this torch lacks, as ``Class.attribute`` strings."""
    missing = []
    for owner, attributes in names.items():
        stored: set[str] = set(getattr(owner, "__annotations__", ()))
        for method in ("__init__", "init", "lazy_init", "init_dtype_attrs", "_init_sharded_param"):
            function = getattr(owner, method, None)
            code = getattr(inspect.unwrap(function), "__code__", None) if function else None
            if code is not None:
                stored.update(code.co_names)
        for attribute in attributes:
            choices = (attribute,) if isinstance(attribute, str) else attribute
            if not any(hasattr(owner, name) or name in stored for name in choices):
                missing.append(f"{owner.__name__}.{' or '.join(choices)}")
    return missing


if _missing := missing_private_names(PRIVATE_NAMES):
    raise ImportError(
        f"fsdp_fx supports torch {SUPPORTED_TORCH}; torch {torch.__version__} lacks "
        f"{', '.join(_missing)}"
    )


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage, stable while its memory comes and goes."""
    return tensor.untyped_storage()._cdata


# Unsharded parameters by storage: how a compiled graph, which gets tensors, finds
# the units (and through them the context) that it works for.
_unit_by_storage: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()


def unit_of_tensor(tensor: torch.Tensor) -> Unit | None:
    """The adopted unit whose unsharded parameter ``tensor`` is, if any."""
    unit = _unit_by_storage.get(storage_key(tensor))
    # The storage of a deleted module's parameter may be another tensor's by now.
    return unit if unit is not None and unit.is_alive else None


class Communication:
    """The streams that every unit of a context shares.

    Wraps one ``FSDPCommContext``. Without sharing, each root module would have its
    own streams and its own idea of what is in flight.
    """

    def __init__(self, comm_context: FSDPCommContext, device: torch.device) -> None:
        self._comm_context = comm_context
        self._device = device

    @property
    def device(self) -> torch.device:
        """Where the units compute."""
        return self._device

    @property
    def copy_in_stream(self) -> torch.Stream | None:
        """The stream that gathers begin on; None on the CPU, as for the others."""
        return self._stream("all_gather_copy_in_stream")

    @property
    def gather_stream(self) -> torch.Stream | None:
        """The stream that gathers end on."""
        return self._stream("all_gather_stream")

    @property
    def reduction_stream(self) -> torch.Stream | None:
        """The stream that reductions run on."""
        return self._stream("reduce_scatter_stream")

    @property
    def captured(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _stream(self, name: str) -> torch.Stream | None:
        return None if self._device.type == "cpu" else getattr(self._comm_context, name)

    def wait_for_compute(self) -> None:
        """Make gathers that start from here on wait for the current stream.

        Called at the start of a window: parameters that the optimizer is still
        writing must not be gathered.
        """
        if self._device.type == "cpu":
            return
        current = torch.accelerator.current_stream(self._device)
        self._comm_context.all_gather_copy_in_stream.wait_stream(current)
        self._comm_context.all_gather_stream.wait_stream(current)

    def wait_for_reductions(self, units: Sequence[Unit]) -> None:
        """Make the current stream wait for every reduction issued so far."""
        comm: Any = self._comm_context  # one state up to torch 2.11, a list of them later
        if hasattr(comm, "reduce_scatter_states"):
            states = list(comm.reduce_scatter_states)
            comm.reduce_scatter_states.clear()
        else:
            states = [comm.reduce_scatter_state] if comm.reduce_scatter_state else []
            comm.reduce_scatter_state = None
        for state in states:
            if state.event is not None and self._device.type != "cpu":
                torch.accelerator.current_stream(self._device).wait_event(state.event)
        for unit in units:
            unit.finish_reductions()


class Unit:
    """The parameters that one ``fully_shard`` call groups.

    Gathered, freed and reduced together. Made by :func:`attach`.

    Attributes:
        spec: name, sizes and chunk, as plain data.
        holds: how many uses of the full parameters are under way.
        collectives: gathers and reductions issued so far.
        reduced: whether gradients were reduced in the window.
        contributed: whether a backward that accumulates gradients has begun or ended
            since the last reduction: the same on every rank, whoever has gradients.
        communication: the streams shared by the context's units.
    """

    __slots__ = (
        "__weakref__",
        "_exposures",
        "_gathered_from",
        "_group",
        "_parameter_index",
        "_partial_layout",
        "_required",
        "_trainable",
        "collectives",
        "communication",
        "contributed",
        "free_at_release",
        "holds",
        "in_flight",
        "reduced",
        "spec",
        "unsharded",
    )

    def __init__(self, group: FSDPParamGroup, spec: UnitSpec, communication: Communication) -> None:
        self._group = weakref.ref(group)
        self.spec = spec
        self.communication = communication
        self.holds = 0
        self.collectives = 0
        self.reduced = False
        self.free_at_release = False
        self.in_flight = False
        self.unsharded = False
        self.contributed = False
        self._exposures = 0
        self._gathered_from: tuple[tuple[int, int, int], ...] | None = None
        self._parameter_index: dict[int, int] = {}
        # Indices of the parameters whose partial sums are outstanding.
        self._partial_layout: list[int] | None = None
        self._trainable = self._trainable_now()
        # Indices of those that a forward of this window has used while they required one.
        self._required: set[int] = set()

    def __repr__(self) -> str:
        return f"Unit({self.spec.name!r})"

    @property
    def group(self) -> FSDPParamGroup:
        """FSDP2's parameter group: for this module alone."""
        group = self._group()
        if group is None:
            raise ReferenceError(f"the module of unit {self.spec.name} has been deleted")
        return group

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that gather and reduce the unit together, replicas included."""
        mesh = self.group.mesh_info.mesh
        return tuple(sorted(int(rank) for rank in mesh.mesh.flatten().tolist()))

    @property
    def is_alive(self) -> bool:
        """Whether the unit's module still exists."""
        return self._group() is not None

    # Gather, wait, free

    def gather(self) -> None:
        """Start the all-gather. The caller sees to it that the unit is sharded."""
        group = self.group
        if not dist.is_initialized():
            raise RuntimeError(
                f"the process group is closed: unit {self.spec.name} cannot be gathered; destroy "
                "the group after the last step"
            )
        self._check_dtypes()
        # FORWARD selects the gather streams. On the CPU there are none, and only an
        # asynchronous collective lets compute go on meanwhile.
        with group.use_training_state(TrainingState.FORWARD), _normal_tensors():
            group.unshard(async_op=group.device.type == "cpu")
        self.in_flight = True
        self.collectives += 1
        if not self.spec.trainable:
            self._gathered_from = self._shards()

    @property
    def is_stale(self) -> bool:
        """Whether a frozen unit's shards have been changed or replaced since it was gathered.

        Told from where the shards are, and from PyTorch's version counters, which count
        in-place operations on the sharded parameter (``copy_``, ``load_state_dict``) and on
        what ``to_local()`` returns. They do not count what is done through ``param.data``, nor
        ``torch._foreach_*`` and fused operations on sharded parameters: what those change is
        not noticed.
        """
        return self._gathered_from is None or self._gathered_from != self._shards()

    def _shards(self) -> tuple[tuple[int, int, int], ...] | None:
        """What tells the shards from what they were; None if nothing does."""
        shards = []
        for parameter in self.group.fsdp_params:
            whole, local = parameter.sharded_param, parameter._sharded_local_tensor
            if whole.is_inference() or local.is_inference():
                return None  # these have no version
            if whole.grad is not None:
                return None  # from before it was frozen: an optimizer goes on changing it
            shards.append((local.data_ptr(), local._version, whole._version))
        return tuple(shards)

    def wait(self, on_waiting: Callable[[], None] | None = None) -> None:
        """Make compute wait for this unit's own gather; the parameters are full after it.

        Args:
            on_waiting: called every few seconds in which a gather on the CPU is not done:
                the other ranks may never come. It may raise.
        """
        group = self.group
        if on_waiting is not None and group.device.type == "cpu":
            self._wait_patiently(on_waiting)
        # PRE_BACKWARD gives the gather's buffer back right after the copy-out, where
        # FORWARD would keep it until the next wait.
        with group.use_training_state(TrainingState.PRE_BACKWARD), _normal_tensors():
            group.wait_for_unshard()
        self.in_flight = False
        self.unsharded = True
        if not self._parameter_index:
            self._register_parameters()
        if not self._exposures:
            self._point_modules_at_sharded()

    def _wait_patiently(self, on_waiting: Callable[[], None]) -> None:
        result = self.group._all_gather_result
        work = result.all_gather_work if result is not None else None
        if work is None or work.is_completed():
            return
        while True:
            began = time.monotonic()
            try:
                work.wait(_PATIENCE)
                return
            except RuntimeError:
                # Not done yet; a failure would have come back before.
                if time.monotonic() - began < 0.5 * _PATIENCE.total_seconds():
                    raise
                on_waiting()

    def free(self) -> None:
        """Give the full parameters' memory back. A gather in flight is waited for first."""
        group = self.group
        if self.in_flight:
            # Dropped whether or not the wait succeeds: a gather that failed must not be
            # waited for again.
            self.in_flight = False
            result, group._all_gather_result = group._all_gather_result, None
            if result is not None:
                if result.all_gather_event is not None and group.device.type != "cpu":
                    torch.accelerator.current_stream(group.device).wait_event(
                        result.all_gather_event
                    )
                if result.all_gather_work is not None:
                    result.all_gather_work.wait()
        # What FSDP2's _to_sharded() does, without what the modules show: that is decided
        # by expose() and conceal(), and costs more than all the rest.
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                parameter.free_unsharded_param()
            parameter.sharded_state = ShardedState.SHARDED
        group._sharded_state = ShardedState.SHARDED
        self.unsharded = False

    # Which parameters the modules show

    def expose(self) -> None:
        """Let the modules show the unsharded parameters until as many :meth:`conceal` calls.

        Outside of a forward the modules always show the sharded ones, so that
        ``parameters()``, ``state_dict()`` and optimizers never see another.
        """
        self._exposures += 1
        if self._exposures == 1:
            self._materialise()
            self._point_modules_at_unsharded()

    def conceal(self) -> None:
        """Undo one :meth:`expose`."""
        self._exposures -= 1
        if self._exposures == 0:
            self._point_modules_at_sharded()

    def reset(self) -> None:
        """Forget every hold and exposure and drop the gradients that are not reduced yet."""
        self.holds = 0
        self.free_at_release = False
        self._exposures = 0
        if self.in_flight and self.group.device.type == "cpu":
            # Other ranks may never come to it. The process group keeps its buffers.
            self.in_flight = False
            self.group._all_gather_result = None
        self.free()
        self._point_modules_at_sharded()
        for parameter in self.group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
            parameter.unsharded_accumulated_grad = None
        self.contributed = False
        self.group._partial_reduce_output = None
        self._partial_layout = None

    def _point_modules_at_sharded(self) -> None:
        for parameter in self.group.fsdp_params:
            parameter._setattr_on_modules(parameter.sharded_param)

    def _point_modules_at_unsharded(self) -> None:
        for index, parameter in enumerate(self.group.fsdp_params):
            unsharded, sharded = parameter._unsharded_param, parameter.sharded_param
            trains = sharded.requires_grad
            if unsharded.requires_grad != trains:
                unsharded.requires_grad_(trains)
            if trains:
                self._required.add(index)
            parameter._setattr_on_modules(unsharded)

    def _check_dtypes(self) -> None:
        # One will do: conversions are of whole modules, and this runs at every gather.
        parameter = self.group.fsdp_params[0]
        dtype = parameter.sharded_param.dtype
        if dtype != parameter.orig_dtype:
            raise RuntimeError(
                f"unit {self.spec.name}: a parameter is {dtype} and was {parameter.orig_dtype} "
                "when its module was adopted: convert a model before adopt()"
            )

    def _materialise(self) -> None:
        # The unsharded parameters exist from the first copy-out on. A graph that is
        # captured before needs the tensors, not their contents.
        if self._parameter_index:
            return
        self._check_dtypes()
        for parameter in self.group.fsdp_params:
            if hasattr(parameter._sharded_local_tensor, "fsdp_post_all_gather"):
                self.gather()
                self.wait()
                self.free()
                return
        world_size = self.group.fsdp_params[0].mesh_info.shard_mesh_size
        with _normal_tensors():
            for parameter in self.group.fsdp_params:
                parameter.init_all_gather_outputs(
                    [parameter._sharded_param_data.numel()],
                    [parameter.param_dtype or parameter.orig_dtype],
                    world_size,
                    self.group.device,
                )
                parameter.init_unsharded_param()
                parameter.free_unsharded_param()
        self._register_parameters()

    def _register_parameters(self) -> None:
        for index, parameter in enumerate(self.group.fsdp_params):
            key = storage_key(parameter._unsharded_param)
            self._parameter_index[key] = index
            _unit_by_storage[key] = self

    # Gradients

    @property
    def trainable(self) -> bool:
        """Whether any parameter requires a gradient now."""
        return any(p.sharded_param.requires_grad for p in self.group.fsdp_params)

    def respecify(self) -> bool:
        """Look again at which parameters require a gradient: at the opening of a window.

        Returns:
            Whether :attr:`spec` has changed.

        Raises:
            RuntimeError: parameters of several dtypes require a gradient now, which did
                not when the module was adopted.
        """
        self._required.clear()
        trainable = self._trainable_now()
        if trainable == self._trainable:
            return False
        group = self.group
        self._set_reduction_dtypes([p for p in group.fsdp_params if p.sharded_param.requires_grad])
        self._trainable = trainable
        before, self.spec = self.spec, _specify(group, self.spec.name, self.spec.chunk)
        return self.spec != before

    def _trainable_now(self) -> tuple[bool, ...]:
        return tuple(p.sharded_param.requires_grad for p in self.group.fsdp_params)

    def _set_reduction_dtypes(self, parameters: Sequence[FSDPParam]) -> None:
        # FSDP2 looks once, at its lazy initialisation: nothing, where all was frozen then.
        dtypes = list(dict.fromkeys((p.orig_dtype, p.reduce_dtype) for p in parameters))
        if len({dtype for dtype, _ in dtypes}) > 1:
            raise RuntimeError(
                f"unit {self.spec.name}: parameters of {_listed(d for d, _ in dtypes)} require "
                "gradients now and did not all when the module was adopted: call "
                "requires_grad_(True) before adopt(), and freeze after it"
            )
        if dtypes:
            group: Any = self.group
            group._orig_dtype, group._reduce_dtype = dtypes[0]

    @property
    def sharded_parameters(self) -> list[nn.Parameter]:
        """The parameters as users and optimizers see them."""
        return [parameter.sharded_param for parameter in self.group.fsdp_params]

    @property
    def trained_parameters(self) -> list[nn.Parameter]:
        """The unsharded parameters that require a gradient: the leaves of autograd graphs."""
        return [
            parameter._unsharded_param
            for parameter in self.group.fsdp_params
            if hasattr(parameter, "_unsharded_param") and parameter._unsharded_param.requires_grad
        ]

    @property
    def tied_modules(self) -> list[nn.Module]:
        """The modules that share a parameter with another module."""
        modules: dict[nn.Module, None] = {}
        for parameter in self.group.fsdp_params:
            info = parameter._module_info
            sharing = dict.fromkeys((info.module, *info.shared_modules))
            if len(sharing) > 1:
                modules.update(sharing)
        return list(modules)

    @property
    def has_gradients(self) -> bool:
        """Whether there are full gradients that are not reduced yet."""
        return any(
            p.unsharded_accumulated_grad is not None
            or (hasattr(p, "_unsharded_param") and p._unsharded_param.grad is not None)
            for p in self.group.fsdp_params
        )

    @property
    def has_partial_sums(self) -> bool:
        """Whether there are reduced gradients that are not all-reduced over the replicas."""
        return self._partial_layout is not None

    @property
    def has_reduced_gradients(self) -> bool:
        """Whether any sharded parameter has a gradient."""
        return any(p.sharded_param.grad is not None for p in self.group.fsdp_params)

    def clear_reduced_gradients(self) -> None:
        """Set the sharded parameters' gradients to ``None``."""
        for parameter in self.group.fsdp_params:
            parameter.sharded_param.grad = None

    def set_gradients_aside(self) -> list[torch.Tensor | None]:
        """Take the full gradients away, for :meth:`take_gradients_back`."""
        aside: list[torch.Tensor | None] = []
        for parameter in self.group.fsdp_params:
            unsharded = parameter._unsharded_param
            aside.append(unsharded.grad)
            unsharded.grad = None
        return aside

    def take_gradients_back(self, aside: list[torch.Tensor | None]) -> None:
        """Add what was set aside to the full gradients that have come since.

        So what is assigned to a parameter's ``grad`` in between does not replace the
        gradients of other microbatches that are kept there.
        """
        for parameter, before in zip(self.group.fsdp_params, aside, strict=True):
            unsharded = parameter._unsharded_param
            if before is not None:
                unsharded.grad = before if unsharded.grad is None else before + unsharded.grad
        aside.clear()

    def add_gradients(
        self, parameters: Sequence[torch.Tensor], gradients: list[torch.Tensor | None]
    ) -> None:
        """Add full gradients that a graph computed.

        Args:
            parameters: unsharded parameters of this unit.
            gradients: the gradient of each, of its shape and dtype, or None. Cleared, so
                that nobody keeps them from being freed after the reduction.
        """
        known = self.group.fsdp_params
        for tensor, gradient in zip(parameters, gradients, strict=True):
            if gradient is None:
                continue
            parameter = known[self._parameter_index[storage_key(tensor)]]
            if not parameter.sharded_param.requires_grad:
                continue  # frozen since the forward: autograd would add nothing either
            unsharded = parameter._unsharded_param
            if unsharded.grad is None:
                unsharded.grad = gradient
            else:
                unsharded.grad = unsharded.grad + gradient
        gradients.clear()

    def accumulates(self, parameter: torch.Tensor) -> bool | None:
        """Whether the autograd pass under way adds to the gradient of ``parameter``.

        Args:
            parameter: an unsharded parameter of this unit, or what was saved of it.

        Returns:
            None if the parameter is frozen.
        """
        index = self._parameter_index[storage_key(parameter)]
        leaf = self.group.fsdp_params[index]._unsharded_param
        return accumulates_gradient(leaf) if leaf.requires_grad else None

    def accumulates_any(self) -> bool:
        """Whether the autograd pass under way adds to the gradient of any parameter."""
        return any(
            parameter._unsharded_param.requires_grad
            and accumulates_gradient(parameter._unsharded_param)
            for parameter in self.group.fsdp_params
            if hasattr(parameter, "_unsharded_param")
        )

    def reduce(self, all_reduce: bool = True) -> None:
        """Start the reduction of the full gradients into the sharded parameters' ``grad``.

        Every parameter that requires one takes part, with zeros where this rank has none:
        the ranks run the same collective, whatever each of them computed. Accumulates
        into a ``grad`` that is there. In flight until
        :meth:`Communication.wait_for_reductions`.

        Args:
            all_reduce: whether a replicated unit's gradients are all-reduced over the
                replicas, with the partial sums of reductions before this one. If not,
                they are such partial sums, and no ``grad`` yet.

        Raises:
            RuntimeError: other parameters require a gradient than those of which there
                are partial sums.
        """
        self._check_gradient_sync()
        layout = self._complete_gradients()
        if self._partial_layout is not None and layout != self._partial_layout:
            raise RuntimeError(
                f"unit {self.spec.name}: a parameter began to require a gradient in the middle of "
                "a window; call requires_grad_() on a replicated unit between windows"
            )
        self.contributed = False
        self.reduced = True
        self.collectives += 1
        group = self.group
        group.all_reduce_grads = all_reduce
        try:
            group.post_backward()
        finally:
            group.all_reduce_grads = True
            group._training_state = TrainingState.IDLE
        self._partial_layout = layout if group._partial_reduce_output is not None else None

    def _complete_gradients(self) -> list[int]:
        """Bring the full gradients into one dtype, and zeros to where there are none.

        Returns:
            The indices of the parameters that have one now.
        """
        group = self.group
        parameters = group.fsdp_params
        for parameter in parameters:
            parameter.accumulate_unsharded_grad_if_needed()
        # What was kept is in the reduction dtype; FSDP2 reduces no mixture.
        kept = any(parameter.unsharded_accumulated_grad is not None for parameter in parameters)
        taking_part, indices = [], []
        for index, parameter in enumerate(parameters):
            if not hasattr(parameter, "_unsharded_param"):
                continue
            if kept:
                parameter.to_accumulated_grad_if_needed()
            unsharded = parameter._unsharded_param
            if unsharded.grad is None and parameter.unsharded_accumulated_grad is None:
                if not (parameter.sharded_param.requires_grad or index in self._required):
                    continue
                if kept:
                    parameter.unsharded_accumulated_grad = torch.zeros_like(
                        unsharded, dtype=parameter.reduce_dtype, requires_grad=False
                    )
                else:
                    unsharded.grad = torch.zeros_like(unsharded, requires_grad=False)
            taking_part.append(parameter)
            indices.append(index)
        if any(parameter.orig_dtype != group._orig_dtype for parameter in taking_part):
            self._set_reduction_dtypes(taking_part)  # unfrozen in the middle of a window
        return indices

    def keep_gradients(self) -> None:
        """Accumulate the full gradients in the reduction dtype instead of reducing them."""
        self._check_gradient_sync()
        group = self.group
        group.reduce_grads = False
        try:
            group.post_backward()
        finally:
            group.reduce_grads = True
            group._training_state = TrainingState.IDLE

    def finish_reductions(self) -> None:
        """Make the current stream wait for this unit's reductions; a gather in flight stays."""
        group = self.group
        # finalize_backward() drops a gather that nobody has waited for. Inside a window
        # (a schedule scales one chunk's gradients before the last backward of another)
        # it may be a prefetch.
        gather, group._all_gather_result = group._all_gather_result, None
        group.finalize_backward()
        group._all_gather_result = gather

    def _check_gradient_sync(self) -> None:
        if not self.group.reduce_grads:
            raise RuntimeError(
                f"unit {self.spec.name}: set_requires_gradient_sync(False) has no effect on a "
                "module that a context schedules; remove it, or build the context with "
                'reduce_gradients="per_window" to reduce once per window'
            )
        if not self.group.all_reduce_grads:
            raise RuntimeError(
                f"unit {self.spec.name}: set_requires_all_reduce(False) has no effect on a module "
                "that a context schedules; remove it: a window all-reduces once"
            )


@dataclass(frozen=True)
class ShardedModule:
    """One ``fully_shard`` call: its modules, its units, and its casts.

    Args:
        modules: weak references to the modules that were given to ``fully_shard``.
        units: its units; none if nested calls took every parameter, several if the
            parameters were placed on several meshes.
        input_dtype: floating-point inputs are cast to it, if given.
        output_dtype: floating-point outputs are cast to it, if given.
    """

    modules: tuple[weakref.ref[nn.Module], ...]
    units: tuple[Unit, ...]
    input_dtype: torch.dtype | None
    output_dtype: torch.dtype | None


def _listed(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))


def find_sharded_modules(root: nn.Module) -> Iterator[tuple[str, FSDPModule]]:
    """The modules under ``root`` on which ``fully_shard`` was called, by path, in order."""
    for path, module in root.named_modules():
        if isinstance(module, FSDPModule):
            yield path, module


def _normal_tensors() -> contextlib.AbstractContextManager[object]:
    """Out of inference mode: the unsharded parameters are kept for training.

    And out of selective checkpoints: a forward may gather where its recomputation need not.
    """
    if not (torch.is_inference_mode_enabled() or inside_dispatch_mode()):
        return contextlib.nullcontext()
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(outside_of_selective_checkpoints())
        return stack.pop_all()


# Where a state of torch 2.11, which knows one group, keeps the others.
_FURTHER_GROUPS = "_fsdp_fx_further_groups"


def _param_groups(state: FSDPState) -> list[FSDPParamGroup]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group
    return [] if group is None else [group, *getattr(state, _FURTHER_GROUPS, ())]


def _initialise(states: Sequence[FSDPState]) -> dict[FSDPParamGroup, str]:
    """Run FSDP2's lazy initialisation, with one group per dtype where it wants that.

    Args:
        states: of each ``fully_shard`` call in a tree, parents first.

    Returns:
        What is to be added to the name of each group that is one of several of its call.
    """
    suffixes: dict[FSDPParamGroup, str] = {}
    for state in states:
        groups: list[FSDPParamGroup] = []
        before = _param_groups(state)
        for index, group in enumerate(before):
            parts = _by_dtype(group) if state._is_root is None else [group]
            for part in parts:
                marks = [str(index)] if len(before) > 1 else []
                if len(parts) > 1:
                    dtype = _shown(part.fsdp_params[0]).dtype
                    marks.append(str(dtype).removeprefix("torch."))
                suffixes[part] = f"[{', '.join(marks)}]" if marks else ""
            groups += parts
        if len(groups) > len(before):
            if hasattr(state, "_fsdp_param_groups"):
                state._fsdp_param_groups[:] = groups
            else:
                setattr(state, _FURTHER_GROUPS, groups[1:])
    for state in states:
        # Modules come parents first, so this initialises each topmost one; the
        # states below it are then initialised already.
        if state._is_root is None:
            state._lazy_init()
    for state in states:
        for group in getattr(state, _FURTHER_GROUPS, ()):
            group.comm_ctx = state._comm_ctx
            group._module_fqn = _param_groups(state)[0]._module_fqn
            group.lazy_init()
    return suffixes


def _by_dtype(group: FSDPParamGroup) -> list[FSDPParamGroup]:
    """The group, cut into one for each dtype if it trains parameters of several.

    FSDP2 refuses such a group: it reduces in one dtype. Dtypes are in the order of
    the parameters, which is the same on every rank.
    """
    parts: dict[torch.dtype, list[FSDPParam]] = {}
    trained: set[torch.dtype] = set()
    for parameter in group.fsdp_params:
        shown = _shown(parameter)
        parts.setdefault(shown.dtype, []).append(parameter)
        if shown.requires_grad:
            trained.add(shown.dtype)
    if len(trained) < 2:
        return [group]
    groups = [group, *(copy.copy(group) for _ in range(len(parts) - 1))]
    for part, parameters in zip(groups, parts.values(), strict=True):
        part.fsdp_params = parameters
        # These belong to one group each, and nothing is in them before the initialisation.
        part._module_to_pre_save_state_dict_hook_handle = {}
        part._module_to_pre_load_state_dict_hook_handle = {}
        part._post_forward_indices = []
    return groups


def _shown(parameter: FSDPParam) -> nn.Parameter:
    """What the module shows; FSDP2 takes that over at its lazy initialisation."""
    info = parameter._module_info
    shown: nn.Parameter = getattr(info.module, info.param_name)
    return shown


def require_supported(root: nn.Module) -> None:
    """Raise for what a context would otherwise silently ignore or get wrong.

    Args:
        root: a module with at least one ``fully_shard`` call in its tree.

    Raises:
        RuntimeError: a module is in the middle of a forward or backward under plain FSDP2.
        ValueError: a module uses an FSDP2 option that has no effect here.
    """
    states = _states(root)
    if not any(_param_groups(state) for _, state in states):
        raise ValueError(
            f"{type(root).__name__} has no parameters that fully_shard() manages: call it on "
            "modules with parameters"
        )
    for path, state in states:
        _refuse_unsupported(path, state)
        around = any(
            not other or path.startswith(other + ".") for other, _ in states if other != path
        )
        if len(state._modules) > 1 and not around:
            raise ValueError(
                f"module {path!r} shares one fully_shard() call with others and no unit is "
                f"around them: call fully_shard() on {type(root).__name__} too, after them"
            )


def require_memory_statistics(chunks: Sequence[nn.Module]) -> None:
    """Raise where nobody can say how much memory is allocated.

    Args:
        chunks: modules with ``fully_shard`` calls in their trees.

    Raises:
        ValueError: a unit is on the CPU.
    """
    for chunk in chunks:
        for path, state in _states(chunk):
            for group in _param_groups(state):
                if group.device.type == "cpu":
                    raise ValueError(
                        f'memory_budget="auto" fills the room under the recorded peak of allocated '
                        f"memory, and module {path or 'root'!r} is on the CPU, which reports none: "
                        "give memory_budget in bytes"
                    )


def require_unshared(chunks: Sequence[nn.Module]) -> None:
    """Raise for a tied parameter that became two: each would be trained on its own.

    Torch 2.11 does not say what a sharded parameter was before, and cannot be asked.

    Args:
        chunks: every chunk of the context, in the order of their names.

    Raises:
        ValueError: a parameter was sharded in two ``fully_shard`` calls.
    """
    seen: dict[int, str] = {}
    for index, chunk in enumerate(chunks):
        for path, state in _states(chunk):
            unit = ".".join((f"c{index}", path)) if path else f"c{index}"
            for group in _param_groups(state):
                for parameter in group.fsdp_params:
                    original = getattr(parameter, "_orig_param_uid", None)
                    if original is None:
                        continue
                    name = f"{parameter._module_info.param_name!r} of unit {unit}"
                    if original in seen:
                        raise ValueError(
                            f"parameter {name} was tied to {seen[original]}, and fully_shard() "
                            "made two of it: give the modules that share it to one "
                            "fully_shard([...]) call, in one chunk"
                        )
                    seen[original] = name


def _states(root: nn.Module) -> list[tuple[str, FSDPState]]:
    """FSDP2's state of each ``fully_shard`` call under ``root``, by its first module's path."""
    states: list[tuple[str, FSDPState]] = []
    for path, module in find_sharded_modules(root):
        state = _get_module_fsdp_state(cast(nn.Module, module))
        if state is not None and all(state is not known for _, known in states):
            states.append((path, state))
    return states


def _refuse_unsupported(path: str, state: FSDPState) -> None:
    where = f"module {path or 'root'!r}"
    if state._training_state is not TrainingState.IDLE:
        raise RuntimeError(
            f"{where} is in the middle of a forward or backward under plain FSDP2; "
            "adopt modules before their first forward, or between steps"
        )
    for group in _param_groups(state):
        if isinstance(group.offload_policy, CPUOffloadPolicy):
            raise ValueError(
                f"{where} uses CPUOffloadPolicy, which fsdp_fx does not schedule yet; "
                "shard it without an offload_policy"
            )
        if not group.unshard_in_backward:
            raise ValueError(
                f"{where}: set_unshard_in_backward(False) has no effect here; remove it"
            )
        if not group.reduce_grads:
            raise ValueError(
                f"{where}: set_requires_gradient_sync(False) has no effect here; remove it, or "
                'build the context with reduce_gradients="per_window"'
            )
        if not group.all_reduce_grads:
            raise ValueError(
                f"{where}: set_requires_all_reduce(False) has no effect here, a window all-reduces "
                "once; remove it"
            )
        mesh = group.post_forward_mesh_info
        if mesh is not None and mesh is not group.mesh_info and mesh != group.mesh_info:
            raise ValueError(
                f"{where}: reshard_after_forward as an int has no effect here, the program "
                "decides when a unit is freed; leave it out"
            )


def attach(
    root: nn.Module, chunk: str, communication: Communication | None
) -> tuple[list[ShardedModule], Communication]:
    """Take FSDP2's own hooks off the modules under ``root`` and make units of its groups.

    Args:
        root: a module with at least one ``fully_shard`` call in its tree.
        chunk: the chunk's name; unit names start with it.
        communication: what the context's other chunks share, or None for the first.

    Returns:
        The sharded modules in module order, and the communication they now share.

    Raises:
        RuntimeError, ValueError: see :func:`require_supported`.
    """
    require_supported(root)
    states = _states(root)
    suffixes = _initialise([state for _, state in states])
    result: list[ShardedModule] = []
    for path, state in states:
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        units = []
        for group in _param_groups(state):
            if communication is None:
                communication = Communication(group.comm_ctx, group.device)
            group.comm_ctx = communication._comm_context
            # The program says when a unit is freed, also after its backward.
            group.reshard_after_backward = False
            group._to_sharded()
            # Saving and loading would free a unit that is in use or prefetched. Modules
            # show the sharded parameters at those times anyway.
            for handle in (
                *group._module_to_pre_save_state_dict_hook_handle.values(),
                *group._module_to_pre_load_state_dict_hook_handle.values(),
            ):
                handle.remove()
            name = (f"{chunk}.{path}" if path else chunk) + suffixes[group]
            units.append(Unit(group, _specify(group, name, chunk), communication))
        if communication is not None:
            state._comm_ctx = communication._comm_context
        _hold_modules_weakly(state)
        policy = state._mp_policy
        result.append(
            ShardedModule(
                modules=tuple(weakref.ref(module) for module in state._modules),
                units=tuple(units),
                input_dtype=policy.param_dtype if policy.cast_forward_inputs else None,
                output_dtype=policy.output_dtype,
            )
        )
    for _, module in find_sharded_modules(root):
        # Dynamo treats modules with this mark specially (it traces their hooks
        # together with the call); units have hooks of their own.
        cast(Any, module)._is_fsdp_managed_module = False
    assert communication is not None
    return result, communication


class _WeakModules(Sequence[nn.Module]):
    """The modules of one ``fully_shard`` call, in the place of FSDP2's tuple of them."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._references = tuple(weakref.ref(module) for module in modules)

    def __len__(self) -> int:
        return len(self._references)

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[nn.Module]: ...
    def __getitem__(self, index: int | slice) -> nn.Module | Sequence[nn.Module]:
        if isinstance(index, slice):
            return tuple(_alive(reference) for reference in self._references[index])
        return _alive(self._references[index])


class _WeakModuleInfo:
    """Where a parameter is shown, in the place of FSDP2's ``ParamModuleInfo``.

    Args:
        module: a module that shows the parameter.
        param_name: its name there.
        shared_modules: the other modules that show it.
        shared_param_names: its name in each.
    """

    def __init__(
        self,
        module: nn.Module,
        param_name: str,
        shared_modules: Sequence[nn.Module],
        shared_param_names: Sequence[str],
    ) -> None:
        self._module = weakref.ref(module)
        self.param_name = param_name
        self._shared_modules = tuple(weakref.ref(shared) for shared in shared_modules)
        self.shared_param_names = list(shared_param_names)

    @property
    def module(self) -> nn.Module:
        """The module."""
        return _alive(self._module)

    @property
    def shared_modules(self) -> list[nn.Module]:
        """The other modules."""
        return [_alive(reference) for reference in self._shared_modules]


def _alive(reference: weakref.ref[nn.Module]) -> nn.Module:
    # A module that was taken out of the tree is nobody's: what is set on it is lost.
    module = reference()
    return nn.Module() if module is None else module


def _hold_modules_weakly(state: FSDPState) -> None:
    """Undo FSDP2's reference cycles through ``state``, which each of its modules holds.

    Otherwise a deleted model would keep its memory until Python next collects garbage.
    Nothing that is dropped here is used while FSDP2's hooks are off.
    """
    private: Any = state
    private._modules = _WeakModules(private._modules)
    private._modules_to_run_forward.clear()
    private._state_ctx.all_states.clear()
    private._states_to_forward_prefetch.clear()
    private._states_to_backward_prefetch.clear()
    for group in _param_groups(state):
        private_group: Any = group
        private_group.modules = private._modules
        # Its length tells FSDP2 that the hooks, which have been removed, were registered.
        for name in (
            "_module_to_pre_save_state_dict_hook_handle",
            "_module_to_pre_load_state_dict_hook_handle",
        ):
            handles = getattr(group, name)
            setattr(group, name, weakref.WeakKeyDictionary(handles))
        for parameter in group.fsdp_params:
            info: Any = parameter._module_info
            private_parameter: Any = parameter
            private_parameter._module_info = _WeakModuleInfo(
                info.module, info.param_name, info.shared_modules, info.shared_param_names
            )


def _specify(group: FSDPParamGroup, name: str, chunk: str) -> UnitSpec:
    elements = size = gradient = 0
    trained = []
    for index, parameter in enumerate(group.fsdp_params):
        numel = parameter._orig_size.numel()
        dtype = parameter.param_dtype or parameter.orig_dtype
        elements += numel
        size += numel * dtype.itemsize
        if parameter.sharded_param.requires_grad:
            trained.append(index)
            gradient += numel * (parameter.reduce_dtype or dtype).itemsize
    return UnitSpec(
        name=name,
        chunk=chunk,
        elements=elements,
        bytes=size,
        gradient_bytes=gradient,
        trainable=gradient > 0,
        replicas=getattr(group.mesh_info, "replicate_mesh_size", 1),
        trained=tuple(trained),
    )
