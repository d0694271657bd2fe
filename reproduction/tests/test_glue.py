"""GLUE tasks from files, fine-tuning text classifiers, and `hap glue` from dense networks to tables."""

from __future__ import annotations

import copy
import json
import random
import shutil
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

import hap
from hap.cli import app
from hap.groups.transformer_blocks import units_of
from hap_reproduction.glue import head_costs, head_latency
from hap_reproduction.glue.campaign import signal_of
from hap_reproduction.glue.data import HELD_OUT, TASKS, Encoded, Texts, encode, metrics_of, read, read_tsv
from hap_reproduction.glue.job import ORDER, Folders, criterion_of, jobs, status
from hap_reproduction.glue.page import NAMES, render
from hap_reproduction.glue.tuning import FilledScalars, Tuning, _Run, predict, tune
from huggingface import library, small
from traced_once import tracing_once


@pytest.fixture(autouse=True, scope="module")
def _one_trace() -> Iterator[None]:
    """All campaigns prune encoders of one shape."""
    with tracing_once():
        yield


# ---- files ----------------------------------------------------------------------------------------------------


def test_reads_the_layouts_of_glue(tmp_path: Path) -> None:
    plain, mrpc, sst, rte = (tmp_path / f"{n}.tsv" for n in ("plain", "mrpc", "sst", "rte"))
    plain.write_text('label\tsentence1\tsentence2\n1\tHe said "no .\tShe did\n0\ta\tb\n')
    mrpc.write_text("\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tone\ttwo\n")
    sst.write_text("sentence\tlabel\nfine film \t1\r\n")
    rte.write_text("index\tsentence1\tsentence2\tlabel\n0\ta\tb\tnot_entailment\n1\tc\td\tentailment\n")
    assert read_tsv(plain) == Texts(('He said "no .', "a"), ("She did", "b"), (1, 0))
    assert read_tsv(mrpc) == Texts(("one",), ("two",), (1,))
    assert read_tsv(sst) == Texts(("fine film ",), None, (1,))
    assert read_tsv(rte).labels == (1, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sentence1\tsentence2\na\tb\n", "expected one named label or Quality"),
        ("label\tsentence1\n1\ta\n1\tb\tc\n", "line 3: 3 fields; expected 2"),
        ("label\tsentence1\n1\tb\tc\n", "line 2: 3 fields; expected 2"),
        ("label\tsentence1\nmaybe\ta\n", "the label 'maybe'"),
    ],
)
def test_says_what_is_wrong_with_a_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.tsv").write_text(text)
    with pytest.raises(hap.HapError, match=message):
        read_tsv(tmp_path / "bad.tsv")


def test_a_development_set_alone_is_split_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "QNLI").mkdir()
    rows = "".join(f"{i % 2}\tquestion {i}\tanswer {i}\n" for i in range(HELD_OUT + 40))
    (tmp_path / "QNLI" / "dev.tsv").write_text("label\tsentence1\tsentence2\n" + rows)
    corpus, again = read(tmp_path, "qnli"), read(tmp_path, "qnli")
    assert (corpus.name, len(corpus.train), len(corpus.dev)) == ("qnli-dev", 40, HELD_OUT)
    assert not set(corpus.train.first) & set(corpus.dev.first) and corpus == again
    with pytest.raises(hap.HapError, match="holds no rte"):
        read(tmp_path, "rte")
    with pytest.raises(hap.HapError, match="expected one of mrpc"):
        read(tmp_path, "cola")


class Table(dict[str, list[Any]]):
    """A split as the package datasets gives it."""

    column_names = property(list)


def test_reads_data_sets_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, task: str) -> dict[str, Table]:
        if (name, task) != ("nyu-mll/glue", "qnli"):
            raise FileNotFoundError(f"{name} is not on the hub")
        pair = Table(question=["why", "who"], sentence=["so", "me"], label=[1, 0], idx=[0, 1])
        return {"train": pair, "validation": Table(question=["a"], sentence=["b"], label=[0], idx=[0])}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    corpus = read("nyu-mll/glue", "qnli")
    assert (corpus.name, corpus.train) == ("qnli", Texts(("why", "who"), ("so", "me"), (1, 0)))
    assert corpus.dev == Texts(("a",), ("b",), (0,))
    with pytest.raises(hap.HapError, match="no folder nowhere, nor a data set with mrpc: nowhere is not on the hub"):
        read("nowhere", "mrpc")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(hap.HapError, match="pip install datasets"):
        read("nyu-mll/glue", "qnli")


