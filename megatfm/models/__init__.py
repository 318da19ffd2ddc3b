"""Model families, from embedding to losses. `build(config)` makes the model of a config."""

from torch import nn

from megatfm.config import ModelConfig
from megatfm.layers import classifier as classifier  # registers itself among the heads
from megatfm.layers import patches as patches  # among the embeddings and heads
from megatfm.layers import position_2d as position_2d  # among the positions
from megatfm.layers import task_heads as task_heads
from megatfm.layers.initialisation import check_inits
from megatfm.layers.lora import add_lora
from megatfm.models import electra as electra
from megatfm.models import hierarchical as hierarchical
from megatfm.models import masked_autoencoder as masked_autoencoder
from megatfm.models import two_towers as two_towers
from megatfm.models import vision_language as vision_language
from megatfm.models import xlnet as xlnet
from megatfm.models.base import MODELS, Model
from megatfm.models.transformer import Decoder


def build(config: ModelConfig) -> nn.Module:
    """Build the model of a config on the current default device (`torch.device("meta")` allocates nothing).

    With `model.lora`, adds low-rank adapters and freezes all other parameters. Raises UsageError.
    """
    model = MODELS.get(config.family)(config)
    if config.lora is not None:
        add_lora(model, config.lora)
    check_inits(model)
    return model


__all__ = ["MODELS", "Decoder", "Model", "build"]
