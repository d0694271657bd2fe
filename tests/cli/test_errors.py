"""A refused bad input for each way to go wrong: the message names what was seen and what to do."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from cases import CASES, images
from checks import assert_unchanged, random_plan, random_scores, run, same, snapshot, traced
from hap.cli.app import in_words_of


def calibration() -> list[Any]:
    torch.manual_seed(0)
    return [(images(4, 3, 8, 8), torch.tensor([0, 1, 2, 4]))]


def score(batches: Any = None, loss: Any = F.cross_entropy, criterion: Any = "hessian", train: bool = False) -> Any:
    """Score the plain network, expecting it untouched."""
    model, _ = CASES["plain"]()
    model.train(train)
    before = snapshot(model)
    try:
        return hap.score(
            model, traced("plain", "joint"), calibration() if batches is None else batches, loss, criterion
        )
    finally:
        assert_unchanged(model, before)


def trace(**options: Any) -> Any:
    model, example = CASES["plain"]()
    return hap.trace(model, **({"example": example} | options))


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Prints(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.numpy().sum())


BUDGETS = [
    ({"flops": 0}, r"flops=0; expected the fraction that is LEFT, above 0 and at most 1"),
    ({"params": 1.5}, r"params=1.5; expected the fraction that is LEFT"),
    ({"channels": -0.1}, r"channels=-0.1"),
    ({"flops": float("nan")}, r"flops=nan"),
    ({"flops": True}, r"flops=True; expected the fraction that is LEFT"),
    ({"params": True}, r"params=True; expected the fraction that is LEFT"),
    ({"flops": "0.4"}, r"flops=0.4; expected|flops='0.4'"),
    ({"flops": 0.4, "latency": 0.5}, r"flops=0.4, latency=0.5; expected .* latency= alone"),
    ({}, r"the budget says nothing; expected one or several of params=, flops=, channels="),
    ({"latency": 0}, r"latency=0; expected the fraction that is LEFT"),
]


@pytest.mark.parametrize(("options", "words"), BUDGETS)
def test_wrong_budgets(options: dict[str, Any], words: str) -> None:
    with pytest.raises(hap.HapError, match=words):
        hap.Budget(**options)


@pytest.mark.parametrize(("options", "words"), BUDGETS)
def test_wrong_budgets_in_prune(options: dict[str, Any], words: str) -> None:
    model, example = CASES["plain"]()
    before = snapshot(model)
    with pytest.raises(hap.HapError, match=words):
        hap.prune_(model, example, criterion="magnitude", **options)
    assert_unchanged(model, before)


def test_unreachable_budget() -> None:
    model, example = CASES["plain"]()
    before = snapshot(model)
    with pytest.raises(hap.HapError, match=r"flops=0.001 cannot be reached: with these limits at least 0\.\d+"):
        hap.prune_(model, example, criterion="magnitude", flops=0.001)
    assert_unchanged(model, before)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"per_layer": 1.5}, "per_layer=1.5; expected a fraction"),
        ({"per_layer": -0.1}, "per_layer=-0.1"),
        ({"minimum": 0}, "minimum=0"),
        ({"round_to": 0}, "round_to=0"),
    ],
)
def test_wrong_limits(options: dict[str, Any], words: str) -> None:
    with pytest.raises(hap.HapError, match=words):
        hap.Limits(**options)


def no_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) * float("nan")


def many_losses(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


@pytest.mark.parametrize(
    "criterion", ["hessian", hap.HessianTrace(method="hutchinson", probes=2), "taylor", "fisher", "obd"]
)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batches": []}, "batches yields nothing; pass a list or a data loader"),
        ({"batches": iter(())}, "batches yields nothing"),
        ({"batches": [images()]}, "a batch is a Tensor; expected a pair"),
        ({"batches": [(images(), torch.zeros(2), 3)]}, "a batch is a tuple; expected a pair"),
        ({"loss": no_loss}, "the loss is nan on a calibration batch"),
        ({"loss": many_losses}, r"the loss returns a tensor of shape \(4,\); expected a tensor with one value"),
        ({"loss": lambda o, t: 1.0}, "the loss returns a float"),
        ({"batches": [(images(), torch.tensor([0, 5]))]}, "label 5 is out of range: the model has 5 outputs"),
        ({"batches": [(images(), torch.tensor([-1, 0]))]}, "label -1 is out of range"),
        ({"batches": [(images(), torch.tensor([0, 7]))], "loss": nn.CrossEntropyLoss()}, "label 7 is out of range"),
        ({"loss": None}, "this criterion needs data: pass batches"),
        ({"train": True}, r"0\.1 \(BatchNorm2d\) is in training mode.*model\.eval\(\)"),
    ],
)
def test_bad_data(criterion: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(hap.HapError, match=words):
        score(criterion=criterion, **options)


@pytest.mark.parametrize(
    "criterion",
    ["hessian", hap.HessianTrace(method="hutchinson", probes=2), "taylor", "fisher", "obd", "joint", "gate-gradient"],
)
@pytest.mark.parametrize(
    "loss",
    [
        lambda output, target: F.cross_entropy(output.detach(), target),
        lambda output, target: torch.tensor(float(F.cross_entropy(output.detach(), target))),
    ],
    ids=["detach", "number"],
)
def test_losses_without_a_gradient(criterion: Any, loss: Any) -> None:
    with pytest.raises(hap.HapError, match=r"the loss has no gradient, or none but zeros; .*such as detach\(\)"):
        score(criterion=criterion, loss=loss)


def test_no_batches_at_all() -> None:
    model, _ = CASES["plain"]()
    with pytest.raises(hap.HapError, match="this criterion needs data"):
        hap.score(model, traced("plain", "joint"), None, F.cross_entropy, "hessian")


def test_weights_that_are_not_finite() -> None:
    model, _ = CASES["plain"]()
    with torch.no_grad():
        model[0][0].weight[0, 0, 0, 0] = float("nan")
    with pytest.raises(hap.HapError, match="the loss is nan"):
        hap.score(model, traced("plain", "joint"), calibration(), F.cross_entropy, "hessian")
    with pytest.raises(hap.HapError, match=r"0\.0\.weight has values that are not finite, 1 of \d+"):
        hap.score(model, traced("plain", "joint"), None, None, "magnitude")
    scores = {n: torch.full((len(g),), float("nan")) for n, g in traced("plain", "joint").items()}
    with pytest.raises(hap.HapError, match=r"scores\['0.0'\] holds nan; scores must be finite"):
        hap.plan(traced("plain", "joint"), scores, hap.Budget(flops=0.5))


def test_dropout_in_training_mode() -> None:
    model, example = CASES["identity_and_dropout"]()
    model[2].train()
    with pytest.raises(hap.HapError, match=r"2 \(Dropout2d\) is in training mode"):
        hap.score(
            model, traced("identity_and_dropout", "joint"), [(example, torch.tensor([0, 1]))], F.cross_entropy, "taylor"
        )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: hap.HessianTrace(method="magic"), "method is 'magic'; expected one of 'auto', 'exact'"),
        (lambda: hap.HessianTrace(probes=1), "probes=1"),
        (lambda: hap.HessianTrace(chunk=0), "chunk=0"),
        (lambda: hap.HessianTrace(settle=1.0), "settle=1.0"),
        (lambda: score(criterion="magic"), "criterion is 'magic'; expected one of hessian, magnitude"),
        (lambda: score(criterion="reversed-magic"), "criterion is 'magic'"),
        (lambda: score(criterion=3), "criterion is 3"),
        (lambda: score(criterion=hap.L1), "criterion is"),
    ],
)
def test_wrong_criteria(make: Any, words: str) -> None:
    with pytest.raises(hap.HapError, match=words):
        make()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"coupling": "loose"}, "coupling is 'loose'; expected one of 'joint', 'union'"),
        ({"example": 3}, "example is a int; expected a tensor, a tuple of arguments or a dict"),
        ({"example": torch.randn(2, 4, 8, 8).double()}, "Sequential does not run on this example: Given groups"),
        ({"example": images().float()}, "Sequential does not run on this example: .*Double"),
    ],
)
def test_wrong_traces(options: dict[str, Any], words: str) -> None:
    with pytest.raises(hap.HapError, match=words):
        trace(**options)


@pytest.mark.parametrize("model", [Branching(), Prints()])
def test_models_that_export_cannot_capture(model: nn.Module) -> None:
    net = nn.Sequential(nn.Linear(4, 4), model)
    before = snapshot(net)
    with pytest.raises(hap.HapError, match=r"torch\.export cannot capture Sequential.*Check that") as caught:
        hap.trace(net, torch.randn(2, 4))
    assert caught.value.__cause__ is not None
    assert_unchanged(net, before)


def test_wrong_scores() -> None:
    groups = traced("plain", "joint")
    scores = random_scores(groups)
    budget = hap.Budget(flops=0.5)
    with pytest.raises(hap.HapError, match=r"no scores for group '1\.0'"):
        hap.plan(groups, {"0.0": scores["0.0"]}, budget)
    with pytest.raises(hap.HapError, match=re.escape("scores['1.0'] has shape (5,); expected (6,)")):
        hap.plan(groups, scores | {"1.0": torch.ones(5)}, budget)
    with pytest.raises(hap.HapError, match="holds inf"):
        hap.plan(groups, scores | {"1.0": torch.full((6,), float("inf"))}, budget)


def test_plans_for_another_model() -> None:
    plan = random_plan(traced("residual", "joint"), 0)
    model, example = CASES["plain"]()
    before = snapshot(model)
    with pytest.raises(hap.HapError, match=r"the plan does not fit this model: .* does not exist.*another model"):
        hap.apply_(model, plan, example=example)
    assert_unchanged(model, before)


def test_a_plan_applied_twice() -> None:
    model, example = CASES["residual"]()
    plan = random_plan(traced("residual", "union"), 0)
    hap.apply_(model, plan, example=example)
    wanted = run(model, example)
    with pytest.raises(hap.HapError, match=r"applied to this one before"):
        hap.apply_(model, plan, example=example)
    assert same(run(model, example), wanted)


@pytest.mark.parametrize("text", ["{", "[]", "3", "{}", '{"kept": {}}'])
def test_plans_that_are_not_plans(text: str) -> None:
    with pytest.raises(hap.HapError, match=r"not valid JSON|not a plan"):
        hap.Plan.from_json(text)


def test_prune_leaves_the_model_when_it_fails() -> None:
    """After compensation and before surgery: the weights that were changed are put back."""
    model, example = CASES["plain"]()
    wanted = {n: t.clone() for n, t in model.state_dict().items()}
    wrong = images(2, 4, 8, 8)
    batches = [*calibration(), (wrong, torch.tensor([0, 1]))]
    with pytest.raises(RuntimeError):
        hap.prune_(model, example, batches, F.cross_entropy, flops=0.5, criterion="magnitude", compensate=True)
    assert all(torch.equal(t, wanted[n]) for n, t in model.state_dict().items())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_every_error_is_a_hap_error_and_a_value_error() -> None:
    assert issubclass(hap.HapError, ValueError)
    with pytest.raises(ValueError, match="expected one or several"):
        hap.Budget()


def test_patterns_must_match_and_are_not_strings() -> None:
    model, example = CASES["residual"]()
    for options, message in (({"ignore": "stem*"}, "ignore is the string"), ({"ignore": ("zzz",)}, "matches no group")):
        with pytest.raises(hap.HapError, match=message):
            hap.trace(model, example, **options)
    groups = hap.trace(model, example)
    scores = {n: torch.rand(len(g)) for n, g in groups.items()}
    for leave, message in (("stem*", "Limits.leave is the string"), (("zzz",), "matches no group")):
        with pytest.raises(hap.HapError, match=message):
            hap.plan(groups, scores, hap.Budget(params=0.5), limits=hap.Limits(leave=leave))


def test_any_producer_names_its_group() -> None:
    model, example = CASES["residual"]()
    joint = hap.trace(model, example)
    other = next(p.weight.rpartition(".")[0] for p in joint["stem.0"].producers[1:])
    assert "stem.0" not in hap.trace(model, example, ignore=(other,))


def test_an_error_carries_the_argument_that_it_is_about() -> None:
    with pytest.raises(hap.HapError) as caught:
        hap.Budget(flops=0)
    assert (caught.value.argument, caught.value.value) == ("flops", 0)
    wrapped = hap.HapError("entry 2: ", caught.value)
    assert str(wrapped) == f"entry 2: {caught.value}" and (wrapped.argument, wrapped.value) == ("flops", 0)
    assert in_words_of("prune", wrapped).startswith("entry 2: --flops 0; expected")
    assert in_words_of("run", wrapped).startswith("entry 2: flops = 0; expected")
    assert hap.HapError("nothing about arguments").argument is None
