"""What training takes, and what rounding does, as tables and pictures.

Imports: _core.contract, _core.state, _core.step, _optree, _private, _refused, sharding
"""
