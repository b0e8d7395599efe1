"""The wheel and the source distribution hold the licences of all that they contain; nothing is compiled for that."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import nanobind
import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from scikit_build_core import build; getattr(build, sys.argv[1])(sys.argv[2])"


def built(step: str, folder: Path) -> Path:
    """What the build backend makes in ``folder``."""
    command = [sys.executable, "-c", BUILD, step, str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
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
    assert (made / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    for name, text in licences.items():
        assert (made / "licenses" / "licenses" / name).read_text().split() == text.split(), name


def test_the_source_distribution_holds_them_and_what_the_build_needs(tmp_path: Path, licences: dict[str, str]) -> None:
    with tarfile.open(built("build_sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", *(f"licenses/{name}" for name in licences)} <= names
    assert {"CMakeLists.txt", "pyproject.toml", "README.md", "kernels/host/module.cpp", "qccl/__init__.py"} <= names
    assert not [name for name in names if name.startswith((".venv", "build/", ".ci")) or name.endswith(".so")]
