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
    from qccl.communicator import Communicator
    from qccl.cuda.nccl import get_unique_id
    from qccl.decentralized import LowPrecisionDecentralized
    from qccl.diloco import DiLoCo
    from qccl.launch import init, join
    from qccl.plan import Plan
    from qccl.pointers import hierarchical_allreduce, peer_exchange, quantized_allreduce
    from qccl.ranks import run_ranks
    from qccl.saved import load_state, save_state
    from qccl.work import Work

from qccl.errors import (
    ArgumentError,
    CodecError,
    CollectiveTimeout,
    EngineError,
    InvalidBufferError,
    MismatchError,
    PeerLost,
    QcclError,
)

__version__ = "0.1.0"

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
    "Communicator": "qccl.communicator",
    "DiLoCo": "qccl.diloco",
    "LowPrecisionDecentralized": "qccl.decentralized",
    "Plan": "qccl.plan",
    "Work": "qccl.work",
    "get_unique_id": "qccl.cuda.nccl",
    "hierarchical_allreduce": "qccl.pointers",
    "peer_exchange": "qccl.pointers",
    "init": "qccl.launch",
    "join": "qccl.launch",
    "quantized_allreduce": "qccl.pointers",
    "run_ranks": "qccl.ranks",
    "load_state": "qccl.saved",
    "save_state": "qccl.saved",
}


def __getattr__(name: str) -> Any:
    if name == "codecs":
        return import_module("qccl.codecs")
    if name not in _HOME:
        from qccl.removed import missing

        raise missing("qccl", name)
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
