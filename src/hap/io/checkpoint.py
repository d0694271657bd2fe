"""save and load: one safetensors file with tensors, plan, recipe and metrics. Nothing in it can name code to run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hap.errors import HapError
from hap.execution.fast_copy import deepcopied
from hap.planning.order import Order
from hap.planning.plan import Plan
from hap.surgery.additions import has_additions
from hap.surgery.cut import rebuild_
from hap.utils.atomic_files import write_atomic
from hap.utils.module_tree import named_tensors

FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint says of itself, without its tensors."""

    format: int
    plans: tuple[Plan, ...]
    recipe: dict[str, Any] | None
    metrics: dict[str, Any]
    about: dict[str, Any]
    aliases: dict[str, str]
    shapes: dict[str, list[int]]
    extra: dict[str, Any]
    order: Order | None = None
    """What `hap.order` found for this model, where it was saved with it."""

    @property
    def plan(self) -> Plan | None:
        """The last plan that was carried out, if any."""
        return self.plans[-1] if self.plans else None


def save(
    path: str | Path,
    model: nn.Module,
    plan: Plan | Sequence[Plan] | None = None,
    *,
    recipe: Any = None,
    metrics: Mapping[str, Any] | None = None,
    about: Mapping[str, Any] | None = None,
    order: Order | None = None,
) -> Path:
    """Write a model, and the plan that pruned it, to one file, which is complete or not there.

    >>> import tempfile
    >>> path = save(Path(tempfile.mkdtemp(), "net.safetensors"), nn.Linear(2, 3), about={"note": "fresh"})
    >>> read(path).about, read(path).shapes
    ({'note': 'fresh'}, {'bias': [3], 'weight': [3, 2]})
    >>> load(path, nn.Linear(2, 3))
    Linear(in_features=2, out_features=3, bias=True)

    Arguments: the `model` as it is now and the `plan` that pruned it; all plans, in order, if it was pruned several
    times; None if it was not. `recipe`, `metrics` and `about` are what JSON holds, for whoever reads the file, and
    `order` is what `hap.order` found for the model as it is now.
    Returns: the path.
    """
    path = Path(path)
    plans = [plan] if isinstance(plan, Plan) else list(plan or ())
    _check_made_by(model, plans)
    tensors, aliases = _distinct(_tensors(model))
    extra = {name: value for name, value in model.state_dict().items() if not isinstance(value, Tensor)}
    _check_extra(extra)
    header = {
        "format": FORMAT,
        "plans": [p.to_dict() for p in plans],
        "recipe": recipe.to_dict() if hasattr(recipe, "to_dict") else recipe,
        "metrics": dict(metrics or {}),
        "about": dict(about or {}),
        "aliases": aliases,
        "extra": extra,
    }
    if order is not None:  # files without one are as older versions write them
        if not isinstance(order, Order):
            raise HapError(f"order is {type(order).__name__}; expected what hap.order returned")
        header["order"] = order.to_dict()
    try:
        text = json.dumps(header)
    except TypeError as error:
        raise HapError(f"recipe, metrics and about must be JSON: {error}") from error
    try:
        write_atomic(path, lambda temporary: save_file(tensors, temporary, metadata={"hap": text}))
    except SafetensorError as error:
        raise HapError(f"cannot write {path}: {error}; its header has {len(text):,} characters") from error
    return path


def _check_extra(extra: Mapping[str, Any]) -> None:
    """What modules keep beside tensors (get_extra_state) must come back from JSON as it was: nothing is pickled."""
    for name, value in extra.items():
        try:
            same = json.loads(json.dumps(value)) == value
        except (TypeError, ValueError):
            same = False
        if not same:
            raise HapError(
                f"{name} is {type(value).__name__}, which JSON does not hold: let get_extra_state return plain values, "
                "such as dicts and lists of numbers and text, or tensors in buffers"
            )


def _check_made_by(model: nn.Module, plans: list[Plan]) -> None:
    """Refuse what could not be loaded again: a model that these plans do not lead to."""
    if not plans and has_additions(model):
        raise HapError("the model is pruned, so it can be loaded again only with its plan: pass the plan to hap.save")
    tensors = named_tensors(model)
    for cut in plans[-1].cuts if plans else ():
        seen = tensors[cut.name].shape[cut.dim] if cut.name in tensors else None
        if seen != len(cut.keep):
            raise HapError(
                f"the plan does not lead to this model: it leaves {len(cut.keep)} on axis {cut.dim} of {cut.name}, "
                f"which has {seen}. Apply the plan first; for a model pruned several times pass all plans in order."
            )


