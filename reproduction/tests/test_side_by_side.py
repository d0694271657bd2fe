"""Networks trained side by side: each as it would be alone."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from hap.data import Data
from hap.errors import HapError
from hap.training import train
from hap_reproduction.cifar10.training import train_many
from tiny_training import RECIPE, bright_quarters, tiny_model, weights

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def quarters() -> Data:
    return bright_quarters()


def test_side_by_side_is_the_same_as_alone(quarters: Data) -> None:
    chosen = [RECIPE, dataclasses.replace(RECIPE, seed=7, lr=0.02, ema=0.9)]
    together = [tiny_model(0), tiny_model(1)]
    histories = train_many(together, quarters, chosen)
    for index, (model, history) in enumerate(zip(together, histories, strict=True)):
        alone = tiny_model(index)
        assert train(alone, quarters, chosen[index], progress=False).loss == history.loss
        assert torch.equal(weights(alone), weights(model))


def test_time_limit_stops_at_an_epoch_and_the_next_call_goes_on(quarters: Data, tmp_path: Path) -> None:
    chosen = [RECIPE, dataclasses.replace(RECIPE, seed=7, ema=0.9, eval_every=3)]
    whole, parts = [tiny_model(0), tiny_model(1)], [tiny_model(0), tiny_model(1)]
    complete = train_many(whole, quarters, chosen)
    for epochs in (1, 2, 3, 4):
        histories = train_many(parts, quarters, chosen, checkpoint_dir=tmp_path / "c", seconds=0.0)
        assert [h.epochs for h in histories] == [epochs, epochs]
        assert all(h.final_accuracy is not None for h in histories)
    assert [h.loss for h in histories] == [h.loss for h in complete]
    for model, other in zip(whole, parts, strict=True):
        assert torch.equal(weights(model), weights(other))


def test_what_cannot_be_trained_together_is_refused(quarters: Data) -> None:
    model = tiny_model()
    longer = dataclasses.replace(RECIPE, epochs=9)
    for networks, chosen, words in [
        ([], [], "0 models"),
        ([model], [RECIPE, RECIPE], "1 models, 2 recipes"),
        ([model, model], [RECIPE, RECIPE], "stands twice"),
        ([model, tiny_model()], [RECIPE, longer], "differ in epochs or batch"),
        ([nn.Sequential(nn.Flatten(), nn.Linear(64, 3))], [RECIPE], r"into \(1, 3\): expected \(1, 4\)"),
    ]:
        with pytest.raises(HapError, match=words):
            train_many(networks, quarters, chosen)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_steps_agree_with_plain_ones_on_cuda(quarters: Data, tmp_path: Path) -> None:
    chosen = [RECIPE, dataclasses.replace(RECIPE, seed=7, ema=0.9, distill=0.5)]
    plain, recorded = ([tiny_model(i).cuda() for i in range(2)] for _ in range(2))
    teachers = [None, tiny_model(5)]
    train_many(plain, quarters, chosen, teachers=teachers, graphs=False)
    for _ in range(4):
        train_many(recorded, quarters, chosen, teachers=teachers, checkpoint_dir=tmp_path, seconds=0.0)
    for model, other in zip(plain, recorded, strict=True):
        torch.testing.assert_close(weights(model), weights(other), rtol=1e-2, atol=1e-3)
        assert all(p.is_contiguous() and p.grad is None for p in other.parameters())
