"""The `[model.lora]` section: low-rank adapters of a model's frozen matrices."""

from pydantic import Field, PositiveFloat, PositiveInt

from megatfm.config.section import MAX_WIDTH, DropProbability, Section


class LoRAConfig(Section):
    """Low-rank adapters (Hu et al. 2022): W x + alpha / rank · B A x, where A and B are trained and W is not."""

    rank: PositiveInt = Field(default=16, le=MAX_WIDTH)
    """Rows of A, and columns of B."""
    alpha: PositiveFloat = 32.0
    """Scale: the factor on B A x is alpha / rank."""
    dropout: DropProbability = 0.0
    """Dropout of A's input."""
    targets: list[str] = Field(default_factory=list, examples=[["wq", "wv"], ["decoder.layers.*.ffn.experts.w_*"]])
    """Patterns of the names, or ends of names, of the matrices with adapters; left out, all linear layers of the
    blocks, to which the matrices of experts don't belong."""
    trained: list[str] = Field(default_factory=list, examples=[["head.*"]])
    """Patterns of the names of further trained weights; `megatfm finetune` adds the task's head."""
