"""Collectives for two ranks that share one GPU, which NCCL refuses.

They go through the host over gloo. Device work still runs on FSDP2's own streams: a
gather that is not waited for, or a buffer that is freed too early, still shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

__all__ = ["use_staged_collectives"]


class _Staged:
    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        # Poisoned: whoever reads it before the collective is found out.
        return torch.full(tuple(size), float("nan"), device=device).to(dtype)


class StagedAllGather(_Staged):
    """All-gather through host memory, on the current stream."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        gathered = torch.empty(output_tensor.shape, dtype=output_tensor.dtype)
        dist.all_gather_into_tensor(gathered, input_tensor.cpu(), group)
        output_tensor.copy_(gathered)


class StagedReduceScatter(_Staged):
    """Reduce-scatter through host memory, on the current stream."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        reduced = torch.empty(output_tensor.shape, dtype=output_tensor.dtype)
        dist.reduce_scatter_tensor(reduced, input_tensor.cpu(), op, group)
        output_tensor.copy_(reduced)


def use_staged_collectives(module: torch.nn.Module) -> None:
    """Let every ``fully_shard`` call under ``module`` communicate through the host."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.set_custom_all_gather(StagedAllGather())  # type: ignore[arg-type]
            each.set_custom_reduce_scatter(StagedReduceScatter())  # type: ignore[arg-type]
