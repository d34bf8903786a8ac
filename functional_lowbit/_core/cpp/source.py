"""A leaf kernel as C++: the arithmetic of one block, traced, as a few loops over the block.

`compute` is traced into a graph of aten operations on [n, b] elements, [n, 1] numbers of a block, and
0-d scalars. A block's largest magnitude must be known before its codes can be: each such reduction ends a loop, and
what was computed before and is needed after it is kept in an array of the block's length, in the first-level cache. So
each tensor is read from memory once and written once, and each number is computed once; inductor's loops over memory
decode the moments twice.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from functional_lowbit._core.cpp.block import Block
from functional_lowbit._core.cpp.loops import Argument, B, N
from functional_lowbit._core.cpp.ops import Unsupported
from functional_lowbit._core.cpp.prelude import PRELUDE


def source(
    compute: Callable[..., list[Tensor]], arguments: Sequence[Argument], places: Sequence[int], n_scalars: int
) -> str:
    """C++ for `run(table, n_leaves, scalars, threads)`, which works on the leaves of a table in place.

    A row of the table is int64[4 + tensors]: blocks, elements of a row of the leaf, elements of a block, blocks of a
    row, and the addresses of the tensors, which are contiguous.

    Args:
        compute: `compute(*arguments that are read) -> new values`, elementwise in blocks.
        arguments: The tensors, one vector of scalars among them. Those that are only written come last.
        places: For each new value, the tensor that it is written to, the vector not counted.
        n_scalars: Length of the vector.

    Raises:
        Unsupported: for an operation whose bits are not fixed, or that is not elementwise in blocks.
    """
    shapes = {"scalars": (n_scalars,), "block": (N, 1), "leaf": (N, 1), "element": (N, B), "code": (N, B)}
    args = [torch.ones(shapes[a.kind], dtype=a.dtype, device="cpu") for a in arguments if a.read]
    try:
        graph = make_fx(compute)(*args).graph
    except RuntimeError as error:  # for instance, a number is asked for: float(c.lr)
        raise Unsupported(f"it cannot be traced: {error}") from error
    return PRELUDE + Block(graph, arguments, places).text()
