"""export: the files run elsewhere and give the same numbers."""

import copy
import re
import warnings
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import hap
from cases import CASES
from checks import assert_unchanged, check_cost, gap, random_plan, run, snapshot, traced, traces
from hap.io import export
from hap.models.cifar_resnet import CifarResNet
from huggingface import library, small
from traced_once import capturing_once


def onnx_outputs(path: Path, example: torch.Tensor) -> list[torch.Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    outputs = session.run(None, {session.get_inputs()[0].name: np.ascontiguousarray(example.numpy())})
    return [torch.from_numpy(o) for o in outputs]


def test_resnet_end_to_end(tmp_path: Path) -> None:
    """Budget met, verified, trains a step, saves, reloads, exports to both formats with equal outputs.

    In union coupling; the flow of test_cli.py does the same in joint coupling."""
    torch.manual_seed(0)
    model = CifarResNet((1, 1, 1), (16, 32, 64)).eval()
    dense = copy.deepcopy(model)
    example = torch.randn(2, 3, 16, 16)
    plan = hap.prune_(
        model, example, flops=0.4, implant=hap.Pointwise(0.2, init="center"), coupling="union", criterion="magnitude"
    )
    assert plan.after.macs <= 0.4 * plan.before.macs
    assert plan.after.macs > 0.39 * plan.before.macs
    check_cost(model, plan.after, example)
    assert any(plan.implanted.values()) and plan.widenings
    optimiser = torch.optim.SGD(model.train().parameters(), 0.01)
    nn.functional.cross_entropy(model(example), torch.tensor([1, 2])).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    optimiser.step()
    wanted = run(model, example)
    path = hap.save(tmp_path / "a.safetensors", model, plan)
    loaded = hap.load(path, dense)
    assert torch.equal(run(loaded, example)[0], wanted[0])
    before = snapshot(loaded)
    with capturing_once():
        onnx = hap.export(tmp_path / "a.onnx", loaded, example)
        program = hap.export(tmp_path / "a.pt2", loaded, example)
    assert_unchanged(loaded, before)
    assert gap(wanted, onnx_outputs(onnx, example)) <= 1e-5
    assert gap(wanted, [torch.export.load(program).module()(example)]) <= 1e-6
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.onnx", "a.pt2", "a.safetensors"]


@pytest.mark.parametrize("name", ["residual", "gated_unit", "unet_transposed", "grouped_few"])
def test_pruned_networks_run_in_onnx(name: str, tmp_path: Path) -> None:
    model, example = CASES[name]()
    plan = random_plan(traced(name, "union"), 0, 0.5, hap.Pointwise(init="center"))
    pruned = hap.apply_(model, plan, example=example).float()
    path = hap.export(tmp_path / "a.onnx", pruned, example.float())
    assert gap(run(pruned, example.float()), onnx_outputs(path, example.float())) <= 1e-5


FOLDED = ["plain", "residual", "bottleneck", "inverted_residual", "grouped_transposed", "conv1d", "mlp_with_norm"]


def batchnorms(program: torch.export.ExportedProgram) -> int:
    return sum(node.target is torch.ops.aten.batch_norm.default for node in program.graph.nodes)


@pytest.mark.parametrize(("name", "coupling"), traces(FOLDED))
def test_batchnorms_are_folded(name: str, coupling: str, tmp_path: Path) -> None:
    """In float64 to rounding, with implants beside convolutions and scatters behind branches."""
    model, example = CASES[name]()
    plan = random_plan(traced(name, coupling), 1, 0.5, hap.Pointwise(init="center"))
    pruned = hap.apply_(model, plan, example=example)
    program = torch.export.load(hap.export(tmp_path / "a.pt2", pruned, example))
    assert batchnorms(program) == 0
    assert not any("running" in name for name in program.state_dict)
    assert gap(run(pruned, example), [program.module()(example)]) <= 1e-12


def test_an_implant_that_is_put_in_order_is_folded(tmp_path: Path) -> None:
    """Where other layers share an axis the implant's channels are sorted in after it; the fold follows them."""
    model, example = CASES["dense_block"]()
    plan = random_plan(traced("dense_block", "joint"), 0, 0.5, hap.Pointwise(init="center"))
    pruned = hap.apply_(model, plan, example=example)
    program = torch.export.load(hap.export(tmp_path / "a.pt2", pruned, example))
    assert gap(run(pruned, example), [program.module()(example)]) <= 1e-12


class Conv(nn.Module):
    """conv -> norm, whose convolution someone else reads too, or whose weight is computed or shared."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.conv, self.norm, self.other = how, nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.register_buffer("order", torch.tensor([2, 0, 1]))
        for norm in (self.norm, self.other):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            nn.init.normal_(norm.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        if self.how == "read twice":
            return self.norm(y) + y
        if self.how == "shared":
            return self.norm(y) + self.other(self.conv(x + 1))
        if self.how == "computed":
            return self.norm(nn.functional.conv2d(x, self.conv.weight * 2))
        if self.how == "twice the same":
            return self.norm(torch.cat([y[:, :1], y[:, :1], y[:, :1]], 1))
        return self.norm(y.index_select(1, self.order))


@pytest.mark.parametrize(
    ("how", "left"), [("read twice", 1), ("shared", 0), ("computed", 1), ("twice the same", 1), ("in order", 0)]
)
def test_only_what_can_be_folded_is(how: str, left: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, example = Conv(how).double().eval(), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    before = snapshot(model)
    program = torch.export.load(hap.export(tmp_path / "a.pt2", model, example))
    assert_unchanged(model, before)
    assert batchnorms(program) == left
    assert gap(run(model, example), [program.module()(example)]) <= 1e-12


@pytest.mark.parametrize("traced_with", [1, 2])
def test_any_batch_size(traced_with: int, tmp_path: Path) -> None:
    model, _ = CASES["residual"]()
    example = torch.randn(5, *CASES["residual"]()[1].shape[1:])
    plan = random_plan(hap.trace(model, example[:1].double(), "union"), 0)
    pruned = hap.apply_(model, plan, example=example.double()).float()
    with capturing_once():
        onnx = hap.export(tmp_path / "a.onnx", pruned, example[:traced_with])
        program = torch.export.load(hap.export(tmp_path / "a.pt2", pruned, example[:traced_with])).module()
    for batch in (1, 2, 5):
        wanted = run(pruned, example[:batch])
        assert gap(wanted, onnx_outputs(onnx, example[:batch])) <= 1e-5
        assert gap(wanted, [program(example[:batch])]) <= 1e-5


class Reader(nn.Module):
    """Tokens with a mask through one attention layer with a place for each token, and the mean over all of them."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how, self.heads = how, 4
        self.tokens, self.places = nn.Embedding(20, 16), nn.Embedding(40, 16)
        self.qkv, self.out, self.by_place = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(6, 6)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, mask[:, None, None].bool())
        x = x + self.out(y.transpose(1, 2).flatten(2))
        if self.how == "fixed":
            x = self.by_place(x.mT).mT
        if self.how == "written out" and torch.compiler.is_compiling():
            return x.sum(1) / 6
        if self.how == "picky" and not torch.compiler.is_compiling() and ids.shape[1] != 6:
            raise RuntimeError("six tokens, please")
        return x.mean(1)


