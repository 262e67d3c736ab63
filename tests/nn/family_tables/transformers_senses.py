"""Families of transformers that see, hear, or look ahead: pictures, films, sounds, pictures with words,
time series."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from tests.nn.family_tables.family import CLASSES, IMAGE
from tests.nn.family_tables.transformers_models import VOCABULARY, model

__all__ = ["SENSES"]

IMAGES = "AutoModelForImageClassification"
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SIGHT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
PICTURE = 60  # the word that a picture stands for


def pixels(rows: int, side: int = IMAGE) -> Tensor:
    return torch.randn(rows, 3, side, side, dtype=torch.float64)


def pictures(rows: int, length: int) -> dict[str, Tensor]:
    return {"pixel_values": pixels(rows), "labels": torch.randint(CLASSES, (rows,))}


def larger(rows: int, length: int) -> dict[str, Tensor]:
    return {"pixel_values": pixels(rows, 64), "labels": torch.randint(CLASSES, (rows,))}


def only_pictures(rows: int, length: int) -> dict[str, Tensor]:
    return {"pixel_values": pixels(rows)}


def maps(rows: int, length: int) -> dict[str, Tensor]:
    return {"pixel_values": pixels(rows), "labels": torch.randint(CLASSES, (rows, IMAGE, IMAGE))}


def films(rows: int, length: int) -> dict[str, Tensor]:
    film = torch.randn(rows, 4, 3, IMAGE, IMAGE, dtype=torch.float64)
    return {"pixel_values": film, "labels": torch.randint(CLASSES, (rows,))}


def captions(rows: int, length: int) -> dict[str, Tensor]:
    """Pictures and their captions, equally many, of which each should find its own."""
    tokens = torch.randint(3, VOCABULARY - 1, (rows, length))
    tokens[:, -1] = 2
    return {"pixel_values": pixels(rows), "input_ids": tokens}


def asked(rows: int, length: int) -> dict[str, Tensor]:
    """A picture of 16 patches, and words about it."""
    tokens = torch.randint(3, PICTURE, (rows, length + 16))
    tokens[:, 1:17] = PICTURE
    return {"input_ids": tokens, "labels": tokens, "pixel_values": pixels(rows)}


def answered(rows: int, length: int) -> dict[str, Tensor]:
    """It is said which words are asked and which answer: without,
        the model itself masks otherwise while it is traced,
    under torch.compile too."""
    batch = asked(rows, length)
    return {**batch, "token_type_ids": (torch.arange(length + 16) > 20).long().expand(rows, -1).clone()}


def heard(rows: int, length: int) -> dict[str, Tensor]:
    wave = torch.randn(rows, 400, dtype=torch.float64)
    return {"input_values": wave, "labels": torch.randint(CLASSES, (rows,))}


def spoken(rows: int, length: int) -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(rows, 16, 32, dtype=torch.float64),
        "labels": torch.randint(3, VOCABULARY, (rows, length)),
    }


def spectra(rows: int, length: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(rows, 32, 16, dtype=torch.float64), "labels": torch.randint(CLASSES, (rows,))}


def channels(rows: int, length: int) -> dict[str, Tensor]:
    return {
        "past_values": torch.randn(rows, 16, 2, dtype=torch.float64),
        "future_values": torch.randn(rows, 4, 2, dtype=torch.float64),
    }


WAVE = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16,
        "mask_time_prob": 0.0, "layerdrop": 0.0, "feat_extract_norm": "layer"}  # fmt: skip
TOWERS = {
    "text_config": {**TEXT, "max_position_embeddings": 32}, "vision_config": SIGHT, "projection_dim": 16,
}  # fmt: skip


def forecast_loss(model: nn.Module, **batch: Tensor) -> Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


def match_loss(model: nn.Module, **batch: Tensor) -> Tensor:
    return model(**batch, return_loss=True).loss  # type: ignore[no-any-return]


MAKERS = {
    "beit": model(IMAGES, pictures),
    "convnext": model(IMAGES, pictures, {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2,
        "patch_size": 4}),
    "convnextv2": model(IMAGES, pictures, {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2,
        "patch_size": 4}),
    "dinov2": model(IMAGES, pictures),
    "resnet": model(
        IMAGES, pictures, {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8, "layer_type": "basic"}
    ),
    "swin": model(
        IMAGES, pictures,
        {"embed_dim": 8, "depths": [1, 1], "num_attention_heads": [1, 2], "num_heads": [1, 2], "window_size": 4,
        "patch_size": 2},
    ),
    "vit": model(IMAGES, pictures),
    "poolformer": model(IMAGES, pictures, {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
        "patch_size": 7}),
    "segformer": model(
        "SegformerForSemanticSegmentation", maps,
        {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2],
         "decoder_hidden_size": 16},
    ),
    "vit_mae": model("ViTMAEForPreTraining", only_pictures, {"decoder_hidden_size": 16,
        "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2, "decoder_intermediate_size": 32}),
    "videomae": model("VideoMAEForVideoClassification", films, {"num_frames": 4, "tubelet_size": 2}),
    "timesformer": model("TimesformerForVideoClassification", films, {"num_frames": 4}),
    "clip": model("CLIPModel", captions, TOWERS),
    "siglip": model("SiglipForImageClassification", pictures, {"vision_config": SIGHT}),
    "llava": model(
        "LlavaForConditionalGeneration", asked,
        {"text_config": {"model_type": "llama", **TEXT}, "vision_config": {"model_type": "clip_vision_model",
        **SIGHT},
         "image_token_id": PICTURE, "image_seq_length": 16},
    ),
    "paligemma": model(
        "PaliGemmaForConditionalGeneration", answered,
        {"text_config": {"model_type": "gemma", **TEXT, "head_dim": 8},
         "vision_config": {"model_type": "siglip_vision_model", **SIGHT, "vision_use_head": False,
         "projection_dim": 32}, "projection_dim": 32,
         "image_token_id": PICTURE},
    ),
    "whisper": model(
        "WhisperForConditionalGeneration", spoken,
        {"num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 32, "decoder_start_token_id": 1},
    ),
    "wav2vec2": model("AutoModelForAudioClassification", heard, WAVE),
    "hubert": model("AutoModelForAudioClassification", heard, WAVE),
    "wavlm": model("AutoModelForAudioClassification", heard, {**WAVE, "num_buckets": 8, "max_bucket_distance": 16}),
    "audio-spectrogram-transformer": model("ASTForAudioClassification", spectra, {"num_mel_bins": 16,
        "max_length": 32}),
    "patchtst": model("PatchTSTForPrediction", channels, {"num_input_channels": 2, "context_length": 16,
        "prediction_length": 4, "patch_length": 4, "patch_stride": 4, "ffn_dim": 64}),
}  # fmt: skip
SENSES = {name: make(name) for name, make in MAKERS.items()}
for name, loss in {"clip": match_loss, "patchtst": forecast_loss}.items():
    SENSES[name] = replace(SENSES[name], loss=loss)
