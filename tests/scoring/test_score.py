"""score: every criterion against its definition, and the model left as found."""

import copy
import random
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import exact
import hap
from cases import CASES, Net, conv, conv_bn, conv_bn_relu, images, pooled, randomise
from checks import assert_unchanged, random_plan, snapshot, traced
from hap.scoring.derivatives import affine_norms

SIZES = (2, 3, 1)  # batches of unequal size
LOSSES = {
    "cross-entropy": (F.cross_entropy, lambda n, k: torch.randint(0, k, (n,))),
    "binary": (F.binary_cross_entropy_with_logits, lambda n, k: torch.rand(n, k, dtype=torch.float64)),
    "squared": (F.mse_loss, lambda n, k: torch.randn(n, k, dtype=torch.float64)),
}


def batches_for(example: Tensor, outputs: int, kind: str = "cross-entropy") -> list[Any]:
    torch.manual_seed(1)
    make = LOSSES[kind][1]
    return [(torch.randn(n, *example.shape[1:], dtype=torch.float64), make(n, outputs)) for n in SIZES]


def problem(name: str, kind: str = "cross-entropy") -> tuple[nn.Module, Any, list[Any], Any]:
    model, example = CASES[name]()
    with torch.no_grad():
        outputs = model(example).shape[1]
    return model, traced(name, "joint"), batches_for(example, outputs, kind), LOSSES[kind][0]


def close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-10) -> bool:
    """Equal groups, and values equal relative to the largest of each group."""
    assert a.keys() == b.keys()
    assert any(float(b[n].abs().max()) > 0 for n in b)
    return all(float((a[n] - b[n]).abs().max()) <= tolerance * float(b[n].abs().max()) for n in a)


def minus(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: a[n] - b[n] for n in a}


def truth(model: nn.Module, groups: Any, batches: Any, loss: Any) -> dict[str, Tensor]:
    return exact.equation6(groups, model, exact.diagonals(model, exact.producers(groups), batches, loss))


@cache
def known(name: str, kind: str = "cross-entropy") -> dict[str, Tensor]:
    """The truth about a problem as it stands."""
    return truth(*problem(name, kind))


# ---- the Hessian's trace ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOSSES)
def test_exact_is_the_hessians_block_trace(kind: str) -> None:
    """Convolutions, BatchNorm in eval mode, ReLU, residual sums, a projection shortcut."""
    model, groups, batches, loss = problem("residual", kind)
    scores = hap.score(model, groups, batches, loss, hap.HessianTrace(method="exact"))
    assert scores.about["method"] == "exact" and not scores.errors
    assert close(scores, known("residual", kind))


@pytest.mark.parametrize(
    "name",
    [
        "bias_without_norm",
        "vgg",
        "dilated",
        "valid_padding",
        "same_padding",
        "reflect_padding",
        "strided_and_pooled",
        "conv1d",
        "mlp_with_norm",
        "prelu",
        "preactivation",
        "grouped_many",
        "grouped_few",
        "depthwise",
        "inverted_residual",
        "dense_block",
        "concatenated_flattened",
        "one_channel",
    ],
)
def test_exact_on_other_layers(name: str) -> None:
    model, groups, batches, loss = problem(name)
    batches = batches[::2]
    scores = hap.score(model, groups, batches, loss, hap.HessianTrace(method="exact"))
    assert close(scores, truth(model, groups, batches, loss))


def transposed_net() -> tuple[nn.Module, Tensor]:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(pooled(F.relu(m.grouped(F.relu(m.up(m.a(x)))))))

    torch.manual_seed(0)
    grouped = nn.ConvTranspose2d(4, 8, 3, groups=4, padding=1)
    up = nn.ConvTranspose2d(5, 4, 2, stride=2)
    model = Net(run, a=conv_bn_relu(3, 5, stride=2), up=up, grouped=grouped, head=nn.Linear(8, 3))
    return randomise(model.double()).eval(), images(2, 3, 6, 6)


