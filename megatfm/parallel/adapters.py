"""How the parts of low-rank adapters are cut: it follows from the style of the linear layer that they are beside.

B of a column-cut matrix is cut by the same output features, and A is whole. A of a row-cut one is cut by the same input
features, and B is whole: A's partial output goes through B, and is summed with the matrix's own. So adapters add no
communication to a layer; of what is whole, ranks have their shares of the gradient.
"""

from torch import nn

from megatfm.parallel.styles import ParallelStyle, register_style

INPUT_CUT = register_style(ParallelStyle("shard_input_features", dim=1, communication=()))
"""A matrix cut by input features, whose partial output is summed later, with something else."""

SHARED, ON_TOKENS = "replicated_partial_grad", "sequence_parallel"
STYLES_OF_PARTS: dict[str, tuple[str, str, str]] = {
    "colwise": (SHARED, "colwise", "replicated"),
    "rowwise": (INPUT_CUT.name, SHARED, "local_shard_dropout"),
    "replicated": ("replicated", "replicated", "replicated"),
    SHARED: (SHARED, SHARED, "replicated"),
    ON_TOKENS: (ON_TOKENS, ON_TOKENS, "local_token_dropout"),
    "gather_output_replicated": (ON_TOKENS, ON_TOKENS, "local_token_dropout"),
}
"""Style of a linear layer → those of its adapter's A and B, and of the dropout before A; for others there is none."""


def adapter_styles(linear: nn.Module, style: str) -> dict[nn.Module, tuple[str, str]]:
    """Return name and style of the parts of a linear layer's adapter; empty where it has none of this style."""
    adapter = getattr(linear, "lora", None)
    if adapter is None:
        return {}
    parts = zip(("a", "b", "dropout"), STYLES_OF_PARTS.get(style, ()), strict=False)
    return {
        part: (f"lora.{key}", of_part)
        for key, of_part in parts
        if (part := getattr(adapter, key)) is not None
    }
