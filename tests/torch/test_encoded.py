"""Tensors in PyTorch's own types of codes and scales: all-gather and all-to-all move their bits, of views, too."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from thread_ranks import on_ranks

import qccl
from qccl.codecs import Encoded

#: bits of a code, elements of a block, and PyTorch's types of codes and scales
FORMATS = {
    "mxfp8": (8, 32, torch.float8_e4m3fn, torch.float8_e8m0fnu),
    "mxfp8:type=e5m2": (8, 32, torch.float8_e5m2, torch.float8_e8m0fnu),
    "mxfp4": (4, 32, torch.float4_e2m1fn_x2, torch.float8_e8m0fnu),
    "nvfp4": (4, 16, torch.float4_e2m1fn_x2, torch.float8_e4m3fn),
}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TENSOR_SCALE = 0.37


def view(data: torch.Tensor, dtype: torch.dtype, columns: int) -> torch.Tensor:
    """Bytes as a matrix of a type, all rows but the first and the last of a larger one: its storage begins earlier."""
    rows = torch.full((data.numel() // columns + 2, columns), 0x5A, dtype=torch.uint8)
    rows[1:-1] = data.view(-1, columns)
    found = rows.view(dtype)[1:-1]
    assert found.dtype == dtype and found.storage_offset() == columns
    return found


def encoded(name: str, codes: torch.Tensor, scales: torch.Tensor) -> Encoded:
    """An Encoded of views; a row has 128 elements."""
    bits, block, of_codes, of_scales = FORMATS[name]
    return Encoded(
        view(codes, of_codes, 16 * bits),
        view(scales, of_scales, 128 // block),
        name,
        TENSOR_SCALE if name == "nvfp4" else None,
    )


def drawn(name: str, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes of codes and scales, which may mean NaN."""
    bits, block, _, _ = FORMATS[name]
    generator = torch.Generator().manual_seed(seed)
    sizes = count * bits // 8, count // block
    codes, scales = (torch.randint(256, (size,), generator=generator, dtype=torch.uint8) for size in sizes)
    return codes, scales


def joined(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(scales)


def values(name: str, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers that bytes mean, by PyTorch's conversions; products are exact in float64."""
    bits, block, of_codes, of_scales = FORMATS[name]
    if bits == 8:
        numbers = codes.view(of_codes).double()
    else:  # PyTorch has no conversion
        nibbles = torch.stack([codes & 15, codes >> 4], dim=1).flatten().long()
        numbers = E2M1[nibbles & 7].double() * (1 - 2 * (nibbles >> 3))
    factor = torch.tensor(TENSOR_SCALE if name == "nvfp4" else 1.0).double()
    return (numbers * scales.view(of_scales).double().repeat_interleave(block) * factor).float()


def check(name: str, out: Encoded, decoded: torch.Tensor, wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Assert that the outputs have the wanted bytes and their values, and that nothing around the views has changed."""
    for array, each in zip((out.codes, out.scales), wanted, strict=True):
        assert torch.equal(array.view(torch.uint8).flatten(), each)
        whole = torch.tensor([], dtype=torch.uint8).set_(array.untyped_storage())
        assert set(whole[: array.storage_offset()].tolist()) == {0x5A} == set(whole[-array.shape[1] :].tolist())
    torch.testing.assert_close(decoded, values(name, *wanted), rtol=0, atol=0, equal_nan=True)


def zeros(name: str, count: int) -> Encoded:
    bits, block, _, _ = FORMATS[name]
    return encoded(name, *(torch.zeros(size, dtype=torch.uint8) for size in (count * bits // 8, count // block)))


@pytest.mark.parametrize("name", FORMATS)
@on_ranks(3)
def test_an_all_gather_moves_the_bits(comm: qccl.Communicator, name: str) -> None:
    counts = [3 * 1024 + 256, 128, 640]
    parts = [drawn(name, count, rank) for rank, count in enumerate(counts)]
    x, out, decoded = encoded(name, *parts[comm.rank]), zeros(name, sum(counts)), torch.empty(sum(counts))
    comm.quantized_all_gather(x, out, counts=counts)
    comm.quantized_all_gather(x, decoded, counts=counts)
    check(name, out, decoded, joined(parts))


@pytest.mark.parametrize("name", FORMATS)
@on_ranks(2)
def test_an_all_to_all_moves_the_bits(comm: qccl.Communicator, name: str) -> None:
    counts = [[128, 2048], [1280, 384]]
    parts = [[drawn(name, count, 10 * i + j) for j, count in enumerate(row)] for i, row in enumerate(counts)]
    received = [row[comm.rank] for row in counts]
    x = encoded(name, *joined(parts[comm.rank]))
    out, decoded = zeros(name, sum(received)), torch.empty(sum(received))
    comm.quantized_all_to_all(x, out, send_counts=counts[comm.rank], recv_counts=received)
    comm.quantized_all_to_all(x, decoded, send_counts=counts[comm.rank], recv_counts=received)
    check(name, out, decoded, joined([row[comm.rank] for row in parts]))


@on_ranks(1)
def test_other_types_and_layouts_are_refused(comm: qccl.Communicator) -> None:
    codes, scales = torch.zeros(4, 64), torch.ones(4, 2)
    with pytest.raises(qccl.InvalidBufferError, match="are an array of float8_e5m2; allowed are uint8 and float8_e4m3"):
        Encoded(codes.to(torch.float8_e5m2), scales.to(torch.float8_e8m0fnu), "mxfp8")
    with pytest.raises(qccl.InvalidBufferError, match="are an array of float8_e4m3fn; allowed are uint8 and float8_e8"):
        Encoded(codes.to(torch.float8_e4m3fn), scales.to(torch.float8_e4m3fn), "mxfp8")
    typed = codes.to(torch.float8_e4m3fn)
    for wrong, message in (
        (typed.t(), r"x\.codes is not: .*; pass a row-major copy"),
        (typed[:, ::2], "not contiguous"),
    ):
        x = Encoded(wrong, scales[: wrong.numel() // 32].to(torch.float8_e8m0fnu), "mxfp8")
        with pytest.raises(qccl.QcclError, match=message):
            comm.quantized_all_gather(x, torch.empty(256))
