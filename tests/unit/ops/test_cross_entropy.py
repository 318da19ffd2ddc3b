"""Chunked cross-entropy, its Triton kernel, and contrastive losses, against all logits at once."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatfm.ops import cross_entropy as module
from megatfm.ops.contrastive import LossOptions, compute_retrieval_ranks, contrastive_loss, contrastive_loss_reference
from megatfm.ops.cross_entropy import IGNORE, LogitOptions, cross_entropy, cross_entropy_reference
from tests.support.documentation import load_script
from tests.support.tensors import OperatorRecorder, assert_same_gradients, draw

M, D, V = 13, 6, 29
PLAIN = LogitOptions()


def inputs(dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(M, D, generator=generator, dtype=torch.float64)
    weight = scale * torch.randn(V, D, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, V, (M,), generator=generator)
    targets[[0, 5, 12]] = IGNORE
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


@pytest.mark.parametrize("chunk", [1, 4, 12, 13, 14, 512])
@pytest.mark.parametrize("scale", [1.0, 500.0])  # 500: exp would overflow
@pytest.mark.parametrize("variant", [PLAIN, LogitOptions(2.5), LogitOptions(None, 0.1), LogitOptions(2.5, 0.1)])
def test_values_and_gradients(chunk: int, scale: float, variant: LogitOptions) -> None:
    hidden, weight, targets = inputs(torch.float64, scale)
    bias = None if variant == PLAIN else torch.linspace(-1, 1, V, dtype=torch.float64).requires_grad_()
    reference = cross_entropy_reference(hidden, weight, targets, bias, variant)
    actual = cross_entropy(hidden, weight, targets, bias, variant, chunk=chunk)
    torch.testing.assert_close(actual, reference, rtol=1e-12, atol=0)
    # As one term of a loss among others: what comes from above is not 1.
    trained = [hidden, weight] if bias is None else [hidden, weight, bias]
    assert_same_gradients(actual, reference, trained, rtol=1e-11, atol=1e-11)
    with torch.no_grad():
        assert torch.equal(cross_entropy(hidden, weight, targets, bias, variant, chunk=chunk), actual)


def test_the_reference_by_hand() -> None:
    hidden, weight, targets = inputs(torch.float64)
    real = [m for m in range(M) if targets[m] != IGNORE]
    nats = [(weight @ hidden[m]).exp().sum().log() - hidden[m] @ weight[targets[m]] for m in real]
    torch.testing.assert_close(cross_entropy_reference(hidden, weight, targets), torch.stack(nats).sum())


@pytest.mark.parametrize("function", [cross_entropy, cross_entropy_reference])
def test_without_targets_loss_and_gradients_are_zero(function) -> None:  # type: ignore[no-untyped-def]
    hidden, weight, targets = inputs(torch.float64)
    loss = function(hidden, weight, torch.full_like(targets, IGNORE))
    assert float(loss.detach()) == 0.0
    assert all(float(g.abs().max()) == 0.0 for g in torch.autograd.grad(loss, [hidden, weight]))


def test_bfloat16_sums_in_float32() -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    loss = cross_entropy(hidden, weight, targets, chunk=4)
    assert loss.dtype == torch.float32
    exact = cross_entropy_reference(hidden.double(), weight.double(), targets)
    assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=5e-3)
    gradients = torch.autograd.grad(loss, [hidden, weight])
    expected = torch.autograd.grad(exact, [hidden, weight])
    for a, b in zip(gradients, expected, strict=True):
        assert a.dtype == torch.bfloat16
        assert float((a.double() - b).norm() / b.double().norm()) < 0.01


def test_a_gradient_is_scaled_in_place() -> None:
    """A gradient that another pass will ask for is copied."""
    hidden, weight, targets = torch.randn(6, 4), torch.randn(9, 4), torch.randint(0, 9, (6,))
    expected = torch.func.grad(lambda w: cross_entropy_reference(hidden, w, targets) / 6)(weight)
    weight.requires_grad_()
    loss = cross_entropy(hidden, weight, targets) / 6
    actual, result = [], []

    def find_copies(operator: Any, operands: list[Tensor], outputs: list[Tensor]) -> list[Any]:
        """Operators that make another tensor as large as the weights."""
        known = {x.data_ptr() for x in operands}
        return [operator for x in outputs if x.shape == weight.shape and x.data_ptr() not in known]

    for retain in (True, True, False):
        weight.grad = None
        with OperatorRecorder(find_copies) as copies:
            loss.backward(retain_graph=retain)
        assert weight.grad is not None
        actual.append(weight.grad.clone())
        result.append(len(copies.records))
    assert result == [1, 1, 0]
    assert all(torch.equal(gradient, actual[0]) for gradient in actual)
    torch.testing.assert_close(actual[0], expected)


def test_only_one_input_needs_a_gradient() -> None:
    hidden, weight, targets = inputs(torch.float64)
    actual = cross_entropy(hidden, weight.detach(), targets, chunk=4)
    assert_same_gradients(actual, cross_entropy_reference(hidden, weight.detach(), targets), [hidden], rtol=1e-11)


def test_a_target_beyond_the_vocabulary_gives_nan() -> None:
    hidden, weight, targets = inputs(torch.float64)
    targets[3] = V
    assert cross_entropy(hidden, weight, targets).isnan()


with_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: pip install triton")


@with_triton
def test_the_interpreted_triton_kernel_equals_the_reference() -> None:
    command = [sys.executable, "-m", "tests.support.triton_kernels"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.stdout.endswith("all alike\n"), ran.stderr[-2000:]


@with_triton
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_the_kernels_compile_for_a_gpu_without_spills() -> None:
    script = load_script("compiled_kernels")
    for title, (name, sharded, _) in script.PASSES.items():
        for options in ({}, {"capped": True, "smoothed": True}):
            actual = script.compile_cross_entropy("bf16", name=name, sharded=sharded, **options)
            assert actual.registers <= 96, (title, options)
            assert actual.spilled == 0, (title, options)
    for is_run in (True, False):
        update = script.compile_adamw(is_run=is_run)
        assert update.registers <= 64, is_run
        assert update.spilled == 0, is_run


def test_no_operator_copies_the_logits_of_a_shard_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels overwrite what the product returned. torch's operators pass over a copy in float32."""
    hidden, weight, targets = inputs(torch.bfloat16)
    shard = module.VocabularyShard(V, 2 * V, lambda values: torch.stack([values, values]))
    options = LogitOptions(None, 0.1)
    calls = {}

    def describe_logits(operator: Any, _: object, outputs: list[Tensor]) -> list[tuple[str, torch.dtype]]:
        """Operators that make tensors as large as the logits, and dtypes of these."""
        return [(operator._schema.name, x.dtype) for x in outputs if x.numel() >= M * V and not operator.is_view]

    for kernels in (None, module._FakeKernels):
        monkeypatch.setattr(module, "_choose_kernels", lambda _, chosen=kernels: chosen)
        with OperatorRecorder(describe_logits) as logits:
            cross_entropy(hidden, weight, targets, None, options, shard=shard)
        calls[kernels] = logits.records
    assert ("aten::_to_copy", torch.float32) in calls[None]
    assert {dtype for _, dtype in calls[module._FakeKernels]} == {torch.bfloat16}
    assert [name for name, _ in calls[module._FakeKernels]] == ["aten::new_empty", "aten::fill_", "aten::mm"]


