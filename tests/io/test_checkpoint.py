"""save and load: bit for bit, or one clear error and nothing changed."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

import hap
from cases import CASES
from checks import TRACES, assert_unchanged, random_plan, run, same, snapshot, traced
from hap.io import checkpoint

SOURCE = Path(hap.__file__).parent


def fresh(name: str) -> nn.Module:
    """A dense model of the same kind with other weights."""
    model, _ = CASES[name]()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(1.0)
    return model


@pytest.mark.parametrize(("name", "coupling"), TRACES)
def test_round_trip_is_bit_for_bit(name: str, coupling: str, tmp_path: Path) -> None:
    model, example = CASES[name]()
    plan = random_plan(traced(name, coupling), 0, implant=hap.Pointwise(init="center"))
    pruned = hap.apply_(model, plan, example=example)
    path = hap.save(tmp_path / "a.safetensors", pruned, plan)
    new = fresh(name)
    loaded = hap.load(path, new)
    assert loaded is new and same(run(loaded, example), run(pruned, example))
    assert hap.read(path).plan == plan
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    seen, wanted = loaded.state_dict(), pruned.state_dict()
    assert seen.keys() == wanted.keys() and all(torch.equal(seen[n], wanted[n]) for n in wanted)


@pytest.mark.parametrize("implant", [hap.DepthwiseSeparable(), hap.SpatialLowRank(rank=3), hap.LowRank(seed=2)])
def test_every_implant_is_rebuilt(implant: hap.Implant, tmp_path: Path) -> None:
    model, example = CASES["residual"]()
    plan = random_plan(traced("residual", "union"), 1, 0.6, implant)
    assert plan.grafts and plan.widenings
    pruned = hap.apply_(model, plan, example=example)
    with torch.no_grad():
        for parameter in pruned.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)  # as if trained
    loaded = hap.load(hap.save(tmp_path / "a.safetensors", pruned, plan), fresh("residual"))
    assert same(run(loaded, example), run(pruned, example))
    assert hap.cost(loaded, example).params == plan.after.params


def test_dense_models_and_what_comes_along(tmp_path: Path) -> None:
    model, example = CASES["residual"]()
    recipe = hap.Recipe(epochs=3)
    path = tmp_path / "deep" / "er" / "dense.safetensors"
    hap.save(path, model, recipe=recipe, metrics={"accuracy": 0.5}, about={"model": "residual"})
    found = hap.read(path)
    assert found.plan is None and found.metrics == {"accuracy": 0.5} and found.about == {"model": "residual"}
    assert found.recipe == json.loads(json.dumps(recipe.to_dict()))
    assert found.shapes["head.weight"] == [5, 8]
    assert same(run(hap.load(path, fresh("residual")), example), run(model, example))


def test_saving_leaves_the_model(tmp_path: Path) -> None:
    model, _ = CASES["tied_parameters"]()
    before = snapshot(model)
    hap.save(tmp_path / "a.safetensors", model)
    assert_unchanged(model, before)


def test_ties_are_stored_once_and_kept(tmp_path: Path) -> None:
    model, example = CASES["tied_parameters"]()
    path = hap.save(tmp_path / "a.safetensors", model)
    with safe_open(path, framework="pt") as file:
        assert "a.weight" in file.keys() and "b.weight" not in file.keys()  # noqa: SIM118
    loaded = hap.load(path, fresh("tied_parameters"))
    assert loaded.a.weight is loaded.b.weight and same(run(loaded, example), run(model, example))


class Tied(nn.Module):
    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        if tie:
            self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())


def test_a_tie_that_the_file_does_not_have(tmp_path: Path) -> None:
    """Two values cannot go into one tensor; where both are the same, they can. The other way round nothing is lost."""
    model, x = Tied(tie=False), torch.randn(2, 4)
    path = hap.save(tmp_path / "a.safetensors", model)
    check_refused(path, r"a\.weight and b\.weight differ there and are one tensor here", Tied(tie=True))
    model.b.load_state_dict(model.a.state_dict())
    assert torch.equal(hap.load(hap.save(path, model), Tied(tie=True))(x), model(x))
    model = Tied(tie=True)
    assert torch.equal(hap.load(hap.save(path, model), Tied(tie=False))(x), model(x))


class Mirror(nn.Module):
    """A buffer that is another view of the same memory is not the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0).view(2, 2))
        self.register_buffer("turned", self.weight.detach().t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.turned


def test_views_of_one_memory_are_told_apart(tmp_path: Path) -> None:
    model, x = Mirror(), torch.eye(2)
    new = Mirror()
    new.turned = torch.zeros(2, 2)
    loaded = hap.load(hap.save(tmp_path / "a.safetensors", model), new)
    assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize(
    ("stored", "own", "held"),
    [
        (torch.float32, torch.float16, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float64, torch.float32, torch.float64),
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.float16, torch.float32, torch.float32),
        (torch.float16, torch.float16, torch.float16),
    ],
)
def test_no_weight_is_rounded(stored: torch.dtype, own: torch.dtype, held: torch.dtype, tmp_path: Path) -> None:
    """With its implants and what is tied, and counters stay whole numbers."""
    for name in ("residual", "tied_parameters"):
        model, example = CASES[name]()
        plan = random_plan(traced(name, "joint"), 0, 0.5, hap.Pointwise(init="center"))
        pruned = hap.apply_(model, plan, example=example).to(stored)
        path = hap.save(tmp_path / "a.safetensors", pruned, plan)
        loaded = hap.load(path, fresh(name).to(own))
        assert {p.dtype for p in loaded.parameters()} == {held}
        for n, tensor in pruned.state_dict().items():
            seen = loaded.state_dict()[n]
            assert torch.equal(seen, tensor.to(seen.dtype)) and seen.is_floating_point() == tensor.is_floating_point()
        if name == "tied_parameters":
            assert loaded.a.weight is loaded.b.weight
        if stored is torch.float64:
            assert same(run(loaded, example), run(pruned, example))


