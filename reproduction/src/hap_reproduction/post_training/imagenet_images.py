"""Five images of each ImageNet class: two to calibrate with, one to choose settings by, two to test with.

The images are those of the validation set in the repository ndb796/Small-ImageNet-Validation-Dataset-1000-Classes, in
folders named by the number of their class. Of each folder, in the order of names, images 1 and 2 calibrate, image 3 is
held out, images 4 and 5 are test images.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from rich.progress import track
from torch import Tensor

from hap.data import Batch
from hap.errors import HapError
from hap.utils.atomic_files import write_atomic

SIDE, RESIZED = 224, 256
PER_CLASS = 5
PARTS = {"calibration": (0, 1), "held out": (2,), "test": (3, 4)}
"""Which images of a class, in the order of their names."""
MEANS = (103.939, 116.779, 123.68)
"""What the weights expect to be taken away: of blue, green and red, 0 to 255."""


@dataclass(frozen=True)
class Images:
    """All images as uint8 RGB crops (images, 3, side, side), class by class, `PER_CLASS` of each."""

    pixels: np.ndarray

    def rows(self, part: str) -> list[int]:
        """Where the images of a part are: the first one of each class, then the second ones."""
        return [first + place for place in PARTS[part] for first in range(0, len(self.pixels), PER_CLASS)]

    def batch(self, rows: Sequence[int]) -> Batch:
        """Images as the network expects them, with their classes."""
        return prepared(torch.from_numpy(self.pixels[list(rows)])), torch.tensor(rows) // PER_CLASS

    def batches(self, part: str, size: int) -> list[Sequence[int]]:
        """The rows of a part, so many at once."""
        rows = self.rows(part)
        return [rows[i : i + size] for i in range(0, len(rows), size)]

    def calibration(self, count: int, size: int = 64, seed: int = 0) -> list[Batch]:
        """So many calibration images, drawn at random, so that batches have classes of all kinds."""
        rows = self.rows("calibration")
        drawn = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count].tolist()
        if len(drawn) < count:
            raise HapError(f"there are {len(rows)} calibration images, not {count}")
        return [self.batch([rows[i] for i in drawn[start : start + size]]) for start in range(0, count, size)]


def prepared(pixels: Tensor) -> Tensor:
    """RGB bytes as the weights expect them: blue first, less the means, channels last in memory as this is fastest."""
    means = torch.tensor(MEANS).view(3, 1, 1)
    return (pixels.flip(1).float() - means).contiguous(memory_format=torch.channels_last)


# ---- decoding ------------------------------------------------------------------------------------------------


def load(folder: Path) -> Images:
    """The images below a folder; decoded once, to a file beside them that later calls read as it is needed."""
    path = folder / f"crops-{SIDE}.npy"
    if not path.exists():
        files = listed(folder)
        write_atomic(path, lambda partial: _decode_all(files, partial))
    return Images(np.load(path, mmap_mode="r"))


def listed(folder: Path) -> list[Path]:
    """The files of all classes: folders by number, the files of each by name."""
    files: list[Path] = []
    for place in sorted((p for p in folder.glob("*/*") if p.is_dir() and p.name.isdigit()), key=lambda p: int(p.name)):
        if int(place.name) * PER_CLASS != len(files):
            raise HapError(
                f"{place.parent} has no folder {len(files) // PER_CLASS}: classes count from 0 without a gap"
            )
        found = sorted(place.glob("*.JPEG"))
        if len(found) != PER_CLASS:
            raise HapError(f"{place} has {len(found)} images; expected {PER_CLASS}")
        files += found
    if not files:
        raise HapError(f"{folder} has no folders of images, such as ILSVRC2012_img_val_subset/0")
    return files


def _decode_all(files: list[Path], path: Path) -> None:
    pixels = open_memmap(path, "w+", np.uint8, (len(files), 3, SIDE, SIDE))
    for row, file in enumerate(track(files, description="decoding")):
        pixels[row] = decoded(file)
    pixels.flush()


def decoded(path: Path) -> np.ndarray:
    """The middle of an image whose shorter side is resized to 256: RGB, (3, 224, 224)."""
    from PIL import Image

    with Image.open(path) as opened:
        image: Any = opened.convert("RGB")
    scale = RESIZED / min(image.size)
    width, height = (round(side * scale) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - SIDE) // 2, (height - SIDE) // 2
    return np.asarray(image.crop((left, top, left + SIDE, top + SIDE))).transpose(2, 0, 1)
