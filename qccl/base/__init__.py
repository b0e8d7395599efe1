"""Errors, element types, the caller's arrays, numbers, files, and the end of the process."""

__version__ = "0.1.0"
