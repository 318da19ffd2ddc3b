"""Samples during training: continuations of `evaluate.sample_prompts`, with the same seed at each evaluation."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatfm.config import Config
from megatfm.errors import UsageError
from megatfm.inference.decoding import Sampling
from megatfm.inference.prompts import build_prompts
from megatfm.inference.text import TextModel, generate_text
from megatfm.tokenizers import Tokenizer

TEMPERATURE, TOP_P = 0.8, 0.95
"""Defaults of `megatfm generate`."""


@dataclass(frozen=True)
class LockstepSampling(Sampling):
    """Sampling by ranks that run the model together: all take rank 0's token, so that all run equally many steps.

    on_token: called for each token, on all ranks alike.
    """

    on_token: Callable[[], None] = lambda: None

    def sample(self, logits_BV: Tensor, position: object) -> Tensor:
        """Return the next token [B] of each row. Collective if there is a process group."""
        self.on_token()
        token_B = super().sample(logits_BV, position)  # type: ignore[arg-type]
        if dist.is_initialized():
            dist.broadcast(token_B, 0)
        return token_B


class PromptSampler:
    """Continues the config's prompts with the model in training."""

    def check(self, model: nn.Module, tokenizer: Tokenizer | None, config: Config) -> None:
        """Raise UsageError for a prompt that the model can't continue."""
        loaded = _make_text_model(model, tokenizer, config)
        limit, n_tokens = config.model.position.limit, config.evaluate.sample_tokens
        for prompt in config.evaluate.sample_prompts:
            length = len(build_prompts(loaded, prompt).tokens[0])
            if limit is not None and length + n_tokens - 1 > limit:
                raise UsageError(
                    f"evaluate.sample_tokens = {n_tokens}: the prompt {prompt[:40]!r} has {length} tokens, and "
                    f"model.position.max_positions = {limit}: set at most {max(0, limit + 1 - length)}, or a shorter "
                    "prompt"
                )

    @torch.no_grad()
    def generate(
        self, model: nn.Module, tokenizer: Tokenizer | None, config: Config, step: int, on_token: Callable[[], None]
    ) -> list[str]:
        """Return the continuation of each prompt. on_token: called for each token. Collective."""
        loaded = _make_text_model(model, tokenizer, config, step)
        n_ids = loaded.tokenizer.vocab_size
        sampling = LockstepSampling(TEMPERATURE, top_p=TOP_P, vocab_size=n_ids, on_token=on_token)
        n_tokens = config.evaluate.sample_tokens
        return [generate_text(loaded, prompt, sampling, n_tokens, 1)[0] for prompt in config.evaluate.sample_prompts]


def _make_text_model(model: nn.Module, tokenizer: Tokenizer | None, config: Config, step: int = 0) -> TextModel:
    if tokenizer is None:
        raise UsageError("evaluate.sample_prompts: the run reads no text: leave them out")
    return TextModel(model, tokenizer, config, step, None, eos_token_id=(tokenizer.eos,))
