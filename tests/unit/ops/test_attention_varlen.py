"""Rows laid end to end, and what reaches GPUs' kernels: torch's operators stood in for by what their pages say."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from megatfm.config import load_config
from megatfm.engines.losses import add_cu_seqlens
from megatfm.layers.attention.patterns import AttentionPattern
from megatfm.layers.attention.patterns.bigbird import BigBird
from megatfm.layers.attention.patterns.local import Full, Window
from megatfm.layers.attention.patterns.mask import PatternMask
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models import build
from megatfm.ops.attention import fused
from megatfm.ops.attention.flex import flex
from megatfm.ops.attention.fused import compute_cu_seqlens, has_flash
from megatfm.ops.attention.kernels import AttentionRequest, choose_kernel
from megatfm.ops.attention.mask import CAUSAL_MASK
from megatfm.ops.attention.reference import AttentionOptions, attention_reference
from tests.support.tensors import assert_same_gradients, draw

B, T, N, K, H = 2, 24, 4, 2, 8
DOCUMENTS = torch.tensor([[0] * 7 + [1] + [2] * 10 + [-1] * 6, [0] * 3 + [1] * 21])


def varlen_attn_stand_in(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn` as its page has it, one document after the other."""
    assert query.dim() == 3
    assert query.shape[1] == key.shape[1] or enable_gqa
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert cu_seq_q[0] == 0
    assert cu_seq_q[-1] == len(query)
    result = []
    for begin, end in zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], strict=False):
        assert 0 <= end - begin <= max_q == max_k
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        ahead = torch.arange(end - begin) - torch.arange(end - begin)[:, None]
        left, right = window_size
        mask = (ahead >= -left if left >= 0 else ahead == ahead) & (ahead <= right if right >= 0 else True)
        result.append(F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa).transpose(0, 1))
    return torch.cat(result)


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "get_operator", lambda: varlen_attn_stand_in)
    monkeypatch.setattr(fused, "list_parameters", fused.list_parameters.__wrapped__)


def draw_heads() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (draw(B, n, T, H, seed=seed).requires_grad_() for seed, n in enumerate((N, K, K)))
    return q, k, v


def make_metadata(documents: Tensor | None = DOCUMENTS, **options: Any) -> SequenceMetadata:
    starts = None if documents is None else torch.from_numpy(compute_cu_seqlens(documents.numpy()))
    return SequenceMetadata(torch.arange(T).expand(B, T), documents, cu_seqlens=starts, **options)


class OnGPU:
    """Heads on a GPU, as far as the choice of a kernel sees them."""

    device = torch.device("cuda", 1)
    requires_grad = False

    def __init__(self, dtype: torch.dtype, width: int = 64, n_heads: int = N) -> None:
        self.dtype, self.shape = dtype, torch.Size((B, n_heads, 4096, width))


def make_request(
    pattern_mask: PatternMask, dtype: torch.dtype = torch.bfloat16, width: int = 64, **requested: Any
) -> AttentionRequest:
    """A request for long rows on a GPU."""
    heads: Any = OnGPU(dtype, width)
    keys: Any = OnGPU(dtype, width, n_heads=K)
    has_dropout = requested.pop("has_dropout", False)
    return AttentionRequest.from_inputs(
        heads, keys, pattern_mask, AttentionOptions(), has_dropout=has_dropout, **requested
    )


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["rows", "packed"])
@pytest.mark.parametrize("pattern", [Full(causal=True), Full(), Window(5), Window(3, 2)], ids=repr)
def test_varlen_attention_equals_the_reference(pattern: AttentionPattern, documents: Tensor | None) -> None:
    inputs, variant = draw_heads(), AttentionOptions(scale=0.3)
    result = fused.varlen(*inputs, PatternMask(pattern, make_metadata(documents)), None, variant, None)
    expected = attention_reference(*inputs, PatternMask(pattern, make_metadata(documents)), None, variant)
    assert_same_gradients(result, expected, inputs, rtol=1e-12, atol=1e-12)


