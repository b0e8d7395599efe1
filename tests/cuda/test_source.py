"""The grids of launches, as data: a block for each piece of work, and none without."""

from __future__ import annotations

import numpy as np
import pytest

from qccl.codecs import get
from qccl.cuda import source as cuda_source
from qccl.cuda.source import THREADS, Launch
from qccl.dtypes import FLOAT32
from qccl.schedule import Decode, Encode, Op, Reduce, Span

#: a codec with several units in a warp, with a warp for each unit, and with a block for each bucket
CODECS = ("minmax4:bucket=64", "minmax4:bucket=1024", "onebit:bucket=512")
UNEVEN = (1, 5_000_000, 100, 70_000, 3, 64 * 1024)


def launch(*ops: Op) -> Launch:
    return cuda_source.launch(ops, 0, FLOAT32, lambda span: (0, span.start))


def operations(codec_spec: str, kind: type, counts: tuple[int, ...]) -> list[Op]:
    codec, wire = get(codec_spec), Span("wires", 0, 1)

    def make(count: int) -> Op:
        values = Span("values", 0, count)
        if kind is Reduce:
            return Reduce(codec, (wire,), values, 0, wire, values)
        return Encode(codec, values, wire, 0) if kind is Encode else Decode(codec, wire, values)

    return [make(count) for count in counts]


@pytest.mark.parametrize("kind", [Encode, Decode, Reduce])
@pytest.mark.parametrize("codec", CODECS)
def test_uneven_jobs_have_as_many_blocks_together_as_alone(codec, kind):
    ops = operations(codec, kind, UNEVEN)
    together = launch(*ops)
    alone = [len(launch(op).blocks) for op in ops]
    assert together.geometry == (sum(alone), 1, 1, THREADS, 1, 1, 0)
    assert together.blocks["job"].tolist() == np.repeat(np.arange(len(ops)), alone).tolist()
    assert together.blocks["number"].tolist() == [number for n in alone for number in range(n)]
    assert alone[0] == 1 < alone[1]


def test_a_launch_has_more_jobs_than_a_grid_has_rows():
    ops = operations("minmax8", Encode, (5,)) * 70_000
    assert launch(*ops).geometry[:3] == (70_000, 1, 1)
