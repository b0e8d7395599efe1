"""compress(): a communication hook of DistributedDataParallel that reduces gradients with qccl.

DDP collects gradients in buckets, and calls the hook with each as soon as its gradients are complete. Which parameters
share a bucket changes after the first step, and again after a resume. Results must not depend on that, so the handle
has groups of parameters of its own (qccl.torch.groups), which never change, and reduces each by one call as soon as the
buckets have brought all its gradients. The calls work in place in DDP's buckets.

The groups start in their own order, whatever order they become complete in: so every rank makes the same calls in the
same order, and a call's number, which random codecs depend on, follows from the step and the group.

Gradients that travel by factors (qccl.torch.low_rank) take two calls, of which the second needs the result of the
first. All second calls follow the first call of the last group, in the order of the groups: that, too, is the same on
all ranks, and no hook waits before the backward pass has computed its last gradient.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from textwrap import shorten
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from qccl.arguments import CodecLike, count_of, timeout_of
from qccl.codecs import NoCodec
from qccl.communicator import Communicator
from qccl.errors import ArgumentError, MismatchError, QcclError
from qccl.torch.backward import BackwardPass, Bucket, ExactWork, gradients_of
from qccl.torch.groups import ParameterGroup, Policy, form_groups, rank_within, table
from qccl.torch.low_rank import LowRank
from qccl.torch.scaling import LossScaling
from qccl.torch.state import FullState, from_saved, to_full, to_saved

if TYPE_CHECKING:
    from qccl.trace import TraceEvent

__all__ = ["Compression", "compress"]

#: the default of torch.distributed: a rank may evaluate or save for a while before its next step
_TIMEOUT_SECONDS = 1800.0
#: the communicators of open handles: the state of two would have the same keys
_in_use: weakref.WeakSet[Communicator] = weakref.WeakSet()


def compress(
    ddp_model: Any,
    codec: CodecLike = "minmax8",
    *,
    codecs: Mapping[str, CodecLike] | None = None,
    exclude: Sequence[str] = (),
    min_elements: int = 4096,
    low_rank: int = 0,
    step_bytes: int | None = None,
    warmup_steps: int = 0,
    group_bytes: int = 4 << 20,
    comm: Communicator | None = None,
    timeout: float | None = None,
    trace: list[TraceEvent] | None = None,
) -> Compression:
    """Collective: reduce the gradients of a DistributedDataParallel model with encoded traffic, during backward().

    Call it once, on all ranks alike, after the model was wrapped and before its first backward(). The gradients that
    backward() leaves are the mean over the ranks, the same bits on all of them. They depend neither on DDP's buckets
    nor on timing.

    Args:
        ddp_model: a ``torch.nn.parallel.DistributedDataParallel``. A larger model should have its ``bucket_cap_mb`` at
            ``group_bytes`` or less: DDP gives gradients away one bucket at a time.
        codec: for parameters with two or more dimensions, such as "minmax8" or "minmax4+ef". The others (biases,
            norms) are sent as they are. Parameters of other element types than float32, float16 and bfloat16 are
            reduced exactly by the process group itself.
        codecs: codecs by patterns of parameter names (fnmatch), such as ``{"embedding.*": "topk:k=0.01+ef"}``, whatever
            a parameter's size; the first pattern that matches counts. "none" sends values as they are.
        exclude: patterns of the names of parameters that are sent as they are.
        min_elements: parameters with fewer elements are sent as they are, unless ``codecs`` names them.
        low_rank: the rank r of PowerSGD's factors (Vogels, Karimireddy and Jaggi 2019, arXiv 1905.13727), which travel
            in place of the gradients of large matrices, encoded by ``codec``: r (n + m) float32 numbers for n x m, if
            that is less than half of n m. n is the outermost dimension in memory, and m the product of the others.
            Smaller matrices, and those that ``codecs`` names, travel as usual. What the factors lack of the gradients
            is kept as a residual, with any codec. On the CPU. 0: all gradients travel as usual.
        step_bytes: take the largest rank with which the encoded gradients of a step have at most so many bytes (the
            last row of table()), in place of ``low_rank``.
        warmup_steps: so many first steps send all values as they are.
        group_bytes: the most bytes of gradients that one call reduces; the first one at most 1 MiB, so that it starts
            early. Smaller groups start earlier; each costs a call.
        comm: a communicator of the same ranks, for this handle alone; the caller closes it. None: a new one, by
            Communicator.from_torch() of the model's process group.
        timeout: seconds until a reduction fails that does not end, for example because a rank does not come to its
            backward pass. None: that of ``comm``, or half an hour.
        trace: a list that gets the events of all calls, as in Communicator.quantized_allreduce.

    Returns:
        The handle. Keep it to save and restore the state; without ``comm`` it closes its communicator.

    Raises:
        ArgumentError: the model or another argument is not possible.
        MismatchError: the ranks have other arguments, or other parameters that need gradients.

    A failure in a hook, or of a call, is raised by backward(). Other reductions than DDP's need another hook, so the
    model can have only this one.
    """
    parameters = _parameters_of(ddp_model)
    if isinstance(exclude, str):
        raise ArgumentError(f"exclude must be a list of patterns, such as [{exclude!r}], not a string")
    if codecs is not None and not isinstance(codecs, Mapping):
        raise ArgumentError(
            f"codecs must be a dict of codecs by patterns of names, such as {{'embedding.*': 'topk:k=0.01+ef'}}, not "
            f"{codecs!r}"
        )
    if count_of(group_bytes, "group_bytes") == 0:
        raise ArgumentError("group_bytes must be a positive number, the most bytes that one call reduces, not 0")
    policy = Policy(codec, codecs or {}, tuple(exclude), count_of(min_elements, "min_elements"))
    policy.check(parameters)
    policy = replace(policy, low_rank=_rank_of(parameters, policy, low_rank, step_bytes))
    warmup_steps = count_of(warmup_steps, "warmup_steps")
    if warmup_steps and "momentum" in policy.state_names:
        raise ArgumentError(
            "warmup_steps and +nesterov exclude each other, because the first steps would have no momentum; leave "
            "one of them out"
        )
    groups = form_groups(parameters.items(), policy, group_bytes)
    timeout = None if timeout is None else timeout_of(timeout)
    is_own = comm is None
    if comm in _in_use:
        raise ArgumentError(
            "comm belongs to another handle of compress(), whose state has the same keys; close() that one, pass "
            "another communicator, or leave comm out"
        )
    if comm is None:
        comm = Communicator.from_torch(ddp_model.process_group, timeout or _TIMEOUT_SECONDS)
    handle = Compression(ddp_model.process_group, groups, comm, is_own, warmup_steps, timeout, trace)
    _in_use.add(comm)
    try:
        handle._check_ranks()
        handle._check_alike()
        ddp_model.register_comm_hook(None, lambda state, bucket: handle._reduce(bucket))
    except BaseException as error:
        handle.close()
        if isinstance(error, RuntimeError):
            raise ArgumentError(f"DDP refuses the hook of compress(): {error}") from error
        raise
    return handle


def _rank_of(parameters: Mapping[str, Any], policy: Policy, low_rank: int, step_bytes: int | None) -> int:
    """The rank of the factors; 0 without. Raises ArgumentError if factors are not possible."""
    rank = count_of(low_rank, "low_rank")
    if not rank and step_bytes is None:
        return 0
    if "momentum" in policy.state_names:
        raise ArgumentError(
            "low_rank and +nesterov exclude each other, because factors have no momentum; use the optimiser's"
        )
    if any(p.device.type != "cpu" for p in parameters.values()):
        raise ArgumentError("low_rank is for models on the CPU so far; PyTorch has powerSGD_hook for GPUs")
    if step_bytes is None:
        return rank
    if rank:
        raise ArgumentError(f"step_bytes chooses the rank, and low_rank={low_rank} is one; leave one of them out")
    return rank_within(parameters.items(), policy, count_of(step_bytes, "step_bytes"))


class Compression:
    """What compress() returns: the reduction of one model's gradients. A context manager that closes it.

    Attributes:
        lr: the learning rate of the step, for codecs with state if it changes from step to step (see
            :doc:`/guide/state`); set it before each backward(), or never (None).
        step: backward passes so far that reduced gradients.
        trace: the list of events, or None.
    """

    def __init__(
        self,
        process_group: Any,
        groups: Sequence[ParameterGroup],
        comm: Communicator,
        is_own: bool,
        warmup_steps: int,
        timeout: float | None,
        trace: list[TraceEvent] | None,
    ) -> None:
        self.lr: float | None = None
        self.step = 0
        self.trace = trace
        self._scaled: LossScaling | None = None
        self._process_group, self._comm, self._is_own = process_group, comm, is_own
        self._groups, self._warmup_steps, self._timeout = groups, warmup_steps, timeout
        self._places = {
            parameter: (number, i)
            for number, group in enumerate(groups)
            for i, parameter in enumerate(group.parameters)
        }
        self._low_rank = {i: LowRank(group, comm, timeout, trace) for i, group in enumerate(groups) if group.rank}
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._lock = threading.Lock()  # of the buckets: the threads that end calls complete them
        self._closed = False
        self._failure: Exception | None = None  # of a call; others of its step may have ended well
        self._pass = BackwardPass(groups)

    def __enter__(self) -> Compression:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None and self._is_own:
            self._comm.abort(f"{type(error).__name__}: {error}")
        self.close()

    def __repr__(self) -> str:
        return f"<Compression of {len(self._places)} parameters in {len(self._groups)} groups, {self._comm!r}>"

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """A line for each group: codec, element type, elements, bytes before and after encoding, and parameters.

        Among n ranks each sends 2 (n-1)/n times the encoded bytes, or a little more for small groups.
        """
        return table(self._groups)

    def close(self) -> None:
        """Collective: end. A later backward() raises ArgumentError, because DDP keeps its hook. Idempotent."""
        self._closed = True
        _in_use.discard(self._comm)
        if self._is_own:
            self._comm.close()

    def scale_with(self, scaler: Any) -> None:
        """Follow a GradScaler, which multiplies the gradients by a factor that changes.

        Each backward pass reads ``scaler.get_scale()``, and residuals are converted from the factor of their step to
        that of the next. A pass whose gradients are not all finite, which the scaler skips, changes no residual. For
        that the residuals are copied in each step. Call it once, on all ranks, before the first backward pass. The
        scaler must not change its factor between a backward() and the ``scaler.step()`` that uses its gradients.

        Raises ArgumentError for something without get_scale(), and for codecs with momentum, which would keep the
        old factor.
        """
        if not callable(getattr(scaler, "get_scale", None)):
            raise ArgumentError(f"scale_with() takes a torch.amp.GradScaler, not {type(scaler).__name__}")
        if any("momentum" in group.codec.state_names for group in self._groups if group.codec is not None):
            raise ArgumentError(
                "+nesterov keeps a momentum of scaled gradients, which does not follow the scaler; use the optimiser's "
                "momentum instead"
            )
        self._scaled = LossScaling(scaler)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state between two steps, for ``torch.save``; ``torch.load`` reads it with its defaults.

        "residuals" and "momenta" have float32 tensors by parameter name, in the parameters' shapes; those that no step
        has used yet are zeros. With low_rank, "factors" has those with which the next step begins. "step" and "calls"
        are counters, on which warm-up and random codecs depend.
        """
        self._check_between_steps("state_dict()")
        return to_saved(self._comm, self._groups, self.step)

    @property
    def full(self) -> FullState:
        """An object whose state_dict() is full_state_dict(), for frameworks that save one state for all ranks."""
        return FullState(self)

    def full_state_dict(self) -> dict[str, Any]:
        """Collective: the state of all ranks between two steps, the same on each, which fits any number of ranks.

        Its residuals are what the results lack so far: per element, the mean of the ranks' own errors plus the error
        of the sum. A group that loads it delivers that, whatever its size; "momenta" are the means over the ranks. A
        run that goes on from it has not lost anything, but only state_dict() of each rank continues with the same bits.
        """
        self._check_between_steps("full_state_dict()")

        def add_ranks(values: torch.Tensor) -> None:
            dist.all_reduce(values, group=self._process_group)

        return to_full(self._comm, self._groups, self.step, add_ranks)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Restore a state; every rank must call it.

        - ``state_dict()`` of the rank of this number in a group of this size: training goes on with the same bits.
        - ``full_state_dict()``, or a list of the ``state_dict()`` of all ranks, of a group of any size: what their
          residuals have not delivered yet is delivered by this group, in the mean over the ranks; momenta become their
          mean. On one rank nothing is encoded, and residuals are dropped.

        Raises ArgumentError for a state of other parameters or codecs, or without residuals after the first step, and
        then changes nothing.
        """
        self._settle()
        self.step = from_saved(self._comm, self._groups, state)
        self._pass = BackwardPass(self._groups)

    def _check_between_steps(self, what: str) -> None:
        if self._failure is not None:
            raise self._failure
        if self._pass.is_under_way:
            raise ArgumentError(f"{what} is for the time between steps, and the last backward pass did not end")
        self._settle()

    def _settle(self) -> None:
        """Undo what a pass that the scaler skips has done to the residuals."""
        if self._scaled is not None:
            self._scaled.settle()

    # -- the hook ----------------------------------------------------------------------------------------------------

    def _check_ranks(self) -> None:
        """Raise ArgumentError unless the communicator fits the model."""
        comm, group = self._comm, self._process_group
        mine, theirs = (comm.rank, comm.size), (dist.get_rank(group), dist.get_world_size(group))
        if mine != theirs:
            raise ArgumentError(
                f"comm is rank {mine[0]} of {mine[1]}, but in the model's process group this is rank {theirs[0]} of "
                f"{theirs[1]}"
            )
        if (comm.backend == "cuda") != (self._device.type == "cuda"):
            raise ArgumentError(
                f"the model is on {self._device}, and the communicator has the backend {comm.backend}; pass a comm of "
                f"the model's device"
            )
        if not comm.transport.is_threaded:
            raise ArgumentError(
                "the hook never waits, so it needs a progress thread, which MPI allows with MPI_THREAD_MULTIPLE only; "
                "leave mpi4py.rc.thread_level as it is, or comm out"
            )

    def _check_alike(self) -> None:
        """Collective: raise MismatchError on all ranks unless they reduce the same parameters in the same way."""
        lines = [f"warmup_steps={self._warmup_steps}"]
        lines += [f"{group.codec_spec} for {', '.join(group.names)} ({group.dtype})" for group in self._groups]
        ranks = [item.decode().split("\n") for item in self._comm.allgather("\n".join(lines).encode())]
        for rank, other in enumerate(ranks):
            if other != ranks[0]:
                pairs = zip_longest(ranks[0], other, fillvalue="nothing more")
                ours, theirs = next((a, b) for a, b in pairs if a != b)
                raise MismatchError(
                    f"all ranks must call compress() with the same arguments, for models with the same parameters that "
                    f"need gradients; rank 0 has {shorten(ours, 300)}, and rank {rank} has {shorten(theirs, 300)}"
                )

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._groups[0].parameters[0].device
        return device

    def _reduce(self, bucket: Any) -> Any:
        """The hook: start the groups that are complete with this bucket; returns the future of its buffer."""
        if self._closed:
            raise ArgumentError("the handle that compress() returned is closed; wrap the model in DDP again")
        if not self._pass.is_under_way:
            self._pass.lr = self.lr if self._scaled is None else self._scaled.begin(self.lr)
        arrived = Bucket(bucket.buffer())
        parameters = bucket.parameters()
        complete = self._pass.add(arrived, parameters, gradients_of(bucket.buffer(), parameters), self._places)
        for number in complete:
            self._start(number)
        if bucket.is_last():
            self._pass.check_complete()
            ended, self._pass = self._pass, BackwardPass(self._groups)
            self._end_factors(ended)
            self.step += 1
        return arrived.future()

    def _start(self, number: int) -> None:
        """Start the reduction of a group. The buckets that wait for it get their futures when it ends."""
        group, gradients, buckets = self._groups[number], self._pass.gradients[number], self._pass.buckets[number]
        if group.rank and self.step >= self._warmup_steps:
            if self._scaled is not None:
                self._scaled.keep(self._comm, group.key)
            self._low_rank[number].begin(gradients, self._pass.lr)
            self._pass.by_factors.append(number)
            return
        if self._stream is None:
            work = self._launch(group, gradients)
            work.add_done_callback(lambda ended: self._ended(gradients, buckets, ended.exception()))
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):  # the backward pass continues on the current one
            self._launch(group, gradients).wait()
            self._ended(gradients, buckets, None)

    def _end_factors(self, ended: BackwardPass) -> None:
        """All groups have started: make the second calls of those that travel by factors, and wait for the results."""
        error: Exception | None = None
        try:
            for number in ended.by_factors:
                self._low_rank[number].exchange()
        except QcclError as found:
            error = found
        for number in ended.by_factors:
            try:
                if error is None:
                    self._low_rank[number].finish()
            except QcclError as found:
                error = found
            self._ended(ended.gradients[number], ended.buckets[number], error)

    def _launch(self, group: ParameterGroup, gradients: list[Any]) -> Any:
        """Start a call; returns its Work."""
        if group.codec is None:
            return ExactWork(gradients, self._process_group)
        codec = NoCodec() if self.step < self._warmup_steps else group.codec
        keeps = bool(codec.state_names)
        if keeps and self._scaled is not None:
            self._scaled.keep(self._comm, group.key)
        return self._comm.quantized_allreduce_coalesced(
            gradients,
            codec=codec,
            op="avg",
            key=group.key if keeps else None,
            lr=self._pass.lr if keeps else None,
            timeout=self._timeout,
            trace=self.trace,
            async_op=True,
        )

    def _ended(self, gradients: Sequence[Any], buckets: Sequence[Bucket], error: Exception | None) -> None:
        """A group's call has ended on the host, or is ordered before the current stream."""
        if self._scaled is not None and error is None:
            self._scaled.look_at(gradients)
        with self._lock:
            self._failure = self._failure or error
            complete = [bucket for bucket in buckets if bucket.group_ended(error)]
        for bucket in complete:
            bucket.complete()


