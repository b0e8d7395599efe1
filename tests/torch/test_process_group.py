"""The backend "qccl" of torch.distributed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import patience
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from on_ranks import check, in_group, on_ranks, run
from rank_calls import error_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import qccl
import qccl.torch

pytestmark = pytest.mark.starts_first

LIMIT = timedelta(seconds=40)
#: 64 KiB of fp32: the smallest call that is compressed
COUNT = 16384


@contextmanager
def group(backend: str = "qccl", **options: Any) -> Iterator[Any]:
    """The default group, on another store in each use."""
    if dist.is_initialized():  # by on_ranks()
        group.store = dist.distributed_c10d._get_default_store()
        group.ranks = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
    group.uses += 1
    rank, size = group.ranks
    store = dist.PrefixStore(f"use {group.uses}", group.store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=LIMIT, **options)
    yield dist.group.WORLD
    dist.destroy_process_group()


group.uses = 0


def values(rank: int, count: int = COUNT, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


def of_threads(call: Callable[[qccl.Communicator], Any], size: int) -> list[Any]:
    """The results of the library's own calls on threads, by rank."""
    return qccl.run_ranks(size, call)


def calls(pg: Any) -> int:
    """The number of compressed calls so far."""
    return sum(comm.calls for comm in pg._comms.values())


# -- checks ----------------------------------------------------------------------------------------------------------


@on_ranks(2, transport="gloo")
def test_releases() -> None:
    """A group that was destroyed leaves no connection and no thread."""
    first: list[int] = []
    for backend in ("qccl", "qccl", "qccl", "gloo"):
        with group(backend):
            dist.all_reduce(torch.ones(COUNT))
            dist.all_reduce(torch.ones(1))
        found = held()
        first = first or found
        patience.wait_until(lambda: held() == first)  # noqa: B023  # a thread that was joined may stay for a moment


def held() -> list[int]:
    """How many files and threads this process has."""
    return [len(os.listdir(f"/proc/self/{each}")) for each in ("fd", "task")]


@on_ranks(2, 4, transport="gloo")
def test_exact() -> None:
    """Each function gives what gloo gives where nothing is compressed, and connects no communicator."""
    with group() as pg:
        gloo = dist.new_group(backend="gloo")
        for name, function in EXACT.items():
            found, expected = function(pg), function(gloo)
            assert torch.equal(found, expected), f"{name}: {found} {expected}"
        assert calls(pg) == 0 and not pg._comms
        assert dist.get_backend() == "qccl" and dist.get_backend(gloo) == "gloo"


def _reduced(dtype: torch.dtype, op: Any, count: int = 100) -> Callable[[Any], torch.Tensor]:
    def function(pg: Any) -> torch.Tensor:
        x = (values(pg.rank(), count) * 10).to(dtype)
        dist.all_reduce(x, op, group=pg)
        return x

    return function


def _filled(start: Callable[[Any, torch.Tensor, torch.Tensor], Any], into: int, given: int) -> Any:
    """``start`` with tensors of so many elements for each rank (0: one rank's)."""

    def function(pg: Any) -> torch.Tensor:
        out = torch.zeros(10 * (into or 1) * (pg.size() if into else 1))
        start(pg, out, values(pg.rank(), 10 * (pg.size() if given else 1)))
        return out

    return function


