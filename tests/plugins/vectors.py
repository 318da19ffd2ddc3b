"""Sequences of float vectors: what reads them, the head that predicts the next one, and the objective."""

from types import MappingProxyType

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from megatfm.data.sequences import DocumentChunk, Field
from megatfm.layers.embedding import EMBEDDINGS
from megatfm.layers.initialisation import make_initialiser
from megatfm.layers.linear import Linear
from megatfm.layers.output_head import HEADS
from megatfm.objectives import OBJECTIVES, Objective


@EMBEDDINGS.register("vectors")
class Vectors(nn.Module):
    """The field "vectors" [B, T, width] times a matrix."""

    tp_plan = (("", "split_output"), ("matrix", "sequence_parallel"))

    def __init__(self, config, initial):
        super().__init__()
        width, d = config.embedding.width, config.embedding_width
        self.matrix = Linear(width, d, initial("dense", width, d), bias=True)

    def forward(self, vectors_BTW):
        return self.matrix(vectors_BTW.to(self.matrix.weight.dtype))


@HEADS.register("next_vector")
class NextVector(nn.Module):
    """Σ ‖prediction − next vector‖² over the vectors that have a next one; without these, the predictions."""

    tp_plan = (("", "gather_input_replicated"), ("matrix", "replicated"))
    input_fields = ("next_vectors", "has_next")
    predicts = True

    def __init__(self, config, section, tokens):
        super().__init__()
        d, width = config.d_model, config.embedding.width
        self.matrix = Linear(d, width, make_initialiser(config)("dense", d, width), bias=True)

    def forward(self, hidden_BTD, next_BTW=None, has_BT=None):
        made_BTW = self.matrix(hidden_BTD)
        if next_BTW is None:
            return made_BTW
        precise = torch.promote_types(made_BTW.dtype, torch.float32)
        return F.mse_loss(made_BTW[has_BT].to(precise), next_BTW[has_BT].to(precise), reduction="sum")


@OBJECTIVES.register("next_vector")
class PredictVectors(Objective):
    """Predicts the next vector: a sample's file "f32" holds float32 [n, width]; its n tokens, for the index, are 0."""

    model_families = ("decoder",)
    loss_weights = MappingProxyType({"next_vector": 1.0})
    reads_text, needs_files = False, True

    def __init__(self, special, config, model, row_lengths):
        self.width, self.max_tokens = model.embedding.width, row_lengths[0]
        of_vector = Field("float32", (self.width,))
        self.fields = {"vectors": of_vector, "next_vectors": of_vector, "has_next": Field("bool")}

    def sequence_lengths(self, n_tokens, keys):
        return n_tokens

    def build_example(self, chunk, key):
        vectors = np.frombuffer(chunk.files["f32"], np.float32).reshape(-1, self.width)
        vectors = vectors[key.chunk * self.max_tokens :][: len(chunk.tokens)]
        has_next = np.arange(len(vectors)) < len(vectors) - 1
        return {"vectors": vectors, "next_vectors": np.roll(vectors, -1, axis=0), "has_next": has_next}

    def target_counts(self, batch):
        return {"next_vector": batch["has_next"].sum()}

    def random_chunk(self, random):
        n = int(random.integers(2, self.max_tokens // 2))
        vectors = random.standard_normal((n, self.width), np.float32)
        return DocumentChunk(np.zeros(n, np.uint16), files={"f32": vectors.tobytes()})
