"""``python -m qccl.relay`` is ``qccl-relay``."""

from qccl.relay.cli import main

main(prog_name="qccl-relay")
