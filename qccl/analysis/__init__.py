"""Schedules examined without an engine: is it right, for all ranks at once, and how long would it take?"""
