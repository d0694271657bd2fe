"""One model of another library, pruned and checked by running it, then exported."""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hap
from hap.errors import HapError
from hap.execution.calling import call_arguments, run
from hap.graph.partition import captured_parts, captures, parts, view_where_it_chooses
from hap.groups.groups import Groups
from hap.io import export
from hap.pruning import apply
from hap.surgery.cut import cut_tensors
from hap.tracing.trace import trace_captured
from hap_reproduction.zoo_sweep.clock import Clock, OutOfTime, failure, forget, reason, warm_memory
from hap_reproduction.zoo_sweep.models import build
from hap_reproduction.zoo_sweep.summary import BRIEF, TRIALS, equal, own_seconds, times_export

Record = dict[str, Any]
T = TypeVar("T")
Way = Callable[[nn.Module, Any], tuple[nn.Module, Groups]]

_WAYS: dict[str, Way] = {
    "in place": lambda model, example: (model, hap.trace(model, example)),
    "as a graph": hap.rewrite,
    "with its stream": lambda model, example: (model, hap.trace(model, example, stream=True)),
}


def measure(spec: str, flops: float, limit: float = math.inf) -> Iterator[Record]:
    """Prune one model by magnitude to a share of its FLOPs; then export it. Two records: the second says both.

    A model that torch.export cannot capture is pruned by its parts, and one that cannot be pruned that far in place as
    the graph that hap.rewrite makes of it, or else with its residual stream. The limit in seconds is on pruning, and
    then once more on exporting; what one forward and torch.export take before, alone, is only there to compare with.
    Both begin with nothing that torch.export would remember. The seconds of the executed check are among those of
    apply. A model that cannot be built took no seconds. Where it was pruned several times, the seconds are of the trial
    in the middle, by times of torch.export, and all are listed.
    """
    record, subject, inputs = _pruned(spec, flops, limit)
    trials = [record]
    while record["verified"] and own_seconds(record, limit) < BRIEF and len(trials) < TRIALS:
        record, subject, inputs = _pruned(spec, flops, limit, first=False)
        trials.append(record)
    if record["verified"] and len(trials) > 1:
        middle = sorted(trials, key=times_export)[len(trials) // 2]
        record = middle | {"trials": [trial["seconds"] for trial in trials]}
    yield record
    if record["verified"]:
        yield record | _exports(spec, subject, inputs, "parts" in record, Clock(limit))


def _pruned(spec: str, flops: float, limit: float, first: bool = True) -> tuple[Record, Any, Any]:
    """What became of a model, and the pruned one with its inputs: there is none where it was not pruned.

    The first time it is also checked at all places of large maps, where apply_ looks at some, and nobody counts that.
    """
    record: Record = {"verified": False}
    clock, alone, inside = Clock(limit), Clock(limit), Clock()
    subject: Any = None
    inputs: Any = None
    try:
        model, example = build(spec)
        warm_memory(model)
        _alone("forward", partial(run, model, example), alone)
        ways, outline = dict(_WAYS), None
        view = clock("parts", lambda: view_where_it_chooses(model, example))
        subject, inputs = (model, example) if view is None else (view, view.example)
        if not _captures_alone(subject, inputs, alone):
            clock.seconds["parts"] += alone.seconds.pop("export")  # finding out is a part of pruning
            view, captured = clock("parts", lambda: captured_parts(model, example))
            subject, ways["in place"] = view, lambda v, i: (v, trace_captured(captured, v, i, "joint", (), False))
            _captures_alone(view, view.example, alone)
        if view is not None:
            inputs, outline = view.example, _outline(run(model, example))
            record["parts"] = list(dict.fromkeys(view.names))
        else:
            clock.seconds["trace"] = clock.seconds.pop("parts")  # a look at the code
        subject, groups, plan = _planned(subject, inputs, flops, clock, record, ways)
        if first:
            apply.verify_plan(subject, plan, {}, inputs, cut_tensors(subject, plan), everywhere=True)
        with _check_timed(inside):
            clock("apply", lambda: hap.apply_(subject, plan, example=inputs))
        count = hap.cost(subject, inputs)
        record |= {
            "verified": True,
            "groups": len(groups),
            "units": groups.units,
            "exact": plan.exact,
            "params": [plan.before.params, plan.after.params],
            "macs": [plan.before.macs, plan.after.macs],
            "counted": [count.params, count.macs],
            "frozen": [f"{f.what}: {f.why}" for f in groups.frozen][:20],
        }
        if record["counted"] != [plan.after.params, plan.after.macs]:
            record |= {"verified": False, "why": "counted costs are not those planned"}
        if outline is not None and _outline(run(model, example)) != outline:
            record |= {"verified": False, "why": "the outputs of the whole model are of another kind"}
    except (Exception, OutOfTime) as error:  # whatever a foreign model raises is the record's reason
        record |= failure(error)
    record["seconds"] = alone.seconds | clock.seconds | inside.seconds
    return record, subject, inputs


def _captures_alone(model: nn.Module, example: Any, alone: Clock) -> bool:
    """Whether torch.export captures it. If that takes too long there is nothing to compare with; pruning may try."""
    forget()
    return _alone("export", lambda: captures(model, *call_arguments(example)), alone) is not False


def _alone(name: str, work: Callable[[], T], alone: Clock) -> T | None:
    """What is timed to compare with. None: it takes too long, and no seconds are noted."""
    try:
        return alone(name, work)
    except OutOfTime:
        del alone.seconds[name]
        return None


@contextmanager
def _check_timed(inside: Clock) -> Iterator[None]:
    """Notes how many of the seconds that hap.apply_ takes go to its executed check."""
    check = apply.verify_plan
    apply.verify_plan = lambda *args: inside("check", lambda: check(*args))
    try:
        yield
    finally:
        apply.verify_plan = check


def _planned(
    model: nn.Module, example: Any, flops: float, clock: Clock, record: Record, ways: Mapping[str, Way]
) -> tuple[Any, Groups, Any]:
    """The first way that reaches the budget: what is to be pruned, its groups and the plan. All ways count."""
    for how, trace in ways.items():
        record["how"] = how
        forget()
        model, groups = clock("trace", partial(trace, model, example))
        scores = clock("score", partial(hap.score, model, groups, None, None, "magnitude"))
        try:
            return model, groups, clock("plan", partial(hap.plan, groups, scores, hap.Budget(flops=flops)))
        except HapError as error:
            record["why_not_in_place"] = str(error)
    raise HapError(record["why_not_in_place"])


def warm_up() -> None:
    """What torch loads when it first exports, and hap when it first prunes, belongs to no model's seconds."""
    model, example = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval(), torch.randn(1, 3, 8, 8)
    hap.prune_(model, example, criterion="magnitude", flops=0.5)


def _outline(outputs: Any) -> Any:
    """What stays the same whatever the values are: a detector finds more or fewer boxes, but boxes."""
    leaves, structure = pytree.tree_flatten(outputs)
    return structure, [(x.dtype, x.ndim) if isinstance(x, Tensor) else type(x) for x in leaves]


# ---- export -------------------------------------------------------------------------------------------------


def _exports(spec: str, model: nn.Module, example: Any, by_parts: bool, clock: Clock) -> Record:
    """How it went with the pruned model and, where outputs are not equal, with the dense one: which one is to blame?

    A model may compute something else while it is captured, such as attend to fewer positions.
    """
    found = {"exported": exported(model, example, clock), "export_seconds": dict(clock.seconds)}
    if not equal(found) and clock.total < clock.limit:
        dense, inputs = build(spec)
        if by_parts:
            dense, inputs = (view := parts(dense, inputs)), view.example
        found["exported_dense"] = exported(dense, inputs, clock)
    return found


def exported(model: nn.Module, example: Any, clock: Clock | None = None) -> Record:
    """How far outputs after export are from those of the model, relative to their size; or why not.

    The model's constant parameters change.
    """
    _enliven(model)
    args, kwargs = call_arguments(example)
    clock, wanted = clock or Clock(), _tensors(run(model, example))
    found: Record = {}

    def gap(ending: str, outputs: Callable[[Path, Any, Any], list[Tensor]]) -> float:
        path = export.write(Path(folder) / f"model{ending}", program)
        return _gap(wanted, outputs(path, args, kwargs))

    try:
        program = clock("capture", lambda: export.capture(model, example))
    except (Exception, OutOfTime) as error:  # whatever keeps a foreign model from it is the record's reason
        return dict.fromkeys(_OUTPUTS, reason(error))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for ending, outputs in _OUTPUTS.items():
            try:
                found[ending] = clock(ending, partial(gap, ending, outputs))
            except (Exception, OutOfTime) as error:
                found[ending] = reason(error)
    return found


def _enliven(model: nn.Module) -> None:
    """Noise on parameters that are constant: with a last layer of zeros, as many start, any two outputs are equal."""
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and p.numel() > 1 and p.min() == p.max():
                p.add_(torch.randn_like(p), alpha=0.1)


def _gap(wanted: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    if len(wanted) != len(outputs):
        raise HapError(f"there are {len(outputs)} outputs instead of {len(wanted)}")
    pairs = [(a.double(), b.double()) for a, b in zip(wanted, outputs, strict=True) if a.numel()]
    gap = max(float((a - b).abs().max() / a.abs().max().clamp_min(1e-12)) for a, b in pairs)
    if not math.isfinite(gap):
        raise HapError("outputs are not finite")
    return gap


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _program_outputs(path: Path, args: Any, kwargs: Any) -> list[Tensor]:
    return _tensors(torch.export.load(path).module()(*args, **kwargs))


def _onnx_outputs(path: Path, args: Any, kwargs: Any) -> list[Tensor]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    feeds = dict(zip(names, (x.numpy() for x in _tensors((args, kwargs))), strict=True))
    return [torch.from_numpy(x) for x in session.run(None, feeds)]


_OUTPUTS: dict[str, Callable[[Path, Any, Any], list[Tensor]]] = {".pt2": _program_outputs, ".onnx": _onnx_outputs}
"""How each kind of file is run."""
