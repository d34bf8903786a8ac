"""The command line: `functional-lowbit`, or `python -m functional_lowbit`.

Imports: _core, _core.contract, _core.report, _core.state, _private, _refused, checkpoint, convert, formats,
functional_lowbit, optim, sharding, transforms
"""

from functional_lowbit.cli._main import main as main
