"""The 1,797 handwritten digits of 8x8 pixels that come with scikit-learn."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from hap.data.dataset import Data, Split
from hap.errors import HapError

TEST_IMAGES = 500


def load_digits() -> Data:
    """Digits with a fixed stratified split: 1,297 training and 500 test images, uint8 (N, 1, 8, 8)."""
    package = find_spec("sklearn")  # of which a file is all that is needed: importing it takes a second
    if package is None or package.origin is None:
        raise HapError("the digits need scikit-learn, which is missing: pip install 'hessian-aware-pruning[data]'")
    table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    pixels, targets = table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1].astype(np.int64)
    labels = torch.from_numpy(targets)
    # Pixels are counts from 0 to 16.
    images = torch.from_numpy(np.rint(pixels * (255 / 16)).astype(np.uint8))
    train, test = _stratified(targets)
    seen = images[train].float() / 255
    return Data(
        Split(images[train], labels[train]),
        Split(images[test], labels[test]),
        classes=10,
        mean=(seen.mean().item(),),
        std=(seen.std().item(),),
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
