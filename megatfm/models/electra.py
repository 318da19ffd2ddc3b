"""ELECTRA (Clark et al. 2020): a small generator fills masked tokens in, a discriminator tells which were replaced."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers.activation import ACTIVATIONS
from megatfm.layers.embedding import Embedding
from megatfm.layers.initialisation import initialiser
from megatfm.layers.linear import Linear
from megatfm.models.encoder import Encoder
from megatfm.models.output import Output
from megatfm.models.registry import MODELS
from megatfm.models.stack import Stack, layout_of
from megatfm.ops.cross_entropy import IGNORE
from megatfm.ops.dropout import mix, token_keys, uniform

# B batch, T tokens, M masked tokens, D model width, V vocabulary

SAMPLING = 0x5A3B1E
"""Sets the keys of sampling apart from those of dropout."""


@MODELS.register("electra")
class Electra(nn.Module):
    """Both share the embeddings of tokens and positions (section 3.2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.discriminator = Discriminator(config)
        embedding = self.discriminator.encoder.embedding
        smaller = generator_config(config)
        self.generator = Encoder(
            smaller, embedding=Embedding(smaller, "encoder", shared=embedding, share_positions=True)
        )

    def forward(
        self,
        tokens: Tensor,
        *,
        original: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        segments: Tensor | None = None,
        targets: Tensor | None = None,
        keys: Tensor | None = None,
    ) -> Output:
        """Without targets, the discriminator's verdict on int64 tokens [B, T].

        With targets [B, T] (the tokens that were masked in `tokens`, −100 elsewhere) and `original` [B, T], the losses
        "generator" and "discriminator". A sampled token that equals the original counts as original. Sampling depends
        on keys [B] and on no other state.
        """
        where = {"positions": positions, "documents": documents, "segments": segments}
        if targets is None:
            return self.discriminator(tokens, keys=keys, **where)
        if original is None or keys is None:
            raise UsageError("ELECTRA's training needs `original` [B, T] and `keys` [B] beside targets")
        # Two stacks of the same depths: the generator's random keys are others.
        made = self.generator(tokens, targets=targets, keys=~keys, **where)
        with torch.no_grad():
            masked = targets != IGNORE
            logits_MV = self.generator.head(made.hidden, where_BT=masked)
            places = torch.arange(tokens.shape[1], device=tokens.device)
            keys_M = token_keys(mix(keys, SAMPLING), 0, places)[masked]
            # Gumbel's trick: the largest of logit − ln(−ln u) is a sample of the softmax.
            noise_MV = -torch.log(-torch.log(uniform(keys_M, logits_MV.shape[-1])))
            corrupted = original.masked_scatter(masked, (logits_MV.double() + noise_MV).argmax(-1))
            counted = torch.ones_like(masked) if documents is None else documents >= 0
            replaced = torch.where(counted, (corrupted != original).long(), IGNORE)
        judged = self.discriminator(corrupted, replaced=replaced, keys=keys, **where)
        losses = {"generator": (made.losses or {})["masked"], **(judged.losses or {})}
        return Output(judged.hidden, losses=losses)


@MODELS.register("discriminator")
class Discriminator(nn.Module):
    """An encoder and, for each token, the log-odds that it was replaced; trained, it is a family of its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Stack(config, "encoder", "full")
        initial, d = initialiser(config, "encoder"), config.d_model
        self.dense = Linear(d, d, initial("dense", d, d), bias=True)
        self.activation = ACTIVATIONS.get(config.activation).function
        self.verdict = Linear(d, 1, initial("dense", d, 1), bias=True)

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        segments: Tensor | None = None,
        replaced: Tensor | None = None,
        keys: Tensor | None = None,
    ) -> Output:
        """Logits [B, T], or, given replaced [B, T] (1, 0, and −100 where none counts), the summed loss."""
        layout = layout_of(tokens, positions, documents, keys_B=keys)
        hidden_BTD = self.encoder(tokens, layout, segments_BT=segments)
        logits_BT = self.verdict(self.activation(self.dense(hidden_BTD)))[..., 0]
        if replaced is None:
            return Output(hidden_BTD, logits=logits_BT)
        logits_BT = logits_BT.to(torch.promote_types(logits_BT.dtype, torch.float32))
        truth_BT = (replaced == 1).to(logits_BT.dtype)
        losses_BT = F.binary_cross_entropy_with_logits(logits_BT, truth_BT, reduction="none")
        return Output(hidden_BTD, losses={"discriminator": (losses_BT * (replaced != IGNORE)).sum()})


def generator_config(config: ModelConfig) -> ModelConfig:
    """The generator as an encoder of its own."""
    if config.generator is None:
        raise UsageError("model.family = 'electra' needs model.generator")
    return config.model_copy(
        update={
            "family": "encoder",
            "d_model": config.generator.d_model,
            "n_heads": config.generator.n_heads,
            "n_kv_heads": None,
            "head_dim": None,
            "d_ff": config.generator.d_ff,
            "n_layers": config.generator.n_layers or config.n_layers,
            "embedding_dim": config.embedding_width,
            "generator": None,
        }
    )
