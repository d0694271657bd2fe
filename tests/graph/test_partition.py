"""Models that torch.export cannot capture are pruned by their parts, in place and under their own names."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hap
from hap.graph.partition import (
    Noted,
    _calls,
    _coarse_calls,
    captured_parts,
    captures,
    may_choose,
    parts,
    view_where_it_chooses,
)


class Detector(nn.Module):
    """A backbone, a head that runs on each of its maps, and a choice by value between them and the result."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1))
        self.head = nn.Sequential(nn.Conv2d(8, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 5, 1))
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, images: list[Tensor], threshold: float = 0.0) -> list[dict[str, Tensor]]:
        found = []
        for image in images:
            maps = self.backbone(image[None])
            both = [self.head(m).flatten(2)[0].T for m in (maps, nn.functional.max_pool2d(maps, 2))]
            boxes = torch.cat(both) * self.scale
            found.append({"boxes": boxes[boxes[:, 0] > threshold]})
        return found


class Particular(Detector):
    """A detector that looks at the width of its head before it chooses."""

    def forward(self, images: list[Tensor], threshold: float = 0.0) -> list[dict[str, Tensor]]:
        if self.head[0].out_channels != 24:
            raise ValueError("24 channels expected")
        return super().forward(images, threshold)


def _detector() -> tuple[Detector, tuple[list[Tensor]]]:
    return Detector().double().eval(), ([torch.randn(3, 8, 8, dtype=torch.float64) for _ in range(2)],)


