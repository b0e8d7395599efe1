"""Connections by TLS 1.3 with a secret: what both sides read, and what they refuse."""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import patience
import pytest
from tls_streams import stream

from qccl import _host
from qccl.base.errors import EngineError
from qccl.meeting import tls

MEBIBYTE = 1 << 20

Pair = tuple[_host.TlsStream, _host.TlsStream]


def over_tcp() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return client, listener.accept()[0]


SOCKETS: dict[str, Callable[[], tuple[socket.socket, socket.socket]]] = {"unix": socket.socketpair, "tcp": over_tcp}


def pair(kind: str = "unix", **options: int) -> Pair:
    client, server = SOCKETS[kind]()
    return stream(client, False, **options), stream(server, True, **options)


def wait(*streams: _host.TlsStream) -> None:
    writers = [each for each in streams if each.wants_write]
    select.select(streams, writers, [], 0.01)


def shake_hands(*streams: _host.TlsStream) -> None:
    patience.wait_until(lambda: all([each.handshake() for each in streams]), lambda: wait(*streams))


def connected(kind: str = "unix", **options: int) -> Pair:
    streams = pair(kind, **options)
    shake_hands(*streams)
    return streams


def exchange(
    streams: Pair, payloads: tuple[bytes, bytes], most: int = MEBIBYTE, sent: tuple[int, int] = (0, 0)
) -> tuple[bytes, bytes]:
    """What each of two streams reads while the other writes its payload, of which so much is ``sent`` already."""
    sent, got = list(sent), [bytearray(), bytearray()]
    limit = patience.Limit(60)
    while any(len(got[i]) < len(payloads[1 - i]) for i in range(2)):
        is_idle = True
        for i, each in enumerate(streams):
            if sent[i] < len(payloads[i]):
                taken = each.write(payloads[i][sent[i] : sent[i] + MEBIBYTE])
                sent[i] += taken or 0
                is_idle &= taken is None
            read = each.read(most)
            assert read != b""
            got[i] += read or b""
            is_idle &= read is None
        if is_idle:
            wait(*streams)
        assert limit.left()
    return bytes(got[0]), bytes(got[1])


def refused(each: _host.TlsStream, text: str, peer: _host.TlsStream | None = None) -> None:
    """The handshake fails with ``text``, and again when it is tried again."""
    limit = patience.Limit(20)
    with pytest.raises(_host.StreamError, match=text):
        while not each.handshake():
            if peer is not None:
                peer.handshake()
            wait(each)
            assert limit.left()
    for again in (each.handshake, lambda: each.read(1), lambda: each.write(b"x")):
        with pytest.raises(_host.StreamError, match=text):
            again()


