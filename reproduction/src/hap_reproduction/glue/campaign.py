"""The paper's experiment on attention heads: fine-tune an encoder on a GLUE task, remove heads, fine-tune on, measure.

One job is a task, a criterion and a seed. It starts from the dense network of its task and seed, which is trained once
and kept, prunes it to each share of the heads, trains these networks side by side and leaves one result file.
"""

import copy
import hashlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from hap.errors import HapError
from hap.groups.groups import Groups
from hap.groups.transformer_blocks import units_of
from hap.scoring import Criterion
from hap.utils.atomic_files import digest, write_json
from hap.workflow.provenance import provenance
from hap.workflow.results import read_json
from hap_reproduction.glue.data import Corpus, Encoded, encode, metrics_of
from hap_reproduction.glue.data import read as read_task
from hap_reproduction.glue.device_use import fast_products, release, use_of
from hap_reproduction.glue.job import FORMAT, IMPLANT, KIND, Folders, Job, Settings, check_same, criterion_of
from hap_reproduction.glue.tuning import Tuned, precision_of, predict, tune
from hap_reproduction.zoo_sweep.models import import_torchvision

Say = Callable[[str], None]


class Campaign:
    """What the jobs share: the model, its tokenizer and its groups, and the tokenised tasks on the device."""

    def __init__(
        self,
        model: str | Path,
        data: str | Path,
        folders: Folders,
        settings: Settings,
        device: torch.device,
        note: str = "",
        revision: str | None = None,
        say: Say = print,
    ):
        self.source, self.data, self.folders, self.settings = str(model), data, folders, settings
        self.device, self.note, self.revision, self.say = device, note, revision, say
        self.library = load_transformers()
        try:
            self.tokenizer = self.library.AutoTokenizer.from_pretrained(self.source)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise HapError(f"--model is {self.source!r}, which is no folder nor name that loads: {reason}") from error
        self.weights = _weights_of(self.source, self.library)
        self._groups: Groups | None = None
        self._narrowable: Groups | None = None
        self._texts: dict[str, Corpus] = {}
        self._encoded: dict[str, tuple[Encoded, Encoded]] = {}
        self._last: tuple[Path, nn.Module, dict[str, Any]] | None = None

    def work_off(self, chosen: Sequence[Job], seconds: float | None = None) -> None:
        """Run what has no result yet, in order; with `seconds`, begin nothing that is expected to end later.

        A job that fails does not keep the others from being done, unless it is the first of all: HapError names at the
        end those that did.
        """
        self._check_budgets()
        left = [j for j in chosen if not self._is_done(j)]
        begun, longest, failed, done = time.monotonic(), 0.0, [], len(chosen) - len(left)
        for job in left:
            started = time.monotonic()
            if seconds is not None and started - begun + 1.1 * longest > seconds:
                self.say(f"stopped before {job.name}: the longest job took {longest:.0f} s")
                break
            try:
                self.run(job)
                done += 1
            except HapError as error:
                if not done:
                    raise
                failed.append(job.name)
                self.say(f"{job.name} failed: {error}")
            longest = max(longest, time.monotonic() - started)
            self.say(f"{job.name}: {time.monotonic() - started:.1f} s")
        if failed:
            raise HapError(f"{len(failed)} of the runs failed: {', '.join(failed)}; see above why")

    def _check_budgets(self) -> None:
        """Before anything is trained: a head stays in each layer."""
        least = len(self.groups()) / self.groups().units
        if below := [b for b in self.settings.budgets if b < least]:
            raise HapError(
                f"--heads has {below[0]}: one of {self.groups().units} heads stays in each of {len(self.groups())} "
                f"layers, so at least {least:.3f} is left"
            )

    def _is_done(self, job: Job) -> bool:
        """Whether there is a result; HapError if other settings made it."""
        path = self.folders.result(job)
        if not path.exists():
            return False
        found = read_json(path)
        check_same(path, found.get("settings", {}), self._settings(job))
        shares = [b["heads"] for b in found["budgets"]]
        check_same(path, {"heads": sorted(shares)}, {"heads": sorted([1.0, *self.settings.budgets])})
        return True

    def _settings(self, job: Job) -> dict[str, Any]:
        return self._origin(job) | self.settings.of(job)

    def _origin(self, job: Job) -> dict[str, Any]:
        """What every figure of a job comes from: the model, its weights and the task's texts."""
        return {"model": Path(self.source).name, "weights": self.weights, "data": _digest_of(self._corpus(job.task))}

    def run(self, job: Job) -> None:
        begun = time.monotonic()
        dense, about = self._dense(job)
        scores, scoring = self.score(job, dense, self.settings.score_batch)
        if (sure := scoring["signal"]) is not None:
            self.say(f"{job.name}: {sure:.0%} of how scores differ is not noise of the probes")
        release(self.device)  # several campaigns may share a GPU, and recorded steps take memory of their own
        parts = self._parts(job, dense, scores)
        corpus, (train, dev) = self._corpus(job.task), self._examples(job.task)
        result = {
            "kind": KIND,
            "format": FORMAT,
            "name": job.name,
            "task": corpus.name,
            "metrics": corpus.task.metrics,
            "criterion": job.criterion,
            "seed": job.seed,
            "settings": self._settings(job),
            "model": self.model_facts(),
            "examples": {"train": len(train), "dev": len(dev)},
            "dense": about,
            "scoring": scoring,
            "scores": {n: v.tolist() for n, v in scores.items()},
            "score_errors": {n: v.tolist() for n, v in scores.errors.items()},
            "budgets": [{"heads": 1.0, "metrics": about["metrics"]}, *parts],
            "device": str(self.device),
            "precision": precision_of(self.device),
            "transformers": self.library.__version__,
            "seconds": time.monotonic() - begun,
        } | provenance(self.revision)
        write_json(self.folders.result(job), result)

    # ---- the dense network ----------------------------------------------------------------------------------

    def _dense(self, job: Job) -> tuple[nn.Module, dict[str, Any]]:
        """The network fine-tuned on the task with this seed, and how it was; trained now or read from `work`."""
        path = self.folders.dense(job)
        if self._last is None or self._last[0] != path:
            self._last = None
            if path.exists():
                about = hap.read(path).metrics
                check_same(path, about.get("settings", {}), self._dense_settings(job))
                found = hap.load(path, self._fresh()).to(self.device).eval()
            else:
                found, about = self.train_dense(job)
                hap.save(path, found, metrics=about)
            self._last = path, found, about
        return self._last[1:]

    def _dense_settings(self, job: Job) -> dict[str, Any]:
        return self._origin(job) | {"tuning": self.settings.tuning("dense", job).to_dict()}

    def train_dense(self, job: Job) -> tuple[nn.Module, dict[str, Any]]:
        """A network fine-tuned on the task with this seed, and what that took."""
        self.say(f"{job.task}, seed {job.seed}: fine-tuning the dense network")
        train, dev = self._examples(job.task)
        torch.manual_seed(job.seed)
        network = self.library.AutoModelForSequenceClassification.from_pretrained(self.source, num_labels=2)
        model = network.float().to(self.device)
        tuned = tune([model], train, self.settings.tuning("dense", job), self.settings.graphs)[0]
        epoch = tuned.seconds / tuned.steps * (len(train) // self.settings.dense.batch)
        about = {
            "metrics": self._measure(model, dev, job),
            "seconds": tuned.seconds,
            "steps": tuned.steps,
            "loss": tuned.loss,
            "seconds_per_epoch": epoch,
            "settings": self._dense_settings(job),
        }
        return model, about

    def _fresh(self) -> nn.Module:
        """The network's shape, with weights that a checkpoint is about to overwrite."""
        config = self.library.AutoConfig.from_pretrained(self.source, num_labels=2)
        return self.library.AutoModelForSequenceClassification.from_config(config).float()

    # ---- scores ---------------------------------------------------------------------------------------------

    def groups(self) -> Groups:
        """The heads that can go. They depend on the shape of the network alone, and are found once."""
        if self._groups is None:
            begun = time.monotonic()
            self._groups = units_of(hap.trace(self._fresh().eval(), self._example(torch.device("cpu"))), "heads")
            self.say(f"{self._groups.units} heads in {len(self._groups)} layers, {time.monotonic() - begun:.1f} s")
        return self._groups

    def _plan(self, job: Job, scores: hap.Scores, budget: float) -> hap.Plan:
        """The plan that leaves a share of the heads, or one with narrow heads that leaves as many FLOPs."""
        plan = hap.plan(self.groups(), scores, hap.Budget(channels=budget))
        if job.criterion != "narrow":
            return plan
        if self._narrowable is None:
            self._narrowable = hap.narrowable(self._fresh().eval(), self.groups(), self._example(torch.device("cpu")))
        try:
            return hap.plan(self._narrowable, scores, hap.Budget(flops=plan.after.macs / plan.before.macs), IMPLANT)
        except HapError as error:
            raise HapError(
                f"narrow heads cannot come down to the FLOPs of {budget:.0%} of the heads; give --heads no less than "
                "they can, or --criteria without narrow"
            ) from error

    def _example(self, device: torch.device) -> dict[str, Tensor]:
        ids = torch.randint(5, self.tokenizer.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
        return {"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device)}

    def _criterion(self, job: Job) -> Criterion:
        return criterion_of(job.criterion, job.seed, self.settings.probes)

    def score(self, job: Job, dense: nn.Module, size: int, warm_up: bool = False) -> tuple[hap.Scores, dict[str, Any]]:
        """The scores of the heads on calibration texts in batches of `size`, and what they took.

        With `warm_up` a short run comes first, for kernels are loaded when they first run, which is not to be timed.
        """
        train, _ = self._examples(job.task)
        batches = list(train.head(self.settings.calibration, job.seed).batches(size))
        groups, criterion = self.groups(), self._criterion(job)
        with fast_products(self.device):
            if warm_up:
                hap.score(dense, groups, batches[:1], loss_of, criterion_of(job.criterion, job.seed, probes=2))
            with use_of(self.device) as use:
                scores = hap.score(dense, groups, batches, loss_of, criterion)
        return scores, {
            "seconds": use.seconds,
            "peak_memory": use.peak_memory,
            "batch": size,
            "examples": sum(len(y) for _, y in batches),
            "signal": signal_of(scores),
            "about": scores.about,
        }

    # ---- pruned networks ------------------------------------------------------------------------------------

    def _parts(self, job: Job, dense: nn.Module, scores: hap.Scores) -> list[dict[str, Any]]:
        """What became of each budget; those finished before are read back."""
        path = self.folders.part(job)
        settings, done = self._settings(job), []
        if path.exists():
            found = read_json(path)
            check_same(path, found["settings"], settings)
            done = found["budgets"]
        left = [b for b in self.settings.budgets if b not in [d["heads"] for d in done]]
        for start in range(0, len(left), self.settings.together):
            done += self._prune_and_tune(job, dense, scores, left[start : start + self.settings.together])
            write_json(path, {"settings": settings, "budgets": done})
        return sorted((d for d in done if d["heads"] in self.settings.budgets), key=lambda d: -d["heads"])

    def _prune_and_tune(self, job: Job, dense: nn.Module, scores: hap.Scores, budgets: Sequence[float]) -> list[Any]:
        train, dev = self._examples(job.task)
        plans = [self._plan(job, scores, b) for b in budgets]
        models = [hap.apply_(copy.deepcopy(dense), plan, self._example(self.device)) for plan in plans]
        at_once = [self._measure(model, dev, job) for model in models]
        tuned = tune(models, train, self.settings.tuning("after", job), self.settings.graphs)
        parts = [
            self._part(budget, plan, shot, self._measure(model, dev, job), run)
            for budget, plan, shot, model, run in zip(budgets, plans, at_once, models, tuned, strict=True)
        ]
        for part in parts:
            self.say(f"{job.name}: {part['heads']:.0%} of the heads, {100 * part['metrics']['score']:.2f}")
        del models
        release(self.device)
        return parts

    @staticmethod
    def _part(budget: float, plan: hap.Plan, shot: dict[str, float], metrics: dict[str, float], run: Tuned) -> Any:
        return {
            "heads": budget,
            "heads_left": {n: len(units) for n, units in plan.kept.items()},
            "kept": plan.kept,
            "narrowed": plan.implanted,
            "params_left": plan.after.params / plan.before.params,
            "macs_left": plan.after.macs / plan.before.macs,
            "metrics_before_tuning": shot,
            "metrics": metrics,
            "loss": run.loss,
            "steps": run.steps,
            "seconds": run.seconds,
            "side_by_side": run.side_by_side,
        }

    # ---- data and facts -------------------------------------------------------------------------------------

    def _corpus(self, task: str) -> Corpus:
        if task not in self._texts:
            self._texts[task] = read_task(self.data, task)
        return self._texts[task]

    def _examples(self, task: str) -> tuple[Encoded, Encoded]:
        """To train on and to measure on, on the device."""
        if task not in self._encoded:
            corpus = self._corpus(task)
            train, dev = (encode(texts, self.tokenizer).to(self.device) for texts in (corpus.train, corpus.dev))
            self._encoded[task] = train, dev
        return self._encoded[task]

    def training_set(self, task: str) -> Encoded:
        return self._examples(task)[0]

    def _measure(self, model: nn.Module, dev: Encoded, job: Job) -> dict[str, float]:
        return metrics_of(*predict(model, dev), self._corpus(job.task).task)

    def model_facts(self) -> dict[str, Any]:
        config = self.library.AutoConfig.from_pretrained(self.source)
        return {
            "name": Path(self.source).name,
            "note": self.note or Path(self.source).name,
            "type": config.model_type,
            "layers": len(self.groups()),
            "heads": self.groups().units,
        }


def loss_of(output: Any, target: Tensor) -> Tensor:
    """The loss of a Hugging Face classifier, as hap.score wants it."""
    return F.cross_entropy(output.logits.float(), target)


def signal_of(scores: hap.Scores) -> float | None:
    """The share of the variance of scores over heads that their standard errors do not explain; None without those.

    Near 0 the ranking is chance, and more probes are needed.
    """
    if not scores.errors:
        return None
    values, errors = (torch.cat(list(found.values())) for found in (scores, scores.errors))
    return max(0.0, 1.0 - float(errors.square().mean() / values.var()))


def _weights_of(source: str, library: Any) -> str:
    """What tells the weights of a model from those of another of its name."""
    if not Path(source).is_dir():
        return str(library.AutoConfig.from_pretrained(source)._commit_hash)
    files = sorted(p for p in Path(source).iterdir() if p.suffix in (".safetensors", ".bin") or p.name == "config.json")
    return _short("".join(map(digest, files)))


def _digest_of(corpus: Corpus) -> str:
    return _short(repr((corpus.train, corpus.dev)))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_transformers() -> Any:
    """transformers, or HapError that says how to get it. It imports torchvision, also one that does not fit torch."""
    if importlib.util.find_spec("torchvision") is not None:
        import_torchvision()
    try:
        import transformers
    except ImportError as error:
        raise HapError("this command needs the package transformers: pip install transformers") from error
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers
