"""qccl.DiLoCo with fragments and overlap, against the published algorithms; joining, states, SparseLoCo."""

from __future__ import annotations

import hashlib
import io
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import patience
import pytest
from rank_forks import check, run
from start_ranks import needs_ucx
from thread_ranks import on_ranks

import qccl
from qccl.base.trace import TraceEvent

pytestmark = pytest.mark.usefixtures("threads_end")

RANKS = 3
SHAPES = ((40, 7), (), (300,), (12, 5))


def local_change(rank: int, step: int, number: int) -> np.ndarray:
    rng = np.random.default_rng([rank, step, number])
    return np.asarray(rng.standard_normal(SHAPES[number]) * 1e-2, np.float32)


def begin(value: float = 1.0, types: Sequence[Any] = (np.float32,)) -> list[np.ndarray]:
    return [np.full(shape, value, types[i % len(types)]) for i, shape in enumerate(SHAPES)]


def train(params: Sequence[Any], rank: int, step: int) -> None:
    """A local step, whose change depends on the parameters and differs from rank to rank."""
    for number, array in enumerate(params):
        array *= 0.75
        array += local_change(rank, step, number).astype(array.dtype)


#: outer_lr, momentum and nesterov by default
USUAL = (0.7, 0.9, True)


def reference(
    steps: int, fragments: Sequence[int], period: int, delay: int, rule: tuple[float, float, bool]
) -> tuple[list[list[Any]], list[Any]]:
    """Algorithm 2 of arXiv 2501.18512 in double precision: each rank's parameters, and the common ones.

    The local steps of the delay are added to the common parameters, as in arXiv 2006.00441.
    """
    outer_lr, momentum, nesterov = rule
    local = [[np.ones(shape) for shape in SHAPES] for _ in range(RANKS)]
    common, velocity = ([np.full(shape, value) for shape in SHAPES] for value in (1.0, 0.0))
    count = max(fragments) + 1
    waiting: dict[tuple[int, int], Any] = {}  # the averages, by the step after which they are applied and the array
    begun: dict[int, Any] = {}  # each rank's parameters when the last all-reduce of the array began
    for t in range(1, steps + 1):
        for rank in range(RANKS):
            for i in range(len(SHAPES)):
                local[rank][i] = local[rank][i] * 0.75 + local_change(rank, t, i)
        for i, fragment in enumerate(fragments):
            if t % period == (fragment + 1) * period // count % period:
                waiting[t + delay, i] = np.mean([common[i] - local[rank][i] for rank in range(RANKS)], axis=0)
                begun[i] = [local[rank][i] for rank in range(RANKS)]
            if (t, i) in waiting:
                d = waiting.pop((t, i))
                velocity[i] = momentum * velocity[i] + d
                common[i] = common[i] - outer_lr * (d + momentum * velocity[i] if nesterov else velocity[i])
                for rank in range(RANKS):
                    local[rank][i] = common[i] + local[rank][i] - begun[i][rank]
    return local, common


