"""Small files of each kind that HAP writes: `python tests/files_made_before/make.py`, from any folder.

They were made before the modules moved into packages, and are kept as they were: tests load them, since files that
users have must still load. Whoever adds a kind of file adds a part here, runs it alone (`make.py NAME`), and leaves
the other files alone. Of the library it uses only what `hap` shows, so it ran with the code of then.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap

FOLDER = Path(__file__).parent
CONFIG = """model = "small_networks:build"
data = "digits"
out = "experiment"
seeds = [0]
calibration = 64
threads = 1

[dense]
recipe = "digits"
epochs = 1

[finetune]
recipe = "digits-finetune"
epochs = 1
teacher = true

[[prune]]
name = "Half"
criterion = "hessian"
params = 0.5
implant = 0.3

[[prune]]
name = "L1"
criterion = "l1"
flops = 0.6
coupling = "union"
"""


class Residual(nn.Module):
    """A stream that two branches are added to."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = (nn.Conv2d(i, 6, 3, padding=1) for i in (3, 6, 6))
        self.norm, self.head = nn.BatchNorm2d(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = x + self.norm(self.a(x)).relu()
        return self.head((x + self.b(x)).relu().mean((2, 3)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8))
        self.last, self.heads = nn.Linear(8, 3), 3

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(len(x), x.shape[1], self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.last((x + self.out(mixed)).mean(1))


class Reader(nn.Module):
    """Layers whose sizes are integers of modules: of hidden units and of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.mix, self.last = nn.LSTM(5, 8, 2), nn.MultiheadAttention(8, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.rows(x)[0]
        return self.last(self.mix(y, y, y)[0].mean(0))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "implants": (Residual, (2, 3, 6, 6)),
    "scatters": (Residual, (2, 3, 6, 6)),
    "narrow": (Attention, (2, 5, 8)),
    "reader": (Reader, (4, 2, 5)),
}


def network(name: str) -> tuple[nn.Module, Tensor]:
    """A network as it is made anew, in eval mode, and the example whose outputs are kept: equal on every machine."""
    build, shape = NETWORKS[name]
    model = build().double().eval()
    with torch.no_grad():
        for n, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                steps = torch.arange(tensor.numel(), dtype=torch.float64) * 0.37 + len(n)
                tensor.copy_((0.4 * steps.sin() + (0.9 if "var" in n else 0)).view_as(tensor))
    size = torch.Size(shape)
    return model, (torch.arange(size.numel(), dtype=torch.float64) * 0.61).cos().view(size)


def plan_of(name: str, model: nn.Module, example: Tensor) -> hap.Plan:
    groups = hap.trace(model, example, coupling="union" if name == "scatters" else "joint")
    if name == "narrow":
        groups = hap.narrowable(model, hap.only(groups, hap.heads(groups)), example)
        return hap.draft(groups, {n: [0] for n in groups}, {n: [2] for n in groups}, hap.NarrowHeads(rank=0.5))
    removed = {n: [1, len(g) - 1] if len(g) > 3 else [0] for n, g in groups.items()}
    if name == "scatters":
        removed = {n: [i % len(groups[n]), (i + 2) % len(groups[n])] for i, n in enumerate(groups)}
    implanted = {n: [0] for n in list(groups)[:1]} if name == "implants" else {}
    return hap.draft(groups, removed, implanted, hap.Pointwise(init="center") if implanted else None)


def checkpoints() -> None:
    for name in NETWORKS:
        model, example = network(name)
        plan = plan_of(name, model, example)
        hap.apply_(model, plan, example)
        hap.save(FOLDER / f"{name}.safetensors", model, plan, metrics={"accuracy": 0.5}, about={"note": name})
        (FOLDER / f"{name}.plan.json").write_text(plan.to_json())
        with torch.no_grad():
            outputs = model(example).tolist()
        (FOLDER / f"{name}.outputs.json").write_text(json.dumps(outputs))


def data() -> hap.data.Data:
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (24, 1, 6, 6), dtype=torch.uint8, generator=draw)
    split = hap.data.Split(images, torch.arange(24) % 3)
    return hap.data.Data(split, split, 3, (0.5,), (0.5,), "noise")


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


RECIPE = hap.Recipe(epochs=3, batch=8, lr=0.05, ema=0.9, warmup=0.2)


def training() -> None:
    """The state after one or two of three epochs, and the losses of all three."""
    path = FOLDER / "training.safetensors"
    history = hap.train(classifier(), data(), RECIPE, progress=False)
    (FOLDER / "training.losses.json").write_text(json.dumps(history.loss))
    epoch, begun = hap.data.Data.epoch, []

    def stop_in_the_third(*arguments: Any) -> Any:
        begun.append(1)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return epoch(*arguments)

    hap.data.Data.epoch = stop_in_the_third  # type: ignore[method-assign]
    try:
        hap.train(classifier(), data(), RECIPE, checkpoint=path, progress=False)
    except KeyboardInterrupt:
        print("stopped in the third epoch")
    hap.data.Data.epoch = epoch  # type: ignore[method-assign]


def experiment() -> None:
    """What `hap run` and `hap score` leave: checkpoints, results, scores, and the file that says what to do."""
    (FOLDER / "experiment.toml").write_text(CONFIG)
    dense = "experiment/dense.safetensors"
    score = ["score", dense, "--model", "small_networks:build", "--criterion", "hessian", "--calibration", "64"]
    for command in (["run", "experiment.toml"], [*score, "--out", "scores.json"]):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:."}
        subprocess.run(
            [sys.executable, "-m", "hap", *command, "--device", "cpu"], cwd=FOLDER, env=environment, check=True
        )
    for left in [*(FOLDER / "experiment").glob("*.html"), *(FOLDER / "experiment").glob("*.png")]:
        left.unlink()


PARTS = {"checkpoints": checkpoints, "training": training, "experiment": experiment}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
