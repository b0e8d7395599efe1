"""Slow networks on one machine: network namespaces with rate-limited links."""
