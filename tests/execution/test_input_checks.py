"""What a user gives, and in which mode: what nothing can be computed with is refused in one sentence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from cases import CASES


def given() -> tuple[nn.Module, Any]:
    model, example = CASES["plain"]()
    return model.eval(), example


def prune(model: Any, example: Any) -> Any:
    return hap.prune_(model, example, criterion="magnitude", flops=0.5)


def made_in_inference_mode() -> tuple[nn.Module, Any]:
    with torch.inference_mode():
        return given()


def quantised() -> tuple[nn.Module, Any]:
    model, example = given()
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}), example


def on_meta(model: nn.Module, example: Tensor) -> tuple[nn.Module, Any]:
    return model.to("meta"), example.to("meta")


WRONG: dict[str, tuple[Callable[[], tuple[Any, Any]], str]] = {
    "function": (lambda: (torch.relu, given()[1]), r"model is a builtin\w+; expected a torch.nn.Module"),
    "script": (lambda: (torch.jit.script(given()[0]), given()[1]), "TorchScript.*prune the module that it was made"),
    "both on meta": (lambda: on_meta(*given()), r"0\.0\.weight is on the meta device, which holds no values; expected"),
    "model on meta": (lambda: (given()[0].to("meta"), given()[1]), r"0\.0\.weight is on the meta device"),
    "example on meta": (lambda: (given()[0], given()[1].to("meta")), "an input of the example is on the meta device"),
    "lazy": (lambda: (nn.Sequential(nn.Flatten(), nn.LazyLinear(8)), given()[1]), r"1\.weight has no shape yet.*run"),
    "quantised": (quantised, r"\d is quantised, .* prune the model first, then quantise it"),
    "no samples": (lambda: (given()[0], given()[1][:0]), r"the example has shape \(0, 3, \d+, \d+\), which is empty"),
    "inference": (made_in_inference_mode, r"0\.0\.weight was made in inference mode.*make the model outside"),
}


@pytest.mark.filterwarnings("ignore:.*(torch.jit|quantize)")
@pytest.mark.parametrize("verb", [prune, hap.trace, hap.parts])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str, verb: Callable[[Any, Any], Any]) -> None:
    make, words = WRONG[name]
    with pytest.raises(hap.HapError, match=words) as found:
        verb(*make())
    assert "\n" not in str(found.value)


def two(example: Tensor) -> list[Any]:
    return [(example[:2].clone(), torch.tensor([0, 1]))]


@pytest.mark.parametrize("options", [{"criterion": "magnitude"}, {}, {"implant": 0.3, "compensate": True}])
def test_a_model_pruned_in_inference_mode_can_be_trained(options: dict[str, Any]) -> None:
    model, example = given()
    with torch.inference_mode():
        hap.prune_(model, example.clone(), two(example), F.cross_entropy, flops=0.5, **options)
        assert torch.is_inference_mode_enabled()
    assert not any(t.is_inference() for t in [*model.parameters(), *model.buffers()])
    model.train()(example).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_steps_one_by_one_in_inference_mode() -> None:
    model, example = given()
    with torch.inference_mode():
        groups = hap.trace(model, example)
        scores = hap.score(model, groups, two(example), F.cross_entropy)
        hap.apply_(model, hap.plan(groups, scores, hap.Budget(flops=0.5)), example)
    model.train()(example).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_model_made_in_inference_mode_is_pruned_there() -> None:
    with torch.inference_mode():
        model, example = given()
        plan = prune(model, example)
        assert plan.after.macs <= plan.before.macs / 2 and model(example).shape == (len(example), 5)
