"""Multi-head latent attention (DeepSeek-AI 2024, section 2.1): keys and values come from narrow latents."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import MLAAttentionConfig, ModelConfig, require_variant
from megatfm.errors import UsageError
from megatfm.layers.attention.dot_product import ATTENTIONS, DotProductAttention
from megatfm.layers.attention.kv_cache import LayerCache, update_cache
from megatfm.layers.attention.patterns.pattern import AttentionPattern
from megatfm.layers.initialisation import Initialiser, with_fixed_inputs
from megatfm.layers.linear import Linear
from megatfm.layers.norm import RMSNorm
from megatfm.layers.position import Rope
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention.reference import compute_probabilities

# B batch, T tokens, S keys, D model width, N heads, H head width, R rotary channels, V value width, C latent width
# X latent and rotary channels


@ATTENTIONS.register("mla")
class LatentAttention(nn.Module):
    """Attention with H content channels and R rotary channels a head; all heads share the rotary keys."""

    tp_plan = (
        ("", "gather_input"),
        ("wq_down", "replicated_partial_grad"),
        ("q_norm", "replicated_partial_grad"),
        ("wkv_down", "replicated_partial_grad"),
        ("kv_norm", "replicated_partial_grad"),
        ("wk_rope", "replicated_partial_grad"),
        ("w[qkv]", "colwise"),
        ("wo", "rowwise"),
    )

    cp_plan = "local"
    lora_without_dropout = ("wk", "wv")  # their matrices are used directly

    def __init__(self, config: ModelConfig, initial: Initialiser, pattern: AttentionPattern) -> None:
        super().__init__()
        latent = require_variant(config.attention, MLAAttentionConfig, "model.attention")
        if config.position.name != "rope" or pattern.is_cross_attention:
            raise UsageError(
                "model.attention.name = 'mla' carries positions in its own rotary channels, in self-attention: it "
                "needs model.position.name = 'rope' and a decoder or encoder, not "
                f"{config.position.name!r} and {config.family}"
            )
        d, n = config.d_model, latent.n_heads
        self.nope_dim, self.rope_dim = config.head_width, latent.qk_rope_head_dim
        latent_initial = initial
        if config.mup is not None and config.mup.latent_ranks == "fixed":
            latent_initial = with_fixed_inputs(initial)
        self.v_dim = latent.v_head_dim or self.nope_dim
        q_width = n * (self.nope_dim + self.rope_dim)
        q_in = latent.q_lora_rank or d
        if latent.q_lora_rank:
            self.wq_down = Linear(d, q_in, initial("query", d, q_in))
            self.q_norm = RMSNorm(q_in, config.norm.eps)
        query_initial = latent_initial if latent.q_lora_rank else initial
        self.wq = Linear(q_in, q_width, query_initial("query", q_in, q_width))
        self.wkv_down = Linear(d, latent.kv_lora_rank, initial("key", d, latent.kv_lora_rank))
        self.kv_norm = RMSNorm(latent.kv_lora_rank, config.norm.eps)
        self.wk_rope = Linear(d, self.rope_dim, initial("key", d, self.rope_dim))
        rank, k_width, v_width = latent.kv_lora_rank, n * self.nope_dim, n * self.v_dim
        self.wk = Linear(rank, k_width, latent_initial("key", rank, k_width))
        self.wv = Linear(rank, v_width, latent_initial("value", rank, v_width))
        self.wo = Linear(n * self.v_dim, d, initial("out", n * self.v_dim, d))
        self.position = Rope(config, initial, self.rope_dim)
        self.core = LatentCore(
            config,
            initial,
            pattern,
            rope_dim=self.rope_dim,
            scale=(self.nope_dim + self.rope_dim) ** -0.5,
            channels=q_width + n * self.v_dim,
        )

    def forward(
        self,
        x_BTD: Tensor,
        sequence: SequenceMetadata,
        bias: Tensor | None = None,
        memory_BSD: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Return [B, T, D]."""
        q_in = self.q_norm(self.wq_down(x_BTD)) if hasattr(self, "wq_down") else x_BTD
        q_BNTH, q_rope_BNTR = self._split_heads(self.wq(q_in), self.nope_dim + self.rope_dim).split(
            (self.nope_dim, self.rope_dim), dim=-1
        )
        latent_BTC = self.kv_norm(self.wkv_down(x_BTD))
        q_rope_BNTR, k_rope_B1TR = self.position(q_rope_BNTR, self.wk_rope(x_BTD)[:, None], sequence)
        q_BNTH = torch.cat((q_BNTH, q_rope_BNTR), -1)
        latent_B1TX = torch.cat((latent_BTC[:, None], k_rope_B1TR), -1)
        if cache is None:
            heads_BNTV = self.core(q_BNTH, latent_B1TX, self.wk.compute_matrix(), self.wv.compute_matrix(), sequence)
        else:
            heads_BNTV = self._attend_cached(q_BNTH, latent_B1TX, sequence, cache)
        return self.wo(heads_BNTV.transpose(1, 2).flatten(2))

    def _attend_cached(
        self, q_BNTH: Tensor, latent_B1TX: Tensor, sequence: SequenceMetadata, cache: LayerCache
    ) -> Tensor:
        """Attend to a cache of latents and rotary keys: C + R elements a token instead of N · (H + R + V).

        For several queries, keys and values are projected from the latents again. For a single query, the projections
        are absorbed into query and output, so that heads attend to the latents directly (DeepSeek-AI 2024a, section
        2.1.2). Returns [B, N, T, V].
        """
        no_values_B1T0 = latent_B1TX[..., :0]
        latent_B1SX, _, sequence = update_cache(cache, latent_B1TX, no_values_B1T0, self.core.pattern, sequence)
        if q_BNTH.shape[2] == 1 and not self.core.has_dropout(sequence):
            return self.core.attend_one_query(
                q_BNTH, latent_B1SX, self.wk.compute_matrix(), self.wv.compute_matrix(), sequence
            )
        k_BNSH, v_BNSV = self.core.project_heads(latent_B1SX, self.wk.compute_matrix(), self.wv.compute_matrix())
        return self.core.attend_head_shard(self.core.dropout.shard_index, q_BNTH, k_BNSH, v_BNSV, sequence)

    def _split_heads(self, x: Tensor, width: int) -> Tensor:
        return x.unflatten(-1, (-1, width)).transpose(1, 2)


