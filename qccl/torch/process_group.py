"""The backend "qccl" of torch.distributed: a process group that compresses the calls that usually carry gradients.

It contains the backends that PyTorch would use without it (gloo for host memory, NCCL for GPUs), and every call goes to
them unless ProcessGroupQccl._codec_of() names a codec. The rule depends only on a call's options, sizes and element
types, so all ranks decide alike. The first compressed call connects qccl's communicator, because many groups (for
example of a DeviceMesh) never make a compressed call.

PyTorch calls a group from Python, and from C++ (DDP, functional collectives). Calls from C++ reach only the methods
that torch's PyProcessGroup.hpp overrides; only torch's Python code calls the others. An overridden method must not call
the same method of the base class: that call would hold Python's lock inside gloo, and could wait forever for a thread
of gloo that needs the lock. So a second group, which has no subclass, runs the exact calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from qccl.base.errors import ArgumentError, MismatchError
from qccl.base.removed import check_variables
from qccl.codecs import NoCodec
from qccl.collectives.arguments import CodecLike, checked_codec, lossiest
from qccl.communicator.communicator import Communicator
from qccl.communicator.dynamo import not_traced
from qccl.communicator.work import Work
from qccl.engine.cuda.nccl import agreed_id
from qccl.meeting.meetings import of_store
from qccl.torch.groups import ENCODED
from qccl.torch.options import Options
from qccl.transports.connect import connect
from qccl.transports.gloo import keep_alive

__all__ = ["ProcessGroupQccl"]

#: most bytes of the text of options that ranks compare
_MOST_TEXT = 1024
#: how long a destroyed group waits for ranks that have not destroyed theirs
_LEAVE_SECONDS = 60.0


def _exact(name: str) -> Callable[..., Any]:
    """Make a method that calls the plain group."""

    def method(self: ProcessGroupQccl, *args: Any, **options: Any) -> Any:
        return getattr(self._plain, name)(*args, **options)

    return method


@not_traced
class ProcessGroupQccl(dist.ProcessGroup):  # type: ignore[misc]  # a class of torch, which mypy does not read
    """A process group whose gradients are compressed; init_process_group("qccl") makes it.

    Attributes:
        compression: its Options.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, options: Options, name: str = "") -> None:
        """Collective. Raises MismatchError if the ranks have different options."""
        super().__init__(rank, size)  # a subclass in Python cannot pass the store
        self.compression = options
        self._sum_codec, self._gather_codec = map(_codec_or_none, (options.codec, options.all_gather_codec))
        self._store = store
        self._comms: dict[str, Communicator] = {}
        self._own_devices: frozenset[str] | None = None
        self._plain = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout=timeout)
        self._contain("cpu", dist.ProcessGroup.BackendType.GLOO, gloo)
        if torch.cuda.is_available() and dist.is_nccl_available():
            how = dist.ProcessGroupNCCL.Options()
            how._timeout, how.group_name = timeout, name
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, how)
            self._contain("cuda", dist.ProcessGroup.BackendType.NCCL, nccl)
        self._check_options(gloo)

    def _contain(self, device: str, kind: Any, backend: Any) -> None:
        backend._set_sequence_number_for_group()
        for group in (self, self._plain):
            group._register_backend(torch.device(device), kind, backend)
            group._set_default_backend(kind)

    def getBackendName(self) -> str:
        """The name of the backend for init_process_group(): "qccl"."""
        return "qccl"

    def get_group_store(self) -> Any:
        """The store by which the ranks have met."""
        return self._store

    # -- collectives that may be compressed --------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None) -> Any:
        """Reduce each of ``tensors`` in place; a single tensor is compressed if the policy allows it.

        The mean of integers is their sum, divided. Returns a Work of torch.distributed.
        """
        tensors, opts = _as_list(tensors), _options_of(dist.AllreduceOptions, opts, op, timeout)
        codec = self._codec_of_sum(opts, tensors) if len(tensors) == 1 else None
        if codec is None and _is_mean_of_integers(tensors, opts):
            opts.reduceOp = dist.ReduceOp.SUM
            return self._then_divide(self._plain.allreduce(tensors, opts))
        if codec is None:
            return self._plain.allreduce(tensors, opts)
        xs, copies = _contiguous(tensors)
        work = self._comm(xs[0]).quantized_allreduce(xs[0], op=opts.reduceOp, **self._how(xs[0], codec, opts))
        return _Work([work], opts, tensors, copies)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Reduce all tensors in place, in one compressed call if the policy allows it for all of them."""
        opts = _options_of(dist.AllreduceCoalescedOptions, opts)
        codec = self._codec_of_sum(opts, tensors)
        if codec is None:
            return self._plain.allreduce_coalesced(tensors, opts)
        xs, copies = _contiguous(tensors)
        how = self._how(xs[0], codec, opts)
        work = self._comm(xs[0]).quantized_allreduce_coalesced(xs, op=opts.reduceOp, **how)
        return _Work([work], opts, tensors, copies)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> Any:
        """Reduce lists of parts; ``outputs`` receive this rank's part.

        A call with one list, whose parts are first joined, may be compressed.
        """
        opts = _options_of(dist.ReduceScatterOptions, opts, op, timeout)
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        codec = self._codec_of_sum(opts, inputs[0], outputs) if len(outputs) == len(inputs) == 1 else None
        if codec is None:
            return self._plain.reduce_scatter(outputs, inputs, opts)
        x = torch.cat([part.detach().reshape(-1) for part in inputs[0]])
        return self._reduce_scatter(outputs, [x], codec, opts, counts=[part.numel() for part in inputs[0]])

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """Reduce ``input``, which has all ranks' parts one after another; ``output`` receives this rank's part."""
        opts = _options_of(dist.ReduceScatterOptions, opts)
        codec = self._codec_of_sum(opts, [input], [output])
        if codec is None:
            return self._plain.reduce_scatter_single(output, input, opts)
        return self._reduce_scatter([output], [input], codec, opts)

    _reduce_scatter_base = reduce_scatter_single  # its name before PyTorch 2.13

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """The same for several pairs of tensors, compressed if the policy allows it for all of them."""
        opts = _options_of(dist.ReduceScatterOptions, opts)
        codec = self._codec_of_sum(opts, inputs, outputs)
        if codec is None:
            return self._plain.reduce_scatter_single_coalesced(outputs, inputs, opts)
        return self._reduce_scatter(outputs, inputs, codec, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Gather one tensor of each rank into a list of tensors.

        A call with one list, whose tensors are then copied from a joined one, may be compressed.
        """
        opts = _options_of(dist.distributed_c10d.AllgatherOptions, opts, None, timeout)
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        codec = self._codec_of(self._gather_codec, outputs[0], inputs) if len(outputs) == len(inputs) == 1 else None
        if codec is None:
            return self._plain.allgather(outputs, inputs, opts)
        counts = [part.numel() for part in outputs[0]]
        gathered = inputs[0].new_empty(sum(counts))
        parts = [part.view_as(to) for part, to in zip(gathered.split(counts), outputs[0], strict=True)]
        how = self._how(gathered, codec, opts)
        x = inputs[0].detach().contiguous()
        work = self._comm(x).quantized_all_gather(x, gathered, counts=counts, **how)
        return _Work([work], opts, outputs[0], list(zip(outputs[0], parts, strict=True)))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """Gather one tensor of each rank, one after another, into ``output``."""
        opts = _options_of(dist.distributed_c10d.AllgatherOptions, opts)
        codec = self._codec_of(self._gather_codec, [output], [input])
        if codec is None:
            return self._plain.all_gather_single(output, input, opts)
        return self._call_each("quantized_all_gather", [output], [input], codec, opts)

    _allgather_base = all_gather_single  # its name before PyTorch 2.13

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """The same for several pairs of tensors, compressed if the policy allows it for all of them."""
        opts = _options_of(dist.distributed_c10d.AllgatherOptions, opts)
        codec = self._codec_of(self._gather_codec, outputs, inputs)
        if codec is None:
            return self._plain.all_gather_single_coalesced(outputs, inputs, opts)
        return self._call_each("quantized_all_gather", outputs, inputs, codec, opts)

    # -- collectives that are exact ----------------------------------------------------------------------------------

    all_to_all_single = _exact("all_to_all_single")
    barrier = _exact("barrier")
    broadcast = _exact("broadcast")
    recv = _exact("recv")
    send = _exact("send")

    # -- the end -----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Close its communicators, waiting a short time for other ranks, and then the plain groups."""
        for comm in self._comms.values():
            comm.timeout = min(comm.timeout, _LEAVE_SECONDS)
            comm.close()
        super().shutdown()

    def abort(self) -> None:
        """Give up: other ranks raise an error in their current or next call."""
        for comm in self._comms.values():
            comm.abort("the process group was aborted")
        super().abort()

    # -- the choice of calls, and their codecs -----------------------------------------------------------------------

    def _codec_of_sum(
        self, opts: Any, large: Sequence[torch.Tensor], small: Sequence[torch.Tensor] = ()
    ) -> CodecLike | None:
        """The codec of a call that adds tensors over the ranks; None: the plain backend runs it."""
        is_sum = opts.reduceOp.op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        return self._codec_of(self._sum_codec, large, small) if is_sum else None

    def _codec_of(
        self, codec: CodecLike | None, large: Sequence[torch.Tensor], small: Sequence[torch.Tensor] = ()
    ) -> CodecLike | None:
        """``codec``, or None: the plain backend runs the call. ``large`` are the tensors whose bytes count."""
        tensors = [*large, *small]
        if codec is None or self.size() == 1 or not tensors:
            return None
        first = tensors[0]
        if first.dtype not in ENCODED or first.device.type not in self._devices():
            return None
        nbytes = sum(tensor.numel() for tensor in large) * first.element_size()
        if nbytes < max(1, self.compression.min_bytes) or not all(_is_like(tensor, first) for tensor in tensors):
            return None
        return codec

    def _devices(self) -> frozenset[str]:
        """The device types for which the program named this backend, for example by "cpu:qccl,cuda:nccl"."""
        if self._own_devices is None:
            pairs = (pair.split(":") for pair in str(dist.get_backend_config(self)).split(","))
            self._own_devices = frozenset(device for device, backend in pairs if backend == "qccl")
        return self._own_devices

    def _how(self, x: torch.Tensor, codec: CodecLike, opts: Any) -> dict[str, Any]:
        """The keywords of a call of the communicator."""
        return {"codec": codec, "async_op": opts.asyncOp, "timeout": self._timeout(x.device, opts)}

    def _timeout(self, device: torch.device, opts: Any) -> float:
        """The call's timeout, or else the group's, in seconds."""
        given = opts.timeout if opts.timeout > timedelta(0) else self._get_backend(device).options._timeout
        return float(given.total_seconds())

    def _comm(self, x: torch.Tensor) -> Communicator:
        """The communicator for a tensor. The first call for a type of device is collective, and connects the ranks."""
        kind = x.device.type
        if kind not in self._comms:
            self._comms[kind] = self._connect(x.device, self._get_backend(x.device).options._timeout.total_seconds())
        return self._comms[kind]

    def _connect(self, device: torch.device, timeout: float) -> Communicator:
        meeting = of_store(dist.PrefixStore(f"qccl/{device.type}", self._store), self.rank(), self.size())
        if device.type == "cpu":
            return Communicator._from_transport(connect(meeting, timeout), timeout)
        unique_id = agreed_id(meeting.rank, lambda note: meeting.gather(note, timeout))
        return Communicator(unique_id, meeting.rank, meeting.size, timeout=timeout, device=device.index)

    def _call_each(
        self,
        name: str,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        codec: CodecLike,
        opts: Any,
        **more: Any,
    ) -> _Work:
        """Call the communicator's method ``name`` for each pair of tensors."""
        targets, copies = _contiguous(outputs)
        method = getattr(self._comm(targets[0]), name)
        how = self._how(targets[0], codec, opts)
        pairs = zip(inputs, targets, strict=True)
        works = [method(x.detach().contiguous(), out, **more, **how) for x, out in pairs]
        return _Work(works, opts, outputs, copies)

    def _reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], codec: CodecLike, opts: Any, **counts: Any
    ) -> _Work:
        return self._call_each("quantized_reduce_scatter", outputs, inputs, codec, opts, op=opts.reduceOp, **counts)

    def _then_divide(self, work: Any) -> Any:
        """Make a Work that turns a sum of integers into their mean, rounded towards zero as by NCCL."""
        size = self.size()

        def divide(ended: torch.futures.Future[list[torch.Tensor]]) -> list[torch.Tensor]:
            return [tensor.div_(size, rounding_mode="trunc") for tensor in ended.value()]

        return torch._C._distributed_c10d._create_work_from_future(work.get_future().then(divide))

    def _check_options(self, gloo: Any) -> None:
        """Raise MismatchError if the ranks' options differ."""
        text = str(self.compression)
        own = torch.frombuffer(bytearray(text.encode()[:_MOST_TEXT].ljust(_MOST_TEXT)), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.size())]
        keep_alive(self, gloo.allgather([found], [own])).wait()
        for rank, other in enumerate(found):
            if not torch.equal(own, other):
                theirs = bytes(other.tolist()).decode(errors="replace").strip()
                raise MismatchError(
                    f'the ranks of a "qccl" process group must have the same options (pg_options, QCCL_CODEC, '
                    f"QCCL_MIN_BYTES), but rank {self.rank()} has {text} and rank {rank} has "
                    f"{theirs}"
                )


