"""The wheels that scripts/wheels has put into dist/ install and run where there is no compiler.

    scripts/wheels && scripts/test -m every_wheel tests/test_wheels.py

It takes some minutes for each system, most of them for its download, and for aarch64 ten, because qemu runs all. The
systems are kept in build/wheels/systems.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import debian
import pytest

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "build/wheels/systems"
#: Debian 12, 13, and the coming one: Python 3.11, 3.13, 3.14
SYSTEMS = [("bookworm", "x86_64"), ("trixie", "x86_64"), ("sid", "x86_64"), ("bookworm", "aarch64")]
NO_COMPILER = "! command -v cc gcc g++ c++ clang clang++ cmake"
JOB = "qccl-bench allreduce --ranks 4 -b 64K -e 1M -f 4 -n 3 --codec minmax8,minmax4,none"

pytestmark = pytest.mark.every_wheel


class System:
    """A system in which a wheel is installed, with UCX and pytest, in the environment /mnt/venv."""

    def __init__(self, suite: str, architecture: str, folder: Path) -> None:
        self._architecture, self.folder = architecture, folder
        self._root = debian.unpacked(suite, architecture, KEPT)
        self.run(NO_COMPILER)
        self.python = self.run("python3 -c 'import sys; print(\"%d.%d\" % sys.version_info[:2])'").strip()
        self._get_packages()
        self.run(
            "python3 -m venv /mnt/venv && pip install --quiet --no-index --find-links /mnt/packages 'qccl[ucx]' pytest"
        )

    def run(self, script: str) -> str:
        """What a script of the shell writes, which must succeed."""
        return debian.run(self._root, self._architecture, self.folder, "sh", "-ec", script, limit=900)

    def _get_packages(self) -> None:
        """The wheels of this checkout, and of all that they need, as pip in the system would choose them."""
        wheels = [*(ROOT / "dist").glob(f"qccl-*{self._architecture}.whl")]
        assert wheels, f"dist/ has no wheel for {self._architecture}: run scripts/wheels"
        packages = self.folder / "packages"
        packages.mkdir()
        for wheel in wheels:
            shutil.copy(wheel, packages)
        tags = [
            f"--platform=manylinux_{glibc}_{self._architecture}" for glibc in ("2_28", "2_27", "2_26", "2_24", "2_17")
        ]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", *tags]
        command += [f"--python-version={self.python}", f"--dest={packages}", f"--find-links={packages}"]
        subprocess.run([*command, "qccl[ucx]", "pytest"], check=True, timeout=600)


@pytest.fixture(scope="module", params=SYSTEMS, ids="-".join)
def system(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> System:
    suite, architecture = request.param
    if missing := debian.why_not(architecture):
        pytest.skip(missing)
    return System(suite, architecture, tmp_path_factory.mktemp(suite))


def test_the_main_job_runs(system: System) -> None:
    output = system.run(JOB)
    rows = [line.split() for line in output.splitlines() if line and not line.startswith("#")]
    assert len(rows) == 3 * 3, output  # sizes, codecs; a wrong result would have ended it
    assert system.run("python -c 'import qccl, qccl._host as h; print(h.__file__)'").startswith("/mnt/venv/")


def test_the_kernels_have_the_bytes_of_every_other_build(system: System) -> None:
    """The golden bytes, and all codecs against their oracles."""
    for name in ("tests", "pyproject.toml"):
        source, copy = ROOT / name, system.folder / name
        if not copy.exists():
            shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
    output = system.run("cd /mnt && pytest -q -p no:cacheprovider tests/codecs/test_codec_golden.py")
    assert " passed" in output
    assert "skipped" not in output
