"""The masked autoencoder against transformers; two towers in packed rows, as each pair alone; what is refused."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import ViTMAEConfig, ViTMAEForPreTraining
from transformers.models.vit_mae import modeling_vit_mae

from megatfm.config import ModelConfig, ParallelConfig, load_config
from megatfm.engines.registry import ENGINES
from megatfm.errors import MegatfmError, UsageError
from megatfm.layers.dropout import DropPath
from megatfm.layers.initialisation import initialise
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models import build
from tests.support.image_models import IMAGE_MODELS, SIDE
from tests.support.image_text_models import SIGLIP, TOWER_MODELS, TOWERS, tower_batch
from tests.support.images import draw_pixels, make_batch, make_masked_batch
from tests.support.models import SWIN_MODEL
from tests.support.reference_gradients import cast_to_float64
from tests.support.tensors import move_parameters

MAE_SIDE, GRID, D, D_DECODER = 4, (5, 5), 24, 16
CONFIG = ModelConfig.from_dotted(
    {"family": "masked_autoencoder", "d_model": D, "n_layers": 2, "attention.n_heads": 3, "attention.bias": True,
     "ffn.d_ff": 40, "ffn.activation": "gelu", "ffn.bias": True, "norm.name": "layer_norm", "norm.eps": 1e-12,
     "position.name": "sinusoidal_2d", "embedding.name": "patches", "embedding.patch_size": MAE_SIDE,
     "embedding.mean": (0.5, 0.4, 0.3), "embedding.std": (0.2, 0.3, 0.4), "lm_head.name": "none",
     "pixel_decoder": {"d_model": D_DECODER, "n_layers": 3, "n_heads": 2, "d_ff": 32}},
)  # fmt: skip
NAMES = (
    (r"^vit\.embeddings\.cls_token", "encoder.embedding.patches.special"),
    (r"^vit\.embeddings\.patch_embeddings\.", "encoder.embedding.patches."),
    (r"^vit\.layers\.", "encoder.layers."),
    (r"^vit\.layernorm\.", "encoder.norm."),
    (r"^decoder\.decoder_embed\.", "decoder.embedding.projection."),
    (r"^decoder\.mask_token", "decoder.embedding.mask_token"),
    (r"^decoder\.decoder_layers\.", "decoder.layers."),
    (r"^decoder\.decoder_norm\.", "decoder.norm."),
    (r"^decoder\.decoder_pred\.", "pixels.prediction."),
    (r"attention\.([qkvo])_proj", r"attn.w\1"),
    (r"layernorm_before", "attn_residual.norm"),
    (r"layernorm_after", "ffn_residual.norm"),
    (r"mlp\.fc1", "ffn.w_up"),
    (r"mlp\.fc2", "ffn.w_down"),
)
PIXELS = torch.arange(3 * MAE_SIDE**2).view(3, MAE_SIDE, MAE_SIDE).permute(1, 2, 0).flatten()
"""Their order of a predicted patch's pixels, channels last, as indices into ours."""