def test_chunks_follow_memory_on_a_gpu() -> None:
    on_gpu = type("On", (), {"device": torch.device("cuda"), "element_size": lambda self: 2})()
    tokens = module.choose_chunk(on_gpu, 50257)
    assert tokens % module.ROW_ALIGNMENT == 0
    row_bytes = 50304 * 2
    assert module.LOGITS_BYTES - module.ROW_ALIGNMENT * row_bytes < tokens * row_bytes <= module.LOGITS_BYTES
    assert module.choose_chunk(on_gpu, 2**30) == module.ROW_ALIGNMENT
    assert module.pad_row_length(50257) == 50304


# ----------------------------------------------------------------------------------------- contrastive losses


class ThreadRing:
    """Ranks that are threads: each leaves what it sends, and takes what the rank before left. Counts what is sent."""

    def __init__(self, rank: int, lengths: Sequence[int], slots: list[Any], barrier: Barrier) -> None:
        self.rank, self.size, self._lengths = rank, len(lengths), lengths
        self._slots, self._barrier = slots, barrier
        self.sent = 0

    def lengths(self, n: int, device: torch.device) -> Sequence[int]:
        assert n == self._lengths[self.rank]
        return [self._lengths[(self.rank - step) % self.size] for step in range(self.size)]

    def shift(self, tensors: Sequence[Tensor], length: int) -> list[Tensor]:
        self.sent += sum(tensor.numel() for tensor in tensors)
        self._slots[self.rank] = [tensor.clone() for tensor in tensors]
        self._barrier.wait(30)
        received: list[Tensor] = self._slots[(self.rank - 1) % self.size]
        self._barrier.wait(30)
        assert all(len(tensor) == length for tensor in received)
        return received


