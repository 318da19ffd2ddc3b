"""The key-value cache and prefixes: a cached pass equals one over all tokens, or is refused."""

from typing import Any

import pytest
import torch

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers.attention.kv_cache import KVCache
from megatfm.layers.initialisation import initialise
from megatfm.models import build

LENGTH, PREFIX = 9, 5
SIZES = {"family": "decoder", "vocab_size": 11, "d_model": 8, "n_layers": 2, "ffn.d_ff": 8}
GQA = {"attention.n_heads": 2}
MLA = {
    "attention.name": "mla", "attention.n_heads": 2, "attention.kv_lora_rank": 4, "attention.qk_rope_head_dim": 2,
}  # fmt: skip


def model_of(pattern: dict[str, Any], attention: dict[str, Any]) -> Any:
    model = build(ModelConfig.from_dotted({**SIZES, **attention, "attention.pattern": pattern}))
    initialise(model, 3)
    return model.double().eval()


def cached_logits(model: Any, tokens_BT: torch.Tensor, prefix_BT: torch.Tensor) -> torch.Tensor:
    """Feed the prefix at once, then token by token."""
    cache = KVCache(2, LENGTH)
    parts = [model(tokens_BT[:, :PREFIX], prefix=prefix_BT[:, :PREFIX], cache=cache).logits]
    parts += [model(tokens_BT[:, at : at + 1], cache=cache).logits for at in range(PREFIX, LENGTH)]
    return torch.cat(parts, 1)


@pytest.mark.parametrize(("pattern", "refused"), [
    ({"name": "window", "width": 3}, True),
    ({"name": "window", "width": 3, "initial_tokens": 1}, True),
    ({"name": "chunked", "size": 3}, True),
    ({"name": "strided", "stride": 3}, True),
    ({"name": "window", "width": LENGTH}, False),
    ({"name": "full"}, False),
], ids=str)  # fmt: skip
@torch.no_grad()
def test_a_prefix_in_a_cache_is_kept_or_refused(pattern: dict[str, Any], refused: bool) -> None:
    tokens_BT = torch.arange(2 * LENGTH).view(2, LENGTH) % 11
    prefix_BT = (torch.arange(LENGTH) < PREFIX).expand(2, -1)
    for attention in (GQA, MLA):
        model = model_of(pattern, attention)
        if refused:
            with pytest.raises(UsageError, match=rf"prefix.*{pattern['name'].title()}.*without a cache"):
                cached_logits(model, tokens_BT, prefix_BT)
        else:
            at_once = model(tokens_BT, prefix=prefix_BT).logits
            torch.testing.assert_close(cached_logits(model, tokens_BT, prefix_BT), at_once, rtol=1e-10, atol=1e-10)