def test_exact_on_transposed_convolutions() -> None:
    model, example = transposed_net()
    groups, batches = hap.trace(model, example), batches_for(example, 3)
    scores = hap.score(model, groups, batches, F.cross_entropy, hap.HessianTrace(method="exact"))
    assert close(scores, truth(model, groups, batches, F.cross_entropy))


def test_exact_in_union_coupling() -> None:
    model, _, batches, loss = problem("residual")
    groups = traced("residual", "union")
    scores = hap.score(model, groups, batches, loss, hap.HessianTrace(method="exact"))
    assert close(scores, truth(model, groups, batches, loss))


def test_exact_in_larger_batches_than_its_chunks() -> None:
    model, groups, _, loss = problem("plain")
    x, y = torch.randn(150, 3, 8, 8, dtype=torch.float64), torch.randint(0, 5, (150,))
    whole = hap.score(model, groups, [(x, y)], loss, "hessian")
    parts = hap.score(model, groups, [(x[:7], y[:7]), (x[7:], y[7:])], loss, "hessian")
    assert close(whole, parts)


def test_exact_with_label_smoothing_and_module_losses() -> None:
    model, groups, batches, _ = problem("plain")
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    assert close(hap.score(model, groups, batches, loss, "hessian"), truth(model, groups, batches, loss))


def test_a_loss_with_negative_curvature() -> None:
    """The Hessian in the outputs need not be positive: signs are kept."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return torch.sin(output).sum(1).mean()

    model, groups, batches, _ = problem("plain")
    scores = hap.score(model, groups, batches, loss, hap.HessianTrace(method="exact"))
    assert min(float(v.min()) for v in scores.values()) < 0
    assert close(scores, truth(model, groups, batches, loss))


def test_a_loss_without_curvature_scores_zero() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output.mean()

    model, groups, batches, _ = problem("plain")
    scores = hap.score(model, groups, batches, loss, hap.HessianTrace(method="exact"))
    assert all(torch.equal(v, torch.zeros_like(v)) for v in scores.values())


def test_a_loss_that_mixes_samples_is_refused() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output.mean(0).square().sum()

    model, groups, batches, _ = problem("plain")
    with pytest.raises(hap.HapError, match="mixes the samples"):
        hap.score(model, groups, batches, loss, hap.HessianTrace(method="exact"))


@pytest.mark.parametrize(
    "name",
    [
        "smooth",
        "squeeze_excite",
        "products_of_activations",
        "shared_module",
        "batch_norm_without_affine",
        "custom_operator",
    ],
)
def test_exact_is_refused_where_it_is_not_valid(name: str) -> None:
    model, groups, batches, loss = problem(name)
    with pytest.raises(hap.HapError, match="does not apply: the network is not piecewise linear"):
        hap.score(model, groups, batches, loss, hap.HessianTrace(method="exact"))
    scores = hap.score(model, groups, batches, loss, hap.HessianTrace(probes=4))
    assert scores.about == {"method": "hutchinson", "probes": 4}
    assert scores.errors.keys() == scores.keys()


def test_gauss_newton_is_named_so_where_it_is_not_the_hessian() -> None:
    model, groups, batches, loss = problem("smooth")
    scores = hap.score(model, groups, batches, loss, hap.HessianTrace(method="gauss-newton"))
    assert scores.about["method"] == "gauss-newton"
    assert not close(scores, known("smooth"), 1e-3)


def test_outputs_that_are_maps_fall_back() -> None:
    model, example = CASES["transposed"]()
    batches = [(example, torch.randn(2, 3, 8, 8, dtype=torch.float64))]
    groups = traced("transposed", "joint")
    scores = hap.score(model, groups, batches, F.mse_loss, hap.HessianTrace(probes=3))
    assert scores.about["method"] == "hutchinson"
    with pytest.raises(hap.HapError, match="not one vector per sample"):
        hap.score(model, groups, batches, F.mse_loss, hap.HessianTrace(method="exact"))


def test_a_weight_used_without_its_module() -> None:
    """Exact where it can see the layer work, or not at all; never a silent zero."""
    model, groups, batches, loss = problem("functional_weight")
    scores = hap.score(model, groups, batches, loss, hap.HessianTrace(probes=400))
    wanted = truth(model, groups, batches, loss)
    assert scores.about["method"] == "hutchinson"
    assert all(((scores[n] - wanted[n]).abs() <= 4 * scores.errors[n]).all() for n in groups)
    with pytest.raises(hap.HapError, match="used other than by one call of the layer that owns it"):
        hap.score(model, groups, batches, loss, hap.HessianTrace(method="exact"))


def test_fixed_filters_are_not_scored() -> None:
    """A filter kept as a buffer has no score of its own and stops no one else's."""
    model, groups, batches, loss = problem("blur_filter")
    assert "a" in groups or any(f.what for f in groups.frozen)
    scores = hap.score(model, groups, batches, loss, "magnitude")
    assert scores.keys() == groups.groups.keys()


