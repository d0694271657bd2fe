"""Data sets by name or by folder, held whole in memory as bytes, normalised and augmented on their device.

`dataset.py` has `Data` and its batches; `cifar.py`, `digits.py` and `folder.py` read one kind of source each, and
`pickles.py` reads CIFAR's python files without running what they name. Import from here. Start at `dataset.py`.
"""

from pathlib import Path

import torch

from hap.data.cifar import LAYOUTS, STATISTICS, find_layout, load_cifar
from hap.data.dataset import Batch, Data, Split
from hap.data.digits import load_digits
from hap.data.folder import is_image_folder, load_folder
from hap.errors import Argument, HapError

__all__ = ["Batch", "Data", "Split", "load"]


def load(
    spec: str | Path, root: str | Path | None = None, device: torch.device | str | None = None, size: int = 224
) -> Data:
    """A data set in memory.

    Arguments:
        spec: "digits"; "cifar10" or "cifar100"; or a folder, which is or holds a CIFAR archive or has image files in
            train/CLASS/* and val/CLASS/* (or test).
        root: the folder that holds the unpacked archive.
        device: where the images go; None leaves them on the CPU.
        size: the side of the square that image files are cut to.

    >>> data = load("digits")
    >>> len(data.train), len(data.test), next(data.batches("test", 4))[0].shape
    (1297, 500, torch.Size([4, 1, 8, 8]))
    """
    data = _load(spec, None if root is None else Path(root), size)
    return data if device is None else data.to(device)


def _load(spec: str | Path, root: Path | None, size: int) -> Data:
    if spec == "digits":
        return load_digits()
    if spec in STATISTICS:
        return _load_named_cifar(str(spec), root)
    folder = Path(spec) if root is None else root / spec
    if not folder.is_dir():
        raise HapError(f"data {str(spec)!r}: expected digits, cifar10, cifar100 or a folder; {folder} is none")
    found = find_layout(folder)
    if found is not None:
        return load_cifar(*found)
    if is_image_folder(folder):
        return load_folder(folder, size)
    raise HapError(
        f"{folder} holds no data set known here: expected {', '.join(layout.folder for layout in LAYOUTS)}, "
        "or train/CLASS/* beside val/CLASS/* or test/CLASS/*"
    )


def _load_named_cifar(name: str, root: Path | None) -> Data:
    folders = " or ".join(layout.folder for layout in LAYOUTS if layout.name == name)
    if root is None:
        where = Argument("data_root", text="root")
        raise HapError(f"data {name!r} needs its folder: give as ", where, f" the folder that holds {folders}")
    if not root.is_dir():
        raise HapError(f"{root} is not a folder: expected the folder that holds {folders}")
    found = find_layout(root, name)
    if found is None:
        raise HapError(f"{root} holds no {name}: expected {folders} in it")
    return load_cifar(*found)
