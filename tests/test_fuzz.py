"""Some of the random modules that `python tests/fuzz.py` runs by the thousand."""

from __future__ import annotations

import pytest

from fuzz import check_seed
from random_modules import make

SEEDS = [*range(92, 120), 365, 376, 1731, 1829]  # heads of width 1; as many heads as inputs; a slice of a few channels


@pytest.mark.parametrize("seed", SEEDS)
def test_random_module(seed: int) -> None:
    seen = check_seed(seed)
    assert seen["plans"] == 4


def test_the_same_seed_gives_the_same_module() -> None:
    (one, example), (two, again) = make(7), make(7)
    assert one.blocks == two.blocks
    assert all((a == b).all() for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert all((a == b).all() for a, b in zip(example, again, strict=True))
