"""The consistency check on CUDA: ranks compare a call through an all-gather when its signature is first used."""

from __future__ import annotations

from qccl.engine.control import Header, mismatch_error
from qccl.meeting.strangers import printable
from qccl.transports.base import Group

__all__ = ["Consistency"]

#: the first byte of what a rank says of a call; its header follows, or its refusal
_CAN, _CANNOT = b"+", b"-"


class Consistency:
    """The calls that all ranks of a group have compared."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._checked: set[str] = set()

    def compare(self, header: Header, timeout: float, refusal: str = "") -> str:
        """Collective: raise MismatchError unless all ranks have made this call.

        ``refusal``: why this rank cannot make it. If a rank has one, nothing is compared, and the rank's number and
        refusal are returned, otherwise an empty text.
        """
        rank, size = self._group.rank, self._group.size
        if size == 1:
            return ""
        mine = header.pack()
        cannot = _CANNOT + refusal.encode(errors="backslashreplace")  # it may contain a file name that is not UTF-8
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
        """As compare(), until the ranks have agreed on a call; later ones with equal text are known to agree."""
        call = header.text + "".join(header.pairs)
        if call in self._checked:
            return ""
        reason = self.compare(header, timeout, refusal)
        if not reason:
            self._checked.add(call)
        return reason
