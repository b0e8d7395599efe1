"""qccl-bench measures what compression gains on this machine and network; flags and table follow nccl-tests."""
