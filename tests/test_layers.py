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


#: part -> the other parts it may import; "qccl" is qccl/__init__.py, which finds the public names when they are asked
#: for; bench is a program that measures calls: it uses neither the engines, nor what a call consists of
MAY_IMPORT = table("""
errors:
deadline:
files: errors
removed: errors
end: errors lifetime
call_numbers:
intervals:
lifetime:
scalars:
threads: deadline errors
machine_name:
trace: files machine_name
dtypes: errors scalars
codecs: _host dtypes errors removed scalars
chunks: codecs dtypes errors
schedule: codecs dtypes errors intervals
analysis: codecs dtypes intervals schedule trace
collectives: arguments arrays chunks codecs dtypes errors schedule
costs: codecs collectives dtypes errors files
guard:
ancestors:
launchers: ancestors errors scalars
records: engine errors files machine_name scalars
statistics: engine
ranges: errors
metrics: errors lifetime statistics transports
saved: errors files
tensors: errors
dynamo:
arrays: _host dtypes errors scalars tensors
transports: _host dtypes deadline errors files launchers lifetime machine_name threads
meetings: ancestors deadline errors launchers transports
<<<<<<< HEAD
connect: meetings transports
engine: _host arrays chunks errors intervals schedule threads trace
host: _host arrays chunks codecs dtypes deadline engine errors guard lifetime scalars schedule tensors trace transports
cuda: _host arrays chunks codecs dtypes deadline engine errors files lifetime schedule tensors threads trace transports
=======
engine: _host arrays call_numbers chunks end errors intervals schedule threads trace
host: _host arrays call_numbers chunks codecs dtypes deadline end engine errors guard lifetime scalars schedule
    tensors trace transports
cuda: _host arrays call_numbers chunks codecs dtypes deadline end engine errors files lifetime schedule
    tensors threads trace transports
>>>>>>> 09fdffc (wip)
arguments: codecs errors scalars
options: arguments collectives dtypes errors removed trace
measuring: arrays codecs collectives costs dtypes engine errors programs schedule session
choosing: collectives costs errors measuring session
plan: arguments arrays collectives costs dynamo engine errors guard programs schedule session state tensors trace
    work
programs: _host collectives engine schedule state
owners: errors
state: codecs dtypes engine errors owners scalars
session: arrays collectives engine errors guard lifetime metrics programs ranges records state statistics
work: arguments dynamo engine errors guard session
calls: arguments arrays choosing collectives costs dtypes dynamo engine errors guard options programs schedule session
    state tensors work
communicator: arguments calls choosing collectives connect costs cuda dtypes dynamo engine errors guard host meetings
    deadline metrics plan ranges records removed session statistics transports
pointers: arguments arrays calls collectives communicator dtypes errors options work
weights: errors
decentralized: arguments codecs communicator dynamo errors scalars weights
parameters: arrays errors scalars
outer_step: errors parameters scalars work
diloco: arguments arrays codecs collectives communicator dynamo errors outer_step owners parameters removed scalars
jax: arguments codecs communicator dtypes errors launch lifetime owners state
launch: arguments communicator connect costs cuda errors launchers machine_name meetings removed transports
ranks: arguments communicator deadline errors threads transports
torch: _host arguments codecs collectives communicator connect costs cuda dtypes dynamo errors meetings owners removed
    scalars schedule state trace transports work
qccl: codecs communicator cuda decentralized diloco errors launch plan pointers ranks removed saved
    work
bench: qccl _host analysis chunks codecs collectives communicator costs cuda deadline dtypes errors files launch
    launchers machine_name metrics plan records removed scalars schedule statistics trace transports
""")

#: other packages that files (or all files of a folder) may import
PACKAGES = table("""
bench: click numpy
bench/launched.py: mpi4py
bench/plain.py: mpi4py torch
bench/sweep.py: mpi4py
codecs: numpy
costs/group.py: msgspec
cuda/source.py: numpy
cuda/libraries.py: cuda cupy
host/memory.py: numpy
host/rig.py: numpy
jax: jax numpy
measuring.py: numpy
metrics.py: prometheus_client
connect.py: torch
meetings.py: torch
parameters.py: numpy
records.py: msgspec
saved.py: ml_dtypes numpy
state.py: numpy
transports/connected.py: msgspec
transports/messages.py: msgspec
transports/mpi.py: mpi4py
cuda/nccl.py: torch
weights.py: numpy
torch: numpy torch
transports/torch.py: torch
work.py: torch
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


def test_nothing_imports_itself_through_others() -> None:
    TopologicalSorter(MAY_IMPORT).prepare()  # raises CycleError with the cycle
    TopologicalSorter({f: {file_of(name) for name in imported_by(f)} - {None, f} for f in SOURCES}).prepare()


def loaded(module: str) -> set[str]:
    """The modules that the import of this one loads in a new interpreter."""
    program = f"import sys; before = set(sys.modules); import {module}; print(*set(sys.modules) - before)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


@pytest.mark.processes
@pytest.mark.parametrize(
    "module", ["qccl", "qccl.schedule", "qccl.collectives", "qccl.analysis.verify", "qccl.analysis.simulate"]
)
def test_import_loads_nothing_large(module: str) -> None:
    """Only the standard library, and no engine or transport."""
    found = loaded(module)
    assert {name.split(".")[0] for name in found} - sys.stdlib_module_names <= {"qccl"}
    assert module != "qccl" or "ctypes" not in found
    assert not {name for name in found if name.startswith(("qccl.host", "qccl.cuda", "qccl.transports", "qccl._host"))}


@pytest.mark.processes
def test_calls_need_numpy_alone() -> None:
    """As where scripts/gpu-check runs: other packages are imported where they are used."""
    assert {name.split(".")[0] for name in loaded("qccl.communicator")} - sys.stdlib_module_names <= {"numpy", "qccl"}
