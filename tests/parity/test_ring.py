"""The ring of keys and values by itself: when it sends, how it adds, and passes over a graph that is kept."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatfm.config import ModelConfig
from megatfm.layers.sequence import SequenceMetadata
from megatfm.layers.sequence_views import SequenceShard
from megatfm.models import build
from megatfm.ops.attention.mask import Band
from megatfm.ops.attention.tile import BackwardInputs, BlockAttentionPlan
from megatfm.parallel import ring_attention
from megatfm.parallel.collectives import all_gather
from megatfm.parallel.context_attention import make_attention_forward, make_latent_forward
from megatfm.parallel.context_parallel import ContextParallel, P2PExchange, compute_token_indices
from megatfm.parallel.pipeline_schedule import mark_backward_part
from megatfm.parallel.ring_attention import LatentKeyValues
from tests.support.models import TINY_LATENT, TINY_MODEL
from tests.support.workers import Workers

TOKENS, HEADS, WIDTH = 12, 2, 8


def inputs(*shapes: Sequence[int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return the tensors of this rank."""
    random = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(shape, generator=random).to(dtype).requires_grad_() for shape in shapes]


def on_a_ring(latent: bool = False, documents: Tensor | None = None) -> tuple[Any, SequenceShard]:
    """Return causal attention around a ring, and this rank's part of the rows: of these documents, or of one."""
    model = build(ModelConfig.from_dotted(**TINY_MODEL, **({"attention": TINY_LATENT} if latent else {})))
    core = model.get_submodule("decoder.layers.0.attn.core")
    contexts = ContextParallel(dist.group.WORLD, lambda _: True, 1, "ring")  # type: ignore[arg-type]
    length = TOKENS * contexts.size if documents is None else documents.shape[1]
    row = SequenceMetadata(torch.arange(length).expand(1 if documents is None else len(documents), -1), documents)
    return (make_latent_forward if latent else make_attention_forward)(core, contexts), SequenceShard(
        row, contexts.token_indices(length)[contexts.rank]
    )


def part_group() -> Any:
    """Return the group of all ranks."""
    return dist.group.WORLD


def places_of(rank: int) -> Tensor:
    """Places of a rank's tokens."""
    ranks = dist.get_world_size()
    return compute_token_indices(TOKENS * ranks, ranks, is_zigzag=True)[rank]


