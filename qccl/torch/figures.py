"""The figures of a handle's last step by name, for TensorBoard and the like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from qccl.codecs import NoCodec
from qccl.communicator import Communicator
from qccl.costs.grouping import sent_nbytes
from qccl.torch.backward import PassTimes
from qccl.torch.groups import ParameterGroup
from qccl.torch.state import schedule_of

__all__ = ["Figures", "residual_norms"]


class Figures:
    """The bytes that the groups of a handle send. The bytes of a group are computed once, for each of its codecs."""

    def __init__(self, groups: Sequence[ParameterGroup], comm: Communicator) -> None:
        self._groups, self._comm = groups, comm
        self._sent: dict[tuple[int, bool], dict[str, float]] = {}

    def of_step(self, times: PassTimes | None, *, is_exact: bool) -> dict[str, float]:
        """The figures of a step. ``is_exact``: all values were sent as they are. None: there was no step yet."""
        if times is None:
            return {}
        found: dict[str, float] = {}
        raw = 0.0
        for number, group in enumerate(self._groups):
            sent = self._sent_by(number, is_exact)
            for name, parameter in zip(group.names, group.parameters, strict=True):
                found[f"qccl/{name}/bytes_raw"] = float(parameter.numel() * parameter.element_size())
                found[f"qccl/{name}/bytes_sent"] = sent[name]
                raw += found[f"qccl/{name}/bytes_raw"]
        found["qccl/bytes_raw"] = raw
        found["qccl/bytes_sent"] = sum(sum(self._sent_by(i, is_exact).values()) for i in range(len(self._groups)))
        found["qccl/calls"] = float(sum(_calls_of(group, is_exact) for group in self._groups))
        if times.ended:
            found |= {"qccl/seconds": times.seconds, "qccl/seconds_hidden": times.hidden}
        return found

    def _sent_by(self, number: int, is_exact: bool) -> dict[str, float]:
        """The bytes that this rank sends of each parameter: its part of those of the group's call."""
        if (number, is_exact) not in self._sent:
            group = self._groups[number]
            if is_exact and group.codec is not None:
                group = replace(group, codec=NoCodec(), rank=0)
            each, ranks = group.encoded_each, self._comm.size
            if group.codec is None or group.rank:  # the process group's own reduction, and the two calls of factors
                sent = sent_nbytes(sum(each), ranks)
            else:
                sent = float(schedule_of(group, self._comm.rank, self._comm.nodes).sent_nbytes()) if ranks > 1 else 0.0
            share = sent / (sum(each) or 1)
            self._sent[number, is_exact] = {n: share * own for n, own in zip(group.names, each, strict=True)}
        return self._sent[number, is_exact]


def _calls_of(group: ParameterGroup, is_exact: bool) -> int:
    if group.codec is None:
        return len(group.names)  # the process group reduces each gradient by a call of its own
    return 2 if group.rank and not is_exact else 1


def residual_norms(state: Mapping[str, Any], lr: float | None) -> dict[str, float]:
    """The L2 norms of a rank's residuals (qccl.torch.state), which are stored times the learning rate."""
    residuals = state["residuals"].items()
    return {f"qccl/{name}/residual_norm": float(tensor.norm()) / (lr or 1.0) for name, tensor in residuals}
