"""What the caller holds: from arrays and pointers, on the host and on a GPU, to addresses that can be trusted."""
