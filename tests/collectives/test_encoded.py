"""All-gather and all-to-all of tensors that are already in a format of blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sent_bytes import sent_by_each
from thread_ranks import on_ranks

import qccl
from qccl.codecs import Encoded

ml_dtypes = pytest.importorskip("ml_dtypes")

FORMATS = {
    "mxfp8": (8, 32, "float8_e4m3fn", "float8_e8m0fnu"),
    "mxfp8:type=e5m2": (8, 32, "float8_e5m2", "float8_e8m0fnu"),
    "mxfp4": (4, 32, "float4_e2m1fn", "float8_e8m0fnu"),
    "nvfp4": (4, 16, "float4_e2m1fn", "float8_e4m3fn"),
}
TENSOR_SCALE = 0.37


def drawn(name: str, count: int, seed: int, layout: Any = "row-major") -> Encoded:
    """Random codes and scales, which may mean NaN."""
    bits, block, _, _ = FORMATS[name]
    random = np.random.default_rng(seed)
    codes, scales = (random.integers(0, 256, size, dtype=np.uint8) for size in (count * bits // 8, count // block))
    return Encoded(codes, scales, name, TENSOR_SCALE if name == "nvfp4" else None, layout)


def empty(name: str, count: int) -> Encoded:
    bits, block, _, _ = FORMATS[name]
    codes, scales = np.zeros(count * bits // 8, np.uint8), np.zeros(count // block, np.uint8)
    return Encoded(codes, scales, name, TENSOR_SCALE if name == "nvfp4" else None)


def values(encoded: Encoded) -> np.ndarray:
    """The numbers that codes and scales mean, by ml_dtypes; products are exact in float64."""
    bits, block, codes, scales = FORMATS[str(encoded.format)]
    raw = encoded.codes if bits == 8 else np.stack([encoded.codes & 15, encoded.codes >> 4], axis=1).reshape(-1)
    numbers = raw.view(getattr(ml_dtypes, codes)).astype(np.float64)
    factors = encoded.scales.view(getattr(ml_dtypes, scales)).astype(np.float64)
    found = numbers * np.repeat(factors, block)
    with np.errstate(over="ignore", invalid="ignore"):
        return (found * float(np.float32(encoded.tensor_scale or 1))).astype(np.float32)


def joined(parts: list[Encoded]) -> tuple[bytes, bytes]:
    return b"".join(each.codes.tobytes() for each in parts), b"".join(each.scales.tobytes() for each in parts)


COUNTS = (3 * 1024 + 256, 0, 128)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("chunk", [None, 1024])
@on_ranks(3)
def test_an_all_gather_moves_the_bytes(comm: qccl.Communicator, name: str, chunk: int | None) -> None:
    parts = [drawn(name, count, rank) for rank, count in enumerate(COUNTS)]
    out = empty(name, sum(COUNTS))
    decoded = np.empty(sum(COUNTS), np.float32)
    for _ in range(2):
        assert comm.quantized_all_gather(parts[comm.rank], out, counts=COUNTS, chunk=chunk) is out
        assert (out.codes.tobytes(), out.scales.tobytes()) == joined(parts)
        comm.quantized_all_gather(parts[comm.rank], decoded, counts=COUNTS, chunk=chunk)
        np.testing.assert_array_equal(decoded, np.concatenate([values(part) for part in parts]))


@pytest.mark.parametrize("name", FORMATS)
@on_ranks(3)
def test_an_all_to_all_moves_the_bytes(comm: qccl.Communicator, name: str) -> None:
    counts = [[128, 2048, 256], [1024, 1280, 0], [4096, 128, 128]]
    sent, received = counts[comm.rank], [row[comm.rank] for row in counts]
    parts = [[drawn(name, count, 10 * i + j) for j, count in enumerate(row)] for i, row in enumerate(counts)]
    codes, scales = (np.frombuffer(each, np.uint8) for each in joined(parts[comm.rank]))
    x = Encoded(codes, scales, name, TENSOR_SCALE if name == "nvfp4" else None)
    out, decoded = empty(name, sum(received)), np.empty(sum(received), np.float32)
    given = {"send_counts": sent, "recv_counts": received}
    comm.quantized_all_to_all(x, out, **given)
    mine = [row[comm.rank] for row in parts]
    assert (out.codes.tobytes(), out.scales.tobytes()) == joined(mine)
    comm.quantized_all_to_all(x, decoded, **given)
    np.testing.assert_array_equal(decoded, np.concatenate([values(part) for part in mine]))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("collective", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("decodes", [False, True])
def test_exactly_the_bytes_of_codes_and_scales_are_sent(name: str, collective: str, decodes: bool) -> None:
    size, count = 3, 3 * 1024 + 128
    bits, block, _, _ = FORMATS[name]

    def call(comm: qccl.Communicator) -> None:
        x = drawn(name, count if collective == "all_gather" else size * count, comm.rank)
        out = np.empty(size * count, np.float32) if decodes else empty(name, size * count)
        getattr(comm, f"quantized_{collective}")(x, out, chunk=1024)

    assert sent_by_each(size, call) == [(size - 1) * (count * bits // 8 + count // block)] * size


@on_ranks(2)
def test_an_instance_of_a_subclass_is_sent_alike(comm: qccl.Communicator) -> None:
    class Named(Encoded):
        pass

    x, out = drawn("mxfp8", 256, comm.rank), empty("mxfp8", 512)
    named = Named(x.codes, x.scales, "mxfp8")
    comm.quantized_all_gather(named, out)
    assert (out.codes.tobytes(), out.scales.tobytes()) == joined([drawn("mxfp8", 256, rank) for rank in range(2)])
    comm.quantized_all_to_all(named, np.empty(256, np.float32))


@on_ranks(2)
def test_sums_of_encoded_tensors_are_refused(comm: qccl.Communicator) -> None:
    x = drawn("mxfp4", 256, 0)
    with pytest.raises(qccl.ArgumentError, match="Pass its values with codec='mxfp4'"):
        comm.quantized_allreduce(x)
    with pytest.raises(qccl.ArgumentError, match="Pass its values with codec='mxfp4'"):
        comm.quantized_reduce_scatter(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: drawn("mxfp4", 256, 0, "swizzled"), "layout='swizzled' is not possible; scales must be row-major"),
        (lambda: Encoded(None, None, "minmax4"), "format='minmax4' is not possible; allowed are mxfp8, "),
        (lambda: Encoded(None, None, {"compressor": "mxfp8"}), "format={'compressor': 'mxfp8'} is not possible"),  # type: ignore[arg-type]
        (lambda: Encoded(None, None, "mxfp4", 2.0), "mxfp4 has no tensor scale; leave tensor_scale=2.0 out"),
        (lambda: Encoded(None, None, "nvfp4", -1.0), "tensor_scale=-1.0 is not possible; it is a float32 above 0"),
        (lambda: Encoded(None, None, "nvfp4", "2"), "tensor_scale='2' is not possible"),
        (lambda: Encoded(None, None, "nvfp4", 10**400), "tensor_scale=1000+ is not possible"),
        (
            lambda: Encoded(np.zeros(4, np.float32), None, "mxfp8"),
            "the codes of mxfp8 are an array of float32; allowed are uint8 and float8_e4m3fn",
        ),
        (
            lambda: Encoded(np.zeros(4, ml_dtypes.float8_e5m2), None, "mxfp8"),
            "an array of float8_e5m2; allowed are uint8 and float8_e4m3fn",
        ),
        (
            lambda: Encoded(np.zeros(4, ml_dtypes.float4_e2m1fn), None, "mxfp4"),  # a code in each byte
            "an array of float4_e2m1fn; allowed are uint8 and float4_e2m1fn_x2",
        ),
    ],
)
def test_wrong_formats_are_refused(make: Any, message: str) -> None:
    with pytest.raises(qccl.QcclError, match=message):
        make()


@on_ranks(2)
def test_wrong_calls_are_refused(comm: qccl.Communicator) -> None:
    x, out, decoded = drawn("mxfp4", 256, 0), empty("mxfp4", 512), np.empty(512, np.float32)

    def refused(message: str, *arrays: Any, **given: Any) -> None:
        with pytest.raises(qccl.QcclError, match=message):
            comm.quantized_all_gather(*arrays, **given)

    refused("x is mxfp4 already; leave codec out", x, out, codec="mxfp4")
    refused("out is an Encoded, and x is not", np.zeros(256, np.float32), out)
    refused("both must be the same", x, empty("mxfp8", 512))
    refused("needs decoded values", x, out, nonfinite="error")
    refused("multiples of 128 .* elements 0 to 2.. of x; pad", x, decoded, counts=[256 - 32, 256 + 32])
    refused("x.codes has 128 bytes, and all_gather of 256 .* needs 64 on", x, np.empty(256, np.float32))
    bytes_ = np.zeros(132, np.uint8)
    refused("x.codes begins at .*, not a multiple of 4 bytes", Encoded(bytes_[1:129], x.scales, "mxfp4"), out)
    refused("x.scales begins at .*, not a multiple of 4 bytes", Encoded(x.codes, bytes_[2:10], "mxfp4"), out)
    refused("a scale belongs to 32 elements", Encoded(x.codes, x.scales[1:], "mxfp4"), out)
    refused("a scale belongs to 32 elements", Encoded(x.codes[:3], x.scales[:0], "mxfp4"), out)
    refused("overlap in memory", Encoded(out.codes[:128], x.scales, "mxfp4"), out)
    refused("has no tensor_scale", Encoded(x.codes, np.zeros(16, np.uint8), "nvfp4"), decoded)
    refused("is not contiguous", Encoded(np.zeros(256, np.uint8)[::2], x.scales, "mxfp4"), out)
    refused("is read-only", x, Encoded(np.frombuffer(bytes(256), np.uint8), out.scales, "mxfp4"))
    comm.quantized_all_gather(x, decoded)  # the group is usable


@on_ranks(2)
def test_only_decoded_values_are_checked_for_nan(comm: qccl.Communicator) -> None:
    """The codes mean -6, and their bytes would be NaN as float32."""
    x, out = Encoded(np.full(64, 0xFF, np.uint8), np.full(4, 127, np.uint8), "mxfp4"), np.empty(256, np.float32)
    assert (comm.quantized_all_gather(x, out, nonfinite="error") == -6).all()
    x.scales[3] = 255
    with pytest.raises(qccl.ArgumentError, match=r"not finite at element 96 of out [^;]*\. The call has"):
        comm.quantized_all_gather(x, out, nonfinite="error")


@on_ranks(2)
def test_ranks_compare_the_format(comm: qccl.Communicator) -> None:
    name = ("mxfp8", "mxfp8:type=e5m2")[comm.rank]
    with pytest.raises(qccl.MismatchError):
        comm.quantized_all_gather(drawn(name, 128, 0), empty(name, 256))


@on_ranks(2)
def test_types_of_ml_dtypes_are_read_as_bytes(comm: qccl.Communicator) -> None:
    x, out = drawn("mxfp8", 256, comm.rank), np.empty(512, np.float32)
    typed = Encoded(x.codes.view(ml_dtypes.float8_e4m3fn), x.scales.view(ml_dtypes.float8_e8m0fnu), "mxfp8")
    comm.quantized_all_gather(typed, out)
    np.testing.assert_array_equal(out, np.concatenate([values(drawn("mxfp8", 256, rank)) for rank in range(2)]))
