"""What a transformation is, and the words that refuse what is none.

Imports: _optree, _refused
"""
