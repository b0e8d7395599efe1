"""What the engines of the host and of CUDA have in common: their interface, control messages, the progress thread."""
