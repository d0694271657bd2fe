"""Criteria that look at samples one by one: the batch is the first axis, or the model is refused."""

from collections import UserDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap


class Attention(nn.Module):
    """One attention layer, tokens first or samples first inside and outside, that returns one vector per sample."""

    def __init__(self, tokens_first: bool, inside: bool | None = None, causal: bool = False, every: bool = False):
        super().__init__()
        self.outside, self.causal, self.every = tokens_first, causal, every
        self.inside = tokens_first if inside is None else inside
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.heads, self.last = 4, nn.Linear(16, 3)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = x.transpose(0, 1) if self.inside != self.outside else x
        heads = (1, 2, 0, 3) if self.inside else (0, 2, 1, 3)
        back = (2, 0, 1, 3) if self.inside else (0, 2, 1, 3)
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).permute(heads) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).permute(back).flatten(2)
        x = x + self.o(y) * (1 if scale is None else scale)
        return self.last(x if self.every else x.mean(0 if self.inside else 1))


CRITERIA = [hap.GateGradient(), hap.JointTrace("gauss-newton"), hap.DiagonalFisher(), hap.Whole(hap.DiagonalFisher())]


def score(model: nn.Module, x: Any, y: Tensor, criterion: hap.Criterion, loss: Any = F.cross_entropy) -> Any:
    groups = hap.trace(model.double().eval(), x)
    return hap.score(model, hap.only(groups, hap.heads(groups)), [(x, y)], loss, criterion)["q"]


@pytest.mark.parametrize("criterion", CRITERIA, ids=str)
@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (6, r"inputs has length 6, that of its target 5\. This criterion looks at each sample by itself and"),
        (5, r"(what o(\.weight)? reads|output 0) is not the same for the last sample alone and in its batch.*first"),
    ],
)
def test_tokens_first_is_refused(tokens: int, words: str, criterion: hap.Criterion) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(tokens, 5, 16, dtype=torch.float64), torch.arange(5) % 3
    with pytest.raises(hap.HapError, match=words):
        score(Attention(True), x, y, criterion)
    assert score(Attention(True), x, y, hap.Taylor()).isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("criterion", [hap.GateGradient(), hap.DiagonalFisher()], ids=str)
def test_targets_for_each_token_do_not_hide_it(criterion: hap.Criterion, causal: bool) -> None:
    """There the target has its tokens first as well. In a causal model the first token alone would be the same."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 5, 16, dtype=torch.float64), torch.randint(0, 3, (6, 5))
    with pytest.raises(hap.HapError, match="is not the same for the last sample alone and in its batch"):
        score(Attention(True, causal=causal, every=True), x, y, criterion, lambda o, t: F.cross_entropy(o.mT, t))


def test_tokens_first_inside() -> None:
    """The samples of layers are then elsewhere; those of the whole model are not."""
    torch.manual_seed(0)
    x, y = torch.randn(5, 5, 16, dtype=torch.float64), torch.arange(5) % 3
    inside, usual = Attention(False, inside=True), Attention(False)
    usual.load_state_dict(inside.state_dict())
    for criterion in CRITERIA[:2]:
        with pytest.raises(hap.HapError, match=r"what (o|q|k|v)(\.weight)? reads is not the same"):
            score(inside, x, y, criterion)
    for criterion in CRITERIA[2:]:
        torch.testing.assert_close(score(inside, x, y, criterion), score(usual, x, y, criterion))


@pytest.mark.parametrize("criterion", CRITERIA, ids=str)
def test_samples_first_with_as_many_tokens(criterion: hap.Criterion) -> None:
    """And with a tensor that all samples share."""
    torch.manual_seed(0)
    x, y = torch.randn(5, 5, 16, dtype=torch.float64), torch.arange(5) % 3
    model = Attention(False)
    plain = score(model, x, y, criterion)
    shared = UserDict({"x": x, "scale": torch.ones(1, 1, 16, dtype=torch.float64)})
    assert plain.isfinite().all() and (plain > 0).all()
    torch.testing.assert_close(score(model, shared, y, criterion), plain)


class Asking(Attention):
    """Asks for a value, as models do that see whether a mask hides anything."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(x, scale) if torch.compiler.is_compiling() or bool((x < 9).all()) else x


def test_a_model_that_asks_for_values() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(4, 6, 16, dtype=torch.float64), torch.arange(4) % 3
    asking, usual = Asking(False), Attention(False)
    usual.load_state_dict(asking.state_dict())
    torch.testing.assert_close(score(asking, x, y, hap.DiagonalFisher()), score(usual, x, y, hap.DiagonalFisher()))


