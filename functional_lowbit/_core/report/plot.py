"""Pictures, drawn with matplotlib, which is only needed here."""

import os
from collections.abc import Sequence
from importlib import import_module
from math import ceil
from pathlib import Path
from typing import Any

from functional_lowbit import _refused as refused
from functional_lowbit._core.report.errors import UPDATE
from functional_lowbit._core.report.recorded import ErrorReport, recorded_quantization_error

WORST = 3  # leaves that are named
COLORS = ("#d1495b", "#edae49", "#2e86ab")
INK, FAINT = "#333333", "#b8c0c8"

Series = dict[str, list[float]]
"""Path of a leaf to its error at each step, in percent; NaN where it was not looked at."""


@refused.speaking("plot.quantization_error")
def quantization_error(history: Any, path: str | os.PathLike[str]) -> Path:
    """Draw how far rounding moves each leaf's moments and its update.

    From two reports on: for each moment and for the update, a curve for each leaf over the steps, with the median and
    the worst leaves named, and beside it the same numbers as a map of leaves and steps. From a single report: the
    mean, the last and the largest error of the worst 40 leaves. Leaves that rest in float32 are left out.

    Args:
        history: Reports of `recorded_quantization_error`, kept while training; or one report, or a state.
        path: The picture's file; its ending says which kind (`.png`, `.svg`, `.pdf`).

    Returns:
        The path.

    Raises:
        ImportError: without matplotlib.
        TypeError: for a history that is no report, state or sequence of reports.
        ValueError: if there is nothing to draw: no look, or all moments rest in float32; or for two reports of one
            step.

    Example:
        >>> import functional_lowbit as fl
        >>> fl.plot.quantization_error([], "errors.png")
        Traceback (most recent call last):
            ...
        functional_lowbit._refused.WrongValue: plot.quantization_error: history has no errors of moments in ...
    """
    reports = _reports(history)
    kinds = list(dict.fromkeys(row.what for report in reports for row in report.rows if _is_stored(row)))
    if not kinds:
        raise refused.WrongValue(
            "history has no errors of moments in few bits; record some steps with "
            "fl.record_quantization_error(low_bit(tx)) first"
        )
    kinds = [*(kind for kind in kinds if kind != UPDATE), UPDATE]
    try:
        figures = import_module("matplotlib.figure")
    except ImportError as error:
        raise refused.NotInstalled("needs the package matplotlib; pip install 'functional-lowbit[demo]'") from error
    figure = _over_steps(figures, reports, kinds) if len(reports) > 1 else _of_one(figures, reports[0], kinds)
    figure.savefig(path, dpi=150)
    return Path(path)


def _reports(history: Any) -> list[ErrorReport]:
    if isinstance(history, ErrorReport):
        return [history]
    if isinstance(history, Sequence) and all(isinstance(x, ErrorReport) for x in history):
        steps = [report.step for report in history if report.step is not None]
        twice = next((s for s in steps if steps.count(s) > 1), None)
        if twice is not None:
            raise refused.WrongValue(
                f"history has two reports of step {twice}; keep one for each look, where report.step has changed"
            )
        return [report for report in history if report.rows]
    try:
        return [recorded_quantization_error(history)]
    except ValueError as error:
        raise refused.WrongType(
            "history must be reports of recorded_quantization_error, or a state with a QuantizationErrorState inside, "
            f"got {type(history).__name__}"
        ) from error


def _is_stored(row: Any) -> bool:
    return row.format not in ("float32", "")


def _over_steps(figures: Any, reports: list[ErrorReport], kinds: list[str]) -> Any:
    """Curves and a map for each kind."""
    steps = [i if report.step is None else report.step for i, report in enumerate(reports)]
    series = {kind: _series(reports, kind) for kind in kinds}
    leaves = max(map(len, series.values()))
    height = 2.6 + min(leaves, 40) * 0.03
    figure = figures.Figure(figsize=(11, height * len(kinds) + 0.7), layout="constrained")
    figure.suptitle("Relative error of rounding, for each leaf", color=INK)
    grid = figure.subplots(len(kinds), 2, squeeze=False, width_ratios=(1.25, 1))
    for (curves, cells), kind in zip(grid, kinds, strict=True):
        _draw_curves(curves, steps, series[kind], kind)
        _draw_map(figure, cells, steps, series[kind], kind)
    return figure


