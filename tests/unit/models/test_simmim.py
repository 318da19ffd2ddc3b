"""SimMIM against transformers' SwinForMaskedImageModeling and ViTForMaskedImageModeling: loss, pixels, gradients."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import ViTConfig, ViTForMaskedImageModeling

from megatfm.config import ModelConfig, load_config
from megatfm.errors import UsageError
from megatfm.models import build
from tests.support.hf_encoders import build_hf_model, copy_hf_weights, draw_images
from tests.support.images import make_batch
from tests.support.models import SWIN_MODEL, SWIN_V2_OPTIONS
from tests.support.tensors import move_parameters

TOLERANCE = 1e-10
SIZE, PATCH = 64, 4
HEAD = {"extra_heads": {"pixels": {"name": "pixels", "stride": 8}}, "embedding.mask_token": True}
SWIN: dict[str, Any] = {
    **{key: value for key, value in SWIN_MODEL.items() if not key.startswith(("extra_heads", "embedding"))},
    **HEAD,
    **{f"embedding.{key}": value for key, value in SWIN_MODEL["embedding"].items()},
    "stages.grid": (SIZE // PATCH, SIZE // PATCH),
}


def masks_of(count: int) -> Tensor:
    """Masked patches [n, 256], in squares of 2 × 2, half of them, and of the last image none."""
    generator = torch.Generator().manual_seed(1)
    squares = torch.rand(count, 8, 8, generator=generator) < 0.5
    squares[-1] = False
    return squares.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)


def masked_rows(images: list[Tensor], masks: Tensor, rows: list[list[int]], n_special: int = 0) -> dict[str, Tensor]:
    """A batch whose masked patches are zero, with their pixels as targets."""
    batch = make_batch(images, PATCH, n_special, rows)
    batch["masked"] = torch.zeros(batch["patches"].shape[:2], dtype=torch.uint8)
    length = n_special + masks.shape[1]
    for row, numbers in enumerate(rows):
        for place, number in enumerate(numbers):
            begin = place * length + n_special
            batch["masked"][row, begin : begin + masks.shape[1]] = masks[number]
    batch["target_patches"] = batch["patches"]
    batch["patches"] = batch["patches"].masked_fill(batch["masked"][..., None] > 0, 0)
    return batch


def compare(actual: Any, reference: Any, names: dict[str, str], batch: dict[str, Tensor], images: list[Tensor],
            pixel_values: Tensor, masks: Tensor, n_special: int) -> None:  # fmt: skip
    expected = reference(pixel_values, bool_masked_pos=masks)
    n_pixels = masks.sum() * PATCH**2
    loss = actual(**batch).losses["pixels"] / masks.sum()
    expected_loss = expected.loss * (n_pixels + 1e-5) / n_pixels
    torch.testing.assert_close(loss, expected_loss, rtol=TOLERANCE, atol=TOLERANCE)
    inputs = {name: values for name, values in batch.items() if name != "target_patches"}
    predicted = actual(**inputs).predictions["pixels"]
    tokens = predicted.reshape(len(images), -1, predicted.shape[-1])[:, n_special:]
    pixels = tokens.reshape(len(images), 16, 16, 3, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5)
    pixels = pixels.reshape(expected.reconstruction.shape)
    torch.testing.assert_close(pixels, expected.reconstruction, rtol=1e-9, atol=TOLERANCE)
    loss.backward()
    expected_loss.backward()
    parameters_of_reference = dict(reference.named_parameters())
    assert len(names) > 20
    largest = max(float(parameter.grad.norm()) for parameter in parameters_of_reference.values())
    for name, parameter in actual.named_parameters():
        reference_gradient = parameters_of_reference[names[name]].grad.reshape(parameter.shape)
        norm = float(reference_gradient.norm())
        assert norm > 1e-6 * largest or "wk.bias" in name, f"nothing to compare for {name}"
        error = float((parameter.grad - reference_gradient).norm())
        assert error <= TOLERANCE * max(norm, 1e-6 * largest), name


@pytest.mark.parametrize("options", [{}, SWIN_V2_OPTIONS], ids=["swin", "swin v2"])
def test_swin_is_transformers(options: dict[str, Any]) -> None:
    """Two images in the first row, and one without any masked patch."""
    actual = build(ModelConfig.from_dotted(**(SWIN | options))).double().eval()
    reference = build_hf_model(actual.config, SIZE, kind="ForMaskedImageModeling", encoder_stride=8)
    names = copy_hf_weights(actual, reference)
    images, pixel_values = draw_images((SIZE, SIZE), 4)
    masks = masks_of(4)
    batch = masked_rows(images, masks, [[0, 1], [2, 3]])
    compare(actual, reference, names, batch, images, pixel_values, masks, 0)


def test_vit_is_transformers() -> None:
    """Mask tokens before positions are added; a class token, which predicts nothing."""
    config = ModelConfig.from_dotted(
        {
            "family": "encoder", "d_model": 24, "n_layers": 2, "attention.n_heads": 3, "attention.bias": True,
            "ffn.d_ff": 48, "ffn.activation": "gelu", "ffn.bias": True, "norm.name": "layer_norm",
            "norm.eps": 1e-6, "embedding.name": "patches", "embedding.patch_size": PATCH,
            "embedding.mask_token": True, "position.name": "learned_2d", "position.grid": (16, 16),
            "lm_head.name": "none", "extra_heads": {"pixels": {"name": "pixels", "stride": PATCH}},
        }
    )  # fmt: skip
    actual = build(config).double().eval()
    reference = ViTForMaskedImageModeling(
        ViTConfig(
            hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48, image_size=SIZE,
            patch_size=PATCH, encoder_stride=PATCH, layer_norm_eps=1e-6, attn_implementation="sdpa",
        )
    ).double().eval()  # fmt: skip
    move_parameters(reference, 0.3)
    parameters_of_reference = dict(reference.named_parameters())
    names = {name: vit_name(name) for name, _ in actual.named_parameters()}
    position = parameters_of_reference.pop("vit.embeddings.position_embeddings")
    places = {
        "encoder.embedding.positions.special": position[0, :1],
        "encoder.embedding.positions.weight": position[0, 1:],
    }
    for name, parameter in actual.named_parameters():
        source = places[name] if name in places else parameters_of_reference[names[name]]
        parameter.data = source.detach().reshape(parameter.shape).clone()
    images, pixel_values = draw_images((SIZE, SIZE), 3)
    masks = masks_of(3)
    batch = masked_rows(images, masks, [[0], [1], [2]], n_special=1)
    for name in places:  # one parameter of the reference, compared below
        del names[name]
    parameters = dict(actual.named_parameters())
    compare(_Without(actual, places), reference, names, batch, images, pixel_values, masks, 1)
    gradient = torch.cat([parameters[name].grad.reshape(-1, 24) for name in places])
    torch.testing.assert_close(gradient, position.grad[0], rtol=1e-9, atol=1e-12)


class _Without:
    """A model that names all parameters but some."""

    def __init__(self, model: Any, hidden: Any) -> None:
        self._model, self._hidden = model, hidden

    def __call__(self, **batch: Tensor) -> Any:
        return self._model(**batch)

    def named_parameters(self) -> Any:
        return [(name, p) for name, p in self._model.named_parameters() if name not in self._hidden]


def vit_name(name: str) -> str:
    for actual, expected in (
        ("pixels.prediction", "decoder.0"), ("encoder.embedding.mask_tokens.weight", "vit.embeddings.mask_token"),
        ("encoder.embedding.patches.projection", "vit.embeddings.patch_embeddings.projection"),
        ("encoder.embedding.patches.special", "vit.embeddings.cls_token"), ("encoder.norm", "vit.layernorm"),
        ("encoder.", "vit."), ("attn.wq", "attention.q_proj"), ("attn.wk", "attention.k_proj"),
        ("attn.wv", "attention.v_proj"), ("attn.wo", "attention.o_proj"), ("attn_residual.norm", "layernorm_before"),
        ("ffn_residual.norm", "layernorm_after"), ("ffn.w_up", "mlp.fc1"), ("ffn.w_down", "mlp.fc2"),
    ):  # fmt: skip
        name = name.replace(actual, expected)
    return name


def test_a_batch_without_masks_is_refused() -> None:
    model = build(ModelConfig.from_dotted(**SWIN)).double()
    images, _ = draw_images((SIZE, SIZE), 1)
    with pytest.raises(TypeError, match=r"needs the field 'masked'"):
        model(**make_batch(images, PATCH, 0, [[0]]))


def test_maps_that_squares_do_not_fill_are_refused() -> None:
    """15 × 15 patches are padded to a map of 8 × 8."""
    model = build(ModelConfig.from_dotted(**(SWIN | {"stages.grid": (15, 15)}))).double()
    images, _ = draw_images((60, 60), 1)
    batch = masked_rows(images, torch.ones(1, 225, dtype=torch.bool), [[0]])
    with pytest.raises(UsageError, match="multiple of 8"):
        model(**batch)


def test_another_stride_is_refused() -> None:
    with pytest.raises(ValueError, match=r"choose extra_heads.pixels.stride = 8"):
        ModelConfig.from_dotted(**(SWIN | {"extra_heads": {"pixels": {"name": "pixels", "stride": 4}}}))


def test_the_preset_has_as_many_parameters_as_transformers() -> None:
    options = transformers.SwinConfig(
        image_size=192, embed_dim=128, depths=[2, 2, 18, 2], num_heads=[4, 8, 16, 32], window_size=6,
        encoder_stride=32,
    )  # fmt: skip
    with torch.device("meta"):
        models = build(load_config("simmim-swin-b").model), transformers.SwinForMaskedImageModeling(options)
    actual, expected = (sum(parameter.numel() for parameter in model.parameters()) for model in models)
    assert actual == expected
