"""compress(): a communication hook of DistributedDataParallel that reduces gradients with qccl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qccl import arguments
from qccl.arguments import CodecLike, count_of, lossiest, timeout_of
from qccl.communicator import Communicator
from qccl.costs.grouping import GROUP_NBYTES
from qccl.errors import ArgumentError
from qccl.torch.auto import AutoCodec, budget_of
from qccl.torch.compression import Compression, in_use
from qccl.torch.groups import Policy, faster, form_groups, rank_within
from qccl.torch.models import parameters_of

if TYPE_CHECKING:
    from qccl.trace import TraceEvent

__all__ = ["compress"]

#: the default of torch.distributed: a rank may evaluate or save for a while before its next step
_TIMEOUT_SECONDS = 1800.0


def compress(
    ddp_model: Any,
    codec: CodecLike = "minmax8",
    *,
    codecs: Mapping[str, CodecLike] | None = None,
    exclude: Sequence[str] = (),
    min_elements: int = 4096,
    low_rank: int = 0,
    step_bytes: int | None = None,
    budget: float | str | None = None,
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
        ddp_model: a ``torch.nn.parallel.DistributedDataParallel``. A larger model should have a ``bucket_cap_mb`` of
            ``group_bytes`` or less, because DDP passes gradients on one bucket at a time.
        codec: for parameters with two or more dimensions, such as "minmax8" or "minmax4+ef". The others (biases,
            norms) are sent unencoded. Parameters of other element types than float32, float16 and bfloat16 are
            reduced exactly by the process group itself. "auto": the first 5 steps send all values unencoded, and the
            last 4 of them are measured; then the ranks choose, for each of these parameters, the most accurate codec
            with which a step fits ``budget``: "none", "minmax8", "minmax4+ef", "minmax2:bucket=256+ef" or "trellis2+ef"
            (the rule is in qccl.costs.choice). On the CPU. "auto:CODEC", such as "auto:minmax4+ef": each group of
            these parameters has the faster one of no codec and CODEC, by calls that the ranks measure now, as in
            Communicator.quantized_allreduce(). A job that continues from a saved state needs the same choice: pass it a
            ``comm`` of qccl.init(profile=) with the profile of the job that saved it.
        codecs: codecs by patterns of parameter names (fnmatch), such as ``{"embedding.*": "topk:k=0.01+ef"}``, whatever
            a parameter's size; the first pattern that matches counts. "none" sends values unencoded.
        exclude: patterns of the names of parameters that are sent unencoded.
        min_elements: parameters with fewer elements are sent unencoded, unless ``codecs`` names them.
        low_rank: the rank r of PowerSGD's factors (Vogels, Karimireddy and Jaggi 2019, arXiv 1905.13727), which are
            sent in place of the gradients of large matrices, encoded by ``codec``: r (n + m) float32 numbers for n x m,
            if that is less than half of n m. n is the outermost dimension in memory, and m the product of the others.
            Smaller matrices, and those that ``codecs`` names, are sent as without it. What the factors lack of the
            gradients is kept as a residual, with any codec. On the CPU. 0: no factors.
        step_bytes: take the largest rank with which the encoded gradients of a step have at most so many bytes (the
            last row of table()), in place of ``low_rank``.
        budget: for "auto": the time by which communication may lengthen a step: seconds, or text such as "50 ms".
            None: 5% of the computation.
        warmup_steps: the number of first steps that send all values unencoded. With "auto" the ranks choose after
            ``warmup_steps`` steps, if that is more than 5, and the last 4 of them are measured.
        group_bytes: the most bytes of gradients that one call reduces; the first one at most 1 MiB, so that it starts
            early. Smaller groups start earlier; each costs a call.
        comm: a communicator of the same ranks, for this handle alone; the caller closes it. None: a new one, by
            Communicator.from_torch() of the model's process group.
        timeout: seconds after which an unfinished reduction fails, for example because a rank has not reached its
            backward pass. None: that of ``comm``, or half an hour.
        trace: a list that gets the events of all calls, as in Communicator.quantized_allreduce.

    Returns:
        The handle. Keep it to save and restore the state; without ``comm`` it closes its communicator.

    Raises:
        ArgumentError: the model or another argument is not allowed.
        MismatchError: the ranks' arguments, or their parameters that need gradients, differ.

    backward() raises the failure of a hook or of a call. A model can have only one hook, so it must have no other.
    """
    parameters = parameters_of(ddp_model)
    if isinstance(exclude, str):
        raise ArgumentError(f"exclude must be a list of patterns, such as [{exclude!r}], not a string")
    if codecs is not None and not isinstance(codecs, Mapping):
        raise ArgumentError(
            f"codecs must be a dict of codecs by patterns of names, such as {{'embedding.*': 'topk:k=0.01+ef'}}, not "
            f"{codecs!r}"
        )
    if count_of(group_bytes, "group_bytes") == 0:
        raise ArgumentError("group_bytes must be a positive number, the most bytes that one call reduces, not 0")
    is_auto, budget = _asks_for_auto(codec, codecs or {}), budget_of(budget)
    is_measured = not is_auto and arguments.is_auto(codec)
    codec = lossiest(codec) if is_measured else codec
    policy = Policy("none" if is_auto else codec, codecs or {}, tuple(exclude), count_of(min_elements, "min_elements"))
    policy.check(parameters)
    warmup_steps = count_of(warmup_steps, "warmup_steps")
    if (warmup_steps or is_auto or is_measured) and "momentum" in policy.state_names:
        raise ArgumentError(
            f"{'warmup_steps' if warmup_steps else 'codec=auto'} and +nesterov exclude each other, because steps "
            f"without the codec would have no momentum; leave one of them out"
        )
    auto = None
    if is_auto:
        _check_auto(parameters, low_rank, step_bytes)
        auto = AutoCodec(parameters, policy, group_bytes, budget, warmup_steps)
    elif budget is not None:
        raise ArgumentError("budget is for codec='auto', which chooses codecs by it; leave it out, or give 'auto'")
    policy = replace(policy, low_rank=_rank_of(parameters, policy, low_rank, step_bytes))
    groups = form_groups(parameters.items(), policy, group_bytes)
    timeout = None if timeout is None else timeout_of(timeout)
    is_own = comm is None
    if comm in in_use:
        raise ArgumentError(
            "comm belongs to another handle of compress(), whose state has the same keys; close() that one, pass "
            "another communicator, or leave comm out"
        )
    if comm is None:
        comm = Communicator.from_torch(ddp_model.process_group, timeout or _TIMEOUT_SECONDS)
    handle = Compression(ddp_model.process_group, groups, comm, is_own, warmup_steps, timeout, trace, auto)
    in_use.add(comm)
    try:
        handle._check_ranks()
        handle._check_alike(f"the faster one of none and {lossiest(codec).spec()}" if is_measured else "a codec")
        if is_measured:  # collective, so not before the ranks have compared their arguments
            handle._adopt(faster(groups, lossiest(codec), comm))
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


