"""Blocks that see a window and blocks that see all, which transformers names layer by layer in `layer_types`."""

from collections.abc import Sequence

from megatfm.config import ModelConfig, WindowPatternConfig
from megatfm.config.patterns import FullPatternConfig
from megatfm.convert.config_keys import Json
from megatfm.errors import UsageError

LOCAL, GLOBAL = "sliding_attention", "full_attention"


def read(theirs: Json, every: int, *, first: str = LOCAL) -> list[str]:
    """`layer_types`; left out, every so-manieth is the other kind than the rest, from `first` on. Raises UsageError."""
    n, given = theirs["num_hidden_layers"], theirs["layer_types"]
    if given is None and first == LOCAL:
        return [LOCAL if (i + 1) % every else GLOBAL for i in range(n)]
    if given is None:
        return [LOCAL if i % every else GLOBAL for i in range(n)]
    if len(given) != n or not set(given) <= {LOCAL, GLOBAL}:
        raise UsageError(
            f"config.json: layer_types = {given!r:.80} is not {LOCAL} or {GLOBAL} for each of num_hidden_layers = {n}"
        )
    return list(given)


def blocks(kinds: Sequence[str], local: Json, whole: Json) -> Json:
    """Our keys for them: a cycle of the kinds "local" and "global", and what each of these has otherwise."""
    names = ["local" if kind == LOCAL else "global" for kind in kinds]
    cycle = next(
        i for i in range(1, len(names) + 1) if all(a == b for a, b in zip(names[i:], names, strict=False))
    )
    sections = {"local": local, "global": whole}
    return {
        "layer_types": names[:cycle],
        **{f"layer_type.{name}": sections[name] for name in dict.fromkeys(names)},
    }


def write(ours: ModelConfig) -> list[str]:
    """The reverse of `read`. Raises UsageError for a block of another pattern."""
    return [GLOBAL if width is None else LOCAL for width in widths(ours)]


def widths(ours: ModelConfig) -> list[int | None]:
    """Of each block's window; None: it sees all. Raises UsageError."""
    found: list[int | None] = []
    for depth in range(ours.n_layers):
        pattern = ours.layer_config(depth).attention.pattern
        if not isinstance(pattern, WindowPatternConfig | FullPatternConfig):
            raise UsageError(
                f"model.attention.pattern.name = {pattern.name!r}: only windows and full are stored"
            )
        found.append(pattern.width if isinstance(pattern, WindowPatternConfig) else None)
    return found


def window(ours: ModelConfig, otherwise: int) -> int:
    """The width of the windows; of several, the first one's."""
    return next((width for width in widths(ours) if width is not None), otherwise)
