"""ELECTRA (Clark et al. 2020): a small generator replaces masked tokens, a discriminator detects the replacements."""

from collections.abc import Collection, Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import GQAAttentionConfig, ModelConfig
from megatfm.errors import UsageError
from megatfm.layers.embedding import InputEmbedding
from megatfm.layers.feed_forward import ACTIVATIONS
from megatfm.layers.initialisation import make_initialiser
from megatfm.layers.linear import Linear
from megatfm.layers.loss_terms import add_by_name
from megatfm.models.base import (
    MODELS,
    Model,
    Output,
    filter_names_below,
    list_sequence_fields,
    make_sequence,
    make_view,
)
from megatfm.models.stack import Stack
from megatfm.models.transformer import Encoder
from megatfm.ops.cross_entropy import IGNORE
from megatfm.ops.keyed_random import draw_uniform, fold_in, make_token_keys
from megatfm.ops.transfer import find_true_indices, move_to_device, to_host
from megatfm.split_points import CarrySpec, SplitPoint

# B batch, T tokens, M masked tokens, D model width, V vocabulary

SAMPLING_SALT = 0x5A3B1E
"""Makes the random keys of sampling differ from those of dropout."""


@MODELS.register("electra")
class Electra(Model):
    """Generator and discriminator, which share the embeddings of tokens and positions (section 3.2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        embedding, generator_config = InputEmbedding(config, "encoder"), make_generator_config(config)
        self.discriminator = Discriminator(config, embedding=embedding)
        self.generator = Encoder(
            generator_config,
            embedding=InputEmbedding(generator_config, "encoder", shared=embedding, share_positions=True),
        )
        self.accept("tokens", "original", *list_sequence_fields(config))
        generator, discriminator = self.generator.encoder, self.discriminator.encoder
        corrupted = ("corrupted_tokens",)
        assert generator is not None  # as in every whole model
        assert discriminator is not None
        self.split_points = [
            *generator.split_points("generator.encoder", "generator_hidden"),
            SplitPoint(
                "generator.head",
                ("generator.head", "generator.head"),  # it runs twice: for its loss, and to sample
                ("generator_hidden",),
                {"corrupted_tokens": CarrySpec("tokens")},
            ),
            *discriminator.split_points("discriminator.encoder", reads=corrupted),
            SplitPoint(
                "discriminator.verdict", ("discriminator.dense", "discriminator.verdict"), ("hidden", *corrupted)
            ),
        ]

    def forward(
        self,
        tokens: Tensor,
        *,
        original: Tensor | None = None,
        targets: Tensor | None = None,
        keys: Tensor | None = None,
        generator_hidden: Tensor | None = None,
        corrupted_tokens: Tensor | None = None,
        hidden: Tensor | None = None,
        **fields: Tensor | None,
    ) -> Output:
        """Run the discriminator on int64 tokens [B, T]; with targets, train both.

        targets [B, T]: original tokens at masked positions, −100 elsewhere. original [B, T]: the unmasked tokens.
        They give the losses "generator" and "discriminator". A sampled token that equals the original counts as
        original. Sampling depends on keys [B] and on no other state. generator_hidden, corrupted_tokens, hidden: from
        the pipeline stage before. The other arguments are those of `Encoder.forward`.
        """
        batch = self.read(tokens=tokens, original=original, targets=targets, keys=keys, **fields)
        if targets is None:
            return self.discriminator(**batch)
        if original is None or keys is None:
            raise UsageError("training ELECTRA needs the fields `original` [B, T] and `keys` [B] besides targets")
        losses = dict[str, Tensor]()

        if self.generator is not None:
            # Generator and discriminator count layers from 0, so they need different random keys.
            sequence = make_sequence(batch, "tokens", keys=~keys)
            if self.generator.encoder is not None:
                generator_hidden, losses = self.generator.encoder(
                    tokens, sequence, segments=batch.get("segments"), hidden=generator_hidden
                )
            if self.generator.runs_head and self.generator.head is not None:
                losses["generator"] = self.generator.head(generator_hidden, targets)
                rng_keys_BT = make_token_keys(fold_in(keys, SAMPLING_SALT), 0, sequence.indices)
                corrupted_tokens = _sample_replacements(
                    self.generator.head, generator_hidden, original, targets, rng_keys_BT
                )
        if self.discriminator is not None:
            assert corrupted_tokens is not None  # sampled here, or by a stage before
            accepted = {name: field for name, field in batch.items() if name in self.discriminator.accepted}
            replaced = _make_replaced_labels(batch, corrupted_tokens)
            accepted |= {"tokens": corrupted_tokens, "replaced": replaced}
            output = self.discriminator(**accepted, hidden=hidden)
            hidden, losses = output.hidden, add_by_name(losses, output.losses or {})
        carry = {"generator_hidden": generator_hidden, "corrupted_tokens": corrupted_tokens}
        return self.output(batch, hidden, losses, carry=carry)

    def stage(self, names: Collection[str]) -> Self:
        """Return a view that runs these split points only, for a pipeline stage."""
        view = make_view(self)
        for path in ("generator", "discriminator"):
            names_below = filter_names_below(path, names)
            setattr(view, path, getattr(self, path).stage(names_below) if names_below else None)
        return view


def _sample_replacements(
    head: nn.Module, hidden_BTD: Any, original: Tensor, targets: Tensor, rng_keys_BT: Tensor
) -> Tensor:
    """Return the original tokens [B, T] with masked positions replaced by samples from the generator."""
    with torch.no_grad():
        # The host computes the mask, because shapes depend on the number of masked tokens.
        masked_on_host = to_host(targets) != IGNORE
        masked = move_to_device(masked_on_host, original.device)
        logits_MV = head(hidden_BTD, token_mask_BT=masked)
        # Gumbel's trick: the largest of logit − ln(−ln u) is a sample of the softmax.
        keys_M = rng_keys_BT[find_true_indices(masked_on_host, original.device)]
        noise_MV = -torch.log(-torch.log(draw_uniform(keys_M, logits_MV.shape[-1])))
        return original.masked_scatter(masked, (logits_MV.double() + noise_MV).argmax(-1))


def _make_replaced_labels(batch: Mapping[str, Tensor], corrupted: Tensor) -> Tensor:
    """Return labels [B, T]: 1 where a token differs from the original, else 0; −100 for padding."""
    original, documents = batch["original"], batch.get("documents")
    is_token = torch.ones_like(original).bool() if documents is None else documents >= 0
    return torch.where(is_token, (corrupted != original).long(), IGNORE)


@MODELS.register("discriminator")
class Discriminator(Model):
    """An encoder with a head for the log-odds that each token was replaced.

    It may have other heads as a family by itself; `lm_head.name = "none"` removes this one.
    """

    tp_plan = (("dense", "sequence_parallel"), ("verdict", "gather_output_replicated"))
    head_split_point = "verdict"

    encoder: Stack | None

    def __init__(self, config: ModelConfig, *, embedding: InputEmbedding | None = None) -> None:
        super().__init__(config)
        embedding = embedding or InputEmbedding(config, "encoder")
        self.encoder = Stack(config, "encoder", embedding=embedding)
        self.input_field = embedding.input_field
        initial, d = make_initialiser(config, "encoder"), config.d_model
        self.activation = ACTIVATIONS.get(config.ffn.activation).function
        self.runs_head = config.lm_head.name != "none"
        if self.runs_head:
            self.dense = Linear(d, d, initial("dense", d, d), bias=True)
            self.verdict = Linear(d, 1, initial("dense", d, 1), bias=True)
        self.add_heads(embedding.table)
        targets = ("replaced",) if self.runs_head else ()
        self.accept(self.input_field, *list_sequence_fields(config), targets=targets)
        self.split_points = [
            *self.encoder.split_points("encoder"),
            *([SplitPoint("verdict", ("dense", "verdict"), ("hidden",))] if self.runs_head else []),
            *self.list_head_points(),
        ]

    def forward(
        self,
        tokens: Tensor | None = None,
        *,
        replaced: Tensor | None = None,
        keys: Tensor | None = None,
        hidden: Tensor | None = None,
        **fields: Tensor | None,
    ) -> Output:
        """Run the model on int64 tokens [B, T], or on the field of another embedding.

        replaced [B, T]: 1, 0, and −100 where none counts; gives the loss "discriminator" instead of logits [B, T]. The
        other arguments are those of `Encoder.forward`.
        """
        batch = self.read(tokens=tokens, replaced=replaced, keys=keys, **fields)
        sequence = make_sequence(batch, self.input_field, keys=keys)
        x_BTD, losses, logits = hidden, dict[str, Tensor](), None

        if self.encoder is not None:
            x_BTD, losses = self.encoder(
                batch[self.input_field], sequence, segments=batch.get("segments"), hidden=hidden
            )
        if self.runs_head and (replaced is not None or not self.has_targets(batch)):
            logits = self.verdict(self.activation(self.dense(x_BTD)))[..., 0]
            if replaced is not None:
                losses["discriminator"], logits = _compute_detection_loss(logits, replaced), None
        return self.output(batch, x_BTD, losses, logits, sequence=sequence)


def _compute_detection_loss(logits_BT: Tensor, replaced_BT: Tensor) -> Tensor:
    """Return the summed binary cross-entropy of log-odds; labels of −100 do not count."""
    logits_BT = logits_BT.to(torch.promote_types(logits_BT.dtype, torch.float32))
    truth_BT = (replaced_BT == 1).to(logits_BT.dtype)
    losses_BT = F.binary_cross_entropy_with_logits(logits_BT, truth_BT, reduction="none")
    return (losses_BT * (replaced_BT != IGNORE)).sum()


def make_generator_config(config: ModelConfig) -> ModelConfig:
    """Return the generator's config, as that of an encoder. Raises UsageError without `model.generator`."""
    if config.generator is None:
        raise UsageError("model.family = 'electra' needs model.generator")
    generator = config.generator
    heads = {"n_heads": generator.n_heads, config.attention.head_dim_key: None}
    if isinstance(config.attention, GQAAttentionConfig):
        heads["n_kv_heads"] = None
    return config.model_copy(
        update={
            "family": "encoder",
            "d_model": generator.d_model,
            "n_layers": generator.n_layers or config.n_layers,
            "attention": config.attention.model_copy(update=heads),
            "ffn": config.ffn.model_copy(update={"d_ff": generator.d_ff}),
            "embedding": config.embedding.model_copy(update={"dim": config.embedding_width}),
            "generator": None,
        }
    )
