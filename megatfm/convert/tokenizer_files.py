"""Tokenizer files beside the weights in both formats, and values of config.json that megatfm's config can't hold.

These are token ids, dropout rates and generation_config.json: a checkpoint keeps them, and they are written back on
export.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from megatfm import tokenizers
from megatfm.checkpoint import file_io
from megatfm.config import Config
from megatfm.convert.hf_checkpoint import read_json_object
from megatfm.convert.hf_config import Json
from megatfm.convert.starting_config import read_preprocessor
from megatfm.errors import MegatfmError, UsageError
from megatfm.tasks.chat import find_answer_end_tokens
from megatfm.tasks.examples import ExampleFormat, Frame, build_frame
from megatfm.tokenizers import CHAT_TEMPLATE, Tokenizer
from megatfm.tokenizers.base import list_token_ids
from megatfm.tokenizers.hugging_face import find_frame_kind, remove_frame, set_frame
from megatfm.tokenizers.sentence_piece import make_tokenizer_json

TOKENIZER_CONFIG = "tokenizer_config.json"
COMPANION_FILES = (TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt")
"""Files of transformers about a tokenizer that are copied with it."""


def export_tokenizer(
    checkpoint: Path, config: Config, folder: Path, state: Mapping[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """Copy the tokenizer of a run, or of its config, to an exported folder; returns notes, and keys of config.json.

    One that says nothing of special tokens around a text gets those of the model's training, unless the model came from
    transformers. With a task's head they replace what the tokenizer adds, if that differs: the head reads these tokens.
    state: of the checkpoint. Raises UsageError if this is not the tokenizer that its hash names.
    """
    tokenizer_hash = digest if isinstance(digest := state.get("tokenizer"), str) else None
    run = checkpoint.absolute().parent.parent
    path = tokenizers.find_tokenizer_file(run)
    if path is None and config.data.tokenizer:
        path = Path(config.data.tokenizer)
    if path is None or not path.is_file():
        if not config.reads_text:
            return [], {}
        return [f"no tokenizer: there is none in {run}, nor at {path or 'data.tokenizer'}"], {}
    tokenizer = tokenizers.load(path)
    if tokenizer_hash is None:
        return [f"no tokenizer: {checkpoint.name} was saved without one; {path} may be another"], {}
    if tokenizer.hash != tokenizer_hash:
        raise UsageError(
            f"{path}: not the tokenizer that {checkpoint.name} was trained with, so that ids would mean other text: "
            f"put that one into {run}"
        )
    copy_tokenizer(path, folder)
    notes: list[str] = []
    if config.task is not None and config.task.chat_template is not None:
        notes += _copy_chat_template(Path(config.task.chat_template), folder)
    tokenizer_json = folder / "tokenizer.json"
    frame_kind = find_frame_kind(tokenizer_json.read_bytes()) if tokenizer_json.is_file() else None
    is_own = frame_kind == "own" or not (folder / TOKENIZER_CONFIG).is_file()
    is_own = is_own or (frame_kind == "none" and "origin" not in state)
    begins = state.get("begins")
    prefix_ids = list_token_ids(begins) if isinstance(begins, list) else [tokenizer.bos]
    frame = _choose_frame(tokenizer, config, prefix_ids)
    declared = getattr(tokenizer, "find_pair_template", lambda: None)() or ((), (), ())
    has_task_head = config.task is not None and bool(config.model.extra_heads)
    is_replaced = has_task_head and not is_own and frame != Frame(*declared)
    if is_own or is_replaced:
        notes += _write_tokenizer_config(tokenizer, folder, frame, is_replaced=is_replaced)
    if config.model.embedding.n_segments > 1 and (is_own or config.task is not None):
        _enable_segment_ids(folder / TOKENIZER_CONFIG)
    ids = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.pad}
    if config.model.family == "encoder_decoder":
        ids["decoder_start_token_id"] = tokenizer.pad
    return notes, ids


def _copy_chat_template(path: Path, folder: Path) -> list[str]:
    """Copy the template that a run was trained with, in place of the tokenizer's; returns a note if it is gone."""
    if not path.is_file():
        return [f"no chat template: task.chat_template = {path} is gone: put it into the folder as {CHAT_TEMPLATE}"]
    _replace_file(folder / CHAT_TEMPLATE, path.read_bytes())
    return []


def import_tokenizer(source: Path, folder: Path) -> tuple[str | None, list[str]]:
    """Copy the tokenizer of a folder in the Hugging Face format; returns its file's name (None: no tokenizer), and
    notes."""
    path = find_tokenizer_path(source)
    try:
        tokenizers.load(path)
    except MegatfmError as error:
        return None, [f"no tokenizer: {error}"]
    return copy_tokenizer(path, folder), []


def find_tokenizer_path(source: Path) -> Path:
    """Return the path for `tokenizers.load` in a folder in the Hugging Face format: a file, or the folder."""
    return tokenizers.find_tokenizer_file(source) or _find_plain_sentencepiece(source) or source


