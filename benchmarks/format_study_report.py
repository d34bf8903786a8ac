"""What format_study.py measured, as tables in docs/formats.md and as two pictures."""

import re
import shlex
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws into files, needs no screen
import matplotlib.pyplot as plt
from step_time_report import machine as machine

import functional_lowbit as fl

TIME_NOISE = 1.05  # a time that is shorter by less than this is not shorter
COLORS = dict(zip(fl.formats.names(), map("C{}".format, range(10)), strict=False))
TICKS = {"bytes_per_param": (1, 1.5, 2, 3, 4), "ratio": (1, 2, 3, 5, 10, 20, 50)}
Row = dict[str, Any]


def command(arguments: list[str], part: str) -> str:
    """How to measure this part again; the folder of the results does not matter."""
    kept = shlex.join(arguments)
    kept = re.sub(r"--out \S+", "", kept)
    kept = re.sub(r"--parts( (errors|curves))+", "", kept)
    return " ".join(f"python benchmarks/format_study.py --parts {part} {kept} --out docs".split())


def rounded(x: Any) -> Any:
    """Every float to 5 digits: what is kept is also what is shown."""
    if isinstance(x, float):
        return float(f"{x:.5g}")
    if isinstance(x, dict):
        return {str(k): rounded(v) for k, v in x.items()}
    return [rounded(v) for v in x] if isinstance(x, (list, tuple)) else x


# ------------------------------------------------------------------------------------------------------- front
def dominates(a: Row, b: Row) -> bool:
    """Whether a is nowhere worse than b in error, bytes and time, and somewhere better."""
    if a["both"] > b["both"] or a["bytes_per_param"] > b["bytes_per_param"]:
        return False
    better = a["both"] < b["both"] or a["bytes_per_param"] < b["bytes_per_param"]
    if "ratio" not in a or "ratio" not in b:
        return better
    return a["ratio"] <= TIME_NOISE * b["ratio"] and (better or TIME_NOISE * a["ratio"] < b["ratio"])


def on_front(row: Row, rows: Iterable[Row]) -> bool:
    """Whether no format of the library dominates the row."""
    return not any(dominates(other, row) for other in rows if other["kind"] == "format" and other is not row)


def label(row: Row) -> str:
    return f"`{row['name']}`" if row["kind"] == "format" else row["name"]


