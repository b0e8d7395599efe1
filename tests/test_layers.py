"""The layers of docs/architecture.md: what each part may import, without cycles. And ``import qccl`` loads little.

The tests read imports from the source, also those inside functions and those for the type checker.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "qccl"

#: part -> the other parts it may import; "" is qccl/__init__.py, which finds the public names when they are asked for
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "intervals": set(),
    "lifetime": set(),
    "scalars": set(),
    "trace": set(),
    "dtypes": {"errors", "scalars"},
    "codecs": {"_host", "dtypes", "errors", "scalars"},
    "chunks": {"codecs", "dtypes", "errors"},
    "schedule": {"codecs", "dtypes", "errors", "intervals"},
    "analysis": {"codecs", "dtypes", "intervals", "schedule", "trace"},
    "collectives": {"arguments", "arrays", "chunks", "codecs", "dtypes", "errors", "schedule"},
    "costs": {"_host", "codecs", "collectives", "dtypes", "errors", "files", "scalars"},
    "guard": set(),
    "launchers": {"errors"},
    "records": {"engine", "errors", "files"},
    "statistics": {"engine"},
    "ranges": {"errors"},
    "metrics": {"engine", "errors", "lifetime", "statistics", "transports"},
    "saved": {"errors", "files"},
    "tensors": {"errors"},
    "arrays": {"_host", "dtypes", "errors", "scalars", "tensors"},
    "transports": {"_host", "dtypes", "errors", "launchers", "lifetime"},
    "meetings": {"errors", "launchers", "transports"},
    "relay": {"", "errors", "transports"},
    "engine": {"_host", "arrays", "chunks", "errors", "intervals", "schedule", "trace"},
    "host": {
        *("_host", "arrays", "chunks", "codecs", "dtypes", "engine", "errors", "guard", "lifetime", "scalars"),
        *("schedule", "tensors", "trace", "transports"),
    },
    "cuda": {
        *("_host", "arrays", "chunks", "codecs", "dtypes", "engine", "errors", "files", "lifetime", "schedule"),
        *("tensors", "trace", "transports"),
    },
    "arguments": {"codecs", "errors", "scalars"},
    "options": {"arguments", "dtypes", "trace"},
    "measuring": {
        *("arrays", "codecs", "collectives", "costs", "dtypes", "engine", "errors", "programs", "schedule", "session"),
    },
    "choosing": {"collectives", "costs", "errors", "measuring", "session"},
    "plan": {
        *(
            "arguments",
            "arrays",
            "collectives",
            "costs",
            "engine",
            "errors",
            "guard",
            "programs",
            "schedule",
            "session",
        ),
        *("state", "tensors", "trace", "work"),
    },
    "programs": {"_host", "collectives", "engine", "schedule", "state"},
    "state": {"codecs", "dtypes", "engine", "errors", "scalars"},
    "session": {
        *("arrays", "collectives", "engine", "errors", "guard", "lifetime", "programs", "records", "state"),
        *("metrics", "ranges", "statistics"),
    },
    "work": {"arguments", "engine", "errors", "guard", "session"},
    "methods": {"arrays", "collectives", "dtypes", "errors", "options"},
    "calls": {
        *("arguments", "arrays", "choosing", "engine", "errors", "guard", "methods", "options"),
        *("programs", "schedule", "session", "state", "tensors", "work"),
    },
    "communicator": {
        *("arguments", "host", "cuda", "calls", "choosing", "costs", "dtypes", "engine", "errors"),
        *("plan", "guard", "collectives", "meetings", "metrics", "programs", "ranges", "records", "session", "state"),
        *("statistics", "transports"),
    },
    "pointers": {
        *("arguments", "arrays", "calls", "collectives", "communicator", "dtypes", "errors", "methods", "options"),
        "work",
    },
    "weights": {"errors"},
    "decentralized": {"arguments", "codecs", "communicator", "errors", "scalars", "weights"},
    "parameters": {"arrays", "errors", "scalars"},
    "tiles": set(),
    "dct": {"parameters"},
    "outer_step": {"errors", "parameters", "scalars", "tiles", "work"},
    "diloco": {
        *("arguments", "arrays", "codecs", "collectives", "communicator", "errors", "parameters", "scalars", "state"),
        *("outer_step", "tiles"),
    },
    "decoupled_momentum": {
        *("arguments", "codecs", "communicator", "dct", "errors", "parameters", "scalars", "tiles", "work"),
    },
    "jax": {"arguments", "codecs", "communicator", "dtypes", "errors", "launch", "lifetime", "state"},
    "launch": {"arguments", "cuda", "communicator", "costs", "errors", "launchers", "meetings", "transports"},
    "ranks": {"arguments", "communicator", "errors", "transports"},
    "torch": {
        *("_host", "arguments", "codecs", "collectives", "communicator", "costs", "cuda", "dtypes", "errors"),
        *("meetings", "scalars", "schedule", "state", "trace", "transports", "work"),
    },
    "": {
        "codecs",
        "communicator",
        "cuda",
        "decentralized",
        "decoupled_momentum",
        "diloco",
        "errors",
        "launch",
        "plan",
        "pointers",
        "ranks",
        "saved",
        "work",
    },
}
#: what a program that measures calls may use: not the engines, nor what a call consists of
MAY_IMPORT["bench"] = {
    *(
        "",
        "_host",
        "analysis",
        "chunks",
        "codecs",
        "collectives",
        "communicator",
        "costs",
        "cuda",
        "dtypes",
        "errors",
        "files",
    ),
    *("launch", "launchers", "meetings", "metrics", "plan", "records", "scalars", "schedule", "statistics", "trace"),
    "transports",
}

#: other packages that files (or all files of a folder) may import
PACKAGES: dict[str, set[str]] = {
    "bench": {"click", "numpy"},
    "bench/launched.py": {"mpi4py"},
    "bench/plain.py": {"mpi4py", "torch"},
    "bench/plot.py": {"matplotlib"},
    "bench/profile.py": {"torch"},
    "bench/sweep.py": {"mpi4py"},
    "codecs": {"numpy"},
    "costs/speed.py": {"numpy"},
    "cuda/source.py": {"numpy"},
    "cuda/libraries.py": {"cuda", "cupy"},
    "dct.py": {"numpy"},
    "decoupled_momentum.py": {"numpy"},
    "host/memory.py": {"numpy"},
    "host/rig.py": {"numpy"},
    "jax": {"jax", "numpy"},
    "measuring.py": {"numpy"},
    "meetings.py": {"torch"},
    "parameters.py": {"numpy"},
    "relay": {"click"},
    "saved.py": {"ml_dtypes", "numpy"},
    "state.py": {"numpy"},
    "transports/mpi.py": {"mpi4py"},
    "cuda/nccl.py": {"torch"},
    "weights.py": {"numpy"},
    "torch": {"numpy", "torch"},
    "transports/torch.py": {"torch"},
    "work.py": {"torch"},
}

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
    return "" if name == "__init__" else name


def part_named(module: str) -> str:
    """The part that ``qccl.x.y`` belongs to; a name of the public interface belongs to the package itself."""
    name = module.split(".")[1] if "." in module else ""
    return name if name in MAY_IMPORT or name == "_host" else ""


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_imports_go_down(source: Path) -> None:
    part = part_of(source)
    assert part in MAY_IMPORT, (
        f"qccl/{source} is a new part: say in MAY_IMPORT and docs/architecture.md what it may use"
    )
    used = {part_named(name) for name in imported_by(source) if name.split(".")[0] == "qccl"} - {part}
    assert used <= MAY_IMPORT[part], f"qccl/{source} imports {sorted(used - MAY_IMPORT[part])}, which is not below it"


def test_the_documented_transport_imports_only_what_transports_may() -> None:
    page = (PACKAGE.parent / "docs" / "adding-a-transport.md").read_text(encoding="utf-8")
    used = set(imports(ast.parse(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[0])))
    assert {part_named(name) for name in used if name.startswith("qccl")} <= MAY_IMPORT["transports"] | {"transports"}
    assert {name.split(".")[0] for name in used} - {"qccl"} <= sys.stdlib_module_names


def test_no_part_imports_itself_through_others() -> None:
    TopologicalSorter(MAY_IMPORT).prepare()  # raises CycleError with the cycle


def test_no_module_imports_itself_through_others() -> None:
    graph = {file: {file_of(name) for name in imported_by(file)} - {None, file} for file in SOURCES}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("source", [source for source in SOURCES if part_of(source) == "bench"], ids=str)
def test_the_benchmark_uses_no_private_name(source: Path) -> None:
    tree = ast.parse((PACKAGE / source).read_text(encoding="utf-8"))
    names = {name.rpartition(".")[2] for name in imports(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "os"):
            names.add(node.attr)
    assert not [name for name in names if name.startswith("_") and not name.startswith("__")]


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_packages(source: Path) -> None:
    used = {name.split(".")[0] for name in imported_by(source)} - sys.stdlib_module_names - {"qccl"}
    allowed = PACKAGES.get(source.as_posix(), set()) | PACKAGES.get(source.parts[0], set())
    assert used <= allowed, f"qccl/{source} imports {sorted(used - allowed)}; PACKAGES says who may"


def test_the_table_of_the_documentation_has_every_part_above_those_that_it_uses() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.search(r"\| part \| .*?\n((?:\|.*\n)+)", page)
    assert rows
    parts = [
        name.removesuffix(".py").removesuffix("/")
        for row in rows[1].splitlines()[1:]
        for name in re.findall(r"`([\w./]+)`", row.split("|")[1])
    ]
    assert sorted(parts) == sorted(MAY_IMPORT.keys() - {""})
    for i, part in enumerate(parts):
        above = MAY_IMPORT[part] & set(parts[:i])
        assert not above, f"{part} may use {sorted(above)}, which docs/architecture.md has above it"


@pytest.mark.parametrize(
    "module", ["qccl", "qccl.schedule", "qccl.collectives", "qccl.analysis.verify", "qccl.analysis.simulate"]
)
def test_import_loads_nothing_large(module: str) -> None:
    """Only the standard library, and no engine or transport."""
    program = f"import sys; before = set(sys.modules); import {module}; print(*set(sys.modules) - before)"
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(found.stdout.split())
    assert {name.split(".")[0] for name in loaded} - sys.stdlib_module_names <= {"qccl"}
    assert not {name for name in loaded if name.startswith(("qccl.host", "qccl.cuda", "qccl.transports", "qccl._host"))}
