"""qccl inside PyTorch's own tools. Imported only when asked for: ``import qccl.torch``.

The import registers the backend "qccl" of torch.distributed: ``dist.init_process_group("qccl")``.
"""

from qccl.torch.compression import Compression
from qccl.torch.ddp import compress
from qccl.torch.fsdp import AllGather, ReduceScatter
from qccl.torch.hsdp import AllReduce
from qccl.torch.ops import register_group
from qccl.torch.options import Options
from qccl.torch.process_group import ProcessGroupQccl

__all__ = [
    "AllGather",
    "AllReduce",
    "Compression",
    "Options",
    "ProcessGroupQccl",
    "ReduceScatter",
    "compress",
    "register_group",
]
