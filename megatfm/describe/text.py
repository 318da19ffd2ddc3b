"""Text of `megatfm describe`: lines of a label and a value."""

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
from megatfm.config.world_size import describe_sizes
from megatfm.errors import UsageError
from megatfm.terminal import format_counted

if TYPE_CHECKING:
    from megatfm.describe.description import Description

Line = tuple[str, str]


def to_lines(description: "Description") -> list[Line]:
    """Return the lines that `megatfm describe` prints."""
    return [
        *_describe_architecture(description.config.model),
        ("objective", description.config.objective.name),
        ("", ""),
        *_describe_counts(description),
    ]


def _describe_architecture(model: ModelConfig) -> list[Line]:
    blocks = format_counted(model.n_layers, "block")
    if model.family == "encoder_decoder":
        blocks = f"{model.encoder_layers} + {blocks}"
    if model.distinct_layers and model.distinct_layers < model.n_layers:
        blocks += f" that share the weights of {model.distinct_layers}"
    lines = [
        ("model", f"{model.family}, {blocks} of width {model.d_model:,}"),
        ("attention", f"{_describe_heads(model)}; {_describe_position(model)}"),
        *([("  pattern", _describe_patterns(model))] if not _is_full_attention(model) else []),
        ("feed-forward", _describe_feed_forward(model)),
        ("norm", f"{model.norm.name} ({model.norm.placement}), epsilon {model.norm.eps:g}"),
        _describe_input(model),
    ]
    if model.stages is not None:
        lines.insert(1, ("  stages", _describe_stages(model.stages, model.d_model)))
    if heads := _describe_extra_heads(model):
        lines.append(("heads", ", ".join(heads)))
    if (text := model.text_tower) is not None:
        size = _describe_size(text.n_layers, text.d_model, text.n_heads)
        lines.append(("text tower", f"{size}, d_ff {text.d_ff:,}; {'causal' if text.causal else 'bidirectional'}"))
    if (tower := model.vision_tower) is not None:
        size = _describe_size(tower.n_layers, tower.d_model, tower.n_heads)
        patches = f"patches of {format_counted(tower.embedding.patch_size, 'pixel')} a side"
        lines.append(("vision tower", f"{size}, {tower.d_ff:,} inside; {patches}"))
    if model.contrastive is not None:
        lines.append(("features", f"{model.contrastive.width:,} dimensions, {model.contrastive.loss} loss"))
    if (generator := model.generator) is not None:
        size = _describe_size(generator.n_layers or model.n_layers, generator.d_model, generator.n_heads)
        lines.append(("generator", f"{size}, d_ff {generator.d_ff:,}"))
    rates = (
        ("residual", model.dropout),
        ("attention", model.attention.dropout),
        ("feed-forward", model.ffn.dropout),
        ("path", model.drop_path),
    )
    if dropped := [f"{name} {rate:g}" for name, rate in rates if rate]:
        lines.append(("dropout", ", ".join(dropped)))
    return lines


def _describe_size(n_layers: int, d_model: int, n_heads: int) -> str:
    return f"{format_counted(n_layers, 'block')} of width {d_model:,}, {format_counted(n_heads, 'head')}"


def _describe_input(model: ModelConfig) -> Line:
    """Describe the vocabulary, or an image model's patches."""
    embedding = model.embedding
    if isinstance(embedding, PatchEmbeddingConfig):
        counts = ((embedding.n_class_tokens, "class token"), (embedding.n_register_tokens, "register"))
        special = "".join(f", {format_counted(count, kind)}" for count, kind in counts if count)
        side = embedding.patch_size
        return "images", f"patches of {side} × {side} × {embedding.channels}{special}"
    vocabulary = "" if model.vocab_size is None else f"{model.vocab_size:,}; "
    return "vocabulary", f"{vocabulary}{_describe_embeddings(model)}"


def _describe_stages(stages: StagesConfig, d_model: int) -> str:
    """Describe blocks, widths and heads of each stage."""
    blocks, heads = (" · ".join(map(str, counts)) for counts in (stages.n_layers, stages.n_heads))
    widths = " · ".join(str(d_model * 2**stage) for stage in range(len(stages.n_layers)))
    rows, columns = stages.grid
    return f"{blocks} blocks of width {widths} with {heads} heads, from {rows} × {columns} patches on"


def _describe_heads(model: ModelConfig) -> str:
    text = f"{format_counted(model.attention.n_heads, 'head')} of {model.head_width}"
    if isinstance(latent := model.attention, MLAAttentionConfig):
        queries = f", queries from {latent.q_lora_rank}" if latent.q_lora_rank else ""
        rotary = f"{text} + {latent.qk_rope_head_dim} rotary"
        return f"{rotary}, keys and values from a latent of rank {latent.kv_lora_rank}{queries}"
    kind = "" if model.attention.name == "gqa" else f", {model.attention.name}"
    return f"{text}, {format_counted(model.attention.kv_heads, 'key-value head')}{kind}"


