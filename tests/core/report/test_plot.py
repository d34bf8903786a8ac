"""plot.quantization_error: what is drawn, and what is refused."""

import sys

import pytest
import torch
from helpers import random_like, refuses

import functional_lowbit as fl
from functional_lowbit._core.report import plot

PARAMS = {"w": torch.zeros(33, 257), "v": torch.zeros(64, 128), "b": torch.zeros(7)}


def _history(n=4, every=2):
    tx = fl.record_quantization_error(fl.adam8bit(0.1), every=every)
    state, reports = tx.init(PARAMS), []
    for t in range(n):
        _, state = tx.update(random_like(PARAMS, seed=t), state, PARAMS)
        if (t + 1) % every == 0:
            reports.append(fl.recorded_quantization_error(state))
    return reports, state


def _figures():
    return pytest.importorskip("matplotlib.figure", reason="needs matplotlib, of the extra demo")


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_is_written(tmp_path, ending):
    _figures()
    reports, state = _history()
    for name, history in (("curves", reports), ("one", reports[0]), ("state", state)):
        path = fl.plot.quantization_error(history, tmp_path / f"{name}.{ending}")
        assert path == tmp_path / f"{name}.{ending}"
        assert path.read_bytes()[:6] == {"png": b"\x89PNG\r\n", "svg": b"<?xml "}[ending]


def test_what_is_drawn_over_steps():
    reports, _ = _history(6)
    figure = plot._over_steps(_figures(), reports, ["mu", "nu", "update"])
    for curves, kind in zip(figure.axes[:6:2], ("mu", "nu", "update"), strict=True):
        drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in curves.get_lines()}
        for path in "vw":  # b rests in float32
            errors = [100 * row.error for r in reports for row in r.rows if (row.path, row.what) == (path, kind)]
            assert drawn[path] == ([2, 4, 6], errors)
        assert drawn.keys() == {"v", "w", "median of 2 leaves"}
        assert curves.get_xlabel() == "step"
        assert curves.get_ylabel() == ("error of the update, %" if kind == "update" else f"error of {kind}, %")
        assert curves.get_ylim()[0] == 0
    cells = figure.axes[1].get_images()[0].get_array()
    assert cells.tolist() == _errors(reports, "mu")


def _errors(reports, kind):
    return [[100 * row.error for r in reports for row in r.rows if (row.path, row.what) == (p, kind)] for p in "vw"]


def test_what_is_drawn_of_one_report():
    reports, _ = _history(6)
    figure = plot._of_one(_figures(), reports[-1], ["mu", "nu", "update"])
    mu = figure.axes[0]
    rows = [row for row in reports[-1].rows if row.what == "mu" and row.format != "float32"]
    assert [bar.get_width() for bar in mu.patches] == pytest.approx([100 * row.mean for row in rows])
    last, largest = mu.get_lines()
    assert list(last.get_xdata()) == [100 * row.error for row in rows]
    assert list(largest.get_xdata()) == [100 * row.largest for row in rows]
    assert figure.get_suptitle() == "Relative error of rounding, 3 looks"


def test_what_is_refused(tmp_path, monkeypatch):
    reports, state = _history()
    path = tmp_path / "x.png"
    nothing = (
        "plot.quantization_error: history has no errors of moments in few bits; record some steps with "
        "fl.record_quantization_error(low_bit(tx)) first"
    )
    plain = fl.quantization_error(fl.adam(0.1), PARAMS, fl.adam(0.1).init(PARAMS), PARAMS)
    fresh = fl.record_quantization_error(fl.adam8bit(0.1)).init(PARAMS)
    for history in ([], plain, [plain], fresh):
        refuses(ValueError, nothing, lambda history=history: fl.plot.quantization_error(history, path))
    refuses(
        ValueError,
        "plot.quantization_error: history has two reports of step 2; keep one for each look, where report.step has "
        "changed",
        lambda: fl.plot.quantization_error([reports[0], reports[0]], path),
    )
    refuses(
        TypeError,
        "plot.quantization_error: history must be reports of recorded_quantization_error, or a state with a "
        "QuantizationErrorState inside, got dict",
        lambda: fl.plot.quantization_error({}, path),
    )
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # Python's own way to say that a package is not there
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refuses(
        ImportError,
        "plot.quantization_error: needs the package matplotlib; pip install 'functional-lowbit[demo]'",
        lambda: fl.plot.quantization_error(state, path),
    )
    assert not path.exists()
