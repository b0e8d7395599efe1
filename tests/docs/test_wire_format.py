"""docs/wire-format.md is true: its examples, options and collectives are read from the page."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

import numpy as np
import oracle
import pytest
from codec_table import oracle_codec

import qccl
from qccl import codecs
from qccl.collectives.chunks import BETWEEN_SITES, GPU, NETWORK, ChunkPolicy, shared_memory
from qccl.collectives.partitions import partition

PAGE = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text()


def table(head: str) -> list[list[list[str]]]:
    """The rows of every table whose first line begins so; cells without their backquotes."""
    found = re.findall(rf"^\| {re.escape(head)} \|.*\n\| --- .*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return [[[cell.strip().strip("`") for cell in line[1:-1].split("|")] for line in t.splitlines()] for t in found]


EXAMPLES = [{name.split(" ")[0]: (name, text) for name, text in rows} for rows in table("example")]
OPTIONS = table("codec")[0]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example["codec"][1])
def test_example(example: dict[str, tuple[str, str]]) -> None:
    """By the library and by the oracle, which was written from the page."""
    dtype = example["values"][0].removeprefix("values (").removesuffix(")")
    call, spec = int(example.get("call", ("", "0"))[1]), example["codec"][1]
    values, wire, decoded = (bytes.fromhex(example[name][1]) for name in ("values", "wire", "decoded"))
    codec, counter = codecs.get(spec), oracle.RngCounter(call=call)
    x, code = np.frombuffer(values, oracle.storage(dtype)), np.frombuffer(wire, np.uint8)
    assert codec.encode(x, call, dtype=dtype).tobytes() == wire
    assert codec.decode(code, x.size, dtype, call).tobytes() == decoded
    assert oracle.encode(oracle_codec(spec), x, dtype, counter).tobytes() == wire
    assert oracle.decode(oracle_codec(spec), code, x.size, dtype, counter=counter).tobytes() == decoded


def test_every_codec_has_an_example() -> None:
    assert {codecs.get(example["codec"][1]).name for example in EXAMPLES} == set(codecs.CODECS)


def test_the_options_are_those_of_the_classes() -> None:
    found = {(codec, option): default for codec, option, default, _ in OPTIONS}
    wanted = {}
    for name, kind in codecs.CODECS.items():
        for field in dataclasses.fields(kind):  # type: ignore[arg-type]
            default = "must be given" if field.default is dataclasses.MISSING else str(field.default)
            wanted[name, field.name] = default.lower() if isinstance(field.default, bool) else default
    assert found == wanted


def test_every_collective_is_in_the_table_of_rounds_and_indices() -> None:
    named = {name for name, *_ in table("collective")[0] for name in re.findall(r"\w+", name)}
    methods = {name for name in dir(qccl.Communicator) if re.match(r"quantized_|hierarchical_|peer_exchange", name)}
    assert methods and methods <= named


def test_the_word_on_the_page() -> None:
    word = re.search(r"`r = (0x[0-9a-f]{8})`", PAGE)
    assert word is not None and oracle.random_words(4, 7, oracle.RngCounter(call=5))[3] == int(word[1], 16)


#: s, e and l of the page
GPUS = {"NVLink": (6500000, 2, 8388608), "PCIe": (1625000, 3, 4194304), "network": (1162500, 2, 4194304)}


@pytest.mark.parametrize("spec", ["minmax8", "minmax4:bucket=shard", "none", "topk:k=0.01", "onebit:bucket=8"])
@pytest.mark.parametrize("where", ["chunk=5000", "on one machine", "over a network", "over wan", *GPU])
def test_shards_and_chunks_are_cut_as_the_page_says(spec: str, where: str) -> None:
    """The page's formulas, written down once more, against the library's partition."""
    codec = codecs.get(spec)
    for count, n in itertools.product((1, 1023, 2500, 100_000, 30_000_001), (1, 2, 3, 40)):
        granules = -(-count // codec.granule)
        largest = -(-granules // n)
        size = codec.encoded_nbytes(largest * codec.granule, "float32")
        if where == "over a network":
            policy, b = NETWORK, max(49152, min(-(-size // 9), 163840, 3145728 // (3 * (3 * n - 2))))
            chunks = max(1, min(-(-size // b), largest))
        elif where == "over wan":
            policy, b = BETWEEN_SITES, max(15360, min(-(-size // 36), 163840, 12582912 // (36 * (3 * n - 2))))
            chunks = max(1, min(-(-size // b), largest))
        elif where in GPU:
            policy, (sent, enough, most) = GPU[where], GPUS[where]
            large = -(-size // min(most, 142606336 // (3 * (3 * n - 2))))
            chunks = max(1, min(round(size * max(n - 1, 1) / sent), max(enough if n > 1 else 16, large), largest))
        else:
            shared = where == "on one machine"
            policy = shared_memory(n) if shared else ChunkPolicy.of_elements(5000)
            elements = max(40960, 3145728 // (3 * (3 * n - 2))) if shared else 5000
            chunks = max(1, -(-largest // max(1, elements // codec.granule)))
        chunks = chunks if codec.splittable else 1
        partitioned = partition([count], n, [codec], policy)
        assert partitioned.chunks == chunks
        for j in range(n):
            first, last = granules * j // n, granules * (j + 1) // n
            by_chunk = {each.chunk: (each.start, each.stop) for each in partitioned.segments(j)}
            for k in range(chunks):
                start, stop = (first + (last - first) * i // chunks for i in (k, k + 1))
                edges = tuple(min(edge * codec.granule, count) for edge in (start, stop))
                found = by_chunk.pop(k, None)
                assert found == edges or (found is None and edges[0] == edges[1])
            assert not by_chunk
