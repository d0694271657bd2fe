"""CIFAR-10 and CIFAR-100 from the archives' own folders, in the binary or the python layout."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hap.data.dataset import Data, Split
from hap.data.pickles import read_arrays
from hap.errors import HapError

PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Layout:
    """Where one version of one data set keeps its images.

    `label_bytes` counts the label bytes before each image in a binary file, the last of them being the one
    used; it is 0 for the python layout, whose labels stand in the list `label_key`.
    """

    name: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    classes: int
    label_bytes: int = 0
    label_key: str = ""


_FIVE = tuple(f"data_batch_{i}" for i in range(1, 6))

LAYOUTS = (
    Layout("cifar10", "cifar-10-batches-bin", tuple(f"{n}.bin" for n in _FIVE), ("test_batch.bin",), 10, 1),
    Layout("cifar100", "cifar-100-binary", ("train.bin",), ("test.bin",), 100, 2),
    Layout("cifar10", "cifar-10-batches-py", _FIVE, ("test_batch",), 10, label_key="labels"),
    Layout("cifar100", "cifar-100-python", ("train",), ("test",), 100, label_key="fine_labels"),
)

# Of the 50,000 training images, in units where a pixel runs from 0 to 1.
STATISTICS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


def find_layout(root: Path, name: str | None = None) -> tuple[Layout, Path] | None:
    """The first layout that `root` is, or directly contains, with its folder; `name` narrows the choice."""
    root = root.resolve()
    for layout in LAYOUTS:
        if name not in (None, layout.name):
            continue
        for folder in (root, root / layout.folder):
            if folder.name == layout.folder and folder.is_dir():
                return layout, folder
    return None


def load_cifar(layout: Layout, folder: Path) -> Data:
    """All images of one layout, uint8 (N, 3, 32, 32); a file may hold fewer than its usual number."""
    mean, std = STATISTICS[layout.name]
    return Data(
        _read_split(layout, [folder / name for name in layout.train]),
        _read_split(layout, [folder / name for name in layout.test]),
        classes=layout.classes,
        mean=mean,
        std=std,
        name=layout.name,
        pad=4,
        flip=True,
    )


def _read_split(layout: Layout, paths: list[Path]) -> Split:
    parts = [_read_file(layout, path) for path in paths]
    images = np.concatenate([images for images, _ in parts]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([labels for _, labels in parts])
    return Split(torch.from_numpy(images), torch.from_numpy(labels))


def _read_file(layout: Layout, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 (N, 3072) and labels int64 (N) of one file, checked."""
    if not path.is_file():
        raise HapError(f"{path} is missing: unpack the whole {layout.name} archive into {path.parent}")
    images, labels = _read_python(layout, path) if layout.label_key else _read_binary(layout, path)
    bad = labels[(labels < 0) | (labels >= layout.classes)]
    if len(bad):
        raise HapError(f"{path} has label {bad[0]}: expected 0 to {layout.classes - 1}; fetch the file again")
    return images, labels


def _read_binary(layout: Layout, path: Path) -> tuple[np.ndarray, np.ndarray]:
    record = layout.label_bytes + PIXELS
    content = np.fromfile(path, dtype=np.uint8)
    if not len(content) or len(content) % record:
        raise HapError(
            f"{path} has {len(content)} bytes: expected a whole number of records of {record} bytes; "
            "fetch the file again"
        )
    rows = content.reshape(-1, record)
    return rows[:, layout.label_bytes :], rows[:, layout.label_bytes - 1].astype(np.int64)


def _read_python(layout: Layout, path: Path) -> tuple[np.ndarray, np.ndarray]:
    content = read_arrays(path)
    images, labels = content.get("data"), content.get(layout.label_key)
    if not isinstance(images, np.ndarray) or images.ndim != 2 or images.shape[1] != PIXELS:
        found = images.shape if isinstance(images, np.ndarray) else type(images).__name__
        raise HapError(f"{path}: 'data' is {found}, expected bytes (N, {PIXELS}); fetch the file again")
    if not isinstance(labels, list) or len(labels) != len(images) or not all(type(n) is int for n in labels):
        raise HapError(f"{path}: {layout.label_key!r} is not a list of {len(images)} numbers; fetch it again")
    return images, np.array(labels, dtype=np.int64)
