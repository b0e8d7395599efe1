"""Error feedback under a GradScaler: residuals follow its factor, also if it skips a step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ddp_models import GROUPS, batches, bits, gradients, loss_of, on_all, wrapped
from on_ranks import on_ranks
from rank_calls import error_of

import qccl
import qccl.torch

#: codecs, and the ranks of the factors that they encode
CODECS = (("minmax2+ef", 0), ("onebit:reconstruct=mean+ef", 0), ("topk:k=0.1+ef", 0), ("minmax8+ef", 2))


class Factor:
    """The part of a GradScaler that qccl reads."""

    scale = 1.0

    def get_scale(self):
        return self.scale


@on_ranks(2)
def test_follows_the_scale() -> None:
    """Powers of two change no digit, so the gradients are those without a scaler, to the bit."""
    for spec, rank in CODECS:
        for has_rates in (False, True):
            plain, scaled, scaler = wrapped(), wrapped(), Factor()
            one, two = (qccl.torch.compress(model, spec, low_rank=rank, **GROUPS) for model in (plain, scaled))
            with one, two:
                two.scale_with(scaler)
                for i, (x, scale) in enumerate(zip(batches(6), (16, 12, 4, 4, 5, 13), strict=True)):
                    if has_rates:
                        one.lr = two.lr = 0.1 / (1 + i) if i % 3 else 0.0
                    scaler.scale = 2.0**scale
                    for model, factor in ((plain, 1.0), (scaled, scaler.scale)):
                        model.zero_grad()
                        (factor * loss_of(model, x)).backward()
                    for name, found in gradients(scaled).items():
                        assert torch.equal(found / scaler.scale, gradients(plain)[name]), (spec, i, name)
                assert two.state_dict()["lr"] is True
                scaler.scale = 2.0**130 if has_rates else 0
                assert "scaler's factor" in error_of(lambda: loss_of(scaled, x).backward(), qccl.ArgumentError)  # noqa: B023
    with qccl.torch.compress(wrapped(), "minmax4+ef+nesterov", **GROUPS) as handle:
        assert "+nesterov keeps a momentum" in error_of(lambda: handle.scale_with(scaler), qccl.ArgumentError)
    with qccl.torch.compress(wrapped(), **GROUPS) as handle:
        assert "GradScaler, not int" in error_of(lambda: handle.scale_with(8), qccl.ArgumentError)


@on_ranks(2)
def test_skips() -> None:
    """One gradient of one rank is infinite or NaN: all ranks skip the step, and no residual of any group changes."""
    for spec, rank in CODECS:
        for bad in (torch.inf, torch.nan):
            skipping, without = Trainer(spec, rank), Trainer(spec, rank)
            for i, x in enumerate(batches(6)):
                if i == 3:
                    before = skipping.handle.state_dict(), bits(skipping.model)
                    skipping.step(x, bad if dist.get_rank() == 1 else 0.0)
                    after = skipping.handle.state_dict(), bits(skipping.model)
                    assert skipping.scaler.get_scale() == without.scaler.get_scale() / 2, spec
                    assert before[1] == after[1], spec
                    for name, residual in before[0]["residuals"].items():
                        assert residual.any() and torch.equal(residual, after[0]["residuals"][name]), (spec, bad, name)
                    assert after[0]["step"] == before[0]["step"] + 1
                skipping.step(x)
                without.step(x)
            assert bits(skipping.model) == bits(without.model), spec
            assert len(set(on_all(bits(skipping.model)))) == 1
            skipping.handle.close()
            without.handle.close()


class Trainer:
    """Steps with a GradScaler, whose gradient of one parameter may be spoilt."""

    def __init__(self, spec, rank):
        self.model, self.bad = wrapped(), 0.0
        self.model.module.inner[2].weight.register_hook(self.spoil)
        self.handle = qccl.torch.compress(self.model, spec, low_rank=rank, **GROUPS)
        assert len(self.handle._groups) > 2
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        self.handle.scale_with(self.scaler)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.02)

    def spoil(self, gradient):
        if self.bad:
            gradient = gradient.clone()
            gradient[3, 5] = self.bad
        return gradient

    def step(self, x, bad=0.0):
        self.bad = bad
        self.optimizer.zero_grad()
        self.scaler.scale(loss_of(self.model, x)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
