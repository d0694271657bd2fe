"""The steps between checkpoints, shared by the commands and by experiments: score and prune."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from hap.data import Batch, Data
from hap.errors import HapError
from hap.groups.groups import Groups
from hap.planning.order import Order
from hap.planning.plan import Plan
from hap.pruning.plan_for_drop import reach
from hap.pruning.prune_in_rounds import Choice
from hap.pruning.repair import apply_with_repair_
from hap.scoring import HessianTrace, Scores, ScoringContext
from hap.training.evaluation import device_of
from hap.utils import distributed
from hap.workflow.config import PruneStep
from hap.workflow.networks import first_images

Say = Callable[[str], None]
"""How a step tells what it is doing."""


def calibration(data: Data, model: nn.Module, count: int, seed: int) -> list[Batch]:
    """Training images to score on, where the model is; fewer where the data has fewer."""
    return data.to(device_of(model)).calibration(min(count, len(data.train)), seed)


def note_if_fewer_images(data: Data, count: int) -> str | None:
    """What to tell where the data has fewer training images than asked for to score on."""
    found = len(data.train)
    return f"{data.name} has {found} training images, not {count}: all of them are used" if found < count else None


@dataclass(frozen=True)
class Work:
    """A network to score and prune by a step: so many `images` of its data score it, which `seed` draws.

    With `stream` the residual stream of a transformer is traced too, and groups that match `ignore` are left alone.
    `say` is told what is being done.
    """

    model: nn.Module
    data: Data
    step: PruneStep
    images: int
    seed: int
    say: Say = lambda _: None
    stream: bool = False
    ignore: tuple[str, ...] = ()

    def batches(self) -> list[Batch]:
        return calibration(self.data, self.model, self.images, self.seed)

    def held_out(self, count: int) -> list[Batch]:
        """At most so many training images beside those that `batches` has."""
        drawn = calibration(self.data, self.model, self.images + count, self.seed)
        x, y = (torch.cat(parts)[self.images :] for parts in zip(*drawn, strict=True))
        if not len(y):
            raise HapError(
                f"{self.data.name} has {len(self.data.train)} training images, and all are scored on; ask "
                "for fewer with --calibration, so that some are left to measure accuracy on"
            )
        return list(zip(x.split(100), y.split(100), strict=True))

    def trace(self) -> Groups:
        self.say("tracing which channels belong together")
        images = first_images(self.data, near=self.model)
        return hap.trace(self.model, images, self.step.coupling, self.ignore, stream=self.stream)

    def score(self) -> tuple[Groups, Scores]:
        """Trace the model and score its units."""
        batches, criterion = self.batches(), self.step.make_criterion(self.seed)
        groups = self.trace()
        self.say(f"scoring {groups.units} units by {self.step.criterion} on {sum(len(y) for _, y in batches)} images")
        return groups, hap.score(self.model, groups, distributed.shard(batches), F.cross_entropy, criterion)

    def order(self, scores: Scores) -> Order:
        """What goes first by these scores, which `score` returned."""
        choices = {"per_cost": self.step.per_cost, "coupling": self.step.coupling, "stream": self.stream}
        return Order.of(scores, self.step.make_criterion(self.seed), **choices)

    def known(self, order: Order) -> tuple[Groups, Scores]:
        """Trace the model, and take its scores from an order of it."""
        groups = self.trace()
        return groups, order.scores_for(groups)

    def choice(self, groups: Groups, scores: Scores) -> Choice:
        """How the units that go are chosen, where scores may be taken anew."""
        images, step = first_images(self.data, near=self.model), self.step
        how = step.make_criterion(self.seed), step.make_implant(), step.limits(), step.per_cost
        return Choice(self.model, groups, images, self.batches(), F.cross_entropy, *how, known=scores)

    def prune(self, groups: Groups, scores: Scores) -> Plan:
        """Plan and apply, in place."""
        if self.step.rounds > 1:
            self.say(f"pruning a copy in {self.step.rounds} rounds, each scored anew")
            given = self.step.budget(), self.step.rounds, self.step.repair_name
            plan, network = reach(self.choice(groups, scores), *given)
            self.apply(plan, network)
            return plan
        self.say("planning")
        how = self.step.budget(), self.step.make_implant(), self.step.limits()
        text = distributed.from_first(lambda: hap.plan(groups, scores, *how, per_cost=self.step.per_cost).to_json())
        plan = Plan.from_json(text)
        self.apply(plan)
        return plan

    def apply(self, plan: Plan, repaired: nn.Module | None = None) -> None:
        """Apply a plan, in place, with the repair that the step asks for, or with what is repaired already."""
        images, repair = first_images(self.data, near=self.model), self.step.repair_name
        self.say(f"pruning, and checking the result by running it{f'; then {repair}' if repair else ''}")
        augment = self.data.augment if self.data.pad or self.data.flip else None
        how = repair, self.step.minutes, augment, repaired
        apply_with_repair_(self.model, plan, images, True, self.batches(), *how)
        distributed.broadcast_(self.model)


def sensitivity_record(name: str, scores: Scores, plan: Plan, criterion: str) -> dict[str, Any]:
    """Scores and what became of each unit: the report's picture of sensitivity per channel."""
    layers = {}
    for layer, values in scores.items():
        fate = ["removed"] * len(values)
        for word, part in (("kept", plan.kept), ("implanted", plan.implanted)):
            for unit in part[layer]:
                fate[unit] = word
        layers[layer] = {"scores": values.tolist(), "fate": fate}
    return {"kind": "hap-sensitivity", "format": 1, "name": name, "criterion": criterion, "layers": layers}


def probe_record(model: nn.Module, data: Data, probes: int, images: int, seed: int) -> dict[str, Any]:
    """How Hutchinson's estimate of a few scores settles with the number of probes, beside the exact values."""
    batches = calibration(data, model, images, seed)
    groups = hap.trace(model, first_images(data, near=model))
    problem = ScoringContext(model, groups, batches, F.cross_entropy)
    try:
        exact = hap.score(model, groups, batches, F.cross_entropy, HessianTrace(method="exact"))
    except HapError:  # the network is not piecewise linear: there is no exact value to hold the estimate against
        exact = None
    names = [(layer, unit) for layer, group in groups.items() for unit in range(len(group))]
    samples = HessianTrace(method="hutchinson", probes=probes, seed=seed).estimates(problem)
    positions = _spread(samples.sum(0) if exact is None else torch.cat(list(exact.values())))
    seen = [samples[:count, positions] for count in range(1, probes + 1)]
    means = [some.mean(0).tolist() for some in seen]
    errors = [[None] * len(positions), *((some.std(0) / len(some) ** 0.5).tolist() for some in seen[1:])]
    channels = []
    for place, position in enumerate(positions):
        layer, unit = names[position]
        value = None if exact is None else float(exact[layer][unit])
        mean, error = ([row[place] for row in rows] for rows in (means, errors))
        channels.append({"layer": layer, "unit": unit, "exact": value, "mean": mean, "error": error})
    return {
        "kind": "hap-probes",
        "format": 1,
        "probes": probes,
        "images": sum(len(y) for _, y in batches),
        "channels": channels,
    }


def _spread(values: Tensor, shares: tuple[float, ...] = (0.35, 0.6, 0.8, 0.99)) -> list[int]:
    """Units from the insensitive to the most sensitive ones."""
    order = values.argsort().tolist()
    return list(dict.fromkeys(order[round(share * (len(order) - 1))] for share in shares))
