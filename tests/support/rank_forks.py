"""Tests whose bodies run on ranks: forks of one process, which has imported the test's file once.

A test's file says ``@on_processes(3)`` above a function of (rank, size, address), and pytest runs it as a test: on 3
processes, which must all return. ``run()`` is for tests that look at the ends of the processes themselves. An
interpreter and the import of numpy and qccl take longer than most of these bodies.

The process that forks loads no UCX (see forked_ranks.py): a test's file must not do so while it is imported.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import patience
from forked_ranks import Forks
from plain_ranks import free_ports

__all__ = ["Body", "Ended", "check", "on_processes", "outputs", "run"]

#: what each rank does, given its number, the number of ranks, and the address at which they meet
Body = Callable[[int, int, str], None]
#: after which ranks that hang are ended
_SECONDS = 60.0
_PROGRAMS = "QCCL_TEST_PROGRAMS"


@dataclass(frozen=True)
class Ended:
    """The end of a rank: its exit status as Popen.returncode, what it has written, and when it ended (time.time())."""

    status: int
    out: str
    err: str
    at: float


def run(
    size: int,
    body: Body,
    *,
    unreaped: int | None = None,
    seconds: float = _SECONDS,
    imported: Sequence[str] = (),
    **environment: str,
) -> list[Ended]:
    """Run ``body`` on ranks, and wait for all that do not stay stopped; these are killed.

    Until the others have ended the rank ``unreaped`` is not waited for: UCX takes it to be alive. The process that
    forks first imports the modules ``imported``.
    """
    with tempfile.TemporaryDirectory(prefix="ranks.") as folder:
        wanted = {
            **{"file": inspect.getfile(body), "name": body.__qualname__, "size": size, "unreaped": unreaped},
            "environment": os.environ | patience.environment() | environment,
            **{"seconds": seconds, "imported": imported, "folder": folder, "address": f"127.0.0.1:{free_ports(1)[0]}"},
        }
        print(json.dumps(wanted), file=_server().stdin, flush=True)
        ends = json.loads(_server().stdout.readline())
        texts = [[(Path(folder) / f"{rank}.{kind}").read_text() for kind in ("out", "err")] for rank in range(size)]
    return [Ended(status, *text, at) for (status, at), text in zip(ends, texts, strict=True)]


def outputs(*programs: str, **environment: str) -> list[str]:
    """The outputs of Python programs that run at the same time, with ``qccl`` imported, and end well."""
    ends = run(len(programs), execute, **{_PROGRAMS: json.dumps(programs)}, **environment)
    check(ends)
    return [each.out.removesuffix("done\n") for each in ends]


def execute(rank: int, size: int, address: str) -> None:
    """The body of outputs()."""
    import qccl

    exec(json.loads(os.environ.pop(_PROGRAMS))[rank], {"__name__": "__main__", "qccl": qccl})


def check(found: list[Ended], *, but: int | None = None) -> None:
    """The body has returned on all ranks, but perhaps on one."""
    failed = [
        (each.at, f"rank {rank}: {each.status}\n{each.out}{each.err}")
        for rank, each in enumerate(found)
        if rank != but and not (each.status == 0 and each.out.endswith("done\n"))
    ]
    assert not failed, "\n".join(text for _, text in sorted(failed))  # first the one that the others have lost


def on_processes(
    size: int, *, over: Iterable[Any] = (), lost: int | None = None, **environment: str
) -> Callable[[Body], Callable[..., None]]:
    """Make a test of the body: on ``size`` ranks, over each of these networks; the rank ``lost`` need not return."""

    def made(body: Body) -> Callable[..., None]:
        import pytest
        from start_ranks import NETWORKS

        if not over:

            def test() -> None:
                check(run(size, body, **environment), but=lost)

        else:

            @pytest.mark.parametrize("network", over)
            def test(network: str) -> None:
                check(run(size, body, **NETWORKS[network], **environment), but=lost)

        test.__name__, test.__doc__, test.__qualname__ = body.__name__, body.__doc__, body.__qualname__
        test.body = body
        return test

    return made


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that forks: it ends with this one, which holds the other end of its stdin."""
    process = subprocess.Popen(
        [sys.executable, __file__],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate, timeout=60)
    return process


# -- the process that forks ------------------------------------------------------------------------------------------


@functools.cache
def _module(path: str) -> ModuleType:
    """The test's file."""
    from qccl.transports import choice

    usual = choice.obstacle
    choice.obstacle = lambda *_: ""  # needs_ucx would load it to see whether it is there
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    choice.obstacle = usual
    assert "libucp" not in Path("/proc/self/maps").read_text()
    gc.freeze()  # the end of a rank need not look through all of it
    return module


def _be_a_rank(body: Body, rank: int, wanted: dict[str, Any]) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(Path(wanted["folder"]) / f"{rank}.out", os.O_WRONLY | os.O_CREAT), 1)
    os.environ.clear()
    os.environ |= wanted["environment"]
    body(rank, wanted["size"], wanted["address"])
    print("done", flush=True)


def _serve() -> None:
    for line in sys.stdin:
        wanted = json.loads(line)
        body = getattr(_module(wanted["file"]), wanted["name"])
        for name in wanted["imported"]:
            importlib.import_module(name)
        ranks, limit = Forks(Path(wanted["folder"])), patience.Limit(wanted["seconds"])
        for rank in range(wanted["size"]):
            ranks.start(rank, partial(_be_a_rank, getattr(body, "body", body), rank, wanted))
        ranks.wait(limit, unreaped=wanted["unreaped"])
        ranks.end()
        ends = [(ranks.statuses[rank], ranks.ends[rank]) for rank in range(wanted["size"])]
        print(json.dumps(ends), flush=True)


if __name__ == "__main__":
    _serve()
