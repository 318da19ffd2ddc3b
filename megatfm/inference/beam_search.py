"""Beam search: the likeliest of several continuations of a prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatfm.errors import UsageError
from megatfm.inference.decoding import DecodingState, Prompts, check_logits, list_stop_ids

# B prompts, K beams of each, V vocabulary

LengthPenalty = Callable[[int], float]
"""n → divisor of the log-probability of a continuation of n tokens."""


@dataclass(frozen=True)
class BeamResult:
    """A continuation: tokens int64 [n] with the stop token, if any, and score, log-probability / length penalty."""

    tokens: Tensor
    score: float


MAX_ALPHA = 10
"""Largest exponent of a length penalty, positive or negative."""


def gnmt_penalty(alpha: float) -> LengthPenalty:
    """Return n → ((5 + n) / 6)^α (Wu et al. 2016, equation 14); 0.6 in Vaswani et al. 2017.

    Raises UsageError for an α with which the penalties of long texts are no numbers.
    """
    if not -MAX_ALPHA <= alpha <= MAX_ALPHA:
        raise UsageError(f"length penalty = {alpha}: choose a number from -{MAX_ALPHA} to {MAX_ALPHA}, e.g. 0.6")
    return lambda n: ((5 + n) / 6) ** alpha


DEFAULT_PENALTY = gnmt_penalty(0.6)


@torch.no_grad()
def beam_search(
    model: nn.Module,
    prompts: Prompts,
    *,
    beams: int,
    max_tokens: int,
    stop_token: int | Sequence[int] | None,
    penalty: LengthPenalty = DEFAULT_PENALTY,
    vocab_size: int | None = None,
    cache: bool = True,
) -> list[BeamResult]:
    """Return the best continuation of each prompt, of up to `max_tokens` tokens.

    Each step takes the (1 + n)·beams likeliest next tokens, for n stop tokens, at least one, as transformers
    does. Stop tokens among the first `beams` finish their beam; the likeliest others continue. A prompt is finished
    when no running beam can beat its best finished one. stop_token: the ids that end a text. vocab_size: only ids below
    it. Raises UsageError without a beam or token, MegatfmError for logits that are not finite.
    """
    if beams < 1 or max_tokens < 1:
        raise UsageError("beam search needs at least one beam and one token")
    decoding = DecodingState(model, prompts, max_tokens, cache=cache)
    stops = list_stop_ids(stop_token)
    searches = [_Search(beams, max_tokens, stops, penalty) for _ in prompts.tokens]
    n_candidates = (1 + max(1, len(set(stops)))) * beams
    scores_BK = torch.zeros(len(searches), 1, dtype=torch.float64)
    for length in range(1, max_tokens + 1):
        logits = decoding.logits()[:, :vocab_size].double().cpu()
        positions_B = (decoding.tokens_BT.shape[1] - decoding.left_padding_B1[:, 0]).tolist()
        check_logits(logits, positions_B)
        logs_BKV = logits.log_softmax(-1).unflatten(0, (len(searches), -1))
        totals = (scores_BK[..., None] + logs_BKV).flatten(1)
        best, indices = totals.topk(min(n_candidates, totals.shape[1]), dim=1)
        steps = [
            search.step(length, row_scores, row_indices, logs_BKV.shape[2])
            for search, row_scores, row_indices in zip(searches, best.tolist(), indices.tolist(), strict=True)
        ]
        if all(search.finished for search in searches):
            break
        width = logs_BKV.shape[1]
        rows = [i * width + beam for i, step in enumerate(steps) for _, beam, _ in step]
        device = decoding.tokens_BT.device
        decoding.reorder(torch.tensor(rows, device=device))
        decoding.append(torch.tensor([token for step in steps for _, _, token in step], device=device))
        scores_BK = torch.tensor([[score for score, _, _ in step] for step in steps], dtype=torch.float64)
    return [BeamResult(torch.tensor(search.best[1]), search.best[0]) for search in searches]


class _Search:
    """The beams of one prompt."""

    def __init__(self, beams: int, max_tokens: int, stops: Sequence[int], penalty: LengthPenalty) -> None:
        self.beams, self.max_tokens, self.stops = beams, max_tokens, frozenset(stops)
        self.penalty = penalty
        self.running: list[list[int]] = [[]]
        self.best: tuple[float, list[int]] = (-float("inf"), [])
        self.finished = False

    def step(
        self, length: int, scores: list[float], indices: list[int], vocabulary: int
    ) -> list[tuple[float, int, int]]:
        """Return (score, beam, token) of each of the `beams` beams that continue; [] if none can.

        scores, indices: the likeliest next tokens, best first; index = beam · vocabulary + token. If the vocabulary
        is too small for `beams` beams, the last one is repeated with score −∞.
        """
        live: list[tuple[float, int, int]] = []
        for rank, (score, index) in enumerate(zip(scores, indices, strict=True)):
            beam, token = divmod(index, vocabulary)
            if token in self.stops or length == self.max_tokens:
                if rank < self.beams and not self.finished:
                    finished = (score / self.penalty(length), [*self.running[beam], token])
                    self.best = max(self.best, finished, key=lambda pair: pair[0])
            elif len(live) < self.beams:
                live.append((score, beam, token))
        if live:
            # Scores only fall, and the largest penalty of the remaining lengths is at one of the two ends.
            best_penalty = max(self.penalty(length + 1), self.penalty(self.max_tokens))
            self.finished = self.finished or self.best[0] >= live[0][0] / best_penalty
            live += [(-float("inf"), live[-1][1], live[-1][2])] * (self.beams - len(live))
            self.running = [[*self.running[beam], token] for _, beam, token in live]
        else:
            self.finished = True
        return live
