"""Mutation testing: do the tests notice one changed line?

``scripts/mutants [--seed N] [--number N] [--jobs N]`` draws mutants of qccl's Python files. A mutant is one changed
line in the body of a function; imports, raised errors, formatted texts and zip's ``strict`` are left alone.

Each mutant runs the tests that cover its line, those of short files first, until one fails. A run of the quick set and
of tests/torch has recorded which tests cover a line. The tests run in clones of the last commit in ``build/mutants``.
The results file in ``docs/results`` lists every mutant. To a survivor that is harmless add a field ``reason``, which
later runs keep.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from queue import Queue
from typing import Any

import patience
import runs

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/mutants"
SUBJECTS = (
    *("qccl/collectives", "qccl/codecs", "qccl/torch"),
    *("qccl/communicator/session.py", "qccl/communicator/state.py", "qccl/communicator/owners.py"),
    *("qccl/engine/cuda/program.py", "qccl/engine/cuda/run.py", "qccl/engine/cuda/source.py"),
    *("qccl/meeting/membership.py", "qccl/meeting/regroup.py"),
)
QUICK = "quick or not (gpu or lab or mpi or packages or processes or slow)"
#: seconds of tests that a mutant runs at most, as they took when their lines were recorded
_MOST_SECONDS = 200
#: a mutant has this many times the seconds of its tests, and these besides, on an idle machine
_PATIENCE, _START_SECONDS = 4, 60

# -- mutants ---------------------------------------------------------------------------------------------------------

_COMPARISONS = {
    **{ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!=")},
    **{ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is")},
    **{ast.In: ("in", "not in"), ast.NotIn: ("not in", "in")},
}
_ARITHMETIC = {
    **{ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "//"), ast.FloorDiv: ("//", "*")},
    **{ast.Div: ("/", "*"), ast.Mod: ("%", "//"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<")},
    **{ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.Pow: ("**", "*")},
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(unsafe_hash=True)
class Mutant:
    """A changed line, and what became of it.

    Attributes:
        statement: the line on which the statement begins.
        outcome: "killed" by a test that failed, "timeout", "survived", or "uncovered": no test runs the line.
        by: the last words of pytest, which name the test that failed.
        tests: how many ran at most, by file.
        reason: a person's, why a survivor is harmless.
    """

    file: str
    line: int
    original: str
    mutated: str
    statement: int
    outcome: str = field(default="", hash=False)
    by: str = field(default="", hash=False)
    tests: dict[str, int] = field(default_factory=dict, hash=False)
    reason: str = field(default="", hash=False)


#: text in place of that between two places, each a line and a column in bytes
_Edit = tuple[tuple[int, int], tuple[int, int], str]


def _begin(node: Any) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: Any) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset


def mutants(file: str, source: str) -> Iterator[Mutant]:
    """All mutants of a file, some of which do not compile to something else."""
    lines = source.encode().split(b"\n")
    for statement in _statements(ast.parse(source)):
        for (row, left), (last, right), text in _edits(statement, lines):
            if row == last:
                changed = lines[row - 1][:left] + text.encode() + lines[row - 1][right:]
                yield Mutant(file, row, lines[row - 1].decode(), changed.decode(), statement.lineno)


def applied(mutant: Mutant, source: str) -> str | None:
    """The file with the changed line; None if that does not compile to something else."""
    lines = source.split("\n")
    lines[mutant.line - 1] = mutant.mutated
    with contextlib.suppress(SyntaxError):
        changed = "\n".join(lines)
        return changed if ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)) else None
    return None


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements of functions, without documentation, errors, and texts for people."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name not in ("__repr__", "__str__"):
            for part in (each for top in function.body for each in ast.walk(top)):
                is_text = isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
                if isinstance(part, ast.stmt) and not is_text and not isinstance(part, ast.FunctionDef | ast.ClassDef):
                    yield part


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions of a statement, without those of statements in it, annotations, and formatted texts."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.stmt | ast.JoinedStr) and name != "annotation":
                if isinstance(child, ast.expr):
                    yield child
                yield from _expressions(child)


def _edits(statement: ast.stmt, lines: list[bytes]) -> Iterator[_Edit]:
    if isinstance(statement, ast.Expr | ast.AugAssign | ast.Raise | ast.Break | ast.Continue | ast.Delete) or (
        isinstance(statement, ast.Assign) and not isinstance(statement.targets[0], ast.Name)
    ):
        yield (_begin(statement), _end(statement), "pass")
    if isinstance(statement, ast.Raise | ast.Import | ast.ImportFrom | ast.Assert):
        return
    if isinstance(statement, ast.Return) and not isinstance(statement.value, ast.Constant | None):
        yield (_begin(statement.value), _end(statement.value), "None")
    if isinstance(statement, ast.AugAssign):
        yield from _between(statement.target, statement.value, lines, _ARITHMETIC.get(type(statement.op)))
    for each in _expressions(statement):
        match each:
            case ast.Compare():
                for left, right, kind in zip([each.left, *each.comparators], each.comparators, each.ops, strict=False):
                    yield from _between(left, right, lines, _COMPARISONS[type(kind)])
            case ast.BinOp() if not any(isinstance(it, ast.JoinedStr) for it in (each.left, each.right)):
                yield from _between(each.left, each.right, lines, _ARITHMETIC.get(type(each.op)))
            case ast.BoolOp():
                names = ("and", "or") if isinstance(each.op, ast.And) else ("or", "and")
                for left, right in zip(each.values, each.values[1:], strict=False):
                    yield from _between(left, right, lines, names)
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                yield (_begin(each), _begin(each.operand), "")
            case ast.Constant(value=bool()):
                yield (_begin(each), _end(each), str(not each.value))
            case ast.Constant(value=int() | float()):
                for change in (1, -1):
                    yield (_begin(each), _end(each), str(each.value + change))
            case ast.Name(id=name) if name in _NAMES:
                yield (_begin(each), _end(each), _NAMES[name])
            case ast.Call():
                given = [*each.args, *each.keywords]
                for before, keyword in zip([each.func, *given], given, strict=False):
                    if isinstance(keyword, ast.keyword) and keyword.arg not in (None, "strict"):  # zip's check
                        text = "" if given[0] is not keyword else "("
                        yield (_end(before), _end(keyword), text)


def _between(left: ast.expr, right: ast.expr, lines: list[bytes], change: tuple[str, str] | None) -> Iterator[_Edit]:
    """The operator between two operands, changed."""
    (row, start), (last, end) = _end(left), _begin(right)
    if change and row == last:
        gap = lines[row - 1][start:end].decode()
        yield ((row, start), (row, end), gap.replace(*change, 1))


def drawn(seed: int, number: int, root: Path) -> list[Mutant]:
    """A sample of the mutants of all subjects."""
    sources = {}
    for subject in SUBJECTS:
        for path in sorted((root / subject).rglob("*.py")) or [root / subject]:
            sources[str(path.relative_to(root))] = path.read_text(encoding="utf-8")
    found = dict.fromkeys(each for file, source in sources.items() for each in mutants(file, source))
    shuffled = random.Random(seed).sample(list(found), len(found))
    return list(islice((each for each in shuffled if applied(each, sources[each.file])), number))


# -- running tests ---------------------------------------------------------------------------------------------------


class Clone:
    """A clone of the last commit, with an environment whose qccl is the clone's."""

    def __init__(self, number: int) -> None:
        self.folder, venv = BUILD / f"{number}/qccl", BUILD / f"{number}/venv"
        self._python = venv / "bin/python"
        (usual,) = ROOT.glob(".venv/lib/python*/site-packages")
        if not self.folder.exists():
            subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, self.folder], check=True)
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        subprocess.run(["git", "fetch", "--quiet", ROOT, "HEAD"], cwd=self.folder, check=True)
        subprocess.run(["git", "checkout", "--quiet", "--force", "--detach", "FETCH_HEAD"], cwd=self.folder, check=True)
        (site,) = venv.glob("lib/python*/site-packages")
        if not (site / "qccl").exists():
            (site / "qccl").symlink_to(usual / "qccl")  # the extension
        finder = "_editable_skbc_qccl.py"
        (site / finder).write_text((usual / finder).read_text().replace(f"'{ROOT}/qccl", f"'{self.folder}/qccl"))
        folders = usual, BUILD / "packages"
        lines = ["import _editable_skbc_qccl", *(f"import site; site.addsitedir({str(each)!r})" for each in folders)]
        (site / "clone.pth").write_text("\n".join([*lines, str(Path(__file__).parent)]))
        for library in (ROOT / ".venv/lib").glob("lib*.so*"):  # MPI's, which are looked for there
            if not (venv / "lib" / library.name).exists():
                (venv / "lib" / library.name).symlink_to(library)
        for program in (ROOT / ".venv/bin").glob("qccl-*"):
            copy = self._python.with_name(program.name)
            copy.write_text(program.read_text().replace(f"{ROOT}/.venv/bin/", f"{self._python.parent}/"))
            copy.chmod(0o755)

    def pytest(self, *arguments: str, seconds: float, **environment: Path) -> tuple[int, str]:
        """The exit status and the output; the status is -1 if it took too long."""
        path = os.pathsep.join((str(self._python.parent), str(ROOT / ".venv/bin"), os.environ["PATH"]))
        variables = {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1", **{k: str(v) for k, v in environment.items()}}
        with (BUILD / f"{self.folder.parent.name}.log").open("w+") as log:
            process = subprocess.Popen(
                [self._python, "-m", "pytest", "-q", "-p", "mutants_plugin", "-p", "no:cacheprovider", *arguments],
                **{"cwd": self.folder, "stdout": log, "stderr": log, "start_new_session": True},
                env=os.environ | variables,
            )
            limit = patience.Limit(seconds)
            while process.poll() is None and limit.left():
                time.sleep(0.1)
            is_late = process.poll() is None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what tests have left
            process.wait()
            log.seek(0)
            return -1 if is_late else process.returncode, log.read()


class Covered:
    """Which tests cover a line, and how long they take."""

    def __init__(self, clones: Queue[Clone], pool: ThreadPoolExecutor) -> None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        self._folder = BUILD / "coverage" / commit.stdout.strip()
        self._folder.mkdir(parents=True, exist_ok=True)
        folders = [f"{BUILD}/{number}/qccl/qccl" for number in range(clones.qsize())]
        self._first = Path(folders[0]).parent
        (self._folder / "coveragerc").write_text(
            f"[run]\ndata_file = {self._folder}/data\nparallel = true\ncontext = ${{MUTANTS_CONTEXT-}}\n"
            f"patch = fork, _exit\ninclude = {'/*,'.join(folders)}/*\n"
            "[paths]\nqccl =" + "".join(f"\n  {each}" for each in folders) + "\n"
        )
        files = sorted(str(each.relative_to(ROOT)) for each in ROOT.glob("tests/**/test_*.py"))
        list(pool.map(lambda file: self._record(clones, file), files))
        from coverage import Coverage

        measured = Coverage(config_file=self._folder / "coveragerc")
        if not (self._folder / "data").exists():
            measured.combine(keep=True)
            measured.save()
        measured.load()
        self._data = measured.get_data()
        passed = [json.loads(path.read_text()) for path in self._folder.glob("*.json")]
        self.seconds = {name: seconds for each in passed for name, seconds in each.items() if seconds != float("inf")}

    def _record(self, clones: Queue[Clone], file: str) -> None:
        """Run the file's tests, unless an earlier run has."""
        passed = self._folder / f"{file.replace('/', '.')}.json"
        if passed.exists() or "/jax/" in file:
            return
        clone = clones.get()
        chosen = "not gpu" if "/torch/" in file else QUICK
        given = {"MUTANTS_RECORD": self._folder / "coveragerc", "MUTANTS_PASSED": passed}
        status, output = clone.pytest(file, "-m", chosen, seconds=1200, **given)
        clones.put(clone)
        if status not in (0, 5):
            print(f"{file}: {output[-2000:]}", flush=True)

    def tests(self, mutant: Mutant) -> list[str]:
        """The tests that cover the mutant's line, the cheapest files first, as many as have the time."""
        lines = self._data.contexts_by_lineno(str(self._first / mutant.file))
        contexts = {each for each in lines.get(mutant.line) or lines.get(mutant.statement, ()) if each}
        files = defaultdict(list)
        for name in self.seconds:
            if name in contexts or name.partition("::")[0] in contexts:
                files[name.partition("::")[0]].append(name)
        found, seconds = [], 0.0
        for names in sorted(files.values(), key=lambda names: sum(map(self.seconds.get, names))):
            for name in names:
                if seconds + self.seconds[name] <= _MOST_SECONDS or not found:
                    found.append(name)
                    seconds += self.seconds[name]
        return found


def run(mutant: Mutant, tests: list[str], seconds: float, clones: Queue[Clone]) -> None:
    """Run the tests with the changed line, and note what became of it."""
    mutant.tests, mutant.outcome = dict(Counter(name.partition("::")[0] for name in tests)), "uncovered"
    if tests:
        clone = clones.get()
        path, chosen = clone.folder / mutant.file, BUILD / f"{clone.folder.parent.name}.json"
        before = path.read_text(encoding="utf-8")
        path.write_text(applied(mutant, before), encoding="utf-8")
        chosen.write_text(json.dumps(tests))
        limit = _START_SECONDS + _PATIENCE * seconds
        status, output = clone.pytest("-x", *mutant.tests, seconds=limit, MUTANTS_CHOSEN=chosen)
        path.write_text(before, encoding="utf-8")
        clones.put(clone)
        mutant.outcome = {0: "survived", -1: "timeout", 5: "error: no test was found"}.get(status, "killed")
        if mutant.outcome == "killed":
            found = re.findall("^(?:FAILED|ERROR) (.*)", output, re.MULTILINE)
            mutant.by = [f"exit status {status}", *found][-1][:200]
    print(f"{mutant.file}:{mutant.line}: {mutant.outcome} {mutant.by}", mutant.original, mutant.mutated, sep="\n")


def reasons() -> dict[tuple[str, str, str], str]:
    """Why survivors of earlier runs are harmless."""
    found = {}
    for path in sorted((ROOT / "docs/results").glob("mutants-*.json")):
        for each in runs.read(path)["mutants"]:
            found[each["file"], each["original"], each["mutated"]] = each["reason"]
    return found


def main() -> None:
    """The exit status is 0 if every survivor has a reason."""
    parser = argparse.ArgumentParser(prog="scripts/mutants", description="Do the tests notice one changed line?")
    parser.add_argument("--seed", type=int, default=1, help="another draws other mutants (1)")
    parser.add_argument("--number", type=int, default=60, help="of mutants (60)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants that run at once (2)")
    given = parser.parse_args()
    del os.environ["PYTHONPATH"]  # the clones' tests have their own
    begin, machine, file, earlier = time.monotonic(), runs.machine(), runs.todays("mutants"), reasons()
    clones: Queue[Clone] = Queue()
    for number in range(given.jobs):
        clones.put(Clone(number))
    chosen = drawn(given.seed, given.number, clones.queue[0].folder)
    with ThreadPoolExecutor(given.jobs) as pool:
        covered = Covered(clones, pool)
        print(f"{len(covered.seconds)} tests recorded in {time.monotonic() - begin:.0f} s", flush=True)
        for mutant, tests in [(mutant, covered.tests(mutant)) for mutant in chosen]:
            seconds = sum(map(covered.seconds.__getitem__, tests))
            mutant.reason = earlier.get((mutant.file, mutant.original, mutant.mutated), "")
            pool.submit(run, mutant, tests, seconds, clones)
    alive = [each for each in chosen if each.outcome not in ("killed", "timeout")]
    summary = {"seed": given.seed, "killed": len(chosen) - len(alive), "seconds": round(time.monotonic() - begin)}
    rest = [each for each in chosen if each not in alive]
    document = {"machine": machine, **summary, "mutants": [asdict(each) for each in [*alive, *rest]]}
    runs.store(file, document)
    print(f"{summary['killed']} of {len(chosen)} mutants killed in {summary['seconds']} s; wrote {file}")
    sys.exit(not all(each.reason for each in alive))


if __name__ == "__main__":
    main()
