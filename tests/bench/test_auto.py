"""bench/auto.py: what "auto" is compared with, from rows as a run writes them."""

from __future__ import annotations

from typing import Any

import auto as program
import pytest


def row() -> dict[str, Any]:
    """Times in which minmax8 by two_round is the best fixed choice of "auto", and auto took one_shot."""
    seconds = {"none one_shot": 4.0, "none two_round": 5.0, "minmax8 one_shot": 2.2, "minmax8 two_round": 2.0}
    seconds |= {"minmax4 one_shot": 1.0, "minmax4 two_round": 1.25, "auto auto": 2.3, "auto:minmax4 auto": 1.01}
    chosen = {"auto": "minmax8 one_shot", "auto:minmax4": "minmax4 one_shot"}
    return {"size": 1024, "network": "1gbit", "ranks": 2, "chosen": chosen, "seconds": seconds}


def test_auto_is_compared_with_what_it_may_choose() -> None:
    assert program.beside(row(), "auto") == pytest.approx((1.15, 1.1, 0.575))
    assert program.beside(row(), "auto:minmax4") == pytest.approx((1.01, 1.0, 0.2525))
    without = row()
    without["seconds"] = {way: each for way, each in without["seconds"].items() if not way.startswith("none")}
    assert program.beside(without, "auto") == pytest.approx((1.15, 1.1, None))
