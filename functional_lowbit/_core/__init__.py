"""The machine behind what a user types.

Imports:

Imports: nothing
"""
