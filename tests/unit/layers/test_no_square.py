"""Attention never makes a tensor of all pairs of a long row, forward and backward; batches may have no rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatfm.config import ModelConfig
from megatfm.layers.attention import ATTENTIONS, dot_product
from megatfm.layers.attention.patterns import PATTERNS
from megatfm.layers.initialisation import initialise
from megatfm.layers.position import POSITIONS
from megatfm.models import build
from megatfm.ops.attention import block_plan, block_sparse, fused, kernels, reference, tile
from tests.support.images import draw_pixels, make_batch
from tests.support.layouts import extend
from tests.support.models import SWIN_MODEL, SWIN_V2_OPTIONS

SHORT, LONG = 640, 1536
"""Tokens of a row; kernels take both for long."""
AT_ONCE = 2**15
"""Scores and pairs that are computed at once here, far fewer than all pairs."""
SMALL = {"d_model": 8, "n_layers": 1, "attention.n_heads": 1, "ffn.d_ff": 8, "vocab_size": 17}
NO_POSITIONS = {"position": {"name": "none"}}
LATENT = {"name": "mla", "kv_lora_rank": 8, "q_lora_rank": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
PATTERN_OPTIONS: dict[str, dict[str, Any]] = {
    "full": {}, "window": {"width": 100}, "chunked": {"size": 100}, "strided": {"stride": 64},
    "fixed": {"stride": 64, "n_summary_tokens": 4}, "bigbird": {"block_size": 32, "n_random_blocks": 1},
}  # fmt: skip
OF_PATTERNS = {name: {"attention": {"pattern": {"name": name, **more}}} for name, more in PATTERN_OPTIONS.items()}
DECODERS: dict[str, dict[str, Any]] = {
    **OF_PATTERNS,
    "softcap and sinks": {"attention": {"softcap": 2.0, "sinks": True}},
    "first": {"attention": {"pattern": {"name": "window", "width": 100, "initial_tokens": 2}}},
    "dilated": {"attention": {"pattern": {"name": "window", "width": 50, "dilation": 3}}},
    "compressed": {"attention": {"name": "compressed"}, **NO_POSITIONS},
    "latent": {"attention": LATENT},
    "latent, window": {"attention": {**LATENT, "pattern": {"name": "window", "width": 100}}},
    "dropout": {"attention": {"dropout": 0.1}},
    "none": NO_POSITIONS,
    **{name: {"position": {"name": name}} for name in ("alibi", "t5", "sinusoidal")},
    "shaw": {"position": {"name": "shaw", "max_distance": 3}},
    "shaw, window": {"position": {"name": "shaw", "max_distance": 3}, **OF_PATTERNS["window"]},
}
LINFORMER = {"attention": {"name": "linformer", "max_length": LONG, "projected_length": 4}, **NO_POSITIONS}
ENCODERS: dict[str, dict[str, Any]] = {
    **{name: OF_PATTERNS[name] for name in ("full", "window", "bigbird")},
    "etc": {"attention": {"pattern": PATTERN_OPTIONS["bigbird"] | {
        "name": "bigbird", "n_random_blocks": 0, "n_global_tokens": 2}}},
    "longformer": {"attention": {"pattern": {"name": "longformer", "width": 100}}},
    "longformer, global projections": {
        "attention": {"name": "longformer", "pattern": {"name": "longformer", "width": 100, "global_tokens": [0, 2]}},
        **NO_POSITIONS,
    },
    **{f"linformer, {share}": {**LINFORMER, "attention": {**LINFORMER["attention"], "share": share}}
       for share in ("none", "headwise", "key_value", "layerwise")},
    **{name: {"position": {"name": name}} for name in ("alibi", "t5")},
    "deberta": {"attention": {"name": "deberta"}, "position": {"name": "deberta", "max_distance": 4}},
    "deberta v3": {
        "attention": {"name": "deberta_v2"},
        "position": {"name": "deberta_v2", "buckets": 4, "max_distance": 8},
    },
}  # fmt: skip
XLNET = {"attention": {"name": "two_stream", "dropout": 0.1}, "position": {"name": "transformer_xl"}}
FAMILIES: dict[str, dict[str, Any]] = {"decoder": DECODERS, "encoder": ENCODERS, "xlnet": {"xlnet": XLNET}}


class Largest(TorchDispatchMode):
    """Notes the most numbers of a tensor that is made, views of smaller ones left out."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.made_by = 0, ""

    def __torch_dispatch__(
        self, function: Any, types: Any, inputs: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        result = function(*inputs, **(named or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                numel = min(leaf.numel(), leaf.untyped_storage().nbytes() // leaf.element_size())
                if numel > self.numel:
                    self.numel, self.made_by = numel, str(function)
        return result


def packed(length: int) -> dict[str, Tensor]:
    """A row of four documents and padding, of lengths that no block divides."""
    documents = torch.arange(length) * 4 // (length - 5)
    documents[-7:] = -1
    starts = torch.searchsorted(documents[:-7], documents[:-7])
    positions = torch.cat([torch.arange(length - 7) - starts, torch.arange(7)])
    return {"documents": documents[None], "positions": positions[None]}


def make_full_rows(length: int) -> dict[str, Tensor]:
    return {"positions": torch.arange(length)[None]}


def with_prefix(length: int) -> dict[str, Tensor]:
    result = packed(length)
    return result | {"prefix": result["positions"] < length // 8}


ROWS: dict[str, Callable[[int], dict[str, Tensor]]] = {
    "one document": make_full_rows, "packed": packed, "prefixes": with_prefix
}  # fmt: skip


def largest(family: str, name: str, rows: str, length: int) -> Largest:
    model = build(ModelConfig.from_dotted(**{**SMALL, "family": family, **FAMILIES[family][name]})).train()
    initialise(model, 7)
    fields = ROWS[rows](length)
    tokens = torch.arange(length)[None] % 17
    if family == "xlnet":
        fields |= {"order": 1 + torch.arange(length).flip(0)[None], "segments": tokens}
    with Largest() as largest:
        model(tokens=tokens, targets=tokens, keys=torch.tensor([3]), **fields).losses.popitem()[1].backward()
    return largest


CASES = [
    *(("decoder", name, "packed") for name in DECODERS),
    *(("decoder", name, "one document") for name in ("full", "window", "first", "latent", "alibi", "shaw")),
    *(("decoder", name, "prefixes") for name in ("full", "window", "alibi", "t5")),
    *(("encoder", name, "packed") for name in ENCODERS),
    *(("encoder", name, "one document") for name in ("bigbird", "longformer", "linformer, none")),
    *(("xlnet", "xlnet", which) for which in ("packed", "one document")),
]


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kernels, fused):
        monkeypatch.setattr(module, "LONG", SHORT)
    monkeypatch.setattr(block_sparse, "SIZE", 64)
    for module, name in (
        (block_sparse, "MAX_SCORES"), (tile, "MAX_TILE_SCORES"), (block_plan, "MAX_MASK_PAIRS"),
        (reference, "MAX_SCORES"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, AT_ONCE)


FURTHER = [
    ("decoder", "shaw", "one document"), ("decoder", "shaw, window", "packed"), ("encoder", "deberta", "packed"),
    ("xlnet", "xlnet", "packed"),
]  # fmt: skip
"""Those that take seconds: Shaw's, DeBERTa's and XLNet's scores are in other cases, too."""


KEPT = [case for case in CASES if case not in FURTHER]


@pytest.mark.parametrize(("family", "name", "rows"), extend(CASES, kept=KEPT))
def test_no_tensor_grows_with_the_square_of_the_length(family: str, name: str, rows: str) -> None:
    short, long = (largest(family, name, rows, length) for length in (SHORT, LONG))
    assert long.numel < LONG**2 / 4, long.made_by
    assert long.numel <= 4 * short.numel, long.made_by  # 2.4 times, and blocks at borders; a square has 5.8


@pytest.mark.parametrize(("family", "name"), [("decoder", "bigbird"), *(("encoder", name) for name in ENCODERS)])
def test_packed_batches_may_have_no_rows(family: str, name: str) -> None:
    model = build(ModelConfig.from_dotted(**{**SMALL, "family": family, **FAMILIES[family][name]}))
    fields = {field: values[:0] for field, values in packed(SHORT).items()}
    tokens = torch.zeros(0, SHORT, dtype=torch.int64)
    assert model(tokens=tokens, **fields).logits.shape == (0, SHORT, SMALL["vocab_size"])


def test_a_dense_path_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    products = next(kernel for kernel in kernels.KERNELS if kernel.name == "products")
    monkeypatch.setattr(dot_product, "choose_kernel", lambda request: products)
    for case in (("decoder", "window", "one document"), ("encoder", "t5", "packed")):
        assert largest(*case, LONG).numel >= LONG**2


def test_scores_of_all_queries_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MAX_SCORES", 2**40)
    assert largest("xlnet", "xlnet", "packed", SHORT).numel >= SHORT**2


def largest_of_image(height: int, width: int, options: dict[str, Any]) -> Largest:
    """The largest tensors of a Swin's or MViT's passes; height, width: of the image, in patches."""
    model = build(ModelConfig.from_dotted(IMAGES | options)).train()
    initialise(model, 7)
    side = 4
    batch = make_batch([draw_pixels(height * side, width * side, seed=1)], side, 0, [[0]], labels=[1])
    with Largest() as largest:
        model(**batch).losses["classifier"].backward()
    return largest


IMAGES = SWIN_MODEL | {"d_model": 4, "stages.n_layers": (2, 1), "stages.n_heads": (1, 2), "ffn.d_ff": 4}


@pytest.mark.parametrize("options", [{}, SWIN_V2_OPTIONS], ids=["swin", "swin v2"])
def test_windows_of_an_image_are_all_that_is_multiplied(options: dict[str, Any]) -> None:
    short, long = (largest_of_image(height, 64, options) for height in (SHORT // 64, LONG // 64))
    assert long.numel < LONG**2 / 4, long.made_by
    assert long.numel <= 4 * short.numel, long.made_by


def test_every_part_is_tried() -> None:
    tried = [kind for kinds in FAMILIES.values() for kind in kinds.values()]
    attention = {"gqa", "windowed", *(kind.get("attention", {}).get("name", "gqa") for kind in tried)}
    patterns = {"windows_2d"} | {kind.get("attention", {}).get("pattern", {}).get("name", "full") for kind in tried}
    positions = {"rope", "learned", *(kind.get("position", {}).get("name", "rope") for kind in tried)}
    assert set(list_own_parts(ATTENTIONS)) <= attention
    assert set(list_own_parts(PATTERNS)) <= patterns
    of_images = {"learned_2d", "sinusoidal_2d", "rope_2d", "relative_2d", "log_relative_2d", "relative_axes"}
    assert set(list_own_parts(POSITIONS)) <= positions | of_images


def list_own_parts(registry: Any) -> list[str]:
    """Parts of megatfm, without those that other tests register."""
    return [name for name in registry.names() if registry.get(name).__module__.startswith("megatfm.")]
