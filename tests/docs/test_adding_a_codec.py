"""docs/adding-a-codec.md is true: its code is compiled as it stands there, and followed in a copy of the repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import oracle
import pytest
from oracle import RngCounter
from pages import DOCS, ROOT, insert, run_in_copy
from ptx_emulator import PtxEmulator, nvrtc_13

pytestmark = [pytest.mark.processes, pytest.mark.starts_first]

PAGE = DOCS / "adding-a-codec.md"
KERNELS = ROOT / "kernels"

DEVICE = """
#include "cuda/team.h"
#include "codecs/ternary/codec.h"
using namespace qccl;
extern "C" __global__ void encode(const float* x, unsigned n, unsigned char* codes, unsigned char* meta) {
  Ternary::encode<Float32>(BlockTeam(), BucketOptions{}, RngCounter{}, x, n, codes, meta);
}
extern "C" __global__ void decode(const unsigned char* codes, const unsigned char* meta, unsigned n, float* y) {
  const auto take = [=](int i, float value) { y[i] = value; };
  Ternary::decode<Float32>(BlockTeam(), BucketOptions{}, RngCounter{}, codes, meta, n, take);
}
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def run(text: str) -> dict:
    """The names that a block of Python makes; without this file's own __future__."""
    names: dict = {"__name__": "ternary"}
    exec(compile(text, PAGE.name, "exec", dont_inherit=True), names)
    return names


def test_the_header_makes_the_oracles_bytes_on_a_device(tmp_path: Path) -> None:
    """As PTX; test_the_page_is_followed_in_a_copy compares the bytes of the host."""
    shutil.copytree(KERNELS, tmp_path / "kernels", ignore=shutil.ignore_patterns("*.cpp"))
    add_header(tmp_path / "kernels")
    kernels = PtxEmulator(nvrtc_13(), tmp_path / "kernels", code=DEVICE)

    def call(name: str, *arguments: np.ndarray | int) -> None:
        given = [np.uint32(each) if isinstance(each, int) else each.ctypes.data for each in arguments]
        arrays = [each for each in arguments if not isinstance(each, int)]
        kernels.execute([name], given, [(each.ctypes.data, each.nbytes, True, True) for each in arrays])

    reference = run(blocks("python")[1])["Ternary"](1 << 13)
    rng = np.random.default_rng(0)
    for n in (1, 7, 16, 100, 255, 1024, 5001):
        for scale in (1.0, 0.0, np.nan):
            x = (rng.standard_normal(n) * scale).astype(np.float32)
            y = np.zeros(n, np.float32)
            codes, meta = np.full(reference.sizes(n, "float32")[0], 0xA5, np.uint8), np.full(4, 0xA5, np.uint8)
            call("encode", x, n, codes, meta)
            wanted = reference.encode_bucket(x, "float32", RngCounter())
            assert codes.tobytes() == wanted[0].tobytes() and meta.tobytes() == wanted[1].tobytes()
            call("decode", codes, meta, n, y)
            decoded = reference.decode_bucket(codes, meta, n, "float32", RngCounter())
            assert oracle.from_float(y, "float32").tobytes() == oracle.from_float(decoded, "float32").tobytes()


def add_header(kernels: Path, name: str = "ternary", number: int = 0) -> None:
    (kernels / f"codecs/{name}").mkdir()
    (kernels / f"codecs/{name}/codec.h").write_text(blocks("cpp")[number])


#: the names of the examples, each with three blocks of Python, two of Markdown and a header
EXAMPLES = ("ternary", "signs")


