"""What is measured of pruned networks before any training: records hold all that tables are made of."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

import hap
from hap.models.cifar_resnet import CifarResNet
from hap_reproduction.post_training import cifar10, page
from hap_reproduction.post_training.cifar10 import Reference, Setting, answered, fidelity, measure, settings


@pytest.fixture(scope="module")
def reference() -> Reference:
    data = hap.data.load("digits")
    split = hap.data.Split(data.train.images[:300], data.train.labels[:300])
    small = hap.data.Data(split, data.test, data.classes, data.mean, data.std, data.name, data.pad, data.flip)
    model = CifarResNet((1, 1, 1), (16, 24, 40), channels=1).eval()
    return Reference(model, small, 0.5, *(answered(model, small, mixed) for mixed in (False, True)))


@pytest.mark.parametrize(
    "more", [{"repair": "distil", "minutes": 0.005}, {"rounds": 2}, {"repair": "compensate"}], ids=str
)
def test_a_record_holds_setting_and_outcome(more: dict[str, object], reference: Reference) -> None:
    setting = Setting(0.6, images=128, **more)
    record = json.loads(json.dumps(measure("noise", reference, setting)))
    assert record["setting"]["flops"] == 0.6 and record["network"] == "noise"
    assert 0.5 < record["flops_left"] <= 0.6 and record["drop"] == record["dense"] - record["accuracy"]
    assert record["divergence"] > 0 and 0 <= record["mixed_agreement"] < 1
    assert ("distilled" in record) == ("minutes" in more)


def test_a_network_agrees_with_itself(reference: Reference) -> None:
    found = fidelity(reference.model, reference)
    assert found == {"divergence": 0.0, "agreement": 1.0, "mixed_divergence": 0.0, "mixed_agreement": 1.0}


@pytest.mark.parametrize("choose", [True, False])
def test_each_setting_has_a_name_of_its_own(choose: bool) -> None:
    names = [setting.slug for setting in settings(choose)]
    assert len(names) == len(set(names)) > 20
    assert cifar10.BUDGETS == (0.5, 0.387, 0.29)


def test_the_page_is_that_of_the_records() -> None:
    root = Path(__file__).parents[2]
    assert (root / "docs" / "without-training.md").read_text(encoding="utf-8") == page.page(root)


def test_cells_are_means_over_networks() -> None:
    made = Setting(0.5, images=64)
    records = [{"network": n, "drop": d, "setting": asdict(made)} for n, d in (("b", 0.02), ("a", 0.01))]
    lines = page.drops(records).splitlines()
    assert lines[0] == "|  | 50% of the FLOPs |"
    assert lines[2] == "| reconstruction per cost, union coupling, refit, 64 images | 1.50 (1.00, 2.00) |"