def test_parts_are_the_largest_that_can_be_captured() -> None:
    model, example = _detector()
    assert not captures(model, example, {})
    view = parts(model, example)
    assert view.names == ["backbone"] * 2 + ["head"] * 4
    assert dict(view.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert hap.cost(view, view.example).macs == hap.cost(model, example).macs


def test_pruning_the_view_prunes_the_model() -> None:
    model, example = _detector()
    view = parts(model, example)
    groups = hap.trace(view, view.example)
    assert {n: len(g) for n, g in groups.items()} == {"backbone.0": 16, "head.0": 24}
    plan = hap.plan(groups, hap.score(view, groups, None, None, "magnitude"), hap.Budget(flops=0.5))

    masked = copy.deepcopy(model)
    for cut in plan.cuts:
        gone = [i for i in range(cut.size) if i not in cut.keep]
        masked.get_parameter(cut.name).data.index_fill_(cut.dim, torch.tensor(gone, dtype=torch.int64), 0)
    hap.apply_(view, plan, example=view.example)
    count = hap.cost(model, example)
    assert (count.params, count.macs) == (plan.after.params, plan.after.macs)
    for seen, wanted in zip(model(*example), masked(*example), strict=True):
        torch.testing.assert_close(seen["boxes"], wanted["boxes"], rtol=0, atol=1e-10)


class Branching(nn.Module):
    """Branches on a value, which running it does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(8, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 5, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) if x.sum() < 1e9 else self.body(-x)


def test_where_a_part_cannot_be_captured_its_own_parts_are() -> None:
    model, example = _detector()
    model.head = Branching().double().eval()
    view = parts(model, example)
    assert view.names == ["backbone"] * 2 + ["head.body"] * 4
    assert {n: len(g) for n, g in hap.trace(view, view.example).items()} == {"backbone.0": 16, "head.body.0": 24}


def test_the_parts_are_captured_once_and_traced_from_that(monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = _detector()
    captured = []
    export = torch.export.export

    def counting(module: nn.Module, *args: object, **kwargs: object) -> object:
        captured.append(type(module).__name__)
        return export(module, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.export, "export", counting)
    with pytest.warns(UserWarning, match="pruned in parts"):
        hap.prune_(model, example, criterion="magnitude", flops=0.5)
    assert captured == ["Detector", "Parts"]


class Finder(Detector):
    """A detector whose code names how it chooses, in a method that its forward calls."""

    def forward(self, images: list[Tensor], threshold: float = 0.0) -> list[dict[str, Tensor]]:
        maps = [self.head(self.backbone(image[None])).flatten(2)[0].T * self.scale for image in images]
        return [{"boxes": self.found(boxes, threshold)} for boxes in maps]

    def found(self, boxes: Tensor, threshold: float) -> Tensor:
        return boxes[(boxes[:, 0] > threshold).nonzero().flatten()] if threshold < 100 else boxes


def test_a_model_whose_code_names_a_choice_is_run_and_not_captured_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = Finder().double().eval(), _detector()[1]
    assert may_choose(model) and not may_choose(_detector()[0])
    view = view_where_it_chooses(model, example)
    assert view is not None and view.names == ["backbone"] * 2 + ["head"] * 2
    assert view_where_it_chooses(model, (*example, 1000.0)) is None  # it does not choose there
    monkeypatch.setattr(hap.pruning.prune, "captured_parts", None)
    with pytest.warns(UserWarning, match="pruned in parts"):
        plan = hap.prune_(model, example, criterion="magnitude", flops=0.5)
    count = hap.cost(model, example)
    assert (count.params, count.macs) == (plan.after.params, plan.after.macs)


class TwoStages(nn.Module):
    """Finds places, and looks at them once more where asked to."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.maps = nn.Sequential(nn.Conv2d(3, 8, 5, 2, 1, 2), nn.ReLU(), nn.Conv2d(8, 6, 3, groups=2, bias=False))
        self.again, self.second = again, nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.maps(x).flatten(2)[0].T
        found = rows[rows[:, 0].argsort(descending=True)[: len((rows[:, 0] > 0).nonzero())]]
        out: Tensor = self.second(found) if self.again else found
        return out


def test_a_coarse_run_finds_the_calls_that_a_true_one_does() -> None:
    model, x = TwoStages(False).eval(), torch.randn(1, 3, 90, 141)
    (coarse, choosing), (true, truly) = _coarse_calls(model, x) or ([], set()), _calls(model, x)

    def shapes(calls: list[Noted]) -> list[tuple[str, torch.Size]]:
        return [(noted.name, noted.call[0][0].shape) for noted in calls]

    assert shapes(coarse) == shapes(true) and len(true) == 3 and choosing == truly == {""}
    assert not torch.equal(coarse[-1].call[0][0], true[-1].call[0][0])
    small = torch.randn(1, 3, 15, 20)
    exact = _coarse_calls(model, small)
    assert exact is not None and torch.equal(exact[0][-1].call[0][0], _calls(model, small)[0][-1].call[0][0])


def test_what_is_called_after_a_choice_needs_a_true_run() -> None:
    model, x = TwoStages(True).eval(), torch.randn(1, 3, 90, 141)
    assert _coarse_calls(model, x) is None
    view = view_where_it_chooses(model, x)
    assert view is not None and view.names == ["maps", "second"]
    assert torch.equal(view.example[1][0][0], _calls(model, x)[0][-1].call[0][0])


class Overwriting(nn.Module):
    """Writes to what its first layer was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        y = self.first(x)
        x.zero_()
        return self.second(x + y)


def test_what_is_written_to_after_a_call_is_noted_as_it_was() -> None:
    model, x = Overwriting().eval(), torch.randn(2, 4)
    (first, second), _ = _calls(model, x)
    assert torch.equal(first.call[0][0], x + 1)
    assert torch.equal(second.call[0][0], model.first(x + 1))
    with torch.inference_mode():
        (first, _), _ = _calls(model, x)
        assert torch.equal(first.call[0][0], x + 1)


def test_what_nothing_writes_to_is_noted_without_a_copy() -> None:
    model, x = TwoStages(False).eval(), torch.randn(1, 3, 12, 12)
    (outer, inner, _), _ = _calls(model, x)
    assert (outer.name, inner.name) == ("maps", "maps.0") and outer.call[0][0] is inner.call[0][0]


def test_parts_that_fail_are_left_out_without_trying_each(monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = _detector()
    model.head = Branching().double().eval()
    monkeypatch.setattr(sys.modules["hap.graph.partition"], "captures", None)
    assert parts(model, example).names == ["backbone"] * 2 + ["head.body"] * 4


def test_a_trace_says_which_size_depends_on_values() -> None:
    model, example = _detector()
    with pytest.raises(hap.HapError, match=r"cannot tell the sizes of Detector.*that of what __getitem__ returns"):
        hap.trace(model, example)


def test_recording_leaves_the_model_as_it_was() -> None:
    model, example = _detector()
    model.train()
    before = {n: p.clone() for n, p in model.named_parameters()}
    parts(model, example)
    assert model.training and not any(m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_a_model_without_such_parts_is_refused() -> None:
    class Chooser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight)[x > 0]

    with pytest.raises(hap.HapError, match="can capture no part of Chooser on this example"):
        parts(Chooser(), torch.randn(4))


IN_PARTS = (
    "cannot capture Detector as a whole, so it is pruned in parts: backbone, head; what passes between them is kept"
)


def test_prune_falls_back_to_parts_and_says_so(tmp_path: Path) -> None:
    model, example = _detector()
    fresh = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=IN_PARTS):
        plan = hap.prune_(model, example, criterion="magnitude", flops=0.5)
    count = hap.cost(model, example)
    assert (count.params, count.macs) == (plan.after.params, plan.after.macs)
    assert count.macs <= 0.5 * plan.before.macs
    assert set(plan.kept) == {"backbone.0", "head.0"}
    again = hap.load(hap.save(tmp_path / "pruned.safetensors", model, plan), copy.deepcopy(fresh))
    applied = hap.apply_(fresh, plan, example)  # the plan knows the model's example, not that of the parts
    for other in (again, applied):
        for seen, wanted in zip(other(*example), model(*example), strict=True):
            assert torch.equal(seen["boxes"], wanted["boxes"])


def test_parts_are_scored_within_the_whole_model() -> None:
    model, ((image, _),) = _detector()
    example = ([image],)  # the backbone runs once, so that it can take an implant
    seen = []

    def loss(found: list[dict[str, Tensor]], target: float) -> Tensor:
        seen.append(len(found))
        return sum(((image["boxes"] - target) ** 2).mean() for image in found)

    with pytest.warns(UserWarning, match=IN_PARTS):
        plan = hap.prune_(
            model,
            example,
            [(example, 0.5)],
            loss,
            params=0.6,
            implant=hap.Pointwise(0.5, init="lstsq"),
            criterion=hap.HessianTrace(probes=4),
            compensate=True,
        )
    assert set(seen) == {1} and [g.module for g in plan.grafts] == ["backbone.0"]
    assert hap.cost(model, example).params == plan.after.params


def test_a_model_that_needs_what_would_go_is_left_as_it_was() -> None:
    model, (_, example) = Particular().double().eval(), _detector()
    before = {n: p.clone() for n, p in model.named_parameters()}
    message = "Particular does not run once its parts are pruned, so nothing was changed: 24 channels expected"
    with pytest.warns(UserWarning, match="pruned in parts"), pytest.raises(hap.HapError, match=message):
        hap.prune_(model, example, criterion="magnitude", flops=0.5)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


class Asks(nn.Module):
    """Chooses by value unless it is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.head = nn.Linear(16, 32), nn.Linear(32, 48), nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.mid(self.stem(x).relu()).relu()
        if not torch.compiler.is_compiling():
            h = h[(x[:, 0] > -1e9).nonzero().flatten()]
        return self.head(h)


def test_a_model_that_chooses_only_when_it_runs_is_pruned_as_a_whole(recwarn: pytest.WarningsRecorder) -> None:
    model = Asks()
    plan = hap.prune_(model, torch.randn(4, 16), criterion="magnitude", flops=0.5)
    assert set(plan.kept) == {"stem", "mid"}
    assert not [w for w in recwarn if "in parts" in str(w.message)]


class OnInstances:
    """A descriptor that cannot be read from a class."""

    def __get__(self, instance: object, kind: type) -> float:
        if instance is None:
            raise RuntimeError("only on instances")
        return 2.0


class Scaled(nn.Module):
    scale = OnInstances()

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu()) * self.scale


