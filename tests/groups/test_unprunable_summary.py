"""What could not be touched is said in one sentence, and nothing is said of what nobody expects to go."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hap
from cases import CASES
from hap.groups.types import Frozen
from hap.groups.unprunable_summary import share_unprunable, unprunable_in_words


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.recurrent = nn.Conv1d(4, 8, 3, padding=1), nn.LSTM(8, 32, proj_size=24, batch_first=True)
        self.wide, self.last = nn.Linear(24, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.recurrent(self.first(x).relu().transpose(1, 2))[0]
        out: Tensor = self.last(self.wide(hidden).relu())
        return out


@pytest.fixture
def recurrent() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Recurrent().eval(), torch.randn(2, 4, 6)


LSTM = r"recurrent \(lstm: projects its states \(proj_size\)\)"
SAID = rf"^\d\d% of the parameters could not be touched: {LSTM} and 1 more layer"


def said_by(model: nn.Module, example: Any, **options: Any) -> tuple[hap.Plan, list[str]]:
    """The plan of `prune_`, and the warnings about what could not be touched."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        plan = hap.prune_(model, example, criterion="magnitude", **options)
    return plan, [str(w.message) for w in found if "could not be touched" in str(w.message)]


def test_recurrent_layers_are_named_with_the_reason(recurrent: tuple[nn.Module, Tensor]) -> None:
    model, example = recurrent
    sizes = {n: p.numel() for n, p in model.named_parameters()}
    expected = sum(v for n, v in sizes.items() if n.startswith(("recurrent", "first"))) / sum(sizes.values())
    groups = hap.trace(model, example)
    assert groups.unprunable.keys() == {n for n in sizes if n.startswith(("recurrent", "first"))}
    assert share_unprunable(groups) == pytest.approx(expected)
    plan, said = said_by(model, example, params=0.95)
    assert len(said) == 1 and re.match(SAID, said[0])
    assert plan.untouched == str(plan).splitlines()[-1] and said[0].startswith(f"{expected:.0%} of the parameters")
    assert hap.Plan.from_json(plan.to_json()) == plan


def test_a_smaller_share_is_said_by_the_plan_alone(recurrent: tuple[nn.Module, Tensor]) -> None:
    _, example = recurrent
    model = Recurrent()
    model.wide, model.last = nn.Linear(24, 512), nn.Linear(512, 3)
    plan, said = said_by(model.eval(), example, params=0.9)
    assert not said and "could not be touched: recurrent (lstm" in str(plan)


def test_what_is_left_alone_as_asked_is_not_mentioned() -> None:
    model, example = CASES["plain"]()
    groups = hap.trace(model, example, ignore=("0.0",))
    assert len(groups) and not unprunable_in_words(groups)


class Block(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4):
        super().__init__()
        self.heads, self.norm, self.qkv = heads, nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.mlp = nn.Linear(width, width), nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm(x))


def test_what_reads_an_input_and_computes_an_output_is_not_mentioned() -> None:
    """Its inputs go with a depthwise convolution of the image, which is never cut, and its classes stay."""
    model = nn.Sequential(nn.Conv2d(3, 3, 3, groups=3), nn.ReLU(), nn.Conv2d(3, 90, 1))
    assert hap.trace(model.eval(), torch.randn(1, 3, 8, 8)).unprunable.keys() <= {"0.weight", "0.bias"}


