"""States of compress() that someone made up, or of ranks on other nodes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from made_up_states import assert_refused_or_loaded, saved

import qccl
from qccl.torch.groups import Policy, form_groups
from qccl.torch.state import from_saved, to_full, to_saved


def test_states_of_compress_that_someone_made_up():
    named = {"a.weight": torch.nn.Parameter(torch.zeros(8, 16)), "a.bias": torch.nn.Parameter(torch.zeros(8))}

    def run(comm):
        groups = form_groups(named.items(), Policy("minmax4+ef+nesterov"), 1 << 20)
        good = to_saved(comm, groups, 7)
        for kind in ("residuals", "momenta"):
            for tensor in good[kind].values():
                tensor.copy_(torch.rand(tensor.shape, generator=torch.Generator().manual_seed(comm.rank)))
        everything = {name: value for name, value in good.items() if name not in ("rank", "size", "nodes")}
        for state in (good, everything):
            from_saved(comm, groups, state)
            wanted = saved(comm.state_dict())
            assert_refused_or_loaded(
                lambda junk: from_saved(comm, groups, junk),
                state,
                lambda wanted=wanted: saved(comm.state_dict()) == wanted,
            )

    qccl.run_ranks(2, run)


_FLAT, _TWO, _THREE = (0, 1, 2, 3, 4, 5), (0, 0, 0, 1, 1, 1), (0, 0, 1, 1, 2, 2)


@pytest.mark.parametrize("layouts", [(_FLAT, _TWO), (_TWO, _THREE), (_THREE, _FLAT)], ids=str)
def test_states_of_compress_on_other_nodes(layouts: tuple[tuple[int, ...], ...]) -> None:
    """One rank's state is refused; that of all ranks keeps the total of what their results lack."""
    named = {"weight": torch.nn.Parameter(torch.zeros(256, 1024)), "other": torch.nn.Parameter(torch.zeros(7, 999))}
    states: list = [None] * 6

    def run(comm: qccl.Communicator) -> None:
        groups = form_groups(named.items(), Policy("minmax4+ef"), 1 << 22)

        def add_ranks(total) -> None:
            each = comm.allgather(total.numpy().tobytes())
            total.copy_(torch.from_numpy(np.sum([np.frombuffer(a) for a in each], axis=0)))

        def call() -> None:
            draw = torch.Generator().manual_seed(comm.rank)
            for group in (each for each in groups if each.codec is not None):
                gradients = [torch.randn(p.shape, generator=draw) for p in group.parameters]
                comm.quantized_allreduce_coalesced(gradients, codec=group.codec, op="avg", key=group.key)

        comm.nodes = layouts[0]
        call()
        states[comm.rank] = to_saved(comm, groups, 1)
        before = to_full(comm, groups, 1, add_ranks)
        assert any(tensor.any() for tensor in before["residuals"].values())
        comm.nodes = layouts[1]
        with pytest.raises(qccl.ArgumentError, match=r"the state belongs to ranks on the nodes .* full_state_dict\(\)"):
            from_saved(comm, groups, states[comm.rank])
        for given in (states, before):
            assert from_saved(comm, groups, given) == 1
            after = to_full(comm, groups, 1, add_ranks)
            for name, tensor in before["residuals"].items():
                torch.testing.assert_close(after["residuals"][name], tensor, rtol=1e-5, atol=1e-7)
        call()

    qccl.run_ranks(6, run)
