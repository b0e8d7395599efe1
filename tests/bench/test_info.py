"""qccl-bench info: what can be used here, and why not."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_runs import LAUNCHERS
from click.testing import CliRunner, Result

import qccl
from qccl.bench import info
from qccl.bench.cli import main
from qccl.bench.lab import lab
from qccl.bench.start import start
from qccl.transports import choice, ucx


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.mark.processes
def test_info_names_every_part_and_why_it_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.os, "geteuid", lambda: 1000)
    result = invoke("info")
    assert result.exit_code == 0
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert lines["qccl"] == qccl.__version__
    for part in (
        "host engine    yes: kernels for",
        "cuda engine    no: ",
        "cuda parts ",
        "mpiexec ",
        "launcher ",
    ):
        assert part in result.output
    assert "lab (--link)   no: network namespaces need root" in result.output


@pytest.mark.parametrize(
    ("environment", "missing", "expected"),
    [
        ({}, [], "ucx: it is the fastest; mpi for ranks that mpiexec started"),
        ({}, ["mpi"], "ucx: it is the fastest"),
        ({}, ["mpi", "ucx"], "gloo: ucx: rank 0: it is missing; mpi: rank 0: it did not start"),
        (
            {},
            ["mpi", "ucx", "gloo", "wan"],
            "no: the 2 ranks of one group have no transport in common. ucx: rank 0: it",
        ),
        ({"QCCL_TOKEN": "x" * 16}, [], "ucx: it is the fastest; among several machines wan: it encrypts"),
        ({"QCCL_TOKEN": "x" * 16, "QCCL_INSECURE": "1"}, [], "ucx: it is the fastest; mpi for ranks"),
        ({"QCCL_TOKEN": "x"}, [], "no: QCCL_TOKEN: a token has at least 16 characters"),
        ({"QCCL_TRANSPORT": "gloo"}, [], "gloo: QCCL_TRANSPORT is gloo"),
        (
            {"QCCL_TRANSPORT": "gloo"},
            ["gloo"],
            "no: the 2 ranks of one group have no transport in common. gloo: rank 0: it",
        ),
        ({"QCCL_TRANSPORT": "mpi"}, [], "mpi: QCCL_TRANSPORT is mpi"),
        ({"QCCL_TRANSPORT": "tcp"}, [], "no: QCCL_TRANSPORT='tcp' does not exist"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, [], "mpi: MPICH started the ranks"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "QCCL_TOKEN": "x" * 16}, [], "ucx: it is the fastest; among several"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "QCCL_TRANSPORT": "ucx"}, [], "ucx: QCCL_TRANSPORT is ucx"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, [], "ucx: it is the fastest"),
    ],
)
def test_info_says_which_transport_is_used_and_why(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], missing: list[str], expected: str
) -> None:
    pytest.importorskip("mpi4py")
    for name in (*LAUNCHERS, "QCCL_TRANSPORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for module in (info, choice):
        monkeypatch.setattr(module, "obstacle", lambda name: "it is missing" if name in missing else "")
    assert info._transport().startswith(expected) and ("; mpi for" in info._transport()) == ("; mpi for" in expected)
    without = info._transport(has_library=False)
    assert without.startswith("ucx" if "started the ranks" in expected else expected.partition("; mpi for")[0])


@pytest.mark.processes
def test_info_says_which_ucx_is_used() -> None:
    if reason := start.obstacle("ucx"):
        pytest.skip(reason)
    (line,) = (line for line in invoke("info").output.splitlines() if line.startswith("ucx "))
    assert f"yes: UCX {ucx.version()}, /" in line and "/libucp.so" in line
    assert ("the wheel libucx-cu12" in line) == ("/libucx/lib/" in line)


@pytest.mark.processes
def test_info_names_a_library_in_a_folder_with_a_blank(monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := start.obstacle("ucx"):
        pytest.skip(reason)
    path = "/home/a b/qccl/.venv/lib/libucx/lib/libucp.so.0.0.0"
    mappings, own = (
        f"7f0000000000-7f0000001000 r-xp 00000000 fe:00 123        {path}\n7f1-7f2 rw-p 0 0:0 0\n",
        Path.read_text,
    )
    monkeypatch.setattr(Path, "read_text", lambda of, *a, **k: mappings if of.name == "maps" else own(of, *a, **k))
    (line,) = (line for line in invoke("info").output.splitlines() if line.startswith("ucx "))
    assert f", {path} (the wheel libucx-cu12;" in line