def _describe_patterns(model: ModelConfig) -> str:
    """Count blocks by attention pattern; an encoder-decoder's are the decoder's."""
    n_layers_by_pattern = Counter(_describe_pattern(model.layer_config(depth)) for depth in range(model.n_layers))
    if len(n_layers_by_pattern) == 1:
        return next(iter(n_layers_by_pattern))
    return ", ".join(f"{count} × {name}" for name, count in n_layers_by_pattern.items())


def _describe_pattern(model: ModelConfig) -> str:
    pattern = model.attention.pattern
    if pattern.name == "full" and model.attention.name not in ("gqa", "mla"):
        return model.attention.name
    options = pattern.model_dump(exclude_defaults=True, exclude={"name"})
    options_text = ", ".join(f"{key} {value}" for key, value in options.items())
    return f"{pattern.name} ({options_text})" if options_text else pattern.name


def _describe_position(model: ModelConfig) -> str:
    match model.position:
        case RopeConfig(theta=theta, scaling=scaling):
            return f"rope, theta {theta:,g}{f', scaled by {scaling.name}' if scaling else ''}"
        case LearnedPositionConfig(max_positions=rows):
            return f"learned, {rows:,} positions"
        case LearnedPosition2dConfig(grid=(rows, columns)):
            return f"learned on a grid of {rows} × {columns}"
        case T5PositionConfig(buckets=buckets, max_distance=distance):
            return f"t5, {buckets} buckets up to {distance}"
        case ShawConfig(name=name, max_distance=distance) | DebertaPositionConfig(name=name, max_distance=distance):
            return f"{name}, up to {distance} away"
    return model.position.name


def _describe_embeddings(model: ModelConfig) -> str:
    text = "output head tied to the embedding" if model.embedding.tied else "output head not tied"
    if model.embedding_width != model.d_model:
        text += f"; embeddings of {model.embedding_width:,}"
    return text + (f"; {model.embedding.n_segments} segments" if model.embedding.n_segments else "")


def _describe_extra_heads(model: ModelConfig) -> list[str]:
    heads = []
    for name, section in model.extra_heads.items():
        if isinstance(section, SentenceHeadConfig):
            heads.append(f"sentence classifier with {format_counted(section.classes, 'class', 'classes')}")
        elif isinstance(section, ClassifierHeadConfig):
            classes = format_counted(section.n_classes, "class", "classes")
            heads.append(f"image classifier with {classes}, pooled by {section.pool}")
        else:
            heads.append("span boundary" if name == "boundary" else name)
    if model.n_mtp_heads:
        heads.append(f"{model.n_mtp_heads} for multi-token prediction")
    return heads


def _describe_counts(description: "Description") -> list[Line]:
    config, weight = description.config, description.weight_bytes
    optimizer = f"{description.optimizer_bytes:.3g} {config.optimizer.name}"
    copy = f"{description.copy_bytes} {config.train.precision} weight, " if description.copy_bytes else ""
    frozen = f", {description.frozen:,} of them frozen" if description.frozen else ""
    lines = [("parameters", f"{description.parameters:,}{frozen}")]
    if description.active < description.parameters:
        lines.append(("  active", f"{description.active:,} for each token"))
    lines += [("  embedding", f"{description.embedding:,}"), ("  non-embedding", f"{description.non_embedding:,}")]
    if description.fp8_parameters:
        lines.append(("  fp8", f"{description.fp8_parameters:,} with matmuls in 8-bit floats"))
    steps = format_counted(config.train.steps, "step")
    tokens = f"{description.tokens_per_step:,} a step, {description.tokens:,} in {steps}"
    flops = f"{description.flops_causal * description.tokens:.3g} in total"
    if description.flops_causal < description.flops_full:
        flops += ", with half of causal attention"
    state = f"{copy}{weight} weight, {weight} gradient, {optimizer}"
    return [
        *lines,
        ("", ""),
        *_describe_flops(description),
        ("", ""),
        ("tokens", tokens),
        ("FLOPs", flops),
        ("state", f"{description.state_bytes:.3g} bytes a parameter: {state}"),
        ("", f"{_format_memory(description.total_bytes)}, {_describe_sharding(description)}"),
        *_describe_engine(config),
        *_describe_per_rank_state(config),
        ("activations", _describe_activations(description)),
        *_suggest_warmup(description.config),
    ]


def _format_memory(n_bytes: float) -> str:
    return f"{n_bytes / 2**30:,.2f} GiB" if n_bytes > 0.1 * 2**30 else f"{n_bytes / 2**20:,.2f} MiB"