# ---- sampled classes ------------------------------------------------------------------------------------------


def many_classes(classes: int = 30) -> tuple[nn.Module, Any, list[Any]]:
    torch.manual_seed(0)
    layers = conv_bn_relu(3, 12, stride=2), conv_bn_relu(12, 16, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    model = randomise(nn.Sequential(*layers, nn.Linear(16, classes)).double()).eval()
    batches = [(torch.randn(n, 3, 8, 8).double(), torch.randint(0, classes, (n,))) for n in (20, 12)]
    return model, hap.trace(model, images()), batches


def test_many_outputs_are_sampled() -> None:
    """The limit of a long run is the exact score, so that is what a short run is held against."""
    model, groups, batches = many_classes()
    scores = hap.score(model, groups, batches, F.cross_entropy)
    assert scores.about == {"method": "sampled", "draws": 8} and scores.errors.keys() == scores.keys()
    wanted = hap.score(model, groups, batches, F.cross_entropy, hap.HessianTrace(method="exact"))
    assert wanted.about["method"] == "exact"
    ranks = [torch.cat(list(s.values())).argsort().argsort().double() for s in (scores, wanted)]
    assert float(torch.corrcoef(torch.stack(ranks))[0, 1]) > 0.98


@pytest.mark.parametrize("kind", LOSSES)
def test_sampled_is_unbiased_and_knows_its_error(kind: str) -> None:
    model, groups, batches, loss = problem("residual", kind)
    scores = hap.score(model, groups, batches, loss, hap.HessianTrace(method="sampled", draws=100))
    apart, error = (torch.cat([v[n] for n in groups]) for v in (minus(scores, known("residual", kind)), scores.errors))
    off = (apart / error)[error > 0].abs()
    assert len(off) > 7 and off.max() < 5 and (off > 3).sum() <= 1
    assert 0.5 < off.square().mean().sqrt() < 1.6


def test_sampled_depends_on_its_seed() -> None:
    model, groups, batches = many_classes()
    first, again, other = (
        hap.score(model, groups, batches, F.cross_entropy, hap.HessianTrace(method="sampled", draws=4, seed=s))
        for s in (1, 1, 2)
    )
    assert all(torch.equal(first[n], again[n]) and not torch.equal(first[n], other[n]) for n in groups)


def test_losses_whose_curvature_cannot_be_sampled() -> None:
    def bends_both_ways(output: Tensor, target: Tensor) -> Tensor:
        return torch.sin(output).sum(1).mean()

    def couples_outputs(output: Tensor, target: Tensor) -> Tensor:
        return (output.sum(1) ** 2 + output.square().sum(1)).mean()

    model, groups, batches = many_classes(25)
    for loss, why in ((bends_both_ways, "bends both ways"), (couples_outputs, "neither a cross-entropy")):
        with pytest.raises(hap.HapError, match=why):
            hap.score(model, groups, batches, loss, hap.HessianTrace(method="sampled"))
        assert hap.score(model, groups, batches, loss, hap.HessianTrace(probes=2)).about["method"] == "hutchinson"


def test_exact_where_the_loss_couples_the_outputs() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output.sum(1) ** 2 + output.square().sum(1)).mean()

    model, groups, batches, _ = problem("plain")
    scores = hap.score(model, groups, batches, loss, hap.HessianTrace(method="exact"))
    assert close(scores, truth(model, groups, batches, loss))


