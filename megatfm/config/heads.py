"""The sections of heads besides the one over the vocabulary, `[model.extra_heads.NAME]`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PositiveInt

from megatfm.config.base import MAX_WIDTH, Section, union_by_name


class SentenceHeadConfig(Section):
    """Classes of whole sequences, told from the first token through a tanh pooler (BERT, ALBERT)."""

    name: Literal["sentence"] = "sentence"
    classes: PositiveInt = Field(default=2, le=MAX_WIDTH)
    """How many."""


class BoundaryHeadConfig(Section):
    """SpanBERT's, which predicts a span from the tokens around it."""

    name: Literal["boundary"] = "boundary"


class PluginHeadConfig(Section):
    """A head that a package in `plugins` registers, with keys of its own."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(examples=["my_head"])
    """The name under which it is registered; left out, that of the table."""


def _named(heads: Any) -> Any:
    """A table's own name is the head's, unless it says another."""
    if not isinstance(heads, Mapping):
        return heads
    return {
        key: {"name": key, **section} if isinstance(section, Mapping) else section
        for key, section in heads.items()
    }


HeadSection = Annotated[
    SentenceHeadConfig | BoundaryHeadConfig | PluginHeadConfig,
    union_by_name(SentenceHeadConfig, BoundaryHeadConfig, plugin=PluginHeadConfig),
]
HeadsConfig = Annotated[dict[str, HeadSection], BeforeValidator(_named)]
