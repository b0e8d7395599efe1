"""Callers that are no ranks, for tests: what they send to a rank's socket, and threads that go on calling."""

from __future__ import annotations

import asyncio
import json
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import msgspec
import patience

from qccl.meeting import channel
from qccl.meeting.join_address import JoinAddress
from qccl.meeting.messages import Member

Place = tuple[str, int]
#: an id, or a nonce, that is none of a rank
UNKNOWN = "0123456789abcdef" * 2


def frame(content: bytes) -> bytes:
    """A well-formed frame around anything."""
    return channel._HEAD.pack(channel._MAGIC, len(content), channel._checksum(content)) + content


def message(**fields: object) -> bytes:
    return frame(msgspec.json.encode(fields))


def member(chosen: random.Random) -> Member:
    """A process that does not exist, with a worker's address that is none."""
    return Member.make(chosen.randbytes(16).hex(), "127.0.0.1", 1, "0" * 64, chosen.randbytes(100))


def hello(chosen: random.Random, **fields: object) -> dict[str, object]:
    """What a rank says of itself, by one that is none."""
    said = {"kind": "join", "nonce": UNKNOWN, "to": UNKNOWN, "epoch": 0, "member": member(chosen), "calls": 0}
    return said | {"newcomers": [], "promised": [0, 0], "accepted": None} | fields


#: what a stranger sends: name -> bytes
PAYLOADS: dict[str, Callable[[random.Random], bytes]] = {
    "nothing": lambda chosen: b"",
    "random": lambda chosen: chosen.randbytes(chosen.randrange(1, 5000)),
    "another protocol": lambda chosen: b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "half a head": lambda chosen: message(kind="knock")[:10],
    "half a frame": lambda chosen: message(**hello(chosen))[:-7],
    "too long": lambda chosen: channel._HEAD.pack(channel._MAGIC, 63 << 20, b"") + bytes(100_000),
    "nested": lambda chosen: frame(b"[" * 500_000),
    "nested objects": lambda chosen: frame(b'{"kind":' * 100_000),
    "not JSON": lambda chosen: frame(chosen.randbytes(100)),
    "no object": lambda chosen: frame(b"[1, 2]"),
    "a watch": lambda chosen: message(kind="look"),
    "strange kind": lambda chosen: message(kind=["join"]),
    "unknown kind": lambda chosen: message(kind="abort"),
    "no fields": lambda chosen: b"".join(message(kind=kind) for kind in ("join", "probe", "knock", "decided")),
    "wrong types": lambda chosen: message(**hello(chosen, epoch="x", member=3, calls=None, newcomers={}, to=[])),
    "huge numbers": lambda chosen: frame(b'{"kind": "join", "epoch": ' + b"9" * 6000 + b', "id": 1e999}'),
    "garbage worker": lambda chosen: message(
        kind="knock", nonce=UNKNOWN, member=[UNKNOWN, "127.0.0.1", 1, chosen.randbytes(60).hex()]
    ),
    "worker not in base64": lambda chosen: message(
        kind="knock", nonce=UNKNOWN, member=[UNKNOWN, "127.0.0.1", 1, "z", UNKNOWN]
    ),
    "knock without a nonce": lambda chosen: message(kind="knock", nonce=UNKNOWN, member=member(chosen)),
    "forged decision": lambda chosen: message(kind="decided", to=UNKNOWN, decided=[1, [member(chosen)], 0, []]),
    "decision of no form": lambda chosen: message(kind="decided", to=UNKNOWN, decided=3),
    "join of no rank": lambda chosen: message(**hello(chosen)),
    "answers": lambda chosen: message(kind="promised") + message(kind="accepted"),
    "many frames": lambda chosen: message(**hello(chosen, kind="probe")) * 2000,
}


def mutated(content: bytes, chosen: random.Random) -> bytes:
    """A real frame with some bytes changed, cut, or repeated."""
    found = bytearray(content)
    for _ in range(chosen.randrange(1, 5)):
        found[chosen.randrange(len(found))] = chosen.randrange(256)
    return bytes(chosen.choice((found, found[: chosen.randrange(len(found))], found * 2)))


def real(chosen: random.Random) -> bytes:
    """A frame as a rank may send it, of ranks that do not exist."""
    kind = chosen.choice(("join", "probe", "knock", "decided"))
    if kind == "knock":
        return message(kind=kind, nonce=UNKNOWN, member=member(chosen))
    if kind == "decided":
        return message(kind=kind, to=UNKNOWN, decided=[1, [member(chosen)], 0, [member(chosen)]])
    return message(**hello(chosen, kind=kind))


