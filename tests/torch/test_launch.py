"""Ranks of torch.distributed find each other, and README's program runs under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import patience
import pytest
import torch.distributed as dist
from on_ranks import on_ranks
from plain_ranks import torch_variables
from start_ranks import start_plain

import qccl
from qccl.meeting import launchers, meetings

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("transport", ["ucx", "gloo"])
@on_ranks(2)
def test_ranks_find_each_other(transport: str) -> None:
    """In processes that no launcher has started."""
    for name in torch_variables(0, 1, 1):
        del os.environ[name]
    os.environ["QCCL_TRANSPORT"] = transport
    with qccl.init(backend="host") as comm:
        assert (comm.rank, comm.size) == (dist.get_rank(), 2)
        assert comm.transport.name == transport


@on_ranks(2, transport="ucx")
def test_a_rank_that_gave_up_alone_meets_the_others_in_its_next_attempt() -> None:
    """First rank 0 does so, then rank 1."""
    for alone in range(2):
        if dist.get_rank() == alone:
            with pytest.raises(qccl.CollectiveTimeout, match=f"rank {1 - alone} did not"):
                qccl.Communicator.from_torch(timeout=0.5)
        dist.barrier()
        with qccl.Communicator.from_torch(timeout=60) as comm:
            assert comm.allgather(bytes([comm.rank])) == [b"\0", b"\1"]


def test_a_rank_that_gives_up_while_its_name_is_read() -> None:
    """It deletes the name between the store's answer that there is one and the question for it."""

    class Store(dist.HashStore):
        def wait(self, keys: list[str], timeout: timedelta) -> None:
            super().wait(keys, timeout)
            self.delete_key(keys[0])

    store = Store()
    store.set_timeout(timedelta(seconds=60))
    store.set("waiting/1", "a name")
    begin = time.monotonic()
    with pytest.raises(qccl.CollectiveTimeout) as caught:
        meetings.of_store(store, 0, 2).gather(b"", 0.5)
    assert str(caught.value) == "rank 1 did not come within 0.5 s (waiting/1 was deleted)"
    assert time.monotonic() - begin < 30 * patience.factor()


def test_the_program_of_the_readme_runs_under_torchrun(port: int, tmp_path: Path) -> None:
    """tests/communicator/test_launch.py has the other commands."""
    (program,) = re.findall(
        r"^```python\n(# sum\.py: .*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    (tmp_path / "sum.py").write_text(program)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--master-port",
        str(port),
        "--nproc-per-node",
        "4",
        "sum.py",
    ]
    environment = launchers.without_launchers(os.environ) | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"\[[- \d]*\.[-. \d]*\]", done.stdout)  # ranks write parts of lines, which may mix
    assert len(found) == 4 and len(set(found)) == 1, done.stdout


def test_ranks_of_a_launcher_find_each_other_over_gloo() -> None:
    """By the launcher's variables: no rank has begun torch.distributed."""
    program = (
        "import qccl; comm = qccl.init('host'); print(f'{comm.rank} {comm.size} {comm.transport.name}\\n', end='')"
    )
    ended = start_plain(2, "-c", program, limit=100, QCCL_TRANSPORT="gloo")
    assert ended.status == 0 and {"0 2 gloo", "1 2 gloo"} <= {*ended.output.splitlines()}, ended.output
