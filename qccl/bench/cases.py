"""The calls of a run, from its options: the cases in order, the calls' parameters, and a check that all are allowed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from qccl import dtypes
from qccl.bench.calls import Case, parameters_of, signature_of
from qccl.bench.kinds import KINDS
from qccl.bench.options import DTYPES, Options
from qccl.bench.params import codec_of

__all__ = ["cases", "check_calls", "parameters"]


@dataclass(frozen=True)
class _Rank:
    rank: int
    size: int


def cases(options: Options, size: int) -> Iterator[Case]:
    """Types, then operations, then sizes, as in nccl-tests; a size is cut to whole elements."""
    kind = KINDS[options.collective]
    ops = options.ops if kind.combines else ("none",)
    for name, op, nbytes in itertools.product(options.dtypes, ops, options.sizes()):
        dtype = dtypes.get(DTYPES[name])
        count = nbytes // dtype.itemsize
        if not (kind.whole_input and kind.whole_output) or options.collective == "all_to_all":
            count -= count % size  # equal parts
        root = options.root if "root" in kind.parameters else -1
        yield Case(count, dtype, op, options.collective, root)


def parameters(options: Options, node_ids: Sequence[int]) -> dict[str, Any]:
    """The collectives' parameters beside op, root and algorithm; ``node_ids`` count where there are no --nodes."""
    o = options
    nodes = node_ids if o.nodes is None else [rank % o.nodes for rank in range(len(node_ids))]
    return {"layout": o.layout, "intra": o.intra, "inter": o.inter, "arrays": o.arrays, "node_ids": nodes}


def check_calls(options: Options, size: int) -> None:
    """Raise ArgumentError or CodecError where a call of the run is not possible on ``size`` ranks."""
    every = parameters(options, [0] * size)
    for case, spec in itertools.product(cases(options, size), options.codecs):
        given = parameters_of(case, options.algorithm, every)
        call = signature_of(case, codec_of(spec), options.chunk, given, _Rank(0, size))
        call.counts(0, size)
