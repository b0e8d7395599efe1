"""The wheels of dist/ in Debian systems without a compiler, for tests/test_wheels.py; it needs root.

In each system pip installs the wheel that it chooses for the system's Python, without a network, and the main job
runs: an all-reduce of 4 ranks over UCX, whose results are verified. Then the golden bytes are tested.
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import debian

ROOT = Path(__file__).resolve().parent.parent.parent
KEPT = ROOT / "build/wheels/systems"
#: what the system may not have
COMPILERS = "cc gcc g++ c++ clang clang++ cmake"
JOB = "qccl-bench allreduce --ranks 4 -b 64K -e 1M -f 4 -n 3 --codec minmax8,minmax4,none"
_JOB_ROWS = 3 * 3  # sizes, codecs
_GLIBC = ("2_28", "2_27", "2_26", "2_24", "2_17")


@dataclasses.dataclass(frozen=True)
class Kind:
    """A system: a suite of Debian, an architecture, its Python, or that of this machine with the name ``python``."""

    suite: str
    architecture: str
    python: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.suite, self.architecture, self.python)))

    @property
    def prefix(self) -> str:
        """The folder of this machine's Python; empty if the system's own is meant."""
        if not self.python:
            return ""
        command = [self.python, "-c", "import sys; print(sys.base_prefix)"]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()

    def why_not(self) -> str:
        """What this machine lacks for the system; empty if nothing."""
        if self.python and shutil.which(self.python) is None:
            return f"needs {self.python}"
        return debian.why_not(self.architecture)


#: Python 3.11 to 3.14. No Debian has 3.12, so it is that of this machine, for its own architecture. It may not lie in
#: /usr, which the system has its own files in.
KINDS = (
    Kind("bookworm", "x86_64"),
    Kind("bookworm", "x86_64", "python3.12"),
    Kind("trixie", "x86_64"),
    Kind("sid", "x86_64"),
    Kind("bookworm", "aarch64"),
    Kind("trixie", "aarch64"),
    Kind("sid", "aarch64"),
)


def verified(output: str) -> int:
    """The rows that the main job has printed, of which each was verified: a wrong result would have ended it."""
    rows = [line for line in output.splitlines() if line and not line.startswith("#")]
    assert len(rows) == _JOB_ROWS, output
    return len(rows)


class System:
    """A system whose /mnt is ``folder``, and in /mnt/venv the wheel, UCX and pytest."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind, self._folder = kind, folder
        self._root = debian.unpacked(kind.suite, kind.architecture, KEPT)
        self._prefix = kind.prefix
        self.run(f"! command -v {COMPILERS}")
        python = f"{self._prefix}/bin/python3" if self._prefix else "python3"
        self.version = self.run(f"{python} -c 'import platform; print(platform.python_version())'").strip()
        self._get_packages()
        self.run(f"{python} -m venv /mnt/venv")
        self.run("pip install --quiet --no-index --find-links /mnt/packages 'qccl[ucx]' pytest")

    def run(self, script: str) -> str:
        """What a script of the shell writes, which must succeed."""
        command = ("sh", "-ec", script)
        return debian.run(self._root, self.kind.architecture, self._folder, *command, shared=self._prefix, limit=1800)

    def _get_packages(self) -> None:
        """The wheels of this checkout, and of all that they need, as pip in the system would choose them."""
        wheels = [*(ROOT / "dist").glob(f"qccl-*{self.kind.architecture}.whl")]
        assert wheels, f"dist/ has no wheel for {self.kind.architecture}: run scripts/wheels"
        packages = self._folder / "packages"
        packages.mkdir()
        for wheel in wheels:
            shutil.copy(wheel, packages)
        tags = [f"--platform=manylinux_{glibc}_{self.kind.architecture}" for glibc in _GLIBC]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", *tags]
        command += [f"--python-version={self.version}", f"--dest={packages}", f"--find-links={packages}"]
        subprocess.run([*command, "qccl[ucx]", "pytest"], check=True, timeout=600)

    def main_job(self) -> int:
        """The rows that the main job prints, of which each was verified; the extension comes from the wheel."""
        rows = verified(self.run(JOB))
        assert self.run("python -c 'import qccl._host as h; print(h.__file__)'").startswith("/mnt/venv/")
        return rows

    def golden(self) -> int:
        """The tests that have passed: the golden bytes, and all codecs against their oracles. None is skipped."""
        shutil.copytree(ROOT / "tests", self._folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", self._folder)
        output = self.run("cd /mnt && pytest -q -p no:cacheprovider tests/codecs/test_golden.py")
        last = output.splitlines()[-1].split()  # "57 passed in 3.90s"
        assert last[1:3] == ["passed", "in"], output
        return int(last[0])
