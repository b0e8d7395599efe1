"""The command qccl-bench: its flags and their errors, its table, JSON and picture, and ranks that mpiexec starts."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import qccl
from qccl.bench import lab, params, progress, sizes, start, table
from qccl.bench.calls import Case
from qccl.bench.cli import main
from qccl.bench.codec import measure_codec
from qccl.bench.kinds import KINDS
from qccl.bench.measure import Row, Side
from qccl.bench.options import Options
from qccl.bench.report import Device, Report

LAUNCHERS = (
    "PMI_RANK",
    "PMI_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "RANK",
    "WORLD_SIZE",
    "SLURM_PROCID",
)
ROOT = Path(__file__).parent.parent


def bench(*arguments: str, limit: float = 60.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run qccl-bench in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "qccl.bench", *arguments],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k not in LAUNCHERS} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit,
    )


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def row(codec: str = "minmax8", seconds: float = 0.004, wrong: int | None = 0, crossed: float | None = None) -> Row:
    side = Side((seconds,), wrong, None if wrong is None else 7.4e-3, crossed)
    return Row(Case(4 << 20, qccl.dtypes.FLOAT32, "sum"), codec, "two_round", 6_340_608, side, side)


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
    assert "-e 1048576 is less than" in result.output  # the flags were read, and the sizes refused


def test_lists_of_codecs_keep_the_commas_of_options() -> None:
    assert params.codec_list("minmax8,minmax4:bucket=256,rounding=stochastic, seed=7,none") == (
        "minmax8",
        "minmax4:bucket=256,rounding=stochastic,seed=7",
        "none",
    )
    assert params.list_of(("a", "b"))("all") == ("a", "b")


USERS = """
from dataclasses import dataclass
from typing import ClassVar
import numpy as np
from qccl.codecs import PythonCodec

@dataclass(frozen=True)
class Half(PythonCodec):
    bucket: int = 64
    name: ClassVar[str] = "half"
    granule = property(lambda self: self.bucket)

    def _nbytes(self, count, dtype):
        return 2 * count

    def encode_values(self, x):
        return x.astype(np.float16).view(np.uint8)

    def decode_values(self, wire, count):
        return wire.view(np.float16).astype(np.float32)

    def error_bound(self, x):
        return abs(np.asarray(x, np.float64)) * 2.0**-11 + 2.0**-25

