"""Calls in compiled functions: the checks of check_compiled.py, each on two processes that have connected once."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from start_ranks import Ended, needs_ucx, start_plain

pytestmark = [needs_ucx, pytest.mark.slow]

CHECKS = Path(__file__).with_name("check_compiled.py")
NAMES = [
    each.name
    for each in ast.parse(CHECKS.read_text(encoding="utf-8")).body
    if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")
]


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest) -> Ended:
    """The checks that are selected, one after the other."""
    wanted = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    command = ("-m", "pytest", *(f"{CHECKS}::{name}" for name in wanted), "-q", "-p", "no:cacheprovider", "-rA")
    return start_plain(2, *command, "--tb=short", limit=300, JAX_PLATFORMS="cpu")


@pytest.mark.parametrize("name", NAMES)
def test_on_two_processes(name: str, ended: Ended) -> None:
    passed = re.findall(rf"PASSED \S+::{name}$", ended.output, re.MULTILINE)
    if len(passed) != 2:
        pytest.fail(f"{name} failed:\n{ended.output}", pytrace=False)
    if not re.search(r"^(FAILED|ERROR) ", ended.output, re.MULTILINE):  # the processes have ended in order, too
        assert ended.status == 0, ended.output
