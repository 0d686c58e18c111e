"""Pictures of a program: what computes, what is gathered, resident and reduced, and when.

:func:`save_timeline` draws a program as PNG or SVG with matplotlib (the ``viz`` extra),
or writes it for Perfetto and ``chrome://tracing`` as JSON, which needs nothing.

Time is counted in events unless durations are given: then nothing is measured, every compute
is drawn one event wide, a gather in flight spans the events between its issue and its wait,
and a reduction, whose end nobody knows, the event after its start. With durations the time
is that of :mod:`fsdp_fx.planning.simulation`.

:mod:`~fsdp_fx.timeline.lanes` says what is shown, :mod:`~fsdp_fx.timeline.picture` and
:mod:`~fsdp_fx.timeline.perfetto` how.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from fsdp_fx.planning.durations import Durations
from fsdp_fx.program import Program
from fsdp_fx.timeline.lanes import Segment, lanes_of
from fsdp_fx.timeline.perfetto import chrome_trace
from fsdp_fx.timeline.picture import figure

__all__ = ["Segment", "save_timeline", "segments"]


def save_timeline(
    program: Program,
    path: str | os.PathLike[str],
    *,
    caption: str | None = None,
    durations: Durations | None = None,
) -> None:
    """Draw ``program`` into a file.

    Args:
        program: a program that verifies.
        path: a file that ends in ``.png`` or ``.svg`` for a picture, in ``.json`` for
            the Chrome trace format, in which one event takes 1 ms.
        caption: what the title says besides the numbers of events, units and chunks, for
            example the rank.
        durations: how long events and collectives take. Given, the time that is shown is
            that of a simulated step instead of the order of events.

    Raises:
        ValueError: the file ends in something else, or the durations are not those of the
            program's trace.
        ImportError: a picture is wanted and matplotlib is not installed.
    """
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in (".json", ".png", ".svg"):
        raise ValueError(
            f"cannot save a timeline as {suffix or 'a file without suffix'}: "
            f"use .png, .svg or .json"
        )
    lanes = lanes_of(program, durations)
    if suffix == ".json":
        target.write_text(json.dumps(chrome_trace(lanes, caption)), encoding="utf-8")
    else:
        figure(lanes, caption).savefig(target, dpi=120, bbox_inches="tight")


def segments(program: Program) -> tuple[Segment, ...]:
    """Where each unit is resident, in events, and in which state.

    Where forward and backward of one unit overlap, the use that began last counts. A
    gather on demand has no segment in flight: it is waited for where it is issued.

    Returns:
        Segments by unit in adoption order, then by time; those of a unit are disjoint.
    """
    return lanes_of(program).segments
