"""Nothing of the tests may outlive them: faulthandler ends a process that hangs, with its stacks."""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machines
import patience
import pytest
from plain_ranks import free_ports

#: Hypothesis' settings: "long" has other inputs in each run, and many
_PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "quick")
# ranks draw nothing, and start sooner without it
if "RANK" not in os.environ and importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("quick", derandomize=True, deadline=None, max_examples=50, print_blob=True, database=None)
    settings.register_profile("long", deadline=None, max_examples=2000, print_blob=True, database=None)
    settings.load_profile(_PROFILE)

machines.pretend(int(os.environ.get("RANK", "0")))  # for the ranks that run the checks of tests/ranks


def pytest_collection() -> None:
    """Thousands of tests are made, and none is garbage."""
    gc.disable()


_TESTS = Path(__file__).parent
#: markers of tests that run only where -m names the marker, because they take too long for every change
_ON_REQUEST = ("every_arch", "every_size", "every_interruption", "every_wheel", "every_trainer")


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what needs frameworks or CuPy. Leave out the tests that run on request only; the longest files start first.

    So at the end no worker is left alone with a long file.
    """
    for item in items:
        if item.path.is_relative_to(_TESTS / "torch") or item.path.is_relative_to(_TESTS / "jax"):
            item.add_marker("frameworks")
        if "cupy" in getattr(item, "fixturenames", ()):
            item.add_marker("cupy")
    left_out = [name for name in _ON_REQUEST if name not in config.getoption("markexpr")]
    config.hook.pytest_deselected(items=[item for item in items if any(map(item.get_closest_marker, left_out))])
    items[:] = [item for item in items if not any(map(item.get_closest_marker, left_out))]
    items.sort(key=lambda item: item.get_closest_marker("starts_first") is None)


def pytest_collection_finish() -> None:
    """Thousands of tests stay to the end: the collector of garbage need not look through them again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def deadline(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test ends within its time: 120 s, or more by its marker; longer if the machine is busy."""
    limits = {"slow": 1000, "lab": 1000, "every_size": 1000, "every_interruption": 4000, "every_wheel": 4000}
    seconds = max((limits[name] for name in limits if request.node.get_closest_marker(name)), default=120)
    seconds *= patience.factor() * (40 if _PROFILE == "long" else 1)
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True, scope="session")
def patient_processes() -> Iterator[None]:
    """The processes that tests wait for have more time if the machine is busy."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        patience.with_patient_processes(monkeypatch)
        yield


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Without the cyclic garbage collector: it goes through millions of live objects for nothing."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def threads_end() -> Iterator[None]:
    """The threads that a test starts end with it: other tests of the same process look at threads."""
    before = set(threading.enumerate())
    yield
    patience.wait_until(lambda: before.issuperset(threading.enumerate()), what="all threads of the test have ended")


@pytest.fixture
def executions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The executions that the host engine makes from now on."""
    from qccl.engine.host.execution import HostExecution

    found, usual = [], HostExecution.__init__

    def count(execution: HostExecution, *arguments: Any) -> None:
        found.append(execution)
        usual(execution, *arguments)

    monkeypatch.setattr(HostExecution, "__init__", count)
    return found


@pytest.fixture
def port() -> int:
    """A free TCP port."""
    return free_ports(1)[0]


@pytest.fixture
def world() -> Any:
    """Fake GPUs."""
    import fake_cuda

    return fake_cuda.World()


@pytest.fixture
def cupy(world: Any) -> Iterator[Any]:
    """The fake CuPy of these GPUs."""
    import fake_cuda
    import fake_kernels

    with fake_cuda.installed(world, fake_kernels.work) as module:
        yield module
