"""What rests between steps: stored tensors, moments, and the parts whose states these are.

Imports: _core.contract, _optree, _refused, formats, sharding
"""
