"""Quick walks find what torch's own do."""

from __future__ import annotations

import torch
from torch import nn

from hap.utils.module_tree import every_module, named_tensors, set_mode


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


def test_walks_find_the_same_in_the_same_order() -> None:
    model = shared()
    assert list(map(id, every_module(model))) == list(map(id, model.modules()))
    wanted = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    assert [(n, id(t)) for n, t in named_tensors(model).items()] == [(n, id(t)) for n, t in wanted]


def test_a_mode_reaches_all_modules_and_those_with_a_way_of_their_own() -> None:
    plain, telling = shared(), nn.Sequential(nn.Dropout(), Telling(2, 2))
    for mode in (False, True):
        for model in (plain, telling):
            set_mode(model, mode)
            assert all(module.training is mode for module in model.modules())
        assert telling[1].told is mode
    scripted = torch.jit.trace(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2))
    set_mode(scripted, training=False)
    assert not scripted.training