def follow(root: Path, number: int) -> None:
    """Do what the page says for one of the examples."""
    name, kind = EXAMPLES[number], EXAMPLES[number].title()
    dataclass, oracle_text, row = blocks("python")[3 * number : 3 * number + 3]
    options, section = blocks("markdown")[2 * number : 2 * number + 2]
    add_header(root / "kernels", name, number)
    insert(root / "kernels/codecs/all.h", '#include "topk/codec.h"', f'#include "{name}/codec.h"\n')
    insert(root / "kernels/codecs/all.h", " each(Trellis)", f" each({kind})")
    (root / f"qccl/codecs/{name}.py").write_text(dataclass)
    insert(root / "qccl/codecs/__init__.py", "from qccl.codecs.trellis", f"from qccl.codecs.{name} import {kind}\n")
    insert(root / "qccl/codecs/__init__.py", ", NVFP4)\n", f", {kind}")
    (root / f"tests/support/oracle_{name}.py").write_text(oracle_text)
    insert(root / "tests/support/codec_table.py", "from oracle_trellis", f"from oracle_{name} import {kind}\n")
    insert(root / "tests/support/codec_table.py", '    "trellis": [', row)
    insert(root / "docs/wire-format.md", "| `trellis` | `bits` |", options)
    insert(root / "docs/wire-format.md", "## `trellis`, 1 to 8 bits", section + "\n")


def copy_of_the_repository(root: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", ".*", "build", "*.so", "results", "*.png")
    shutil.copytree(ROOT, root, symlinks=True, ignore=ignored)
    return root


def library_files(root: Path) -> dict[str, bytes]:
    folders = (root / "qccl", root / "kernels")
    return {str(path.relative_to(root)): path.read_bytes() for f in folders for path in f.rglob("*") if path.is_file()}


def test_a_codec_touches_the_four_places_that_the_page_lists(tmp_path: Path) -> None:
    root = copy_of_the_repository(tmp_path / "qccl")
    before = library_files(root)
    follow(root, 0)
    touched = {path for path, content in library_files(root).items() if before.get(path) != content}
    listed = re.findall(r"^\| `((?:kernels|qccl)/\S+)` \|", PAGE.read_text(), re.MULTILINE)
    assert len(listed) == len(touched) == 4
    assert all(any(path.startswith(place) for path in touched) for place in listed), (listed, touched)


def build(root: Path) -> None:
    """The host extension, for one instruction set, without optimisation and inlining; what counts is bytes."""
    cmake = Path(sys.executable).with_name("cmake")
    options = [f"-DPython_EXECUTABLE={sys.executable}", "-DQCCL_X86_64_LEVELS=OFF", "-DQCCL_LOOP_OPTIMIZATION=-O0"]
    options += ["-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0 -Dalways_inline= -Wno-psabi"]
    options += ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    environment = os.environ | {"CCACHE_BASEDIR": str(root), "CCACHE_NOHASHDIR": "1"}  # each copy has another name
    commands = [["-S", ".", "-B", "build", *options], ["--build", "build", "--target", "_host", "--parallel", "2"]]
    for arguments in commands:
        done = subprocess.run(
            [cmake, *arguments], cwd=root, env=environment, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (library,) = (root / "build").glob("_host*.so")
    shutil.copy(library, root / "qccl")


@pytest.mark.slow
@pytest.mark.processes
def test_the_page_is_followed_in_a_copy(tmp_path: Path) -> None:
    """The examples pass the tests that the page names, but for those of all-reduce and CUDA, which take long."""
    root = copy_of_the_repository(tmp_path / "qccl")
    for number in range(len(EXAMPLES)):
        follow(root, number)
    build(root)
    named = re.search(r"python -m pytest (.*?)\n\n", PAGE.read_text(), re.DOTALL)
    files = [each for each in re.findall(r"tests/\S+\.py", named[1]) if not re.search("allreduce|cuda", each)]
    for arguments in (
        ["tests/codecs/golden/make.py"],
        ["pytest", "-q", "-x", "-k", "ternary or signs or every or options", *files],
    ):
        run_in_copy(root, *arguments, limit=300)
    wires = [json.loads((folder / "tests/codecs/golden/wire.json").read_text())["wires"] for folder in (ROOT, root)]
    added = [entry for entry in wires[1] if entry not in wires[0]]
    assert len(wires[1]) == len(wires[0]) + len(added) and {e["codec"].split(":")[0] for e in added} == set(EXAMPLES)