@pytest.mark.parametrize(
    ("kind", "most", "nbytes"),
    [
        *((kind, MEBIBYTE, 5 * MEBIBYTE + 3) for kind in SOCKETS),
        *(("unix", 1, 50), ("unix", 1000, 50_000), ("unix", 16 << 10, 300_000), ("unix", (16 << 10) + 1, 300_000)),
    ],
)
def test_both_directions_bring_the_bytes(kind: str, most: int, nbytes: int) -> None:
    """By reads of any size, which do the handshake themselves, as writes do."""
    payloads = os.urandom(nbytes), os.urandom(nbytes // 2)
    assert exchange(pair(kind), payloads, most) == payloads[::-1]


def test_a_large_read_takes_all_that_has_come() -> None:
    client, server = connected()
    assert client.write(bytes(100_000)) == 100_000
    read = server.read(MEBIBYTE)
    assert read is not None
    assert len(read) == 100_000
    assert not server.has_pending
    assert server.read(1) is None


def test_pending_bytes_are_told() -> None:
    client, server = connected()
    assert client.write(b"two") == 3
    assert client.write(b" records") == 8
    assert not server.has_pending
    assert server.read(3) == b"two"
    assert server.has_pending
    assert not select.select([server], [], [], 0)[0]
    assert server.read(3) == b" re"
    assert server.has_pending
    assert server.read(9) == b"cords"
    assert not server.has_pending


def test_a_full_connection_takes_part_and_waits() -> None:
    client, server = connected()
    data, taken = os.urandom(16 * MEBIBYTE), 0
    while (some := client.write(data[taken:])) is not None:
        taken += some
    assert 0 < taken < len(data)
    assert client.wants_write
    assert client.read(1) is None
    assert client.wants_write  # though the read does not wait for that
    got = b""
    while len(got) < taken:
        got += server.read(taken - len(got)) or b""
    assert got == data[:taken]
    moved = bytearray(data[taken : taken + 200_000])
    with pytest.raises(ValueError, match="fewer bytes"):
        client.write(bytes(moved[:1]))
    assert client.write(bytes(moved)) == 200_000
    assert not client.wants_write
    assert server.read(MEBIBYTE) == moved


def test_a_notice_that_waits_is_sent_later() -> None:
    client, server = connected()
    taken = 0
    while (some := client.write(bytes(MEBIBYTE))) is not None:
        taken += some
    client.shut()
    assert client.wants_write
    assert server.read(1 << 30)
    client.shut()
    assert not client.wants_write
    assert read_all(server) is not None
    assert server.read(1) == b""


@pytest.mark.parametrize("records_per_key", [1, 3])
def test_the_key_changes_while_both_write(records_per_key: int) -> None:
    """Both sides' connections are full when the keys change, so neither message can be sent at once."""
    streams = connected("tcp", records_per_key=records_per_key)
    data = os.urandom(24 * MEBIBYTE)
    taken = [0, 0]
    for i, each in enumerate(streams):
        while (some := each.write(data[taken[i] : taken[i] + 50_000])) is not None:
            taken[i] += some
    assert max(taken) < len(data)
    assert exchange(streams, (data, data), sent=tuple(taken)) == (data, data)


def test_an_orderly_end_is_read_after_the_bytes() -> None:
    client, server = connected()
    client.write(b"last")
    client.shut()
    client.shut()
    assert server.read(10) == b"last"
    assert server.read(10) == b""
    assert server.read(10) == b""
    server.write(b"the other direction goes on")
    assert client.read(100) == b"the other direction goes on"
    with pytest.raises(_host.StreamError, match="this side has closed"):
        client.write(b"x")
    server.close()
    with pytest.raises(_host.StreamError, match="was cut"):
        client.read(1)


def test_a_connection_that_ends_without_notice_was_cut() -> None:
    client, server = connected()
    client.write(b"last")
    client.close()
    assert server.read(10) == b"last"
    for _ in range(2):
        with pytest.raises(_host.StreamError, match="was cut: it ended without the peer's notice"):
            server.read(10)


def test_a_reset_connection() -> None:
    client, server = connected("tcp")
    server.write(b"unread")
    client.close()  # with bytes that it has not read: the system resets the connection
    with pytest.raises(_host.StreamError, match="connection failed: Connection reset"):
        read_all(server)


def read_all(each: _host.TlsStream) -> bytes:
    got, limit = bytearray(), patience.Limit(20)
    while (some := each.read(MEBIBYTE)) != b"":
        got += some or b""
        wait(each)
        assert limit.left()
    return bytes(got)


@pytest.mark.parametrize("kind", SOCKETS)
def test_no_sigpipe(kind: str) -> None:
    """Python ignores SIGPIPE; a process that embeds it, or a test, may not."""
    client, server = connected(kind)
    server.close()
    received: list[int] = []
    earlier = signal.signal(signal.SIGPIPE, lambda number, frame: received.append(number))
    try:
        with pytest.raises(_host.StreamError, match=r"connection failed: (Broken pipe|Connection reset)"):
            for _ in range(1000):
                client.write(bytes(100_000))
        client.shut()
        client.close()
    finally:
        signal.signal(signal.SIGPIPE, earlier)
    assert not received


def test_another_secret_is_refused_on_both_sides() -> None:
    client, server = socket.socketpair()
    streams = stream(client, False, bytes(32)), stream(server, True)
    streams[0].handshake()
    refused(streams[1], "does not have this job's secret")
    refused(streams[0], "does not have this job's secret")


@pytest.mark.parametrize("is_server", [False, True])
@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(1000), b"\x16\x03\x01\x02\x00\x01\x00" * 100])
def test_a_peer_without_tls_is_refused(is_server: bool, data: bytes) -> None:
    here, there = socket.socketpair()
    each = stream(here, is_server)
    there.sendall(data)
    with there:
        refused(each, "TLS handshake failed")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("certificate") / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    try:
        subprocess.run([*command, "-keyout", path, "-out", path], check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("no program openssl")
    return path


@pytest.mark.processes
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_server_with_a_certificate_is_refused(certificate: Path, version: ssl.TLSVersion) -> None:
    here, there = socket.socketpair()
    client = stream(here, False)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.maximum_version = version

    def serve() -> None:
        try:
            context.wrap_socket(there, server_side=True).close()
        except OSError:
            there.close()

    thread = threading.Thread(target=serve)
    thread.start()
    refused(client, "TLS handshake failed")
    client.close()
    thread.join(60)


def open_descriptors() -> set[tuple[str, str]]:
    """Each descriptor's number, and what it is; those that other tests have left may be closed meanwhile."""
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the folder itself
            found.add((each.name, os.readlink(each)))
    return found


def shake(number: int) -> None:
    """A handshake, and one of the ways in which a connection ends."""
    streams = pair()
    shake_hands(*streams)
    streams[0].write(b"x")
    streams[1].read(100)
    if number % 3:
        streams[0].shut()
    for each in streams if number % 2 else ():
        each.close()


def fail(number: int) -> None:
    client, server = socket.socketpair()
    streams = stream(client, False, bytes(32)), stream(server, True)
    streams[0].handshake()
    for each in streams[::-1]:
        with pytest.raises(_host.StreamError):
            each.handshake()


@pytest.mark.parametrize("act", [shake, fail])
def test_a_thousand_handshakes_leave_nothing(act: Callable[[int], None]) -> None:
    for number in range(100):
        act(number)
    gc.collect()
    descriptors, memory = open_descriptors(), resident_nbytes()
    for number in range(1000 if act is shake else 500):
        act(number)
    gc.collect()
    assert open_descriptors() <= descriptors
    assert resident_nbytes() < memory + 2 * MEBIBYTE


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("secret", [b"", bytes(31), bytes(33)])
def test_a_secret_has_32_bytes(secret: bytes) -> None:
    descriptors = open_descriptors()
    here, there = socket.socketpair()
    with there, pytest.raises(ValueError, match="32 bytes"):
        stream(here, False, secret)
    assert open_descriptors() <= descriptors


def test_a_closed_stream() -> None:
    client, _ = connected()
    client.close()
    client.close()
    assert client.fileno() == -1
    for use in (
        client.handshake,
        client.shut,
        lambda: client.read(1),
        lambda: client.write(b""),
        lambda: client.wants_write,
    ):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_a_fork_does_not_end_the_connection() -> None:
    client, server = connected()
    child = os.fork()
    if not child:
        client.close()
        server.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert exchange((client, server), (b"still", b"here")) == (b"here", b"still")


def test_the_library_is_that_of_pythons_ssl() -> None:
    assert tls.version() == ssl.OPENSSL_VERSION


def loaded_in(program: str) -> str:
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert not found.returncode, found.stderr
    return found.stdout


_MAPS = "print(*sorted({line.split(maxsplit=5)[-1] for line in open('/proc/self/maps') if 'libssl' in line}))"


@pytest.mark.processes
def test_no_second_openssl_is_loaded() -> None:
    python = loaded_in("import ssl;" + _MAPS)
    assert loaded_in("from qccl.meeting import tls; tls.functions();" + _MAPS) == python


@pytest.mark.processes
@pytest.mark.parametrize("module", ["None", "types.ModuleType('_ssl')"])
def test_without_pythons_ssl_it_is_the_systems(module: str) -> None:
    """Python has no ``_ssl``, or one that is built into the interpreter and hides its OpenSSL."""
    if not any(Path("/usr/lib").glob("*/libssl.so.3")):
        pytest.skip("the system has no OpenSSL 3")
    program = f"import sys, types; sys.modules['_ssl'] = {module}\nfrom qccl.meeting import tls\nprint(tls.version())"
    assert loaded_in(program).startswith("OpenSSL 3")


def test_without_any_openssl_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "_candidates", lambda: iter(()))
    tls.load_library.cache_clear()
    try:
        with pytest.raises(EngineError, match=r"OpenSSL 1\.1\.1 or later.*apt-get install libssl3"):
            tls.load_library()
    finally:
        tls.load_library.cache_clear()
