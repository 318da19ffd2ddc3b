"""Features of images and captions, and the loss that compares those of a global batch."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ContrastiveConfig, ModelConfig
from megatfm.errors import MegatfmError
from megatfm.layers.classifier import AttentionPool, ImageMean, index_documents
from megatfm.layers.initialisation import Constant, make_initialiser
from megatfm.layers.linear import Linear
from megatfm.layers.sequence import SequenceMetadata
from megatfm.layers.sequence_shard import SequenceShard
from megatfm.ops.contrastive import ONE_RANK, LossOptions, Ring, compute_retrieval_ranks, contrastive_loss
from megatfm.ops.transfer import find_true_indices

# B batch, T tokens, M documents of all rows, D width of a tower, W width of a feature

TOP_K = (1, 5)
"""Values of k of the metrics `topk`: the share of images with fewer than k other captions at least as similar."""
TERM = "contrastive"


class BoundaryVector(nn.Module):
    """The vector of each document's first token, or of its last."""

    cp_plan = "all_reduce"

    def __init__(self, *, last: bool) -> None:
        super().__init__()
        self.last = last
        self.all_reduce = nn.Identity()  # context parallelism replaces it by an all-reduce over ranks

    def forward(self, hidden_BTD: Tensor, index_M: Tensor, sequence: SequenceMetadata) -> Tensor:
        """Return vectors [M, D] of the documents of these indices (`index_documents`)."""
        token_N = find_boundary_tokens(sequence, last=self.last)
        n_documents = len(hidden_BTD) * sequence.max_documents_per_row
        vectors = hidden_BTD.new_zeros(n_documents, hidden_BTD.shape[-1])
        vectors = vectors.index_copy(0, index_documents(sequence, token_N), hidden_BTD.flatten(0, 1)[token_N])
        all_vectors: Tensor = self.all_reduce(vectors)
        return all_vectors[index_M]


class FeatureHead(nn.Module):
    """Unit vectors [M, W] of the documents of rows: pooled, then projected if so configured.

    pool: "class" takes each document's first token, "last" its last, "mean" and "attention" see its patches.
    """

    cp_plan = "local"
    tp_plan = (("", "gather_input_replicated"), ("*", "replicated"), ("pool.*", "replicated"))

    def __init__(self, config: ModelConfig, pool: str, width: int | None, *, bias: bool) -> None:
        super().__init__()
        pools = {"mean": ImageMean, "attention": lambda: AttentionPool(config)}
        self.pool: nn.Module = pools[pool]() if pool in pools else BoundaryVector(last=pool == "last")
        d = config.d_model
        self.projection: nn.Module | None = None
        if width:
            self.projection = Linear(d, width, make_initialiser(config)("dense", d, width), bias=bias)

    def forward(self, hidden_BTD: Tensor, sequence: SequenceMetadata, captions: SequenceMetadata) -> Tensor:
        """Return features [M, W], in float32 at least, of the pairs whose captions begin here, in the order of rows and
        of documents."""
        token_M = find_boundary_tokens(captions, last=False)
        x_MD = self.pool(hidden_BTD, index_documents(sequence, token_M, captions), sequence)
        y_MW: Tensor = x_MD if self.projection is None else self.projection(x_MD)
        return F.normalize(y_MW.to(torch.promote_types(y_MW.dtype, torch.float32)), dim=-1)


def find_boundary_tokens(sequence: SequenceMetadata, *, last: bool) -> Tensor:
    """Return indices [M], counted over all rows, of the first tokens of documents, or of their last ones."""
    host = sequence.on_host()
    row = host.full_sequence
    chosen_BT = row.positions == 0
    if last and row.documents is None:  # each row is one document
        chosen_BT = torch.arange(chosen_BT.shape[1]).expand_as(chosen_BT) == chosen_BT.shape[1] - 1
    elif last and row.documents is not None:
        next_BT = F.pad(row.documents[:, 1:], (0, 1), value=-1)
        chosen_BT = row.documents != next_BT
    if row.documents is not None:  # padding has position 0 as well
        chosen_BT = chosen_BT & (row.documents >= 0)
    if isinstance(host, SequenceShard):
        chosen_BT = chosen_BT[:, host.token_indices]
    return find_true_indices(chosen_BT.flatten(), sequence.positions.device)[0]


def check_pairs(images: SequenceMetadata, captions: SequenceMetadata) -> None:
    """Raise MegatfmError for a row with another number of images than captions."""
    n_images_B, n_captions_B = (_count_documents(side) for side in (images, captions))
    if len(unequal_rows := (n_images_B != n_captions_B).nonzero()):
        row = int(unequal_rows[0, 0])
        raise MegatfmError(
            f"row {row} has {int(n_images_B[row])} images and {int(n_captions_B[row])} captions: the i-th image of a "
            "row belongs to its i-th caption; give both sides documents of the same numbers"
        )


def _count_documents(sequence: SequenceMetadata) -> Tensor:
    """Return the number of documents [B] of the full rows, on the host."""
    return sequence.on_host().full_sequence.documents_or_zeros.amax(1) + 1


class Temperature(nn.Module):
    """The learned factor on similarities, and for the sigmoid loss the learned bias."""

    cp_plan = "local"
    tp_plan = (("", "replicated"),)

    def __init__(self, config: ContrastiveConfig) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.empty(1))
        self.initial = {"log_scale": Constant(math.log(config.scale))}
        self.max_log_scale = math.log(config.max_scale or math.inf)
        self.register_parameter("bias", None)
        if config.loss == "sigmoid":
            self.bias = nn.Parameter(torch.empty(1))
            self.initial["bias"] = Constant(config.bias)

    def forward(self) -> dict[str, Tensor]:
        """Return `scale` [1], and `bias` [1] if there is one."""
        log_scale = self.log_scale.to(torch.promote_types(self.log_scale.dtype, torch.float32))
        factors = {"scale": log_scale.clamp(max=self.max_log_scale).exp()}
        return factors if self.bias is None else factors | {"bias": self.bias.to(log_scale.dtype)}


class ContrastiveLoss(nn.Module):
    """Compares the features of a global batch. The engine passes the ring that brings those of other data ranks."""

    dp_plan = "ring"
    cp_plan = "local"

    def __init__(self, config: ContrastiveConfig) -> None:
        super().__init__()
        self.kind = config.loss

    def forward(
        self,
        images_MW: Tensor,
        texts_MW: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        captions_M: Tensor | None = None,
        ring: Ring = ONE_RANK,
    ) -> dict[str, Tensor]:
        """Return the summed loss, and, given numbers of captions, how many images find theirs (`top1`, `top5`).

        ring: the data ranks, of which these are this rank's part. Raises MegatfmError for an image without a caption.
        """
        if len(images_MW) != len(texts_MW):
            raise MegatfmError(
                f"{len(images_MW)} images and {len(texts_MW)} captions: the i-th image belongs to the i-th caption"
            )
        loss = contrastive_loss(images_MW, texts_MW, scale, bias, LossOptions(self.kind, ring))
        if captions_M is None:
            return {TERM: loss}
        ranks_M = compute_retrieval_ranks(images_MW, texts_MW, captions_M, ring)
        return {TERM: loss, **{f"top{k}": (ranks_M < k).sum() for k in TOP_K}}