def test_code_is_looked_at_without_running_any() -> None:
    traced = torch.jit.trace(nn.Sequential(nn.ReLU(), nn.ReLU6()), torch.randn(1, 8, 6, 6))
    for model in (Scaled(), nn.Sequential(nn.Conv2d(3, 8, 3), traced, nn.Conv2d(8, 4, 1))):
        assert not may_choose(model)


def test_parts_are_found_in_few_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) * (1 if float(x.sum()) > 0 else 2)

    seen = []
    real = hap.parts.__globals__["captured"]
    monkeypatch.setitem(hap.parts.__globals__, "captured", lambda *a: seen.append(1) or real(*a))
    view = parts(nn.Sequential(*(Reads() for _ in range(8))), torch.randn(2, 8))
    assert len(view.names) == 16
    assert len(seen) <= 3


class Block(nn.Module):
    """One that `branches` cannot be captured, but what is inside of it can."""

    def __init__(self, branches: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.branches = nn.Linear(4, 12), nn.Linear(12, 4), branches

    def forward(self, x: Tensor) -> Tensor:
        x = -x if self.branches and x.sum() > 1e9 else x
        return x + self.down(self.up(x).relu())


class Masked(nn.Module):
    """Asks for a value between its first layer and its blocks."""

    def __init__(self, branches: bool = False) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList(Block(branches) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x * 0 if x.isnan().any() else x
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_behind_a_choice_are_parts_with_what_they_were_called_with() -> None:
    model, x = Masked().double().eval(), torch.randn(2, 3, 4, dtype=torch.float64)
    view, _ = captured_parts(model, (x,))
    assert view.names == ["first", *(f"blocks.{i}" for i in range(5))]
    assert torch.equal(view.example[-1][0][0], _before_last(model, x))


def _before_last(model: Masked, x: Tensor) -> Tensor:
    x = model.first(x)
    for block in model.blocks[:-1]:
        x = block(x)
    return x


def test_of_blocks_that_cannot_be_captured_the_layers_are_parts() -> None:
    model, x = Masked(branches=True).double().eval(), torch.randn(2, 3, 4, dtype=torch.float64)
    view, _ = captured_parts(model, (x,))
    assert view.names == ["first", *(f"blocks.{i}.{name}" for i in range(5) for name in ("up", "down"))]


def test_parts_that_lose_nothing_are_not_run_to_check_the_others() -> None:
    model, x = Masked().double().eval(), torch.randn(2, 3, 4, dtype=torch.float64)
    view = parts(model, (x,))
    ran: list[str] = []
    for name in dict.fromkeys(view.names):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: ran.append(name))
    plan = hap.draft(hap.trace(view, view.example), {"blocks.3.up": range(6)})
    ran.clear()
    hap.apply_(view, plan, view.example)
    assert set(ran) == {"blocks.3"}
    assert model.blocks[3].up.out_features == 6


class Reused(nn.Module):
    """Calls a layer of its body once more by itself, and returns that too; then it branches on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 6))
        self.head = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, first = self.body(x), self.again(x)
        y = y + 1 if y.sum() > 0 else y
        return self.head(y), first

    def again(self, x: Tensor) -> Tensor:
        return self.body[0](x)


def test_a_module_inside_of_a_part_that_is_also_called_by_itself_returns_all_that_it_did() -> None:
    model, x = Reused().double().eval(), torch.randn(3, 6, dtype=torch.float64)
    _, first = model(x)
    view = parts(model, x)
    assert view.names == ["body", "body.0", "head"]
    assert hap.cost(view, view.example).macs == hap.cost(model, x).macs
    with pytest.warns(UserWarning, match=r"in parts: body, body.0, head;"):
        plan = hap.prune_(model, x, criterion="magnitude", channels=0.5)
    assert set(plan.kept) == {"body.2", "head.0"}
    torch.testing.assert_close(model(x)[1], first)


class Caller(nn.Module):
    """Runs a block that belongs to another module, and branches on what that returns."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.blocks, self.own = [block], nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0](x)
        return self.own(x) + (y.sum() if float(y.sum()) > 0 else y.mean())


def test_inside_of_what_another_module_calls_by_itself_units_still_go() -> None:
    model, x = Reused().double().eval(), torch.randn(3, 6, dtype=torch.float64)
    model.body[0] = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 12)).double()
    model.head = Caller(model.body[0]).double()
    view = parts(model, x)
    assert view.names == ["body", *["body.0"] * 2, "head.own"]  # called by the model and by its head
    assert set(hap.trace(view, view.example)) == {"body.0.0", "body.2"}


