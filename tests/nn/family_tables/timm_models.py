"""Families of timm: nets for pictures, as small as their makers let them be."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.libraries import library
from tests.nn.family_tables.family import CLASSES, Family, classified

__all__ = ["TIMM"]


def model(kind: str, side: int = 32, **sizes: Any) -> Family:
    """Of a name of timm's list, or of a class of its models."""

    def make(small: Mapping[str, Any]) -> nn.Module:
        timm = library("timm")
        made = getattr(timm.models, kind) if kind[0].isupper() else partial(timm.create_model, kind)
        built: nn.Module = made(num_classes=CLASSES, **sizes)
        return built

    def batch(rows: int, length: int) -> dict[str, Tensor]:
        return {
            "pixels": torch.randn(rows, 3, side, side, dtype=torch.float64),
            "labels": torch.randint(CLASSES, (rows,)),
        }

    return Family("timm", make, batch, classified)


STAGES: dict[str, Any] = {"depths": (1, 1, 2, 1), "dims": (8, 16, 16, 16)}
TOKENS: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
TIMM = {
    "resnet18d": model("resnet18d", layers=(1, 1, 1, 1), channels=(8, 8, 16, 16)),
    "seresnet": model("seresnet18", layers=(1, 1, 1, 1), channels=(8, 8, 16, 16)),
    "efficientnet": model("test_efficientnet"),
    "mobilenetv3": model("mobilenetv3_small_050"),
    "convnextv2": model("convnextv2_atto", **STAGES),
    "mixer": model("MlpMixer", img_size=32, patch_size=8, num_blocks=2, embed_dim=32),
    "vit": model("vit_tiny_patch16_224", **TOKENS),
    "deit": model("deit_tiny_distilled_patch16_224", **TOKENS),
    "beit": model("beit_base_patch16_224", **TOKENS),
    "eva02": model("eva02_tiny_patch14_224", **TOKENS),
    "swin": model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=8, depths=(2, 2), num_heads=(1, 2)
    ),
    "swinv2": model(
        "swinv2_tiny_window8_256", img_size=32, window_size=4, embed_dim=8, depths=(2, 2), num_heads=(1, 2)
    ),
    "maxvit": model("test_maxvit", 64, img_size=64),
    "coatnet": model("test_coatnet", 64, img_size=64),
    "xcit": model("xcit_nano_12_p16_224", img_size=32, embed_dim=32, depth=2, num_heads=4),
    "poolformer": model("MetaFormer", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
    "mobilevit": model("mobilevit_xxs", 64),
    "nfnet": model("test_nfnet"),
    "densenet": model("densenet121", growth_rate=4, block_config=(1, 1, 2, 1)),
    "edgenext": model("edgenext_xx_small", depths=(1, 1, 1, 1), dims=(8, 16, 16, 16), heads=(2, 2, 2, 2)),
    "pvt_v2": model("pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(8, 8, 16, 16), num_heads=(1, 1, 2, 2)),
    "hiera": model("hiera_tiny_224", 32, img_size=(32, 32), embed_dim=16, stages=(1, 1), num_heads=1, q_pool=1),
    "inception_next": model("inception_next_atto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 16)),
}  # fmt: skip
