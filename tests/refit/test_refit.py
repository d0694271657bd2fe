"""refit_: the layers of a pruned model take over what the dense one does at their places."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hap
from cases import CASES
from checks import _captured, assert_unchanged, implantable, random_plan, run, snapshot, traced
from hap.graph.capture import capture
from hap.graph.nodes import short_name
from hap.refit.calibration import Calibration
from hap.refit.fit_layer import fit_layer
from hap.refit.flow import LINEAR
from hap.refit.graph_run import Graph, GraphRun
from hap.refit.parameters import LayerParameters
from hap.refit.ridge_regression import Affine, Moments, RidgeSolver
from hap.refit.rows import LinearMap, at, by_axis


def inputs_like(example: Any, count: int = 8) -> list[Any]:
    """Other numbers of the same kind."""
    torch.manual_seed(1)
    return [
        pytree.tree_map_only(Tensor, lambda t: torch.randn_like(t) if t.is_floating_point() else t, example)
        for _ in range(count)
    ]


def pruned_case(name: str, coupling: str = "joint", share: float = 0.4) -> tuple[nn.Module, nn.Module, hap.Plan, Any]:
    """A dense model, a pruned copy, the plan and an example."""
    dense, example = CASES[name]()
    groups = traced(name, coupling)
    implant = hap.Pointwise(ratio=0.5, init="center") if implantable(groups) else None
    plan = random_plan(groups, 0, share, implant)
    return dense, hap.apply_(copy.deepcopy(dense), plan, example, verify=False), plan, example


def output_error(model: nn.Module, wanted: list[list[Any]], inputs: list[Any]) -> float:
    """How far outputs are from those of the dense model, which are `wanted`."""
    pairs = [
        pair for x, outputs in zip(inputs, wanted, strict=True) for pair in zip(run(model, x), outputs, strict=True)
    ]
    return sum(float((a - b).square().sum()) for a, b in pairs if a.shape == b.shape and a.is_floating_point())


def reuse_what_was_captured(monkeypatch: pytest.MonkeyPatch, name: str, dense: nn.Module) -> None:
    """A case is captured for its trace already. Where an operator writes to what it reads, a refit puts another one in
    its place, so that it gets a graph of its own."""
    known = _captured(name)[2]
    schemas = [getattr(node.target, "_schema", None) for node in known.program.graph.nodes]
    if not any(schema is not None and schema.is_mutable for schema in schemas):
        monkeypatch.setattr("hap.refit.graph_run.capture", lambda m, x: known if m is dense else capture(m, x))


@pytest.mark.parametrize("name", [n for n in CASES if n != "nothing_to_remove"])
def test_outputs_come_nearer_to_the_dense_ones_and_nothing_else_changes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, pruned, plan, example = pruned_case(name, "union")
    reuse_what_was_captured(monkeypatch, name, dense)
    inputs, before = inputs_like(example), snapshot(dense)
    shapes = {n: t.shape for n, t in pruned.state_dict().items() if isinstance(t, Tensor)}
    wanted = [run(dense, x) for x in inputs]
    old = output_error(pruned, wanted, inputs)
    report = hap.refit_(pruned, dense, [(x, None) for x in inputs], plan)
    assert report.after <= report.before
    assert output_error(pruned, wanted, inputs) <= old * 1.1 + 1e-12
    assert {n: t.shape for n, t in pruned.state_dict().items() if isinstance(t, Tensor)} == shapes
    assert_unchanged(dense, before)
    assert all(layer.after <= layer.before for layer in report.layers)


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(6, 4), (5, 6)),
    "linear_on_tokens": (nn.Linear(6, 4, bias=False), (3, 5, 6)),
    "conv1d": (nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9)),
    "conv2d": (nn.Conv2d(4, 6, 3), (2, 4, 7, 8)),
    "strided": (nn.Conv2d(4, 6, (3, 5), stride=(2, 3), padding=(1, 2)), (2, 4, 9, 11)),
    "dilated": (nn.Conv2d(4, 6, 3, dilation=2, padding=2), (2, 4, 9, 9)),
    "same": (nn.Conv2d(4, 6, (4, 3), padding="same"), (2, 4, 9, 9)),
    "grouped": (nn.Conv2d(4, 6, 3, groups=2), (2, 4, 7, 7)),
    "depthwise": (nn.Conv2d(4, 8, 3, groups=4, padding=1), (2, 4, 7, 7)),
    "conv3d": (nn.Conv3d(2, 3, 3, padding=1, stride=2), (2, 2, 5, 6, 7)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), (2, 4, 5, 6)),
    "transposed_grouped": (nn.ConvTranspose1d(4, 6, 5, stride=3, groups=2, dilation=2), (2, 4, 5)),
    "without_batch": (nn.Conv2d(4, 6, 3), (4, 7, 8)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_rows_times_matrices_are_what_the_layer_computes(kind: str) -> None:
    layer, shape = LAYERS[kind]
    layer, x = copy.deepcopy(layer).double().eval(), torch.randn(*shape).double()
    graph = Graph(layer, x)
    node = next(n for n in graph.graph.nodes if n.op == "call_function" and short_name(n) in LINEAR)
    made, wanted = LinearMap(node), layer(x)
    axis = wanted.ndim - 1 if isinstance(layer, nn.Linear) else wanted.ndim - 1 - made.spatial
    positions = torch.arange(wanted.numel() // wanted.shape[axis])[::3]
    matrices = made.matrices(layer.weight)
    rows = made.rows(x, tuple(layer.weight.shape[2:]), by_axis(positions, tuple(wanted.shape), axis))
    result = (rows @ matrices.mT).transpose(0, 1).flatten(1)
    result = result if layer.bias is None else result + layer.bias
    assert torch.allclose(result, at(wanted, axis, positions), atol=1e-12)
    assert torch.equal(made.weight(matrices, layer.weight), layer.weight)


def solved(x: Tensor, targets: Tensor, old: Affine, ridge: float) -> Affine:
    moments = Moments(x, centred=True)
    return RidgeSolver(moments, old, ridge).solve(moments.with_targets(targets))


def test_the_solution_is_that_of_least_squares() -> None:
    x, target = torch.randn(2, 50, 4).double(), torch.randn(2, 50, 3).double()
    old = Affine(torch.randn(2, 3, 4).double(), torch.zeros(2, 3).double())
    found = solved(x, target, old, 1e-12)
    for group in range(2):
        columns = torch.cat([x[group], torch.ones(50, 1).double()], 1)
        exact = torch.linalg.lstsq(columns, target[group]).solution
        assert torch.allclose(found.weight[group], exact[:4].T, atol=1e-8)
        assert torch.allclose(found.bias[group], exact[4], atol=1e-8)


def test_weights_of_inputs_that_never_vary_stay() -> None:
    x = torch.cat([torch.randn(1, 30, 2), torch.full((1, 30, 1), 3.0)], 2)
    old = Affine(torch.randn(1, 2, 3).double(), torch.zeros(1, 2).double())
    found = solved(x, torch.randn(1, 30, 2), old, 1e-3)
    assert torch.allclose(found.weight[0, :, 2], old.weight[0, :, 2], atol=1e-6)
    assert bool(found.weight.isfinite().all())


@pytest.mark.parametrize("values", ["zeros", "one position", "repeated inputs"])
def test_what_determines_nothing_leaves_finite_weights(values: str) -> None:
    x = {
        "zeros": torch.zeros(1, 9, 3),
        "one position": torch.randn(1, 1, 3),
        "repeated inputs": torch.randn(1, 9, 1).expand(1, 9, 3),
    }[values]
    old = Affine(torch.randn(1, 2, 3).double(), torch.zeros(1, 2).double())
    found = solved(x, torch.randn(1, x.shape[1], 2), old, 1e-4)
    assert bool(found.weight.isfinite().all()) and bool(found.bias.isfinite().all())


def test_values_are_those_of_the_model_and_forgotten_after() -> None:
    model, example = CASES["residual_basic"]() if "residual_basic" in CASES else CASES[next(iter(CASES))]()
    graph = Graph(model, example)
    computing = GraphRun(graph, [example], [graph.output])
    with torch.no_grad():
        found = pytree.tree_leaves(computing.value(graph.output, 0))
    assert torch.allclose(found[0], run(model, example)[0])
    assert set(computing.known[0]) <= {*graph.inputs, graph.output}


class Residual(nn.Module):
    """A stream to which two branches are added."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.a, self.b = (nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8)) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.a(x)
        return self.head(x + self.b(x))


