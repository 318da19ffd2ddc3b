"""The cache changes nothing, and greedy generation is that of transformers."""

import pytest
import torch
from torch import Tensor

from megatfm.errors import UsageError
from megatfm.inference.decoding import Prompts, Sampling, generate, stream
from megatfm.layers.attention.kv_cache import KVCache
from megatfm.models import Decoder
from tests.plugins import plugin
from tests.support.trained_runs import SMALL_DECODER, random_model

PROMPT = torch.tensor([[1, 17, 300, 42, 8], [1, 17, 299, 5, 399]])


@pytest.mark.parametrize("chunks", [[1] * 12, [5, 1, 1, 1, 1, 1, 1, 1], [4, 5, 3], [12]], ids=str)
def test_the_cache_gives_the_logits_of_the_whole_prefix(model: Decoder, chunks: list[int]) -> None:
    tokens = torch.randint(0, 400, (3, sum(chunks)), generator=torch.Generator().manual_seed(2))
    cache, result = KVCache(SMALL_DECODER.n_layers, sum(chunks)), []
    with torch.no_grad():
        for chunk in tokens.split(chunks, dim=1):
            result.append(model(chunk, cache=cache).logits)
        full = torch.stack([model(tokens[:, : t + 1]).logits[:, -1] for t in range(sum(chunks))], dim=1)
    assert (torch.cat(result, dim=1) - full).abs().max() < 1e-10


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_and_without_cache_the_same_tokens(tied: bool, temperature: float) -> None:
    model = random_model(SMALL_DECODER.with_changes({"embedding.tied": tied}))
    options = {"max_tokens": 30, "temperature": temperature, "seed": 5}
    fast = generate(model, PROMPT, **options)
    assert fast.shape == (2, 35)
    assert torch.equal(fast, generate(model, PROMPT, **options, cache=False))
    assert fast[:, 5:].unique().numel() > 5, "a sequence this dull would prove nothing"


def test_the_longest_context_is_still_exact(model: Decoder) -> None:
    """The cache has room for every token of prompt and continuation, and not for one more."""
    assert generate(model, PROMPT, max_tokens=1).shape == (2, 6)
    assert generate(model, PROMPT, max_tokens=0).shape == (2, 5)


def test_rows_stop_at_the_stop_token(model: Decoder) -> None:
    free = generate(model, PROMPT, max_tokens=20)
    stop = int(free[0, 8])
    assert stop not in free[:, :8]
    stopped = generate(model, PROMPT, max_tokens=20, stop_token=stop)
    ends = [next((t for t in range(5, 25) if row[t] == stop), 24) for row in free.tolist()]
    assert stopped.shape[1] == max(ends) + 1
    for row, end in enumerate(ends):
        assert torch.equal(stopped[row, : end + 1], free[row, : end + 1])
        assert (stopped[row, end + 1 :] == stop).all()


def test_a_row_does_not_depend_on_the_rows_beside_it(model: Decoder) -> None:
    """Row 0 of three samples is the one sample; other rows differ."""
    options = {"max_tokens": 25, "temperature": 1.0, "seed": 3}
    three = generate(model, PROMPT[:1].expand(3, -1), **options)
    assert torch.equal(three[:1], generate(model, PROMPT[:1], **options))
    assert not torch.equal(three[0], three[1])


def test_tokens_come_one_at_a_time(model: Decoder) -> None:
    seen: list[int] = []

    def count(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0].shape[1])

    handle = model.register_forward_pre_hook(count)
    try:
        tokens = stream(model, PROMPT, Sampling(), max_tokens=3)
        assert next(tokens).shape == (2,)
        assert seen == [5]
        assert len(list(tokens)) == 2
        assert seen == [5, 1, 1]
    finally:
        handle.remove()


def test_an_empty_prompt_is_refused(model: Decoder) -> None:
    with pytest.raises(UsageError, match="bos"):
        generate(model, PROMPT[:, :0], max_tokens=1)


def test_a_plugin_s_family_goes_on_without_a_cache(caplog: pytest.LogCaptureFixture) -> None:
    """Its class says that it is causal, and its forward takes no cache: with one, it would read one token alone."""
    plugin("looped")
    model = random_model(SMALL_DECODER.with_changes({"family": "looped"}))
    result = PROMPT
    with torch.no_grad():
        for _ in range(6):
            result = torch.cat([result, model(result).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(generate(model, PROMPT, max_tokens=6), result)
    assert "family 'looped' takes no cache: each token recomputes its prefix" in caplog.text
    ragged = Prompts([PROMPT[0], PROMPT[1, :3]])
    alone = generate(model, Prompts([PROMPT[1, :3]]), max_tokens=6)
    assert torch.equal(generate(model, ragged, max_tokens=6)[1, 2:], alone[0])