def _send(pg: Any) -> torch.Tensor:
    x, y = values(pg.rank()), torch.zeros(COUNT)
    after, before = ((pg.rank() + step) % pg.size() for step in (1, -1))
    ops = [dist.P2POp(dist.isend, x, after, pg), dist.P2POp(dist.irecv, y, before, pg)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return y


def _objects(pg: Any) -> torch.Tensor:
    found: list[Any] = [None] * pg.size()
    dist.all_gather_object(found, {"rank": pg.rank()}, group=pg)
    text = [{"from": 0} if pg.rank() == 0 else None]
    dist.broadcast_object_list(text, 0, group=pg)
    dist.barrier(group=pg)
    pg.monitored_barrier(LIMIT)
    return torch.tensor([each["rank"] for each in found] + [text[0]["from"]])


def _sparse(pg: Any) -> torch.Tensor:
    x = torch.eye(300).to_sparse()  # its dense form would be compressed
    dist.all_reduce(x, group=pg)
    return x.to_dense()


def _coalesced(pg: Any) -> torch.Tensor:
    xs = [values(pg.rank(), 10), values(pg.rank() + 1, 7)]
    with dist._coalescing_manager(pg) as manager:
        for x in xs:
            dist.all_reduce(x, group=pg)
    manager.wait()
    return torch.cat(xs)


def _many(pg: Any, function: str) -> torch.Tensor:
    """A function of lists of tensors, one tensor for each rank."""
    parts = list(values(pg.rank(), 10 * pg.size()).split(10))
    out = [torch.zeros(10) for _ in parts]
    root, is_root = {"src": 0, "group": pg}, pg.rank() == 0
    if function == "all_to_all":
        dist.all_to_all(out, parts, group=pg)
    elif function == "gather":
        dist.gather(parts[0], out if is_root else None, group=pg)
    elif function == "scatter":
        dist.scatter(out[0], parts if is_root else None, **root)
    elif function == "all_gather":
        dist.all_gather(out, parts[0], group=pg)
    else:
        dist.reduce_scatter(out[0], parts, group=pg)
    return torch.cat(out)


SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX
EXACT: dict[str, Callable[[Any], torch.Tensor]] = {
    "small": _reduced(torch.float32, SUM),
    "small mean": _reduced(torch.bfloat16, AVG),
    "just below 64 KiB": _reduced(torch.float32, SUM, COUNT - 1),
    "number": lambda pg: _reduced(torch.float32, SUM, 1)(pg).reshape(()),
    "empty": _reduced(torch.float32, SUM, 0),
    "float64": _reduced(torch.float64, SUM, COUNT),
    "int64": _reduced(torch.int64, SUM, COUNT),
    "max": _reduced(torch.float32, MAX, COUNT),
    "sparse": _sparse,
    "broadcast": lambda pg: dist.broadcast(x := values(pg.rank()), 0, group=pg) or x,
    "reduce": lambda pg: dist.reduce(x := values(pg.rank(), 10), 0, group=pg) or x,
    "reduce_scatter_single": _filled(lambda pg, out, x: dist.reduce_scatter_single(out, x, group=pg), 0, 1),
    "all_gather_single": _filled(lambda pg, out, x: dist.all_gather_single(out, x, group=pg), 1, 0),
    "large all_gather_single": lambda pg: functional.all_gather_tensor(values(pg.rank()), 0, pg).clone(),
    "all_to_all_single": _filled(lambda pg, out, x: dist.all_to_all_single(out, x, group=pg), 1, 1),
    "send": _send,
    "objects": _objects,
    "coalesced": _coalesced,
    **{
        name: lambda pg, name=name: _many(pg, name)
        for name in ("all_to_all", "gather", "scatter", "all_gather", "reduce_scatter")
    },
}


@on_ranks(2, 4, transport="gloo")
def test_compressed() -> None:
    """Sums of 64 KiB have the bits of qccl's own calls with the same codec, through each function of PyTorch."""
    with group() as pg:
        rank, size = pg.rank(), pg.size()
        x = values(rank)
        sums = of_threads(lambda comm: comm.quantized_allreduce(values(comm.rank)), size)
        parts = of_threads(
            lambda comm: comm.quantized_reduce_scatter(values(comm.rank), torch.empty(COUNT // size), op="avg"), size
        )
        works = [dist.all_reduce(y := x.clone()) or (y, sums)]
        works += [(functional.all_reduce(x, "sum", pg), sums)]
        works += [(pg.allreduce(y := x.clone(), op=SUM).wait() and y, sums)]
        works += [(pg.allreduce([y := x.clone()]).get_future().wait()[0], sums)]
        works += [(dist.reduce_scatter_single(y := torch.empty(COUNT // size), x, AVG) or y, parts)]
        works += [(dist.reduce_scatter(y := torch.empty(COUNT // size), list(x.chunk(size)), AVG) or y, parts)]
        works += [(functional.reduce_scatter_tensor(x, "avg", 0, pg), parts)]
        works += [(dist.reduce_scatter_single(in_place := x.clone()[: COUNT // size], x, AVG) or in_place, parts)]
        for i, (found, expected) in enumerate(works):
            assert torch.equal(found, expected[rank]), i
        assert calls(pg) == len(works)
        assert not torch.equal(sums[0], sum(values(r) for r in range(size)))  # it is not exact

        y = [values(rank, 9000), values(rank + 1, 9000)]
        expected = of_threads(
            lambda comm: comm.quantized_allreduce_coalesced([values(comm.rank, 9000), values(comm.rank + 1, 9000)]),
            size,
        )
        with dist._coalescing_manager(async_ops=True) as manager:
            for each in y:
                dist.all_reduce(each)
        manager.wait()
        assert all(map(torch.equal, y, expected[rank]))
        assert torch.equal(x, values(rank))
        comm = pg._comms["cpu"]
    assert "closed" in error_of(comm.barrier, qccl.ArgumentError)


@on_ranks(2, transport="gloo")
def test_tensors() -> None:
    """Tensors that are not contiguous, need gradients, are complex, or of 16 bits; and errors."""
    with group() as pg:
        rank, size = pg.rank(), pg.size()
        expected = of_threads(lambda comm: comm.quantized_allreduce(values(comm.rank, 2 * COUNT)), size)[rank]
        x = torch.zeros(2 * COUNT, 2)
        x[:, 0] = values(rank, 2 * COUNT)
        for asynchronous in (False, True):
            y = x.clone()
            assert not y[:, 0].is_contiguous()
            work = dist.all_reduce(y[:, 0], async_op=asynchronous)
            if asynchronous:
                assert work.get_future().wait() and work.wait() and work.is_success()
            assert torch.equal(y[:, 0], expected) and not y[:, 1].any()
        y = values(rank, 2 * COUNT).requires_grad_()
        dist.all_reduce(y)
        assert torch.equal(y, expected) and y.requires_grad
        y = torch.view_as_complex(values(rank, 2 * COUNT).reshape(-1, 2).clone())
        dist.all_reduce(y)
        assert torch.equal(torch.view_as_real(y).flatten(), expected)
        for dtype in (torch.float16, torch.bfloat16):
            y = values(rank, 2 * COUNT, dtype)
            dist.all_reduce(y, AVG)
            expected_16 = of_threads(
                lambda comm, dtype=dtype: comm.quantized_allreduce(values(comm.rank, 2 * COUNT, dtype), op="avg"), size
            )
            assert torch.equal(y, expected_16[rank])
        done = calls(pg)
        for asynchronous in (False, True):
            y = torch.tensor([3 + rank, -9, 7])  # gloo has no mean of integers, and NCCL rounds it towards zero
            work = dist.all_reduce(y, AVG, async_op=asynchronous)
            assert work is None or work.wait()
            total = 3 * size + sum(range(size))
            assert y.tolist() == [total // size, -9, 7], y
        mixed = [torch.ones(COUNT), torch.ones(COUNT, dtype=torch.float64)]
        assert "same type" in error_of(lambda: pg.allreduce_coalesced(mixed), RuntimeError)
        assert calls(pg) == done


@on_ranks(2, transport="gloo")
def test_asynchronous() -> None:
    """async_op=True returns before the others call, and a Future ends although nobody waits for the Work."""
    with group() as pg:
        rank, size, store = pg.rank(), pg.size(), dist.PrefixStore("asynchronous", group.store)
        dist.all_reduce(torch.ones(COUNT))  # connects
        xs = [values(rank + i) for i in range(3)]
        expected = of_threads(lambda comm: [comm.quantized_allreduce(values(comm.rank + i)) for i in range(3)], size)
        if rank:
            store.wait(["started"], LIMIT)
        works = [dist.all_reduce(x, async_op=True) for x in xs]
        if rank == 0:
            assert not any(work.is_completed() for work in works)
            store.set("started", "")
        ended: list[Any] = []
        future = works[-1].get_future().then(lambda done: ended.append(done.value()) or "next")
        assert future.wait() == "next" and ended[0][0] is xs[-1] is works[-1].result()[0]
        for work, x, y in zip(works, xs, expected[rank], strict=True):
            assert work.wait(LIMIT) and work.is_completed() and work.exception() is None and torch.equal(x, y)
        strided = torch.zeros(COUNT, 2)
        strided[:, 0] = values(rank)
        polled = dist.all_reduce(strided[:, 0], async_op=True)
        patience.wait_until(polled.is_completed)
        assert torch.equal(strided[:, 0], expected[rank][0])  # without wait()


@on_ranks(2, transport="gloo")
def test_callbacks() -> None:
    """Exact calls run while a thread of gloo drops functions of Python."""
    with group() as pg:
        for i in range(200):
            future = dist.all_reduce(torch.tensor([i]), async_op=True).get_future()
            future = future.then(lambda done: done.value()[0] + 1)
            dist.barrier()
            assert future.wait() == i * pg.size() + 1


@on_ranks(2, transport="gloo")
def test_compiles() -> None:
    """Collectives in a compiled function, which traces some of them itself, have the values of others."""

    def at_once(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        gathered = x.new_empty(x.numel() * dist.get_world_size())
        dist.all_gather_into_tensor(gathered, x)
        return gathered + 1

    def later(x: torch.Tensor) -> torch.Tensor:
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        return x + 1

    with group() as pg:
        for call in (at_once, later):
            wanted = call(values(pg.rank()))
            before = calls(pg)
            assert torch.equal(torch.compile(call, backend="aot_eager")(values(pg.rank())), wanted), call
            assert calls(pg) > before


@on_ranks(2, 4, transport="gloo")
def test_options() -> None:
    """min_bytes, all_gather_codec, codec "none", subgroups, device:backend pairs, and what is refused."""
    made = qccl.torch.Options(codec="minmax4", min_bytes=40, all_gather_codec="cast:dtype=bfloat16")
    with group("cpu:qccl", pg_options=made) as pg:
        rank, size = pg.rank(), pg.size()
        x = values(rank, 10)
        expected = of_threads(lambda comm: comm.quantized_allreduce(values(comm.rank, 10), codec="minmax4"), size)
        dist.all_reduce(x)
        assert torch.equal(x, expected[rank])
        gathered = torch.cat([values(r, 10) for r in range(size)]).bfloat16().float()
        dist.all_gather_single(out := torch.empty(10 * size), values(rank, 10))
        assert torch.equal(out, gathered)
        dist.all_gather(outs := [torch.empty(10) for _ in range(size)], values(rank, 10))
        assert torch.equal(torch.cat(outs), gathered)
        assert torch.equal(functional.all_gather_tensor(values(rank, 10), 0, pg), gathered)
        count = calls(pg)
        assert count == 4
        dist.all_reduce(torch.ones(9))
        assert calls(pg) == count

        ranks = list(range(1, size))
        sub = dist.new_group(ranks, backend="qccl", pg_options=qccl.torch.Options(codec="none", min_bytes=0))
        default = dist.new_group(ranks)  # the options of the environment
        if rank:
            dist.all_reduce(x := values(rank), group=sub)
            assert torch.equal(x, sum(values(r) for r in ranks)) or len(ranks) > 2
            assert not sub._comms and default.compression == qccl.torch.Options()
            dist.all_reduce(values(rank), group=default)
            assert calls(default) == (1 if len(ranks) > 1 else 0)

        different = qccl.torch.Options(codec=f"minmax{8 if rank else 4}")
        assert "minmax4" in error_of(lambda: dist.new_group(backend="qccl", pg_options=different), qccl.MismatchError)
        assert "Options" in error_of(
            lambda: dist.new_group(backend="qccl", pg_options={"codec": "minmax4"}), qccl.ArgumentError
        )
    assert "qccl.torch.compress" in error_of(lambda: qccl.torch.Options(codec="minmax4+ef"), qccl.ArgumentError)
    assert "minmax" in error_of(lambda: qccl.torch.Options(all_gather_codec="minmx8"), qccl.CodecError)
    assert "min_bytes" in error_of(lambda: qccl.torch.Options(min_bytes=-1), qccl.ArgumentError)
    os.environ |= {"QCCL_CODEC": "minmax4", "QCCL_MIN_BYTES": "10"}
    assert qccl.torch.Options() == qccl.torch.Options("minmax4", 10, "none")
    os.environ["QCCL_MIN_BYTES"] = "64 KiB"
    assert "QCCL_MIN_BYTES='64 KiB'" in error_of(qccl.torch.Options, qccl.ArgumentError)
    for name in ("QCCL_CODEC", "QCCL_MIN_BYTES"):
        del os.environ[name]
    with group("cpu:qccl,cuda:nccl") as pg:
        dist.all_reduce(x := values(pg.rank()))
        assert calls(pg) == 1
        with qccl.Communicator.from_torch() as comm:
            assert (comm.quantized_allreduce(torch.ones(9)) == comm.size).all()


@on_ranks(2, transport="gloo")
def test_auto() -> None:
    """With "auto" the ranks choose alike, and calls have the bits of the codec that was chosen."""
    os.environ["QCCL_CODEC"] = "auto:minmax4"
    options = qccl.torch.Options(min_bytes=10, all_gather_codec="auto")
    del os.environ["QCCL_CODEC"]
    assert str(options) == "codec=auto:minmax4, min_bytes=10, all_gather_codec=auto:minmax8"
    assert qccl.torch.Options(codec="auto:none") and "auto:minmax8+ef" in error_of(
        lambda: qccl.torch.Options(codec="auto:minmax8+ef"), qccl.ArgumentError
    )
    with group(pg_options=options) as pg:
        size = pg.size()
        dist.all_reduce(x := values(pg.rank()))
        dist.all_gather_into_tensor(gathered := torch.empty(size * COUNT), values(pg.rank()))
        [comm] = pg._comms.values()
        assert calls(pg) == 2 and len(comm._chooser.profile.times) == 2
        plan = comm.plan("allreduce", COUNT, codec="auto:minmax4")
        how = {"codec": plan.codec, "algorithm": plan.spec.algorithm}
        assert plan.codec in ("none", "minmax4")
        gathers = comm.plan("all_gather", size * COUNT, codec="auto").codec
    expected = of_threads(lambda comm: comm.quantized_allreduce(values(comm.rank), **how), size)[0]
    assert torch.equal(x, expected)
    each = of_threads(
        lambda comm: comm.quantized_all_gather(values(comm.rank), torch.empty(size * COUNT), codec=gathers), size
    )
    assert torch.equal(gathered, each[0])
    with group(pg_options=qccl.torch.Options(codec="auto:none")) as pg:
        dist.all_reduce(values(pg.rank()))
        assert calls(pg) == 0


@on_ranks(2, transport="gloo")
def test_ddp() -> None:
    """DDP as it is: each bucket is one compressed call, the replicas stay equal, and the loss falls."""
    with group() as pg:
        torch.manual_seed(pg.rank())  # DDP broadcasts rank 0's model, exactly
        model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))
        first = [p.detach().clone() for p in model.parameters()]
        for p in first:
            dist.broadcast(p, 0)
        wrapped = DistributedDataParallel(model)
        assert all(map(torch.equal, first, model.parameters())) and calls(pg) == 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for step in range(20):
            x = torch.randn(64, 64, generator=torch.Generator().manual_seed(100 * step + pg.rank()))
            optimizer.zero_grad()
            loss = (wrapped(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert calls(pg) == 20  # one bucket
        assert losses[-1] < 0.9 * losses[0]
        found: list[Any] = [None] * pg.size()
        dist.all_gather_object(found, [p.detach().numpy().tobytes() for p in model.parameters()])
        assert all(each == found[0] for each in found)


@on_ranks(2, 4, transport="gloo")
def test_fsdp() -> None:
    """FSDP2: parameters are gathered exactly, and gradients are off by no more than the codec's bound."""
    with group() as pg:
        rank, size = pg.rank(), pg.size()
        loss, gradients = _sharded_step(init_device_mesh("cpu", (size,)), rank)
        assert calls(pg) == 2  # the first layer, and the rest of the model
    with group("gloo"):
        plain_loss, plain_gradients = _sharded_step(init_device_mesh("cpu", (size,)), rank)
    assert loss == plain_loss
    local = [_sharded_step(None, r)[1] for r in range(size)]
    for i, (found, expected) in enumerate(zip(gradients, plain_gradients, strict=True)):
        step = sum((own[i].max() - own[i].min()) / 255 for own in local) / size
        assert not torch.equal(found, expected) and (found - expected).abs().max() <= 0.501 * step


def _sharded_step(mesh: Any, rank: int) -> tuple[float, list[torch.Tensor]]:
    """The loss and the gradients of a step on the data of ``rank``; without ``mesh``, of this process alone."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256, bias=False), torch.nn.Linear(256, 256, bias=False))
    if mesh is not None:
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    loss = model(values(rank, 256 * 8).reshape(8, 256)).square().mean()
    loss.backward()
    return loss.item(), [p.grad.full_tensor() if mesh else p.grad for p in model.parameters()]


@in_group
def dies() -> None:
    """A rank is lost: the others' compressed calls say which."""
    with group() as pg:
        dist.all_reduce(torch.ones(COUNT))
        if pg.rank() == 1:
            os._exit(0)
        future = dist.all_reduce(torch.ones(COUNT), async_op=True).get_future()
        assert "rank 1" in error_of(future.wait, (qccl.PeerLost, RuntimeError))
        assert "rank 1" in error_of(lambda: dist.all_reduce(torch.ones(COUNT)), qccl.PeerLost)


def test_a_rank_that_dies() -> None:
    check(run(dies, 3, transport="gloo"), but=1)
