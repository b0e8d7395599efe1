"""States of which a part is replaced by junk: each is refused, and changes nothing, or it is loaded."""

from __future__ import annotations

import copy
import io

import numpy as np

import qccl

JUNK = (None, True, -1, 2**70, 0.5, float("nan"), "x", [], [1, "y"], {}, {"w": 1}, {1: {}}, b"z", object())
JUNK += (np.ones((2, 2)), np.array([np.nan]), np.array(["x"]), np.array(3.0), np.ones(3) * 1j, np.array([object()]))


def saved(state) -> bytes:
    file = io.BytesIO()
    qccl.save_state(file, state)
    return file.getvalue()


def places(value, path=()):
    """The paths of a state's parts."""
    yield path
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(each, (*path, key))


def changed(state, path, junk):
    """The state with something else at ``path``."""
    if not path:
        return junk
    state = copy.copy(state)
    state[path[0]] = changed(state[path[0]], path[1:], junk)
    return state


def assert_refused_or_loaded(load, good, same) -> None:
    """For each part of a state that is replaced by junk: ArgumentError, and nothing has changed, or it is loaded."""
    refused = 0
    for path in places(good):
        for junk in JUNK:
            try:
                load(changed(good, path, junk))
            except qccl.ArgumentError:
                refused += 1
                assert same(), (path, junk)
            else:
                load(good)
    assert refused > len(JUNK) * 4  # of the parts, few take anything
