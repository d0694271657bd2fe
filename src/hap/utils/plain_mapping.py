"""Mappings of any kind as dicts, the only ones that torch looks into."""

from collections.abc import Mapping
from typing import Any


def as_dict(example: Any) -> Any:
    """The example with a dict in place of any other mapping, such as a tokenizer's: torch looks into dicts alone."""
    return dict(example) if isinstance(example, Mapping) else example
