"""ResNet50 without training: which image goes where, what the network reads, and what a record holds."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import hap
from hap_reproduction.post_training import imagenet, imagenet_images, torch_pruning
from hap_reproduction.post_training.imagenet import BUDGETS, Reference, Setting, dense_network, measure, settings
from hap_reproduction.post_training.imagenet_images import PARTS, PER_CLASS, Images, decoded, listed, prepared


@pytest.fixture
def images() -> Images:
    return Images(np.random.default_rng(0).integers(0, 256, (40, 3, 16, 16), np.uint8))


def test_parts_share_no_image_and_have_each_class_alike(images: Images) -> None:
    rows = {part: images.rows(part) for part in PARTS}
    assert sorted(row for some in rows.values() for row in some) == list(range(40))
    for part, some in rows.items():
        _, labels = images.batch(some)
        assert labels.bincount().tolist() == [len(PARTS[part])] * 8
    assert rows["held out"] == [2, 7, 12, 17, 22, 27, 32, 37]
    assert [row for some in images.batches("test", 6) for row in some] == rows["test"]


def test_calibration_draws_from_its_part_alone(images: Images) -> None:
    batches = images.calibration(12, size=5)
    assert [len(y) for _, y in batches] == [5, 5, 2]
    known = {bytes(x.contiguous().numpy()) for x in images.batch(images.rows("calibration"))[0]}
    drawn = [bytes(x.contiguous().numpy()) for x in torch.cat([x for x, _ in batches])]
    assert len(set(drawn)) == 12 and set(drawn) <= known
    with pytest.raises(hap.HapError, match="16 calibration images, not 17"):
        images.calibration(17)


def test_the_network_reads_blue_first_less_the_means() -> None:
    pixels = torch.tensor([10, 20, 30], dtype=torch.uint8).view(1, 3, 1, 1).expand(1, 3, 2, 2)
    read = prepared(pixels)[0, :, 0, 0]
    torch.testing.assert_close(read, torch.tensor([30 - 103.939, 20 - 116.779, 10 - 123.68]))


def test_folders_are_classes_by_number_and_files_go_by_name(tmp_path: Path) -> None:
    for label in range(11):
        for name in "edcba":
            (tmp_path / "set" / str(label)).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 20), (label, 0, 255)).save(tmp_path / "set" / str(label) / f"{name}.JPEG")
    files = listed(tmp_path)
    assert [int(file.parent.name) for file in files] == [row // PER_CLASS for row in range(55)]
    assert [file.stem for file in files[50:]] == list("abcde")
    files[-1].unlink()
    with pytest.raises(hap.HapError, match="has 4 images"):
        listed(tmp_path)


def test_the_middle_of_an_image_is_taken(tmp_path: Path) -> None:
    wide = np.zeros((256, 512, 3), np.uint8)
    wide[:, 144:368] = (255, 128, 0)  # just what a crop of 224 in the middle shows
    Image.fromarray(wide).save(tmp_path / "wide.png")
    pixels = decoded(tmp_path / "wide.png")
    assert pixels.shape == (3, 224, 224)
    assert (pixels == np.array([255, 128, 0])[:, None, None]).all()


def test_strides_and_epsilon_are_those_of_the_weights(tmp_path: Path) -> None:
    whole = hap.models.build("resnet50", classes=1000).state_dict()
    given = {name: tensor for name, tensor in whole.items() if not name.endswith("num_batches_tracked")}
    save_file(given, tmp_path / "weights.safetensors")
    model = dense_network(tmp_path / "weights.safetensors")
    strided = {name for name, m in model.named_modules() if isinstance(m, nn.Conv2d) and m.stride == (2, 2)}
    first = {f"layer{stage}.0.{layer}" for stage in (2, 3, 4) for layer in ("conv1", "downsample.0")}
    assert strided == {"conv1", *first}
    assert {m.eps for m in model.modules() if isinstance(m, nn.BatchNorm2d)} == {1e-3}
    save_file({name: given[name] for name in list(given)[1:]}, tmp_path / "fewer.safetensors")
    with pytest.raises(hap.HapError, match="lacks"):
        dense_network(tmp_path / "fewer.safetensors")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.fc = nn.Conv2d(16, 16, 3), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.conv2(self.bn(self.conv(x)).relu()).relu().mean((2, 3)))


@pytest.mark.parametrize("theirs", [False, True])
def test_a_record_holds_setting_and_outcome(theirs: bool, images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    def right(model: nn.Module, images: Images, part: str) -> dict[str, float]:
        return {"accuracy": 0.5, "top5": 0.75, "examples": len(images.rows(part))}

    monkeypatch.setattr(imagenet, "evaluated", right)
    monkeypatch.setattr(imagenet, "version", lambda name: "1.6.1")
    monkeypatch.setattr(imagenet, "cut_to", lambda dense, *given: dense)
    model = Small().eval().to(memory_format=torch.channels_last)
    setting = Setting(
        0.5, imagenet.THEIRS if theirs else imagenet.OURS, images=16, repair="norms" if theirs else "refit"
    )
    record = json.loads(json.dumps(measure(Reference(model, images, "test", {"accuracy": 0.625, "top5": 1}), setting)))
    assert record["setting"]["flops"] == 0.5 and record["part"] == "test" and record["examples"] == 16
    assert record["dense"] == 0.625 and record["drop"] == 0.125 and record["top5"] == 0.75
    assert {"prune", "repair", "evaluate"} <= set(record["seconds"])
    assert record.get("version") == ("1.6.1" if theirs else None)
    assert record["flops_left"] == 1 if theirs else 0.3 < record["flops_left"] <= 0.5


def test_exported_networks_answer_as_they_do_in_torch(images: Images) -> None:
    model = Small().eval()
    x, labels = images.batch(images.rows("test"))
    with torch.no_grad():
        share = (model(x).argmax(1) == labels).double().mean()
    found = imagenet.evaluated(model, images, "test")
    assert found["accuracy"] == share and found["examples"] == 16 and found["top5"] >= share


def test_gradients_are_those_of_the_mean_loss(images: Images) -> None:
    model = Small().eval()
    batches = images.calibration(12, size=5)
    found = torch_pruning.gradients(model, batches, most=2)
    x, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    wanted = torch.autograd.grad(nn.functional.cross_entropy(model(x), labels), list(model.parameters()))
    for gradient, whole in zip(found.values(), wanted, strict=True):
        torch.testing.assert_close(gradient, whole)


def test_each_setting_has_a_name_of_its_own() -> None:
    for choose in (True, False):
        names = [setting.slug for setting in settings(choose)]
        assert len(names) == len(set(names)) >= 8
    assert {setting.flops for setting in settings(False)} == set(BUDGETS) and len(list(settings(False))) == 16
    assert imagenet_images.SIDE == 224
