"""The options of a process group of the backend "qccl", by pg_options and environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from qccl.base.errors import ArgumentError, CodecError
from qccl.codecs import Codec
from qccl.collectives.arguments import CodecLike, codec_text, count_of, lossiest

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """Options for ``pg_options``: the calls that a process group of the backend "qccl" compresses; equal on all ranks.

    An option that is given here wins over its environment variable; all_gather_codec has no variable.

    Attributes:
        codec: the codec of sums and means (all-reduce and reduce-scatter), e.g. "minmax8"; by default QCCL_CODEC, or
            else "minmax8". "none" compresses nothing; "auto" or "auto:CODEC" is the faster one of none and CODEC, as in
            Communicator.quantized_allreduce().
        min_bytes: calls with fewer bytes are exact; by default QCCL_MIN_BYTES, or else 64 KiB. It counts the larger
            side of a call: the input of a reduce-scatter, the output of an all-gather, all tensors of a coalesced call.
        all_gather_codec: the codec of all-gather, which often carries parameters; by default "none", which is exact.

    Raises CodecError, ArgumentError: a codec does not exist, or keeps state; or min_bytes is not a number of bytes.
    """

    codec: CodecLike = field(default_factory=lambda: _codec_from_environment())
    min_bytes: int = field(default_factory=lambda: _bytes_from_environment())
    all_gather_codec: CodecLike = "none"

    def __str__(self) -> str:
        sums, gathers = codec_text(self.codec), codec_text(self.all_gather_codec)
        return f"codec={sums}, min_bytes={self.min_bytes}, all_gather_codec={gathers}"

    def __post_init__(self) -> None:
        for name in ("codec", "all_gather_codec"):
            given = getattr(self, name)
            _check_stateless(f"{name}={codec_text(given)!r}", lossiest(given))
        count_of(self.min_bytes, "min_bytes")


def _bytes_from_environment() -> int:
    text = os.environ.get("QCCL_MIN_BYTES") or "65536"
    if not text.isdecimal():
        raise ArgumentError(
            f"QCCL_MIN_BYTES={text!r} is not a number of bytes; give an integer without a unit, such as 65536"
        )
    return int(text)


def _codec_from_environment() -> str:
    text = os.environ.get("QCCL_CODEC") or "minmax8"
    try:
        codec = lossiest(text)
    except CodecError as error:
        raise CodecError(f"QCCL_CODEC={text!r}: {error}") from error
    _check_stateless(f"QCCL_CODEC={text!r}", codec)
    return text


def _check_stateless(what: str, codec: Codec) -> None:
    if codec.state_names:
        raise ArgumentError(
            f"{what} keeps its {' and '.join(codec.state_names)} for each tensor from call to call, but a process "
            f"group does not know which tensor a call has; use a codec without +ef and +nesterov, or "
            f"qccl.torch.compress(), which knows the parameters of a DDP model"
        )
