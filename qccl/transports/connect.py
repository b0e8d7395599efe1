"""Connects ranks that have met by the transport that choice.py chooses, in two gathers.

The first gather brings the ranks' offers, the second their addresses in the chosen transport.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qccl.meeting.meetings import GroupMeeting, Meeting, StoreMeeting, TcpMeeting
from qccl.meeting.network import Network, own_address
from qccl.meeting.secret import draw, job_secret, token_key
from qccl.transports.choice import Offer, choose, is_alone

if TYPE_CHECKING:
    from qccl.transports.base import Transport
    from qccl.transports.connected import ConnectedTransport

__all__ = ["connect", "connected_transport", "gather_offers"]

_log = logging.getLogger("qccl")


def gather_offers(meeting: Meeting, timeout: float, wanted: str | None = None, **more: Any) -> list[Offer]:
    """Collective: the offers of all ranks; ``more``: fields of this rank's offer."""
    if meeting.size == 1:
        return [Offer(**more)]
    if not isinstance(meeting, TcpMeeting | GroupMeeting | StoreMeeting):
        more["gloo"] = f"{meeting.name} has no port for gloo"
    own = Offer.here(wanted, drawn="" if meeting.rank else draw().hex(), **more)
    offers = [Offer.of(rank, note) for rank, note in enumerate(meeting.gather(own.note(), timeout))]
    offers[meeting.rank] = own._replace(drawn=offers[meeting.rank].drawn)
    return offers


def connect(
    meeting: Meeting, timeout: float, wanted: str | None = None, offers: Sequence[Offer] | None = None
) -> Transport:
    """Collective: the transport that choice.py chooses for all ranks, connected.

    ``wanted``: the only transport allowed (see wanted_transport()); ``offers``: the result of gather_offers(), if it
    was called. Raises EngineError if no transport suits all ranks, MismatchError for different tokens.
    """
    offers = offers or gather_offers(meeting, timeout, wanted)
    if meeting.size == 1:
        from qccl.transports.loopback import LoopbackGroup

        return LoopbackGroup(1).transport(0)
    chosen = choose(offers, meeting.name)
    who = meeting.rank, meeting.size, meeting.name
    _log.info("rank %d of %d (%s) uses the transport %s: %s", *who, chosen.name, chosen.why)
    if chosen.name == "gloo":
        network = Network.towards(meeting.host, is_local=chosen.is_local)
        own = own_address(network, meeting.own_address())
        meeting.close()  # it may listen at the same port
        return _over_gloo(meeting, own, timeout)
    from qccl.transports.connected import Protection

    secret = job_secret(bytes.fromhex(offers[0].drawn), token_key()) if chosen.has_secret else None
    return connected_transport(chosen.name).meet(
        lambda note: meeting.gather(note, timeout),
        timeout,
        Network.towards(
            meeting.host,
            is_local=chosen.is_local,
            can_share_memory=chosen.can_share_memory,
            is_alone=is_alone(offers, meeting.rank),
        ),
        Protection(secret, chosen.encrypts),
    )


def connected_transport(name: str) -> type[ConnectedTransport]:
    """The class of "ucx" or "wan"."""
    if name == "wan":
        from qccl.transports.wan import WanTransport

        return WanTransport
    from qccl.transports.ucx import UcxTransport

    return UcxTransport


def _over_gloo(meeting: Meeting, own: str | None, timeout: float) -> Transport:
    """Connect by gloo. ``own``: this machine's address; None: gloo finds it by GLOO_SOCKET_IFNAME or by its name."""
    from qccl.transports.gloo import TorchTransport

    if isinstance(meeting, GroupMeeting):
        return TorchTransport.from_group(meeting.group, timeout, own)
    if isinstance(meeting, StoreMeeting):
        import torch.distributed as dist

        return TorchTransport(dist.PrefixStore("gloo", meeting.store), meeting.rank, meeting.size, timeout, own=own)
    assert isinstance(meeting, TcpMeeting)  # gather_offers() refuses gloo for other meetings
    return TorchTransport.at((meeting.host, meeting.port), meeting.rank, meeting.size, timeout, own)
