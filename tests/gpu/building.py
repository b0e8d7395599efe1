"""Builds qccl's extension for scripts/gpu-check, where the Python at hand has none."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

__all__ = ["SECONDS", "build", "missing_tools"]

#: how long the compiler may take
SECONDS = 100.0


def build(root: Path) -> str:
    """Build the extension into root/qccl, unless another one is there. Returns why that is not possible, or nothing."""
    folder, before = root / "build" / "gpu-check", list((root / "qccl").glob("_host*.so"))
    if not before and _is_built(root):  # one that an earlier build left there may be of other sources
        return ""
    if lacking := list(missing_tools()):
        return (
            f"qccl's extension must be built, and there is no {', no '.join(lacking)}: pip install nanobind cmake "
            f"ninja, apt-get install g++ python3-dev, or carry a built extension (docs/cuda.md)"
        )
    print(f"building the extension for Python {sys.version.split()[0]}", file=sys.stderr, flush=True)
    # Bytes do not depend on the optimisation, and -O1 compiles in half the time.
    options = ["-DQCCL_LOOP_OPTIMIZATION=-O1", f"-DPython_EXECUTABLE={sys.executable}"]
    cmake = shutil.which("cmake", path=_path()) or "cmake"
    environment = os.environ | {"PATH": _path()}
    for command in (
        [cmake, "-S", str(root), "-B", str(folder), *options],
        [cmake, "--build", str(folder), "--parallel"],
    ):
        try:
            done = subprocess.run(command, stdout=sys.stderr, env=environment, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return f"the extension was not built within {SECONDS:.0f} s; carry a built one (docs/cuda.md)"
        if done.returncode:
            return (
                f"the extension cannot be built: {' '.join(command[:2])} ended with status {done.returncode}; see above"
            )
    for each in folder.glob("_host*.so"):
        shutil.copy(each, root / "qccl")
    return ""


def missing_tools() -> Iterator[str]:
    """What a build needs and this machine lacks."""
    if importlib.util.find_spec("nanobind") is None:
        yield "nanobind"
    if shutil.which("cmake", path=_path()) is None:
        yield "CMake"
    if not any(shutil.which(name, path=_path()) for name in ("ninja", "make")):
        yield "ninja or make"
    if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++") if name):
        yield "C++ compiler"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        yield "header of Python (Python.h)"


def _is_built(root: Path) -> bool:
    command = [sys.executable, "-c", "import qccl._host"]
    return subprocess.run(command, cwd=root, capture_output=True, timeout=60).returncode == 0


def _path() -> str:
    """Where programs are, also those of packages that pip has installed."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