def test_cu_seqlens_have_a_fixed_number_of_documents() -> None:
    """The shape follows from that of the batch, so that nothing is compiled again; short documents need more room."""
    few, many = np.zeros((2, 1024), np.int64), np.arange(2 * 1024).reshape(2, 1024) // 200
    assert len(compute_cu_seqlens(few)) == len(compute_cu_seqlens(many)) == 2 + 2048 // fused.MIN_DOCUMENT_LENGTH + 1
    assert compute_cu_seqlens(few)[:3].tolist() == [0, 1024, 2048]
    assert compute_cu_seqlens(many)[-1] == 2048
    single = compute_cu_seqlens(np.arange(2 * 1024).reshape(2, 1024))
    assert single[: 2048 + 1].tolist() == [*range(2048), 2048]
    assert compute_cu_seqlens(DOCUMENTS.numpy())[:7].tolist() == [0, 7, 8, 18, 24, 27, 48]


def test_kernels_chosen_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    causal, packed, plain = Full(causal=True), make_metadata(), make_metadata(None)
    opened = make_metadata(prefix=torch.arange(T).expand(B, T) < 3)
    unknown = SequenceMetadata(torch.arange(T).expand(B, T), DOCUMENTS)
    big_bird = BigBird(4, 1, 0, N)
    actual = {
        "packed": make_request(PatternMask(causal, packed)),
        "window": make_request(PatternMask(Window(5), plain)),
        "one document": make_request(PatternMask(causal, plain)),
        "prefix": make_request(PatternMask(causal, opened)),
        "starts unknown": make_request(PatternMask(causal, unknown)),
        "pattern": make_request(PatternMask(big_bird, packed)),
        "float32": make_request(PatternMask(causal, packed), torch.float32),
        "drops": make_request(PatternMask(causal, packed), has_dropout=True),
        "drops, one document": make_request(PatternMask(causal, plain), has_dropout=True),
        "sinks": make_request(PatternMask(causal, packed), sinks=True),
        "values of another width": make_request(PatternMask(causal, packed), v_width=16),
        "narrow heads": make_request(PatternMask(causal, opened), width=8),
        "narrow values": make_request(PatternMask(causal, opened), v_width=8),
        "narrow heads and sinks": make_request(PatternMask(causal, opened), width=8, sinks=True),
        "float64": make_request(PatternMask(causal, packed), torch.float64),
    }
    assert {name: choose_kernel(requested).name for name, requested in actual.items()} == {
        "packed": "varlen", "window": "varlen", "one document": "fused", "prefix": "flex", "starts unknown": "flex",
        "pattern": "flex", "float32": "flex", "drops": "flex", "drops, one document": "flex", "sinks": "flex",
        "values of another width": "flex", "narrow heads": "fused", "narrow values": "fused",
        "narrow heads and sinks": "products", "float64": "fused",
    }  # fmt: skip
    for missing in ("scale", "enable_gqa"):  # as torch 2.10 has it
        known = {*fused.REQUIRED_PARAMETERS, "enable_gqa"} - {missing}
        monkeypatch.setattr(fused, "list_parameters", lambda known=known: known)
        assert choose_kernel(make_request(PatternMask(causal, packed))).name == "flex"


def test_the_installed_torch_has_the_varlen_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert {"scale", "window_size", "cu_seq_q", "max_q"} <= fused.list_parameters()


def test_cu_seqlens_of_the_batch_reach_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the host's arrays to the operator, through a decoder that computes as on a GPU."""
    inputs, real = [], fused.varlen

    def serve(request: AttentionRequest) -> Any:
        assert request.is_varlen
        return type("Varlen", (), {"name": "varlen", "run": staticmethod(noted)})

    def noted(*args: Any) -> Tensor:
        inputs.append(args[3].cu_seqlens())
        return real(*args)

    small = [
        "model.d_model=32", "model.n_layers=2", "model.attention.n_heads=4", "model.vocab_size=64",
        "model.ffn.d_ff=32",
    ]  # fmt: skip
    model = build(load_config("quickstart", small).model).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    arrays = {"tokens": np.arange(B * T).reshape(B, T), "documents": DOCUMENTS.numpy()}
    batch = {name: torch.as_tensor(values) for name, values in add_cu_seqlens(arrays).items()}
    expected = model(batch["tokens"], documents=batch["documents"]).logits
    monkeypatch.setattr("megatfm.layers.attention.dot_product.choose_kernel", serve)
    torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-10, atol=1e-12)
    assert len(inputs) == 2
    assert all(starts is batch["cu_seqlens"] for starts in inputs)