class Table(nn.Module):
    """Reads a table that is computed when the module is made, and not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4) / 3, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + self.table)


def test_what_was_rounded_before_is_refused(tmp_path: Path) -> None:
    path = hap.save(tmp_path / "a.safetensors", Table())
    check_refused(path, "holds float32 where the model has float16, and table, which is not in the", Table().half())
    assert hap.load(path, Table()).table.dtype == torch.float32


class Mixed(Table):
    """Narrow, but for the norm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x).float())


def test_a_table_of_a_model_in_mixed_precision_is_as_it_was(tmp_path: Path) -> None:
    """That some weights are wider than others does not tell that the table was."""
    torch.manual_seed(0)
    model, x = Mixed().bfloat16(), torch.randn(2, 4).bfloat16()
    model.norm.float()
    loaded = hap.load(hap.save(tmp_path / "a.safetensors", model), Mixed().bfloat16())
    assert loaded.norm.weight.dtype == torch.float32 and loaded.table.dtype == torch.bfloat16
    assert torch.equal(loaded(x), model(x))


# ---- refusals -----------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, example = CASES["residual"]()
    plan = random_plan(traced("residual", "union"), 0, 0.5, hap.Pointwise(init="center"))
    return hap.save(tmp_path / "good.safetensors", hap.apply_(model, plan, example=example), plan)