class Odd(Attention):
    """Does what vmap cannot: reads numbers out of a tensor, or writes into one of its own."""

    how = ""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        if torch.compiler.is_compiling():
            return super().forward(x, scale)
        if self.how == "in place":
            own = torch.zeros(x.shape, dtype=x.dtype)
            own += x
            return super().forward(own, scale)
        numbers = x.detach().tolist() if self.how == "list" else x.detach().numpy()
        return super().forward(x, scale) + 0 * len(numbers)


@pytest.mark.parametrize("how", ["in place", "list", "numpy"])
def test_what_vmap_cannot_do_is_done_one_by_one(how: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(4, 6, 16, dtype=torch.float64), torch.arange(4) % 3
    odd, usual = Odd(False), Attention(False)
    odd.how = how
    usual.load_state_dict(odd.state_dict())
    torch.testing.assert_close(score(odd, x, y, hap.DiagonalFisher()), score(usual, x, y, hap.DiagonalFisher()))


class Across(Attention):
    """Samples see each other."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(x - x.mean(0), scale)


def test_a_model_that_looks_across_its_batch() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(4, 6, 16, dtype=torch.float64), torch.arange(4) % 3
    with pytest.raises(hap.HapError, match=r"in its batch.*has tokens first; for one that looks across its batch"):
        score(Across(False), x, y, hap.DiagonalFisher())


@pytest.mark.parametrize("sizes", [(5, 16), (16, 5)])
def test_a_shared_input_as_long_as_one_of_the_batches(sizes: tuple[int, int]) -> None:
    """It would be cut up there, and not elsewhere. A batch of a single sample does no harm."""
    torch.manual_seed(0)
    model, x = Attention(False).double().eval(), torch.randn(16, 6, 16, dtype=torch.float64)
    groups = hap.trace(model, x)

    def scores(sizes: tuple[int, ...], scale: Tensor) -> Any:
        batches = [({"x": x[:size], "scale": scale.double()}, torch.arange(size) % 3) for size in sizes]
        return hap.score(model, groups, batches, F.cross_entropy, hap.DiagonalFisher())

    with pytest.raises(hap.HapError, match=r"batch\[0\]\['scale'\] has shape \(16,\) in a batch of"):
        scores(sizes, torch.ones(16))
    seen, wanted = scores((1, 5, 1), torch.ones(1)), scores((1, 5, 1), torch.ones(16))
    assert all(torch.allclose(seen[name], wanted[name]) for name in groups)


def test_a_loss_that_fails_on_one_sample() -> None:
    def picky(output: Tensor, target: Tensor) -> Tensor:
        if len(output) == 1:
            raise ValueError("two at least")
        return F.cross_entropy(output, target)

    x, y = torch.randn(4, 6, 16, dtype=torch.float64), torch.arange(4) % 3
    with pytest.raises(hap.HapError, match=r"the model or the loss fails sample by sample: two at least\. This crit"):
        score(Attention(False), x, y, hap.DiagonalFisher(), picky)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cross_entropy_in_half_precision_is_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Attention(False).eval()
    x = torch.randn(16, 5, 16)
    groups = hap.trace(model, x)
    heads = hap.only(groups, hap.heads(groups))
    criterion = hap.JointTrace("gauss-newton", draws=100)
    batches = [(x, torch.randint(0, 3, (16,))) for _ in range(3)]
    wanted = hap.score(model, heads, batches, F.cross_entropy, criterion)["q"]
    half = [(x.to(dtype), y) for x, y in batches]
    seen = hap.score(model.to(dtype), heads, half, F.cross_entropy, criterion)["q"]
    torch.testing.assert_close(seen, wanted, rtol=0.05, atol=0)
    in_float = hap.score(model, heads, half, lambda o, t: F.cross_entropy(o.float(), t), criterion)["q"]
    torch.testing.assert_close(in_float, wanted, rtol=0.05, atol=0)
    with pytest.raises(hap.HapError, match="knows the cross-entropy alone"):
        hap.score(model, heads, half, lambda o, t: 1.1 * F.cross_entropy(o, t), criterion)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.02, 0.1])
def test_label_smoothing_is_told_from_the_cross_entropy(dtype: torch.dtype, smoothing: float) -> None:
    """A fresh model finds all classes about as probable, so that the loss itself is nearly the same."""
    torch.manual_seed(0)
    model, x, y = Attention(False).to(dtype).eval(), torch.randn(16, 5, 16).to(dtype), torch.arange(16) % 3
    groups = hap.trace(model, x)
    heads = hap.only(groups, hap.heads(groups))

    def smoothed(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, label_smoothing=smoothing)

    assert torch.allclose(smoothed(model(x), y), F.cross_entropy(model(x), y), rtol=0.02)
    with pytest.raises(hap.HapError, match="not the cross-entropy of the outputs: its gradient in them is off"):
        hap.score(model, heads, [(x, y)], smoothed, hap.JointTrace("gauss-newton"))