def text(rows: int, length: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, -1] = 0
    return {"ids": torch.randint(0, 20, (rows, length)), "mask": mask}


def onnx_of_many(path: Path, example: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    outputs = session.run(None, {name: tensor.numpy() for name, tensor in example.items()})
    return [torch.from_numpy(o) for o in outputs]


@pytest.mark.parametrize("dynamic_batch", [True, False])
def test_any_number_of_tokens(dynamic_batch: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, example = Reader().eval(), text(2, 6)
    groups = hap.trace(model, example)
    hap.apply_(model, hap.draft(groups, {"qkv": [0, 3]}), example)
    options: Any = {"dynamic_batch": dynamic_batch, "dynamic_axes": (1,)}
    with capturing_once():
        onnx = hap.export(tmp_path / "a.onnx", model, UserDict(example), **options)
        program = torch.export.load(hap.export(tmp_path / "a.pt2", model, UserDict(example), **options)).module()
    for rows, length in ((2, 17), (2, 2), (5, 9)) if dynamic_batch else ((2, 17), (2, 6)):
        other = text(rows, length)
        wanted = run(model, other)
        assert gap(wanted, onnx_of_many(onnx, other)) <= 1e-5
        assert gap(wanted, [program(**other)]) <= 1e-5


class Scaled(nn.Module):
    """Takes a tensor by name and, among **kwargs, another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor, **scale: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * scale["scale"]  # which is also what all of them are called


@pytest.mark.parametrize("ending", ["pt2", "onnx"])
def test_arguments_without_a_name_in_the_forward_have_any_batch_too(ending: str, tmp_path: Path) -> None:
    model, example = Scaled().eval(), {"x": torch.randn(2, 6), "scale": torch.rand(2, 3)}
    hap.prune_(model, example, criterion="magnitude", flops=0.6)
    path = hap.export(tmp_path / f"scaled.{ending}", model, example)
    assert "forward" not in vars(model)
    other = {"x": torch.randn(5, 6), "scale": torch.rand(5, 3)}
    with torch.no_grad():
        wanted = model(**other)
    if ending == "pt2":
        seen = torch.export.load(path).module()(**other)
    else:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        seen = torch.from_numpy(session.run(None, {name: x.numpy() for name, x in other.items()})[0])
    torch.testing.assert_close(seen, wanted, rtol=0, atol=1e-5)


def test_sides_of_an_image_may_be_open(tmp_path: Path) -> None:
    model = CifarResNet((1, 1, 1), (16, 24, 40), channels=1).eval()
    path = hap.export(tmp_path / "a.pt2", model, torch.randn(1, 1, 8, 8), dynamic_axes=[2, 3])
    other = torch.randn(3, 1, 13, 10)
    assert gap(run(model, other), [torch.export.load(path).module()(other)]) <= 1e-5


@pytest.mark.parametrize(
    ("how", "length", "axes", "words"),
    [
        ("fixed", 6, (1,), "Reader runs with one length of axis 1 only, that of the example; leave it out of dynamic_"),
        ("picky", 6, (1,), r"Reader runs with no other lengths of axes \(1,\)"),
        ("written out", 6, (1,), "compute the same where axis 1 has length 2: the value of output 0 is"),
        ("", 1, (1,), "axis 1 cannot have any length: torch.export takes a length of 1 for fixed; give an example"),
        ("", 6, (2,), "axis 2 cannot have any length: no tensor of the example has it"),
        ("", 6, (0,), r"dynamic_axes is \(0,\); expected axes behind the first.*see dynamic_batch"),
        ("", 6, 1, "dynamic_axes is 1; expected axes"),
        ("", 6, (True,), r"dynamic_axes is \(True,\); expected axes"),
        ("", 6, ("ids",), "expected axes behind the first"),
    ],
)
def test_axes_that_cannot_be_open(how: str, length: int, axes: Any, words: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with pytest.raises(hap.HapError, match=words):
        hap.export(tmp_path / "a.pt2", Reader(how).eval(), text(2, length), dynamic_axes=axes)
    assert not any(tmp_path.iterdir())


class TwoWays(nn.Module):
    """Goes one way or the other, as the lengths of its input say."""

    def __init__(self, way: Callable[[torch.Size], bool]) -> None:
        super().__init__()
        self.way, self.conv, self.norm = way, nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x))
        return 2 * y if self.way(x.shape) else y


@pytest.mark.parametrize(
    ("way", "batch", "axes", "refused", "where"),
    [
        (lambda shape: shape[2] > 4, 2, (2,), (2, 8, 3), "axis 2 has length 4"),
        (lambda shape: shape[2] < 9, 2, (2,), (2, 8, 9), "axis 2 has length 9"),
        (lambda shape: shape[2] % 2 == 0, 2, (2,), (2, 8, 5), "axis 2 has length 13"),
        (lambda shape: shape[0] > 3, 5, (), (3, 8, 6), "axis 0 has length 3"),
        (lambda shape: shape[0] > 3, 1, (), (4, 8, 6), "axis 0 has length 4"),
    ],
    ids=["longer", "shorter", "even", "large batch", "small batch"],
)
def test_lengths_that_were_not_captured_are_refused(
    way: Any, batch: int, axes: tuple[int, ...], refused: tuple[int, ...], where: str, tmp_path: Path
) -> None:
    """By the .pt2 file itself, which a warning says; ONNX would compute the other way, so that is not written."""
    torch.manual_seed(0)
    model, example = TwoWays(way).eval(), torch.randn(batch, 8, 6)
    with pytest.warns(UserWarning, match=f"does not compute what TwoWays does where {where} .it fails: Guard failed"):
        path = hap.export(tmp_path / "a.pt2", model, example, dynamic_axes=axes)
    program = torch.export.load(path).module()
    assert gap(run(model, example), [program(example)]) <= 1e-5
    with pytest.raises(AssertionError, match="Guard failed"):
        program(torch.randn(refused))
    with pytest.raises(hap.HapError, match=rf"compute the same where {where}: the value.*or write a \.pt2 file"):
        hap.export(tmp_path / "a.onnx", model, example, dynamic_axes=axes)
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt2"]


@pytest.mark.parametrize("name", ["a.pt2", "a.onnx"])
def test_another_way_with_one_sample_is_told(name: str, tmp_path: Path) -> None:
    """torch.export takes any open length for 2 or more, and the files run with 1 all the same."""
    model = TwoWays(lambda shape: shape[0] == 1).eval()
    with pytest.warns(UserWarning, match="does not compute what TwoWays does where axis 0 has length 1 .the value of"):
        hap.export(tmp_path / name, model, torch.randn(1, 8, 6))


@pytest.mark.parametrize("name", ["a.pt2", "a.onnx"])
def test_limits_of_the_model_itself_go_without_saying(name: str, tmp_path: Path) -> None:
    """Reader has places for 40 tokens, which torch.export notes; the model itself fails with more."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*does not compute.*")
        path = hap.export(tmp_path / name, Reader().eval(), text(2, 6), dynamic_axes=(1,))
    if name == "a.pt2":
        with pytest.raises(AssertionError, match=r"Guard failed.* <= 40"):
            torch.export.load(path).module()(**text(2, 41))


def test_a_bert_without_half_of_its_heads_reads_texts_of_any_length(tmp_path: Path) -> None:
    transformers = library()
    model, example = small("bert", layers=1)
    hap.prune_blocks_(model, example, None, None, heads=0.5, criterion=hap.Random())
    path = hap.export(tmp_path / "a.onnx", model, transformers.BatchEncoding(example), dynamic_axes=(1,))
    ids = torch.randint(3, 60, (5, 17))
    other = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert gap(run(model, other), onnx_of_many(path, other)) <= 1e-5


class Windows(nn.Module):
    """Two heads that attend within windows of the sequence: queries with five dimensions."""

    def __init__(self, mask: torch.Tensor | None) -> None:
        super().__init__()
        self.qkv, self.out, self.mask = nn.Linear(8, 24), nn.Linear(8, 8), mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).unflatten(-1, (3, 2, 4)).unflatten(1, (2, -1)).permute(3, 0, 4, 1, 2, 5)
        mixed = nn.functional.scaled_dot_product_attention(*parts.unbind(0), self.mask)
        return self.out(mixed.permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2))