def test_exact_with_weighted_classes_and_ignored_labels() -> None:
    """The mean of such a loss weighs a sample by what else is in the batch."""
    model, groups, batches, _ = problem("plain")
    batches[0][1][0] = -100
    weights = torch.tensor([0.1, 2.0, 1.0, 0.5, 3.0]).double()
    loss = nn.CrossEntropyLoss(weights)
    assert close(hap.score(model, groups, batches, loss, "hessian"), truth(model, groups, batches, loss))


# ---- Hutchinson ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deflate", [0, 4])
@pytest.mark.parametrize("name", ["residual", "smooth", "squeeze_excite"])
def test_hutchinson_is_within_three_standard_errors(name: str, deflate: int) -> None:
    """Counted over all units of the net: at most one in fifty beyond three, none beyond five; and errors are honest:
    the root mean square of (estimate - truth) / error is near one."""
    model, groups, batches, loss = problem(name)
    criterion = hap.HessianTrace(method="hutchinson", probes=300, chunk=25, deflate=deflate)
    scores = hap.score(model, groups, batches, loss, criterion)
    wanted = known(name)
    apart, error = (torch.cat([v[n] for n in groups]) for v in (minus(scores, wanted), scores.errors))
    assert (apart[error == 0].abs() < 1e-15).all()  # units that no sample wakes
    off = (apart / error)[error > 0].abs()
    assert len(off) > 7
    assert scores.about == {"method": "hutchinson", "probes": 300} | ({"deflate": 4} if deflate else {})
    assert (off > 3).sum() <= max(len(off) // 50, 1) and off.max() < 5
    assert 0.6 < off.square().mean().sqrt() < 1.6


def test_hutchinsons_errors_are_those_of_the_theory() -> None:
    """The variance of v^T A v for random signs is 2 ||offdiagonal of the symmetric part||^2."""
    model, groups, batches, loss = problem("mlp_with_norm")
    probes = 1000
    scores = hap.score(model, groups, batches, loss, hap.HessianTrace(method="hutchinson", probes=probes, chunk=50))
    hessian = exact.full_hessian(model, ["0.weight"], batches, loss)
    rows = model[0].weight.shape[1]
    for unit in range(9):
        part = torch.zeros_like(hessian)
        part[unit * rows : (unit + 1) * rows] = hessian[unit * rows : (unit + 1) * rows]
        part = (part + part.t()) / 2
        part.fill_diagonal_(0)
        scale = model[0].weight[unit].detach().square().sum() / (2 * rows)
        wanted = scale * (2 * part.square().sum() / probes).sqrt()
        assert float(scores.errors["0"][unit]) == pytest.approx(float(wanted), rel=0.2)


def test_deflation_leaves_less_to_the_probes() -> None:
    """Ever smaller errors with more directions, and none once they are all there are."""
    model, groups, batches, loss = problem("smooth")
    wanted, batches = known("smooth"), [tuple(map(torch.cat, zip(*batches, strict=True)))]  # one takes a third as long
    size = sum(p.numel() for p in model.parameters())
    errors = []
    for deflate, seeds in ((0, 8), (4, 8), (16, 8), (size, 1)):
        squares = []
        for seed in range(seeds):  # the errors are estimates too: those of one seed may lie in any order
            criterion = hap.HessianTrace(method="hutchinson", probes=50, deflate=deflate, seed=seed)
            scores = hap.score(model, groups, batches, loss, criterion)
            squares.append(torch.cat(list(scores.errors.values())).square().mean())
        errors.append(float(torch.stack(squares).mean().sqrt()))
    assert errors[0] > 1.1 * errors[1] and errors[1] > 1.25 * errors[2] and errors[2] > 1e6 * errors[3]
    assert close(scores, wanted, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_deflation_in_half_precision(dtype: torch.dtype) -> None:
    model, groups, batches, loss = problem("mlp_with_norm")
    model, batches = model.to(dtype), [(x.to(dtype), y) for x, y in batches]
    plain, deflated = (
        hap.score(model, groups, batches, loss, hap.HessianTrace(method="hutchinson", probes=200, deflate=k))["0"]
        for k in (0, 8)
    )
    assert torch.isfinite(deflated).all()
    assert torch.corrcoef(torch.stack([plain, deflated]))[0, 1] > 0.9


def test_chunks_do_not_matter() -> None:
    model, groups, batches, loss = problem("residual")
    one, five = (
        hap.score(model, groups, batches, loss, hap.HessianTrace(method="hutchinson", probes=12, chunk=c, seed=3))
        for c in (1, 5)
    )
    other = hap.score(model, groups, batches, loss, hap.HessianTrace(method="hutchinson", probes=12, seed=4))
    assert close(one, five, 1e-12) and close(one.errors, five.errors, 1e-9)
    assert not close(one, other, 1e-3)


def test_same_seed_same_scores() -> None:
    model, groups, batches, loss = problem("plain")
    for criterion in ("hessian", "obd", "random", "fisher"):
        a, b = (hap.score(model, groups, batches, loss, criterion) for _ in range(2))
        assert all(torch.equal(a[n], b[n]) for n in groups)


def test_settle_stops_when_the_cut_is_clear() -> None:
    model, groups, batches, loss = problem("mlp_with_norm")
    lowest = hap.score(model, groups, batches, loss, "hessian")["0"].argsort()[:4]
    with torch.no_grad():
        model[0].weight[lowest] *= 1e-3
    clear = hap.score(model, groups, batches, loss, hap.HessianTrace(method="hutchinson", probes=500, settle=0.55))
    assert clear.about["probes"] < 500
    kept = clear["0"].argsort()[4:]
    assert not set(kept.tolist()) & set(lowest.tolist())
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight[kept[-1]].expand(9, -1))
        model[1].load_state_dict({n: t[kept[-1]].expand(9) if t.ndim else t for n, t in model[1].state_dict().items()})
    tied = hap.score(model, groups, batches, loss, hap.HessianTrace(method="hutchinson", probes=50, settle=0.55))
    assert tied.about["probes"] == 50


# ---- the other criteria, by hand ----------------------------------------------------------------------------


def test_obd_against_the_true_diagonal() -> None:
    """Within four standard deviations of what random signs give, unit by unit."""
    model, groups, batches, loss = problem("mlp_with_norm")
    probes = 500
    seen = hap.score(model, groups, batches, loss, hap.OBD(probes=probes, chunk=50))["0"]
    hessian = exact.full_hessian(model, ["0.weight"], batches, loss)
    wanted = exact.obd(groups, model, exact.diagonals(model, ["0.weight"], batches, loss))["0"]
    squares = model[0].weight.detach().square().flatten() / 2
    rows = model[0].weight.shape[1]
    for unit in range(9):
        part = torch.zeros_like(hessian)
        index = slice(unit * rows, (unit + 1) * rows)
        part[index] = squares[index, None] * hessian[index]
        part = (part + part.t()) / 2
        part.fill_diagonal_(0)
        deviation = float((2 * part.square().sum() / probes).sqrt())
        assert abs(float(seen[unit] - wanted[unit])) <= 4 * deviation


def test_fisher_against_a_loop_over_samples() -> None:
    for name in ("residual", "depthwise", "smooth"):
        model, groups, batches, loss = problem(name)
        seen = hap.score(model, groups, batches, loss, hap.DiagonalFisher(chunk=2))
        assert close(seen, exact.fisher(groups, model, batches, loss))


def test_taylor_by_hand() -> None:
    model, groups, batches, loss = problem("residual")
    names = exact.producers(groups)
    slope, weights = exact.gradient(model, names, batches, loss), exact.weights_of(model, names)
    terms = {n: slope[n] * weights[n] for n in names}
    wanted = {n: exact.by_unit(groups, n, terms, lambda s: s.sum().square()) for n in groups}
    assert close(hap.score(model, groups, batches, loss, "taylor"), wanted)


@pytest.mark.parametrize(
    "name", ["residual", "grouped_few", "depthwise", "transposed", "grouped_transposed", "gated_unit"]
)
def test_weights_alone_by_hand(name: str) -> None:
    """Magnitude: mean square; L1: sum of absolutes; both summed over the producers of a unit."""
    model, _ = CASES[name]()
    groups = traced(name, "joint")
    weights = exact.weights_of(model, exact.producers(groups))
    squares = {n: exact.by_unit(groups, n, weights, lambda s: s.square().mean()) for n in groups}
    absolutes = {n: exact.by_unit(groups, n, weights, lambda s: s.abs().sum()) for n in groups}
    assert close(hap.score(model, groups, None, None, "magnitude"), squares)
    assert close(hap.score(model, groups, None, None, hap.L1()), absolutes)


def small() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2)).double().eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[3.0, 4.0], [0.0, 0.0], [3.0, 0.0]]))
        model[1].weight.copy_(torch.tensor([0.5, -2.0, 0.0]))
    return model, hap.trace(model, torch.randn(2, 2, dtype=torch.float64))


