"""The command ``qccl-relay``: it joins ranks of a job that cannot reach each other, and forwards what it cannot read.

A program of its own: nothing here is used by ranks. What they say to it is in qccl/transports/relay_protocol.py.
"""
