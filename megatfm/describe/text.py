"""A description as lines of label and text."""

from collections import Counter
from typing import TYPE_CHECKING

from megatfm.config import (
    ClassifierHeadConfig,
    Config,
    DebertaPositionConfig,
    LearnedPosition2dConfig,
    LearnedPositionConfig,
    MLAAttentionConfig,
    ModelConfig,
    PatchEmbeddingConfig,
    RopeConfig,
    SentenceHeadConfig,
    ShawConfig,
    T5PositionConfig,
)
from megatfm.config.ffn import FFNConfig, MoEConfig
from megatfm.config.stages import StagesConfig
from megatfm.errors import UsageError

if TYPE_CHECKING:
    from megatfm.describe.description import Description

Line = tuple[str, str]


def to_lines(description: "Description") -> list[Line]:
    """Return the lines that `megatfm describe` prints."""
    objective = description.config.objective.name
    return [
        *_architecture(description.config.model),
        ("objective", objective),
        ("", ""),
        *_counts(description),
    ]


def _architecture(model: ModelConfig) -> list[Line]:
    blocks = f"{model.n_layers} blocks"
    if model.family == "encoder_decoder":
        blocks = f"{model.encoder_layers} + {blocks}"
    if model.distinct_layers and model.distinct_layers < model.n_layers:
        blocks += f" ({model.distinct_layers} with weights of their own)"
    lines = [
        ("model", f"{model.family}, {blocks} of width {model.d_model:,}"),
        ("attention", f"{_heads(model)}; {_position(model)}"),
        *([("  looks at", _patterns(model))] if not _sees_all(model) else []),
        ("feed-forward", _feed_forward(model)),
        ("norm", f"{model.norm.name} ({model.norm.placement}), epsilon {model.norm.eps:g}"),
        _input(model),
    ]
    if model.stages is not None:
        lines.insert(1, ("  stages", _stages(model.stages, model.d_model)))
    if heads := _extra_heads(model):
        lines.append(("heads", ", ".join(heads)))
    if model.text_tower is not None:
        text = model.text_tower
        sees = "each token sees those before it" if text.causal else "each token sees all"
        lines.append(
            (
                "text tower",
                f"{text.n_layers} blocks of width {text.d_model:,}, {text.n_heads} heads, {text.d_ff:,} inside; {sees}",
            )
        )
    if (tower := model.vision_tower) is not None:
        inner = f"{tower.n_heads} heads, {tower.d_ff:,} inside; patches of {tower.embedding.patch_size} pixels a side"
        lines.append(("vision tower", f"{tower.n_layers} blocks of width {tower.d_model:,}, {inner}"))
    if model.contrastive is not None:
        lines.append(("features", f"{model.contrastive.width:,} numbers, {model.contrastive.loss} loss"))
    if model.generator is not None:
        layers, generator = model.generator.n_layers or model.n_layers, model.generator
        lines.append(
            (
                "generator",
                f"{layers} blocks of width {generator.d_model:,}, {generator.n_heads} heads, {generator.d_ff:,} inside",
            )
        )
    rates = (
        ("residual", model.dropout),
        ("attention", model.attention.dropout),
        ("feed-forward", model.ffn.dropout),
        ("path", model.drop_path),
    )
    if dropped := [f"{name} {rate:g}" for name, rate in rates if rate]:
        lines.append(("dropout", ", ".join(dropped)))
    return lines


def _input(model: ModelConfig) -> Line:
    """The vocabulary, or the patches of images."""
    embedding = model.embedding
    if isinstance(embedding, PatchEmbeddingConfig):
        counts = ((embedding.n_class_tokens, "class token"), (embedding.n_register_tokens, "register"))
        special = "".join(f", {number} {kind}{'s' * (number > 1)}" for number, kind in counts if number)
        return (
            "images",
            f"patches of {embedding.patch_size} × {embedding.patch_size} × {embedding.channels}{special}",
        )
    vocabulary = "" if model.vocab_size is None else f"{model.vocab_size:,}; "
    return "vocabulary", f"{vocabulary}{_embeddings(model)}"


def _stages(stages: StagesConfig, d_model: int) -> str:
    """Blocks, widths and heads of each stage."""
    blocks, heads = (" · ".join(map(str, numbers)) for numbers in (stages.layers, stages.heads))
    widths = " · ".join(str(d_model * 2**stage) for stage in range(len(stages.layers)))
    rows, columns = stages.grid
    return f"{blocks} blocks of width {widths} with {heads} heads, from {rows} × {columns} patches on"


def _heads(model: ModelConfig) -> str:
    text = f"{model.attention.n_heads} heads of {model.head_width}"
    if isinstance(latent := model.attention, MLAAttentionConfig):
        queries = f", queries from {latent.q_lora_rank}" if latent.q_lora_rank else ""
        rotary = f"{text} + {latent.qk_rope_head_dim} rotary"
        return f"{rotary}, keys and values from a latent of {latent.kv_lora_rank}{queries}"
    kind = "" if model.attention.name == "gqa" else f", {model.attention.name}"
    return f"{text}, {model.attention.kv_heads} of keys and values{kind}"


