"""Branches that run in training alone, such as the auxiliary classifiers of GoogLeNet.

A model is captured as it is evaluated, and so its graph does not show what such a branch reads. Parameters that no node
of the graph reads tell that there may be one, and a run in training whether there is. Then what runs in training is
captured too, so that the branch is cut with what it reads, and a pruned copy is run in training to see.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hap.execution.calling import call_arguments, copied, seeded
from hap.execution.fast_copy import copy_with
from hap.execution.model_outputs import plain_outputs
from hap.graph.capture import Captured, captured
from hap.graph.partition import Parts
from hap.groups.groups import Groups
from hap.planning.assemble import draft
from hap.surgery.cut import cut_tensors, update_modules_
from hap.trials.removal_rounds import rounds_of
from hap.verification.comparison import in_a_line

ALONE = "it runs in training alone"
READ = "the model does not run in training without some of it"


@dataclass(frozen=True)
class TrainingOnly:
    """What a model runs in training alone, the `parameters` that this reads, and `shapes` of what is returned then."""

    model: nn.Module
    example: Any
    parameters: Set[str]
    shapes: list[tuple[int, ...]]

    def captured(self) -> Captured | None:
        """The model with these branches; None, if torch.export cannot capture that."""
        copy = _copy(self.model, {})
        own = {id(p) for name, p in copy.named_parameters() if name in self.parameters}
        training = {m for m in copy.modules() if not isinstance(m, _NormBase) and own & set(map(id, m.parameters()))}
        try:
            return captured(copy, self.example, training=training)
        except Exception:  # what runs in training may choose by value, as no graph can
            return None

    def misfits(self, groups: Groups) -> dict[str, str]:
        """The groups that cannot lose units because the model would not run in training then, and why."""
        removal = rounds_of(groups, [x.classes for x in groups.rewiring.size_attributes], set())[0][1]

        def problem(names: Sequence[str]) -> str | None:
            plan = draft(groups, {n: removal[n] for n in names})
            try:
                pruned = _copy(self.model, cut_tensors(self.model, plan))
                update_modules_(pruned, plan, {})
                shapes, _ = _run_in_training(pruned, self.example)
            except Exception as error:  # a forward that gets other sizes than it counted on may raise anything
                return in_a_line(error)
            return None if shapes == self.shapes else "it returns tensors of other shapes"

        return _misfits([n for n in groups if removal[n]], problem)


def training_only(model: nn.Module, example: Any, unread: Set[str]) -> tuple[TrainingOnly | None, Set[str]]:
    """What the model runs in training that reads some of these parameters, if it does, and those that nothing reads.

    A warning says if it does not run in training. Of a view of parts, what is in no part never runs.
    """
    if isinstance(model, Parts):
        unread = frozenset(n for n in unread if n.startswith(tuple(f"{part}." for part in model.names)))
    try:
        copy = _copy(model, {}) if unread else None
    except Exception:  # where no copy can be made no group goes, and that is said there
        copy = None
    if copy is None:
        return None, unread
    try:
        shapes, read = _run_in_training(copy, example)
    except Exception as error:  # it may want labels, or whatever else the example lacks
        first = next(name for name, _ in model.named_parameters() if name in unread)
        warnings.warn(
            f"{branch_of(model, unread, first)} does not run in evaluation but may in training, and is not cut with "
            f"what it reads there: the model does not train on the example ({in_a_line(error)}); give one that it "
            "trains on, such as with labels",
            stacklevel=6,
        )
        return None, frozenset()
    return TrainingOnly(model, example, read & unread, shapes) if read & unread else None, unread - read


def warn_of_idle(model: nn.Module, groups: Groups, unread: Set[str]) -> None:
    """Say which modules the example does not run though they may read what goes, as far as widths tell: they are not
    cut with it. Such is the head of another task, or a copy of the model that is kept beside it."""
    widths = {len(classes) for classes in groups.axes.values() if classes.any()}
    able = [n for n, p in model.named_parameters() if n in unread and p.ndim > 1 and not widths.isdisjoint(p.shape)]
    idle = list(dict.fromkeys(branch_of(model, unread, name) for name in able))
    if idle:
        those = ", ".join(idle[:3]) + (f" and {len(idle) - 3} more" if len(idle) > 3 else "")
        warnings.warn(
            f"the example does not run {those}, which {'is' if len(idle) == 1 else 'are'} not cut with what "
            f"{'it reads' if len(idle) == 1 else 'they read'}, and may no longer fit: give an example that runs all of "
            "the model, or leave out by ignore= what such modules read",
            stacklevel=6,
        )


def branch_of(model: nn.Module, parameters: Set[str], parameter: str) -> str:
    """The outermost module around a parameter that has no others than these, or else the parameter itself."""
    parts = parameter.split(".")
    for module in (".".join(parts[:n]) for n in range(1, len(parts))):
        if all(f"{module}.{name}" in parameters for name, _ in model.get_submodule(module).named_parameters()):
            return module
    return parameter


def _copy(model: nn.Module, shorter: Mapping[str, Tensor]) -> nn.Module:
    """A copy, some of it shorter, that shares nothing with the model: a forward may write to weights in training."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()} | dict(shorter)
    return copy_with(model, {name: tensor.clone() for name, tensor in tensors.items()})


def _run_in_training(model: nn.Module, example: Any) -> tuple[list[tuple[int, ...]], Set[str]]:
    """The shapes that a copy, which nobody else uses, returns, and the parameters that are read."""
    model.train()
    for module in model.modules():
        if isinstance(module, _NormBase):  # not what is asked about, and would not take a batch of one
            module.eval()
    args, kwargs = copied(call_arguments(example))
    reading = _Reading(model)
    with torch.no_grad(), seeded(), reading:
        returned = pytree.tree_leaves(plain_outputs(model(*args, **kwargs)))
    return [tuple(x.shape) for x in returned if isinstance(x, Tensor)], reading.found


class _Reading(TorchDispatchMode):
    """Notes which parameters operators read."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.update(self.names[id(x)] for x in pytree.tree_leaves((args, kwargs)) if id(x) in self.names)
        return func(*args, **(kwargs or {}))


def _misfits(names: list[str], problem: Callable[[Sequence[str]], str | None]) -> dict[str, str]:
    """Which of these to leave out, and why, so that there is no problem with the others: by halves."""
    why = problem(names) if names else None
    if why is None:
        return {}
    if len(names) == 1:
        return {names[0]: f"{READ}: {why}"}
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    found = _misfits(halves[0], problem) | _misfits(halves[1], problem)
    rest = [n for n in names if n not in found]
    if rest in ([], *halves) or (found and problem(rest) is None):  # a half that is left whole was asked about already
        return found
    return dict.fromkeys(names, f"{READ}: {why}")
