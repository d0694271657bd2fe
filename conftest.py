"""What all tests and examples in docstrings share: one thread and fixed seeds, so the same numbers on every run."""

from typing import Any

import pytest
import torch
from torch import nn

import hap

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _names_in_examples(doctest_namespace: dict[str, Any]) -> None:
    """An example in a docstring of hap starts from these names, as the docs do."""
    doctest_namespace.update(hap=hap, torch=torch, nn=nn)
