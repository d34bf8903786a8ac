"""Transformations, one idea a file. Users find them all in `functional_lowbit`."""
