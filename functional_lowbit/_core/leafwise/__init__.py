"""A function of one leaf, held to what it declares, lifted to trees.

Imports: _core.contract, _core.cpp, _core.state, _optree, _private, _refused, formats, sharding
"""
