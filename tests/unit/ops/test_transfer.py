"""Memory: as torch's own, by the helper; kernels read none that is unwritten, which conftest.py fills with NaN.

oneDNN's products of bfloat16 with AMX read a row of 50 numbers up to its 64th, and multiply by zero what is there. So
sizes of kernels' inputs here are no multiples of anything, and larger than the tiles of such kernels.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from megatfm.layers.attention.patterns import AttentionPattern
from megatfm.layers.attention.patterns.bigbird import BigBird
from megatfm.layers.attention.patterns.local import Chunked, Fixed, Full, Longformer, Strided, Window
from megatfm.layers.attention.patterns.mask import PatternMask
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops import transfer as module
from megatfm.ops.attention import block_sparse
from megatfm.ops.attention.kernels import AttentionRequest, choose_kernel
from megatfm.ops.attention.reference import AttentionOptions, attention_reference
from megatfm.ops.cross_entropy import LogitOptions, cross_entropy, cross_entropy_reference
from megatfm.ops.moe import KERNELS, choose_grouped_kernel, grouped_linear
from megatfm.ops.transfer import align, align_all, allocate_aligned, is_aligned, move_to_device
from tests.support.tensors import MisalignedInputs, assert_aligned_inputs, is_misaligned, misalign

ROWS = torch.arange(15.0).view(5, 3)
MISALIGNED = {
    "8 bytes on": misalign(ROWS),
    "a slice": ROWS[1:],
    "by columns": ROWS.T,
    "8 bytes on, by columns": misalign(ROWS.T),
}


@pytest.mark.parametrize("kind", MISALIGNED)
def test_misaligned_tensors_are_copied(kind: str) -> None:
    tensor = MISALIGNED[kind]
    assert is_misaligned(tensor)
    assert not is_aligned(tensor)
    aligned = align(tensor)
    assert torch.equal(aligned, tensor)
    assert not is_misaligned(aligned)


def test_aligned_tensors_are_not_copied() -> None:
    for tensor in (ROWS, torch.empty(0), torch.tensor(3.0), torch.zeros(0, 5)):
        assert align(tensor) is tensor


def test_views_of_a_buffer_are_copied_together() -> None:
    def split_buffer(sizes: list[int]) -> dict[str, Tensor]:
        return {str(i): part for i, part in enumerate(torch.arange(float(sum(sizes))).split(sizes))}

    aligned_views, misaligned_views = split_buffer([16, 32, 5]), split_buffer([16, 3, 32])
    results = align_all({**aligned_views, **{f"misaligned {name}": part for name, part in misaligned_views.items()}})
    assert all(results[name] is part for name, part in aligned_views.items())
    buffer = next(iter(misaligned_views.values())).untyped_storage().data_ptr()
    for name, part in misaligned_views.items():
        actual = results[f"misaligned {name}"]
        assert torch.equal(actual, part)
        assert not is_misaligned(actual)
        assert actual.untyped_storage().data_ptr() != buffer


@pytest.mark.parametrize("line", [64, 4096])
def test_allocated_bytes_are_aligned_for_any_start(monkeypatch: pytest.MonkeyPatch, line: int) -> None:
    numpy_empty = np.empty
    for offset in (0, 8, 16, 40):

        def empty(size: int, dtype: type, offset: int = offset) -> np.ndarray:
            memory = numpy_empty(size + 2 * line, dtype)
            return memory[-memory.ctypes.data % line + offset :][:size]

        monkeypatch.setattr(module.np, "empty", empty)
        for size in (0, 1, 1000):
            memory = allocate_aligned(size, line)
            assert memory.size == size
            assert not size or memory.ctypes.data % line == 0


def test_the_support_code_finds_kernels_on_misaligned_memory() -> None:
    with assert_aligned_inputs():
        align(misalign(ROWS)).T @ ROWS[1:, :2].T.T[:4].repeat(2, 1)[:5]
    with MisalignedInputs() as kernels:
        misalign(ROWS) @ ROWS.T
    assert kernels.wrong == {"aten.mm.default [5, 3]"}


def make_device_tensor(host: Tensor) -> Tensor:
    """A device tensor that can't be read, with a copy on the host."""
    return module.remember_host_copy(torch.empty_like(host, device="meta"), host)


def test_the_host_computes_functions_of_tensors_it_has_copies_of() -> None:
    def take(values: Tensor, index: Tensor) -> Tensor:
        return values[:, index]

    values, index = torch.arange(6).view(2, 3), torch.tensor([2, 0])
    device_tensors = [make_device_tensor(values), make_device_tensor(index)]
    result = module.keep_host_copy(take, *device_tensors)
    assert result.device.type == "meta"
    assert torch.equal(module.to_host(result), torch.tensor([[2, 0], [5, 3]]))
    assert torch.equal(module.keep_host_copy(take, values, index), values[:, index])
    device_tensors[0].add_(1)  # the copy is out of date
    with pytest.raises(NotImplementedError):
        module.to_host(module.keep_host_copy(take, *device_tensors))