@pytest.mark.parametrize(
    ("fragments", "found", "period", "delay", "rule"),
    [
        (1, [0, 0, 0, 0], 1, 0, USUAL),
        (1, [0, 0, 0, 0], 1, 0, (0.5, 0.6, False)),
        (1, [0, 0, 0, 0], 1, 0, (1.0, 0.0, True)),
        (1, [0, 0, 0, 0], 3, 0, USUAL),
        (1, [0, 0, 0, 0], 4, 3, USUAL),
        (2, [0, 1, 1, 0], 4, 1, USUAL),
        ([2, 1, 0, 2], [2, 1, 0, 2], 3, 2, USUAL),
        (4, [0, 1, 2, 3], 5, 2, USUAL),
        (2, [0, 1, 1, 0], 4, 0, USUAL),
    ],
)
def test_fragments_take_their_outer_steps_as_the_papers_say(
    fragments: Any, found: list[int], period: int, delay: int, rule: tuple[float, float, bool]
) -> None:
    """With a period of 1 the program takes the outer steps itself."""

    def run(comm: qccl.Communicator) -> tuple[list[np.ndarray], list[np.ndarray]]:
        params = begin(comm.rank + 1)
        how: dict[str, Any] = {"fragments": fragments, "period": period, "delay": delay} if period > 1 else {}
        how |= dict(zip(("outer_lr", "momentum", "nesterov"), rule, strict=True)) if rule != USUAL else {}
        outer = qccl.DiLoCo(comm, params, codec="none", **how)
        assert outer.fragments == found and all((array == 1).all() for array in params)  # rank 0's
        for step in range(1, 18):
            train(params, comm.rank, step)
            after = outer.step() if period == 1 else outer.after_local_step()
            assert all(a is b for a, b in zip(after, params, strict=True))
        assert outer.local_steps == 17 * (period > 1) and outer.steps >= 2
        state = [array.copy() for array in params], [array.copy() for array in outer.common]
        outer.finish()
        return state

    local, common = reference(17, found, period, delay, rule)
    for rank, (mine, shared) in enumerate(qccl.run_ranks(RANKS, run)):
        for i in range(len(SHAPES)):
            np.testing.assert_allclose(mine[i], local[rank][i], atol=5e-6)
            np.testing.assert_allclose(shared[i], common[i], atol=5e-6)


@pytest.mark.parametrize(
    "codec", ["trellis2+ef", "topk:k=0.1,block=64/k=0.3,block=64+ef", "onebit+ef", "minmax2:rounding=stochastic+ef"]
)
def test_all_ranks_hold_the_same_common_bits(codec: str) -> None:
    """At every step, with two element types; after step() also the same parameters."""

    def run(comm: qccl.Communicator) -> list[bytes]:
        params = begin(1, (np.float32, ml_dtypes.bfloat16))
        outer = qccl.DiLoCo(comm, params, codec=codec, fragments=[0, 0, 1, 1], period=4, delay=3)
        seen = []
        for step in range(1, 13):
            train(params, comm.rank, step)
            outer.after_local_step()
            seen.append(b"".join(array.tobytes() for array in outer.common))
        train(params, comm.rank, 13)
        outer.step()
        assert outer.finish() is not None and outer.local_steps == 12
        seen.append(b"".join(array.tobytes() for array in params))
        assert seen[-1] == b"".join(array.tobytes() for array in outer.common) and len({*seen}) > 4
        return seen

    found = qccl.run_ranks(RANKS, run)
    assert found[0] == found[1] == found[2]


@on_ranks(2)
def test_a_local_step_runs_while_an_outer_step_is_under_way(comm: qccl.Communicator, stepping: threading.Event) -> None:
    """Rank 0's local step makes no call, and keeps the interpreter busy until the all-reduce has ended by itself."""
    events: list[TraceEvent] = []
    allreduce = comm.quantized_allreduce_coalesced
    traced = {"quantized_allreduce_coalesced": lambda *a, **how: allreduce(*a, trace=events, **how)}
    vars(comm).update(traced)
    params = [np.zeros(200_000, np.float32)]
    outer = qccl.DiLoCo(comm, params, codec="trellis2+ef", period=2, delay=1)
    outer.after_local_step()
    params[0] += np.random.default_rng(comm.rank).standard_normal(params[0].size, np.float32)
    if comm.rank == 1:
        assert stepping.wait(60)
    outer.after_local_step()
    begun, limit = time.perf_counter(), time.perf_counter() + 60
    if comm.rank == 0:
        stepping.set()  # rank 1 begins its part now
    while not {event.queue for event in events.copy()} >= {"compute", "recv"}:
        assert time.perf_counter() < limit, "the all-reduce has not ended by itself"
    ended = time.perf_counter()
    assert not outer.common[0].any()  # the outer step comes after its delay
    if comm.rank == 0:
        during = {event.queue for event in events if begun < event.stop < ended}
        assert during >= {"compute", "recv"}, during
    outer.after_local_step()
    assert outer.common[0].any() and outer.steps == 1


