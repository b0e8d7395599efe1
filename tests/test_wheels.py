"""Wheels install and run where there is no compiler: that of this checkout, and those that scripts/wheels has made.

    scripts/wheels && scripts/test -m every_wheel tests/test_wheels.py

That takes some minutes for each system, most of them for its download, and for aarch64 longer, because qemu runs all.
The systems are kept in build/wheels/systems.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import clean_systems
import numpy
import pytest


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
