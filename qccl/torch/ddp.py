"""compress(): a communication hook of DistributedDataParallel that reduces gradients with qccl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qccl.base.errors import ArgumentError
from qccl.base.removed import without_removed
from qccl.collectives.arguments import CodecLike, auto_codec, count_of, lossiest, timeout_of
from qccl.communicator.communicator import Communicator
from qccl.torch.compression import Compression, in_use
from qccl.torch.groups import Policy, faster, form_groups
from qccl.torch.hook import HookState, reduce_bucket
from qccl.torch.models import frozen_parameters, parameters_of, uncompiled
from qccl.training.grouping import GROUP_NBYTES

if TYPE_CHECKING:
    from qccl.base.trace import TraceEvent

__all__ = ["compress"]

#: torch.distributed's default: a rank may evaluate or save for a while before its next step
_TIMEOUT_SECONDS = 1800.0


@without_removed("qccl.torch.compress")
def compress(
    ddp_model: Any,
    codec: CodecLike = "minmax8",
    *,
    codecs: Mapping[str, CodecLike] | None = None,
    exclude: Sequence[str] = (),
    min_elements: int = 4096,
    low_rank: int = 0,
    warmup_steps: int = 0,
    group_bytes: int = GROUP_NBYTES,
    comm: Communicator | None = None,
    timeout: float | None = None,
    trace: list[TraceEvent] | None = None,
) -> Compression:
    """Collective: reduce the gradients of a DistributedDataParallel model with encoded traffic, during backward().

    Call it once, on all ranks alike, after the model was wrapped and before its first backward(). The gradients that
    backward() leaves are the mean over the ranks, the same bits on all of them. They depend neither on DDP's buckets
    nor on timing.

    Args:
        ddp_model: a ``torch.nn.parallel.DistributedDataParallel``, or torch.compile() of one. A larger model should
            have a ``bucket_cap_mb`` of ``group_bytes`` or less, because DDP passes gradients on one bucket at a time.
        codec: for parameters with two or more dimensions, such as "minmax8" or "minmax4+ef". The others (biases,
            norms) are sent unencoded. Parameters of other element types than float32, float16 and bfloat16 are
            reduced exactly by the process group itself; "+nesterov" is refused for them. "auto:CODEC", such as
            "auto:minmax4+ef": each group of these parameters has the faster one of no codec and CODEC, by calls that
            the ranks measure now, as in Communicator.quantized_allreduce(). A job that continues from a saved state
            needs the same choice: pass it a ``comm`` of qccl.init(profile=) with the profile of the job that saved it.
        codecs: codecs by patterns of parameter names (fnmatch), such as ``{"embedding.*": "topk:k=0.01+ef"}``, whatever
            a parameter's size; the first pattern that matches counts. "none" sends values unencoded.
        exclude: patterns of the names of parameters that are sent unencoded.
        min_elements: parameters with fewer elements are sent unencoded, unless ``codecs`` names them.
        low_rank: the rank r of PowerSGD's factors (Vogels, Karimireddy and Jaggi 2019, arXiv 1905.13727), which are
            sent in place of the gradients of large matrices, encoded by ``codec``: r (n + m) float32 numbers for n x m,
            if that is less than half of n m. n is the outermost dimension in memory, and m the product of the others.
            Smaller matrices, and matrices that ``codecs`` names, are sent without factors. The factors' error is kept
            as a residual, with any codec. On the CPU only. 0: no factors.
        warmup_steps: the number of first steps that send all values unencoded.
        group_bytes: the most bytes of gradients in one call; the first call has at most 1 MiB, so that it starts
            early. Smaller groups start earlier, but each costs a call.
        comm: a communicator of the same ranks, for this handle alone; the caller closes it. None: a new one, by
            Communicator.from_torch() of the model's process group.
        timeout: seconds after which an unfinished reduction fails, for example because a rank has not reached its
            backward pass. None: the timeout of ``comm``, or half an hour without ``comm``.
        trace: a list that gets the events of all calls, as in Communicator.quantized_allreduce.

    Returns:
        The handle. Keep it to save and restore the state; without ``comm`` it closes its communicator.

    Raises:
        ArgumentError: the model or another argument is not allowed.
        MismatchError: the ranks' arguments, or their parameters that need gradients, differ.

    backward() raises the failure of a hook or of a call. A model can have only one hook, so it must have no other.
    """
    ddp_model = uncompiled(ddp_model)
    parameters = parameters_of(ddp_model)
    policy = Policy.of(codec, codecs, exclude, min_elements)
    if count_of(group_bytes, "group_bytes") == 0:
        raise ArgumentError("group_bytes must be a positive number, the most bytes that one call reduces, not 0")
    is_measured = auto_codec(codec) is not None
    if auto_codec(codec) == "":
        raise ArgumentError(
            f"{codec!r} names no codec for compress(); give it as 'auto:minmax4+ef', the faster one of no codec and "
            f"minmax4+ef by measured calls, or give a codec alone, such as 'minmax4+ef'"
        )
    codec = lossiest(codec) if is_measured else codec
    policy = replace(policy, codec=codec, low_rank=count_of(low_rank, "low_rank"))
    policy.check(parameters)
    _check_low_rank(parameters, policy)
    warmup_steps = count_of(warmup_steps, "warmup_steps")
    if (warmup_steps or is_measured) and "momentum" in policy.state_names:
        raise ArgumentError(
            f"{'warmup_steps' if warmup_steps else 'codec=auto'} and +nesterov exclude each other, because steps "
            f"without the codec would have no momentum; leave one of them out"
        )
    groups = form_groups(parameters.items(), policy, group_bytes)
    timeout = None if timeout is None else timeout_of(timeout)
    is_own = comm is None
    if comm in in_use:
        raise ArgumentError(
            "comm belongs to another handle of compress(), whose state has the same keys; close() that handle, pass "
            "another communicator, or leave out comm"
        )
    if comm is None:
        comm = Communicator.from_torch(ddp_model.process_group, timeout or _TIMEOUT_SECONDS)
    comm.state.forget_used([group.key for group in groups])  # state of a closed handle
    frozen = frozen_parameters(ddp_model)
    handle = Compression(ddp_model.process_group, groups, frozen, comm, is_own, warmup_steps, timeout, trace)
    in_use.add(comm)
    try:
        handle._check_ranks()
        handle._check_alike(f"the faster one of none and {lossiest(codec).spec()}" if is_measured else "a codec")
        if is_measured:  # after the ranks have compared their arguments, because measuring is collective
            handle._adopt(faster(groups, lossiest(codec), comm))
        ddp_model._comm_hooks.clear()  # a copy of a model has the original's hooks
        ddp_model.register_comm_hook(HookState(handle), reduce_bucket)
    except BaseException as error:
        handle.close()
        if isinstance(error, RuntimeError):
            raise ArgumentError(f"DDP refuses the hook of compress(): {error}") from error
        raise
    return handle


def _check_low_rank(parameters: Mapping[str, Any], policy: Policy) -> None:
    """Raise ArgumentError if factors are asked for and are not possible."""
    if not policy.low_rank:
        return
    if "momentum" in policy.state_names:
        raise ArgumentError(
            "low_rank and +nesterov exclude each other, because factors have no momentum; use the optimiser's"
        )
    if any(p.device.type != "cpu" for p in parameters.values()):
        raise ArgumentError("low_rank is for models on the CPU so far; PyTorch has powerSGD_hook for GPUs")
