"""Packed rows, and models whose attention no kernel computes."""

import torch
from torch import Tensor, nn

from megatfm.ops.cross_entropy import IGNORE

ROW_LENGTH = 29


def packed_batch(family: str, *, prefix: bool) -> dict[str, Tensor]:
    """Two rows, of which the first has two documents and padding."""
    generator = torch.Generator().manual_seed(1)
    draw = [torch.randint(0, 20, (2, ROW_LENGTH), generator=generator) for _ in range(3)]
    documents = torch.tensor([[0] * 17 + [1] * 9 + [-1] * 3, [0] * 29])
    first = (documents == 0).sum(1, keepdim=True) * (documents == 1)
    result = {
        "tokens": draw[0],
        "targets": draw[1],
        "documents": documents,
        "positions": torch.arange(ROW_LENGTH).expand(2, -1) - first,
        "keys": torch.tensor([5, 6]),
    }
    if family == "encoder_decoder":
        result |= {f"encoder_{key}": result[key] for key in ("documents", "positions")} | {
            "encoder_tokens": draw[2]
        }
    return result | ({"prefix": torch.arange(ROW_LENGTH).expand(2, -1) < 3} if prefix else {})


def loss_gradients(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of the sum of all loss terms."""
    model.zero_grad()
    torch.stack([*model(**inputs).losses.values()]).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


SCORE_SIZES = {"vocab_size": 20, "d_model": 16, "n_layers": 2, "attention.n_heads": 4, "ffn.d_ff": 24}
SHAW_OPTIONS = {"position.name": "shaw", "position.max_distance": 3, "attention.dropout": 0.2}
SCORE_MODELS = {
    "shaw": SHAW_OPTIONS,
    "shaw, prefixes": SHAW_OPTIONS,
    "shaw, window": {
        **SHAW_OPTIONS,
        "attention.pattern": {"name": "window", "width": 5, "initial_tokens": 1},
    },
    "shaw, bigbird": {
        **SHAW_OPTIONS,
        "attention.pattern": {"name": "bigbird", "block_size": 2, "n_random_blocks": 1},
    },
    "shaw of an encoder": {**SHAW_OPTIONS, "family": "encoder"},
    "deberta": {
        "family": "encoder",
        "attention.name": "deberta",
        "attention.dropout": 0.2,
        "position.name": "deberta",
        "position.max_distance": 4,
    },
    "deberta v3": {
        "family": "encoder",
        "attention.name": "deberta_v2",
        "position.name": "deberta_v2",
        "position.buckets": 4,
        "position.max_distance": 8,
    },
    "xlnet": {
        "family": "xlnet",
        "attention.name": "two_stream",
        "attention.dropout": 0.2,
        "position.name": "transformer_xl",
    },
}


def score_inputs(family: str, *, prefix: bool) -> dict[str, Tensor]:
    """Packed rows; of XLNet, with unequally many targets in random orders, and segments."""
    result = packed_batch(family, prefix=prefix)
    if family != "xlnet":
        return result
    drawn = torch.rand(2, ROW_LENGTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    order = drawn.argsort(1).argsort(1) - torch.tensor([[13], [16]])
    targets = result["targets"].where((order > 0) & (result["documents"] >= 0), IGNORE)
    assert len(set((targets != IGNORE).sum(1).tolist())) == 2
    segments = (torch.arange(ROW_LENGTH) % 7 > 2).long().expand(2, -1)
    return result | {"order": order.clamp(min=0), "targets": targets, "segments": segments}
