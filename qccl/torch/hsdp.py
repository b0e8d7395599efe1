"""Quantised all-reduces between the replicas of FSDP2's models (HSDP).

Inside a replica FSDP2 shards the model, over a fast network; the replicas average their gradients over a slow one.
fully_shard() gets the shard dimension of the mesh alone, and calls the hook of set_all_reduce_hook() with each module's
shard of the gradients, already averaged inside the replica. The hook here averages it between the replicas.

On the host the backward pass continues while an average is under way, unless FSDP2 reads the gradients before
backward() ends. On CUDA the hook's stream has the same effect.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch.autograd.variable import Variable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
from torch.distributed.tensor import DTensor, distribute_tensor

from qccl.base.errors import ArgumentError
from qccl.codecs import Codec
from qccl.collectives.arguments import CodecLike
from qccl.collectives.schedule import buffer_name
from qccl.communicator.communicator import Communicator
from qccl.communicator.owners import Owner
from qccl.communicator.state import Parts, Places
from qccl.torch.fsdp import checked_communicator, sharded_modules
from qccl.torch.groups import ParameterGroup, Policy, table
from qccl.torch.state import FullState, from_saved, owned_parts, take, to_full, to_saved
from qccl.torch.units import SEPARATORS, KeyOfSet, not_known, reduced_parameters

__all__ = ["AllReduce"]

#: the end of the error for a state of other parameters
_HINT = "; if it lacks parameters that were frozen, freeze them before install(), and unfreeze them after loading"


class AllReduce:
    """The average of gradients between replicas with encoded traffic, for FSDP2's modules.

    Attributes:
        lr: the learning rate of the present step, for "+ef" (see quantized_allreduce); set it before each backward(),
            or never (None).
        step: the number of backward passes so far.
    """

    def __init__(
        self,
        codec: CodecLike,
        comm: Communicator,
        *,
        codecs: Mapping[str, CodecLike] | None = None,
        exclude: Sequence[str] = (),
        min_elements: int = 4096,
        key: str | None = None,
    ) -> None:
        """``comm`` has the ranks of the mesh's replicas: ``Communicator.from_torch(mesh["replicate"].get_group())``.

        ``codec`` is for parameters with two or more dimensions; ``codecs``, ``exclude`` and ``min_elements`` choose
        other codecs by name and size, as in compress(). ``key`` is the begin of the residuals' and momenta's names in
        ``comm``; if a codec keeps state, no other object may have it. None: "hsdp" for the first installed AllReduce
        with state, "hsdp#2" for the second, and so on; all ranks install them in the same order.
        """
        self._comm = checked_communicator(comm)
        self._policy = Policy.of(codec, codecs, exclude, min_elements)
        self._key, self._modules = key, list[_Module]()
        self._owner: Owner | None = None
        self._is_closed = False
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

        Each module's state has its own key, so it fits the same model later. Parameters may lack a gradient in some
        steps, if they do so on all replicas, and may be frozen and unfrozen: residuals follow the parameters.

        Raises ArgumentError, and changes nothing, for a model without such modules, for a model whose mesh includes the
        replicas (FSDP2 then averages them itself), and if the parameters that need gradients differ between replicas.
        Parameters that are unfrozen later are compared in their first backward pass.
        """
        if self._modules:
            raise ArgumentError("this AllReduce is installed already; make one for each model")
        owners, is_stateful = self._comm.state.owners, bool(self._policy.state_names)
        owner = owners.add("AllReduce", "hsdp", self._key, separators=SEPARATORS, is_stateful=is_stateful)
        try:
            modules = self._checked_modules(model, owner)
        except BaseException:
            owner.release()  # install() may be called again
            raise
        self._owner, self._modules = owner, modules
        for module in self._modules:
            module.fsdp.set_all_reduce_hook(lambda shard, module=module: self._reduce(module, shard))

    def _checked_modules(self, model: Any, owner: Owner) -> list[_Module]:
        names = {id(p): name for name, p in model.named_parameters()} if isinstance(model, torch.nn.Module) else {}
        found = [(name, module) for name, module in sharded_modules(model) if _param_groups(module)]
        modules = [_Module(self._comm, owner, f"/{name}", module, names, self._policy) for name, module in found]
        self._policy.check(name for module in modules for name in module.all_names)
        self._check_replicas([line for module in modules for line in module.lines(module.groups)])
        return modules

    def close(self) -> None:
        """Delete the state, and free the key. All ranks must call it; later calls are refused."""
        self._is_closed = True
        if self._owner is not None:
            self._owner.close()

    def state_dict(self) -> dict[str, Any]:
        """Copy this rank's state between two steps, for ``torch.save``; ``torch.load`` reads it with its defaults.

        It has all parameters that have had a gradient so far, or needed gradients in install().
        """
        self._gather()
        return to_saved(self._comm, self._groups, self.step)

    @property
    def full(self) -> FullState:
        """An object whose state_dict() is full_state_dict(), for frameworks that save one state for all ranks."""
        return FullState(self)

    def full_state_dict(self) -> dict[str, Any]:
        """Collective: gather the state of all ranks of the mesh between two steps, the same on each, for any mesh.

        "residuals" and "momenta" have whole parameters; otherwise see Compression.full_state_dict().
        """
        self._gather()
        full = to_full(self._comm, self._groups, self.step, self._add_replicas)
        sharded = self._parameters()
        for kind in ("residuals", "momenta"):
            for name in [name for name in sharded if self._keeps(name, kind)]:
                p = sharded[name]
                local = full[kind].get(name, torch.empty_like(p.to_local(), dtype=torch.float32)).to(p.device)
                whole = DTensor.from_local(local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
                full[kind][name] = whole.full_tensor().cpu()
        return full | {"groups": self._descriptions(is_whole=True)}

    def load_state_dict(self, state: Any) -> None:
        """Restore a state_dict() of this rank, or a full_state_dict() of any mesh; every rank must call it.

        Parameters of the state may be frozen now. Raises ArgumentError for a state of other parameters or
        codecs, and then changes nothing.
        """
        before = [(module, module.shards, module.groups) for module in self._modules]
        try:
            for module in self._modules:
                module.expect(_names_in(state))
            if isinstance(state, Mapping) and "rank" not in state:
                state = self._own_part(state)
            groups = self._groups
            self.step = from_saved(self._comm, groups, state, _HINT)
        except BaseException:
            for module, shards, groups in before:
                module.shards, module.groups = shards, groups
            raise
        loaded = {group.key for group in groups}
        for key in self._comm.state_dict()["keys"]:
            if self._owner is not None and self._owner.owns(key) and key not in loaded:
                self._comm.reset(key)  # a key of another set of the parameters

    # -- the state ---------------------------------------------------------------------------------------------------

    @property
    def _groups(self) -> list[ParameterGroup]:
        return [group for module in self._modules for group in module.groups]

    def _gather(self) -> None:
        """Move the state of each parameter to the groups of all parameters."""
        for module in self._modules:
            module.gather()

    def _parameters(self) -> dict[str, Any]:
        """The sharded parameters by name."""
        return {name: each.sharded_param for module in self._modules for name, each in module.shards.items()}

    def _keeps(self, name: str, kind: str) -> bool:
        codec = self._policy.codec_of(name, self._parameters()[name])
        return codec is not None and {"residuals": "residual", "momenta": "momentum"}[kind] in codec.state_names

    def _descriptions(self, is_whole: bool) -> list[dict[str, Any]]:
        """Describe the groups in a state, with the shapes of this rank's shards or of whole parameters."""
        found = [group.description() for group in self._groups]
        if is_whole:
            shapes = {name: [name, list(p.shape), list(p.stride())] for name, p in self._parameters().items()}
            for each in found:
                each["parameters"] = [shapes[name] for name, _, _ in each["parameters"]]
        return found

    def _own_part(self, full: Mapping[str, Any]) -> dict[str, Any]:
        """Take this rank's shards from a full state's tensors. from_saved() refuses tensors that do not fit."""
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

    def _check_replicas(self, lines: Sequence[str]) -> None:
        """Collective: raise ArgumentError unless all replicas have the same parameters."""
        found = self._comm.allgather("\n".join(lines).encode())
        for rank, other in enumerate(found):
            if other != found[0]:
                pairs = zip(found[0].decode().split("\n"), other.decode().split("\n"), strict=False)
                ours, theirs = next(((a, b) for a, b in pairs if a != b), ("fewer parameters", "more"))
                raise ArgumentError(
                    f"the replicas must begin with the same parameters and codecs; replica 0 has {ours}, and replica "
                    f"{rank} has {theirs}: give them the same seed, or load the same checkpoint, before install()"
                )

    def _reduce(self, module: _Module, shard: torch.Tensor) -> None:
        """Average the gradients of a module's shard between the replicas, in place (the hook)."""
        if self._is_closed:
            raise ArgumentError("this AllReduce is closed; install another one")
        reduced = reduced_parameters()
        if reduced is None:
            raise not_known()
        members = reduced[1]
        if new := module.unseen(members):  # they were frozen
            self._check_replicas([*module.lines(new)])
            module.add(members)
        works = [self._launch(group, arrays) for group, arrays in module.split(shard, members)]
        self._is_passing = True
        Variable._execution_engine.queue_callback(self._end_pass)  # each time: an earlier pass may have failed
        if module.must_wait(shard, members):
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
            key=group.key,
            lr=self.lr if keeps else None,
            async_op=True,
        )

    def _end_pass(self) -> None:
        """Wait for all averages at the end of a backward pass. Raises the first failure."""
        if not self._is_passing:
            return  # this is not the first callback of the pass
        self._is_passing = False
        under_way, self._under_way = self._under_way, []
        for work in under_way:
            work.wait()
        self.step += 1


