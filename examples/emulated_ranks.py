"""One GPU that stands for one rank of several: collectives that cost what a link would.

    emulated_ranks.start(2, bandwidth=300e9)   # in the place of dist.init_process_group("nccl")

A process group of `ranks` ranks of which only rank 0 exists. Its collectives are copies on
the current stream, as NCCL's are: a few thread blocks, paced so that a collective takes as
long as its bytes take on the link, one after the other in the order in which they were issued,
on whatever streams, as on one NCCL communicator. They keep those multiprocessors from other kernels and
load the memory as a real collective does. What the absent ranks would send is made of what
this one has: a gathered tensor is this rank's shard over and over, and what a reduction adds
up is this rank's own part for each of the ranks. So two programs that gather and reduce the
same can still be compared number by number, and allocated memory is what a real rank has.

Not emulated: latency, ranks that wait for each other, and NCCL's own buffers.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

BACKEND = "emulated"
BLOCKS = 24  # thread blocks of a collective, one a multiprocessor, as NCCL uses over NVLink
THREADS = 512
TILE = 16384  # elements that a thread block moves at once


@triton.jit
def emulated_all_gather(
    shards,
    outputs,
    elements,
    tiles,
    nanoseconds,
    ranks: tl.constexpr,
    first: tl.constexpr,
    tile: tl.constexpr,
):
    """Writes each shard to its place of every rank, from `first` on, not faster than the link."""
    begin = globaltimer()
    before = 0
    for each in tl.static_range(len(shards)):
        for index in range(tl.program_id(0), tl.cdiv(elements[each], tile), tl.num_programs(0)):
            places = index.to(tl.int64) * tile + tl.arange(0, tile)
            inside = places < elements[each]
            values = tl.load(shards[each] + places, mask=inside)
            for rank in tl.static_range(first, ranks):
                tl.store(outputs[each] + rank * elements[each] + places, values, mask=inside)
            due = begin + (before + index + 1).to(tl.int64) * nanoseconds // tiles
            now = globaltimer()
            while now < due:
                now = globaltimer()
        before += tl.cdiv(elements[each], tile)


@triton.jit
def emulated_reduce_scatter(
    inputs,
    outputs,
    elements,
    tiles,
    nanoseconds,
    ranks: tl.constexpr,
    scale: tl.constexpr,
    tile: tl.constexpr,
):
    """Writes the scaled sum of this rank's parts of each input, not faster than the link."""
    begin = globaltimer()
    before = 0
    for each in tl.static_range(len(inputs)):
        for index in range(tl.program_id(0), tl.cdiv(elements[each], tile), tl.num_programs(0)):
            places = index.to(tl.int64) * tile + tl.arange(0, tile)
            inside = places < elements[each]
            total = tl.load(inputs[each] + places, mask=inside)
            for rank in tl.static_range(1, ranks):
                total += tl.load(inputs[each] + rank * elements[each] + places, mask=inside)
            tl.store(outputs[each] + places, total * scale, mask=inside)
            due = begin + (before + index + 1).to(tl.int64) * nanoseconds // tiles
            now = globaltimer()
            while now < due:
                now = globaltimer()
        before += tl.cdiv(elements[each], tile)


def _sizes(parts: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], int]:
    """Elements of each, and tiles of all."""
    elements = tuple(part.numel() for part in parts)
    return elements, sum(triton.cdiv(each, TILE) for each in elements)


class _Done(dist.Work):
    """What was issued on the current stream needs no waiting for by that stream."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class EmulatedRanks(dist.ProcessGroup):
    """Rank 0 of `size` ranks, alone.

    Args:
        size: how many ranks.
        bandwidth: bytes per second that a rank sends and receives at the same time.
    """

    def __init__(self, size: int, bandwidth: float) -> None:
        super().__init__(0, size)
        self._size = size
        self._bandwidth = bandwidth
        self._last: torch.cuda.Event | None = None

    def getBackendName(self) -> str:
        return BACKEND

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    def _nanoseconds(self, wholes: Sequence[torch.Tensor]) -> int:
        size = sum(whole.numel() * whole.element_size() for whole in wholes)
        return math.ceil(1e9 * size * (self._size - 1) / self._size / self._bandwidth)

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        """The collective inside starts when those issued before have ended."""
        stream = torch.cuda.current_stream()
        if self._last is not None:
            stream.wait_event(self._last)
        yield
        self._last = stream.record_event()

    def _gather(self, outputs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> _Done:
        # NCCL leaves a part that is in its place already alone.
        first = 1 if shards[0].data_ptr() == outputs[0].data_ptr() else 0
        elements, tiles = _sizes(shards)
        if self._size > first:
            with self._in_turn():
                emulated_all_gather[(min(BLOCKS, tiles),)](
                    tuple(shards), tuple(outputs), elements, tiles, self._nanoseconds(outputs),
                    self._size, first, TILE, num_warps=THREADS // 32,
                )  # fmt: skip
        return _Done()

    def _reduce(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: Any
    ) -> _Done:
        average = op == dist.ReduceOp.AVG
        if not average and op != dist.ReduceOp.SUM:
            raise NotImplementedError(f"only SUM and AVG are emulated, not {op}")
        elements, tiles = _sizes(outputs)
        with self._in_turn():
            emulated_reduce_scatter[(min(BLOCKS, tiles),)](
                tuple(inputs), tuple(outputs), elements, tiles, self._nanoseconds(inputs),
                self._size, 1 / self._size if average else 1.0, TILE, num_warps=THREADS // 32,
            )  # fmt: skip
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

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> _Done:
        if opts.reduceOp == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(self._size)
        return _Done()

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> _Done:
        return _Done()

    def barrier(self, opts: Any = None) -> _Done:
        return _Done()


def start(ranks: int, bandwidth: float) -> None:
    """Make the default process group one of `ranks` ranks, this process being rank 0.

    Args:
        ranks: how many.
        bandwidth: bytes per second that a rank sends and receives at the same time.
    """
    dist.Backend.register_backend(
        BACKEND,
        lambda store, rank, size, timeout: EmulatedRanks(size, bandwidth),
        devices=["cuda"],
    )
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=ranks)
