"""To and from the Hugging Face format: safetensors, config.json and tokenizer, tensor by tensor.

An architecture (`architectures/`, one file each) says how one class of transformers stores a model of ours: their
config.json as our `ModelConfig` and back, and a table of rules between their tensors and ours.
"""

from megatfm.convert import architectures
from megatfm.convert.registry import ARCHITECTURES, Architecture, architecture_for
from megatfm.convert.table import WeightMapping, from_hf, to_hf

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "WeightMapping",
    "architecture_for",
    "architectures",
    "from_hf",
    "to_hf",
]