class LatentCore(DotProductAttention):
    """Attention to keys and values projected from latents. Context parallelism exchanges the latents, not the keys."""

    cp_plan = "latent_attention"

    def __init__(
        self,
        config: ModelConfig,
        initial: Initialiser,
        pattern: AttentionPattern,
        *,
        rope_dim: int,
        scale: float,
        channels: int,
    ) -> None:
        super().__init__(config, initial, pattern, scale=scale, channels=channels)
        self.nope_dim, self.rope_dim = config.head_width, rope_dim

    def project_heads(self, latent_B1SX: Tensor, wk_XC: Tensor, wv_XC: Tensor) -> tuple[Tensor, Tensor]:
        """Project latents to keys [B, N, S, H + R], rotary channels included, and values [B, N, S, V]."""
        latent_BSC, rope_B1SR = latent_B1SX[:, 0, :, : -self.rope_dim], latent_B1SX[..., -self.rope_dim :]
        k_BNSH = F.linear(latent_BSC, wk_XC).unflatten(-1, (-1, self.nope_dim)).transpose(1, 2)
        n = k_BNSH.shape[1]
        v_BNSV = F.linear(latent_BSC, wv_XC).unflatten(-1, (n, -1)).transpose(1, 2)
        return torch.cat((k_BNSH, rope_B1SR.expand(-1, n, -1, -1)), -1), v_BNSV

    def forward(  # type: ignore[override]  # latents and projections in place of keys and values
        self, q_BNTH: Tensor, latent_B1TX: Tensor, wk_XC: Tensor, wv_XC: Tensor, sequence: SequenceMetadata
    ) -> Tensor:
        """Return [B, N, T, V]."""
        k_BNTH, v_BNTV = self.project_heads(latent_B1TX, wk_XC, wv_XC)
        return super().forward(q_BNTH, k_BNTH, v_BNTV, sequence)

    def has_dropout(self, sequence: SequenceMetadata) -> bool:
        """Return whether dropout is active for this sequence."""
        return self.dropout.make_head_rng_keys(sequence, self.n_heads, self.dropout.shard_index) is not None

    def attend_one_query(
        self, q_BN1H: Tensor, latent_B1SX: Tensor, wk_XC: Tensor, wv_XC: Tensor, sequence: SequenceMetadata
    ) -> Tensor:
        """Attend from the last token to the latents directly, without projecting them; return [B, N, 1, V]."""
        assert self.options.scale is not None
        n = q_BN1H.shape[1]
        wk_NHC, wv_NVC = (weight.unflatten(0, (n, -1)) for weight in (wk_XC, wv_XC))
        content_BN1H, rope_BN1R = q_BN1H.split((self.nope_dim, self.rope_dim), dim=-1)
        q_BN1X = torch.cat((content_BN1H @ wk_NHC, rope_BN1R), -1) * self.options.scale
        # The head dim takes the place of the query dim, so that latents are not copied for each head.
        scores_BN1S = (q_BN1X.transpose(1, 2) @ latent_B1SX.transpose(-1, -2)).transpose(1, 2)
        if self.options.softcap:
            scores_BN1S = self.options.softcap * torch.tanh(scores_BN1S / self.options.softcap)
        # A mask of None is right here: the last token sees all earlier ones.
        probabilities_BN1S = compute_probabilities(scores_BN1S, self.attention_mask(sequence, n).mask())
        latent_BN1C = (probabilities_BN1S.transpose(1, 2) @ latent_B1SX[..., : -self.rope_dim]).transpose(1, 2)
        return latent_BN1C @ wv_NVC.transpose(-1, -2)
