"""What is written down of windows that go another way, and how much of it."""

from __future__ import annotations

import logging

import pytest

from fsdp_fx.passes import PassOptions
from fsdp_fx.report import Report
from fsdp_fx.residency import Stats


def test_windows_that_leave_their_program_are_logged_one_by_one_up_to_a_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    report = Report()
    with caplog.at_level(logging.WARNING, logger="fsdp_fx"):
        for window in range(100):
            report.leave_program(window, f"at event {window}: expected a F0, found b F0")
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 32
    assert messages[0].startswith("fell back: window 0")
    assert "at event 5" in messages[5]
    assert [m for m in messages if "further ones are counted in explain()" in m] == messages[-1:]
    text = report.explain("recorded", PassOptions(), Stats(), ("c0",), ())
    assert text.count("left its program and was recorded") == 1
    assert "window 99" in text
    assert "(100 times)" in text