def test_signal_is_what_errors_leave_of_the_differences() -> None:
    values, errors = torch.tensor([1.0, 3.0], dtype=torch.float64), torch.full((2,), 0.5, dtype=torch.float64)
    assert signal_of(hap.Scores({"a": values})) is None
    assert signal_of(hap.Scores({"a": values}, {"a": errors})) == pytest.approx(1 - 0.25 / 2)
    assert signal_of(hap.Scores({"a": values}, {"a": 10 * errors})) == 0.0


def test_metrics_by_hand() -> None:
    predicted, labels = torch.tensor([1, 1, 0, 1, 0]), torch.tensor([1, 0, 0, 1, 1])
    found = metrics_of(predicted, labels, TASKS["mrpc"])
    assert found == pytest.approx({"accuracy": 3 / 5, "f1": 2 * 2 / 6, "score": (3 / 5 + 4 / 6) / 2})
    assert metrics_of(predicted, labels, TASKS["rte"]) == pytest.approx({"accuracy": 0.6, "score": 0.6})
    assert metrics_of(torch.zeros(3), torch.zeros(3), TASKS["mrpc"])["f1"] == 0


# ---- batches and training -------------------------------------------------------------------------------------


def _encoded(count: int = 70, longest: int = 60) -> Encoded:
    """Texts of 3 or more tokens; the label says whether token 7 is the first one."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, longest, (count,), generator=generator)
    ids = torch.randint(8, 20, (count, 64), generator=generator)
    labels = torch.arange(count) % 2
    ids[labels == 1, 0] = 7
    mask = torch.arange(64)[None] < lengths[:, None]
    return Encoded({"input_ids": (ids * mask).int(), "attention_mask": mask.int()}, labels, lengths)


def test_batches_hold_every_text_once_and_whole() -> None:
    data = _encoded()
    for batches in (list(data.batches(16)), list(data.epoch(14, torch.Generator().manual_seed(1)))):
        tokens = sum(int(x["attention_mask"].sum()) for x, _ in batches)
        assert tokens == int(data.lengths.sum()) and sum(len(y) for _, y in batches) == 70
        assert {x["input_ids"].shape[1] for x, _ in batches} <= {16, 32, 48, 64}
    widths = [x["input_ids"].shape[1] for x, _ in data.batches(16)]
    assert widths == sorted(widths)
    assert len(list(data.epoch(16, torch.Generator().manual_seed(1)))) == 4  # 6 texts are left over


class Bag(nn.Module):
    """A classifier of the first token, with the outputs of a Hugging Face model."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.out = nn.Embedding(20, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        logits = self.out(self.norm(self.table(input_ids[:, 0])))
        return type("Output", (), {"logits": logits})


def test_training_side_by_side_equals_training_alone() -> None:
    data, tuning = _encoded(), Tuning(epochs=6, batch=16, lr=0.05, seed=2)
    first, second, alone = Bag(), Bag(), Bag()
    alone.load_state_dict(second.state_dict())
    tuned = tune([first, second], data, tuning)
    assert tune([alone], data, tuning)[0].loss == tuned[1].loss
    assert all(torch.equal(a, b) for a, b in zip(second.parameters(), alone.parameters(), strict=True))
    assert tuned[0].steps == 24 and tuned[0].loss[-1] < 0.2 * tuned[0].loss[0] and not first.training
    assert metrics_of(*predict(first, data, 32), TASKS["rte"])["score"] == 1.0


def test_rates_rise_and_fall() -> None:
    tuning = Tuning(lr=1.0, warmup=0.1, epochs=2, batch=10)
    rates = [tuning.rate(step, 20) for step in range(20)]
    assert rates[:2] == [0.5, 1.0] and rates == [*rates[:2], *sorted(rates[2:], reverse=True)] and rates[-1] > 0
    assert tuning.steps(105) == 20 and Tuning(most_steps=7).steps(1000) == 7
    with pytest.raises(hap.HapError, match="at least one batch of 32"):
        Tuning().steps(31)
    with pytest.raises(hap.HapError, match="expected 1 or more"):
        Tuning(epochs=0)