@torch.no_grad()
@pytest.mark.parametrize("mask", [None, torch.eye(3, dtype=torch.bool), torch.eye(3)], ids=["none", "bool", "float"])
def test_attention_in_windows(mask: torch.Tensor | None, tmp_path: Path) -> None:
    model, example = Windows(mask).eval(), torch.randn(2, 6, 8)
    path = hap.export(tmp_path / "a.onnx", model, example)
    assert gap(run(model, example), onnx_outputs(path, example)) <= 1e-5


class Clamped(nn.Module):
    """Clamps one value several times, by limits that are tensors, and takes types from other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("low", torch.tensor([-0.5, -0.2, -torch.inf]))
        self.register_buffer("high", torch.tensor([0.1, torch.inf, 0.3]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = 2 * x
        clamped = [layer(y.clamp(self.low[i], self.high[i])) for i, layer in enumerate(self.layers)]
        return sum(clamped) + torch.arange(4).type_as(x)  # type: ignore[return-value]


@torch.no_grad()
def test_several_clamps_of_one_value(tmp_path: Path) -> None:
    model, example = Clamped().eval(), torch.randn(2, 4)
    path = hap.export(tmp_path / "a.onnx", model, example)
    assert gap(run(model, example), onnx_outputs(path, example)) <= 1e-5
    graph = export.capture(model, example).graph
    assert {export.CLAMP, export.TYPE_AS} <= {node.target for node in graph.nodes}


class Biased(nn.Module):
    """Attention with a learned bias, as in T5: its result lies in memory as it is read, so that no copy is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.bias = nn.Linear(8, 24), nn.Linear(8, 8), nn.Parameter(torch.randn(1, 2, 5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts.unbind(0), self.bias.expand(x.shape[0], -1, -1, -1))
        return self.out(mixed.transpose(1, 2).reshape(x.shape[0], 5, 8))


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [True, False])
def test_attention_that_takes_no_copy(dynamic: bool, tmp_path: Path) -> None:
    model, example = Biased().eval(), torch.randn(2, 5, 8)
    path = hap.export(tmp_path / "a.onnx", model, example, dynamic_batch=dynamic)
    assert gap(run(model, example), onnx_outputs(path, example)) <= 1e-5


