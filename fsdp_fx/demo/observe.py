"""Counts what plain FSDP2 does, by watching its parameter groups.

FSDP2 keeps no counters, so :class:`Observer` wraps the methods of ``FSDPParamGroup``
through which every gather, free and reduction goes. What a number means is what it
means in :class:`fsdp_fx.residency.Stats`, so that the two can be compared:

- a gather is an all-gather started, on demand if it was started by the forward or
  backward of the very group that it is for, and ahead of need if by anything else (the
  backward prefetch, the schedule);
- a group is resident from the start of its gather to its free, with the bytes of its
  full parameters; buffers of the collectives are not counted;
- a reduction is a reduce-scatter of one group's gradients.

The private names of FSDP2 that the demo needs are used in this module only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from ..residency import Stats

__all__ = ["Observer"]


class Observer:
    """While entered, keeps ``stats`` of what FSDP2 does in this process.

    Attributes:
        stats: ``gathers``, ``on_demand_gathers``, ``prefetched_gathers``,
            ``reductions``, ``resident_bytes`` and ``peak_resident_bytes`` are kept.
    """

    def __init__(self) -> None:
        self.stats = Stats()
        self._resident: dict[FSDPParamGroup, int] = {}
        self._computing: list[FSDPParamGroup] = []
        self._patches = ExitStack()

    def __enter__(self) -> Observer:
        for name in ("pre_forward", "pre_backward"):
            self._wrap(FSDPParamGroup, name, self._around_compute)
        self._wrap(FSDPParamGroup, "unshard", self._around_unshard)
        for name in ("_to_sharded", "finalize_backward"):
            self._wrap(FSDPParamGroup, name, self._around_free)
        self._wrap(_fsdp_param_group, "foreach_reduce", self._around_reduce)
        return self

    def __exit__(self, *exception: object) -> None:
        self._patches.close()

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(owner, name, wrapper)
        self._patches.callback(setattr, owner, name, original)

    def _around_compute(
        self, original: Callable[..., Any], group: FSDPParamGroup, *args: Any, **kwargs: Any
    ) -> Any:
        self._computing.append(group)
        try:
            return original(group, *args, **kwargs)
        finally:
            self._computing.pop()

    def _around_unshard(
        self, original: Callable[..., Any], group: FSDPParamGroup, *args: Any, **kwargs: Any
    ) -> None:
        in_flight = group._all_gather_result is not None
        original(group, *args, **kwargs)
        if not in_flight and group._all_gather_result is not None:
            self.stats.gathers += 1
            if self._computing and self._computing[-1] is group:
                self.stats.on_demand_gathers += 1
            else:
                self.stats.prefetched_gathers += 1
        self._update(group)

    def _around_free(self, original: Callable[..., Any], group: FSDPParamGroup) -> None:
        original(group)
        self._update(group)

    def _around_reduce(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.stats.reductions += 1
        return original(*args, **kwargs)

    def _update(self, group: FSDPParamGroup) -> None:
        stats = self.stats
        resident = group.is_unsharded or group._all_gather_result is not None
        if resident and group not in self._resident:
            self._resident[group] = _full_bytes(group)
        elif not resident:
            self._resident.pop(group, None)
        stats.resident_bytes = sum(self._resident.values())
        stats.peak_resident_bytes = max(stats.peak_resident_bytes, stats.resident_bytes)


def _full_bytes(group: FSDPParamGroup) -> int:
    return sum(
        parameter._orig_size.numel() * (parameter.param_dtype or parameter.orig_dtype).itemsize
        for parameter in group.fsdp_params
    )
