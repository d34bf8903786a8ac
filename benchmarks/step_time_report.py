"""What step_time.py measured, as tables, as goals met or not met, and as a picture."""

import math
import os
import statistics
from typing import Any

import torch

from functional_lowbit._core.report.columns import table
from functional_lowbit.cli import _contenders as timing


def versus(rows: dict[str, Any], name: str, other: str) -> float | None:
    """Median, over the rounds, of one contender's ratio divided by another's."""
    if name not in rows or other not in rows:
        return None
    return statistics.median(a / b for a, b in zip(rows[name]["ratios"], rows[other]["ratios"], strict=False))


def goals(results: dict[str, Any], cold: dict[str, Any]) -> list[tuple[str, float | None, float, bool]]:
    """(what, measured, goal, whether less is better): docs/design.md's goals."""
    one, gpt, small = (results.get(name, {}) for name in ("one", "gpt", "small"))

    def of(rows: dict[str, Any], name: str, key: str) -> float | None:
        return rows[name][key] if name in rows else None

    ours_cold = [c for c in cold.values() if "torchao" not in c["name"] and "inductor" not in c["name"]]
    return [
        ("adamw8bit / torch fused, one leaf", of(one, "adamw8bit", "ratio"), 1.0, True),
        ("adamw8bit / torch fused, gpt", of(gpt, "adamw8bit", "ratio"), 1.0, True),
        ("torchao / adamw8bit", versus(one, "torchao 8 bits", "adamw8bit"), 40.0, False),
        ("torchao / dynamic8", versus(one, "torchao 8 bits", "adamw8bit dynamic8"), 15.0, False),
        ("torchao 4 bits / adamw4bit", versus(one, "torchao 4 bits", "adamw4bit"), 12.0, False),
        ("dynamic8 / adamw8bit", versus(one, "adamw8bit dynamic8", "adamw8bit"), 4.0, True),
        ("adamwfp8 / adamw8bit", versus(one, "adamwfp8", "adamw8bit"), 2.0, True),
        ("adamw4bit / adamw8bit", versus(one, "adamw4bit", "adamw8bit"), 3.0, True),
        ("stochastic / nearest rounding", versus(one, "  with stochastic rounding", "adamw8bit, bf16"), 1.25, True),
        ("clip + adamw8bit / adamw8bit, gpt", versus(gpt, "clip + adamw8bit", "adamw8bit"), 1.25, True),
        ("1000 small leaves: adamw8bit / torch foreach", versus(small, "adamw8bit", "torch foreach"), 3.0, True),
        ("graphs for a model of 40 leaves", of(gpt, "adamw8bit", "graphs"), 2, True),
        ("cold first step, slowest of ours, s", max((c["seconds"] for c in ours_cold), default=None), 10.0, True),
        ("state bytes per parameter, gpt", of(gpt, "adamw8bit", "state_bytes_per_param"), 2.05, True),
        ("state bytes per parameter, gpt, 4 bits", of(gpt, "adamw4bit", "state_bytes_per_param"), 1.08, True),
        ("peak extra memory, largest leaf in fp32 = 1", of(gpt, "adamw8bit", "peak_extra_leaves"), 1.0, True),
    ]


def machine(device: str) -> str:
    """One line: what was measured on."""
    load = f", load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{timing.machine(device)} of {os.cpu_count()} cores, torch {torch.__version__}{load}"


def print_table(workload: str, shapes: list[tuple[int, ...]], rows: dict[str, Any]) -> None:
    params = sum(math.prod(shape) for shape in shapes)
    print(f"\n{workload}: {len(shapes)} leaves, {len(set(shapes))} shapes, {params:,} parameters")
    head = ("", "ns/param", "ratio", "min .. max", "graphs", "state B/param", "peak MiB", "in leaves")
    lines = [
        (
            name,
            f"{row['ns_per_param']:.3f}",
            f"{row['ratio']:.2f}",
            f"{min(row['ratios']):.2f} .. {max(row['ratios']):.2f}",
            "" if row["graphs"] is None else str(row["graphs"]),
            f"{row['state_bytes_per_param']:.3f}",
            f"{row['peak_extra_bytes'] / 2**20:.2f}",
            f"{row['peak_extra_leaves']:.3f}",
        )
        for name, row in rows.items()
    ]
    print(table(head, lines, head[1:]))


def print_goals(results: dict[str, Any], cold: dict[str, Any]) -> None:
    print("\ncold first step (fresh process, empty compile cache)")
    lines = [
        (c["name"], f"{c['seconds']:.1f} s", f"{c['graphs']} graphs for {c['shapes']} shapes ({c['workload']})")
        for c in cold.values()
    ]
    print(table(("", "seconds", ""), lines, ("seconds",)))
    lines = []
    for what, value, goal, less in goals(results, cold):
        met = value is not None and (value <= goal if less else value >= goal)
        verdict = "not measured" if value is None else "met" if met else "not met"
        lines.append((what, "" if value is None else f"{value:.2f}", f"{'<=' if less else '>='} {goal}", verdict))
    print("\n" + table(("goal", "measured", "goal", ""), lines, ("measured",)))


def plot(results: dict[str, Any], title: str, path: str) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(4.5 * len(results), 4), squeeze=False, layout="constrained")
    for axis, (workload, rows) in zip(axes[0], results.items(), strict=True):
        ratios = [row["ratio"] for row in rows.values()]
        low = [row["ratio"] - min(row["ratios"]) for row in rows.values()]
        high = [max(row["ratios"]) - row["ratio"] for row in rows.values()]
        axis.barh(list(rows), ratios, xerr=[low, high], color=["#27a" if "adamw" in n else "#888" for n in rows])
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set(title=workload, xscale="log", xlabel="step time / torch fused fp32 AdamW")
        axis.invert_yaxis()
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=150)