def test_arithmetic_by_hand() -> None:
    model, groups = small()
    expected = {
        "magnitude": [12.5, 0.0, 4.5],
        "l1": [7.0, 0.0, 3.0],
        "bn-scale": [0.5, 2.0, 0.0],
        # distances 5, 3 and 4 between the points; the mean over all three, per root of two weights
        "geometric-median": [(5 + 4) / 3 / 2**0.5, (5 + 3) / 3 / 2**0.5, (4 + 3) / 3 / 2**0.5],
        "reversed-l1": [-7.0, 0.0, -3.0],
    }
    for criterion, values in expected.items():
        scores = hap.score(model, groups, None, None, criterion)
        assert scores["0"].tolist() == pytest.approx(values), criterion
        assert scores["0"].dtype == torch.float64


def test_random_depends_on_its_seed_only() -> None:
    model, groups = small()
    first, again, other = (hap.score(model, groups, None, None, hap.Random(seed=s))["0"] for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert ((first >= 0) & (first <= 1)).all()


def test_reversed_turns_any_criterion_upside_down() -> None:
    model, groups, batches, loss = problem("residual")
    scores = hap.score(model, groups, batches, loss, hap.Reversed(hap.HessianTrace()))
    plain = hap.score(model, groups, batches, loss, hap.HessianTrace())
    assert all(torch.equal(scores[n], -plain[n]) for n in groups)
    assert hap.Reversed(hap.L1()).to_dict() == {"name": "reversed", "of": {"name": "l1"}}


def test_joint_scores_sum_over_producers() -> None:
    model, groups, batches, loss = problem("residual")
    apart = traced("residual", "union")
    for criterion in (hap.Magnitude(), hap.L1(), hap.HessianTrace(), hap.Taylor(), hap.DiagonalFisher()):
        joint = hap.score(model, groups, batches, loss, criterion)
        union = hap.score(model, apart, batches, loss, criterion)
        assert torch.allclose(joint["stem.0"], union["stem.0"] + union["b1.1.0"], rtol=1e-12)
        assert torch.allclose(joint["b2.1.0"], union["b2.1.0"] + union["shortcut.0"], rtol=1e-12)


def test_bn_scale_needs_a_norm() -> None:
    model, _ = CASES["bias_without_norm"]()
    with pytest.raises(hap.HapError, match=r"group '0' has no batch normalisation.*ignore"):
        hap.score(model, traced("bias_without_norm", "joint"), None, None, "bn-scale")


# ---- the model is left as found -----------------------------------------------------------------------------

CRITERIA = [
    hap.HessianTrace(method="exact"),
    hap.HessianTrace(method="hutchinson", probes=3),
    hap.HessianTrace(method="hutchinson", probes=4, chunk=2, deflate=3),
    hap.Magnitude(),
    hap.L1(),
    hap.Random(),
    hap.BNScale(),
    hap.Taylor(),
    hap.DiagonalFisher(),
    hap.OBD(probes=3),
    hap.GeometricMedian(),
    hap.Reversed(hap.Taylor()),
]


@pytest.mark.parametrize("criterion", CRITERIA, ids=lambda c: f"{c.name}-{getattr(c, 'method', '')}")
def test_model_is_left_as_found(criterion: hap.Criterion) -> None:
    """Tensors, versions, gradients, flags, modes and hooks; and frozen parameters are scored like all others."""
    model, groups, batches, loss = problem("residual")
    wanted = hap.score(model, groups, batches, loss, criterion)
    model.stem[0].weight.requires_grad_(False)
    model.b1[0][1].weight.requires_grad_(False)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    model.head.train()
    model.b2[0][0].register_forward_hook(lambda *_: None)
    before = snapshot(model)
    seen = hap.score(model, groups, batches, loss, criterion)
    assert_unchanged(model, before)
    assert all(torch.equal(seen[n], wanted[n]) for n in groups)
    assert not any(v.requires_grad for v in seen.values())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("method", ["exact", "sampled", "hutchinson"])
def test_equal_calls_give_equal_bits_whatever_the_allocator_does(method: str) -> None:
    model, groups, batches, loss = problem("residual")
    batches, criterion, sizes = batches[:2], hap.HessianTrace(method=method, probes=3), random.Random(0)
    wanted = hap.score(model, groups, batches, loss, criterion)
    for _ in range(15):
        kept = [torch.empty(sizes.randrange(1, 5000)) for _ in range(sizes.randrange(40))]
        seen = hap.score(model, groups, batches, loss, criterion)
        assert all(torch.equal(seen[name], wanted[name]) for name in groups), len(kept)


@pytest.mark.parametrize("name", ["module_with_two_names", "tied_parameters"])
def test_what_is_shared_stays_shared(name: str) -> None:
    """torch.func.functional_call leaves a module that has two names with the tensors that it was lent."""
    model, groups, batches, loss = problem(name)
    before = snapshot(model)
    for criterion in (hap.HessianTrace(probes=3), hap.Taylor(), hap.DiagonalFisher(), hap.OBD(probes=3)):
        hap.score(model, groups, batches, loss, criterion)
        assert_unchanged(model, before)


def test_all_parameters_frozen() -> None:
    model, groups, batches, loss = problem("plain")
    wanted = {c: hap.score(model, groups, batches, loss, c) for c in ("hessian", "taylor", "fisher", "obd")}
    model.requires_grad_(False)
    for criterion, scores in wanted.items():
        assert close(hap.score(model, groups, batches, loss, criterion), scores)


def test_model_is_left_as_found_when_scoring_fails() -> None:
    model, groups, batches, _ = problem("plain")
    before = snapshot(model)

    def broken(output: Tensor, target: Tensor) -> Tensor:
        raise KeyError("no such column")

    for criterion in ("hessian", "taylor", "fisher"):
        with pytest.raises(KeyError):
            hap.score(model, groups, batches, broken, criterion)
        assert_unchanged(model, before)


def test_running_statistics_of_instance_norm_stay() -> None:
    """A module that would write while it is scored is refused."""
    torch.manual_seed(0)
    layers = conv(3, 5), nn.InstanceNorm2d(5, track_running_stats=True), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(5, 4)).double().train()
    groups = hap.trace(model, images())
    before = snapshot(model)
    with pytest.raises(hap.HapError, match=r"InstanceNorm2d.*training mode.*model.eval"):
        hap.score(model, groups, batches_for(images(), 4), F.cross_entropy, "taylor")
    assert_unchanged(model, before)


