"""The program of docs/examples with JAX: its short form runs and draws."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import EXAMPLES
from start_ranks import start


@pytest.mark.mpi
@pytest.mark.slow
def test_the_short_form_on_two_ranks(tmp_path: Path) -> None:
    picture = tmp_path / "x.png"
    command = (str(EXAMPLES / "jax_mlp.py"), "--quick", "--figure", str(picture))
    ended = start(2, *command, limit=300, MPLBACKEND="agg", JAX_PLATFORMS="cpu")
    assert ended.status == 0, ended.output
    for codec in ("none", "minmax8", "minmax4+ef", "onebit"):
        assert re.search(rf"^{re.escape(codec)}\S* +step +50 of 50", ended.output, re.M), ended.output
    assert ended.output.endswith(f"wrote {picture}\n") and picture.read_bytes().startswith(b"\x89PNG")
