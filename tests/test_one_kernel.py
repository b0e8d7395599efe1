"""The protocol of docs/one-kernel.md is right under a weak memory model, and nothing in it is superfluous."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
from one_kernel import PARTS, Failure, Setup, explore, wander

from qccl.dtypes import BFLOAT16, FLOAT32

ONE_SHOTS = (("one_shot", 1),) * 3
TWO_SHOTS = (("two_shot", 2), ("two_shot", 1))
MIXED = (("one_shot", 1), ("two_shot", 2), ("two_shot", 1))
ROOT = Path(__file__).parent.parent
LARGE = Setup(ranks=4, blocks=2, calls=(("two_shot", 3), ("one_shot", 1), ("two_shot", 2)))

#: runs, one of which must go wrong for each part that is left out
PROBES = [
    Setup(calls=MIXED),
    Setup(calls=(("one_shot", 1),), blocks=2),
    Setup(calls=TWO_SHOTS, deadlines=True),
]


def goes_wrong(setup: Setup) -> bool:
    try:
        explore(setup)
    except Failure:
        return True
    return False


@pytest.mark.parametrize(
    "setup",
    [
        Setup(calls=(("two_shot", 3), ("one_shot", 1), ("two_shot", 2))),
        Setup(calls=(("one_shot", 2), *ONE_SHOTS)),
        Setup(ranks=3, calls=(("one_shot", 1), ("two_shot", 1), ("one_shot", 1))),
        Setup(ranks=3, calls=(("two_shot", 1), ("two_shot", 1))),
        Setup(ranks=4, calls=(("one_shot", 1), ("two_shot", 1))),
        Setup(blocks=2, calls=(("one_shot", 1),)),
    ],
    ids=str,
)
def test_right_in_every_order(setup: Setup) -> None:
    assert explore(setup) > 20


@pytest.mark.parametrize("seed", range(6))
def test_right_in_random_orders(seed: int) -> None:
    wander(LARGE, seed)


@pytest.mark.parametrize("absent", [None, 1])
def test_deadlines_end_every_run(absent: int | None) -> None:
    """No rank that is not aborted gets a wrong result from one that is, and aborted ranks end."""
    for calls in (ONE_SHOTS, (("two_shot", 1), ("two_shot", 1))):
        explore(Setup(calls=calls, deadlines=True, absent=absent))


@pytest.mark.parametrize("seed", range(6))
def test_deadlines_end_runs_in_random_orders(seed: int) -> None:
    wander(replace(LARGE, deadlines=True, absent=seed % 4), seed)


@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_superfluous(part: str) -> None:
    assert any(goes_wrong(replace(setup, without=part)) for setup in PROBES), PARTS[part]


@pytest.mark.parametrize("part", [part for part in PARTS if part.endswith("1") and part != "slots 1"])
def test_nothing_is_superfluous_in_one_shot_calls(part: str) -> None:
    deadlines = part == "abort 1"
    setup = Setup(calls=(("one_shot", 3),), deadlines=deadlines, absent=1 if deadlines else None, without=part)
    assert goes_wrong(setup), PARTS[part]


@pytest.mark.parametrize("part", ["", *PARTS])
def test_orders_that_are_left_out_show_nothing_else(part: str) -> None:
    """``explore`` finds what it finds with each store early or late, and no operation without a step of its own."""
    setup = Setup(calls=(("one_shot", 1), ("two_shot", 1)) if part == "" else MIXED, without=part)
    if part and not goes_wrong(setup):
        return  # needs blocks or deadlines, where the runs are too many
    if part == "":
        assert explore(setup, visible=("any",)) > explore(setup)
    else:
        with pytest.raises(Failure):
            explore(setup, visible=("any",))


@pytest.mark.parametrize(
    ("calls", "ahead", "slots"),
    [
        (TWO_SHOTS, 0, (1, 1)),
        (TWO_SHOTS, 1, (2, 2)),
        (ONE_SHOTS, 0, (2, 1)),
        (MIXED, 0, (2, 1)),
        (MIXED, 1, (3, 2)),
    ],
)
def test_slots_that_are_needed(calls: tuple[tuple[str, int], ...], ahead: int, slots: tuple[int, int]) -> None:
    """The table of the page: as many suffice, and one less in a round does not."""
    setup = Setup(calls=calls, ahead=ahead, slots=slots)
    explore(setup)
    for fewer in ((slots[0] - 1, slots[1]), (slots[0], slots[1] - 1)):
        if min(fewer) > 0:
            assert goes_wrong(replace(setup, slots=fewer)), fewer


def test_blocks_need_places_only_if_they_begin_in_any_order() -> None:
    setup = Setup(blocks=2, resident=1, calls=(("two_shot", 1),))
    explore(setup)
    with pytest.raises(Failure, match="deadlock"):
        explore(replace(setup, in_order=False))


def test_the_page_has_the_estimates_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    nvlink = importlib.import_module("nvlink")
    page = (ROOT / "docs" / "one-kernel.md").read_text(encoding="utf-8")
    for dtype in (BFLOAT16, FLOAT32):
        assert nvlink.table(dtype) in page, f"print it with: python bench/nvlink.py ({dtype})"
