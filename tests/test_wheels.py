"""The wheels that scripts/wheels has put into dist/ install and run where there is no compiler.

    scripts/wheels && scripts/test -m every_wheel tests/test_wheels.py

It takes some minutes for each system, most of them for its download, and for aarch64 longer, because qemu runs all. The
systems are kept in build/wheels/systems.
"""

from __future__ import annotations

from pathlib import Path

import clean_systems
import pytest


@pytest.mark.every_wheel
@pytest.mark.parametrize("kind", clean_systems.KINDS, ids=str)
def test_the_wheel_runs_the_main_job_and_has_the_bytes_of_every_other_build(
    kind: clean_systems.Kind, tmp_path: Path
) -> None:
    if missing := kind.why_not():
        pytest.skip(missing)
    system = clean_systems.System(kind, tmp_path)
    assert system.main_job()
    assert system.golden()
