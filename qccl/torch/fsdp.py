"""Quantised communication of FSDP2: reduce-scatters of gradients and all-gathers of weights.

fully_shard() calls a reduce-scatter for the gradients of each module that it wraps, and an all-gather for the weights.
Both may be replaced; the classes here encode what they send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_api as api
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from qccl.arguments import CodecLike, checked_codec, codec_text, is_auto, lossiest
from qccl.codecs import Codec, NoCodec
from qccl.communicator import Communicator
from qccl.errors import ArgumentError
from qccl.torch.groups import ENCODED

__all__ = ["AllGather", "ReduceScatter", "checked_communicator", "sharded_modules"]

#: reductions that qccl does, by PyTorch's; PyTorch does the others, such as PREMUL_SUM
_OPS = ((dist.ReduceOp.AVG, "avg"), (dist.ReduceOp.SUM, "sum"))


class ReduceScatter(api.ReduceScatter):  # type: ignore[misc]  # torch has no types here
    """A reduce-scatter with encoded traffic, for ``set_custom_reduce_scatter()`` of FSDP2's modules.

    Sums and means of float32, float16 and bfloat16 are encoded. PyTorch itself reduces everything else, exactly: all
    gradients with the codec "none", other element types, and PREMUL_SUM, which follows set_gradient_divide_factor()
    (unless with set_force_sum_reduction_for_comms()). With HSDP, qccl.torch.AllReduce averages the replicas.

    With the codec "auto" or "auto:CODEC" each module has the faster one of none and CODEC, as in
    Communicator.quantized_allreduce(). Then a job that continues from a checkpoint needs the profile of the first one.

    Attributes:
        codec: of the gradients; with "auto" the one that may be chosen.
        key: the name of the state of codecs with "+ef" or "+nesterov".
        lr: the learning rate of the present step, for "+ef" (see quantized_allreduce); set it before each backward(),
            or never (None).
    """

    def __init__(self, codec: CodecLike, comm: Communicator, *, key: str = "fsdp") -> None:
        """``comm`` has the ranks of the mesh's shard dimension: ``qccl.Communicator.from_torch(mesh.get_group())``.

        Modules with state need a ``key`` each; install() makes them.
        """
        if not isinstance(key, str):
            raise ArgumentError(f"key must be a string that names the module, not {key!r}")
        self.codec, self.key, self._asked = lossiest(codec), key, checked_codec(codec)
        self.lr: float | None = None
        self._comm = checked_communicator(comm)
        self._exact = DefaultReduceScatter()
        self._parent = self  # has the learning rate

    def __repr__(self) -> str:
        return f"<ReduceScatter {codec_text(self._asked)}, key={self.key!r}, {self._comm!r}>"

    def install(self, model: Any) -> None:
        """Set this reduce-scatter for all modules of ``model`` that fully_shard() has wrapped.

        The state of each has a key of its own, made of ``key`` and the module's name, so it fits the same model later.
        """
        for name, module in sharded_modules(model):
            own = ReduceScatter(self._asked, self._comm, key=f"{self.key}/{name}")
            own._parent = self
            module.set_custom_reduce_scatter(own)

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory as PyTorch's own reduce-scatter takes it."""
        return self._exact.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """FSDP2 calls it, on the stream of its reduce-scatters."""
        name = next((ours for theirs, ours in _OPS if op == theirs), None)
        if name is None or not _encodes(self.codec, input_tensor):
            return self._exact(output_tensor, input_tensor, group, op, async_op)
        if not _same_ranks(self._comm, group):
            raise ArgumentError(
                f"the gradients of {self.key!r} are reduced by rank {group.rank()} of {group.size()}, and the "
                f"communicator is rank {self._comm.rank} of {self._comm.size}; make it of the shard dimension of the "
                f"model's mesh: qccl.Communicator.from_torch(mesh.get_group())"
            )
        keeps = bool(self.codec.state_names)
        work = self._comm.quantized_reduce_scatter(
            input_tensor,
            output_tensor,
            codec=self._asked,
            op=name,
            key=self.key if keeps else None,
            lr=self._parent.lr if keeps else None,
            async_op=async_op,
        )
        return _Work(work) if async_op else None

    def state_dict(self) -> dict[str, Any]:
        """This rank's state between two steps, for ``torch.save``; ``torch.load`` reads it with its defaults.

        "keys" has the residuals and momenta, as tensors, of this object's key, and of those that install() made;
        "calls" is the number of the communicator's next call, on which random codecs depend.
        """
        kept = self._comm.state_dict()
        keys = {key: entry for key, entry in kept["keys"].items() if self._owns(key)}
        for entry in keys.values():
            entry["values"] = {name: torch.from_numpy(values) for name, values in entry["values"].items()}
        return {"calls": kept["calls"], "keys": keys}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state_dict() of the rank of this number in a group of this size; every rank must call it.

        Training then goes on with the same bits. Raises ArgumentError for any other state, such as one after calls that
        has no residuals, and then changes nothing.
        """
        if not isinstance(state, Mapping) or set(state) != {"calls", "keys"} or not isinstance(state["keys"], Mapping):
            raise ArgumentError('a state is the dict that state_dict() returned, with "calls" and "keys"')
        for key in state["keys"]:
            if not self._owns(key):
                raise ArgumentError(f"the state has the key {key!r}; this reduce-scatter has {self.key!r}")
        if self.codec.state_names and not is_auto(self._asked) and state["calls"] and not state["keys"]:
            raise ArgumentError(
                f"the state, after {state['calls']} calls, has no {' and no '.join(self.codec.state_names)}; "
                f"torch.distributed.checkpoint loads only what a new object's state_dict() has, which is nothing: let "
                f"each rank save its own file with torch.save(), or load nothing to begin with an empty state"
            )
        others = {key: entry for key, entry in self._comm.state_dict()["keys"].items() if not self._owns(key)}
        self._comm.load_state_dict({"calls": state["calls"], "keys": {**others, **state["keys"]}})

    def _owns(self, key: Any) -> bool:
        return isinstance(key, str) and (key == self.key or key.startswith(f"{self.key}/"))


class AllGather(api.AllGather):  # type: ignore[misc]  # torch has no types here
    """An all-gather with encoded traffic, for ``set_custom_all_gather()`` of FSDP2's modules.

    All ranks compute with the same decoded weights, also the one whose shard they come from; the optimiser's shard
    stays exact. Weights of float32, float16 and bfloat16 are encoded. PyTorch moves everything else exactly: all
    weights with the codec "none", other element types, modules whose parameters have several (FSDP2 moves their bytes),
    and the smaller groups of ``reshard_after_forward=n``, whose weights were decoded before.

    ``codec`` may be "auto", as in ReduceScatter.
    """

    def __init__(self, codec: CodecLike, comm: Communicator) -> None:
        """``comm``: see ReduceScatter; one communicator serves both."""
        self.codec, self._asked = lossiest(codec), checked_codec(codec)
        if self.codec.state_names:
            raise ArgumentError(
                f"an all-gather of weights keeps no state: use {self.codec.plain.spec()}, not {self.codec.spec()}"
            )
        self._comm = checked_communicator(comm)
        self._exact = DefaultAllGather()

    def __repr__(self) -> str:
        return f"<AllGather {codec_text(self._asked)}, {self._comm!r}>"

    def install(self, model: Any) -> None:
        """Set this all-gather for all modules of ``model`` that fully_shard() has wrapped."""
        for _, module in sharded_modules(model):
            module.set_custom_all_gather(self)

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory as PyTorch's own all-gather takes it."""
        return self._exact.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """FSDP2 calls it, on the stream of its all-gathers; ``input_tensor`` is a part of ``output_tensor``."""
        if not _encodes(self.codec, input_tensor) or not _same_ranks(self._comm, group):
            return self._exact(output_tensor, input_tensor, group, async_op)
        work = self._comm.quantized_all_gather(input_tensor, output_tensor, codec=self._asked, async_op=async_op)
        return _Work(work) if async_op else None


