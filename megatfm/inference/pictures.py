"""Pictures for the report of an image model: attention rollout, reconstructions and mistakes."""

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from megatfm.config import Config
from megatfm.data.contact_sheet import get_class_name
from megatfm.data.dataset import SizedRowDataset
from megatfm.data.sequences import IGNORE_INDEX
from megatfm.errors import UsageError
from megatfm.files import atomic_write, name_write_errors
from megatfm.inference.image_evaluation import Mistake, Pixels, get_image_pixels, list_image_tokens
from megatfm.layers.attention.dot_product import DotProductAttention
from megatfm.layers.patches import make_normalisation
from megatfm.models.masked_autoencoder import VARIANCE_EPS

PICTURES, FOLDER = "pictures.json", "pictures"
SMALLEST, LARGEST, GAP = 112, 224, 4
"""Pixels: smallest and largest longer side of a panel, and the gap between two panels."""
GREY = 128
"""Colour of masked patches."""
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Picture:
    """Panels [H, W, C] side by side, and a caption."""

    panels: Sequence[Pixels]
    caption: str


@dataclass(frozen=True)
class Gallery:
    """Pictures of one kind."""

    name: str
    title: str
    note: str
    pictures: Sequence[Picture]


def iter_example_batches(rows: SizedRowDataset, count: int) -> Iterator[Batch]:
    """Yield `count` rows spread evenly over a set, each as a batch of one."""
    for row in np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int)).tolist():
        fields = rows.read_rows([row])
        yield {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in fields.items()}


def make_rollout_gallery(
    model: nn.Module, config: Config, batches: Sequence[Batch], device: torch.device, names: Sequence[str]
) -> Gallery:
    """Show where the model attends: each image, and the image times the rollout, as in figure 6 of the ViT paper.

    The rollout is the class token's, or the mean over patches if the classifier reads no class token. Raises UsageError
    for a model that `record_attention` refuses.
    """
    head: Any = config.model.extra_heads.get("classifier")
    by_class_token = head is not None and "class" in head.pool
    pictures = []
    for batch in batches:
        inputs = {name: values.to(device) for name, values in batch.items() if name != "labels"}
        with record_attention(model) as maps:
            output = model(**inputs)
        reached_TT = compute_rollout(maps)[0].cpu()
        logits = (output.predictions or {}).get("classifier")
        for index, token in enumerate(_find_first_tokens(batch)):
            token_indices = list_image_tokens(batch, 0, token)
            is_patch = batch["grid"][0, token_indices, 0].numpy() >= 0
            attention_TT = reached_TT[token_indices][:, token_indices[is_patch]]
            weights = (attention_TT[0] if by_class_token else attention_TT[torch.from_numpy(is_patch)].mean(0)).numpy()
            image = get_image_pixels(batch, 0, token, _get_patch_size(config))
            label = int(batch["labels"][0, token])
            caption = "" if label == IGNORE_INDEX else f"label {get_class_name(names, label)}"
            if logits is not None:
                probability, predicted = logits[index].double().softmax(-1).max(-1)
                caption += f", predicted {get_class_name(names, int(predicted))} ({float(probability):.2f})"
            grid = tuple(batch["grid"][0, token, 2:].tolist())
            pictures.append(Picture([image, shade(image, weights.reshape(grid))], caption))
    note = "Each image, and the image times the attention that reaches its patches (Abnar & Zuidema 2020)."
    return Gallery("rollout", "Attention rollout", note, pictures)


def shade(image: Pixels, weights: NDArray[np.floating[Any]]) -> Pixels:
    """Return an image [H, W, C] times weights [h, w], scaled to a maximum of 1 and interpolated bilinearly."""
    scaled = Image.fromarray((weights / max(float(weights.max()), 1e-12)).astype(np.float32))
    factors = np.asarray(scaled.resize((image.shape[1], image.shape[0]), Image.Resampling.BILINEAR))
    shaded: Pixels = (image * factors[..., None]).round().astype(np.uint8)
    return shaded


