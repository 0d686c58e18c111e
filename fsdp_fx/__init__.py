"""fsdp_fx: training steps under FSDP2 as scheduled FX graphs.

Record one training step (every microbatch, every chunk, one shared context), plan
every gather, prefetch, free and reduction in an FX graph, prove the plan safe, and
run it: inside torch.compile's graphs where the model compiles, from hooks where it
does not. See :class:`FSDPContext`.
"""

import importlib
from types import ModuleType

from .agreement import RanksDisagreeError
from .context import FSDPContext
from .passes import PassOptions, plan
from .passes.verify import ProgramError
from .program import Program
from .residency import Stats
from .trace import Event, Trace, UnitSpec
from .window import IncompleteWindowError

__all__ = [
    "Event",
    "FSDPContext",
    "IncompleteWindowError",
    "PassOptions",
    "Program",
    "ProgramError",
    "RanksDisagreeError",
    "Stats",
    "Trace",
    "UnitSpec",
    "plan",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    # torch.distributed.pipelining takes seconds to import; many runs do not need it.
    if name == "pipelining":
        return importlib.import_module("fsdp_fx.pipelining")
    raise AttributeError(f"module 'fsdp_fx' has no attribute {name!r}")
