"""The layers of docs/architecture.md: what each part may import, without cycles. And ``import qccl`` loads little.

The tests read imports from the source, also those inside functions and those for the type checker.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from qccl.transports.choice import TRANSPORTS

PACKAGE = Path(__file__).parent.parent / "qccl"


def table(text: str) -> dict[str, set[str]]:
    """Lists of names, by the name before the colon. An indented line continues the line before."""
    rows = (line.partition(":") for line in text.replace("\n    ", " ").strip().splitlines())
    return {name: set(others.split()) for name, _, others in rows}


#: room -> the other rooms that it may import, by floors from the lowest; an empty line ends a floor. "_host" is the
#: compiled module. qccl/__init__.py has the public names: it stands above all rooms, and none imports it
ROOMS = """
base: _host

codecs: base _host
meeting: base _host

collectives: base codecs _host
transports: base meeting _host

observe: base collectives meeting _host

engine: base codecs collectives meeting observe transports _host

communicator: base codecs collectives engine meeting observe transports _host

jax: base codecs collectives communicator
training: base codecs collectives communicator

torch: base codecs collectives communicator engine meeting training transports _host

bench: base codecs collectives communicator engine meeting observe training transports _host
"""
FLOORS = [table(floor) for floor in ROOMS.split("\n\n")]
MAY_IMPORT = {room: others for floor in FLOORS for room, others in floor.items()}
MAY_IMPORT["qccl"] = {"base", "codecs", "communicator", "engine", "training"}

#: other packages that files (or all files of a folder) may import
PACKAGES = table("""
bench: click numpy
bench/start/launched.py: mpi4py
bench/sweep/plain.py: mpi4py torch
base/conversion.py: msgspec
bench/doctor/training.py: torch
bench/sweep/sweep.py: mpi4py
codecs: numpy
communicator/profile.py: msgspec
communicator/measuring.py: numpy
communicator/saved.py: ml_dtypes numpy
communicator/state.py: numpy
communicator/work.py: torch
engine/cuda/source.py: numpy
engine/cuda/libraries.py: cuda cupy
engine/cuda/nccl.py: torch
engine/host/memory.py: numpy
engine/host/rig.py: numpy
jax: jax numpy
meeting/meetings.py: torch
meeting/messages.py: msgspec
observe/metrics.py: prometheus_client
observe/records.py: msgspec
torch: numpy torch
training/parameters.py: numpy
training/weights.py: numpy
transports/connect.py: torch
transports/connected.py: msgspec
transports/gloo.py: torch
transports/mpi.py: mpi4py
""")

SOURCES = sorted(p.relative_to(PACKAGE) for p in PACKAGE.rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[str]:
    """The full names of all imported modules, or of what is imported from them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imports(node)


@functools.cache
def imported_by(source: Path) -> set[str]:
    return set(imports(ast.parse((PACKAGE / source).read_text(encoding="utf-8"))))


def file_of(name: str) -> Path | None:
    """The file of the package that an imported name is in; None for other packages and the compiled module."""
    top, *folders = name.split(".")
    if top != "qccl" or folders[:1] == ["_host"]:
        return None
    files = [Path("__init__.py")]
    for i in range(len(folders)):
        files += [Path(*folders[: i + 1], "__init__.py"), Path(*folders[:i], f"{folders[i]}.py")]
    return [file for file in files if file in SOURCES][-1]


def part_of(source: Path) -> str:
    name = source.parts[0].removesuffix(".py")
    return "qccl" if name == "__init__" else name


def part_named(module: str) -> str:
    """The part that ``qccl.x.y`` belongs to; a name of the public interface belongs to the package itself."""
    name = module.split(".")[1] if "." in module else ""
    return name if name in MAY_IMPORT or name == "_host" else "qccl"


def test_imports_go_down() -> None:
    faults = []
    for source in SOURCES:
        part = part_of(source)
        if part not in MAY_IMPORT:
            faults.append(f"qccl/{source} is a new part: say in MAY_IMPORT and docs/architecture.md what it may use")
            continue
        used = {part_named(name) for name in imported_by(source) if name.split(".")[0] == "qccl"}
        if above := used - {part} - MAY_IMPORT[part]:
            faults.append(f"qccl/{source} imports {sorted(above)}, which is not below it")
    assert not faults, "\n".join(faults)


