"""The command ``qccl-bench``."""

from __future__ import annotations

import click

import qccl
from qccl.bench.allreduce import allreduce
from qccl.bench.codec import codec
from qccl.bench.info import info

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(qccl.__version__, prog_name="qccl-bench")
def main() -> None:
    """Measure what compressed collectives gain on this machine and this network."""


for _command in (allreduce, codec, info):
    main.add_command(_command)
