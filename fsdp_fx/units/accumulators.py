"""Full gradients that are added to where they are, and get their memory when they need it.

A new buffer for a gradient has a shape and no memory. The first product that is added to it
allocates it, and writes it instead of adding: the gradients of a unit take memory one after the
other, while the backward gives up that of its activations. Whether that has happened is noted
on the tensor itself, so that the note is gone with the buffer, whoever drops it, and so that a
copy of a buffer is not taken for it.

Who makes a buffer, and when, is :mod:`fsdp_fx.units.unit`'s business; what adds to it,
:mod:`fsdp_fx.compile.products`'.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["allocate", "is_fresh", "mark_written", "new_accumulator", "when_allocated"]

_FRESH = "_fsdp_fx_fresh"
_WATCHED = "_fsdp_fx_watched"


def new_accumulator(shape: torch.Size, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """A buffer that holds nothing yet, where ``like`` is."""
    # There is no way to a shape without memory but to give the memory back.
    buffer = torch.empty(shape, dtype=dtype, device=like.device)
    buffer.untyped_storage().resize_(0)
    setattr(buffer, _FRESH, True)
    return buffer


def when_allocated(buffer: torch.Tensor, then: Callable[[], None]) -> None:
    """Call ``then`` right before a new buffer gets its memory."""
    setattr(buffer, _WATCHED, then)


def allocate(buffer: torch.Tensor) -> None:
    """Give a new buffer its memory, on the current stream."""
    then: Callable[[], None] | None = getattr(buffer, _WATCHED, None)
    if then is not None:
        delattr(buffer, _WATCHED)
        then()
    storage = buffer.untyped_storage()
    if not storage.size():
        storage.resize_(buffer.numel() * buffer.element_size())


def mark_written(gradient: torch.Tensor) -> torch.Tensor:
    """``gradient`` holds something, and may be added to."""
    setattr(gradient, _FRESH, False)
    return gradient


def is_fresh(buffer: torch.Tensor) -> bool | None:
    """Whether ``buffer`` holds nothing yet. None if it is none of these, be it a copy of one."""
    fresh: bool | None = getattr(buffer, _FRESH, None)
    return fresh
