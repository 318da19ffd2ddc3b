"""The key `model.attention.pattern`: what a query sees, one section for each pattern, its name says which."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveInt

from megatfm.config.base import MAX_LENGTH, MAX_WIDTH, Section, union_by_name


class FullPatternConfig(Section):
    """All tokens of the document, in decoders those up to the query itself."""

    name: Literal["full"] = "full"


class WindowPatternConfig(Section):
    """The nearest tokens (Child et al. 2019; Beltagy et al. 2020; Jiang et al. 2023)."""

    name: Literal["window"] = "window"
    width: PositiveInt = Field(examples=[4096], le=MAX_LENGTH)
    """In decoders, so many tokens up to the query itself; in encoders, the query and half of it on each side."""
    dilation: PositiveInt = Field(default=1, le=MAX_LENGTH)
    """Of those tokens every `step`-th one, over a window that is so many times as wide (a dilated window)."""
    initial_tokens: NonNegativeInt = Field(default=0, le=MAX_LENGTH)
    """So many first tokens of the document are seen as well, in decoders (StreamingLLM: 4; Xiao et al. 2023)."""


class ChunkedPatternConfig(Section):
    """Tokens of the same chunk of the document, in decoders those up to the query itself (Llama 4)."""

    name: Literal["chunked"] = "chunked"
    size: PositiveInt = Field(examples=[8192], le=MAX_LENGTH)
    """Tokens of a chunk."""


class StridedPatternConfig(Section):
    """The last `stride` tokens, and every `stride`-th before the query (Child et al. 2019, merged heads)."""

    name: Literal["strided"] = "strided"
    stride: PositiveInt = Field(examples=[128], le=MAX_LENGTH)
    """Tokens between those that are seen."""


class FixedPatternConfig(Section):
    """The query's own stretch of the document, and the ends of the others (Child et al. 2019, merged heads)."""

    name: Literal["fixed"] = "fixed"
    stride: PositiveInt = Field(examples=[128], le=MAX_LENGTH)
    """Tokens of a stretch."""
    n_summary_tokens: PositiveInt = Field(default=8, le=MAX_LENGTH)
    """Tokens at the end of a stretch that all see, in decoders all later ones."""


class BigBirdPatternConfig(Section):
    """Blocks around the query's, random ones, and some that see all and are seen by all (Zaheer et al. 2020)."""

    name: Literal["bigbird"] = "bigbird"
    block_size: PositiveInt = Field(default=64, le=MAX_LENGTH)
    """Tokens of a block."""
    n_random_blocks: NonNegativeInt = Field(default=3, le=MAX_WIDTH)
    """Random blocks that each block sees, others in each head and layer."""
    n_global_tokens: NonNegativeInt = Field(default=0, le=MAX_LENGTH)
    """So many first tokens of the document see all and are seen by all, instead of its first and last block (ETC)."""


class LongformerPatternConfig(Section):
    """A window on both sides, and tokens that see all and are seen by all (Beltagy et al. 2020); attention of that name
    has projections of their own for those."""

    name: Literal["longformer"] = "longformer"
    width: PositiveInt = Field(examples=[512], le=MAX_LENGTH)
    """Tokens that are seen beside the query, half of them on each side."""
    global_tokens: tuple[NonNegativeInt, ...] = (0,)
    """Places in the document of those that see all and are seen by all."""


class PluginPatternConfig(Section):
    """A pattern that a package in `plugins` registers, with keys of its own."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(examples=["my_pattern"])
    """The name under which it is registered."""


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


PatternConfig = Annotated[
    FullPatternConfig
    | WindowPatternConfig
    | ChunkedPatternConfig
    | StridedPatternConfig
    | FixedPatternConfig
    | BigBirdPatternConfig
    | LongformerPatternConfig
    | PluginPatternConfig,
    union_by_name(
        FullPatternConfig,
        WindowPatternConfig,
        ChunkedPatternConfig,
        StridedPatternConfig,
        FixedPatternConfig,
        BigBirdPatternConfig,
        LongformerPatternConfig,
        plugin=PluginPatternConfig,
    ),
    BeforeValidator(_named),  # the last is called first
]
