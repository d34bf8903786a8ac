"""Transformations, one idea a file. Users find them all in `functional_lowbit`.

Imports: _core.contract, _core.leafwise, _core.report, _core.state, _optree, _refused, formats, sharding
"""
