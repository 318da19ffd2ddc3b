"""Learning rates of single parameters, where the parametrisation asks for them."""

from torch import nn

from megatfm.config import ModelConfig
from megatfm.layers.linear import Linear


def lr_scales(model: nn.Module, config: ModelConfig) -> dict[str, float]:
    """Parameter name → factor on the learning rate; 1 where a name is missing.

    Under muP with Adam, hidden matrices learn by base_width / d_model more slowly (Yang et al. 2022, table 8); tables,
    vectors and the output head, whose output is scaled down instead, learn as fast at every width.
    """
    if config.mup is None:
        return {}
    hidden = [f"{path}.weight" for path, module in model.named_modules() if isinstance(module, Linear)]
    return dict.fromkeys(hidden, config.mup.base_width / config.d_model)