def knock_once(place: Place, chosen: random.Random) -> None:
    """Call, send something, and stay for a moment. Raises OSError where nobody listens, or it is dropped."""
    with socket.create_connection(place, timeout=2) as connection:
        if connection.getsockname() == connection.getpeername():
            return
        connection.settimeout(2)
        if chosen.random() < 0.3:
            connection.sendall(mutated(real(chosen), chosen))
        else:
            connection.sendall(PAYLOADS[chosen.choice(list(PAYLOADS))](chosen))
        connection.settimeout(chosen.uniform(0.001, 0.2))
        with suppress(TimeoutError):
            while connection.recv(1 << 16):
                pass


def knock_for_ever(places: Callable[[], Iterable[Place]], seed: int, over: threading.Event) -> int:
    """Call one of the places after the other, until ``over``; the number of calls that were heard."""
    chosen, calls = random.Random(seed), 0
    while not over.wait(0.002):
        for place in places():
            with suppress(OSError):
                knock_once(place, chosen)
                calls += 1
    return calls


@contextmanager
def strangers(*places: Place, count: int = 3) -> Iterator[None]:
    """Threads that call these places meanwhile."""
    over = threading.Event()
    with ThreadPoolExecutor(count) as pool:
        for seed in range(count):
            pool.submit(knock_for_ever, lambda: places, seed, over)
        try:
            yield
        finally:
            over.set()


@contextmanager
def connected(place: Place, payload: bytes = b"") -> Iterator[socket.socket]:
    """A stranger's connection; of the payload so much is sent as the other side takes."""
    with socket.create_connection(place, timeout=5) as connection:
        connection.settimeout(0.5)
        with suppress(OSError):
            connection.sendall(payload)
        yield connection


def has_ended(connection: socket.socket) -> bool:
    """Whether the other side has ended the connection; reads what has come."""
    while select.select([connection], [], [], 0)[0]:
        try:
            if not connection.recv(1 << 16):
                return True
        except OSError:
            return True
    return False


def stream(place: Place, part: bytes, over: threading.Event, head: bytes = b"", pause: float = 0) -> None:
    """Send ``part`` again and again until ``over``, over a new connection when the old one is closed.

    With a ``pause`` send it byte by byte, with so many seconds between them.
    """
    pieces = [bytes([byte]) for byte in part] if pause else [part]
    while not over.wait(0.001):
        with suppress(OSError), socket.create_connection(place, timeout=2) as connection:
            connection.settimeout(1)
            connection.sendall(head)
            while not over.is_set():
                for piece in pieces:
                    connection.sendall(piece)
                    if over.wait(pause):
                        return


def be_strangers(folder: Path, seed: int) -> None:
    """Go on calling the places in ``folder/places``, and write to ``folder/calls.SEED`` how many calls were heard."""

    def places() -> list[Place]:
        with suppress(OSError, ValueError):
            return [JoinAddress.of(each).place for each in json.loads((folder / "places").read_text())]
        return []

    def stay_silent() -> None:
        while True:
            with ExitStack() as stack:
                for place in places() * 15:
                    with suppress(OSError):
                        stack.enter_context(socket.create_connection(place, timeout=1))
                time.sleep(1)

    threading.Thread(target=stay_silent, daemon=True).start()
    calls = 0
    while True:
        over = threading.Event()
        threading.Timer(1, over.set).start()
        calls += knock_for_ever(places, seed + calls, over)
        (folder / f"calls.{seed}").write_text(str(calls))


@contextmanager
def knockers(*places: Place, count: int) -> Iterator[None]:
    """``count`` processes that want to join, over the places in turn: they answer the challenge, stay, and call again.

    The block begins when all have called once.
    """
    over, called = threading.Event(), set[int]()

    async def knock(number: int) -> None:
        while True:
            with suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection(*places[number % len(places)])
                called.add(number)
                with closing(writer):
                    _, length, _ = channel._HEAD.unpack(await reader.readexactly(channel._HEAD.size))
                    nonce = json.loads(await reader.readexactly(length))["nonce"]
                    writer.write(message(kind="knock", nonce=nonce, member=member(random.Random(number))))
                    await reader.read()
            await asyncio.sleep(0.01)

    async def knock_until_over() -> None:
        tasks = [asyncio.ensure_future(knock(number)) for number in range(count)]
        await asyncio.to_thread(over.wait)
        for task in tasks:
            task.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(knock_until_over()))
    thread.start()
    try:
        patience.wait_until(lambda: len(called) == count)
        yield
    finally:
        over.set()
        thread.join(30)
