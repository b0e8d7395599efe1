"""What a call on CUDA costs the host, by count (bench/dispatch.py measures it)."""

from __future__ import annotations

import dispatch


def test_a_repeated_call_runs_few_functions() -> None:
    """Of CUDA and NCCL exactly those that two rounds need; of qccl's own not many more than now."""
    with dispatch.silent() as comm:
        made = dispatch.calls(comm)
        found = {name: dispatch.counts(call) for name, call in made.items()}
    two_round = {"launchKernel": 5, "groupStart": 2, "groupEnd": 2, "send": 2, "recv": 2}
    two_round |= {"cuEventRecord": 6, "streamWaitEvent": 6, "getDevice": 2}
    assert found["quantized_allreduce(x)"].cuda == two_round
    assert found["plan.start().wait()"].cuda == two_round
    assert found["quantized_allreduce_coalesced(8 arrays)"].cuda == two_round
    limits = {"quantized_allreduce(x)": 85, "quantized_allreduce_coalesced(8 arrays)": 135, "plan.start().wait()": 68}
    assert {name: found[name].python for name in limits if found[name].python > limits[name]} == {}
