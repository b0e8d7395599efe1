"""One rank of ``qccl-bench``: makes the communicator of all ranks, under any launcher, and runs the sweep."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import qccl
from qccl.bench.launched import join_torch_group
from qccl.bench.options import Options
from qccl.bench.progress import Progress
from qccl.bench.sweep import Sweep
from qccl.cuda.libraries import device_count
from qccl.errors import EngineError
from qccl.launchers import Launcher, detect

if TYPE_CHECKING:
    from qccl.communicator import Communicator

__all__ = ["run_rank"]


def run_rank(options: Options, emit: Callable[[str], None], progress: Progress) -> int:
    """Collective: measure as one rank; returns the exit status. ``emit`` and ``progress``: see Sweep.

    All ranks have the same wrong arguments. Only rank 0 reports them and fails, because launchers end all ranks
    when one fails, before another could print the reason.
    """
    launcher = detect()
    rank = launcher.rank if launcher else 0
    try:
        with _communicator(launcher, options.backend, options.timeout) as comm:
            return 0 if Sweep(comm, options, emit, progress).run() else 1
    except (qccl.ArgumentError, qccl.CodecError) as error:
        if rank == 0:
            print(f"qccl-bench: {type(error).__name__}: {error}", file=sys.stderr)
        return int(rank == 0)
    except qccl.QcclError as error:
        print(f"qccl-bench: rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
    return 1


@contextlib.contextmanager
def _communicator(launcher: Launcher | None, backend: str, timeout: float) -> Iterator[Communicator]:
    """The communicator of all ranks: over MPI or NCCL, or over gloo under torchrun without GPUs."""
    if launcher is None or launcher.name != "torchrun" or backend == "cuda":
        with qccl.init(backend=backend, timeout=timeout) as comm:
            yield comm
        return
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise EngineError(
            f"torchrun's environment is set, but PyTorch cannot be imported ({error}); install torch, or start the "
            f"ranks with mpiexec, or with --ranks"
        ) from error
    join_torch_group(timeout)
    on_gpus = backend == "auto" and _everywhere(device_count() >= launcher.local_size)
    with qccl.init("cuda", timeout) if on_gpus else qccl.Communicator.from_torch(timeout=timeout) as comm:
        yield comm
    dist.destroy_process_group()


def _everywhere(fact: bool) -> bool:
    """Collective: whether ``fact`` is true on all ranks of torch's group."""
    import torch.distributed as dist

    facts = [False] * dist.get_world_size()
    dist.all_gather_object(facts, fact)
    return all(facts)
