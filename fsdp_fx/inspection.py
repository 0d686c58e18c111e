"""Where programs and graphs are shown while they are made.

Each goes, as text, to a logger under ``fsdp_fx`` at level DEBUG, and to torch's structured
trace (``TORCH_TRACE=folder``, read with ``tlparse``), whoever listens. The texts are made
only if somebody does.

Topics, each the logger ``fsdp_fx.<topic>``:

- ``programs``: each program when it is planned, and what each pass changed;
- ``regions``: the regions of each captured graph, when they are compiled;
- ``graph_code``: the host code of each slice, when it is first used.

What programs and graphs look like is their own business (:meth:`fsdp_fx.Program.print_readable`,
:mod:`fsdp_fx.compile.host_graph`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Literal

from .torch_internals import trace_artifact

__all__ = ["Topic", "show"]

Topic = Literal["programs", "regions", "graph_code"]


def show(topic: Topic, name: str, text: Callable[[], str]) -> None:
    """Show a text to whoever listens.

    Args:
        topic: the logger it goes to, below ``fsdp_fx``.
        name: what it is; the trace has it as ``fsdp_fx_...``, with underscores.
        text: makes the text.
    """
    logger = logging.getLogger(f"fsdp_fx.{topic}")
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s\n%s", name, text())
    trace_artifact("fsdp_fx_" + re.sub(r"\W+", "_", name), text)
