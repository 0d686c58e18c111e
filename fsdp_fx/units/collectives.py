"""Collectives without copies: gathers into the full parameters, reductions out of the gradients.

FSDP2 copies the shards of a unit into one buffer, gathers that, and copies each parameter out
of what came; gradients are copied into one buffer and reduced from there. Where every parameter
is sharded evenly on its first dimension, the shards one behind the other *are* the parameter:
one coalesced call then gathers each into its own storage, and another reduces each gradient
from where it is. What does not fit takes FSDP2's own way, a unit as a whole;
:func:`gather_obstacle` and :func:`reduction_obstacle` say why.

When something is gathered or reduced, and which way, is :class:`fsdp_fx.units.Unit`'s business.

Streams and memory. The full parameters belong to the stream that was current when their gather
was issued, the compute stream: they are allocated there, and what is freed goes back there.
The gather stream waits for it before it writes, as kernels queued earlier may still read what
that memory was before; compute waits for the gather before it reads. So after the kernels that
use a full parameter are queued its memory can be given back at once, and whoever gets it next
on the compute stream comes after them: nothing is recorded on streams, and the host waits for
nothing. A gather that nobody waited for is waited for before its memory is given back. What is
cast for a gather belongs to the gather stream and dies there. The inputs of a reduction belong
to the compute stream too, and are kept until it has waited for the reduction; the results
belong to the reduction stream, and live as long as the gradients that are views of them.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    ReduceScatterOptions,
)
from torch.distributed.tensor import DTensor

from ..torch_internals import inside_functorch_transform, profiling
from .private_names import (
    AllReduceState,
    DDPMeshInfo,
    DefaultAllGather,
    DefaultReduceScatter,
    FSDPParam,
    FSDPParamGroup,
    ReduceScatterState,
    ShardedState,
    _get_gradient_divide_factors,
)

__all__ = [
    "GatherInFlight",
    "Sharding",
    "ends_by",
    "finish_gather",
    "gather_in_place",
    "gather_obstacle",
    "reduce_in_place",
    "reduction_obstacle",
    "sharding_of",
    "wait_for_gather",
]

# Elements. NCCL is slower on what does not begin at 16 bytes, which the parts of a buffer do.
_ALIGNMENT = 16

_ASYNCHRONOUS: Any = AllgatherOptions()
_ASYNCHRONOUS.asyncOp = True
_ON_THE_STREAM: Any = AllgatherOptions()
_ON_THE_STREAM.asyncOp = False


@dataclass(frozen=True)
class Sharding:
    """What never changes of how a unit is sharded.

    Args:
        obstacle: why it can neither be gathered nor reduced in place, or None.
        gather_obstacle: why it cannot be gathered in place, or None.
        dtype: that it is gathered in.
    """

    obstacle: str | None
    gather_obstacle: str | None
    dtype: torch.dtype


@dataclass(frozen=True)
class GatherInFlight:
    """A gather in place that nobody has waited for.

    Args:
        outputs: what it writes, one for each parameter. They live as long as it runs.
        event: recorded behind it; None on the CPU.
        work: on the CPU, where it runs by itself, to wait for; else None.
    """

    outputs: list[torch.Tensor]
    event: torch.Event | None
    work: dist.Work | None


def sharding_of(group: FSDPParamGroup) -> Sharding:
    """How the unit is sharded, after FSDP2's lazy initialisation."""
    parameters = group.fsdp_params
    ranks = group._all_gather_process_group.size()
    dtypes = list(dict.fromkeys(p.param_dtype or p.orig_dtype for p in parameters))
    obstacle = gather = None
    if ranks == 1:
        obstacle = "there is one rank to shard over"
    for parameter in parameters:
        name = parameter._module_info.param_name
        if obstacle is None:
            obstacle = _uneven(parameter, ranks, name)
        if any(each.is_inference() for each in parameter.all_gather_outputs):
            gather = f"parameter {name!r} was made in inference mode"
    if len(dtypes) > 1:
        gather = f"its parameters are gathered in {' and '.join(str(each)[6:] for each in dtypes)}"
    return Sharding(obstacle, obstacle or gather, dtypes[0])


