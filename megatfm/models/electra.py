"""ELECTRA (Clark et al. 2020): a small generator fills masked tokens in, a discriminator tells which were replaced."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import HeadsAttentionConfig, ModelConfig
from megatfm.errors import UsageError
from megatfm.layers.activation import ACTIVATIONS
from megatfm.layers.embedding import Embedding
from megatfm.layers.initialisation import initialiser
from megatfm.layers.linear import Linear
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models.encoder import Encoder
from megatfm.models.heads import add_heads
from megatfm.models.output import Output
from megatfm.models.registry import MODELS
from megatfm.models.stack import Stack, StackInputs, sequence_metadata
from megatfm.models.steps import Field, ForwardPass, ModelStep, ModelSteps
from megatfm.ops.cross_entropy import IGNORE
from megatfm.ops.dropout import mix, token_keys, uniform

# B batch, T tokens, M masked tokens, D model width, V vocabulary

SAMPLING = 0x5A3B1E
"""Sets the keys of sampling apart from those of dropout."""


@MODELS.register("electra")
class Electra(nn.Module):
    """Both share the embeddings of tokens and positions (section 3.2)."""

    context = "alone"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.discriminator = Discriminator(config)
        embedding = self.discriminator.encoder.embedding
        smaller = generator_config(config)
        self.generator = Encoder(
            smaller, embedding=Embedding(smaller, "encoder", shared=embedding, share_positions=True)
        )
        generate = StackInputs(self.generator_sequence, writes="made")
        discriminate = StackInputs(self.discriminator.sequence, carried="corrupted")
        self.steps = ModelSteps(
            [
                *self.generator.encoder.steps("generator.encoder", generate),
                ModelStep(
                    "generator.head", self._generate, uses=("generator.head", "generator.head"), reads=("made",),
                    writes={"corrupted": Field("tokens")},
                ),
                *self.discriminator.encoder.steps("discriminator.encoder", discriminate),
                ModelStep(
                    "discriminator.verdict", self._judge,
                    uses=("discriminator.dense", "discriminator.verdict"), reads=("hidden", "corrupted"),
                ),
            ]
        )  # fmt: skip

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
        **fields: Tensor | None,
    ) -> Output:
        """Without targets, the discriminator's verdict on int64 tokens [B, T].

        With targets [B, T] (the tokens that were masked in `tokens`, −100 elsewhere) and `original` [B, T], the losses
        "generator" and "discriminator". A sampled token that equals the original counts as original. Sampling depends
        on keys [B] and on no other state. fields: of whole rows, where these are parts of them.
        """
        where = {"positions": positions, "documents": documents, "segments": segments, "keys": keys}
        if targets is None:
            return self.discriminator(tokens, **where)
        if original is None or keys is None:
            raise UsageError("ELECTRA's training needs `original` [B, T] and `keys` [B] beside targets")
        batch = ForwardPass({"tokens": tokens, "original": original, "targets": targets, **where, **fields})
        for step in self.steps:
            batch.keep(step, step.run(*step.inputs(batch)))
        return batch.output()

    def generator_sequence(self, batch: ForwardPass) -> SequenceMetadata:
        """Where the generator's tokens stand; one for all its steps."""
        return batch.once("generator sequence", lambda: self._generator_sequence(batch))

    def _generator_sequence(self, batch: ForwardPass) -> SequenceMetadata:
        # Two stacks of the same depths: the generator's random keys are others.
        return sequence_metadata(
            batch["tokens"],
            batch.get("positions"),
            batch.get("documents"),
            rng_keys_B=~batch["keys"],
            of_row=batch.of_row(),
        )

    def _generate(self, batch: ForwardPass) -> Tensor:
        """The generator's loss, and what it puts in the place of masked tokens."""
        made, targets, head = batch.carry["made"], batch["targets"], self.generator.head
        assert head is not None  # the config refuses an ELECTRA without
        batch.losses["generator"] = head(made, targets)
        with torch.no_grad():
            masked = targets != IGNORE
            logits_MV = head(made, where_BT=masked)
            places = self.generator_sequence(batch).indices
            rng_keys_M = token_keys(mix(batch["keys"], SAMPLING), 0, places)[masked]
            # Gumbel's trick: the largest of logit − ln(−ln u) is a sample of the softmax.
            noise_MV = -torch.log(-torch.log(uniform(rng_keys_M, logits_MV.shape[-1])))
            return batch["original"].masked_scatter(masked, (logits_MV.double() + noise_MV).argmax(-1))

    def _judge(self, batch: ForwardPass) -> None:
        """The discriminator's loss: which tokens are not the original's."""
        documents, original = batch.get("documents"), batch["original"]
        counted = torch.ones_like(original).bool() if documents is None else documents >= 0
        replaced = torch.where(counted, (batch.carry["corrupted"] != original).long(), IGNORE)
        self.discriminator.judge(batch, replaced)


