"""``fsdp-fx plan``: what a step would cost on machines that nobody has at hand.

A schedule and a model's shape, or a saved trace, become one trace per pipeline rank
(:mod:`.workload`); for each budget it is planned as the package would plan it, and as others
would; every plan is simulated (:mod:`.comparison`) and shown as a table, as JSON and as a
picture. No process group, no model and no accelerator are needed.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from contextlib import contextmanager

from fsdp_fx.forecast.comparison import compare, without_communication
from fsdp_fx.forecast.display import progress_line, show
from fsdp_fx.forecast.options import ForecastError, Options, add_arguments, options_of
from fsdp_fx.forecast.picture import can_draw, save_picture
from fsdp_fx.forecast.record import save_record

__all__ = ["ForecastError", "Options", "add_arguments", "options_of", "run"]


def run(parsed: argparse.Namespace) -> int:
    """Plan what the arguments ask, and show it.

    Args:
        parsed: of a parser that :func:`add_arguments` has filled.

    Returns:
        The exit code.

    Raises:
        ForecastError: it cannot be planned as asked, or not saved.
    """
    with _without_garbage_collection():
        options = options_of(parsed)
    if options.picture is not None and not can_draw():
        raise ForecastError("--picture needs matplotlib: pip install 'fsdp-fx[viz]'")
    workload = options.workload
    with _without_garbage_collection(), progress_line() as progress:
        floor = without_communication(workload)
        forecasts = list(
            compare(workload, options.budgets, options.reduce_gradients, options.prefetch, progress)
        )
    try:
        if options.json is not None:
            save_record(
                options.json,
                workload,
                forecasts,
                floor,
                options.reduce_gradients,
                options.prefetch,
            )
        if options.picture is not None:
            save_picture(options.picture, workload.title, forecasts, floor)
    except OSError as error:
        # A full disk is noticed without a name.
        name = error.filename or ", ".join(
            str(each) for each in (options.json, options.picture) if each is not None
        )
        raise ForecastError(f"cannot save {name}: {error.strerror}") from error
    show(workload.title, forecasts, floor, options.per_rank)
    return 0


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Plans are millions of small objects without cycles: looking for some takes a third."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
