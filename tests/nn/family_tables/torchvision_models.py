"""Families of torchvision: nets for pictures and films, with their losses."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.libraries import library
from tests.nn.family_tables.family import CLASSES, Family, classified

__all__ = ["TORCHVISION"]


def pixels(rows: int, side: int, frames: int) -> Tensor:
    shape = (rows, 3, frames, side, side) if frames else (rows, 3, side, side)
    return torch.randn(shape, dtype=torch.float64)


def with_aids(model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    """Heads on the way help those behind them."""
    return sum((F.cross_entropy(each, labels) for each in model(pixels) if each is not None), torch.zeros(()))


def segmented(model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(pixels)["out"], labels)


def model(
    make: Callable[[Any], Any],
    side: int = 32,
    *,
    loss: Callable[..., Tensor] = classified,
    frames: int = 0,
) -> Family:
    def batch(rows: int, length: int) -> dict[str, Tensor]:
        shape = (rows, side, side) if loss is segmented else (rows,)
        return {"pixels": pixels(rows, side, frames), "labels": torch.randint(CLASSES, shape)}

    def made(small: Mapping[str, Any]) -> nn.Module:
        built: nn.Module = make(library("torchvision").models)
        return built

    return Family("torchvision", made, batch, loss)


N = {"num_classes": CLASSES}


def resnet(models: Any) -> Any:
    return models.resnet.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], **N)


def vgg(models: Any) -> Any:
    return models.vgg.VGG(models.vgg.make_layers([8, "M", 16, "M"], batch_norm=True), **N)


def efficientnet(models: Any) -> Any:
    kind = models.efficientnet.MBConvConfig
    return models.efficientnet.EfficientNet([kind(1, 3, 1, 8, 8, 1), kind(4, 3, 2, 8, 16, 2)], 0.0, **N)


def swin(models: Any) -> Any:
    return models.swin_transformer.SwinTransformer([4, 4], 8, [2, 2], [1, 2], [2, 2], stochastic_depth_prob=0.0, **N)


def swin_v2(models: Any) -> Any:
    part = models.swin_transformer
    return part.SwinTransformer(
        [4, 4], 8, [2, 2], [1, 2], [2, 2], stochastic_depth_prob=0.0, block=part.SwinTransformerBlockV2,
        downsample_layer=part.PatchMergingV2, **N,
    )  # fmt: skip


def convnext(models: Any) -> Any:
    kind = models.convnext.CNBlockConfig
    return models.convnext.ConvNeXt([kind(8, 16, 1), kind(16, None, 1)], 0.0, **N)


def maxvit(models: Any) -> Any:
    return models.maxvit.MaxVit((32, 32), 8, 4, [8, 16], [1, 1], 8, stochastic_depth_prob=0.0, **N)


def fcn(models: Any) -> Any:
    back = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
    return models.segmentation.fcn.FCN(Named(back), models.segmentation.fcn.FCNHead(8, CLASSES))


def deeplab(models: Any) -> Any:
    part = models.segmentation.deeplabv3
    back = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
    return part.DeepLabV3(Named(back), part.DeepLabHead(8, CLASSES, [2, 3]))


class Named(nn.Module):
    """A body whose result has a name, as segmentation heads want it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        return {"out": self.body(pixels)}


def r3d(models: Any) -> Any:
    part = models.video.resnet
    return part.VideoResNet(part.BasicBlock, [part.Conv3DSimple] * 4, [1, 1, 1, 1], part.BasicStem, **N)


def r2plus1d(models: Any) -> Any:
    part = models.video.resnet
    return part.VideoResNet(part.BasicBlock, [part.Conv2Plus1D] * 4, [1, 1, 1, 1], part.R2Plus1dStem, **N)


def mvit(models: Any) -> Any:
    part = models.video.mvit
    blocks = [
        part.MSBlockConfig(1, 16, 16, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        part.MSBlockConfig(2, 16, 32, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
    ]
    return part.MViT((32, 32), 4, blocks, False, False, True, False, stochastic_depth_prob=0.0, **N)


def swin3d(models: Any) -> Any:
    return models.video.swin_transformer.SwinTransformer3d(
        [2, 4, 4], 8, [2, 2], [1, 2], [2, 4, 4], stochastic_depth_prob=0.0, **N
    )


TORCHVISION = {
    "resnet": model(resnet),
    "densenet": model(lambda models: models.DenseNet(4, (1, 1, 2), 8, **N)),
    "squeezenet": model(lambda models: models.squeezenet1_1(**N)),
    "mnasnet": model(lambda models: models.mnasnet0_5(**N)),
    "mobilenet_v2": model(lambda models: models.mobilenet_v2(width_mult=0.25, **N)),
    "mobilenet_v3": model(lambda models: models.mobilenet_v3_small(width_mult=0.5, **N)),
    "shufflenet": model(lambda models: models.shufflenet_v2_x0_5(**N)),
    "efficientnet": model(efficientnet),
    "convnext": model(convnext),
    "vit": model(lambda models: models.VisionTransformer(32, 8, 2, 4, 32, 64, **N)),
    "swin": model(swin),
    "swin_v2": model(swin_v2),
    "maxvit": model(maxvit),
    "fcn": model(fcn, loss=segmented),
    "deeplabv3": model(deeplab, loss=segmented),
    "r3d": model(r3d, 16, frames=4),
    "r2plus1d": model(r2plus1d, 16, frames=4),
    "mvit": model(mvit, frames=4),
    "swin3d": model(swin3d, frames=4),
}  # fmt: skip
