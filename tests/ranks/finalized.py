"""Every public call of a communicator after MPI.Finalize(): what each raises. 1 or more ranks."""

from __future__ import annotations

import sys

import mpi4py

mpi4py.rc.thread_level = "funneled"  # so that no thread of qccl's is in MPI while it is finalized

import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

import qccl  # noqa: E402

x = np.ones(1000, np.float32)

#: on a communicator of its own each: what is done before the end of MPI, and what with its result after
CALLS = {
    "a call": (lambda comm: comm, lambda comm: comm.quantized_allreduce(x)),
    "a call under way": (lambda comm: comm, lambda comm: comm.quantized_allreduce(x, async_op=True).wait()),
    "wait": (lambda comm: begun(comm)[1], lambda work: work.wait() if work else None),
    "is_completed": (lambda comm: begun(comm)[1], lambda work: work.is_completed() if work else None),
    "exception": (lambda comm: begun(comm)[1], lambda work: raised(work) if work else None),
    "state_dict in a call": (lambda comm: begun(comm)[0], lambda comm: comm.state_dict()),
    "close in a call": (lambda comm: begun(comm)[0], lambda comm: comm.close()),
    "a plan": (lambda comm: comm.plan("allreduce", 1000), lambda plan: plan(x)),
    "a plan that has run": (lambda comm: ran(comm.plan("allreduce", 1000)), lambda plan: plan(x)),
    "plan": (lambda comm: comm, lambda comm: comm.plan("allreduce", 1000)),
    "barrier": (lambda comm: comm, lambda comm: comm.barrier()),
    "allgather": (lambda comm: comm, lambda comm: comm.allgather(b"x")),
    "split": (lambda comm: comm, lambda comm: comm.split(0)),
    "check": (lambda comm: comm, lambda comm: comm.check()),
    "state_dict": (lambda comm: comm, lambda comm: comm.state_dict()),
    "load_state_dict": (lambda comm: (comm, comm.state_dict()), lambda both: both[0].load_state_dict(both[1])),
    "reset": (lambda comm: comm, lambda comm: comm.reset()),
    "abort": (lambda comm: comm, lambda comm: comm.abort()),
    "close": (lambda comm: comm, lambda comm: comm.close()),
    "from_mpi": (lambda comm: comm, lambda comm: qccl.Communicator.from_mpi(MPI.COMM_WORLD)),
    "init": (lambda comm: comm, lambda comm: qccl.init(backend="host")),
    "nothing": (lambda comm: comm, lambda comm: None),
}


def begun(comm: qccl.Communicator) -> tuple[qccl.Communicator, qccl.Work | None]:
    """With a call that does not end, because rank 0 does not make it."""
    return comm, comm.quantized_allreduce(x.copy(), async_op=True) if comm.rank else None


def raised(work: qccl.Work) -> None:
    """Raise what the work says it has raised."""
    if error := work.exception():
        raise error


def ran(plan: qccl.Plan) -> qccl.Plan:
    plan(x.copy())
    return plan


def outcome(act, given) -> str:
    try:
        act(given)
    except qccl.EngineError as error:
        return "EngineError" if "MPI was finalized" in str(error) else f"EngineError: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "harmless"


communicators = [qccl.Communicator.from_mpi(MPI.COMM_WORLD, timeout=20) for _ in CALLS]
rank = communicators[0].rank
given = [before(comm) for comm, (before, _) in zip(communicators, CALLS.values(), strict=True)]
MPI.COMM_WORLD.Barrier()
MPI.Finalize()
for (name, (_, after)), one in zip(CALLS.items(), given, strict=True):
    sys.stdout.write(f"rank {rank}: {name}: {outcome(after, one)}\n")
    sys.stdout.flush()