def _describe_sharding(description: "Description") -> str:
    if description.zero == 0:
        return "on each data rank"
    sharded = "sharded over dp_shard × cp" if description.config.parallel.cp > 1 else "sharded over dp_shard"
    if not description.unsharded_bytes:
        return sharded
    unsharded = f"{description.unsharded_bytes:.3g} bytes a parameter"
    return f"{sharded} except {unsharded} on each data rank"


def _describe_engine(config: Config) -> list[Line]:
    if config.parallel.engine == "native":
        return []
    uncounted = "buckets and offloading" if config.parallel.engine == "deepspeed" else "buffers"
    engine = config.parallel.engine
    return [("", f"counted as for the native engine; {engine}'s {uncounted} are not counted")]


def _describe_per_rank_state(config: Config) -> list[Line]:
    from megatfm.describe.per_rank import count_rank_state
    from megatfm.parallel.mesh import ALL_AXES

    try:
        state = count_rank_state(config)
    except UsageError as error:
        return [("  on a rank", f"not counted: {error}")]
    if state is None:
        return []
    parallel = config.parallel
    axes = {axis: getattr(parallel, axis, 1) for axis in ALL_AXES}
    layout = describe_sizes({axis: size for axis, size in axes.items() if size > 1})
    weights, gradients, optimizer, total = map(
        _format_memory, (state.weight_bytes, state.gradient_bytes, state.optimizer_bytes, state.total_bytes)
    )
    rank = f"{total}{' on the fullest rank' if parallel.pp > 1 else ''} of {state.ranks}"
    return [
        ("  on a rank", f"{rank}: weights {weights}, gradients {gradients}, optimizer {optimizer}"),
        ("", f"{layout}, ZeRO {parallel.zero}; {state.parameters:,} parameters before ZeRO"),
    ]


def _suggest_warmup(config: Config) -> list[Line]:
    needs_warmup = config.optimizer.name in ("adamw", "muon", "soap", "lamb", "lion")
    if config.lr_schedule.warmup_steps or not needs_warmup:
        return []
    usual = max(1, min(2000, config.train.steps // 50))
    return [("schedule", f"no warmup: full learning rate from step 1; usual: lr_schedule.warmup_steps={usual}")]


def _describe_feed_forward(model: ModelConfig) -> str:
    """Describe the feed-forward network of each kind of block."""
    sections = (model.layer_config(depth).ffn for depth in range(max(1, len(model.layer_types))))
    return "; or ".join(dict.fromkeys(map(_describe_network, sections)))


def _describe_network(ffn: FFNConfig) -> str:
    network = f"{ffn.activation}, inner width {ffn.d_ff:,}"
    if not isinstance(ffn, MoEConfig):
        return network
    shared = f" and {ffn.n_shared_experts} shared" if ffn.n_shared_experts else ""
    return f"{format_counted(ffn.n_experts, 'expert')}, {ffn.top_k} a token by {ffn.router.name!r}{shared}: {network}"


def _describe_activations(description: "Description") -> str:
    from megatfm.describe.activation_memory import measure_block_activations

    rows = description.config.train.micro_batch
    try:
        activation_bytes = measure_block_activations(description.config)
    except Exception as error:  # any module's, even a plugin's: the rest of the description is still valid
        return f"not counted: {type(error).__name__}: {' '.join(str(error).split())}"
    if activation_bytes is None:
        return "not counted: this model's activations depend on values, and only shapes are known here"
    saved_text, recomputed_text = map(_format_memory, activation_bytes)
    text = f'{saved_text} saved by blocks for a micro-batch of {rows}; {recomputed_text} with train.recompute = "full"'
    parallel = description.config.parallel
    is_divided = max(parallel.tp, parallel.cp, parallel.pp) > 1
    return f"{text}; before tp, cp and pp divide them" if is_divided else text


def _describe_flops(description: "Description") -> list[Line]:
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
    is_plain = not model.layer_types and model.attention.name == "gqa" and _is_full_attention(model)
    if model.family == "decoder" and is_plain:
        return [
            *lines,
            ("  6N + 12·L·h·s", f"{description.flops_full:.4g}, attention counted in full"),
            ("  6N + 6·L·h·s", f"{description.flops_causal:.4g}, only the causal half of attention counted"),
        ]
    method = "patterns count the pairs they see; full attention counts all"
    if _is_full_attention(model):
        method = "counted in full"
    lines.append(("  with attention", f"{description.flops_full:.4g}, {method}"))
    if description.flops_causal < description.flops_full:
        attention = "the decoder's self-attention" if model.family == "encoder_decoder" else "full attention"
        lines.append(("", f"{description.flops_causal:.4g}, only the causal half of {attention} counted"))
    return lines


def _is_full_attention(model: ModelConfig) -> bool:
    """Return whether every block has plain full attention."""
    sections = [model, *(model.type_config(kind) for kind in model.layer_type)]
    return all(
        section.attention.pattern.name == "full" and section.attention.name in ("gqa", "mla") for section in sections
    )
