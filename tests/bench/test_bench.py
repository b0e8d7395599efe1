"""The command qccl-bench: its flags and their errors, and its commands codec and info."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from bench_runs import LAUNCHERS, USERS
from click.testing import CliRunner, Result

import qccl
from qccl.bench import info, lab, params, sizes, start
from qccl.bench.cli import main
from qccl.bench.codec import measure_codec
from qccl.bench.kinds import KINDS
from qccl.transports import ucx

ROOT = Path(__file__).parents[2]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


# -- flags -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["-b", "12Q"], ["'12Q' is not a size", "64K"]),
        (["-b", "1M", "-e", "1K"], ["1024 is less than -b 1048576"]),
        (["-b", "0", "-e", "1K", "-f", "2"], ["-f never gets from -b 0"]),
        (["-b", "0", "-e", "1K", "-i", "0"], ["-i 0 never gets"]),
        (["-f", "1"], ["1 is not in the range x>=2"]),
        (["-n", "0"], ["0 is not in the range x>=1"]),
        (["-o", "prod"], ["'prod' is not one of sum, avg, min, max, all"]),
        (["-d", "double"], ["'double' is not one of float, half, bfloat16, all"]),
        (["-a", "4"], ["4 is not in the range"]),
        (["-T", "0"], ["0.0 is not in the range x>0"]),
        (["-g", "2"], ["2 is not possible, only 1", "--ranks"]),
        (["-G", "1"], ["-G 1: there are no CUDA graphs on the host", "--backend cuda"]),
        (["--backend", "cuda", "--link", "1gbit"], ["--link 1gbit is for ranks on the host"]),
        (["--backend", "gpu"], ["'host', 'cuda', 'auto'"]),
        (["--codec", "minmax9"], ["bits=9", "1 to 8"]),
        (["--codec", "minmax8,minmux"], ["minmux", "minmax"]),
        (["--codec", "minmax8:bukket=8"], ["bukket", "bucket"]),
        (["--algorithm", "ring"], ["'auto', 'one_shot', 'two_round'"]),
        (["--ranks", "0"], ["0 is not in the range x>=1"]),
        (["--link", "fast"], ["'fast' is not a link's rate", "100mbit"]),
        (["--json", "/nowhere/x.json"], ["'/nowhere/x.json' cannot be written"]),
        (["--plot", "x.txt"], [".png, .svg, .pdf"]),
    ],
)
def test_bad_flags_say_what_is_allowed(arguments: list[str], parts: list[str]) -> None:
    result = invoke("allreduce", *arguments)
    assert result.exit_code == 2
    for part in parts:
        assert part in " ".join(result.output.split())


def test_nccl_tests_flags_with_their_one_value_are_accepted() -> None:
    result = invoke("allreduce", "-t1", "-g1", "-m1", "-p0", "-z1", "-G0", "-C0", "-b2M", "-e1M")
    assert "-e 1048576 is less than" in result.output  # the flags were accepted, and the sizes refused


def test_lists_of_codecs_keep_the_commas_of_options() -> None:
    assert params.codec_list("minmax8,minmax4:bucket=256,rounding=stochastic, seed=7,none") == (
        "minmax8",
        "minmax4:bucket=256,rounding=stochastic,seed=7",
        "none",
    )
    assert params.list_of(("a", "b"))("all") == ("a", "b")


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module with a codec in the current folder; its name."""
    name = f"users_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(USERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield name
    sys.modules.pop(name, None)


def test_a_codec_of_the_users_is_named_by_module_and_class(users: str) -> None:
    text = f"{users}:Half,{users}:Half:bucket=128+ef+nesterov:mu=0.5,minmax8:bucket=64"
    specs = params.codec_list(text)
    assert ",".join(specs) == text
    plain, stateful, minmax = (params.codec_of(spec) for spec in specs)
    assert (plain.spec(), minmax.spec()) == ("half", "minmax8:bucket=64")
    assert stateful.spec() == "half:bucket=128+ef+nesterov:mu=0.5" and stateful.plain.bucket == 128


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}:Half:buckets=3", "half has no key 'buckets'; its keys: bucket"),
        ("{}:Hallf", "cannot be imported .*has no attribute 'Hallf'"),
        ("{}:number", "is 5; it must be a dataclass that inherits from qccl.codecs.PythonCodec"),
        ("no_such_module:Half", "cannot be imported .*No module named 'no_such_module'"),
        ("minmax8:bucket", "'bucket' is not key=value"),
        ("minmux8:bucket=8", "there is no codec 'minmux8'"),
    ],
)
def test_what_is_no_codec_of_the_users_is_refused(users: str, text: str, reason: str) -> None:
    with pytest.raises(qccl.CodecError, match=reason):
        params.codec_list(text.format(users))


