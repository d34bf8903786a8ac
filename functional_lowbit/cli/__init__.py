"""The command line: `functional-lowbit`, or `python -m functional_lowbit`."""

from functional_lowbit.cli._main import main as main
