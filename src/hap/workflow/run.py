"""Carrying out an experiment, step by step. A finished step leaves files and is not done again."""

import copy
import dataclasses
import hashlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hap
from hap.data import Data
from hap.errors import HapError
from hap.groups.groups import Groups
from hap.planning.plan import Plan
from hap.pruning.latency import with_threads
from hap.scoring import Scores
from hap.training import History
from hap.training.evaluation import check_reads
from hap.training.recipes import Recipe
from hap.utils.atomic_files import digest as file_digest
from hap.utils.atomic_files import write_json
from hap.workflow.config import Experiment, PruneStep
from hap.workflow.networks import describe_network, load_data, measure_networks, new_network, open_checkpoint
from hap.workflow.provenance import provenance
from hap.workflow.results import INDEX, KIND, Measured, Result, read_json
from hap.workflow.steps import Say, Work, note_if_fewer_images, probe_record, sensitivity_record

PROBE_IMAGES = 64


@dataclass(frozen=True)
class Console:
    """How an experiment is shown: a step that begins, one that was finished before, and work without a bar of its own,
    inside which a function says what is being done."""

    step: Say
    skipped: Say
    status: Callable[[str], AbstractContextManager[Say]]


def run(experiment: Experiment, device: torch.device, console: Console) -> list[Result]:
    """Carry out what is not done yet and return all results: the dense network's, then one per way and seed.

    A step is finished when its files are there and were made with the settings asked for now; others are done again.
    """
    with with_threads(experiment.threads or torch.get_num_threads()):
        return _Runner(experiment, device, console).run()