def _find_plain_sentencepiece(source: Path) -> Path | None:
    """Return a SentencePiece model if the files beside it add no tokens, as in folders of `to_hf`."""
    path, config_file = source / "tokenizer.model", source / TOKENIZER_CONFIG
    if not path.is_file() or (source / "added_tokens.json").is_file():
        return None
    added_tokens = config_file.is_file() and read_json_object(config_file).get("added_tokens_decoder")
    return None if added_tokens else path


def copy_tokenizer(path: Path, target: Path) -> str:
    """Copy the tokenizer at `path` and its companion files to a folder; returns the name of its main file."""
    files = tokenizers.read_tokenizer_files(path)
    if path.name == "tokenizer.json":
        companions = [path.parent / name for name in COMPANION_FILES]
        files |= {file.name: file.read_bytes() for file in companions if file.is_file()}
    for name, content in files.items():
        (target / name).parent.mkdir(exist_ok=True)
        file_io.write_file(target / name, [memoryview(content)])
    return "tokenizer.json" if "tokenizer.json" in files else "tokenizer.model"


def _choose_frame(tokenizer: Tokenizer, config: Config, prefix_ids: Sequence[int]) -> Frame:
    """Return the special tokens around texts in a model's training. prefix_ids: before a decoder's text."""
    family, objective = config.model.family, config.objective.name
    is_causal = family in ("decoder", "vision_language")
    if family == "encoder_decoder" or (is_causal and not config.model.extra_heads):
        before = [] if family == "encoder_decoder" or objective == "span_corruption" else prefix_ids
        if objective == "ul2" and "S" in tokenizer.modes:
            before = [tokenizer.modes["S"]]
        end = (tokenizer.eos,) if family == "encoder_decoder" else ()
        return Frame(tuple(before), end, end)
    if is_causal or (family in TEXT_ENCODERS and tokenizer.cls is not None and tokenizer.sep is not None):
        return build_frame(tokenizer, ExampleFormat(0, is_causal=is_causal, ends_in_cls=family == "xlnet"))
    return Frame((), (), ())


def _write_tokenizer_config(tokenizer: Tokenizer, folder: Path, frame: Frame, *, is_replaced: bool) -> list[str]:
    """Write tokenizer_config.json, with which transformers reads the same tokenizer, and its frame.

    is_replaced: the frame replaces another post-processor's. Returns a note if the frame can't be written.
    """
    begins, ends = frame.before == (tokenizer.bos,), frame.after == (tokenizer.eos,)
    tokenizer_config: dict[str, Any] = {
        f"{role}_token": tokenizer.id_to_piece(token)
        for role in ("bos", "eos", "unk", "pad", "mask", "cls", "sep")
        if (token := getattr(tokenizer, role)) is not None
    } | {ADD_BOS_KEY: begins, ADD_EOS_KEY: ends, "clean_up_tokenization_spaces": False}
    notes = []
    path, model = folder / "tokenizer.json", folder / "tokenizer.model"
    content = make_tokenizer_json(model.read_bytes()) if model.is_file() else path.read_bytes()
    if content is not None:
        tokenizer_config["tokenizer_class"] = "PreTrainedTokenizerFast"
        content = remove_frame(content) if is_replaced else content
        _replace_file(path, set_frame(content, frame.before, frame.between, frame.after))
    else:
        before, after = (" ".join(map(tokenizer.id_to_piece, ids)) for ids in (frame.before, frame.after))
        notes = [
            f"the tokenizer is copied as it is, for no tokenizer.json does what this {tokenizer.kind} model does; "
            f"the training put {before or 'nothing'} before a text and {after or 'nothing'} after it"
        ]
    path = folder / TOKENIZER_CONFIG
    present = read_json_object(path) if path.is_file() else {}
    # A class such as LlamaTokenizer would put its own tokens around a text.
    decided = (ADD_BOS_KEY, ADD_EOS_KEY, *(["tokenizer_class"] if is_replaced and content is not None else []))
    merged = tokenizer_config | present | {key: tokenizer_config[key] for key in decided}
    _replace_file(path, json.dumps(merged, indent=2).encode() + b"\n")
    return notes


def _replace_file(path: Path, content: bytes) -> None:
    """Write a file in an unfinished folder, in place of one of that name."""
    path.unlink(missing_ok=True)
    file_io.write_file(path, [memoryview(content)])


def _enable_segment_ids(config_file: Path) -> None:
    """Let transformers' tokenizer return segment ids; without them, its models put all tokens in the first segment."""
    if not config_file.is_file():
        return
    names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer_config = {"model_input_names": names} | read_json_object(config_file)
    _replace_file(config_file, json.dumps(tokenizer_config, indent=2).encode() + b"\n")


TEXT_ENCODERS = ("encoder", "discriminator", "electra", "xlnet")
"""Families that read texts between [CLS] and [SEP], or before [SEP] and [CLS]."""
GENERATION = "generation_config.json"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
DROPOUT_KEY = re.compile(r"(pdrop|dropout|dropout_prob)$")
LABELS = ("id2label", "label2id")
TEXT_CONFIG = "text_config"
"""Section of config.json for the text tower of a model of images and text; it has separate special ids."""
ADD_BOS_KEY, ADD_EOS_KEY = "add_bos_token", "add_eos_token"


