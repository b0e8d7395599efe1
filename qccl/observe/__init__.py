"""Tells people about the calls of ranks: statistics, records, Prometheus, and profiler ranges."""
