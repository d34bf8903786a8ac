"""What a transformation is, and the words that refuse what is none.

Imports: _core, _optree
"""
