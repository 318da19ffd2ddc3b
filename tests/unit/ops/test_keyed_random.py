"""Numbers by keys: the same compiled, and products that wrap."""

import pytest
import torch
from torch import Tensor

from megatfm.config import ModelConfig
from megatfm.ops import keyed_random
from megatfm.ops.keyed_random import GOLDEN, RATE_STEPS

WIDTHS = (29, 72, 160)
"""Numbers of places and channels that fill a vector of a CPU's and leave some over."""


def drawn(keys_B: Tensor) -> list[Tensor]:
    """What a compiled model draws, of places and channels that are counted within."""
    keys_BT = keyed_random.token_keys(keys_B, 5, torch.arange(WIDTHS[0]))
    kept = [keyed_random.keep(keys_BT, width, RATE_STEPS // 3) for width in WIDTHS]
    heads = torch.arange(WIDTHS[1])
    return [
        keys_BT,
        keyed_random.fold_in(keys_B[:, None], heads),
        keyed_random.uniform(keys_B, WIDTHS[2]),
        *kept,
    ]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_compiled_it_draws_the_same() -> None:
    """A product of places that overflowed within a loop had gcc make loops that ended too late, and wrote elsewhere."""
    torch.compiler.reset()
    keys_B = torch.randint(-(2**63), 2**63 - 1, (3,), generator=torch.Generator().manual_seed(0))
    result = torch.compile(drawn, fullgraph=True, dynamic=False)(keys_B)
    for compiled, plain in zip(result, drawn(keys_B), strict=True):
        assert torch.equal(compiled, plain)


def test_steps_wrap_as_one_product_does() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.cat(
        [torch.arange(-9, 999), torch.randint(-(2**63), 2**63 - 1, (9999,), generator=generator)]
    )
    assert torch.equal(keyed_random._golden_steps(values), values * GOLDEN)


def test_the_largest_rate_of_a_config_leaves_something() -> None:
    """One above it is refused, with the rate that would do."""
    most = 1 - 2**-16
    kept = keyed_random.dropout(torch.ones(2**18), most, torch.tensor(7))
    assert set(kept.unique().tolist()) == {0.0, float(RATE_STEPS)}
    base = {"vocab_size": 31, "d_model": 16, "n_layers": 1, "attention.n_heads": 2, "ffn.d_ff": 16}
    for key in ("dropout", "attention.dropout", "ffn.dropout", "drop_path"):
        assert ModelConfig.from_dotted(**base, **{key: most})
        with pytest.raises(ValueError, match=f"less than or equal to {most}"):
            ModelConfig.from_dotted(**base, **{key: 0.999999})
