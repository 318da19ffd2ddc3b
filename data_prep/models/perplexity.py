"""The perplexity of a text under a run of ours (CCNet, Wenzek et al. 2020, section 3.4, with an n-gram model)."""

import math

import torch
import torch.nn.functional as F

from megatfm.config.prep_scores import PerplexityConfig
from megatfm.data_prep.counts import StepStats
from megatfm.data_prep.documents import Document
from megatfm.data_prep.steps.registry import STEPS
from megatfm.data_prep.steps.scored import filter_by_score
from megatfm.errors import UsageError
from megatfm.generate.load import load


@STEPS.register("perplexity")
class Perplexity:
    """Keeps documents by e^(mean negative log-likelihood of a token), each token given those before it in its window of
    the model's row length; the first is given the id with which texts begin."""

    title = "perplexity"

    def __init__(self, config: PerplexityConfig) -> None:
        self._config = config
        found = load(config.run, config.device)
        if found.config.objective.name != "causal":
            raise UsageError(
                f"{config.run}: was trained with objective.name = {found.config.objective.name!r}, and perplexity is "
                "that of a causal model: choose another run"
            )
        self._model, self._tokenizer = found.model, found.tokenizer
        self._begin = found.prompt_prefix_ids[-1] if found.prompt_prefix_ids else found.tokenizer.bos
        self._row = found.config.data.sequence_length

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        (ids,) = self._tokenizer.encode_batch([document.text], 1)
        score = self.of(list(map(int, ids[: self._config.tokens])))
        counts.count_event(f"from {2 ** int(math.log2(score)):,} on")
        return filter_by_score(document, score, self._config, "perplexity")

    @torch.inference_mode()
    def of(self, ids: list[int]) -> float:
        """The perplexity of ids [n]."""
        row, total = torch.tensor([self._begin, *ids], device=self._config.device), 0.0
        for begin in range(0, len(ids), self._row):
            window = row[begin : begin + self._row + 1]
            logits_TV = self._model(window[None, :-1]).logits[0]
            total += float(F.cross_entropy(logits_TV.float(), window[1:], reduction="sum"))
        return math.exp(min(total / max(1, len(ids)), 700.0))