def test_inputs_in_tuples_and_dicts() -> None:
    for name in ("two_inputs", "named_inputs"):
        model, example = CASES[name]()
        groups = traced(name, "joint")
        batches = [(example, torch.tensor([0, 3]))]
        scores = {c: hap.score(model, groups, batches, F.cross_entropy, c) for c in ("hessian", "taylor", "fisher")}
        assert scores["hessian"].about["method"] == "exact"
        assert all(torch.isfinite(v).all() and v.max() > 0 for s in scores.values() for v in s.values())


def test_generators_and_float32() -> None:
    model, groups, batches, loss = problem("plain")
    wanted = hap.score(model, groups, batches, loss, "hessian")
    single = copy.deepcopy(model).float()
    seen = hap.score(single, groups, ((x.float(), y) for x, y in batches), loss, "hessian")
    assert close(seen, wanted, 1e-5)


def test_scores_of_a_pruned_model_with_implants() -> None:
    """Streams and implants are seen through: what remains prunable is scored exactly."""
    model, _, batches, loss = problem("residual")
    hap.apply_(model, random_plan(traced("residual", "joint"), 0, 0.5, hap.Pointwise(init="center")), images())
    groups = hap.trace(model, images())
    scores = hap.score(model, groups, batches, loss, "hessian")
    assert groups.units > 0 and scores.about["method"] == "exact"
    assert close(scores, truth(model, groups, batches, loss))