@not_traced
class _Work(dist.Work):  # type: ignore[misc]
    """A compressed call of a process group.

    ``copies`` are pairs of tensors: the second is copied to the first when the call has ended.
    """

    def __init__(
        self,
        works: Sequence[Any],
        opts: Any,
        outputs: Sequence[torch.Tensor],
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        super().__init__()
        self._works: Sequence[Work] = works if opts.asyncOp else ()
        self._outputs = list(outputs)
        self._copies = list(copies)
        self._lock = threading.Lock()
        if not self._works:
            self._finish()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when the outputs may be used; on CUDA make the current stream wait. Raises the call's error."""
        seconds = timeout.total_seconds() if timeout > timedelta(0) else None
        for work in self._works:
            work.wait(seconds)
        self._finish()
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call has ended or failed; if it succeeded, its outputs may be used, as after wait()."""
        if not all(work.is_completed() for work in self._works):
            return False
        if self.exception() is None:
            self._finish()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Make a future of the list of output tensors, or of the call's error."""
        if not self._works:
            done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            done.set_result(self._outputs)
            return done
        return torch.futures.collect_all([work.get_future() for work in self._works]).then(self._conclude)

    def _conclude(self, ended: torch.futures.Future[list[torch.futures.Future[Any]]]) -> list[torch.Tensor]:
        for future in ended.value():
            future.value()  # raises the call's error
        self._finish()
        return self._outputs

    def _finish(self) -> None:
        """Copy, once, the results that the call could not write in place."""
        with self._lock, torch.no_grad():
            for target, source in self._copies:
                target.copy_(source)
            self._copies.clear()


def _codec_or_none(given: CodecLike) -> CodecLike | None:
    """The codec of calls, which may be "auto"; None: calls are not compressed."""
    return None if lossiest(given) == NoCodec() else checked_codec(given)


def _contiguous(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Make tensors contiguous and without gradients. Returns them, and pairs of target and source to copy back."""
    made = [tensor.detach().contiguous() for tensor in tensors]
    copies = [(tensor, x) for tensor, x in zip(tensors, made, strict=True) if not tensor.is_contiguous()]
    return made, copies


def _is_like(tensor: torch.Tensor, first: torch.Tensor) -> bool:
    """Whether a tensor is ordinary and dense, with the element type and the device of ``first``."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return is_plain and tensor.dtype == first.dtype and tensor.device == first.device


def _is_mean_of_integers(tensors: Sequence[torch.Tensor], opts: Any) -> bool:
    """Whether the call is a mean of integers on the CPU, which gloo cannot compute."""
    is_integer = all(not (x.is_floating_point() or x.is_complex()) and x.device.type == "cpu" for x in tensors)
    return is_integer and opts.reduceOp.op == dist.ReduceOp.AVG


def _as_list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _options_of(kind: Any, given: Any, op: Any = None, timeout: timedelta | None = None) -> Any:
    """The options of a call: ``given``, or options made from its reduction and its timeout."""
    if isinstance(given, kind):
        return given
    options = kind()
    if isinstance(given, timedelta):
        given, timeout = None, given
    op = given if op is None else op
    if op is not None:
        options.reduceOp = op
    if timeout is not None:
        options.timeout = timeout
    return options


def _create(made_for: Any, options: Options | None) -> ProcessGroupQccl:
    """Make a group of the backend "qccl" for torch.distributed."""
    check_variables()
    if options is not None and not isinstance(options, Options):
        raise ArgumentError(f'pg_options of the backend "qccl" must be qccl.torch.Options(...), not {options!r}')
    return ProcessGroupQccl(
        *(made_for.store, made_for.group_rank, made_for.group_size, made_for.timeout),
        options or Options(),
        made_for.group_id,
    )


dist.Backend.register_backend("qccl", _create, extended_api=True, devices=["cpu", "cuda"])
