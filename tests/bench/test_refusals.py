"""Command lines that qccl-bench refuses before anything starts, and what it says of them."""

from __future__ import annotations

import shlex

import pytest
from bench_runs import LAUNCHERS
from click.testing import CliRunner

from qccl.bench.cli import main
from qccl.bench.sweep import collective

#: in place of a number with so many digits
LONG = "9" * 400

#: the command line -> what it says | and what else. "*" stands for allreduce, and for run with a program
REFUSED = r"""
allreduce -b 12Q -> '12Q' is not a size | 64K
allreduce -b 1M -e 1K -> 1024 is less than -b 1048576
allreduce -b 0 -e 1K -f 2 -> -f never gets from -b 0
allreduce -b 0 -e 1K -i 0 -> -i 0 never gets
allreduce -f 1 -> 1 is not in the range x>=2
allreduce -n 0 -> 0 is not in the range x>=1
allreduce -o prod -> 'prod' is not one of sum, avg, min, max, all
allreduce -d double -> 'double' is not one of float, half, bfloat16, all
allreduce -a 4 -> 4 is not in the range
allreduce -T 0 -> 0.0 is not in the range x>0
allreduce -g 2 -> 2 is not possible, only 1 | --ranks
allreduce -G 1 -> -G 1: there are no CUDA graphs on the host | --backend cuda
allreduce --backend cuda --link 1gbit -> --link 1gbit is for ranks on the host
allreduce --backend gpu -> 'host', 'cuda', 'auto'
allreduce --codec minmax9 -> bits=9 | 1 to 8
allreduce --codec minmax8,minmux -> minmux | minmax
allreduce --codec minmax8:bukket=8 -> bukket | bucket
allreduce --algorithm ring -> 'auto', 'one_shot', 'two_round'
allreduce -t1 -g1 -m1 -p0 -z1 -G0 -C0 -b2M -e1M -> -e 1048576 is less than
allreduce --nodes=2 -> are for the lab; give --link
allreduce --link=1gbit --link-per-rank -> --link-per-rank has no effect without --nodes
allreduce --ranks 0 -> 0 is not in the range x>=1
allreduce --link fast -> 'fast' is not a link's rate | 100mbit
allreduce --json - -> '-' is not a file; give the name
allreduce --json /nowhere/x.json -> '/nowhere/x.json' cannot be written
allreduce --transport=loopback --link=1gbit -> threads use no network
allreduce --transport=ucx --backend=cuda -> is for ranks on the host
allreduce --transport=loopback --plain=mpi -> which mpiexec starts
allreduce --transport=tcp -> 'tcp' is not one of 'ucx', 'mpi', 'gloo', 'wan', 'loopback'
allreduce --codec=minmax8+ef -omax -> use minmax8, or a collective with state: allreduce, hierarchical_allreduce and
    reduce_scatter, with op
allreduce --codec=topk:k=0.1 -osum,min -> op 'min' is not possible with topk
allreduce_fast -> No such command 'allreduce_fast'
reduce --codec=minmax8,onebit+ef -> onebit+ef keeps its residual from call to call, which reduce does not
broadcast --root=2 -> root=2 is not a rank
sendrecv -> there is no sendrecv, as nccl-tests has
sendrecv_perf -> there is no sendrecv_perf, as nccl-tests has
gather_perf -> there is no gather_perf, as nccl-tests has

* --delay=25ms -> --delay is for the lab's links, which need a rate, too; give --link
* --link=1gbit --loss=150% -> '150%' is not a loss; give a percentage of packets from 0% to below 100%
* --link=1gbit --delay=11s -> a delay of 11 s is not possible; give 0 to 10 s
* --tcp=bbr -> --tcp is for the lab's links, which need a rate, too
* --link=1gbit '--tcp=a b' -> 'a b' is not a congestion control's name
* --sites=sites.toml -> there is no --sites any more; give --link, --delay and --loss

run -> Missing argument 'COMMAND...'
run --delay=20 --link=1gbit true -> '20' is not a time; give a positive number with us, ms or s
run --link=1gbit --ranks=1 true -> nothing would cross the link
run --launcher=srun true -> 'srun' is not one of 'torchrun', 'mpiexec'
run -- no-such-program --ranks=3 -> 'no-such-program' is neither a program in PATH

simulate allreduce --link 25 -> '25' is not a rate; give bits per second such as 100mbit or 25gbit
simulate allreduce --link 0gbit -> '0gbit' is not a rate
simulate allreduce --delay soon -> 'soon' is not a time
simulate allreduce --codec minmax9 -> bits
simulate allreduce --codec auto -> name a codec here, such as 'minmax8'
simulate allreduce --algorithm ring -> --algorithm ring: allreduce has auto, one_shot, two_round
simulate all_gather --algorithm one_shot -> --algorithm one_shot: all_gather has auto
simulate allreduce --encode 1GBps -> --encode and --decode go together
simulate allreduce --ranks 9 --nodes 6 -> --nodes 6: 9 ranks fill 5 nodes of 2; give --nodes 5
simulate allreduce --ranks 2 --nodes 3 -> --nodes 3: 2 ranks fill 2 nodes of 1; give --nodes 2
simulate allreduce -b 2M -e 1M -> is less than -b
simulate broadcast --root 7 -> root=7 is not a rank
simulate allreduce --profile x -> there is no --profile any more; give --encode and --decode
simulate allreduce --ranks 0 -> 0 is not in the range
simulate allreduce --ranks 100000000000 -> 100000000000 is not in the range 1<=x<=16384
simulate allreduce --processors nan -> nan is not a finite number
simulate allreduce --processors 4 -> 4.0 is not in the range 0<x<=1
simulate allreduce --maxbytes LONG -> is not a size
simulate allreduce --link LONGgbit -> is not a rate
simulate allreduce --delay LONGs -> is not a time
simulate hierarchical_allreduce -> is not one of

doctor -> --parameters or --model; give the network once: --link RATE, or --measure under a launcher; --step is
doctor --link=1gbit --step=1s -> give the gradients once: --parameters or --model
doctor --sizes=4M --link=1gbit --step=1s -> there is no --sizes any more; give --parameters
doctor --parameters=1M --link=1gbit -> --step is missing
doctor --parameters=1M --step=1s -> give the network once: --link RATE, or --measure
doctor --parameters=1M --measure --link=1gbit --step=1s -> give the network once
doctor --parameters=1M --measure --step=1s -> --measure needs several ranks: mpiexec -n 4
doctor --parameters=1M --ranks=1 --link=1gbit --step=1s -> 1 is not in the range x>=2
doctor --parameters=1M --processors=nan --link=1gbit --step=1s -> nan is not a finite number
doctor --measure --delay=25ms -> --delay is for --link, whose network it describes: --link 100mbit --delay
doctor --measure --loss=1% -> there is no --loss any more; measure the network with --measure
doctor --parameters=1M --step=1s --delay=1ms -> give the network once: --link RATE, or --measure under a launcher;
    --delay is for --link
doctor --measure --tcp=bbr -> there is no --tcp any more
doctor --link=1gbit --delay=0ms -> is not a time; give a positive number with us, ms or s
doctor --link=1gbit --bucket=4 -> there is no --bucket any more; give --bucket-cap-mb
"""


def rows() -> list[tuple[str, str]]:
    """The command lines and what is said of them; an indented line continues the last one."""
    found = []
    for row in REFUSED.replace("\n    ", " ").split("\n"):
        if row:
            command, _, said = row.partition(" -> ")
            both = (command.replace("*", "allreduce"), command.replace("*", "run") + " true")
            found += [(each, said) for each in (both if command[0] == "*" else (command,))]
    return found


@pytest.mark.parametrize(("command", "said"), rows(), ids=[command for command, _ in rows()])
def test_refused(command: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    for module in ("sweep.collective", "start.run"):
        monkeypatch.setattr(f"qccl.bench.{module}.obstacle", lambda: None)  # the lab's
    monkeypatch.setattr(collective, "run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    result = CliRunner().invoke(main, shlex.split(command.replace("LONG", LONG)))
    assert result.exit_code == 2
    output = " ".join(result.output.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").split())
    assert all(part in output for part in said.split(" | ")), output