def _parameters_of(model: Any) -> dict[str, Any]:
    """The parameters that DDP reduces, by name. Raises ArgumentError for a model that cannot be compressed."""
    if not isinstance(model, DistributedDataParallel):
        raise ArgumentError(
            f"compress() takes a model wrapped in torch.nn.parallel.DistributedDataParallel, not "
            f"{type(model).__name__}; wrap it first: compress(DistributedDataParallel(module))"
        )
    if model.mixed_precision is not None:
        raise ArgumentError(
            "DDP's mixed_precision= has a communication hook of its own; use torch.autocast, or a model in bfloat16"
        )
    if model._comm_hooks:
        hook = getattr(model._comm_hooks[0][0], "__qualname__", "?")
        raise ArgumentError(
            f"the model has a communication hook already ({hook}), for example of an earlier compress(), of torchft or "
            f"of Accelerate's comm_hook, and DDP takes only one; wrap it in DDP again, without that hook"
        )
    sparse = [
        f"{name}.weight".removeprefix(".")
        for name, module in model.module.named_modules()
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
    ]
    # DDP compares the names of ignored parameters with a dot in front of those of the outermost module
    ignored = {name for name in model.parameters_to_ignore if "." in name}
    named = {name: p for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored}
    if any(name in named for name in sparse):
        raise ArgumentError(
            f"{', '.join(sparse)} has sparse gradients, which have no fixed size; make the module with sparse=False"
        )
    if len({p.device for p in named.values()}) > 1:
        raise ArgumentError("the model's parameters are on several devices; compress() needs them on one")
    _check_unchanged(model, named.values())
    return named


def _check_unchanged(model: Any, parameters: Collection[Any]) -> None:
    """Raise ArgumentError unless DDP reduces these parameters: it keeps the list that it made in its constructor."""
    made = model._get_ddp_logging_data()
    theirs = made["num_parameter_tensors"], made["total_parameter_size_bytes"]
    ours = len(parameters), sum(p.numel() * p.element_size() for p in parameters)
    if ours != theirs:
        raise ArgumentError(
            f"the model's parameters have changed since it was wrapped in DDP: DDP reduces {theirs[0]} of "
            f"{theirs[1]} bytes, and {ours[0]} of {ours[1]} bytes need gradients now; freeze, unfreeze or replace "
            f"parameters first, then wrap the model, then call compress()"
        )