def test_a_branch_makes_up_for_what_went_before_it() -> None:
    """The second branch loses nothing, but is asked for the dense sum less the changed stream."""
    dense = Residual().eval()
    x = torch.randn(512, 6)
    plan = hap.draft(hap.trace(dense, x[:2]), {"a.0": [*range(16)]})
    pruned = hap.apply_(copy.deepcopy(dense), plan, x[:2])
    old = pruned.b[2].weight.clone()
    report = hap.refit_(pruned, dense, [(x, None)], plan)
    assert not torch.equal(pruned.b[2].weight, old)
    assert report.after < 0.5 * report.before


def test_the_statistics_of_a_batch_normalisation_are_those_of_the_pruned_model() -> None:
    dense = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 16, 4),
    )
    x = torch.randn(64, 3, 8, 8)
    for _ in range(30):
        dense.train()(x)
    dense.eval()
    plan = hap.draft(hap.trace(dense, x[:2]), {"0": [0, 1, 2], "3": [1]})
    pruned = hap.apply_(copy.deepcopy(dense), plan, x[:2])
    hap.refit_(pruned, dense, [(x, None)], plan)
    with torch.no_grad():
        result = pruned[:4](x)
    norm = pruned[4]
    assert torch.allclose(norm.running_mean, result.mean((0, 2, 3)), rtol=0.1, atol=0.02)
    assert torch.allclose(norm.running_var, result.var((0, 2, 3)), rtol=0.1)


