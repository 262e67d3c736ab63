"""Models that look at values train as graphs: the error of the capture says what to mark, and what is marked trains.

Each is held to one device over two steps. Nobody picks the marks: they are the calls that errors name, made one by one.
"""

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from tests.libraries import library
from tests.nn.graph.alike import same, same_model, sgd

MARK = re.compile(r"(flow\.nn\.eager\(model[^)]*\))(?:, or in a plan: inside (\S+) run eager)?$", re.MULTILINE)
OFF = 1e-6  # some compute in float32 inside, whatever their weights are
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}


class Model(NamedTuple):
    make: Callable[[Any], nn.Module]  # of transformers
    batch: Callable[[torch.Generator], dict[str, Any]]
    marks: tuple[str, ...]  # the modules that are marked in the end, `*` for many


@pytest.fixture(autouse=True)
def _doubles() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def words(chance: torch.Generator) -> dict[str, Any]:
    ids = torch.randint(3, 64, (4, 8), generator=chance)
    return {"input_ids": ids, "labels": ids}


def detr(library: Any) -> nn.Module:
    import transformers.loss.loss_for_object_detection as losses

    # It is imported with PIL alone, which has nothing to do with it.
    losses.center_to_corners_format = lambda b: torch.cat(
        [b[..., :2] - b[..., 2:] / 2, b[..., :2] + b[..., 2:] / 2], -1
    )
    backbone = library.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    config = library.DetrConfig(
        use_timm_backbone=False, backbone=None, backbone_config=backbone, use_pretrained_backbone=False, d_model=16,
        num_queries=5, encoder_layers=1, decoder_layers=1, num_labels=3, auxiliary_loss=False, **heads, **NO_DROPOUT,
    )  # fmt: skip
    made: nn.Module = library.DetrForObjectDetection(config)
    return made


def pictures(chance: torch.Generator) -> dict[str, Any]:
    labels = [
        {"class_labels": torch.tensor([0, 1][:many]), "boxes": torch.rand(many, 4, generator=chance)}
        for many in (1, 2, 1, 2)
    ]
    return {"pixel_values": torch.randn(4, 3, 32, 32, generator=chance), "labels": labels}


def wav2vec2(library: Any) -> nn.Module:
    none = dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"), 0.0)
    config = library.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, conv_dim=(8, 8),
        conv_stride=(4, 2), conv_kernel=(8, 4), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        vocab_size=12, final_dropout=0.0, layerdrop=0.0, ctc_loss_reduction="mean", apply_spec_augment=False, **none,
    )  # fmt: skip
    made: nn.Module = library.Wav2Vec2ForCTC(config)
    return made


def speech(chance: torch.Generator) -> dict[str, Any]:
    labels = torch.randint(1, 12, (4, 5), generator=chance)
    labels[1, 3:] = labels[3, 2:] = -100
    return {"input_values": torch.randn(4, 400, generator=chance), "labels": labels}


def encodec(library: Any) -> nn.Module:
    config = library.EncodecConfig(
        num_filters=2, hidden_size=4, codebook_size=8, codebook_dim=4, upsampling_ratios=[2], num_lstm_layers=1,
        target_bandwidths=[36.0],
    )  # fmt: skip
    made: nn.Module = library.EncodecModel(config)
    return made


