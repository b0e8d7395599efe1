"""The end of the process and children of os.fork(): in which order, and for which objects."""

from __future__ import annotations

import subprocess
import sys

import pytest
from changing_sets import changed_while_read

from qccl.base import lifetime
from qccl.base.lifetime import Registry


def printed(program: str) -> list[str]:
    """The lines that a process prints that runs the program."""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert not ended.stderr, ended.stderr
    return ended.stdout.splitlines()


REGISTRIES = """
import atexit, functools, os, sys
from qccl.base import lifetime
from qccl.base.lifetime import Registry, Stage, at_exit

class Thing:
    def __init__(self, name):
        self.name = name
    def say(self, what):
        print(what, self.name, flush=True)

def registry(stage, *whats, **more):
    return Registry(tuple(functools.partial(Thing.say, what=what) for what in whats), stage, **more)
"""


@pytest.mark.processes
def test_stages_follow_each_other_however_they_were_registered():
    """As a transport's module that is imported when there are engines; and exit handlers of the program."""
    program = f"""
{REGISTRIES}
engines = registry(Stage.ENGINES, "leaves")
atexit.register(lambda: print("before all"))
first = Thing("first")
engines.add(first)
at_exit(Stage.LIBRARIES, lambda: print("a library ends"))
at_exit(Stage.CALLS, lambda: print("calls end"))
atexit.register(lambda: print("between"))
transports = registry(Stage.TRANSPORTS, "disconnects", "waits")
second, third = Thing("second"), Thing("third")
transports.add(second)
transports.add(third)
"""
    said = printed(program)
    assert sorted(said[2:4]) == ["disconnects second", "disconnects third"]
    assert sorted(said[4:6]) == ["waits second", "waits third"]
    assert said[:2] + said[6:] == ["calls end", "leaves first", "between", "a library ends", "before all"]


@pytest.mark.processes
def test_the_last_object_counts():
    """Exit handlers that the program registered before it run afterwards."""
    program = f"""
{REGISTRIES}
engines = registry(Stage.ENGINES, "leaves")
first = Thing("first")
engines.add(first)
atexit.register(lambda: print("the program's"))
second = Thing("second")
engines.add(second)
"""
    assert printed(program)[2:] == ["the program's"]


@pytest.mark.processes
@pytest.mark.parametrize("keeps", [False, True])
def test_what_a_registry_keeps_alive(keeps):
    program = f"""
{REGISTRIES}
engines = registry(Stage.ENGINES, "leaves", keeps={keeps})
gone, stays = Thing("gone"), Thing("stays")
engines.add(gone)
engines.add(stays)
print(len(engines))
engines.discard(gone)
del stays
"""
    assert printed(program) == ["2", "leaves stays"] if keeps else ["2"]


@pytest.mark.processes
@pytest.mark.parametrize("keeps", [False, True])
def test_a_child_and_its_child(keeps):
    """The object is told in both; at their ends nothing is done for it. Where it was kept alive it is never freed."""
    program = f"""
{REGISTRIES}
engines = registry(Stage.ENGINES, "leaves", at_fork=functools.partial(Thing.say, what="forked"), keeps={keeps})
old = Thing("old")
engines.add(old)
Thing.__del__ = lambda self: print("freed", self.name, flush=True)
for generation in ("child", "grandchild"):
    if child := os.fork():
        os.waitpid(child, 0)
        del Thing.__del__
        break
    print(generation, len(engines), flush=True)
else:
    engines.discard(old)
    del old
    print("discarded", flush=True)
    del Thing.__del__
    new = Thing("new")
    engines.add(new)
"""
    freed = [] if keeps else ["freed old"]
    assert printed(program) == [
        *("forked old", "child 0", "forked old", "grandchild 0"),
        *(*freed, "discarded", "leaves new"),  # and then the child ends, with nothing to do
        "leaves old",
    ]


class Thing:
    pass


def test_another_thread_may_add_objects_meanwhile():
    """As where the handler of a signal goes through all communicators while a thread makes one."""
    registry, things = Registry[Thing](), []

    def add() -> None:
        things.append(Thing())
        registry.add(things[-1])

    for _ in range(3):
        add()
    with changed_while_read(add):
        found = list(registry)
    assert set(things[:3]) <= set(found) <= set(things)


def test_an_exception_that_was_caught_is_not_what_ended_the_process(monkeypatch):
    """pytest and notebooks keep the last one where Python keeps the one that ends the program."""
    try:
        raise ValueError("caught")
    except ValueError as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        assert lifetime.unhandled() is None
        monkeypatch.delattr(sys, "last_value")
        assert lifetime.unhandled() is None
