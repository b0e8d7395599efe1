"""qccl: collective communication whose traffic is quantised.

    with qccl.init() as comm:
        comm.quantized_allreduce(x)

The names below are the public interface. They are loaded when they are first used: importing qccl imports neither
NumPy nor MPI nor any GPU or framework library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qccl import codecs
    from qccl.communicator.communicator import Communicator
    from qccl.communicator.launch import init, join
    from qccl.communicator.plan import Plan
    from qccl.communicator.pointers import hierarchical_allreduce, peer_exchange, quantized_allreduce
    from qccl.communicator.ranks import run_ranks
    from qccl.communicator.saved import load_state, save_state
    from qccl.communicator.work import Work
    from qccl.engine.cuda.nccl import get_unique_id
    from qccl.training.decentralized import LowPrecisionDecentralized
    from qccl.training.diloco import DiLoCo

from qccl.base import __version__ as __version__
from qccl.base.errors import (
    ArgumentError,
    CodecError,
    CollectiveTimeout,
    EngineError,
    InvalidBufferError,
    MismatchError,
    PeerLost,
    QcclError,
)

__all__ = [
    "ArgumentError",
    "CodecError",
    "CollectiveTimeout",
    "Communicator",
    "DiLoCo",
    "EngineError",
    "InvalidBufferError",
    "LowPrecisionDecentralized",
    "MismatchError",
    "PeerLost",
    "Plan",
    "QcclError",
    "Work",
    "codecs",
    "get_unique_id",
    "hierarchical_allreduce",
    "init",
    "join",
    "load_state",
    "peer_exchange",
    "quantized_allreduce",
    "run_ranks",
    "save_state",
]

_HOME = {
    "Communicator": "qccl.communicator.communicator",
    "DiLoCo": "qccl.training.diloco",
    "LowPrecisionDecentralized": "qccl.training.decentralized",
    "Plan": "qccl.communicator.plan",
    "Work": "qccl.communicator.work",
    "get_unique_id": "qccl.engine.cuda.nccl",
    "hierarchical_allreduce": "qccl.communicator.pointers",
    "peer_exchange": "qccl.communicator.pointers",
    "init": "qccl.communicator.launch",
    "join": "qccl.communicator.launch",
    "quantized_allreduce": "qccl.communicator.pointers",
    "run_ranks": "qccl.communicator.ranks",
    "load_state": "qccl.communicator.saved",
    "save_state": "qccl.communicator.saved",
}


def __getattr__(name: str) -> Any:
    if name == "codecs":
        return import_module("qccl.codecs")
    if name not in _HOME:
        from qccl.base.removed import missing

        raise missing("qccl", name)
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
