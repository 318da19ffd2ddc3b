"""Tokenizers of before tokenizer.json: BERT's vocab.txt; GPT-2's and RoBERTa's vocab.json with merges.txt."""

import json

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from megatfm.errors import UsageError

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
END_OF_TEXT = "<|endoftext|>"
ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
CONVERT_HINT = (
    "transformers' AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) makes a tokenizer.json"
)


def wordpiece_json(vocabulary: bytes, config: bytes | None, name: str) -> bytes:
    """The tokenizer.json that transformers makes of a vocab.txt; config: the tokenizer_config.json beside it.

    Raises UsageError if it is no WordPiece.
    """
    try:
        pieces = vocabulary.decode("utf-8").split("\n")
        tokenizer_config = json.loads(config) if config else {}
    except ValueError as error:
        raise UsageError(f"{name}: not a vocabulary, a piece a line in UTF-8: {error}") from None
    ids = {piece.rstrip("\r"): number for number, piece in enumerate(pieces) if piece.strip()}
    if missing := [piece for piece in SPECIAL if piece not in ids]:
        raise UsageError(f"{name}: no WordPiece: it has no {missing[0]}: {CONVERT_HINT}")
    made = Tokenizer(models.WordPiece(vocab=ids, unk_token="[UNK]"))
    lower = tokenizer_config.get("do_lower_case", True)
    made.normalizer = normalizers.BertNormalizer(
        lowercase=lower,
        strip_accents=tokenizer_config.get("strip_accents"),
        handle_chinese_chars=tokenizer_config.get("tokenize_chinese_chars", True),
    )
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    made.decoder = decoders.WordPiece(prefix="##")
    made.add_special_tokens(list(SPECIAL))
    return made.to_str(pretty=True).encode()


def byte_bpe_json(vocabulary: bytes, merges: bytes, config: bytes | None, name: str) -> bytes:
    """The tokenizer.json that transformers makes of GPT-2's or RoBERTa's vocab.json and merges.txt.

    config: the tokenizer_config.json beside them. Raises UsageError if they are no byte-level BPE of one of these two.
    """
    try:
        ids = json.loads(vocabulary)
        tokenizer_config = json.loads(config) if config else {}
        lines = [
            line for line in merges.decode("utf-8").split("\n") if line and not line.startswith("#version")
        ]
        pairs = [(first, second) for first, second in (line.rstrip("\r").split(" ") for line in lines)]
        made = Tokenizer(models.BPE(vocab=ids, merges=pairs, fuse_unk=False))
    except Exception as error:  # the library raises its own bare Exception for what doesn't fit together
        raise UsageError(f"{name}: not the vocabulary and merges of a BPE: {error}") from None
    is_roberta = all(piece in ids for piece in ROBERTA)
    of_bytes = set(pre_tokenizers.ByteLevel.alphabet()) <= ids.keys()
    if not of_bytes or not (is_roberta or END_OF_TEXT in ids):
        raise UsageError(f"{name}: neither GPT-2's nor RoBERTa's byte-level BPE: {CONVERT_HINT}")
    leading = bool(tokenizer_config.get("add_prefix_space", False))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=leading)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(ROBERTA) if is_roberta else [END_OF_TEXT])
    if is_roberta:
        ends = ("</s>", ids["</s>"]), ("<s>", ids["<s>"])
        made.post_processor = processors.RobertaProcessing(*ends, add_prefix_space=leading)
    return made.to_str(pretty=True).encode()
