"""The wire format as it was published: bytes kept in golden/wire.json, which golden/make.py wrote from the oracle."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import oracle
import pytest

from qccl import codecs

GOLDEN = json.loads(Path(__file__).with_name("golden").joinpath("wire.json").read_text())
ENTRIES, CALL = GOLDEN["wires"], GOLDEN["call"]


@pytest.mark.parametrize("entry", ENTRIES, ids=[f"{entry['codec']}-{entry['dtype']}" for entry in ENTRIES])
def test_wire_is_unchanged(entry: dict[str, str]) -> None:
    codec, dtype = codecs.get(entry["codec"]), entry["dtype"]
    values = np.frombuffer(bytes.fromhex(GOLDEN["values"][dtype]), oracle.storage(dtype))
    wire = codec.encode(values, call=CALL, dtype=dtype)
    assert wire.tobytes().hex() == entry["wire"]
    old = np.frombuffer(bytes.fromhex(entry["wire"]), np.uint8)
    assert codec.decode(old, values.size, dtype, call=CALL).tobytes().hex() == entry["decoded"]


def test_every_codec_and_width_is_held() -> None:
    held = {type(codecs.get(entry["codec"])) for entry in ENTRIES}
    assert held == set(codecs.CODECS.values())
    widths = {codec.bits for entry in ENTRIES if isinstance(codec := codecs.get(entry["codec"]), codecs.MinMax)}
    assert widths == set(range(1, 9))
