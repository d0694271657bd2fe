"""Repairs by name: prune_ gives back a network that works, or leaves the model as it was."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hap
from checks import assert_unchanged, snapshot
from hap.distil.descent import Clock


def network() -> tuple[nn.Module, Any, list[Any]]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 12, 3), nn.BatchNorm2d(12), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(12 * 16, 5))
    x = torch.randn(1024, 3, 8, 8)
    model.train()(x)
    return model.eval(), x[:2], [(x, None)]


def error(model: nn.Module, dense: nn.Module, x: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(x) - dense(x)).square().mean())


def test_repairs_bring_the_outputs_nearer() -> None:
    dense, example, batches = network()
    fresh = torch.randn(256, 3, 8, 8)
    errors = {}
    for repair in (None, "norms", "compensate", "refit"):
        model = copy.deepcopy(dense)
        plan = hap.prune_(model, example, batches, criterion="magnitude", flops=0.5, repair=repair)
        assert hap.cost(model, example).macs == plan.after.macs
        errors[repair] = error(model, dense, fresh)
    assert errors["refit"] == min(errors.values()) < 0.5 * errors[None], errors


def test_the_older_option_means_the_same() -> None:
    dense, example, batches = network()
    first, second = copy.deepcopy(dense), copy.deepcopy(dense)
    hap.prune_(first, example, batches, criterion="magnitude", flops=0.5, compensate=True)
    hap.prune_(second, example, batches, criterion="magnitude", flops=0.5, repair="compensate")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_minutes_after_the_refit_bring_them_nearer_still(monkeypatch: pytest.MonkeyPatch) -> None:
    # A step takes 10 ms of these minutes on every machine, however busy.
    monkeypatch.setattr(Clock, "seconds", property(lambda clock: 0.01 * clock.steps))
    dense, example, batches = network()
    fresh, seen, errors = torch.randn(256, 3, 8, 8), list[int](), {}

    def augment(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return x.flip(3)

    for how in ({"repair": "refit"}, {"minutes": 0.01}, {"repair": "distil", "minutes": 0.01, "augment": augment}):
        model = copy.deepcopy(dense)
        hap.prune_(model, example, batches, criterion="magnitude", flops=0.5, **how)
        errors[str(how)] = error(model, dense, fresh)
        assert all(p.grad is None and p.requires_grad for p in model.parameters()) and not model.training
    refitted, *distilled = errors.values()
    assert max(distilled) < refitted, errors
    assert sum(seen)


def test_minutes_are_for_distillation_alone() -> None:
    dense, example, batches = network()
    before = snapshot(dense)
    for how, words in (
        ({"repair": "refit", "minutes": 1}, "repair is 'refit', which takes no minutes; they are for 'distil'"),
        ({"compensate": True, "minutes": 1}, "repair is 'compensate', which takes no minutes"),
        ({"minutes": -1}, "minutes is -1; expected a number above 0"),
    ):
        with pytest.raises(hap.HapError, match=words):
            hap.prune_(dense, example, batches, criterion="magnitude", flops=0.5, **how)
    with pytest.raises(hap.HapError, match="repair='distil' needs batches"):
        hap.prune_(dense, example, criterion="magnitude", flops=0.5, minutes=1)
    assert_unchanged(dense, before)


@pytest.mark.parametrize("repair", ["refit", "norms", "compensate", "distil"])
def test_a_repair_that_fails_leaves_the_model_as_it_was(repair: str) -> None:
    dense, example, _ = network()
    before = copy.deepcopy(dense.state_dict())
    with pytest.raises(hap.HapError, match="needs batches"):
        hap.prune_(dense, example, criterion="magnitude", flops=0.5, repair=repair)
    with pytest.raises(Exception, match=r"5|channels|shape"):
        hap.prune_(dense, example, [(torch.randn(4, 5, 8, 8), None)], criterion="magnitude", flops=0.5, repair=repair)
    assert dense[0].out_channels == 12
    assert all(torch.equal(tensor, before[name]) for name, tensor in dense.state_dict().items())


def test_an_unknown_repair_is_refused_with_those_that_are_known() -> None:
    dense, example, batches = network()
    before = snapshot(dense)
    with pytest.raises(hap.HapError, match="'magic'; expected one of 'refit', 'norms', 'compensate', 'distil'"):
        hap.prune_(dense, example, batches, criterion="magnitude", flops=0.5, repair="magic")
    assert_unchanged(dense, before)


def test_a_refitted_network_is_saved_and_loaded(tmp_path: Any) -> None:
    dense, example, batches = network()
    model = copy.deepcopy(dense)
    plan = hap.prune_(model, example, batches, criterion="magnitude", flops=0.4, implant=0.3, repair="refit")
    hap.save(tmp_path / "pruned.safetensors", model, plan)
    loaded = copy.deepcopy(dense)
    hap.load(tmp_path / "pruned.safetensors", loaded)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(example), model(example))


def test_narrow_heads_are_refitted() -> None:
    from huggingface import small

    model, example = small("bert")
    dense = copy.deepcopy(model)
    ids = torch.randint(0, 50, (64, example["input_ids"].shape[1]))
    inputs = {key: ids if key == "input_ids" else torch.ones_like(ids) for key in example if key != "token_type_ids"}
    groups = hap.narrowable(model, hap.trace(model, example), example)
    heads = hap.only(groups, hap.heads(groups))
    scores = hap.score(model, heads, None, None, "magnitude")
    plan = hap.plan(heads, scores, hap.Budget(channels=0.75), implant=hap.NarrowHeads(ratio=0.5))
    hap.apply_(model, plan, example)
    report = hap.refit_(model, dense, [(inputs, None)], plan)
    assert report.after < report.before