def test_behind_a_relu_only_what_it_lets_through_counts() -> None:
    torch.manual_seed(3)
    dense = nn.Sequential(nn.Linear(5, 40), nn.ReLU(), nn.Linear(40, 12), nn.ReLU(), nn.Linear(12, 12)).eval()
    x = torch.randn(4096, 5)
    plan = hap.draft(hap.trace(dense, x[:2]), {"0": [*range(30)]})
    errors = []
    for sweeps in (0, 2):
        pruned = hap.apply_(copy.deepcopy(dense), plan, x[:2])
        errors.append(
            next(
                r.after for r in hap.refit_(pruned, dense, [(x, None)], plan, rectified=sweeps).layers if r.name == "2"
            )
        )
    assert errors[1] < 0.98 * errors[0]


def test_nothing_changes_where_nothing_was_removed() -> None:
    dense = Residual().eval()
    x = torch.randn(64, 6)
    plan = hap.draft(hap.trace(dense, x[:2]), {})
    pruned = hap.apply_(copy.deepcopy(dense), plan, x[:2])
    report = hap.refit_(pruned, dense, [(x, None)], plan)
    assert all(torch.equal(a, b) for a, b in zip(pruned.parameters(), dense.parameters(), strict=True))
    assert {layer.ridge for layer in report.layers} == {None}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_few_samples_are_no_reason_to_fail(count: int) -> None:
    dense, pruned, plan, example = pruned_case("vgg")
    report = hap.refit_(pruned, dense, [(torch.randn_like(example[:1]), None) for _ in range(count)], plan)
    assert report.after <= report.before
    assert all(bool(t.isfinite().all()) for t in pruned.state_dict().values())


def test_batches_of_several_sizes_count_alike() -> None:
    dense = Residual().eval()
    x = torch.randn(300, 6)
    plan = hap.draft(hap.trace(dense, x[:2]), {"a.0": [*range(12)]})
    found = []
    for sizes in ([300], [128, 128, 44]):
        pruned = hap.apply_(copy.deepcopy(dense), plan, x[:2])
        found.append(hap.refit_(pruned, dense, [(part, None) for part in x.split(sizes)], plan).after)
    assert found[0] == pytest.approx(found[1], rel=0.3)


