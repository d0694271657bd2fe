"""What an experiment is made of, and how it is read from TOML. Everything is checked before any work begins."""

import dataclasses
import inspect
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from hap.errors import Argument, HapError
from hap.implants import KINDS, Implant, implant_from_dict
from hap.planning.budget import Budget, Limits
from hap.pruning.prune_in_rounds import check_rounds
from hap.pruning.repair import check_repair, repair_asked
from hap.scoring import Criterion, HessianTrace, as_criterion
from hap.training import recipes
from hap.training.recipes import Recipe

DISTILL = 0.7
"""The weight of a teacher's word where neither the recipe nor the caller sets one."""


@dataclass(frozen=True)
class PruneStep:
    """One way to prune: a criterion, a budget (fractions LEFT, all of which hold), and how far it may go.

    `implant` is the share of the removed units to replace. `probes` asks for the Hessian's trace by that many random
    probes instead of exactly. `leave` holds patterns of layers not to touch.
    """

    name: str
    criterion: str = "hessian"
    params: float | None = None
    flops: float | None = None
    channels: float | None = None
    implant: float = 0.0
    implant_kind: str = "Pointwise"
    implant_init: str | None = None
    coupling: str = "joint"
    probes: int | None = None
    per_layer: float = 0.95
    round_to: int = 1
    leave: tuple[str, ...] = ()
    per_cost: bool = False
    compensate: bool = False
    activations: float | None = None
    repair: str | None = None
    minutes: float | None = None
    rounds: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "leave", tuple(self.leave))
        if self.coupling not in ("joint", "union"):
            seen = Argument("coupling", self.coupling, text="coupling")
            raise HapError(seen, f" is {self.coupling!r}; expected 'joint' or 'union'")
        check_repair(self.repair_name, ())
        self.budget(), self.limits(), self.make_criterion()
        check_rounds(self.rounds, None, self.make_implant())

    @property
    def repair_name(self) -> str | None:
        """What mends the pruned network without labels."""
        return repair_asked(self.repair, self.compensate, self.minutes)

    def budget(self) -> Budget:
        return Budget(self.params, self.flops, self.channels, activations=self.activations)

    def limits(self) -> Limits:
        return Limits(per_layer=self.per_layer, round_to=self.round_to, leave=self.leave)

    def make_implant(self) -> Implant | None:
        kinds = [name for name, kind in KINDS.items() if not kind.needs_head_spaces]
        if self.implant_kind not in kinds:
            seen = Argument("implant_kind", self.implant_kind, text="implant kind")
            raise HapError(seen, f" is {self.implant_kind!r}; expected one of {', '.join(kinds)}")
        if not self.implant:
            return None
        init = {} if self.implant_init is None else {"init": self.implant_init}
        return implant_from_dict({"kind": self.implant_kind, "ratio": self.implant, **init})

    def make_criterion(self, seed: int = 0) -> Criterion:
        """The criterion by name, with the probes asked for and, where it draws at random, the seed."""
        criterion = as_criterion(self.criterion)
        if self.probes is not None:
            if not isinstance(criterion, HessianTrace):
                raise HapError(f"probes are for criterion 'hessian', not for {self.criterion!r}")
            criterion = HessianTrace(method="hutchinson", probes=self.probes)
        seeded = any(f.name == "seed" for f in dataclasses.fields(criterion))
        return dataclasses.replace(criterion, seed=seed) if seeded else criterion  # type: ignore[call-arg]

    @property
    def slug(self) -> str:
        """The name as a file name."""
        return re.sub(r"[^a-z0-9.]+", "-", self.name.lower()).strip("-.") or "prune"


@dataclass(frozen=True)
class DenseStep:
    """The dense network: trained by a recipe (its name and the fields to replace), or read from a checkpoint."""

    recipe: str | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None

    def __post_init__(self) -> None:
        if (self.recipe is None) == (self.checkpoint is None):
            raise HapError("[dense] needs either a recipe to train by or a checkpoint to start from")
        if self.checkpoint is not None and self.changes:
            raise HapError(f"[dense] has a checkpoint, so {next(iter(self.changes))!r} has no effect; remove one")

    def make(self, seed: int) -> Recipe:
        assert self.recipe is not None
        return recipes.get(self.recipe, **self.changes, seed=seed)


@dataclass(frozen=True)
class FinetuneStep:
    """How the pruned networks are fine-tuned; with `teacher` the dense one guides them."""

    recipe: str
    changes: dict[str, Any] = field(default_factory=dict)
    teacher: bool = False

    def make(self, seed: int) -> Recipe:
        return taught(recipes.get(self.recipe, **self.changes, seed=seed), self.teacher)


