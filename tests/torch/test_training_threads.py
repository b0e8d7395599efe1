"""bench/training_threads.py: ranks that are threads of one process."""

from __future__ import annotations

import pytest
import resnet
import torch
import training_threads as program


def test_ranks_have_their_own_batches_and_rank_0_its_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters are those of a loop that averages the gradients of both ranks; so are DDP's."""
    data = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(64) % resnet.CLASSES
    monkeypatch.setattr(program, "EVERY", 1)
    monkeypatch.setattr(program, "_parts", lambda model: (data, data))
    task = {"model": "resnet", "method": "fp32", "seed": 3, "steps": 3, "factor": 20.0}
    found = program.curve(2, task)

    torch.manual_seed(3)
    model = resnet.make_model()
    optimizer = resnet.optimizer_of(model)
    generators = [torch.Generator().manual_seed(3000 + rank) for rank in range(2)]
    curve = []
    for step in range(1, 4):
        optimizer.param_groups[0]["lr"] = 20 * resnet.learning_rate(step)
        gradients, statistics = [], []
        for generator in generators:
            optimizer.zero_grad()
            resnet.loss_of(model, resnet.random_batch(data, generator)).backward()
            gradients.append([p.grad for p in model.parameters()])
            statistics.append([buffer.clone() for buffer in model.buffers()])
        for buffer, value in zip(model.buffers(), statistics[0], strict=True):
            buffer.copy_(value)
        for p, *each in zip(model.parameters(), *gradients, strict=True):
            p.grad = torch.stack(each).mean(0)
        optimizer.step()
        curve.append((step, resnet.quality(model, data)))
    assert [step for step, _ in found["curve"]] == [1, 2, 3]
    assert [bits for _, bits in found["curve"]] == pytest.approx([bits for _, bits in curve], abs=1e-4)
