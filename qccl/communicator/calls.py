"""The collectives as methods on arrays. A call is prepared, unless the table of calls has an equal earlier call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Unpack

from qccl.base import dtypes
from qccl.base.arrays import Memory, Values, check_listed, refuse_nonfinite, text_about_inputs
from qccl.base.errors import ArgumentError
from qccl.base.guard import guarded
from qccl.base.tensors import is_tensor
from qccl.codecs import Encoded
from qccl.collectives import (
    AllGatherSpec,
    AllReduceSpec,
    AllToAllSpec,
    BroadcastSpec,
    Call,
    CoalescedSpec,
    CollectiveSpec,
    EncodedAllGatherSpec,
    EncodedAllToAllSpec,
    HierarchicalSpec,
    PeerExchangeSpec,
    ReduceScatterSpec,
    ReduceSpec,
)
from qccl.collectives.arguments import CodecLike, OpLike, check_key, check_trace, codecs_of, count_of, timeout_of
from qccl.collectives.schedule import Role
from qccl.communicator.choosing import Chooser
from qccl.communicator.dynamo import not_traced, skip_tracing
from qccl.communicator.options import ArrayOptions, CallOptions, Method, ResultArrayOptions, StateArrayOptions
from qccl.communicator.profile import CallChoice
from qccl.communicator.programs import Compiled
from qccl.communicator.session import Session
from qccl.communicator.state import lr_of
from qccl.communicator.work import Work
from qccl.engine.base import Bound, Progress, Request

__all__ = ["Collectives"]

_NOW = Progress.NOW
_ALLREDUCE = Method(AllReduceSpec, "op", "algorithm")
_COALESCED = Method(CoalescedSpec, "outs", "op", "algorithm")
_REDUCE_SCATTER = Method(ReduceScatterSpec, "counts", "op")
_ALL_GATHER = Method(AllGatherSpec, "counts")
_ALL_TO_ALL = Method(AllToAllSpec, "send_counts", "recv_counts")
_BROADCAST = Method(BroadcastSpec, "root", "algorithm")
_REDUCE = Method(ReduceSpec, "root", "op", "algorithm")
_HIERARCHICAL = Method(HierarchicalSpec, "op", "intra", "layout", "node_ids", "inter", "algorithm")
_PEER_EXCHANGE = Method(PeerExchangeSpec, "send_to", "replicas")


class _Checks(NamedTuple):
    """The checks of a call before and after its program runs. They hold no array, so that none is kept alive.

    Attributes:
        tensors: the PyTorch tensors among the arrays, each with its position; every call checks them again.
        inputs, outputs: the memory that ``nonfinite="error"`` searches for NaN and infinity.
    """

    tensors: tuple[tuple[int, Values], ...]
    inputs: tuple[Values, ...]
    outputs: tuple[Values, ...]


#: a prepared call, which later calls with equal arguments reuse; without checks, if it needs none and is synchronous
_Prepared = tuple[Compiled, Bound, Request, _Checks | None]


@not_traced
class Collectives:
    """A Communicator's collectives on arrays."""

    rank: int
    size: int
    backend: str
    nodes: tuple[int, ...]
    _halves: tuple[int, ...]
    _session: Session
    memory: Memory
    _chooser: Chooser

    @_ALLREDUCE.accepts(CallOptions)
    def quantized_allreduce(
        self, x: Any, out: Any = None, *, op: OpLike = "sum", algorithm: str = "auto", **options: Unpack[CallOptions]
    ) -> Any:
        """Combine ``x`` over all ranks, with encoded traffic; every rank gets the same bits.

        Args:
            x: a dense array of float32, float16 or bfloat16, of any shape; on CUDA in the memory of this rank's GPU.
            out: the array for the result, like ``x``; None means ``x`` itself.
            op: "sum", "avg" or "mean" (the global mean), "min" or "max"; or the same operation as NCCL's number, a
                ReduceOp of torch.distributed, or an Op of mpi4py.
            algorithm: "two_round", "one_shot" or "auto". "auto" decides by size, and reduces in two levels like
                hierarchical_allreduce() if ranks share nodes and this sends less between nodes. With codec="auto" or a
                loaded profile, "auto" is the fastest algorithm.
            codec: e.g. ``"minmax8"``, ``"minmax4:bucket=256"``, a dict of the same, or a Codec. "auto" is the faster
                one of none and minmax8, and "auto:CODEC" the faster one of none and CODEC, by the group's profile().
                The first such call of a collective and element type measures both.
            async_op: return a Work at once instead of the result. Do not write the array, or read the output, before
                ``wait()`` has returned. Later calls on this communicator that use the same memory wait for it; calls on
                other communicators do not. On the host, a PyTorch tensor can never be resized again, as after
                ``x.numpy()``, and NumPy refuses to resize ``x`` until the call has ended, unless told not to check
                (``refcheck=False``).
            chunk: the most elements of a chunk, the unit of the pipeline; None means a default by size.
            timeout: seconds for this call; None means the communicator's.
            nonfinite: "propagate" passes NaN and infinity on (their bucket or block becomes NaN); "error" raises
                ArgumentError on every rank if the result has any, and names the first such element. On the host, if no
                other call was running, the error also names the first such element of this rank's input.
            key: a name for ``x``, such as "layer1.weight", which the ranks compare; codecs with "+ef" or "+nesterov"
                need it and keep state under it.
            lr: the learning rate by which the caller multiplies the result, if it changes from step to step. Errors of
                earlier steps are then corrected at the rate of their own step. A result that is multiplied by 0 has
                no effect, so a call with lr=0 sends no residuals, and leaves them as they are.
            dtype: "bfloat16" reads an array of uint16 as bfloat16.
            stream: on CUDA, the stream (a number, or an object with ``__cuda_stream__``) that the call is ordered with;
                None means the current stream of the library that made ``x``.
            trace: a list to which the call appends a TraceEvent for each operation and transfer of this rank (on CUDA
                when synchronize() returns); qccl.base.trace.write_trace() writes them to a file.

        Returns:
            The output array, or its Work. On the host the array holds the result. On CUDA, operations put on the stream
            later see the result; Work.synchronize() or check() raises the error if the call failed.

        Raises:
            ArgumentError, CodecError, InvalidBufferError: an argument, a codec or an array is not allowed; nothing was
                sent. With ``nonfinite="error"`` ArgumentError is also raised after the call has written the result. The
                communicator stays usable.
            MismatchError: the ranks' calls differ; no array is changed.
            CollectiveTimeout: the call reached its deadline.
            PeerLost: another rank failed, left or gave up.
            EngineError: the library of the transport (MPI, UCX, gloo, NCCL) or CUDA failed.
        """
        return self._call(_ALLREDUCE, (x, out), (op, algorithm), options, x if out is None else out)

    @_COALESCED.accepts(CallOptions)
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
        if type(xs) is not list:
            check_listed(xs, "xs")
        if type(targets) is not list:
            check_listed(targets, "outs")
        if len(targets) != len(xs):
            raise ArgumentError(f"there are {len(xs)} arrays in xs and {len(targets)} in outs; each needs its own")

        arrays = tuple(xs) if outs is None else (*xs, *outs)
        return self._call(_COALESCED, arrays, (outs is not None, op, algorithm), options, targets)

    @_REDUCE_SCATTER.accepts(StateArrayOptions)
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
        the values it sends; a rank changes its state if its ``x`` and its part of the result are finite. Other
        arguments: see quantized_allreduce. Returns ``out`` (or ``x``), or its Work.
        """
        return self._call(_REDUCE_SCATTER, (x, out), (counts, op), options, x if out is None else out)

    @_ALL_GATHER.accepts(ResultArrayOptions)
    def quantized_all_gather(
        self, x: Any, out: Any, *, counts: Sequence[int] | None = None, **options: Unpack[ResultArrayOptions]
    ) -> Any:
        """Concatenate every rank's ``x`` into ``out``, on all ranks: the second half of an all-reduce.

        ``counts`` are the elements of each rank's part; None means equal parts. ``x`` may be this rank's part of
        ``out`` itself. All ranks get the same bits: each replaces its own part by the values that the others decode.
        Other arguments: see quantized_allreduce. Returns ``out``, or its Work.

        ``x`` may be a codecs.Encoded: its bytes are sent without being encoded again. Then ``out`` is an array, which
        receives the decoded values, or an Encoded that shares no memory with ``x``; parts are multiples of 128 elements
        (64 with NVFP4), and ``codec`` is left out.
        """
        if isinstance(x, Encoded) or isinstance(out, Encoded):
            return self._call(_GATHER_ENCODED, *_of_encoded(x, out, (counts,), options), out)
        return self._call(_ALL_GATHER, (x, out), (counts,), options, out)

    @_ALL_TO_ALL.accepts(ArrayOptions)
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
        ``out``, or its Work. ``x`` and ``out`` may be Encoded, as in quantized_all_gather.
        """
        if isinstance(x, Encoded) or isinstance(out, Encoded):
            return self._call(_EXCHANGE_ENCODED, *_of_encoded(x, out, (send_counts, recv_counts), options), out)
        return self._call(_ALL_TO_ALL, (x, out), (send_counts, recv_counts), options, out)

    @_BROADCAST.accepts(ResultArrayOptions)
    def quantized_broadcast(
        self, x: Any, out: Any = None, *, root: int = 0, algorithm: str = "auto", **options: Unpack[ResultArrayOptions]
    ) -> Any:
        """Copy ``x`` of rank ``root`` to all ranks.

        All ranks get the same bits: the root, too, gets the decoded values. ``out`` None means ``x`` itself; with
        ``out``, only the root needs ``x``. ``algorithm`` is "chain", "binomial" or "auto" (by size). Other arguments:
        see quantized_allreduce. Returns the output array, or its Work.
        """
        arrays = x if self.rank == root or out is None else None, out
        return self._call(_BROADCAST, arrays, (root, algorithm), options, x if out is None else out)

    @_REDUCE.accepts(ArrayOptions)
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
        is_root = self.rank == root
        result = None if not is_root else x if out is None else out
        return self._call(_REDUCE, (x, out if is_root else None), (root, op, algorithm), options, result)

    @_HIERARCHICAL.accepts(CallOptions)
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
        algorithm: str = "auto",
        **options: Unpack[CallOptions],
    ) -> Any:
        """All-reduce in two levels: with ``codec`` between nodes, and exact or with another codec inside them.

        - ``intra`` is the codec inside nodes: "none" (exact), "float16", "bfloat16" or any other that keeps no state
          and draws no random numbers, such as "minmax8".
        - ``layout``: with "sharded" several ranks of each node communicate with other nodes, each for a part (as many
          parts as the smallest node has ranks); with "leader" the first rank does, as in ByteGrad.
        - ``node_ids`` has a number for each rank, equal for ranks of one node; None means the machines of the ranks,
          or the halves of a machine with two sockets whose GPUs communicate over PCIe.
        - ``algorithm``, "one_shot" or "two_round", runs between nodes; "auto" is one_shot for two nodes.
        - ``inter="host"``: on CUDA, codes between nodes go through pinned host memory and MPI instead of NCCL. It needs
          a communicator over MPI and cannot be captured in a graph. On the host it changes nothing.
        - With "+ef" residuals are those of the codes between nodes; with intra="none" nothing is encoded on one node.

        Other arguments: see quantized_allreduce; avg is the mean over all ranks. Returns the output array, or its Work.
        """
        own = op, intra, layout, node_ids, inter, algorithm
        return self._call(_HIERARCHICAL, (x, out), own, options, x if out is None else out)

    @_PEER_EXCHANGE.accepts(StateArrayOptions)
    def peer_exchange(
        self,
        z: Any,
        *,
        send_to: Collection[int],
        replicas: Mapping[int, Any],
        applied: Any = None,
        **options: Unpack[StateArrayOptions],
    ) -> Any:
        """Send ``z``, encoded, to some ranks, and add the values that other ranks send to ``replicas``.

        All ranks make the call, and each names its own peers. The peers form a directed graph; data moves only along
        its edges.

        - ``z`` is the array to send, such as the change of a model.
        - ``send_to`` are the ranks that receive ``z``; each of them names this rank in its ``replicas``.
        - ``replicas`` has, for each rank that sends to this one, the array to which the decoded values are added.
        - ``applied`` (None: no array) is the array to which this rank's own values are added, decoded as on its peers.
          If ``applied`` was bit-identical to its replicas on other ranks, it stays so.
        - With "+ef" a sender keeps the residual of ``z``; it changes if ``z`` is finite. The state under a ``key``
          belongs to one ``send_to``, and to calls with ``applied`` or without.

        Other arguments: see quantized_allreduce. Returns ``applied``, or the Work. If a rank names a peer that does
        not name it, both raise MismatchError and change nothing; other ranks raise it now or in their next call.
        """
        if not isinstance(replicas, Mapping):
            raise ArgumentError(f"replicas must be a dict of arrays by rank, not {type(replicas).__name__}")
        return self._call(
            _PEER_EXCHANGE, (z, applied, *replicas.values()), (send_to, tuple(replicas)), options, applied
        )

    # -- the path of every call --------------------------------------------------------------------------------------

    def _call(self, method: Method, arrays: tuple[Any, ...], own: tuple[Any, ...], options: Any, result: Any) -> Any:
        """Make a call, and return ``result`` or its Work. Only the first call with equal arguments is prepared.

        ``own`` are the arguments that ``method.own`` names; ``options`` is the dict of ``**options``. An array may also
        be an address.
        """
        session, memory = self._session, self.memory
        if session.end.is_over or session.calling:
            self._check_usable()
        # not part of the table's key, because it may differ in each call
        lr = options.pop("lr") if "lr" in options and "lr" in method.parameters else None
        found = session.calls.find(method.name, arrays, own, options)
        prepared, views = found or self._prepare(method, arrays, own, options)
        compiled, bound, request, checks = prepared
        if lr is not None:
            request = request._replace(lr=lr_of(lr))
        kept: object = arrays, views
        streams = memory.streams(request.stream, arrays) if memory.has_streams else ()
        if checks is None:
            session.start(compiled, bound, request, kept, streams)
            return result
        is_async = request.progress is _NOW
        if checks.tensors:
            kept = kept, memory.recheck(checks.tensors, arrays, hold=is_async)
        check = self._check_of(checks) if request.nonfinite == "error" else None
        if is_async:
            work = Work(session, result, check)
            session.start(compiled, bound, request, kept, streams, work._begin)
            return work
        session.start(compiled, bound, request, kept, streams)
        if check is not None:
            check()
        return result

    @guarded
    def _check_usable(self) -> None:
        self._session.check_usable()

    @guarded
    def _check_of(self, checks: _Checks) -> Callable[[], None]:
        """Return a function to call after the run: it raises ArgumentError if the result is not finite."""
        # not while other calls are under way, which may be writing the input; nor on CUDA, where the host would wait
        own = text_about_inputs(self.memory, checks.inputs, self.rank) if self._session.engine.is_idle else ""
        return partial(refuse_nonfinite, self.memory, checks.outputs, own)

    @guarded
    def _prepare(
        self, method: Method, arrays: tuple[Any, ...], given: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[_Prepared, list[Values]]:
        """Check the arguments of a call, and add it to the table of calls; also returns the arrays' memory."""
        session, memory = self._session, self.memory
        options, own = method.complete(given, keywords)
        is_pointers = "count" in own
        call = Call(
            memory=memory,
            rank=self.rank,
            size=self.size,
            node_ids=self._halves or self.nodes,
            arrays=arrays,
            codecs=codecs_of(options["codec"]),
            chunk=options["chunk"],
            count=count_of(own.pop("count")) if is_pointers else None,
            dtype=dtypes.get(own.pop("datatype")) if is_pointers else options["dtype"],
            own=own,
        )
        specs, by_name = method.spec.from_call(call)
        request = _request(options)
        memory.streams(options["stream"], ())
        spec = self._choose(specs, options["key"], options["stream"]).spec
        compiled, bound = session.bind(spec, by_name, options["key"], session.programs)
        values = list(dict.fromkeys(by_name.values()))
        bare = {each: replace(each, array=None, view=None, owner=None) for each in values}
        of_tensors = [(number, array) for number, array in enumerate(arrays) if is_tensor(array)]
        if of_tensors:
            skip_tracing()  # torch may have been imported after the communicator was made
        tensors = tuple((number, bare[each]) for number, array in of_tensors for each in values if each.array is array)
        checks = None
        if tensors or request.progress is _NOW or request.nonfinite == "error":
            inputs, outputs = (
                tuple(bare[each] for each in spec.arrays_of(role, by_name, self.rank, self.size))
                for role in (Role.INPUT, Role.OUTPUT)
            )
            checks = _Checks(tensors, inputs, outputs)
        prepared = compiled, bound, request, checks
        if request.trace is None and all(each.count for each in values):
            pointed = [(each.address, each.nbytes, each.writable) for each in values] if is_pointers else []
            session.calls.add(method.name, arrays, given, keywords, prepared, pointed)
        return prepared, values

    def _choose(self, specs: Sequence[CollectiveSpec], key: str | None, stream: Any = None) -> CallChoice:
        """Choose how the ranks make a call; ``specs`` has one spec for each codec that the call may use."""
        for spec in specs:
            check_key(spec.codec, key)
        return self._chooser.choose(specs, self.nodes, stream)


_GATHER_ENCODED = _ALL_GATHER.variant(EncodedAllGatherSpec, "tensor_scale", "decodes")
_EXCHANGE_ENCODED = _ALL_TO_ALL.variant(EncodedAllToAllSpec, "tensor_scale", "decodes")


def _of_encoded(
    x: Any, out: Any, own: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
    """The arrays, own arguments and options of a call that sends an Encoded."""
    if not isinstance(x, Encoded):
        raise ArgumentError("out is an Encoded, and x is not; encode x first, or pass an array as out")
    x.check_output(out)
    if "codec" in options:
        raise ArgumentError(f"codec={options['codec']!r} is not possible: x is {x.format} already; leave codec out")
    decodes = not isinstance(out, Encoded)
    if not decodes and options.get("nonfinite", "propagate") != "propagate":
        raise ArgumentError('nonfinite="error" needs decoded values: pass an array as out, or leave nonfinite out')
    arrays = (x.codes, x.scales, out) if decodes else (x.codes, x.scales, out.codes, out.scales)
    return arrays, (*own, x.tensor_scale, decodes), {**options, "codec": x.codec}


def _request(how: CallOptions) -> Request:
    """Check the options of a call, and make its request of them."""
    nonfinite, trace = how["nonfinite"], how["trace"]
    if nonfinite not in ("propagate", "error"):
        raise ArgumentError(f'nonfinite={nonfinite!r} is not "propagate" or "error"')
    check_trace(trace)
    timeout = None if how["timeout"] is None else timeout_of(how["timeout"])
    waits = Progress.CALLER if nonfinite == "propagate" else Progress.SYNCHRONOUS
    progress = _NOW if how["async_op"] else waits
    return Request(progress, timeout, how["key"], None, how["stream"], trace, nonfinite)