def test_varlen_attention_is_one_operator_of_a_compiled_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own, which a CPU can trace but not run."""
    monkeypatch.undo()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return lambda *inputs: (torch.zeros(B, N, T, H, dtype=torch.bfloat16),)

    sequences = make_metadata()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pattern_mask = PatternMask(Full(causal=True), sequences)
        assert AttentionRequest.from_inputs(q, k, pattern_mask, AttentionOptions(), has_dropout=False).is_varlen
        return fused.varlen(q, k, v, pattern_mask, None, AttentionOptions(), None)

    inputs = (x.detach().bfloat16() for x in draw_heads())
    torch.compile(attend, fullgraph=True, backend=backend)(*inputs)
    actual = [str(node.target) for node in graphs[0].graph.nodes]
    assert sum(target.startswith("torch_attn._varlen_attn") for target in actual) == 1, actual
    torch._dynamo.reset()


def test_masked_attention_on_a_gpu_is_neither_cudnn_s_nor_torch_s_math(caplog: pytest.LogCaptureFixture) -> None:
    on_gpu: Any = type("On", (), {"device": torch.device("cuda"), "dtype": torch.bfloat16, "shape": (B, N, T, 64)})
    assert fused.choose_backends(on_gpu, 64, masked=True) == [SDPBackend.EFFICIENT_ATTENTION]
    assert SDPBackend.MATH not in fused.choose_backends(on_gpu, 64, masked=False)
    on_gpu.shape = (B, N, T, 20)
    with caplog.at_level(logging.WARNING, "megatfm"):
        assert fused.choose_backends(on_gpu, 20, masked=False) == fused.choose_backends(on_gpu, 20, masked=False) == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "all scores are held at once" in caplog.text


def set_capability(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.parametrize(("capability", "is_new"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_flash_attention_is_for_ampere_and_newer(
    capability: tuple[int, int], is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older GPUs, which float16 is for, would raise "FlashAttention only supports Ampere GPUs or newer"."""
    set_capability(monkeypatch, capability)
    heads: Any = OnGPU(torch.float16)
    packed = PatternMask(Full(causal=True), make_metadata())
    assert choose_kernel(make_request(packed, torch.float16)).name == ("varlen" if is_new else "flex")
    assert has_flash(heads, 64) == fused._supports_flash(heads, 64, masked=False) == is_new
    assert fused.choose_backends(heads, 64, masked=False) == fused.UNMASKED_BACKENDS
    in_bf16: Any = OnGPU(torch.bfloat16)
    for masked, backends in ((False, fused.UNMASKED_BACKENDS), (True, fused.MASKED_BACKENDS)):
        assert fused.choose_backends(in_bf16, 64, masked=masked) == (backends if is_new else [])