def taught(recipe: Recipe, teacher: bool, distill: float | None = None) -> Recipe:
    """The recipe with the weight `distill` of a teacher, if there is one: its own if that is None, else `DISTILL`."""
    if distill is None:
        distill = recipe.distill or DISTILL
    return dataclasses.replace(recipe, distill=distill if teacher else 0.0)


@dataclass(frozen=True)
class Experiment:
    """A dense network, ways to prune it, and one fine-tuning, which is done once for every seed.

    `calibration` images score the units; with `probes`, that many Hutchinson probes are drawn for the report's
    picture of how the estimate settles. `threads` is the number of CPU threads; 0 leaves torch its choice.
    """

    model: str
    data: str
    out: str
    dense: DenseStep
    finetune: FinetuneStep
    prune: tuple[PruneStep, ...]
    seeds: tuple[int, ...] = (0,)
    calibration: int = 512
    probes: int = 0
    threads: int = 0

    def __post_init__(self) -> None:
        if not self.prune:
            raise HapError("there is nothing to prune: add at least one [[prune]] entry")
        slugs = [step.slug for step in self.prune]
        if twice := [p.name for p in self.prune if slugs.count(p.slug) > 1 or p.slug == "dense"]:
            raise HapError(f"the name {twice[0]!r} of a [[prune]] entry is taken; give each its own")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise HapError(f"seeds are {list(self.seeds)}; expected at least one, each once")
        if self.calibration < 1:
            raise HapError(f"calibration is {self.calibration}; expected at least 1 image to score on")
        if self.threads < 0:
            raise HapError(f"threads is {self.threads}; expected 0 for torch's choice, or at least 1")
        if self.probes and self.probes < 2:
            raise HapError(f"probes is {self.probes}; expected 0 for none, or at least 2")
        self.finetune.make(self.seeds[0])
        if self.dense.recipe is not None:
            self.dense.make(self.seeds[0])


def read_config(path: str | Path) -> Experiment:
    """An experiment from a TOML file; see docs/command-line.md for its keys."""
    path = Path(path)
    if not path.is_file():
        raise HapError(f"there is no file {path}")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HapError(f"{path} is not valid TOML: {error}") from error
    try:
        return from_values(values)
    except HapError as error:
        raise HapError(f"{path}: ", error) from error


def from_values(values: Mapping[str, Any]) -> Experiment:
    """An experiment from nested tables of plain values."""
    top = _checked("at the top level", values, Experiment, get_type_hints(Experiment))
    steps = {
        "dense": _with_changes("in [dense]", top["dense"], DenseStep),
        "finetune": _with_changes("in [finetune]", top["finetune"], FinetuneStep),
        "prune": tuple(_prune(i, table) for i, table in enumerate(top["prune"], 1)),
        "seeds": tuple(top.get("seeds", (0,))),
    }
    return Experiment(**{**top, **steps})


def _prune(number: int, table: Mapping[str, Any]) -> PruneStep:
    where = f"[[prune]] entry {number}"
    known = _checked(f"in {where}", table, PruneStep, get_type_hints(PruneStep))
    try:
        return PruneStep(**known)
    except HapError as error:
        raise HapError(f"{where} ({known['name']!r}): ", error) from error


def _with_changes(where: str, table: Mapping[str, Any], kind: type[Any]) -> Any:
    """A step whose table mixes its own keys with recipe fields to replace."""
    own, fields = get_type_hints(kind), get_type_hints(Recipe)
    del own["changes"], fields["seed"]
    known = _checked(where, table, kind, own | fields)
    changes = {key: known.pop(key) for key in list(known) if key not in own}
    return kind(**known, changes=changes)


def _checked(where: str, table: Mapping[str, Any], kind: type[Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The table, if it holds known keys with values of the right kind only, and all that a `kind` cannot do without."""
    for key, value in table.items():
        if key not in known:
            raise HapError(f"unknown key {key!r} {where}; known keys: {', '.join(known)}")
        if not _fits(value, known[key]):
            words = "a list" if get_origin(known[key]) is tuple else _PLAIN.get(_plain(known[key]), "a table")
            raise HapError(f"{key} is {value!r} {where}; expected {words}")
    for parameter in inspect.signature(kind).parameters.values():
        if parameter.default is parameter.empty and parameter.name not in table:
            raise HapError(f"{parameter.name!r} is missing {where}")
    return dict(table)


_PLAIN = {str: "text", float: "a number", int: "a whole number", bool: "true or false"}
"""Kinds of plain values, in words. All others are tables."""


def _plain(hint: Any) -> Any:
    """The kind of value of a field that may also be None."""
    return get_args(hint)[0] if isinstance(hint, UnionType) else hint


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is tuple:
        return isinstance(value, list | tuple) and all(_fits(v, get_args(hint)[0]) for v in value)
    kind = _plain(hint)
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind is float:
        return isinstance(value, int | float)
    return isinstance(value, kind if kind in _PLAIN else dict)
