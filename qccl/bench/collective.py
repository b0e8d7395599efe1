"""The commands of the collectives: their options, starting the ranks or being one of them, showing their output."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

import click

import qccl
from qccl.bench.cases import check_calls
from qccl.bench.columns import columns_help
from qccl.bench.kinds import KINDS
from qccl.bench.lab import Lab, obstacle
from qccl.bench.launched import LaunchedCommand, check_other_ranks
from qccl.bench.options import DTYPES, OPS, STDOUT, Options
from qccl.bench.params import (
    checked,
    codec_list,
    list_of,
    nccl_only,
    output_file,
    output_file_or_stdout,
    picture_file,
)
from qccl.bench.progress import Bar, decode_report, encode_progress, is_progress, is_report
from qccl.bench.sizes import parse_link, parse_size
from qccl.bench.start import run_ranks_by_mpiexec, stoppable
from qccl.collectives.hierarchical import INTRA, LAYOUTS
from qccl.launchers import Launcher, detect

__all__ = ["command"]

_DEFAULT_RANKS = 2
_POSITIVE = click.FloatRange(min=0, min_open=True)
_OPS_HELP = f"{', '.join(OPS)} or all [sum]."
_TYPES_HELP = f"{', '.join(DTYPES)} or all [float]."
_AVERAGE_HELP = "Time of all ranks: 0 rank 0's, 1 mean, 2 minimum, 3 maximum [3]."
_CODEC_HELP = "Codecs to compare, e.g. minmax8,minmax4:bucket=256,none; module:Class is a codec of yours [minmax8]."
_LINK_HELP = "Put each rank behind a link of this rate, e.g. 100mbit or 1gbit; needs root."
_NODES_HELP = "With --link: number of nodes; the ranks of a node share memory and a link."
_LAYOUT_HELP = "Ranks that communicate between nodes: the first of each node, or each for a part [leader]."
_INTRA_HELP = "Codec inside nodes [none]."
_ARRAYS_HELP = "Arrays of equal size that the vector consists of [16]."
_PLAN_HELP = "Time a plan that is bound once, not the communicator's method."
_JSON_HELP = "Write nccl-tests' JSON, and more, after each size; -: to standard output, the table to standard error."
_TRACE_HELP = "Write a timeline of one call (largest size, first codec) for Perfetto."


#: options of all collectives, in the order of the help
_COMMON: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "-b", "--minbytes", callback=checked(parse_size), default="32M", metavar="SIZE", help="Smallest size [32M]."
    ),
    click.option(
        "-e", "--maxbytes", callback=checked(parse_size), default="32M", metavar="SIZE", help="Largest size [32M]."
    ),
    click.option(
        "-i", "--stepbytes", callback=checked(parse_size), default="1M", metavar="SIZE", help="Step to the next [1M]."
    ),
    click.option(
        "-f", "--stepfactor", type=click.IntRange(min=2), metavar="N", help="Factor to the next, instead of -i."
    ),
    click.option("-n", "--iters", type=click.IntRange(min=1), default=20, metavar="N", help="Timed calls [20]."),
    click.option(
        "-w", "--warmup_iters", type=click.IntRange(min=0), default=1, metavar="N", help="Calls before them [1]."
    ),
    click.option(
        "-N", "--run_cycles", type=click.IntRange(min=0), default=1, metavar="N", help="Sweeps [1]; 0: no end."
    ),
    click.option(
        "-c", "--check", type=click.IntRange(min=0), default=1, metavar="N", help="Checked calls [1]; 0: none."
    ),
    click.option("-o", "--op", "ops", callback=checked(list_of(OPS)), default="sum", metavar="LIST", help=_OPS_HELP),
    click.option(
        "-d",
        "--datatype",
        "dtypes",
        callback=checked(list_of(tuple(DTYPES))),
        default="float",
        metavar="LIST",
        help=_TYPES_HELP,
    ),
    click.option("-a", "--average", type=click.IntRange(0, 3), default=3, metavar="N", help=_AVERAGE_HELP),
    click.option("-T", "--timeout", type=_POSITIVE, default=60.0, metavar="SECONDS", help="Limit of one call [60]."),
    click.option(
        "--codec", "codecs", callback=checked(codec_list), default="minmax8", metavar="LIST", help=_CODEC_HELP
    ),
    click.option("--chunk", type=click.IntRange(min=1), metavar="N", help="Elements in a step of the pipeline."),
    click.option(
        "--backend", type=click.Choice(["host", "cuda", "auto"]), default="host", help="Where the arrays are [host]."
    ),
    click.option(
        "-G", "--cudagraph", type=click.IntRange(min=0), default=0, metavar="N", help="Replays of a captured call [0]."
    ),
    click.option("--plan", is_flag=True, help=_PLAN_HELP),
    click.option(
        "--ranks", type=click.IntRange(min=1), metavar="N", help=f"Processes to start here [{_DEFAULT_RANKS}]."
    ),
    click.option("--link", callback=checked(lambda text: parse_link(text).name), metavar="RATE", help=_LINK_HELP),
    click.option("--nodes", type=click.IntRange(min=1), metavar="N", help=_NODES_HELP),
    click.option("--link-per-rank", is_flag=True, help="With --nodes: each rank of a node has a link of its own."),
    click.option("-J", "--json", callback=checked(output_file_or_stdout), metavar="FILE", help=_JSON_HELP),
    click.option("--plot", callback=checked(picture_file), metavar="FILE", help="Draw it (.png, .svg, .pdf)."),
    click.option("--trace", callback=checked(output_file), metavar="FILE", help=_TRACE_HELP),
    nccl_only,
)
#: options of some collectives, by the name of the parameter
_OWN = {
    "root": click.option("-r", "--root", type=click.IntRange(min=0), default=0, metavar="RANK", help="Root [0]."),
    "layout": click.option("--layout", type=click.Choice(LAYOUTS), default="leader", help=_LAYOUT_HELP),
    "intra": click.option("--intra", type=click.Choice(INTRA), default="none", help=_INTRA_HELP),
    "inter": click.option(
        "--inter", type=click.Choice(["host"]), help="On GPUs: communicate between nodes from host memory."
    ),
    "arrays": click.option("--arrays", type=click.IntRange(min=1), default=16, metavar="N", help=_ARRAYS_HELP),
}


def command(name: str) -> click.Command:
    """The command that times one of the collectives in kinds.KINDS."""
    kind = KINDS[name]
    beside = " beside the plain one of the library underneath, in the same run" if kind.is_allreduce else ""

    def run(ctx: click.Context, /, ranks: int | None, **given: Any) -> None:
        options = Options(args=("qccl-bench", *sys.argv[1:]), collective=name, **given)
        _check(options)
        ctx.exit(_run(ranks, options))

    run.__doc__ = f"""Time the compressed {kind.title} of each codec{beside}.

    Flags, columns and footers are those of nccl-tests. Under mpiexec, torchrun or srun it uses the launcher's ranks;
    otherwise it starts --ranks processes itself.
    """
    options = [*_COMMON, *(_OWN[parameter] for parameter in kind.parameters if parameter in _OWN)]
    if kind.algorithms:
        choice = click.Choice(["auto", *kind.algorithms])
        options.append(click.option("--algorithm", type=choice, default="auto", help=f"Of the {kind.title}."))
    decorated: Any = click.pass_context(run)
    for option in reversed(options):
        decorated = option(decorated)
    decorated = click.command(
        name,
        cls=LaunchedCommand,
        epilog=columns_help(),
        short_help=f"Time compressed {kind.title}{' beside the plain one' if beside else ''}.",
    )(decorated)
    assert isinstance(decorated, click.Command)
    return decorated


def _run(ranks: int | None, options: Options) -> int:
    """Start the ranks, or run as one of a launcher's ranks; returns the exit status."""
    with stoppable(), _Screen(to_stderr=options.json == STDOUT) as screen:
        try:
            launcher = detect()
            if launcher is None:
                return _start(ranks or _DEFAULT_RANKS, options, screen)
            return _join(launcher, ranks, options, screen)
        except KeyboardInterrupt:
            click.echo("qccl-bench: stopped; its ranks and networks are gone", err=True)
            return 130
        except qccl.QcclError as error:
            raise click.ClickException(f"{type(error).__name__}: {error}") from error


