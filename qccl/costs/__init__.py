"""The cost of calls: the measured times of a group's calls, and how gradients share calls."""