def draw_features(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Unit vectors of `n` images and captions."""
    images, texts = F.normalize(draw(2, n, 5, seed=seed), dim=2)
    return images, texts


def make_scale_and_bias(kind: str) -> tuple[Tensor, Tensor | None]:
    scale, bias = (torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (7.0, -1.2))
    return scale, bias if kind == "sigmoid" else None


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_contrastive_loss_in_chunks_equals_the_reference(kind: Any, chunk: int) -> None:
    images, texts = (x.requires_grad_() for x in draw_features(7))
    scale, bias = make_scale_and_bias(kind)
    loss = contrastive_loss(images, texts, scale, bias, LossOptions(kind, chunk=chunk))
    expected = contrastive_loss_reference(images, texts, scale, bias, kind)
    inputs = [x for x in (images, texts, scale, bias) if x is not None]
    assert_same_gradients(loss, expected, inputs, rtol=1e-12, atol=1e-12)


def test_contrastive_losses_of_two_pairs_by_hand() -> None:
    """Two pairs whose vectors are equal, or at right angles: e and 1 stand for the logits 1 and 0."""
    eye, scale = torch.eye(2, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    e = torch.e
    softmax = contrastive_loss(eye, eye, scale, None, LossOptions("softmax"))
    assert softmax.item() == pytest.approx(2 * -torch.tensor(e / (e + 1)).log().item())
    sigmoid = contrastive_loss(eye, eye, scale, -scale, LossOptions("sigmoid"))
    negative, positive = torch.tensor([e / (1 + e), 0.5]).log().tolist()
    assert sigmoid.item() == pytest.approx(-2 * positive - 2 * negative, rel=1e-6)


@pytest.mark.parametrize("lengths", [(4,), (3, 3), (2, 5, 1), (4, 0, 3), (1, 2, 0, 0, 6)])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_contrastive_loss_on_a_ring_equals_one_rank(kind: Any, lengths: tuple[int, ...]) -> None:
    """Some ranks have no pairs. Gradients of features are complete, those of scale and bias add up."""
    images, texts = (x.requires_grad_() for x in draw_features(sum(lengths)))
    scale, bias = make_scale_and_bias(kind)
    inputs = [x for x in (images, texts, scale, bias) if x is not None]
    full_loss = contrastive_loss_reference(images, texts, scale, bias, kind)
    expected = torch.autograd.grad(full_loss, inputs)
    slots: list[Any] = [None] * len(lengths)
    barrier, results = Barrier(len(lengths)), list[Any]([None] * len(lengths))
    rings = [ThreadRing(rank, lengths, slots, barrier) for rank in range(len(lengths))]

    def run(rank: int) -> None:
        begin = sum(lengths[:rank])
        local_features = [x.detach()[begin : begin + lengths[rank]].requires_grad_() for x in (images, texts)]
        leaves = [*local_features, *(x.detach().requires_grad_() for x in inputs[2:])]
        options = LossOptions(kind, rings[rank], chunk=2)
        loss = contrastive_loss(leaves[0], leaves[1], leaves[2], leaves[3] if bias is not None else None, options)
        results[rank] = loss.detach(), torch.autograd.grad(loss, leaves)

    threads = [Thread(target=run, args=(rank,)) for rank in range(len(lengths))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    torch.testing.assert_close(sum(loss for loss, _ in results), full_loss.detach(), rtol=1e-12, atol=1e-12)
    for index, gradient in enumerate(expected):
        parts = [gradients[index] for _, gradients in results]
        actual = torch.cat(parts) if index < 2 else torch.stack(parts).sum(0)
        torch.testing.assert_close(actual, gradient, rtol=1e-11, atol=1e-12)
    if len(set(lengths)) == 1:
        n, d, ranks = lengths[0], 5, len(lengths)
        per_pair = (3 * ranks - 2) * d + (2 * ranks - 1) * (kind == "softmax")
        assert rings[0].sent == (n * per_pair if ranks > 1 else 0)


def test_retrieval_ranks_count_captions_at_least_as_similar() -> None:
    """By counting: equal captions are the image's own, ties and NaN count against it."""
    images, texts = draw_features(9, seed=3)
    texts[4], texts[7] = texts[2], texts[2]  # 4 is the same caption, 7 another one that looks the same
    captions = torch.tensor([10, 11, 12, 13, 12, 15, 16, 17, 18])
    cosines, nine = images @ texts.T, range(9)
    expected = [sum(bool(cosines[i, j] >= cosines[i, i] and captions[j] != captions[i]) for j in nine) for i in nine]
    for chunk in (2, 100):
        assert compute_retrieval_ranks(images, texts, captions, chunk=chunk).tolist() == expected
    assert expected[2] >= 1
    images[0] = torch.nan
    assert compute_retrieval_ranks(images, texts, captions)[0] == 8
