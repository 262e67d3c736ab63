"""Models of two towers, as transformers has them, train in two pipelines of one plan as on one device."""

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow

from .families import STEPS, distance, everything, losses_of, sgd
from .family_tables.family import IMAGE
from .family_tables.transformers_models import ENDS, SMALL, VOCABULARY

# transformers says which kernels of others it does not find, and warns of its own names.
pytestmark = pytest.mark.filterwarnings("ignore")

hub: Any = importlib.import_module("transformers")
ROWS, LENGTH = 8, 10
OFF = 1e-7  # T5 and its kin compute in float32 inside
DEEP = {"encoder_layers": 2, "decoder_layers": 4}
LOOKS_BACK = {"d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 4, "num_heads": 4}
STARTS = {"decoder_start_token_id": 0}


def tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, LENGTH))


def images() -> Tensor:
    return torch.randn(ROWS, 3, IMAGE, IMAGE, dtype=torch.float64)


def translated() -> dict[str, Tensor]:
    """Sentences of unequal lengths, and what they are in another language, of which ends do not count."""
    said, mask, labels = tokens(), torch.ones(ROWS, LENGTH, dtype=torch.long), tokens()
    mask[1::3, -3:], labels[::2, -2:] = 0, -100
    return {"input_ids": said, "attention_mask": mask, "labels": labels}


def heard() -> dict[str, Tensor]:
    return {"input_features": torch.randn(ROWS, 8, 24, dtype=torch.float64), "labels": tokens()}


def seen() -> dict[str, Tensor]:
    return {"pixel_values": images(), "labels": tokens()}


def matched() -> dict[str, Tensor]:
    return {"input_ids": tokens(), "pixel_values": images()}


def own_loss(model: nn.Module, **batch: Tensor) -> Tensor:
    more = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    return model(**batch, **more).loss  # type: ignore[no-any-return]


def each_pair(model: nn.Module, **batch: Tensor) -> Tensor:
    """How far each picture is from its own text."""
    found = model(**batch)
    return (1 - F.cosine_similarity(found.text_embeds, found.image_embeds)).mean()


def all_pairs(model: nn.Module, **batch: Tensor) -> Tensor:
    """Their own loss, in which each picture is held to every text."""
    return model(**batch, return_loss=True).loss  # type: ignore[no-any-return]


def sequences(name: str, **sizes: Any) -> nn.Module:
    usual = hub.AutoConfig.for_model(name)
    known = {key: value for key, value in {**SMALL, **ENDS}.items() if hasattr(usual, key)}
    made: nn.Module = hub.AutoModelForSeq2SeqLM.from_config(hub.AutoConfig.for_model(name, **{**known, **sizes}))
    return made


def whisper() -> nn.Module:
    sizes = {key: SMALL[key] for key in SMALL if key.startswith(("encoder_", "decoder_", "d_model"))} | DEEP
    more = {"vocab_size": VOCABULARY, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 32}
    starts = {"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}
    made: nn.Module = hub.WhisperForConditionalGeneration(hub.WhisperConfig(**sizes, **more, **ENDS, **starts))
    return made


INSIDE = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
SIGHT = {**INSIDE, "image_size": IMAGE, "patch_size": 8, "num_hidden_layers": 4}


def twins(name: str) -> nn.Module:
    text = {**INSIDE, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 16, **ENDS}
    config = getattr(hub, f"{name}Config")(text_config=text, vision_config=SIGHT, projection_dim=16)
    made: nn.Module = getattr(hub, f"{name}Model")(config)
    return made


def captions() -> nn.Module:
    """A vision tower before a language model that looks at it in every layer."""
    words = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32, "vocab_size": VOCABULARY, **ENDS}
    text = hub.GPT2Config(**words, is_decoder=True, add_cross_attention=True)
    config = hub.VisionEncoderDecoderConfig.from_encoder_decoder_configs(hub.ViTConfig(**SIGHT), text)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    made: nn.Module = hub.VisionEncoderDecoderModel(config=config)
    return made


@dataclass(frozen=True)
class Towers:
    """A model with the paths of its two lists of layers, its batch and its loss."""

    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]] = translated
    lists: tuple[str, str] = ("model.encoder.layers", "model.decoder.layers")
    loss: Callable[..., Tensor] = field(default=own_loss)


BLOCKS, TWO = ("encoder.block", "decoder.block"), ("vision_model.encoder.layers", "text_model.encoder.layers")
MODELS = {
    "bart": Towers(lambda: sequences("bart", **DEEP)),
    "mbart": Towers(lambda: sequences("mbart", **DEEP)),
    "pegasus": Towers(lambda: sequences("pegasus", **DEEP)),
    "marian": Towers(lambda: sequences("marian", **DEEP, **STARTS)),
    "m2m_100": Towers(lambda: sequences("m2m_100", **DEEP)),
    "t5": Towers(lambda: sequences("t5", **LOOKS_BACK, **STARTS), lists=BLOCKS),
    "umt5": Towers(lambda: sequences("umt5", **LOOKS_BACK, **STARTS), lists=BLOCKS),
    "whisper": Towers(whisper, heard),
    "vit and gpt2": Towers(captions, seen, ("encoder.layers", "decoder.transformer.h")),
    "clip": Towers(lambda: twins("CLIP"), matched, TWO, each_pair),
    "siglip": Towers(lambda: twins("Siglip"), matched, TWO, each_pair),
}
PLANS = {
    "1f1b": "grid (pipe=2)\npipe {0} over pipe by 1f1b, 4 micro-batches\npipe {1} over pipe by 1f1b",
    "zb_v": "grid (pipe=2)\npipe {0} over pipe by zb_v, 4 micro-batches\npipe {1} over pipe by zb_v",
    "apart": "grid (pipe=3)\npipe {0} over pipe[:1] by 1f1b, 4 micro-batches\npipe {1} over pipe[1:] by 1f1b",
    "sharded": "grid (pipe=2, data=2)\npipe {0} over pipe by zb_h1, 4 micro-batches\npipe {1} over pipe by zb_h1\n"
    "**: data=S(0)",
}


def trained(towers: Towers, plan: str) -> None:
    """Losses and weights after some steps by a plan are those of one device."""
    torch.manual_seed(0)
    model = towers.make().double().eval()  # without dropout
    batches, one = [towers.batch() for _ in range(STEPS)], copy.deepcopy(model)
    optimizer = sgd(one)

    def plain(**batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = towers.loss(one, **batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    wanted = losses_of(plain, batches)
    losses = losses_of(flow.compile(model, towers.loss, sgd(model), plan=plan.format(*towers.lists)), batches)
    mine = dict(everything(model))
    assert all(abs(a - b) < OFF for a, b in zip(losses, wanted, strict=True)), f"{losses} for {wanted}"
    off = {name: distance(mine[name], value) for name, value in everything(one)}
    assert not {name: by for name, by in off.items() if not by < OFF}


@pytest.mark.sampled(1, sweep=22)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_two_pipelines_of_a_model_train_as_one_device(name: str, plan: str) -> None:
    trained(MODELS[name], PLANS[plan])


def test_a_loss_over_all_pairs_is_refused_in_micro_batches() -> None:
    with pytest.raises(flow.SbpError, match=r"matmul at .*needs more than one micro-batch at once"):
        trained(Towers(MODELS["clip"].make, matched, TWO, all_pairs), PLANS["1f1b"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_a_loss_over_all_pairs_is_that_of_one_device_in_one_micro_batch(name: str) -> None:
    trained(Towers(MODELS[name].make, matched, TWO, all_pairs), PLANS["1f1b"].replace("4 micro-", "1 micro-"))
