"""The C++ of one block: two functions that work on it, and the one that calls them for all blocks of all leaves."""

import torch
from torch import fx

from functional_lowbit._core.cpp.loops import REDUCTIONS, Argument, Loops
from functional_lowbit._core.cpp.ops import (
    CTYPES,
    HALF,
    cast,
    ctype_of,
    is_number,
    name_of,
    operation_of,
)
from functional_lowbit._core.cpp.prelude import DRIVER


class Block(Loops):
    """The text of a traced graph."""

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
        self.buffered = [i for i, a in enumerate(self.arguments) if _is_buffered(a, widen)]
        lines = [
            f"static inline void {name}(const int64_t n, const int64_t width, const int64_t half, char* const scratch,",
            "    const int64_t step, const float* const scalars, " + ", ".join(pointers) + ") {",
        ]
        for at, node in enumerate(self.kept):
            t = ctype_of(node.meta["val"].dtype)
            lines.append(f"    {t}* const __restrict__ k_{node.name} = ({t}*)(scratch + {at} * step);")
        for at, i in enumerate(self.buffered, len(self.kept)):
            dtype = self.arguments[i].dtype
            t = ctype_of(dtype) if widen or dtype in HALF else CTYPES[dtype]
            lines.append(f"    {t}* const __restrict__ c{i} = ({t}*)(scratch + {at} * step);")
        for node, i in self.argument.items():
            if i in self.buffered:
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
            if i in self.buffered:
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
                self._reduce_(node, before, clauses, body)
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

    def _reduce_(self, node: fx.Node, before: list[str], clauses: list[str], body: list[str]) -> None:
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
        if not is_number(node.args[0]):  # by itself: a comparison that also finds NaN would not be vectorized
            before.append(f"int {r}_nan = 0;")
            clauses.append(f"|:{r}_nan")
            body.append(f"{r}_nan |= {x} != {x};")

    def _declare(self, node: fx.Node) -> str:
        code = self.code[node] or self._element(self.argument[node])
        return f"const {ctype_of(node.meta['val'].dtype)} {name_of(node)} = {code};"

    def _element(self, i: int) -> str:
        return f"{'c' if i in self.buffered else 'a'}{i}[j]"

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


def _is_buffered(a: Argument, widen: bool) -> bool:
    """Whether a block of this tensor is worked on in an array of its own."""
    if a.kind not in ("element", "code"):
        return False
    return a.packed or a.dtype in HALF or (widen and a.dtype.itemsize < 4)
