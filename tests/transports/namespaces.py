"""Machines for tests: network namespaces, the cables between them, and Python inside them. Needs root."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import patience
import pytest

from qccl.bench.lab import lab

ROOT = Path(__file__).resolve().parents[2]
NEEDS_LAB = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.skipif(lab.obstacle() is not None, reason=lab.obstacle() or "there is a lab"),
]


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, timeout=20, capture_output=True, text=True).stdout


@contextmanager
def namespaces(*names: str) -> Iterator[list[str]]:
    """Network namespaces whose names begin with "qccl-" and this process's number."""
    made = [f"qccl-{os.getpid()}-{name}" for name in names]
    try:
        for name in made:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        yield made
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=20, capture_output=True)


def cable(one: str, name: str, address: str, other: str, other_name: str, other_address: str) -> None:
    """Connect two namespaces, with a network interface and its address in each."""
    ip("link", "add", name, "netns", one, "type", "veth", "peer", "name", other_name, "netns", other)
    for namespace, link, place in ((one, name, address), (other, other_name, other_address)):
        ip("-n", namespace, "address", "add", place, "dev", link)
        ip("-n", namespace, "link", "set", link, "up")


@contextmanager
def linked() -> Iterator[list[str]]:
    """Two namespaces with a cable between them: 10.99.7.1 at "qccl-veth0" and 10.99.7.2 at "qccl-veth1"."""
    with namespaces("first", "second") as machines:
        cable(machines[0], "qccl-veth0", "10.99.7.1/24", machines[1], "qccl-veth1", "10.99.7.2/24")
        yield machines


def inside(machine: str, *command: str) -> list[str]:
    return ["ip", "netns", "exec", machine, *command]


def start(machine: str | Sequence[str], *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Python in a namespace, or behind a command that enters one; stderr goes to stdout."""
    python = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}"} | patience.environment()
    return subprocess.Popen(
        [*(inside(machine) if isinstance(machine, str) else machine), sys.executable, *arguments],
        env=os.environ | python | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextmanager
def started(machine: str, *command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """As start(); the process ends with the block."""
    process = start(machine, *command, **environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def outputs(machines: list[str], *command: str, **environment: str | list[str]) -> list[str]:
    """The texts that two ranks write, one on each machine; a variable may have a value for each."""
    place = {"WORLD_SIZE": "2", "MASTER_PORT": "29500", "RANK": ["0", "1"]} | environment
    one, other = ({name: each if isinstance(each, str) else each[i] for name, each in place.items()} for i in (0, 1))
    return texts_of([start(machines[0], *command, **one), start(machines[1], *command, **other)])


def texts_of(processes: list[subprocess.Popen[str]]) -> list[str]:
    """All that the processes write until they end; those that do not end in time are killed."""
    try:
        return [process.communicate(timeout=90 * patience.factor())[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
