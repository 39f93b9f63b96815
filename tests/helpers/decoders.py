"""Tiny encoder-decoder models of transformers, and their inputs."""

from typing import Any

import torch
from transformers import (
    T5Config,
    T5ForConditionalGeneration,
    TrOCRConfig,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

VOCABULARY = 64
_STARTS = {"decoder_start_token_id": 1, "pad_token_id": 0}


def t5() -> Any:
    sizes = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **sizes, **_STARTS))


def whisper() -> Any:
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "num_mel_bins": 8}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    sizes |= {"max_source_positions": 8, "max_target_positions": 16}
    ids = {**_STARTS, "bos_token_id": 1, "eos_token_id": 2}
    return WhisperForConditionalGeneration(WhisperConfig(vocab_size=VOCABULARY, **sizes, **ids))


def trocr() -> Any:
    images = ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=8,
        patch_size=4,
    )
    text = TrOCRConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=16,
        max_position_embeddings=16,
    )
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(images, text, **_STARTS)
    return VisionEncoderDecoderModel(config)


DECODERS = {
    "t5": (t5, lambda: {"input_ids": torch.tensor([[3, 4]])}),
    "whisper": (whisper, lambda: {"input_features": torch.zeros(1, 8, 16)}),
    "trocr": (trocr, lambda: {"pixel_values": torch.zeros(1, 3, 8, 8)}),
}
"""Makers of a model, and of inputs without targets."""
