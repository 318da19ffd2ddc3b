"""Classes of whole texts: a head on the mean of their vectors, and the objective that reads a text with its label."""

from types import MappingProxyType

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from megatfm.data.sequences import DocumentChunk, Field
from megatfm.layers.initialisation import make_initialiser
from megatfm.layers.linear import Linear
from megatfm.layers.output_head import HEADS
from megatfm.objectives import OBJECTIVES, Objective

NONE = -100


@HEADS.register("topic")
class Topic(nn.Module):
    """Logits [B, C] of the mean over each row's text, or, given labels [B], their summed cross-entropy."""

    tp_plan = (("", "gather_input_replicated"), ("classifier", "replicated"))
    input_fields = ("in_text", "labels")

    def __init__(self, config, section, tokens):
        super().__init__()
        d = config.d_model
        self.classifier = Linear(d, section.classes, make_initialiser(config)("dense", d, section.classes), bias=True)

    def forward(self, hidden_BTD, in_text_BT, labels_B):
        weights_BT1 = in_text_BT[..., None].to(hidden_BTD.dtype)
        mean_BD = (hidden_BTD * weights_BT1).sum(1) / weights_BT1.sum(1).clamp(min=1)
        logits_BC = self.classifier(mean_BD)
        precise = torch.promote_types(logits_BC.dtype, torch.float32)
        return F.cross_entropy(logits_BC.to(precise), labels_B, ignore_index=NONE, reduction="sum")


@OBJECTIVES.register("topic")
class TellTopics(Objective):
    """One text a row, cut to its length, and beside it the class that the sample's member "cls" names."""

    model_families = ("encoder", "decoder")
    loss_weights = MappingProxyType({"topic": 1.0})
    needs_files = True

    def __init__(self, special, config, model, row_lengths):
        self.special, self.length, self.classes = special, row_lengths[0], model.extra_heads["topic"].classes
        self.fields = {
            "tokens": Field(pad_value=special.pad),
            "in_text": Field("bool"),
            "labels": Field(per="row", pad_value=NONE),
        }
        self.max_tokens = 10**9  # a text is never cut into several rows

    def sequence_lengths(self, n_tokens, keys):
        return np.minimum(n_tokens + 1, self.length)

    def build_example(self, chunk, key):
        tokens = np.append(self.special.bos, chunk.tokens)[: self.length].astype(np.int64)
        return {
            "tokens": tokens,
            "in_text": np.ones(len(tokens), np.bool_),
            "labels": np.array(int(chunk.files["cls"])),
        }

    def target_counts(self, batch):
        return {"topic": (batch["labels"] != NONE).sum()}

    def random_chunk(self, random):
        tokens = random.integers(0, self.special.vocab_size, int(random.integers(2, self.length * 2)))
        return DocumentChunk(tokens, files={"cls": b"%d" % random.integers(self.classes)})