@on_ranks(2)
def test_goes_on_from_a_state_to_the_bit_while_an_outer_step_is_under_way(comm: qccl.Communicator) -> None:
    how: dict[str, Any] = {"codec": "minmax2:rounding=stochastic+ef", "fragments": 2, "period": 4, "delay": 3}
    params = begin()
    outer = qccl.DiLoCo(comm, params, **how)
    for number in range(1, 8):
        train(params, comm.rank, number)
        outer.after_local_step()
    file, residuals = io.BytesIO(), comm.state_dict()
    qccl.save_state(file, outer.state_dict() | {"local": params})
    state = qccl.load_state(io.BytesIO(file.getvalue()))
    assert len(state["under_way"]) == 1 and state["steps"] == [1, 1]

    def go_on(each: qccl.DiLoCo, arrays: list[Any]) -> bytes:
        for number in range(8, 13):
            train(arrays, comm.rank, number)
            each.after_local_step()
        found = b"".join(np.asarray(array).tobytes() for array in (*arrays, *each.common, *each._velocity))
        each.finish(begin())
        return found

    wanted, again = go_on(outer, params), begin()
    outer.close()
    other = qccl.DiLoCo(comm, again, **how)
    saved = state.pop("local")
    state["weights"] = [1.0, 2.0]  # of the last release, with weighted=True
    other.load_state_dict(state)
    comm.load_state_dict(residuals)
    for array, each in zip(again, saved, strict=True):
        array[...] = each
    assert other.local_steps == 7 and go_on(other, again) == wanted


@on_ranks(2)
def test_a_refused_average_changes_neither_parameters_nor_residuals(comm: qccl.Communicator) -> None:
    """Of two element types, of which one is not finite; training then goes on."""
    params = begin(1, (np.float32, np.float16))
    outer = qccl.DiLoCo(comm, params, codec="onebit+ef", period=2, delay=1)
    for step in range(1, 4):
        train(params, comm.rank, step)
        outer.after_local_step()
    before, common = comm.state_dict()["keys"], [array.copy() for array in outer.common]
    params[1][...] = np.nan if comm.rank else 1
    outer.after_local_step()
    with pytest.raises(qccl.ArgumentError, match="not finite"):
        outer.state_dict()  # and again when it is due
    local = [array.copy() for array in params]
    with pytest.raises(qccl.ArgumentError, match="not finite"):
        outer.after_local_step()
    for now, then in ((outer.common, common), (params, local)):
        assert all(a.tobytes() == b.tobytes() for a, b in zip(now, then, strict=True))
    for key, entry in comm.state_dict()["keys"].items():
        for name, values in entry["values"].items():
            assert values.tobytes() == before[key]["values"][name].tobytes()
    params[1][...] = 1
    for _ in range(2):
        outer.after_local_step()
    assert outer.steps == 2 and outer.local_steps == 7


def test_a_new_rank_gets_common_parameters_momentum_and_turn() -> None:
    def run(comm: qccl.Communicator) -> bytes:
        both = comm.split(None if comm.rank == 2 else 0)
        params = begin(comm.rank)
        how: dict[str, Any] = {"codec": "minmax4+ef", "fragments": 2, "period": 4, "delay": 1}
        if both is not None:
            outer = qccl.DiLoCo(both, params, **how)
            for step in range(1, 7):  # fragment 0 is under way
                train(params, comm.rank, step)
                outer.after_local_step()
            assert len(outer._under_way) == 1
            outer.finish()
            kept = [array.copy() for array in params]
            outer.continue_on(comm)
            both.close()
            assert all(a.tobytes() == b.tobytes() for a, b in zip(kept, params, strict=True))
        else:
            outer = qccl.DiLoCo(comm, params, **how)
            assert all(a.tobytes() == b.tobytes() for a, b in zip(outer.common, params, strict=True))
        assert outer.local_steps == 6 and outer._taken == [2, 1]
        seen = [b"".join(array.tobytes() for array in (*outer.common, *outer._velocity))]
        for step in range(7, 12):
            train(params, comm.rank, step)
            outer.after_local_step()
            seen.append(b"".join(array.tobytes() for array in outer.common))
        assert len({*seen}) == 4  # two outer steps, and the state with momentum
        return b"".join(seen)

    found = qccl.run_ranks(3, run)
    assert found[0] == found[1] == found[2]


