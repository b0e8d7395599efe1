"""The handle of compress(): the communication hook of a DistributedDataParallel model, and its state.

DDP collects gradients in buckets, and calls the hook with each bucket when its gradients are complete. The parameters
of a bucket change after the first step, and again after a resume. Results must not depend on that, so the handle
forms its own groups of parameters (qccl.torch.groups), and reduces each by one call as soon as the buckets have
brought all its gradients. The calls work in place in DDP's buckets.

The groups start in a fixed order, whenever they become complete. So every rank makes the same calls in the
same order, and a call's number, on which random codecs depend, follows from the step and the group.

Gradients that are sent as factors (qccl.torch.low_rank) take two calls; the second needs the result of the first. All
second calls follow the first call of the last group, in the order of the groups. This order is also the same on all
ranks, and no hook waits before the backward pass has computed its last gradient.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from textwrap import shorten
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from qccl.base.errors import ArgumentError, MismatchError, QcclError
from qccl.base.removed import Gone
from qccl.codecs import NoCodec
from qccl.communicator.communicator import Communicator
from qccl.communicator.state import lr_of
from qccl.torch.backward import BackwardPass, Bucket, ExactWork, gradients_of
from qccl.torch.groups import ParameterGroup, table
from qccl.torch.low_rank import LowRank
from qccl.torch.scaling import LossScaling
from qccl.torch.state import FullState, IncompatibleKeys, from_saved, to_full, to_saved, what_fits, without_choice

if TYPE_CHECKING:
    from qccl.base.trace import TraceEvent

__all__ = ["Compression", "in_use"]

#: the communicators of open handles; two handles cannot share one, because their keys would be equal
in_use: weakref.WeakSet[Communicator] = weakref.WeakSet()


class Compression:
    """The reduction of one model's gradients; compress() returns it. As a context manager it closes itself.

    Attributes:
        lr: the learning rate of the step, for codecs with state if it changes from step to step (see
            :doc:`/guide/state`); set it before each backward(), or never (None). A step with 0, for example at the
            begin of a warm-up, leaves the residuals unchanged.
        step: the number of backward passes so far that reduced gradients.
        trace: the list of events, or None.
    """

    statistics = Gone("qccl.torch.Compression")

    def __init__(
        self,
        process_group: Any,
        groups: Sequence[ParameterGroup],
        frozen: Mapping[str, Any],
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
        self._frozen = frozen  # the parameters that DDP does not reduce, by name
        self._warmup_steps, self._timeout = warmup_steps, timeout
        self._adopt(groups)
        self._low_rank = {i: LowRank(group, comm, timeout, trace) for i, group in enumerate(groups) if group.rank}
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._lock = threading.Lock()  # guards the buckets, which the threads that end calls complete
        self._closed = False
        self._failure: Exception | None = None  # a call's error; other calls of its step may have ended well

    def _adopt(self, groups: Sequence[ParameterGroup]) -> None:
        """Reduce by these groups from the next pass on."""
        self._groups = groups
        self._places = {
            parameter: (number, i)
            for number, group in enumerate(groups)
            for i, parameter in enumerate(group.parameters)
        }
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
        """Make a line for each group: codec, element type, elements, bytes before and after encoding, parameters.

        Among n ranks each sends 2 (n-1)/n times the encoded bytes, or a little more for small groups.
        """
        return table(self._groups)

    def close(self) -> None:
        """Collective: close the handle. A later backward() raises ArgumentError: DDP keeps its hook. Idempotent."""
        self._closed = True
        in_use.discard(self._comm)
        if self._is_own:
            self._comm.close()

    def scale_with(self, scaler: Any) -> None:
        """Follow a GradScaler, which multiplies the gradients by a factor that changes.

        Each backward pass reads ``scaler.get_scale()``, and residuals are converted from the factor of their step to
        the factor of the next step. The scaler skips a pass whose gradients are not all finite. Such a pass must
        change no residual, so the residuals are copied in each step. Call scale_with() once, on all ranks, before the
        first backward pass. The scaler must not change its factor between a backward() and the ``scaler.step()`` that
        uses its gradients.

        Raises ArgumentError for an object without get_scale(), and for codecs with momentum, which would keep the
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
        """Copy this rank's state between two steps, for ``torch.save``; ``torch.load`` reads it with its defaults.

        "residuals" and "momenta" have float32 tensors by parameter name, in the parameters' shapes; unused ones are
        zeros. With low_rank, "factors" has the factors with which the next step begins. Warm-up and random codecs
        depend on the counters "step" and "calls".
        """
        self._check_between_steps("state_dict()")
        return to_saved(self._comm, self._groups, self.step)

    @property
    def full(self) -> FullState:
        """An object whose state_dict() is full_state_dict(), for frameworks that save one state for all ranks."""
        return FullState(self)

    def full_state_dict(self) -> dict[str, Any]:
        """Collective: gather the state of all ranks between two steps, the same on each, for any number of ranks.

        Its residuals are the difference between exact and delivered results so far: per element, the mean of the ranks'
        own errors plus the error of the sum. A group of any size that loads them delivers them; "momenta" are the means
        over the ranks. A run that continues from it has lost nothing, but only state_dict() of each rank continues with
        the same bits.
        """
        self._check_between_steps("full_state_dict()")

        def add_ranks(values: torch.Tensor) -> None:
            dist.all_reduce(values, group=self._process_group)

        return to_full(self._comm, self._groups, self.step, add_ranks)

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], strict: bool = True
    ) -> IncompatibleKeys:
        """Restore a state; every rank must call it.

        - ``state_dict()`` of the same rank in a group of the same size: training continues with the same bits.
        - ``full_state_dict()``, or a list of the ``state_dict()`` of all ranks, of a group of any size: this group
          delivers the values of their residuals, in the mean over the ranks; momenta become their mean. On one rank
          nothing is encoded, and residuals are dropped.

        With ``strict=False`` a full_state_dict() may be of other parameters or codecs, for example because parameters
        were frozen, unfrozen or replaced during training: parameters with the same name, shape, strides, element type
        and codec get their state, and others begin with zeros.

        Returns ``missing_keys`` and ``unexpected_keys``, as torch.nn.Module.load_state_dict() does: the names of the
        parameters without a state that fits, and of the states that do not fit. Both are empty unless ``strict`` is
        false.

        Raises ArgumentError for a state of other parameters or codecs, or without residuals after the first step, and
        then changes nothing.
        """
        self._settle()
        state, hint = without_choice(state)
        incompatible = IncompatibleKeys([], [])
        if not strict:
            state, incompatible = what_fits(self._groups, state)
        hint += ", or load what fits of a full_state_dict() by load_state_dict(state, strict=False)"
        self.step = from_saved(self._comm, self._groups, state, hint)
        self._adopt(self._groups)
        return incompatible

    def _check_between_steps(self, what: str) -> None:
        if self._failure is not None:
            raise self._failure
        if self._pass.is_under_way:
            raise ArgumentError(f"{what} is for the time between steps, and the last backward pass did not end")
        self._settle()

    def _settle(self) -> None:
        """Undo the changes to the residuals by a pass that the scaler skips."""
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
                "leave mpi4py.rc.thread_level at its default, or leave out comm"
            )

    def _check_alike(self, codec: str) -> None:
        """Collective: raise MismatchError on all ranks unless they reduce the same parameters in the same way.

        ``codec``: a text for the codec that the program asks for.
        """
        lines = [f"warmup_steps={self._warmup_steps}", codec]
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
        """Start the groups that this bucket completes (the hook). Returns the future of the bucket's buffer."""
        if self._closed:
            raise ArgumentError("the handle that compress() returned is closed; wrap the model in DDP again")
        if not self._pass.is_under_way:
            self._begin_pass()
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

    def _begin_pass(self) -> None:
        """Begin a pass: its first bucket has arrived, and all calls of the previous pass have ended."""
        self._warn_of_unfrozen()
        lr = None if self.lr is None else lr_of(self.lr)  # a schedule may give an array
        self._pass.lr = lr if self._scaled is None else self._scaled.begin(lr)

    def _warn_of_unfrozen(self) -> None:
        found = [name for name, p in self._frozen.items() if p.requires_grad]
        if not found:
            return
        self._frozen = {name: p for name, p in self._frozen.items() if not p.requires_grad}  # warn once of each
        warnings.warn(
            f"{', '.join(found)} needed no gradients when the model was wrapped in DDP, so DDP does not average their "
            f"gradients, and the ranks' parameters drift apart; save full_state_dict(), close() this handle, wrap the "
            f"model in DDP again, call compress() on it, and load_state_dict(saved, strict=False)",
            stacklevel=2,
        )

    @property
    def _is_exact(self) -> bool:
        """Whether this step sends all values unencoded."""
        return self.step < self._warmup_steps

    def _start(self, number: int) -> None:
        """Start the reduction of a group. Buckets that wait for the group are completed when it ends."""
        begun = self._pass
        group, gradients = self._groups[number], begun.gradients[number]
        if group.rank and not self._is_exact:
            if self._scaled is not None:
                self._scaled.keep(self._comm, group.key)
            self._low_rank[number].begin(gradients, begun.lr)
            begun.by_factors.append(number)
            return
        if self._stream is None:
            work = self._launch(group, gradients)
            work.add_done_callback(lambda ended: self._ended(begun, number, ended.exception()))
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):  # the backward pass continues on the current one
            self._launch(group, gradients).wait()
            self._ended(begun, number, None)

    def _end_factors(self, ended: BackwardPass) -> None:
        """Make the second calls of the groups that travel by factors, after all groups have started, and wait."""
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
            self._ended(ended, number, error)

    def _launch(self, group: ParameterGroup, gradients: list[Any]) -> Any:
        """Start a call. Returns its Work."""
        if group.codec is None:
            return ExactWork(gradients, self._process_group)
        codec = NoCodec() if self._is_exact else group.codec
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

    def _ended(self, begun: BackwardPass, number: int, error: Exception | None) -> None:
        """Note that a group's call has ended on the host, or is ordered before the current stream."""
        if self._scaled is not None and error is None:
            self._scaled.look_at(begun.gradients[number])
        with self._lock:
            self._failure = self._failure or error
            complete = [bucket for bucket in begun.buckets[number] if bucket.group_ended(error)]
        for bucket in complete:
            bucket.complete()
