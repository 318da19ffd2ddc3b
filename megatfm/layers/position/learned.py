"""Learned absolute positions (Gehring et al. 2017), as in BERT and GPT."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import LearnedPositionConfig, ModelConfig, require_variant
from megatfm.errors import UsageError
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.position.registry import POSITIONS, PositionEncoding
from megatfm.layers.sequence import SequenceMetadata

# B batch, T tokens, D embedding width


class LearnedPositions(nn.Module):
    """Rows of a table; the first `position.offset` rows are never used (RoBERTa's padding and its neighbour)."""

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        options = require_variant(config.position, LearnedPositionConfig, "model.position")
        self.limit, self.offset = options.max_positions, options.offset
        rows = self.limit + self.offset
        self.weight = nn.Parameter(torch.empty(rows, config.embedding_width))
        self.initial = {"weight": initial("position", rows, config.embedding_width)}
        self.roles = {"weight": "embedding"}

    def forward(self, sequence: SequenceMetadata) -> Tensor:
        """[B, T, D]. Raises UsageError where a row could be longer than the table."""
        length = sequence.cached_length + sequence.positions.shape[1]
        if length > self.limit and sequence.documents is None:
            raise UsageError(
                f"a sequence of {length} tokens, but model.position.max_positions = {self.limit}: shorten it, or train "
                "more positions"
            )
        return F.embedding(sequence.positions + self.offset, self.weight)


LEARNED = POSITIONS.register("learned")(PositionEncoding(absolute=LearnedPositions))
