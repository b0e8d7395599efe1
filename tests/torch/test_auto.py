"""compress("auto:CODEC"): measured calls decide between CODEC and none; "auto" alone, and its states, are refused."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from ddp_models import GROUPS, backward, batches, gradients, wrapped
from on_ranks import on_ranks
from profiles import profile
from rank_calls import error_of

import qccl
import qccl.torch


def codecs_of(handle) -> dict[str, str]:
    return {name: group.codec_spec for group in handle._groups for name in group.names}


@on_ranks(2)
def test_by_measured_calls() -> None:
    """With "auto:CODEC" each group has CODEC or none, as the profile says; and the ranks choose alike without one."""
    for fast in ("none", "minmax4+ef"):
        ends = []
        for codec in ("auto:minmax4+ef", fast):
            with qccl.Communicator.from_torch(timeout=60) as comm:
                comm._adopt(profile(comm, (fast, "two_round"), codec="minmax4+ef"))
                model = wrapped()
                with qccl.torch.compress(model, codec, comm=comm, **GROUPS) as handle:
                    for x in batches(3):
                        backward(x, model)
                    ends.append((codecs_of(handle), {n: g.numpy().tobytes() for n, g in gradients(model).items()}))
        assert ends[0] == ends[1] and set(ends[0][0].values()) == {"none", fast}
    model = wrapped()
    with qccl.torch.compress(model, "auto:minmax4", **GROUPS) as handle:
        chosen = codecs_of(handle)
        backward(batches(1)[0], model)
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, chosen)
    assert all(each == chosen for each in found) and set(chosen.values()) <= {"none", "minmax4"}
    refused = partial(error_of, kind=qccl.ArgumentError)
    model = wrapped()
    assert "codec=auto and +nesterov exclude" in refused(lambda: qccl.torch.compress(model, "auto:minmax8+nesterov"))
    text = error_of(lambda: qccl.torch.compress(model, codecs={"inner.*": "auto:minmax8"}), qccl.CodecError)
    assert "choose a codec, in calls and plans of a communicator" in text
    alone = dist.new_group([0])
    with qccl.Communicator.from_torch(timeout=60) as comm:
        if dist.get_rank() == 0:
            text = refused(lambda: qccl.torch.compress(wrapped(process_group=alone), "auto:minmax4", comm=comm))
            assert f"comm is rank 0 of {comm.size}, but" in text
        assert comm.calls == 0
        comm.barrier()
    codec = "auto:minmax4" if dist.get_rank() else "minmax4"
    text = error_of(lambda: qccl.torch.compress(wrapped(), codec), qccl.MismatchError)
    assert "rank 0 has a codec, and rank 1 has the faster one of none and minmax4" in text
    with qccl.Communicator.from_torch(timeout=60) as comm:  # as if the first job had measured other times
        comm._adopt(profile(comm, ("none", "two_round"), codec="minmax4+ef"))
        model = wrapped()
        with qccl.torch.compress(model, "minmax4+ef", **GROUPS) as handle:
            backward(batches(1)[0], model)
            state = handle.state_dict()
        with qccl.torch.compress(wrapped(), "auto:minmax4+ef", comm=comm, **GROUPS) as handle:
            assert "and with codec='auto:CODEC' a comm with the same profile" in refused(
                lambda: handle.load_state_dict(state)
            )


@on_ranks(2)
def test_auto_names_no_codec() -> None:
    model = wrapped()
    for codec in ("auto", " auto", "auto:"):
        text = error_of(lambda codec=codec: qccl.torch.compress(model, codec), qccl.ArgumentError)
        assert "give" in text and "as 'auto:minmax4+ef'" in text
    assert "'auto'" in error_of(lambda: qccl.torch.compress(model, codecs={"inner.*": "auto"}), qccl.CodecError)


@on_ranks(2)
def test_a_state_of_chosen_codecs() -> None:
    """It loads where the same codecs are named; otherwise the error says which."""
    model = wrapped()
    with qccl.torch.compress(model, "minmax4+ef", **GROUPS) as handle:
        backward(batches(1)[0], model)
        state, full = handle.state_dict(), handle.full_state_dict()
    for given in (state | {"choice": "{}"}, full | {"choice": ""}):
        with qccl.torch.compress(wrapped(), "minmax4+ef", **GROUPS) as handle:
            assert handle.load_state_dict(given) == ([], []) and handle.step == 1
        with qccl.torch.compress(wrapped(), "minmax2+ef", **GROUPS) as handle:
            text = error_of(lambda given=given: handle.load_state_dict(given), qccl.ArgumentError)
            assert (
                "the codec of its group 0 is minmax4+ef" in text
                and "codec='auto'), which was removed: give codecs=" in text
            )
