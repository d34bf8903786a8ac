"""What rests between steps: stored tensors, moments, masters, and the parts whose states these are.

Imports: _core, _core.contract, _optree, formats, sharding
"""
