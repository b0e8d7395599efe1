"""What ranks have done, for people: statistics, records, Prometheus, and profiler ranges."""
