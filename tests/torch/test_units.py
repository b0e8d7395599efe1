"""The stack as FSDP2 leaves it, from which qccl.torch.units takes the parameters that are reduced."""

from __future__ import annotations

import numpy as np
import pytest

import qccl
from qccl.torch import units


def test_a_reduction_with_other_variables(monkeypatch) -> None:
    """Another PyTorch may have them: its parameters are unknown then, which an error says."""

    def post_backward(self) -> object:
        return units.reduced_parameters()

    assert units.reduced_parameters() is None
    monkeypatch.setattr(units, "_REDUCTION", post_backward.__code__)
    with pytest.raises(qccl.EngineError, match="does not show which parameters it reduces"):
        post_backward(0)


def test_names_of_parameters_with_commas_and_colons() -> None:
    """Keys of sets hold the names of their parameters, which may be keys of a ModuleDict."""
    names = ("layers.a,b.weight", "layers.c:d.weight", "bias")

    def places(members):
        return {name: [("residual", 64 * i, 64 * (i + 1))] for i, name in enumerate(members)}

    def run(comm: qccl.Communicator) -> float:
        owner = comm._session.state.owners.add("test", "test", None, separators=units.SEPARATORS)
        keys = units.KeyOfSet(comm, owner, "/module", names, places)
        for members, takes_over in ((names[:1], False), (names[:2], True), (names, True), (names[1:], True)):
            assert keys.arrange(members) == takes_over
            x = np.linspace(0, 1 + comm.rank, 64 * len(members), dtype=np.float32)
            comm.quantized_allreduce(x, codec="minmax2+ef", algorithm="one_shot", key=keys.key(members))
        return len(comm.state_dict()["keys"])

    assert qccl.run_ranks(2, run) == [2, 2]  # the first parameter's residual waits under the key of all
