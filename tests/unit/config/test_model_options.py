"""Options of the model that a combination of parts would leave unread are refused, with the way out."""

import pytest
from pydantic import ValidationError

from megatfm.config import ModelConfig

LATENT = {"attention": "latent", "latent": {"kv_rank": 4, "rope_dim": 2}}
XLNET = {"family": "xlnet", "attention": "two_stream", "position": "transformer_xl"}
DEBERTA = {"family": "encoder", "attention": "disentangled", "position": "disentangled"}


def refused(**options: object) -> str:
    with pytest.raises(ValidationError) as caught:
        ModelConfig.model_validate({"d_model": 8, "n_layers": 2, "n_heads": 2, "d_ff": 8, **options})
    (error,) = caught.value.errors()
    return str(error["msg"]).removeprefix("Value error, ")


@pytest.mark.parametrize(
    ("options", "way_out"),
    [
        ({**LATENT, "qk_norm": True}, "choose attention = 'heads'"),
        ({**LATENT, "n_kv_heads": 1}, "choose attention = 'heads'"),
        ({**DEBERTA, "attention_softcap": 2.0}, "choose attention = 'heads' or attention = 'latent'"),
        ({"position_offset": 2}, "choose position = 'learned'"),
        ({"position": "alibi", "rope_theta": 5e5}, "choose position = 'rope'"),
        ({"position": "none", "rope_scaling": {"name": "linear", "factor": 2}}, "choose position = 'rope'"),
        ({"position": "shaw", "relative_buckets": 8}, "choose position = 't5'"),
        (
            {"relative_distance": 8},
            "choose position = 't5' or position = 'shaw' or position = 'disentangled'",
        ),
        ({"n_encoder_layers": 3}, "choose family = 'encoder_decoder'"),
        ({"family": "encoder_decoder", "n_segments": 2}, "choose family = 'decoder' or family = 'encoder'"),
        ({"sentence_classes": 2}, "set family = 'encoder', or leave it out"),
        ({"family": "encoder", "future_tokens": 1}, "set family = 'decoder', or leave it out"),
        ({"attention": "latent"}, "attention = 'latent' needs model.latent: give it"),
        ({"latent": LATENT["latent"]}, "leave it out, or set model.attention = 'latent'"),
        ({"position": "learned"}, "position = 'learned' needs model.max_positions: give it"),
        ({"init": "deepnorm"}, "belong together: set both, or neither"),
        ({"norm_position": "deepnorm"}, "belong together: set both, or neither"),
        ({"distinct_layers": 3}, "distinct_layers = 3 is more than n_layers = 2: leave it out"),
        (
            {"family": "xlnet"},
            "'two_stream' and position = 'transformer_xl' belong together: set all three, or none",
        ),
        ({"position": "transformer_xl"}, "belong together: set all three, or none"),
        ({**XLNET, "n_segments": 2}, "has no meaning with family = 'xlnet'"),
        ({**XLNET, "attention_bias": True}, "choose attention = 'heads'"),
        ({"mup": {"base_width": 4}, "embedding_dim": 4}, "mup is for models of one width"),
    ],
)
def test_an_option_without_its_part(options: dict[str, object], way_out: str) -> None:
    assert way_out in refused(**options)


def test_a_plugin_s_part_may_read_any_option() -> None:
    base = {"d_model": 8, "n_layers": 1, "n_heads": 2, "d_ff": 8}
    assert ModelConfig.model_validate({**base, "position": "mine", "rope_theta": 5.0, "relative_buckets": 8})
