"""What byte_lm.py shows at its end: the table and the picture."""

import statistics
from dataclasses import dataclass

import matplotlib

matplotlib.use("Agg")  # draws into files, needs no screen
import matplotlib.pyplot as plt

LABELS = {
    "torch": "torch AdamW, fused",
    "adamw": "ours, fp32",
    "adamw8bit": "ours, 8-bit",
    "adamw4bit": "ours, 4-bit, bf16",
}
STYLES = {
    "torch": ("#b8bec6", 6.0, "-"),
    "adamw": ("#22314a", 1.8, "-"),
    "adamw8bit": ("#e4572e", 1.8, (0, (3.5, 1.6))),
    "adamw4bit": ("#2a9d8f", 1.6, (0, (1.2, 1.2))),
}


@dataclass(frozen=True)
class Result:
    """What one run measured. Losses are means in nats per byte."""

    losses: list[float]  # training loss of every step
    valid: dict[int, float]  # steps taken -> validation loss
    step_seconds: list[float]  # clip and optimizer step, for every step
    state_bytes: int
    params: int
    graphs: int
    weight_bytes: int  # of one weight and its gradient

    @property
    def train_loss(self) -> float:
        """Mean of the last 10 steps."""
        return statistics.fmean(self.losses[-10:])

    @property
    def valid_loss(self) -> float:
        return list(self.valid.values())[-1]

    @property
    def bytes_per_param(self) -> float:
        return self.state_bytes / self.params

    @property
    def training_bytes(self) -> float:
        """Bytes per parameter of weights, gradients and state."""
        return self.bytes_per_param + self.weight_bytes

    @property
    def step_ms(self) -> float:
        """Median, without the warm-up: the first tenth and at least one step."""
        return 1e3 * statistics.median(self.step_seconds[len(self.step_seconds) // 10 or 1 :])


def print_table(results: dict[str, Result]) -> None:
    titles = ("train loss", "val. loss", "state bytes", "bytes/param", "training", "ms/step", "graphs", "first step")
    print("\n" + f"{'optimizer':18}" + "".join(f"{title:>13}" for title in titles))
    for name, r in results.items():
        print(
            f"{LABELS[name]:18}{r.train_loss:13.4f}{r.valid_loss:13.4f}{r.state_bytes:13,}{r.bytes_per_param:13.3f}"
            f"{r.training_bytes:13.3f}{r.step_ms:13.2f}{r.graphs:13}{r.step_seconds[0]:11.2f} s"
        )
    print("losses: nats per byte, train over the last 10 steps; bytes/param: of the state; training: with weights and")
    print("gradients; ms/step: clipping and optimizer, median;")
    print("first step: compiling included, and loading the compiler where it is first used\n")


def print_difference(results: dict[str, Result]) -> None:
    for name in ("adamw8bit", "adamw4bit"):
        for reference in ("torch", "adamw"):
            if reference in results and name in results:
                ours, theirs = results[name].valid_loss, results[reference].valid_loss
                relative = f"{ours / theirs - 1:+.3%} (goal: within 1%)"
                print(
                    f"validation loss, {LABELS[name]} {ours:.4f} against {LABELS[reference]} {theirs:.4f}: {relative}"
                )


def plot(results: dict[str, Result], path: str) -> None:
    """Loss curves above their distance from the first run's; beside them bars for state size and time."""
    plt.rcParams.update({"font.size": 10, "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.titlepad": 10})
    plt.rcParams.update({"axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False})
    figure = plt.figure(figsize=(11, 4.6), layout="constrained", dpi=150)
    grid = figure.add_gridspec(2, 3, width_ratios=[2.3, 1, 1], height_ratios=[2.7, 1])
    curves = figure.add_subplot(grid[0, 0])
    plot_curves(curves, results)
    plot_distances(figure.add_subplot(grid[1, 0], sharex=curves), results)
    plot_bars(figure.add_subplot(grid[:, 1]), "Training, bytes per param", results, "training_bytes")
    plot_bars(figure.add_subplot(grid[:, 2]), "Optimizer step, ms", results, "step_ms")
    figure.get_layout_engine().set(w_pad=0.15, wspace=0.06)
    figure.savefig(path)
    plt.close(figure)


def plot_curves(axes, results: dict[str, Result]) -> None:
    for name, r in results.items():
        color, width, dash = STYLES[name]
        axes.plot(range(1, len(r.losses) + 1), r.losses, color=color, lw=0.6, alpha=0.25)
        axes.plot(list(r.valid), list(r.valid.values()), color=color, lw=width, ls=dash, label=LABELS[name])
    axes.set_title("Validation loss, nats per byte (thin: training loss)")
    axes.tick_params(labelbottom=False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def plot_distances(axes, results: dict[str, Result]) -> None:
    reference = next(iter(results))
    for name, r in results.items():
        color, width, dash = STYLES[name]
        percent = [100 * (r.valid[step] / results[reference].valid[step] - 1) for step in r.valid]
        axes.plot(list(r.valid), percent, color=color, lw=width, ls=dash)
    axes.axhspan(-1, 1, color="#2a9d8f", alpha=0.12, lw=0)
    axes.text(1, -0.95, "within 1%", color="#2a9d8f", fontsize=8.5, va="bottom")
    axes.set(title=f"Distance from {LABELS[reference]}, in percent", xlabel="step", ylim=(-1.5, 1.5))


def plot_bars(axes, title: str, results: dict[str, Result], key: str) -> None:
    values = [getattr(r, key) for r in results.values()]
    names = [LABELS[name].replace(" AdamW", "").replace(", ", "\n") for name in results]
    bars = axes.bar(names, values, color=[STYLES[name][0] for name in results], width=0.66)
    axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=3, fontweight="bold")
    axes.set_title(title, loc="center")
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="x", length=0, labelsize=9)
    axes.margins(y=0.1)
