"""Process groups whose collectives are late, so that a stream that does not wait is found out.

A collective sleeps on the current stream before it reads, spoils what it is to write, and
sleeps again before it writes. Whoever reads too early reads NaN; so does what was queued before
and whose memory was given away too early. What a group does in the end:

- ``"nccl"``: the same collective over NCCL, one GPU a rank;
- ``"host"``: the same over gloo, through the host, for ranks that share a GPU. The host waits
  for each, so it is never far ahead of the GPU;
- ``"alone"``: there is one rank of the several, and nobody is waited for. What the others would
  send is made of what this one has: a gathered tensor is its shard over and over, a reduced one
  the mean of its own parts. `examples/emulated_ranks.py` does the same, as fast as a link.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

__all__ = ["Way", "nap", "start"]

Way = Literal["nccl", "host", "alone"]
BACKEND = "slow"
NAPS = (0, 0, 200_000, 1_000_000)  # cycles of the GPU: up to half a millisecond


def nap(draw: random.Random, device: torch.device) -> None:
    """Sleeps on the current stream, for as long as is drawn."""
    cycles = draw.choice(NAPS)
    if cycles and device.type == "cuda":
        torch.cuda._sleep(cycles)


class _Done(dist.Work):
    """What was issued on the current stream needs no waiting for by that stream."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class SlowRanks(dist.ProcessGroup):
    """A process group of gathers and reductions that are late.

    Args:
        way: what it does after the sleep.
        rank: of this process.
        size: how many ranks.
        inner: the group that communicates, or None if this rank is alone.
    """

    def __init__(self, way: Way, rank: int, size: int, inner: Any) -> None:
        super().__init__(rank, size)
        self._way, self._rank, self._size, self._inner = way, rank, size, inner
        self._draw = random.Random(rank)

    def getBackendName(self) -> str:
        return BACKEND

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    def _gather(self, outputs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> _Done:
        shards = self._spoil(outputs, shards)
        if self._way == "alone":
            for output, shard in zip(outputs, shards, strict=True):
                output.view(self._size, -1).copy_(shard.view(1, -1))
            return _Done()
        options: Any = AllgatherOptions()
        options.asyncOp = False

        def collective(outputs: list[torch.Tensor], shards: list[torch.Tensor]) -> Any:
            return self._inner.allgather_into_tensor_coalesced(outputs, shards, options)

        return self._run(collective, outputs, shards)

    def _reduce(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: Any
    ) -> _Done:
        inputs = self._spoil(outputs, inputs)
        if self._way == "alone":
            average = op == dist.ReduceOp.AVG
            assert average or op == dist.ReduceOp.SUM, op
            for output, whole in zip(outputs, inputs, strict=True):
                total = whole.view(self._size, -1).sum(0)
                output.view(-1).copy_(total / self._size if average else total)
            return _Done()
        options: Any = ReduceScatterOptions()
        options.reduceOp, options.asyncOp = op, False

        def collective(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
            return self._inner.reduce_scatter_tensor_coalesced(outputs, inputs, options)

        return self._run(collective, outputs, inputs)

    def _spoil(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Copies of the inputs, which may lie inside of the outputs."""
        nap(self._draw, outputs[0].device)
        result = [each.clone() for each in inputs]
        for output in outputs:
            output.fill_(float("nan"))
        nap(self._draw, outputs[0].device)
        return result

    def _run(
        self, collective: Any, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> _Done:
        if self._way == "nccl":
            work = collective(list(outputs), list(inputs))
            if work is not None:
                work.wait()  # of the stream
            return _Done()
        results = [torch.empty(each.shape, dtype=each.dtype) for each in outputs]
        work = collective(results, [each.cpu() for each in inputs])
        if work is not None:
            work.wait()
        arrived = [each.to(outputs[0].device) for each in results]
        nap(self._draw, outputs[0].device)  # the host has slept through the one before
        for output, each in zip(outputs, arrived, strict=True):
            output.copy_(each)
        return _Done()

    def _allgather_base(self, output: torch.Tensor, shard: torch.Tensor, opts: Any = None) -> _Done:
        return self._gather([output], [shard])

    def _reduce_scatter_base(self, output: torch.Tensor, inputs: torch.Tensor, opts: Any) -> _Done:
        return self._reduce([output], [inputs], opts.reduceOp)

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], opts: Any = None
    ) -> _Done:
        return self._gather(outputs, shards)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any
    ) -> _Done:
        return self._reduce(outputs, inputs, opts.reduceOp)

    # What torch 2.13 calls them.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced


def start(way: Way, device: torch.device, rank: int, size: int, store: str) -> DeviceMesh:
    """Begins a process group; the mesh to shard over has collectives that are late.

    Args:
        way: what communicates.
        device: of this rank.
        rank: of this process.
        size: how many ranks, of which this one is the only one if it is alone.
        store: a file that does not exist, the same for every rank.
    """

    def make(_: Any, rank: int, size: int, timeout: Any) -> SlowRanks:
        return SlowRanks(way, rank, size, None if way == "alone" else dist.group.WORLD)

    dist.Backend.register_backend(BACKEND, make, devices=["cpu", "cuda"])
    if way == "alone":
        dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=size)
        return init_device_mesh(device.type, (size,))
    backend = "nccl" if way == "nccl" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    group = dist.new_group(backend=BACKEND)
    return DeviceMesh.from_group(group, device.type, mesh=list(range(size)))