@pytest.mark.parametrize(("capability", "is_small"), [
    ((8, 0), False), ((9, 0), False), ((10, 3), False), ((8, 6), True), ((8, 9), True), ((12, 0), True), ((12, 1), True)
])  # fmt: skip
def test_heads_without_a_backward_pass_on_small_gpus_take_other_kernels(
    capability: tuple[int, int], is_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention's own check, and torch's `check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`;
    if keys are shared, torch then finds no kernel at all."""
    set_capability(monkeypatch, capability)
    packed = PatternMask(Full(causal=True), make_metadata())
    for width in (192, 200, 224, 232, 256):
        heads: Any = OnGPU(torch.bfloat16, width)
        is_fused = not (is_small and 192 < width <= 224)
        assert has_flash(heads, width) == fused._supports_flash(heads, width, masked=False) == is_fused
        assert choose_kernel(make_request(packed, width=width)).name == ("varlen" if is_fused else "flex")


@pytest.fixture
def shared_keys(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of torch's attention shares keys between heads, where back ends are chosen as on a GPU."""
    calls: list[bool] = []
    real = F.scaled_dot_product_attention

    def watched(*inputs: Tensor, enable_gqa: bool, **options: Any) -> Tensor:
        calls.append(enable_gqa)
        return real(*inputs, enable_gqa=enable_gqa, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(fused, "sdpa_kernel", lambda allowed: nullcontext())
    monkeypatch.setattr(
        fused, "choose_backends", lambda q, width, masked: fused.MASKED_BACKENDS if masked else fused.UNMASKED_BACKENDS
    )
    return calls


def test_masked_attention_repeats_shared_keys(monkeypatch: pytest.MonkeyPatch, shared_keys: list[bool]) -> None:
    allowed: list[list[SDPBackend]] = []

    @contextmanager
    def only(backends: list[SDPBackend]) -> Iterator[None]:
        allowed.append(backends)
        yield

    monkeypatch.setattr(fused, "sdpa_kernel", only)
    pattern_mask, inputs = PatternMask(Full(causal=True), make_metadata()), draw_heads()
    actual = fused.sdpa_attention(*inputs, pattern_mask, None, AttentionOptions(), None)
    torch.testing.assert_close(actual, attention_reference(*inputs, pattern_mask))
    assert allowed == [fused.MASKED_BACKENDS]
    assert shared_keys == [False]


@pytest.mark.parametrize(("dtype", "width", "of_values", "shares"), [
    (torch.bfloat16, 128, 128, True),
    (torch.bfloat16, 256, 256, True),
    (torch.bfloat16, 264, 264, False),
    (torch.bfloat16, 128, 64, False),
    (torch.float32, 128, 128, False),
])  # fmt: skip
def test_shared_keys_are_repeated_for_kernels_other_than_flash_attention(
    shared_keys: list[bool], dtype: torch.dtype, width: int, of_values: int, shares: bool
) -> None:
    """The other kernels of the list take no keys that heads share, so that torch would find none at all."""
    sizes = (4, width), (2, width), (2, of_values)
    q, k, v = (draw(1, n, 5, w, seed=seed).to(dtype) for seed, (n, w) in enumerate(sizes))
    actual = fused.sdpa_attention(q, k, v, CAUSAL_MASK, None, AttentionOptions(), None)
    expected = attention_reference(q.double(), k.double(), v.double(), CAUSAL_MASK)
    torch.testing.assert_close(actual.double(), expected, rtol=2e-2, atol=2e-2)
    assert shared_keys == [shares]


def test_shared_keys_are_repeated_on_gpus_without_flash_attention(
    monkeypatch: pytest.MonkeyPatch, shared_keys: list[bool]
) -> None:
    monkeypatch.setattr(fused, "supports_device", lambda *_: False)
    inputs = draw_heads()
    actual = fused.sdpa_attention(*(x.half() for x in inputs), CAUSAL_MASK, None, AttentionOptions(), None)
    torch.testing.assert_close(actual.double(), attention_reference(*inputs, CAUSAL_MASK), rtol=1e-2, atol=1e-2)
    assert shared_keys == [False]


@pytest.mark.parametrize("rate", [0.1, 0.9])
@pytest.mark.parametrize("sinks", [False, True])
def test_flex_attention_with_dropout_equals_the_reference(
    rate: float, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients, with FlexAttention's contract written out: on a CPU it has no backward pass."""
    monkeypatch.setattr("torch.nn.attention.flex_attention.flex_attention", flex_attention_stand_in)
    monkeypatch.setattr("megatfm.ops.attention.flex.MIN_HEAD_WIDTH", 2)
    inputs, variant = draw_heads(), AttentionOptions(softcap=2.0, dropout=rate)
    keys = torch.randint(-(2**62), 2**62, (B, N, T), generator=torch.Generator().manual_seed(2))
    score = torch.linspace(-1, 1, N, dtype=torch.float64).requires_grad_() if sinks else None
    wanted_of = [*inputs, *([score] if score is not None else [])]
    pattern_mask = PatternMask(Full(causal=True), make_metadata())
    result = flex(*inputs, pattern_mask, None, variant, keys, score)
    expected = attention_reference(*inputs, PatternMask(Full(causal=True), make_metadata()), None, variant, keys, score)
    assert_same_gradients(result, expected, wanted_of, rtol=1e-11)


def flex_attention_stand_in(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, scale: float | None,
    enable_gqa: bool, return_aux: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Stand-in by flex_attention's documentation: 0 and a logarithm of −∞ for queries without keys."""
    assert not enable_gqa or query.shape[1] > key.shape[1]
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    at = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    scores = scores if score_mod is None else score_mod(scores, *at)
    scores = scores.masked_fill(~block_mask.mask_mod(*at), -torch.inf)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    lse = scores.masked_fill(blind, 0).logsumexp(-1)
    shares = (scores - lse[..., None]).exp().masked_fill(blind, 0)
    return shares @ value, type("Aux", (), {"lse": lse.masked_fill(blind[..., 0], -torch.inf)})