@MODELS.register("discriminator")
class Discriminator(nn.Module):
    """An encoder and, for each token, the log-odds that it was replaced; trained, it is a family of its own.

    Then it may have other heads, and `head.name = "none"` leaves the log-odds out.
    """

    plan = (("dense", "sequence"), ("verdict", "sequence, gathered"))

    context = "alone"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Stack(config, "encoder")
        self.reads = self.encoder.reads
        initial, d = initialiser(config, "encoder"), config.d_model
        self.activation = ACTIVATIONS.get(config.ffn.activation).function
        judges = config.head.name != "none"
        if judges:
            self.dense = Linear(d, d, initial("dense", d, d), bias=True)
            self.verdict = Linear(d, 1, initial("dense", d, 1), bias=True)
        verdict = ModelStep("verdict", self._judge, uses=("dense", "verdict"), reads=("hidden",))
        self.steps = ModelSteps(
            [
                *self.encoder.steps("encoder", StackInputs(self.sequence)),
                *([verdict] if judges else []),
                *add_heads(self, config, self.encoder.embedding.table),
            ]
        )

    def forward(
        self,
        tokens: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        segments: Tensor | None = None,
        replaced: Tensor | None = None,
        keys: Tensor | None = None,
        **fields: Tensor | None,
    ) -> Output:
        """Logits [B, T], or, given replaced [B, T] (1, 0, and −100 where none counts), the summed loss. fields: what
        other heads read."""
        inputs = {
            "tokens": tokens, "positions": positions, "documents": documents, "segments": segments,
            "replaced": replaced, "keys": keys,
        }  # fmt: skip
        batch = ForwardPass({**inputs, **fields})
        for step in self.steps:
            batch.keep(step, step.run(*step.inputs(batch)))
        return batch.output()

    def sequence(self, batch: ForwardPass) -> SequenceMetadata:
        """Where the tokens stand; one for all steps."""
        return batch.once("sequence", lambda: self._sequence(batch))

    def _sequence(self, batch: ForwardPass) -> SequenceMetadata:
        return sequence_metadata(
            batch[self.reads],
            batch.get("positions"),
            batch.get("documents"),
            rng_keys_B=batch.get("keys"),
            of_row=batch.of_row(),
        )

    def _judge(self, batch: ForwardPass) -> None:
        self.judge(batch, batch.get("replaced"))

    def judge(self, batch: ForwardPass, replaced_BT: Tensor | None) -> None:
        """Logits [B, T], or, given replaced [B, T], their loss."""
        logits_BT = self.verdict(self.activation(self.dense(batch.carry["hidden"])))[..., 0]
        if replaced_BT is None:
            batch.logits = logits_BT
            return
        logits_BT = logits_BT.to(torch.promote_types(logits_BT.dtype, torch.float32))
        truth_BT = (replaced_BT == 1).to(logits_BT.dtype)
        losses_BT = F.binary_cross_entropy_with_logits(logits_BT, truth_BT, reduction="none")
        batch.losses["discriminator"] = (losses_BT * (replaced_BT != IGNORE)).sum()


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
