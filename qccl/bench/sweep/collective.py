"""The commands of the collectives: their options, starting the ranks or being one of them, showing their output."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import click

from qccl.base.errors import ArgumentError, CodecError
from qccl.bench.lab.lab import obstacle
from qccl.bench.lab.network import NETWORK_FLAGS, network_of
from qccl.bench.options import DTYPES, KINDS, OPS, SweepOptions, columns_help
from qccl.bench.params import (
    AT_LEAST_0,
    AT_LEAST_1,
    PositiveNumber,
    codec_list,
    intra_codec,
    list_of,
    nccl_only,
    option,
    output_file,
    parse_size,
)
from qccl.bench.start.launched import LaunchedCommand
from qccl.bench.start.processes import exit_status
from qccl.bench.start.start import choose_way, run_ranks
from qccl.bench.sweep.calls import check_calls
from qccl.collectives.hierarchical import LAYOUTS
from qccl.meeting.launchers import Launcher, detect
from qccl.transports.choice import TRANSPORTS

__all__ = ["check_sizes", "command"]

_DEFAULT_RANKS = 2
_AVERAGE_HELP = "Time of all ranks: 0 rank 0's, 1 mean, 2 minimum, 3 maximum [3]."
_CODEC_HELP = "Codecs to compare, e.g. minmax8,minmax4:bucket=256,none; module:Class is a codec of yours [minmax8]."
_TRANSPORT_HELP = (
    "The transport; loopback: between threads of one process [under a launcher: as qccl.init() chooses; otherwise "
    f"the first that works of {', '.join(TRANSPORTS)}]."
)
_PLAIN_HELP = "Compare with MPI's all-reduce, or qccl's without compression [the transport's library, if it has one]."
_LAYOUT_HELP = "Ranks that communicate between nodes: the first of each node, or each for a part [sharded]."
_JSON_HELP = "Write nccl-tests' JSON, and more, after each size."


#: options of all collectives, in the order of the help
_COMMON: tuple[Callable[[Any], Any], ...] = (
    option("-b --minbytes", parse_size, "SIZE", "Smallest size [32M].", "32M"),
    option("-e --maxbytes", parse_size, "SIZE", "Largest size [32M].", "32M"),
    option("-i --stepbytes", parse_size, "SIZE", "Step to the next [1M].", "1M"),
    option("-f --stepfactor", click.IntRange(min=2), "N", "Factor to the next, instead of -i."),
    option("-n --iters", AT_LEAST_1, "N", "Timed calls [20].", 20),
    option("-w --warmup_iters", AT_LEAST_0, "N", "Calls before them [1].", 1),
    option("-N --run_cycles", AT_LEAST_0, "N", "Sweeps [1]; 0: no end.", 1),
    option("-c --check", AT_LEAST_0, "N", "Checked calls [1]; 0: none.", 1),
    option("-o --op ops", list_of(OPS), "LIST", f"{', '.join(OPS)} or all [sum].", "sum"),
    option("-d --datatype dtypes", list_of(tuple(DTYPES)), "LIST", f"{', '.join(DTYPES)} or all [float].", "float"),
    option("-a --average", click.IntRange(0, 3), "N", _AVERAGE_HELP, 3),
    option("-T --timeout", PositiveNumber(), "SECONDS", "Limit of one call [60].", 60.0),
    option("--codec codecs", codec_list, "LIST", _CODEC_HELP, "minmax8"),
    option("--chunk", AT_LEAST_1, "N", "Elements of a chunk, at most."),
    option("--backend", click.Choice(["host", "cuda", "auto"]), None, "Where the arrays are [host].", "host"),
    option("--transport", click.Choice([*TRANSPORTS, "loopback"]), None, _TRANSPORT_HELP),
    option("-G --cudagraph", AT_LEAST_0, "N", "Replays of a captured call [0].", 0),
    click.option("--plan", is_flag=True, help="Time a plan that is bound once, not the communicator's method."),
    option("--ranks", AT_LEAST_1, "N", f"Processes to start here [{_DEFAULT_RANKS}]."),
    *NETWORK_FLAGS,
    option("--nodes", AT_LEAST_1, "N", "With --link: number of nodes; the ranks of a node share memory and a link."),
    click.option("--link-per-rank", is_flag=True, help="With --nodes: each rank of a node has a link of its own."),
    option("-J --json", output_file, "FILE", _JSON_HELP),
    option("--trace", output_file, "FILE", "Write a timeline of one call (largest size, first codec) for Perfetto."),
    nccl_only,
)
#: options of some collectives only, by the name of the parameter
_OWN = {
    "root": option("-r --root", AT_LEAST_0, "RANK", "Root [0].", 0),
    "layout": option("--layout", click.Choice(LAYOUTS), None, _LAYOUT_HELP, "sharded"),
    "intra": option("--intra", intra_codec, "CODEC", "Codec inside nodes, e.g. bfloat16 or minmax8 [none].", "none"),
    "inter": option("--inter", click.Choice(["host"]), None, "On GPUs: communicate between nodes from host memory."),
}


def command(name: str) -> click.Command:
    """Make the command that times one of the collectives in KINDS."""
    kind = KINDS[name]
    beside = " beside a plain one, without compression, in the same run" if kind.is_allreduce else ""

    def run(ctx: click.Context, /, ranks: int | None, **given: Any) -> None:
        network = network_of(given)
        options = SweepOptions(args=("qccl-bench", *sys.argv[1:]), collective=name, network=network, **given)
        _check(options)
        ctx.exit(exit_status(lambda: _run(ranks, options)))

    run.__doc__ = f"""Time the compressed {kind.title} of each codec{beside}.

    Flags, columns and footers follow nccl-tests. Under mpiexec, torchrun or srun it uses the launcher's ranks;
    otherwise it starts --ranks processes itself.
    """
    options = [*_COMMON, *(_OWN[parameter] for parameter in kind.parameters if parameter in _OWN)]
    if kind.is_allreduce:
        options.append(option("--plain", click.Choice(["mpi", "none"]), None, _PLAIN_HELP))
    if kind.algorithms:
        choice = click.Choice(["auto", *kind.algorithms])
        options.append(option("--algorithm", choice, None, f"Of the {kind.title}.", "auto"))
    decorated: Any = click.pass_context(run)
    for decorate in reversed(options):
        decorated = decorate(decorated)
    decorated = click.command(
        name,
        cls=LaunchedCommand,
        epilog=columns_help(),
        short_help=f"Time compressed {kind.title}{' beside the plain one' if beside else ''}.",
    )(decorated)
    assert isinstance(decorated, click.Command)
    return decorated


def _run(ranks: int | None, options: SweepOptions) -> int:
    """Start the ranks, or run as one of a launcher's ranks. Returns the exit status."""
    launcher = detect()
    wants_own = ranks or options.network.flag or options.transport == "loopback"
    if launcher is None or (launcher.processes == 1 and wants_own):
        return _start(ranks or _DEFAULT_RANKS, options)
    return _join(launcher, ranks, options)


