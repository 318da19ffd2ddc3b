"""XLNet: XLNetLMHeadModel, and XLNetModel without the head.

Its projections are kept head by head, and [d_in, heads, width] but for the last."""

from collections.abc import Sequence

from torch import Tensor

from megatfm.config import ModelConfig
from megatfm.convert.config_keys import Json, alias, ignored, supported_values, used
from megatfm.convert.encoder import SUMMARY
from megatfm.convert.keys import activation, check_implied_values, std, their_activation
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_base_model
from megatfm.convert.table import WeightMapping, per_layer, rename, rename_linear
from megatfm.errors import UsageError

KEYS = SUMMARY | {
    "vocab_size": used(32000),
    "d_model": used(1024),
    "n_layer": used(24),
    "n_head": used(16),
    "d_inner": used(4096),
    "d_head": used(None, int),
    "ff_activation": used("gelu"),
    "layer_norm_eps": used(1e-12),
    "attn_type": supported_values("bi"),
    "bi_data": supported_values(False),
    "clamp_len": supported_values(-1),
    "same_length": supported_values(False),
    "untie_r": supported_values(True),
    "tie_word_embeddings": supported_values(True),
    "dropout": used(0.1),
    "initializer_range": used(0.02),
    "pad_token_id": used(5, int, None),
    "bos_token_id": used(1, int, list, None),
    "eos_token_id": used(2, int, list, None),
    "n_token": alias("vocab_size"),
    "hidden_size": alias("d_model"),
    "num_attention_heads": alias("n_head"),
    "num_hidden_layers": alias("n_layer"),
    # About memory: without one, they change nothing.
    **ignored("mem_len", "reuse_len", "use_mems_eval", "use_mems_train"),
    **ignored("start_n_top", "end_n_top"),
}


def read(theirs: Json) -> ModelConfig:
    if theirs["d_model"] % 2 or theirs["n_head"] < 1:
        raise UsageError(
            f"config.json: d_model = {theirs['d_model']}, n_head = {theirs['n_head']}: only even "
            "widths run in transformers"
        )
    check_implied_values(theirs, d_head=theirs["d_model"] // theirs["n_head"])
    return ModelConfig.from_dotted(
        {
            "family": "xlnet",
            "vocab_size": theirs["vocab_size"],
            "d_model": theirs["d_model"],
            "n_layers": theirs["n_layer"],
            "attention.n_heads": theirs["n_head"],
            "ffn.d_ff": theirs["d_inner"],
            "norm.name": "layer_norm",
            "norm.eps": theirs["layer_norm_eps"],
            "norm.placement": "post",
            "ffn.activation": activation(theirs["ff_activation"]),
            "attention.name": "two_stream",
            "ffn.bias": True,
            "position.name": "transformer_xl",
            "lm_head.bias": True,
            "dropout": theirs["dropout"],
            "attention.dropout": theirs["dropout"],
            "init.name": "normal",
            "init.std": theirs["initializer_range"],
        }
    )


def write(ours: ModelConfig) -> Json:
    return {
        "vocab_size": ours.vocab_size,
        "d_model": ours.d_model,
        "n_layer": ours.n_layers,
        "n_head": ours.attention.n_heads,
        "d_head": ours.head_width,
        "d_inner": ours.ffn.d_ff,
        "ff_activation": their_activation(ours.ffn.activation),
        "layer_norm_eps": ours.norm.eps,
        "attn_type": "bi",
        "bi_data": False,
        "clamp_len": -1,
        "same_length": False,
        "mem_len": None,
        "reuse_len": None,
        "dropout": ours.dropout,
        "initializer_range": std(ours),
        "tie_word_embeddings": True,
    }


def rules(config: ModelConfig) -> list[WeightMapping]:
    n = config.attention.n_heads
    block = [
        *(_inwards(f"attn.w{part}.weight", f"rel_attn.{part}", n) for part in "qkv"),
        _inwards("attn.wk_position.weight", "rel_attn.r", n),
        _outwards("attn.wo.weight", "rel_attn.o", n),
        rename("attn.content_bias", "rel_attn.r_w_bias"),
        rename("attn.position_bias", "rel_attn.r_r_bias"),
        rename("attn.segment_bias", "rel_attn.r_s_bias"),
        rename("attn.segments", "rel_attn.seg_embed"),
        *rename_linear("attn_residual.norm", "rel_attn.layer_norm", bias=True),
        *rename_linear("ffn.w_up", "ff.layer_1", bias=True),
        *rename_linear("ffn.w_down", "ff.layer_2", bias=True),
        *rename_linear("ffn_residual.norm", "ff.layer_norm", bias=True),
    ]
    return [
        WeightMapping(
            ("encoder.query.weight",),
            ("transformer.mask_emb",),
            lambda tensors: [tensors[0][None, None]],
            lambda tensors: [tensors[0][0, 0]],
        ),
        rename(
            "encoder.embedding.tokens.weight", "transformer.word_embedding.weight", copies=["lm_loss.weight"]
        ),
        *per_layer(config.n_layers, "encoder.layers.", "transformer.layer.", block),
        rename("head.bias", "lm_loss.bias"),
    ]


def _inwards(ours: str, theirs: str, n_heads: int) -> WeightMapping:
    """[heads · width, d_in] as [d_in, heads, width]."""

    def forth(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensors[0].T.unflatten(1, (n_heads, -1))]

    return WeightMapping((ours,), (theirs,), forth, lambda tensors: [tensors[0].flatten(1).T])


def _outwards(ours: str, theirs: str, n_heads: int) -> WeightMapping:
    """[d_out, heads · width] as [d_out, heads, width]."""

    def forth(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensors[0].unflatten(1, (n_heads, -1))]

    return WeightMapping((ours,), (theirs,), forth, lambda tensors: [tensors[0].flatten(1)])


ARCHITECTURES.register("XLNetLMHeadModel")(
    Architecture(
        "xlnet", KEYS, read, write, rules, base_model_prefix="transformer.", fingerprint={"family": "xlnet"}
    )
)
register_base_model("XLNetModel", ARCHITECTURES.get("XLNetLMHeadModel"))
