"""Models of other libraries by name, randomly initialised, each with an example to run it on."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hap
from hap.errors import HapError
from hap.execution.calling import run
from hap_reproduction.zoo_sweep.hugging_face import HUGGING_FACE

SIDE = 224
"""Images have that many pixels a side, where a model takes them: larger ones tell no more and take longer."""


class Missing(HapError):
    """There is no model of this name, such as in the installed version of a library."""

    @classmethod
    def of(cls, library: Any, name: str) -> Missing:
        return cls(f"{library.__name__} {library.__version__} has no model {name!r}")


def build(spec: str) -> tuple[nn.Module, Any]:
    """A model in eval mode and an example: `tv:NAME` (torchvision), `timm:NAME`, `hf:NAME` or `hap:NAME`."""
    family, _, name = spec.partition(":")
    if family not in FAMILIES:
        raise Missing(f"model is {spec!r}; expected tv:NAME, timm:NAME, hf:NAME or hap:NAME")
    torch.manual_seed(0)
    model, example = FAMILIES[family](name)
    return model.eval(), example


def _ours(name: str) -> tuple[nn.Module, Any]:
    if name not in hap.models.names():
        raise Missing(f"unknown model 'hap:{name}'; known are {', '.join(hap.models.names())}")
    return hap.models.build(name), torch.randn(1, *hap.models.info(name).input_shape)


def _timm(name: str) -> tuple[nn.Module, Any]:
    import_torchvision()
    import timm

    if not timm.is_model(name):
        raise Missing.of(timm, name)
    model: Any = timm.create_model(name)
    channels, height, width = model.pretrained_cfg["input_size"]
    small = torch.randn(1, channels, SIDE, SIDE)
    if min(height, width) > SIDE and _takes(model, small):
        return model, small
    return model, torch.randn(1, channels, height, width)


def _takes(model: nn.Module, example: Tensor) -> bool:
    """Whether it runs: many a model counts on the size of its images."""
    try:
        run(model, example)
    except Exception:  # whatever it raises where sizes do not fit
        return False
    return True


# ---- torchvision --------------------------------------------------------------------------------------------

DETECTORS = ("fasterrcnn", "fcos", "keypointrcnn", "maskrcnn", "retinanet", "ssd")
"""These take a list of images of any size and return boxes, as many as they find."""

SEGMENTERS = ("deeplabv3", "fcn", "lraspp")


def _torchvision(name: str) -> tuple[nn.Module, Any]:
    library = import_torchvision()
    if name not in library.models.list_models():
        raise Missing.of(library, name)
    if name.startswith(DETECTORS):
        sizes = {} if name.startswith("ssd") else {"min_size": SIDE, "max_size": SIDE}  # the smallest side, not 800
        if "rcnn" in name:  # fewer proposals: without torchvision's own kernels, each takes long to cut out
            sizes |= {"rpn_pre_nms_top_n_test": 200, "rpn_post_nms_top_n_test": 50}
        model = library.models.get_model(name, weights=None, weights_backbone=None, **sizes)
        return model, ([torch.rand(3, SIDE, SIDE)],)
    if name.startswith(SEGMENTERS):
        return library.models.get_model(name, weights=None, weights_backbone=None), torch.randn(1, 3, SIDE, SIDE)
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    side = 299 if name == "inception_v3" else SIDE
    return library.models.get_model(name, weights=None, **options), torch.randn(1, 3, side, side)


def import_torchvision() -> Any:
    """torchvision, also where its compiled operators do not fit this torch: then their names alone are declared.

    Detectors need one of these operators to run at all, non-maximum suppression; that one is given a body.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    for _ in range(50):
        try:
            import torchvision
        except RuntimeError as error:
            if (missing := re.search(r"torchvision::(\w+) does not exist", str(error))) is None:
                raise
            library.define(f"{missing[1]}(Tensor x) -> Tensor")
            for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
        else:
            if not torchvision.extension._has_ops():
                torchvision.ops.boxes.nms = suppress
            return torchvision
    raise HapError("torchvision cannot be imported: too many operators are missing")


def suppress(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """The boxes that no better one overlaps by more than the threshold, best first: non-maximum suppression."""
    order = scores.argsort(descending=True, stable=True)
    left, top, right, bottom = boxes[order].detach().numpy().T  # by numpy: what watches operators need not see these
    spans = ((left, right), (top, bottom))
    width, height = (np.minimum(end[:, None], end) - np.maximum(begin[:, None], begin) for begin, end in spans)
    shared, area = width.clip(0) * height.clip(0), (right - left) * (bottom - top)
    apart = shared <= iou_threshold * (area[:, None] + area - shared)
    alive = np.ones(len(order), dtype=bool)
    for i in range(len(order)):
        if alive[i]:
            alive[i + 1 :] &= apart[i, i + 1 :]
    return order[torch.from_numpy(alive)]


def _hugging_face(name: str) -> tuple[nn.Module, Any]:
    if name not in HUGGING_FACE:
        raise Missing(f"unknown model 'hf:{name}'; known are {', '.join(HUGGING_FACE)}")
    import_torchvision()  # transformers looks for it
    import transformers

    cls, settings, example = HUGGING_FACE[name]
    network = getattr(transformers, cls, None)
    if network is None:
        raise Missing.of(transformers, cls)
    return network(network.config_class(**settings)), example()


FAMILIES: dict[str, Callable[[str], tuple[nn.Module, Any]]] = {
    "hap": _ours,
    "tv": _torchvision,
    "timm": _timm,
    "hf": _hugging_face,
}