def test_specifications_elsewhere_import_nothing(users: str) -> None:
    """A specification may come from an untrusted file or dict."""
    with pytest.raises(qccl.CodecError):
        qccl.codecs.get(f"{users}:Half")
    assert users not in sys.modules


def test_a_codec_of_the_users_is_measured(users: str) -> None:
    result = invoke("codec", "-b", "64K", "-n", "1", "-w", "0", "-d", "float", "--codec", f"{users}:Half")
    assert result.exit_code == 0 and "half (Python, slow)" in result.output, result.output


def test_plot_without_matplotlib_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(params.importlib.util, "find_spec", lambda name: None)
    result = invoke("allreduce", "--plot", "x.png")
    assert result.exit_code == 2 and "qccl[plot]" in result.output


def test_link_without_root_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(lab.os, "geteuid", lambda: 1000)
    result = invoke("allreduce", "--link", "1gbit")
    assert result.exit_code == 2
    assert "need root" in result.output and "sudo" in result.output


def test_link_without_iproute2_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.shutil, "which", lambda tool: None)
    assert "ip and tc not found; install iproute2" in invoke("allreduce", "--link", "1gbit").output


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (
            [],
            [
                "no transport can be used here. ucx: ",
                "qccl[ucx]",
                "mpi: ",
                "qccl[mpi]",
                "gloo: PyTorch is not installed",
            ],
        ),
        (["--transport=mpi"], ["mpi4py is not installed", "qccl[mpi]"]),
        (["--transport=ucx"], ["libucp was not found", "qccl[ucx]"]),
    ],
)
def test_without_a_transport_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], parts: list[str]
) -> None:
    for name in (*LAUNCHERS, "QCCL_TRANSPORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(ucx, "_candidates", lambda: [])
    monkeypatch.setattr(ucx.ctypes, "CDLL", lambda *given, **more: _raise_os_error())
    ucx.load_library.cache_clear()
    result = invoke("allreduce", *flags)
    assert result.exit_code == 1 and all(part in result.output for part in parts), result.output


def _raise_os_error() -> None:
    raise OSError("it is not loaded")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--transport=loopback", "--link=1gbit"], "threads use no network"),
        (["--transport=ucx", "--backend=cuda"], "is for ranks on the host"),
        (["--transport=loopback", "--plain=mpi"], "which mpiexec starts"),
        (["--transport=tcp"], "'tcp' is not one of 'mpi', 'ucx', 'gloo', 'wan', 'loopback'"),
    ],
)
def test_transports_that_are_impossible_are_refused(flags: list[str], reason: str) -> None:
    result = invoke("allreduce", *flags)
    assert result.exit_code == 2 and reason in " ".join(result.output.split()), result.output


def test_threads_under_a_launcher_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "1")
    result = invoke("allreduce", "--transport=loopback")
    assert result.exit_code == 2 and "but MPICH has started this rank" in result.output


def test_ranks_that_differ_from_the_launchers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "4")
    result = invoke("allreduce", "--ranks", "2")
    assert result.exit_code == 2 and "--ranks 2, but MPICH has started 4" in result.output


# -- sizes and links ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"), [("0", 0), ("4096", 4096), ("64K", 65536), ("1.5M", 3 << 19), ("2g", 2 << 30), ("8KiB", 8192)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert sizes.parse_size(text) == nbytes
    assert sizes.parse_size(sizes.format_size(nbytes)) == nbytes


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5", "1e6", "0x10", "1 M", "9" * 400])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        sizes.parse_size(text)


def test_links() -> None:
    assert sizes.parse_link("1GBIT") == sizes.Link("1gbit", 125e6, 66_000)
    assert sizes.parse_link("10gbit").burst == 250_000
    assert sizes.parse_link("100mbit").burst == sizes.parse_link("10mbit").burst == 18_200
    for text in ("1gb", "10", "0gbit", "1tbit", "1kbit"):
        with pytest.raises(ValueError, match="is not a link's rate"):
            sizes.parse_link(text)


def test_sweeps_are_those_of_nccl_tests() -> None:
    assert list(sizes.sweep(8, 128, 1, 4)) == [8, 32, 128]
    assert list(sizes.sweep(0, 10, 4, None)) == [0, 4, 8]
    assert list(sizes.sweep(5, 5, 0, None)) == [5]
    assert list(sizes.sweep(0, 0, 1, 2)) == [0]


# -- codec and info ----------------------------------------------------------------------------------------------------