def gradients_twice() -> bool:
    """Whether gradients of a graph that is kept agree: twice at once, and twice in two parts."""
    attention, part = on_a_ring()
    arguments = inputs(*[(1, HEADS, TOKENS, WIDTH)] * 3)
    loss = attention(*arguments, part).square().sum()
    first, second = (torch.autograd.grad(loss, arguments, retain_graph=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    with mark_backward_part("inputs"):
        third = torch.autograd.grad(loss, arguments, retain_graph=True)
    with mark_backward_part("weights"):
        assert torch.autograd.grad(loss, arguments, retain_graph=True, allow_unused=True) == (None, None, None)
    for gradients in (third, torch.autograd.grad(loss, arguments)):
        for a, b in zip(first, gradients, strict=True):
            assert torch.equal(a, b)
    return True


def test_a_graph_that_is_kept_gives_all_gradients_again(workers: Workers) -> None:
    assert all(workers.run(gradients_twice, 3))


def attention_with_biases() -> bool:
    """Whether biases of pairs, as a plugin gives them, and by distance equal one device's, gradients too."""
    attention, part = on_a_ring()
    arguments = inputs(*[(1, HEADS, TOKENS, WIDTH)] * 3)
    rate = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
    rows = [torch.cat(all_gather(x.detach()[None], 0, part_group()).unbind(), 2) for x in arguments]
    order = torch.cat([places_of(rank) for rank in range(dist.get_world_size())]).argsort()
    q, k, v = (x[:, :, order].requires_grad_() for x in rows)
    length = q.shape[2]
    away = torch.arange(length)[None] - torch.arange(length)[:, None]
    scores = q @ k.mT / WIDTH**0.5 - rate[:, None, None] * away.abs()
    expected = scores.masked_fill(away > 0, -torch.inf).softmax(-1) @ v
    token_indices = part.token_indices
    expected_rate, expected_q = torch.autograd.grad(expected[:, :, token_indices].square().sum(), (rate, q))
    for bias in (
        -rate[:, None, None] * part.relative_positions().abs()[None],
        -rate[:, None] * part.unique_relative_positions().abs(),
    ):
        out = attention(*arguments, part, bias[None] if bias.dim() == 3 else bias)
        torch.testing.assert_close(out, expected[:, :, token_indices])
        of_rate, of_q = torch.autograd.grad(out.square().sum(), (rate, arguments[0]))
        torch.testing.assert_close(of_rate, expected_rate)
        torch.testing.assert_close(of_q, expected_q[:, :, token_indices])
    return True


def test_biases_of_either_form(workers: Workers) -> None:
    assert all(workers.run(attention_with_biases, 3))


PACKED = torch.tensor([[0] * 211 + [1] * 29, [0] * 67 + [1] * 160 + [-1] * 13])


def attend_to_documents(latent: bool, dtype: torch.dtype) -> float:
    """Return the largest error of output and gradients of packed rows, against the softmax of all pairs."""
    attention, shard = on_a_ring(latent, PACKED)
    generator = torch.Generator().manual_seed(0)
    shapes = (
        [(2, HEADS, 240, 12), (2, 1, 240, 10)]
        if latent
        else [(2, 2 * HEADS, 240, WIDTH)] + [(2, HEADS, 240, WIDTH)] * 2
    )
    full = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    weights = [torch.randn(16, 6, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2 * latent)]
    local = [x[:, :, shard.token_indices].requires_grad_() for x in full]
    local_weights = [x.clone().requires_grad_() for x in weights]
    plans: list[BlockAttentionPlan] = []
    with pytest.MonkeyPatch.context() as patch:
        real = ring_attention.compute_partial_attention
        patch.setattr(ring_attention, "compute_partial_attention", lambda *a: (plans.append(a[-1]), real(*a))[1])
        out = attention(*local, *local_weights, shard)
    assert all(isinstance(visit, Band) for plan in plans for visit in plan.visits), "no blocks"
    g = torch.randn(2, len(out[0]), 240, out.shape[3], generator=generator, dtype=torch.float64)
    gradients = torch.autograd.grad(out, [*local, *local_weights], g[:, :, shard.token_indices].to(dtype))
    for weight_gradient in gradients[len(local) :]:
        dist.all_reduce(weight_gradient)

    inputs = [x.double().requires_grad_() for x in (*full, *weights)]
    q, *kv = inputs
    if latent:  # as DeepSeek-V2's paper has it: heads' keys and values from 6 channels, 4 rotary ones shared
        latents, rotary = kv[0].split([6, 4], -1)
        k, v = (
            (latents[:, 0] @ w.view(HEADS, 8, 6).flatten(0, 1).T).unflatten(-1, (HEADS, 8)).transpose(1, 2)
            for w in kv[1:]
        )
        k = torch.cat([k, rotary.expand(-1, HEADS, -1, -1)], -1)
    else:
        k, v = (x.repeat_interleave(2, 1) for x in kv)
    index = torch.arange(240)
    is_visible = (PACKED[:, None, :, None] == PACKED[:, None, None, :]) & (index <= index[:, None])
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~is_visible, -torch.inf)
    expected_out = scores.softmax(-1) @ v
    expected = [expected_out, *torch.autograd.grad(expected_out, inputs, g)]
    of_tokens = 1 + len(full)
    expected = [x[:, :, shard.token_indices] for x in expected[:of_tokens]] + expected[of_tokens:]
    results = (out, *gradients)
    return max(((x.double() - y).norm() / y.norm()).item() for x, y in zip(results, expected, strict=True))


@pytest.mark.parametrize("latent", [False, True])
def test_documents_need_no_blocks(latent: bool, workers: Workers) -> None:
    """Keys of other ranks are seen fully or not at all: fused kernels compute all of it, heads of two widths, too."""
    for ranks in (3, 5):
        assert max(workers.run(attend_to_documents, ranks, latent, torch.float64)) < 1e-12
    assert max(workers.run(attend_to_documents, 2, latent, torch.bfloat16)) < 1e-2


@pytest.mark.parametrize(("dtype", "fused_width", "reason"), [
    (torch.float32, 64, "not support float32 with heads of 64 channels here"),
    (torch.bfloat16, 20, "not support bfloat16 with heads of 20 channels here"),
    (torch.bfloat16, None, "not support a bias, a soft cap or dropout of probabilities here"),
    (torch.bfloat16, 64, "not support a pattern other than full attention, a prefix, or documents of few tokens"),
])  # fmt: skip
def test_blocks_on_a_gpu_are_announced_once(
    dtype: torch.dtype, fused_width: int | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeTensorMode():
        on_gpu, on_cpu = (torch.empty(1, HEADS, TOKENS, 64, dtype=dtype, device=device) for device in ("cuda", "cpu"))
    for q in (on_cpu, on_gpu, on_gpu):
        ring_attention.warn_of_blocks(q, fused_width, "Full(causal=True)")
    (record,) = caplog.records
    assert reason in record.message


def events() -> tuple[list[str], list[str]]:
    """A rank's events in either pass, in order."""
    attention, part = on_a_ring()
    messages: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (ring_attention, "compute_partial_attention"),
            (ring_attention, "compute_partial_attention_backward"),
            (P2PExchange, "wait"),
        ):
            real = getattr(owner, name)
            message = "wait" if name == "wait" else "compute"
            patch.setattr(owner, name, lambda *a, real=real, message=message: (messages.append(message), real(*a))[1])
        send = ring_attention._start_shift
        patch.setattr(
            ring_attention,
            "_start_shift",
            lambda x, contexts, hows: (messages.append("send") if hows else None, send(x, contexts, hows))[1],
        )
        arguments = inputs(*[(1, HEADS, TOKENS, WIDTH)] * 3)
        out = attention(*arguments, part)
        forward = [*messages]
        messages.clear()
        out.sum().backward()
    return forward, messages


def test_the_next_part_travels_while_one_is_computed(workers: Workers) -> None:
    keys = ["send", "compute", "wait", "send", "compute", "wait", "compute"]
    events_of_rank = [
        *["send", "compute", "wait", "send", "compute"],
        *["send", "wait", "compute"],  # gradients of the first foreign part leave, the last keys come
        *["wait", "send", "wait"],  # gradients are added to, and come home
    ]
    assert workers.run(events, 3) == [(keys, events_of_rank)] * 3


def sums_of_parts() -> tuple[set[float], set[float]]:
    """Gradients of queries and of latents' projections in bfloat16, of which one part is large and three are small."""
    attention, part = on_a_ring(latent=True)
    with pytest.MonkeyPatch.context() as patch:
        size = iter([256.0, 0.5, 0.5, 0.5])
        now = [0.0]

        def part_backward(inputs: BackwardInputs, *remaining: Any) -> list[Tensor]:
            now[0] = next(size)
            return [torch.full_like(inputs.q, now[0]), torch.zeros_like(inputs.k), torch.zeros_like(inputs.v)]

        def back(latents: LatentKeyValues, sent: Tensor, weights: Sequence[Tensor], *remaining: Any) -> list[Tensor]:
            return [torch.zeros_like(sent), *(torch.full_like(weight, now[0]) for weight in weights)]

        patch.setattr(ring_attention, "compute_partial_attention_backward", part_backward)
        patch.setattr(LatentKeyValues, "backward", back)
        q, latent, of_keys, of_values = inputs(
            (1, 2, TOKENS, 8 + 4), (1, 1, TOKENS, 6 + 4), (16, 6), (16, 6), dtype=torch.bfloat16
        )
        attention(q, latent, of_keys, of_values, part).sum().backward()
    assert q.grad is not None
    assert of_keys.grad is not None
    return set(q.grad.flatten().tolist()), set(of_keys.grad.flatten().tolist())


def test_gradients_of_parts_are_rounded_once(workers: Workers) -> None:
    """256 + 3 · 0.5 is 258 to the nearest in bfloat16; added one after the other there, 256."""
    assert workers.run(sums_of_parts, 4) == [({258.0}, {258.0})] * 4
