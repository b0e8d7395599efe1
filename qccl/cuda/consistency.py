"""The consistency check on CUDA: ranks compare a call through an all-gather when its signature is first used."""

from __future__ import annotations

from qccl.engine.control import Header, mismatch_error
from qccl.transports.base import Group

__all__ = ["Consistency"]


class Consistency:
    """The calls that all ranks of a group have compared."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._checked: set[str] = set()

    def compare(self, header: Header, timeout: float) -> None:
        """Collective: raise MismatchError unless all ranks have made this call."""
        rank, size = self._group.rank, self._group.size
        if size == 1:
            return
        mine = header.pack()
        for peer, theirs in enumerate(self._group.allgather(mine, timeout)):
            if theirs != mine:
                raise mismatch_error(mine, theirs, rank, peer)
        if not header.pairs:
            return
        for_peers = [header.pack(peer) for peer in range(size)]
        length = len(for_peers[0])
        for peer, theirs in enumerate(self._group.allgather(b"".join(for_peers), timeout)):
            for_me = theirs[length * rank :][:length]
            if for_me != for_peers[peer]:
                raise mismatch_error(for_peers[peer], for_me, rank, peer)

    def compare_once(self, header: Header, timeout: float) -> None:
        """Compare a call the first time that it is made; later ones with equal text are known to agree."""
        call = header.text + "".join(header.pairs)
        if call not in self._checked:
            self.compare(header, timeout)
            self._checked.add(call)
