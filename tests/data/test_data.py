"""Data sets: tiny files in the official layouts, batches, augmentation, and what is refused."""

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from hap import data as hap_data
from hap.data import Data, Split
from hap.data.dataset import crop
from hap.data.pickles import read_arrays
from hap.errors import HapError

torch.set_num_threads(1)

RNG = np.random.RandomState(0)
DEEP = b")" + b"\x85" * 300_000
"""A tuple in a tuple in a tuple: what walks through it by recursion overflows the stack of C."""
TEN = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def records(count: int, classes: int, label_bytes: int) -> np.ndarray:
    """Rows of a CIFAR binary file: label bytes, the last of them the one that counts, then 3,072 pixels."""
    rows = RNG.randint(0, 256, (count, label_bytes + 3072)).astype(np.uint8)
    rows[:, :label_bytes] = RNG.randint(0, classes, (count, label_bytes))
    return rows


def write_cifar10_binary(root: Path, count: int = 3) -> Path:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    for name in TEN:
        records(count, 10, 1).tofile(folder / f"{name}.bin")
    return folder


def old_pickle(images: np.ndarray, labels: list[int]) -> bytes:
    """What Python 2 wrote for {"labels": labels, "data": images}: short strings, BININT1, raw array bytes."""
    raw = images.tobytes()
    numbers = b"".join(b"K" + bytes([n]) for n in labels)
    shape = b"".join(b"M" + struct.pack("<H", n) for n in images.shape)
    minus_one = b"J\xff\xff\xff\xff"
    dtype = b"cnumpy\ndtype\nq\x08U\x02u1K\x00K\x01\x87Rq\x09(K\x03U\x01|NNN" + 2 * minus_one + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x06cnumpy\nndarray\nq\x07K\x00\x85U\x01b\x87R"
    state = b"(K\x01" + shape + b"\x86" + dtype + b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    return b"\x80\x02}q\x01(U\x06labelsq\x04](" + numbers + b"eU\x04dataq\x05" + array + state + b"u."


def test_cifar10_binary(tmp_path: Path) -> None:
    folder = write_cifar10_binary(tmp_path)
    data = hap_data.load("cifar10", tmp_path)
    assert data.train.images.shape == (15, 3, 32, 32)
    assert (data.classes, data.name, data.pad, data.flip) == (10, "cifar10", 4, True)
    rows = np.fromfile(folder / "data_batch_2.bin", dtype=np.uint8).reshape(3, -1)
    assert data.train.labels[3:6].tolist() == rows[:, 0].tolist()
    assert torch.equal(data.train.images[4, 2, 1], torch.from_numpy(rows[1, 1 + 2048 + 32 : 1 + 2048 + 64]))
    for spec in (tmp_path, folder):
        assert torch.equal(hap_data.load(spec).test.images, data.test.images)


def test_cifar100_binary_takes_the_fine_label(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    rows = records(4, 100, 2)
    rows.tofile(folder / "train.bin")
    rows[:2].tofile(folder / "test.bin")
    data = hap_data.load("cifar100", folder)
    assert data.train.labels.tolist() == rows[:, 1].tolist()
    assert (data.classes, len(data.test)) == (100, 2)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_cifar10_python_of_python3(tmp_path: Path, protocol: int) -> None:
    rows = records(4, 10, 1)
    content = {b"batch_label": b"x", b"labels": rows[:, 0].tolist(), b"data": rows[:, 1:]}
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in TEN:
        (folder / name).write_bytes(pickle.dumps(content, protocol=protocol))
    data = hap_data.load("cifar10", tmp_path)
    assert torch.equal(data.test.images, torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32)))
    assert data.test.labels.tolist() == rows[:, 0].tolist()


def test_python2_pickle_is_read_without_unpickling(tmp_path: Path) -> None:
    rows = records(5, 10, 1)
    path = tmp_path / "test_batch"
    path.write_bytes(old_pickle(rows[:, 1:], rows[:, 0].tolist()))
    found = read_arrays(path)
    assert np.array_equal(found["data"], rows[:, 1:])
    assert found["labels"] == rows[:, 0].tolist()