def _check(options: SweepOptions) -> None:
    """Raise UsageError for options that contradict each other."""
    o = options
    check_sizes(o)
    if o.cudagraph and o.backend == "host":
        raise click.UsageError(f"-G {o.cudagraph}: there are no CUDA graphs on the host; give --backend cuda")
    if o.transport is not None and o.backend != "host":
        raise click.UsageError(f"--transport {o.transport} is for ranks on the host; leave out --backend {o.backend}")
    if o.plain == "mpi" and (o.transport == "loopback" or o.backend != "host"):
        raise click.UsageError("--plain mpi compares processes on the host, which mpiexec starts; use --plain none")
    lab = o.network.flag
    if lab and o.transport == "loopback":
        raise click.UsageError(f"{lab}: threads use no network; leave out --transport loopback")
    if lab and o.backend != "host":
        raise click.UsageError(f"{lab} is for ranks on the host; leave out --backend {o.backend}")
    if not lab and (o.nodes is not None or o.link_per_rank):
        raise click.UsageError("--nodes and --link-per-rank are for the lab; give --link")
    if o.link_per_rank and o.nodes is None:
        raise click.UsageError(
            "--link-per-rank has no effect without --nodes, because every rank has a link then; leave it out"
        )
    if lab and (reason := obstacle()):
        raise click.UsageError(f"{lab}: {reason}")


def check_sizes(options: SweepOptions) -> None:
    """Raise UsageError for an endless or an empty range of sizes."""
    o = options
    if o.maxbytes < o.minbytes:
        raise click.UsageError(f"-e {o.maxbytes} is less than -b {o.minbytes}; give a larger -e or a smaller -b")
    if o.stepfactor is None and o.stepbytes == 0 and o.maxbytes > o.minbytes:
        raise click.UsageError("-i 0 never gets from -b to -e; give a step of 1 or more, or -f")
    if o.stepfactor is not None and o.minbytes == 0 and o.maxbytes > 0:
        raise click.UsageError("-f never gets from -b 0 to -e; start at 1 or more, or give -i")


def _check_calls(options: SweepOptions, size: int) -> None:
    """Raise UsageError if a call of the run is impossible on ``size`` ranks."""
    try:
        check_calls(options, size)
    except (ArgumentError, CodecError) as error:
        raise click.UsageError(str(error)) from error


def _start(ranks: int, options: SweepOptions) -> int:
    """Start the ranks; rank 0 shows the table. Returns the exit status."""
    o, flag = options, options.network.flag
    if flag and ranks == 1:
        raise click.UsageError(f"{flag} with one rank: nothing would cross the link; give --ranks 2 or more")
    way = choose_way(o.transport, o.plain, o.backend)
    _check_calls(o, ranks)
    if o.link_per_rank and way.transport != "mpi":
        raise click.UsageError(
            f"--link-per-rank: traffic inside a node would cross the links over {way.transport}; give --transport mpi"
        )
    lab = o.network.lab(ranks, o.nodes, link_per_rank=o.link_per_rank)
    with lab or contextlib.nullcontext():
        command = [sys.executable, "-P", "-m", "qccl.bench.sweep.worker", o.to_json()]
        command += [str(ranks)] if way.transport == "loopback" else []
        return run_ranks(ranks, command, way=way, lab=lab, smallest=o.minbytes)


def _join(launcher: Launcher, ranks: int | None, options: SweepOptions) -> int:
    """Run as one of the launcher's ranks. Returns the exit status."""
    from qccl.bench.sweep.worker import run_rank

    if flag := options.network.flag:
        raise click.UsageError(
            f"{flag} starts its own ranks, but {launcher.name} has started this one; leave one of them out"
        )
    if options.transport == "loopback":
        raise click.UsageError(
            f"--transport loopback starts threads, but {launcher.name} has started this rank; leave one of them out"
        )
    if ranks not in (None, launcher.size):
        raise click.UsageError(f"--ranks {ranks}, but {launcher.name} has started {launcher.size}; leave --ranks out")
    _check_calls(options, launcher.size)
    return run_rank(options)
