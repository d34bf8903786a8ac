"""A leaf kernel as C++: the arithmetic of one block, traced, as a few loops over the block.

`compute` (see `_kernel`) is traced into a graph of aten operations on [n, b] elements, [n, 1] numbers of a block, and
0-d scalars. A block's largest magnitude must be known before its codes can be: each such reduction ends a loop, and
what was computed before and is needed after it is kept in an array of the block's length, in the first-level cache. So
each tensor is read from memory once and written once, and each number is computed once; inductor's loops over memory
decode the moments twice.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from functional_lowbit._cpp_ops import (
    CTYPES,
    HALF,
    Unsupported,
    cast,
    ctype_of,
    expression,
    is_number,
    literal,
    name_of,
    operation_of,
)
from functional_lowbit._cpp_text import DRIVER, PRELUDE

N, B = 3, 14  # blocks and elements in the example that is traced; unlike each other and unlike 1

REDUCTIONS = {"amax": ("max", "-INFINITY", "<"), "amin": ("min", "INFINITY", ">"), "any": ("|", "0", "")}
FILLED = {"full_like": 1, "zeros_like": 0, "ones_like": 0, "full": 1, "zeros": 0, "ones": 0, "scalar_tensor": 0}


class Argument(NamedTuple):
    """One tensor of a leaf."""

    dtype: torch.dtype
    kind: str  # "element": one for each of the leaf's; "code": the same, by whole blocks; "block": one for each block;
    # "leaf": one for the leaf
    packed: bool = False  # two codes of 4 bits in a byte


def source(
    compute: Callable[..., list[Tensor]],
    n_inputs: int,
    n_scalars: int,
    arguments: Sequence[Argument],
    places: Sequence[int],
) -> str:
    """C++ for `run(table, n_leaves, scalars, threads)`, which works on the leaves of a table in place.

    A row of the table is int64[4 + tensors]: blocks, elements of a row of the leaf, elements of a block, blocks of a
    row, and the addresses of the tensors, which are contiguous.

    Args:
        compute: `compute(g, p, scalars, *more) -> new values`, elementwise in blocks.
        n_inputs: How many of the tensors `compute` takes.
        n_scalars: Length of the vector of scalars.
        arguments: The tensors: g, p, what follows the scalars, and perhaps one that is only written.
        places: For each new value, the tensor that it is written to.

    Raises:
        Unsupported: for an operation whose bits are not fixed, or that is not elementwise in blocks.
    """
    shapes = [(N, 1 if a.kind in ("block", "leaf") else B) for a in arguments[:n_inputs]]
    args = [torch.ones(s, dtype=a.dtype, device="cpu") for s, a in zip(shapes, arguments, strict=False)]
    scalars = torch.ones(n_scalars, dtype=torch.float32, device="cpu")
    try:
        graph = make_fx(compute)(*args[:2], scalars, *args[2:]).graph
    except RuntimeError as error:  # for instance, a number is asked for: float(c.lr)
        raise Unsupported(f"it cannot be traced: {error}") from error
    return PRELUDE + _Block(graph, arguments, places).text()


class _Block:
    """The graph, sorted into loops over a block.

    An element belongs to the first loop in which all that it is made of is known, or to a later one if it is needed
    only there. A number of a block is known before the loop that it belongs to.
    """

    def __init__(self, graph: fx.Graph, arguments: Sequence[Argument], places: Sequence[int]):
        self.arguments, self.places = arguments, places
        self.code: dict[fx.Node, str] = {}  # in order
        self.domain: dict[fx.Node, str] = {}  # "scalar", "block" or "element"
        self.loop: dict[fx.Node, int] = {}
        self.argument: dict[fx.Node, int] = {}  # of placeholders
        self.vector: Any = None  # the placeholder of the scalars
        self.outputs: list[fx.Node] = []
        self.apart: list[int] = []  # arguments that the function being written reads into arrays of their own
        self._seen: dict[Any, fx.Node] = {}
        for node in graph.nodes:
            self._add(node)
        self.stores = [(v, i) for v, i in zip(self.outputs, places, strict=True) if arguments[i].kind != "block"]
        self.elements = [n for n in self.code if self.domain[n] == "element"]
        self._sink()
        self.n_loops = 1 + max(self.loop[n] for n in [*self.elements, *(v for v, _ in self.stores)])
        self.uses = self._uses()
        self.kept = [n for n in self.elements if self._is_kept(n)]

    # --- the graph

    def _add(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._add_placeholder(node)
        elif node.op == "output":
            self.outputs = list(node.args[0])  # type: ignore[arg-type]
        elif node.op == "get_attr":
            constant = getattr(node.graph.owning_module, str(node.target))
            if constant.numel() != 1:
                raise Unsupported(f"a constant of shape {tuple(constant.shape)}")
            self._put(node, "scalar", 0, literal(constant.item(), constant.dtype))
        else:
            self._add_call(node)

    def _add_placeholder(self, node: fx.Node) -> None:
        i = len(self.argument)
        if i == 2 and self.vector is None:
            self.vector = node
            return
        self.argument[node] = i
        if self.arguments[i].kind in ("block", "leaf"):
            self._put(node, "block", 0, f"a{i}[0]")
        else:
            self._put(node, "element", 0, "")  # its text depends on the block, see `_declare`

    def _add_call(self, node: fx.Node) -> None:
        same = (node.target, repr(node.args), repr(node.kwargs))  # as text: 2 is not 2.0, nor 0.0 the same as -0.0
        if same in self._seen:
            node.replace_all_uses_with(self._seen[same])
            return
        self._seen[same] = node
        name, value = operation_of(node), node.meta.get("val")
        if not isinstance(value, Tensor) or value.dtype not in CTYPES:
            raise Unsupported(str(node.target))
        inputs = node.all_input_nodes
        if self.vector in inputs:
            if name != "select":
                raise Unsupported(f"{node.target} of the vector of scalars")
            self._put(node, "scalar", 0, f"scalars[{node.args[2]}]")
            return
        if name in FILLED:
            fill = 1 if name.startswith("ones") else 0 if name.startswith("zeros") else node.args[FILLED[name]]
            text = literal(fill, value.dtype)
            self._put(node, "scalar", 0, text if "_builtin_" in text else f"opaque({text})")
            return
        if name == "arange" and value.shape == (B,) and node.args in ((0, B), (B,)):
            self._put(node, "element", 0, f"({CTYPES[value.dtype]})j")
            return
        loop = max((self.loop[i] for i in inputs), default=0)
        domain = max((self.domain[i] for i in inputs), key=("scalar", "block", "element").index, default="scalar")
        if name in REDUCTIONS:
            self._add_reduction(node, name, domain, loop)
            return
        if {"scalar": value.numel() == 1, "block": value.shape == (N, 1), "element": value.shape == (N, B)}[domain]:
            self._put(node, domain, loop, expression(node))
        else:
            raise Unsupported(f"{node.target} with a result of shape {tuple(value.shape)}")

    def _add_reduction(self, node: fx.Node, name: str, domain: str, loop: int) -> None:
        x, dims, keep = (*node.args, None, None)[:3]
        dims = [dims] if isinstance(dims, int) else dims
        if domain != "element" or not dims or [d % 2 for d in dims] != [1] or not keep:  # type: ignore[union-attr]
            raise Unsupported(f"{node.target}, except over the last dimension with keepdim=True")
        if x.meta["val"].dtype != (torch.bool if name == "any" else torch.float32):  # type: ignore[union-attr]
            raise Unsupported(f"{node.target} of {x.meta['val'].dtype}")  # type: ignore[union-attr]
        r = f"r_{node.name}"
        code = f"{r} != 0" if name == "any" else r
        self._put(node, "block", loop + 1, code if name == "any" or is_number(x) else f"{r}_nan ? NAN : {r}")

    def _put(self, node: fx.Node, domain: str, loop: int, code: str) -> None:
        self.domain[node], self.loop[node], self.code[node] = domain, loop, code

    def _is_reduction(self, node: fx.Node) -> bool:
        return node.op == "call_function" and operation_of(node) in REDUCTIONS

    def _loop_of_use(self, user: fx.Node) -> int:
        return self.loop[user] - self._is_reduction(user)

    def _sink(self) -> None:
        """Move what only later loops need into the first of them: what it is made of is often kept for them anyway."""
        last = max(self.loop[n] for n in self.elements)
        stored = {v for v, _ in self.stores}
        for node in reversed(self.elements):
            if node not in self.argument:
                # What is filled like an element (full_like) does not use it.
                uses = [self._loop_of_use(n) for n in node.users if self.domain.get(n, "scalar") != "scalar"]
                if node in stored:
                    uses.append(last)
                if uses:
                    self.loop[node] = min(uses)

    def _uses(self) -> dict[fx.Node, set[int]]:
        """For each value, the loops in which it is used."""
        uses: dict[fx.Node, set[int]] = {n: set() for n in self.code}
        for value, _ in self.stores:
            uses[value].add(self.loop[value])
        for node in reversed(self.code):
            if self.domain[node] != "scalar":
                loops = {self._loop_of_use(node)} | (uses[node] if self._is_cheap(node) else set())
                for i in node.all_input_nodes:
                    if i in uses:
                        uses[i] |= loops
        return uses

    def _is_cheap(self, node: fx.Node) -> bool:
        """Whether an element is computed again where a later loop needs it: a load of a bool is not vectorized."""
        is_bool = node.op == "call_function" and node.meta["val"].dtype == torch.bool
        return self.domain[node] == "element" and (is_bool or operation_of(node) == "abs")

    def _is_kept(self, node: fx.Node) -> bool:
        """Whether an element is kept in an array for later loops.

        An input is read again instead, if it is not written before; a magnitude or a comparison is computed again.
        """
        last = max(self.uses[node], default=0)
        if last <= self.loop[node] or self._is_cheap(node):
            return False
        if node in self.argument:
            written = [self.loop[value] for value, i in self.stores if i == self.argument[node]]
            return min(written, default=last) < last
        return True

    # --- the text

    def text(self) -> str:
        """All that follows the prelude: two functions for a block, and the one that calls them.

        A loop with a byte in it is vectorized for 64 elements at a time, and what is left over is done one by one. That
        is fastest for blocks of a multiple of 64; for others, bytes are widened in a loop of their own.
        """
        functions = [*self._function("even_block", widen=False), *self._function("any_block", widen=True)]
        driver = DRIVER.format(
            columns=4 + len(self.arguments),
            arrays=len(self.kept) + len(self.arguments),
            pointers=(",\n" + " " * 22).join(self._pointer(i) for i in range(len(self.arguments))),
        )
        return "\n".join(functions) + driver

    def _function(self, name: str, widen: bool) -> list[str]:
        pointers = [f"{CTYPES[a.dtype]}* const __restrict__ a{i}" for i, a in enumerate(self.arguments)]
        self.apart = [i for i, a in enumerate(self.arguments) if _is_apart(a, widen)]
        lines = [
            f"static inline void {name}(const int64_t n, const int64_t width, const int64_t half, char* const scratch,",
            "    const int64_t step, const float* const scalars, " + ", ".join(pointers) + ") {",
        ]
        for at, node in enumerate(self.kept):
            t = ctype_of(node.meta["val"].dtype)
            lines.append(f"    {t}* const __restrict__ k_{node.name} = ({t}*)(scratch + {at} * step);")
        for at, i in enumerate(self.apart, len(self.kept)):
            dtype = self.arguments[i].dtype
            t = ctype_of(dtype) if widen or dtype in HALF else CTYPES[dtype]
            lines.append(f"    {t}* const __restrict__ c{i} = ({t}*)(scratch + {at} * step);")
        for node, i in self.argument.items():
            if i in self.apart:
                lines += ["    " + line for line in self._widen(node, i)]
        lines += [f"    {self._declare(n)}" for n in self.code if self.domain[n] == "scalar"]
        for loop in range(self.n_loops + 1):
            lines += [
                f"    {self._declare(n)}" for n in self.code if self.domain[n] == "block" and self.loop[n] == loop
            ]
            if loop < self.n_loops:
                lines += self._loop_text(loop)
        for value, i in zip(self.outputs, self.places, strict=True):
            if self.arguments[i].kind == "block":
                lines.append(f"    a{i}[0] = {cast(value, self.arguments[i].dtype)};")
        for i in dict.fromkeys(i for _, i in self.stores):
            if i in self.apart:
                lines += ["    " + line for line in self._narrow(i)]
        return [*lines, "}", ""]

    def _widen(self, node: fx.Node, i: int) -> list[str]:
        """A block of narrow numbers, read into an array of its own."""
        if not self.uses[node]:
            return []
        if self.arguments[i].packed:
            return [
                f"for (int64_t j = 0; j < half; j++) c{i}[j] = a{i}[j] & 15;",
                f"for (int64_t j = half; j < width; j++) c{i}[j] = a{i}[j - half] >> 4;",
            ]
        read = f"wide(a{i}[j])" if self.arguments[i].dtype == torch.bfloat16 else f"a{i}[j]"
        return [f"for (int64_t j = 0; j < n; j++) c{i}[j] = {read};"]

    def _narrow(self, i: int) -> list[str]:
        """The way back."""
        if self.arguments[i].packed:
            return [
                f"for (int64_t j = 0; j < width - half; j++) a{i}[j] = c{i}[j] | (c{i}[half + j] << 4);",
                f"if (width & 1) a{i}[half - 1] = c{i}[half - 1] | (c{i}[0] << 4);",
            ]
        dtype = self.arguments[i].dtype
        write = f"narrow(c{i}[j])" if dtype == torch.bfloat16 else f"({CTYPES[dtype]})c{i}[j]"
        return [f"for (int64_t j = 0; j < n; j++) a{i}[j] = {write};"]

    def _loop_text(self, loop: int) -> list[str]:
        before: list[str] = []
        clauses: list[str] = []
        body: list[str] = []
        for node in self.code:
            if self._is_reduction(node) and self.loop[node] == loop + 1:
                self._reduce(node, before, clauses, body)
            elif self.domain[node] == "element" and (loop == self.loop[node] or loop in self.uses[node]):
                if loop == self.loop[node] or node not in self.kept:
                    body.append(self._declare(node))
                    if node in self.kept:
                        body.append(f"k_{node.name}[j] = {name_of(node)};")
                else:
                    body.append(f"const {ctype_of(node.meta['val'].dtype)} {name_of(node)} = k_{node.name}[j];")
        for value, i in self.stores:
            if self.loop[value] == loop:
                body.append(f"{self._element(i)} = {cast(value, self.arguments[i].dtype)};")
        pragma = "#pragma omp simd" + "".join(f" reduction({clause})" for clause in clauses)
        lines = [*before, pragma, "for (int64_t j = 0; j < n; j++) {", *("    " + line for line in body), "}"]
        return ["    " + line for line in lines]

    def _reduce(self, node: fx.Node, before: list[str], clauses: list[str], body: list[str]) -> None:
        """What a reduction adds: its variable, the clause that lets it be vectorized, and the step in the loop."""
        kind, start, less = REDUCTIONS[operation_of(node)]
        r, x = f"r_{node.name}", name_of(node.args[0])  # type: ignore[arg-type]
        clauses.append(f"{kind}:{r}")
        if kind == "|":
            before.append(f"int {r} = {start};")
            body.append(f"{r} |= {x};")
            return
        before.append(f"float {r} = {start};")
        body.append(f"{r} = {r} {less} {x} ? {x} : {r};")
        if not is_number(node.args[0]):  # looked for apart: a comparison that also finds NaN would not be vectorized
            before.append(f"int {r}_nan = 0;")
            clauses.append(f"|:{r}_nan")
            body.append(f"{r}_nan |= {x} != {x};")

    def _declare(self, node: fx.Node) -> str:
        code = self.code[node] or self._element(self.argument[node])
        return f"const {ctype_of(node.meta['val'].dtype)} {name_of(node)} = {code};"

    def _element(self, i: int) -> str:
        return f"{'c' if i in self.apart else 'a'}{i}[j]"

    def _pointer(self, i: int) -> str:
        kind = "half" if self.arguments[i].packed else self.arguments[i].kind
        offset = {
            "element": "row * length + k * width",
            "code": "b * width",
            "half": "b * half",
            "block": "b",
            "leaf": "0",
        }[kind]
        return f"({CTYPES[self.arguments[i].dtype]}*)leaf[{4 + i}] + {offset}"


def _is_apart(a: Argument, widen: bool) -> bool:
    """Whether a block of this tensor is worked on in an array of its own."""
    if a.kind not in ("element", "code"):
        return False
    return a.packed or a.dtype in HALF or (widen and a.dtype.itemsize < 4)
