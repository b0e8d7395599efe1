"""A module of a user with a codec of his; tests copy it to where a user would have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from qccl.codecs import PythonCodec


@dataclass(frozen=True)
class Half(PythonCodec):
    """float16; ``bound`` is the error that it states, in units of the true bound."""

    bucket: int = 64
    bound: float = 1.0
    name: ClassVar[str] = "half"
    granule = property(lambda self: self.bucket)

    def _nbytes(self, count, dtype):
        return 2 * count

    def encode_values(self, x):
        return x.astype(np.float16).view(np.uint8)

    def decode_values(self, wire, count):
        return wire.view(np.float16).astype(np.float32)

    def error_bound(self, x):
        return self.bound * (abs(np.asarray(x, np.float64)) * 2.0**-11 + 2.0**-25)


number = 5
