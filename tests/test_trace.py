"""What a trace accepts, how it is divided into calls, and the order known before a run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_fx.trace import Call, Event, Trace, UnitSpec, registration_trace
from traces import TWO_CHUNKS, trace

TESTS = Path(__file__).parent


def spec(name: str, trainable: bool = True) -> UnitSpec:
    return UnitSpec(name, name.split(".")[0], 10, 40, 40 if trainable else 0, trainable)


def labels(window: Trace) -> list[str]:
    return [str(event) for event in window]


# What a trace accepts

A = (spec("m.a"),)
F = Event("m.a", "F", 0)
B = Event("m.a", "B", 0)


@pytest.mark.parametrize(
    ("events", "ends", "reduces", "message"),
    [
        ((F, B), (0,), (), "a trace of 2 events has 1 ends"),
        ((Event("m.z", "F", 0),), (0,), (), r"event 0 \(m.z F0\) names an unknown unit"),
        ((F, B), (0, 0), (), r"event 1 \(m.a B0\) ends at 0, outside of 1 to 1"),
        ((F, B), (2, 1), (), r"event 0 \(m.a F0\) ends at 2, outside of 0 to 1"),
        ((F, B), (0, 1), (0,), "position 0 reduces but is not a backward event"),
        ((F, B), (0, 1), (2,), "position 2 reduces but is not a backward event"),
        ((F, B), (0, 1), (-1,), "position -1 reduces but is not a backward event"),
    ],
    ids=[
        "one end per event",
        "unknown unit",
        "end before its event",
        "end after the window",
        "reduction at a forward",
        "reduction after the window",
        "reduction before the window",
    ],
)
def test_trace_refuses_what_no_window_can_have(
    events: tuple[Event, ...], ends: tuple[int, ...], reduces: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Trace(A, events, ends, frozenset(reduces))


def test_order_of_ending_must_agree_with_the_ends() -> None:
    for ending in ((1, 0, 2), (0, 1), (0, 0, 1), (0, 1, 3)):
        with pytest.raises(ValueError, match="contradicts the ends"):
            Trace(A, (F, B, replace(B, occurrence=1)), (0, 2, 2), frozenset(), ending)


def test_order_of_ending_is_part_of_a_trace_where_uses_do_not_nest() -> None:
    events = (F, B, replace(B, occurrence=1))
    nested, crossing = (
        Trace(A, events, (0, 2, 2), frozenset({1, 2}), ending) for ending in ((0, 2, 1), (0, 1, 2))
    )
    assert nested == Trace(A, events, (0, 2, 2), frozenset({1, 2}))
    assert nested != crossing
    assert nested.fingerprint != crossing.fingerprint


def test_trace_is_a_sequence_of_its_events() -> None:
    window = Trace(A, (F, B), (0, 1), frozenset({1}))
    assert list(window) == [F, B]
    assert len(window) == 2
    assert window[1] is B
    assert window[:1] == (F,)
    assert B in window


def test_events_are_equal_whatever_their_microbatch() -> None:
    assert Event("m.a", "F", 1, microbatch=0) == Event("m.a", "F", 1, microbatch=5)
    assert Event("m.a", "F", 1) != Event("m.a", "F", 2)
    assert Event("m.a", "F", 1) != Event("m.a", "B", 1)


def test_unit_is_found_by_name() -> None:
    window = trace("m F0: a b")
    assert window.unit("m.b").name == "m.b"
    with pytest.raises(KeyError, match=r"m\.z"):
        window.unit("m.z")


# Calls


def test_calls_are_runs_of_one_chunk_phase_and_microbatch() -> None:
    assert trace("c0 F0: a b; c0 F1: a b; c1 F0: a; c1 B0: a; c0 B0: b a").calls == (
        Call("c0", "F", 0, 0, 2),
        Call("c0", "F", 1, 2, 4),
        Call("c1", "F", 0, 4, 5),
        Call("c1", "B", 0, 5, 6),
        Call("c0", "B", 0, 6, 8),
    )


def test_calls_cover_every_event_once() -> None:
    window = trace(TWO_CHUNKS)
    assert [position for call in window.calls for position in range(call.start, call.stop)] == (
        list(range(len(window)))
    )
    assert str(window.calls[0]) == "c0 F microbatch 0"


def test_trace_without_events_has_no_calls() -> None:
    assert Trace(A, (), (), frozenset()).calls == ()


# Fingerprint

BASE = "c0 F0: *(a b); c0 B0: *(b a)"


@pytest.mark.parametrize(
    "other",
    [
        "c0 F0: *(b a); c0 B0: *(b a)",
        "c0 F0: *(a b); c0 B0: *(b)",
        "c0 F0: * a b; c0 B0: *(b a)",
        "c0 F0: *(a b); c0 B0: *(b a-)",
        "c1 F0: *(a b); c1 B0: *(b a)",
    ],
    ids=["order", "number", "ends", "reductions", "chunk"],
)
def test_fingerprint_differs_with_every_part_of_the_order(other: str) -> None:
    assert trace(BASE).fingerprint != trace(other).fingerprint


def test_fingerprint_ignores_sizes_which_uneven_shards_may_change() -> None:
    assert trace(BASE).fingerprint == trace(BASE, elements={"c0.a": 7}).fingerprint


def test_fingerprint_does_not_depend_on_the_hash_seed() -> None:
    code = f"from traces import trace; print(trace({TWO_CHUNKS!r}).fingerprint)"
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ
            | {"PYTHONHASHSEED": seed, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1" if os.environ.get("PYTHONHASHSEED") != "1" else "2",)
    }
    assert printed == {trace(TWO_CHUNKS).fingerprint}


# The order known before anything runs


def test_registration_runs_forward_depth_first_and_backward_roots_reversed() -> None:
    window = registration_trace([spec("c0.a"), spec("c0.b"), spec("c1.a"), spec("c1.b")])
    assert labels(window) == [
        *("c0.a F0", "c0.b F0", "c1.a F0", "c1.b F0"),
        *("c1.b B0", "c1.a B0", "c0.b B0", "c0.a B0"),
    ]


def test_registration_backward_is_preorder_with_children_reversed() -> None:
    names = ["c0", "c0.a", "c0.a.x", "c0.a.y", "c0.b", "c1", "c1.a"]
    window = registration_trace([spec(name) for name in names])
    assert labels(window) == [
        *(f"{name} F0" for name in names),
        *("c1 B0", "c1.a B0"),
        *("c0 B0", "c0.b B0", "c0.a B0", "c0.a.y B0", "c0.a.x B0"),
    ]


def test_registration_use_of_a_parent_ends_after_its_children() -> None:
    names = ["c0", "c0.a", "c0.a.x", "c0.b"]
    window = registration_trace([spec(name) for name in names])
    ends = {str(window[i]): str(window[end]) for i, end in enumerate(window.ends)}
    assert ends == {
        "c0 F0": "c0.b F0",
        "c0.a F0": "c0.a.x F0",
        "c0.a.x F0": "c0.a.x F0",
        "c0.b F0": "c0.b F0",
        "c0 B0": "c0.a.x B0",
        "c0.b B0": "c0.b B0",
        "c0.a B0": "c0.a.x B0",
        "c0.a.x B0": "c0.a.x B0",
    }


def test_registration_parent_is_a_path_not_a_common_beginning_of_names() -> None:
    window = registration_trace([spec("c0.a"), spec("c0.ab")])
    assert window.ends == (0, 1, 2, 3)
    assert labels(window)[2:] == ["c0.ab B0", "c0.a B0"]


def test_registration_reduces_every_trainable_unit_once() -> None:
    window = registration_trace([spec("c0.a"), spec("c0.b", trainable=False), spec("c0.c")])
    assert sorted(str(window[position]) for position in window.reduces) == ["c0.a B0", "c0.c B0"]