def _check(options: Options) -> None:
    """Raise UsageError for options that contradict each other."""
    o = options
    if o.maxbytes < o.minbytes:
        raise click.UsageError(f"-e {o.maxbytes} is less than -b {o.minbytes}; give a larger -e or a smaller -b")
    if o.stepfactor is None and o.stepbytes == 0 and o.maxbytes > o.minbytes:
        raise click.UsageError("-i 0 never gets from -b to -e; give a step of 1 or more, or -f")
    if o.stepfactor is not None and o.minbytes == 0 and o.maxbytes > 0:
        raise click.UsageError("-f never gets from -b 0 to -e; start at 1 or more, or give -i")
    if o.cudagraph and o.backend == "host":
        raise click.UsageError(f"-G {o.cudagraph}: there are no CUDA graphs on the host; give --backend cuda")
    if o.link is not None and o.backend != "host":
        raise click.UsageError(f"--link {o.link} is for ranks on the host; leave --backend {o.backend} out")
    if o.link is None and (o.nodes is not None or o.link_per_rank):
        raise click.UsageError("--nodes and --link-per-rank are for the lab; give --link")
    if o.link_per_rank and o.nodes is None:
        raise click.UsageError(
            "--link-per-rank has no effect without --nodes, because every rank has a link then; leave it out"
        )
    if o.link is not None and (reason := obstacle()):
        raise click.UsageError(f"--link {o.link}: {reason}")


