"""Models of other libraries, one for each way of building networks: traced, pruned to half, run, and counted.

There is no code for any of them. What is small in its library runs as it is, others on smaller images and with fewer
blocks of each kind.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hap
from hap.execution.calling import run
from hap.graph.partition import parts
from hap_reproduction.zoo_sweep.models import build, import_torchvision
from hap_reproduction.zoo_sweep.ours import exported

IMAGES = {
    "tv:alexnet": 96,  # flattened features
    "tv:convnext_tiny": 64,  # layer scale, permuted layer norm
    "tv:densenet121": 64,  # deep concatenation
    "tv:efficientnet_b0": 64,  # squeeze and excitation
    "tv:googlenet": 96,  # parallel branches
    "tv:lraspp_mobilenet_v3_large": 64,  # segmentation, a dict of outputs
    "tv:mobilenet_v3_small": 64,
    "tv:regnet_y_400mf": 64,  # grouped convolutions
    "tv:resnet18": 64,
    "tv:shufflenet_v2_x0_5": 64,  # channel split and shuffle
    "tv:squeezenet1_1": 64,
    "timm:ese_vovnet19b_slim": 64,  # one-shot aggregation
    "timm:ghostnet_050": 64,  # cheap features beside real ones
    "timm:lcnet_035": 64,
    "timm:mobilevit_xxs": 64,  # convolutions and attention over unfolded patches
    "timm:pvt_v2_b0": 64,  # attention over reduced keys
    "timm:resnest14d": 64,  # split attention
    "timm:starnet_s1": 64,  # products of two branches
    "timm:test_byobnet": 0,
    "timm:test_convnext": 0,
    "timm:test_efficientnet": 0,
    "timm:test_mambaout": 0,  # gated convolutions
    "timm:test_resnet": 0,
    "timm:test_vit": 160,  # fused queries, keys and values
}
"""The side of the image, or 0 for the model's own."""

SHORT: dict[str, Callable[[Any], torch.nn.Module]] = {
    "tv:convnext_tiny": lambda tv: tv.ConvNeXt([tv.convnext.CNBlockConfig(*c) for c in ((24, 48, 2), (48, None, 2))]),
    "tv:densenet121": lambda tv: tv.DenseNet(16, (2, 4, 3, 2), 32),
    "tv:efficientnet_b0": lambda tv: tv.EfficientNet([tv.efficientnet.MBConvConfig(*c) for c in EFFICIENT], 0.2),
    "tv:googlenet": lambda tv: _shorter_googlenet(tv.GoogLeNet(init_weights=False)),
    "tv:lraspp_mobilenet_v3_large": lambda tv: tv.segmentation.lraspp._lraspp_mobilenetv3(_mobilenet(tv, 2), 21),
    "tv:mobilenet_v3_small": lambda tv: _mobilenet(tv, 1),
    "tv:regnet_y_400mf": lambda tv: tv.RegNet(
        tv.regnet.BlockParams.from_init_params(6, 48, 40.0, 2.1, group_width=8, se_ratio=0.25)
    ),
    "tv:shufflenet_v2_x0_5": lambda tv: tv.ShuffleNetV2([2, 3, 2], [24, 48, 96, 192, 256]),
}
EFFICIENT = ((1, 3, 1, 32, 16, 1), (6, 3, 2, 16, 24, 2), (6, 5, 2, 24, 40, 2), (6, 3, 1, 40, 80, 1))
"""Kernels, strides, widths and numbers of blocks of a short EfficientNet."""
MOBILE = (
    (16, 3, 16, 16, True, "RE", 2),
    (16, 3, 72, 24, False, "RE", 2),
    (24, 3, 88, 24, False, "RE", 1),
    (24, 5, 96, 40, True, "HS", 2),
    (40, 5, 240, 40, True, "HS", 1),
)
"""Widths, kernels, attention, activations and strides of a short MobileNet."""
SHORT_OF_TIMM: dict[str, Callable[[Any], torch.nn.Module]] = {
    "timm:ghostnet_050": lambda timm: timm.ghostnet.GhostNet(GHOSTS, width=0.5),
    "timm:mobilevit_xxs": lambda timm: _shorter_mobilevit(timm.create_model("mobilevit_xxs")),
    "timm:pvt_v2_b0": lambda timm: timm.create_model("pvt_v2_b0", depths=(1, 2, 1, 1)),
    "timm:starnet_s1": lambda timm: timm.create_model("starnet_s1", depths=(1, 1, 2, 1)),
    "timm:test_vit": lambda timm: timm.create_model("test_vit", depth=3),
}
GHOSTS = [
    [[3, 16, 16, 0, 1]],
    [[3, 48, 24, 0, 2]],
    [[5, 72, 40, 0.25, 2], [5, 120, 40, 0.25, 1]],
    [[3, 240, 80, 0, 2], [3, 200, 80, 0, 1]],
    [[3, 480, 112, 0.25, 1]],
]
"""Deep networks repeat their blocks: of these, few of each kind are built."""


