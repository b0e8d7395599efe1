"""Ranks of jax.distributed find each other, in processes that no launcher has started."""

from __future__ import annotations

import pytest
from rank_forks import outputs

CONNECT = "import jax, qccl; jax.distributed.initialize('127.0.0.1:{port}', 2, {rank})\n"
INIT = """
try:
    comm = qccl.init(backend="host")
    print(f"rank {comm.rank} of {comm.size}")
except qccl.QcclError as error:
    print(f"{type(error).__name__}: {error}")
"""
END = "jax.distributed.shutdown()"
#: first rank 0 gives up alone, then rank 1
GIVES_UP = """
from jax._src.distributed import global_state
for alone in range(2):
    if alone == jax.process_index():
        try:
            qccl.Communicator.from_jax(timeout=0.5)
        except qccl.CollectiveTimeout as error:
            print(error)
    global_state.client.wait_at_barrier(f"met {alone}", 60_000)
    with qccl.Communicator.from_jax(timeout=60) as comm:
        print(comm.allgather(bytes([comm.rank])))
"""


def on_two_ranks(port: int, program: str, transport: str) -> list[list[str]]:
    """The lines of programs in processes that no launcher has started."""
    programs = (CONNECT.format(port=port, rank=rank) + program for rank in range(2))
    return [text.splitlines() for text in outputs(*programs, QCCL_TRANSPORT=transport, JAX_PLATFORMS="cpu")]


def test_ranks_find_each_other(port: int) -> None:
    """Also after a rank has given up alone."""
    for rank, lines in enumerate(on_two_ranks(port, INIT + GIVES_UP + END, "ucx")):
        assert lines.pop(0) == f"rank {rank} of 2"
        assert f"rank {1 - rank} did not" in lines.pop(rank)
        assert lines == ["[b'\\x00', b'\\x01']"] * 2


def test_ranks_without_a_transport_in_common(port: int) -> None:
    for lines in on_two_ranks(port, INIT + END, "gloo"):
        assert lines[0].startswith("EngineError: the 2 ranks of jax.distributed have no transport in common.")


def test_frameworks_that_are_loaded_but_have_one_rank() -> None:
    pytest.importorskip("torch")
    program = f"import jax, jax.distributed, torch.distributed\n{INIT}"
    assert outputs(program, JAX_PLATFORMS="cpu") == ["rank 0 of 1\n"]
