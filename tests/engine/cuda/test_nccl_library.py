"""Which of several NCCL libraries in one process CuPy's module uses, with small libraries of the same names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

#: an NCCL of version 2.28, which knows its number
_LIBRARY = """extern "C" int ncclGetVersion(int *version) { *version = 22800; return 0; }
extern "C" int number() { return NUMBER; }
"""
#: stands for CuPy's extension module
_MODULE = """extern "C" int number();
extern "C" int used() { return number(); }
"""
#: loads libraries, then the module, and says what the module and qccl use
_PROGRAM = """import ctypes, os, sys, types
from qccl.engine.cuda import nccl_library
module, *libraries = sys.argv[1:]
for each in libraries:
    name, mode = each.split(":")
    ctypes.CDLL(name, {"local": os.RTLD_LOCAL, "global": os.RTLD_GLOBAL}[mode] | os.RTLD_NOW)
used = ctypes.CDLL(module, os.RTLD_NOW).used()
sys.modules["module"] = types.SimpleNamespace(__file__=module)
gpu = types.SimpleNamespace(nccl=types.SimpleNamespace(NcclCommunicator=types.SimpleNamespace(__module__="module")))
nccl_library.cuda_libraries = lambda: gpu
print(used, nccl_library.library().number())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """1/libnccl.so.2, 2/libnccl.so.2, and module.so, which needs the first one."""
    folder = tmp_path_factory.mktemp("libraries")

    def compile_to(path: Path, source: str, *options: str) -> None:
        path.parent.mkdir(exist_ok=True)
        command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path), *options]
        subprocess.run(command, input=source, text=True, check=True, timeout=60)

    for number in "12":
        compile_to(folder / number / "libnccl.so.2", _LIBRARY, f"-DNUMBER={number}", "-Wl,-soname,libnccl.so.2")
    compile_to(folder / "module.so", _MODULE, f"-L{folder}/1", "-l:libnccl.so.2", f"-Wl,-rpath,{folder}/1")
    return folder


@pytest.mark.parametrize(
    ("loaded", "outcome"),
    [
        ([], "1 1"),
        (["2:local"], "2 2"),
        (["1:global"], "1 1"),
        (["1:local", "2:local"], "1 1"),
        (["2:local", "1:local"], "2 2"),
        (["2:local", "2:global"], "2 2"),
    ],
    ids=str,
)
def test_the_library_of_cupys_module(folder, loaded, outcome) -> None:
    """The versions are equal."""
    libraries = [f"{folder}/{each.replace(':', '/libnccl.so.2:')}" for each in loaded]
    command = [sys.executable, "-c", _PROGRAM, str(folder / "module.so"), *libraries]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(outcome), done.stdout + done.stderr