def _distinct(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor once; names that share one are listed as aliases of the first. Those that share a part are apart."""
    first: dict[Any, str] = {}
    stored: set[int] = set()
    tensors, aliases = {}, {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
            plain = tensor.detach().cpu().contiguous()
            place = plain.untyped_storage().data_ptr()
            tensors[name] = plain.clone() if place in stored else plain
            stored.add(place)
    return tensors, aliases


def read(path: str | Path) -> Checkpoint:
    """What a checkpoint that `save` wrote holds, without loading its tensors. `save` has an example.

    Returns: plans, recipe, metrics and the other entries of its header; shapes by name.
    """
    with _opened(path) as file:
        text = (file.metadata() or {}).get("hap")
        shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    header = _header(path, text)
    if not isinstance(header.get("format"), int) or header["format"] > FORMAT:
        raise HapError(
            f"{path} has format {header.get('format')}; this version of HAP reads up to {FORMAT}. Upgrade HAP."
        )
    try:
        plans = tuple(Plan.from_dict(p) for p in header["plans"])
        order = Order.from_dict(header["order"]) if "order" in header else None
    except HapError as error:
        raise HapError(f"{path}: {error}") from error
    told = {name: header[name] for name in ("format", "recipe", "metrics", "about", "aliases")}
    return Checkpoint(plans=plans, shapes=shapes, extra=header.get("extra") or {}, order=order, **told)


EXTRA = "_extra_state"
"""How the name ends under which torch lists what a module's get_extra_state returns."""
KINDS = {"plans": list, "recipe": dict | None, "metrics": dict, "about": dict, "aliases": dict}


def _header(path: str | Path, text: str | None) -> dict[str, Any]:
    try:
        header = json.loads(text or "null")
    except ValueError:
        header = None
    if not isinstance(header, dict) or "format" not in header:
        raise HapError(f"{path} is a safetensors file, but not one that hap.save wrote")
    for name, kind in KINDS.items():
        if header["format"] == FORMAT and (name not in header or not isinstance(header[name], kind)):
            raise HapError(f"{path} is damaged: its header has no valid {name!r}")
    if not all(isinstance(name, str) for name in (header.get("aliases") or {}).values()):
        raise HapError(f"{path} is damaged: its aliases are not names")
    return header


def load(path: str | Path, model: nn.Module) -> nn.Module:
    """Fill a fresh dense model from a checkpoint: prune it as the plan says, load its weights. `save` has an example.

    Arguments: the `path` of a file that `save` wrote, and a dense `model` of the same code. If anything does not fit,
    HapError is raised and it is left as it was.
    Returns: the model.
    The model's tensors keep their dtypes, but for those that cannot hold what the file has: they take the file's.
    Buffers that are not persistent are in no file: they are cut out of those that the fresh model was made with.
    """
    checkpoint = read(path)
    with _opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in checkpoint.shapes}
    trial = deepcopied(model, {})
    try:
        for plan in checkpoint.plans:
            rebuild_(trial, plan)
    except HapError as error:
        raise HapError(f"{path} was saved from another model: {error}") from error
    _compare(path, checkpoint, trial)
    tensors = {name: tensors[checkpoint.aliases.get(name, name)] for name in _tensors(trial)}
    _check_ties(path, tensors, trial)
    _check_not_rounded(path, tensors, trial)
    for plan in checkpoint.plans:
        rebuild_(model, plan)
    with torch.no_grad():
        for name, tensor in _tensors(model).items():
            if (dtype := _holding(tensor.dtype, tensors[name].dtype)) != tensor.dtype:
                tensor.data = tensor.data.to(dtype)
            tensor.data.copy_(tensors[name])
    for name, value in checkpoint.extra.items():
        model.get_submodule(name.removesuffix(EXTRA).rstrip(".")).set_extra_state(value)
    return model


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds of a model, but for what is no tensor: see _check_extra."""
    return {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


def _holding(own: torch.dtype, stored: torch.dtype) -> torch.dtype:
    """The model's own dtype, or one that loses nothing of the real numbers that are stored."""
    if own == stored or not (own.is_floating_point and stored.is_floating_point) or own.itemsize > stored.itemsize:
        return own
    return stored if stored.itemsize > own.itemsize else torch.float32


def _check_ties(path: str | Path, tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """A tensor of the model that has several names can take one value only."""
    first: dict[int, str] = {}
    for name, tensor in _tensors(model).items():
        other = first.setdefault(id(tensor), name)
        if tensors[name] is not tensors[other] and not torch.equal(tensors[name], tensors[other]):
            raise HapError(
                f"{path} was saved from another model: {other} and {name} differ there and are one tensor here. Make "
                "the model without that tie and load again."
            )


def _check_not_rounded(path: str | Path, tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """Refuse a model in a narrower dtype than the file if it has buffers that are not in the file: they were rounded
    when it was made. A file with both dtypes holds a model of mixed precision, and nothing tells of its buffers."""
    state, stored = _tensors(model), {tensor.dtype for tensor in tensors.values()}
    wider = {t.dtype: d for n, t in state.items() if (d := _holding(t.dtype, tensors[n].dtype)) != t.dtype}
    for name, buffer in model.named_buffers():
        if name not in state and buffer.dtype in wider and buffer.dtype not in stored:
            narrow, wide = (str(d).removeprefix("torch.") for d in (buffer.dtype, wider[buffer.dtype]))
            raise HapError(
                f"{path} holds {wide} where the model has {narrow}, and {name}, which is not in the file, is {narrow} "
                f"too: it was rounded when the model was made. Make it in {wide} and load again."
            )


def _compare(path: str | Path, checkpoint: Checkpoint, model: nn.Module) -> None:
    """What the file and the model hold, by name: the shapes of tensors, None for other values."""
    aliases = {name: checkpoint.shapes.get(first) for name, first in checkpoint.aliases.items()}
    held = {**checkpoint.shapes, **aliases, **dict.fromkeys(checkpoint.extra)}
    needed = {n: list(x.shape) if isinstance(x, Tensor) else None for n, x in model.state_dict().items()}
    for name, shape in needed.items():
        if name not in held or (held[name] is None) != (shape is None):
            what = repr(name) if shape is None else f"tensor {name!r}"
            raise HapError(f"{path} has no {what}, which the model needs; was it saved from another model?")
        if held[name] != shape:
            raise HapError(f"{path} was saved from another model: {name} has shape {held[name]} there and {shape} here")
    if extra := [n for n in (*checkpoint.shapes, *checkpoint.extra) if n not in needed]:
        raise HapError(f"{path} was saved from another model: it holds {extra[0]!r}, which this one does not have")


def _opened(path: str | Path) -> Any:
    path = Path(path)
    if not path.is_file():
        raise HapError(f"there is no file {path}")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise HapError(
            f"{path} cannot be read: {error}. It is truncated, damaged or not a checkpoint of HAP."
        ) from error
