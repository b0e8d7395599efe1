"""Wheels hold the licences of all that they contain, and install and run where there is no compiler.

    scripts/wheels && scripts/test -m every_wheel tests/test_wheels.py

That takes some minutes for each system, most of them for its download, and for aarch64 longer, because qemu runs all.
The systems are kept in build/wheels/systems.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import clean_systems
import nanobind
import numpy
import pytest

pytestmark = pytest.mark.processes

BUILD = "import sys; from scikit_build_core import build; getattr(build, sys.argv[1])(sys.argv[2])"


def built(step: str, folder: Path) -> Path:
    """What the build backend makes in ``folder``."""
    command = [sys.executable, "-c", BUILD, step, str(folder)]
    subprocess.run(command, cwd=clean_systems.ROOT, check=True, capture_output=True, timeout=60)
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def licences() -> dict[str, str]:
    """The licences of what the extension is linked with, by the names of their files, as the libraries have them."""
    (path,) = (each for each in importlib.metadata.files("nanobind") or () if each.name == "LICENSE")
    (header,) = (Path(nanobind.__file__).parent / "ext").glob("robin_map/**/robin_map.h")
    comment = header.read_text(encoding="utf-8").partition("*/")[0].removeprefix("/**")
    return {
        "nanobind.txt": path.read_text(encoding="utf-8"),
        "robin-map.txt": re.sub(r"^ \* ?", "", comment, flags=re.M),
    }


def test_the_wheel_holds_the_licences_of_what_is_linked_in(tmp_path: Path, licences: dict[str, str]) -> None:
    made = built("prepare_metadata_for_build_wheel", tmp_path)
    assert (
        "\nLicense-Expression: Apache-2.0 AND Apache-2.0 WITH LLVM-exception AND BSD-3-Clause AND MIT\n"
        in (made / "METADATA").read_text()
    )
    assert (made / "licenses" / "LICENSE").read_bytes() == (clean_systems.ROOT / "LICENSE").read_bytes()
    for name, text in licences.items():
        assert (made / "licenses" / "licenses" / name).read_text().split() == text.split(), name


def test_the_source_distribution_holds_them_and_what_the_build_needs(tmp_path: Path, licences: dict[str, str]) -> None:
    with tarfile.open(built("build_sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", *(f"licenses/{name}" for name in licences)} <= names
    assert {"CMakeLists.txt", "pyproject.toml", "README.md", "kernels/host/module.cpp", "qccl/__init__.py"} <= names
    assert not [name for name in names if name.startswith((".venv", "build/", ".ci")) or name.endswith(".so")]


@pytest.mark.slow
def test_a_wheel_of_this_checkout_runs_the_main_job_without_a_compiler(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    # in the folder where scripts/install has compiled, so nothing is compiled again
    options = ["--no-build-isolation", "--no-deps", "--config-settings=build-dir=build/editable-{wheel_tag}"]
    subprocess.run([*pip, "wheel", *options, f"--wheel-dir={tmp_path}", clean_systems.ROOT], check=True, timeout=100)
    (wheel,) = tmp_path.glob("qccl-*.whl")
    environment = tmp_path / "venv"
    venv.create(environment, symlinks=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    python = environment / "bin/python"
    subprocess.run([*pip, "--python", python, "install", "--no-deps", wheel], check=True, timeout=100)
    # numpy and UCX are this environment's, whose qccl of the checkout is not found: its own .pth file is not read
    (packages / "others.pth").write_text(str(Path(numpy.__file__).parent.parent))

    def run(*command: str) -> str:
        variables = {"PATH": str(environment / "bin"), "HOME": str(tmp_path), "LANG": "C.UTF-8"}
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    where = "import qccl, qccl._host as h; print(qccl.__file__, h.__file__, sep='\\n')"
    assert all(Path(line).is_relative_to(packages) for line in run(str(python), "-c", where).splitlines())
    (tmp_path / "qccl").mkdir()  # as in a checkout: the ranks must not import what is in the current folder
    (tmp_path / "qccl/__init__.py").write_text("raise ImportError('this one is not built')")
    clean_systems.verified(run(str(environment / "bin/qccl-bench"), *clean_systems.JOB.split()[1:]))


@pytest.mark.every_wheel
@pytest.mark.parametrize("kind", clean_systems.KINDS, ids=str)
def test_the_wheel_runs_the_main_job_and_has_the_bytes_of_every_other_build(
    kind: clean_systems.Kind, tmp_path: Path
) -> None:
    if missing := kind.why_not():
        pytest.skip(missing)
    system = clean_systems.System(kind, tmp_path)
    assert system.main_job()
    assert system.golden()
