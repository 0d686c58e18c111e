"""Draws the picture of docs/concepts.md: python docs/draw_step.py [FILE.svg].

The trace is written out here, so that no process group is needed; a context records its own.
"""

import os
import sys
from collections import Counter
from pathlib import Path

import matplotlib

from fsdp_fx import Event, PassOptions, Program, Trace, UnitSpec, plan

MiB = 2**20
UNITS = tuple(
    UnitSpec(
        name=f"c{chunk}.{layer}",
        chunk=f"c{chunk}",
        elements=2 * MiB,
        bytes=4 * MiB,
        gradient_bytes=8 * MiB,
        trainable=True,
    )
    for chunk in range(2)
    for layer in range(2)
)
# Phase, chunk, microbatch.
CALLS = ("F00", "F10", "B10", "F01", "B00", "F11", "B11", "B01")


def program(budget: int | None = 8 * MiB) -> Program:
    """The program of the picture."""
    seen: Counter[tuple[str, str]] = Counter()
    events = []
    for phase, chunk, microbatch in CALLS:
        for layer in "01" if phase == "F" else "10":
            unit = f"c{chunk}.{layer}"
            events.append(Event(unit, phase, seen[unit, phase], int(microbatch)))
            seen[unit, phase] += 1
    trace = Trace(
        units=UNITS,
        events=tuple(events),
        ends=tuple(range(len(events))),  # no use reaches into another
        reduces=frozenset(i for i, event in enumerate(events) if event.phase == "B"),
    )
    return plan(trace, PassOptions(memory_budget=budget))


def main(path: Path) -> None:
    # Text as text, and the same file every time.
    os.environ["SOURCE_DATE_EPOCH"] = "0"
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "step"}):
        program().save_timeline(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent / "step.svg")