def _uneven(parameter: FSDPParam, ranks: int, name: str) -> str | None:
    if parameter.fsdp_placement.dim != 0:
        return f"parameter {name!r} is sharded on dimension {parameter.fsdp_placement.dim}"
    if parameter._orig_size[0] % ranks:
        return f"parameter {name!r} has {parameter._orig_size[0]} rows for {ranks} ranks"
    if not parameter._orig_size.numel():
        return f"parameter {name!r} is empty"
    if parameter.orig_dtype.is_complex:
        return f"parameter {name!r} is complex"
    if parameter.offload_to_cpu:
        return "its shards are on the CPU"
    return None


def gather_obstacle(group: FSDPParamGroup, sharding: Sharding) -> str | None:
    """Why the unit cannot be gathered in place now; None if it can."""
    if sharding.gather_obstacle is not None:
        return sharding.gather_obstacle
    if type(group._all_gather_comm) is not DefaultAllGather:
        return f"all-gathers go through {type(group._all_gather_comm).__name__}"
    for parameter in group.fsdp_params:
        # Shards may have been replaced.
        if type(parameter._sharded_param_data) is not torch.Tensor or hasattr(
            parameter._sharded_local_tensor, "fsdp_pre_all_gather"
        ):
            return f"parameter {parameter._module_info.param_name!r} is a tensor of its own kind"
    if inside_functorch_transform():
        return "a transform of torch.func is running"
    return None


def reduction_obstacle(
    group: FSDPParamGroup, sharding: Sharding, indices: Sequence[int] = ()
) -> str | None:
    """Why the unit cannot be reduced in place now; None if it can.

    Args:
        group: the unit's.
        sharding: of the unit.
        indices: the parameters whose gradients are to be reduced.
    """
    if sharding.obstacle is not None:
        return sharding.obstacle
    if type(group._reduce_scatter_comm) is not DefaultReduceScatter:
        return f"reduce-scatters go through {type(group._reduce_scatter_comm).__name__}"
    if group._all_reduce_hook is not None:
        return "it has an all-reduce hook"
    dtypes = set()
    for index in indices:
        parameter = group.fsdp_params[index]
        gradient = parameter.unsharded_accumulated_grad
        if gradient is None:
            gradient = parameter._unsharded_param.grad
        assert gradient is not None
        reduced = parameter.sharded_param.grad
        name = parameter._module_info.param_name
        if type(gradient) is not torch.Tensor and not parameter.is_dtensor:
            return f"the gradient of parameter {name!r} is a tensor of its own kind"
        if reduced is not None and not isinstance(reduced, DTensor):
            return f"parameter {name!r} has a gradient that is not a DTensor"
        dtypes.add(gradient.dtype)
    return "its gradients are of several dtypes" if len(dtypes) > 1 else None


@torch.no_grad()
def gather_in_place(group: FSDPParamGroup, sharding: Sharding) -> GatherInFlight:
    """Start the all-gather of every shard into the storage of its full parameter.

    Args:
        group: a unit's, without an obstacle, whose full parameters exist without memory.
        sharding: of the unit.
    """
    device: Any = group.device_handle
    parameters = group.fsdp_params
    for parameter in parameters:
        parameter.alloc_all_gather_outputs()
    # Not the parameters themselves, by version counter: to autograd, which may look at what it
    # has saved while the gather runs, they are what they were.
    outputs = [parameter.all_gather_outputs[0].data for parameter in parameters]
    shards = [parameter._sharded_param_data for parameter in parameters]
    processes: Any = group._all_gather_process_group
    with _named(group, "FSDP::all_gather"):
        if group.device.type == "cpu":
            # Compute goes on meanwhile: there are no streams, but threads of the process group.
            work = processes.allgather_into_tensor_coalesced(
                outputs, _cast(shards, sharding.dtype), _ASYNCHRONOUS
            )
            return GatherInFlight(outputs, None, work)
        stream = group.comm_ctx.all_gather_stream
        stream.wait_stream(device.current_stream())
        with device.stream(stream):
            work = processes.allgather_into_tensor_coalesced(
                outputs, _cast(shards, sharding.dtype), _ON_THE_STREAM
            )
            if work is not None:
                work.wait()  # of the stream, for what runs on one of the process group
            return GatherInFlight(outputs, stream.record_event(), None)


