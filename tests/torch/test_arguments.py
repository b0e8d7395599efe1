"""Arguments that are of torch: its reductions, and keywords that compress() has no more."""

from __future__ import annotations

import re

import numpy as np
import pytest
from torch import distributed

import qccl
import qccl.torch
from qccl.base import removed
from qccl.collectives.arguments import op_of


def test_reductions_of_torch():
    reduce_op = distributed.ReduceOp
    given = {
        "sum": [0, "sum", reduce_op.SUM, reduce_op(reduce_op.SUM)],
        "avg": [4, "avg", "mean", reduce_op.AVG, reduce_op(reduce_op.AVG)],
        "min": [3, "min", reduce_op.MIN, reduce_op(reduce_op.MIN)],
        "max": [np.int64(2), "max", reduce_op.MAX, reduce_op(reduce_op.MAX)],
    }
    for name, each in given.items():
        assert {op_of(op) for op in each} == {name}
    for op in (reduce_op.PRODUCT, reduce_op(reduce_op.BXOR), distributed._make_nccl_premul_sum(2.0)):
        with pytest.raises(qccl.ArgumentError, match="is not supported"):
            op_of(op)

    def run(comm):
        x = np.full(8, comm.rank, np.float32)
        assert (comm.quantized_allreduce(x.copy(), op=reduce_op.MAX, codec="none") == 1).all()
        assert (
            comm.quantized_allreduce(x.copy(), op="mean" if comm.rank else reduce_op.AVG, codec="none") == 0.5
        ).all()
        y = np.empty_like(x)
        qccl.quantized_allreduce(x.ctypes.data, y.ctypes.data, 8, "float32", reduce_op.MIN, comm, codec="none")
        assert (y == 0).all()

    qccl.run_ranks(2, run)


def test_names_that_are_gone():
    with pytest.raises(AttributeError, match=r"'statistics' any more; give compress\(\) a comm, whose stats\(\) has"):
        _ = qccl.torch.Compression.statistics


@pytest.mark.parametrize("keyword", ["budget", "step_bytes"])
def test_keywords_of_compress_that_are_gone(keyword):
    instead = removed.KEYWORDS[f"qccl.torch.compress({keyword})"]
    with pytest.raises(qccl.ArgumentError, match=re.escape(f"{keyword!r} any more; {instead}")):
        qccl.torch.compress(None, **{keyword: 1})
