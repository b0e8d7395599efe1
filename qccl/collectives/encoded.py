"""All-gather and all-to-all of tensors that are already encoded: the wire is a copy of their codes and scales."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from qccl.base.arrays import Values, check_disjoint
from qccl.base.dtypes import BYTES, FLOAT32
from qccl.base.errors import ArgumentError, InvalidBufferError
from qccl.codecs.encoded import FloatBlocks
from qccl.codecs.none import NoCodec
from qccl.collectives.all_gather import AllGatherSpec
from qccl.collectives.all_to_all import AllToAllSpec
from qccl.collectives.chunks import ChunkPolicy
from qccl.collectives.operands import Arrays, CallerBuffers, Places, RankGroup
from qccl.collectives.partitions import Segment, partition_as_given
from qccl.collectives.rounds import AllGatherRound, assemble, merged, pipeline
from qccl.collectives.schedule import Buffer, Decode, Encode, Op, Reduce, Role, Schedule, Span
from qccl.collectives.spec import Binding, Call, CollectiveSpec
from qccl.collectives.wire import ByChunk, Encoding, Slots, exchange

__all__ = ["EncodedAllGatherSpec", "EncodedAllToAllSpec"]

_COPY = NoCodec()
#: bytes of a word: codes and scales are copied as float32, whose bits the codec none keeps
_WORD = FLOAT32.itemsize


class _Encoded(CollectiveSpec):
    """The part that both calls share. Arrays of codes are "input" and "output", of scales "input scales" and so on.

    Attributes:
        tensor_scale: the factor of decoded values, or None.
        decodes: the output is an array of values, not an Encoded.
    """

    __slots__ = ()  # a base of classes with slots of their own

    codec: FloatBlocks
    tensor_scale: float | None
    decodes: bool

    @classmethod
    def named(cls, call: Call) -> dict[str, Values]:
        """Find the arrays, and check that codes and scales belong to whole numbers of elements."""
        (codec,), outputs = call.codecs, call.arrays[2:]
        assert isinstance(codec, FloatBlocks)
        arrays = _bytes_of(call, codec, call.arrays[:2], "x", writable=False)
        if call.own["decodes"]:
            return {"input": arrays[0], "input scales": arrays[1], "output": call.find(outputs[0], "out")}
        target = _bytes_of(call, codec, outputs, "out", writable=True)
        return dict(zip(("input", "input scales", "output", "output scales"), (*arrays, *target), strict=True))

    @classmethod
    def from_call(cls, call: Call) -> tuple[list[Any], dict[str, Values]]:
        """See CollectiveSpec; the count is in elements, and an Encoded has no element type but float32's words."""
        arrays = cls.named(call)
        whole, dtype, (codec,) = arrays[cls.whole], arrays["output"].dtype, call.codecs
        count = whole.count
        if whole.dtype is BYTES:
            count = count * 8 // codec.code_bits  # type: ignore[union-attr]  # named() has checked the codec
        name = FLOAT32.name if dtype is BYTES else dtype.name
        return cls._with_codecs(call, arrays, count, name, whole.order), arrays

    def arrays_of(self, role: Role, arrays: Mapping[str, Values], rank: int, size: int) -> list[Values]:
        """The output alone: codes and scales are no values, which could be finite or not."""
        return [] if role is Role.INPUT else super().arrays_of(role, arrays, rank, size)

    def bind(self, arrays: Mapping[str, Values], rank: int, size: int) -> Binding:
        """Check that the output overlaps neither the input nor itself: the call is never in place."""
        outputs = [values for name, values in arrays.items() if name.startswith("output")]
        check_disjoint(outputs, [values for name, values in arrays.items() if name.startswith("input")])
        return Binding(False, {name: values.address for name, values in arrays.items()})

    def _words(self, name: str, start: int, stop: int) -> tuple[Span, Span]:
        """The codes and scales of elements of an Encoded. Raises ArgumentError if their scales are not whole words."""
        block, bits = self.codec.block, self.codec.code_bits
        if start % (block * _WORD) or stop % (block * _WORD):
            what = "x" if name == "input" else "out"
            raise ArgumentError(
                f"{self.name} of {self.codec.name} codes: the parts of the ranks must be multiples of {block * _WORD} "
                f"elements, 4 bytes of scales, and a part is elements {start} to {stop} of {what}; pad the tensor, or "
                f"let qccl encode its values: codec={self.codec.name!r}"
            )
        word = _WORD * 8
        codes = Span(name, start * bits // word, stop * bits // word)
        return codes, Span(f"{name} scales", start // block // _WORD, stop // block // _WORD)

    def _buffers(self, sent: int, received: int, counts: Sequence[int]) -> CallerBuffers:
        declared = {}
        for name, count, role in (("input", sent, Role.INPUT), ("output", received, Role.OUTPUT)):
            if self.decodes and role is Role.OUTPUT:
                declared[name] = Buffer(count, self.dtype, role)
            else:
                declared |= {span.buffer: Buffer(span.stop, FLOAT32, role) for span in self._words(name, 0, count)}
        return CallerBuffers(self.dtype, tuple(counts), Arrays(("input",)), Arrays(("output",)), declared)

    def _pack(self, slots: Slots, peer: int, first: int) -> ByChunk:
        """Copy a part's codes and scales to its slots; the input begins with element ``first`` of the vector."""
        ops: list[list[Op]] = [[] for _ in slots.wires]
        for segment, wire in zip(slots.encoding.segments[slots.parts[peer]], slots.spans(peer), strict=True):
            for source, piece in _paired(self._words("input", segment.start - first, segment.stop - first), wire):
                ops[segment.chunk].append(Encode(_COPY, source, piece, 0))
        return ops

    def _unpack(self, slots: Slots, peer: int, segments: Sequence[Segment]) -> ByChunk:
        """Decode, or copy, the wires of a peer to ``segments`` of the output."""
        ops: list[list[Op]] = [[] for _ in slots.wires]
        for segment, wire in zip(segments, slots.spans(peer), strict=True):
            target = Span("output", segment.start, segment.stop)
            if not self.decodes:
                pieces = _paired(self._words("output", segment.start, segment.stop), wire)
                ops[segment.chunk] += [Decode(_COPY, piece, words) for words, piece in pieces]
            elif self.tensor_scale is None:
                ops[segment.chunk].append(Decode(self.codec, wire, target))
            else:
                ops[segment.chunk].append(Reduce(self.codec, (wire,), None, 0, None, target, scale=self.tensor_scale))
        return ops


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedAllGatherSpec(_Encoded, AllGatherSpec):
    """Arguments of quantized_all_gather of an Encoded."""

    tensor_scale: float | None
    decodes: bool

    def buffers(self, rank: int, size: int, *, in_place: bool = False) -> CallerBuffers:
        """See CollectiveSpec."""
        lengths = self.lengths(size)
        return self._buffers(lengths[rank], sum(lengths), lengths)

    def _schedule(self, group: RankGroup, buffers: CallerBuffers, chunking: ChunkPolicy) -> Schedule:
        return self._gathered(group, buffers, chunking, partial(_EncodedRound, self))


class _EncodedRound(AllGatherRound):
    """A round whose wires are copies."""

    def __init__(self, spec: EncodedAllGatherSpec, group: RankGroup, encoding: Encoding, **how: Any) -> None:
        super().__init__(group, encoding, **how)
        self._spec = spec

    def encode(self, source: Places, keep: Places | None = None) -> ByChunk:
        rank = self._group.rank
        packed = self._spec._pack(self._send, rank, sum(self._spec.lengths(self._group.size)[:rank]))
        return packed if keep is None else merged(packed, self.decode(keep, self._send))

    def decode(self, target: Places, slots: Slots | None = None) -> ByChunk:
        slots, segments = slots or self._recv, self.encoding.segments
        return merged(*[self._spec._unpack(slots, peer, segments[part]) for peer, part in slots.parts.items()])


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedAllToAllSpec(_Encoded, AllToAllSpec):
    """Arguments of quantized_all_to_all of an Encoded."""

    tensor_scale: float | None
    decodes: bool

    def buffers(self, rank: int, size: int, *, in_place: bool = False) -> CallerBuffers:
        """See CollectiveSpec."""
        sends, receives = self.lengths(rank, size)
        return self._buffers(sum(sends), sum(receives), (*sends, *receives))

    def _schedule(self, group: RankGroup, buffers: CallerBuffers, chunking: ChunkPolicy) -> Schedule:
        rank, counts = group.rank, self.lengths(group.rank, group.size)
        out, back = (
            Encoding(partition_as_given(each, self.codec, chunking), self.codec, self.dtype, chunking.depth)
            for each in counts
        )
        send = Slots(out, "send", {peer: peer for peer in group.ranks})
        recv = Slots(back, "recv", {peer: peer for peer in group.others})
        sent = [{peer: span for peer, span in wires.items() if peer != rank} for wires in send.wires]
        packed = merged(*[self._pack(send, peer, 0) for peer in group.ranks])
        own = self._unpack(send, rank, back.segments[rank])
        others = merged(*[self._unpack(recv, peer, back.segments[peer]) for peer in group.others])
        ops = pipeline((0, merged(packed, exchange(sent, recv.wires))), (0, own), (out.lag, others))
        return assemble("all_to_all", group, buffers, ops, send, recv)


def _paired(words: tuple[Span, Span], wire: Span) -> Iterable[tuple[Span, Span]]:
    """Codes and scales, each with its place in the wire of a chunk: the scales follow the codes, without padding."""
    middle = wire.start + len(words[0]) * _WORD
    return zip(words, (Span(wire.buffer, wire.start, middle), Span(wire.buffer, middle, wire.stop)), strict=True)


def _bytes_of(
    call: Call, codec: FloatBlocks, arrays: Sequence[Any], what: str, *, writable: bool
) -> tuple[Values, Values]:
    """The codes and the scales of an Encoded.

    Raises ArgumentError if their sizes do not fit, and InvalidBufferError if they are not aligned to words, which GPUs
    need.
    """
    names = f"{what}.codes", f"{what}.scales"
    codes, scales = (
        call.memory.from_array(array, dtype=BYTES, writable=writable, what=name)
        for array, name in zip(arrays, names, strict=True)
    )
    count = codes.count * 8 // codec.code_bits
    if count % (codec.block * _WORD) or scales.count * codec.block != count:
        raise ArgumentError(
            f"{names[0]} has {codes.count} bytes, {count} elements, and {names[1]} {scales.count} bytes; a scale "
            f"belongs to {codec.block} elements, and there must be a multiple of 4 scales; pad the tensor"
        )
    for each in codes, scales:
        if each.count and each.address % _WORD:
            raise InvalidBufferError(
                f"{each.what} begins at {each.address:#x}, not a multiple of {_WORD} bytes; pass a copy"
            )
    return codes, scales
