"""Tensors that are already in a format of blocks: their codes and scales are two arrays of the caller."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from qccl.base.errors import ArgumentError, CodecError, InvalidBufferError
from qccl.base.tensors import is_tensor
from qccl.codecs.base import Codec
from qccl.codecs.blocks import MXFP4, MXFP8, NVFP4, NVFP4Codes

__all__ = ["Encoded", "FloatBlocks"]

#: codecs whose wire is the codes and scales of tensors in these formats
FloatBlocks = MXFP8 | MXFP4 | NVFP4

_E4M3, _E5M2, _E2M1, _E8M0 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2", "float8_e8m0fnu"
#: by format: its codec on the wire, the element types of PyTorch for codes and scales, and the bits of a code
_FORMATS: dict[str, tuple[FloatBlocks, str, str]] = {
    "mxfp8": (MXFP8(), _E4M3, _E8M0),
    "mxfp8:type=e5m2": (MXFP8("e5m2"), _E5M2, _E8M0),
    "mxfp4": (MXFP4(), _E2M1, _E8M0),
    "nvfp4": (NVFP4Codes(), _E2M1, _E4M3),
}


@dataclass(frozen=True, eq=False)
class Encoded:
    """A tensor in MXFP8, MXFP4 or NVFP4, which quantized_all_gather and quantized_all_to_all send as it is.

    Attributes:
        codes: an array of bytes, row-major: uint8, or the format's type in PyTorch and ml_dtypes. A byte holds one code
            of 8 bits, or two of 4 bits, the first in the low half (PyTorch's ``float4_e2m1fn_x2``).
        scales: an array of bytes, row-major: a scale for each 32 elements (E8M0), for each 16 with NVFP4 (E4M3). Calls
            need both arrays at multiples of 4 bytes.
        format: "mxfp8", "mxfp8:type=e5m2", "mxfp4", "nvfp4", or the codec.
        tensor_scale: with NVFP4 the number, rounded to float32, by which all values are multiplied; a decoded output
            needs it. All ranks give the same, and it is not sent.
        layout: the order of the scales. Only "row-major" is possible; kernels of matrix products often want "swizzled".

    Raises CodecError for another format, layout or tensor scale, InvalidBufferError for arrays of other types.
    """

    codes: Any
    scales: Any
    format: str | Codec
    tensor_scale: float | None = None
    layout: str = "row-major"

    def __post_init__(self) -> None:
        name = self.format.spec() if isinstance(self.format, Codec) else str(self.format)
        if name not in _FORMATS:
            raise CodecError(f"Encoded: format={self.format!r} is not possible; allowed are {', '.join(_FORMATS)}")
        object.__setattr__(self, "format", name)
        if self.layout != "row-major":
            raise CodecError(
                f"Encoded: layout={self.layout!r} is not possible; scales must be row-major, so that those of a part "
                f"lie together. Keep the scales as the encoder made them, or undo the swizzle of 128 x 4 tiles, and "
                f"swizzle what the call returns"
            )
        if self.tensor_scale is not None:
            self._check_tensor_scale(name)
        _, codes, scales = _FORMATS[name]
        object.__setattr__(self, "codes", _bytes_of(self.codes, codes, f"the codes of {name}"))
        object.__setattr__(self, "scales", _bytes_of(self.scales, scales, f"the scales of {name}"))

    def _check_tensor_scale(self, name: str) -> None:
        import ctypes

        if name != "nvfp4":
            raise CodecError(f"Encoded: {name} has no tensor scale; leave tensor_scale={self.tensor_scale!r} out")
        try:
            given = ctypes.c_float(self.tensor_scale).value  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            given = math.nan
        if not 0 < given < math.inf:
            raise CodecError(
                f"Encoded: tensor_scale={self.tensor_scale!r} is not possible; it is a float32 above 0, given as a "
                f"float: float(scale)"
            )
        object.__setattr__(self, "tensor_scale", given)

    @property
    def codec(self) -> FloatBlocks:
        """The codec whose wire is the codes of a chunk, and then its scales."""
        return _FORMATS[str(self.format)][0]

    def check_output(self, out: Any) -> None:
        """Raise ArgumentError if ``out``, the output of a call that sends this, does not fit."""
        if not isinstance(out, Encoded):
            if self.format == "nvfp4" and self.tensor_scale is None:
                raise ArgumentError(
                    "x has no tensor_scale, which a decoded output of nvfp4 needs; give Encoded(..., tensor_scale=), "
                    "or an Encoded as out"
                )
        elif (out.format, out.tensor_scale) != (self.format, self.tensor_scale):
            raise ArgumentError(
                f"x is {self.format} with tensor_scale={self.tensor_scale}, and out {out.format} with tensor_scale="
                f"{out.tensor_scale}; both must be the same, because nothing is encoded again"
            )


def _bytes_of(array: Any, wanted: str, what: str) -> Any:
    """A view of an array as uint8: array libraries do not pass arrays of the type ``wanted`` on."""
    dtype = getattr(array, "dtype", None)
    name = str(dtype).removeprefix("torch.")
    if dtype is None or name == "uint8":
        return array
    if name != wanted:
        raise InvalidBufferError(f"{what} are an array of {name}; allowed are uint8 and {wanted}")
    return array.view(sys.modules["torch"].uint8 if is_tensor(array) else "uint8")
