"""A map of intervals: what it finds and replaces is what an array of all integers would have."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from qccl.collectives.analysis.intervals import IntervalMap

END = 30


@dataclass
class Cell:
    start: int
    stop: int
    label: int

    def split(self, at: int) -> Cell:
        rest = Cell(at, self.stop, self.label)
        self.stop = at
        return rest


def by_integer(cells: list[Cell]) -> dict[int, int]:
    """The label of each integer. No cell is empty, none overlaps another one, and they ascend."""
    found = [(i, cell.label) for cell in cells for i in range(cell.start, cell.stop)]
    assert all(cell.start < cell.stop for cell in cells) and [i for i, _ in found] == sorted({i for i, _ in found})
    return dict(found)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, END - 1), st.integers(1, 9)), max_size=30))
def test_any_order_of_uses(uses):
    intervals, model = IntervalMap[Cell](), dict[int, int]()
    for number, (puts, start, length) in enumerate(uses):
        within = {i: model[i] for i in range(start, start + length) if i in model}
        if puts:
            assert by_integer(intervals.put(Cell(start, start + length, number))) == within
            model |= dict.fromkeys(range(start, start + length), number)
        else:
            assert by_integer(intervals.covered(start, start + length)) == within
        assert by_integer(list(intervals)) == model


def test_intervals_that_recur_are_not_split():
    intervals = IntervalMap[Cell]()
    cells = [Cell(0, 4, 0), Cell(4, 8, 1)]
    assert [intervals.put(cell) for cell in cells] == [[], []]
    assert intervals.covered(4, 8) == [cells[1]] and intervals.covered(0, 8) == cells == list(intervals)
