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
from collections.abc import Mapping, Set

from fsdp_fx.trace import Event, Phase, Trace, UnitSpec


def trace(
    text: str,
    elements: Mapping[str, int] | None = None,
    frozen: Set[str] = frozenset(),
    default: int = 100,
    replicas: Mapping[str, int] | None = None,
) -> Trace:
    """The trace of a window written in the notation above.

    Args:
        text: the window.
        elements: elements by unit name; a parameter takes 2 bytes, a gradient 4.
        frozen: names of units that are not trainable.
        default: elements of the other units.
        replicas: replicas by unit name; the other units are only sharded.

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
        )
        for unit, chunk in chunks.items()
    )
    return Trace(units, tuple(events), tuple(ends), frozenset(reduces))


# Two chunks of two layers under a parent unit, two microbatches, as a pipeline runs them.
TWO_CHUNKS = (
    "c0 F0: *(a b); c0 F1: *(a b); c1 F0: *(a b); c1 F1: *(a b); "
    "c1 B0: *(b a); c1 B1: *(b a); c0 B0: *(b a); c0 B1: *(b a)"
)
