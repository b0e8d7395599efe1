"""Which codecs were shown to train as well as fp32, and where; ``qccl-bench doctor`` recommends no others."""

from __future__ import annotations

__all__ = ["STEPS", "is_shown", "remark"]

#: of fp32's steps, so many times more may pass until fp32's quality is reached
_MOST_STEPS = 1.1

#: for each codec ("none" is fp32, "cast" fp16) and training of docs/results.md, the steps to fp32's quality, relative
#: to fp32's; None: it was not reached
# written by bench/quality.py
STEPS: dict[str, dict[str, float | None]] = {
    "cast": {"byte_model": 1.0, "word_gpt": 1.0},
    "minmax2:bucket=256+ef": {"byte_model": 1.0, "word_gpt": 1.0},
    "minmax4+ef": {"byte_model": 1.0, "word_gpt": 1.0},
    "minmax8": {"byte_model": 1.0, "word_gpt": 1.08},
    "none": {"byte_model": 1.0, "word_gpt": 1.0},
    "onebit:reconstruct=mean+ef": {"byte_model": 1.15, "word_gpt": None},
    "powersgd:1": {"byte_model": None, "word_gpt": None},
    "powersgd:4": {"byte_model": 1.38, "word_gpt": None},
    "topk:k=0.01+ef": {"byte_model": None, "word_gpt": None},
    "topk:k=64,block=4096,values=exp4/topk:k=256,block=4096,values=exp4+ef": {"byte_model": 1.54, "word_gpt": None},
    "topk:k=64,block=4096,values=exp4/topk:k=256,block=4096,values=exp4+ef+nesterov": {"byte_model": 1.46},
    "topk:k=96,block=4096,values=exp4/topk:k=192,block=4096,values=exp4+ef": {"byte_model": 1.46},
    "trellis2+ef": {"byte_model": 1.0, "word_gpt": 1.15},
    "trellis4+ef": {"byte_model": 1.0, "word_gpt": 1.08},
}
# end of bench/quality.py


def is_shown(codec: str) -> bool:
    """Whether each training that had this codec took it to fp32's quality in about fp32's steps."""
    found = STEPS.get(codec, {}).values()
    return bool(found) and all(steps is not None and steps <= _MOST_STEPS for steps in found)


def remark(codec: str) -> str:
    """The steps to fp32's quality in each training that had this codec, relative to fp32's."""
    found = STEPS.get(codec, {})
    if not found:
        return "not shown"
    return ", ".join(f"{model} {'not reached' if steps is None else f'{steps:.2f}x'}" for model, steps in found.items())