class WritingThroughAView(nn.Module):
    """Adds positions to the tokens of a feature map in place, which the map is to show."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 8, 2, 2), nn.Conv2d(8, 4, 1)
        self.positions = nn.Parameter(torch.randn(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        tokens = h.permute(0, 2, 3, 1).flatten(1, 2)
        tokens += self.positions
        return self.head(h)


@pytest.mark.parametrize("dynamic", [True, False])
def test_what_is_written_through_a_turned_view_is_in_the_file(dynamic: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, example = WritingThroughAView().eval(), torch.randn(2, 3, 8, 8)
    path = hap.export(tmp_path / "a.onnx", model, example, dynamic_batch=dynamic)
    assert gap(run(model, example), onnx_outputs(path, example)) <= 1e-5


class Pair(NamedTuple):
    first: Any
    second: Any


class Returning(nn.Module):
    """A layer and what is made of its output."""

    def __init__(self, made: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.made = nn.Linear(4, 3), made

    def forward(self, x: torch.Tensor) -> Any:
        return self.made(self.layer(x))


@pytest.mark.parametrize("value", [3, True, 0.5])
def test_values_that_are_no_tensors(value: Any, tmp_path: Path) -> None:
    model, example = Returning(lambda y: {"y": y, "more": [None, value]}).eval(), torch.randn(2, 4)
    with pytest.raises(hap.HapError, match=f"the model returns {value!r}, and ONNX has outputs for tensors alone; ret"):
        hap.export(tmp_path / "a.onnx", model, example)
    assert not list(tmp_path.iterdir())
    path = hap.export(tmp_path / "a.pt2", model, example)
    assert torch.export.load(path).module()(example)["more"] == [None, value]


@pytest.mark.parametrize("made", [lambda y: {"a": Pair(y, [Pair(y + 1, None)])}, lambda y: torch.max(y, 1)])
def test_named_tuples_are_plain_in_a_file(made: Callable[[torch.Tensor], Any], tmp_path: Path) -> None:
    model, example = Returning(made).eval(), torch.randn(2, 4)
    seen = torch.export.load(hap.export(tmp_path / "a.pt2", model, example)).module()(example)
    assert type(seen["a"] if isinstance(seen, dict) else seen) is tuple
    wanted = [x for x in run(model, example) if x is not None]
    assert gap(wanted, [x for x in pytree.tree_leaves(seen) if x is not None]) <= 1e-6
    assert gap(wanted, onnx_outputs(hap.export(tmp_path / "a.onnx", model, example), example)) <= 1e-6


def test_what_no_file_can_hold_is_said_in_a_sentence(tmp_path: Path) -> None:
    model, example = Returning(lambda y: torch.linalg.svd(y)[1]).eval(), torch.randn(2, 4)
    with pytest.raises(hap.HapError) as caught:
        hap.export(tmp_path / "a.onnx", model, example)
    why = (
        "torch.onnx cannot convert this model: No ONNX function found for .*aten._linalg_svd.*; a .pt2 file can hold it"
    )
    assert re.fullmatch(why, str(caught.value))
    model = Returning(lambda y: (y, "text")).eval()
    for ending, why in ((".onnx", "outputs for tensors alone"), (".pt2", "cannot read a text back from a file")):
        with pytest.raises(hap.HapError, match=f"the model returns 'text', and [^\n]*{why}"):
            hap.export(tmp_path / f"a{ending}", model, example)
    assert not list(tmp_path.iterdir())


def test_inputs_that_no_file_can_hold(tmp_path: Path) -> None:
    class Added(nn.Module):
        def forward(self, pair: Pair) -> torch.Tensor:
            return pair.first + pair.second

    example = (Pair(torch.randn(2, 4), torch.randn(2, 4)),)
    with pytest.raises(hap.HapError, match=r"^torch.export cannot write this model: [^\n]*Pair[^\n]*$"):
        hap.export(tmp_path / "a.pt2", Added(), example, dynamic_batch=False)
    assert not list(tmp_path.iterdir())


def test_one_batch_size(tmp_path: Path) -> None:
    model, example = CASES["hard_coded_view"]()
    with pytest.raises(hap.HapError, match=r"runs with one batch size only.*pass dynamic_batch=False"):
        hap.export(tmp_path / "a.pt2", model, example)
    program = torch.export.load(hap.export(tmp_path / "a.pt2", model, example, dynamic_batch=False))
    assert gap(run(model, example), [program.module()(example)]) <= 1e-12


def test_a_model_in_training_mode_is_exported_in_eval_mode(tmp_path: Path) -> None:
    model, example = CASES["vgg"]()
    wanted = run(model, example)
    model.train()
    before = snapshot(model)
    path = hap.export(tmp_path / "a.pt2", model, example)
    assert_unchanged(model, before)
    assert gap(wanted, [torch.export.load(path).module()(example)]) <= 1e-12


class Masked(nn.Module):
    """Heads share one key and one value, which are written out for each head where there is a mask.

    Like many, it does without a mask that hides nothing, but not where it is exported. Another number is as large.
    """

    def __init__(self) -> None:
        super().__init__()
        self.number, self.heads, self.repeated = 4, 4, 4
        self.q, self.kv, self.out = nn.Linear(8, 32), nn.Linear(8, 16), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (self.heads, 8)).transpose(1, 2)
        k, v = self.kv(x).unsqueeze(1).chunk(2, -1)
        scores = q @ k.mT
        if torch.compiler.is_exporting() or not bool(mask.all()):
            k, v = (t.expand(-1, self.repeated, -1, -1) for t in (k, v))
            scores = (q @ k.mT).masked_fill(~mask, -1e9)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)) + x


def test_attributes_follow_that_only_an_export_reads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, example = Masked().double().eval(), (torch.randn(2, 5, 8).double(), torch.ones(2, 1, 5, 5, dtype=torch.bool))
    groups = hap.trace(model, example)
    assert {x.attribute for x in groups.rewiring.size_attributes} == {
        "heads",
        "repeated",
    } and not torch.compiler.is_exporting()
    hap.apply_(model, hap.draft(groups, {"q": [1, 2]}), example)
    path = hap.export(tmp_path / "a.pt2", model, example)
    assert gap(run(model, example), [torch.export.load(path).module()(*example)]) <= 1e-12
    hidden = (example[0], torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5))
    assert gap(run(model, hidden), [torch.export.load(path).module()(*hidden)]) <= 1e-12


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("name", "model", "words"),
    [
        ("a.txt", nn.Linear(2, 2), r"must end in \.onnx or \.pt2"),
        ("a", nn.Linear(2, 2), r"must end in \.onnx or \.pt2"),
        ("a.pt2", Branching(), "torch.export cannot capture Branching"),
        ("file/a.pt2", nn.Linear(2, 2), "cannot write"),
        ("file/a.onnx", nn.Linear(2, 2), "cannot write"),
    ],
)
def test_refusals(name: str, model: Any, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(hap.HapError, match=words):
        hap.export(tmp_path / name, model, torch.randn(1, 2))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


class OtherWay(nn.Module):
    """Computes something else while it is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (2 if torch.compiler.is_compiling() else 1)


