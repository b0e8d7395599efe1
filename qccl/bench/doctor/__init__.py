"""Computes times that were not measured: the steps of a training, and calls on machines that you do not have."""