def test_a_recomputation_reads_nothing_on_the_host_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a second one, as a backward pass in two parts takes; and a tensor is read once."""
    real, waits = Tensor.cpu, []
    monkeypatch.setattr(module, "is_on_host", lambda _: False)
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: (waits.append(1), real(tensor).clone())[1])

    def run() -> list[Tensor]:
        first, second = torch.arange(3), torch.arange(4) * 2
        return [module.read_on_host(x) for x in (first, second, first)]

    expected = [torch.arange(3), torch.arange(4) * 2, torch.arange(3)]
    forward, again = module.HostReads().make_contexts()
    other_block, _ = module.HostReads().make_contexts()
    for context in (forward, other_block):
        with context:
            assert all(map(torch.equal, run(), expected))
    assert len(waits) == 4
    for _ in range(2):
        with again:
            assert all(map(torch.equal, run(), expected))
    assert len(waits) == 4
    run()
    assert len(waits) == 6


def test_a_captured_pass_copies_nothing_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph repeats the copy from the same address, where memory is in use for something else by then."""
    pinned: list[Tensor] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: pinned.append(self) or ROWS)
    monkeypatch.setattr(Tensor, "to", lambda self, *_, **__: self)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    move_to_device(ROWS, torch.device("cuda"))
    assert len(pinned) == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: ROWS[:0])
    move_to_device(ROWS[:0], torch.device("cuda"))
    with pytest.raises(RuntimeError, match="can't be captured"):
        move_to_device(ROWS, torch.device("cuda"))
    assert len(pinned) == 1


DTYPES = [torch.bfloat16, torch.float32]
B, N, T, H = 2, 4, 77, 20
PATTERNS = [
    Full(causal=True), Full(), Window(10), Window(7, 9), Window(12, step=3), Window(9, first=3),
    Chunked(20, causal=True), Strided(9, causal=True), Fixed(12, 2, causal=True), BigBird(4, 1, 0, N),
    Longformer(9, (0, 17)),
]  # fmt: skip


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def assert_finite(outputs: Tensor, inputs: list[Tensor]) -> None:
    assert outputs.isfinite().all()
    for gradient in torch.autograd.grad(outputs.float().square().sum(), inputs):
        assert gradient.isfinite().all()


def test_new_memory_is_filled_with_nan() -> None:
    assert torch.empty(3).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [50, 97])
@pytest.mark.parametrize("rows", [1, 33, 70])
def test_cross_entropy_reads_no_unwritten_memory(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    hidden, weight = draw(rows, 48, dtype=dtype), draw(vocabulary, 48, dtype=dtype)
    targets, bias = torch.arange(rows) % vocabulary, draw(vocabulary, dtype=dtype)
    inputs = [x.requires_grad_() for x in (hidden, weight, bias)]
    variant = LogitOptions(2.5, 0.1)
    exact = cross_entropy_reference(hidden.double(), weight.double(), targets, bias.double(), variant)
    for chunk in (33, 512):
        actual = cross_entropy(hidden, weight, targets, bias, variant, chunk=chunk)
        assert_finite(actual, inputs)
        assert float(actual.detach()) == pytest.approx(float(exact.detach()), rel=2e-2)


def run_chosen_kernel(q: Tensor, k: Tensor, v: Tensor, pattern_mask: PatternMask) -> Tensor:
    return choose_kernel(AttentionRequest.from_inputs(q, k, pattern_mask, AttentionOptions(), has_dropout=False)).run(
        q, k, v, pattern_mask, None, AttentionOptions(), None
    )


def run_block_sparse(q: Tensor, k: Tensor, v: Tensor, pattern_mask: PatternMask) -> Tensor:
    return block_sparse.block_sparse_attention(q, k, v, pattern_mask, None, AttentionOptions(), None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize("function", [run_chosen_kernel, run_block_sparse, attention_reference])
def test_attention_reads_no_unwritten_memory(
    function: Callable[..., Tensor], pattern: AttentionPattern, dtype: torch.dtype
) -> None:
    q, k, v = (draw(B, n, T, H, dtype=dtype).requires_grad_() for n in (N, 2, 2))
    documents = torch.tensor([[0] * 19 + [1] * 41 + [-1] * 17, [0] * 24 + [1] * 53])
    for packed in (None, documents):
        pattern_mask = PatternMask(pattern, SequenceMetadata(torch.arange(T).expand(B, T), packed))
        assert_finite(function(q, k, v, pattern_mask), [q, k, v])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 50])
def test_grouped_linear_reads_no_unwritten_memory(width: int, dtype: torch.dtype) -> None:
    ends = torch.tensor([33, 33, 40, 74, 75], dtype=torch.int32)
    x, weight = draw(75, width, dtype=dtype).requires_grad_(), draw(5, 37, width, dtype=dtype).requires_grad_()
    assert_finite(grouped_linear(x, weight, ends), [x, weight])
    assert choose_grouped_kernel(x, weight) in KERNELS