def _shorter_googlenet(model: torch.nn.Module) -> torch.nn.Module:
    """Without blocks that return as many channels as they take."""
    model.inception4b = model.inception4c = model.inception5a = torch.nn.Identity()
    return model


def _mobilenet(tv: Any, dilation: int) -> torch.nn.Module:
    """The last block has a dilation."""
    blocks = [*((*block, 1) for block in MOBILE), (40, 5, 288, 96, True, "HS", 2, dilation)]
    return tv.MobileNetV3([tv.mobilenetv3.InvertedResidualConfig(*b, width_mult=1.0) for b in blocks], 256)


def _shorter_mobilevit(model: torch.nn.Module) -> torch.nn.Module:
    """One or two transformer layers where there are two to four."""
    for block in (m for m in model.modules() if hasattr(m, "transformer")):
        block.transformer = block.transformer[: len(block.transformer) // 2]
    return model


TEXTS = ["albert", "bert", "distilbert", "gpt2", "llama", "mpnet", "opt", "qwen2", "bart", "t5"]
OTHERS = ["clip", "convnext", "segformer", "swin", "vit", "wav2vec2", "whisper"]

EXPORTED = ["timm:test_resnet", "timm:test_vit", "hf:albert", "hf:llama"]
"""What is exported as well, once it is pruned."""


def _prune_to_half(model: torch.nn.Module, example: Any) -> hap.Plan:
    """Fails unless the executed check passes and counted cost = planned cost <= half."""
    groups = hap.trace(model, example)
    plan = hap.plan(groups, hap.score(model, groups, None, None, "magnitude"), hap.Budget(flops=0.5))
    before = run(model, example)
    hap.apply_(model, plan, example=example)
    count = hap.cost(model, example)
    assert (count.params, count.macs) == (plan.after.params, plan.after.macs)
    assert count.macs <= 0.5 * plan.before.macs and count.macs > 0.4 * plan.before.macs
    assert _shapes(run(model, example)) == _shapes(before)
    return plan


def _check_exported(model: torch.nn.Module, example: Any) -> None:
    """Outputs are equal as a program of torch.export and in onnxruntime. The sweep records this for every model."""
    gaps = exported(model, example)
    assert set(gaps) == {".pt2", ".onnx"}
    assert all(isinstance(gap, float) and gap <= 1e-4 for gap in gaps.values()), gaps


def _shapes(outputs: Any) -> list[Any]:
    return [getattr(x, "shape", x) for x in torch.utils._pytree.tree_leaves(outputs)]


def _short(spec: str) -> tuple[torch.nn.Module, Any]:
    """The network, or one of its kind with fewer blocks."""
    if spec in SHORT:
        torch.manual_seed(0)
        return SHORT[spec](import_torchvision().models).eval(), None
    if spec in SHORT_OF_TIMM:
        import_torchvision()
        import timm

        torch.manual_seed(0)
        return SHORT_OF_TIMM[spec](timm.models).eval(), None
    return build(spec)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("spec", IMAGES)
def test_networks_for_images(spec: str) -> None:
    model, example = _short(spec)
    example = torch.randn(1, 3, IMAGES[spec], IMAGES[spec]) if IMAGES[spec] else example
    _prune_to_half(model, example)
    if spec in EXPORTED:
        _check_exported(model, example)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TEXTS + OTHERS)
def test_hugging_face(name: str) -> None:
    model, example = build(f"hf:{name}")
    _prune_to_half(model, example)
    if f"hf:{name}" in EXPORTED:
        _check_exported(model, example)


def test_a_detector_by_its_parts() -> None:
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, example = build("tv:ssdlite320_mobilenet_v3_large")
        wanted = run(model, example)
        view = parts(model, example)
        assert view.names == ["backbone", "head"]
        _prune_to_half(view, view.example)
        seen = run(model, example)
    assert [{k: (v.dtype, v.ndim) for k, v in found.items()} for found in seen] == [
        {k: (v.dtype, v.ndim) for k, v in found.items()} for found in wanted
    ]
    assert all(math.isfinite(float(v.double().sum())) for found in seen for v in found.values())