@pytest.mark.parametrize("value", [0.0, 3, True])
def test_scalars_are_filled_not_copied(value: Any) -> None:
    with FilledScalars(), torch.device("meta"):
        made, listed = torch.tensor(value), torch.tensor([1.0, 2.0])
        typed = torch.tensor(value, dtype=torch.bfloat16, device="cpu")
    assert made.shape == () and made.dtype == torch.tensor(value).dtype and made.is_meta and listed.shape == (2,)
    assert typed.dtype == torch.bfloat16 and float(typed) == float(value)


class OnDevice(TorchDispatchMode):
    """Fails where an operator reads or makes something on the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        places = {t.device.type for t in pytree.tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)}
        assert places <= {"meta"}, func
        return result


class NoCopies(TorchFunctionMode):
    """Fails where a tensor is made of numbers, which on a GPU is a copy from the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.tensor, args
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["mpnet", "roberta"])
def test_a_step_reads_nothing_back_and_copies_nothing_from_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CUDA graph asks of a step, tried with tensors that have no values and so cannot be read."""
    model, example = small(name)
    groups = hap.trace(model, example)
    heads = hap.only(groups, hap.heads(groups))
    scores = hap.score(model, heads, None, None, "random")
    hap.apply_(model, hap.plan(heads, scores, hap.Budget(channels=0.5)), example)
    monkeypatch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True)
    meta = torch.device("meta")
    step = _Run(model.train(), Tuning(), torch.device("cpu"))
    step.device, step.loss_sum = meta, step.loss_sum.to(meta)
    step.optimizer = torch.optim.SGD(model.to(meta).parameters(), lr=0.1)
    inputs, labels = {k: v.to(meta) for k, v in example.items()}, torch.zeros(3, dtype=torch.int64, device=meta)
    with OnDevice(), NoCopies():
        step.step(inputs, labels)
    assert step.loss_sum.is_meta


@pytest.mark.skipif(not torch.cuda.is_available(), reason="records CUDA graphs")
def test_recorded_steps_train_like_plain_ones() -> None:
    data, tuning = _encoded(160).to("cuda"), Tuning(epochs=6, batch=16, lr=0.05)
    plain = Bag().cuda()
    recorded = [copy.deepcopy(plain) for _ in range(2)]
    wanted = tune([plain], data, tuning, graphs=False)[0].loss
    for tuned in tune(recorded, data, tuning):
        assert tuned.loss == pytest.approx(wanted, rel=0.02, abs=0.01)
    for a, b in zip(recorded[0].parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="records CUDA graphs")
@pytest.mark.parametrize("name", ["mpnet", "roberta"])
def test_recorded_steps_train_pruned_encoders_like_plain_ones(name: str) -> None:
    """Two encoders with other heads left, side by side, on texts of several lengths."""
    model, example = small(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    heads = units_of(hap.trace(model, example), "heads")
    data, tuning = _encoded(160, 30).to("cuda"), Tuning(epochs=4, batch=16, lr=1e-3)
    plain = []
    for seed in range(2):
        plan = hap.plan(heads, hap.score(model, heads, None, None, hap.Random(seed)), hap.Budget(channels=0.5))
        plain.append(hap.apply_(copy.deepcopy(model), plan, example).cuda())
    recorded = copy.deepcopy(plain)
    wanted, seen = tune(plain, data, tuning, graphs=False), tune(recorded, data, tuning)
    for a, b in zip(wanted, seen, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=0.05, abs=0.02) and b.loss[-1] < b.loss[0]


# ---- the whole way --------------------------------------------------------------------------------------------

WORDS = "good bad fine poor film plot story actor scene music very quite rather long short".split()


def _sentences(path: Path, count: int, seed: int, pairs: bool = False) -> None:
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        label = draw.randrange(2)
        words = [draw.choice(("good", "fine") if label else ("bad", "poor")), *draw.choices(WORDS[4:], k=3)]
        draw.shuffle(words)
        rows.append(f"{label}\t{' '.join(words)}" + "\tlong story" * pairs + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("label\tsentence1" + "\tsentence2" * pairs + "\n" + "".join(rows))


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small task, a small encoder and the results of a short campaign."""
    transformers = library()
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("glue")
    _sentences(folder / "data" / "sst2" / "train.tsv", 192, 0)
    _sentences(folder / "data" / "sst2" / "dev.tsv", 64, 1)
    words = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["<s>", "<pad>", "</s>", "<unk>", *WORDS])}, "<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>")
    tokenizer.save_pretrained(folder / "model")
    _save_encoder(folder / "model", layers=2, heads=4)
    assert _glue(folder).exit_code == 0
    return folder


