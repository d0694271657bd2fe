"""Small Hugging Face models: for each a class, the settings of a small one, and an example to run it on."""

from collections.abc import Callable
from typing import Any

import torch


def _text(**more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"input_ids": torch.randint(5, 96, (2, 12))} | more


def _translation() -> dict[str, Any]:
    """What an encoder reads and what a decoder has written so far."""
    return {
        "input_ids": torch.randint(5, 96, (2, 12)),
        "decoder_input_ids": torch.randint(5, 96, (2, 7)),
        "use_cache": False,
    }


def _image(side: int = 64) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": torch.randn(1, 3, side, side)}


def _sound() -> dict[str, Any]:
    return {"input_values": torch.randn(1, 2000)}


_BASE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
_WORDS = _BASE | {"vocab_size": 96, "max_position_embeddings": 64}
_GROUPED = _WORDS | {"num_key_value_heads": 2}
_PAIR = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
_PATCHES = _BASE | {"image_size": 64, "patch_size": 16}
_STAGES = {"image_size": 64, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
_WAVES = _BASE | {
    "conv_dim": (32, 32),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "vocab_size": 96,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
_DECODING = _text(use_cache=False)

HUGGING_FACE: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "albert": ("AlbertForSequenceClassification", _WORDS | {"embedding_size": 32}, _text()),
    "bert": ("BertForSequenceClassification", _WORDS, _text()),
    "camembert": ("CamembertForSequenceClassification", _WORDS, _text()),
    "deberta_v2": (
        "DebertaV2ForSequenceClassification",
        _WORDS | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        _text(),
    ),
    "distilbert": (
        "DistilBertForSequenceClassification",
        {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, "vocab_size": 96},
        _text(),
    ),
    "electra": ("ElectraForSequenceClassification", _WORDS | {"embedding_size": 32}, _text()),
    "modernbert": (
        "ModernBertForSequenceClassification",
        _WORDS | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
        _text(),
    ),
    "mpnet": ("MPNetForSequenceClassification", _WORDS, _text()),
    "roberta": ("RobertaForSequenceClassification", _WORDS, _text()),
    "bloom": ("BloomForCausalLM", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96}, _DECODING),
    "falcon": (
        "FalconForCausalLM",
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96},
        _DECODING,
    ),
    "gemma": ("GemmaForCausalLM", _GROUPED | {"head_dim": 16, "pad_token_id": 0}, _DECODING),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64},
        _DECODING,
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", _WORDS, _DECODING),
    "llama": ("LlamaForCausalLM", _GROUPED, _DECODING),
    "mistral": ("MistralForCausalLM", _GROUPED, _DECODING),
    "opt": (
        "OPTForCausalLM",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 128,
            "vocab_size": 96,
            "word_embed_proj_dim": 64,
            "max_position_embeddings": 64,
        },
        _DECODING,
    ),
    "phi": ("PhiForCausalLM", _WORDS, _DECODING),
    "qwen2": ("Qwen2ForCausalLM", _GROUPED, _DECODING),
    "qwen3": ("Qwen3ForCausalLM", _GROUPED | {"head_dim": 16}, _DECODING),
    "bart": ("BartForConditionalGeneration", _PAIR, _translation),
    "marian": (
        "MarianMTModel",
        _PAIR | {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1},
        _translation,
    ),
    "pegasus": ("PegasusForConditionalGeneration", _PAIR, _translation),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 96},
        _translation,
    ),
    "beit": ("BeitForImageClassification", _PATCHES, _image()),
    "clip": (
        "CLIPModel",
        {"text_config": _WORDS | {"eos_token_id": 2}, "vision_config": _PATCHES, "projection_dim": 32},
        lambda: _image()() | _text()(),
    ),
    "convnext": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]},
        _image(),
    ),
    "deit": ("DeiTForImageClassification", _PATCHES, _image()),
    "dinov2": ("Dinov2ForImageClassification", _PATCHES, _image()),
    "segformer": (
        "SegformerForSemanticSegmentation",
        {
            "hidden_sizes": [16, 32, 48, 64],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 3, 4],
            "decoder_hidden_size": 64,
        },
        _image(),
    ),
    "siglip": (
        "SiglipModel",
        {"text_config": _WORDS | {"projection_size": 64}, "vision_config": _PATCHES},
        lambda: _image()() | _text()(),
    ),
    "swin": ("SwinForImageClassification", _STAGES | {"patch_size": 4}, _image()),
    "swinv2": ("Swinv2ForImageClassification", _STAGES | {"patch_size": 4}, _image()),
    "vit": ("ViTForImageClassification", _PATCHES, _image()),
    "hubert": ("HubertForCTC", _WAVES, _sound),
    "wav2vec2": ("Wav2Vec2ForCTC", _WAVES, _sound),
    "whisper": (
        "WhisperForConditionalGeneration",
        _PAIR
        | {
            "num_mel_bins": 20,
            "max_source_positions": 30,
            "max_target_positions": 32,
            "pad_token_id": 0,
            "decoder_start_token_id": 1,
        },
        lambda: {
            "input_features": torch.randn(1, 20, 60),
            "decoder_input_ids": torch.randint(5, 96, (1, 7)),
            "use_cache": False,
        },
    ),
}
"""Name: model class, settings of a small one, example. Attention is whatever the library takes by default."""

