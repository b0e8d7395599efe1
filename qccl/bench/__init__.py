"""qccl-bench: what compression gains on this machine and this network, in the habits of nccl-tests."""
