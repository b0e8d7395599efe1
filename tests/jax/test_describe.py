"""From an array of JAX to its address, layout and element type, without a copy."""

from __future__ import annotations

import jax
import pytest
from rank_forks import outputs

from qccl import _host


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_jax(dtype: str) -> None:
    x = jax.numpy.zeros(4, dtype)
    view = _host.describe(x)
    assert view.address == x.unsafe_buffer_pointer()
    assert (view.shape, view.dtype, view.device_type, view.readonly) == ((4,), dtype, 1, True)


def test_a_sharded_jax_array():
    """It needs two devices, which JAX must be told of when it starts."""
    program = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh = Mesh(jax.devices(), ("a",))
def run(comm):
    errors = []
    for spec in (PartitionSpec("a"), PartitionSpec()):
        x = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, spec))
        try:
            comm.quantized_allreduce(x, out=np.empty(8, np.float32))
        except qccl.InvalidBufferError as error:
            errors.append(str(error))
        part = x.addressable_shards[0].data
        assert (comm.quantized_allreduce(part, out=np.empty(part.shape, np.float32)) == 2).all()
    return errors
for errors in qccl.run_ranks(2, run):
    print(*errors, sep="\\n")
"""
    [found] = outputs(program, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    lines = found.splitlines()
    assert len(lines) == 4
    assert all("on 2 devices" in line and "x.addressable_shards[0].data" in line for line in lines)
