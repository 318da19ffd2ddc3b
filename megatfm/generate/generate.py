"""Autoregressive generation, with a key-value cache or, as its slow reference, without."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from megatfm.errors import UsageError
from megatfm.generate.sampling import Sampling
from megatfm.layers.attention import KVCache

# B rows, T tokens of the prompt, V vocabulary


def generate(
    model: nn.Module,
    tokens: Tensor,
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_token: int | None = None,
    cache: bool = True,
) -> Tensor:
    """Continue int64 tokens [B, T] by up to `max_tokens`; returns prompt and continuation [B, T + n].

    The choice of a token is `Sampling`'s. A row that has reached `stop_token` repeats it until all rows have.
    Without `cache` the whole prefix is computed again for each token. Raises UsageError, MegatfmError.
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    made = stream(model, tokens, sampling, max_tokens=max_tokens, stop_token=stop_token, cache=cache)
    return torch.cat([tokens, *(token_B[:, None] for token_B in made)], dim=1)


def stream(
    model: nn.Module,
    tokens_BT: Tensor,
    sampling: Sampling,
    *,
    max_tokens: int,
    stop_token: int | None = None,
    cache: bool = True,
) -> Iterator[Tensor]:
    """The tokens [B] of `generate`, one position at a time, as they are made."""
    if tokens_BT.shape[1] == 0:
        raise UsageError("nothing to continue: the prompt needs a token, e.g. the tokenizer's bos")
    n_layers = model.config.n_layers  # type: ignore[union-attr]
    past = KVCache(n_layers, tokens_BT.shape[1] + max_tokens) if cache else None
    ended_B = torch.zeros(len(tokens_BT), dtype=torch.bool, device=tokens_BT.device)
    seen_BT = unseen_BT = tokens_BT
    for _ in range(max_tokens):
        with torch.no_grad():
            logits_BV = model(unseen_BT, cache=past).logits[:, -1]
        token_B = sampling.choose(logits_BV, position=seen_BT.shape[1])
        if stop_token is not None:
            token_B = token_B.masked_fill(ended_B, stop_token)
            ended_B |= token_B == stop_token
        yield token_B
        if ended_B.all():
            return
        seen_BT = torch.cat([seen_BT, token_B[:, None]], dim=1)
        unseen_BT = token_B[:, None] if cache else seen_BT
