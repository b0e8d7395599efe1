"""The table in which native code finds what earlier calls with equal arguments have proved."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from dlpack import FLOAT, Producer
from interruption_kinds import KINDS

import qccl
from qccl import _host, codecs
from qccl.codecs import Codec

NAME = "method"


def ones(count: int = 64) -> np.ndarray:
    return np.ones(count, np.float32)


def test_types_forms_and_addresses():
    table = _host.CallTable(Codec)
    x, y = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)
    table.add(NAME, (x, None), (1, "sum"), {"chunk": None}, "found")
    payload, (view,) = table.find(NAME, (x, None), (1, "sum"), {"chunk": None})
    assert payload == "found" and view.shape == (2, 3)
    assert table.find(NAME, (x[:], None), (1, "sum"), {"chunk": None})[0] == "found"
    frozen = x[:]
    frozen.flags.writeable = False
    for arrays, options, keywords in (
        ((None, x), (1, "sum"), {"chunk": None}),
        ((x, x), (1, "sum"), {"chunk": None}),
        ((y, None), (1, "sum"), {"chunk": None}),
        ((x[1:], None), (1, "sum"), {"chunk": None}),
        ((x[:1], None), (1, "sum"), {"chunk": None}),
        ((x.T, None), (1, "sum"), {"chunk": None}),
        ((x.reshape(3, 2), None), (1, "sum"), {"chunk": None}),
        ((np.lib.stride_tricks.as_strided(x, (2, 3), (4, 8)), None), (1, "sum"), {"chunk": None}),
        ((x.view(np.int32), None), (1, "sum"), {"chunk": None}),
        ((x.view(type("Other", (np.ndarray,), {})), None), (1, "sum"), {"chunk": None}),
        ((frozen, None), (1, "sum"), {"chunk": None}),
        ((x.ctypes.data, None), (1, "sum"), {"chunk": None}),
        ((x.tolist(), None), (1, "sum"), {"chunk": None}),
        ((x, None), (True, "sum"), {"chunk": None}),
        ((x, None), (1.0, "sum"), {"chunk": None}),
        ((x, None), (1, "avg"), {"chunk": None}),
        ((x, None), (1, "sum"), {}),
        ((x, None), (1, "sum"), {"codec": None}),
        ((x, None), (1, "sum"), {"chunk": []}),
    ):
        assert table.find(NAME, arrays, options, keywords) is None
    assert table.find("another", (x, None), (1, "sum"), {"chunk": None}) is None
    for options in ((np.int64(1),), ({},), ([[1]],), ((1, (2,)),), (object(),)):
        table.add(NAME, (x,), options, {}, "refused")
        assert table.find(NAME, (x,), options, {}) is None


def test_lists_and_tuples_are_compared_by_their_elements():
    table, x, counts = _host.CallTable(Codec), ones(), [1, 2]
    table.add(NAME, (x,), (counts,), {}, "list")
    table.add(NAME, (x,), ((1, 2),), {}, "tuple")
    assert table.find(NAME, (x,), ([1, 2],), {})[0] == "list" and table.find(NAME, (x,), ((1, 2),), {})[0] == "tuple"
    for other in ([2, 1], [1], [1, 2, 3], [1, 2.0], [True, 2], (1, True), (2, 1), (), [], None):
        assert table.find(NAME, (x,), (other,), {}) is None
    counts[0] = 5
    assert table.find(NAME, (x,), (counts,), {}) is None
    assert table.find(NAME, (x,), ([1, 2],), {})[0] == "list"


def test_raw_addresses():
    table = _host.CallTable(Codec)
    table.add(NAME, (4096, 8192), ("sum",), {}, "found")
    assert table.find(NAME, (4096, 8192), ("sum",), {}) == ("found", [4096, 8192])
    table.add(NAME, (1 << 200, None), (), {}, "large")
    assert table.find(NAME, (1 << 200, None), (), {})[0] == "large"
    for addresses in ((8192, 4096), (4096, 4096), (4096, None), (4096.0, 8192), (True, 8192), (1 << 61, 8192)):
        assert table.find(NAME, addresses, ("sum",), {}) is None
    for address in (np.int64(4096), np.uint64(4096), np.array(4096)):  # their own memory says nothing
        table.add(NAME, (address,), (), {}, "refused")
        assert table.find(NAME, (address,), (), {}) is None
    number = np.array(1, np.float32)  # an array without axes
    table.add(NAME, (number,), (), {}, "found")
    assert table.find(NAME, (number,), (), {})[0] == "found"


def test_memory_at_raw_pointers_is_looked_at_in_each_search():
    """By the kernel, or by the function that the table was given, which may also empty the table."""
    asked, allowed = [], [True, True]

    def is_there(*pointed):
        asked.append(pointed)
        if not allowed:
            table.clear()
        return bool(allowed and allowed.pop())

    x = ones()
    here, nowhere = (x.ctypes.data, x.nbytes, True), (4096, 4, False)
    for table, pointed, found in (
        (_host.CallTable(Codec), [here], True),
        (_host.CallTable(Codec), [here, nowhere], False),
        (_host.CallTable(Codec, None, is_there), [here, nowhere], True),
    ):
        table.add(NAME, (4096,), (), {}, "found", pointed)
        assert (table.find(NAME, (4096,), (), {}) is not None) is found
    assert asked == [here, nowhere]
    assert table.find(NAME, (4096,), (), {}) is None and asked == [here, nowhere, here]
    table.add(NAME, (4096,), (), {}, "found")
    assert table.find(NAME, (4096,), (), {})[0] == "found" and len(asked) == 3


def test_devices():
    """The table describes arrays as it was told to."""
    x = np.zeros(4, np.float32)
    described = []

    def describe(array):
        described.append(array)
        return None if isinstance(array, str) else _host.describe(array, -1)

    table = _host.CallTable(Codec, describe)
    here = Producer(x, FLOAT, device=(2, 0))
    table.add(NAME, (here, None), (), {}, "found")
    assert table.find(NAME, (Producer(x, FLOAT, device=(2, 0)), None), (), {})[0] == "found"
    for device in ((2, 1), (13, 0), (3, 0), (1, 0)):
        assert table.find(NAME, (Producer(x, FLOAT, device=device), None), (), {}) is None
    assert described[0] is here and len(described) == 6
    for refused in (object(), "text"):
        table.add(NAME, (refused, None), (), {}, "refused")
        assert table.find(NAME, (refused, None), (), {}) is None


def test_an_interrupt_while_an_array_is_described():
    """Other errors mean that the preparation of the call says what is wrong; Ctrl-C must not be lost."""
    x, errors = ones(1), []

    def describe(array):
        if errors:
            raise errors.pop()
        return _host.describe(array)

    table = _host.CallTable(Codec, describe)
    table.add(NAME, (x,), (), {}, "found")  # an empty table describes nothing
    for call in (table.find, lambda *arguments: table.add(*arguments, "found")):
        for lost in (TypeError, BufferError):
            errors.append(lost())
            assert call(NAME, (x,), (), {}) is None
        errors.append(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            call(NAME, (x,), (), {})
    assert table.find(NAME, (x,), (), {})[0] == "found"


def test_an_option_that_its_list_loses_while_an_array_is_described():
    """A key borrows what the arguments hold, but not the elements of a list, which may change meanwhile."""

    class Constant:
        pass

    seen = []

    def describe(array):
        (element,) = map(weakref.ref, options)
        options.clear()
        seen.append(element() is not None)
        options.append(Constant())
        return _host.describe(array)

    table, x, options = _host.CallTable(Constant, describe), ones(), [Constant()]
    table.add(NAME, (x,), (options,), {}, "found")
    assert table.find(NAME, (x,), (options,), {}) is None  # the entry has the first element, the list the second one
    assert seen == [True, True]


def test_a_search_leaves_no_references():
    # nothing that other tests have left refers to these objects: NumPy's own float32 is the type of all arrays
    x, codec = np.ones(64, np.dtype(np.float32).newbyteorder("=")), codecs.get("minmax4")
    table, options = _host.CallTable(Codec), [12345678901, "".join(["te", "xt"])]
    assert x.dtype == np.float32 and x.dtype is not np.dtype(np.float32)
    table.add(NAME, (x,), (options,), {"codec": codec}, "found")
    counted = [x, x.dtype, codec, options, *options]
    before = [sys.getrefcount(each) for each in counted]
    for _ in range(100):
        assert table.find(NAME, (x,), (options,), {"codec": codec})
    assert [sys.getrefcount(each) for each in counted] == before


def test_a_codec_equals_only_itself():
    table, x = _host.CallTable(Codec), ones()
    codec, equal = codecs.get("minmax4"), dataclasses.replace(codecs.get("minmax4"))
    assert codec == equal and codec is not equal
    table.add(NAME, (x,), (), {"codec": codec}, "found")
    assert table.find(NAME, (x,), (), {"codec": codec})[0] == "found"
    for other in (equal, codecs.get("minmax8"), codec.spec()):
        assert table.find(NAME, (x,), (), {"codec": other}) is None


@pytest.mark.parametrize(("calls", "arrays", "most"), [(5000, 1, 4096), (100, 1000, 65)])
def test_the_table_is_bounded(calls, arrays, most):
    """By the number of calls, and of their arrays."""
    table, xs = _host.CallTable(Codec), (ones(1),) * arrays
    for i in range(calls):
        table.add(NAME, xs, (i,), {}, i)
    found = [i for i in range(calls) if table.find(NAME, xs, (i,), {})]
    assert found and found[-1] == calls - 1 and len(found) <= most


def test_types_that_refer_to_their_communicator_are_freed():
    """The table keeps the types of arrays alive, but no cycle through it."""

    def run(comm):
        kind = type("Array", (np.ndarray,), {"comm": comm})
        comm.quantized_allreduce(ones().view(kind))
        comm.close()
        return weakref.ref(kind)

    (kind,) = qccl.run_ranks(1, run)
    gc.collect()
    assert kind() is None


#: entries of functions in a first call, also of generators and comprehensions, and the files that have them
MOST_ENTRIES, MOST_FILES = 450, 33
#: kinds of calls that are no repetition, or that do more than a call that the program waits for
LONGER = ("first", "async", "plan.start", "plan()", "nonfinite", "trace", "barrier", "allgather")


@contextlib.contextmanager
def entered(counts):
    """The functions of qccl that this thread enters, and their files, if it ``counts``.

    Those of the loopback transport are left out: it is written in Python, others are not.
    """
    package = f"{Path(qccl.__file__).parent}/"
    found: list[tuple[str, str]] = []

    def note(frame, event, _):
        name, file = frame.f_code.co_qualname, frame.f_code.co_filename
        if event == "call" and file.startswith(package) and not name.startswith("Loopback"):
            found.append((name, file.removeprefix(package)))

    sys.setprofile(note if counts else None)
    try:
        yield found
    finally:
        sys.setprofile(None)


def test_functions_of_python_in_the_first_call():
    """Of two ranks: 9 chunks for each, 27 operations and 36 transfers. The rank that comes first parses the codec."""

    def run(comm):
        x = np.ones(1 << 20, np.float32)
        with entered(True) as found:
            comm.quantized_allreduce(x)
        comm.barrier()  # until here nobody leaves
        return found

    gc.collect()  # what earlier tests left is not freed, by functions of qccl, in the call
    found = max(qccl.run_ranks(2, run), key=len)
    files = {file for _, file in found}
    print(f"the first call of 1 Mi elements enters {len(found)} functions of {len(files)} files")
    assert 200 < len(found) <= MOST_ENTRIES and len(files) <= MOST_FILES, Counter(found).most_common(20)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not any(word in kind for word in LONGER)])
def test_a_repeated_call_enters_at_most_nine_functions_of_python(kind):
    def run(comm):
        case = KINDS[kind].make(comm)
        case.run()
        case.run()
        with entered(comm.rank == 0) as found:
            case.run()
        comm.barrier()
        return found

    found = qccl.run_ranks(2, run)[0]
    assert 5 < len(found) <= 9, found
