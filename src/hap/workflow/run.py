"""Carrying out an experiment, step by step. A finished step leaves files and is not done again."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
from hap.training.recipes import Recipe
from hap.utils.atomic_files import digest as file_digest
from hap.utils.atomic_files import write_json
from hap.workflow.config import Experiment, PruneStep
from hap.workflow.networks import (
    check_reads,
    describe_network,
    load_data,
    measure_networks,
    new_network,
    open_checkpoint,
    same_settings,
)
from hap.workflow.results import INDEX, KIND, Measured, Result, origin, read_json, write_result
from hap.workflow.steps import note_if_fewer_images, probe_record, prune_step, score_step, sensitivity_record

PROBE_IMAGES = 64


class Console:
    """What an experiment tells while it runs; this one keeps silent."""

    progress = False

    def step(self, text: str) -> None:
        """A step begins."""

    def skipped(self, text: str) -> None:
        """A step was finished before."""

    def status(self, text: str) -> AbstractContextManager[Callable[[str], None]]:
        """Work without a bar of its own; the function inside says what it is doing."""
        return nullcontext(lambda _: None)


def run(experiment: Experiment, device: torch.device, console: Console | None = None) -> list[Result]:
    """Carry out what is not done yet and return all results: the dense network's, then one per way and seed.

    A step is finished when its files are there and were made with the settings asked for now; others are done again.
    """
    with with_threads(experiment.threads or torch.get_num_threads()):
        return _Runner(experiment, device, console or Console()).run()


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
        write_json(self.out / INDEX, {"kind": "hap-experiment", "format": 1, "files": self._records()})
        return results

    def _records(self) -> list[str]:
        """The result files of this experiment, so that a report leaves out what an earlier one left here."""
        steps, seeds = self.experiment.prune, self.experiment.seeds
        files = [self.out / "results" / "dense.json"]
        for step in steps:
            files += [self._paths(step, seed)[0] for seed in seeds]
            files.append(self.out / "results" / f"{step.slug}-sensitivity.json")
        files += [self.out / "results" / "probes.json"] if self.experiment.probes else []
        return [path.relative_to(self.out).as_posix() for path in files]

    # ---- the dense network ----------------------------------------------------------------------------------

    def _dense(self) -> tuple[nn.Module, Result]:
        config = self._config()
        path, record = self.out / "dense.safetensors", self.out / "results" / "dense.json"
        done = self._finished(record, path, config)
        if done is not None:
            self.console.skipped("dense network")
            return self._open(path), done
        model, history, recipe = self._trained_dense(config)
        with self.console.status("evaluating the dense network"):
            accuracy = hap.evaluate(model, self.data).accuracy
            (side,) = measure_networks((model, accuracy), data=self.data)
        result = self._result("Dense", self.experiment.seeds[0], config, side, None, None, history)
        self._save(path, model, None, recipe, side, config)
        write_result(record, result)
        self._training_file("dense", config).unlink(missing_ok=True)
        return model, result

    def _trained_dense(self, config: dict[str, Any]) -> tuple[nn.Module, History, Recipe | None]:
        step, seed = self.experiment.dense, self.experiment.seeds[0]
        if step.checkpoint is not None:
            self.console.step(f"dense network from {step.checkpoint}")
            model, found, _ = open_checkpoint(step.checkpoint, self.experiment.model)
            if found.plan is not None:
                raise HapError(f"{step.checkpoint} is pruned already; [dense] needs a dense checkpoint")
            model = model.to(self.device)
            check_reads(model, self.data, self.experiment.model)
            return model, History(), None
        self.console.step(f"dense network: train {self.experiment.model} on {self.data.name}")
        model = new_network(self.experiment.model, self.data.classes, seed).to(self.device)
        check_reads(model, self.data, self.experiment.model)
        recipe = step.make(seed)
        return model, self._train(model, recipe, None, "dense", config), recipe

    # ---- one way to prune -----------------------------------------------------------------------------------

    def _one_way(self, dense: nn.Module, first: Result, step: PruneStep) -> list[Result]:
        results: dict[int, Result] = {}
        for seed in self.experiment.seeds:
            record, path = self._paths(step, seed)
            done = self._finished(record, path, self._config(step, seed))
            if done is not None:
                results[seed] = done
        if missing := [s for s in self.experiment.seeds if s not in results]:
            pruned, plan, one_shot = self._pruned(dense, step)
            for seed in missing:
                results[seed] = self._finetuned(dense, first, copy.deepcopy(pruned), plan, one_shot, step, seed)
        else:
            self.console.skipped(step.name)
        return [results[seed] for seed in self.experiment.seeds]

    def _pruned(self, dense: nn.Module, step: PruneStep) -> tuple[nn.Module, Plan, float]:
        config = self._config(step)
        path = self.out / f"{step.slug}-pruned.safetensors"
        found = _read_if_there(path)
        if found is not None and found.plan is not None and same_settings(found.about.get("settings"), config):
            self.console.skipped(f"{step.name}: pruned network")
            return self._open(path), found.plan, float(found.metrics["accuracy"])
        budget = " and ".join(f"{share:.0%} of {kind}" for kind, share in step.budget().given.items())
        self.console.step(f"{step.name}: prune to {budget}")
        model, count, seed = copy.deepcopy(dense), self.experiment.calibration, self.experiment.seeds[0]
        with self.console.status(step.name) as say:
            key = json.dumps([step.criterion, step.probes, step.coupling])
            if key not in self.scored:
                self.scored[key] = score_step(dense, self.data, step, count, seed, say)
            groups, scores = self.scored[key]
            plan = prune_step(model, self.data, step, groups, scores, count, seed, say)
            accuracy = hap.evaluate(model, self.data).accuracy
        picture = sensitivity_record(step.name, scores, plan, step.criterion)
        write_json(self.out / "results" / f"{step.slug}-sensitivity.json", picture)
        metrics = {"accuracy": accuracy}
        hap.save(path, model, plan, metrics=metrics, about=self._about(config))
        return model, plan, accuracy

    def _finetuned(
        self, dense: nn.Module, first: Result, model: nn.Module, plan: Plan, one_shot: float, step: PruneStep, seed: int
    ) -> Result:
        config = self._config(step, seed)
        record, path = self._paths(step, seed)
        many = f", seed {seed}" if len(self.experiment.seeds) > 1 else ""
        self.console.step(f"{step.name}: fine-tune{many}")
        recipe = self.experiment.finetune.make(seed)
        teacher = dense if self.experiment.finetune.teacher else None
        history = self._train(model, recipe, teacher, record.stem, config)
        with self.console.status("measuring"):
            accuracy = hap.evaluate(model, self.data).accuracy
            sides = measure_networks((dense, first.dense.accuracy), (model, accuracy), data=self.data)
        result = self._result(step.name, seed, config, sides[0], sides[1], one_shot, history, step)
        self._save(path, model, plan, recipe, sides[1], config)
        write_result(record, result)
        self._training_file(record.stem, config).unlink(missing_ok=True)
        return result

    def _probes(self, dense: nn.Module) -> None:
        probes, path = self.experiment.probes, self.out / "results" / "probes.json"
        config = {**self._config(), "probes": probes}
        if not probes or (path.is_file() and same_settings(read_json(path).get("config"), config)):
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
            asked = {key: value for key, value in dataclasses.asdict(step).items() if key != "activations" or value}
            config |= {"prune": asked, "calibration": e.calibration}
        if seed is not None:
            config |= {"finetune": dataclasses.asdict(e.finetune), "seed": seed}
        return dict(json.loads(json.dumps(config)))

    def _paths(self, step: PruneStep, seed: int) -> tuple[Path, Path]:
        name = f"{step.slug}-seed{seed}"
        return self.out / "results" / f"{name}.json", self.out / f"{name}.safetensors"

    def _training_file(self, name: str, config: dict[str, Any]) -> Path:
        """Where an interrupted training waits. Other settings have another name, so they never meet."""
        key = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
        return self.out / "training" / f"{name}-{key}.safetensors"

    def _finished(self, record: Path, checkpoint: Path, config: dict[str, Any]) -> Result | None:
        if not record.is_file() or not checkpoint.is_file():
            return None
        values = read_json(record)
        if values.get("kind") != KIND or not same_settings(values.get("config"), config):
            return None
        return Result.from_dict(values)

    def _train(
        self, model: nn.Module, recipe: Recipe, teacher: nn.Module | None, name: str, config: dict[str, Any]
    ) -> History:
        path = self._training_file(name, config)
        return hap.train(model, self.data, recipe, teacher=teacher, checkpoint=path, progress=self.console.progress)

    def _open(self, path: Path) -> nn.Module:
        return open_checkpoint(path, self.experiment.model)[0].to(self.device)

    def _about(self, config: dict[str, Any]) -> dict[str, Any]:
        return {**describe_network(self.experiment.model, self.data), "settings": config}

    def _save(
        self,
        path: Path,
        model: nn.Module,
        plan: Plan | None,
        recipe: Recipe | None,
        side: Measured,
        config: dict[str, Any],
    ) -> None:
        metrics = {"accuracy": side.accuracy, "params": side.params, "macs": side.macs}
        hap.save(path, model, plan, recipe=recipe, metrics=metrics, about=self._about(config))

    def _result(
        self,
        name: str,
        seed: int,
        config: dict[str, Any],
        dense: Measured,
        pruned: Measured | None,
        one_shot: float | None,
        history: History,
        step: PruneStep | None = None,
    ) -> Result:
        budget = step.budget().given if step else None
        return Result(
            name,
            seed,
            config,
            step.criterion if step else None,
            budget,
            dense,
            pruned,
            one_shot,
            len(self.data.test),
            history.to_dict(),
            sum(history.seconds),
            **origin(self.device),
        )


def remove_results(experiment: Experiment) -> None:
    """Remove what a run of this experiment leaves, and nothing else."""
    out = Path(experiment.out)
    names = ["dense", *(f"{step.slug}-seed{seed}" for step in experiment.prune for seed in experiment.seeds)]
    pictures = [f"{step.slug}-sensitivity" for step in experiment.prune]
    files = [out / INDEX, out / "report.html", out / "summary.png"]
    files += [out / f"{name}.safetensors" for name in [*names, *(f"{step.slug}-pruned" for step in experiment.prune)]]
    files += [out / "results" / f"{name}.json" for name in [*names, *pictures, "probes"]]
    files += [path for name in names for path in out.glob(f"training/{name}-????????.safetensors")]
    for path in files:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise HapError(f"cannot remove {path}: {error.strerror or error}") from error


def short_digest(path: str | Path) -> str:
    """A fingerprint of a file's content."""
    return file_digest(path)[:16]


def _read_if_there(path: Path) -> Any:
    return hap.read(path) if path.is_file() else None
