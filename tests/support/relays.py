"""A relay in a thread of the test, processes that use it, and ranks that nobody can call."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import patience

from qccl.relay.jobs import Job
from qccl.relay.server import Limits, Relay
from qccl.transports import regroup, relay_protocol, rendezvous, wan
from qccl.transports.relay_protocol import GREETING_NBYTES, Hello, Role, relay_key
from qccl.transports.secret import token_key
from qccl.transports.sockets import Place, listen

__all__ = ["KEY", "NAME", "TOKEN", "Client", "hidden", "hide", "joined", "running", "use", "wait_for"]

TOKEN = "a token for tests only"
#: of a job whose token is not needed
KEY, NAME = hashlib.sha256(b"key").digest(), hashlib.sha256(b"name").digest()
#: while it waits for something that must happen soon
_SECONDS = 60.0


@contextmanager
def running(*keys: bytes, limits: Limits | None = None, place: Place = ("127.0.0.1", 0)) -> Iterator[Relay]:
    """A relay for the jobs with these keys."""
    relay = Relay(listen(*place), [Job(key) for key in keys or (KEY,)], limits or Limits())
    thread = threading.Thread(target=relay.serve)
    thread.start()
    try:
        yield relay
    finally:
        relay.stop()
        thread.join(_SECONDS)
        assert not thread.is_alive()


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Until ``condition`` holds; AssertionError after some seconds."""
    limit = patience.Limit(_SECONDS)
    while not condition():
        assert limit.left(), f"this did not happen: {what}"
        time.sleep(0.002)


class Client:
    """A connection to a relay. With a ``role`` it says who it is."""

    def __init__(self, place: Place, role: Role | None = None, name: bytes = NAME, key: bytes = KEY) -> None:
        self.socket = socket.create_connection(place, timeout=_SECONDS)
        if role is not None:
            self.say(Hello.make(role, name, key, self.hear(GREETING_NBYTES)).packed())

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.socket.close()

    def say(self, content: bytes) -> None:
        self.socket.sendall(content)

    def hear(self, nbytes: int = 1) -> bytes:
        """So many bytes, or fewer where the relay has ended the connection."""
        found = b""
        while len(found) < nbytes:
            try:
                part = self.socket.recv(nbytes - len(found))
            except ConnectionResetError:
                return found
            if not part:
                return found
            found += part
        return found


@contextmanager
def joined(
    place: Place, name: bytes = NAME, key: bytes = KEY, *, is_sole: bool = False
) -> Iterator[tuple[Client, Client]]:
    """Two processes that the relay has joined."""
    roles = (Role.SOLE_CALLER, Role.SOLE_LISTENER) if is_sole else (Role.CALLER, Role.LISTENER)
    with Client(place, roles[0], name, key) as caller, Client(place, roles[1], name, key) as listener:
        assert caller.hear() == listener.hear() == relay_protocol.JOINED
        yield caller, listener


def token_relay_key() -> bytes:
    """The relay key of TOKEN."""
    token = token_key({"QCCL_TOKEN": TOKEN})
    assert token is not None
    return relay_key(token)


def use(monkeypatch, place: Place) -> None:
    """Let all ranks of this process use the relay."""
    monkeypatch.setenv("QCCL_TOKEN", TOKEN)
    monkeypatch.setenv("QCCL_RELAY", f"{place[0]}:{place[1]}")


class _Hidden(socket.socket):
    """A listening socket that names a port where nobody listens."""

    def getsockname(self):
        host, _, *rest = super().getsockname()
        with socket.create_server((host, 0)) as free:
            self.named = getattr(self, "named", free.getsockname()[1])
        return host, self.named, *rest


def hidden(*arguments: object, **options: object) -> socket.socket:
    """As listen(), but nobody finds it."""
    return _Hidden(fileno=listen(*arguments, **options).detach())


def hide(monkeypatch) -> None:
    """From now on the ranks of this process cannot reach each other directly."""
    monkeypatch.setattr(wan, "listen", hidden)
    monkeypatch.setattr(regroup, "listen", hidden)
    monkeypatch.setattr(rendezvous, "listen", lambda host, port, **options: hidden("127.0.0.1", 0, **options))
