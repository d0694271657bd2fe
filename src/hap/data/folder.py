"""Image folders: train/CLASS/*.png|jpg beside val/CLASS/... or test/CLASS/..."""

from pathlib import Path

import numpy as np
import torch
from rich.progress import track

from hap.data.dataset import Data, Split
from hap.errors import HapError, optional_package

SUFFIXES = (".png", ".jpg", ".jpeg")
# What networks trained on ImageNet expect.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# The usual evaluation transform: the shorter side is resized to 256 for a crop of 224.
RESIZE = 256 / 224


def load_folder(root: Path, size: int = 224) -> Data:
    """All images decoded to `size` x `size` and held in memory: 3 size^2 bytes an image, 150 kB at 224."""
    train, test = root / "train", _test_folder(root)
    classes = _class_names(train)
    unknown = set(_class_names(test)) - set(classes)
    if unknown:
        raise HapError(f"{test / min(unknown)} has no counterpart in {train}: both need the same class folders")
    return Data(
        _read_split(train, classes, size),
        _read_split(test, classes, size),
        classes=len(classes),
        mean=MEAN,
        std=STD,
        name=root.resolve().name,
        pad=size // 8,
        flip=True,
    )


def is_image_folder(root: Path) -> bool:
    """Whether `root` has the two folders of splits."""
    return (root / "train").is_dir() and any((root / name).is_dir() for name in ("val", "test"))


def _test_folder(root: Path) -> Path:
    return root / "val" if (root / "val").is_dir() else root / "test"


def _class_names(split: Path) -> list[str]:
    names = sorted(p.name for p in split.iterdir() if p.is_dir())
    if not names:
        raise HapError(f"{split} has no class folders: expected {split.name}/CLASS/*.png or *.jpg")
    return names


def _read_split(split: Path, classes: list[str], size: int) -> Split:
    files: list[tuple[Path, int]] = []
    for label, name in enumerate(classes):
        if not (split / name).is_dir():
            continue
        found = sorted(p for p in (split / name).iterdir() if p.suffix.lower() in SUFFIXES)
        if not found:
            raise HapError(f"{split / name} has no {', '.join(SUFFIXES)} files: add some or remove the folder")
        files += [(path, label) for path in found]
    images = torch.empty(len(files), 3, size, size, dtype=torch.uint8)
    for row, (path, _) in enumerate(track(files, description=f"reading {split.name}")):
        images[row] = _decode(path, size)
    return Split(images, torch.tensor([label for _, label in files]))


def _decode(path: Path, size: int) -> torch.Tensor:
    """One image, shorter side resized and centre cropped, uint8 (3, size, size)."""
    with optional_package("image folders need pillow, which is missing", "data"):
        from PIL import Image
    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    except OSError as error:
        raise HapError(f"cannot decode {path}: {error}; mend or remove the file") from error
    scale = size * RESIZE / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    pixels = np.asarray(image.crop((left, top, left + size, top + size)))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)
