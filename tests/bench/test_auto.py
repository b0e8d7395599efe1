"""bench/auto.py: the ratios, the table and the figure, from rows as a run writes them; nothing is measured."""

from __future__ import annotations

from typing import Any

import auto as program
import pytest

OF = {"cpu": "A", "cores": 2, "mpi": "", "ucx": "UCX 1", "tcp": "", "qccl": "0", "commit": "c", "date": "d"}


def row(size: int = 1024, network: str = "1gbit", ranks: int = 2, **changed: float) -> dict[str, Any]:
    """Times in which minmax8 by two_round is the best fixed choice of "auto", and auto took one_shot."""
    seconds = {"none one_shot": 4.0, "none two_round": 5.0, "minmax8 one_shot": 2.2, "minmax8 two_round": 2.0}
    seconds |= {"minmax4 one_shot": 1.0, "minmax4 two_round": 1.25, "auto auto": 2.3, "auto:minmax4 auto": 1.01}
    chosen = {"auto": "minmax8 one_shot", "auto:minmax4": "minmax4 one_shot"}
    return {
        **{"size": size, "network": network, "ranks": ranks, "profiled": 0.5, "rounds": 3, "chosen": chosen},
        "seconds": seconds | {name.replace("_X_", " "): each for name, each in changed.items()},
    }


def test_auto_is_compared_with_what_it_may_choose() -> None:
    assert program.beside(row(), "auto") == pytest.approx((1.15, 1.1, 0.575))
    assert program.beside(row(), "auto:minmax4") == pytest.approx((1.01, 1.0, 0.2525))
    without = row()
    without["seconds"] = {way: each for way, each in without["seconds"].items() if not way.startswith("none")}
    assert program.beside(without, "auto") == pytest.approx((1.15, 1.1, None))


def test_the_table_has_the_worst_size_of_each_network() -> None:
    rows = [row(), row(4096, auto_X_auto=1.9), row(network="700mbit 2ms", ranks=4)]
    text = program.report({"rows": rows, "machine": OF})
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert lines[0] == list(program.COLUMNS)
    assert lines[2] == ["2", "1gbit", "none", "`auto`", "2", "+5.0%", "+15.0%", "1K", "+10.0%", "-42.5%"]
    assert lines[4][:5] == ["4", "700mbit (new)", "2ms", "`auto`", "1"]
    assert "Of 6 cases 4 took at most 5% longer than the best fixed choice." in text
    assert "within 5% of the best in 3." in text
    assert "6 of the 6 with plain times took at most 3% longer" in text


def test_the_figure_has_a_panel_for_each_network(tmp_path) -> None:
    path = tmp_path / "auto.png"
    program.draw([row(), row(4096), row(network="700mbit 2ms", ranks=4)], path)
    assert path.read_bytes()[:4] == b"\x89PNG"