class _Module:
    """A module that fully_shard() has wrapped: its parameters, and the groups in which they are reduced.

    Attributes:
        all_names: the names of all parameters, also of frozen ones.
        shards: FSDP2's records, by name, of the parameters that have had a gradient, needed gradients in install(), or
            have a loaded state.
        groups: the groups of these parameters, one for each codec.
    """

    def __init__(
        self,
        comm: Communicator,
        owner: Owner,
        rest: str,
        module: FSDPModule,
        names: Mapping[int, str],
        policy: Policy,
    ) -> None:
        self.fsdp, self._comm, self._owner, self._rest, self._policy = module, comm, owner, rest, policy
        self._param_group, *others = _param_groups(module)
        if others:
            raise ArgumentError(
                f"the parameters of the module {rest[1:]!r} are on several meshes, as shard_placement_fn= says, and "
                f"FSDP2 calls an all-reduce hook for one mesh only; wrap the parameters of each mesh in a module of "
                f"their own"
            )
        self._names = {each: names[id(each.sharded_param)] for each in self._param_group.fsdp_params}
        self.all_names = [*self._names.values()]
        if isinstance(self._param_group.mesh_info, DDPMeshInfo):
            raise ArgumentError(
                f"the mesh of {', '.join(self.all_names)} includes the replicas, so FSDP2 averages the replicas "
                f'itself; give fully_shard() the shard dimension alone: fully_shard(module, mesh=mesh["shard"])'
            )
        self._keys: dict[Codec, KeyOfSet] = {}
        self._last: tuple[list[Any], list[tuple[ParameterGroup, list[int]]]] = [], []  # the groups of the last step
        self._compared = set[Any]()  # the parameters that the replicas have compared
        self.shards: dict[str, Any] = {}
        self.groups: list[ParameterGroup] = []
        self.add([each for each in self._names if each.sharded_param.requires_grad])

    def unseen(self, members: Sequence[Any]) -> list[ParameterGroup]:
        """The groups of parameters that have a gradient for the first time."""
        new = [each for each in members if each not in self._compared]
        return [group for group, _ in self._form_groups(new)]

    def add(self, members: Sequence[Any]) -> None:
        """Note the parameters that have a gradient, and are the same on all replicas."""
        self._compared.update(members)
        self.expect({self._names[each] for each in members})

    def expect(self, names: Set[str]) -> None:
        """Add the module's parameters among these names to the groups."""
        self.shards = {name: each for each, name in self._names.items() if name in self.shards or name in names}
        self.groups = [group for group, _ in self._form_groups([*self.shards.values()])]

    def _form_groups(self, members: Sequence[Any]) -> Iterator[tuple[ParameterGroup, list[int]]]:
        """Form one group for each codec, with the numbers of its members."""
        by_codec: dict[Codec, list[int]] = {}
        for i, each in enumerate(members):
            name, p = self._names[each], each.sharded_param
            codec = self._policy.codec_of(name, p)
            if codec is None:
                raise ArgumentError(
                    f"{name!r} has the element type {p.dtype}; gradients of float32, float16 and bfloat16 can be "
                    f"averaged between replicas"
                )
            by_codec.setdefault(codec, []).append(i)
        for codec, indices in by_codec.items():
            names = [self._names[members[i]] for i in indices]
            yield self._group(codec, names, self._keys_of(codec).key(names)), indices

    def _group(self, codec: Codec, names: Sequence[str], key: str = "") -> ParameterGroup:
        by_name = {name: each for each, name in self._names.items()}
        return ParameterGroup(key, codec, tuple(names), tuple(by_name[n].sharded_param.to_local() for n in names))

    def _keys_of(self, codec: Codec) -> KeyOfSet:
        """The keys of the parameters with a codec."""
        if codec not in self._keys:
            rest = f"{self._rest}/{len(self._keys)}"
            codecs = {name: self._policy.codec_of(name, each.sharded_param) for each, name in self._names.items()}
            names = [name for name, found in codecs.items() if found == codec]

            def places(names: Sequence[str]) -> Places:
                lengths = self._group(codec, names).counts
                return {
                    name: [(buffer_name(kind, i), 0, length) for kind in codec.state_names if length]
                    for i, (name, length) in enumerate(zip(names, lengths, strict=True))
                }

            def sums(names: Sequence[str]) -> Parts:
                return owned_parts(self._group(codec, names), self._comm.rank, self._comm.nodes)

            self._keys[codec] = KeyOfSet(self._comm, self._owner, rest, names, places, sums)
        return self._keys[codec]

    def gather(self) -> None:
        """Move the state of each parameter to ``groups`` from the sets of parameters that had it."""
        entries = self._comm.state.entries.items()
        lr = 1.0 if any(entry.lr for key, entry in entries if self._owner.owns(key)) else None
        for group in self.groups:
            if self._arrange(group):
                take(self._comm, group, lr)

    def _arrange(self, group: ParameterGroup) -> bool:
        """Let the group's next call find its state. Returns whether the state comes from other sets."""
        codec = group.codec
        return codec is not None and bool(codec.state_names) and self._keys_of(codec).arrange(group.names)

    def lines(self, groups: Sequence[ParameterGroup]) -> Iterator[str]:
        """Describe the parameters, with a digest of their values, for a comparison of the replicas."""
        for group in groups:
            for name, p in zip(group.names, group.parameters, strict=True):
                yield f"{name} of {tuple(p.shape)} with {group.codec_spec}, {_digest(p)}"

    def split(self, shard: torch.Tensor, members: Sequence[Any]) -> Iterator[tuple[ParameterGroup, list[torch.Tensor]]]:
        """Find the groups of a step, with the parts of a shard that are their parameters' gradients."""
        padded = [each.padded_sharded_param_size.numel() for each in members]
        if shard.numel() != sum(padded):
            raise ArgumentError(
                f"the shard of the gradients of {', '.join(self._names[each] for each in members)} has {shard.numel()} "
                f"elements instead of {sum(padded)}"
            )
        if self._last[0] != members:
            self._last = list(members), list(self._form_groups(members))
        parts = shard.split(padded)
        for group, indices in self._last[1]:
            self._arrange(group)
            yield group, [parts[i][:count] for i, count in zip(indices, group.counts, strict=True)]

    def must_wait(self, shard: torch.Tensor, members: Sequence[Any]) -> bool:
        """Whether FSDP2, or a hook of the user, reads the averages before backward() ends.

        FSDP2 does so if it converts, divides, copies or accumulates them. On CUDA a wait costs the host nothing.
        """
        return (
            shard.is_cuda
            or shard.dtype not in (torch.float32, torch.bfloat16)  # FSDP2 divides other types after the hook
            or self._param_group.force_sum_reduction_for_comms
            or any(
                each.sharded_param.dtype != shard.dtype
                or each.sharded_param.grad is not None
                or each.offload_to_cpu
                or each.sharded_param._post_accumulate_grad_hooks
                for each in members
            )
        )


def _param_groups(module: FSDPModule) -> list[Any]:
    """FSDP2's records of the parameters that are reduced together."""
    found: list[Any] = module._get_fsdp_state()._fsdp_param_groups
    return found


def _names_in(state: Any) -> set[str]:
    """The names of the parameters in a state; from_saved() refuses invalid states."""
    states = [state] if isinstance(state, Mapping) else state
    try:
        return {str(p[0]) for each in states for group in each["groups"] for p in group["parameters"]}
    except (TypeError, LookupError):
        return set()


def _digest(p: torch.Tensor) -> str:
    """A digest of a parameter's values; meta tensors have no values yet."""
    if p.is_meta:
        return "no values yet"
    values = p.detach().contiguous().cpu().view(torch.uint8).numpy()
    return f"values of digest {hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()}"