def record_origin(source: Path, name: str, hf_config: Json, written_config: Json) -> Json:
    """Return the values of a Hugging Face folder that a checkpoint keeps, also through further training.

    name: of the class. written_config: megatfm's export of the model. Returns `config`, the special ids, label names
    and dropout rates of config.json that differ in `written_config`, and `generation`, the content of
    generation_config.json if there is one, and `preprocessor`, that of preprocessor_config.json. Raises MegatfmError.
    """
    differing = {
        key: {"theirs": value, "ours": written_config.get(key)}
        for key, value in hf_config.items()
        if (key in IDS or key in LABELS or DROPOUT_KEY.search(key))
        and (key not in written_config or written_config[key] != value)
    }
    text_config, written_text_config = (config.get(TEXT_CONFIG) or {} for config in (hf_config, written_config))
    differing |= {
        f"{TEXT_CONFIG}.{key}": {"theirs": value, "ours": written_text_config.get(key)}
        for key, value in text_config.items()
        if key in IDS and written_text_config.get(key) != value
    }
    file = source / GENERATION
    generation = {"generation": read_json_object(file)} if file.is_file() else {}
    preprocessor = {"preprocessor": content} if (content := read_preprocessor(source)) else {}
    return {"name": name, "config": differing, **generation, **preprocessor}


def make_generation_config(
    origin: Mapping[str, Any], config: Config, folder: Path, hf_config: Mapping[str, Any]
) -> Json:
    """Return generation_config.json: the origin's, with the end token of answers for a model that learnt to chat.

    folder: with the tokenizer that was written. Empty if there is nothing to say.
    """
    stored = origin.get("generation")
    generation: Json = dict(stored) if isinstance(stored, dict) else {}
    path = tokenizers.find_tokenizer_file(folder)
    ends = find_answer_end_tokens(config.task, path, tokenizers.load(path)) if path is not None else ()
    ids = generation.get("eos_token_id", hf_config.get("eos_token_id"))
    listed = list_token_ids(ids)
    if missing := [token for token in ends if token not in listed]:
        generation["eos_token_id"] = [*listed, *missing]
    return generation


def restore_origin(origin: Mapping[str, Any], written_config: Mapping[str, Any]) -> Json:
    """Return the values that `record_origin` kept, except those that have changed since in megatfm's export."""
    origin_config = origin.get("config", {})
    text_config = written_config.get(TEXT_CONFIG) or {}
    written = {**written_config, **{f"{TEXT_CONFIG}.{key}": value for key, value in text_config.items()}}
    return {key: values["theirs"] for key, values in origin_config.items() if written.get(key) == values["ours"]}


def move_text_ids(hf_config: Mapping[str, Any]) -> Json:
    """Return a config.json with its special ids moved to the section of the text tower, if it has one."""
    if TEXT_CONFIG not in hf_config:
        return dict(hf_config)
    prefix = f"{TEXT_CONFIG}."
    ids = {key: value for key, value in hf_config.items() if key in IDS}
    restored = {key.removeprefix(prefix): v for key, v in hf_config.items() if key.startswith(prefix)}
    without_ids = {key: v for key, v in hf_config.items() if key not in ids and not key.startswith(prefix)}
    return {**without_ids, TEXT_CONFIG: {**hf_config[TEXT_CONFIG], **ids, **restored}}


def find_eos_token_ids(source: Path, hf_config: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    """Return the ids that end a text by the model's files; the tokenizer's EOS comes first if it is among them."""
    file = source / GENERATION
    ids = (read_json_object(file) if file.is_file() else {}).get("eos_token_id", hf_config.get("eos_token_id"))
    return sorted(dict.fromkeys(list_token_ids(ids)), key=lambda id: id != tokenizer.eos)


def find_bos_prefix_ids(source: Path, files: Mapping[str, bytes], tokenizer: Tokenizer) -> list[int]:
    """Return the ids that the model's tokenizer puts before a text: none for GPT-2, a BOS for Llama.

    files: of the tokenizer, by name.
    """
    file = source / TOKENIZER_CONFIG
    tokenizer_config = read_json_object(file) if file.is_file() else {}
    if (content := files.get("tokenizer.json")) is not None:
        library = Library.from_str(content.decode())
        with_special, plain = (library.encode("a", add_special_tokens=is_special).ids for is_special in (True, False))
        starts = range(len(with_special) - len(plain) + 1)
        prefix = next((with_special[:i] for i in starts if with_special[i : i + len(plain)] == plain), [])
        if ADD_BOS_KEY not in tokenizer_config:
            return prefix
    elif ADD_BOS_KEY not in tokenizer_config:
        tokenizer_config = {ADD_BOS_KEY: str(tokenizer_config.get("tokenizer_class", "Llama")).startswith("Llama")}
    return [tokenizer.bos] if tokenizer_config[ADD_BOS_KEY] else []
