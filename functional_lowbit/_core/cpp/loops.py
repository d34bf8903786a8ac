"""The loops of one block: in which of them each value of a traced graph is computed, used and kept."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from functional_lowbit._core.cpp.ops import (
    CTYPES,
    Unsupported,
    expression,
    is_number,
    literal,
    operation_of,
)

N, B = 3, 14  # blocks and elements in the example that is traced; unlike each other and unlike 1

REDUCTIONS = {"amax": ("max", "-INFINITY", "<"), "amin": ("min", "INFINITY", ">"), "any": ("|", "0", "")}


FILLED = {"full_like": 1, "zeros_like": 0, "ones_like": 0, "full": 1, "zeros": 0, "ones": 0, "scalar_tensor": 0}


class Argument(NamedTuple):
    """One tensor of a leaf, or the vector of scalars."""

    dtype: torch.dtype
    kind: str  # "element": one for each of the leaf's; "code": the same, by whole blocks; "block": one for each block;
    # "leaf": one for the leaf; "scalars": numbers for all leaves
    packed: bool = False  # two codes of 4 bits in a byte
    read: bool = True  # whether the function is given it; else it is only written


class Loops:
    """The graph, sorted into loops over a block.

    An element belongs to the first loop in which all that it is made of is known, or to a later one if it is needed
    only there. A number of a block is known before the loop that it belongs to.
    """

    def __init__(self, graph: fx.Graph, arguments: Sequence[Argument], places: Sequence[int]):
        self.arguments, self.places = [a for a in arguments if a.kind != "scalars"], places
        self._given = iter([a for a in arguments if a.read])
        self.code: dict[fx.Node, str] = {}  # in order
        self.domain: dict[fx.Node, str] = {}  # "scalar", "block" or "element"
        self.loop: dict[fx.Node, int] = {}
        self.argument: dict[fx.Node, int] = {}  # of placeholders
        self.vector: Any = None  # the placeholder of the scalars
        self.outputs: list[fx.Node] = []
        self.buffered: list[int] = []  # arguments that the function being written reads into arrays of their own
        self._seen: dict[Any, fx.Node] = {}
        for node in graph.nodes:
            self._add(node)
        self.stores = [(v, i) for v, i in zip(self.outputs, places, strict=True) if self.arguments[i].kind != "block"]
        self.elements = [n for n in self.code if self.domain[n] == "element"]
        self._sink()
        self.n_loops = 1 + max(self.loop[n] for n in [*self.elements, *(v for v, _ in self.stores)])
        self.uses = self._uses()
        self.kept = [n for n in self.elements if self._is_kept(n)]

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
        given, i = next(self._given), len(self.argument)
        if given.kind == "scalars":
            self.vector = node
            return
        self.argument[node] = i
        if given.kind in ("block", "leaf"):
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
