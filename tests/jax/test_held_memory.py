"""The memory of a call's arrays of JAX lives as long as the call uses it, whatever becomes of the arrays."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import jax, numpy as np
from swapped_memory import COUNT, call

def donate(x):  # what is computed next must not be written into the memory of x
    jax.jit(lambda a: a * 0 - 7, donate_argnums=0)(x).block_until_ready()

take_away = {"delete": lambda x: x.delete(), "donation": donate}[sys.argv[1]]
for planned in (False, True):
    made = call(lambda: jax.numpy.full(COUNT, 2, np.float32).block_until_ready(), take_away, planned=planned)
    assert (made == 3).all()
"""


@pytest.mark.parametrize("way", ["delete", "donation"])
def test_taken_away_in_the_middle_of_a_call(way: str) -> None:
    """In a process where each array is a mapping: a call that uses freed memory ends it."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM, way]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
