"""To and from the Hugging Face format: safetensors, config.json and tokenizer, tensor by tensor.

An architecture (`architectures/`, a chapter for each family) describes how one class of transformers stores a megatfm
model: config.json as `ModelConfig` and back, and a table of rules between the tensors of both.
"""

from megatfm.convert import architectures as architectures