class Decoder(nn.Module):
    """Nearly all of it is a table of words and a classifier: the residual stream on one side, outputs on the other."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(500, 16), nn.Parameter(torch.randn(1, 6, 16))
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(16, 500)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.words(x) + self.places))
        return out


def test_streams_tables_and_classifiers_are_not_mentioned() -> None:
    torch.manual_seed(0)
    plan, said = said_by(Decoder().eval(), torch.randint(0, 500, (2, 6)), params=0.95)
    assert not said and not plan.untouched and "touched" not in str(plan)


@pytest.mark.parametrize("name", ["plain", "bottleneck", "depthwise", "dense_block", "inception", "squeeze_excite"])
def test_ordinary_networks_are_quiet(name: str) -> None:
    model, example = CASES[name]()
    plan, said = said_by(model, example, params=0.9)
    assert not said and not plan.untouched


def test_a_stream_that_was_asked_for_and_stays_is_mentioned() -> None:
    torch.manual_seed(0)
    model, example = Decoder().eval(), torch.randint(0, 500, (2, 6))
    assert not hap.trace(model, example).unprunable
    assert "of.words.weight" in hap.trace(Running(model), example, stream=True).unprunable
    assert not hap.trace(Running(model), example).unprunable


class Running(nn.Module):
    """Hands the residual stream to an operator that no rule knows."""

    def __init__(self, of: nn.Module):
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        stream = self.of.blocks(self.of.words(x) + self.of.places)  # type: ignore[operator, union-attr]
        out: Tensor = self.of.head(torch.cummax(stream, -1).values)  # type: ignore[operator]
        return out


def test_reasons_are_for_layers_that_hold_parameters() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.table = nn.Linear(4, 8), nn.Parameter(torch.randn(8, 8))
            self.last = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(torch.linalg.solve(self.table.T, self.first(x)[..., None])[..., 0])
            return out

    torch.manual_seed(0)
    untouched = hap.trace(Own().eval(), torch.randn(3, 4)).unprunable
    assert untouched.keys() == {"first.weight", "first.bias", "table"}
    assert untouched["table"] == Frozen("linalg_solve", "no rule for this operator")


# ---- errors that say it too ---------------------------------------------------------------------------------


class Untouchable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.last = nn.LSTM(4, 12, proj_size=8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.recurrent(x)[0])
        return out


def test_where_nothing_can_be_removed_the_error_has_the_reason() -> None:
    model, example = Untouchable().eval(), torch.randn(2, 5, 4)
    reason = r"nothing in this model can be removed: recurrent \(lstm: projects its states \(proj_size\)\); print\("
    with pytest.raises(hap.HapError, match=rf"{reason}hap\.trace\(model, example\)\) has all reasons"):
        hap.prune_(model, example, criterion="magnitude", params=0.5)
    groups = hap.trace(model, example)
    for verb in (
        lambda: hap.score(model, groups, None, None, "l1"),
        lambda: hap.plan(groups, {}, hap.Budget(params=0.5)),
    ):
        with pytest.raises(hap.HapError, match=rf"{reason}groups\) has all reasons"):
            verb()


def test_where_all_is_as_expected_the_error_says_so() -> None:
    with pytest.raises(hap.HapError, match=r"nothing in this model can be removed: 0 \(an output of the model\); "):
        hap.prune_(nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4), criterion="l1", params=0.5)
    with pytest.raises(hap.HapError, match="nothing in this model can be removed: no layer computes what another one"):
        hap.prune_(nn.Sequential(nn.ReLU()), torch.randn(2, 4), criterion="l1", params=0.5)


def test_a_budget_that_frozen_layers_keep_out_of_reach_says_so(recurrent: tuple[nn.Module, Tensor]) -> None:
    words = (
        r"at least 0\.\d+ of the dense model is left; \d\d% of the parameters could not be touched: recurrent \(lstm"
    )
    with pytest.raises(hap.HapError, match=words):
        hap.prune_(*recurrent, criterion="l1", params=0.2)
    with pytest.raises(hap.HapError, match=r"of the dense model is left\. Ask for"):
        hap.prune_(*CASES["plain"](), criterion="l1", params=0.001)


class Choosing(nn.Module):
    """Between any two of its layers it chooses by value, so that each is a part by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        out: Tensor = self.last(hidden if hidden.sum() > 0 else -hidden)
        return out


def test_a_model_in_parts_that_loses_nothing_is_told_how_to_see_them() -> None:
    words = r"can be removed: .*first.*in parts.*view = hap\.parts\(model, example\), and print\(hap\.trace\(view"
    with pytest.warns(UserWarning, match="pruned in parts"), pytest.raises(hap.HapError, match=words):
        hap.prune_(Choosing().eval(), torch.randn(2, 4), criterion="l1", params=0.5)


class Decoding(Choosing):
    def forward(self, x: Tensor, use_cache: bool = True) -> Tensor:
        return super().forward(x)


def test_a_decoder_in_parts_is_told_of_its_cache() -> None:
    hint = 'give the example "use_cache": False'
    with pytest.warns(UserWarning, match=hint), pytest.raises(hap.HapError, match=hint):
        hap.prune_(Decoding().eval(), torch.randn(2, 4), criterion="l1", params=0.5)
    for model, example in [(Decoding(), {"x": torch.randn(2, 4), "use_cache": False}), (Choosing(), torch.randn(2, 4))]:
        with (
            pytest.warns(UserWarning, match="in parts") as told,
            pytest.raises(hap.HapError, match="in parts") as found,
        ):
            hap.prune_(model.eval(), example, criterion="l1", params=0.5)
        assert "use_cache" not in str(found.value) and not [w for w in told if "use_cache" in str(w.message)]


def test_of_many_parts_a_few_are_named() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(20))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x if x.sum() > 0 else -x)
            return x

    words = r"in parts: layers\.0, layers\.1, .*layers\.7 and 12 more; what passes between them is kept"
    with pytest.warns(UserWarning, match=words), pytest.raises(hap.HapError, match="nothing in this model"):
        hap.prune_(Many().eval(), torch.randn(2, 4), criterion="l1", params=0.5)


class Half(nn.Module):
    """One part can be pruned, the other is a single layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(4, 64), nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        out: Tensor = self.rest(hidden if hidden.sum() > 0 else -hidden)
        return out


def test_layers_that_are_parts_by_themselves_are_mentioned() -> None:
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="in parts: first, rest"):
        plan = hap.prune_(Half().eval(), torch.randn(2, 4), criterion="l1", params=0.8)
    expected = (
        "30% of the parameters could not be touched: first (a part by itself, and what passes between parts is kept)"
    )
    assert plan.untouched == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(value: float) -> None:
    model, example = CASES["plain"]()
    with torch.no_grad():
        model[0][0].weight[0, 0, 0, 0] = value
    words = r"0\.0\.weight has values that are not finite, 1 of \d+, so that nothing tells what may go"
    with pytest.raises(hap.HapError, match=words):
        hap.prune_(model, example, criterion="magnitude", flops=0.5)
    with pytest.raises(hap.HapError, match=words):
        hap.score(model, hap.trace(model, example), None, None, "magnitude")
