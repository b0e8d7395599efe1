"""bench/doctor_accuracy.py: the predictions and the summary, from a document as it is saved; nothing is measured."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import doctor_accuracy as program
import pytest

from qccl.bench.doctor.speed import CodecSpeed
from qccl.bench.doctor.steps import Step, cost_of
from qccl.bench.doctor.training import estimated
from qccl.bench.params import parse_link

pytestmark = pytest.mark.slow

METHODS = ("none", "minmax4+ef", "minmax8")


def test_the_errors_of_the_predictions() -> None:
    """The measured steps are the doctor's own predictions, and 10% or 30% more."""
    own = asdict(estimated([(1000, 500), (100,)], 0.03, 1 << 19))
    speeds = {method: asdict(CodecSpeed(1e-9, 1e-9, 0.1)) for method in METHODS}
    document = {"machine": {"cores": 2}, "speeds": speeds, "profile of a": own, "rows": []}
    step = Step(program._computation(own), 4, parse_link("100mbit").rate, 0.5)
    for method, more in zip(METHODS, (1.0, 1.1, 1.3), strict=True):
        speed = CodecSpeed(**speeds[method])
        row = {"model": "a", "ranks": 4, "link": "100mbit", "method": method}
        document["rows"].append(row | {"seconds": cost_of(step, method, speed).overlapped * more})
    rows = list(program.predicted(document))
    assert [row["error"] for row in rows] == pytest.approx([0, 1 / 1.1 - 1, 1 / 1.3 - 1])
    ((model, ranks, link, median, worst, of, *_),) = program.summary(rows)
    assert (model, ranks, link, median, worst, of) == ("a", "4", "100mbit", "9%", "-23%", "minmax8")


def test_a_run_that_goes_on_measures_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, dict[str, Any], str | None]] = []

    def run(ranks: int, task: dict[str, Any], link: str | None) -> list[dict[str, Any]]:
        asked.append((ranks, task, link))
        if task["measure"] != "steps":
            return [{"found": {"of": task["model"]}}]
        return [{"found": {"method": method, "seconds": 1.0}} for method in task["methods"]]

    monkeypatch.setattr(program, "_run", run)
    given = {"models": "a", "methods": "none,minmax8", "ranks": "2,4", "links": "100mbit"}
    have = {"model": "a", "ranks": 2, "link": "100mbit", "method": "none", "seconds": 2.0}
    document = {"rows": [have], "profile of a": {}, "speeds": {}}
    assert len(list(program._measured(document, given))) == 2
    assert [(ranks, task["methods"], link) for ranks, task, link in asked] == [
        (2, ["minmax8"], "100mbit"),
        (4, ["none", "minmax8"], "100mbit"),
    ]
    assert len(document["rows"]) == 4 and document["rows"][0] == have
    assert list(program._measured(document, given)) == []
