"""Starts the ranks of a command or of a program of yours."""