def _save_encoder(folder: Path, layers: int, heads: int) -> None:
    """A small encoder as it comes."""
    transformers = library()
    torch.manual_seed(0)
    config = transformers.MPNetConfig(
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=32,
        max_position_embeddings=140,
        vocab_size=20,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    transformers.MPNetForSequenceClassification(config).save_pretrained(folder)


def _glue(folder: Path, *more: str) -> Any:
    options = [
        "--task",
        "sst2",
        "--model",
        folder / "model",
        "--data",
        folder / "data",
        "--out",
        folder / "results",
        "--work",
        folder / "work",
        "--criteria",
        "hessian,gradient",
        "--seeds",
        "1",
        "--heads",
        "0.75,0.5",
        "--epochs",
        "6",
        "--more-epochs",
        "2",
        "--lr",
        "0.003",
        "--calibration",
        "32",
        "--probes",
        "3",
        "--device",
        "cpu",
        "--note",
        "a toy",
        *more,
    ]
    return CliRunner().invoke(app, ["glue", *map(str, options)])


def test_a_campaign_leaves_one_result_for_each_job(campaign: Path) -> None:
    found = sorted(p.stem for p in (campaign / "results").glob("*.json"))
    assert found == [f"sst2-{c}-seed0" for c in ("gradient", "hessian")]
    for path in (campaign / "results").glob("*.json"):
        record = json.loads(path.read_text())
        assert [b["heads"] for b in record["budgets"]] == [1.0, 0.75, 0.5]
        assert [sum(b["heads_left"].values()) for b in record["budgets"][1:]] == [6, 4]
        assert all(min(b["heads_left"].values()) >= 1 for b in record["budgets"][1:])
        assert record["dense"]["metrics"]["score"] > 0.9 and record["budgets"][1]["metrics"]["score"] > 0.9
        assert record["budgets"][2]["params_left"] < record["budgets"][1]["params_left"] < 1
        assert record["model"]["heads"] == 8 and record["model"]["note"] == "a toy" and record["seed"] == 0
        assert len(record["scores"]) == 2 and record["revision"] and record["hardware"]["torch"]
    hessian = json.loads((campaign / "results" / "sst2-hessian-seed0.json").read_text())
    settings = hessian["settings"]
    assert settings["criterion"]["probes"] == 3 and settings["tuning"]["after"]["most_steps"] == 1000
    assert (
        0 <= hessian["scoring"]["signal"] <= 1
        and settings["calibration"] == 32
        and hessian["device"] == "cpu"
        and hessian["precision"] == "float32"
    )


def test_a_seed_gives_the_same_figures_again(campaign: Path, tmp_path: Path) -> None:
    for name in ("model", "data"):
        (tmp_path / name).symlink_to(campaign / name)
    assert _glue(tmp_path, "--criteria", "hessian").exit_code == 0
    seen, before = (
        json.loads((folder / "results" / "sst2-hessian-seed0.json").read_text()) for folder in (tmp_path, campaign)
    )
    assert seen["scores"] == before["scores"] and seen["dense"]["loss"] == before["dense"]["loss"]
    for a, b in zip(seen["budgets"][1:], before["budgets"][1:], strict=True):
        assert all(a[key] == b[key] for key in ("kept", "metrics", "metrics_before_tuning", "loss"))


def test_what_is_done_is_not_done_again(campaign: Path) -> None:
    path = campaign / "results" / "sst2-gradient-seed0.json"
    before = json.loads(path.read_text())
    path.unlink()
    part = campaign / "work" / "sst2-gradient-seed0.part.json"
    kept = json.loads(part.read_text())
    kept["budgets"] = [p for p in kept["budgets"] if p["heads"] == 0.75]
    part.write_text(json.dumps(kept))
    others = {p: p.stat().st_mtime_ns for p in (campaign / "results").glob("*.json")}
    again = _glue(campaign)
    assert again.exit_code == 0, again.output
    assert "fine-tuning the dense" not in again.output and "75% of the heads" not in again.output
    after = json.loads(path.read_text())
    assert after["budgets"][1] == before["budgets"][1]
    assert after["budgets"][2]["kept"] == before["budgets"][2]["kept"]
    assert all(p.stat().st_mtime_ns == t for p, t in others.items())


def test_an_interrupted_campaign_goes_on(campaign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of the second job: the first has its result, and the dense network is not trained again."""
    for name in ("model", "data"):
        (tmp_path / name).symlink_to(campaign / name)
    calls = []

    def tune_twice(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:  # the dense network, the first job, the second
            raise KeyboardInterrupt
        return tune(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("hap_reproduction.glue.campaign.tune", tune_twice)
        stopped = _glue(tmp_path, "--epochs", "1", "--more-epochs", "1")
    assert stopped.exit_code == 130 and "the same command goes on" in stopped.output
    assert [p.stem for p in (tmp_path / "results").iterdir()] == ["sst2-hessian-seed0"]
    before = (tmp_path / "results" / "sst2-hessian-seed0.json").read_bytes()
    again = _glue(tmp_path, "--epochs", "1", "--more-epochs", "1")
    assert again.exit_code == 0 and "fine-tuning the dense" not in again.output
    assert len(list((tmp_path / "results").iterdir())) == 2
    assert (tmp_path / "results" / "sst2-hessian-seed0.json").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "file", "message"),
    [
        (["--heads", "0.75"], None, "sst2-hessian-seed0.json was made with heads"),
        (["--more-epochs", "3"], None, "sst2-hessian-seed0.json was made with tuning"),
        (["--calibration", "16"], None, "sst2-hessian-seed0.json was made with calibration 32; expected 16"),
        (
            ["--more-epochs", "3"],
            "results/sst2-gradient-seed0.json",
            "sst2-gradient-seed0.part.json was made with tuning",
        ),
        (["--epochs", "1"], "results/sst2-gradient-seed0.json", "sst2-dense-seed0.safetensors was made with tuning"),
    ],
)
def test_what_other_settings_made_is_not_gone_on_from(
    campaign: Path, options: list[str], file: str | None, message: str
) -> None:
    """Else figures of one setting would be reported as those of another."""
    kept = (campaign / file).read_bytes() if file else b""
    if file:
        (campaign / file).unlink()
        options = [*options, "--criteria", "gradient"]
    refused = _glue(campaign, *options)
    assert refused.exit_code != 0 and message in " ".join(refused.output.split()), refused.output
    if file:
        assert not (campaign / file).exists()
        (campaign / file).write_bytes(kept)


def test_a_job_that_fails_does_not_keep_others_from_being_done(
    campaign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("model", "data", "work"):
        (tmp_path / name).symlink_to(campaign / name)
    order = ("--criteria", "gradient,hessian")
    score = hap.score

    def fail(model: Any, groups: Any, batches: Any, loss: Any, criterion: Any) -> Any:
        if isinstance(criterion, hap.JointTrace):
            raise hap.HapError("a Hessian product is not finite")
        return score(model, groups, batches, loss, criterion)

    monkeypatch.setattr("hap.score", fail)
    failed = _glue(tmp_path, *order)
    assert failed.exit_code != 0 and "sst2-hessian-seed0 failed: a Hessian product is not finite" in failed.output
    assert "1 of the runs failed: sst2-hessian-seed0" in failed.output
    assert [p.stem for p in (tmp_path / "results").iterdir()] == ["sst2-gradient-seed0"]
    again = _glue(tmp_path, *order, "--seeds", "2")  # it comes first now, and others are left
    assert again.exit_code != 0 and "2 of the runs failed: sst2-hessian-seed0, sst2-hessian-seed1" in again.output
    assert sorted(p.stem for p in (tmp_path / "results").iterdir()) == ["sst2-gradient-seed0", "sst2-gradient-seed1"]
    first = _glue(tmp_path, "--criteria", "hessian,gradient", "--seeds", "2", "--out", str(tmp_path / "new"))
    assert first.exit_code != 0 and "a Hessian product is not finite" in first.output  # what fails at once always will
    assert not [*(tmp_path / "new").glob("*.json")]


def test_status_and_time_limit(campaign: Path) -> None:
    shown = _glue(campaign, "--status", "--seeds", "2").output
    assert shown.count("done") == 2 and shown.count("left") == 2
    chosen = jobs(["sst2"], ["hessian"], range(2))
    folders = Folders(campaign / "results", campaign / "work")
    assert status(chosen, folders) == {"done": ["sst2-hessian-seed0"], "left": ["sst2-hessian-seed1"]}
    stopped = _glue(campaign, "--seeds", "2", "--seconds", "0")
    assert stopped.exit_code == 0 and "stopped before sst2-hessian-seed1" in stopped.output
    assert status(chosen, folders)["left"] == ["sst2-hessian-seed1"]


def test_the_table_is_made_from_the_files(campaign: Path) -> None:
    page = campaign / "page.md"
    assert CliRunner().invoke(app, ["glue", "--out", str(campaign / "results"), "--render", str(page)]).exit_code == 0
    text = page.read_text()
    record = json.loads((campaign / "results" / "sst2-hessian-seed0.json").read_text())
    scores = [f"{100 * b['metrics']['score']:.2f}" for b in record["budgets"]]
    assert f"| Hessian trace (HAP) | {' | '.join(scores)} |" in text and "a toy (mpnet, 8 heads)" in text
    assert "Hessian minus gradient" in text and "| heads left | 100% | 75% | 50% |" in text
    with pytest.raises(hap.HapError, match="holds no results of hap glue"):
        render(campaign / "data")


@pytest.mark.parametrize(
    ("gaps", "verdict"),
    [
        ((1.1, 0.9, 1.0), "held (mean lead +1.00, standard error 0.06, 3 seeds)"),
        ((0.3, 0.2, 0.25), "held in part, it is ahead by less (mean lead +0.25"),
        ((-1.0, 2.0, 0.5), "not held, the difference is within what seeds do"),
        ((-1.1, -0.9, -1.0), "not held, it is behind"),
        ((1.0,), "Too few seeds"),
    ],
)
def test_the_page_says_whether_the_claim_holds(
    campaign: Path, tmp_path: Path, gaps: tuple[float, ...], verdict: str
) -> None:
    """From files in which the Hessian is so many points ahead, seed by seed; and no criterion is left out."""
    record = json.loads((campaign / "results" / "sst2-hessian-seed0.json").read_text())
    part = record["budgets"][-1]
    for seed, gap in enumerate(gaps):
        for criterion in NAMES:
            score = 0.9 + (gap / 100 if criterion == "hessian" else 0)
            parts = [part | {"heads": share, "metrics": {"accuracy": score, "score": score}} for share in (0.6, 0.5)]
            changed = record | {"criterion": criterion, "seed": seed, "budgets": [record["budgets"][0], *parts]}
            (tmp_path / f"{criterion}-{seed}.json").write_text(json.dumps(changed))
    text = render(tmp_path)
    shares = ", ".join([f"{record['scoring']['signal']:.0%}"] * len(gaps))
    assert f"scores of heads differ, {shares} (seed by seed) is not noise of its 3 probes" in text
    assert "trained anew" not in text
    changed["dense"] = record["dense"] | {"loss": [0.5]}
    (tmp_path / f"{criterion}-{seed}.json").write_text(json.dumps(changed))
    assert f"the same dense network with seed {seed}: it was trained anew" in render(tmp_path)
    assert verdict in text and all(f"| {name} |" in text for name in NAMES.values())


def test_every_criterion_has_a_name_and_the_telling_tasks_come_first() -> None:
    assert all(criterion_of(name, 0, 2) for name in NAMES)
    with pytest.raises(hap.HapError) as error:
        criterion_of("?", 0, 2)
    assert set(str(error.value).partition("expected some of ")[2].split(", ")) == set(NAMES)
    assert [j.name for j in jobs(ORDER, ["hessian", "gradient"], range(2))][:5] == [
        "mrpc-hessian-seed0",
        "mrpc-gradient-seed0",
        "mrpc-hessian-seed1",
        "mrpc-gradient-seed1",
        "sst2-hessian-seed0",
    ]


def test_every_task_goes_the_whole_way(campaign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hap_reproduction.glue.data.HELD_OUT", held_out := 100)
    for task in ("mrpc", "rte"):
        _sentences(tmp_path / "data" / task / "train.tsv", 64, 2, pairs=True)
        _sentences(tmp_path / "data" / task / "dev.tsv", 20, 3, pairs=True)
    _sentences(tmp_path / "data" / "sst2" / "train.tsv", 64, 4)
    _sentences(tmp_path / "data" / "sst2" / "dev.tsv", 20, 5)
    _sentences(tmp_path / "data" / "qnli" / "dev.tsv", held_out + 40, 6, pairs=True)
    (tmp_path / "model").symlink_to(campaign / "model")
    options = "--task all --epochs 1 --more-epochs 1 --heads 0.5 --criteria hessian,narrow".split()
    whole = _glue(tmp_path, *options)
    assert whole.exit_code == 0, whole.output
    found = [json.loads(p.read_text()) for p in sorted((tmp_path / "results").glob("*.json"))]
    assert sorted({r["task"] for r in found}) == ["mrpc", "qnli-dev", "rte", "sst2"] and len(found) == 8
    assert all(r["metrics"] == (["accuracy", "f1"] if r["task"] == "mrpc" else ["accuracy"]) for r in found)
    assert {r["task"]: (r["examples"]["train"], r["examples"]["dev"]) for r in found}["qnli-dev"] == (40, held_out)
    narrow = {r["name"]: r["budgets"][1] for r in found}
    for task in ("mrpc", "sst2"):
        ours, theirs = (narrow[f"{task}-{criterion}-seed0"] for criterion in ("narrow", "hessian"))
        assert any(ours["narrowed"].values()) and not any(theirs["narrowed"].values())
        assert ours["macs_left"] <= theirs["macs_left"]
    again = _glue(tmp_path, *options)
    assert again.exit_code == 0 and "fine-tuning" not in again.output and "of the heads" not in again.output
    text = render(tmp_path / "results")
    assert all(f"## {task}\n" in text for task in ("mrpc", "rte", "sst2", "qnli-dev"))
    assert "## What the scores cost" not in text and "## Latency" not in text


def test_costs_of_scores_beside_training(campaign: Path) -> None:
    result = _glue(campaign, "--costs")
    assert result.exit_code == 0, result.output
    record = json.loads((campaign / "results" / "costs-cpu.json").read_text())
    assert [(row["criterion"], row["batch"]) for row in record["rows"]] == list(head_costs.MEASURED)
    epoch, plain = record["dense"]["seconds_per_epoch"], record["plain"]
    assert plain["steps"] == 6 and plain["step_memory"] is None and plain["seconds_per_epoch"] > 0
    assert all(row["of_a_plain_epoch"] == row["seconds"] / plain["seconds_per_epoch"] for row in record["rows"])
    assert epoch == pytest.approx(record["dense"]["seconds"] / 6)
    assert all(row["of_an_epoch"] == pytest.approx(row["seconds"] / epoch) for row in record["rows"])
    assert all(row["examples"] == 32 and row["of_a_step"] is None for row in record["rows"])
    first = record["rows"][0]
    ratios = f"{first['of_an_epoch']:.2f} | {first['of_a_plain_epoch']:.2f}"
    line = f"| Gauss-Newton trace | 16 | {first['seconds']:.2f} | {ratios} | - | - |"
    assert line in render(campaign / "results")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures on CUDA")
def test_the_whole_way_on_a_gpu(campaign: Path, tmp_path: Path) -> None:
    for name in ("model", "data"):
        (tmp_path / name).symlink_to(campaign / name)
    result = _glue(tmp_path, "--device", "cuda", "--criteria", ",".join(NAMES))
    assert result.exit_code == 0, result.output
    found = [json.loads(p.read_text()) for p in (tmp_path / "results").glob("*.json")]
    assert len(found) == len(NAMES) and all(r["scoring"]["peak_memory"] > 0 for r in found)
    assert all(r["dense"]["metrics"]["score"] > 0.9 and r["precision"].startswith("bf16") for r in found)
    costs = _glue(tmp_path, "--device", "cuda", "--costs")
    assert costs.exit_code == 0, costs.output
    record = json.loads((tmp_path / "results" / "costs-cuda.json").read_text())
    step = record["plain"]["step_memory"]
    assert all(row["of_a_step"] == pytest.approx(row["peak_memory"] / step) for row in record["rows"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "cola"], "--task is 'cola'"),
        (["--task", "mrpc"], "needs --model and --data"),
        (["--task", "mrpc", "--model", "m", "--data", "d", "--heads", "half"], "--heads is 'half'"),
        (["--status", "--heads", "0.5,1.5"], "--heads is '0.5,1.5'; expected shares that are LEFT, between 0 and 1"),
        (["--status", "--criteria", "hessian,"], "--criteria names ''; expected some of hessian"),
    ],
)
def test_says_what_is_missing(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["glue", *options])
    assert result.exit_code == 2 and message in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lr", "nan"], "lr is nan; expected a learning rate above 0"),
        (
            ["--heads", "0.75,0.1"],
            "--heads has 0.1: one of 8 heads stays in each of 2 layers, so at least 0.250 is left",
        ),
        (["--model", "."], "--model is '.', which is no folder nor name that loads: "),
    ],
)
def test_says_what_is_wrong_before_anything_is_trained(
    campaign: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    refused = _glue(campaign, "--out", tmp_path / "results", "--work", tmp_path / "work", *options)
    assert refused.exit_code == 2 and message in refused.output
    assert "fine-tuning" not in refused.output


@pytest.mark.parametrize("other", ["weights", "data"])
def test_results_of_another_model_or_other_data_are_not_taken_for_its_own(
    campaign: Path, tmp_path: Path, other: str
) -> None:
    """A folder of the same name may hold other weights, and other texts."""
    for name in ("model", "data", "results", "work"):
        shutil.copytree(campaign / name, tmp_path / name)
    if other == "weights":
        network = library().MPNetForSequenceClassification.from_pretrained(tmp_path / "model")
        with torch.no_grad():
            network.classifier.dense.bias.fill_(1)
        network.save_pretrained(tmp_path / "model")
    else:
        _sentences(tmp_path / "data" / "sst2" / "dev.tsv", 40, 2)
    for criteria, file in (("hessian", "hessian-seed0.json"), ("random", "dense-seed0.safetensors")):
        refused = _glue(tmp_path, "--criteria", criteria)
        assert refused.exit_code == 2 and f"{file} was made with {other}" in " ".join(refused.output.split())


def test_weights_that_are_broken_are_not_blamed_on_the_learning_rate(campaign: Path, tmp_path: Path) -> None:
    shutil.copytree(campaign / "model", tmp_path / "model")
    (tmp_path / "data").symlink_to(campaign / "data")
    network = library().MPNetForSequenceClassification.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        network.classifier.dense.bias.fill_(torch.nan)
    network.save_pretrained(tmp_path / "model")
    refused = _glue(tmp_path)
    assert refused.exit_code == 2 and "classifier.dense.bias is not finite before fine-tuning" in refused.output


def _median_ratio(row: dict[str, Any]) -> float:
    return statistics.median(a / b for a, b in zip(row["dense"]["times"], row["pruned"]["times"], strict=True))


def test_latency_with_and_without_heads(campaign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(head_latency.ROUNDS) == {1, 32}
    monkeypatch.setattr(head_latency, "ROUNDS", {4: 3})
    _save_encoder(tmp_path / "model", layers=1, heads=8)
    result = _glue(campaign, "--latency", "--model", tmp_path / "model")
    assert result.exit_code == 0, result.output
    record = json.loads((campaign / "results" / "latency-cpu.json").read_text())
    rows = [(row["backend"], row["batch"]) for row in record["rows"]]
    assert rows == [("eager", 4), ("onnxruntime", 4)] and record["macs_left"] < 1
    assert all(row["faster"] == pytest.approx(_median_ratio(row)) for row in record["rows"])
    assert sum(record["heads_left"].values()) == 4
    last, text = record["rows"][-1], render(campaign / "results")
    assert f"| onnxruntime | 4 | {last['dense']['median']:.1f} | {last['pruned']['median']:.1f} |" in text


def test_long_texts_are_cut_and_padded_to_a_bucket() -> None:
    transformers = library()
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1, "a": 2}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>")
    data = encode(Texts(("a " * 300, "a a"), None, (0, 1)), tokenizer, longest=40)
    assert data.lengths.tolist() == [40, 2] and data.inputs["input_ids"].shape == (2, 48)
    assert data.inputs["input_ids"][1].tolist() == [2, 2] + [0] * 46