def make_reconstruction_gallery(
    model: nn.Module, config: Config, batches: Sequence[Batch], device: torch.device
) -> Gallery:
    """Show the visible patches, the model's reconstruction, and the image, as in figure 2 of the MAE paper."""
    targets = "target_patches" if config.objective.name == "simmim" else "patches"
    pictures = []
    for batch in batches:
        inputs = {name: values.to(device) for name, values in batch.items() if name != targets}
        output, image_TK = model(**inputs), batch[targets][0]
        if targets == "patches":
            predicted_TK, is_masked_T1 = output.logits[0].cpu(), batch["source"][0, :, None] < 0
        else:
            predicted_TK = output.predictions["pixels"][0].cpu()
            is_masked_T1 = batch["masked"][0, :, None] > 0
        visible_TK = image_TK.masked_fill(is_masked_T1, GREY)
        filled_TK = torch.where(is_masked_T1, denormalize_pixels(predicted_TK, image_TK, config), image_TK)
        for token in _find_first_tokens(batch):
            panels = [
                get_image_pixels({**batch, "patches": patches_TK[None]}, 0, token, _get_patch_size(config))
                for patches_TK in (visible_TK, filled_TK, image_TK)
            ]
            pictures.append(Picture(panels, ""))
    note = "What the model sees, what it makes of that, and the image."
    pixel_decoder = config.model.pixel_decoder
    if pixel_decoder is not None and getattr(pixel_decoder, "normalize_targets", False):
        note += " Predicted patches have the image's own mean and deviation, which the model doesn't predict."
    return Gallery("reconstructions", "Reconstructions", note, pictures)


def denormalize_pixels(predicted_TK: Tensor, patches_TK: Tensor, config: Config) -> Tensor:
    """Return predicted pixels [T, K] as uint8. Normalised targets are rescaled by each patch's mean and deviation."""
    predicted_TK = predicted_TK.double()
    scale_K, shift_K = make_normalisation(config.model.embedding, predicted_TK.device, torch.float64)  # type: ignore[arg-type]
    if getattr(config.model.pixel_decoder, "normalize_targets", False):
        pixels_TK = patches_TK.double() * scale_K + shift_K
        deviation_T1 = (pixels_TK.var(-1, keepdim=True) + VARIANCE_EPS).sqrt()
        predicted_TK = predicted_TK * deviation_T1 + pixels_TK.mean(-1, keepdim=True)
    return ((predicted_TK - shift_K) / scale_K).round().clamp(0, 255).to(torch.uint8)


def make_mistakes_gallery(mistakes: Sequence[Mistake], names: Sequence[str], name: str) -> Gallery:
    """Show the most confident mistakes of an evaluation. name: of the validation set."""
    pictures = [
        Picture(
            [mistake.pixels],
            f"label {get_class_name(names, mistake.label)}, predicted {get_class_name(names, mistake.predicted)} "
            f"({mistake.probability:.2f})",
        )
        for mistake in mistakes
    ]
    return Gallery(
        f"mistakes-{name}", f"Surest mistakes, {name}", "With the probability of the predicted class.", pictures
    )


