"""A plugin of pytest for mutants.py: records the lines that each test runs, or runs chosen tests only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def pytest_configure(config: Any) -> None:
    if "MUTANTS_RECORD" in os.environ:
        config.pluginmanager.register(_Recorder())


def pytest_collection_modifyitems(items: list[Any]) -> None:
    if path := os.environ.get("MUTANTS_CHOSEN"):
        chosen = set(json.loads(Path(path).read_text()))
        items[:] = [item for item in items if item.nodeid in chosen]


class _Recorder:
    """Of the tests in this process, and of the processes that they start."""

    def __init__(self) -> None:
        from coverage import Coverage

        settings = os.environ["COVERAGE_PROCESS_START"] = os.environ["MUTANTS_RECORD"]
        self._coverage = Coverage(config_file=settings, context="")
        self._passed: dict[str, float] = {}
        self._coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        file = nodeid.partition("::")[0]
        # processes of one test of tests/torch serve later tests
        os.environ["MUTANTS_CONTEXT"] = file if file.startswith("tests/torch/") else nodeid
        self._coverage.config.context = os.environ["MUTANTS_CONTEXT"]  # of forks
        self._coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._passed[report.nodeid] = float("inf")
        elif not report.skipped:
            self._passed[report.nodeid] = self._passed.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self, session: Any) -> None:
        self._coverage.stop()
        self._coverage.save()
        Path(os.environ["MUTANTS_PASSED"]).write_text(json.dumps(self._passed))
