"""The 1,797 handwritten digits of 8x8 pixels that come with scikit-learn."""

import numpy as np
import torch

from hap.data.dataset import Data, Split
from hap.errors import optional_package

TEST_IMAGES = 500


def load_digits() -> Data:
    """Digits with a fixed stratified split: 1,297 training and 500 test images, uint8 (N, 1, 8, 8)."""
    with optional_package("the digits need scikit-learn, which is missing", "data"):
        from sklearn.datasets import load_digits as read
    bunch = read()
    labels = torch.from_numpy(np.asarray(bunch.target, dtype=np.int64))
    # Pixels are counts from 0 to 16.
    images = torch.from_numpy(np.rint(bunch.images * (255 / 16)).astype(np.uint8)).unsqueeze(1)
    train, test = _stratified(bunch.target)
    pixels = images[train].float() / 255
    return Data(
        Split(images[train], labels[train]),
        Split(images[test], labels[test]),
        classes=10,
        mean=(pixels.mean().item(),),
        std=(pixels.std().item(),),
        name="digits",
    )


def _stratified(labels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the training and the test images, both in stored order.

    Evenly spaced picks from a list sorted by class, shuffled within each, give each class its share.
    """
    shuffled = np.random.RandomState(0).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    test = by_class[np.arange(TEST_IMAGES) * len(labels) // TEST_IMAGES]
    train = np.setdiff1d(np.arange(len(labels)), test)
    return torch.from_numpy(train), torch.from_numpy(np.sort(test))
