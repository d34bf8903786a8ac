"""A traced graph as C++, compiled once and kept.

Imports: _private
"""