def write_pictures(run_dir: Path, step: int, galleries: Sequence[Gallery]) -> int:
    """Write galleries as PNG files and their index; return the number of pictures. Raises MegatfmError."""
    index: list[Mapping[str, Any]] = []
    for gallery in galleries:
        entries = []
        for number, picture in enumerate(gallery.pictures):
            file = Path(FOLDER) / f"{gallery.name}-{number:02d}.png"
            with name_write_errors(run_dir / file):
                (run_dir / FOLDER).mkdir(exist_ok=True)
                atomic_write(run_dir / file, join_panels(picture.panels))
            entries.append({"file": str(file), "caption": picture.caption})
        index.append({"title": gallery.title, "note": gallery.note, "pictures": entries})
    content = {"step": step, "galleries": index}
    with name_write_errors(run_dir / PICTURES):
        atomic_write(run_dir / PICTURES, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return sum(len(gallery.pictures) for gallery in galleries)


def join_panels(panels: Sequence[Pixels]) -> bytes:
    """Return panels side by side as a PNG file, with transparent gaps. Enlarged pixels are not smoothed."""
    images = []
    for panel in panels:
        image = Image.fromarray(panel if panel.shape[2] == 3 else panel[..., 0]).convert("RGBA")
        longest = max(image.size)
        scale = -(-SMALLEST // longest) if longest < SMALLEST else min(1.0, LARGEST / longest)
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        images.append(image.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BICUBIC))
    width = sum(image.width for image in images) + GAP * (len(images) - 1)
    joined = Image.new("RGBA", (width, max(image.height for image in images)))
    left = 0
    for image in images:
        joined.paste(image, (left, 0))
        left += image.width + GAP
    out = io.BytesIO()
    joined.save(out, "PNG", optimize=True)
    return out.getvalue()


def make_galleries(
    config: Config, rows: SizedRowDataset, count: int, device: torch.device, names: Sequence[str]
) -> Callable[[nn.Module], list[Gallery]]:
    """Return a function that builds the objective's galleries from a model in evaluation mode."""
    batches = list(iter_example_batches(rows, count))

    @torch.no_grad()
    def build_galleries(model: nn.Module) -> list[Gallery]:
        if config.objective.name in ("masked_image", "simmim"):
            return [make_reconstruction_gallery(model, config, batches, device)]
        if config.model.family != "encoder":
            return []
        return [make_rollout_gallery(model, config, batches, device, names)]

    return build_galleries


def _find_first_tokens(batch: Batch) -> list[int]:
    """Return the index of the first token of each image of a row, without padding."""
    is_first = batch["positions"][0] == 0
    if "documents" in batch:
        is_first = is_first & (batch["documents"][0] >= 0)
    return [int(token) for token in is_first.nonzero()[:, 0]]


def _get_patch_size(config: Config) -> int:
    return int(config.model.embedding.patch_size)  # type: ignore[union-attr]


# B batch, N heads, T tokens


@contextmanager
def record_attention(model: Any) -> Iterator[list[Tensor]]:
    """Record the mean attention over heads [B, T, T] of each layer, for a forward pass inside the block.

    The layer's kernel computes it: with the identity as values, it returns its weights. Raises UsageError unless all
    layers are dot-product attention over the same tokens.
    """
    config = model.config
    cores = [module for module in model.modules() if isinstance(module, DotProductAttention)]
    if config.family != "encoder" or len(cores) != config.n_layers:
        raise UsageError(
            "attention rollout multiplies dot-product attention of layers that have the same tokens: model.family = "
            f"{config.family!r} with model.attention.name = {config.attention.name!r} has other layers"
        )
    maps: list[Tensor] = []

    def record(core: DotProductAttention, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        q_BNTH, k_BKTH, v_BKTH, *arguments = args
        identity = torch.eye(v_BKTH.shape[-2], dtype=v_BKTH.dtype, device=v_BKTH.device)
        values = identity.expand(*v_BKTH.shape[:2], -1, -1).contiguous()
        weights_BNTT = core.forward(q_BNTH, k_BKTH, values, *arguments, **options)
        maps.append(weights_BNTT.to(torch.promote_types(weights_BNTT.dtype, torch.float32)).mean(1))

    hooks = [core.register_forward_pre_hook(record, with_kwargs=True) for core in cores]
    try:
        yield maps
    finally:
        for hook in hooks:
            hook.remove()


def compute_rollout(maps: list[Tensor]) -> Tensor:
    """Return the rollout [B, output token, input token]: the product over layers of (A + I) / 2, rows scaled to sum 1.

    How much each token of the input reaches each token of the output (Abnar & Zuidema 2020). maps: attention [B, T, T]
    of each layer, first layer first.
    """
    identity = torch.eye(maps[0].shape[-1], dtype=maps[0].dtype, device=maps[0].device)
    reached_BTT = identity.expand_as(maps[0])
    for attention_BTT in maps:
        mixed_BTT = (attention_BTT + identity) / 2
        reached_BTT = mixed_BTT / mixed_BTT.sum(-1, keepdim=True) @ reached_BTT
    return reached_BTT