class Many(Reused):
    """Does so with more rows."""

    def again(self, x: Tensor) -> Tensor:
        return self.body[0](torch.cat([x, x]))


class Chooses(nn.Linear):
    """Chooses by value, if there are many rows."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if len(x) < 4 else y[y[:, 0] > 0]


def test_what_cannot_be_captured_where_it_is_called_by_itself_is_not_cut_elsewhere() -> None:
    model, x = Many().double().eval(), torch.randn(3, 6, dtype=torch.float64)
    model.body[0] = Chooses(6, 12).double()
    view = parts(model, x)
    assert view.names == ["body.2", "body.4", "head"]  # the body runs it as well
    assert set(hap.trace(view, view.example)) == {"head.0"}


def test_the_same_where_capturing_is_what_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y if len(x) < 4 or float(y.sum()) > 1e9 else -y

    model, x = Many().double().eval(), torch.randn(3, 6, dtype=torch.float64)
    model.body[0] = Reads(6, 12).double()
    assert parts(model, x).names == ["body.2", "body.4", "head"]
    monkeypatch.setattr(sys.modules["hap.graph.partition"], "MOST_BLAMED", 0)  # each is tried by itself
    assert parts(model, x).names == ["body.2", "body.4", "head"]


def test_an_example_of_other_length_than_the_view_is_refused() -> None:
    model, x = Masked().double().eval(), torch.randn(2, 3, 4, dtype=torch.float64)
    view = parts(model, (x,))
    groups = hap.trace(view, view.example)
    plan = hap.draft(groups, {"blocks.3.up": range(6)})
    for example in (view.example[:1], x):
        message = "this view runs 6 calls of parts, but the example has 1: use view.example"
        with pytest.raises(hap.HapError, match=message):
            hap.apply_(view, plan, example)
        with pytest.raises(hap.HapError, match=message):
            hap.trace(view, example)
    assert model.blocks[3].up.out_features == 12


class Experts(nn.Module):
    """Sends every token to one of its experts: to the first two, since the router prefers them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(4))
        with torch.no_grad():
            self.router.weight[2:], self.router.bias[2:] = 0.0, -1e3

    def forward(self, x: Tensor) -> Tensor:
        which, out = self.router(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = (which == number).nonzero().flatten()
            if len(mine):
                out[mine] = expert(x[mine])
        return out


def test_experts_that_no_token_was_sent_to_are_said_to_stay(recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    model, example = Experts().eval(), torch.randn(16, 8)
    assert set(model.router(example).argmax(-1).tolist()) == {0, 1}
    plan = hap.prune_(model, example, criterion="magnitude", flops=0.6)
    (said,) = (text for w in recwarn if "could not be touched" in (text := str(w.message)))
    assert said.startswith("47% of the parameters could not be touched: experts.2.0 (the example does not run it")
    assert said in str(plan)
    assert [len(expert[0].weight) == 32 for expert in model.experts] == [False, False, True, True]


class SharedWeight(nn.Module):
    """Holds a weight under a name that no part has, too: that of a layer which does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(16, 64)
        self.first = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
        self.first[0].weight = self.idle.weight
        self.last = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x[(x.sum(-1) > 0).nonzero().flatten()])


def test_a_weight_that_a_part_holds_under_another_name_is_not_said_to_stay() -> None:
    model = SharedWeight().eval()
    with pytest.warns(UserWarning, match="pruned in parts"):
        plan = hap.prune_(model, torch.randn(16, 16), criterion="magnitude", flops=0.6)
    assert len(model.idle.weight) < 64 and "could not be touched" not in str(plan)


class Keeping(nn.Module):
    """Keeps a table that it computes by a convolution on its first run, and chooses by value."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            waves = torch.arange(58.0 * 58).sin().view(1, 1, 58, 58)
            self.table = nn.functional.conv2d(waves, torch.ones(1, 1, 3, 3))
        x = (self.layers(x) + self.table).mean((2, 3)).flatten()
        return x[(x > 0).nonzero()]


def test_a_coarse_run_leaves_nothing_behind() -> None:
    model, other, example = Keeping().eval(), Keeping().eval(), torch.randn(1, 3, 56, 56)
    assert _coarse_calls(model, example) is not None
    assert model.table is None
    assert view_where_it_chooses(model, example) is not None
    model(example), other(example)
    assert torch.equal(model.table, other.table)
