"""refit_: every layer of a pruned model solved anew, one after the other, against the dense one. No training."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from hap.errors import HapError
from hap.execution.calling import eval_mode
from hap.execution.gram_regression import pairs
from hap.execution.input_checks import outside_inference
from hap.planning.plan import Plan
from hap.refit.calibration import Calibration
from hap.refit.fit_layer import RIDGES, RefittedLayer, fit_layer
from hap.refit.parameters import LayerParameters
from hap.surgery.cut import cut_tensors
from hap.surgery.rotate_heads import restore_, rotate_
from hap.utils import distributed
from hap.utils.module_tree import named_tensors

MOST_ROWS = 65536


@dataclass(frozen=True)
class Refit:
    """What `refit_` did: to each layer, and to the outputs on samples held out, by relative squared errors.

    `left` names layers that it cannot solve, with the reason. `undone`: the outputs were no better in the end, so that
    all weights are as before.
    """

    layers: tuple[RefittedLayer, ...]
    left: dict[str, str]
    before: float
    after: float
    undone: bool

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self.layers), default=5)
        lines = [f"{'layer':<{width}}  error before  after"]
        for layer in self.layers:
            kept = "  old weights kept" if layer.ridge is None else ""
            lines.append(f"{layer.name:<{width}}  {layer.before:>12.4f}  {layer.after:.4f}{kept}")
        lines += [f"not refitted: {name} ({why})" for name, why in self.left.items()]
        lines.append(f"outputs: error {self.before:.4f} -> {self.after:.4f}" + ", all undone" * self.undone)
        return "\n".join(lines)


def refit_(
    pruned: nn.Module,
    dense: nn.Module,
    batches: Iterable[Any],
    plan: Plan,
    *,
    ridges: Sequence[float] = RIDGES,
    rectified: int = 2,
    most_rows: int = MOST_ROWS,
    progress: bool | None = None,
) -> Refit:
    """Solve every layer of a pruned model anew, so that it computes what the dense model does at its place.

    Layers are solved in the order in which data flows, by least squares, given what the pruned model really feeds
    them. Where branches add up, the last layer of a branch is asked for the dense sum less what the other branches
    bring, so that errors are repaired block by block. This is equation 10 of the paper with the true inputs. A quarter
    of the samples is held out: a layer keeps its old weights where the new ones are no better there, and all is undone
    where the outputs are not.

    Arguments:
        pruned: the model as `apply_` left it, before any training. It is changed in place.
        dense: the model that it was made from, as it was before `apply_`.
        batches: an iterable of (input, target); targets are not looked at. A thousand samples do.
        plan: what `apply_` carried out.
        ridges: pulls towards the old weights to choose from, by what is held out. Times the mean square of an input.
        rectified: how often layers before a ReLU are solved again, for what the ReLU lets through.
        most_rows: how many positions of a layer's result are looked at, drawn at random.
        progress: whether to show a bar; None where stderr is a terminal.

    Returns:
        A report; `print` shows each layer's error on the samples held out, and which layers could not be solved.

    >>> import copy
    >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).eval()
    >>> dense = copy.deepcopy(net)
    >>> plan = hap.prune_(net, torch.randn(2, 4), criterion="magnitude", flops=0.5)
    >>> report = hap.refit_(net, dense, [(torch.randn(256, 4), None)], plan)
    >>> report.after < report.before
    True
    """
    how: dict[str, Any] = {"ridges": ridges, "rectified": rectified, "most_rows": most_rows, "progress": progress}
    with outside_inference(pruned), torch.no_grad(), _rotated(dense, plan):
        check_pair(pruned, dense, plan)
        return refit_layers_(pruned, dense, batches, plan, **how)


def refit_layers_(
    pruned: nn.Module,
    dense: nn.Module,
    batches: Iterable[Any],
    plan: Plan,
    *,
    ridges: Sequence[float] = RIDGES,
    rectified: int = 2,
    most_rows: int = MOST_ROWS,
    progress: bool | None = None,
) -> Refit:
    """`refit_` from whatever values the pruned model has, such as those of an earlier refit."""
    show = sys.stderr.isatty() if progress is None else progress
    with outside_inference(pruned), torch.no_grad(), eval_mode(pruned), eval_mode(dense):
        inputs = [x for x, _ in pairs(batches, next(pruned.parameters()).device)]
        calibration = Calibration(pruned, dense, plan, inputs, most_rows)
        old = {name: tensor.detach().clone() for name, tensor in named_tensors(pruned).items()}
        outputs = calibration.outputs_before()
        found = []
        with _undone_on_failure(pruned, old):
            for layer in track(calibration.work.layers, "refit", console=Console(stderr=True), disable=not show):
                parameters = LayerParameters(layer, calibration.passes[0].graphs[0])
                found.append(fit_layer(parameters, *calibration.rows(layer, parameters), ridges, rectified))
                calibration.done(layer)
            wanted = calibration.outputs(of_dense=True)
            before, after = (_relative(these, wanted) for these in (outputs, calibration.outputs(of_dense=False)))
        if undone := not after <= before:
            _undo_(pruned, old)
    return Refit(tuple(found), calibration.work.left, before, before if undone else after, undone)


def _undo_(pruned: nn.Module, old: dict[str, Tensor]) -> None:
    for name, tensor in named_tensors(pruned).items():
        tensor.data.copy_(old[name])


@contextmanager
def _undone_on_failure(pruned: nn.Module, old: dict[str, Tensor]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        _undo_(pruned, old)
        raise


@contextmanager
def _rotated(dense: nn.Module, plan: Plan) -> Iterator[None]:
    """Inside, heads that the plan narrows are written in the basis of which it keeps a part."""
    before = rotate_(dense, plan.turns)
    try:
        yield
    finally:
        restore_(dense, before)


def _relative(outputs: list[Tensor], wanted: list[Tensor]) -> float:
    """The squared difference of two lists of outputs, relative to the second, over all processes."""
    pairs = [(a, b) for a, b in zip(outputs, wanted, strict=True) if a.shape == b.shape]
    sums = [
        sum((t.square().sum() for t in some), torch.zeros((), dtype=torch.float64))
        for some in ([a - b for a, b in pairs], [b for _, b in pairs])
    ]
    distributed.sum_(sums)
    return float(sums[0] / sums[1]) if sums[1] else float(sums[0])


def check_pair(pruned: nn.Module, dense: nn.Module, plan: Plan) -> None:
    """Refuse a dense model that the plan was not made for, and a pruned one that is not what the plan leaves of it."""
    try:
        plan.check_fits(dense)
    except HapError as error:
        raise HapError(f"dense is not the model that was pruned: {error}") from error
    whole, own = named_tensors(dense), named_tensors(pruned)
    shorter = {id(whole[name]): tensor for name, tensor in cut_tensors(dense, plan).items()}
    for name, tensor in ((name, shorter.get(id(tensor), tensor)) for name, tensor in whole.items()):
        if name not in own or own[name].shape != tensor.shape:
            raise HapError(f"{name} of the pruned model is not what the plan leaves: was it made by another plan?")
        if not torch.equal(own[name], tensor):
            raise HapError(
                f"{name} of the pruned model has other values than the plan leaves of the dense one: refit_ starts "
                "from a model as apply_ left it, before any training, and the dense model that it was made from"
            )