def longcat(library: Any) -> nn.Module:
    config = library.LongcatFlashConfig(
        vocab_size=64, hidden_size=16, ffn_hidden_size=32, num_layers=1, num_attention_heads=2, num_key_value_heads=2,
        n_routed_experts=4, zero_expert_num=2, expert_ffn_hidden_size=16, moe_topk=2, kv_lora_rank=8, q_lora_rank=8,
        qk_nope_head_dim=8, qk_rope_head_dim=8, head_dim=8, v_head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    made: nn.Module = library.LongcatFlashForCausalLM(config)
    return made


def series(kind: str, **more: float) -> Callable[[Any], nn.Module]:
    def make(library: Any) -> nn.Module:
        config = getattr(library, f"{kind}Config")(
            prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=1, d_model=16,
            encoder_layers=2, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=16, decoder_ffn_dim=16, **{"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, **more},
            **NO_DROPOUT,
        )  # fmt: skip
        made: nn.Module = getattr(library, f"{kind}ForPrediction")(config)
        return made

    return make


def measured(chance: torch.Generator) -> dict[str, Any]:
    return {
        "past_values": torch.rand(4, 10, generator=chance),
        "past_time_features": torch.randn(4, 10, 1, generator=chance),
        "past_observed_mask": torch.ones(4, 10),
        "future_values": torch.rand(4, 4, generator=chance),
        "future_time_features": torch.randn(4, 4, 1, generator=chance),
    }


def longformer(library: Any) -> nn.Module:
    config = library.LongformerConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        attention_window=4, max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        pad_token_id=0,
    )  # fmt: skip
    made: nn.Module = library.LongformerForMaskedLM(config)
    return made


def led(library: Any) -> nn.Module:
    config = library.LEDConfig(
        vocab_size=64, d_model=16, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, attention_window=4,
        max_encoder_position_embeddings=64, max_decoder_position_embeddings=64, encoder_layerdrop=0.0,
        decoder_layerdrop=0.0, **NO_DROPOUT,
    )  # fmt: skip
    made: nn.Module = library.LEDForConditionalGeneration(config)
    return made


MODELS = {
    "detr": Model(detr, pictures, ("model.encoder.layers.0", "")),
    "wav2vec2": Model(wav2vec2, speech, ("",)),
    "encodec": Model(encodec, lambda chance: {"input_values": torch.randn(4, 1, 32, generator=chance)}, ("*",)),
    "longcat": Model(longcat, words, ("model.layers.0.mlp.experts",)),
    "time series": Model(series("TimeSeriesTransformer"), measured, ()),
    "time series, layers left out": Model(series("TimeSeriesTransformer", encoder_layerdrop=0.5), measured, ("*",)),
    "informer": Model(series("Informer"), measured, ()),
    "longformer": Model(longformer, words, ("longformer.encoder",)),
    "led": Model(led, words, ("led.encoder",)),
}


def loss_of(model: nn.Module, **batch: Any) -> Tensor:
    made = model(**batch)
    loss: Tensor | None = getattr(made, "loss", None)
    return (made.audio_values - batch["input_values"]).square().mean() if loss is None else loss


def told(error: flow.SbpflowError) -> tuple[str, str]:
    """The call that an error of a capture names, and the module that it names for a plan."""
    found = MARK.search(str(error))
    assert found is not None, error
    return found[1], found[2] or ""


def marked_by_errors(model: nn.Module, step: Callable[[], flow.nn.Graph], batch: dict[str, Any]) -> Any:
    """The step's first loss and the step, after all that its errors say was done; and the modules that were marked."""
    marks: list[str] = []
    for _ in range(40):
        made = step()
        try:
            torch.manual_seed(7)
            return made(**batch), made, tuple(marks)
        except flow.SbpflowError as error:
            call, path = told(error)
        if path in marks:
            break
        marks.append(path)
        eval(call, {"flow": flow, "model": model})
    raise AssertionError(marks)


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_on_one_device_by_the_marks_they_are_told(name: str, ranks: int) -> None:
    of = MODELS[name]
    torch.manual_seed(0)
    model = of.make(library("transformers")).double()
    one = copy.deepcopy(model)
    ones, where = sgd(one), flow.placement("cpu", range(ranks))
    batches = [of.batch(torch.Generator().manual_seed(at)) for at in range(2)]
    torch.manual_seed(7)
    wanted = []
    for batch in batches:
        loss = loss_of(one, **batch)
        loss.backward()  # type: ignore[no-untyped-call]
        ones.step()
        ones.zero_grad()
        wanted.append(loss)
    first, step, marks = marked_by_errors(
        model, lambda: flow.compile(model, loss_of, sgd(model), placement=where), batches[0]
    )
    same(first, wanted[0], OFF)
    same(step(**batches[1]), wanted[1], OFF)
    same_model(model, one, OFF)
    assert marks == of.marks or (of.marks == ("*",) and marks), marks


class Halves(nn.Module):
    """Looks at values in a layer of its own, or in the forward of the whole."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4), Looks() if inside else nn.Identity(), nn.Linear(4, 3)])
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if self.inside or x.sum() > 0 else 2 * x


class Looks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x[x > 0].mean()


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(("inside", "marks"), [(True, ("layers.1",)), (False, ("",))], ids=["layer", "whole"])
@pytest.mark.parametrize("by", ["call", "plan"])
def test_the_fix_that_an_error_names_is_the_fix(inside: bool, marks: tuple[str, ...], by: str, ranks: int) -> None:
    model = Halves(inside=inside)
    one = copy.deepcopy(model)
    ones, x = sgd(one), torch.randn(8, 4)
    plan = f"grid cpu (data={ranks})\n**: data=B\n"

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = model(x).square().mean()
        return out

    if by == "plan":
        with pytest.raises(flow.SbpflowError) as error:
            flow.compile(model, loss, sgd(model), plan=plan)(x)
        path = told(error.value)[1]
        if not inside:  # a plan names modules, and the whole is none of them
            assert not path
            return
        step = flow.compile(model, loss, sgd(model), plan=f"{plan}inside {path} run eager\n")
        first, found = step(x), (path,)
    else:
        first, step, found = marked_by_errors(
            model,
            lambda: flow.compile(model, loss, sgd(model), placement=flow.placement("cpu", range(ranks))),
            {"x": x},
        )
    assert found == marks
    for at in range(2):
        wanted = loss(one, x)
        same(step(x) if at else first, wanted)
        wanted.backward()  # type: ignore[no-untyped-call]
        ones.step()
        ones.zero_grad()
    same_model(model, one)
