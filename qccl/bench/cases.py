"""The cases of a run and the calls' parameters, from the options; and a check that all calls are possible."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from qccl import dtypes
from qccl.bench.calls import Case, parameters_of, spec_of_case
from qccl.bench.kinds import KINDS
from qccl.bench.options import DTYPES, Options
from qccl.bench.params import codec_of

__all__ = ["cases", "check_calls", "parameters"]


def cases(options: Options, size: int) -> Iterator[Case]:
    """All cases, ordered by type, operation and size as in nccl-tests; sizes are rounded down to whole elements."""
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
    """The parameters besides op, root and algorithm; ``node_ids`` is used without --nodes."""
    o = options
    nodes = node_ids if o.nodes is None else [rank % o.nodes for rank in range(len(node_ids))]
    return {"layout": o.layout, "intra": o.intra, "inter": o.inter, "arrays": o.arrays, "node_ids": nodes}


def check_calls(options: Options, size: int) -> None:
    """Raise ArgumentError or CodecError if a call of the run is impossible on ``size`` ranks."""
    every = parameters(options, [0] * size)
    for case, spec in itertools.product(cases(options, size), options.codecs):
        given = parameters_of(case, options.algorithm, every)
        call = spec_of_case(case, codec_of(spec), options.chunk, given, 0, size)
        call.buffers(0, size)
