"""The programs of the documentation that torchrun starts run unchanged; tests/docs/test_pages.py has the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import DOCS, PROGRAMS
from plain_ranks import free_ports
from start_ranks import start_plain

pytestmark = [pytest.mark.starts_first, pytest.mark.processes]

#: the libraries of docs/howto/trainers.md that take long to import
TRAINERS = ("accelerate", "lightning", "transformers")

#: runs the programs that it is given as PORT=FILE, in their folder
IN_TURN = """
import os, runpy, sys
os.chdir(sys.path[0])
for place in sys.argv[1:]:
    os.environ["MASTER_PORT"], _, path = place.partition("=")
    print(path, flush=True)
    runpy.run_path(path, run_name="__main__")
    if "accelerate" in sys.modules:  # it keeps the process group of the first program
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("with_trainers", "size"), [(False, 2), (False, 4), (True, 2), (True, 4)])
def test_programs_of_torchrun(tmp_path, with_trainers, size):
    """Those of the same size share processes with torchrun's variables, because importing torch takes long."""
    trainers = DOCS / "howto" / "trainers.md"
    programs = []
    for block in PROGRAMS:
        if block.launcher != "mpiexec" and "torchtitan" not in block.text and (block.page == trainers) == with_trainers:
            found = re.fullmatch(r"torchrun --standalone --nproc-per-node ([24]) (\w+\.py)", block.program[2])
            assert found and found[2] == block.program[1], block.program[2]
            programs += [block] if int(found[1]) == size else []
    assert programs
    libraries = [name for name in TRAINERS if any(block.imports(name) for block in programs)]
    run_torch_programs([block.write(tmp_path) for block in programs], size, *libraries)


@pytest.mark.every_trainer
@pytest.mark.slow
def test_the_program_of_torchtitan(tmp_path):
    """Trains, and goes on from the checkpoint of the first run. Its dependencies are not those of the other tests."""
    (block,) = [block for block in PROGRAMS if "torchtitan" in block.text]
    command = ("tests/torch/torchtitan_ranks.py", str(block.write(tmp_path)), str(tmp_path / "out"))
    settings = {"QCCL_TRANSPORT": "auto", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    for steps in (2, 4):
        ended = start_plain(4, *command, str(steps), limit=200, **settings)
        assert ended.status == 0, ended.output
        assert ended.output.count(f"the same bits on all replicas after step {steps}") == 4, ended.output


def run_torch_programs(programs: list[Path], size: int, *imported: str) -> None:
    """Run programs one after the other, all in the same ``size`` processes, each program with a port of its own."""
    places = [f"{port}={path}" for port, path in zip(free_ports(len(programs)), programs, strict=True)]
    in_turn = programs[0].with_name("in_turn.py")
    in_turn.write_text(IN_TURN)
    settings = {"TORCHELASTIC_RUN_ID": "docs", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    modules = ",".join(("torch.distributed", *imported))
    ended = start_plain(size, str(in_turn), *places, limit=300, imported=modules, QCCL_TRANSPORT="auto", **settings)
    assert ended.status == 0, ended.output