number = 5
"""


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
    """A specification may come from a file or a dict that nobody looked at."""
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


def test_without_mpi_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(start.importlib.util, "find_spec", lambda name: None)
    result = invoke("allreduce")
    assert result.exit_code == 1 and "mpi4py is not installed" in result.output and "qccl[mpi]" in result.output


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


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5", "1e6", "0x10", "1 M"])
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


# -- table, JSON, picture ----------------------------------------------------------------------------------------------


def test_rows_have_nccl_tests_columns_first() -> None:
    plain = replace(row("mpi", 0.0166), in_place=Side((0.002, 0.004, 0.008), 0, 0.0, None))
    fields = table.row(row(), plain, 4, None).split()
    assert fields[:5] == ["16777216", "4194304", "float", "sum", "-1"]
    assert fields[5:9] == fields[9:13] == ["4000.00", "4.19", "6.29", "0"]
    assert fields[13:] == ["6340608", "7.4e-03", "4.15x", "1.00x", "0", "0", "minmax8"]
    assert table.row(plain, plain, 4, None).split()[15:] == ["1.00x", "1.00x", "0", "150", "mpi"]
    link = sizes.parse_link("1gbit")
    fields = table.row(in_lab(0.0513, 0.0509), None, 4, link).split()
    assert fields[15:] == ["-", "-", "0", "0", "50724.9", "98.9", "99.2", "minmax8"]
    assert table.row(row(wrong=None), None, 4, None).count("N/A") == 3


@pytest.mark.parametrize("lab", [False, True])
@pytest.mark.parametrize("seconds", [0.0123, 0.05, 9.5])
def test_columns_stand_under_their_titles(seconds: float, lab: bool) -> None:
    link = sizes.parse_link("1gbit") if lab else None
    above, title, below = table.header("mpi", lab=lab)
    line = table.row(in_lab(seconds, seconds), row("mpi", 10 * seconds), 4, link)
    assert title.index("codec") == line.index("minmax8")
    assert len(title.removesuffix("codec")) <= 160
    columns = [("size", 0), ("redop", 3), ("#wrong", 8), ("wire", 13), ("out", 15)]
    for name, number in columns + ([("floor", 19), ("line", 20), ("bulk", 21)] if lab else []):
        assert line[: title.index(name) + len(name)].split()[-1] == line.split()[number]
    for group, number in (("vs mpi", 16), ("spread", 18)):
        end = above.index(group) + len(group)
        assert title[:end].split()[-1] == "in" and line[:end].split()[-1] == line.split()[number]
    assert below[: above.index("spread") + 6].endswith("(%)  (%)")


def test_bandwidths_are_on_the_uncompressed_size() -> None:
    r = row(seconds=0.016777216)
    assert table.algbw(r, r.in_place) == pytest.approx(1.0)
    assert table.busbw(r, r.in_place, 4) == pytest.approx(1.5)
    assert table.busbw(r, r.in_place, 1) == 0


def test_shares_that_the_burst_would_falsify_are_not_shown() -> None:
    r, link = row(), sizes.parse_link("1gbit")
    assert table.line_share(r, r.in_place, link) == pytest.approx(50724.864e-6 / 0.004)
    short = replace(r, wire_nbytes=40 * link.burst)
    assert table.line_share(short, short.in_place, link) is None


@pytest.mark.parametrize(
    ("rows", "okay", "parts"),
    [
        ([row()], True, ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 6.29"]),
        ([row(wrong=3)], False, ["# Out of bounds values : 6 FAILED"]),
        ([row(wrong=None)], True, ["# Out of bounds values : N/A"]),
        ([row(), row("none")], True, ["#   minmax8            : 6.29", "#   none               : 6.29"]),
        ([row(crossed=1.01)], True, ["# Crossed the link     : at least 101.0% of the bytes sent OK"]),
        ([row(crossed=1.01), row(crossed=0.2)], False, ["at least 20.0%", "FAILED: traffic bypassed the link"]),
    ],
)
def test_footers(rows: list[Row], okay: bool, parts: list[str]) -> None:
    totals = table.totals([(each, None) for each in rows], 4, None)
    text = "\n".join(table.footer(totals, "mpi"))
    assert totals.okay is okay
    for part in parts:
        assert part in text


def test_a_wrong_plain_all_reduce_counts_too() -> None:
    assert not table.totals([(row(), row("mpi", wrong=1))], 4, None).okay


def test_the_footer_has_the_worse_of_both_modes() -> None:
    """A gain out of place does not hide a loss in place, which is how gradients are reduced."""
    slow_in_place = replace(row(seconds=0.001), in_place=Side((0.002078,), 0, 7.4e-3, None))
    plain = replace(row("mpi", 0.00137), in_place=Side((0.001539,), 0, 0.0, None))
    totals = table.totals([(slow_in_place, plain), (row(seconds=0.0005), plain)], 4, None)
    assert totals.speedups == {"minmax8": (pytest.approx(0.7406, abs=1e-4), pytest.approx(2.74))}
    assert "#   minmax8            : 0.74 to 2.74x" in table.footer(totals, "mpi")


def test_the_footer_has_the_spread_of_a_disturbed_row() -> None:
    """One that was measured while something else ran is told from others, the plain all-reduce's too."""
    disturbed = replace(row("mpi"), in_place=Side((0.004, 0.004, 0.004, 0.005, 0.0068), 0, 0.0, None))
    totals = table.totals([(row(), disturbed)], 4, None)
    assert disturbed.in_place.seconds == 0.004 and totals.spread == pytest.approx(0.7)
    assert "# Spread of the rounds : at most 70% of the median" in table.footer(totals, "mpi")


