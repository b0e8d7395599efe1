"""The command qccl-relay, and files of relay keys."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import patience
import pytest
from click.testing import CliRunner
from plain_ranks import free_ports
from relays import KEY, NAME, TOKEN, joined, token_relay_key

from qccl import ArgumentError
from qccl.relay.cli import main
from qccl.relay.jobs import key_text, read_jobs


def write(tmp_path, text, mode=0o600):
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_of_keys(tmp_path):
    path = write(tmp_path, f"# two jobs\n{key_text(KEY)} the lab's job\n\n  {key_text(NAME)}\n")
    first, second = read_jobs(path)
    assert (first.key, second.key) == (KEY, NAME)
    assert (first.name, second.name) == ("the lab's job", second.id.hex())
    assert repr(first.key) == "<secret>"


@pytest.mark.parametrize("text", ["", "# nothing\n", "short\n", "x" * 43 + "!\n", f"{key_text(KEY)}\n\x00\n"])
def test_files_that_are_refused(tmp_path, text):
    with pytest.raises(ArgumentError, match=r"is not a relay key|has 0 keys"):
        read_jobs(write(tmp_path, text))


def test_a_file_that_others_may_read_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="other users"):
        read_jobs(write(tmp_path, key_text(KEY), 0o644))


def test_the_key_of_a_token():
    found = CliRunner().invoke(main, ["--show-key"], env={"QCCL_TOKEN": TOKEN, "QCCL_TOKEN_FILE": None})
    assert (found.exit_code, found.output) == (0, key_text(token_relay_key()) + "\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "does not know which jobs may use it"),
        (["--keys", "/none"], "cannot be read"),
        (["--listen", "here"], "is not an address with a port"),
        (["--idle", "0"], "is not a positive number"),
        (["--job-mbit", "-1"], "is not a positive number"),
        (["--job-mbit", "inf"], "is not a positive number"),
        (["--idle", "nan"], "is not a positive number"),
        (["--connections", "1"], "is not in the range"),
    ],
)
def test_wrong_arguments(arguments, text):
    token = None if not arguments else TOKEN
    found = CliRunner().invoke(main, arguments, env={"QCCL_TOKEN": token, "QCCL_TOKEN_FILE": None})
    assert found.exit_code in (1, 2) and text in found.output


def test_the_command_until_it_is_stopped():
    environment = {key: value for key, value in os.environ.items() if key != "QCCL_TOKEN_FILE"} | {"QCCL_TOKEN": TOKEN}
    (port,) = free_ports(1)
    relay = subprocess.Popen(
        [sys.executable, "-m", "qccl.relay", "--listen", f"127.0.0.1:{port}", "--progress"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert relay.stderr is not None
    try:
        assert f"the relay listens at 127.0.0.1:{port}, for 1 jobs" in relay.stderr.readline()
        with joined(("127.0.0.1", port), key=token_relay_key()) as (caller, listener):
            caller.say(b"hello")
            assert listener.hear(5) == b"hello"
            relay.send_signal(signal.SIGUSR1)
            limit = patience.Limit(10)
            while "1 pairs, 0 connections wait" not in relay.stderr.readline():
                assert limit.left()
        relay.terminate()
        _, rest = relay.communicate(timeout=30)
        assert relay.returncode == 0
        assert "5 bytes there and 0 back" in rest
        assert "the relay ends" in rest
    finally:
        relay.kill()
        relay.wait()
