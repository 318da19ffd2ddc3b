"""To and from the Hugging Face format: safetensors, config.json and tokenizer, tensor by tensor.

An architecture (`architectures/`, a chapter for each family) says how one class of transformers stores a model of ours:
their config.json as our `ModelConfig` and back, and a table of rules between their tensors and ours.
"""

from megatfm.convert import architectures as architectures