def test_the_footer_has_what_a_plain_transfer_got_of_the_link() -> None:
    rows = [(in_lab(0.0513, 50724.864e-6 / share), None) for share in (0.988, 0.9823)]
    totals = table.totals(rows, 4, sizes.parse_link("1gbit"))
    assert "# Plain bulk transfer  : 98.2 to 98.8% of the link's rate" in table.footer(totals, "mpi")


def in_lab(seconds: float, bulk: float) -> Row:
    """A row beside a plain transfer of the same bytes."""
    side = Side((seconds,), 0, 7.4e-3, 1.01, bulk)
    return replace(row(), out_of_place=side, in_place=side)


@pytest.fixture
def report() -> Report:
    options = Options(minbytes=1 << 20, maxbytes=16 << 20, stepfactor=16, codecs=("minmax8",), args=("qccl-bench",))
    made = Report(options, [Device(r, 100 + r, "here", "host x86-64-v4") for r in range(4)], "MPICH 5.0.2", None)
    plain = row("mpi", 0.2)
    made.add(row(), plain)
    made.add(row("minmax4", 0.002), plain)
    return made


def test_json_has_nccl_tests_fields_and_ours(report: Report) -> None:
    found = json.loads(json.dumps(report.document()))
    assert found["version"] == 3
    assert {"start_time", "args", "env", "nccl_version", "config", "errors", "end_time"} < set(found)
    assert found["out_of_bounds"] == {"count": 0, "okay": "true"}
    assert found["average_bus_bandwidth"]["bandwidth"] == pytest.approx((6.291456 + 2 * 6.291456) / 2)
    assert [d["rank"] for d in found["config"]["devices"]] == [0, 1, 2, 3]
    assert found["config"]["step_factor"] == 16 and "step_bytes" not in found["config"]
    first = found["results"][0]
    assert (first["size"], first["count"], first["type"], first["redop"], first["root"]) == (
        1 << 24,
        1 << 22,
        "float",
        "sum",
        "-1",
    )
    assert (first["codec"], first["algorithm"], first["wire_bytes"]) == ("minmax8", "two_round", 6_340_608)
    for mode in ("out_of_place", "in_place"):
        side = first[mode]
        assert side["time"] == pytest.approx(4000) and side["alg_bw"] == pytest.approx(4.194304)
        assert side["nwrong"] == 0 and side["speedup"] == pytest.approx(50) and side["plain_time"] == pytest.approx(2e5)
        assert side["time_rounds"] == pytest.approx([4000]) and side["plain_time_rounds"] == pytest.approx([2e5])
    assert found["speedup"]["minmax4"] == {"least": pytest.approx(100), "greatest": pytest.approx(100)}
    assert found["greatest_spread"] == 0 and found["config"]["timed"] == "method"


@pytest.mark.parametrize("link", [None, "1gbit"])
def test_a_picture_is_drawn(report: Report, tmp_path: Path, link: str | None) -> None:
    pytest.importorskip("matplotlib")
    from qccl.bench.plot import write_plot

    path = tmp_path / "x.png"
    write_plot(str(path), report, sizes.parse_link(link) if link else None)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


# -- progress ----------------------------------------------------------------------------------------------------------


class Terminal:
    """A stream that says whether it is a terminal."""

    def __init__(self, *, tty: bool) -> None:
        self.tty, self.text = tty, ""

    def isatty(self) -> bool:
        return self.tty

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def test_the_bar_is_drawn_on_a_terminal_only() -> None:
    for tty in (True, False):
        stream = Terminal(tty=tty)
        bar = progress.Bar(stream)
        line = progress.encode_progress(3, 12, "64K minmax8 in place")
        assert progress.is_progress(line) and not progress.is_progress("  65536 ...")
        bar.feed(line)
        bar.clear()
        if tty:
            assert "3/12  64K minmax8 in place" in stream.text and stream.text.endswith("\r\x1b[K")
        else:
            assert stream.text == ""