class _Runner:
    def __init__(self, experiment: Experiment, device: torch.device, console: Console) -> None:
        self.experiment, self.device, self.console = experiment, device, console
        self.out = Path(experiment.out)
        self.data: Data = load_data(experiment.data, experiment.model).to(device)
        self.scored: dict[str, tuple[Groups, Scores]] = {}

    def run(self) -> list[Result]:
        if words := note_if_fewer_images(self.data, self.experiment.calibration):
            self.console.step(words)
        dense, first = self._dense()
        results = [first]
        for step in self.experiment.prune:
            results += self._one_way(dense, first, step)
        self._probes(dense)
        # so that a report leaves out what an earlier experiment left here
        files = [f"results/{stem}.json" for stem in _records(self.experiment)]
        write_json(self.out / INDEX, {"kind": "hap-experiment", "format": 1, "files": files})
        return results

    # ---- the dense network ----------------------------------------------------------------------------------

    def _dense(self) -> tuple[nn.Module, Result]:
        config = self._config()
        done = self._finished("dense", config)
        if done is not None:
            self.console.skipped("dense network")
            return self._open("dense"), done
        model, history, recipe = self._trained_dense(config)
        with self.console.status("evaluating the dense network"):
            accuracy = hap.evaluate(model, self.data).accuracy
            (side,) = measure_networks((model, accuracy), data=self.data)
        result = self._result(config, history, side)
        self._keep("dense", result, model, None, recipe)
        return model, result

    def _trained_dense(self, config: dict[str, Any]) -> tuple[nn.Module, History, Recipe | None]:
        step, seed = self.experiment.dense, self.experiment.seeds[0]
        if step.checkpoint is not None:
            self.console.step(f"dense network from {step.checkpoint}")
            model, found, _ = open_checkpoint(step.checkpoint, self.experiment.model)
            if found.plan is not None:
                raise HapError(f"{step.checkpoint} is pruned already; [dense] needs a dense checkpoint")
        else:
            self.console.step(f"dense network: train {self.experiment.model} on {self.data.name}")
            model = new_network(self.experiment.model, self.data.classes, seed)
        model = model.to(self.device)
        check_reads(model, self.data, self.experiment.model)
        if step.checkpoint is not None:
            return model, History(), None
        recipe = step.make(seed)
        history = hap.train(model, self.data, recipe, checkpoint=self._training_file("dense", config))
        return model, history, recipe

    # ---- one way to prune -----------------------------------------------------------------------------------

    def _one_way(self, dense: nn.Module, first: Result, step: PruneStep) -> list[Result]:
        seeds = self.experiment.seeds
        found = {seed: self._finished(_stem(step, seed), self._config(step, seed)) for seed in seeds}
        if all(found.values()):
            self.console.skipped(step.name)
        else:
            pruned, plan, one_shot = self._pruned(dense, step)
            for seed in (seed for seed, done in found.items() if done is None):
                found[seed] = self._finetuned(dense, first, copy.deepcopy(pruned), plan, one_shot, step, seed)
        return [result for result in found.values() if result is not None]

    def _pruned(self, dense: nn.Module, step: PruneStep) -> tuple[nn.Module, Plan, float]:
        config = self._config(step)
        stem = f"{step.slug}-pruned"
        path = self._checkpoint(stem)
        found = hap.read(path) if path.is_file() else None
        if found is not None and found.plan is not None and found.about.get("settings") == config:
            self.console.skipped(f"{step.name}: pruned network")
            return self._open(stem), found.plan, float(found.metrics["accuracy"])
        budget = " and ".join(f"{share:.0%} of {kind}" for kind, share in step.budget().given.items())
        self.console.step(f"{step.name}: prune to {budget}")
        model, count, seed = copy.deepcopy(dense), self.experiment.calibration, self.experiment.seeds[0]
        with self.console.status(step.name) as say:
            key = json.dumps([step.criterion, step.probes, step.coupling])
            if key not in self.scored:
                self.scored[key] = Work(dense, self.data, step, count, seed, say).score()
            groups, scores = self.scored[key]
            plan = Work(model, self.data, step, count, seed, say).prune(groups, scores)
            accuracy = hap.evaluate(model, self.data).accuracy
        picture = sensitivity_record(step.name, scores, plan, step.criterion)
        write_json(self._record(f"{step.slug}-sensitivity"), picture)
        hap.save(path, model, plan, metrics={"accuracy": accuracy}, about=self._about(config))
        return model, plan, accuracy

    def _finetuned(
        self, dense: nn.Module, first: Result, model: nn.Module, plan: Plan, one_shot: float, step: PruneStep, seed: int
    ) -> Result:
        config, stem = self._config(step, seed), _stem(step, seed)
        many = f", seed {seed}" if len(self.experiment.seeds) > 1 else ""
        self.console.step(f"{step.name}: fine-tune{many}")
        recipe = self.experiment.finetune.make(seed)
        teacher = dense if self.experiment.finetune.teacher else None
        state = self._training_file(stem, config)
        history = hap.train(model, self.data, recipe, teacher=teacher, checkpoint=state)
        with self.console.status("measuring"):
            accuracy = hap.evaluate(model, self.data).accuracy
            sides = measure_networks((dense, first.dense.accuracy), (model, accuracy), data=self.data)
        result = self._result(config, history, sides[0], sides[1], step, one_shot)
        self._keep(stem, result, model, plan, recipe)
        return result

    def _probes(self, dense: nn.Module) -> None:
        probes, path = self.experiment.probes, self._record("probes")
        config = {**self._config(), "probes": probes}
        if not probes or (path.is_file() and read_json(path).get("config") == config):
            return
        self.console.step(f"Hutchinson's estimate with {probes} probes, for the report")
        with self.console.status(f"drawing {probes} probes on {PROBE_IMAGES} images"):
            record = probe_record(dense, self.data, probes, PROBE_IMAGES, self.experiment.seeds[0])
        write_json(path, {**record, "config": config})

    # ---- files ----------------------------------------------------------------------------------------------

    def _config(self, step: PruneStep | None = None, seed: int | None = None) -> dict[str, Any]:
        """All settings that a step's result depends on, earlier steps' included."""
        e = self.experiment
        config: dict[str, Any] = {
            "model": e.model,
            "data": self.data.name,
            "dense": dataclasses.asdict(e.dense),
            "dense_seed": e.seeds[0],
        }
        if e.dense.checkpoint is not None:
            config["dense"]["digest"] = short_digest(e.dense.checkpoint)
        if step is not None:
            # what a step leaves open says nothing, so that results from before a setting came remain valid
            newer = {
                "activations": None,
                "repair": None,
                "minutes": None,
                "rounds": 1,
            }  # older results do not have these
            asked = {key: value for key, value in dataclasses.asdict(step).items() if newer.get(key, ...) != value}
            config |= {"prune": asked, "calibration": e.calibration}
        if seed is not None:
            config |= {"finetune": dataclasses.asdict(e.finetune), "seed": seed}
        return dict(json.loads(json.dumps(config)))

    def _record(self, stem: str) -> Path:
        return self.out / "results" / f"{stem}.json"

    def _checkpoint(self, stem: str) -> Path:
        return self.out / f"{stem}.safetensors"

    def _training_file(self, stem: str, config: dict[str, Any]) -> Path:
        """Where an interrupted training waits. Other settings have another name, so they never meet."""
        key = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
        return self.out / "training" / f"{stem}-{key}.safetensors"

    def _finished(self, stem: str, config: dict[str, Any]) -> Result | None:
        if not self._record(stem).is_file() or not self._checkpoint(stem).is_file():
            return None
        values = read_json(self._record(stem))
        ours = values.get("kind") == KIND and values.get("config") == config
        return Result.from_dict(values) if ours else None

    def _keep(self, stem: str, result: Result, model: nn.Module, plan: Plan | None, recipe: Recipe | None) -> None:
        """Write the files of a step that is finished."""
        side, config = result.measured, result.config
        metrics = {"accuracy": side.accuracy, "params": side.params, "macs": side.macs}
        about = self._about(config)
        hap.save(self._checkpoint(stem), model, plan, recipe=recipe, metrics=metrics, about=about)
        write_json(self._record(stem), result.to_dict())
        self._training_file(stem, config).unlink(missing_ok=True)

    def _open(self, stem: str) -> nn.Module:
        return open_checkpoint(self._checkpoint(stem), self.experiment.model)[0].to(self.device)

    def _about(self, config: dict[str, Any]) -> dict[str, Any]:
        return {**describe_network(self.experiment.model, self.data), "settings": config}

    def _result(
        self,
        config: dict[str, Any],
        history: History,
        dense: Measured,
        pruned: Measured | None = None,
        step: PruneStep | None = None,
        one_shot: float | None = None,
    ) -> Result:
        made = provenance()
        return Result(
            name=step.name if step else "Dense",
            seed=config.get("seed", config["dense_seed"]),
            config=config,
            criterion=step.criterion if step else None,
            budget=step.budget().given if step else None,
            dense=dense,
            pruned=pruned,
            one_shot=one_shot,
            test_images=len(self.data.test),
            curve=history.to_dict(),
            seconds=sum(history.seconds),
            **{**made, "hardware": {"device": self.device.type, **made["hardware"]}},
        )


def _stem(step: PruneStep, seed: int) -> str:
    """The name of the files of a fine-tuned network."""
    return f"{step.slug}-seed{seed}"


def _records(experiment: Experiment) -> list[str]:
    """The names of the result files of an experiment."""
    stems = ["dense"]
    for step in experiment.prune:
        stems += [*(_stem(step, seed) for seed in experiment.seeds), f"{step.slug}-sensitivity"]
    return [*stems, "probes"] if experiment.probes else stems


def remove_results(experiment: Experiment) -> None:
    """Remove what a run of this experiment leaves, and nothing else."""
    out = Path(experiment.out)
    files = [out / INDEX, out / "report.html", out / "summary.png"]
    for stem in (*_records(experiment), "probes", *(f"{step.slug}-pruned" for step in experiment.prune)):
        files += [out / f"{stem}.safetensors", out / "results" / f"{stem}.json"]
        files += out.glob(f"training/{stem}-????????.safetensors")
    for path in files:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise HapError(f"cannot remove {path}: {error.strerror or error}") from error


def short_digest(path: str | Path) -> str:
    """A fingerprint of a file's content."""
    return file_digest(path)[:16]