def _check_calls(options: Options, size: int) -> None:
    """Raise UsageError if a call of the run is impossible on ``size`` ranks."""
    try:
        check_calls(options, size)
    except (qccl.ArgumentError, qccl.CodecError) as error:
        raise click.UsageError(str(error)) from error


def _start(ranks: int, options: Options, screen: _Screen) -> int:
    """Start the ranks and show rank 0's output; returns the exit status."""
    if options.link is not None and ranks == 1:
        raise click.UsageError("--link with one rank: nothing would cross the link; give --ranks 2 or more")
    _check_calls(options, ranks)
    command = [sys.executable, "-m", "qccl.bench.worker", options.to_json()]
    calls = options.iters + options.warmup_iters + options.check + 2
    o = options
    lab_of = Lab(ranks, parse_link(o.link), o.nodes, link_per_rank=o.link_per_rank) if o.link else None
    with lab_of or contextlib.nullcontext() as lab:
        return run_ranks_by_mpiexec(
            ranks,
            command,
            lab=lab,
            smallest=options.minbytes,
            silence=calls * options.timeout + 60,
            on_line=screen.show,
        )


def _join(launcher: Launcher, ranks: int | None, options: Options, screen: _Screen) -> int:
    """Run as one of the launcher's ranks; returns the exit status."""
    from qccl.bench.rank import run_rank

    if options.link is not None:
        raise click.UsageError(
            f"--link starts its own ranks, but {launcher.name} has started this one; leave one of them out"
        )
    if ranks not in (None, launcher.size):
        raise click.UsageError(f"--ranks {ranks}, but {launcher.name} has started {launcher.size}; leave --ranks out")
    _check_calls(options, launcher.size)
    check_other_ranks(launcher)
    return run_rank(options, screen.show, lambda *step: screen.show(encode_progress(*step)))


class _Screen:
    """Shows rank 0's output: the table above the progress bar, and at the end the last report, on standard output.

    If the run is stopped, the report is still printed. ``to_stderr``: print the table on standard error.
    """

    def __init__(self, *, to_stderr: bool) -> None:
        self._bar = Bar(sys.stderr)
        self._to_stderr = to_stderr
        self._report: dict[str, Any] | None = None

    def __enter__(self) -> _Screen:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.clear()
        if self._report is not None:
            click.echo(json.dumps(self._report, indent=1))

    def show(self, line: str) -> None:
        """Handle a line from rank 0."""
        if is_progress(line):
            self._bar.feed(line)
        elif is_report(line):
            self._report = decode_report(line)
        else:
            self._bar.clear()
            click.echo(line, err=self._to_stderr)
            self._bar.draw()
