"""Tokens, the job's secret, what may be seen of them, and the transport that ranks choose by them."""

from __future__ import annotations

import logging
import os
import pickle
import stat

import pytest
from click.testing import CliRunner

import qccl
from qccl import ArgumentError, EngineError, MismatchError
from qccl.bench.cli import main
from qccl.meeting import meetings, secret
from qccl.meeting.join_address import JoinAddress
from qccl.meeting.secret import Secret, derive, draw, is_insecure, job_secret, token_key
from qccl.transports import choice, connect
from qccl.transports.choice import Offer, choose, is_alone

TOKEN = "a token of some characters"
BYTES = bytes(range(32))


def file_of(tmp_path, text=TOKEN, mode=0o600):
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(mode)
    return {"QCCL_TOKEN_FILE": str(path)}


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_a_token_in_the_environment_and_in_a_file_are_the_same(tmp_path):
    found = token_key({"QCCL_TOKEN": TOKEN})
    assert found is not None and len(found) == 32
    assert token_key(file_of(tmp_path, f" {TOKEN}\n")) == found
    assert token_key({"QCCL_TOKEN": TOKEN + "!"}) != found
    assert token_key({}) is token_key({"QCCL_TOKEN": "", "QCCL_TOKEN_FILE": ""}) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644])
def test_a_file_that_others_may_read_is_refused(tmp_path, mode):
    with pytest.raises(ArgumentError, match="other users may read or change this file; run chmod 600"):
        token_key(file_of(tmp_path, mode=mode))


def test_files_that_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ArgumentError, match=r"cannot be read .No such file"):
        token_key({"QCCL_TOKEN_FILE": str(tmp_path / "none")})
    with pytest.raises(ArgumentError, match="cannot be read"):
        token_key({"QCCL_TOKEN_FILE": str(tmp_path)})
    environ = file_of(tmp_path)
    monkeypatch.setattr(secret.os, "geteuid", lambda: os.getuid() + 1)
    if os.getuid():  # root's are everybody's
        with pytest.raises(ArgumentError, match="belongs to another user"):
            token_key(environ)


@pytest.mark.parametrize("text", ["x" * 15, " " * 20, f"{'x' * 10}\n"])
def test_a_token_that_is_too_short_is_refused_and_not_shown(tmp_path, text):
    for environ in ({"QCCL_TOKEN": text}, file_of(tmp_path, text)):
        with pytest.raises(ArgumentError, match="at least 16 characters; make one with: qccl-bench token") as raised:
            token_key(environ)
        assert text not in str(raised.value)


def test_one_token_at_a_time(tmp_path):
    with pytest.raises(ArgumentError, match="both set"):
        token_key({"QCCL_TOKEN": TOKEN} | file_of(tmp_path))


def test_the_command_makes_a_file_that_only_its_owner_may_read(tmp_path):
    path, umask = tmp_path / "token", os.umask(0)
    try:
        done = CliRunner().invoke(main, ["token", str(path)])
    finally:
        os.umask(umask)
    assert done.exit_code == 0 and f"QCCL_TOKEN_FILE={path}" in done.output
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    assert text not in done.output and len(text.strip()) == 43
    assert token_key({"QCCL_TOKEN_FILE": str(path)})
    again = CliRunner().invoke(main, ["token", str(path)])
    assert again.exit_code == 1 and "File exists" in again.output and path.read_text() == text
    printed = [CliRunner().invoke(main, ["token"]).output for _ in range(2)]
    assert printed[0] != printed[1] and len(printed[0]) == 44


# -- secrets -----------------------------------------------------------------------------------------------------------


def test_keys_differ_by_purpose_and_by_secret():
    keys = {derive(key, purpose) for key in (BYTES, bytes(32)) for purpose in ("meeting", "wan", "membership")}
    assert len(keys) == 6 and {len(key) for key in keys} == {32}
    assert job_secret(BYTES, None) != job_secret(BYTES, BYTES) != job_secret(bytes(32), BYTES)
    assert draw() != draw()


