"""What is scheduled: units over FSDP2's parameter groups.

The only package that touches private attributes of
``torch.distributed.fsdp._fully_shard``. The rest sees :class:`Unit` (gather, wait,
free, reduce) and :class:`ShardedModule` (which module a unit belongs to and how its
inputs and outputs are cast).

Supported: torch 2.11 to 2.14. On another torch the import fails and names the
attribute that is missing.
"""

from .accumulators import allocate, is_fresh, mark_written, when_allocated
from .adoption import (
    ShardedModule,
    attach,
    detach,
    find_sharded_modules,
    redirect_forward_methods,
    require_detachable,
    require_memory_statistics,
    require_supported,
    require_unshared,
)
from .private_names import PRIVATE_NAMES, missing_private_names
from .unit import Communication, Unit, storage_key, unit_of_tensor

__all__ = [
    "PRIVATE_NAMES",
    "Communication",
    "ShardedModule",
    "Unit",
    "allocate",
    "attach",
    "detach",
    "find_sharded_modules",
    "is_fresh",
    "mark_written",
    "missing_private_names",
    "redirect_forward_methods",
    "require_detachable",
    "require_memory_statistics",
    "require_supported",
    "require_unshared",
    "storage_key",
    "unit_of_tensor",
    "when_allocated",
]