def rewritten(
    path: Path, change: Any = None, drop: str | None = None, extra: str | None = None, raw: Any = None
) -> Path:
    """The same checkpoint with another header or other tensors."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["hap"])
        tensors = {n: file.get_tensor(n) for n in file.keys() if n != drop}  # noqa: SIM118
    if change:
        change(header)
    if extra:
        tensors[extra] = torch.zeros(3)
    new = path.with_name("bad.safetensors")
    save_file(tensors, new, metadata={"hap": raw if raw is not None else json.dumps(header)})
    return new


def check_refused(path: Path, words: str, model: nn.Module | None = None) -> None:
    """One error of ours that names the file, and the model as it was."""
    model = fresh("residual") if model is None else model
    before = snapshot(model)
    with pytest.raises(hap.HapError, match=words) as caught:
        hap.load(path, model)
    assert str(path) in str(caught.value)
    assert_unchanged(model, before)


def test_another_model(saved: Path) -> None:
    check_refused(saved, "saved from another model", fresh("plain"))
    check_refused(saved, "saved from another model", fresh("bottleneck"))
    wider, _ = CASES["residual"]()
    wider.b1[0][0] = nn.Conv2d(6, 7, 3, padding=1, bias=False).double()
    check_refused(saved, r"saved from another model.*b1\.0\.0", wider)


def test_another_dense_model(tmp_path: Path) -> None:
    model, _ = CASES["plain"]()
    check_refused(hap.save(tmp_path / "a.safetensors", model), "has no tensor 'stem.0.weight'.*another model")
    plain = hap.save(tmp_path / "b.safetensors", nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    check_refused(plain, "it holds '1.(weight|bias)'", nn.Sequential(nn.Linear(3, 4)))
    check_refused(plain, r"has shape \[4, 3\] there and \[5, 3\] here", nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))


def test_a_model_that_is_pruned_already(saved: Path) -> None:
    check_refused(saved, "applied to this one before", hap.load(saved, fresh("residual")))


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, 0.99])
def test_truncated(saved: Path, keep: float) -> None:
    content = saved.read_bytes()
    short = saved.with_name("short.safetensors")
    short.write_bytes(content[: int(keep if keep >= 1 or keep == 0 else keep * len(content))])
    check_refused(short, "truncated, damaged or not a checkpoint")


def test_newer_format(saved: Path) -> None:
    check_refused(rewritten(saved, lambda h: h.update(format=99)), "format 99.*reads up to 1.*[Uu]pgrade")


@pytest.mark.parametrize("name", ["head.weight", "b1.0.0.weight", "stem.1.running_mean"])
def test_missing_tensor(saved: Path, name: str) -> None:
    check_refused(rewritten(saved, drop=name), f"has no tensor '{re.escape(name)}'")


def test_extra_tensor(saved: Path) -> None:
    check_refused(rewritten(saved, extra="surprise"), "holds 'surprise'")


def test_not_ours(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"a": torch.zeros(2)}, path)
    check_refused(path, "not one that hap.save wrote")
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    check_refused(text, "truncated, damaged or not a checkpoint")
    check_refused(tmp_path / "nowhere.safetensors", "there is no file")
    check_refused(tmp_path, "no file|cannot be read")


REST = '"recipe": null, "metrics": {}, "about": {}, "aliases":'


@pytest.mark.parametrize(
    "raw",
    [
        "not json",
        "[]",
        "null",
        "{}",
        '{"format": 1}',
        '{"format": "1"}',
        f'{{"format": 1, "plans": 3, {REST} {{}}}}',
        f'{{"format": 1, "plans": [], {REST} 5}}',
    ],
)
def test_damaged_header(saved: Path, raw: str) -> None:
    check_refused(rewritten(saved, raw=raw), "")


def break_cut(field: str, value: Any) -> Any:
    def change(header: dict[str, Any]) -> None:
        header["plans"][0]["cuts"][0][field] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        break_cut("keep", [0, 99]),
        break_cut("keep", [-1]),
        break_cut("keep", ["a"]),
        break_cut("dim", 7),
        break_cut("dim", -1),
        break_cut("name", "nowhere.weight"),
        lambda h: h["plans"][0].pop("kept"),
        lambda h: h["plans"][0].update(implant={"kind": "os.system"}),
        lambda h: h["plans"][0].update(implant={"kind": "Pointwise", "ratio": 0.2, "init": "center", "command": "rm"}),
        lambda h: h["plans"][0]["grafts"][0].update(rows=[999]),
        lambda h: h["plans"][0]["grafts"][0].update(module="head"),
        lambda h: h["plans"][0]["widenings"][0].update(index=[999, 1000]),
        lambda h: h["plans"][0].update(before=3),
    ],
)
def test_damaged_plan(saved: Path, change: Any) -> None:
    check_refused(rewritten(saved, change), "")


# ---- a model with its order -----------------------------------------------------------------------------------------

ORDER = hap.Order({"b1.0.0": [0.1, 1 / 3, 5e-324]}, {"name": "magnitude"}, per_cost=True, ignore=("b2*",))


@pytest.fixture
def ordered(tmp_path: Path) -> Path:
    return hap.save(tmp_path / "ordered.safetensors", CASES["residual"]()[0], order=ORDER)


def test_an_order_comes_back_number_for_number(ordered: Path, saved: Path) -> None:
    found = hap.read(ordered)
    assert found.order == ORDER and found.plan is None
    model, example = CASES["residual"]()
    assert same(run(hap.load(ordered, fresh("residual")), example), run(model, example))
    assert hap.read(saved).order is None
    with safe_open(saved, framework="pt") as file:
        assert "order" not in json.loads(file.metadata()["hap"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: h.update(order=5), "not an order that this version of HAP wrote"),
        (lambda h: h.update(order=None), "not an order that this version of HAP wrote"),
        (lambda h: h["order"].pop("criterion"), "'criterion'.* missing or unknown"),
        (lambda h: h["order"]["scores"].update({"b1.0.0": [float("nan")]}), r"scores\['b1\.0\.0'\] holds nan"),
        (lambda h: h["order"].update(scores={"a": {"__reduce__": "os.system"}}), "expected one number for each unit"),
    ],
)
def test_damaged_order(ordered: Path, change: Any, words: str) -> None:
    check_refused(rewritten(ordered, change), words)


def test_an_order_that_cannot_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.safetensors"
    with pytest.raises(hap.HapError, match=r"order is dict; expected what hap\.order returned"):
        hap.save(path, nn.Linear(2, 3), order=ORDER.to_dict())

    def refusing(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: header too large")

    monkeypatch.setattr(checkpoint, "save_file", refusing)
    with pytest.raises(hap.HapError, match=r"cannot write .*header too large; its header has [\d,]+ characters"):
        hap.save(path, nn.Linear(2, 3), order=ORDER)
    assert not list(tmp_path.iterdir())


def test_unwritable_paths(tmp_path: Path) -> None:
    model, _ = CASES["plain"]()
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file" / "a.safetensors", Path("/proc/nowhere/a.safetensors"), tmp_path):
        with pytest.raises(hap.HapError, match=rf"cannot write {re.escape(str(path))}"):
            hap.save(path, model)
    assert (tmp_path / "file").read_text() == "in the way"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_failed_save_leaves_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = saved.read_bytes()
    model, _ = CASES["plain"]()

    def half(tensors: Any, path: Any, metadata: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hap.io.checkpoint.save_file", half)
    with pytest.raises(hap.HapError, match="No space left"):
        hap.save(saved, model)
    with pytest.raises(hap.HapError, match="must be JSON"):
        hap.save(saved, model, metrics={"bad": object()})
    assert saved.read_bytes() == old
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]


def test_an_interrupted_save_leaves_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = saved.read_bytes()
    model, _ = CASES["plain"]()

    def stopped(tensors: Any, path: Any, metadata: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hap.io.checkpoint.save_file", stopped)
    with pytest.raises(KeyboardInterrupt):
        hap.save(saved, model)
    assert saved.read_bytes() == old and len(list(saved.parent.iterdir())) == 1


class Failing:
    """An open checkpoint whose disk gives up after a few tensors."""

    def __init__(self, file: Any):
        self.file, self.left = file, 3

    def __enter__(self) -> Any:
        self.file.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self.file.__exit__(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        self.left -= 1
        if not self.left:
            raise OSError("input/output error")
        return self.file.get_tensor(name)


def test_a_disk_that_fails_halfway_leaves_the_model(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh("residual")
    before = snapshot(model)
    opened = checkpoint._opened
    monkeypatch.setattr("hap.io.checkpoint._opened", lambda path: Failing(opened(path)))
    with pytest.raises((hap.HapError, OSError)):
        hap.load(saved, model)
    assert_unchanged(model, before)


def test_nothing_is_unpickled() -> None:
    """Promise 7, by reading the source: no call that could run what a file says."""
    words = r"torch\.load|pickle\.loads?\b|Unpickler|yaml\.load|shelve\.|marshal\.|joblib\.|(?<![.\w])(eval|exec)\("
    calls = re.compile(words)
    found = [
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"
        for path in sorted(SOURCE.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if calls.search(line) and not line.strip().startswith(("#", '"""'))
    ]
    allowed = [line for line in found if "weights_only=True" in line]
    assert [line for line in found if line not in allowed] == []


