"""Whether memory at a raw address may be read and written, asked of the kernel rather than of luck.

An answer must cost little, because every call on raw pointers asks. So a call asks for the first and the last byte, and
whether anything between is unmapped. What the pages between allow is looked up when a range of pages is seen for the
first time. Linux; elsewhere all memory is assumed to be there.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import re

__all__ = ["is_readable", "is_writable"]


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("len", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_MS_ASYNC = 1
#: the number of the system call futex
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_FUTEX_WAKE_OP_PRIVATE, _OR = 5 | 128, 2 << 28
_NOBODY = ctypes.pointer(ctypes.c_uint32())  # a futex without waiters
#: pages (first, stop, needed permissions) whose mappings were looked up; forgotten when there are too many
_seen: set[tuple[int, int, str]] = set()
_MOST_SEEN = 1024


def is_readable(address: int, nbytes: int) -> bool:
    """Whether so many bytes (at least one) may be read."""
    read = getattr(_libc, "process_vm_readv", None)
    if read is None:
        return True
    ends = (_IoVec * 2)(_IoVec(address, 1), _IoVec(address + nbytes - 1, 1))
    local = ctypes.create_string_buffer(2)
    to = _IoVec(ctypes.addressof(local), 2)
    done: int = read(os.getpid(), ctypes.byref(to), 1, ends, 2, 0)
    if done == 1 or (done < 0 and ctypes.get_errno() == errno.EFAULT):  # a sandbox that forbids the call says EPERM
        return False
    return _are_mapped(address, nbytes, "r")


def is_writable(address: int, nbytes: int) -> bool:
    """Whether so many bytes (at least one) may be written. No value changes, also if other threads write some."""
    if _FUTEX is None:
        return is_readable(address, nbytes) and _are_mapped(address, nbytes, "w")
    ends = {address & -4, address + nbytes - 1 & -4}  # aligned words: each is in one page
    return all(map(_may_write, ends)) and _are_mapped(address, nbytes, "w")


def _are_mapped(address: int, nbytes: int, permission: str) -> bool:
    """Whether the pages of these bytes are mapped, with the permission when they were first seen."""
    first, stop = address & -mmap.PAGESIZE, -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    if stop - first <= 2 * mmap.PAGESIZE:
        return True
    # with MS_ASYNC nothing is written, only the list of mappings is gone through
    failed: int = _libc.msync(ctypes.c_void_p(first), ctypes.c_size_t(stop - first), _MS_ASYNC)
    return not (failed and ctypes.get_errno() == errno.ENOMEM) and _have_permission(first, stop, permission)


def _may_write(address: int) -> bool:
    """Whether the word at ``address`` may be written: the kernel combines it with 0 by an atomic OR."""
    done: int = _libc.syscall(_FUTEX, _NOBODY, _FUTEX_WAKE_OP_PRIVATE, 0, None, ctypes.c_void_p(address), _OR)
    return not (done < 0 and ctypes.get_errno() == errno.EFAULT)


def _have_permission(first: int, stop: int, permission: str) -> bool:
    """Whether the mappings from ``first`` to ``stop`` have a permission; their list is read once for a range."""
    key = first, stop, permission
    if key not in _seen:
        try:
            with open("/proc/self/maps") as lines:
                refused = any(
                    int(low, 16) < stop and first < int(high, 16) and permission not in has
                    for low, high, has in (re.split("[- ]", line, maxsplit=3)[:3] for line in lines)
                )
        except OSError:  # not mounted
            return True
        if refused:
            return False
        if len(_seen) >= _MOST_SEEN:
            _seen.clear()
        _seen.add(key)
    return True
