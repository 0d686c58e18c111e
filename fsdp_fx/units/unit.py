"""A unit: the parameters that one ``fully_shard`` call groups.

A unit does what it is told when it is told. Whether it *should* be gathered or
freed, and who still uses it, is :mod:`fsdp_fx.residency`'s business; the order is
the program's.
"""

from __future__ import annotations

import contextlib
import datetime
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..torch_internals import (
    accumulates_gradient,
    inside_dispatch_mode,
    is_shared,
    outside_of_selective_checkpoints,
)
from ..trace import UnitSpec
from .accumulators import is_fresh, mark_written, new_accumulator
from .collectives import (
    GatherInFlight,
    Sharding,
    ends_by,
    finish_gather,
    gather_in_place,
    gather_obstacle,
    reduce_in_place,
    reduction_obstacle,
    sharding_of,
    wait_for_gather,
)
from .private_names import FSDPCommContext, FSDPParam, FSDPParamGroup, ShardedState, TrainingState

__all__ = ["Communication", "Unit", "specify", "storage_key", "unit_of_tensor"]

_PATIENCE = datetime.timedelta(seconds=4)


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage, stable while its memory comes and goes.

    Of a parameter that is distributed over other ranks too (tensor parallelism): that of
    this rank's part.
    """
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
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

    def keep_reduction_inputs(self, counts: Iterable[int]) -> None:
        """Let as many reductions hold their input at once as any unit asks for.

        Args:
            counts: of each unit, by ``set_reduce_scatter_max_input_buffers`` (torch 2.13 on).
        """
        comm: Any = self._comm_context
        if hasattr(comm, "reduce_scatter_max_input_buffers"):
            comm.reduce_scatter_max_input_buffers = max(
                comm.reduce_scatter_max_input_buffers, *counts
            )

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
        "_abandoned",
        "_exposures",
        "_gather",
        "_gathered_from",
        "_group",
        "_home",
        "_kept_dtype",
        "_parameter_index",
        "_partial_in_place",
        "_partial_layout",
        "_required",
        "_sharding",
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
        self._sharding: Sharding | None = None
        self._gather: GatherInFlight | None = None
        # A gather on the CPU that was given up before it was done: it may write yet.
        self._abandoned: GatherInFlight | None = None
        # The stream that the full parameters' memory belongs to.
        self._home: torch.Stream | None = None
        self._gathered_from: tuple[tuple[int, int, int], ...] | None = None
        self._parameter_index: dict[int, int] = {}
        # Indices of the parameters whose partial sums are outstanding.
        self._partial_layout: list[int] | None = None
        self._partial_in_place = False
        self._kept_dtype: torch.dtype | None = None
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
        on_cpu = group.device.type == "cpu"
        abandoned = self._abandoned.work if self._abandoned is not None else None
        if abandoned is not None and abandoned.is_completed():
            self._abandoned = None
        # As long as that one may write, into a buffer; to the other ranks, which may gather in
        # place, that is the same all-gather on the CPU.
        with _normal_tensors():
            if self._abandoned is None and not gather_obstacle(group, self.sharding):
                self._materialise()
                if not on_cpu:
                    self._home = torch.accelerator.current_stream(group.device)
                self._gather = gather_in_place(group, self.sharding)
            else:
                # FORWARD selects the gather streams. On the CPU there are none, and only an
                # asynchronous collective lets compute go on meanwhile.
                with group.use_training_state(TrainingState.FORWARD):
                    group.unshard(async_op=on_cpu)
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
        if self._gather is not None:
            finish_gather(group, self._gather)
            self._gather = None
        else:
            if self._abandoned is not None:
                wait_for_gather(group, self._abandoned)
                self._abandoned = None
            # PRE_BACKWARD gives the gather's buffer back right after the copy-out, where
            # FORWARD would keep it until the next wait.
            with group.use_training_state(TrainingState.PRE_BACKWARD), _normal_tensors():
                group.wait_for_unshard()
            if not self._parameter_index:
                self._register_parameters()
            if not self._exposures:
                self._point_modules_at_sharded()
        self.in_flight = False
        self.unsharded = True

    def _wait_patiently(self, on_waiting: Callable[[], None]) -> None:
        result = self.group._all_gather_result
        if self._gather is not None:
            work = self._gather.work
        else:
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
            gather, self._gather = self._gather, None
            if gather is not None:
                wait_for_gather(group, gather)
            result, group._all_gather_result = group._all_gather_result, None
            if result is not None:
                if result.all_gather_event is not None and group.device.type != "cpu":
                    torch.accelerator.current_stream(group.device).wait_event(
                        result.all_gather_event
                    )
                if result.all_gather_work is not None:
                    result.all_gather_work.wait()
        if self._home is not None:
            # Its memory goes back to a stream that may not be the one that has used it.
            current = torch.accelerator.current_stream(group.device)
            if current != self._home:
                self._home.wait_stream(current)
            self._home = None
        # What FSDP2's _to_sharded() does, without what the modules show: that is decided
        # by expose() and conceal(), and costs more than all the rest.
        for parameter in group.fsdp_params:
            if self._abandoned is None and hasattr(parameter, "_unsharded_param"):
                parameter.free_unsharded_param()
            parameter.sharded_state = ShardedState.SHARDED
        group._sharded_state = ShardedState.SHARDED
        self.unsharded = False

    def abandon(self) -> None:
        """The unit's module is gone, and its memory with it, unless a gather still writes there."""
        if self._gather is not None and self._gather.event is not None:
            torch.accelerator.current_stream(self.communication.device).wait_event(
                self._gather.event
            )
        self._gather = None
        self.unsharded = self.in_flight = False

    @property
    def sharding(self) -> Sharding:
        """How the unit is sharded, looked at once."""
        if self._sharding is None:
            self._sharding = sharding_of(self.group)
        return self._sharding

    @property
    def obstacles(self) -> tuple[str | None, str | None]:
        """Why the unit is not gathered, and not reduced, in place; None where it is."""
        return (
            gather_obstacle(self.group, self.sharding),
            reduction_obstacle(self.group, self.sharding),
        )

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

    def reset(self, deadline: float = 0.0) -> None:
        """Forget every hold and exposure and drop the gradients that are not reduced yet.

        Args:
            deadline: until which ``time.monotonic()`` to wait for a gather in flight on the CPU.
        """
        self.holds = 0
        self.free_at_release = False
        self._exposures = 0
        if self.in_flight and self.group.device.type == "cpu":
            # Other ranks may never come to it. The process group keeps its buffers, and the
            # full parameters that it writes to keep their memory, unless it ends soon.
            self.in_flight = False
            self.group._all_gather_result = None
            gather, self._gather = self._gather, None
            if gather is not None and not ends_by(gather, deadline):
                self._abandoned = gather
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
            info = parameter._module_info
            shown = info.module._parameters.get(info.param_name)
            # None: it was taken out of the model, which is left to it.
            if shown is not None and shown is not sharded:
                self._point_modules_at_sharded()
                raise RuntimeError(
                    f"unit {self.spec.name}: {info.param_name!r} of {type(info.module).__name__} is "
                    "not the parameter that was adopted: torch.func.functional_call() and "
                    "parameters that are replaced after adopt() have no effect on a module that a "
                    "context schedules; change the weights in place, between windows"
                )
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
                self._point_modules_at_sharded()
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

    def let_go(self) -> None:
        """The unit's parameters are nobody's unit from here on."""
        for key in self._parameter_index:
            _unit_by_storage.pop(key, None)

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
        before = self.spec
        self._specify()
        return self.spec != before

    def keep_gradients_in(self, dtype: torch.dtype | None) -> None:
        """Choose what full gradients are kept in between backwards.

        Args:
            dtype: a floating dtype, of every parameter's; None for each one's reduction dtype.
        """
        self._kept_dtype = dtype
        self._specify()

    def _specify(self) -> None:
        before = self.spec
        self.spec = specify(
            self.group, before.name, before.chunk, before.kept_after_forward, self._kept_dtype
        )

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

    @property
    def reduced_gradient_bytes(self) -> int:
        """Bytes of the sharded parameters' gradients on the device."""
        gradients: list[Any] = [p.sharded_param.grad for p in self.group.fsdp_params]
        parts = [each._local_tensor for each in gradients if isinstance(each, DTensor)]
        return sum(part.nbytes for part in parts if part.device.type == self.group.device.type)

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
            if unsharded.grad is not None:
                unsharded.grad = unsharded.grad + gradient
            elif is_shared(gradient):
                # One value may be the gradient of two parameters; each is added to by itself.
                unsharded.grad = gradient.clone()
            else:
                unsharded.grad = gradient
        gradients.clear()

    def gradient_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """What the full gradient of an unsharded parameter is kept in until it is reduced."""
        known = self.group.fsdp_params[self._parameter_index[storage_key(parameter)]]
        return self._gradient_dtype(known)

    def _gradient_dtype(self, parameter: FSDPParam) -> torch.dtype:
        return (
            self._kept_dtype
            or parameter.reduce_dtype
            or parameter.param_dtype
            or parameter.orig_dtype
        )

    def accumulators(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The full gradients of some parameters, to be added to where they are.

        Args:
            parameters: unsharded parameters of this unit.

        Returns:
            A contiguous tensor of the shape of each, in :meth:`gradient_dtype`. What has no
            gradient yet gets one that holds nothing (:mod:`fsdp_fx.units.accumulators`);
            what has been frozen since its forward, one that nobody reads.
        """
        result = []
        for tensor in parameters:
            parameter = self.group.fsdp_params[self._parameter_index[storage_key(tensor)]]
            if not parameter.sharded_param.requires_grad:
                result.extend(self.scratch_gradients([tensor]))
                continue
            # What another path has left in `grad` is added when the gradients are kept or
            # reduced: it may be the gradient of another parameter, too.
            gradient = parameter.unsharded_accumulated_grad
            if gradient is None:
                gradient = new_accumulator(tensor.shape, self._gradient_dtype(parameter), tensor)
            elif is_fresh(gradient) is None:
                gradient = mark_written(gradient.contiguous())
            parameter.unsharded_accumulated_grad = gradient
            result.append(gradient)
        return result

    def transient_gradients(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The full gradients of some parameters that are reduced as soon as they are there.

        What no gradient is there to be added to is written in the parameter's dtype, unless that
        is larger than the reduction's, where autograd would have left it: the reduction casts
        it, when the input of the reduction before it is gone. Both in the reduction's dtype
        would be there at the same time otherwise. In the dtype that gradients are kept in it
        would be rounded for nothing.

        Args:
            parameters: unsharded parameters of this unit.

        Returns:
            What :meth:`accumulators` returns, but for the dtype.
        """
        result = []
        for tensor in parameters:
            parameter = self.group.fsdp_params[self._parameter_index[storage_key(tensor)]]
            unsharded = parameter._unsharded_param
            reduced = parameter.reduce_dtype or tensor.dtype
            if (
                tensor.dtype != self._gradient_dtype(parameter)
                and tensor.dtype.itemsize <= reduced.itemsize
                and parameter.sharded_param.requires_grad
                and parameter.unsharded_accumulated_grad is None
                and unsharded.grad is None
                and not parameter.is_dtensor
            ):
                unsharded.grad = new_accumulator(tensor.shape, tensor.dtype, tensor)
                result.append(unsharded.grad)
            else:
                result.extend(self.accumulators([tensor]))
        return result

    def drop_unwritten_gradients(self) -> None:
        """Take back the gradients that were given to products which have not written them."""
        for parameter in self.group.fsdp_params:
            gradient = parameter.unsharded_accumulated_grad
            if gradient is not None and is_fresh(gradient):
                parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                gradient = parameter._unsharded_param.grad
                if gradient is not None and is_fresh(gradient):
                    parameter._unsharded_param.grad = None

    def scratch_gradients(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What :meth:`accumulators` gives, for gradients that are not to be kept."""
        return [
            new_accumulator(tensor.shape, self.gradient_dtype(tensor), tensor)
            for tensor in parameters
        ]

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
        in_place = (
            self._partial_in_place
            if self._partial_layout is not None
            else not reduction_obstacle(group, self.sharding, layout)
        )
        try:
            if in_place:
                reduce_in_place(group, layout, all_reduce)
            else:
                group.post_backward()
        finally:
            group.all_reduce_grads = True
            group._training_state = TrainingState.IDLE
        self._partial_in_place = in_place
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
        # What was kept is in one dtype; FSDP2 reduces no mixture.
        kept = any(parameter.unsharded_accumulated_grad is not None for parameter in parameters)
        taking_part, indices = [], []
        for index, parameter in enumerate(parameters):
            if not hasattr(parameter, "_unsharded_param"):
                continue
            if kept:
                self._keep_gradient(parameter)
            unsharded = parameter._unsharded_param
            if unsharded.grad is None and parameter.unsharded_accumulated_grad is None:
                if not (parameter.sharded_param.requires_grad or index in self._required):
                    continue
                if kept:
                    parameter.unsharded_accumulated_grad = torch.zeros_like(
                        unsharded,
                        dtype=self._kept_dtype or parameter.reduce_dtype,
                        requires_grad=False,
                    )
                else:
                    unsharded.grad = torch.zeros_like(unsharded, requires_grad=False)
            if self._kept_dtype is not None:
                self._cast_kept_gradient(parameter)
            taking_part.append(parameter)
            indices.append(index)
        if any(parameter.orig_dtype != group._orig_dtype for parameter in taking_part):
            self._set_reduction_dtypes(taking_part)  # unfrozen in the middle of a window
        return indices

    @staticmethod
    def _cast_kept_gradient(parameter: FSDPParam) -> None:
        # Where there is no reduction dtype, what is reduced is so in the dtype that it has:
        # on every rank the same, be there anything kept or not.
        gradient = parameter.unsharded_accumulated_grad
        if gradient is not None and parameter.reduce_dtype is None:
            own = parameter.param_dtype or parameter.orig_dtype
            parameter.unsharded_accumulated_grad = gradient.to(own)

    def keep_gradients(self) -> None:
        """Accumulate the full gradients in the dtype that they are kept in, and reduce nothing."""
        self._check_gradient_sync()
        for parameter in self.group.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed()
            self._keep_gradient(parameter)

    def _keep_gradient(self, parameter: FSDPParam) -> None:
        """Bring what autograd has left of a gradient into the dtype that it is kept in."""
        dtype = self._kept_dtype
        if dtype is None:
            parameter.to_accumulated_grad_if_needed()
            return
        gradient = parameter._unsharded_param.grad if self._parameter_index else None
        if gradient is not None:
            # Detached, so that it is seen to share its memory if it is not a copy: a graph may
            # have it for the gradient of another unit's parameter, which comes later.
            parameter.unsharded_accumulated_grad = gradient.to(dtype).detach()
            parameter._unsharded_param.grad = None

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


def _listed(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))


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


def specify(
    group: FSDPParamGroup,
    name: str,
    chunk: str,
    kept_after_forward: bool = False,
    kept_dtype: torch.dtype | None = None,
) -> UnitSpec:
    """The name and sizes of a unit, as plain data."""
    elements = size = gradient = kept = 0
    trained = []
    for index, parameter in enumerate(group.fsdp_params):
        numel = parameter._orig_size.numel()
        dtype = parameter.param_dtype or parameter.orig_dtype
        elements += numel
        size += numel * dtype.itemsize
        if parameter.sharded_param.requires_grad:
            trained.append(index)
            reduced = parameter.reduce_dtype or dtype
            gradient += numel * reduced.itemsize
            kept += numel * (kept_dtype or reduced).itemsize
    return UnitSpec(
        name=name,
        chunk=chunk,
        elements=elements,
        bytes=size,
        gradient_bytes=gradient,
        trainable=gradient > 0,
        replicas=getattr(group.mesh_info, "replicate_mesh_size", 1),
        trained=tuple(trained),
        kept_after_forward=kept_after_forward,
        kept_gradient_bytes=kept,
    )