def _asks_for_auto(codec: CodecLike, codecs: Mapping[str, CodecLike]) -> bool:
    """Whether ``codec`` is "auto". Raises ArgumentError for the word in capitals, and in ``codecs``."""

    def word(given: CodecLike) -> str:
        return given.strip() if isinstance(given, str) else ""

    for pattern, each in codecs.items():
        if word(each).lower() == "auto":
            raise ArgumentError(
                f"codecs has 'auto' for the pattern {pattern!r}, but 'auto' is for codec=, and then chooses for all "
                f"parameters that no pattern names; give codec='auto', and leave the pattern out"
            )
    if word(codec) != "auto" and word(codec).lower() == "auto":
        raise ArgumentError(f"codec={codec!r} must be written in small letters: codec='auto'")
    return word(codec) == "auto"


def _check_auto(parameters: Mapping[str, Any], low_rank: int, step_bytes: int | None) -> None:
    """Raise ArgumentError for what codec="auto" cannot be combined with."""
    if low_rank or step_bytes is not None:
        raise ArgumentError(
            "codec='auto' chooses codecs, not ranks of factors; leave low_rank and step_bytes out, or give a codec"
        )
    if any(p.device.type != "cpu" for p in parameters.values()):
        raise ArgumentError(
            "codec='auto' is for models on the CPU so far, because its predictions were fitted to ranks on CPUs; give "
            "a codec, such as 'minmax4+ef', or 'auto:minmax4+ef', the faster one of none and that codec"
        )
