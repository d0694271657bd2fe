"""Products that torch's own counter passes over, against sums done by hand, and the ones that nobody can count."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hap
from hap.planning.cost import CostModel
from hap.planning.mac_counter import Counter, _may_multiply, _recurrent
from hap.pruning.plan_for_latency import _Search


class Applied(nn.Module):
    """A layer of 4 units, which can be pruned, beside a function of the input and a weight."""

    def __init__(self, function: Callable[..., Tensor], *weight: int):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(weight))
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, small: Tensor) -> Any:
        return self.function(x, self.weight), self.last(self.first(small).relu())


def offsets(*ends: int) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def grouped(x: Tensor, w: Tensor, *ends: int) -> Tensor:
    return torch._grouped_mm(x.bfloat16(), w.bfloat16(), offsets(*ends) if ends else None)


PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...], int]] = {
    "rows in groups": (lambda x, w: grouped(x, w, 2, 5), (5, 16), (2, 16, 8), 5 * 16 * 8),
    "batches in groups": (grouped, (2, 8, 16), (2, 16, 8), 2 * 8 * 16 * 8),
    "columns in groups": (lambda x, w: grouped(x, w, 8, 24), (2, 8, 16), (16, 24), 8 * 16 * 24),
    "sums in groups": (lambda x, w: grouped(x, w, 8, 16), (8, 16), (16, 8), 8 * 16 * 8),
    "matrix by vector": (torch.matmul, (5, 6), (6,), 30),
    "vectors": (torch.dot, (6,), (6,), 6),
    "added matrix by vector": (lambda x, w: torch.addmv(x[:, 0], x, w), (5, 6), (6,), 30),
    "outer": (lambda x, w: torch.addr(x, x[:, 0], w), (5, 6), (6,), 30),
    "batches added up": (lambda x, w: torch.addbmm(x[0, :, :4], x, w), (3, 5, 6), (3, 6, 4), 3 * 5 * 6 * 4),
    "in place": (lambda x, w: x[:, :4].clone().addmm_(x, w), (5, 6), (6, 4), 120),
    "integers": (lambda x, w: torch._int_mm(x.to(torch.int8), w.to(torch.int8)), (32, 16), (16, 8), 32 * 16 * 8),
    "bilinear": (lambda x, w: nn.functional.bilinear(x, x, w), (2, 5), (3, 5, 5), 2 * 3 * 5 * 5),
    "distances": (torch.cdist, (7, 5, 6), (1, 4, 6), 7 * 5 * 4 * 6),
    "distances of many": (torch.cdist, (30, 6), (40, 6), 30 * 40 * 6),
    "time first": (lambda x, w: torch.conv_tbc(x, w, w[0, 0], 1), (5, 2, 6), (3, 6, 4), 5 * 2 * 3 * 6 * 4),
}


def planned(model: nn.Module, example: Any) -> int:
    groups = hap.trace(model, example)
    all_of_it = np.ones(groups.classes, dtype=bool)
    return CostModel(groups)(all_of_it, ~all_of_it).macs


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_by_hand(name: str) -> None:
    function, given, weight, macs = PRODUCTS[name]
    model, example = Applied(function, *weight).eval(), (torch.randn(given), torch.randn(3, 2))
    count = hap.cost(model, example)
    assert count.macs == macs + 3 * (2 * 4 + 4 * 3) == planned(model, example)


@pytest.mark.parametrize(("layers", "both"), [(1, False), (2, True)])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: Any, layers: int, both: bool) -> None:
    """Alike whether a kernel does all steps at once, on a processor or a graphics card, or torch step by step."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps, self.last = kind(6, 5, layers, bidirectional=both, batch_first=True), nn.Linear(5 + 5 * both, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.steps(x)[0][:, -1])

    model, example = Recurrent().eval(), torch.randn(2, 7, 6)
    matrices = [p for p in model.steps.parameters() if p.ndim == 2]
    macs = 2 * 7 * sum(p.numel() for p in matrices)
    assert hap.cost(model, example).by_module["steps"] == macs
    assert planned(model, example) == macs + 2 * model.last.weight.numel()
    assert _recurrent(example.shape, [p.shape for p in model.steps.parameters()]) == macs


@torch.library.custom_op("hap_tests::mix", mutates_args=())
def mix(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


@mix.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(len(x), weight.shape[1])


def test_a_budget_says_what_it_does_not_count() -> None:
    model, example = Applied(lambda x, w: mix(x, w), 6, 5).eval(), (torch.randn(4, 6), torch.randn(3, 2))
    groups = hap.trace(model, example)
    assert groups.costs.uncounted == ("hap_tests::mix",)
    scores = hap.score(model, groups, None, None, "magnitude")
    with pytest.warns(UserWarning, match="flops=0.6 is met without counting hap_tests::mix, which may be a matrix"):
        hap.plan(groups, scores, hap.Budget(flops=0.6))
    with pytest.warns(UserWarning, match="without counting hap_tests::mix"):
        hap.prune_(model, example, criterion="magnitude", flops=0.6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hap.plan(groups, scores, hap.Budget(params=0.9))
        timed = _Search(model, groups, scores, _Watch(), 0.5, None, hap.Limits(), False)  # type: ignore[arg-type]
        timed.least[1] = 0.0
        assert timed._plan(0.6, 1).after.macs <= 0.6 * timed._plan(1.0, 1).before.macs


class _Watch:
    def add(self, model: nn.Module) -> None: ...


def test_what_may_be_a_matrix_product() -> None:
    x, w, boxes = torch.randn(4, 6, 8, 8), torch.randn(5, 6, 3, 3), torch.randn(9, 5)
    named = "_sparse_addmm", "_weight_int8pack_mm", "_spsolve", "linalg_matrix_exp", "mkldnn_linear", "_lstm_mps"
    assert all(_may_multiply(f"aten::{name}", ()) for name in (*named, "slow_conv_dilated2d", "_linalg_svd"))
    harmless = "relu_", "lgamma", "hamming_window", "linalg_vector_norm", "upsample_bilinear2d", "_thnn_fused_lstm_cell"
    assert not any(_may_multiply(f"aten::{name}", (x, w)) for name in (*harmless, "mvlgamma", "add", "_fft_r2c"))
    assert _may_multiply("torchvision::deform_conv2d", ()) and _may_multiply("quantized::linear", ())
    assert _may_multiply("mine::contract", (x, w)) and _may_multiply("mine::contract", {"x": [x, w]})
    assert not _may_multiply("torchvision::roi_align", (x, boxes)) and not _may_multiply("mine::act", (x, w[0, 0, 0]))


def test_no_common_operator_is_taken_for_a_product() -> None:
    for name in ("resnet56", "preresnet29"):
        with Counter() as counter, torch.no_grad():
            hap.models.build(name).eval()(torch.randn(1, *hap.models.info(name).input_shape))
        assert counter.uncounted and not counter.unknown