def test_packages() -> None:
    faults = []
    for source in SOURCES:
        used = {name.split(".")[0] for name in imported_by(source)} - sys.stdlib_module_names - {"qccl"}
        if other := used - PACKAGES.get(source.as_posix(), set()) - PACKAGES.get(source.parts[0], set()):
            faults.append(f"qccl/{source} imports {sorted(other)}; PACKAGES says who may")
    assert not faults, "\n".join(faults)


def test_one_list_has_the_names_of_the_transports() -> None:
    """A second list would be a second place that decides which transport is used."""
    found = []
    for source in SOURCES:
        for node in ast.walk(ast.parse((PACKAGE / source).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Tuple | ast.List | ast.Set):
                texts = {each.value for each in node.elts if isinstance(each, ast.Constant)}
                found += [source] if len(texts & {*TRANSPORTS}) > 1 else []
    assert found == [Path("transports/choice.py")]


def test_the_benchmark_uses_no_private_name() -> None:
    faults = []
    for source in SOURCES:
        if part_of(source) == "bench":
            names = {name.rpartition(".")[2] for name in imported_by(source)}
            for node in ast.walk(ast.parse((PACKAGE / source).read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "os"):
                    names.add(node.attr)
            faults += [f"qccl/{source} uses {n}" for n in names if n.startswith("_") and not n.startswith("__")]
    assert not faults, "\n".join(faults)


def test_a_name_of_a_class_stands_once() -> None:
    found: dict[str, list[str]] = {}
    for source in SOURCES:
        for node in ast.walk(ast.parse((PACKAGE / source).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(source.as_posix())
    assert not {name: files for name, files in found.items() if len(files) > 1}


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    """A docstring that begins with "What" or "Of" leaves open what kind of thing is meant."""
    riddles = ("What", "Of", "That of", "Those of", "As")
    found = []
    for source in SOURCES:
        for node in ast.walk(ast.parse((PACKAGE / source).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node) or ""
                found += [f"qccl/{source}: {text[:60]}"] if text.startswith(tuple(f"{r} " for r in riddles)) else []
    assert not found, "\n".join(found)


def test_rooms_import_rooms_of_lower_floors() -> None:
    below: set[str] = {"_host"}
    for floor in FLOORS:
        for room, others in floor.items():
            assert others <= below, f"{room} may import {sorted(others - below)}, which is not on a lower floor"
        below |= {*floor}
    assert len(below) - 1 <= 12


def test_nothing_imports_itself_through_others() -> None:
    TopologicalSorter({f: {file_of(name) for name in imported_by(f)} - {None, f} for f in SOURCES}).prepare()


def loaded(module: str) -> set[str]:
    """The modules that the import of this one loads in a new interpreter."""
    program = f"import sys; before = set(sys.modules); import {module}; print(*set(sys.modules) - before)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


@pytest.mark.processes
@pytest.mark.parametrize(
    "module",
    ["qccl", "qccl.collectives", "qccl.collectives.schedule"]
    + [f"qccl.collectives.analysis.{name}" for name in ("verify", "simulate")],
)
def test_import_loads_nothing_large(module: str) -> None:
    """Only the standard library, and no engine or transport."""
    found = loaded(module)
    assert {name.split(".")[0] for name in found} - sys.stdlib_module_names <= {"qccl"}
    assert module != "qccl" or "ctypes" not in found
    assert not {name for name in found if name.startswith(("qccl.engine", "qccl.transports", "qccl._host"))}


@pytest.mark.processes
def test_calls_need_numpy_alone() -> None:
    """As where scripts/gpu-check runs: other packages are imported where they are used."""
    found = loaded("qccl.communicator.communicator")
    assert {name.split(".")[0] for name in found} - sys.stdlib_module_names <= {"numpy", "qccl"}
