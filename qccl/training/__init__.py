"""Algorithms of training on a communicator: DiLoCo and decentralised SGD."""
