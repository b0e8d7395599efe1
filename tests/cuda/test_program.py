"""Launches of a run on a fake GPU: the grid and the block of each kernel, which the fake demands exactly."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import fake_cuda
import fake_kernels
import numpy as np
import pytest
from cuda_ranks import ranks, values

import qccl
from qccl.cuda.source import ADDRESS_KERNEL, BEGIN_KERNEL, END_KERNEL, NONFINITE_KERNEL


def every_kernel(comm: qccl.Communicator) -> None:
    """Calls that launch each kind of kernel; of a group of one rank a call is a copy."""
    x = fake_cuda.array(values(comm.rank, 40_000), comm.rank)
    for codec in ("minmax8", "onebit", "minmax4:bucket=16384", "minmax3:bucket=64+ef"):
        comm.quantized_allreduce(x, codec=codec, key="x", algorithm="two_round", nonfinite="error")
    many = [fake_cuda.array(values(comm.rank, 5, i), comm.rank) for i in range(100)]
    comm.quantized_allreduce_coalesced(many, codec="minmax8")
    alone = comm.split(comm.rank)
    alone.quantized_allreduce(x, fake_cuda.array(np.zeros(40_000, np.float32), comm.rank))
    alone.check()
    comm.check()


def test_no_kernel_runs_in_another_shape_than_its_own(world: fake_cuda.World) -> None:
    """The engine's shapes pass; with one block, thread or byte of shared memory more or less, a launch is refused.

    Only a grid without the blocks of the last job is not: it leaves wrong bytes.
    """
    refused: dict[str, set[int]] = {}

    def demanding(name: str, geometry: tuple[int, ...], arguments: int) -> Callable[[], object]:
        right, late = fake_kernels.work(name, geometry, arguments), []
        found = refused.setdefault(fake_kernels.kind_of(name), set())
        for number, change in [*itertools.product(range(1, len(geometry)), (-1, 1)), (0, 1)]:
            other = (*geometry[:number], geometry[number] + change, *geometry[number + 1 :])
            try:
                late.append((number, fake_kernels.work(name, other, arguments)))
            except AssertionError:
                found.add(number)

        def run() -> object:
            for number, wrong in late:  # the tables of jobs are on the device now
                with pytest.raises(AssertionError):
                    wrong()
                found.add(number)
            return right()

        return run

    with fake_cuda.installed(world, demanding):
        assert ranks(2, every_kernel) == [None, None]
    kinds = {"encode", "decode", "reduce", "reduce_with_state", "commit", "copy"}
    assert refused.keys() == kinds | {BEGIN_KERNEL, END_KERNEL, ADDRESS_KERNEL, NONFINITE_KERNEL}
    assert all(found == set(range(7)) for found in refused.values()), refused
