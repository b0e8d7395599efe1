"""All-reduces of other systems, and of qccl: ``SYSTEMS[NAME](rank, ranks, folder)`` connects the ranks.

bench/peer_rank.py times them. A system is imported only when it is asked for, because each is installed in an
environment of its own.
"""

from __future__ import annotations

import atexit
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["SYSTEMS", "AllReduce"]

#: float32 values; the type checker cannot follow the environments of other systems
Values = Any
#: elements of one of FBGEMM's rows, which share a scale: its users' choice for gradients
_ROW = 512
#: columns of the matrix in which PyTorch's hooks get the values; PowerSGD needs a matrix
_COLUMNS = 1024
#: the rank of PowerSGD's factors, and of qccl's
_LOW_RANK = 4
#: first steps in which PowerSGD sends everything
_EXACT_STEPS = 2
#: attempts of PCCL's ranks to reach its master, one per second
_ATTEMPTS = 60
#: seconds for which hivemind looks for a group before each call, outside the timing
_LOOKING = 2.0
#: seconds after which all ranks of hivemind's group know that it is complete
_GROUPED = 0.2


@dataclass(frozen=True)
class AllReduce:
    """A system's all-reduce.

    Attributes:
        run: replaces the values of a float32 array by the sums over all ranks.
        prepare: called before each ``run``, outside the timing; None if there is nothing to prepare.
    """

    run: Callable[[Values], None]
    prepare: Callable[[Values], None] | None = None


def _qccl(codec: str, rank: int, ranks: int, folder: Path) -> AllReduce:
    import qccl

    comm = qccl.init()

    def run(x: Values) -> None:
        comm.quantized_allreduce(x, x, codec=codec)

    return AllReduce(run)


def _mpi(rank: int, ranks: int, folder: Path) -> AllReduce:
    from mpi4py import MPI

    def run(x: Values) -> None:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x)

    return AllReduce(run)


def _torch_group() -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    atexit.register(dist.destroy_process_group)  # else gloo's threads may abort a process that ends
    return torch, dist


def _gloo(dtype: str, rank: int, ranks: int, folder: Path) -> AllReduce:
    torch, dist = _torch_group()

    def run(x: Values) -> None:
        values = torch.from_numpy(x)
        sent = values.to(getattr(torch, dtype))  # the values themselves, if that is their type
        dist.all_reduce(sent)
        values.copy_(sent)

    return AllReduce(run)


