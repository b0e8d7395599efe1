"""Predictions of times: the steps of a training, and calls on machines that you do not have."""
