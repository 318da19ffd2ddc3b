"""Every pattern with every part: it works, by blocks as by a mask of all pairs, or one line refuses it by name."""

import itertools
import re
from typing import Any
from unittest import mock

import pytest
import torch

from megatfm.config import ModelConfig, load_config
from megatfm.errors import UsageError
from megatfm.layers.attention.patterns import PATTERNS
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.ops.attention import block_sparse, kernels
from tests.support.layouts import extend
from tests.support.models import loss_gradients, packed_batch

PATTERN: dict[str, dict[str, Any]] = {
    "window": {"name": "window", "width": 5},
    "dilated": {"name": "window", "width": 3, "dilation": 2},
    "first": {"name": "window", "width": 4, "initial_tokens": 2},
    "chunked": {"name": "chunked", "size": 6},
    "strided": {"name": "strided", "stride": 4},
    "fixed": {"name": "fixed", "stride": 5, "n_summary_tokens": 1},
    "bigbird": {"name": "bigbird", "block_size": 2, "n_random_blocks": 1},
    "etc": {"name": "bigbird", "block_size": 2, "n_random_blocks": 0, "n_global_tokens": 2},
    "longformer": {"name": "longformer", "width": 4, "global_tokens": [0, 7]},
}
ENCODER = {"family": "encoder"}
PARTS: dict[str, dict[str, Any]] = {
    "decoder": {},
    "encoder": ENCODER,
    "encoder-decoder": {"family": "encoder_decoder"},
    "one key head": {"attention.n_kv_heads": 1},
    "QK norm": {"attention.qk_norm": True},
    "sinks": {"attention.sinks": True},
    "soft cap": {"attention.softcap": 2.0},
    "dropout": {"attention.dropout": 0.3, "dropout": 0.1},
    "latent": {"attention.name": "mla", "attention.kv_lora_rank": 6, "attention.qk_rope_head_dim": 4,
    "attention.v_head_dim": 3},
    "alibi": {"position.name": "alibi"},
    "t5": {"position.name": "t5", "position.buckets": 8, "position.max_distance": 6},
    "shaw": {"position.name": "shaw", "position.max_distance": 3},
    "learned": {"position.name": "learned", "position.max_positions": 30, **ENCODER},
    "sinusoidal": {"position.name": "sinusoidal"},
    "no positions": {"position.name": "none"},
    "prefix": {},
    "longformer": {
        "attention.name": "longformer", "position.name": "learned", "position.max_positions": 30, **ENCODER
    },
    "disentangled": {"attention.name": "deberta", "position.name": "deberta", **ENCODER},
    "disentangled, shared": {
        "attention.name": "deberta_v2", "position.name": "deberta_v2", **ENCODER
    },
    "linformer": {"attention.name": "linformer", "attention.max_length": 30, "position.name": "learned",
                  "position.max_positions": 30, **ENCODER},
    "two streams": {"family": "xlnet", "attention.name": "two_stream", "position.name": "transformer_xl"},
    "shared layers": {"n_layers": 4, "distinct_layers": 2},
    "heads for later tokens": {"n_mtp_heads": 1},
}  # fmt: skip
ALL_TOKENS = ("linformer", "disentangled", "disentangled, shared", "two streams")


def refusal(pattern: str, part: str) -> str | None:
    """The refusal where the two don't go together."""
    encoder = PARTS[part].get("family") == "encoder"
    if pattern == "first" and encoder:
        return "pattern.initial_tokens = 2: in an encoder, initial tokens would not see the whole.*leave it out"
    if part in ALL_TOKENS:
        return rf"pattern = '{PATTERN[pattern]['name']}': attention.name = '.*' supports full attention only: leave the"
    if part == "longformer" and pattern != "longformer":
        return "attention.name = 'longformer' needs model.attention.pattern.name = 'longformer'"
    if pattern == "longformer" and not encoder:
        return "pattern.name = 'longformer' has global tokens, which see later tokens.*choose family = 'encoder'"
    if pattern == "first" and part == "encoder-decoder":
        return "pattern.initial_tokens = 2: in an encoder, initial tokens would not see the whole.*leave it out"
    return None


@pytest.mark.parametrize(("pattern", "part"), list(itertools.product(PATTERN, PARTS)))
def test_a_pattern_works_with_a_part_or_is_refused(pattern: str, part: str) -> None:
    sizes = {"vocab_size": 20, "d_model": 16, "n_layers": 2, "attention.n_heads": 4, "ffn.d_ff": 24}
    config = ModelConfig.from_dotted({**sizes, **PARTS[part], "attention.pattern": PATTERN[pattern]})
    if expected := refusal(pattern, part):
        with pytest.raises(UsageError) as caught:
            build(config)
        assert "\n" not in str(caught.value)
        assert re.search(expected, str(caught.value))
        return
    model, inputs = build(config).double().train(), packed_batch(config.family, prefix=part == "prefix")
    initialise(model, 3)
    by_mask = loss_gradients(model, inputs)
    with mock.patch.object(kernels, "LONG", 1), mock.patch.object(block_sparse, "SIZE", 8):
        by_blocks = loss_gradients(model, inputs)
    assert by_mask.keys() == by_blocks.keys() == {name for name, _ in model.named_parameters()}
    norm = torch.stack([gradient.norm() for gradient in by_mask.values()]).norm()
    for name, gradient in by_mask.items():
        assert (by_blocks[name] - gradient).norm() <= 1e-11 * norm, name


def test_every_pattern_is_tried() -> None:
    shipped = {name for name in PATTERNS.names() if PATTERNS.get(name).__module__.startswith("megatfm.")}
    # Windows of maps are for images alone; other tests may have imported them.
    assert shipped - {"windows_2d"} == {"full", *(options["name"] for options in PATTERN.values())}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "pattern",
    extend([pattern for pattern in PATTERN if pattern != "bigbird"], kept=["chunked", "longformer", "strided", "etc"]),
)
def test_a_compiled_block_is_the_same(pattern: str, backend: str) -> None:
    torch._dynamo.reset()  # code that was compiled for the blocks before counts against a limit
    sizes = {"vocab_size": 20, "d_model": 16, "n_layers": 1, "attention.n_heads": 4, "ffn.d_ff": 24}
    family = "encoder" if pattern == "longformer" else "decoder"
    config = ModelConfig.from_dotted({**sizes, "family": family, "attention.pattern": PATTERN[pattern]})
    model, inputs = build(config).double().train(), packed_batch(family, prefix=False)
    initialise(model, 3)
    eager = loss_gradients(model, inputs)
    for block in (model.decoder if family == "decoder" else model.encoder).layers.values():
        block.compile(fullgraph=True, backend=backend)
    with mock.patch.object(kernels, "LONG", 1):
        compiled = loss_gradients(model, inputs)
    for name, gradient in eager.items():
        torch.testing.assert_close(compiled[name], gradient, rtol=1e-10, atol=1e-12)


def test_random_blocks_are_not_compiled() -> None:
    options = ["model.attention.pattern=bigbird", "train.compile=true"]
    with pytest.raises(
        UsageError, match=r"train\.compile = true: .*'bigbird' draws random blocks.*n_random_blocks = 0"
    ):
        load_config("quickstart", options)
    load_config("quickstart", ["train.compile=true"])