# ------------------------------------------------------------------------------------------------------ tables
def table(head: list[str], body: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def by_block(rows: list[Row], show: Callable[[Row], str]) -> str:
    """Formats down, block sizes across."""
    blocks = sorted({row["block"] for row in rows if row["block"] is not None})
    names = list(dict.fromkeys(row["name"] for row in rows))
    body = []
    for name in names:
        cells = {row["block"]: show(row) for row in rows if row["name"] == name}
        if None in cells:
            body.append([f"`{name}`", cells[None], *[""] * len(blocks)])
        else:
            body.append([f"`{name}`", "", *(cells.get(b, "") for b in blocks)])
    return table(["block size", "none", *map(str, blocks)], body)


def cell(key: str, digits: int) -> Callable[[Row], str]:
    return lambda row: f"{row[key]:.{digits}f}" if key in row else ""


def source_line(part: Row) -> str:
    return f"`{part['command']}` ({part['seconds']:.0f} s)"


def pareto_section(errors: Row) -> str:
    rows = [row for row in errors["rows"] if row["kind"] == "format"]

    def error(row: Row) -> str:
        return f"**{row['both']:.4f}**" if on_front(row, rows) else f"{row['both']:.4f}"

    timed = "timing" in errors
    steps = ", ".join(map(str, errors["steps"]))
    text = (
        f"{source_line(errors)}: a byte-level transformer of width {errors['width']} and {errors['layers']} layer(s), "
        f"{errors['weights']:,} weights; moments after {steps} steps, pooled.\n\n"
        f"Relative error of an AdamW update, both moments rounded once. Bold: on the Pareto front of error, bytes"
        f"{' and time' if timed else ' (times were not measured)'}.\n\n{by_block(rows, error)}\n\n"
        f"Adam's state of this model, bytes per parameter.\n\n{by_block(rows, cell('bytes_per_param', 3))}"
    )
    if timed:
        timing = errors["timing"]
        low, high = timing["fused_ratios"][0], timing["fused_ratios"][-1]
        text += (
            f"\n\nTime of a compiled AdamW step on one leaf of {timing['elements']:,}, as a multiple of torch's fused "
            f"fp32 AdamW ({timing['fused_ns']:.2f} ns per parameter; against itself {low:.2f} .. {high:.2f}).\n"
            f"{timing['machine']}.\n\n{by_block(rows, cell('ratio', 2))}"
        )
    longest = [name for name in rows[0]["leaves"] if name.endswith("down.weight")]
    if longest:
        text += (
            f"\n\nRows shorter than a block are blocks of their own. `{longest[0]}` has the longest rows "
            f"({4 * errors['width']}); its error alone:\n\n"
            f"{by_block([row['leaves'] | row for row in rows], cell(longest[0], 4))}"
        )
    return text


def detail(rows: list[Row], timing: Row | None, every: list[Row]) -> str:
    head = ["", "block", "bytes per parameter", "both moments", "first", "second", "after each number of steps"]
    head += ["largest change, in lr", "read as 0", "Lion's signs flipped", "worst leaves"]
    head += ["step / torch fused", "ns per parameter"] if timing else []
    body = []
    for row in rows:
        worst = sorted(row["leaves"].items(), key=lambda item: -item[1])[:2]
        cells = [
            label(row) + (" (front)" if on_front(row, every) else ""),
            str(row["block"] or "–"),
            f"{row['bytes_per_param']:.3f}",
            *(f"{row[which]:.4f}" for which in ("both", "mu", "nu")),
            " ".join(f"{error:.3f}" for error in row["steps"].values()),
            f"{row['max_change']:.2g}",
            f"{row['zeros']:,}",
            f"{100 * row['flips']:.2f}%",
            ", ".join(f"{name.removesuffix('.weight')} {error:.3f}" for name, error in worst),
        ]
        if timing:
            cells += [f"{row['ratio']:.2f}", f"{row['ns']:.2f}"] if "ratio" in row else ["–", "–"]
        body.append(cells)
    return table(head, body)


def defaults_section(errors: Row) -> str:
    rows = [row for row in errors["rows"] if row["kind"] == "format" and row["default"]]
    return "At the default block size.\n\n" + detail(rows, errors.get("timing"), errors["rows"])


def candidates_section(errors: Row) -> str:
    wanted = {"companded8", "e4m3", "root4", "dynamic4"}
    rows = [r for r in errors["rows"] if r["default"] and (r["kind"] == "candidate" or r["name"] in wanted)]
    rows.sort(key=lambda row: (row["bytes_per_param"] < 1.5, row["both"]))
    return (
        "Beside the formats with as many bits. `(front)`: no format of the library is as good in everything. First "
        "moments of rank1 are `root4`'s; it has no time, so error and bytes alone put it on the front.\n\n"
        + detail(rows, errors.get("timing"), errors["rows"])
    )


def curves_section(curves: Row) -> str:
    runs = curves["runs"]
    head = [
        "",
        "validation loss, nats per byte",
        "spread over seeds",
        "against float32, %: mean",
        "median",
        "each seed",
    ]
    body = []
    for name, seeds in runs.items():
        losses = [seed["valid"] for seed in seeds]
        change = differences(runs, name)
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        cells = [
            f"{statistics.fmean(losses):.4f}",
            f"±{spread:.4f}",
            *(f"{f(change):+.2f}" for f in (statistics.fmean, statistics.median)),
        ]
        body.append([shown(name), *cells, " ".join(f"{x:+.2f}" for x in change)])
    return (
        f"{source_line(curves)}: width {curves['width']}, {curves['layers']} layer(s), {curves['steps']} steps, "
        f"{curves['seeds']} seeds, the same batches for all. The spread is the standard deviation over seeds; the "
        f"difference is taken seed by seed. `torch fused` differs from `float32` by the rounding of float32 "
        f"only.\n\n{table(head, body)}"
    )


def shown(name: str) -> str:
    return name if name.startswith("torch") else f"Lion, `{name[5:]}`" if name.startswith("lion ") else f"`{name}`"


def differences(runs: Row, name: str) -> list[float]:
    """Validation loss against the float32 run of the same optimizer and seed, in percent."""
    base = runs["lion float32" if name.startswith("lion ") else "float32"]
    return [100 * (a["valid"] / b["valid"] - 1) for a, b in zip(runs[name], base, strict=True)]


# ---------------------------------------------------------------------------------------------------- pictures
def draw_pareto(errors: Row, path: Path) -> None:
    rows = [row for row in errors["rows"] if row["both"] > 0]
    timed = "timing" in errors
    figure, axes = plt.subplots(
        1, 2 if timed else 1, figsize=(12 if timed else 7, 5), squeeze=False, layout="constrained"
    )
    axes = list(axes[0])
    keys = [("bytes_per_param", "state, bytes per parameter"), ("ratio", "step time / torch fused fp32 AdamW")]
    for axis, (key, title) in zip(axes, keys, strict=False):
        labelled: set[str] = set()  # softs lie on one another
        for name in dict.fromkeys(row["name"] for row in rows):
            own = [row for row in rows if row["name"] == name and key in row]
            if not own:
                continue
            color, known = COLORS.get(name, "#999999"), own[0]["kind"] == "format"
            x, y = [row[key] for row in own], [row["both"] for row in own]
            axis.plot(x, y, "o-" if known else "x", color=color, lw=0.8, ms=4, label=name if known else None, zorder=2)
            front = [row for row in own if known and on_front(row, rows)]
            axis.scatter(
                [r[key] for r in front], [r["both"] for r in front], s=90, facecolors="none", edgecolors=color, zorder=3
            )
            default = next((row for row in own if row["default"]), own[0])
            place = {"xytext": (7, 4) if known else (-6, -3), "ha": "left" if known else "right"}
            style = {"textcoords": "offset points", "fontsize": 7, "color": color}
            family = name.split("(")[0]
            if family not in labelled:
                axis.annotate(family, (default[key], default["both"]), **place, **style)
            labelled.add(family)
        axis.set(xscale="log", yscale="log", xlabel=title, ylabel="relative error of an AdamW update")
        axis.set_xticks(TICKS[key], map(str, TICKS[key]))
        axis.minorticks_off()
        axis.margins(x=0.15)
        axis.grid(alpha=0.3)
    axes[0].set_title("circled: Pareto front (error, bytes, time); ×: candidates outside the library", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_curves(curves: Row, path: Path) -> None:
    runs = curves["runs"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for i, (name, seeds) in enumerate(runs.items()):
        mean = [statistics.fmean(losses) for losses in zip(*(seed["losses"] for seed in seeds), strict=True)]
        width = max(1, len(mean) // 20)
        smooth = [statistics.fmean(mean[max(0, t - width + 1) : t + 1]) for t in range(len(mean))]
        color = COLORS.get(name.removeprefix("lion "), "#222222")
        left.plot(smooth, ":" if name.startswith("lion ") else "-", color=color, lw=1.2, label=name)
        right.plot(differences(runs, name), [i] * len(seeds), "o", color=color, alpha=0.7)
    left.set(xlabel="step", ylabel="training loss, nats per byte (mean of seeds, smoothed)")
    left.legend(fontsize=8)
    right.axvline(0, color="black", lw=0.8)
    right.set(yticks=range(len(runs)), yticklabels=list(runs), xlabel="validation loss against float32, % (each seed)")
    right.invert_yaxis()
    figure.savefig(path, dpi=130)
    plt.close(figure)


# ------------------------------------------------------------------------------------------------------ publish
def publish(results: Row, out: Path) -> None:
    """Tables into the marked places of formats.md, or into files of their own; pictures beside them."""
    sections: dict[str, str] = {}
    if "errors" in results:
        sections["pareto"] = pareto_section(results["errors"])
        sections["defaults"] = defaults_section(results["errors"])
        sections["candidates"] = candidates_section(results["errors"])
        draw_pareto(results["errors"], out / "formats_pareto.png")
    if "curves" in results:
        sections["curves"] = curves_section(results["curves"])
        draw_curves(results["curves"], out / "formats_curves.png")
    page = out / "formats.md"
    text = page.read_text() if page.exists() else ""
    for name, section in sections.items():
        place = re.compile(rf"(<!-- study:{name} -->\n).*?(<!-- /study -->)", re.DOTALL)
        if place.search(text):
            text = place.sub(lambda m, section=section: f"{m[1]}{section}\n{m[2]}", text)
        else:
            (out / f"formats-{name}.md").write_text(section + "\n")
    if text:
        page.write_text(text)
    print("\n\n".join(sections.values()))
