"""What the fake GPUs have exists in CuPy, cuda-python and NCCL, and takes as many arguments there.

The libraries need no GPU for that; where they are not installed there is nothing to compare with.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import stub_libraries

pytestmark = pytest.mark.packages

ROOT = Path(__file__).resolve().parents[3]
FILES = [
    *sorted((ROOT / "qccl" / "engine" / "cuda").glob("*.py")),
    *sorted((ROOT / "tests" / "gpu").glob("*.py")),
    ROOT / "qccl" / "bench" / "sweep" / "plain.py",
]


@pytest.fixture(scope="module")
def cupy() -> Any:
    """The real one, with its module of NCCL."""
    reason = "CuPy is not installed (extra 'cuda12' or 'cuda13')"
    pytest.importorskip("cupy.cuda.nccl", reason=reason, exc_type=ImportError)
    return importlib.import_module("cupy")


def parameters(function: Any) -> list[tuple[str, bool]] | None:
    """Names, and whether there is a default; Cython tells them in the first line of the description."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        head = re.match(r"[\w.]+\(([^)]*)\)", function.__doc__ or "")
        if head is None:
            return None
        parts = [part.strip() for part in head[1].split(",") if part.strip() not in ("", "*", "self")]
        return [(re.split(r"[\s*]", part.partition("=")[0].strip())[-1], "=" in part) for part in parts]
    kinds = {p.kind for p in signature.parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return None
    return [(p.name, p.default is not p.empty) for p in signature.parameters.values()]


def test_the_fake_has_nothing_that_the_libraries_lack(cupy):
    """Tests on the fake mean something only for what exists, and takes as many arguments.

    NCCL's module and the driver's are the real ones there, which refuse other arguments by themselves.
    """
    import fake_cuda

    made, compared = fake_cuda.modules(fake_cuda.World()), set()
    for module, real in (("cupy", cupy), ("cupy.cuda", cupy.cuda), ("cupy.cuda.runtime", cupy.cuda.runtime)):
        for name, fake in vars(made[module]).items():
            assert name.startswith("__") or hasattr(real, name), f"{module}.{name}"
            wanted = parameters(getattr(real, name)) if inspect.isroutine(fake) else None
            if wanted is None or (given := parameters(fake)) is None:
                continue
            assert len(given) <= len(wanted), f"{module}.{name} takes {wanted}, and the fake one {given}"
            assert all(has_default for _, has_default in wanted[len(given) :]), f"{module}.{name} needs {wanted}"
            compared.add(name)
    assert {"eventRecord", "streamWaitEvent", "memcpy", "memsetAsync", "setDevice"} <= compared, compared
    for name in vars(fake_cuda.Event):
        assert name.startswith("_") or hasattr(cupy.cuda.Event, name), name
    for name in ("__enter__", "__exit__", "synchronize", "begin_capture", "end_capture", "from_external", "null"):
        assert hasattr(cupy.cuda.Stream, name), name


@pytest.fixture(scope="module")
def headers() -> list[Path]:
    """cuda.h and nccl.h."""
    nvidia = [Path(folder) for folder in __import__("nvidia").__path__]
    found = [next((p for f in nvidia for p in f.glob(f"*/include/{name}")), None) for name in ("cuda.h", "nccl.h")]
    if None in found:
        pytest.skip("the headers of CUDA and NCCL are not installed (nvidia-cuda-runtime, nvidia-nccl-cu13)")
    return found


def test_the_stub_s_functions_are_those_of_the_headers(headers):
    """Two declarations of one function that differ are an error."""
    included = """#include <cuda.h>
typedef CUstream cudaStream_t;
typedef CUevent cudaEvent_t;
#define __CUDA_RUNTIME_H__  /* nccl.h includes them, and not all that they include is installed */
#define __CUDA_FP16_H__
#include <nccl.h>
"""
    command = ["cc", "-fsyntax-only", "-x", "c", "-", *(f"-I{header.parent}" for header in headers)]
    subprocess.run(command, input=stub_libraries.source(included), text=True, check=True, timeout=60)
    wrong = stub_libraries.source(included).replace("cuuint32_t", "cuuint64_t")
    assert subprocess.run(command, input=wrong, text=True, capture_output=True, timeout=60).returncode


def test_what_is_called_in_nccls_library_has_the_arguments_of_its_header(headers):
    """By ctypes nothing else would notice a wrong number of arguments."""
    text = headers[1].read_text(encoding="utf-8")
    declared = {
        m[1]: m[2].count(",") + 1 for m in re.finditer(r"^ncclResult_t\s+(nccl\w+)\(([^)]*)\);", text, re.MULTILINE)
    }
    calls = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(ast.Name("call"), [ast.Constant(name), *arguments]):
                    if not any(isinstance(each, ast.Starred) for each in arguments):
                        assert len(arguments) == declared[name], f"{path.name}:{node.lineno}"
                    calls[name] = declared[name]
    assert "ncclBroadcast" in calls
