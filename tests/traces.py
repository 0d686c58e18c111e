"""Builds traces from compact strings, for tests.

A window is written call by call, separated by semicolons::

    c0 F0: *(a b); c0 B0: *(b a)

``c0 F0:`` is chunk ``c0``, forward, microbatch 0. Then come its units in the order in
which compute reaches them: ``*`` is the chunk's own unit ``c0``, ``a`` is ``c0.a``, and
parentheses hold the uses that begin and end inside a use. A backward that ends in ``-``
leaves contributions of its unit missing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from hypothesis import strategies as st

from fsdp_fx.planning.pipelines import pipeline_calls, pipeline_traces
from fsdp_fx.trace import Event, Phase, Trace, UnitSpec


def trace(
    text: str,
    elements: Mapping[str, int] | None = None,
    frozen: Set[str] = frozenset(),
    default: int = 100,
    replicas: Mapping[str, int] | None = None,
    kept: Set[str] = frozenset(),
) -> Trace:
    """The trace of a window written in the notation above.

    Args:
        text: the window.
        elements: elements by unit name; a parameter takes 2 bytes, a gradient 4.
        frozen: names of units that are not trainable.
        default: elements of the other units.
        replicas: replicas by unit name; the other units are only sharded.
        kept: names of units that stay after their forward.

    Raises:
        ValueError: the text is not in the notation.
    """
    events: list[Event] = []
    ends: list[int] = []
    reduces: set[int] = set()
    chunks: dict[str, str] = {}
    seen: Counter[tuple[str, Phase]] = Counter()
    for call in text.split(";"):
        head = re.fullmatch(r"\s*(\w+) ([FB])(\d+): ?(.*)", call, re.DOTALL)
        if head is None:
            raise ValueError(f"not a call: {call!r}")
        chunk, microbatch = head[1], int(head[3])
        phase: Phase = "F" if head[2] == "F" else "B"
        running: list[int] = []
        for token in re.findall(r"[\w*.]+-?|[()]", head[4]):
            if token == "(":
                running.append(len(events) - 1)
            elif token == ")":
                ends[running.pop()] = len(events) - 1
            else:
                name = token.removesuffix("-")
                unit = chunk if name == "*" else f"{chunk}.{name}"
                chunks[unit] = chunk
                if phase == "B" and not token.endswith("-") and unit not in frozen:
                    reduces.add(len(events))
                ends.append(len(events))
                events.append(Event(unit, phase, seen[unit, phase], microbatch))
                seen[unit, phase] += 1
        if running:
            raise ValueError(f"unclosed parenthesis: {call!r}")
    sizes = dict(elements or {})
    units = tuple(
        UnitSpec(
            name=unit,
            chunk=chunk,
            elements=(count := sizes.get(unit, default)),
            bytes=2 * count,
            gradient_bytes=0 if unit in frozen else 4 * count,
            trainable=unit not in frozen,
            replicas=(replicas or {}).get(unit, 1),
            kept_after_forward=unit in kept,
        )
        for unit, chunk in chunks.items()
    )
    return Trace(units, tuple(events), tuple(ends), frozenset(reduces))


# Two chunks of two layers under a parent unit, two microbatches, as a pipeline runs them.
TWO_CHUNKS = (
    "c0 F0: *(a b); c0 F1: *(a b); c1 F0: *(a b); c1 F1: *(a b); "
    "c1 B0: *(b a); c1 B1: *(b a); c0 B0: *(b a); c0 B1: *(b a)"
)


SIZES = (0, 10, 20, 30, 50)  # of units, in elements

# Units of a chunk in the order of their uses. A use may lie inside of another, also of one of
# the same unit, and a unit may be used twice.
_SHAPES = ("a", "a b", "*(a b)", "*(a(b) c)", "a(b a)", "a b a", "*(a a)")


@st.composite
def windows(
    draw: st.DrawFn, calls: int = 6, sizes: Sequence[int] = SIZES, keeps: bool = False
) -> Trace:
    """Small windows of one or two chunks, in any order that a schedule may call them.

    Units lie inside of each other and have different sizes, some of them are frozen,
    contributions may be missing, and uses may last into the events after them.

    Args:
        draw: given by hypothesis.
        calls: the most forwards and backwards together.
        sizes: what a unit may have as elements.
        keeps: whether some units stay after their forward.
    """
    shapes = draw(st.lists(st.sampled_from(_SHAPES), min_size=1, max_size=2))
    waiting: list[tuple[int, int]] = []
    started = [0] * len(shapes)
    lines: list[str] = []
    for _ in range(draw(st.integers(1, calls // 2))):
        chunk = draw(st.integers(0, len(shapes) - 1))
        waiting.append((chunk, started[chunk]))
        lines.append(f"c{chunk} F{started[chunk]}: {shapes[chunk]}")
        started[chunk] += 1
        while waiting and draw(st.booleans()):
            lines.append(_backward(draw, shapes, waiting))
    while waiting:
        lines.append(_backward(draw, shapes, waiting))
    names = [f"c{chunk}{name}" for chunk in range(2) for name in ("", ".a", ".b", ".c")]
    size = st.sampled_from(sizes)
    window = trace(
        "; ".join(lines),
        elements={name: draw(size) for name in names},
        frozen=draw(st.sets(st.sampled_from(names), max_size=3)),
        kept=draw(st.sets(st.sampled_from(names), max_size=3)) if keeps else frozenset(),
    )
    longer = draw(st.dictionaries(st.integers(0, len(window) - 1), st.integers(1, 3), max_size=2))
    ends = tuple(
        min(end + longer.get(position, 0), len(window) - 1)
        for position, end in enumerate(window.ends)
    )
    return replace(window, ends=ends)


def _backward(draw: st.DrawFn, shapes: list[str], waiting: list[tuple[int, int]]) -> str:
    """The backward of one of the forwards that wait for theirs."""
    chunk, microbatch = waiting.pop(draw(st.integers(0, len(waiting) - 1)))
    missing = draw(st.sampled_from((False, False, False, True)))
    shape = shapes[chunk].replace("b", "b-") if missing else shapes[chunk]
    return f"c{chunk} B{microbatch}: {shape}"


def interleaved(events: int, larger: int = 1) -> Trace:
    """The first rank of interleaved 1F1B: eight ranks, four chunks of four units each.

    Args:
        events: how many, a multiple of 256.
        larger: how many times as large as the others the first unit is.
    """
    stages = [
        [
            UnitSpec(f"s{stage}.u{index}", f"s{stage}", size, 2 * size, 4 * size, True)
            for index in range(4)
            for size in (50 * (larger if stage == index == 0 else 1),)
        ]
        for stage in range(32)
    ]
    return pipeline_traces(pipeline_calls("Interleaved1F1B", 8, 4, events // 32), stages)[0]
