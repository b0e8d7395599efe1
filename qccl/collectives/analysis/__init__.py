"""Analysis of schedules without an engine: a verifier for all ranks together, and a simulator of their time."""
