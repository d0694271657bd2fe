"""export: the files run elsewhere and give the same numbers."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hap
from cases import CASES
from checks import assert_unchanged, check_cost, gap, random_plan, run, snapshot, traced


def onnx_outputs(path: Path, example: torch.Tensor) -> list[torch.Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    outputs = session.run(None, {session.get_inputs()[0].name: np.ascontiguousarray(example.numpy())})
    return [torch.from_numpy(o) for o in outputs]


@pytest.mark.parametrize("coupling", ["joint", "union"])
def test_resnet56_end_to_end(coupling: str, tmp_path: Path) -> None:
    """Budget met, verified, trains a step, saves, reloads, exports to both formats with equal outputs."""
    torch.manual_seed(0)
    model = hap.models.build("resnet56").eval()
    dense = copy.deepcopy(model)
    example = torch.randn(2, 3, 32, 32)
    plan = hap.prune_(model, example, flops=0.4, implant=hap.Pointwise(0.2, init="center"), coupling=coupling,
                      criterion="magnitude")  # fmt: skip
    assert plan.after.macs <= 0.4 * plan.before.macs
    assert plan.after.macs > 0.39 * plan.before.macs
    check_cost(model, plan.after, example)
    assert any(plan.implanted.values()) and (coupling == "joint" or plan.widenings)
    optimiser = torch.optim.SGD(model.train().parameters(), 0.01)
    nn.functional.cross_entropy(model(example), torch.tensor([1, 2])).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    optimiser.step()
    wanted = run(model, example)
    path = hap.save(tmp_path / "a.safetensors", model, plan)
    loaded = hap.load(path, dense)
    assert torch.equal(run(loaded, example)[0], wanted[0])
    before = snapshot(loaded)
    onnx = hap.export(tmp_path / "a.onnx", loaded, example)
    program = hap.export(tmp_path / "a.pt2", loaded, example)
    assert_unchanged(loaded, before)
    assert gap(wanted, onnx_outputs(onnx, example)) <= 1e-5
    assert gap(wanted, [torch.export.load(program).module()(example)]) <= 1e-6
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.onnx", "a.pt2", "a.safetensors"]


@pytest.mark.parametrize("name", ["residual", "gated_unit", "unet_transposed", "grouped_few"])
def test_pruned_networks_run_in_onnx(name: str, tmp_path: Path) -> None:
    model, example = CASES[name]()
    plan = random_plan(traced(name, "union"), 0, 0.5, hap.Pointwise(init="center"))
    pruned = hap.apply_(model, plan, example=example).float()
    path = hap.export(tmp_path / "a.onnx", pruned, example.float())
    assert gap(run(pruned, example.float()), onnx_outputs(path, example.float())) <= 1e-5


def test_a_model_in_training_mode_is_exported_in_eval_mode(tmp_path: Path) -> None:
    model, example = CASES["vgg"]()
    wanted = run(model, example)
    model.train()
    before = snapshot(model)
    path = hap.export(tmp_path / "a.pt2", model, example)
    assert_unchanged(model, before)
    assert gap(wanted, [torch.export.load(path).module()(example)]) <= 1e-12


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("name", "model", "words"),
    [
        ("a.txt", nn.Linear(2, 2), r"must end in \.onnx or \.pt2"),
        ("a", nn.Linear(2, 2), r"must end in \.onnx or \.pt2"),
        ("a.pt2", Branching(), "torch.export cannot capture Branching"),
        ("file/a.pt2", nn.Linear(2, 2), "cannot write"),
        ("file/a.onnx", nn.Linear(2, 2), "cannot write"),
    ],
)
def test_refusals(name: str, model: Any, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(hap.HapError, match=words):
        hap.export(tmp_path / name, model, torch.randn(1, 2))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
