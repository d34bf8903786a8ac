"""A transformation taken apart, and run as kernels in place.

Imports: _core, _core.contract, _core.cpp, _core.leafwise, _core.state, _optree, _private, formats, rounding, sharding
"""
