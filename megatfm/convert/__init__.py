"""To and from the Hugging Face format: safetensors, config.json and tokenizer, tensor by tensor.

An architecture (`architectures/`, a file for each family) describes how one class of transformers stores a megatfm
model: config.json to and from `ModelConfig`, and weight mappings between the tensors of both.
"""

from megatfm.convert import architectures as architectures
