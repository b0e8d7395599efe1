"""The consistency check on CUDA: ranks compare a call through an all-gather when its signature is first used."""

from __future__ import annotations

from qccl.engine.control import Header, mismatch_error
from qccl.meeting.strangers import printable
from qccl.transports.base import Group

__all__ = ["Consistency"]

#: the first byte of a rank's note about a call: the rest is the call's header, or the rank's refusal
_CAN, _CANNOT = b"+", b"-"


class Consistency:
    """The calls that all ranks of a group have compared."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._checked: set[str] = set()

    def compare(self, header: Header, timeout: float, refusal: str = "") -> str:
        """Collective: raise MismatchError unless all ranks have made this call.

        ``refusal``: why this rank cannot make the call, or an empty text. If a rank refuses, nothing is compared, and
        a text with that rank and its refusal is returned; otherwise an empty text.
        """
        rank, size = self._group.rank, self._group.size
        if size == 1:
            return ""
        mine = header.pack()
        cannot = _CANNOT + refusal.encode(errors="backslashreplace")  # a file name in it may not be UTF-8
        notes = self._group.allgather(cannot if refusal else _CAN + mine, timeout)
        for peer, note in enumerate(notes):
            if note.startswith(_CANNOT):
                return f"rank {peer} cannot make this call, so no rank makes it: {printable(note[len(_CANNOT) :])}"
        for peer, note in enumerate(notes):
            if note != _CAN + mine:
                raise mismatch_error(mine, note[len(_CAN) :], rank, peer)
        if not header.pairs:
            return ""
        for_peers = [header.pack(peer) for peer in range(size)]
        length = len(for_peers[0])
        for peer, theirs in enumerate(self._group.allgather(b"".join(for_peers), timeout)):
            for_me = theirs[length * rank :][:length]
            if for_me != for_peers[peer]:
                raise mismatch_error(for_peers[peer], for_me, rank, peer)
        return ""

    def compare_once(self, header: Header, timeout: float, refusal: str) -> str:
        """Do compare() if the ranks have not agreed on a call with the same text."""
        call = header.text + "".join(header.pairs)
        if call in self._checked:
            return ""
        reason = self.compare(header, timeout, refusal)
        if not reason:
            self._checked.add(call)
        return reason
