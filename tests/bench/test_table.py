"""What qccl-bench prints and writes: the table, JSON, charts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import qccl
from qccl.bench import params
from qccl.bench.options import SweepOptions
from qccl.bench.sweep import table
from qccl.bench.sweep.calls import Case
from qccl.bench.sweep.measure import Row, Side
from qccl.bench.sweep.report import RankDevice, Report

ROOT = Path(__file__).parents[2]


def row(codec: str = "minmax8", seconds: float = 0.004, wrong: int | None = 0, crossed: float | None = None) -> Row:
    side = Side((seconds, seconds), wrong, None if wrong is None else 7.4e-3, crossed)
    return Row(Case(4 << 20, qccl.base.dtypes.FLOAT32, "sum"), codec, "two_round", 6_340_608, side, side)


def test_rows_have_nccl_tests_columns_first() -> None:
    plain = replace(row("mpi", 0.0166), in_place=Side((0.002, 0.004, 0.008), 0, 0.0, None))
    fields = table.row(row(), plain, 4, None).split()
    assert fields[:5] == ["16777216", "4194304", "float", "sum", "-1"]
    assert fields[5:9] == fields[9:13] == ["4000.00", "4.19", "6.29", "0"]
    assert fields[13:] == ["6340608", "7.4e-03", "4.15x", "1.00x", "0", "0", "minmax8"]
    assert table.row(plain, plain, 4, None).split()[15:] == ["1.00x", "1.00x", "0", "150", "mpi"]
    link = params.parse_link("1gbit")
    fields = table.row(row(seconds=0.0513), None, 4, link).split()
    assert fields[15:] == ["-", "-", "0", "0", "50724.9", "98.9", "minmax8"]
    assert table.row(row(wrong=None), None, 4, None).count("N/A") == 3


@pytest.mark.parametrize("lab", [False, True])
@pytest.mark.parametrize("seconds", [0.0123, 0.05, 9.5])
def test_columns_stand_under_their_titles(seconds: float, lab: bool) -> None:
    link = params.parse_link("1gbit") if lab else None
    above, title, below = table.header("mpi", lab=lab)
    line = table.row(row(seconds=seconds), row("mpi", 10 * seconds), 4, link)
    assert title.index("codec") == line.index("minmax8")
    assert len(title.removesuffix("codec")) <= 160
    columns = [("size", 0), ("redop", 3), ("#wrong", 8), ("wire", 13), ("out", 15)]
    for name, number in columns + ([("floor", 19), ("line", 20)] if lab else []):
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
    r, link = row(), params.parse_link("1gbit")
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
    totals = table.totals([(each, None) for each in rows], 4)
    text = "\n".join(table.footer(totals, "mpi"))
    assert totals.okay is okay
    for part in parts:
        assert part in text


def test_a_wrong_plain_all_reduce_counts_too() -> None:
    assert not table.totals([(row(), row("mpi", wrong=1))], 4).okay


def test_the_footer_has_the_worse_of_both_modes() -> None:
    """A gain out of place does not hide a loss in place, which is how gradients are reduced."""
    slow_in_place = replace(row(seconds=0.001), in_place=Side((0.002078,), 0, 7.4e-3, None))
    plain = replace(row("mpi", 0.00137), in_place=Side((0.001539,), 0, 0.0, None))
    totals = table.totals([(slow_in_place, plain), (row(seconds=0.0005), plain)], 4)
    assert totals.speedups == {"minmax8": (pytest.approx(0.7406, abs=1e-4), pytest.approx(2.74))}
    assert "#   minmax8            : 0.74 to 2.74x" in table.footer(totals, "mpi")


def test_the_footer_has_the_spread_of_a_disturbed_row() -> None:
    """It reveals a disturbed row, also of the plain all-reduce."""
    disturbed = replace(row("mpi"), in_place=Side((0.004, 0.004, 0.004, 0.005, 0.0068), 0, 0.0, None))
    totals = table.totals([(row(), disturbed)], 4)
    assert disturbed.in_place.seconds == 0.004 and totals.spread == pytest.approx(0.7)
    assert "# Spread of the rounds : at most 70% of the median" in table.footer(totals, "mpi")


def test_one_round_has_no_spread() -> None:
    """As with -n 1, and in calls that are computed."""
    once = replace(row(), out_of_place=Side((0.004,), None, None, None), in_place=None)
    assert table.row(once, None, 4, None).split()[-3:] == ["-", "-", "minmax8"]
    totals = table.totals([(once, None)], 4)
    assert totals.spread is None and not any("Spread" in line for line in table.footer(totals, "none"))


@pytest.fixture
def report() -> Report:
    options = SweepOptions(
        minbytes=1 << 20, maxbytes=16 << 20, stepfactor=16, codecs=("minmax8",), args=("qccl-bench",)
    )
    made = Report(
        options, [RankDevice(r, 100 + r, "here", "host x86-64-v4") for r in range(4)], "UCX 1.22.0", "MPICH 5.0.2", None
    )
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
        assert side["time_rounds"] == pytest.approx([4000] * 2) and side["plain_time_rounds"] == pytest.approx(
            [2e5] * 2
        )
    assert found["speedup"]["minmax4"] == {"least": pytest.approx(100), "greatest": pytest.approx(100)}
    assert found["greatest_spread"] == 0 and found["config"]["timed"] == "method"
