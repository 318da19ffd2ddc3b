"""Learning rates of single parameters, where the parametrisation asks for them."""

from torch import nn

from megatfm.config import ModelConfig


def lr_scales(model: nn.Module, config: ModelConfig) -> dict[str, float]:
    """Return parameter name → factor on the learning rate; 1 where a name is missing.

    Under muP with Adam, matrices whose inputs grow with the width learn by base_width / d_model more slowly (Yang et
    al. 2022, table 8): those of attention, feed-forward networks, experts and routers. Tables, vectors, matrices of
    fixed inputs (latents, a head's channels) and the output head, whose output is scaled down instead, learn as fast at
    every width. A matrix's initial weights tell which it is.
    """
    if config.mup is None:
        return {}
    ratios = {
        f"{path}.{key}": initial.width_ratio
        for path, module in model.named_modules()
        for key, initial in getattr(module, "initial", {}).items()
    }
    return {name: ratios[name] for name, _ in model.named_parameters() if ratios.get(name, 1.0) != 1.0}
