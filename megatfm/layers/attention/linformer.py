"""Linformer's attention (Wang et al. 2020): keys and values of a document are projected to a fixed number of them."""

from itertools import pairwise

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
from megatfm.layers.part import Part
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention import probabilities

# B batch, T tokens, D model width, N heads, H head width, P places of a document, R rank


@ATTENTIONS.register("linformer")
class LinformerAttention(nn.Module):
    """softmax(q (E k)ᵀ · scale) (F v): each document has R keys and values. Padding is a document of its own."""

    plan = (("", "enter"), ("w[qkv]", "column"), ("wo", "row"), ("dropout", "keys of own part"))
    context = "sums"

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
        self.summed = nn.Identity()  # where sums over some tokens of documents become those over all

    def forward(
        self,
        x_BTD: Tensor,
        sequence: SequenceMetadata,
        bias: Tensor | None = None,
        memory_BSD: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """[B, T, D]."""
        if sequence.length > self.of_keys.length:
            raise UsageError(
                f"rows of {sequence.length} tokens, but model.attention.length = {self.of_keys.length}: make the rows "
                "shorter, or length longer"
            )
        q_BNTH, k_BNTH, v_BNTH = (self._heads(w(x_BTD)) for w in (self.wq, self.wk, self.wv))
        rng_keys_BNT = self.dropout.head_rng_keys(sequence, q_BNTH.shape[1])
        if isinstance(sequence, Part):
            heads_BNTH = self._parts(q_BNTH, k_BNTH, v_BNTH, rng_keys_BNT, sequence)
        elif sequence.document_numbers() is None:
            heads_BNTH = self._document(q_BNTH, k_BNTH, v_BNTH, rng_keys_BNT)
        else:
            # One document after the other: work and memory grow with their tokens, however many a row has.
            places_BT = sequence.document_places()[0].expand(len(x_BTD), -1)
            rows = []
            for row, places_T in enumerate(places_BT):
                parts = []
                for start, end in pairwise([*(places_T == 0).nonzero()[:, 0].tolist(), len(places_T)]):
                    at = slice(row, row + 1), slice(None), slice(start, end)
                    rng_keys = None if rng_keys_BNT is None else rng_keys_BNT[at]
                    parts.append(self._document(q_BNTH[at], k_BNTH[at], v_BNTH[at], rng_keys))
                rows.append(torch.cat(parts, 2))
            heads_BNTH = torch.cat(rows)
        return self.wo(heads_BNTH.transpose(1, 2).flatten(2))

    def _document(
        self, q_BNTH: Tensor, k_BNTH: Tensor, v_BNTH: Tensor, rng_keys_BNT: Tensor | None
    ) -> Tensor:
        """[B, N, T, H] of documents that begin at the first token; no other is in them."""
        places_T = torch.arange(k_BNTH.shape[2], device=k_BNTH.device)
        return self._looked(q_BNTH, *self._sketched(k_BNTH, v_BNTH, places_T), rng_keys_BNT)

    def _sketched(self, k_BNTH: Tensor, v_BNTH: Tensor, places_T: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N, R, H] each, of the tokens at these places of a document."""
        of_values = self.of_keys if self.of_values is None else self.of_values
        return self.of_keys(k_BNTH, places_T), of_values(v_BNTH, places_T)

    def _looked(self, q_BNTH: Tensor, k_BNRH: Tensor, v_BNRH: Tensor, rng_keys_BNT: Tensor | None) -> Tensor:
        scores_BNTR = (q_BNTH * self.scale) @ k_BNRH.transpose(-1, -2)
        return probabilities(scores_BNTR, None, self.dropout.rate, rng_keys_BNT) @ v_BNRH

    def _parts(
        self, q_BNTH: Tensor, k_BNTH: Tensor, v_BNTH: Tensor, rng_keys_BNT: Tensor | None, part: Part
    ) -> Tensor:
        """[B, N, T, H] of some of the tokens of documents: what is here of each is sketched, and these are summed."""
        documents, sketches = [], []
        for row, places_S in enumerate(part.row.document_places()[0].expand(len(q_BNTH), -1)):
            for start, end in pairwise([*(places_S == 0).nonzero()[:, 0].tolist(), len(places_S)]):
                first, last = torch.searchsorted(part.places, torch.tensor([start, end])).tolist()
                at = slice(row, row + 1), slice(None), slice(first, last)
                documents.append(at)
                sketches.append(
                    torch.cat(self._sketched(k_BNTH[at], v_BNTH[at], part.places[at[2]] - start), -1)
                )
        k_MNRH, v_MNRH = self.summed(torch.cat(sketches)).chunk(2, -1)
        made = []
        for i, at in enumerate(documents):
            rng_keys = None if rng_keys_BNT is None else rng_keys_BNT[at]
            made.append(self._looked(q_BNTH[at], k_MNRH[i : i + 1], v_MNRH[i : i + 1], rng_keys))
        rows = [
            [y for y, at in zip(made, documents, strict=True) if at[0].start == b] for b in range(len(q_BNTH))
        ]
        return torch.cat([torch.cat(row, 2) for row in rows])

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

    def forward(self, x_BNTH: Tensor, places_T: Tensor) -> Tensor:
        """Keys or values of a document's tokens, which stand there in it → [B, N, R, H]."""
        weight_PRN = self.weight if self.weight.dim() == 3 else self.weight[..., None]
        weight_TRN = weight_PRN[places_T].expand(-1, -1, x_BNTH.shape[1])
        return torch.einsum("trn,bnth->bnrh", weight_TRN, x_BNTH)


class HeadSketch(Sketch):
    """A matrix [P, R] for each head, the heads last."""

    plan = (("", "last dim"),)

    def _shape(self, options: LinformerAttentionConfig) -> tuple[int, ...]:
        return (self.length, self.rank, options.n_heads)