def test_a_secret_is_not_shown():
    found = Secret(b"never seen, never ever seen.....")
    assert f"{found} {found!r} {found!s} {[found]}".count("<secret>") == 4
    assert pickle.loads(pickle.dumps(found)) == found
    offer = Offer(drawn=BYTES.hex())
    assert BYTES.hex() not in repr(offer) + str(offer)


@pytest.mark.parametrize(("text", "found"), [("1", True), ("0", False), ("", False)])
def test_insecure(text, found):
    assert is_insecure({"QCCL_INSECURE": text}) is found and not is_insecure({})


def test_insecure_is_1():
    with pytest.raises(ArgumentError, match="QCCL_INSECURE='yes' is neither 1 nor 0"):
        is_insecure({"QCCL_INSECURE": "yes"})


# -- addresses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, BYTES])
@pytest.mark.parametrize(("transport", "encrypts"), [("ucx", True), ("wan", True), ("wan", False)])
@pytest.mark.parametrize("place", [("host0", 1), ("127.0.0.1", 65535), ("fd77::11", 29500)])
def test_addresses_for_join(key, transport, encrypts, place):
    address = JoinAddress(transport, place, key, encrypts)
    assert JoinAddress.of(address.text()) == address
    assert ("#" in address.text()) is (key is not None)


GOOD = JoinAddress("ucx", ("host0", 80), BYTES, True).text()


@pytest.mark.parametrize(
    "text",
    [
        *("", "host0", "host0:0", "#", "host0:80#", "tcp://host0:80", "host0:80#x", f"{GOOD}x", f"{GOOD}#", None, 3),
        *(GOOD[:-1], GOOD.replace("#", "##"), f"://{GOOD}", GOOD.replace("80", "80x"), GOOD[:-1] + "\u0661"),
    ],
)
def test_what_is_no_address_is_refused_and_its_secret_is_not_shown(text):
    with pytest.raises(ArgumentError, match=r"is not the comm.address of a rank") as raised:
        qccl.join(text)
    assert GOOD[-20:-5] not in str(raised.value)


def test_an_address_without_a_secret_is_refused(monkeypatch):
    with pytest.raises(ArgumentError, match=r"'host0:80' has no secret: pass all of a rank's comm.address"):
        qccl.join("host0:80", 1.0)


# -- the transport -----------------------------------------------------------------------------------------------------

NONE = Offer(drawn=BYTES.hex())
LOCAL, TOKENED = NONE._replace(network="one"), NONE._replace(token="x")
INSECURE = NONE._replace(insecure=True)


@pytest.mark.parametrize(
    ("offers", "name", "encrypts"),
    [
        ([LOCAL, LOCAL], "ucx", False),
        ([LOCAL._replace(ucx="no"), LOCAL], "gloo", False),
        ([LOCAL._replace(ucx="no"), LOCAL._replace(gloo="no")], "wan", False),
        ([LOCAL._replace(wanted="wan")] * 2, "wan", False),
        ([LOCAL._replace(wanted="wan", token="x")] * 2, "wan", True),
        ([LOCAL._replace(token="x")] * 2, "ucx", False),
        ([NONE, NONE], "ucx", False),
        ([LOCAL, LOCAL._replace(network="two")], "ucx", False),
        ([TOKENED, TOKENED], "wan", True),
        ([TOKENED._replace(insecure=True)] * 2, "ucx", False),
        ([TOKENED._replace(insecure=True), TOKENED], "wan", True),
        ([TOKENED._replace(wanted="ucx")] * 2, "ucx", False),
        ([INSECURE._replace(wanted="wan")] * 2, "wan", False),
        ([TOKENED._replace(insecure=True, wanted="wan")] * 2, "wan", True),
        ([NONE._replace(ucx="no")] * 2, "gloo", False),
    ],
)
def test_the_transport_that_ranks_choose(offers, name, encrypts):
    found = choose(offers, "the test")
    assert (found.name, found.encrypts, found.has_secret) == (name, encrypts, True)
    assert found.is_local == (offers[0].network == offers[1].network != "")
    assert ("must be trusted" in found.why) == (not found.is_local and not encrypts)


