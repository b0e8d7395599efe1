"""What the fuzz targets begin with: the codecs that they know, and inputs from real runs.

``seeds.py rows FILE`` writes the codecs of ``tests/support/codec_table.py`` for ``codecs.cpp``. ``seeds.py inputs
FOLDER`` writes a folder of inputs for each target, as the targets read them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import struct
import sys
import tempfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import hostile
import kernel_calls
import msgspec
import numpy as np
import patience
import threads
import wan_wires
from codec_table import ALL
from fuzz_headers import calls

import qccl
from qccl import codecs
from qccl.base import dtypes
from qccl.codecs import Codec
from qccl.collectives.allreduce import one_shot, two_round
from qccl.communicator import profile
from qccl.meeting import messages
from qccl.meeting.channel import frame
from qccl.meeting.join_address import JoinAddress
from qccl.meeting.meeting_messages import Hello, MeetingKind, MeetingMessage, join
from qccl.meeting.messages import Decision, Member
from qccl.observe.records import write_record

#: the inputs of a target
Inputs = Iterator[bytes]

_ID = "0123456789abcdef" * 2


def rows() -> list[Codec]:
    """The codecs of the target ``codecs``, by their numbers there."""
    choices = itertools.product(range(1, 9), (8, 64, 1024, "shard"), ("nearest", "stochastic"))
    minmax = [codecs.MinMax(bits, bucket, rounding) for bits, bucket, rounding in choices]
    return [codecs.NoCodec(), *minmax, *(kernel_calls.library_codec(each) for each in ALL)]


def rows_text() -> str:
    """As C++."""
    found = []
    for codec in rows():
        kernel = codec.kernel()
        options = ", ".join(map(str, kernel.options))
        found.append(f'{{"{kernel.type}", {{{kernel.bucket}, {kernel.seed}, {{{options}}}}}}},\n')
    return "".join(found)


# -- the targets in C++ ----------------------------------------------------------------------------------------------


def codec_inputs() -> Inputs:
    """Wires of real values, of each codec and element type; decoded, added, and reduced."""
    rng = np.random.default_rng(1)
    for number, codec in enumerate(rows()):
        for dtype, flags, kind in zip(dtypes.DTYPES, (0, 1, 0x1E), ("normal", "special", "outliers"), strict=True):
            count = int(rng.choice([1, 7, 64, 300]))
            values = kernel_calls.hard_values(kind, count, dtype.name, rng)
            wire = codec.encode(values, dtype=dtype).tobytes()
            yield struct.pack("<HBBBHBIB", number, dtype.code, flags, 1, count - 1, 0, 0, 0) + wire


def header_inputs() -> Inputs:
    """Honest calls; and the control messages of real ones."""
    for kind in range(4):
        call, both = bytes([0, kind]), bytes([1, 0, 1, 1, 1, 1])
        yield call + both + bytes([4, 0, 7, 4, 1, 7]) * 2
        yield both + call + bytes([2, 0, 1, 1, 9, 3])
        yield call * 20 + both * 20
    plan = 3, ((one_shot, 63), (two_round, 1000)), False
    for found in threads.outcomes(3, lambda transport: calls(transport, plan)):
        if isinstance(found, BaseException):
            raise found
        for peer, tag, sent in found[1]:
            if tag == hostile.CONTROL_TAG:
                yield bytes([0, 1, 3, peer % 2]) + struct.pack("<H", len(sent)) + sent


def _frames() -> bytes:
    """What a rank between sites writes on a connection."""
    sent = b""
    with wan_wires.rank_0() as (wire, (raw,)):
        wire.receive(1, 100)
        for nbytes in (0, 1, 5000, 40_000):
            wire.send(1, bytes(nbytes))
        raw.socket.setblocking(False)
        limit = patience.Limit(10)
        while len(sent) < 45_001 and limit.left():
            wire.nap()
            with contextlib.suppress(BlockingIOError):
                sent += raw.socket.recv(1 << 16)
    return sent


def caller_inputs() -> Inputs:
    """Ranks that say who they are, and what a rank writes after that; and strangers."""
    call, hello, other = bytes([3]), bytes([6, 0, 0, 0, 0]), bytes([6, 1, 0, 0, 1])
    receive, data = bytes([0, 0, 0, 100, 0]), bytes([7, 0, 0, 0, 0, 100, 0])
    yield call + hello + receive + data
    yield call * 2 + hello + other + data + receive + bytes([1, 0, 0, 100, 11, 0, 8, 0, 2, 0, 0, 1, 0, 0, 4])
    yield call + bytes([6, 0, 16, 0, 0, 3, 1]) + data  # another group
    yield call + data + bytes([5, 0, 1, 136, 255])  # it does not say who it is, ends, and time passes
    sent = _frames()
    for start in range(0, len(sent), 9000):
        part = sent[start : start + 9000]
        yield call + hello + bytes([0, 0, 0, 241, 0, 0]) + bytes([9]) + struct.pack("<H", len(part)) + part


def address_inputs() -> Inputs:
    """Addresses of wires."""
    wire = wan_wires.Wire()
    yield wire.native.address()
    wire.close()


# -- the targets in Python -------------------------------------------------------------------------------------------


def message_inputs() -> Inputs:
    """A message of each kind in which processes agree on a group, and other texts of other processes."""
    member = Member.make(_ID, "192.0.2.1", 4711, "ab" * 32, b"worker")
    other = Member.make(_ID[::-1], "::1", 4712, "cd" * 32, b"")
    decided = Decision(3, (member, other), 7, ())
    hello = _ID, _ID, 1, member, 5, (other,), (1, 0)
    for each in (
        messages.Challenge(_ID),
        messages.Knock(_ID, member),
        messages.Join(*hello, ((1, 0), decided)),
        messages.Probe(*hello, None),
        messages.Wait(1.5),
        messages.Tell(),
        messages.Prepare((2, 1)),
        messages.Accept((2, 1), decided),
        messages.Decided(_ID, decided),
    ):
        yield b"\0" + each.packed()
        yield b"\1" + frame(each)
    yield b"\2" + msgspec.json.encode(member)
    yield b"\3" + JoinAddress("wan", ("192.0.2.1", 4711), bytes(32), True).text().encode()
    yield b"\3" + b"[::1]:4711"
    for said in (
        join([b"a", b"bc"]),
        MeetingMessage(MeetingKind.REFUSED, b"why"),
        MeetingMessage(MeetingKind.PROVE, bytes(24)),
        Hello(1, 2, 0, bytes(8), b"abc").message(),
    ):
        yield b"\4" + said.packed()


def state_inputs() -> Inputs:
    """States of real calls, as files and as the parts of files (see python_targets.py)."""

    def work(comm: qccl.Communicator) -> dict[str, object]:
        for key in ("a", "b"):
            comm.quantized_allreduce(np.ones(20, np.float32), codec="minmax4+ef", key=key)
        return comm.state_dict()

    for state in (qccl.run_ranks(2, work)[0], {"a": [1, 2.5, None, True, "x"], "b": {"c": np.arange(3)}}):
        file = BytesIO()
        qccl.save_state(file, state)
        yield b"\4" + file.getvalue()
        structure = b'{"dict": [["a", {"array": "0"}], ["b", {"list": [1, {"bfloat16": "1"}]}]]}'
        yield b"\6" + structure
        arrays = []
        for array in (np.frombuffer(structure, np.uint8), np.ones(3, np.float32), np.zeros((2, 1), np.uint16)):
            content = BytesIO()
            np.save(content, array)
            arrays.append(struct.pack("<H", len(content.getvalue())) + content.getvalue())
        yield b"\1" + b"".join(arrays)


def record_inputs() -> Inputs:
    """Records of real calls, and of one that has not ended."""

    def work(comm: qccl.Communicator) -> object:
        for count in (10, 3000):
            comm.quantized_allreduce(np.ones(count, np.float32))
        return comm.record()

    records = qccl.run_ranks(2, work)
    with tempfile.TemporaryDirectory() as folder:
        for record in records:
            write_record(record, folder)
        found = [path.read_bytes() for path in sorted(Path(folder).iterdir())]
    transfer = {"is_send": False, "peer": 1, "nbytes": 10, "since": 1.0}
    stuck = json.loads(found[0])
    stuck["calls"][-1] |= {"state": "begun", "ended": None, "missing": [1], "transfers": [transfer]}
    yield from found
    yield b"\n".join(found)
    yield json.dumps(stuck).encode() + b"\n" + found[1]


def text_inputs() -> Inputs:
    """Codecs as texts and as dicts, and profiles of a group."""
    for spec in [*codecs.examples(), "minmax4+ef:beta=0.95", "topk:k=64,values=exp4/k=256+ef", "minmax8/minmax4"]:
        yield b"\0" + spec.encode()
    yield b"\1" + json.dumps({"byteps_compressor": "topk", "k": "0.01", "ef": "vanilla", "ef_beta": 0.9}).encode()
    yield b"\1" + json.dumps({"compressor": "minmax", "bits": 4, "momentum": "nesterov", "mu": "0.9"}).encode()
    curve = profile.Curve(((256, 1e-5), (8192, 1e-4)), 2.0)
    times = {("none", "two_round"): curve, ("minmax8", "two_round"): curve}
    found = profile.GroupProfile((0, 1), "ucx").with_times(profile.CallKind("allreduce", "float32", "minmax8"), times)
    yield b"\2" + json.dumps(found.as_dict()).encode()


TARGETS = {
    "addresses": address_inputs,
    "callers": caller_inputs,
    "codecs": codec_inputs,
    "headers": header_inputs,
    "messages": message_inputs,
    "records": record_inputs,
    "states": state_inputs,
    "texts": text_inputs,
}


def main() -> None:
    match sys.argv[1:]:
        case ["rows", file]:
            Path(file).write_text(rows_text())
        case ["inputs", folder]:
            for name, inputs in TARGETS.items():
                place = Path(folder) / name
                place.mkdir(parents=True, exist_ok=True)
                for number, content in enumerate(inputs()):
                    (place / f"seed-{number}").write_bytes(content)
        case _:
            sys.exit("seeds.py rows FILE, or seeds.py inputs FOLDER")


if __name__ == "__main__":
    main()
