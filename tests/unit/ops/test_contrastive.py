"""Contrastive losses by chunks and in a ring: against all logits at once, and the ranks of captions by counting."""

from collections.abc import Sequence
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatfm.ops.contrastive import (
    LossOptions,
    compute_retrieval_ranks,
    contrastive_loss,
    contrastive_loss_reference,
)


class ThreadRing:
    """Ranks that are threads: each leaves what it sends, and takes what the rank before left. Counts what is sent."""

    def __init__(self, rank: int, lengths: Sequence[int], places: list[Any], barrier: Barrier) -> None:
        self.rank, self.size, self._lengths = rank, len(lengths), lengths
        self._places, self._barrier = places, barrier
        self.sent = 0

    def lengths(self, n: int, device: torch.device) -> Sequence[int]:
        assert n == self._lengths[self.rank]
        return [self._lengths[(self.rank - step) % self.size] for step in range(self.size)]

    def shift(self, tensors: Sequence[Tensor], length: int) -> list[Tensor]:
        self.sent += sum(tensor.numel() for tensor in tensors)
        self._places[self.rank] = [tensor.clone() for tensor in tensors]
        self._barrier.wait(30)
        received: list[Tensor] = self._places[(self.rank - 1) % self.size]
        self._barrier.wait(30)
        assert all(len(tensor) == length for tensor in received)
        return received


def features(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Unit vectors of `n` images and captions."""
    generator = torch.Generator().manual_seed(seed)
    images, texts = (
        F.normalize(torch.randn(n, 5, generator=generator, dtype=torch.float64), dim=1) for _ in range(2)
    )
    return images, texts


def numbers(kind: str) -> tuple[Tensor, Tensor | None]:
    scale, bias = (torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (7.0, -1.2))
    return scale, bias if kind == "sigmoid" else None


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_chunks_are_all_logits_at_once(kind: Any, chunk: int) -> None:
    results = []
    for way in ("chunks", "reference"):
        images, texts = (x.requires_grad_() for x in features(7))
        scale, bias = numbers(kind)
        inputs = [x for x in (images, texts, scale, bias) if x is not None]
        if way == "chunks":
            loss = contrastive_loss(images, texts, scale, bias, LossOptions(kind, chunk=chunk))
        else:
            loss = contrastive_loss_reference(images, texts, scale, bias, kind)
        results.append([loss, *torch.autograd.grad(3 * loss, inputs)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_losses_by_hand() -> None:
    """Two pairs whose vectors are equal, or at right angles: e and 1 stand for the logits 1 and 0."""
    eye, one = torch.eye(2, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    e = torch.e
    softmax = contrastive_loss(eye, eye, one, None, LossOptions("softmax"))
    assert softmax.item() == pytest.approx(2 * -torch.tensor(e / (e + 1)).log().item())
    sigmoid = contrastive_loss(eye, eye, one, -one, LossOptions("sigmoid"))
    negative, positive = torch.tensor([e / (1 + e), 0.5]).log().tolist()
    assert sigmoid.item() == pytest.approx(-2 * positive - 2 * negative, rel=1e-6)


@pytest.mark.parametrize("lengths", [(4,), (3, 3), (2, 5, 1), (4, 0, 3), (1, 2, 0, 0, 6)])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_a_ring_is_one_rank(kind: Any, lengths: tuple[int, ...]) -> None:
    """Also of ranks without pairs; features' gradients are complete, those of numbers add up."""
    images, texts = (x.requires_grad_() for x in features(sum(lengths)))
    scale, bias = numbers(kind)
    inputs = [x for x in (images, texts, scale, bias) if x is not None]
    loss_of_all = contrastive_loss_reference(images, texts, scale, bias, kind)
    expected = torch.autograd.grad(loss_of_all, inputs)
    places: list[Any] = [None] * len(lengths)
    barrier, results = Barrier(len(lengths)), list[Any]([None] * len(lengths))
    rings = [ThreadRing(rank, lengths, places, barrier) for rank in range(len(lengths))]

    def run(rank: int) -> None:
        begin = sum(lengths[:rank])
        mine = [x.detach()[begin : begin + lengths[rank]].requires_grad_() for x in (images, texts)]
        leaves = [*mine, *(x.detach().requires_grad_() for x in inputs[2:])]
        options = LossOptions(kind, rings[rank], chunk=2)
        loss = contrastive_loss(
            leaves[0], leaves[1], leaves[2], leaves[3] if bias is not None else None, options
        )
        results[rank] = loss.detach(), torch.autograd.grad(loss, leaves)

    threads = [Thread(target=run, args=(rank,)) for rank in range(len(lengths))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    torch.testing.assert_close(sum(loss for loss, _ in results), loss_of_all.detach(), rtol=1e-12, atol=1e-12)
    for at, gradient in enumerate(expected):
        parts = [gradients[at] for _, gradients in results]
        actual = torch.cat(parts) if at < 2 else torch.stack(parts).sum(0)
        torch.testing.assert_close(actual, gradient, rtol=1e-11, atol=1e-12)
    if len(set(lengths)) == 1:
        n, d, ranks = lengths[0], 5, len(lengths)
        per_pair = (3 * ranks - 2) * d + (2 * ranks - 1) * (kind == "softmax")
        assert rings[0].sent == (n * per_pair if ranks > 1 else 0)


def test_captions_before_the_own() -> None:
    """By counting: equal captions are the image's own, ties and NaN count against it."""
    images, texts = features(9, seed=3)
    texts[4], texts[7] = texts[2], texts[2]  # 4 is the same caption, 7 another one that looks the same
    captions = torch.tensor([10, 11, 12, 13, 12, 15, 16, 17, 18])
    cosines = images @ texts.T
    expected = [
        sum(bool(cosines[i, j] >= cosines[i, i]) and bool(captions[j] != captions[i]) for j in range(9))
        for i in range(9)
    ]
    for chunk in (2, 100):
        assert compute_retrieval_ranks(images, texts, captions, chunk=chunk).tolist() == expected
    assert expected[2] >= 1
    images[0] = torch.nan
    assert compute_retrieval_ranks(images, texts, captions)[0] == 8