def test_codec_times_every_kernel_beside_memcpy(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    result = invoke("codec", "-b", "256K", "-n", "2", "--codec", "minmax8,none", "--json", str(path))
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines() if not line.startswith("#")]
    assert [(r[0], r[-1]) for r in rows] == [(t, c) for c in ("minmax8", "none") for t in ("float", "half", "bfloat16")]
    assert [r[1] for r in rows] == ["1.0078"] * 3 + ["4.0000", "2.0000", "2.0000"]
    assert 0.006 < float(rows[0][2]) < 0.009 and float(rows[3][2]) == 0
    found = json.loads(path.read_text())["results"]
    assert len(found) == 6 and all(r["share"]["encode"] > 0 for r in found)


def test_codec_counts_compulsory_bytes() -> None:
    speed = measure_codec(qccl.codecs.get("minmax8"), qccl.dtypes.FLOAT32, 1 << 16, 1, 0, sources=3)
    values, wire = 1 << 16, 16384 + 16 * 8
    assert speed.moved == {
        "encode": values + wire,
        "decode": values + wire,
        "reduce": 4 * wire + 2 * values,
        "copy": 2 * values,
    }
    assert speed.share("copy") == 1


def test_info_names_every_part_and_why_it_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.os, "geteuid", lambda: 1000)
    result = invoke("info")
    assert result.exit_code == 0
    lines = dict(line.split(maxsplit=1) for line in result.output.splitlines())
    assert lines["qccl"] == qccl.__version__
    for part in (
        "host engine    yes: kernels for",
        "cuda engine    no: ",
        "cuda parts ",
        "mpiexec ",
        "launcher ",
        "plot ",
    ):
        assert part in result.output
    assert "lab (--link)   no: network namespaces need root" in result.output


@pytest.mark.parametrize(
    ("environment", "missing", "expected"),
    [
        ({}, [], "ucx: it is the fastest; mpi for ranks that mpiexec started"),
        ({}, ["mpi"], "ucx: it is the fastest"),
        ({}, ["mpi", "ucx"], "gloo: there is no UCX"),
        ({}, ["mpi", "ucx", "gloo"], "wan: there is neither UCX nor gloo"),
        ({"QCCL_TOKEN": "x" * 16}, [], "ucx: it is the fastest; wan among several machines; mpi"),
        ({"QCCL_TOKEN": "x" * 16, "QCCL_INSECURE": "1"}, [], "ucx: it is the fastest; mpi"),
        ({"QCCL_TOKEN": "x"}, [], "no: QCCL_TOKEN: a token has at least 16 characters"),
        ({"QCCL_TRANSPORT": "gloo"}, [], "gloo: QCCL_TRANSPORT is gloo"),
        ({"QCCL_TRANSPORT": "tcp"}, [], "no: QCCL_TRANSPORT='tcp' does not exist"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, [], "mpi: MPICH started the ranks"),
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
    monkeypatch.setattr(info, "obstacle", lambda name: "it is missing" if name in missing else "")
    assert info._transport().startswith(expected) and ("; mpi" in info._transport()) == ("; mpi" in expected)


def test_info_says_which_ucx_is_used() -> None:
    if reason := start.obstacle("ucx"):
        pytest.skip(reason)
    (line,) = (line for line in invoke("info").output.splitlines() if line.startswith("ucx "))
    assert f"yes: UCX {ucx.version()}, /" in line and "/libucp.so" in line
    assert ("the wheel libucx-cu12" in line) == ("/libucx/lib/" in line)


def test_versions_and_names_are_read() -> None:
    assert isinstance(main, click.Group) and set(main.commands) == {
        *KINDS,
        "codec",
        "run",
        "doctor",
        "explain",
        "info",
        "simulate",
        "token",
        "top",
    }
    assert "qccl-bench, version" in invoke("--version").output


def test_factors_are_those_of_nccl_tests() -> None:
    found = {name: kind.factor(4) for name, kind in KINDS.items()}
    assert found == {
        **{"allreduce": 1.5, "hierarchical_allreduce": 1.5, "reduce_scatter": 0.75, "all_gather": 0.75},
        **{"all_to_all": 0.75, "broadcast": 1.0, "reduce": 1.0},
        **{"allreduce_coalesced": 1.5, "peer_exchange": 2.0},  # in a ring: a link to each side
    }
    assert [KINDS["peer_exchange"].factor(n) for n in (1, 2, 3)] == [0.0, 1.0, 2.0]


def test_nodes_need_a_link() -> None:
    for arguments, reason in (
        (["--nodes=2"], "are for the lab; give --link"),
        (["--link=1gbit", "--link-per-rank"], "--link-per-rank has no effect without --nodes"),
    ):
        result = invoke("allreduce", *arguments)
        assert result.exit_code == 2 and reason in result.output
