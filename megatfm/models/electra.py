"""ELECTRA (Clark et al. 2020): a small generator fills masked tokens in, a discriminator tells which were replaced."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import HeadsAttentionConfig, ModelConfig
from megatfm.errors import UsageError
from megatfm.layers.activation import ACTIVATIONS
from megatfm.layers.embedding import Embedding
from megatfm.layers.initialisation import initialiser
from megatfm.layers.linear import Linear
from megatfm.models.encoder import MASKED_SHARE, Encoder
from megatfm.models.output import Output
from megatfm.models.registry import MODELS
from megatfm.models.stack import Reads, Stack, layout_of
from megatfm.models.steps import Field, Pass, Step, Steps
from megatfm.ops.cross_entropy import IGNORE
from megatfm.ops.dropout import mix, token_keys, uniform
from megatfm.ops.sequence import SequenceLayout

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
        where = {"positions": positions, "documents": documents, "segments": segments, "keys": keys}
        if targets is None:
            return self.discriminator(tokens, **where)
        if original is None or keys is None:
            raise UsageError("ELECTRA's training needs `original` [B, T] and `keys` [B] beside targets")
        batch = Pass({"tokens": tokens, "original": original, "targets": targets, **where})
        self.steps().through(batch)
        return Output(batch.carry["hidden"], losses=batch.losses)

    def steps(self) -> Steps:
        """What training does."""
        reads = Reads(
            lambda batch: batch["tokens"], self._generator_layout, lambda batch: batch.get("segments")
        )
        return Steps(
            [
                *self.generator.encoder.steps("generator.encoder.", reads, writes="made"),
                Step(
                    "generator.head",
                    self._generate,
                    ("generator.head",),
                    ("made",),
                    {"corrupted": Field("tokens")},
                    share=2 * MASKED_SHARE,
                ),
                *self.discriminator.steps(
                    "discriminator.", "corrupted", lambda batch: batch.carry["corrupted"], self._replaced
                ),
            ]
        )

    def _generator_layout(self, batch: Pass) -> SequenceLayout:
        def make() -> SequenceLayout:
            # Two stacks of the same depths: the generator's random keys are others.
            return layout_of(
                batch["tokens"], batch.get("positions"), batch.get("documents"), keys_B=~batch["keys"]
            )

        return batch.once("generator layout", make)

    def _generate(self, batch: Pass) -> None:
        """The generator's loss, and what it puts in the place of masked tokens."""
        made, targets = batch.carry["made"], batch["targets"]
        batch.losses["generator"] = self.generator.head(made, targets)
        with torch.no_grad():
            masked = targets != IGNORE
            logits_MV = self.generator.head(made, where_BT=masked)
            places = torch.arange(targets.shape[1], device=targets.device)
            keys_M = token_keys(mix(batch["keys"], SAMPLING), 0, places)[masked]
            # Gumbel's trick: the largest of logit − ln(−ln u) is a sample of the softmax.
            noise_MV = -torch.log(-torch.log(uniform(keys_M, logits_MV.shape[-1])))
            batch.carry["corrupted"] = batch["original"].masked_scatter(
                masked, (logits_MV.double() + noise_MV).argmax(-1)
            )

    def _replaced(self, batch: Pass) -> Tensor:
        documents, original = batch.get("documents"), batch["original"]
        counted = torch.ones_like(original).bool() if documents is None else documents >= 0
        return torch.where(counted, (batch.carry["corrupted"] != original).long(), IGNORE)


@MODELS.register("discriminator")
class Discriminator(nn.Module):
    """An encoder and, for each token, the log-odds that it was replaced; trained, it is a family of its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Stack(config, "encoder", "full")
        initial, d = initialiser(config, "encoder"), config.d_model
        self.dense = Linear(d, d, initial("dense", d, d), bias=True)
        self.activation = ACTIVATIONS.get(config.ffn.activation).function
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
        inputs = {
            "tokens": tokens, "positions": positions, "documents": documents, "segments": segments,
            "replaced": replaced, "keys": keys,
        }  # fmt: skip
        batch = self.steps().through(Pass(inputs))
        return Output(batch.carry["hidden"], logits=batch.logits, losses=batch.losses or None)

    def steps(
        self,
        path: str = "",
        carried: str | None = None,
        tokens: Callable[[Pass], Tensor] = lambda batch: batch["tokens"],
        replaced: Callable[[Pass], Tensor | None] = lambda batch: batch.get("replaced"),
    ) -> Steps:
        """What forward does. carried: the part of the carry that `tokens` and `replaced` read, if they do."""
        more = () if carried is None else (carried,)

        def layout(batch: Pass) -> SequenceLayout:
            def make() -> SequenceLayout:
                return layout_of(
                    tokens(batch), batch.get("positions"), batch.get("documents"), keys_B=batch.get("keys")
                )

            return batch.once("layout", make)

        def judge(batch: Pass) -> None:
            logits_BT = self.verdict(self.activation(self.dense(batch.carry["hidden"])))[..., 0]
            truth = replaced(batch)
            if truth is None:
                batch.logits = logits_BT
                return
            logits_BT = logits_BT.to(torch.promote_types(logits_BT.dtype, torch.float32))
            truth_BT = (truth == 1).to(logits_BT.dtype)
            losses_BT = F.binary_cross_entropy_with_logits(logits_BT, truth_BT, reduction="none")
            batch.losses["discriminator"] = (losses_BT * (truth != IGNORE)).sum()

        reads = Reads(tokens, layout, lambda batch: batch.get("segments"), carried=more)
        uses = (f"{path}dense", f"{path}verdict")
        return Steps(
            [
                *self.encoder.steps(f"{path}encoder.", reads),
                Step(f"{path}verdict", judge, uses, ("hidden", *more)),
            ]
        )


def generator_config(config: ModelConfig) -> ModelConfig:
    """The generator as an encoder of its own."""
    if config.generator is None:
        raise UsageError("model.family = 'electra' needs model.generator")
    smaller = config.generator
    heads = {"n_heads": smaller.n_heads, "head_dim": None}
    if isinstance(config.attention, HeadsAttentionConfig):
        heads["n_kv_heads"] = None
    return config.model_copy(
        update={
            "family": "encoder",
            "d_model": smaller.d_model,
            "n_layers": smaller.n_layers or config.n_layers,
            "attention": config.attention.model_copy(update=heads),
            "ffn": config.ffn.model_copy(update={"d_ff": smaller.d_ff}),
            "embedding": config.embedding.model_copy(update={"dim": config.embedding_width}),
            "generator": None,
        }
    )
