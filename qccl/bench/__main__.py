"""``python -m qccl.bench`` is ``qccl-bench``."""

from qccl.bench.cli import main

main(prog_name="qccl-bench")