def test_fortran_order_is_kept(tmp_path: Path) -> None:
    values = np.asfortranarray(np.arange(12, dtype=np.uint8).reshape(3, 4))
    path = tmp_path / "file"
    path.write_bytes(pickle.dumps({"data": values}, protocol=2))
    assert np.array_equal(read_arrays(path)["data"], values)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x80\x02cos\nsystem\nU\x04true\x85R.", "call of os system"),
        (b"\x80\x02}U\x01aitorch\nload\n.", "not a CIFAR python file"),
        (b"\x80\x02(cos\nsystem\nU\x04trueo.", "opcode OBJ"),
        (pickle.dumps({"data": np.zeros(3)}, protocol=2), "f8"),
        (pickle.dumps([1, 2], protocol=2), "holds a list"),
        (b"\x80\x02}(U\x04data", "not a CIFAR python file"),
        (b"\x80\x02u.", "not a CIFAR python file"),
        (b"", "not a CIFAR python file"),
        (b"\x80\x02U\x09os systemU\x04true\x85R.", "call of os system"),
        (b"\x80\x02(ios\nsystem\n.", "opcode INST"),
        (b"\x80\x02cos\nsystem\n)\x81.", "opcode NEWOBJ"),
        (b"\x80\x02\x82\x01.", "opcode EXT1"),
        (b"Pname\n.", "opcode PERSID"),
        (pickle.dumps(Path("name")), "call of pathlib"),
        (b"\x80\x02}" + DEEP + b"K\x01s.", "a tuple stands where text belongs"),
        (b"\x80\x02" + DEEP + b")R.", "a tuple stands where text belongs"),
        (b"\x80\x02}U\x01acnumpy\ndtype\n" + DEEP + b"\x85Rs.", "a tuple stands where text belongs"),
        (b"\x80\x02}q\x00h\x00K\x01s.", "a dict stands where text belongs"),
        (b"\x80\x02]K\x01K\x02s.", "a list stands where a dict belongs"),
        (b"\x80\x02}(U\x01au.", "not a CIFAR python file"),
        (b"\x80\x02}K\x01b.", "a dict stands where"),
        (b"\x80\x02(.", "not a CIFAR python file"),
        (b"\x80\x02}K\x01t.", "not a CIFAR python file"),
        (b"\x80\x02h\x05.", "not a CIFAR python file"),
        (b"\x80\x04}\x8e" + struct.pack("<Q", 2**62) + b"x.", "MemoryError"),
        (b"I" + b"9" * 5000 + b"\n.", "not a CIFAR python file"),
        (old_pickle(np.zeros((2, 3), np.uint8), [1]).replace(b"M\x03\x00", b"M\x04\x00"), "cannot reshape"),
        (old_pickle(np.zeros((2, 3), np.uint8), [1]).replace(b"u1", b"O8"), "array of O8"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_other_pickles_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(content)
    with pytest.raises(HapError, match=words) as caught:
        read_arrays(path)
    assert str(path) in str(caught.value)


def test_image_folder(tmp_path: Path) -> None:
    from PIL import Image

    for split, name, colour in [("train", "cat", 10), ("train", "dog", 200), ("val", "dog", 90)]:
        (tmp_path / split / name).mkdir(parents=True)
        Image.new("RGB", (40, 60), (colour, 0, 255)).save(tmp_path / split / name / "a.PNG")
    data = hap_data.load(tmp_path, size=16)
    assert data.train.images.shape == (2, 3, 16, 16)
    assert data.train.images[:, 0, 0, 0].tolist() == [10, 200]
    assert (data.train.labels.tolist(), data.test.labels.tolist(), data.classes) == ([0, 1], [1], 2)
    (tmp_path / "val" / "cow").mkdir()
    with pytest.raises(HapError, match=r"cow.*no counterpart"):
        hap_data.load(tmp_path, size=16)
    (tmp_path / "train" / "cow").mkdir()
    with pytest.raises(HapError, match=r"train/cow has no .png"):
        hap_data.load(tmp_path, size=16)
    (tmp_path / "train" / "cow" / "b.jpg").write_bytes(b"no image")
    with pytest.raises(HapError, match=r"cannot decode .*b\.jpg"):
        hap_data.load(tmp_path, size=16)


def test_image_is_cut_at_its_centre(tmp_path: Path) -> None:
    from PIL import Image

    pixels = np.zeros((32, 96, 3), dtype=np.uint8)
    pixels[:, 32:64] = 255
    for split in ("train", "test"):
        (tmp_path / split / "c").mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / split / "c" / "i.png")
    assert (hap_data.load(tmp_path, size=28).train.images == 255).all()


