"""Sizes, rates and times as people write them, and back.

Written as ``400MiB``, ``50GB/s``, ``3ms``. Nothing here knows what they are for.
"""

from __future__ import annotations

import re

__all__ = ["bandwidth", "byte_count", "format_time", "nanoseconds"]

_NUMBER = r"(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
_WRITTEN = re.compile(_NUMBER + r"\s*(?P<suffix>[A-Za-zµμ]*(?:/s)?)")

_POWERS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_BYTES = {"": 1.0} | {f"{power}B": float(factor) for power, factor in _POWERS.items()}
_RATES = {f"{power}B/s": float(factor) for power, factor in _POWERS.items()} | {
    f"{power}{bit}/s": factor / 8 for power, factor in _POWERS.items() for bit in ("b", "bit")
}
_TIMES = {"ns": 1.0, "us": 1e3, "µs": 1e3, "μs": 1e3, "ms": 1e6, "s": 1e9}

# More than any machine has or takes; keeps mistakes from becoming infinities.
_MOST = 2.0**60


def byte_count(text: str) -> int:
    """Bytes: ``"400MiB"``, ``"1.5GB"`` or a plain number.

    Raises:
        ValueError: it is no size, negative, or 1 EiB and more.
    """
    return round(_parsed(text, _BYTES, "size", "400MiB, 1.5GB or a number of bytes"))


def bandwidth(text: str) -> float:
    """Bytes per second: ``"50GB/s"`` or ``"400Gb/s"``.

    Raises:
        ValueError: it is no rate, or not positive.
    """
    return _positive(text, _parsed(text, _RATES, "rate", "50GB/s or 400Gb/s"))


def nanoseconds(text: str) -> int:
    """Nanoseconds: ``"3ms"``, ``"20us"``, ``"1.5s"``.

    Raises:
        ValueError: it is no time, or negative.
    """
    return round(_parsed(text, _TIMES, "time", "3ms, 20us or 1.5s"))


def format_time(duration: float) -> str:
    """``duration`` nanoseconds for people, three digits: ``"12.3 ms"``."""
    for suffix, factor in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        value = duration / factor
        # 999.96 µs would print as 1000 µs.
        if value >= 0.9995:
            return (
                f"{value:#.3g}".rstrip(".") + f" {suffix}"
                if value < 999.5
                else f"{value:,.0f} {suffix}"
            )
    return f"{duration:.0f} ns"


def _parsed(text: str, suffixes: dict[str, float], what: str, example: str) -> float:
    match = _WRITTEN.fullmatch(text.strip())
    factor = None
    if match is not None:
        suffix = match["suffix"]
        # 50kB is 50KB.
        factor = suffixes.get(suffix, suffixes.get(suffix[:1].upper() + suffix[1:]))
    if match is None or factor is None:
        raise ValueError(f"{text!r} is no {what}: write {example}")
    value = float(match["number"]) * factor
    if value < 0:
        raise ValueError(f"{text} is negative")
    if value >= _MOST:
        raise ValueError(f"{text} is more than any machine has")
    return value


def _positive(text: str, value: float) -> float:
    if value == 0:
        raise ValueError(f"{text} is nothing: use more than 0")
    return value
