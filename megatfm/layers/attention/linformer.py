"""Linformer's attention (Wang et al. 2020): keys and values of a document are projected to a fixed number of them."""

import torch
from torch import Tensor, nn

from megatfm.config import LinformerAttentionConfig, ModelConfig, expect
from megatfm.errors import UsageError
from megatfm.layers.attention.cache import LayerCache
from megatfm.layers.attention.patterns import Pattern, require_full
from megatfm.layers.attention.registry import ATTENTIONS
from megatfm.layers.dropout import Dropout
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.linear import Linear
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention import probabilities

# B batch, T tokens, D model width, N heads, H head width, P places of a document, R rank, U documents of a row


@ATTENTIONS.register("linformer")
class LinformerAttention(nn.Module):
    """softmax(q (E k)ᵀ · scale) (F v): each document has R keys and values. Padding is a document of its own."""

    plan = (("", "enter"), ("w[qkv]", "column"), ("wo", "row"), ("dropout", "keys of own part"))

    def __init__(self, config: ModelConfig, initial: Initialiser, pattern: Pattern) -> None:
        super().__init__()
        options = expect(config.attention, LinformerAttentionConfig, "model.attention")
        require_full(config)
        if pattern.plain != "all" or config.position.name not in ("learned", "sinusoidal", "none"):
            raise UsageError(
                "model.attention.name = 'linformer' mixes keys of all places, later ones too, so that it leaks the "
                f"future in family = {config.family!r} with position.name = {config.position.name!r}: choose family = "
                "'encoder', and position.name = 'learned', 'sinusoidal' or 'none'"
            )
        d, self.head_dim = config.d_model, config.head_width
        width = options.n_heads * self.head_dim
        self.wq = Linear(d, width, initial("query", d, width), bias=options.bias)
        self.wk = Linear(d, width, initial("key", d, width), bias=options.bias)
        self.wv = Linear(d, width, initial("value", d, width), bias=options.bias)
        self.wo = Linear(width, d, initial("out", width, d), bias=options.bias)
        sketch = HeadSketch if options.share == "none" else Sketch
        self.of_keys = sketch(options, initial)
        self.of_values = None if options.share == "key_value" else sketch(options, initial)
        self.scale = options.scale or self.head_dim**-0.5
        self.dropout = Dropout(options.dropout, "attention")

    def forward(
        self,
        x_BTD: Tensor,
        sequence: SequenceMetadata,
        bias: Tensor | None = None,
        memory_BSD: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """[B, T, D]."""
        q_BNTH, k_BNTH, v_BNTH = (self._heads(w(x_BTD)) for w in (self.wq, self.wk, self.wv))
        places_BT = sequence.document_places()[0].expand(len(x_BTD), -1)
        number_BT = (places_BT == 0).cumsum(1) - 1  # of the document in its row
        of_values = self.of_keys if self.of_values is None else self.of_values
        k_BNUH, v_BNUH = self.of_keys(k_BNTH, places_BT, number_BT), of_values(v_BNTH, places_BT, number_BT)
        scores_BNTU = (q_BNTH * self.scale) @ k_BNUH.transpose(-1, -2)
        of_key_U = torch.arange(k_BNUH.shape[2], device=x_BTD.device) // self.of_keys.rank
        mask_B1TU = (number_BT[..., None] == of_key_U)[:, None]
        rng_keys = self.dropout.head_rng_keys(sequence, q_BNTH.shape[1])
        heads_BNTH = probabilities(scores_BNTU, mask_B1TU, self.dropout.rate, rng_keys) @ v_BNUH
        return self.wo(heads_BNTH.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class Sketch(nn.Module):
    """A matrix [P, R] for all heads of a layer."""

    plan = (("", "shared by heads"),)

    def __init__(self, options: LinformerAttentionConfig, initial: Initialiser) -> None:
        super().__init__()
        self.length, self.rank = options.length, options.rank
        shape = self._shape(options)
        self.weight = nn.Parameter(torch.empty(shape))
        self.initial = {"weight": initial("relative", self.length, self.rank)}

    def _shape(self, options: LinformerAttentionConfig) -> tuple[int, ...]:
        return (self.length, self.rank)

    def forward(self, x_BNTH: Tensor, places_BT: Tensor, number_BT: Tensor) -> Tensor:
        """[B, N, U·R, H] of keys or values, R of each document of a row."""
        if x_BNTH.shape[2] > self.length:
            raise UsageError(
                f"rows of {x_BNTH.shape[2]} tokens, but model.attention.length = {self.length}: make the rows "
                "shorter, or length longer"
            )
        weight_PRN = self.weight if self.weight.dim() == 3 else self.weight[..., None]
        documents = int(number_BT.max()) + 1
        if documents == 1:  # whose places are those in the row
            return torch.einsum(
                "trn,bnth->bnrh", weight_PRN[: x_BNTH.shape[2]].expand(-1, -1, x_BNTH.shape[1]), x_BNTH
            )
        weight_BTRN = weight_PRN[places_BT].expand(-1, -1, -1, x_BNTH.shape[1])
        made = [
            torch.einsum("btrn,bnth->bnrh", weight_BTRN, x_BNTH * (number_BT == document)[:, None, :, None])
            for document in range(documents)
        ]
        return torch.cat(made, 2)


class HeadSketch(Sketch):
    """A matrix [P, R] for each head, the heads last."""

    plan = (("", "last dim"),)

    def _shape(self, options: LinformerAttentionConfig) -> tuple[int, ...]:
        return (self.length, self.rank, options.n_heads)
