"""The engines, which run schedules on the host and on CUDA, and the parts that both share."""