def test_a_pickle_with_code_is_never_run(tmp_path: Path) -> None:
    import pickle

    class Boom:
        def __reduce__(self) -> Any:
            return (Path(tmp_path / "ran").touch, ())

    path = tmp_path / "evil.safetensors"
    path.write_bytes(pickle.dumps(Boom()))
    check_refused(path, "not a checkpoint")
    assert not (tmp_path / "ran").exists()


def test_copy_of_a_loaded_model_is_independent(saved: Path) -> None:
    _, example = CASES["residual"]()
    loaded = hap.load(saved, fresh("residual"))
    twin = copy.deepcopy(loaded)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not same(run(twin, example), run(loaded, example))


def test_a_model_pruned_twice_is_saved_with_both_plans(tmp_path: Path) -> None:
    model, example = CASES["residual"]()
    fresh = copy.deepcopy(model)
    plans = [hap.prune_(model, example, params=share, criterion="magnitude") for share in (0.8, 0.7)]
    path = hap.save(tmp_path / "twice.safetensors", model, plans)
    assert same(run(hap.load(path, fresh), example), run(model, example))
    with pytest.raises(hap.HapError, match="does not lead to this model"):
        hap.save(tmp_path / "wrong.safetensors", model, plans[0])


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    model, example = CASES["residual"]()
    groups = hap.trace(model, example, "union")
    plan = hap.draft(groups, {"stem.0": [0]})
    with pytest.raises(hap.HapError, match="does not lead to this model"):
        hap.save(tmp_path / "a.safetensors", model, plan)
    hap.apply_(model, plan, example=example)
    with pytest.raises(hap.HapError, match="only with its plan"):
        hap.save(tmp_path / "a.safetensors", model)
    assert not list(tmp_path.iterdir())


def test_buffers_that_are_in_no_file_are_cut_again(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 3, 1)
            self.scale: torch.Tensor
            self.register_buffer("scale", torch.linspace(0.5, 2, 16), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x) * self.scale[:, None, None])

    model, example = Scaled().eval(), torch.randn(2, 3, 8, 8)
    plan = hap.prune_(model, example, params=0.5, criterion="magnitude")
    path = hap.save(tmp_path / "scaled.safetensors", model, plan)
    loaded = hap.load(path, Scaled().eval())
    assert 0 < len(loaded.scale) == len(model.scale) < 16
    assert same(run(loaded, example), run(model, example))
