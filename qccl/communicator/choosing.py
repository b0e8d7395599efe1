"""Chooses the codec and algorithm of a call that says "auto": by measured times, or without them by for_nodes()."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qccl.base.errors import ArgumentError
from qccl.collectives import CollectiveSpec, for_nodes, ways
from qccl.communicator.profile import CallChoice, CallKind, GroupProfile, fastest, kind_of
from qccl.communicator.session import Session

__all__ = ["Chooser"]


class Chooser:
    """The choices of one rank. All ranks make the same choices, because their profiles are the same.

    The first call of a kind with ``codec="auto"`` measures, unless the profile has times of that kind. For a call that
    names its codec the loaded profile decides, and for_nodes() if none was loaded. Later measurements are not used for
    such a call, so that its algorithm never changes.

    Attributes:
        profile: all times, loaded or measured since.
    """

    def __init__(self, session: Session, profile: GroupProfile) -> None:
        """``profile``: this group's profile, without times."""
        self._session = session
        self._loaded: GroupProfile | None = None
        self._refusals: dict[CallKind, str] = {}  # why calls of a kind cannot be measured
        self.profile = profile

    def adopt(self, profile: GroupProfile) -> None:
        """Collective: decide by a loaded profile.

        Raises ArgumentError if it belongs to another group, and MismatchError if the ranks loaded different profiles.
        """
        profile.check_group(self.profile)
        self._session.run_collective(f"agree on the profile {profile.digest()}", lambda: None)
        self._loaded = self.profile = profile

    def choose(self, specs: Sequence[CollectiveSpec], nodes: Sequence[int], stream: Any = None) -> CallChoice:
        """Choose how ranks on these nodes make a call.

        ``specs`` has the call with the codec that it names; or, with codec="auto", the call with the codec none and
        with the other codec. With two specs this may be collective, and measure calls; if that fails, the choice is
        none. ``stream`` is the caller's, on CUDA. Raises ArgumentError if the collective has no codec="auto", or if the
        call is being captured in a CUDA graph and must be measured first.
        """
        if len(specs) == 1:
            # the state of a codec belongs to an algorithm, and must fit a run without this profile, too
            loaded = None if specs[0].codec.state_names else self._loaded
            found = None if loaded is None else fastest(loaded, specs, nodes)
            return found or CallChoice(for_nodes(specs[0], nodes))
        if self._session.size == 1:
            return CallChoice(specs[0])
        if not ways(specs[0], nodes):
            raise ArgumentError(
                f"codec='auto' is not possible in {specs[0].name}; name a codec, such as 'minmax8'. It is possible in "
                f"all-reduce of one or more arrays, reduce-scatter, all-gather, broadcast and reduce"
            )
        kind = kind_of(specs[-1])
        if kind not in self.profile.times and kind not in self._refusals:
            self._measure(kind, specs, nodes, stream)
        if refusal := self._refusals.get(kind):
            return CallChoice(for_nodes(specs[0], nodes), refusal=refusal)
        found = fastest(self.profile, specs, nodes)
        assert found is not None  # measured
        return found

    def _measure(self, kind: CallKind, specs: Sequence[CollectiveSpec], nodes: Sequence[int], stream: Any) -> None:
        """Collective: measure calls of this kind; takes less than a second, and less than the timeout."""
        from qccl.communicator.measuring import candidates, measure  # needs NumPy

        session, codecs = self._session, [spec.codec for spec in specs]
        if session.memory.is_capturing(stream):
            raise ArgumentError(
                f"codec='auto' measures {kind.collective} of {kind.dtype} in its first call, and this one would become "
                f"part of a CUDA graph; make such a call, on any array, once before the capture, or load a profile"
            )
        calls = candidates(kind.collective, specs[0].dtype, codecs, nodes)
        session.engine.wait_until_idle(session.engine.timeout)
        found = session.run_measurement(
            f"measure {kind.collective} of {kind.dtype} with {' and '.join(codec.spec() for codec in codecs)}, for "
            f"codec='auto'",
            lambda: measure(session, nodes, calls),
        )
        if isinstance(found, str):
            self._refusals[kind] = found
        else:
            self.profile = self.profile.with_times(kind, found)
