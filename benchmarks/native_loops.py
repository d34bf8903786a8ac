"""Count the machine instructions of a generated kernel's loops over a block, for AdamW with each format.

    python benchmarks/native_loops.py [companded8 …]

Needs g++ and a processor with AVX-512: the loops that count are those over 64 elements at a time. See
docs/performance.md for what the numbers say.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import functional_lowbit as fl
from functional_lowbit._core.cpp import library


def sources(format: str) -> list[str]:
    """The C++ that a step of AdamW with moments in this format is made of."""
    found: list[str] = []
    load = library.load

    def noted(source: str):
        found.append(source)
        return load(source)

    library.load = noted
    try:
        params = {"w": torch.ones(64, 256)}
        tx = fl.adamw8bit(1e-3, format=format)
        fl.compile(tx, backend="native")(params, tx.init(params), params)
    finally:
        library.load = load
    return found


def loops(source: str) -> list[list[str]]:
    """The innermost loops of the compiled source, as lists of instructions."""
    with tempfile.TemporaryDirectory() as folder:
        text, made = Path(folder, "kernel.cpp"), Path(folder, "kernel.s")
        text.write_text(source)
        subprocess.run(["g++", *library.FLAGS, "-S", str(text), "-o", str(made)], check=True)
        lines = made.read_text().splitlines()
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.match(r"\.L\d+:$", line)}
    found = []
    for i, line in enumerate(lines):
        jump = re.match(r"\s+j\w+\s+(\.L\d+)$", line)
        if jump and labels.get(jump[1], i) < i:
            body = [
                x.split()[0] + " " + x for x in lines[labels[jump[1]] : i + 1] if x.startswith("\t") and x[1] != "."
            ]
            if not any(other in range(labels[jump[1]] + 1, i) for other in labels.values()):
                found.append(body)
    return found


def main() -> None:
    print(f"{'':12} {'loop':>4} {'instructions':>12} {'512 bits':>8} {'divisions':>9} {'roots':>5}")
    for format in sys.argv[1:] or [f for f in fl.formats.names() if f != "float32"]:
        for source in sources(format):
            main_loops = [b for b in loops(source) if sum("zmm" in x for x in b) > 0.8 * len(b) > 40]
            for k, body in enumerate(main_loops[:2]):
                divisions = sum(x.startswith("vdivps") for x in body)
                roots = sum(x.startswith("vsqrtps") for x in body)
                vectors = sum("zmm" in x for x in body)
                print(f"{format:12} {k + 1:>4} {len(body):>12} {vectors:>8} {divisions:>9} {roots:>5}")


if __name__ == "__main__":
    main()
