"""Folders in the Hugging Face format: read, edited, small ones with a tokenizer, and files of tasks."""

import csv
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import tokenizers.models
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from megatfm.convert.convert import convert
from tests.support.command_line import run_command as run_command

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


ANIMALS = ["cat", "dog", "horse", "cow", "sheep", "goat"]
TOOLS = ["saw", "hammer", "drill", "rasp", "plane", "file"]
OTHER = ["the", "a", "old", "new", "in", "on", "by"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write_model(folder: Path, name: str) -> Any:
    """Write a model of transformers, "bert" or "llama", with its tokenizer; returns the model."""
    vocabulary = [*SPECIAL, *ANIMALS, *TOOLS, *OTHER]
    built = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = dict(zip(("pad", "unk", "cls", "sep", "mask"), SPECIAL, strict=True))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=built, **{f"{key}_token": token for key, token in names.items()}
    )
    torch.manual_seed(0)
    sizes = {
        "vocab_size": len(vocabulary), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "max_position_embeddings": 64,
    }  # fmt: skip
    model: Any
    if name == "bert":
        config = transformers.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        model = transformers.BertForPreTraining(config)
    else:
        llama = transformers.LlamaConfig(**sizes, pad_token_id=0, bos_token_id=2, eos_token_id=3)
        model = transformers.LlamaForCausalLM(llama)
    model.save_pretrained(folder / name)
    fast.save_pretrained(folder / name)
    return model


def write_topics(folder: Path, n: int = 96) -> None:
    """Write train.csv and validation.csv: texts that end in an animal or a tool, as the label says."""
    draw = random.Random(1)
    for name, count in (("train", n), ("validation", 24)):
        with open(folder / f"{name}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, ["text", "label"])
            writer.writeheader()
            for _ in range(count):
                word = draw.choice(ANIMALS + TOOLS)
                text = " ".join([*draw.sample(OTHER, draw.randint(1, 4)), word])
                writer.writerow({"text": text, "label": "animal" if word in ANIMALS else "tool"})


def write_preferences(folder: Path, n: int = 24) -> None:
    """Write pairs.jsonl: answers that name an animal are preferred to those that name a tool."""
    draw = random.Random(2)
    rows = []
    for _ in range(n):
        chosen, rejected = f"a {draw.choice(ANIMALS)}", f"a {draw.choice(TOOLS)}"
        rows.append({"prompt": f"the {draw.choice(OTHER)}", "chosen": chosen, "rejected": rejected})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


TOWNS = ("Rome", "Oslo", "Kyiv", "Bern", "Lyon", "東京")
NAMES = ("Anna", "Emil", "Dora", "Gustav")
FILLERS = ("the", "old", "lamp", "was", "red", "and", "new", ".")
MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def save_bert(folder: Path, words: Sequence[str], **options: Any) -> None:
    """Save a BERT of two layers with random weights, and its tokenizer of whole words."""
    vocabulary = [*MARKS, *dict.fromkeys(words)]
    built = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    built.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=built, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]",
    )  # fmt: skip
    torch.manual_seed(0)
    sizes = {
        "vocab_size": len(vocabulary), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    config = transformers.BertConfig(**(sizes | options))
    transformers.BertForPreTraining(config).save_pretrained(folder)
    fast.save_pretrained(folder)


def make_questions(n: int, seed: int, *, no_answer: float = 0.0) -> list[dict[str, Any]]:
    """Return questions about someone's place: the one town of a text of 30 words or so, or none in a share of them."""
    draw, rows = random.Random(seed), []
    for number in range(n):
        words = [draw.choice(FILLERS + NAMES) for _ in range(draw.randint(20, 35))]
        has_answer, place = draw.random() >= no_answer, draw.randrange(len(words))
        if has_answer:
            words[place] = draw.choice(TOWNS)
        answers = [{"text": words[place], "answer_start": len(" ".join([*words[:place], ""]))}]
        question = f"where was {draw.choice(NAMES)} ?"
        row = {"id": f"q{seed}-{number}", "question": question, "context": " ".join(words)}
        rows.append(row | {"answers": answers if has_answer else []})
    return rows


WORDS_OF_QUESTIONS = (*TOWNS, *NAMES, *FILLERS, "where", "was", "?")
