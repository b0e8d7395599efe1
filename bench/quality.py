"""Which codecs were shown to train as well as fp32: ``python bench/quality.py`` writes qccl/bench/quality.py's table.

It reads the curves of docs/results/training-*.json. The target of a training is the mean quality of fp32 after the
file's budget of steps, plus one standard deviation of its seeds, as in bench/train_slow_link.py.
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

__all__ = ["found", "table"]

_ROOT = Path(__file__).parent.parent
_PAGE = _ROOT / "qccl" / "bench" / "quality.py"
#: the methods of the files that are no specifications of codecs
_NAMES = {"fp32": "none", "fp16": "cast"}
_BEGIN, _END = "# written by bench/quality.py\n", "# end of bench/quality.py\n"
#: methods that are more than a codec: other warm-up steps, factors, outer steps, another optimiser
_MORE = re.compile("@|^(low_rank|diloco|sparseloco|demo):")
#: files of before there were several models
_FIRST_MODEL = "byte_model"


def found(folder: Path = _ROOT / "docs" / "results") -> dict[str, dict[str, float | None]]:
    """For each codec and model the steps to the target, relative to fp32's; None: most seeds did not reach it."""
    result: dict[str, dict[str, float | None]] = {}
    for path in sorted(folder.glob("training-*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("curves"):
            model = document.get("model", _FIRST_MODEL)
            for method, steps in _relative(document).items():
                if not _MORE.search(method):
                    result.setdefault(_NAMES.get(method, method), {})[model] = steps
    return result


def _relative(document: dict[str, Any]) -> dict[str, float | None]:
    curves = document["curves"]
    at_budget = [dict(row["curve"])[document["budget"]] for row in curves if row["method"] == "fp32"]
    target = statistics.fmean(at_budget) + (statistics.stdev(at_budget) if len(at_budget) > 1 else 0.0)
    steps = {method: _steps(curves, method, target) for method in dict.fromkeys(row["method"] for row in curves)}
    first = steps["fp32"]
    assert first is not None
    return {method: None if each is None else round(each / first, 2) for method, each in steps.items()}


def _steps(curves: list[dict[str, Any]], method: str, target: float) -> float | None:
    """The median over the seeds; None unless most of them reach the target."""
    each = [
        next((step for step, quality in row["curve"] if quality <= target), None)
        for row in curves
        if row["method"] == method
    ]
    known = [step for step in each if step is not None]
    return statistics.median(known) if 2 * len(known) > len(each) else None


def table(shown: dict[str, dict[str, float | None]]) -> str:
    """The lines of the table in Python."""
    rows = (
        f'    "{codec}": {{' + ", ".join(f'"{model}": {steps}' for model, steps in models.items()) + "},\n"
        for codec, models in sorted(shown.items())
    )
    return "STEPS: dict[str, dict[str, float | None]] = {\n" + "".join(rows) + "}\n"


if __name__ == "__main__":
    text = _PAGE.read_text(encoding="utf-8")
    block = re.compile(f"(?<={re.escape(_BEGIN)}).*(?={re.escape(_END)})", re.DOTALL)
    _PAGE.write_text(block.sub(lambda match: table(found()), text), encoding="utf-8")
    print(f"wrote the table of {_PAGE.relative_to(_ROOT)}")
