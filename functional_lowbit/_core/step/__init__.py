"""A transformation taken apart, and run as kernels in place.

Imports: _core.contract, _core.cpp, _core.leafwise, _core.state, _optree, _private, _refused, formats, rounding,
sharding
"""
