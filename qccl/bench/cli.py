"""The command ``qccl-bench``."""

from __future__ import annotations

import click

import qccl
from qccl.bench.codec import codec
from qccl.bench.collective import command
from qccl.bench.columns import columns_help
from qccl.bench.doctor import doctor
from qccl.bench.info import info
from qccl.bench.kinds import KINDS
from qccl.bench.launched import LaunchedGroup
from qccl.bench.run import run

__all__ = ["main"]


@click.group(cls=LaunchedGroup, epilog=columns_help(), context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(qccl.__version__, prog_name="qccl-bench")
def main() -> None:
    """Measure what compressed collectives gain on this machine and this network."""


for _command in (*map(command, KINDS), codec, run, doctor, info):
    main.add_command(_command)
