"""The comparison as a picture: step time against memory. Needs matplotlib."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_fx.forecast.comparison import Forecast, Policy
from fsdp_fx.forecast.display import budget_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["can_draw", "save_picture"]

# Marker and colour; the optimum in the foreground.
_STYLES: dict[Policy, tuple[str, str]] = {
    "one ahead": ("D", "#546e7a"),
    "least recently used": ("s", "#e0a526"),
    "optimum": ("o", "#3d7ea6"),
    "keep everything": ("^", "#c8553d"),
}
_RING = {"markersize": 12, "markerfacecolor": "none", "markeredgewidth": 1.6}
# Whose points have budgets for labels, under them (-1) or over them (1).
_WITH_BUDGETS: dict[Policy, int] = {"optimum": -1, "least recently used": 1}
_INK = "#263238"
# What a label takes, in pixels of the figure.
_LABEL_WIDTH, _LABEL_HEIGHT = 60, 16


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def save_picture(
    path: str | os.PathLike[str], title: str, forecasts: Sequence[Forecast], floor: int
) -> None:
    """Draw step time against the peak of resident bytes, a line for each policy.

    Args:
        path: a file that ends in ``.png`` or ``.svg``.
        title: what was planned for.
        forecasts: what each policy costs.
        floor: nanoseconds of a step without communication.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    for policy, (marker, color) in _STYLES.items():
        points = [_point(each) for each in forecasts if each.policy == policy]
        axes.plot(
            [memory for memory, _ in points],
            [time for _, time in points],
            marker=marker,
            color=color,
            label=policy,
            linewidth=1.5,
            zorder=3,
            # A ring around what may lie under it.
            **({"markersize": 7} if policy in _WITH_BUDGETS else _RING),
        )
    axes.axhline(floor / 1e9, color=_INK, linewidth=1, linestyle=(0, (4, 4)), zorder=1)
    axes.annotate(
        "without communication",
        (0, floor / 1e9),
        xycoords=("axes fraction", "data"),
        xytext=(4, -3),
        textcoords="offset points",
        va="top",
        fontsize=8.5,
        color=_INK,
    )
    axes.set_title(title.replace("; ", "\n", 1), fontsize=11, color=_INK)
    axes.set_xlabel("peak of full parameters and kept full gradients, GiB (worst rank)")
    axes.set_ylabel("predicted step time, s")
    axes.grid(color="#eceff1")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.08, y=0.15)
    figure.legend(loc="outside lower center", ncols=len(_STYLES), frameon=False)
    figure.draw_without_rendering()  # from here on points have places
    for policy, side in _WITH_BUDGETS.items():
        _name_budgets(axes, [each for each in forecasts if each.policy == policy], side)
    figure.savefig(Path(path), dpi=130)


def _point(forecast: Forecast) -> tuple[float, float]:
    memory = max(rank.peak_bytes for rank in forecast.ranks)
    return memory / 2**30, forecast.nanoseconds / 1e9


def _name_budgets(axes: Axes, forecasts: Sequence[Forecast], side: int) -> None:
    """Write budgets under or over their points; points that meet share a text."""
    groups: list[tuple[float, float, list[Forecast]]] = []  # the first point's place in pixels
    for forecast in forecasts:
        x, y = axes.transData.transform(_point(forecast))
        for other_x, other_y, group in groups:
            if abs(x - other_x) < _LABEL_WIDTH and abs(y - other_y) < _LABEL_HEIGHT:
                group.append(forecast)
                break
        else:
            groups.append((x, y, [forecast]))
    for _, _, group in groups:
        axes.annotate(
            "\n".join(budget_text(each.budget) for each in group),
            _point(group[0]),
            xytext=(0, 9 * side),
            textcoords="offset points",
            ha="center",
            va="bottom" if side > 0 else "top",
            fontsize=8.5,
            color=_STYLES[group[0].policy][1],
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.9, "pad": 0.5},
            zorder=4,
        )
