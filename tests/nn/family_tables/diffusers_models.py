"""Families of diffusers: U-Nets and transformers that tell noise from a picture, and the coders around them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.libraries import library
from tests.nn.family_tables.family import Family

__all__ = ["DIFFUSERS"]

WORDS, WIDTH = 6, 16  # of a prompt, and how wide each is


def noise_loss(model: nn.Module, noise: Tensor, **given: Any) -> Tensor:
    return F.mse_loss(model(**given).sample, noise)


def coded_loss(model: nn.Module, sample: Tensor) -> Tensor:
    return F.mse_loss(model(sample).sample, sample)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def steps(rows: int) -> Tensor:
    return torch.randint(1000, (rows,))


def pictures(rows: int, length: int) -> dict[str, Tensor]:
    return {"sample": drawn(rows, 3, 16, 16)}


def noised(rows: int, length: int) -> dict[str, Tensor]:
    return {"sample": drawn(rows, 3, 16, 16), "timestep": steps(rows), "noise": drawn(rows, 3, 16, 16)}


def prompted(rows: int, length: int) -> dict[str, Tensor]:
    return {**noised(rows, length), "encoder_hidden_states": drawn(rows, WORDS, WIDTH)}


def controlled(rows: int, length: int) -> dict[str, Tensor]:
    batch = {**prompted(rows, length), "controlnet_cond": drawn(rows, 3, 16, 16)}
    return {**batch, "noise": drawn(rows, 16, 8, 8)}


def control_loss(model: nn.Module, noise: Tensor, **given: Any) -> Tensor:
    found = model(**given)
    loss: Tensor = F.mse_loss(found.mid_block_res_sample, noise) + sum(
        each.square().mean() for each in found.down_block_res_samples
    )
    return loss


def filmed(rows: int, length: int) -> dict[str, Tensor]:
    return {**prompted(rows, length), "sample": drawn(rows, 3, 4, 16, 16), "noise": drawn(rows, 3, 4, 16, 16)}


def latent(rows: int, length: int) -> dict[str, Tensor]:
    return {
        "hidden_states": drawn(rows, 4, 8, 8), "timestep": steps(rows), "class_labels": torch.randint(5, (rows,)),
        "noise": drawn(rows, 4, 8, 8),
    }  # fmt: skip


def described(rows: int, length: int) -> dict[str, Tensor]:
    return {
        "hidden_states": drawn(rows, 4, 8, 8), "timestep": steps(rows), "noise": drawn(rows, 4, 8, 8),
        "encoder_hidden_states": drawn(rows, WORDS, WIDTH),
    }  # fmt: skip


def pooled(rows: int, length: int) -> dict[str, Tensor]:
    return {**described(rows, length), "pooled_projections": drawn(rows, WIDTH)}


def filmed_latent(rows: int, length: int) -> dict[str, Tensor]:
    return {**described(rows, length), "hidden_states": drawn(rows, 4, 2, 8, 8), "noise": drawn(rows, 4, 2, 8, 8)}


def filmed_frames(rows: int, length: int) -> dict[str, Tensor]:
    return {**described(rows, length), "hidden_states": drawn(rows, 2, 4, 8, 8), "noise": drawn(rows, 2, 4, 8, 8)}


def flux(rows: int, length: int) -> dict[str, Tensor]:
    return {
        "hidden_states": drawn(rows, 16, 16), "encoder_hidden_states": drawn(rows, WORDS, WIDTH),
        "pooled_projections": drawn(rows, WIDTH), "timestep": torch.rand(rows, dtype=torch.float64),
        "noise": drawn(rows, 16, 16),
    }  # fmt: skip


def flux_loss(model: nn.Module, hidden_states: Tensor, **given: Any) -> Tensor:
    """Where each patch and word lies is the same for all rows."""
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0))
    return noise_loss(model, hidden_states=hidden_states, img_ids=places, txt_ids=torch.zeros(WORDS, 3), **given)


BLOCKS: dict[str, Any] = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}


def model(
    kind: str,
    batch: Callable[[int, int], dict[str, Tensor]],
    loss: Callable[..., Tensor] = noise_loss,
    **sizes: Any,
) -> Family:
    def make(small: Mapping[str, Any]) -> nn.Module:
        built: nn.Module = getattr(library("diffusers"), kind)(**sizes)
        for part in built.modules():  # what begins at zero would hide what lies behind it
            if isinstance(part, nn.Linear | nn.Conv2d) and not part.weight.any():
                nn.init.normal_(part.weight, std=0.02)
        return built

    return Family("diffusers", make, batch, loss)


DIFFUSERS = {
    "UNet2DModel": model(
        "UNet2DModel", noised, sample_size=16, **BLOCKS,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    ),
    "UNet2DConditionModel": model(
        "UNet2DConditionModel", prompted, sample_size=16, in_channels=3, out_channels=3, **BLOCKS,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D",
        "CrossAttnUpBlock2D"),
        cross_attention_dim=WIDTH, attention_head_dim=4,
    ),
    "UNet3DConditionModel": model(
        "UNet3DConditionModel", filmed, sample_size=16, in_channels=3, out_channels=3, **BLOCKS,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), up_block_types=("UpBlock3D",
        "CrossAttnUpBlock3D"),
        cross_attention_dim=WIDTH, attention_head_dim=8,
    ),
    "ControlNetModel": model(
        "ControlNetModel", controlled, control_loss, in_channels=3, **BLOCKS,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), cross_attention_dim=WIDTH, attention_head_dim=4,
        conditioning_embedding_out_channels=(8,),
    ),
    "AutoencoderKL": model(
        "AutoencoderKL", pictures, coded_loss, **BLOCKS, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    ),
    "VQModel": model(
        "VQModel", pictures, coded_loss, **BLOCKS, latent_channels=4, num_vq_embeddings=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    ),
    "AutoencoderDC": model(
        "AutoencoderDC", pictures, coded_loss, latent_channels=4, encoder_block_out_channels=(8, 16),
        decoder_block_out_channels=(8, 16), encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)), attention_head_dim=8,
        encoder_block_types=("ResBlock", "EfficientViTBlock"), decoder_block_types=("ResBlock",
        "EfficientViTBlock"),
        decoder_norm_types="rms_norm", decoder_act_fns="silu",
    ),
    "DiTTransformer2DModel": model(
        "DiTTransformer2DModel", latent, **HEADS, in_channels=4, out_channels=4, norm_num_groups=4, sample_size=8,
        num_embeds_ada_norm=5,
    ),
    "PixArtTransformer2DModel": model(
        "PixArtTransformer2DModel", described, **HEADS, in_channels=4, out_channels=4, norm_num_groups=4,
        sample_size=8,
        caption_channels=WIDTH, cross_attention_dim=16, use_additional_conditions=False,
    ),
    "SD3Transformer2DModel": model(
        "SD3Transformer2DModel", pooled, sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2,
        attention_head_dim=8, num_attention_heads=2, caption_projection_dim=16, joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH, pos_embed_max_size=8,
    ),
    "FluxTransformer2DModel": model(
        "FluxTransformer2DModel", flux, flux_loss, in_channels=16, num_layers=2, num_single_layers=2,
        attention_head_dim=8, num_attention_heads=2, joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH,
        axes_dims_rope=(2, 2, 4),
    ),
    "SanaTransformer2DModel": model(
        "SanaTransformer2DModel", described, in_channels=4, out_channels=4, num_layers=2, num_attention_heads=2,
        attention_head_dim=8, num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16,
        caption_channels=WIDTH, sample_size=8,
    ),
    "CogVideoXTransformer3DModel": model(
        "CogVideoXTransformer3DModel", filmed_frames, num_attention_heads=2, attention_head_dim=8, in_channels=4,
        out_channels=4, time_embed_dim=8, text_embed_dim=WIDTH, num_layers=2, sample_width=8, sample_height=8,
        sample_frames=5, max_text_seq_length=WORDS,
    ),
    "WanTransformer3DModel": model(
        "WanTransformer3DModel", filmed_latent, patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12,
        in_channels=4, out_channels=4, text_dim=WIDTH, freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=16,
    ),
    "AuraFlowTransformer2DModel": model(
        "AuraFlowTransformer2DModel", described, sample_size=8, in_channels=4, out_channels=4, num_mmdit_layers=1,
        num_single_dit_layers=2, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=WIDTH,
        caption_projection_dim=16, pos_embed_max_size=16,
    ),
}  # fmt: skip
