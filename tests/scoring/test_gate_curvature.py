"""GateCurvature: against whole Jacobians, across couplings and layers, and against what removal does to the loss."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from test_samples_first import Attention, score
from test_score import LOSSES, batches_for, close
from torch import Tensor, nn

import exact
import hap
from cases import CASES, Net
from checks import assert_unchanged, snapshot, traced

NAMES = [
    "residual",
    "bias_without_norm",
    "vgg",
    "strided_and_pooled",
    "conv1d",
    "mlp_with_norm",
    "preactivation",
    "grouped_many",
    "grouped_few",
    "depthwise",
    "inverted_residual",
    "dense_block",
    "concatenated_flattened",
]


@pytest.mark.parametrize("coupling", ["joint", "union"])
@pytest.mark.parametrize("name", NAMES)
def test_is_the_curvature_of_a_gate(name: str, coupling: str) -> None:
    model, example = CASES[name]()
    groups, batches = traced(name, coupling), batches_for(example, model(example).shape[1])
    before = snapshot(model)
    scores = hap.score(model, groups, batches, F.cross_entropy, "gate-curvature")
    assert_unchanged(model, before)
    assert scores.about == {"method": "gauss-newton"}
    assert close(scores, exact.gate_curvature(model, groups, batches, F.cross_entropy))


@pytest.mark.parametrize("kind", LOSSES)
def test_other_losses(kind: str) -> None:
    model, example = CASES["residual"]()
    groups, batches = traced("residual", "union"), batches_for(example, model(example).shape[1], kind)
    loss = LOSSES[kind][0]
    scores = hap.score(model, groups, batches, loss, hap.GateCurvature())
    assert close(scores, exact.gate_curvature(model, groups, batches, loss))


def wide_mlp(outputs: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, outputs))
    return model.double().eval(), torch.randn(2, 6, dtype=torch.float64)


def test_many_outputs_are_sampled_without_bias() -> None:
    model, example = wide_mlp(30)
    groups, batches = hap.trace(model, example), batches_for(example, 30)
    scores = hap.score(model, groups, batches, F.cross_entropy, hap.GateCurvature(draws=400))
    wanted = exact.gate_curvature(model, groups, batches, F.cross_entropy)
    assert scores.about == {"method": "gauss-newton", "draws": 400}
    off = torch.cat([((scores[n] - wanted[n]) / scores.errors[n].clamp_min(1e-30)).abs() for n in wanted])
    assert off.max() < 4 and off.median() < 1


def test_squared_error_of_the_last_layer_is_what_removal_does() -> None:
    """The outputs are linear in the gates of the last hidden units, and their own loss is stationary: the second order
    is all there is."""
    model, example = wide_mlp(4)
    x = torch.randn(7, 6, dtype=torch.float64)
    batches = [(x, model(x).detach())]
    groups = hap.trace(model, example)
    last = list(groups)[-1]
    scores = hap.score(model, groups, batches, F.mse_loss, "gate-curvature")[last]
    for unit in range(len(groups[last])):
        pruned = hap.apply_(wide_mlp(4)[0], hap.draft(groups, {last: [unit]}), example)
        assert F.mse_loss(pruned(x), batches[0][1]).item() == pytest.approx(float(scores[unit]), rel=1e-10, abs=1e-15)


def test_a_shift_behind_the_weights_counts() -> None:
    """A unit whose weights are nearly zero hands on its BatchNorm's shift, which goes with it: equation 6 sees
    nothing of that."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3)
    )
    with torch.no_grad():
        model[0].weight[1] *= 1e-6
        model[1].bias[1] = 3.0
    model, example = model.double().eval(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    groups, batches = hap.trace(model, example), batches_for(example, 3)
    by_gate = hap.score(model, groups, batches, F.cross_entropy, "gate-curvature")["0"]
    by_trace = hap.score(model, groups, batches, F.cross_entropy, "hessian")["0"]
    assert by_gate.argmax() == 1 and by_trace.argmin() == 1


class Squashed(nn.Linear):
    """Not the layer that it is a kind of."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sigmoid())


REFUSED = {
    "maps": (lambda m, x: m.b(m.a(x).relu()), "output is not one vector per sample"),
    "by name": (lambda m, x: m.fc(input=m.a(x).relu().mean((2, 3))), "fc is called with its input by name"),
    "another layer": (lambda m, x: m.odd(m.a(x).relu().mean((2, 3))), "odd.weight reads group 'a' other than by one"),
    "a product": (
        lambda m, x: m.fc((z := m.a(x).relu().flatten(2)).matmul((z.mT @ z).softmax(-1).mT).mean(2)),
        "group 'a' is read by a product of activations",
    ),
    "samples last": (lambda m, x: m.fc(m.a(x).relu().mean(3).permute(2, 0, 1)).mean(0), "is not that of the samples"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_gate_is_refused(name: str) -> None:
    forward, words = REFUSED[name]
    torch.manual_seed(0)
    model = Net(forward, a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(4, 2, 3), fc=nn.Linear(4, 3), odd=Squashed(4, 3)).eval()
    x = torch.randn(6, 3, 8, 8)
    target = torch.arange(6) % 3 if name != "maps" else torch.zeros(6, 4, 4, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the example does not run all layers
        groups = hap.trace(model, x)
    with pytest.raises(hap.HapError, match=words):
        hap.score(model, groups, [(x, target)], F.cross_entropy, "gate-curvature")


def test_settings() -> None:
    with pytest.raises(hap.HapError, match="draws=1; expected at least 2"):
        hap.GateCurvature(draws=1)


@pytest.mark.parametrize("tokens", [5, 6])
def test_heads_of_samples_and_tokens_first(tokens: int) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(tokens, 5, 16, dtype=torch.float64), torch.arange(5) % 3
    with pytest.raises(hap.HapError, match=r"not that of the samples|not one vector per sample"):
        score(Attention(True), x, y, hap.GateCurvature())
    model, samples_first = Attention(False), x.transpose(0, 1)
    scores = score(model, samples_first, y, hap.GateCurvature())
    groups = hap.trace(model, samples_first)
    wanted = exact.gate_curvature(model, hap.only(groups, ("q",)), [(samples_first, y)], F.cross_entropy)["q"]
    assert len(scores) == 4 and torch.allclose(scores, wanted, rtol=1e-10)
