"""Ranks of jax.distributed find each other, in processes that no launcher has started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qccl import launchers

ROOT = Path(__file__).parents[2]

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


def outputs(*programs: str, **environment: str) -> list[list[str]]:
    """The lines of programs that run at the same time."""
    clean = launchers.without_launchers(os.environ) | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment
    commands = [[sys.executable, "-c", program] for program in programs]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=clean, **pipes) for command in commands]
    try:
        ended = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
    assert all(process.returncode == 0 for process in processes), ended
    return [out.splitlines() for out, _ in ended]


def on_two_ranks(port: int, program: str, transport: str) -> list[list[str]]:
    programs = (CONNECT.format(port=port, rank=rank) + program for rank in range(2))
    return outputs(*programs, QCCL_TRANSPORT=transport)


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
    assert outputs(f"import qccl, jax, jax.distributed, torch.distributed\n{INIT}") == [["rank 0 of 1"]]
