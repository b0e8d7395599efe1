"""Public names, keywords, variables, commands and flags that this release has removed, and their replacements.

A program that uses one of them gets an error that names both. The next release empties the tables.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from qccl.base.errors import ArgumentError

__all__ = ["COMMANDS", "FLAGS", "KEYWORDS", "NAMES", "VALUES", "VARIABLES", "Gone", "check_variables", "missing"]
__all__ += ["relay", "without_removed"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: public names, such as "qccl.Name"
NAMES: dict[str, str] = {
    "qccl.DeMo": "take docs/examples/demo.py into your program (states of qccl.DeMo are still read by load_state())",
    "qccl.torch.Compression.statistics": "give compress() a comm, whose stats() has bytes and times; table() has the "
    "bytes of each group, and state_dict() the residuals (docs/howto/watching.md)",
    "qccl.DiLoCo.sparseloco": "use the options of docs/examples/sparseloco.py",
}
#: keywords of functions, such as "qccl.torch.compress(keyword)"
KEYWORDS: dict[str, str] = {
    "qccl.torch.compress(budget)": "name a codec, or give 'auto:CODEC', the faster one of none and CODEC",
    "qccl.torch.compress(step_bytes)": "give low_rank=, and see the bytes of a step in the handle's table()",
    "qccl.hierarchical_allreduce(exact)": "leave it out: results are the host's bits (exact=True)",
    "qccl.DiLoCo(mixing)": "leave it out: ranks keep the local steps of the delay, with which losses were lower",
    "qccl.DiLoCo(weighted)": "scale each rank's change before step(), as docs/reference/diloco.md does for sites of "
    "different speed",
    "qccl.DiLoCo(tile)": "give step() arrays in the order of tiles, as docs/examples/sparseloco.py does. Residuals "
    "that were saved with tile= are in another order: forget them by comm.reset()",
}
#: values of a codec's keys, as in a specification
VALUES: dict[str, str] = {
    "topk:values=mean2": "use values=exp4, with which a value takes 4 bits in place of 2; forget residuals that were "
    "saved with values=mean2 by comm.reset(key)",
}
#: environment variables
VARIABLES: dict[str, str] = {
    "QCCL_RELAY": "connect the machines by WireGuard or ssh (docs/howto/behind-nat.md)",
    "QCCL_WAN_SHARED_MEMORY": "set UCX_TLS=tcp to keep the ranks of a machine from sharing memory over wan",
    "QCCL_ALL_GATHER_CODEC": "pass pg_options=qccl.torch.Options(all_gather_codec=...) to init_process_group()",
}
#: commands of qccl-bench
COMMANDS: dict[str, str] = {
    "top": "open docs/howto/dashboard.json in Grafana, or ask Prometheus for its expressions (docs/howto/watching.md)",
}
#: flags of qccl-bench's commands; "command --flag" if other commands still have the flag
FLAGS: dict[str, str] = {
    "--sizes": "give --parameters, the number of parameters, or --model",
    "--bucket": "give --bucket-cap-mb",
    "--profile": "give --encode and --decode, or let simulate measure the codecs",
    "doctor --loss": "measure the network with --measure, whose calls losses slow down as they do those of a training",
    "doctor --tcp": "measure the network with --measure, which uses the machines' congestion control",
    "--frontier": "run bench/frontier.py of a checkout",
    "--plot": "write --json, and draw its results by a program of yours",
    "--draws": "run bench/frontier.py of a checkout",
    "--write": "run bench/frontier.py of a checkout",
    "--torch": "read what qccl-bench explain prints, or its records, which are JSON",
    "--up": "give --link, the rate at which each rank sends",
    "--down": "give --link, the rate at which each rank sends",
    "--jitter": "give --delay, which is constant",
    "--queue": "leave it out: the lab's queues hold what a link carries in 100 ms",
    "simulate --node-size": "give --nodes, the number of nodes",
    "simulate --inter": "give --link, the rate of each node's link",
    "simulate --link-per-rank": "give --link, the rate of a node's links together",
    "--sources": "leave it out: a reduce combines 3 codes",
    "--threads": "time calls with OMP_NUM_THREADS=N qccl-bench allreduce",
    "--arrays": "leave it out: the vector consists of 16 arrays",
    "--sites": "give --link, --delay and --loss, which all pairs of ranks have, or build other networks with ip and tc",
}


def missing(owner: str, name: str) -> AttributeError:
    """The error for a name that a module or a class lacks."""
    kind = "class" if owner.rpartition(".")[2][0].isupper() else "module"
    text = f"{kind} {owner!r} has no attribute {name!r}"
    instead = NAMES.get(f"{owner}.{name}")
    return AttributeError(f"{text} any more; {instead}" if instead else text)


class Gone:
    """The place of a method that a class of this name has no more: reading it raises AttributeError."""

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, *_: object) -> NoReturn:
        raise missing(self._owner, self._name)


def check_variables(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ArgumentError if a variable is set that nothing reads any more."""
    for name, instead in VARIABLES.items():
        if environ.get(name):
            raise ArgumentError(f"{name} is set, but qccl has no such variable any more; unset it, and {instead}")


def relay() -> NoReturn:
    """The command qccl-relay."""
    sys.exit(f"there is no qccl-relay any more; {VARIABLES['QCCL_RELAY']}")


def without_removed(name: str) -> Callable[[_Function], _Function]:
    """Decorate the public function ``name``: a keyword of the last release raises ArgumentError."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def checked(*args: Any, **given: Any) -> Any:
            for keyword in given:
                if instead := KEYWORDS.get(f"{name}({keyword})"):
                    raise ArgumentError(f"{name}() has no argument {keyword!r} any more; {instead}")
            return function(*args, **given)

        return checked  # type: ignore[return-value]

    return decorate
