"""The documentation is true: its Python blocks run unchanged, and its lists are complete.

A block whose first line is ``# FILE: COMMAND`` is a program, which is started by that command. The others of a page are
one program in the order of the page, and run on ranks that are threads, with ``comm``, ``np`` and ``qccl``.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from plain_ranks import free_ports
from start_ranks import start, start_plain

import qccl
from qccl import codecs
from qccl.launchers import detect

pytestmark = pytest.mark.starts_first

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCE = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
#: pages whose blocks have a test of their own
ELSEWHERE = {DOCS / f"adding-a-{kind}.md" for kind in ("codec", "collective", "transport")}
PAGES = sorted({ROOT / "README.md", *DOCS.rglob("*.md")} - ELSEWHERE)
RANKS = 4
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

_PROGRAM = re.compile(r"# (\w+\.py): (.+)\n")
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    page: Path
    line: int
    text: str

    @property
    def program(self) -> re.Match[str] | None:
        return _PROGRAM.match(self.text)

    @property
    def launcher(self) -> str:
        return self.program[2].split()[0]

    def write(self, folder: Path) -> Path:
        path = folder / self.program[1]
        path.write_text(self.text)
        return path

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(page, text[: found.start(1)].count("\n"), found[1]) for found in _BLOCK.finditer(text)]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PROGRAMS = [block for block in BLOCKS if block.program]
SNIPPETS = {page: found for page in PAGES if (found := [b for b in blocks_of(page) if not b.program])}


@pytest.mark.parametrize("page", SNIPPETS, ids=lambda page: str(page.relative_to(ROOT)))
def test_snippets(page, tmp_path, monkeypatch):
    if "import jax" in page.read_text():
        pytest.importorskip("jax")
    monkeypatch.chdir(tmp_path)
    compiled = [compile("\n" * b.line + b.text, page.name, "exec", dont_inherit=True) for b in SNIPPETS[page]]

    def run(comm):
        names = {"__name__": page.stem, "comm": comm, "np": np, "qccl": qccl}
        for code in compiled:
            exec(code, names)

    qccl.run_ranks(RANKS, run, timeout=30)


def marked(block: Block) -> Any:
    return pytest.param(
        block, id=str(block), marks=[pytest.mark.mpi, *[pytest.mark.gpu] * ("import cupy" in block.text)]
    )


@pytest.mark.parametrize("block", [marked(block) for block in PROGRAMS if block.launcher == "mpiexec"])
def test_programs(block, tmp_path):
    found = re.fullmatch(r"mpiexec -n (\d+) python (\w+\.py)", block.program[2])
    assert found and found[2] == block.program[1]
    ended = start(int(found[1]), str(block.write(tmp_path)), limit=60)
    assert ended.status == 0, ended.output


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
    text = "\n".join(block.text for block in programs)
    libraries = [name for name in TRAINERS if re.search(rf"^(import|from) {name}\b", text, re.MULTILINE)]
    for name in ("torch", *libraries):
        pytest.importorskip(name)
    run_torch_programs([block.write(tmp_path) for block in programs], size, *libraries)


@pytest.mark.every_trainer
@pytest.mark.slow
def test_the_program_of_torchtitan(tmp_path):
    """Trains, and goes on from the checkpoint of the first run. Its dependencies are not those of the other tests."""
    (block,) = [block for block in PROGRAMS if "torchtitan" in block.text]
    command = ("tests/support/torchtitan_ranks.py", str(block.write(tmp_path)), str(tmp_path / "out"))
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


def test_every_block_of_python_is_marked():
    """An indented block would not be run."""
    for page in PAGES:
        assert not re.search(r"^ {4}(import |from \w+ import )", page.read_text(), re.MULTILINE), page


def test_the_reference_has_every_public_name():
    for name in qccl.__all__:
        assert f"qccl.{name}" in REFERENCE, name
    for kind in codecs.CODECS.values():
        assert f".. autoclass:: qccl.codecs.{kind.__name__}" in REFERENCE, kind
    for name, member in inspect.getmembers(qccl.Communicator):
        if not name.startswith("_") and (callable(member) or isinstance(member, property)):
            assert re.search(rf"auto(method|property):: Communicator\.{name}$", REFERENCE, re.MULTILINE), name


def test_the_environment_variables():
    read = re.compile(r"""(?:getenv\(|environ(?:\.get\(|\[)|_?environ\.get\()\s*"(\w+)"|"(\w+)" in os\.environ""")
    sources = [*(ROOT / "qccl").rglob("*.py"), *(ROOT / "kernels").rglob("*.cpp"), *(ROOT / "kernels").rglob("*.h")]
    found = {a or b for path in sources for a, b in read.findall(path.read_text())}
    assert {"OMP_NUM_THREADS", "QCCL_ISA", "QCCL_PORT", "QCCL_CACHE_DIR"} <= found
    page = (DOCS / "guide" / "settings.md").read_text()
    launchers = inspect.getmodule(detect)._VARIABLES.values()
    for name in found | {name for names in launchers for name in names if name}:
        assert f"`{name}`" in page, name


@pytest.mark.parametrize("page", ["docs/results-collectives.md"])
def test_the_columns_that_matter_come_first(page):
    """A phone shows five or six columns; a program that writes the table again keeps the order."""
    import links

    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    begins = [i for i, line in enumerate(lines) if line.startswith("<!-- measured by python bench/links.py")]
    assert begins
    for i in begins:
        head = [cell.strip() for cell in lines[i + 2].strip("|").split("|")]
        assert head[4].startswith("speed-up") and tuple(head) == links.HEAD


NAMES_FILES = [DOCS / "architecture.md", *sorted((DOCS / "architecture").glob("*.md")), DOCS / "glossary.md"]


@pytest.mark.parametrize("path_of_page", NAMES_FILES, ids=lambda path: path.stem)
def test_the_files_that_pages_name_exist(path_of_page):
    page = path_of_page.read_text()
    folders = (ROOT, ROOT / "qccl", ROOT / "qccl" / "collectives", DOCS)
    for path in re.findall(r"`([\w./-]+(?:\.(?:py|h|cpp|md)|/\w+))`", page):
        assert any((folder / path).exists() for folder in folders), f"{path_of_page} names {path}"


def test_the_break_even_bandwidths():
    """The table in docs/when-not.md follows from its formula and the speeds in docs/codecs.md."""
    page, speeds = (DOCS / "when-not.md"), (DOCS / "codecs.md").read_text()
    names: dict[str, Any] = {}
    exec(blocks_of(page)[0].text, names)
    rows = re.findall(
        r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \| (\d+) Gbit/s \| (\d+) Gbit/s \|$", page.read_text(), re.M
    )
    assert len(rows) == 3
    for codec, encode, decode, two, eight in rows:
        assert f"| `{codec}` | float32 | {encode} | {decode} |" in speeds
        for ranks, stated in ((2, two), (8, eight)):
            found = names["break_even"](ranks, float(encode) * 1e9, float(decode) * 1e9) * 8e-9
            assert round(found) == int(stated), (codec, ranks)