def _patterns(model: ModelConfig) -> str:
    """Count the blocks by their pattern in [model]; of an encoder-decoder, as many as its decoder has."""
    n_layers_by_pattern = Counter(_pattern(model.layer_config(depth)) for depth in range(model.n_layers))
    if len(n_layers_by_pattern) == 1:
        return next(iter(n_layers_by_pattern))
    return ", ".join(f"{number} × {name}" for name, number in n_layers_by_pattern.items())


def _pattern(model: ModelConfig) -> str:
    pattern = model.attention.pattern
    if pattern.name == "full" and model.attention.name not in ("gqa", "mla"):
        return model.attention.name
    options = pattern.model_dump(exclude_defaults=True, exclude={"name"})
    options_text = ", ".join(f"{key} {value}" for key, value in options.items())
    return f"{pattern.name} ({options_text})" if options_text else pattern.name


def _position(model: ModelConfig) -> str:
    match model.position:
        case RopeConfig(theta=theta, scaling=scaling):
            return f"rope, theta {theta:,g}{f', scaled by {scaling.name}' if scaling else ''}"
        case LearnedPositionConfig(max_positions=rows):
            return f"learned, {rows:,} positions"
        case LearnedPosition2dConfig(grid=(rows, columns)):
            return f"learned on a grid of {rows} × {columns}"
        case T5PositionConfig(buckets=buckets, max_distance=distance):
            return f"t5, {buckets} buckets up to {distance}"
        case (
            ShawConfig(name=name, max_distance=distance)
            | DebertaPositionConfig(name=name, max_distance=distance)
        ):
            return f"{name}, up to {distance} away"
    return model.position.name


def _embeddings(model: ModelConfig) -> str:
    text = "the output head shares the embedding" if model.embedding.tied else "the output head is apart"
    if model.embedding_width != model.d_model:
        text += f"; embeddings of {model.embedding_width:,}"
    return text + (f"; {model.embedding.n_segments} segments" if model.embedding.n_segments else "")


def _extra_heads(model: ModelConfig) -> list[str]:
    heads = []
    for name, section in model.extra_heads.items():
        if isinstance(section, SentenceHeadConfig):
            heads.append(f"{section.classes} classes of sentences")
        elif isinstance(section, ClassifierHeadConfig):
            heads.append(f"{section.n_classes:,} classes of images by {section.pool}")
        else:
            heads.append("span boundary" if name == "boundary" else name)
    if model.n_mtp_heads:
        heads.append(f"{model.n_mtp_heads} tokens beyond the next")
    return heads


def _counts(description: "Description") -> list[Line]:
    config, weight = description.config, description.weight_bytes
    optimizer = f"{description.optimizer_bytes:.3g} {config.optimizer.name}"
    copy = f"{description.copy_bytes} {config.train.precision} weight, " if description.copy_bytes else ""
    return [
        (
            "parameters",
            f"{description.parameters:,}{f', {description.frozen:,} of them frozen' if description.frozen else ''}",
        ),
        *(
            [("  active", f"{description.active:,} for each token")]
            if description.active < description.parameters
            else []
        ),
        ("  embedding", f"{description.embedding:,}"),
        ("  non-embedding", f"{description.non_embedding:,}"),
        *(
            [("  in 8 bits", f"{description.fp8_parameters:,} are multiplied so")]
            if description.fp8_parameters
            else []
        ),
        ("", ""),
        *_flops(description),
        ("", ""),
        (
            "tokens",
            f"{description.tokens_per_step:,} a step, {description.tokens:,} in {config.train.steps:,} steps",
        ),
        ("FLOPs", f"{description.flops_causal * description.tokens:.3g} in all{_half(description)}"),
        (
            "state",
            f"{description.state_bytes:.3g} bytes a parameter: {copy}{weight} weight, {weight} gradient, {optimizer}",
        ),
        ("", f"{description.total_bytes / 2**30:,.2f} GiB, {_sharing(description)}"),
        *_of_another_engine(config),
        *_on_a_rank(config),
        ("activations", _activations(description)),
        *_without_warmup(description.config),
    ]


def _sharing(description: "Description") -> str:
    if description.zero == 0:
        return "on each data rank"
    if not description.unsharded_bytes:
        return "sharded over dp_shard"
    return (
        f"sharded over dp_shard but for {description.unsharded_bytes:.3g} bytes a parameter on each data rank"
    )


def _of_another_engine(config: Config) -> list[Line]:
    if config.parallel.engine == "native":
        return []
    uncounted = "buckets and offloading" if config.parallel.engine == "deepspeed" else "buffers"
    return [
        (
            "",
            f"counted as the native engine holds it; {uncounted} of {config.parallel.engine} are not counted",
        )
    ]


