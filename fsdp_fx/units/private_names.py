"""The names of FSDP2 that this package relies on, checked as it is imported.

Only the modules of :mod:`fsdp_fx.units` use them. On a torch that lacks one the import
fails and names it.
"""

from __future__ import annotations

import inspect

import torch

__all__ = [
    "PRIVATE_NAMES",
    "AllReduceState",
    "DDPMeshInfo",
    "DefaultAllGather",
    "DefaultReduceScatter",
    "FSDPCommContext",
    "FSDPMeshInfo",
    "FSDPModule",
    "FSDPParam",
    "FSDPParamGroup",
    "FSDPState",
    "FSDPStateContext",
    "ParamModuleInfo",
    "ReduceScatterState",
    "ShardedState",
    "TrainingState",
    "_get_gradient_divide_factors",
    "_get_module_fsdp_state",
    "_register_group_forward_hooks",
    "missing_private_names",
]

SUPPORTED_TORCH = "2.11 to 2.14"

try:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultAllGather,
        DefaultReduceScatter,
        _get_gradient_divide_factors,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        DDPMeshInfo,
        FSDPMeshInfo,
        TrainingState,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_param import (
        FSDPParam,
        ParamModuleInfo,
        ShardedState,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import (
        AllReduceState,
        FSDPCommContext,
        FSDPParamGroup,
        ReduceScatterState,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_state import (
        FSDPState,
        FSDPStateContext,
        _get_module_fsdp_state,
        _register_group_forward_hooks,
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
        "_pre_forward",
        "_post_forward",
        ("_fsdp_param_groups", "_fsdp_param_group"),
        "_comm_ctx",
        "_training_state",
        "_is_root",
        "_auto_reshard_after_forward",
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
        "device_handle",
        "mesh_info",
        "modules",
        "reduce_grads",
        "all_reduce_grads",
        "mesh_info",
        "reshard_after_backward",
        "unshard_in_backward",
        "unshard_async_op",
        "post_forward_mesh_info",
        "_all_gather_comm",
        "_all_gather_process_group",
        "_all_gather_result",
        "_all_reduce_hook",
        "_all_reduce_state",
        "_post_reduce_event",
        "_reduce_scatter_comm",
        "_reduce_scatter_process_group",
        "_sharded_state",
        "_wait_for_post_backward",
        "_with_fqn",
        "force_sum_reduction_for_comms",
        "gradient_divide_factor",
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
        "all_gather_outputs",
        "alloc_all_gather_outputs",
        "fsdp_placement",
        "init_all_gather_outputs",
        "is_dtensor",
        "offload_to_cpu",
        "sharded_size",
        "to_sharded_dtensor",
        "_get_grad_inner_tensor",
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
        "all_reduce_stream",
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
