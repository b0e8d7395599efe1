"""Quantised all-reduces between the replicas of FSDP2's models (HSDP).

Inside a replica FSDP2 shards the model, over a fast network; the replicas average their gradients over a slow one.
fully_shard() gets the shard dimension of the mesh alone, and calls the hook of set_all_reduce_hook() with each module's
shard of the gradients, already averaged inside the replica. The hook here averages it between the replicas.

On the host the backward pass goes on while an average is under way, where FSDP2 does not read the gradients before
backward() ends. On CUDA the hook's stream has the same effect.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd.variable import Variable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from qccl.arguments import CodecLike, count_of
from qccl.communicator import Communicator
from qccl.errors import ArgumentError
from qccl.torch.fsdp import checked_communicator, sharded_modules
from qccl.torch.groups import ParameterGroup, Policy, table
from qccl.torch.state import FullState, from_saved, to_full, to_saved

__all__ = ["AllReduce"]


class AllReduce:
    """The average of gradients between replicas with encoded traffic, for FSDP2's modules.

    Attributes:
        lr: the learning rate of the present step, for "+ef" (see quantized_allreduce); set it before each backward(),
            or never (None).
        step: backward passes so far.
    """

    def __init__(
        self,
        codec: CodecLike,
        comm: Communicator,
        *,
        codecs: Mapping[str, CodecLike] | None = None,
        exclude: Sequence[str] = (),
        min_elements: int = 4096,
        key: str = "hsdp",
    ) -> None:
        """``comm`` has the ranks of the mesh's replicas: ``Communicator.from_torch(mesh["replicate"].get_group())``.

        ``codec`` is for parameters with two or more dimensions; ``codecs``, ``exclude`` and ``min_elements`` choose
        other codecs by name and size, as in compress(). ``key`` begins the names of the residuals and momenta.
        """
        self._comm = checked_communicator(comm)
        self._policy = Policy(codec, codecs or {}, tuple(exclude), count_of(min_elements, "min_elements"))
        self._key, self._modules = key, list[_Module]()
        self.lr: float | None = None
        self.step = 0
        self._under_way: list[Any] = []
        self._is_passing = False

    def __repr__(self) -> str:
        return f"<AllReduce of {len(self._modules)} modules, {self._comm!r}>"

    def __str__(self) -> str:
        return table(self._groups)

    def install(self, model: Any) -> None:
        """Collective: set the hook of all modules of ``model`` that fully_shard() has wrapped; once for each object.

        The state of a module has a key of its own, so it fits the same model later. Raises ArgumentError for a model
        without such modules, for one whose mesh has the replicas, too (FSDP2 averages them itself then), and if the
        replicas' parameters differ; then it changes nothing.
        """
        if self._modules:
            raise ArgumentError("this AllReduce is installed already; make one for each model")
        names = {id(p): name for name, p in model.named_parameters()} if isinstance(model, torch.nn.Module) else {}
        modules = [_Module(f"{self._key}/{name}", m, names, self._policy) for name, m in sharded_modules(model)]
        self._policy.check(name for module in modules for name in module.names)
        self._check_replicas(modules)
        self._modules = [module for module in modules if module.groups]
        for module in self._modules:
            module.fsdp.set_all_reduce_hook(lambda shard, module=module: self._reduce(module, shard))

    def state_dict(self) -> dict[str, Any]:
        """This rank's state between two steps, for ``torch.save``; ``torch.load`` reads it with its defaults."""
        return to_saved(self._comm, self._groups, self.step)

    @property
    def full(self) -> FullState:
        """An object whose state_dict() is full_state_dict(), for frameworks that save one state for all ranks."""
        return FullState(self)

    def full_state_dict(self) -> dict[str, Any]:
        """Collective: the state of all ranks of the mesh between two steps, the same on each, for any other mesh.

        "residuals" and "momenta" have whole parameters; otherwise see Compression.full_state_dict().
        """
        full = to_full(self._comm, self._groups, self.step, self._add_replicas)
        sharded = self._parameters()
        for kind in ("residuals", "momenta"):
            for name in [name for name in sharded if self._keeps(name, kind)]:
                p = sharded[name]
                local = full[kind].get(name, torch.empty(p.to_local().shape)).to(p.device)
                whole = DTensor.from_local(local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
                full[kind][name] = whole.full_tensor().cpu()
        return full | {"groups": self._descriptions(is_whole=True)}

    def load_state_dict(self, state: Any) -> None:
        """Restore a state_dict() of this rank, or a full_state_dict() of any mesh; every rank must call it.

        Raises ArgumentError for a state of other parameters or codecs, and then changes nothing.
        """
        if isinstance(state, Mapping) and "rank" not in state:
            state = self._own_part(state)
        self.step = from_saved(self._comm, self._groups, state)

    # -- the state ---------------------------------------------------------------------------------------------------

    @property
    def _groups(self) -> list[ParameterGroup]:
        return [group for module in self._modules for group in module.groups]

    def _parameters(self) -> dict[str, Any]:
        """The sharded parameters by name."""
        return {name: p for module in self._modules for name, p in zip(module.names, module.parameters, strict=True)}

    def _keeps(self, name: str, kind: str) -> bool:
        codec = self._policy.codec_of(name, self._parameters()[name])
        return codec is not None and {"residuals": "residual", "momenta": "momentum"}[kind] in codec.state_names

    def _descriptions(self, is_whole: bool) -> list[dict[str, Any]]:
        """The groups of a state, with the shapes of this rank's shards or of whole parameters."""
        found = [group.description() for group in self._groups]
        if is_whole:
            shapes = {name: [name, list(p.shape), list(p.stride())] for name, p in self._parameters().items()}
            for each in found:
                each["parameters"] = [shapes[name] for name, _, _ in each["parameters"]]
        return found

    def _own_part(self, full: Mapping[str, Any]) -> dict[str, Any]:
        """A full state with this rank's shards of its tensors. What does not fit is left to from_saved()."""
        own = dict(full)
        if full.get("groups") == self._descriptions(is_whole=True):
            own["groups"] = self._descriptions(is_whole=False)
            for kind in ("residuals", "momenta"):
                if isinstance(full.get(kind), Mapping):
                    own[kind] = {name: self._shard(name, values) for name, values in full[kind].items()}
                    own[kind] = {name: v for name, v in own[kind].items() if not torch.is_tensor(v) or v.numel()}
        return own

    def _shard(self, name: str, values: Any) -> Any:
        p = self._parameters().get(name)
        if p is None or not isinstance(values, torch.Tensor) or values.shape != p.shape:
            return values
        return distribute_tensor(values, p.device_mesh, p.placements, src_data_rank=None).to_local()

    def _add_replicas(self, values: torch.Tensor) -> None:
        own = values.cpu().numpy()
        total = sum(np.frombuffer(each, own.dtype) for each in self._comm.allgather(own.tobytes()))
        values.copy_(torch.from_numpy(np.asarray(total)).reshape(values.shape))

    # -- the hook ----------------------------------------------------------------------------------------------------

    def _check_replicas(self, modules: Sequence[_Module]) -> None:
        """Collective: raise ArgumentError unless all replicas have the same parameters."""
        found = self._comm.allgather("\n".join(line for module in modules for line in module.lines()).encode())
        for rank, other in enumerate(found):
            if other != found[0]:
                pairs = zip(found[0].decode().split("\n"), other.decode().split("\n"), strict=False)
                ours, theirs = next(((a, b) for a, b in pairs if a != b), ("fewer parameters", "more"))
                raise ArgumentError(
                    f"the replicas must begin with the same parameters and codecs; replica 0 has {ours}, and replica "
                    f"{rank} has {theirs}: give them the same seed, or load the same checkpoint, before install()"
                )

    def _reduce(self, module: _Module, shard: torch.Tensor) -> None:
        """The hook: average the gradients of a module's shard between the replicas, in place."""
        works = [self._launch(group, arrays) for group, arrays in module.split(shard)]
        self._is_passing = True
        Variable._execution_engine.queue_callback(self._end_pass)  # each time: an earlier pass may have failed
        if module.must_wait(shard):
            for work in works:
                work.wait()
        else:
            self._under_way += works

    def _launch(self, group: ParameterGroup, arrays: Sequence[torch.Tensor]) -> Any:
        assert group.codec is not None
        keeps = bool(group.codec.state_names)
        return self._comm.quantized_allreduce_coalesced(
            arrays,
            codec=group.codec,
            op="avg",
            key=group.key if keeps else None,
            lr=self.lr if keeps else None,
            async_op=True,
        )

    def _end_pass(self) -> None:
        """At the end of a backward pass: all gradients are averages of the replicas. Raises the first failure."""
        if not self._is_passing:
            return  # this is not the first callback of the pass
        self._is_passing = False
        under_way, self._under_way = self._under_way, []
        for work in under_way:
            work.wait()
        self.step += 1


class _Module:
    """A module that fully_shard() has wrapped: its parameters, in the order of its gradients' shard."""

    def __init__(self, key: str, module: FSDPModule, names: Mapping[int, str], policy: Policy) -> None:
        self.fsdp, self._key = module, key
        self._shards = [
            each
            for group in module._get_fsdp_state()._fsdp_param_groups
            for each in group.fsdp_params
            if each.sharded_param.requires_grad
        ]
        self.parameters = [each.sharded_param for each in self._shards]
        self.names = [names[id(p)] for p in self.parameters]
        self._check()
        self.groups = list(self._form_groups(policy))

    @property
    def _param_group(self) -> Any:
        """FSDP2's own record of the module; set_all_reduce_hook() takes only modules with one."""
        return self.fsdp._get_fsdp_state()._fsdp_param_groups[0]

    def _check(self) -> None:
        for name, p in zip(self.names, self.parameters, strict=True):
            if p.device_mesh.ndim != 1:
                raise ArgumentError(
                    f"{name!r} is on a mesh with the dimensions {p.device_mesh.mesh_dim_names or p.device_mesh.ndim}, "
                    f"so FSDP2 averages the replicas itself; give fully_shard() the shard dimension alone: "
                    f'fully_shard(module, mesh=mesh["shard"])'
                )

    def _form_groups(self, policy: Policy) -> Iterator[ParameterGroup]:
        """One group for each codec."""
        by_codec: dict[Any, list[int]] = {}
        for i, (name, p) in enumerate(zip(self.names, self.parameters, strict=True)):
            codec = policy.codec_of(name, p)
            if codec is None:
                raise ArgumentError(
                    f"{name!r} has the element type {p.dtype}; gradients of float32, float16 and bfloat16 can be "
                    f"averaged between replicas"
                )
            by_codec.setdefault(codec, []).append(i)
        self._indices = list(by_codec.values())
        for number, (codec, indices) in enumerate(by_codec.items()):
            locals_ = tuple(self.parameters[i].to_local() for i in indices)
            yield ParameterGroup(f"{self._key}/{number}", codec, tuple(self.names[i] for i in indices), locals_)

    def lines(self) -> Iterator[str]:
        """The parameters in words, with a digest of their values, for a comparison of the replicas."""
        for group in self.groups:
            for name, p in zip(group.names, group.parameters, strict=True):
                yield f"{name} of {tuple(p.shape)} with {group.codec_spec}, {_digest(p)}"

    def split(self, shard: torch.Tensor) -> Iterator[tuple[ParameterGroup, list[torch.Tensor]]]:
        """The groups, and the parts of a shard that are the gradients of their parameters."""
        padded = [each.padded_sharded_param_size.numel() for each in self._shards]
        if shard.numel() != sum(padded):
            raise ArgumentError(
                f"the shard of the gradients of {', '.join(self.names)} has {shard.numel()} elements instead of "
                f"{sum(padded)}, because some parameters had no gradient in this step; call "
                f"set_reduce_scatter_unused_params(True) on the model"
            )
        parts = shard.split(padded)
        for group, indices in zip(self.groups, self._indices, strict=True):
            yield group, [parts[i][: self.parameters[i].to_local().numel()] for i in indices]

    def must_wait(self, shard: torch.Tensor) -> bool:
        """Whether FSDP2, or a hook of the user, reads the averages before backward() ends.

        It does if it converts, divides, copies or accumulates them. On CUDA a wait costs the host nothing.
        """
        return (
            shard.is_cuda
            or shard.dtype not in (torch.float32, torch.bfloat16)  # FSDP2 divides others after the hook
            or self._param_group.force_sum_reduction_for_comms
            or any(
                p.dtype != shard.dtype or p.grad is not None or each.offload_to_cpu or p._post_accumulate_grad_hooks
                for p, each in zip(self.parameters, self._shards, strict=True)
            )
        )


def _digest(p: torch.Tensor) -> str:
    """Differs where values do; meta tensors have none yet."""
    if p.is_meta:
        return "no values yet"
    values = p.detach().contiguous().cpu().view(torch.uint8).numpy()
    return f"values of digest {hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()}"
