"""describe: what a state is made of, how many bytes it takes, and why."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from functional_lowbit import _optree
from functional_lowbit._core.contract.base import moments_of, statistics_of
from functional_lowbit._core.report.table import Report, Row
from functional_lowbit._core.state.quantized import QuantizedTensor
from functional_lowbit._optree import Tree
from functional_lowbit.sharding import local_of

WHY = {"shared": "shared by all leaves", "statistic": "a statistic of its leaf", "number": "a number of its leaf"}


def describe(state: Any, params: Tree = None) -> Report:
    """A report of a state: for each leaf its path, format, global shape, bytes on this rank, and the reason.

    Args:
        state: The state of any transformation.
        params: The parameters that it is for, to count the bytes of training too.

    Returns:
        A `Report` with `.rows` and `.total_bytes`; `print` shows it as a table. With params also `.weight_bytes`,
        `.gradient_bytes` (as large), `.training_bytes` (the sum of weights, gradients and state) and
        `.bytes_per_parameter`. Activations are not counted.

    Example:
        >>> import torch, functional_lowbit as fl
        >>> print(fl.describe(fl.lion8bit(1e-3).init({"w": torch.zeros(64, 64), "b": torch.zeros(64)})))
        path    format      shape     bytes  why
        0.step  int64       ()            8  shared by all leaves
        0.mu.b  float32     (64,)       256  fewer than 4,096 elements
        0.mu.w  companded8  (64, 64)  4,352  at least 4,096 elements
        total                         4,616
        >>> params = {"w": torch.zeros(64, 64, dtype=torch.bfloat16)}
        >>> round(fl.describe(fl.adamw8bit(1e-3).init(params), params).bytes_per_parameter, 2)  # 2 + 2 + 2.125
        6.13
    """
    rows: list[Row] = []
    for path, leaf, threshold, kind in _leaves(state):
        if isinstance(leaf, QuantizedTensor):
            rows.append(Row(path, leaf.format.name, leaf.shape, leaf.nbytes, _why_stored(leaf)))
        elif isinstance(leaf, Tensor):
            why = _why_plain(leaf, threshold) if kind == "moment" else WHY[kind]
            dtype = str(leaf.dtype).removeprefix("torch.")
            rows.append(Row(path, dtype, tuple(leaf.shape), local_of(leaf).nbytes, why))
    if params is None:
        return Report(tuple(rows))
    shards = [local_of(p) for p in _optree.leaves(params)]
    weight_bytes = sum(p.nbytes for p in shards)
    return Report(tuple(rows), sum(p.numel() for p in shards), weight_bytes, weight_bytes)


def _why_stored(leaf: QuantizedTensor) -> str:
    threshold = leaf.layout.threshold
    why = "chosen by where" if threshold is None else f"at least {threshold:,} elements"
    return why + "; the mesh cuts its rows, so each shard has blocks of its own" if leaf.layout.cut else why


def _why_plain(leaf: Tensor, threshold: int | None) -> str:
    if threshold is None:
        return "not stored in few bits"
    return f"fewer than {threshold:,} elements" if leaf.numel() < threshold else "rows too short to gain by it"


def _kinds(node: Any) -> dict[str, str]:
    """What the fields of a state are: "moment", "statistic" or "number"."""
    numbers = dict.fromkeys(getattr(type(node), "PER_LEAF", ()), "number")
    statistics, moments = statistics_of(type(node)), moments_of(type(node))
    return numbers | dict.fromkeys(statistics, "statistic") | dict.fromkeys(moments, "moment")


def _leaves(state: Any) -> Iterator[tuple[str, Any, int | None, str]]:
    """(path, leaf, threshold of the leaf's moment, "moment", "statistic", "number" or "shared")."""
    for field in _optree.stored_leaves(state, _kinds):
        kind, below = field.mark or "shared", list(_optree.stored_leaves(field.node))
        found = (at.node.layout.threshold for at in below if isinstance(at.node, QuantizedTensor))
        threshold = next((t for t in found if t is not None), None)
        for at in below:
            yield ".".join(field.names + at.names), at.node, threshold, kind