@pytest.mark.parametrize(
    ("columns", "bar", "end"),
    [
        (60, "[#######.......]", "  about 0 s left"),
        (24, "[]", "minmax8 in"),
        (200, f"[{'#' * 15}{'.' * 15}]", "  about 0 s left"),
    ],
)
def test_the_bar_leaves_room_for_the_words(monkeypatch: pytest.MonkeyPatch, columns: int, bar: str, end: str) -> None:
    monkeypatch.setattr(progress.shutil, "get_terminal_size", lambda *_args, **_kwargs: os.terminal_size((columns, 24)))
    monkeypatch.setattr(progress.time, "monotonic", lambda: 0.0)
    stream = Terminal(tty=True)
    progress.Bar(stream).show(6, 12, "64K minmax8 in place")
    line = stream.text.removeprefix("\r\x1b[K")
    assert line.startswith(f"{bar} 6/12  64K") and line.endswith(end) and len(line) < columns


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
    for part in ("host engine    yes: kernels for", "cuda engine    no: ", "mpiexec ", "launcher ", "plot "):
        assert part in result.output
    assert "lab (--link)   no: network namespaces need root" in result.output


# -- ranks by mpiexec --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mpi() -> start.Mpiexec:
    try:
        return start.find_mpiexec()
    except start.StartError as error:
        pytest.skip(str(error))


def test_settings_leave_the_users_own_alone(mpi: start.Mpiexec) -> None:
    for name in ("MPICH", "Open MPI"):
        settings = start.Mpiexec("mpiexec", name, "5.0").environment(1000, None, 1 << 20)
        assert any("yield" in key.lower() for key in settings)
        assert not any("ALLREDUCE" in key.upper() for key in settings)


@pytest.mark.mpi
def test_the_command_starts_ranks_and_reports(mpi: start.Mpiexec, tmp_path: Path) -> None:
    files = {name: tmp_path / f"x.{name}" for name in ("json", "trace")}
    flags = [f"--{name}={path}" for name, path in files.items()]
    done = bench("allreduce", "--ranks=3", "-b4K", "-e64K", "-f16", "-n3", "--codec=minmax8,none", *flags)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line and not line.startswith("#")]
    assert [line.split()[-1] for line in rows] == ["mpi", "minmax8", "none"] * 2
    assert "# Out of bounds values : 0 OK" in done.stdout
    assert done.stdout.count("#  Rank") == 3
    assert "\x1e" not in done.stdout + done.stderr and done.stderr == ""
    found = json.loads(files["json"].read_text())
    assert found["args"][:2] == ["qccl-bench", "allreduce"] and len(found["results"]) == 4
    assert {event["pid"] for event in json.loads(files["trace"].read_text())["traceEvents"]} == {0, 1, 2}


