"""Tests whose bodies run on the ranks of a process group over gloo: forks of one process that has imported PyTorch."""

from __future__ import annotations

import base64
import functools
import inspect
import os
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import rank_forks
import torch
import torch.distributed as dist
from plain_ranks import torch_variables
from rank_forks import Ended, check

_SETTINGS = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
_ARGUMENTS = "QCCL_TEST_ARGUMENTS"


def on_ranks(*sizes: int, transport: str = "auto", **environment: str) -> Callable[[Callable[..., None]], Any]:
    """Make a test for each of these numbers of ranks: its body runs on every rank, and must return on each.

    The body's arguments are pickled: those of parametrize(), and of fixtures such as tmp_path.
    """

    def decorate(body: Callable[..., None]) -> Any:
        @pytest.mark.parametrize("ranks", sizes)
        @functools.wraps(body)
        def test(ranks: int, **arguments: Any) -> None:
            check(run(body, ranks, arguments, transport=transport, **environment))

        given = inspect.signature(body)
        ranks = inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = given.replace(parameters=[*given.parameters.values(), ranks])  # type: ignore[attr-defined]
        test.body = functools.partial(_work, body, True)  # type: ignore[attr-defined]
        return test

    return decorate


def in_group(body: Callable[[], Any]) -> Any:
    """Let run() start ``body``, whose ranks end as Python ends any program, each when its body has returned."""
    body.body = functools.partial(_work, body, False)  # type: ignore[attr-defined]
    return body


def run(
    body: Callable[..., Any],
    size: int,
    arguments: Mapping[str, Any] | None = None,
    *,
    transport: str = "auto",
    **environment: str,
) -> list[Ended]:
    """Run a function of a test's file, which on_ranks() or in_group() decorates, and return how each rank ended."""
    given = {_ARGUMENTS: base64.b64encode(pickle.dumps(dict(arguments or {}))).decode(), "QCCL_TRANSPORT": transport}
    return rank_forks.run(size, body, **_SETTINGS, **given, **environment)


def _work(body: Callable[..., Any], meets: bool, rank: int, size: int, address: str) -> None:
    """Run the body in a process group; with ``meets`` the ranks leave the group together, and end at once."""
    os.environ |= torch_variables(rank, size, int(address.rpartition(":")[2]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.barrier()  # a rank that leaves at once would close connections that others still make
    found = body(**pickle.loads(base64.b64decode(os.environ.pop(_ARGUMENTS))))
    if found is not None:
        print(found, flush=True)
    if meets:
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        print("done", flush=True)
        os._exit(0)  # Python's own end touches each object, and so copies the memory of the process that forked