def _on_a_rank(config: Config) -> list[Line]:
    from megatfm.describe.per_rank import rank_state
    from megatfm.parallel.mesh import ALL_AXES, describe_sizes

    try:
        state = rank_state(config)
    except UsageError as error:
        return [("  on a rank", f"not counted: {error}")]
    if state is None:
        return []
    parallel = config.parallel
    axes = {axis: getattr(parallel, axis, 1) for axis in ALL_AXES}
    layout = describe_sizes({axis: size for axis, size in axes.items() if size > 1})
    weights, gradients, optimizer, total = (
        f"{n_bytes / 2**30:,.2f}"
        for n_bytes in (state.weight_bytes, state.gradient_bytes, state.optimizer_bytes, state.total_bytes)
    )
    fullest = " on the fullest rank" if parallel.pp > 1 else ""
    return [
        (
            "  on a rank",
            f"{total} GiB{fullest} of {state.ranks}: weights {weights}, gradients {gradients}, optimizer {optimizer}",
        ),
        ("", f"{layout}, ZeRO {parallel.zero}; {state.parameters:,} parameters before ZeRO"),
    ]


def _without_warmup(config: Config) -> list[Line]:
    if config.lr_schedule.warmup_steps or config.optimizer.name not in (
        "adamw",
        "muon",
        "soap",
        "lamb",
        "lion",
    ):
        return []
    usual = max(1, min(2000, config.train.steps // 50))
    return [
        ("schedule", f"no warm-up: the full rate from step 1; usual: lr_schedule.warmup_steps={usual}"),
    ]


def _feed_forward(model: ModelConfig) -> str:
    """Name the network of each kind of block."""
    kinds = (model.layer_config(depth).ffn for depth in range(max(1, len(model.layer_types))))
    return "; or ".join(dict.fromkeys(map(_network, kinds)))


def _network(ffn: FFNConfig) -> str:
    inside = f"{ffn.activation}, inner width {ffn.d_ff:,}"
    if not isinstance(ffn, MoEConfig):
        return inside
    shared = f" and {ffn.n_shared_experts} for all" if ffn.n_shared_experts else ""
    return f"{ffn.n_experts:,} experts, {ffn.top_k} a token by {ffn.router.name!r}{shared}: {inside}"


def _activations(description: "Description") -> str:
    from megatfm.describe.activation_memory import block_activation_bytes

    rows = description.config.train.micro_batch
    try:
        activation_bytes = block_activation_bytes(description.config)
    except Exception as error:  # of any part, a plugin's too: the rest of the description stands
        return f"not counted: {type(error).__name__}: {' '.join(str(error).split())}"
    if activation_bytes is None:
        return "not counted: a part of this model asks for values, and is measured on shapes alone"
    kept_text, recomputed_text = (f"{number / 2**30:,.2f} GiB" for number in activation_bytes)
    text = f'{kept_text} kept by blocks for a micro-batch of {rows}; {recomputed_text} with train.recompute = "full"'
    parallel = description.config.parallel
    return (
        f"{text}; before tp, cp and pp divide them"
        if max(parallel.tp, parallel.cp, parallel.pp) > 1
        else text
    )


def _flops(description: "Description") -> list[Line]:
    config, model = description.config, description.config.model
    length = f"s = {config.data.sequence_length:,}"
    if model.family == "encoder_decoder":
        length += f" of the encoder, t = {config.data.target_length or config.data.sequence_length:,} of the decoder"
    names = {
        "encoder": "the head only for masked tokens" if model.lm_head.name != "none" else "heads once a row",
        "electra": "both halves, the generator's head only for masked tokens",
        "encoder_decoder": "averaged over the tokens of both",
        "two_towers": "averaged over the tokens of both towers",
        "vision_language": "averaged over the tokens of images and text",
    }.get(model.family, "the embedding as output head" if model.embedding.tied else "without the embedding")
    lines = [("FLOPs per token", f"in training; {length}, N = {description.matmul_parameters:,} ({names})")]
    if (
        model.family == "decoder"
        and not model.layer_types
        and _sees_all(model)
        and model.attention.name == "gqa"
    ):
        return [
            *lines,
            ("  6N + 12·L·h·s", f"{description.flops_full:.4g}, attention counted in full"),
            ("  6N + 6·L·h·s", f"{description.flops_causal:.4g}, of attention only its causal half"),
        ]
    method = "counted in full" if _sees_all(model) else "as patterns see pairs; full attention in full"
    lines.append(("  with attention", f"{description.flops_full:.4g}, {method}"))
    if description.flops_causal < description.flops_full:
        half_of = "the decoder's own" if model.family == "encoder_decoder" else "full attention"
        lines.append(("", f"{description.flops_causal:.4g}, of {half_of} only the causal half"))
    return lines


def _sees_all(model: ModelConfig) -> bool:
    """Whether all blocks have full attention, to all tokens by themselves."""
    kinds = [model, *(model.type_config(kind) for kind in model.layer_type)]
    return all(
        kind.attention.pattern.name == "full" and kind.attention.name in ("gqa", "mla") for kind in kinds
    )


def _half(description: "Description") -> str:
    return ", of causal attention only its half" if description.flops_causal < description.flops_full else ""
