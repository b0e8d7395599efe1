"""Raw pointers: what a call accepts, and memory that it must not write, refused before anything is sent on the host."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
from thread_ranks import on_ranks

import qccl

PAGE = mmap.PAGESIZE
PAGES = 5
COUNT = PAGES * PAGE // 4
_libc = ctypes.CDLL(None)
#: an address far below other memory: the kernel puts new mappings above it, and none into a page that a test unmaps
_FAR = 1 << 45


def protect(address: int, nbytes: int, how: int) -> None:
    assert _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), how) == 0


def reduce(sendbuf, recvbuf, count, comm, **options):
    return qccl.quantized_allreduce(sendbuf, recvbuf, count, "float32", "sum", comm, codec="none", **options)


@pytest.fixture
def memory():
    """The address of some pages, which may be protected."""
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
                reduce(sendbuf, memory, COUNT, comm)
        with pytest.raises(qccl.InvalidBufferError, match=r"recvbuf.* read-only"):
            qccl.hierarchical_allreduce(source.ctypes.data, memory, COUNT, "float32", "sum", comm)
        for written in ({"replicas": {}, "applied": memory}, {"replicas": {0: memory}}):
            with pytest.raises(qccl.InvalidBufferError, match=r"(applied|replicas\[0\]).* read-only"):
                qccl.peer_exchange(source.ctypes.data, COUNT, "float32", comm, send_to=[], **written)
        out = np.empty(COUNT, np.float32)  # it may be read
        reduce(memory, out.ctypes.data, COUNT, comm)
        assert (out == 0).all()

    qccl.run_ranks(1, run)


def test_memory_that_may_not_be_read(memory):
    """A guard page between pages that may be used."""
    protect(memory + 2 * PAGE, PAGE, 0)
    out = np.empty(COUNT, np.float32)

    def run(comm):
        with pytest.raises(qccl.InvalidBufferError, match=r"sendbuf: .* not all memory"):
            reduce(memory, out.ctypes.data, COUNT, comm)

    qccl.run_ranks(1, run)


@on_ranks(1)
def test_memory_that_becomes_read_only(comm, memory):
    """The ends are asked for in every call, and asking changes no value."""
    values = np.frombuffer((ctypes.c_char * (COUNT * 4)).from_address(memory), np.float32)
    values[:] = np.arange(COUNT)
    for _ in range(2):
        reduce(memory, memory, COUNT, comm)
    assert (values == np.arange(COUNT)).all()
    protect(memory, PAGES * PAGE, mmap.PROT_READ)
    with pytest.raises(qccl.InvalidBufferError, match=r"recvbuf.* read-only"):
        reduce(memory, memory, COUNT, comm)


@on_ranks(1)
def test_any_address_in_a_page(comm, memory):
    """The words that are asked for lie in the page, whatever the element's address."""
    for first, count in ((2, 1), (PAGE - 2, 1), (PAGE - 2, 2), (6, 2 * PAGE // 2 - 3)):
        at = memory + first
        qccl.quantized_allreduce(at, at, count, "float16", "sum", comm)


@on_ranks(2)
def test_raw_pointers(comm):
    x = np.ones(COUNT, np.float32)
    p = x.ctypes.data

    def call(*arguments, **more):
        return qccl.quantized_allreduce(*arguments, comm, **more)

    for arguments, message in {
        (0, p, COUNT, "float32", "sum"): "null",
        (p, 0, COUNT, "float32", "sum"): "null",
        (p + 1, p + 1, COUNT, "float32", "sum"): "aligned",
        (p, p + 4, COUNT - 1, "float32", "sum"): "overlap",
        (16, 16, COUNT, "float32", "sum"): "not all memory",
        (p, p, 1 << 44, "float32", "sum"): "not all memory",
        (p, p, (1 << 61) - 1, "float32", "sum"): "not all memory",
        (p, p, 1 << 61, "float32", "sum"): "not all memory",
        (p, p, 1 << 62, "float32", "sum"): "64-bit",
        (p, p, (1 << 63) + 1, "float16", "sum"): "64-bit",
        (p, p, 1 << 80, "float32", "sum"): "64-bit",
        (p + (1 << 64), p, COUNT, "float32", "sum"): "64-bit",
        (-16, -16, 0, "float32", "sum"): "64-bit",
        (1 << 64, 1 << 64, 0, "float32", "sum"): "64-bit",
        ("x", p, COUNT, "float32", "sum"): "an int, a ctypes.c_void_p or an array of ctypes, not str",
    }.items():
        with pytest.raises(qccl.InvalidBufferError, match=message):
            call(*arguments)
    for arguments, message in {
        (p, p, -1, "float32", "sum"): "-1",
        (p, p, 2.5, "float32", "sum"): "2.5",
        (p, p, COUNT, "float8", "sum"): "float8",
        (p, p, COUNT, 3, "sum"): "NCCL 7",
        (p, p, COUNT, "float32", 1): "sum",
    }.items():
        with pytest.raises(qccl.ArgumentError, match=message):
            call(*arguments)
    with pytest.raises(qccl.ArgumentError, match="stream"):
        call(p, p, COUNT, "float32", "sum", stream=5)
    with pytest.raises(qccl.ArgumentError, match="comm must be a Communicator"):
        qccl.quantized_allreduce(p, p, COUNT, "float32", "sum", None)
    with pytest.raises(qccl.ArgumentError, match="replicas must be a dict of pointers by rank, not list"):
        qccl.peer_exchange(p, COUNT, "float32", comm, send_to=[], replicas=[p])
    assert (x == 1).all()
    x[:], out = np.arange(COUNT) % 256 + comm.rank, np.empty(COUNT, np.float32)
    y = comm.quantized_allreduce(x.copy())
    call(p, out.ctypes.data, COUNT, 7, 0, async_op=True).wait()
    assert call(np.uint64(p), np.uint64(p), np.int64(COUNT), np.int8(7), np.int8(0)) is None
    assert (x == y).all() and (out == y).all()
    call(0, 0, 0, "float32", "sum")  # nothing to read: null is fine

    arrays, address = [np.full(COUNT, value, np.float32) for value in range(20)], np.array(0)
    for array in arrays:  # another address at the same place in memory
        address[()] = array.ctypes.data
        call(address, address, COUNT, "float32", "sum", codec="none")
    assert [array[0] for array in arrays] == [2 * value for value in range(20)]


def _map(address, pages):
    """Map pages at an address where nothing is mapped, and return it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
    _libc.mmap.restype, access = ctypes.c_void_p, mmap.PROT_READ | mmap.PROT_WRITE
    at, nbytes = ctypes.c_void_p(address), ctypes.c_size_t(pages * PAGE)
    assert _libc.mmap(at, nbytes, access, flags, -1, ctypes.c_long(0)) == address
    return address


def _unmap(address, pages):
    assert _libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(pages * PAGE)) == 0


def test_memory_with_a_hole():
    """Both ends are memory of this process, and a page between is not."""
    start = _map(_FAR, PAGES)

    def run(comm):
        with pytest.raises(qccl.InvalidBufferError, match="not all memory"):
            reduce(start, start, 5 * PAGE // 4, comm)
        reduce(start, start, 2 * PAGE // 4, comm)
        reduce(start + 3 * PAGE, start + 3 * PAGE, 2 * PAGE // 4, comm)

    _unmap(start + 2 * PAGE, 1)
    try:
        qccl.run_ranks(1, run)
    finally:
        _unmap(start, 2)
        _unmap(start + 3 * PAGE, 2)


@pytest.mark.parametrize("unmapped", [0, 2, 4])
def test_memory_that_is_unmapped_between_equal_calls(unmapped):
    """At the ends or in the middle: the call that was found before is refused, and made again when the page is back."""
    start = _map(_FAR, PAGES)
    gone = start + unmapped * PAGE

    def run(comm):
        out = np.empty(COUNT, np.float32)
        for given in ((start, start), (start, out.ctypes.data)):
            for _ in range(3):
                reduce(*given, COUNT, comm)
            _unmap(gone, 1)
            try:
                for _ in range(2):
                    with pytest.raises(qccl.InvalidBufferError, match="not all memory"):
                        reduce(*given, COUNT, comm)
            finally:
                _map(gone, 1)
            reduce(*given, COUNT, comm)

    try:
        qccl.run_ranks(1, run)
    finally:
        _unmap(start, PAGES)


@on_ranks(2)
def test_pointers_of_ctypes(comm):
    x = (ctypes.c_float * 8)(*range(8))
    y = np.zeros(8, np.float32)
    reduce(x, y.ctypes.data_as(ctypes.c_void_p), 8, comm)
    assert (y == 2 * np.arange(8)).all()
    reduce(ctypes.c_void_p(y.ctypes.data), x, 8, comm)
    assert list(x) == list(4 * np.arange(8))
    with pytest.raises(qccl.InvalidBufferError, match="null"):
        reduce(ctypes.c_void_p(), x, 8, comm)
    with pytest.raises(qccl.InvalidBufferError, match="array of 32 bytes, but the call needs 36"):
        reduce(x, x, 9, comm)
    work = reduce(y.ctypes.data, (ctypes.c_float * 8)(), 8, comm, async_op=True)  # the Work keeps the array
    work.wait()


@on_ranks(1)
def test_pointers_that_changed_between_equal_calls(comm, memory):
    """The memory at an address is looked at in each call, and an object may hold another address."""
    count = PAGE // 4
    x = np.frombuffer((ctypes.c_char * PAGE).from_address(memory), np.float32)

    y, out = np.ones(count, np.float32), np.ones(count, np.float32)
    held = ctypes.c_void_p(y.ctypes.data)
    given = (ctypes.c_float * count)(*[3] * count)
    for i in range(3):
        x[:], y[:] = i, 2 * i
        protect(memory, PAGE, mmap.PROT_READ)
        with pytest.raises(qccl.InvalidBufferError, match=r"recvbuf: .* read-only"):
            reduce(y.ctypes.data, memory, count, comm)
        reduce(memory, out.ctypes.data, count, comm)
        assert (out == i).all()
        protect(memory, PAGE, mmap.PROT_READ | mmap.PROT_WRITE)
        reduce(y.ctypes.data, memory, count, comm)
        assert (x == 2 * i).all()
        for held.value, wanted in ((y.ctypes.data, 2 * i), (ctypes.addressof(given), 3)):
            reduce(held, out.ctypes.data, count, comm)
            assert (out == wanted).all()
        reduce(given, out.ctypes.data, count, comm)
        assert (out == 3).all()
        with pytest.raises(qccl.InvalidBufferError, match="is an array of"):
            reduce(given, given, count + 1, comm)
