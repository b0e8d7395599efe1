"""Raw pointers to memory that a call would write, but must not: refused before anything is sent, on the host."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest

import qccl
from qccl import _host

PAGE = mmap.PAGESIZE
PAGES = 5
COUNT = PAGES * PAGE // 4
_libc = ctypes.CDLL(None)


def protect(address: int, nbytes: int, how: int) -> None:
    assert _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), how) == 0


@pytest.fixture
def memory():
    """The address of some pages, which may be protected, and no call has seen."""
    _host.forget_mappings()
    pages = mmap.mmap(-1, PAGES * PAGE)
    first = ctypes.c_char.from_buffer(pages)
    yield ctypes.addressof(first)
    protect(ctypes.addressof(first), PAGES * PAGE, mmap.PROT_READ | mmap.PROT_WRITE)


@pytest.mark.parametrize("protected", [range(PAGES), range(1), range(2, 3), range(PAGES - 1, PAGES)])
def test_read_only_memory(memory, protected):
    protect(memory + protected.start * PAGE, len(protected) * PAGE, mmap.PROT_READ)
    source = np.ones(COUNT, np.float32)

    def run(comm):
        for sendbuf in (source.ctypes.data, memory):
            with pytest.raises(qccl.InvalidBufferError, match=r"recvbuf.* read-only"):
                qccl.quantized_allreduce(sendbuf, memory, COUNT, "float32", "sum", comm)
        with pytest.raises(qccl.InvalidBufferError, match=r"recvbuf.* read-only"):
            qccl.hierarchical_allreduce(source.ctypes.data, memory, COUNT, "float32", "sum", comm)
        for written in ({"replicas": {}, "applied": memory}, {"replicas": {0: memory}}):
            with pytest.raises(qccl.InvalidBufferError, match=r"(applied|replicas\[0\]).* read-only"):
                qccl.peer_exchange(source.ctypes.data, COUNT, "float32", comm, send_to=[], **written)
        out = np.empty(COUNT, np.float32)  # it may be read
        qccl.quantized_allreduce(memory, out.ctypes.data, COUNT, "float32", "sum", comm)
        assert (out == 0).all()

    qccl.run_ranks(1, run)


def test_memory_that_may_not_be_read(memory):
    """A guard page between pages that may be used."""
    protect(memory + 2 * PAGE, PAGE, 0)
    out = np.empty(COUNT, np.float32)

    def run(comm):
        with pytest.raises(qccl.InvalidBufferError, match=r"sendbuf: .* not all memory"):
            qccl.quantized_allreduce(memory, out.ctypes.data, COUNT, "float32", "sum", comm)

    qccl.run_ranks(1, run)


def test_memory_that_becomes_read_only(memory):
    """The ends are asked for in every call, and asking changes no value."""

    def run(comm):
        values = np.frombuffer((ctypes.c_char * (COUNT * 4)).from_address(memory), np.float32)
        values[:] = np.arange(COUNT)
        for _ in range(2):
            qccl.quantized_allreduce(memory, memory, COUNT, "float32", "sum", comm)
        assert (values == np.arange(COUNT)).all()
        protect(memory, PAGES * PAGE, mmap.PROT_READ)
        with pytest.raises(qccl.InvalidBufferError, match=r"recvbuf.* read-only"):
            qccl.quantized_allreduce(memory, memory, COUNT, "float32", "sum", comm)

    qccl.run_ranks(1, run)


def test_any_address_in_a_page(memory):
    """The words that are asked for lie in the page, whatever the element's address."""

    def run(comm):
        for first, count in ((2, 1), (PAGE - 2, 1), (PAGE - 2, 2), (6, 2 * PAGE // 2 - 3)):
            at = memory + first
            qccl.quantized_allreduce(at, at, count, "float16", "sum", comm)

    qccl.run_ranks(1, run)
