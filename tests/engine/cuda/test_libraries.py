"""Everything that is asked of CuPy and cuda-python exists there, and takes as many arguments as it is given.

The libraries need no GPU for that; where they are not installed there is nothing to compare with.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
from collections.abc import Iterator
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
_UNKNOWN = "?"


@pytest.fixture(scope="module")
def roots() -> dict[str, list[Any]]:
    """The names under which the code knows the libraries, and what they are."""
    cupy = pytest.importorskip(
        "cupy", reason="CuPy is not installed (extra 'cuda12' or 'cuda13')", exc_type=ImportError
    )
    bindings = pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not installed")
    from cupy.cuda import driver, nccl, runtime

    return {
        "cupy": [cupy],
        "cuda": [cupy.cuda],
        "runtime": [runtime],
        "driver": [driver, bindings],
        "bindings": [bindings],
        "nccl": [nccl],
        "comm": [nccl.NcclCommunicator],
        "_comm": [nccl.NcclCommunicator],
    }


def chain(node: ast.expr) -> list[str]:
    """cuda_libraries().a.b -> [cuda_libraries, a, b]; nothing is known of the results of other calls."""
    match node:
        case ast.Attribute(value, name):
            return [*chain(value), name]
        case ast.Call(ast.Name("cuda_libraries")):
            return ["cuda_libraries"]
        case ast.Name(name):
            return [name]
    return [_UNKNOWN]


def uses(path: Path) -> Iterator[tuple[int, list[str], list[ast.expr] | None, list[str]]]:
    """Line, names, and the arguments of a call or of a pair of a function and its arguments."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute() as function, arguments, keywords):
                names = [str(k.arg) for k in keywords]
                if not any(isinstance(a, ast.Starred) for a in arguments) and "None" not in names:
                    yield node.lineno, chain(function), arguments, names
            case ast.Tuple([ast.Attribute() as function, ast.Tuple(arguments)]):
                if not any(isinstance(a, ast.Starred) for a in arguments):
                    yield node.lineno, chain(function), arguments, []
            case ast.Attribute():
                yield node.lineno, chain(node), None, []


def found(names: list[str], roots: dict[str, list[Any]], line: str) -> Any:
    """What the libraries have under these names; None where they are not about the libraries."""
    places = [i for i, name in enumerate(names[:-1]) if name in roots]
    if (
        not places
        or names[0] in ("torch", "bindings", _UNKNOWN)
        or (names[places[-1]] in ("comm", "_comm") and "nccl.py" not in line and names[-1] != "allReduce")
    ):
        return None
    missing = ""
    for root in roots[names[places[-1]]]:
        value = root
        for name in names[places[-1] + 1 :]:
            if not hasattr(value, name):
                missing = f"{line}: {'.'.join(names)} does not exist"
                break
            value = getattr(value, name)
        else:
            return value
    raise AssertionError(missing)


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


def test_every_name_and_number_of_arguments(roots):
    names, calls = set(), set()
    for path in FILES:
        for number, parts, arguments, keywords in uses(path):
            line = f"{path.name}:{number}"
            function = found(parts, roots, line)
            if function is None:
                continue
            names.add(parts[-1])
            expected = parameters(function) if arguments is not None and callable(function) else None
            if expected is None or arguments is None:
                continue
            known = [name for name, _ in expected]
            given = [*known[: len(arguments)], *keywords]
            assert len(arguments) <= len(expected), f"{line}: {parts[-1]} takes {known}, not {len(arguments)} arguments"
            assert set(keywords) <= set(known), f"{line}: {parts[-1]} takes {known}, not {keywords}"
            lacking = [name for name, has_default in expected if not has_default and name not in given]
            assert not lacking, f"{line}: {parts[-1]} needs {lacking}, too"
            calls.add(parts[-1])
    assert {"launchKernel", "compile_using_nvrtc", "commSplit", "cuPointerGetAttributes", "from_external"} <= names
    assert {
        "eventRecord",
        "cuEventQuery",
        "streamWaitEvent",
        "memcpyAsync",
        "send",
        "recv",
        "allGather",
        "allReduce",
    } <= calls


def test_the_fake_has_nothing_that_the_libraries_lack(roots):
    """Tests on the fake mean something only for what exists, and takes as many arguments.

    NCCL's module and the driver's are the real ones there, which refuse other arguments by themselves.
    """
    import fake_cuda

    cupy = roots["cupy"][0]
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
