"""Chooses how a communicator makes its calls: by the profile of the group, or by constants where it has none."""

from __future__ import annotations

from collections.abc import Sequence

from qccl.collectives import CollectiveSpec, for_nodes, ways
from qccl.costs.group import Choice, GroupProfile, choose, kind_of
from qccl.errors import ArgumentError
from qccl.session import Session

__all__ = ["Chooser"]


class Chooser:
    """The choices of one rank. All ranks make the same ones, because their profiles are the same.

    Calls with ``codec="auto"`` are measured when the first of their kind comes, unless the profile has them already. A
    call that names its codec is decided by the profile that was loaded, and without one by constants: so the choice of
    a call never changes.

    Attributes:
        profile: what was loaded, and what was measured since.
    """

    def __init__(self, session: Session, nodes: Sequence[int], backend: str, transport: str) -> None:
        self._session, self._backend = session, backend
        self._loaded: GroupProfile | None = None
        self.profile = GroupProfile(tuple(nodes), transport)

    def adopt(self, profile: GroupProfile) -> None:
        """Collective: decide by a profile that was loaded. Raises ArgumentError, and MismatchError if others differ."""
        if self._backend != "host":
            raise ArgumentError(f"the {self._backend} backend uses no profile yet; leave out profile= and QCCL_PROFILE")
        profile.check_group(self.profile.nodes, self.profile.transport)
        self._session.run_collective(f"agree on the profile {profile.digest()}", lambda: None)
        self._loaded = self.profile = profile

    def choose(self, specs: Sequence[CollectiveSpec], nodes: Sequence[int]) -> Choice:
        """How ranks on these nodes make a call: ``specs`` is it, or it without a codec and with the most lossy one.

        With two specs it may be collective, and measure. Raises ArgumentError for a call that cannot choose its codec.
        """
        if len(specs) == 1:
            found = None if self._loaded is None else choose(self._loaded, specs, nodes)
            return found or Choice(for_nodes(specs[0], nodes))
        if self._session.size == 1:
            return Choice(specs[0])
        self._check(specs[0], nodes)
        self._measure(specs, nodes)
        found = choose(self.profile, specs, nodes)
        assert found is not None  # measured
        return found

    def _check(self, spec: CollectiveSpec, nodes: Sequence[int]) -> None:
        if self._backend != "host":
            raise ArgumentError(
                f"codec='auto' is not possible on the {self._backend} backend yet, where nothing measures the calls; "
                f"name a codec, such as 'minmax8'"
            )
        if not ways(spec, nodes):
            raise ArgumentError(
                f"codec='auto' is not possible in {spec.name}; name a codec, such as 'minmax8'. It is possible in "
                f"all-reduce of one or more arrays, reduce-scatter, all-gather, broadcast and reduce"
            )

    def _measure(self, specs: Sequence[CollectiveSpec], nodes: Sequence[int]) -> None:
        """Collective: measure calls of this kind, unless the profile has them; takes less than a second."""
        kind, session = kind_of(specs[-1]), self._session
        if kind in self.profile.times:
            return
        from qccl.measuring import candidates, measure  # needs NumPy

        codecs = [spec.codec for spec in specs]
        calls = candidates(kind.collective, specs[0].dtype, codecs, nodes)
        session.engine.wait_until_idle(session.engine.timeout)
        found = session.run_collective(
            f"measure {kind.collective} of {kind.dtype} with {' and '.join(codec.spec() for codec in codecs)}, for "
            f"codec='auto'",
            lambda: measure(session, nodes, calls),
        )
        self.profile = self.profile.with_times(kind, found)