class _Work(dist.Work):  # type: ignore[misc]  # torch has no types here
    """A call under way, as PyTorch's Work."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: Any = None) -> bool:
        """On the host until the call has ended; on CUDA the current stream waits."""
        self._work.wait()
        return True

    def is_completed(self) -> bool:
        completed: bool = self._work.is_completed()
        return completed


def checked_communicator(comm: Any) -> Communicator:
    """``comm``. Raises ArgumentError for anything but a Communicator."""
    if not isinstance(comm, Communicator):
        raise ArgumentError(
            f"comm must be a Communicator, such as qccl.Communicator.from_torch(mesh.get_group()), not "
            f"{type(comm).__name__}"
        )
    return comm


def _encodes(codec: Codec, tensor: torch.Tensor) -> bool:
    return codec != NoCodec() and tensor.dtype in ENCODED


def _same_ranks(comm: Communicator, group: dist.ProcessGroup) -> bool:
    return (comm.rank, comm.size) == (group.rank(), group.size())


def sharded_modules(model: Any) -> list[tuple[str, FSDPModule]]:
    """The modules that fully_shard() has wrapped, by name; "" is the model itself.

    Of modules that one call has wrapped as a list, the first stands for all: FSDP2 reduces their gradients together.
    """
    if isinstance(model, torch.nn.Module):
        found: dict[int, tuple[str, FSDPModule]] = {}
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                found.setdefault(id(module._get_fsdp_state()), (name, module))
        if found:
            return [*found.values()]
    raise ArgumentError(
        f"the model, of type {type(model).__name__}, has no module that fully_shard() has wrapped; call "
        f"torch.distributed.fsdp.fully_shard() first"
    )
