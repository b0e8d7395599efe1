"""Calls that send tensors in a format of blocks, on fake GPUs: the host's bits, and no more bytes than the tensors'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import fake_cuda
import fake_nccl
import numpy as np
import pytest
from cuda_ranks import alike, returned

import qccl
from qccl.codecs import Encoded

#: bits of a code, and elements of a block
FORMATS = {"mxfp8": (8, 32), "mxfp8:type=e5m2": (8, 32), "mxfp4": (4, 32), "nvfp4": (4, 16)}
COLLECTIVES = ["all_gather", "all_to_all"]


def nbytes(name: str, count: int) -> tuple[int, int]:
    """The bytes of codes and of scales."""
    bits, block = FORMATS[name]
    return count * bits // 8, count // block


def encoded(name: str, array: Callable[..., Any], count: int, seed: int | None = None) -> Encoded:
    """Random codes and scales, which may mean NaN; without a seed the same byte everywhere."""
    random = np.random.default_rng(seed)
    content = [
        np.full(size, 0xA5, np.uint8) if seed is None else random.integers(0, 256, size, np.uint8)
        for size in nbytes(name, count)
    ]
    codes, scales = (array(each, code=1) for each in content)
    return Encoded(codes, scales, name, 0.37 if name == "nvfp4" else None)


def parts(collective: str, rank: int, size: int) -> list[int]:
    """By rank, the elements of its part of an all-gather, or those that ``rank`` sends to it and receives from it."""
    return [1280 + 128 * (other + (rank if collective == "all_to_all" else 0)) for other in range(size)]


def call(collective: str, comm: qccl.Communicator, x: Encoded, out: Any) -> None:
    counts = parts(collective, comm.rank, comm.size)
    if collective == "all_gather":
        comm.quantized_all_gather(x, out, counts=counts, chunk=1024)
    else:
        comm.quantized_all_to_all(x, out, send_counts=counts, recv_counts=counts, chunk=1024)


def arrays(
    collective: str, name: str, comm: qccl.Communicator, array: Callable[..., Any]
) -> tuple[Encoded, Encoded, Any]:
    """An input, an output of its format, and one of values."""
    counts = parts(collective, comm.rank, comm.size)
    x = encoded(name, array, counts[comm.rank] if collective == "all_gather" else sum(counts), comm.rank)
    return x, encoded(name, array, sum(counts)), array(np.zeros(sum(counts), np.float32))


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [1, 3])
def test_the_hosts_bits_whatever_the_order(collective: str, name: str, size: int, world: Any, cupy: Any) -> None:
    def calls(comm: qccl.Communicator, array: Callable[..., Any]) -> list[Any]:
        x, out, decoded = arrays(collective, name, comm, array)
        call(collective, comm, x, out)
        call(collective, comm, x, decoded)
        return [out.codes, out.scales, decoded, x.codes, x.scales]

    for seed in range(2):
        world.random.seed(seed)
        alike(size, calls)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("name", FORMATS)
def test_exactly_the_bytes_of_codes_and_scales_are_sent(
    collective: str, name: str, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, sent, send = 3, Counter[int](), fake_nccl.Communicator.send

    def counting(self: fake_nccl.Communicator, address: int, count: int, *rest: int) -> None:
        sent[self._rank] += count
        send(self, address, count, *rest)

    def bytes_of_calls(comm: qccl.Communicator) -> list[int]:
        x, *outputs = arrays(collective, name, comm, partial(fake_cuda.array, device=comm.rank))
        found = []
        for out in outputs:
            before = sent[comm.rank]
            call(collective, comm, x, out)
            found.append(sent[comm.rank] - before)
        comm.check()
        return found

    monkeypatch.setattr(fake_nccl.Communicator, "send", counting)
    elements = []
    for rank in range(size):
        counts = parts(collective, rank, size)
        elements.append((size - 1) * counts[rank] if collective == "all_gather" else sum(counts) - counts[rank])
    assert returned(size, bytes_of_calls) == [[sum(nbytes(name, count))] * 2 for count in elements]
