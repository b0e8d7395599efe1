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

from qccl.base.errors import ArgumentError
from qccl.codecs import Codec, NoCodec
from qccl.collectives.arguments import CodecLike, auto_codec, checked_codec, codec_text, lossiest
from qccl.communicator.communicator import Communicator
from qccl.communicator.owners import Owner
from qccl.communicator.state import Places
from qccl.torch.groups import ENCODED
from qccl.torch.units import SEPARATORS, KeyOfSet, not_known, reduced_parameters

__all__ = ["AllGather", "ReduceScatter", "checked_communicator", "sharded_modules"]

#: PyTorch's names of the reductions that qccl does; PyTorch does the others, such as PREMUL_SUM
_OPS = ((dist.ReduceOp.AVG, "avg"), (dist.ReduceOp.SUM, "sum"))


class ReduceScatter(api.ReduceScatter):  # type: ignore[misc]  # torch has no types here
    """A reduce-scatter with encoded traffic, for ``set_custom_reduce_scatter()`` of FSDP2's modules.

    Sums and means of float32, float16 and bfloat16 are encoded. PyTorch itself reduces everything else, exactly: all
    gradients with the codec "none", other element types, and PREMUL_SUM, which follows set_gradient_divide_factor()
    (unless with set_force_sum_reduction_for_comms()). With HSDP, qccl.torch.AllReduce averages the replicas.

    With the codec "auto" or "auto:CODEC" each module has the faster one of none and CODEC, as in
    Communicator.quantized_allreduce(). A job that continues from a checkpoint then needs the first job's profile.

    Attributes:
        codec: the codec of the gradients; with "auto" the codec that may be chosen.
        key: the begin of the keys under which codecs with "+ef" or "+nesterov" keep state in the communicator.
        lr: the learning rate of the present step, for "+ef" (see quantized_allreduce); set it before each backward(),
            or never (None).
    """

    def __init__(self, codec: CodecLike, comm: Communicator, *, key: str | None = None) -> None:
        """``comm`` has the ranks of the mesh's shard dimension: ``qccl.Communicator.from_torch(mesh.get_group())``.

        If the codec keeps state, no other object may have the same ``key`` in ``comm``. None: "fsdp" for the first
        ReduceScatter with state, "fsdp#2" for the second, and so on; all ranks make them in the same order.
        """
        self.codec, self._asked = lossiest(codec), checked_codec(codec)
        self.lr: float | None = None
        self._comm = checked_communicator(comm)
        self._exact = DefaultReduceScatter()
        owners, is_stateful = self._comm.state.owners, bool(self.codec.state_names)
        self._owner = owners.add("ReduceScatter", "fsdp", key, separators=SEPARATORS, is_stateful=is_stateful)
        self.key = self._owner.name
        self._is_installed = False
        self._unit: _Unit | None = None

    def __repr__(self) -> str:
        return f"<ReduceScatter {codec_text(self._asked)}, key={self.key!r}, {self._comm!r}>"

    def install(self, model: Any) -> None:
        """Set this reduce-scatter for all modules of ``model`` that fully_shard() has wrapped.

        Each module's state has its own key, made of ``key`` and the module's name, so it fits the same model later.
        Parameters may lack a gradient in some steps, if they do so on all ranks: residuals follow the parameters.
        Raises ArgumentError for a second model if the codec keeps state.
        """
        modules = sharded_modules(model)
        if self._is_installed and self.codec.state_names:
            raise ArgumentError("this ReduceScatter is installed already; make one for each model")
        self._is_installed = True
        for name, module in modules:
            module.set_custom_reduce_scatter(_ModuleReduceScatter(self, name))

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate memory like PyTorch's own reduce-scatter."""
        return self._exact.allocate(size, dtype=dtype, device=device)

    def __call__(self, *call: Any, **named: Any) -> dist.Work | None:
        """Reduce and scatter, when FSDP2 calls this on the stream of its reduce-scatters; see _reduce()."""
        return self._reduce(self, "", *call, **named)

    def _reduce(
        self,
        part: ReduceScatter | _ModuleReduceScatter,
        rest: str,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Make a call of ``part``, whose state has the key ``self.key + rest``."""
        name = next((ours for theirs, ours in _OPS if op == theirs), None)
        if name is None or not _encodes(self.codec, input_tensor):
            if "momentum" in self.codec.state_names:
                raise ArgumentError(
                    f"PyTorch itself reduces gradients of {input_tensor.dtype} with {op}, without the momentum of "
                    f"+nesterov; use a codec without +nesterov, and the optimiser's momentum"
                )
            return self._exact(output_tensor, input_tensor, group, op, async_op)
        if not _same_ranks(self._comm, group):
            raise ArgumentError(
                f"the gradients of {self.key + rest!r} are reduced by rank {group.rank()} of {group.size()}, and the "
                f"communicator is rank {self._comm.rank} of {self._comm.size}; make it of the shard dimension of the "
                f"model's mesh: qccl.Communicator.from_torch(mesh.get_group())"
            )
        keeps = bool(self.codec.state_names)
        work = self._comm.quantized_reduce_scatter(
            input_tensor,
            output_tensor,
            codec=self._asked,
            op=name,
            key=self._key_of(part, rest, input_tensor.numel()),
            lr=self.lr if keeps else None,
            async_op=async_op,
        )
        return _UnitWork(work) if async_op else None

    def _key_of(self, part: ReduceScatter | _ModuleReduceScatter, rest: str, count: int) -> str | None:
        """The key of a call on a vector of ``count`` elements; ranks with gradients of other parameters disagree."""
        found = reduced_parameters()
        if found is None and part is not self:
            raise not_known()
        if found is None:  # the program itself calls this object
            return self._owner.key(rest) if self.codec.state_names else None
        group, members = found
        if part._unit is None or (group is not part._unit.group and not self.codec.state_names):
            part._unit = _Unit(self._comm, self._owner, rest, group, self.codec.state_names)
        return part._unit.key(group, members, count)

    def close(self) -> None:
        """Delete the state, and free the key. All ranks must call it; later calls are refused."""
        self._owner.close()

    def state_dict(self) -> dict[str, Any]:
        """Copy this rank's state between two steps, for ``torch.save``; ``torch.load`` reads it with its defaults.

        "keys" has the residuals and momenta, as tensors, by ``key`` and the modules' names. Without a ``key`` it is
        "fsdp", so the state fits any object without a key. "calls" is the number of the communicator's next call, on
        which random codecs depend.
        """
        kept = self._comm.state_dict()
        keys = {key: entry for key, entry in kept["keys"].items() if self._owner.owns(key)}
        for entry in keys.values():
            entry["values"] = {name: torch.from_numpy(values) for name, values in entry["values"].items()}
        return {"calls": kept["calls"], "keys": self._owner.renamed(keys, to_file=True)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state_dict() of the same rank in a group of the same size; every rank must call it.

        Training then continues with the same bits. Raises ArgumentError for any other state, such as a state after
        calls without residuals, and then changes nothing.
        """
        if not isinstance(state, Mapping) or set(state) != {"calls", "keys"} or not isinstance(state["keys"], Mapping):
            raise ArgumentError('a state is the dict that state_dict() returned, with "calls" and "keys"')
        keys = self._owner.renamed(state["keys"])
        if self.codec.state_names and auto_codec(self._asked) is None and state["calls"] and not keys:
            raise ArgumentError(
                f"the state, after {state['calls']} calls, has no {' and no '.join(self.codec.state_names)}; "
                f"torch.distributed.checkpoint loads only the entries of a new object's state_dict(), which is empty: "
                f"let each rank save its own file with torch.save(), or load nothing to begin with an empty state"
            )
        others = {key: each for key, each in self._comm.state_dict()["keys"].items() if not self._owner.owns(key)}
        self._comm.load_state_dict({"calls": state["calls"], "keys": {**others, **keys}})


class _Unit:
    """A module's parameters, whose gradients are one vector: all parameters' parts for rank 0, then for rank 1, ..."""

    def __init__(
        self, comm: Communicator, owner: Owner, rest: str, group: Any, kinds: Sequence[str]
    ) -> None:  # fmt: skip
        self.group, self._what, self._size, self._kinds = group, owner.name + rest, comm.size, kinds
        self._names = {each: each._param_fqn or str(i) for i, each in enumerate(group.fsdp_params)}
        self._lengths = {name: each.padded_sharded_param_size.numel() for each, name in self._names.items()}
        self._keys = KeyOfSet(comm, owner, rest, [*self._lengths], self._places)

    def key(self, group: Any, members: Sequence[Any], count: int) -> str:
        """The key of a call with the gradients of these parameters."""
        if group is not self.group:
            raise ArgumentError(
                f"the ReduceScatter with the state {self._what!r} reduces the gradients of two modules, with the "
                f"parameters {', '.join(self._lengths)} and {', '.join(str(p._param_fqn) for p in group.fsdp_params)}; "
                f"give each module its own ReduceScatter, as install() does"
            )
        names = [self._names[each] for each in members]
        if self._size * sum(self._lengths[name] for name in names) != count:
            raise ArgumentError(
                f"the gradients of {', '.join(names)} do not have {count} elements on {self._size} ranks"
            )
        if self._kinds:
            self._keys.arrange(names)
        return self._keys.key(names)

    def _places(self, names: Sequence[str]) -> Places:
        """The place of each parameter's state in the vector of the parameters ``names``."""
        width, start, found = sum(self._lengths[name] for name in names), 0, dict[str, list[tuple[str, int, int]]]()
        for name in names:
            parts = range(start, start + self._size * width, width)
            length = self._lengths[name]
            found[name] = [(kind, first, first + length) for kind in self._kinds for first in parts if length]
            start += length
        return found


class _ModuleReduceScatter(api.ReduceScatter):  # type: ignore[misc]  # torch has no types here
    """The reduce-scatter of one module, which install() makes."""

    def __init__(self, parent: ReduceScatter, name: str) -> None:
        self._parent, self._name = parent, name
        self._unit: _Unit | None = None

    def __repr__(self) -> str:
        return f"<the part for {self._name!r} of {self._parent!r}>"

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._parent.allocate(size, dtype=dtype, device=device)

    def __call__(self, *call: Any, **named: Any) -> dist.Work | None:
        return self._parent._reduce(self, f"/{self._name}", *call, **named)


class AllGather(api.AllGather):  # type: ignore[misc]  # torch has no types here
    """An all-gather with encoded traffic, for ``set_custom_all_gather()`` of FSDP2's modules.

    All ranks compute with the same decoded weights, also the rank that owns a shard; the optimiser's shard stays exact.
    Weights of float32, float16 and bfloat16 are encoded. PyTorch moves everything else exactly: all weights with the
    codec "none", other element types, modules with several element types (FSDP2 moves their bytes), and the smaller
    groups of ``reshard_after_forward=n``, whose weights were decoded before.

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
        """Allocate memory like PyTorch's own all-gather."""
        return self._exact.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather, when FSDP2 calls this on the stream of its all-gathers; the input is a part of the output."""
        if not _encodes(self.codec, input_tensor) or not _same_ranks(self._comm, group):
            return self._exact(output_tensor, input_tensor, group, async_op)
        work = self._comm.quantized_all_gather(input_tensor, output_tensor, codec=self._asked, async_op=async_op)
        return _UnitWork(work) if async_op else None


class _UnitWork(dist.Work):  # type: ignore[misc]  # torch has no types here
    """A call under way, with the interface of PyTorch's Work."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the call has ended; on CUDA let the current stream wait."""
        self._work.wait()
        return True

    def is_completed(self) -> bool:
        completed: bool = self._work.is_completed()
        return completed


def checked_communicator(comm: Any) -> Communicator:
    """Return ``comm``. Raises ArgumentError for anything but a Communicator."""
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

    If one call has wrapped a list of modules, only the first is listed: FSDP2 reduces their gradients together.
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