def _series(reports: list[ErrorReport], kind: str) -> Series:
    paths = dict.fromkeys(row.path for report in reports for row in report.rows if row.what == kind and _is_stored(row))
    found: Series = {path: [float("nan")] * len(reports) for path in paths}
    for i, report in enumerate(reports):
        for row in report.rows:
            if row.what == kind and row.path in found:
                found[row.path][i] = 100 * row.error
    return found


def _draw_curves(axes: Any, steps: list[int], series: Series, kind: str) -> None:
    worst = sorted(series, key=lambda path: -_mean(series[path]))[:WORST]
    for path, errors in series.items():
        if path not in worst:
            axes.plot(steps, errors, color=FAINT, linewidth=0.8, alpha=0.7)
    for path, color in zip(worst, COLORS, strict=False):
        axes.plot(steps, series[path], color=color, linewidth=1.4, label=path)
    middle = [_median([errors[i] for errors in series.values()]) for i in range(len(steps))]
    axes.plot(steps, middle, color=INK, linewidth=1.8, linestyle=(0, (4, 2)), label=f"median of {len(series)} leaves")
    axes.set_ylim(bottom=0)
    axes.set(xlabel="step", ylabel=f"error of {_title(kind)}, %")
    axes.legend(fontsize=7, frameon=False, loc="best")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)


def _draw_map(figure: Any, axes: Any, steps: list[int], series: Series, kind: str) -> None:
    paths = list(series)
    image = axes.imshow(list(series.values()), aspect="auto", interpolation="nearest", cmap="viridis", vmin=0)
    every = ceil(len(paths) / 14)
    axes.set_yticks(range(0, len(paths), every), paths[::every], fontsize=6)
    some = ceil(len(steps) / 6)
    axes.set_xticks(range(0, len(steps), some), steps[::some])
    axes.set_xlabel("step")
    figure.colorbar(image, ax=axes, label=f"error of {_title(kind)}, %")


def _of_one(figures: Any, report: ErrorReport, kinds: list[str]) -> Any:
    """For each kind, a bar for each leaf: the mean, with marks at the last and at the largest error."""
    rows = {kind: [r for r in report.rows if r.what == kind and _is_stored(r)] for kind in kinds}
    worst = sorted(rows[UPDATE], key=lambda row: -row.mean)[:40]
    order = [row.path for row in rows[UPDATE] if row in worst]
    figure = figures.Figure(figsize=(3 + 3 * len(kinds), 1.4 + 0.22 * len(order)), layout="constrained")
    all_axes = figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
    for axes, kind in zip(all_axes, kinds, strict=True):
        by_path = {row.path: row for row in rows[kind]}
        shown = [(y, by_path[path]) for y, path in enumerate(order) if path in by_path]
        places = [y for y, _ in shown]
        axes.barh(places, [100 * row.mean for _, row in shown], color="#9fc5d8", label="mean")
        axes.plot([100 * row.error for _, row in shown], places, "o", color=INK, markersize=3, label="last")
        axes.plot([100 * row.largest for _, row in shown], places, "|", color=COLORS[0], markersize=8, label="largest")
        axes.set(xlabel=f"error of {_title(kind)}, %")
        axes.set_xlim(left=0)
        axes.set_yticks(range(len(order)), order, fontsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].set_ylim(len(order) - 0.4, -0.6)
    all_axes[-1].legend(fontsize=7, frameon=False, loc="best")
    left_out = len(rows[UPDATE]) - len(order)
    looks = max((row.looks for row in report.rows), default=0)
    words = f"Relative error of rounding, {looks} looks" + (f", the worst {len(order)} leaves" if left_out else "")
    figure.suptitle(words, color=INK)
    return figure


def _title(kind: str) -> str:
    return "the update" if kind == UPDATE else kind


def _mean(numbers: list[float]) -> float:
    known = [x for x in numbers if x == x]
    return sum(known) / len(known) if known else 0.0


def _median(numbers: list[float]) -> float:
    known = sorted(x for x in numbers if x == x)
    return known[len(known) // 2] if known else float("nan")
