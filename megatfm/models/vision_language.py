"""Vision-language model (LLaVA; Liu et al. 2023): an image encoder, a connector, and a decoder of text and images.

A batch has two rows, as for an encoder-decoder: "encoder_" fields hold images, the others text, in which
`connector.image_token_id` stands once for each patch of the row's images, in their order.
"""

from collections.abc import Collection
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig, PatchEmbeddingConfig
from megatfm.config.image_text import make_image_tower
from megatfm.layers.attention.kv_cache import KVCache
from megatfm.layers.embedding import InputEmbedding, TokenGather
from megatfm.layers.initialisation import make_initialiser
from megatfm.layers.linear import Linear
from megatfm.layers.loss_terms import add_by_name
from megatfm.layers.output_head import LMHead
from megatfm.layers.sequence import SequenceMetadata
from megatfm.layers.sequence_views import SequenceShard
from megatfm.models.base import MODELS, Model, Output, list_sequence_fields, list_target_fields, make_sequence
from megatfm.models.stack import Stack
from megatfm.ops.transfer import move_to_device, to_host
from megatfm.split_points import CarrySpec, SplitPoint

# B batch, S tokens of the image row, T of the text row, V width of the image encoder, D of the decoder


class Connector(nn.Module):
    """Maps vectors of the image encoder [B, S, V] to the decoder's width [B, S, D], token by token."""

    tp_plan = (("w_in", "sequence_parallel"), ("w_out", "sequence_parallel"))
    cp_plan = "local"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.connector is not None  # checked with the config
        assert config.vision_tower is not None
        width, d, bias = config.vision_tower.d_model, config.d_model, config.connector.bias
        initial = make_initialiser(config, "decoder")
        self.w_in = Linear(width, d, initial("dense", width, d), bias=bias)
        self.w_out = Linear(d, d, initial("dense", d, d), bias=bias) if config.connector.name == "mlp" else None

    def forward(self, hidden_BSV: Tensor) -> Tensor:
        y_BSD: Tensor = self.w_in(hidden_BSV)
        return y_BSD if self.w_out is None else self.w_out(F.gelu(y_BSD))


