"""bench/peers.py: what a rank measures, and which rows are compared."""

from __future__ import annotations

import signal
from itertools import combinations
from pathlib import Path

import numpy as np
import patience
import peer_report
import peers
import pytest
from bench_runs import peer_ranks
from peer_rank import errors
from peer_report import comparisons, verdict
from runs import read


@pytest.mark.processes
def test_ranks_find_the_error_of_a_system(tmp_path):
    (first,), (second,) = peer_ranks("qccl minmax8", tmp_path)
    row = peers._row((first, second), 2)
    assert row["equal"] and row["count"] == 5000 and 5e-3 < row["error"] < 2e-2 and abs(row["bias"]) < 1e-2
    assert len(row["blocks"]) == 3 and row["seconds"] > 0


@pytest.mark.processes
def test_what_a_system_raises_is_its_result(tmp_path):
    found = peer_ranks("hivemind uniform8", tmp_path)
    assert all("ModuleNotFoundError" in each["error"] for each in found)


#: ranks that are killed in a call: the last one by itself; what the first one does is the parameter
_ENDING = """
import json, os, sys, time
rank, folder = int(os.environ["RANK"]), json.loads(sys.argv[1])["folder"]
if rank == 0:
    {first}
if rank == 1:
    with open(folder + "/rank-1.json", "w") as file:
        json.dump({{"seconds": 0.1, "raised": "lost"}}, file)
"""


@pytest.mark.processes
@pytest.mark.parametrize(("first", "outcome"), [("os.abort()", "ended"), ("time.sleep(60)", "waits")])
def test_a_rank_that_ends_without_a_word_does_not_wait(first, outcome, tmp_path, monkeypatch):
    program = tmp_path / "rank.py"
    program.write_text(_ENDING.format(first=first))
    monkeypatch.setattr(peers, "_RANK", str(program))
    monkeypatch.setattr(peers, "_SURVIVORS_SECONDS", 20 * patience.factor() if outcome == "ended" else 1.0)
    found = peers._with_a_killed_rank("qccl none")
    assert found == {"outcome": outcome, **({"status": -signal.SIGABRT} if outcome == "ended" else {})}


def test_error_and_bias():
    exact = np.array([3.0, 4.0])
    assert errors(np.float32([3, 4]), exact) == {"error": 0, "bias": 0}
    assert errors(np.float32([1.5, 2]), exact) == {"error": 0.5, "bias": -0.5}


def row(system: str, error: float, seconds: float, **more) -> dict:
    return (
        {"network": "1gbit", "ranks": 2, "count": 1 << 20, "system": system}
        | {"error": error, "seconds": seconds}
        | more
    )


def test_a_system_is_compared_with_the_fastest_codec_that_is_as_exact():
    rows = [
        row("gloo", 3e-8, 4.0),
        row("exact to three digits", 1e-3, 4.0, ranks=3),
        row("qccl cast", 2e-3, 2.5, ranks=3),
        row("gloo bf16", 3e-3, 2.0),
        row("qccl none", 4e-8, 3.0),
        row("qccl cast", 2e-3, 2.5),
        row("qccl minmax8", 9e-3, 1.0),
        row("qccl none", 4e-8, 1.0, ranks=4),
    ]
    found = {theirs["system"]: own["seconds"] for theirs, own in comparisons({"rows": rows})}
    assert found == {"gloo": 3.0, "gloo bf16": 2.5}
    text = verdict({"rows": rows})
    assert "1 further calls had a smaller error" in text and "at most 5% larger" in text
    assert (
        "compared 2 times" in text and "faster 1 times" in text and "| gloo bf16 | 2 x 1gbit | 4M | 2e+03 ms |" in text
    )


def test_a_system_that_qccl_cannot_match_is_not_compared():
    assert not list(comparisons({"rows": [row("other", 1e-4, 1.0), row("qccl minmax8", 9e-3, 0.5)]}))


def test_labels_of_the_figure_cover_nothing(monkeypatch):
    """Each point of qccl has a label inside its panel, beside all markers and other labels."""
    newest = max((Path(peers.__file__).parents[1] / "docs" / "results").glob("peers-*.json"))
    figures = []
    monkeypatch.setattr(peer_report, "save_figure", lambda figure, _: figures.append(figure))
    peer_report.draw(read(newest), Path("peers.png"))
    (figure,) = figures
    panels = [axes for axes in figure.axes if axes.lines]
    assert len(panels) == 4
    for axes in panels:
        boxes = [text.get_window_extent() for text in axes.texts if text.get_text()]
        assert len(boxes) == len(axes.lines[0].get_xydata())
        assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
        marks = [mark for line in axes.lines for mark in axes.transData.transform(line.get_xydata())]
        assert not any(box.contains(*mark) for box in boxes for mark in marks)
        assert all(axes.bbox.contains(*corner) for box in boxes for corner in box.corners())
