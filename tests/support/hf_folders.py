"""Folders in the Hugging Face format: read, edited, and small models to convert."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import tokenizers.models
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from megatfm.convert.convert import convert

DECODER_TOKENS = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(3))


def perturb_parameters(model: PreTrainedModel) -> PreTrainedModel:
    """A model with noise added to every parameter, biases and norms too."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def copy_to_aligned_memory(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its weights copied to aligned memory: transformers leaves them where they lie in the file."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    return model.eval()


def build_hf_gpt2() -> PreTrainedModel:
    """A GPT-2 of transformers."""
    return perturb_parameters(
        GPT2LMHeadModel(GPT2Config(vocab_size=60, n_positions=32, n_embd=24, n_layer=2, n_head=3))
    )


def write_gpt2(folder: Path) -> Path:
    """Write a GPT-2 with noise and a byte-level tokenizer, as transformers does; returns the folder."""
    model = tokenizers.models.BPE()
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["import textwrap the größer end"] * 9, trainer)
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    config = GPT2Config(
        vocab_size=tokenizer.get_vocab_size(), n_positions=32, n_embd=24, n_layer=2, n_head=3,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    perturb_parameters(GPT2LMHeadModel(config)).save_pretrained(folder)
    return folder


def build_hf_llama() -> PreTrainedModel:
    """A Llama of transformers, with biases and scaled positions."""
    config = LlamaConfig(
        vocab_size=60, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=77, attention_bias=True, tie_word_embeddings=False,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    )  # fmt: skip
    return perturb_parameters(LlamaForCausalLM(config))


def read_folder_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files."""
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def get_public_config(model: PreTrainedModel) -> dict[str, Any]:
    """A model's config without private keys."""
    return {key: value for key, value in model.config.to_dict().items() if not key.startswith("_")}


def load_complete(kind: Any, folder: Path, **options: Any) -> Any:
    """Load a folder's model by transformers; no tensor is missing, and none is superfluous."""
    loaded, info = kind.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    return loaded


def convert_there_and_back(folder: Path, original: PreTrainedModel, **changes: Any) -> Any:
    """Convert `theirs` to `ours` and that to `back`; returns its model, whose config is the original's with changes."""
    convert(folder / "theirs", folder / "ours", "megatfm")
    convert(folder / "ours", folder / "back", "hf")
    loaded = load_complete(type(original), folder / "back")
    assert get_public_config(loaded) == get_public_config(original) | changes
    return loaded


def check_same_tensors(folder: Path, prefix: str = "") -> None:
    """Compare the tensors of `theirs` and `back`, to the bit; names in `theirs` may lack the prefix."""
    original, back = (read_folder_tensors(folder / name) for name in ("theirs", "back"))
    prefix = "" if original.keys() == back.keys() else prefix
    assert {f"{prefix}{key}" for key in original} == back.keys()
    for key, tensor in original.items():
        assert torch.equal(back[f"{prefix}{key}"], tensor), key


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of `config.json`."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change what is in `model.safetensors`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
