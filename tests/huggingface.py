"""Small Hugging Face models from configurations, each with an example: no weights are downloaded."""

from __future__ import annotations

import gc
import importlib.util
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

TOKENS, WIDTH, LAYERS, HEADS, HIDDEN = 60, 32, 2, 4, 48


def library() -> Any:
    """transformers, or the test is skipped."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    return _loaded()


@cache
def _loaded() -> Any:
    from hap_reproduction.glue.campaign import load_transformers

    loaded = load_transformers()
    gc.freeze()  # the garbage collector need not look through what it loads, as in conftest.py
    return loaded


def _text(rows: int = 3, length: int = 10) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, TOKENS, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return {"input_ids": ids, "attention_mask": mask}


BERT = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": HIDDEN,
    "vocab_size": TOKENS,
    "max_position_embeddings": 40,
}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", BERT),
    "roberta": ("Roberta", BERT),
    "mpnet": ("MPNet", BERT),
    "distilbert": (
        "DistilBert",
        {
            "dim": WIDTH,
            "n_layers": LAYERS,
            "n_heads": HEADS,
            "hidden_dim": HIDDEN,
            "vocab_size": TOKENS,
            "max_position_embeddings": 40,
        },
    ),
    "vit": (
        "ViT",
        {
            k: v
            for k, v in BERT.items()
            if k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        }
        | {"image_size": 16, "patch_size": 4},
    ),
    "gpt2": (
        "GPT2",
        {
            "n_embd": WIDTH,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_inner": HIDDEN,
            "vocab_size": TOKENS,
            "n_positions": 40,
            "pad_token_id": 0,
            "use_cache": False,
        },
    ),
    "llama": ("Llama", BERT | {"num_key_value_heads": 2, "pad_token_id": 0, "use_cache": False}),
}


def small(name: str, layers: int = LAYERS) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A classifier with two classes in eval mode, and an example of three samples."""
    prefix, settings = SETTINGS[name]
    settings = settings | {key: layers for key in ("num_hidden_layers", "n_layers", "n_layer") if key in settings}
    transformers = library()
    torch.manual_seed(0)
    network = getattr(transformers, f"{prefix}For{'Image' if name == 'vit' else 'Sequence'}Classification")
    model = network(network.config_class(**settings)).eval()
    return model, {"pixel_values": torch.randn(3, 3, 16, 16)} if name == "vit" else _text()