def test_exact_is_refused_where_the_first_axis_is_not_the_samples() -> None:
    class SequenceFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(F.relu(self.a(x.transpose(0, 1)))).mean(0)

    model, x, y = SequenceFirst().double().eval(), torch.randn(5, 5, 4).double(), torch.randint(0, 3, (5,))
    groups = hap.trace(model, x)
    assert hap.score(model, groups, [(x, y)], F.cross_entropy).about["method"] == "hutchinson"
    with pytest.raises(hap.HapError, match=r"first axis of what a\.weight reads is not that of the samples"):
        hap.score(model, groups, [(x, y)], F.cross_entropy, hap.HessianTrace(method="exact"))


def small_residual() -> tuple[nn.Module, Tensor]:
    """A projection shortcut around two convolutions: what takes longest to compile is how many layers there are."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.head(pooled(F.relu(m.branch(x) + m.shortcut(x))))

    torch.manual_seed(0)
    branch = nn.Sequential(conv_bn_relu(4, 5, stride=2), conv_bn(5, 6))
    model = Net(run, stem=conv_bn_relu(3, 4), branch=branch, shortcut=conv_bn(4, 6, 1, stride=2), head=nn.Linear(6, 3))
    return randomise(model.double()).eval(), images()


def test_a_compiled_model_scores_like_the_plain_one() -> None:
    model, example = small_residual()
    groups, batches, loss = hap.trace(model, example), batches_for(example, 3)[:1], F.cross_entropy
    plain = hap.score(model, groups, batches, loss)
    compiled = copy.deepcopy(model)
    compiled.compile(backend="eager")
    assert close(hap.score(compiled, groups, batches, loss), plain, 1e-10)
    wrapped = torch.compile(model, backend="eager")
    scores = hap.score(wrapped, hap.trace(wrapped, batches[0][0]), batches, loss)
    assert scores.about["method"] == "exact"
    assert all(torch.allclose(a, b, rtol=1e-10) for a, b in zip(scores.values(), plain.values(), strict=True))


@pytest.mark.parametrize("scored", [False, True])
def test_norms_that_are_not_scored_are_products_with_constants(scored: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2)).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    model(x)
    expected = model.eval()(x)
    weights = {n: p for n, p in model.named_parameters() if p.ndim == 2 or (scored and n == "1.weight")}
    with affine_norms(SimpleNamespace(model=model, weights=weights)):  # type: ignore[arg-type]
        assert len(model[1]._forward_hooks) == (0 if scored else 1)
        found = model(x)
    assert not model[1]._forward_hooks
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert bool(torch.autograd.grad(found.sum(), model[1].weight, allow_unused=True)[0] is None) != scored


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.norm(input=self.a(x))))


def test_norms_called_by_keyword_are_scored_too() -> None:
    torch.manual_seed(0)
    model = ByKeyword().double().eval()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 2, (6,))
    groups = hap.trace(model, x)
    many, exact = (
        hap.score(model, groups, [(x, y)], F.cross_entropy, hap.HessianTrace(method=m, **o))["a"]
        for m, o in (("hutchinson", {"probes": 3000}), ("exact", {}))
    )
    torch.testing.assert_close(many, exact, rtol=0.2, atol=1e-3)