def _fp16_hook(torch: Any, model: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def _power_sgd_hook(torch: Any, model: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(None, _LOW_RANK, start_powerSGD_iter=_EXACT_STEPS)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(_EXACT_STEPS):
        model(torch.zeros(model.module.weight.shape)).backward()


def _qccl_low_rank(torch: Any, model: Any) -> None:
    from qccl.torch import compress

    compress(model, "minmax8", low_rank=_LOW_RANK)


def _ddp_hook(register: Callable[[Any, Any], None], rank: int, ranks: int, folder: Path) -> AllReduce:
    """Reduce the values as the gradient of a module with one matrix: DDP calls the hook in the backward pass.

    The forward pass is not part of the all-reduce, so it is not timed.
    """
    torch, _ = _torch_group()
    from torch.nn.parallel import DistributedDataParallel

    class Matrix(torch.nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(count // _COLUMNS, _COLUMNS))

        def forward(self, gradient: Any) -> Any:
            return (self.weight * gradient).sum()

    modules: dict[int, Any] = {}
    losses: list[Any] = []

    def module(count: int) -> Any:
        if count not in modules:
            modules[count] = model = DistributedDataParallel(Matrix(count), bucket_cap_mb=1000)
            register(torch, model)
        return modules[count]

    def prepare(x: Values) -> None:
        model = module(x.size)
        model.module.weight.grad = None
        losses.append(model(torch.from_numpy(x).view(model.module.weight.shape)))

    def run(x: Values) -> None:
        losses.pop().backward()
        np.multiply(module(x.size).module.weight.grad.numpy().reshape(-1), ranks, out=x)  # the hooks average

    return AllReduce(run, prepare)


def _fbgemm(rank: int, ranks: int, folder: Path) -> AllReduce:
    """Make the all-reduce that users assemble from FBGEMM's 8-bit rows and gloo: exchange shards, add, gather sums."""
    torch, dist = _torch_group()
    import fbgemm_gpu  # noqa: F401 - it registers the operators

    encode, decode = (
        torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized,
        torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat,
    )

    def run(x: Values) -> None:
        rows = -(-x.size // (_ROW * ranks))
        values = torch.from_numpy(x)
        if x.size < ranks * rows * _ROW:
            values = torch.nn.functional.pad(values, (0, ranks * rows * _ROW - x.size))
        codes = encode(values.view(-1, _ROW))
        received = torch.empty_like(codes)
        dist.all_to_all_single(received, codes)
        sums = encode(decode(received).view(ranks, rows, _ROW).sum(0))
        gathered = torch.empty_like(codes)
        dist.all_gather_into_tensor(gathered, sums)
        x[:] = decode(gathered).view(-1)[: x.size].numpy()

    return AllReduce(run)


def _pccl(algorithm: str, rank: int, ranks: int, folder: Path) -> AllReduce:
    """PCCL's all-reduce with one of its quantisations. Rank 0's process also runs the master that PCCL needs."""
    import pccl

    address = f"{socket.gethostbyname(os.environ['MASTER_ADDR'])}:{os.environ['MASTER_PORT']}"
    if not rank:
        master = pccl.MasterNode(address)
        master.run()
        atexit.register(master.interrupt)  # else the process waits for the master for ever
    comm = pccl.Communicator(address)
    comm.connect(n_attempts=_ATTEMPTS)
    while comm.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) < ranks:
        if comm.are_peers_pending():
            comm.update_topology()
        time.sleep(0.01)
    kind = pccl.QuantizationAlgorithm[algorithm]
    dtype = pccl.DataType.FLOAT if kind is pccl.QuantizationAlgorithm.NONE else pccl.DataType.UINT8
    options = pccl.QuantizationOptions(dtype, kind)

    def run(x: Values) -> None:
        comm.all_reduce(x, x, op=pccl.ReduceOp.SUM, quantization_options=options)

    return AllReduce(run)


def _own_address() -> str:
    """This rank's address on the network to rank 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 1))  # a UDP socket: nothing is sent
        return str(probe.getsockname()[0])


def _hivemind(rank: int, ranks: int, folder: Path) -> AllReduce:
    """hivemind's averager. The ranks look for each other in ``prepare``, so only the averaging is timed."""
    import torch
    from hivemind import DHT
    from hivemind.averaging import DecentralizedAverager
    from hivemind.compression import Uniform8BitQuantization
    from hivemind.utils import get_dht_time

    torch.set_num_threads(1)
    own = _own_address()
    first = folder / "hivemind"
    while rank and not first.exists():
        time.sleep(0.05)
    peers = first.read_text().split() if rank else []
    dht = DHT(initial_peers=peers, start=True, host_maddrs=[f"/ip4/{own}/tcp/0"])
    if not rank:
        part = folder / "hivemind.part"
        part.write_text(" ".join(map(str, dht.get_visible_maddrs())))
        part.rename(first)
    averagers: dict[int, Any] = {}
    controls: list[Any] = []

    def averager(count: int) -> Any:
        if count not in averagers:
            averagers[count] = DecentralizedAverager(
                [torch.zeros(count)],
                dht,
                start=True,
                prefix=f"sum{count}",
                target_group_size=ranks,
                min_group_size=ranks,
                min_matchmaking_time=_LOOKING,
                compression=Uniform8BitQuantization(),
                allow_state_sharing=False,
            )
        return averagers[count]

    def prepare(x: Values) -> None:
        with averager(x.size).get_tensors() as (values,):
            values.copy_(torch.from_numpy(x))
        begin = get_dht_time() + _LOOKING
        control = averager(x.size).step(wait=False, require_trigger=True, scheduled_time=begin, timeout=20 * _LOOKING)
        time.sleep(max(0.0, begin + _GROUPED - get_dht_time()))
        controls.append(control)

    def run(x: Values) -> None:
        control = controls.pop()
        control.allow_allreduce()
        if control.result(60) is None:
            raise RuntimeError("hivemind found no group")
        with averager(x.size).get_tensors() as (values,):
            np.multiply(values.numpy(), ranks, out=x)  # hivemind averages

    return AllReduce(run, prepare)


SYSTEMS: dict[str, Callable[[int, int, Path], AllReduce]] = {
    "mpi": _mpi,
    "gloo": partial(_gloo, "float32"),
    "gloo bf16": partial(_gloo, "bfloat16"),
    "DDP fp16 hook": partial(_ddp_hook, _fp16_hook),
    "DDP PowerSGD rank 4": partial(_ddp_hook, _power_sgd_hook),
    "qccl low rank 4": partial(_ddp_hook, _qccl_low_rank),
    "gloo + FBGEMM int8": _fbgemm,
    "hivemind uniform8": _hivemind,
    "PCCL": partial(_pccl, "NONE"),
    "PCCL min-max uint8": partial(_pccl, "MIN_MAX"),
    "PCCL zero-point uint8": partial(_pccl, "ZERO_POINT_SCALE"),
    **{
        f"qccl {codec}": partial(_qccl, codec)
        for codec in ("none", "cast", "cast:dtype=bfloat16", "trellis8", "minmax8", "trellis4", "minmax4")
    },
}