def test_broken_files_are_named(tmp_path: Path) -> None:
    folder = write_cifar10_binary(tmp_path)
    target = folder / "data_batch_3.bin"
    good = target.read_bytes()
    target.write_bytes(good[:-1])
    with pytest.raises(HapError, match=r"data_batch_3.bin has 9218 bytes.*3073"):
        hap_data.load("cifar10", tmp_path)
    target.write_bytes(b"\x0a" + good[1:])
    with pytest.raises(HapError, match=r"data_batch_3.bin has label 10: expected 0 to 9"):
        hap_data.load("cifar10", tmp_path)
    target.unlink()
    with pytest.raises(HapError, match=r"data_batch_3.bin is missing"):
        hap_data.load("cifar10", tmp_path)


def test_python_layout_checks_its_contents(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    pixels = np.zeros((2, 3072), dtype=np.uint8)
    for content, words in [
        ({"fine_labels": [1, 2]}, "'data' is NoneType"),
        ({"data": pixels[:, :7], "fine_labels": [1, 2]}, r"'data' is \(2, 7\)"),
        ({"data": pixels, "fine_labels": [1]}, "'fine_labels' is not a list of 2"),
        ({"data": pixels, "fine_labels": [1, 100]}, "label 100"),
    ]:
        (folder / "train").write_bytes(pickle.dumps(content, protocol=2))
        with pytest.raises(HapError, match=words):
            hap_data.load(folder)


def test_missing_folders_are_explained(tmp_path: Path) -> None:
    for arguments, words in [
        (("cifar10",), "give as root"),
        (("cifar10", tmp_path / "none"), "is not a folder"),
        (("cifar100", write_cifar10_binary(tmp_path).parent), "holds no cifar100"),
        (("mnist",), "expected digits, cifar10"),
    ]:
        with pytest.raises(HapError, match=words):
            hap_data.load(*arguments)
    (tmp_path / "empty").mkdir()
    with pytest.raises(HapError, match="no data set known here"):
        hap_data.load(tmp_path / "empty")


def test_digits_split_is_stratified_and_fixed() -> None:
    data = hap_data.load("digits")
    assert (len(data.train), len(data.test)) == (1297, 500)
    counts = data.test.labels.bincount()
    assert int(counts.min()) >= 47
    assert int(counts.max()) <= 52
    both = torch.cat([data.train.images, data.test.images]).flatten(1)
    assert len(both.unique(dim=0)) == 1797
    assert (int(both.min()), int(both.max())) == (0, 255)
    assert torch.equal(data.test.images, hap_data.load("digits").test.images)
    x = torch.cat([x for x, _ in data.batches("train")])
    assert abs(float(x.mean())) < 1e-4
    assert abs(float(x.std()) - 1) < 1e-4


@pytest.fixture
def counted() -> Data:
    """Twenty images of two channels of 3x4 pixels, each filled with its own number, which is its label."""
    values = torch.arange(1, 21, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 2, 3, 4).contiguous()
    split = Split(values, torch.arange(1, 21))
    return Data(split, split, classes=21, mean=(0.5, 0.25), std=(0.5, 0.1), name="counted", pad=1, flip=True)


def test_batches_are_normalised_in_order_with_the_remainder(counted: Data) -> None:
    batches = list(counted.batches("test", size=8))
    assert [len(y) for _, y in batches] == [8, 8, 4]
    assert torch.cat([y for _, y in batches]).tolist() == list(range(1, 21))
    x = batches[0][0]
    assert x.dtype == torch.float32
    assert float(x[2, 0, 0, 0]) == pytest.approx((3 / 255 - 0.5) / 0.5, abs=1e-6)
    assert float(x[2, 1, 0, 0]) == pytest.approx((3 / 255 - 0.25) / 0.1, abs=1e-6)


def test_epoch_is_seeded_shuffled_and_drops_the_remainder(counted: Data) -> None:
    def labels(seed: int, size: int = 8) -> list[int]:
        batches = list(counted.epoch(size, torch.Generator().manual_seed(seed)))
        assert {len(y) for _, y in batches} == {min(size, 20)}
        return torch.cat([y for _, y in batches]).tolist()

    assert labels(0) == labels(0) != labels(1)
    assert len(set(labels(0))) == len(labels(0)) == 16
    assert sorted(labels(0, size=64)) == list(range(1, 21))


def test_images_stay_with_their_labels(counted: Data) -> None:
    for augment in (False, True):
        for x, y in counted.epoch(5, torch.Generator().manual_seed(0), augment=augment):
            value = (x[:, 0].amax((1, 2)) * 0.5 + 0.5) * 255
            assert value.round().long().tolist() == y.tolist()


def test_crop_agrees_with_slicing() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(1, 256, (12, 3, 5, 6), dtype=torch.uint8, generator=generator)
    offset = torch.randint(0, 5, (12, 2), generator=generator)
    mirror = torch.rand(12, generator=generator) < 0.5
    assert mirror.any()
    assert not mirror.all()
    cut = crop(images, offset, mirror, pad=2)
    for i in range(12):
        padded = torch.zeros(3, 9, 10, dtype=torch.uint8)
        padded[:, 2:7, 2:8] = images[i]
        row, column = offset[i].tolist()
        expected = padded[:, row : row + 5, column : column + 6]
        assert torch.equal(cut[i], expected.flip(2) if mirror[i] else expected)


def test_augmentation_moves_and_mirrors(counted: Data) -> None:
    plain = torch.cat([x for x, _ in counted.epoch(20, torch.Generator().manual_seed(3), augment=False)])
    moved = torch.cat([x for x, _ in counted.epoch(20, torch.Generator().manual_seed(3))])
    black = -counted.mean[0] / counted.std[0]
    assert not (plain[:, 0] - black).abs().lt(1e-6).any()
    assert (moved[:, 0] - black).abs().lt(1e-6).any()


def test_batches_are_augmented_as_in_training(counted: Data) -> None:
    plain = torch.cat([x for x, _ in counted.batches("train")])
    with torch.random.fork_rng():
        torch.manual_seed(3)
        moved, other = counted.augment(plain), counted.augment(plain)
    black = torch.tensor([-m / s for m, s in zip(counted.mean, counted.std, strict=True)])[:, None, None]
    assert moved.shape == plain.shape and not torch.equal(moved, other)
    inside = (moved - black).abs() > 1e-5  # each pixel is black, or has the one value of its image
    assert not inside.all() and inside.any()
    assert torch.allclose(moved[inside], plain.expand_as(moved)[inside], atol=1e-5)


def test_calibration_is_fixed_and_plain(counted: Data) -> None:
    first, again = counted.calibration(12, seed=1, size=5), counted.calibration(12, seed=1, size=5)
    assert [len(y) for _, y in first] == [5, 5, 2]
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first, again, strict=True))
    drawn = torch.cat([y for _, y in first]).tolist()
    assert len(set(drawn)) == 12
    assert drawn != torch.cat([y for _, y in counted.calibration(12, seed=2, size=5)]).tolist()
    assert float(first[0][0][0, 0, 0, 0]) == pytest.approx((drawn[0] / 255 - 0.5) / 0.5, abs=1e-6)
    with pytest.raises(HapError, match="wants 21 images"):
        counted.calibration(21)


def test_data_refuses_bad_tensors(counted: Data) -> None:
    images, labels = counted.train.images, counted.train.labels
    for split, words in [
        (Split(images.float(), labels), "float32"),
        (Split(images, labels[:3]), r"expected int64 \(20,\)"),
        (Split(images[:0], labels[:0]), "no images"),
        (Split(images, labels + 1), "labels run from 2 to 21, expected 0 to 20"),
    ]:
        with pytest.raises(HapError, match=words):
            Data(split, split, classes=21, mean=(0.0, 0.0), std=(1.0, 1.0), name="bad")
    with pytest.raises(HapError, match="unknown split 'val'"):
        counted.batches("val")
