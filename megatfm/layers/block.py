"""Transformer blocks: self-attention, optional cross-attention, and a feed-forward network."""

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers import moe as moe  # registers itself among the feed-forward networks
from megatfm.layers.attention import ATTENTIONS
from megatfm.layers.attention.kv_cache import LayerCache
from megatfm.layers.attention.patterns import PATTERNS
from megatfm.layers.attention.patterns.local import CrossAttentionPattern
from megatfm.layers.feed_forward import FFNS
from megatfm.layers.initialisation import StackKind, make_initialiser
from megatfm.layers.lora import InputDropout
from megatfm.layers.loss_terms import AuxiliaryCollector, AuxiliaryLoss, BlockOutput
from megatfm.layers.norm import RESIDUALS
from megatfm.layers.sequence import SequenceMetadata

# B batch, T tokens, S tokens of the memory, D model width


class Block(nn.Module):
    """Attention and feed-forward sublayers on a residual stream, as configured for the layer at `depth`.

    stack: "decoder" for causal attention. cross: with cross-attention to the encoder's output.
    """

    def __init__(self, config: ModelConfig, stack: StackKind, depth: int = 0, *, cross: bool = False) -> None:
        super().__init__()
        self.input_dropouts: list[InputDropout] = []
        self.depth, self.kind, config = depth, config.get_layer_type(depth), config.layer_config(depth)
        initial, residual = make_initialiser(config, stack), RESIDUALS.get(config.norm.placement)
        first = RESIDUALS.get("none") if depth == 0 and not config.norm.first_attention_norm else residual
        self.attn_residual = first(config, "attention residual", stack)
        pattern = PATTERNS.get(config.attention.pattern.name)(config, stack == "decoder").at_depth(depth)
        self.attn = ATTENTIONS.get(config.attention.name)(config, initial, pattern)
        if cross:
            self.cross_residual = residual(config, "cross residual", stack)
            self.cross = ATTENTIONS.get(config.attention.name)(config, initial, CrossAttentionPattern())
        self.ffn_residual = residual(config, "ffn residual", stack)
        self.ffn = FFNS.get(config.ffn.name)(config, initial)

    def forward(
        self,
        x_BTD: Tensor,
        sequence: SequenceMetadata,
        bias: Tensor | None = None,
        memory_BSD: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor | BlockOutput:
        """Return [B, T, D], or a BlockOutput with auxiliary losses.

        bias: position biases or the sequence projection that the stack's layers share. memory: the encoder's output.
        """
        for dropout in self.input_dropouts:
            dropout.sequence = sequence
        extras = AuxiliaryCollector()
        y_BTD = extras.unwrap("attn", self.attn(self.attn_residual.input_norm(x_BTD), sequence, bias, None, cache))
        x_BTD = self.attn_residual.add(x_BTD, y_BTD, sequence)
        if memory_BSD is not None:
            output = self.cross(self.cross_residual.input_norm(x_BTD), sequence, None, memory_BSD, cache)
            y_BTD = extras.unwrap("cross", output)
            x_BTD = self.cross_residual.add(x_BTD, y_BTD, sequence)
        y_BTD = extras.unwrap("ffn", self.ffn(self.ffn_residual.input_norm(x_BTD), sequence))
        return extras.wrap(self.ffn_residual.add(x_BTD, y_BTD, sequence))


def collect_auxiliary_losses(config: ModelConfig) -> dict[str, AuxiliaryLoss]:
    """Return the auxiliary losses, by name, that attention and feed-forward classes declare in `terms(config)`.

    Raises UsageError if two declare the same term differently.
    """
    losses: dict[str, AuxiliaryLoss] = {}
    kinds = [config.type_config(kind) for kind in dict.fromkeys(config.layer_types)] or [config]
    modules: list[tuple[ModelConfig, object]] = [(kind, FFNS.get(kind.ffn.name)) for kind in kinds]
    # Some families have an attention that is not in the registry.
    names = ATTENTIONS.names()
    modules += [(kind, ATTENTIONS.get(kind.attention.name)) for kind in kinds if kind.attention.name in names]
    for kind, module in modules:
        declared = getattr(module, "terms", None)
        for name, term in (declared(kind) if declared else {}).items():
            if losses.setdefault(name, term) != term:
                raise UsageError(
                    f"two parts of the model add a term {name!r} to the loss, one as {losses[name]}, one as {term}: "
                    "give both the same weight, or one another name"
                )
    return losses
