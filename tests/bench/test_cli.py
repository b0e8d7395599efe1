"""The command qccl-bench: its flags, its commands, and the speeds that codec measures."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from bench_runs import LAUNCHERS
from click.testing import CliRunner, Result

import qccl
from qccl.bench.cli import main
from qccl.bench.codec import measure_codec
from qccl.bench.lab import lab
from qccl.bench.options import KINDS
from qccl.bench.start.start import choose_way
from qccl.meeting import tls
from qccl.transports import ucx

ROOT = Path(__file__).parents[2]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize("command", [["allreduce", "--link", "1gbit"], ["run", "--link", "1gbit", "true"]])
def test_link_without_root_says_what_to_do(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.setattr(lab.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(lab.os, "geteuid", lambda: 1000)
    result = invoke(*command)
    assert result.exit_code == 2
    assert "need root" in result.output and "sudo" in result.output


def test_link_without_iproute2_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.shutil, "which", lambda tool: None)
    assert "ip and tc not found; install iproute2" in invoke("allreduce", "--link", "1gbit").output


@pytest.fixture
def without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither MPI nor UCX nor PyTorch."""
    for name in (*LAUNCHERS, "QCCL_TRANSPORT"):
        monkeypatch.delenv(name, raising=False)
    tls.load_library()  # which keeps OpenSSL
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name == "msgspec" else None)
    monkeypatch.setattr(ucx, "_candidates", lambda: ["libucp.so.0"])
    monkeypatch.setattr(ucx.ctypes, "CDLL", lambda *given, **more: _raise_os_error())
    ucx.load_library.cache_clear()


@pytest.mark.parametrize(
    ("transport", "parts"),
    [
        ("mpi", ["mpi4py is not installed", "qccl[mpi]"]),
        ("ucx", ["UCX cannot be used (it is not loaded)", "qccl[ucx]"]),
        ("gloo", ["PyTorch is not installed"]),
    ],
)
def test_without_a_transport_it_says_what_to_install(
    without_libraries: None, transport: str, parts: list[str]
) -> None:  # fmt: skip
    result = invoke("allreduce", f"--transport={transport}")
    assert result.exit_code == 1 and all(part in result.output for part in parts), result.output


def test_without_libraries_the_ranks_use_wan(without_libraries: None) -> None:
    assert choose_way(None).transport == "wan"


def _raise_os_error() -> None:
    raise OSError("it is not loaded")


def test_threads_under_a_launcher_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    result = invoke("allreduce", "--transport=loopback")
    assert result.exit_code == 2 and "but MPICH has started this rank" in result.output


def test_ranks_that_differ_from_the_launchers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "4")
    result = invoke("allreduce", "--ranks", "2")
    assert result.exit_code == 2 and "--ranks 2, but MPICH has started 4" in result.output


def test_codec_times_every_kernel_beside_memcpy(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    result = invoke("codec", "-b", "256K", "-n", "2", "--codec", "minmax8,none", "--json", str(path))
    assert result.exit_code == 0 and "memcpy" in result.output, result.output
    rows = [line.split() for line in result.output.splitlines() if not line.startswith("#")]
    assert [(r[0], r[-1]) for r in rows] == [(t, c) for c in ("minmax8", "none") for t in ("float", "half", "bfloat16")]
    assert [r[1] for r in rows] == ["1.0078"] * 3 + ["4.0000", "2.0000", "2.0000"]
    assert 0.006 < float(rows[0][2]) < 0.009 and float(rows[3][2]) == 0
    found = json.loads(path.read_text())["results"]
    assert len(found) == 6 and all(r["share"]["encode"] > 0 for r in found)


def test_codec_counts_compulsory_bytes() -> None:
    speed = measure_codec(qccl.codecs.get("minmax8"), qccl.base.dtypes.FLOAT32, 1 << 16, 1, 0)
    values, wire = 1 << 16, 16384 + 16 * 8
    assert speed.moved == {
        "encode": values + wire,
        "decode": values + wire,
        "reduce": 4 * wire + 2 * values,
        "copy": 2 * values,
    }
    assert speed.share("copy") == 1


def test_the_version_is_read() -> None:
    assert "qccl-bench, version" in invoke("--version").output


def test_factors_are_those_of_nccl_tests() -> None:
    found = {name: kind.factor(4) for name, kind in KINDS.items()}
    assert found == {
        **{"allreduce": 1.5, "hierarchical_allreduce": 1.5, "reduce_scatter": 0.75, "all_gather": 0.75},
        **{"all_to_all": 0.75, "broadcast": 1.0, "reduce": 1.0},
        **{"allreduce_coalesced": 1.5, "peer_exchange": 2.0},  # in a ring: a link to each side
    }
    assert [KINDS["peer_exchange"].factor(n) for n in (1, 2, 3)] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        *(("alltoall", "all_to_all"), ("alltoall_perf", "all_to_all"), ("all_reduce", "allreduce")),
        *(("all_reduce_perf", "allreduce"), ("all_gather_perf", "all_gather"), ("reduce_perf", "reduce")),
        *(("reduce_scatter_perf", "reduce_scatter"), ("broadcast_perf", "broadcast")),
    ],
)
def test_names_of_nccl_tests(theirs: str, ours: str) -> None:
    shown, usual = (invoke(name, "--help") for name in (theirs, ours))
    assert shown.exit_code == 0 and shown.output.split("\n", 1)[1] == usual.output.split("\n", 1)[1]