def _cast(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The tensors in ``dtype``, flat and contiguous; those that are not are put into one buffer."""
    result = [tensor.reshape(-1) for tensor in tensors]
    others = [index for index, tensor in enumerate(result) if tensor.dtype != dtype]
    if others:
        sources = [result[index] for index in others]
        parts = _split(sources, dtype)[1]
        torch._foreach_copy_(parts, sources)
        for index, part in zip(others, parts, strict=True):
            result[index] = part
    return result


def _split(
    like: Sequence[torch.Tensor], dtype: torch.dtype, ranks: int = 1
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A new buffer, and an aligned part of it for a ``ranks``-th of each of ``like``."""
    sizes = [tensor.numel() // ranks for tensor in like]
    places = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
    # What is between the parts is reduced over replicas with them.
    make = torch.empty if places[-1] == sum(sizes) else torch.zeros
    buffer = make(places[-1], dtype=dtype, device=like[0].device)
    return buffer, [
        buffer[place : place + size] for place, size in zip(places, sizes, strict=False)
    ]


def wait_for_gather(group: FSDPParamGroup, gather: GatherInFlight) -> None:
    """Make the current stream wait for ``gather``; on the CPU, the host."""
    if gather.event is not None:
        device: Any = group.device_handle
        device.current_stream().wait_event(gather.event)
    if gather.work is not None:
        gather.work.wait()


def ends_by(gather: GatherInFlight, deadline: float) -> bool:
    """Whether a gather on the CPU has ended, be it with an error.

    Args:
        gather: the gather.
        deadline: until which ``time.monotonic()`` to wait for it.
    """
    assert gather.work is not None
    left = deadline - time.monotonic()
    if left > 0 and not gather.work.is_completed():
        try:
            gather.work.wait(datetime.timedelta(seconds=left))
        except RuntimeError:  # not done yet, or failed
            return gather.work.is_completed()
    return gather.work.is_completed()


def finish_gather(group: FSDPParamGroup, gather: GatherInFlight) -> None:
    """Make compute wait for ``gather``, after which the unit is unsharded."""
    wait_for_gather(group, gather)
    for parameter in group.fsdp_params:
        trains = parameter.sharded_param.requires_grad
        if parameter._unsharded_param.requires_grad != trains:
            parameter._unsharded_param.requires_grad_(trains)
        parameter.sharded_state = ShardedState.UNSHARDED
    group._sharded_state = ShardedState.UNSHARDED


@torch.no_grad()
def reduce_in_place(group: FSDPParamGroup, indices: Sequence[int], all_reduce: bool) -> None:
    """Start the reduction of full gradients from where they are.

    What FSDP2's ``post_backward`` does but for the copy, bit for bit.

    Args:
        group: a unit's, without an obstacle.
        indices: the parameters to reduce the gradients of. They are taken from these.
        all_reduce: whether to all-reduce a replicated unit's gradients over the replicas, or
            to keep partial sums.
    """
    private: Any = group
    device: Any = group.device_handle
    current = device.current_stream()
    parameters = [group.fsdp_params[index] for index in indices]
    with _named(group, "FSDP::post_backward_reduce"):
        gradients = [_take_gradient(parameter) for parameter in parameters]
        _drop_reduction_inputs(group, current)
        if not parameters:
            return
        group._wait_for_post_backward()
        _reduce(private, device, current, parameters, gradients, all_reduce)


def _reduce(
    group: Any,
    device: Any,
    current: Any,
    parameters: Sequence[FSDPParam],
    gradients: list[torch.Tensor],
    all_reduce: bool,
) -> None:
    processes = group._reduce_scatter_process_group
    replicas = group._all_reduce_process_group if isinstance(group.mesh_info, DDPMeshInfo) else None
    dtype = group._reduce_dtype or gradients[0].dtype
    before, after, scatter_op, reduce_op = _get_gradient_divide_factors(
        processes,
        replicas,
        dtype,
        group.device.type,
        group.gradient_divide_factor,
        group.force_sum_reduction_for_comms,
    )
    inputs = _cast(gradients, dtype)
    gradients.clear()
    if before is not None and before != 1:
        # Two parameters may have one gradient: it is not divided where it is.
        inputs = list(torch._foreach_div(inputs, before))
    stream = group.comm_ctx.reduce_scatter_stream
    stream.wait_stream(current)
    with device.stream(stream):
        reduced, parts = _split(inputs, dtype, processes.size())
        options: Any = ReduceScatterOptions()
        options.reduceOp = scatter_op
        options.asyncOp = False
        work = processes.reduce_scatter_tensor_coalesced(parts, inputs, options)
        if work is not None:
            work.wait()
        _keep_reduction_inputs(group, inputs, stream.record_event())
        if replicas is not None:
            partial = group._partial_reduce_output
            if not all_reduce:
                if partial is not None:
                    partial += reduced
                    reduced = partial
                group._partial_reduce_output = reduced
                _reduced(group, stream)
                return
            if partial is not None:
                reduced += partial
            group._partial_reduce_output = None
    if replicas is not None:
        scattered, stream = stream, group.comm_ctx.all_reduce_stream
        stream.wait_stream(scattered)
        with device.stream(stream):
            dist.all_reduce(reduced, group=replicas, op=reduce_op)
            # Kept until the next reduction of this unit, as its memory is the other stream's.
            group._all_reduce_state = AllReduceState(reduced, stream.record_event())
    with device.stream(stream):
        if after is not None and after != 1:
            reduced.div_(after)
        if group._orig_dtype is not None and group._orig_dtype != dtype:
            whole = reduced.to(group._orig_dtype)
            parts = [
                whole[part.storage_offset() : part.storage_offset() + part.numel()]
                for part in parts
            ]
        _accumulate(parameters, parts)
        _reduced(group, stream)


def _accumulate(parameters: Sequence[FSDPParam], parts: Sequence[torch.Tensor]) -> None:
    sums: list[torch.Tensor] = []
    added: list[torch.Tensor] = []
    for parameter, part in zip(parameters, parts, strict=True):
        sharded: Any = parameter.sharded_param
        gradient = part.view(parameter.sharded_size)
        if sharded.grad is None:
            sharded.grad = parameter.to_sharded_dtensor(gradient)
        else:
            sums.append(sharded.grad._local_tensor)
            added.append(gradient)
    if sums:
        torch._foreach_add_(sums, added)
    for parameter in parameters:
        hooks: Any = getattr(parameter.sharded_param, "_post_accumulate_grad_hooks", None) or {}
        for hook in hooks.values():
            hook(parameter.sharded_param)


def _take_gradient(parameter: FSDPParam) -> torch.Tensor:
    gradient = parameter.unsharded_accumulated_grad
    if gradient is not None:
        parameter.unsharded_accumulated_grad = None
    else:
        gradient = parameter._unsharded_param.grad
        assert gradient is not None
        parameter._unsharded_param.grad = None
    # Of one that is distributed further, this rank's part.
    return parameter._get_grad_inner_tensor(gradient) if parameter.is_dtensor else gradient


# FSDP2 keeps one input up to torch 2.11, as many as are asked for later.


def _drop_reduction_inputs(group: Any, current: Any) -> None:
    """Wait for earlier reductions, and let go of their inputs, until one more can be kept."""
    communication = group.comm_ctx
    if hasattr(communication, "reduce_scatter_states"):
        dropped = []
        states = communication.reduce_scatter_states
        # The groups of one module count as one.
        if group._param_group_index == group._num_param_groups - 1:
            while len(states) >= communication.reduce_scatter_max_input_buffers:
                dropped.append(states.pop(0))
    else:
        dropped = [communication.reduce_scatter_state]
        communication.reduce_scatter_state = None
    for state in dropped:
        if state is not None and state.event is not None:
            current.wait_event(state.event)


def _keep_reduction_inputs(group: Any, inputs: Any, event: Any) -> None:
    communication, state = group.comm_ctx, ReduceScatterState(inputs, event)
    if hasattr(communication, "reduce_scatter_states"):
        communication.reduce_scatter_states.append(state)
    else:
        communication.reduce_scatter_state = state


def _reduced(group: Any, stream: Any) -> None:
    """What FSDP2's end of a backward waits for."""
    group._post_reduce_event = stream.record_event()
    events = getattr(group.comm_ctx, "_last_post_reduce_events", None)
    if events is not None:
        events[stream] = group._post_reduce_event


def _named(group: Any, what: str) -> contextlib.AbstractContextManager[object]:
    """A range of this name in profiles; nothing where nobody profiles."""
    if not profiling():
        return contextlib.nullcontext()
    return torch.profiler.record_function(group._with_fqn(what))
