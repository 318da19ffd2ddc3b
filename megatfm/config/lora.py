"""The `[model.lora]` section: low-rank adapters beside a model's matrices, which are frozen."""

from pydantic import Field, PositiveFloat, PositiveInt

from megatfm.config.section import MAX_WIDTH, DropProbability, Section


class LoRAConfig(Section):
    """Low-rank adapters (Hu et al. 2022): W x + alpha / rank · B A x, where A and B are trained and W is not."""

    rank: PositiveInt = Field(default=16, le=MAX_WIDTH)
    """Rows of A, and columns of B."""
    alpha: PositiveFloat = 32.0
    """The product's factor is alpha / rank."""
    dropout: DropProbability = 0.0
    """Dropout of A's input."""
    targets: list[str] = Field(
        default_factory=list, examples=[["wq", "wv"], ["decoder.layers.*.ffn.experts.w_*"]]
    )
    """Patterns over names of the matrices that get adapters, or over the ends of these names; left out, all linear
    layers of the blocks, to which the matrices of experts don't belong."""
    trained: list[str] = Field(default_factory=list, examples=[["head.*"]])
    """Patterns over names of other weights that are trained, too; `megatfm finetune` adds the task's head."""
