"""muP's promise: what a few steps change in activations does not depend on the width (Yang et al. 2022, D.1)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers.initialisation import initialise
from megatfm.models import build, compute_lr_scales

BASE, WIDTHS = 32, (32, 128, 512)


KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "dense": lambda width: {"ffn.d_ff": 2 * width},
    "experts": lambda width: {
        "ffn.name": "moe", "ffn.d_ff": width, "ffn.n_experts": 4, "ffn.top_k": 2, "ffn.router.name": "noisy_top_k",
    },
    "compressed": lambda width: {"attention.name": "compressed", "attention.factor": 3, "position.name": "none"},
    "latents": lambda width: {**LATENT, "attention.kv_lora_rank": 16, "attention.q_lora_rank": 12},
    "latents that grow": lambda width: {
        **LATENT, "attention.kv_lora_rank": width // 2, "attention.q_lora_rank": width // 2, "mup.latent_ranks":
        "scaled",
    },
}  # fmt: skip
LATENT = {"attention.name": "mla", "attention.qk_rope_head_dim": 8, "attention.qk_nope_head_dim": 16}


def changes(width: int, mup: bool, kind: str = "dense") -> dict[str, float]:
    """Root mean square of what four AdamW steps change in the logits and in each sublayer's output, by its path."""
    values = {"vocab_size": 50, "d_model": width, "n_layers": 2, "attention.n_heads": width // 16}
    values |= {"ffn.d_ff": 2 * width, "embedding.tied": False, "init.name": "normal", "init.std": 0.1}
    values |= {"mup.base_width": BASE, **KINDS[kind](width)}
    config = ModelConfig.from_dotted(
        {key: value for key, value in values.items() if mup or not key.startswith("mup.")}
    )
    model = build(config).double()
    initialise(model, 1)
    scales = compute_lr_scales(model, config)
    groups = [{"params": [p], "lr": 0.01 * scales.get(name, 1.0)} for name, p in model.named_parameters()]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    tokens = torch.randint(0, 50, (4, 17), generator=torch.Generator().manual_seed(2))

    def outputs() -> dict[str, Tensor]:
        actual: dict[str, Tensor] = {}
        for path, module in model.named_modules():
            if path.endswith((".attn", ".ffn")):
                module.register_forward_hook(
                    lambda module, inputs, y, path=path: actual.update({path: first(y)})
                )
        actual["logits"] = model.eval()(tokens).logits
        return {name: output.detach() for name, output in actual.items()}

    before = outputs()
    model.train()
    for _ in range(4):
        inputs = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "keys": torch.arange(4)}
        model(**inputs).losses["causal"].div(64).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = outputs()
    return {name: float((after[name] - before[name]).square().mean().sqrt()) for name in before}


def first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def change_of_logits(width: int, mup: bool) -> float:
    return changes(width, mup)["logits"]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_change_each_sublayer_s_output_by_as_much_at_every_width(kind: str) -> None:
    narrow, *wider = [changes(width, True, kind) for width in WIDTHS]
    assert len(narrow) == 5
    for one in wider:
        ratios = {name: one[name] / narrow[name] for name in narrow if name != "logits"}
        assert all(0.65 < ratio < 1.5 for ratio in ratios.values()), ratios


def test_steps_change_the_logits_by_as_much_at_every_width() -> None:
    narrow, *wider = [change_of_logits(width, mup=True) for width in WIDTHS]
    assert all(0.5 < change / narrow < 2 for change in wider), (narrow, wider)


def test_without_mup_they_change_more_and_more() -> None:
    narrow, wide, wider = [change_of_logits(width, mup=False) for width in WIDTHS]
    assert wide > 2 * narrow
    assert wider > 2 * wide


def test_the_base_width_is_the_standard_parametrisation() -> None:
    assert change_of_logits(BASE, mup=True) == change_of_logits(BASE, mup=False)


def test_an_initialisation_that_follows_the_width_is_refused() -> None:
    config = ModelConfig(
        vocab_size=50,
        d_model=64,
        n_layers=1,
        mup={"base_width": 32},
        attention={"n_heads": 4},
        ffn={"d_ff": 64},
        init={"name": "xavier"},
    )
    with pytest.raises(UsageError, match=r"model\.mup does not go with model\.init\.name = 'xavier'"):
        build(config)
