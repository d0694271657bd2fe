"""A data set held whole in memory as bytes, with batches normalised and augmented where the bytes live."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from hap.errors import HapError

Batch = tuple[Tensor, Tensor]

PIXELS_AHEAD = 2**23
"""Small batches are made several at a time, up to so many values (32 MiB): fewer and larger kernels."""


@dataclass(frozen=True)
class Split:
    """`images` is uint8 (N, C, H, W), `labels` is int64 (N)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> "Split":
        return Split(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Data:
    """A training and a test split with what is needed to feed them to a network.

    `mean` and `std` are per channel, in units where a pixel runs from 0 to 1. `pad` is the width of the black
    border of the random crop and `flip` allows mirror images; both are used by `epoch` alone.
    """

    train: Split
    test: Split
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    name: str
    pad: int = 0
    flip: bool = False

    def __post_init__(self) -> None:
        for which, split in (("train", self.train), ("test", self.test)):
            _check_split(f"{self.name} {which}", split, self.classes)

    def to(self, device: torch.device | str) -> "Data":
        """Data with its images on `device`; nothing is copied that is there already."""
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    def batches(self, split: str = "test", size: int = 500) -> Iterator[Batch]:
        """Normalised (x, y) in stored order, without augmentation; the last batch may be smaller."""
        chosen = self._split(split)
        scale, shift = self._affine()
        pairs = zip(chosen.images.split(size), chosen.labels.split(size), strict=True)
        return ((images.float() * scale + shift, labels) for images, labels in pairs)

    def epoch(self, size: int, generator: torch.Generator, augment: bool = True) -> Iterator[Batch]:
        """One pass over the training split in random order: normalised float (x, y), all of `size`.

        The last partial batch is dropped; a split smaller than `size` makes one batch. `generator` is a CPU
        generator, so that the order does not depend on the device. All draws are made before the first batch.
        """
        count = len(self.train)
        size = min(size, count)
        order = torch.randperm(count, generator=generator)[: count - count % size]
        shifts = torch.randint(0, 2 * self.pad + 1, (len(order), 2), generator=generator)
        mirrored = torch.rand(len(order), generator=generator) < 0.5
        device = self.train.images.device
        ahead = size * max(1, PIXELS_AHEAD // (size * self.train.images[0].numel()))
        chunks = (t.to(device).split(ahead) for t in (order, shifts, mirrored))
        scale, shift = self._affine()
        for index, offset, mirror in zip(*chunks, strict=True):
            images = self.train.images[index]
            if augment and (self.pad or self.flip):
                images = crop(images, offset, mirror & self.flip, self.pad)
            x, y = images.float() * scale + shift, self.train.labels[index]
            yield from zip(x.split(size), y.split(size), strict=True)

    def augment(self, images: Tensor) -> Tensor:
        """Normalised images cropped and mirrored at random, as `epoch` does it, drawn by torch's own generator."""
        count, device = len(images), images.device
        offset, mirrored = torch.randint(0, 2 * self.pad + 1, (count, 2)), torch.rand(count) < 0.5
        black = self._affine()[1].to(images)
        return crop(images - black, offset.to(device), (mirrored & self.flip).to(device), self.pad) + black

    def calibration(self, n: int = 512, seed: int = 0, size: int = 128) -> list[Batch]:
        """`n` training images drawn once by `seed`, in normalised batches of `size`, without augmentation."""
        if not 1 <= n <= len(self.train):
            raise HapError(f"calibration wants {n} images: {self.name} has 1 to {len(self.train)} to draw from")
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(seed))[:n]
        index = order.to(self.train.images.device)
        drawn = Split(self.train.images[index], self.train.labels[index])
        return list(replace(self, test=drawn).batches("test", size))

    def _split(self, name: str) -> Split:
        if name not in ("train", "test"):
            raise HapError(f"unknown split {name!r}: expected 'train' or 'test'")
        return self.train if name == "train" else self.test

    def _affine(self) -> tuple[Tensor, Tensor]:
        """The scale and shift, each (C, 1, 1), that take a byte to a normalised float."""
        device = self.train.images.device
        mean, std = (torch.tensor(v, device=device).view(-1, 1, 1) for v in (self.mean, self.std))
        return 1 / (255 * std), -mean / std


def crop(images: Tensor, offset: Tensor, mirror: Tensor, pad: int) -> Tensor:
    """Each image cut back to its size out of a black border, some of them mirrored.

    images (N, C, H, W); offset int64 (N, 2), the row and column of the cut, 0 to 2 pad; mirror bool (N).
    """
    count, channels, height, width = images.shape
    device = images.device
    rows = torch.arange(height, device=device) + offset[:, :1]
    columns = torch.arange(width, device=device).expand(count, width)
    columns = torch.where(mirror[:, None], width - 1 - columns, columns) + offset[:, 1:]
    image = torch.arange(count, device=device).view(-1, 1, 1, 1)
    channel = torch.arange(channels, device=device).view(1, -1, 1, 1)
    padded = functional.pad(images, (pad, pad, pad, pad))
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


def _check_split(name: str, split: Split, classes: int) -> None:
    images, labels = split.images, split.labels
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise HapError(f"{name}: images are {images.dtype} {tuple(images.shape)}, expected uint8 (N, C, H, W)")
    if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
        raise HapError(f"{name}: labels are {labels.dtype} {tuple(labels.shape)}, expected int64 ({len(images)},)")
    if not len(labels):
        raise HapError(f"{name}: no images, expected at least one")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise HapError(f"{name}: labels run from {low} to {high}, expected 0 to {classes - 1}")
