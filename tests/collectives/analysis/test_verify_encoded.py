"""The verifier accepts the schedules of calls that send tensors in a format of blocks.

Such a schedule copies a part's codes and its scales, two buffers, to one wire. The verifier knows codes of values. So
the tests first join each pair of copies into one operation on the elements to which both belong; this needs codes and
scales to be of the same elements, and to lie next to each other in the wire.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from schedule_cases import chunks_of

from qccl.codecs import Codec, Encoded, NoCodec
from qccl.collectives import CollectiveSpec, EncodedAllGatherSpec, EncodedAllToAllSpec
from qccl.collectives.analysis import postconditions as expect
from qccl.collectives.analysis.symbolic import Postcondition
from qccl.collectives.analysis.verify import verify
from qccl.collectives.schedule import Decode, Encode, Op, Role, Schedule, Span
from qccl.collectives.topology import crossing_nbytes, for_nodes

#: by format, the tensor scale
FORMATS = {"mxfp8": None, "mxfp8:type=e5m2": None, "mxfp4": None, "nvfp4": 0.37}
#: element types of the output, or None for an Encoded
OUTPUTS = [None, "float32", "bfloat16"]


def elements(name: str, codec: Any, codes: Span, scales: Span) -> Span:
    """The elements of ``name`` whose codes and scales, in words of 4 bytes, these are."""
    assert (codes.buffer, scales.buffer) == (name, f"{name} scales")
    start, stop = (32 * at // codec.code_bits for at in (codes.start, codes.stop))
    assert (start, stop) == (4 * scales.start * codec.block, 4 * scales.stop * codec.block)
    return Span(name, start, stop)


def joined(schedule: Schedule, codec: Codec) -> Schedule:
    """The schedule with one Encode or Decode, of elements, for each two copies, of codes and of scales."""
    ops, used = list[Op](), 0
    remaining = iter(schedule.ops)
    for op in remaining:
        if not isinstance(op, Encode | Decode) or not isinstance(op.codec, NoCodec):
            ops.append(op)
            continue
        scales = next(remaining)
        assert type(scales) is type(op) and scales.wire.buffer == op.wire.buffer and scales.wire.start == op.wire.stop
        wire = Span(op.wire.buffer, op.wire.start, scales.wire.stop)
        if isinstance(op, Decode):
            assert isinstance(scales, Decode)
            ops.append(Decode(codec, wire, elements("output", codec, op.dst, scales.dst)))
        else:
            assert isinstance(scales, Encode)
            values = elements("input", codec, op.src, scales.src)
            ops.append(Encode(codec, values, wire, used))  # copies draw no random numbers: any other ones
            used += -(-len(values) // codec.granule) * codec.granule
    buffers = dict(schedule.buffers)
    for name, role in (("input", Role.INPUT), ("output", Role.OUTPUT)):
        if (scales := buffers.pop(f"{name} scales", None)) is not None:
            whole = elements(name, codec, Span(name, 0, buffers[name].size), Span(f"{name} scales", 0, scales.size))
            buffers[name] = replace(buffers[name], size=whole.stop, dtype=schedule.buffers["output"].dtype)
        assert buffers[name].role is role
    return replace(schedule, ops=tuple(ops), buffers=buffers)


def scaled(wanted: Iterator[Postcondition], scale: float) -> Iterator[Postcondition]:
    return (replace(each, scale=scale) for each in wanted)


def check(collective: str, name: str, output: str | None, size: int, seed: int, node_ids: tuple[int, ...] = ()) -> None:
    """Verify the schedules of a call whose parts have random sizes, in chunks of which several are under way."""
    drawn = random.Random(f"{collective} {name} {output} {size} {seed}")
    codec, how = Encoded(b"", b"", name).codec, {"tensor_scale": FORMATS[name], "decodes": output is not None}
    shared: list[Any] = [output or "float32", codec, None]
    counts = [[128 * drawn.choice([0, 1, 3, 8, 11, 30]) for _ in range(size)] for _ in range(size)]  # by sender
    if collective == "all_gather":
        parts = counts[0]
        gather = EncodedAllGatherSpec.from_arguments(sum(parts), *shared, counts=parts, **how)
        specs: list[CollectiveSpec] = [replace(gather, node_ids=node_ids)] * size
        wanted, given = partial(expect.all_gather, counts=parts), partial(expect.given_parts, counts=parts)
    else:
        rows = zip(counts, zip(*counts, strict=True), strict=True)
        specs = [
            EncodedAllToAllSpec.from_arguments(sum(sent), *shared, send_counts=sent, recv_counts=received, **how)
            for sent, received in rows
        ]
        wanted, given = partial(expect.all_to_all, counts=counts), None
    chunking = chunks_of(1024, drawn.randint(1, 3))
    schedules = [
        joined(spec.schedule(rank, size, in_place=False, chunking=chunking), codec) for rank, spec in enumerate(specs)
    ]
    scale = FORMATS[name] if output is not None else None
    verify(schedules, expect=lambda schedule: scaled(wanted(schedule), scale or 1.0), given=given)


@pytest.mark.parametrize("collective", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("output", OUTPUTS)
def test_accepts_sizes_to_16(collective: str, name: str, output: str | None) -> None:
    for size in (1, 2, 3, 4, 5, 8, 16):
        check(collective, name, output, size, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("output", OUTPUTS[:2])
def test_accepts_64_ranks(collective: str, output: str | None) -> None:
    check(collective, "nvfp4", output, 64, seed=0)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("output", OUTPUTS)
def test_accepts_an_all_gather_in_two_levels(name: str, output: str | None) -> None:
    for node_ids in ((0, 0, 1, 1), (0, 1, 1, 2, 0), (0, 1, 0, 1, 0, 1)):
        check("all_gather", name, output, len(node_ids), seed=1, node_ids=node_ids)


def test_in_two_levels_codes_cross_once_between_two_nodes() -> None:
    how = {"tensor_scale": None, "decodes": False}
    spec, nodes = EncodedAllGatherSpec.from_arguments(6 << 12, "float32", "mxfp8", None, **how), (0, 0, 0, 1, 1, 1)
    assert crossing_nbytes(spec, nodes) == 3 * crossing_nbytes(for_nodes(spec, nodes), nodes)
