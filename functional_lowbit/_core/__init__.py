"""The machine behind what a user types, and the one error by which all of it refuses.

Imports: nothing
"""
