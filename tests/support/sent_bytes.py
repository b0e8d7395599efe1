"""Bytes on the wire, counted at the transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import qccl
from qccl.engine.control import CONTROL_TAG, HEADER_NBYTES


def count_sent(comm: qccl.Communicator) -> list[int]:
    """The sizes of the messages that ``comm``'s rank sends from now on, headers apart; the list grows with them."""
    transport: Any = comm.transport
    send, found = transport.send, list[int]()

    def counting(peer: int, tag: int, address: int, nbytes: int, token: object) -> None:
        found.append(nbytes - (HEADER_NBYTES if tag == CONTROL_TAG else 0))  # small data goes with the header
        send(peer, tag, address, nbytes, token)

    transport.send = counting
    return found


def sent_by_each(n: int, call: Callable[[qccl.Communicator], object]) -> list[int]:
    """Bytes that each of ``n`` ranks sends in a call, headers apart."""

    def run(comm: qccl.Communicator) -> int:
        sent = count_sent(comm)
        call(comm)
        return sum(sent)

    return qccl.run_ranks(n, run)