def to_our_name(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """A parameter or gradient of theirs under our name and in our shape."""
    for expected, actual in NAMES:
        name = re.sub(expected, actual, name)
    if name.startswith("pixels."):
        turned = torch.empty_like(tensor)
        turned[PIXELS] = tensor
        return name, turned
    return name, tensor.flatten(1) if tensor.dim() == 4 else tensor[0] if tensor.dim() == 3 else tensor


def positions(height: int, width: int, d: int) -> Tensor:
    """[1, 1 + h · w, d]: zeros for the class token, then [sin column | cos column | sin row | cos row], by hand."""
    rows = [torch.zeros(d, dtype=torch.float64)]
    for row in range(height):
        for column in range(width):
            angles = [[at / 10_000 ** (4 * i / d) for i in range(d // 4)] for at in (column, row)]
            waves = [torch.tensor(part, dtype=torch.float64) for part in angles]
            rows.append(torch.cat([waves[0].sin(), waves[0].cos(), waves[1].sin(), waves[1].cos()]))
    return torch.stack(rows)[None]


def make_pair(*, normalize: bool) -> tuple[nn.Module, ViTMAEForPreTraining]:
    """Ours and theirs in float64 from the same random weights; theirs with fixed positions, which it would leave 0."""
    expected = ViTMAEForPreTraining(
        ViTMAEConfig(
            hidden_size=D, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, image_size=20,
            patch_size=MAE_SIDE, decoder_hidden_size=D_DECODER, decoder_num_hidden_layers=3,
            decoder_num_attention_heads=2, decoder_intermediate_size=32, norm_pix_loss=normalize,
            attn_implementation="eager",
        )
    ).double()  # fmt: skip
    for name, parameter in move_parameters(expected, 0.3).named_parameters():
        if "pos" in name:
            parameter.data = positions(*GRID, parameter.shape[-1])
            parameter.requires_grad_(requires_grad=False)
    model = build(CONFIG.with_changes({"pixel_decoder.normalize_targets": normalize})).double()
    weights = dict(to_our_name(n, p.data) for n, p in expected.named_parameters() if p.requires_grad)
    model.load_state_dict(weights)
    return model, expected


def kept_patches(number: int) -> list[int]:
    """Patches that image `number` keeps, of 25 a quarter."""
    return sorted(torch.randperm(25, generator=torch.Generator().manual_seed(number))[:6].tolist())


@pytest.mark.parametrize("normalize", [True, False])
def test_transformers_mae(normalize: bool) -> None:
    """Two images in one row and one in another: loss, pixels and every gradient, as of three in theirs."""
    model, expected = make_pair(normalize=normalize)
    images = [draw_pixels(20, 20, seed=seed) for seed in range(3)]
    mean, std = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)))
    values = torch.stack([(image.double() / 255 - mean) / std for image in images])
    noise = torch.ones(3, 25)
    for number in range(3):
        noise[number, kept_patches(number)] = torch.arange(6) / 10
    with cast_to_float64(torch.float64, modeling_vit_mae):
        output = expected(pixel_values=values, noise=noise)
    output.loss.backward()
    patches = [kept_patches(number) for number in range(3)]
    batch = make_masked_batch(images, MAE_SIDE, 1, [[0, 1], [2]], patches, (15, 54))
    loss = model(**batch).losses["reconstruction"]
    torch.testing.assert_close(loss / (3 * 19), output.loss, rtol=1e-11, atol=1e-11)
    (loss / (3 * 19)).backward()
    expected_gradients = dict(to_our_name(n, p.grad) for n, p in expected.named_parameters() if p.requires_grad)
    assert expected_gradients.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert name.endswith("wk.bias") or parameter.grad.norm() > 1e-6, name
        torch.testing.assert_close(parameter.grad, expected_gradients[name], rtol=1e-9, atol=1e-11)
    del batch["patches"]
    predicted = model(**batch).logits
    tokens = torch.cat([predicted[0, 1:26], predicted[0, 27:52], predicted[1, 1:26]]).unflatten(0, (3, 25))
    torch.testing.assert_close(tokens[..., PIXELS], output.logits, rtol=1e-10, atol=1e-10)


# ------------------------------------------------------------------------------------------- stochastic depth


RATE = 0.6
SHAPES = [(1, 3), (2, 2), (3, 2), (2, 3)]
CONFIGS = {
    "vit": (IMAGE_MODELS["class"].with_changes({"drop_path": RATE}), 2, SHAPES),
    "swin": (ModelConfig.from_dotted(SWIN_MODEL | {"drop_path": RATE}), 0, [(8, 8)] * 4),
}
"""Model, its special tokens, and the images in patches."""
ROWS = [[0, 1, 2], [3], [2, 0]]


def draws_of(model: nn.Module, batch: dict[str, Tensor], keys: Tensor, n_images: int) -> dict[str, list[Tensor]]:
    """Factors [B, images] of each sublayer, which must be the same for all tokens of an image."""
    draws: dict[str, list[Tensor]] = {}

    def record(name: str, inputs: tuple[Tensor, SequenceMetadata], out: Tensor) -> None:
        x, sequence = inputs
        numbers = torch.zeros_like(sequence.positions) if sequence.documents is None else sequence.documents
        factors = torch.zeros(len(x), n_images, dtype=x.dtype)
        for row in range(len(x)):
            for image in range(int(numbers[row].max()) + 1):
                of_image = numbers[row] == image
                factors[row, image] = (out[row, of_image] / x[row, of_image]).mean()
                torch.testing.assert_close(out[row, of_image], x[row, of_image] * factors[row, image])
        draws.setdefault(name, []).append(factors)

    hooks = [
        module.register_forward_hook(lambda _, inputs, out, name=name: record(name, inputs, out))
        for name, module in model.named_modules()
        if isinstance(module, DropPath)
    ]
    model(**batch, keys=keys)
    for hook in hooks:
        hook.remove()
    return draws


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_images_are_dropped_as_in_a_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, n_special, shapes = CONFIGS[name]
    model = move_parameters(build(config), 0.3)
    images = [draw_pixels(SIDE * h, SIDE * w, seed=seed) for seed, (h, w) in enumerate(shapes)]
    side = max(h * w for h, w in shapes) + n_special
    batch = make_batch(images, SIDE, n_special, ROWS, labels=[0, 1, 0, 1], row_length=3 * side)
    keys = torch.arange(len(ROWS)) * 31 + 7
    draws = draws_of(model, batch, keys, 3)
    loss = sum(model(**batch, keys=keys).losses.values())
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    names = {module: n for n, module in model.named_modules()}
    model.zero_grad()
    alone, place = torch.zeros((), dtype=torch.float64), (0, 0)
    monkeypatch.setattr(DropPath, "forward", lambda self, x, _: x * draws[names[self]][0][place])
    for row, numbers in enumerate(ROWS):
        for index, number in enumerate(numbers):
            place = (row, index)
            batch_of_image = make_batch([images[number]], SIDE, n_special, [[0]], labels=[[0, 1, 0, 1][number]])
            alone = alone + sum(model(**batch_of_image, keys=keys[:1]).losses.values())
    alone.backward()
    torch.testing.assert_close(loss, alone, rtol=1e-12, atol=1e-12)
    assert gradients
    for n, parameter in model.named_parameters():
        if n in gradients:
            torch.testing.assert_close(parameter.grad, gradients[n], rtol=1e-10, atol=1e-12)
    assert any(len(factors[0].unique()) > 1 for calls in draws.values() for factors in calls), "each image is drawn"


def test_images_of_a_row_are_dropped_independently_and_the_first_as_the_row_s_only_one() -> None:
    rows, images = 20_000, 3
    keys = torch.arange(rows) * 7919 + 3
    documents = torch.arange(images).expand(rows, images)
    positions, grid = torch.zeros_like(documents), torch.ones(rows, images, 4, dtype=torch.int32)
    path, x = DropPath("here"), torch.ones(rows, images, 1, dtype=torch.float64)

    def dropped(documents: Tensor | None, grid: Tensor | None) -> Tensor:
        sequence = SequenceMetadata(positions, documents, rng_keys=keys, grid=grid)
        return path(x, sequence.at_layer(2, 0.3))[..., 0] == 0

    result = dropped(documents, grid)
    for image in range(images):
        assert float(result[:, image].double().mean()) == pytest.approx(0.3, abs=0.015)
        for other in range(image):
            dropped_together = (result[:, image] & result[:, other]).double().mean()
            assert float(dropped_together) == pytest.approx(0.09, abs=0.01)
    assert torch.equal(result[:, 0], dropped(None, grid)[:, 0])
    assert torch.equal(dropped(documents, None), result[:, :1].expand(rows, images)), "text by full rows"


# Parameters as those of the released models.


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_packed_is_each_pair_alone(name: str) -> None:
    model, batch = build(TOWER_MODELS[name]).double(), tower_batch(name)
    initialise(model, 7)
    del batch["keys"]
    features = model(**batch).predictions
    assert len(features["images"]) == len(features["texts"]) > len(batch["tokens"])
    at = 0
    for row in range(len(batch["tokens"])):
        for document in range(int(batch["documents"][row].max()) + 1):
            alone = {}
            for field in ("tokens", "encoder_patches", "encoder_grid"):
                documents = batch["encoder_documents" if field.startswith("encoder") else "documents"]
                alone[field] = batch[field][row][documents[row] == document][None]
            predictions = model(**alone).predictions
            for kind in ("images", "texts"):
                torch.testing.assert_close(features[kind][at], predictions[kind][0], rtol=1e-12, atol=1e-12)
            at += 1
    assert at == len(features["images"])
    torch.testing.assert_close(features["texts"].norm(dim=1), torch.ones(at, dtype=torch.float64), rtol=1e-12, atol=0)


def test_the_factor_has_a_bound() -> None:
    for scale, expected in ((9.0, 9.0), (11.0, 10.0)):
        model = build(ModelConfig.from_dotted(TOWERS | {"contrastive": {"scale": scale, "max_scale": 10.0}}))
        initialise(model, 0)
        factor = model.temperature()["scale"]
        assert factor.item() == pytest.approx(expected)
        factor.backward()
        assert bool(model.temperature.log_scale.grad) == (scale < 10)


def test_unequal_numbers_of_images_and_captions_are_refused() -> None:
    model, batch = build(TOWER_MODELS["softmax"]), tower_batch("softmax")
    with pytest.raises(MegatfmError, match="2 images and 3 captions"):
        model.compare({"images": torch.eye(3)[:2], "texts": torch.eye(3), "scale": torch.ones(1)})
    batch["documents"][1] = torch.where(batch["documents"][1] == 1, -1, batch["documents"][1])
    with pytest.raises(MegatfmError, match="row 1 has 2 images and 1 captions"):
        model(**batch)


@pytest.mark.parametrize(("changes", "message"), [
    ({"text_tower": None}, "needs the sections text_tower and contrastive"),
    ({"embedding": {"name": "tokens"}, "position": {"name": "none"}}, "reads images"),
    ({"lm_head.name": "linear"}, "predicts no tokens"),
    ({"text_tower.n_heads": 5}, r"text_tower.n_heads = 5 does not divide .* choose n_heads = 4"),
    ({"embedding.n_class_tokens": 0}, "image_pool = 'class' reads a class token"),
    ({"contrastive.project_image": False}, "choose width = 24"),
    ({"distinct_layers": 1}, "distinct_layers has no meaning"),
    ({"ffn.name": "moe", "ffn.n_experts": 2, "ffn.top_k": 1}, "has no meaning with family = 'two_towers'"),
    ({"family": "encoder"}, "text_tower has no meaning with family = 'encoder'"),
    ({"extra_heads.classifier.n_classes": 3}, "which compares images and captions"),
])  # fmt: skip
def test_parts_that_do_not_go_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dotted(TOWERS).with_changes(changes)
    ModelConfig.from_dotted(SIGLIP)


def test_engines_that_see_one_micro_batch_are_refused() -> None:
    config = load_config("clip-b32", ["parallel.engine=deepspeed"])
    with pytest.raises(UsageError, match=r"'deepspeed' does not declare 'compares_samples'.*'native'"):
        ENGINES.check(config, "bf16")
    ENGINES.check(config.model_copy(update={"parallel": ParallelConfig()}), "bf16")
