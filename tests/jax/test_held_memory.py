"""The memory of a call's arrays of JAX lives as long as the call uses it, whatever becomes of the arrays."""

from __future__ import annotations

import pytest
from rank_forks import outputs

PROGRAM = """
import ctypes
assert ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD of <malloc.h>
import jax, numpy as np
from swapped_memory import COUNT, call

def donate(x):  # what is computed next must not be written into the memory of x
    jax.jit(lambda a: a * 0 - 7, donate_argnums=0)(x).block_until_ready()

take_away = {way}
for planned in (False, True):
    made = call(lambda: jax.numpy.full(COUNT, 2, np.float32).block_until_ready(), take_away, planned=planned)
    assert (made == 3).all()
"""


@pytest.mark.parametrize("way", ["lambda x: x.delete()", "donate"])
def test_taken_away_in_the_middle_of_a_call(way: str) -> None:
    """In a process where each array is a mapping: a call that uses freed memory ends it."""
    outputs(PROGRAM.format(way=way))