@pytest.mark.mpi
def test_under_a_launcher_its_ranks_are_used(mpi: start.Mpiexec) -> None:
    done = subprocess.run(
        [
            mpi.path,
            *mpi.options(None),
            "-n",
            "2",
            sys.executable,
            "-m",
            "qccl.bench",
            "allreduce",
            "-b4K",
            "-e4K",
            "-n2",
        ],
        cwd=ROOT,
        env=mpi.environment(2, None, 4096) | os.environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("# Out of bounds values") == 1 and done.stdout.count("#  Rank") == 2


@pytest.mark.mpi
def test_a_rank_that_fails_is_reported_and_none_is_left(mpi: start.Mpiexec) -> None:
    die = (
        "from mpi4py import MPI; import os, time; MPI.COMM_WORLD.rank == 1 and os.kill(os.getpid(), 9); time.sleep(60)"
    )
    begin = time.monotonic()
    command = [sys.executable, "-c", die]
    status = start.run_ranks_by_mpiexec(3, command, lab=None, smallest=0, silence=30, on_line=lambda line: None)
    assert status != 0 and time.monotonic() - begin < 25


@pytest.mark.mpi
def test_silent_ranks_are_given_up(mpi: start.Mpiexec) -> None:
    begin = time.monotonic()
    with pytest.raises(start.StartError, match="printed nothing for 1 s"):
        command = [sys.executable, "-c", "print('hello', flush=True); import time; time.sleep(60)"]
        start.run_ranks_by_mpiexec(2, command, lab=None, smallest=0, silence=1, on_line=lambda line: None)
    assert time.monotonic() - begin < 15


@pytest.mark.mpi
def test_broken_output_of_a_command_that_ends_is_complete(mpi: start.Mpiexec) -> None:
    lines: list[str] = []
    command = [sys.executable, "-c", "print('a\\nb', end='')"]
    assert start.run_ranks_by_mpiexec(1, command, lab=None, smallest=0, silence=30, on_line=lines.append) == 0
    assert lines == ["a", "b"]


def test_signals_unwind_once() -> None:
    for number, expected in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)):
        before = signal.getsignal(number)
        with pytest.raises(expected) as caught, start.stoppable():
            try:
                signal.raise_signal(number)
            finally:
                signal.raise_signal(signal.SIGINT)  # while cleaning up: ignored
        assert signal.getsignal(number) is before
        if expected is SystemExit:
            assert caught.value.code == 128 + number


def test_versions_and_names_are_read() -> None:
    assert isinstance(main, click.Group) and set(main.commands) == {*KINDS, "codec", "info"}
    assert "qccl-bench, version" in invoke("--version").output


# -- the other collectives ---------------------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize("name", [name for name in KINDS if name != "allreduce"])
def test_every_collective_is_timed_and_checked(name: str, tmp_path: Path) -> None:
    """Results are right, a flipped sign would show, and busbw is what the factor makes of the time."""
    path = tmp_path / "x.json"
    codecs = "--codec=minmax4:rounding=stochastic,none"
    done = bench(name, "--ranks=3", "-b100K", "-e100K", "-n2", codecs, f"--json={path}")
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["out_of_bounds"] == {"count": 0, "okay": "true"}
    for result in found["results"]:
        side = result["out_of_place"]
        assert side["alg_bw"] == pytest.approx(result["size"] / side["time"] / 1e3)
        assert side["bus_bw"] == pytest.approx(side["alg_bw"] * KINDS[name].factor(3))
        assert (result["in_place"] is None) == (not KINDS[name].is_allreduce)
        assert (side["relative_l2_error"] > 1e-3) == (result["codec"] != "none" and name != "hierarchical_allreduce")


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
        done = bench("allreduce", *arguments)
        assert done.returncode == 2 and reason in done.stderr


# -- the tables of the documentation -----------------------------------------------------------------------------------


def test_a_measured_table_takes_its_place_in_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the README has the place that `bench/links.py --write README.md` fills."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    runs = importlib.import_module("runs")
    page = tmp_path / "page.md"
    page.write_text((ROOT / "README.md").read_text())
    before, _, rest = page.read_text().partition("<!-- measured by python bench/links.py -->\n")
    _, _, after = rest.partition("<!-- end of python bench/links.py -->")
    of = {"cpu": "a processor", "cores": 2, "mpi": "MPICH 5", "qccl": "1.0", "commit": "abc", "date": "2026-11-22"}
    table = runs.document_table(("link", "ms"), [("1gbit", 34.2)], of)
    assert table.splitlines()[:3] == ["| link | ms |", "| --- | --- |", "| 1gbit | 34.2 |"]
    assert table.endswith("(Measured on a processor, 2 cores, MPICH 5, qccl 1.0 (abc), 2026-11-22.)")
    for _ in range(2):
        runs.rewrite_table(str(page), "python bench/links.py", table)
        found = page.read_text()
        assert found.count(table) == 1 and found.startswith(before) and found.endswith(after)
    with pytest.raises(SystemExit, match="has no lines '<!-- measured by python other"):
        runs.rewrite_table(str(page), "python other.py", table)
