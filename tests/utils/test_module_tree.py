"""Tensors go by all their names, and equal modules are told from others."""

from __future__ import annotations

import torch
from torch import nn

from hap.execution.calling import eval_mode
from hap.utils.module_tree import named_tensors, same_modules


class Telling(nn.Linear):
    """Does more than set a flag when its mode changes."""

    def train(self, mode: bool = True) -> Telling:
        self.told = mode
        return super().train(mode)


def shared() -> nn.Module:
    """A module and a parameter with two names each, a missing bias and a missing module, and some buffers."""
    block = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model = nn.Sequential(block, nn.Linear(3, 3, bias=False), nn.Sequential(block, nn.BatchNorm1d(3, affine=False)))
    model[1].weight = block[0].weight
    model.register_module("none", None)
    model.register_buffer("nothing", None)
    return model


def test_tensors_are_found_under_all_their_names() -> None:
    model = shared()
    found = named_tensors(model)
    assert found["0.0.weight"] is found["1.weight"] is found["2.0.0.weight"]
    assert found["0.1.running_mean"] is found["2.0.1.running_mean"]
    wanted = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    assert [(n, id(t)) for n, t in found.items()] == [(n, id(t)) for n, t in wanted]


def test_a_mode_reaches_all_modules_and_those_with_a_way_of_their_own() -> None:
    plain, telling = shared(), nn.Sequential(nn.Dropout(), Telling(2, 2))
    for model in (plain, telling):
        with eval_mode(model):
            assert not any(module.training for module in model.modules())
            assert model is plain or telling[1].told is False
        assert all(module.training for module in model.modules())
    assert telling[1].told is True
    scripted = torch.jit.trace(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2))
    with eval_mode(scripted):
        assert not scripted.training
    assert scripted.training


def test_modules_with_other_numbers_of_submodules_are_not_the_same() -> None:
    short, long = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert same_modules(short, nn.Sequential(nn.Linear(2, 2))) and not same_modules(short, long)
