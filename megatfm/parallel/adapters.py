"""Tensor parallelism of low-rank adapters (LoRA): their styles follow from the style of the adapted linear layer.

Beside a column-parallel matrix, B is sharded by the same output features and A is replicated. Beside a row-parallel
one, A is sharded by the same input features and B is replicated: A's partial output goes through B and is summed
together with the matrix's output. So adapters add no communication. Gradients of the replicated matrix are partial.
"""

from torch import nn

from megatfm.parallel.styles import ParallelStyle, register_style

SHARDED_INPUT = register_style(ParallelStyle("shard_input_features", dim=1, communication=()))
"""A matrix sharded by input features; the layer that uses it sums its partial output later."""

SHARED, SEQUENCE_PARALLEL = "replicated_partial_grad", "sequence_parallel"
ADAPTER_STYLES: dict[str, tuple[str, str, str]] = {
    "colwise": (SHARED, "colwise", "replicated"),
    "rowwise": (SHARDED_INPUT.name, SHARED, "local_shard_dropout"),
    "replicated": ("replicated", "replicated", "replicated"),
    SHARED: (SHARED, SHARED, "replicated"),
    SEQUENCE_PARALLEL: (SEQUENCE_PARALLEL, SEQUENCE_PARALLEL, "local_token_dropout"),
    "gather_output_replicated": (SEQUENCE_PARALLEL, SEQUENCE_PARALLEL, "local_token_dropout"),
}
"""Style of a linear layer → styles of its adapter's A, B and the dropout before A. Other styles allow no adapter."""


def adapter_styles(linear: nn.Module, style: str) -> dict[nn.Module, tuple[str, str]]:
    """Return submodule → (name, style) for a linear layer's adapter; empty without one, or if the style allows none."""
    adapter = getattr(linear, "lora", None)
    if adapter is None:
        return {}
    styles = zip(("a", "b", "dropout"), ADAPTER_STYLES.get(style, ()), strict=False)
    return {
        module: (f"lora.{key}", module_style)
        for key, module_style in styles
        if (module := getattr(adapter, key)) is not None
    }