def test_layers_with_a_shared_weight_are_named() -> None:
    dense, pruned, plan, example = pruned_case("tied_parameters")
    report = hap.refit_(pruned, dense, [(x, None) for x in inputs_like(example)], plan)
    assert "its weight is used more than once" in str(report)


def test_what_does_not_belong_together_is_refused_and_nothing_changes() -> None:
    dense = Residual().eval()
    x = torch.randn(64, 6)
    plan = hap.draft(hap.trace(dense, x[:2]), {"a.0": [1, 2]})
    pruned = hap.apply_(copy.deepcopy(dense), plan, x[:2])
    batches = [(x, None)]
    with pytest.raises(hap.HapError, match="dense is not the model that was pruned"):
        hap.refit_(pruned, pruned, batches, plan)
    with pytest.raises(hap.HapError, match="not what the plan leaves"):
        hap.refit_(copy.deepcopy(dense), dense, batches, plan)
    with pytest.raises(hap.HapError, match="has other values than the plan leaves"):
        hap.refit_(pruned, Residual().eval(), batches, plan)
    trained = copy.deepcopy(pruned)
    trained.head.bias.data += 1
    with pytest.raises(hap.HapError, match=r"head.bias .* before any training"):
        hap.refit_(trained, dense, batches, plan)
    before = copy.deepcopy(pruned.state_dict())
    with pytest.raises(hap.HapError, match="not finite"):
        hap.refit_(pruned, dense, [(torch.full_like(x, torch.nan), None)], plan)
    with pytest.raises(hap.HapError, match=r"does not run|cannot capture"):
        hap.refit_(pruned, dense, [(torch.randn(4, 5), None)], plan)
    assert all(torch.equal(t, before[n]) for n, t in pruned.state_dict().items())


def test_an_error_on_the_way_undoes_the_layers_before(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = Residual().eval()
    x = torch.randn(64, 6)
    plan = hap.draft(hap.trace(dense, x[:2]), {"a.0": [*range(12)]})
    pruned = hap.apply_(copy.deepcopy(dense), plan, x[:2])
    before, solved_before = copy.deepcopy(pruned.state_dict()), []

    def failing(parameters: Any, *rest: Any) -> Any:
        if parameters.layer.name == "head":
            assert any(not torch.equal(t, before[n]) for n, t in pruned.state_dict().items())
            raise hap.HapError("not finite")
        solved_before.append(fit_layer(parameters, *rest))
        return solved_before[-1]

    monkeypatch.setattr("hap.refit.refit.fit_layer", failing)
    with pytest.raises(hap.HapError, match="not finite"):
        hap.refit_(pruned, dense, [(x, None)], plan)
    assert solved_before and all(torch.equal(t, before[n]) for n, t in pruned.state_dict().items())


def test_outputs_of_a_few_lines_come_much_nearer() -> None:
    """What the docs show."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).eval()
    dense = copy.deepcopy(net)
    x = torch.randn(1024, 8)
    plan = hap.prune_(net, x[:2], criterion="magnitude", flops=0.6)
    with torch.no_grad():
        old = F.mse_loss(net(x), dense(x))
        hap.refit_(net, dense, [(x, None)], plan)
        assert F.mse_loss(net(x), dense(x)) < 0.2 * old


def test_the_quarter_held_out_is_the_same_whatever_the_shapes() -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    numbers = torch.arange(26).float()[:, None] + torch.rand(1, 4) / 2
    inputs = list(numbers.split([10, 6, 10]))
    calibration = Calibration(copy.deepcopy(dense), dense, hap.draft(hap.trace(dense, inputs[0]), {}), inputs, 10**6)
    layer = calibration.work.layers[0]
    _, held = calibration.rows(layer, LayerParameters(layer, calibration.passes[0].graphs[0]))
    assert held.x[0, :, 0].floor().sort().values.tolist() == [3, 7, 11, 15, 19, 23]