@pytest.mark.parametrize("dynamic_batch", [True, False])
def test_export_warns_of_a_model_that_goes_another_way_when_captured(dynamic_batch: bool, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="was not seen to compute the same: the value of output 0 is off"):
        hap.export(tmp_path / "model.pt2", OtherWay(), torch.randn(1, 4), dynamic_batch=dynamic_batch)
    assert (tmp_path / "model.pt2").exists()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*compute the same.*")
        hap.export(tmp_path / "model.pt2", nn.Linear(4, 3), torch.randn(1, 4), dynamic_batch=dynamic_batch)


class Shifts(nn.Module):
    """Adds a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


@pytest.mark.parametrize("kind", ["plain", "norm", "unread", "tied", "constant"])
def test_a_model_is_captured_again_only_where_that_changes_the_file(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    between = {"norm": nn.BatchNorm1d(4), "constant": Shifts()}.get(kind, nn.ReLU())
    model = nn.Sequential(first, between, last).eval()
    if kind == "unread":
        model[1].unread = nn.Parameter(torch.ones(3))
    if kind == "tied":
        last.weight = first.weight
    seen, torch_export = [], torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda *args, **kwargs: seen.append(1) or torch_export(*args, **kwargs))
    x = torch.randn(3, 4)
    program = export.capture(model, x)
    assert len(seen) == (1 if kind == "plain" else 2)
    assert torch.allclose(program.module()(x), model(x), atol=1e-6)
    assert {tuple(t.shape) for t in program.state_dict.values()} == {(4, 4), (4,)}
    assert all(t.is_meta for t in program.module().to("meta").state_dict().values())
    assert not program.constants


def test_a_sparse_buffer_does_not_stop_a_capture() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("matrix", torch.eye(4).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.matrix.to_dense()

    x = torch.randn(3, 4)
    assert torch.allclose(export.capture(Sparse(), x).module()(x), x)
