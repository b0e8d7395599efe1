"""What the ranks of test_torch_ddp.py do: ``torch_ddp_ranks.py FUNCTION...``, of the modules below."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
import torch_ddp_auto
import torch_ddp_failures
import torch_ddp_low_rank
import torch_ddp_results
import torch_ddp_scaling
import torch_ddp_state

MODULES = (
    torch_ddp_auto,
    torch_ddp_results,
    torch_ddp_state,
    torch_ddp_failures,
    torch_ddp_scaling,
    torch_ddp_low_rank,
)


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        begin = time.perf_counter()
        next(getattr(module, name) for module in MODULES if hasattr(module, name))()
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"{name} {time.perf_counter() - begin:.1f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