def loses_and_gains(rank: int, size: int, address: str) -> None:
    """Rank 1 gives up after 11 local steps, and joins the others again when they have taken 15."""
    place = Path(os.environ["QCCL_TEST_PLACE"])

    def train(comm: qccl.Communicator, left: int | None) -> str | None:
        """Until 24 local steps; the rank that fails after ``left`` of them returns None."""
        params = np.zeros(20_000, np.float32)
        outer = qccl.DiLoCo(comm, [params[:5000], params[5000:]], codec="trellis2+ef", fragments=2, period=4, delay=2)
        while outer.local_steps < 24:
            try:
                if outer.local_steps == left:
                    comm.abort("a fault")
                    return None
                if comm.size == 2 and outer.local_steps >= 15:
                    outer.finish()
                    if comm.rank == 0:
                        place.with_suffix(".new").write_text(comm.address)
                        place.with_suffix(".new").replace(place)
                    comm = comm.grow(3, timeout=30)
                    outer.continue_on(comm)
                params += np.random.default_rng([comm.rank, outer.local_steps]).standard_normal(20_000, np.float32)
                outer.after_local_step()
            except qccl.PeerLost:
                comm = comm.shrink(10)
                outer.continue_on(comm)
        outer.step()
        return f"{comm.size} ranks, {outer.steps} steps, {hashlib.sha256(params).hexdigest()}"

    comm = qccl.init("host", rank=rank, size=size, address=address, transport="ucx", timeout=30)
    found = train(comm, 11 if rank == 1 else None)
    if found is None:
        comm.close()
        patience.wait_until(place.exists)
        found = train(qccl.join(place.read_text(), timeout=30), None)
    print(found)


@needs_ucx
@pytest.mark.processes
def test_training_goes_on_when_a_rank_is_lost_and_another_joins(tmp_path: Path) -> None:
    ends = run(3, loses_and_gains, QCCL_TEST_PLACE=str(tmp_path / "address"))
    check(ends)
    assert len({each.out for each in ends}) == 1 and ends[0].out.startswith("3 ranks, ")


@on_ranks(1)
def test_refused(comm: qccl.Communicator) -> None:
    params = begin()
    for arguments, message in (
        ({"period": 0}, r"period must be a number of local steps, at least the number of fragments \(1\), not 0"),
        ({"period": 1, "fragments": 2}, r"at least the number of fragments \(2\), not 1"),
        ({"fragments": 2}, "2 fragments have outer steps at different local steps; give period="),
        ({"fragments": 5, "period": 9}, "fragments=5 is not possible: there are 4 arrays"),
        (
            {"fragments": [0, 2, 0, 0], "period": 9},
            "fragments must be the number of fragments, or the fragment's number for each of the 4 arrays",
        ),
        ({"fragments": [0, 1], "period": 9}, "fragments must be the number of fragments"),
        ({"delay": 1}, "delay must be a number of local steps, 0 or more, and only with period=, not 1"),
        ({"delay": 4, "period": 4}, "delay must be .* less than period=4, not 4"),
        ({"algorithm": "ring"}, "algorithm"),
    ):
        with pytest.raises(qccl.ArgumentError, match=message):
            qccl.DiLoCo(comm, params, **arguments)
    outer = qccl.DiLoCo(comm, params)
    with pytest.raises(qccl.ArgumentError, match=r"give DiLoCo period="):
        outer.after_local_step()
    counted = qccl.DiLoCo(comm, params, period=1)
    with pytest.raises(qccl.ArgumentError, match="params has 3 arrays, and DiLoCo was made for 4"):
        counted.after_local_step(params[:3])
    assert counted.local_steps == 0
