"""How often the compiler begins anew while batches with other documents pass: a kernel is built once for a pattern.

On a GPU each new frame is a build of a Triton kernel, seconds; what Dynamo guards on is the same on a CPU.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from megatfm.layers.attention.patterns import AttentionPattern
from megatfm.layers.attention.patterns.bigbird import BigBird
from megatfm.layers.attention.patterns.local import Full, Window
from megatfm.layers.attention.patterns.mask import PatternMask
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention import flex
from megatfm.ops.attention.reference import AttentionOptions, attention_reference

T = 256


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A counter of graphs that Dynamo hands to the compiler, in whose place they run as they are."""
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(flex_attention, backend=counter)
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    return counter


def documents(number: int) -> torch.Tensor:
    """Two rows of a few documents, other ones in each batch."""
    generator = torch.Generator().manual_seed(number)
    ends = torch.randint(1, T, (2, 3 + number), generator=generator).sort(1).values
    return torch.searchsorted(ends, torch.arange(T).expand(2, T).contiguous(), right=True)


@pytest.mark.parametrize(
    "pattern",
    [lambda: Full(causal=True), lambda: Window(30), lambda: BigBird(64, 1, 0, 2)],
    ids=["causal", "window", "bigbird"],
)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_kernel_is_built_once_for_all_batches(
    frames: Any, pattern: Callable[[], AttentionPattern], kv_heads: int
) -> None:
    counts = []
    for number in range(5):
        q, k, v = (torch.randn(2, heads, T, 16) for heads in (2, kv_heads, kv_heads))
        row = SequenceMetadata(torch.arange(T)[None], documents(number))
        seen = PatternMask(pattern(), row, 0, 2)
        result = flex.flex(q, k, v, seen, None, AttentionOptions(), None)
        expected = attention_reference(q, k, v, seen, None, AttentionOptions(), None)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
        counts.append(frames.frame_count)
    assert counts == [1] * 5