HERE, THERE = (NONE._replace(network=where, memory="shm") for where in ("here", "there"))


@pytest.mark.parametrize(
    ("offers", "alone"),
    [
        ([HERE, HERE, THERE], [False, False, True]),
        ([HERE, HERE._replace(memory="other"), THERE], [True] * 3),
        ([HERE, THERE, THERE._replace(network="")], [False] * 3),
    ],
)
def test_ranks_that_are_alone_on_their_machines(offers, alone):
    assert [is_alone(offers, rank) for rank in range(3)] == alone


@pytest.mark.parametrize(
    ("offers", "text"),
    [
        ([NONE._replace(wanted="wan")] * 2, "wan needs a token.*qccl-bench token FILE.*QCCL_INSECURE=1"),
        (
            [INSECURE._replace(wanted="wan"), NONE._replace(wanted="wan")],
            "wan: rank 1: between machines wan needs a token",
        ),
        ([TOKENED._replace(wan="no TLS")] * 2, "ucx: rank 0: it does not encrypt.*wan: rank 0: no TLS"),
        (
            [TOKENED._replace(wanted="ucx"), TOKENED],
            "ucx: rank 1: it does not encrypt.*wan: rank 0: the rank allows only",
        ),
    ],
)
def test_ranks_that_have_none_in_common(offers, text):
    with pytest.raises(EngineError, match=text):
        choose(offers, "the test")


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (("", "x"), "rank 1 has a token, and rank 0 has none"),
        (("x", ""), "rank 1 has no token, and rank 0 has one"),
        (("x", "y"), "rank 1 has another token, and rank 0 has one"),
    ],
)
def test_different_tokens(tokens, text):
    with pytest.raises(MismatchError, match=f"{text}: set the same QCCL_TOKEN on all ranks"):
        choose([NONE._replace(token=token) for token in tokens], "the test")


def test_a_rank_without_tls_takes_the_secret_from_all():
    found = choose([LOCAL, LOCAL._replace(no_tls="no OpenSSL")], "the test")
    assert not found.has_secret and "anybody may join, because there is no TLS (rank 1: no OpenSSL)" in found.why


@pytest.mark.parametrize("drawn", ["", "zz" * 32, "00" * 31, "00" * 33])
def test_rank_0_must_bring_the_random_bytes(drawn):
    with pytest.raises(MismatchError, match="rank 0 brought a note"):
        Offer.of(0, NONE._replace(drawn=drawn).note())
    assert Offer.of(1, NONE._replace(drawn="").note()).drawn == ""


def test_what_others_say_of_this_rank_does_not_count(monkeypatch):
    """As of one that changes the notes in a store without encryption: this rank's token is not forgotten."""
    monkeypatch.setenv("QCCL_TOKEN", TOKEN)
    meeting = meetings.Meeting("the test", 1, 2, lambda own, timeout: [NONE.note()] * 2)
    with pytest.raises(MismatchError, match="rank 1 has a token, and rank 0 has none"):
        connect.connect(meeting, 5.0)


def test_the_log_says_that_the_network_must_be_trusted(monkeypatch, caplog):
    monkeypatch.setattr(choice, "TRANSPORTS", ("gloo",))
    monkeypatch.setattr(choice, "obstacle", lambda *arguments: "")
    monkeypatch.setattr(connect, "_over_gloo", lambda meeting, own, timeout: "the transport")
    meeting = meetings.TcpMeeting("the test", 1, 2, lambda own, timeout: [NONE.note(), NONE.note()], "host", port=1)
    with caplog.at_level(logging.INFO, "qccl"):
        assert connect.connect(meeting, 5.0) == "the transport"
    assert "nothing is encrypted: the network between the machines must be trusted" in caplog.text
    assert BYTES.hex() not in caplog.text