_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64}
_FALCON = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
_PYRAMID = {
    "image_size": 64,
    "hidden_sizes": [16, 32, 48, 64],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 2, 3, 4],
}
_PADDED = _GROUPED | {"pad_token_id": 0}


def _video() -> dict[str, Any]:
    return {"pixel_values": torch.randn(1, 2, 3, 64, 64)}


HUGGING_FACE |= {
    "big_bird": ("BigBirdForSequenceClassification", _WORDS | {"attention_type": "original_full"}, _text()),
    "deberta": (
        "DebertaForSequenceClassification",
        _WORDS | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        _text(),
    ),
    "deberta_v3": (
        "DebertaV2ForSequenceClassification",
        _WORDS
        | {
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "share_att_key": True,
            "position_buckets": 16,
            "norm_rel_ebd": "layer_norm",
        },
        _text(),
    ),
    "esm": ("EsmForSequenceClassification", _WORDS | {"pad_token_id": 1, "position_embedding_type": "rotary"}, _text()),
    "funnel": (
        "FunnelForSequenceClassification",
        {"block_sizes": [1, 1], "d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 128, "vocab_size": 96},
        _text(),
    ),
    "roformer": ("RoFormerForSequenceClassification", _WORDS | {"embedding_size": 64}, _text()),
    "xlm": ("XLMForSequenceClassification", {"emb_dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 96}, _text()),
    "xlm_roberta": ("XLMRobertaForSequenceClassification", _WORDS, _text()),
    "codegen": ("CodeGenForCausalLM", _GPT | {"rotary_dim": 8}, _DECODING),
    "cohere": ("CohereForCausalLM", _PADDED, _DECODING),
    "falcon_alibi": ("FalconForCausalLM", _FALCON | {"multi_query": False, "alibi": True}, _DECODING),
    "falcon_grouped": ("FalconForCausalLM", _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}, _DECODING),
    "gemma2": ("Gemma2ForCausalLM", _PADDED | {"head_dim": 16}, _DECODING),
    "gemma3": ("Gemma3ForCausalLM", _PADDED | {"head_dim": 16}, _DECODING),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", _GPT, _DECODING),
    "gptj": ("GPTJForCausalLM", _GPT | {"rotary_dim": 8}, _DECODING),
    "granite": ("GraniteForCausalLM", _GROUPED, _DECODING),
    "mpt": (
        "MptForCausalLM",
        {"d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 96, "max_seq_len": 64},
        _DECODING,
    ),
    "olmo2": ("Olmo2ForCausalLM", _PADDED, _DECODING),
    "openai_gpt": ("OpenAIGPTLMHeadModel", _GPT, _text()),
    "phi3": ("Phi3ForCausalLM", _PADDED, _DECODING),
    "starcoder2": ("Starcoder2ForCausalLM", _GROUPED, _DECODING),
    "m2m_100": ("M2M100ForConditionalGeneration", _PAIR, _translation),
    "mbart": ("MBartForConditionalGeneration", _PAIR, _translation),
    "prophetnet": (
        "ProphetNetForConditionalGeneration",
        {
            "hidden_size": 64,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "num_encoder_layers": 1,
            "num_decoder_layers": 1,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "vocab_size": 96,
            "max_position_embeddings": 64,
        },
        _translation,
    ),
    "t5_encoder": ("T5EncoderModel", _T5 | {"num_layers": 3}, _text()),
    "umt5": ("UMT5ForConditionalGeneration", _T5, _translation),
    "beit_relative": ("BeitForImageClassification", _PATCHES | {"use_relative_position_bias": True}, _image()),
    "dinov2_registers": ("Dinov2WithRegistersForImageClassification", _PATCHES, _image()),
    "dinov3": ("DINOv3ViTModel", _PATCHES, _image()),
    "hiera": (
        "HieraForImageClassification",
        {
            "image_size": [64, 64],
            "embed_dim": 16,
            "depths": [1, 1, 1],
            "num_heads": [1, 2, 4],
            "masked_unit_size": [4, 4],
            "num_layers": 3,
            "query_stride": [2, 2],
            "num_query_pool": 2,
        },
        _image(),
    ),
    "levit": (
        "LevitForImageClassification",
        {
            "image_size": 64,
            "hidden_sizes": [32, 48, 64],
            "num_attention_heads": [2, 3, 4],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
        },
        _image(),
    ),
    "mobilevit": (
        "MobileViTForImageClassification",
        {"image_size": 64, "hidden_sizes": [32, 48, 64], "neck_hidden_sizes": [8, 16, 16, 32, 32, 48, 96]},
        _image(),
    ),
    "pvt": ("PvtForImageClassification", _PYRAMID, _image()),
    "pvt_v2": ("PvtV2ForImageClassification", _PYRAMID, _image()),
    "timesformer": ("TimesformerForVideoClassification", _PATCHES | {"num_frames": 2}, _video),
    "videomae": ("VideoMAEForVideoClassification", _PATCHES | {"num_frames": 2}, _video),
    "wav2vec2_conformer": ("Wav2Vec2ConformerForCTC", _WAVES | {"position_embeddings_type": "relative"}, _sound),
}
