"""Recipes, files, evaluation and the training loop, on tiny networks."""

import dataclasses
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hap import data as hap_data
from hap import models
from hap.data import Data, Split
from hap.errors import HapError
from hap.training import evaluate, recipes, train
from hap.training.recipes import Recipe
from hap.training.run import epoch_seed
from hap.utils.atomic_files import write_atomic, write_json
from tiny_training import RECIPE, bright_quarters, tiny_model, weights

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def quarters() -> Data:
    return bright_quarters()


class Interrupted(KeyboardInterrupt):
    """Stands for Ctrl-C, without ending the test run if it escapes."""


def interrupt_in_epoch(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Raise in the middle of the `number`-th epoch (from 1) that is begun."""
    original, calls = Data.epoch, []

    def epoch(self: Data, *arguments: object) -> Iterator[tuple[Tensor, Tensor]]:
        calls.append(1)
        for index, batch in enumerate(original(self, *arguments)):
            if len(calls) == number and index == 3:
                raise Interrupted
            yield batch

    monkeypatch.setattr(Data, "epoch", epoch)


# Recipes


def test_recipes_survive_json() -> None:
    for recipe in recipes.RECIPES.values():
        assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_paper_recipes() -> None:
    finetune = recipes.get("paper-finetune")
    assert (finetune.epochs, finetune.batch, finetune.lr, finetune.weight_decay) == (160, 64, 0.02, 4e-4)
    rates = [finetune.learning_rate(step, 160) for step in (0, 79, 80, 119, 120, 159)]
    assert rates == pytest.approx([0.02, 0.02, 0.002, 0.002, 0.0002, 0.0002])
    assert recipes.get("paper-pretrain", epochs=3).epochs == 3
    assert not recipes.get("paper-imagenet-finetune").nesterov


def test_cosine_with_warmup() -> None:
    recipe = Recipe(1, lr=1.0, warmup=0.25)
    rates = [recipe.learning_rate(step, 8) for step in range(8)]
    assert rates[:3] == pytest.approx([0.5, 1.0, 1.0])
    assert rates[5] == pytest.approx(0.5)
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] > 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0),
        ("lr", -1.0),
        ("lr", math.nan),
        ("momentum", 1.0),
        ("distill", 1.5),
        ("schedule", "linear"),
        ("precision", "fp16"),
        ("milestones", (0.75, 0.5)),
        ("warmup", 2),
        ("seed", -1),
    ],
)
def test_recipes_name_the_bad_field(field: str, value: object) -> None:
    with pytest.raises(HapError) as caught:
        recipes.get("digits", **{field: value})
    assert field in str(caught.value)
    assert repr(value) in str(caught.value)


def test_unknown_recipes_and_fields() -> None:
    with pytest.raises(HapError, match=r"'papers'.*paper-finetune"):
        recipes.get("papers")
    with pytest.raises(HapError, match=r"'rate'.*lr"):
        recipes.get("digits", rate=1)
    with pytest.raises(HapError, match="'epochs'"):
        Recipe.from_dict({"lr": 0.1})
    with pytest.raises(HapError, match="nesterov"):
        Recipe(1, momentum=0.0)


# Files


def test_write_atomic_keeps_the_old_file_on_failure(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.json"
    write_json(path, {"a": [1, None]})
    assert json.loads(path.read_text()) == {"a": [1, None]}

    def half(temporary: Path) -> None:
        temporary.write_text("{")
        raise Interrupted

    with pytest.raises(Interrupted):
        write_atomic(path, half)
    assert json.loads(path.read_text()) == {"a": [1, None]}
    assert os.listdir(path.parent) == ["a.json"]
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, math.nan)


def test_unwritable_path_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HapError, match=r"cannot write .*file/a.json"):
        write_json(tmp_path / "file" / "a.json", {})
    with pytest.raises(HapError, match="cannot write"):
        write_json(tmp_path, {})


# Evaluation


def test_evaluate_by_hand() -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(2, 2, bias=False), nn.Dropout(0.5))
    nn.init.eye_(model[1].weight)
    model[0].eval()
    batches = [(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0])), (torch.zeros(1, 2), torch.tensor([0]))]
    found = evaluate(model, batches)
    losses = [math.log1p(math.exp(-2)), math.log1p(math.exp(2)), math.log(2)]
    assert (found.accuracy, found.count) == (2 / 3, 3)
    assert found.loss == pytest.approx(sum(losses) / 3)
    assert [m.training for m in model] == [False, True, True]
    with pytest.raises(HapError, match="no examples"):
        evaluate(model, [])
    with pytest.raises(HapError, match="no parameters"):
        evaluate(nn.Identity(), batches)


# Training


def test_digits_resnet_learns() -> None:
    torch.manual_seed(1)
    model, data = models.build("digits_resnet"), hap_data.load("digits")
    history = train(model, data, recipes.get("digits", epochs=5), progress=False)
    assert history.final_accuracy > 0.95
    assert evaluate(model, data).accuracy == history.final_accuracy
    assert not any(m.training for m in model.modules())


def test_step_is_plain_sgd(quarters: Data) -> None:
    """The loop against the update written out: v = 0.9 v + g + wd w, w = w - lr v (without Nesterov)."""
    recipe = Recipe(2, batch=52, lr=0.1, nesterov=False, weight_decay=0.01, augment=False, schedule="step")
    model, twin = tiny_model(), tiny_model()
    history = train(model, quarters, recipe, progress=False)
    momenta = [torch.zeros_like(p) for p in twin.parameters()]
    losses = []
    rates = iter([0.1, 0.1, 0.01, 0.001])
    for epoch in range(2):
        generator = torch.Generator().manual_seed(epoch_seed(recipe, epoch))
        for x, y in quarters.epoch(52, generator, augment=False):
            loss = nn.functional.cross_entropy(twin(x), y)
            losses.append(loss.item())
            grads = torch.autograd.grad(loss, list(twin.parameters()))
            rate = next(rates)
            with torch.no_grad():
                for p, g, v in zip(twin.parameters(), grads, momenta, strict=True):
                    v.mul_(0.9).add_(g + 0.01 * p)
                    p.sub_(rate * v)
    torch.testing.assert_close(weights(model), weights(twin))
    assert history.loss == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:]) / 2])
    assert history.lr == pytest.approx([0.1, 0.001])


def test_history_is_per_epoch_and_sparse_where_asked(quarters: Data) -> None:
    history = train(tiny_model(), quarters, dataclasses.replace(RECIPE, epochs=5, eval_every=2), progress=False)
    assert [a is None for a in history.accuracy] == [True, False, True, False, False]
    assert {len(v) for v in history.to_dict().values()} == {5} == {history.epochs}
    assert json.loads(json.dumps(history.to_dict())) == history.to_dict()
    assert min(history.images_per_second) > 0


def test_training_is_seeded_and_leaves_the_global_generator_alone(quarters: Data) -> None:
    one, two, other = tiny_model(), tiny_model(), tiny_model()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    train(one, quarters, RECIPE, progress=False)
    assert torch.equal(torch.rand(3), expected)
    train(two, quarters, RECIPE, progress=False)
    train(other, quarters, dataclasses.replace(RECIPE, seed=6), progress=False)
    assert torch.equal(weights(one), weights(two))
    assert not torch.equal(weights(one), weights(other))


@pytest.mark.parametrize("extra", [{}, {"ema": 0.9, "eval_every": 3}, {"momentum": 0.0, "nesterov": False}])
def test_interrupted_and_resumed_is_uninterrupted(
    quarters: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: dict[str, object]
) -> None:
    recipe = dataclasses.replace(RECIPE, **extra)
    path = tmp_path / "a" / "run.safetensors"
    whole, parts = tiny_model(dropout=0.2), tiny_model(dropout=0.2)
    history = train(whole, quarters, recipe, progress=False)
    with monkeypatch.context() as patch:
        interrupt_in_epoch(patch, 3)
        with pytest.raises(Interrupted):
            train(parts, quarters, recipe, checkpoint=path, progress=False)
    resumed = train(other := tiny_model(9, dropout=0.2), quarters, recipe, checkpoint=path, progress=False)
    assert torch.equal(weights(other), weights(whole))
    assert (resumed.loss, resumed.lr, resumed.accuracy) == (history.loss, history.lr, history.accuracy)
    again = tiny_model(9, dropout=0.2)
    assert train(again, quarters, recipe, checkpoint=path, progress=False) == resumed
    assert torch.equal(weights(again), weights(whole))
    assert os.listdir(path.parent) == ["run.safetensors"]


def test_checkpoint_of_something_else_is_refused(quarters: Data, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    train(tiny_model(), quarters, dataclasses.replace(RECIPE, epochs=1), checkpoint=path, progress=False)
    recipe = dataclasses.replace(RECIPE, epochs=1)
    wider = tiny_model()
    wider[0], wider[1], wider[6] = nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Linear(32, 4)
    renamed = dataclasses.replace(quarters, name="halves")
    for model, data, chosen, words in [
        (tiny_model(), quarters, dataclasses.replace(recipe, lr=0.5), r"another recipe \(lr is 0.05, expected 0.5\)"),
        (wider, quarters, recipe, r"another model \(model.0.weight is \[6, 1, 3, 3\], expected \[8, 1, 3, 3\]\)"),
        (tiny_model(), renamed, recipe, r"another data \(name is quarters, expected halves\)"),
    ]:
        with pytest.raises(HapError, match=words):
            train(model, data, chosen, checkpoint=path, progress=False)
    path.write_bytes(b"broken")
    with pytest.raises(HapError, match="cannot read checkpoint"):
        train(tiny_model(), quarters, recipe, checkpoint=path, progress=False)


def test_exploding_loss_stops_with_its_epoch_and_keeps_the_checkpoint(quarters: Data, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    steep = dataclasses.replace(RECIPE, lr=1e30, nesterov=False, weight_decay=1.0)
    with pytest.raises(HapError, match=r"training loss is (nan|inf) in epoch 1: lower the learning rate"):
        train(tiny_model(), quarters, steep, checkpoint=path, progress=False)
    assert not path.exists()


def test_average_is_evaluated_and_kept(quarters: Data) -> None:
    plain, averaged = tiny_model(), tiny_model()
    train(plain, quarters, RECIPE, progress=False)
    history = train(averaged, quarters, dataclasses.replace(RECIPE, ema=0.95), progress=False)
    assert not torch.equal(plain[0].weight, averaged[0].weight)
    assert torch.equal(plain[1].running_mean, averaged[1].running_mean)
    assert evaluate(averaged, quarters).accuracy == history.final_accuracy


def test_distillation_follows_the_teacher(quarters: Data) -> None:
    """Labels are noise and the student hears only the teacher: it must learn what the teacher knows."""
    teacher = tiny_model(3)
    train(teacher, quarters, dataclasses.replace(RECIPE, epochs=12), progress=False)
    assert evaluate(teacher, quarters).accuracy > 0.95
    noise = torch.randint(0, 4, (104,), generator=torch.Generator().manual_seed(1))
    blind = dataclasses.replace(quarters, train=Split(quarters.train.images, noise))
    before = weights(teacher)
    student = tiny_model(4)
    recipe = dataclasses.replace(RECIPE, epochs=12, distill=1.0)
    assert train(student, blind, recipe, teacher=teacher, progress=False).final_accuracy > 0.9
    assert torch.equal(weights(teacher), before)
    assert all(p.requires_grad for p in teacher.parameters())
    with pytest.raises(HapError, match=r"distill=1.0 but no teacher"):
        train(student, blind, recipe, progress=False)


def test_bf16_trains_float32_weights(quarters: Data) -> None:
    model, exact = tiny_model(), tiny_model()
    history = train(model, quarters, dataclasses.replace(RECIPE, precision="bf16"), progress=False)
    other = train(exact, quarters, RECIPE, progress=False)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert history.loss == pytest.approx(other.loss, rel=0.05)
    assert history.loss != other.loss


def test_a_network_with_another_number_of_classes_is_refused(quarters: Data) -> None:
    with pytest.raises(HapError, match=r"into \(1, 3\): expected \(1, 4\)"):
        train(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), quarters, RECIPE, progress=False)


def test_tensorboard_log_and_progress(quarters: Data, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    history = train(tiny_model(), quarters, RECIPE, log_dir=tmp_path / "log")
    events = EventAccumulator(str(tmp_path / "log"))
    events.Reload()
    assert [e.value for e in events.Scalars("accuracy")] == pytest.approx(history.accuracy)
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3, 4]
    assert "epoch 4/4" in capsys.readouterr().err


def test_small_data_makes_one_batch(quarters: Data) -> None:
    history = train(tiny_model(), quarters, dataclasses.replace(RECIPE, epochs=1, batch=4096), progress=False)
    assert history.epochs == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_steps_agree_with_plain_ones_on_cuda(quarters: Data) -> None:
    recipe = dataclasses.replace(RECIPE, ema=0.9, distill=0.5)
    plain, recorded = (tiny_model().cuda() for _ in range(2))
    train(plain, quarters, recipe, teacher=tiny_model(5), graphs=False, progress=False)
    train(recorded, quarters, recipe, teacher=tiny_model(5), progress=False)
    torch.testing.assert_close(weights(plain), weights(recorded), rtol=1e-2, atol=1e-3)
    assert all(p.is_contiguous() and p.grad is None for p in recorded.parameters())