@MODELS.register("vision_language")
class VisionLanguage(Model):
    """Image encoder, connector and decoder; the image encoder's weights are those of the family "encoder"."""

    tp_plan = (("image_vectors", "gather_output_for_tokens"),)
    is_causal, takes_cache = True, True

    encoder: Stack | None
    decoder: Stack | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        images = make_image_tower(config)
        assert config.connector is not None  # checked with the config
        assert isinstance(images.embedding, PatchEmbeddingConfig)
        self.image_token_id = config.connector.image_token_id
        self.n_special_tokens = images.embedding.n_special_tokens
        self.encoder = Stack(images, "encoder", embedding=InputEmbedding(images, "encoder"))
        self.connector = Connector(config)
        self.image_vectors = nn.Identity()  # where tensor parallelism gathers the vectors of a row's images
        self.gather = TokenGather()
        embedding = InputEmbedding(config, "decoder", inserts_vectors=True)
        self.decoder = Stack(config, "decoder", embedding=embedding)
        self.runs_connector, self.runs_head = True, config.lm_head.name != "none"
        self.head = LMHead(config, embedding.tied_table(config)) if self.runs_head else None
        self.add_heads(embedding.table)
        image_fields = (f"encoder_{name}" for name in ("patches", *list_sequence_fields(images)))
        self.accept("tokens", *list_sequence_fields(config), *image_fields, targets=list_target_fields(config))
        vectors = {"image_vectors": CarrySpec("encoder_positions", config.d_model)}
        self.split_points = [
            *self.encoder.split_points("encoder", "encoder_hidden", side="encoder_"),
            SplitPoint("connector", ("connector",), ("encoder_hidden",), vectors, "encoder_tokens"),
            *self.decoder.split_points(
                "decoder", reads=("image_vectors",), embedding_modules=("image_vectors", "gather")
            ),
            *([SplitPoint("head", ("head",), ("hidden",))] if self.runs_head else []),
            *self.list_head_points(),
        ]

    def forward(
        self,
        tokens: Tensor | None = None,
        encoder_patches: Tensor | None = None,
        *,
        targets: Tensor | None = None,
        keys: Tensor | None = None,
        cache: KVCache | None = None,
        encoder_hidden: Tensor | None = None,
        image_vectors: Tensor | None = None,
        hidden: Tensor | None = None,
        **fields: Tensor | None,
    ) -> Output:
        """Run the model on int64 tokens [B, T] and uint8 patches [B, S, K]; without patches on text alone.

        A row's tokens have `connector.image_token_id` once for each patch of its images. targets [B, T]: next tokens,
        −100 where none counts; gives `losses` instead of `logits`. Both sides take positions and documents, the images'
        with the prefix "encoder_", and they need grid. cache: tokens before these. encoder_hidden, image_vectors,
        hidden: from the previous pipeline stage. Raises TypeError for patches of another number than image tokens.
        """
        batch = self.read(tokens=tokens, encoder_patches=encoder_patches, targets=targets, keys=keys, **fields)
        sequence = make_sequence(batch, "tokens", keys=keys, cache=cache)
        x_BTD, losses, logits = hidden, dict[str, Tensor](), None
        runs_embedding = self.decoder is not None and self.decoder.embedding is not None

        if encoder_patches is not None:
            images = make_sequence(batch, "patches", "encoder_", keys=keys)
            if self.encoder is not None:
                encoder_hidden, losses = self.encoder(encoder_patches, images, hidden=encoder_hidden)
            if self.runs_connector:
                image_vectors = self.connector(encoder_hidden)
            if runs_embedding:
                is_image_BT = batch["tokens"] == self.image_token_id
                index_BT = self._find_patch_indices(batch, images)
                vectors_BTD = self.gather(self.image_vectors(image_vectors), index_BT, images.length)
                sequence.inserted = (is_image_BT, vectors_BTD * is_image_BT[..., None])
        if self.decoder is not None:
            x_BTD, decoder_losses = self.decoder(batch["tokens"], sequence, hidden=hidden, cache=cache)
            losses = add_by_name(losses, decoder_losses)
        if self.head is not None and self.runs_head:
            if targets is not None:
                losses["causal"] = self.head(x_BTD, targets)
            elif not self.has_targets(batch):
                logits = self.head(x_BTD)
        carry = {
            "encoder_hidden": None if self.runs_connector else encoder_hidden,
            "image_vectors": None if runs_embedding else image_vectors,
        }
        return self.output(batch, x_BTD, losses, logits, carry=carry, sequence=sequence)

    def _find_patch_indices(self, batch: dict[str, Tensor], images: SequenceMetadata) -> Tensor:
        """Return the index in the image row of each token of the full text rows, −1 where it is text."""
        tokens = batch["tokens"]
        if not isinstance(images, SequenceShard):
            return find_patch_indices(tokens == self.image_token_id, images, self.n_special_tokens)
        is_image_BT = to_host(batch["full_row_tokens"]) == self.image_token_id
        full_images = images.full_sequence.on_host()
        return move_to_device(find_patch_indices(is_image_BT, full_images, self.n_special_tokens), tokens.device)

    def stage(self, names: Collection[str]) -> Self:
        """Return a view that runs these split points only, for a pipeline stage."""
        view = super().stage(names)
        view.runs_connector = "connector" in names
        return view


def find_patch_indices(is_image_BT: Tensor, images: SequenceMetadata, n_special: int) -> Tensor:
    """Return the index [B, T] in the image row of the patch that each image token stands for, in order; −1 elsewhere.

    n_special: class and register tokens before an image's patches, which are left out. Raises TypeError for a row with
    another number of image tokens than patches (on a GPU a device assertion, so that the host need not wait).
    """
    is_patch_BS = images.positions >= n_special
    if images.documents is not None:
        is_patch_BS = is_patch_BS & (images.documents >= 0)
    n_patches_B, n_image_tokens_B = is_patch_BS.sum(1), is_image_BT.sum(1)
    fits = (n_patches_B == n_image_tokens_B).all()
    if is_image_BT.device.type == "cpu" and not fits:
        row = int((n_patches_B != n_image_tokens_B).nonzero()[0, 0])
        raise TypeError(
            f"row {row} has {int(n_image_tokens_B[row])} image tokens and images of {int(n_patches_B[row])} patches: "
            "put model.connector.image_token_id into the text once for each patch"
        )
    torch._assert_async(fits)
    # Patches first, in their order.
    order_BS = is_patch_BS.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    rank_BT = (is_image_BT.cumsum(1) - 1).clamp(min=0, max=order_BS.shape[1] - 1)
    return order_BS.gather(1, rank_BT).where(is_image_BT, -1)
