"""The collectives as methods on arrays: each checks its arguments, makes its CollectiveSpec and runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Unpack

from qccl.arguments import CodecLike, OpLike
from qccl.arrays import Form, Memory, Values, from_known_form
from qccl.collectives import (
    AllGatherSpec,
    AllReduceSpec,
    AllToAllSpec,
    Binding,
    BroadcastSpec,
    CoalescedSpec,
    CollectiveSpec,
    HierarchicalSpec,
    PeerExchangeSpec,
    ReduceScatterSpec,
    ReduceSpec,
    spec_of,
)
from qccl.dtypes import FLOAT32
from qccl.errors import ArgumentError
from qccl.options import ArrayOptions, CallOptions, ResultArrayOptions, StateArrayOptions, accepts, complete
from qccl.tensors import is_tensor

if TYPE_CHECKING:
    from qccl.plan import Plan

__all__ = ["Collectives", "KnownCall"]

#: arrays, the method's own options, and the shared ones
_Arguments = tuple[tuple[Any, ...], tuple[Any, ...], Mapping[str, Any]]


@dataclass(slots=True)
class KnownCall:
    """What follows from the options of a call and from the forms of its arrays, and the binding of the last such call.

    Attributes:
        given: form and name of each array that the caller gave.
        buffers: the schedule's buffers, each with the number of its array.
        key, stream, timeout, async_op: options.
        bound: the addresses of the last call's arrays, and what CollectiveSpec.bind() returned for them.
        has_tensors: whether PyTorch's tensors are among the arrays; they are looked at in each call.
        can_rerun: whether Plan._rerun() may run the call again, with the plan of the last one.
        plan: finds that plan, as long as it exists.
    """

    spec: CollectiveSpec
    given: tuple[tuple[Form, str], ...]
    buffers: tuple[tuple[str, int], ...]
    key: str | None
    stream: int | None
    timeout: float | None
    async_op: bool
    bound: tuple[list[int], Binding]
    has_tensors: bool
    can_rerun: bool
    plan: Callable[[], Plan | None] = lambda: None


class Collectives(ABC):
    """A Communicator's collectives on arrays."""

    rank: int
    size: int
    backend: str
    nodes: tuple[int, ...]
    _memory: Memory

    @accepts(CallOptions)
    def quantized_allreduce(
        self, x: Any, out: Any = None, *, op: OpLike = "sum", algorithm: str = "auto", **options: Unpack[CallOptions]
    ) -> Any:
        """Combine ``x`` over all ranks, with encoded traffic; every rank gets the same bits.

        Args:
            x: a dense array of float32, float16 or bfloat16, of any shape; on CUDA in the memory of this rank's GPU.
            out: the array for the result, like ``x``; None means ``x`` itself.
            op: "sum", "avg" or "mean" (the global mean), "min" or "max"; or the same operation as NCCL's number, a
                ReduceOp of torch.distributed, or an Op of mpi4py.
            algorithm: "two_round", "one_shot", or "auto" (by size).
            codec: e.g. ``"minmax8"``, ``"minmax4:bucket=256"``, a dict of the same, or a Codec.
            async_op: return a Work at once instead of the result. Do not write the array, or read the output, before
                ``wait()`` has returned. Later calls on this communicator that use the same memory wait for it; calls on
                other communicators do not. On the host, a PyTorch tensor can never be resized again, as after
                ``x.numpy()``, and NumPy refuses to resize ``x`` until the call has ended, unless told not to check
                (``refcheck=False``).
            chunk: elements of a step of the pipeline; None means a default by size.
            timeout: seconds for this call; None means the communicator's.
            nonfinite: "propagate" passes NaN and infinity on (their whole bucket becomes NaN); "error" raises
                ArgumentError on every rank if the result has any, and names the first such element. On the host, if no
                other call was running, the error also names the first such element of this rank's input.
            key: a name for ``x``, such as "layer1.weight"; codecs with "+ef" or "+nesterov" need it and keep state
                under it.
            lr: the learning rate by which the caller multiplies the result, if it changes from step to step. Errors of
                earlier steps are then corrected at the rate of their own step.
            dtype: "bfloat16" reads an array of uint16 as bfloat16.
            stream: on CUDA, the stream (a number, or an object with ``__cuda_stream__``) that the call is ordered with;
                None means the current stream of the library that made ``x``.
            trace: a list to which the call appends a TraceEvent for each operation and transfer of this rank (on CUDA
                when synchronize() returns); qccl.trace.write_trace() writes them to a file.

        Returns:
            The output array, or its Work. On the host the array holds the result. On CUDA, operations put on the stream
            later see the result; Work.synchronize() or check() raises the error if the call failed.

        Raises:
            ArgumentError, CodecError, InvalidBufferError: an argument, a codec or an array is not allowed; nothing was
                sent. ArgumentError also follows ``nonfinite="error"``, after the call has written the result. The
                communicator stays usable.
            MismatchError: the ranks' calls differ; no array is changed.
            CollectiveTimeout: the call reached its deadline.
            PeerLost: another rank failed, left or gave up.
            EngineError: the library of the transport (MPI, UCX, gloo, NCCL) or CUDA failed.
        """
        lr = options.pop("lr", None)  # may be another one in each call
        arguments = (x, out), ("allreduce", op, algorithm), options
        found = self._find(arguments)
        if found is not None:
            return self._repeat(*found, (x, out), x if out is None else out, lr)
        how = complete(options, lr=lr)
        source, target, result = self._pair(x, out, how)
        if target.count != source.count:
            raise ArgumentError(f"x has {source.count} elements and out has {target.count}; they must be equal")
        spec = spec_of(AllReduceSpec.from_arguments, source, how, source.order, op=op, algorithm=algorithm)
        arrays = {"input": source, "output": target}
        ended = self._run(spec, arrays, result, how)
        self._remember(arguments, spec, arrays, how)
        return ended

    @accepts(CallOptions)
    def quantized_allreduce_coalesced(
        self,
        xs: Sequence[Any],
        outs: Sequence[Any] | None = None,
        *,
        op: OpLike = "sum",
        algorithm: str = "auto",
        **options: Unpack[CallOptions],
    ) -> Any:
        """All-reduce many arrays of one element type in one call, without copying them.

        ``xs`` and ``outs`` are lists of arrays; ``outs`` None means ``xs`` themselves. The arrays share messages, but
        each has buckets of its own. Other arguments: see quantized_allreduce. Returns the list of the outputs, or its
        Work.
        """
        targets = xs if outs is None else outs
        if not isinstance(xs, Collection) or not isinstance(targets, Collection):
            raise ArgumentError(f"xs and outs must be lists of arrays, not {type(xs).__name__}, {type(outs).__name__}")
        if len(targets) != len(xs):
            raise ArgumentError(f"there are {len(xs)} arrays in xs and {len(targets)} in outs; each needs its own")
        lr = options.pop("lr", None)  # may be another one in each call
        given = tuple(xs) if outs is None else tuple(array for pair in zip(xs, outs, strict=True) for array in pair)
        arguments = given, ("allreduce_coalesced", outs is None, op, algorithm), options
        found = self._find(arguments)
        if found is not None:
            return self._repeat(*found, given, targets, lr)
        how, memory = complete(options, lr=lr), self._memory
        arrays: dict[str, Values] = {}
        dtype = how["dtype"]
        for i, (x, out) in enumerate(zip(xs, targets, strict=True)):
            source = arrays[f"input {i}"] = memory.from_array(x, dtype=dtype, writable=outs is None, what=f"xs[{i}]")
            dtype = source.dtype
            arrays[f"output {i}"] = (
                source if outs is None else memory.from_array(out, dtype=dtype, writable=True, what=f"outs[{i}]")
            )
        each = [arrays[f"input {i}"].count for i in range(len(xs))]
        spec = CoalescedSpec.from_arguments(
            *(sum(each), dtype or FLOAT32, how["codec"], how["chunk"]), each=each, op=op, algorithm=algorithm
        )
        order = spec.order_of(arrays)
        spec = spec if order == "C" else replace(spec, order=order)
        ended = self._run(spec, arrays, targets, how)
        self._remember(arguments, spec, arrays, how)
        return ended

    @accepts(StateArrayOptions)
    def quantized_reduce_scatter(
        self,
        x: Any,
        out: Any = None,
        *,
        counts: Sequence[int] | None = None,
        op: OpLike = "sum",
        **options: Unpack[StateArrayOptions],
    ) -> Any:
        """Combine ``x`` over all ranks and give each rank one part of the result: the first half of an all-reduce.

        ``counts`` are the elements of each rank's part; None means equal parts. ``out`` receives this rank's part; None
        means this rank's part of ``x``, whose other parts do not change. With "+ef" each rank keeps the residuals of
        what it sends; a rank changes its state if its ``x`` and its part of the result are finite. Other arguments: see
        quantized_allreduce. Returns ``out`` (or ``x``), or its Work.
        """
        how = complete(options)
        source = self._memory.from_array(x, dtype=how["dtype"], writable=out is None, what="x")
        spec = spec_of(ReduceScatterSpec.from_arguments, source, how, op=op, counts=counts)
        if out is None:
            target = spec.output_in(source, self.rank, self.size)
        else:
            target = self._memory.from_array(out, dtype=source.dtype, writable=True, what="out")
        arrays = {"input": source, "output": target}
        return self._run(spec, arrays, x if out is None else out, how)

    @accepts(ResultArrayOptions)
    def quantized_all_gather(
        self, x: Any, out: Any, *, counts: Sequence[int] | None = None, **options: Unpack[ResultArrayOptions]
    ) -> Any:
        """Concatenate every rank's ``x`` into ``out``, on all ranks: the second half of an all-reduce.

        ``counts`` are the elements of each rank's part; None means equal parts. ``x`` may be this rank's part of
        ``out`` itself. All ranks get the same bits: each replaces its own part by the values that the others decode.
        Other arguments: see quantized_allreduce. Returns ``out``, or its Work.
        """
        how = complete(options)
        source, target = self._two(x, out, how)
        spec = spec_of(AllGatherSpec.from_arguments, target, how, counts=counts)
        return self._run(spec, {"input": source, "output": target}, out, how)

    @accepts(ArrayOptions)
    def quantized_all_to_all(
        self,
        x: Any,
        out: Any,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        **options: Unpack[ArrayOptions],
    ) -> Any:
        """Send part j of ``x`` to rank j, for each j; ``out`` receives the parts from all ranks in rank order.

        ``send_counts`` and ``recv_counts`` are the elements that this rank sends to and receives from each rank; None
        means equal parts. A rank's part for itself is copied exactly. Other arguments: see quantized_allreduce. Returns
        ``out``, or its Work.
        """
        how = complete(options)
        source, target = self._two(x, out, how)
        spec = spec_of(AllToAllSpec.from_arguments, source, how, send_counts=send_counts, recv_counts=recv_counts)
        return self._run(spec, {"input": source, "output": target}, out, how)

    @accepts(ResultArrayOptions)
    def quantized_broadcast(
        self, x: Any, out: Any = None, *, root: int = 0, algorithm: str = "auto", **options: Unpack[ResultArrayOptions]
    ) -> Any:
        """Copy ``x`` of rank ``root`` to all ranks.

        All ranks get the same bits: the root, too, gets the decoded values. ``out`` None means ``x`` itself; with
        ``out``, only the root needs ``x``. ``algorithm`` is "chain", "binomial" or "auto" (by size). Other arguments:
        see quantized_allreduce. Returns the output array, or its Work.
        """
        how = complete(options)
        if self.rank == root or out is None:
            source, target, result = self._pair(x, out, how)
        else:
            source = target = self._memory.from_array(out, dtype=how["dtype"], writable=True, what="out")
            result = out
        spec = spec_of(BroadcastSpec.from_arguments, source, how, source.order, root=root, algorithm=algorithm)
        return self._run(spec, {"input": source, "output": target}, result, how)

    @accepts(ArrayOptions)
    def quantized_reduce(
        self,
        x: Any,
        out: Any = None,
        *,
        root: int = 0,
        op: OpLike = "sum",
        algorithm: str = "auto",
        **options: Unpack[ArrayOptions],
    ) -> Any:
        """Combine ``x`` over all ranks; only rank ``root`` gets the result, in ``out`` or in ``x`` itself.

        The other ranks do not change ``x`` and do not use ``out``. Other arguments: see quantized_allreduce. Returns
        the output array on the root, None on the other ranks; or the Work.
        """
        how = complete(options)
        if self.rank == root:
            source, target, result = self._pair(x, out, how)
            arrays = {"input": source, "output": target}
        else:
            source, result = self._memory.from_array(x, dtype=how["dtype"], writable=False, what="x"), None
            arrays = {"input": source}
        spec = spec_of(ReduceSpec.from_arguments, source, how, source.order, op=op, root=root, algorithm=algorithm)
        return self._run(spec, arrays, result, how)

    @accepts(CallOptions)
    def hierarchical_allreduce(
        self,
        x: Any,
        out: Any = None,
        *,
        op: OpLike = "sum",
        intra: CodecLike = "none",
        layout: str = "sharded",
        node_ids: Sequence[int] | None = None,
        inter: str | None = None,
        exact: bool = True,
        algorithm: str = "auto",
        **options: Unpack[CallOptions],
    ) -> Any:
        """All-reduce in two levels: with ``codec`` between nodes, and exact or with another codec inside them.

        - ``intra`` is the codec inside nodes: "none" (exact), "float16", "bfloat16" or any other that keeps no state
          and draws no random numbers, such as "minmax8".
        - ``layout``: with "sharded" several ranks of each node communicate with other nodes, each for a part (as many
          parts as the smallest node has ranks); with "leader" the first rank does, as in ByteGrad.
        - ``node_ids`` has a number for each rank, equal for ranks of one node; None means the machines of the ranks.
        - ``algorithm``, "one_shot" or "two_round", runs between nodes; "auto" is one_shot for two nodes.
        - ``inter="host"``: on CUDA, codes between nodes go through pinned host memory and MPI instead of NCCL. It needs
          a communicator over MPI and cannot be captured in a graph. On the host it changes nothing.
        - ``exact=False``: on CUDA NCCL's own reduce-scatter and all-gather move values inside nodes, if these are not
          encoded and every rank of a node owns a part. All ranks still get the same bits, but in the last places these
          may differ from the host's, and between versions of NCCL, machines and numbers of ranks. On the host it
          changes nothing.
        - With "+ef" residuals are those of the codes between nodes; with intra="none" nothing is encoded on one node.

        Other arguments: see quantized_allreduce; avg is the mean over all ranks. Returns the output array, or its Work.
        """
        how = complete(options)
        source, target, result = self._pair(x, out, how)
        spec = spec_of(
            HierarchicalSpec.from_arguments,
            source,
            how,
            source.order,
            op=op,
            intra=intra,
            layout=layout,
            node_ids=self.nodes if node_ids is None else node_ids,
            algorithm=algorithm,
            inter=inter,
            exact=exact,
        )
        return self._run(spec, {"input": source, "output": target}, result, how)

    @accepts(StateArrayOptions)
    def peer_exchange(
        self,
        z: Any,
        *,
        send_to: Collection[int],
        replicas: Mapping[int, Any],
        applied: Any = None,
        **options: Unpack[StateArrayOptions],
    ) -> Any:
        """Send the code of ``z`` to some ranks and add it to ``applied``; add the codes of others to replicas.

        All ranks call it; each names its own peers. Data moves only along the edges of this directed graph.

        - ``z`` is the array to send, such as the change of a model.
        - ``send_to`` are the ranks that receive the code of ``z``: those that name this rank in ``replicas``.
        - ``replicas`` has, for each rank that sends to this one, the array to which its decoded code is added.
        - ``applied`` (None: no array) is the array to which this rank's own decoded code is added. If it was
          bit-identical to its replicas on other ranks, it stays so.
        - With "+ef" a sender keeps the residual of ``z``; it changes if ``z`` is finite. The state under a ``key``
          belongs to one ``send_to``, and to calls with ``applied`` or without.

        Other arguments: see quantized_allreduce. Returns ``applied``, or the Work. If a rank names another that does
        not name it, both raise MismatchError and change nothing; the others raise it now or in their next call.
        """
        if not isinstance(replicas, Mapping):
            raise ArgumentError(f"replicas must be a dict of arrays by rank, not {type(replicas).__name__}")
        how, memory = complete(options), self._memory
        own = memory.from_array(z, dtype=how["dtype"], writable=False, what="z")
        arrays = {"input": own}
        if applied is not None:
            arrays["applied"] = memory.from_array(applied, dtype=own.dtype, writable=True, what="applied")
        for peer, array in replicas.items():
            what = f"replicas[{peer}]"
            arrays[f"replica {peer}"] = memory.from_array(array, dtype=own.dtype, writable=True, what=what)
        spec = spec_of(
            PeerExchangeSpec.from_arguments,
            own,
            how,
            own.order,
            send_to=send_to,
            receive_from=replicas.keys(),
            applied=applied is not None,
        )
        return self._run(spec, arrays, applied, how)

    def _pair(self, x: Any, out: Any, how: CallOptions) -> tuple[Values, Values, Any]:
        """The memory of both arrays (the same if ``out`` is None), and the array that the call returns."""
        if out is not None:
            return *self._two(x, out, how), out
        source = self._memory.from_array(x, dtype=how["dtype"], writable=True, what="x")
        return source, source, x

    def _two(self, x: Any, out: Any, how: CallOptions) -> tuple[Values, Values]:
        """The memory of an input and of an output."""
        source = self._memory.from_array(x, dtype=how["dtype"], writable=False, what="x")
        return source, self._memory.from_array(out, dtype=source.dtype, writable=True, what="out")

    def _find(self, arguments: _Arguments) -> tuple[KnownCall, list[Any]] | None:
        """An earlier call with these options on arrays of these forms, and views of the arrays."""
        return self._memory.calls.find(*arguments)

    def _remember(
        self, arguments: _Arguments, spec: CollectiveSpec, arrays: Mapping[str, Values], how: CallOptions
    ) -> None:
        """Let _find() find this call, which was accepted, unless some option must be looked at in each call."""
        if how["nonfinite"] != "propagate" or how["trace"] is not None:
            return
        if all(values.count for values in arrays.values()):
            self._memory.calls.add(*arguments, lambda: self._known(spec, arrays, how))

    def _known(self, spec: CollectiveSpec, arrays: Mapping[str, Values], how: CallOptions) -> KnownCall:
        """What _repeat() needs of a call that was accepted."""
        given = list(dict.fromkeys(arrays.values()))
        numbers = {values: number for number, values in enumerate(given)}
        return KnownCall(
            spec,
            tuple((values.form, values.what) for values in given),
            tuple((name, numbers[values]) for name, values in arrays.items()),
            how["key"],
            how["stream"],
            how["timeout"],
            how["async_op"],
            ([values.address for values in given], spec.bind(arrays, self.rank, self.size)),
            has_tensors=any(is_tensor(values.array) for values in given),
            can_rerun=not how["async_op"] and not spec.codec.state_names,
        )

    def _repeat(self, known: KnownCall, views: list[Any], given: Sequence[Any], result: Any, lr: float | None) -> Any:
        """Run a call again, on other arrays or the same; checks what may have changed."""
        addresses = [view.address for view in views]
        last_addresses, binding = known.bound
        is_unmoved, may_rerun = addresses == last_addresses, known.can_rerun and lr is None
        if is_unmoved and may_rerun and not known.has_tensors:
            if self._rerun(known, binding, (given, views)):
                return result
            may_rerun = False
        values = [
            from_known_form(view, array, form, what)
            for view, array, (form, what) in zip(views, given, known.given, strict=False)  # out may be None
        ]
        arrays = {name: values[number] for name, number in known.buffers}
        if not is_unmoved:
            binding = known.spec.bind(arrays, self.rank, self.size)
            known.bound = addresses, binding
        if may_rerun and self._rerun(known, binding, values):
            return result
        return self._run_known(known, binding, arrays, result, lr)

    @abstractmethod
    def _rerun(self, known: KnownCall, binding: Binding, kept: object) -> bool:
        """Run a collective whose arguments were checked and bound, and wait for it, if its last run can be repeated.

        ``kept``: objects that must live until it has ended.
        """

    @abstractmethod
    def _run_known(
        self, known: KnownCall, binding: Binding, arrays: Mapping[str, Values], result: Any, lr: float | None
    ) -> Any:
        """Run a collective whose arguments were checked and bound, and return its result or its Work."""

    @abstractmethod
    def _run(self, spec: CollectiveSpec, arrays: Mapping[str, Values], result: Any, how: CallOptions) -> Any:
        """Run a collective, and return its result or its Work."""
