"""Recurrent layers: hidden units go from all gates, layers and directions; states go with them or keep them."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import exact
import hap
from cases import Net
from checks import check_pruned, gap, random_plan, run
from hap.errors import CaptureError
from traced_once import capturing_once


def steps(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def words(*shape: int) -> Tensor:
    return torch.randint(0, 20, shape, generator=torch.Generator().manual_seed(0))


def made(run: Any, **modules: Any) -> nn.Module:
    return Net(run, **modules).double().eval()


def classifier(kind: Any = nn.LSTM, **options: Any) -> nn.Module:
    """A table of words, a layer, and classes from its last step."""
    width = 9 * (1 + options.get("bidirectional", False))
    return made(
        lambda m, x: m.head(m.rnn(m.table(x))[0][:, -1]),
        table=nn.Embedding(20, 6),
        rnn=kind(6, 9, batch_first=True, **options),
        head=nn.Linear(width, 4),
    )


def tagger() -> nn.Module:
    """Two layers of both directions, and classes for every step."""
    rnn = nn.GRU(6, 7, 2, batch_first=True, bidirectional=True)
    return made(lambda m, x: m.head(m.rnn(m.first(x))[0]), first=nn.Linear(5, 6), rnn=rnn, head=nn.Linear(14, 4))


def started(start: Any, **more: Any) -> nn.Module:
    """A layer that starts from what a function of (network, inputs) gives."""

    def run(m: Any, x: Tensor, *rest: Tensor) -> Tensor:
        return m.head(m.rnn(m.first(x), start(m, x, *rest))[0][:, -1])

    rnn = nn.GRU(6, 9, batch_first=True)
    return made(run, first=nn.Linear(5, 6), rnn=rnn, head=nn.Linear(9, 4), **more)


def encoder_decoder() -> nn.Module:
    encoder, decoder = nn.LSTM(5, 8, batch_first=True), nn.LSTM(6, 8, batch_first=True)
    return made(
        lambda m, x, y: m.head(m.decoder(m.table(y), m.encoder(x)[1])[0]),
        encoder=encoder,
        decoder=decoder,
        table=nn.Embedding(20, 6),
        head=nn.Linear(8, 4),
    )


def stepping(kind: Any) -> nn.Module:
    """A cell, called step by step."""

    def run(m: Any, x: Tensor) -> Tensor:
        x, state = m.first(x), None
        for i in range(x.shape[1]):
            state = m.rnn(x[:, i], state)
        return m.head(state[0] if isinstance(state, tuple) else state)

    return made(run, first=nn.Linear(5, 6), rnn=kind(6, 9), head=nn.Linear(9, 4))


def signs() -> nn.Module:
    """Columns of an image, as a convolution sees them, read in both directions."""

    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(m.rnn(m.norm(m.conv(x)).relu().permute(3, 0, 1, 2).flatten(2))[0])

    conv, rnn = nn.Conv2d(1, 6, 3, padding=1), nn.LSTM(6 * 4, 8, bidirectional=True)
    return made(run, conv=conv, norm=nn.BatchNorm2d(6), rnn=rnn, head=nn.Linear(16, 4))


def ending(m: Any, x: Tensor) -> Tensor:
    last, cells = m.rnn(m.first(x))[1]
    return m.head(last[-1] * cells[-2])


def first_and_rnn(rnn: int = 9, first: int = 6) -> dict[str, int]:
    return {"first": first, "rnn": rnn}


MODELS: dict[str, tuple[Any, Any, dict[str, int]]] = {
    "lstm": (classifier, words(3, 5), {"rnn": 9}),
    "several layers without bias": (lambda: classifier(num_layers=3, bias=False), words(3, 5), {"rnn": 9}),
    "both directions": (lambda: classifier(bidirectional=True), words(3, 5), {"rnn": 9}),
    "rnn": (lambda: classifier(nn.RNN, num_layers=2), words(3, 5), {"rnn": 9}),
    "rnn with relu": (lambda: classifier(nn.RNN, nonlinearity="relu"), words(3, 5), {"rnn": 9}),
    "tagger": (tagger, steps(3, 5, 5), first_and_rnn(7)),
    "convolution": (signs, steps(2, 1, 4, 7), {"conv": 6, "rnn": 8}),
    "final states": (
        lambda: made(ending, first=nn.Linear(5, 6), rnn=nn.LSTM(6, 9, 2, batch_first=True), head=nn.Linear(9, 4)),
        steps(3, 5, 5),
        first_and_rnn(),
    ),
    "encoder and decoder": (encoder_decoder, (steps(3, 5, 5), words(3, 4)), {"encoder": 8}),
    "a state that a layer computes": (
        lambda: started(lambda m, x: m.bridge(x[:, 0]).tanh()[None], bridge=nn.Linear(5, 9)),
        steps(3, 5, 5),
        {"first": 6, "bridge": 9},
    ),
    "a learnt state": (
        lambda: started(lambda m, x: m.state.expand(-1, len(x), -1), state=nn.Parameter(torch.randn(1, 1, 9))),
        steps(3, 5, 5),
        first_and_rnn(),
    ),
    "lstm cell": (lambda: stepping(nn.LSTMCell), steps(3, 5, 5), first_and_rnn()),
    "gru cell": (lambda: stepping(nn.GRUCell), steps(3, 5, 5), first_and_rnn()),
    "rnn cell": (lambda: stepping(nn.RNNCell), steps(3, 5, 5), first_and_rnn()),
    "without a batch": (
        lambda: made(
            lambda m, x: m.head(m.rnn(m.first(x))[0]), first=nn.Linear(5, 6), rnn=nn.GRU(6, 9), head=nn.Linear(9, 4)
        ),
        steps(5, 5),
        first_and_rnn(),
    ),
    "two calls": (
        lambda: made(
            lambda m, x: m.head(m.rnn(m.first(x))[0] * m.rnn(m.first(x.flip(1)))[0]),
            first=nn.Linear(5, 6),
            rnn=nn.LSTM(6, 9, batch_first=True),
            head=nn.Linear(9, 4),
        ),
        steps(3, 5, 5),
        first_and_rnn(),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_pruned_is_zeroed_and_planned_is_counted(name: str) -> None:
    make, example, units = MODELS[name]
    torch.manual_seed(0)
    model = make()
    groups = hap.trace(model, example)
    assert {n: len(g) for n, g in groups.items()} == units
    for seed, share in ((0, 0.3), (1, 0.8)):
        plan = random_plan(groups, seed, share)
        assert plan.exact and plan.after.macs < plan.before.macs
        check_pruned(model, groups, plan, example)


def test_a_unit_owns_a_row_of_every_gate() -> None:
    model = tagger()
    plan = hap.draft(hap.trace(model, steps(3, 5, 5)), {"first": [1], "rnn": [0, 4]})
    keep = {(cut.name, cut.dim): cut.keep for cut in plan.cuts}
    rows = tuple(i for i in range(21) if i % 7 not in (0, 4))
    for ending in ("l0", "l0_reverse", "l1", "l1_reverse"):
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            assert keep[f"rnn.{name}_{ending}", 0] == rows
        assert keep[f"rnn.weight_hh_{ending}", 1] == (1, 2, 3, 5, 6)
        wanted = (0, 2, 3, 4, 5) if ending.startswith("l0") else (1, 2, 3, 5, 6, 8, 9, 10, 12, 13)
        assert keep[f"rnn.weight_ih_{ending}", 1] == wanted
    assert keep["head.weight", 1] == (1, 2, 3, 5, 6, 8, 9, 10, 12, 13)
    hap.apply_(model, plan)
    assert (model.rnn.input_size, model.rnn.hidden_size) == (5, 5)
    assert all(a is b for a, b in zip(model.rnn._flat_weights, model.rnn.parameters(), strict=True))


def test_the_size_of_zeros_that_a_forward_makes_follows() -> None:
    model = started(lambda m, x: torch.zeros(1, len(x), m.hidden, dtype=x.dtype).to(x.device))
    model.hidden = 9
    groups = hap.trace(model, steps(3, 5, 5))
    assert {n: len(g) for n, g in groups.items()} == first_and_rnn()
    pruned = check_pruned(model, groups, hap.draft(groups, {"rnn": [0, 3, 8]}), steps(3, 5, 5))
    assert pruned.hidden == pruned.rnn.hidden_size == 6


def test_one_tensor_of_zeros_for_two_layers_ties_their_units() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        start = x.new_zeros(1, len(x), m.hidden)
        return m.head(m.b(m.a(x, start)[0], start)[0])

    a, b = nn.GRU(5, 9, batch_first=True), nn.GRU(9, 9, batch_first=True)
    model = made(run, a=a, b=b, head=nn.Linear(9, 4))
    model.hidden = 9
    groups = hap.trace(model, steps(3, 5, 5))
    assert {n: len(g) for n, g in groups.items()} == {"a": 9}
    check_pruned(model, groups, random_plan(groups, 0), steps(3, 5, 5))


def written(m: Any, x: Tensor) -> Tensor:
    start = x.new_zeros(1, len(x), 9)
    start[:, 0] = 1.0
    return start


KEPT: dict[str, tuple[Any, Any, str]] = {
    "an input": (lambda: started(lambda m, x, h: h), (steps(3, 5, 5), steps(1, 3, 9)), "never cut"),
    "ones": (lambda: started(lambda m, x: x.new_ones(1, len(x), 9)), steps(3, 5, 5), "never cut"),
    "zeros that are written to": (lambda: started(written), steps(3, 5, 5), "never cut"),
    "zeros of a fixed size": (lambda: started(lambda m, x: x.new_zeros(1, len(x), 9)), steps(3, 5, 5), "counts on"),
}


@pytest.mark.parametrize("name", KEPT)
def test_states_that_cannot_be_cut_keep_the_units_and_not_what_is_read(name: str) -> None:
    make, example, why = KEPT[name]
    model = make()
    groups = hap.trace(model, example)
    assert {n: len(g) for n, g in groups.items()} == {"first": 6}
    assert any(f.what == "rnn" and why in f.why for f in groups.frozen)
    check_pruned(model, groups, random_plan(groups, 0), example)


def test_zeros_of_a_fixed_size_follow_in_the_graph() -> None:
    model = started(lambda m, x: x.new_zeros(1, len(x), 9))
    graph, groups = hap.rewrite(model, steps(3, 5, 5))
    assert {n: len(g) for n, g in groups.items()} == first_and_rnn()
    hap.apply_(graph, hap.draft(groups, {"rnn": [0, 3], "first": [1]}), steps(3, 5, 5))
    assert graph.rnn.weight_hh_l0.shape == (21, 7)


def test_states_among_the_outputs_stay() -> None:
    model = made(
        lambda m, x: (m.head(m.rnn(m.first(x))[0]), m.rnn(x)[1]),
        first=nn.Linear(5, 5),
        rnn=nn.GRU(5, 9, batch_first=True),
        head=nn.Linear(9, 4),
    )
    groups = hap.trace(model, steps(3, 5, 5))
    assert not groups.units and any("an output of the model" in f.why for f in groups.frozen)


def test_projected_states_stay() -> None:
    rnn = nn.LSTM(6, 9, proj_size=4, batch_first=True)
    model = made(lambda m, x: m.head(m.rnn(m.first(x))[0]), first=nn.Linear(5, 6), rnn=rnn, head=nn.Linear(4, 4))
    groups = hap.trace(model, steps(3, 5, 5))
    assert not groups.units and ("lstm", "projects its states (proj_size)") in [(f.what, f.why) for f in groups.frozen]


def test_what_is_cut_along_the_steps_stays() -> None:
    rnn = nn.GRU(6, 9, batch_first=True)
    model = made(lambda m, x: m.head(m.rnn(m.first(x))[0]), first=nn.Conv1d(3, 7, 1), rnn=rnn, head=nn.Linear(9, 4))
    groups = hap.trace(model, steps(2, 3, 6))
    assert list(groups) == ["rnn"]
    assert ("gru", "runs along an axis that would be cut") in [(f.what, f.why) for f in groups.frozen]


def test_packed_sequences_stay_and_other_parts_go() -> None:
    """torch.export does not capture them, so that the model is pruned by parts, of which they are none."""

    def run(m: Any, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 4, 2]), batch_first=True)
        return m.head(nn.utils.rnn.pad_packed_sequence(m.rnn(packed)[0], batch_first=True)[0][:, 0])

    head = nn.Sequential(nn.Linear(9, 12), nn.ReLU(), nn.Linear(12, 4))
    model = made(run, rnn=nn.LSTM(5, 9, batch_first=True), head=head)
    with pytest.raises(CaptureError, match=r"torch\.export cannot capture"):
        hap.trace(model, steps(3, 5, 5))
    hap.prune_(model, steps(3, 5, 5), criterion="magnitude", channels=0.5)
    assert model.rnn.hidden_size == 9 and model.head[0].out_features == 6


# ---- scores ---------------------------------------------------------------------------------------------------------


def scored(make: Any) -> tuple[nn.Module, Any, hap.Groups, Any]:
    """A model of its own for a test, an example, its groups and a batch."""
    model, x, groups = _traced(make)
    torch.manual_seed(0)  # whether it was traced just now or before
    return copy.deepcopy(model), x, groups, [(x, torch.tensor([0, 1, 2, 3]))]


@cache
def _traced(make: Any) -> tuple[nn.Module, Any, hap.Groups]:
    torch.manual_seed(0)
    model, x = make(), words(4, 3)
    return model, x, hap.trace(model, x)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_hutchinson_lands_on_the_exact_trace(kind: Any) -> None:
    model, _, groups, batches = scored(lambda: classifier(kind))
    found = hap.score(model, groups, batches, F.cross_entropy, hap.HessianTrace(method="hutchinson", probes=400))
    wanted = torch.zeros(9, dtype=torch.float64)
    for producer in groups["rnn"].producers:
        weight = model.get_parameter(producer.weight).detach()
        diagonal = exact.diagonals(model, [producer.weight], batches, F.cross_entropy)[producer.weight]
        for unit in range(9):
            own = torch.from_numpy(np.flatnonzero(producer.unit == unit))
            wanted[unit] += diagonal[own].sum() / (2 * weight[own].numel()) * weight[own].square().sum()
    off = (found["rnn"] - wanted).abs() / found.errors["rnn"]
    assert float(off.max()) < 4 and float(off.median()) < 1.5


@pytest.mark.parametrize(
    "criterion", ["magnitude", "l1", "taylor", "fisher", "obd", "geometric-median", "hessian", "joint"]
)
@pytest.mark.parametrize("make", [classifier, lambda: classifier(nn.GRU, num_layers=2, bidirectional=True)])
def test_criteria_score_hidden_units(criterion: str, make: Any) -> None:
    model, x, groups, batches = scored(make)
    before = run(model, x)
    scores = hap.score(model.float(), groups, batches, F.cross_entropy, criterion)
    assert len(scores["rnn"]) == 9 and bool(scores["rnn"].isfinite().all()) and float(scores["rnn"].std()) > 0
    assert gap(run(model.double(), x), before) < 1e-6


@pytest.mark.parametrize("method", ["exact", "gauss-newton", "sampled"])
def test_shortcuts_for_piecewise_linear_networks_refuse(method: str) -> None:
    model, _, groups, batches = scored(lambda: classifier(nn.RNN, nonlinearity="relu"))
    with pytest.raises(hap.HapError, match=f'method="{method}" does not apply'):
        hap.score(model, groups, batches, F.cross_entropy, hap.HessianTrace(method=method))


def test_recurrent_layers_are_not_piecewise_linear() -> None:
    model = made(lambda m, x: m.head(m.rnn(x)[0]), rnn=nn.RNN(5, 9, nonlinearity="relu"), head=nn.Linear(9, 4))
    assert hap.trace(model, steps(3, 2, 5)).curved == "rnn_relu"


# ---- what leaves the process ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lstm", "tagger"])
def test_save_load_train_and_export(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, example, _ = MODELS[name]
    model = make().float()
    example = example[:, :3]  # steps, each of which is written out in an ONNX file
    example = example.float() if example.is_floating_point() else example
    fresh = copy.deepcopy(model)
    plan = hap.prune_(model, example, criterion="magnitude", flops=0.5)
    assert plan.after.macs <= 0.5 * plan.before.macs and model.rnn.hidden_size < fresh.rnn.hidden_size
    optimiser = torch.optim.SGD(model.train().parameters(), 0.01)
    model(example).square().mean().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    optimiser.step()
    wanted = run(model, example)
    loaded = hap.load(hap.save(tmp_path / "a.safetensors", model, plan), fresh)
    assert torch.equal(run(loaded, example)[0], wanted[0])
    onnxruntime = pytest.importorskip("onnxruntime")
    with capturing_once():
        program, onnx = (hap.export(tmp_path / name, loaded, example) for name in ("a.pt2", "a.onnx"))
    assert gap(wanted, [torch.export.load(program).module()(example)]) <= 1e-6
    session = onnxruntime.InferenceSession(str(onnx))
    seen = session.run(None, {session.get_inputs()[0].name: np.ascontiguousarray(example.numpy())})
    assert gap(wanted, [torch.from_numpy(x) for x in seen]) <= 1e-5
