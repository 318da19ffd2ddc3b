"""Autoregressive generation, with a key-value cache or, as its slow reference, without."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from megatfm.generate.decoding import DecodingState, Prompts, stop_tokens
from megatfm.generate.sampling import Sampling

# B rows, T tokens of the prompt, V vocabulary


def generate(
    model: nn.Module,
    tokens: Tensor | Prompts,
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_token: int | Sequence[int] | None = None,
    cache: bool = True,
) -> Tensor:
    """Continue int64 tokens [B, T] by up to `max_tokens`; returns prompt and continuation [B, T + n].

    tokens: `Prompts`, for prompts of different lengths (the shorter are padded with 0 at their left) or an encoder-
    decoder (whose start token is part of what is returned). The choice of a token is `Sampling`'s. A row that has
    reached `stop_token`, or one of several, repeats it until all rows have. Without `cache` the whole prefix is
    computed again for each token. Raises UsageError, MegatfmError.
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    prompts = tokens if isinstance(tokens, Prompts) else Prompts(list(tokens))
    decoding = DecodingState(model, prompts, max_tokens, cache=cache)
    made = _steps(decoding, sampling, max_tokens, stop_token)
    return torch.cat([decoding.tokens_BT, *(token_B[:, None] for token_B in made)], dim=1)


def stream(
    model: nn.Module,
    tokens: Tensor | Prompts,
    sampling: Sampling,
    *,
    max_tokens: int,
    stop_token: int | Sequence[int] | None = None,
    cache: bool = True,
) -> Iterator[Tensor]:
    """The tokens [B] of `generate`, one position at a time, as they are made."""
    prompts = tokens if isinstance(tokens, Prompts) else Prompts(list(tokens))
    return _steps(DecodingState(model, prompts, max_tokens, cache=cache), sampling, max_tokens, stop_token)


def _steps(
    decoding: DecodingState, sampling: Sampling, max_tokens: int, stop_token: int | Sequence[int] | None
) -> Iterator[Tensor]:
    token_B = torch.zeros_like(decoding.tokens_BT[:, 0])
    ended_B = torch.zeros_like(token_B, dtype=torch.bool)
    stops = ended_B.new_tensor(stop_tokens(stop_token), dtype=torch.int64)
    for _ in range(max_tokens):
        places = (decoding.tokens_BT.shape[1] - decoding.left_padding_B1[:, 0]).tolist()
        token_B = torch.where(ended_B, token_B, sampling.sample(decoding.logits(), places))
        ended_B = torch.isin(token_B, stops)
        decoding.append(token_B)
        yield token_B
        if ended_B.all():
            return
