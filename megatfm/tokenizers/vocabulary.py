"""BERT's vocab.txt, a piece a line, as a tokenizer.json."""

import json

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from megatfm.errors import UsageError

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def wordpiece_json(vocabulary: bytes, config: bytes | None, name: str) -> bytes:
    """The tokenizer.json that transformers makes of a vocab.txt; config: the tokenizer_config.json beside it.

    Raises UsageError if it is no WordPiece.
    """
    try:
        pieces = vocabulary.decode("utf-8").split("\n")
        told = json.loads(config) if config else {}
    except ValueError as error:
        raise UsageError(f"{name}: not a vocabulary, a piece a line in UTF-8: {error}") from None
    ids = {piece.rstrip("\r"): number for number, piece in enumerate(pieces) if piece.strip()}
    if missing := [piece for piece in SPECIAL if piece not in ids]:
        raise UsageError(
            f"{name}: no WordPiece: it has no {missing[0]}: transformers' AutoTokenizer.from_pretrained(FOLDER)"
            ".save_pretrained(FOLDER) makes a tokenizer.json"
        )
    made = Tokenizer(models.WordPiece(vocab=ids, unk_token="[UNK]"))
    lower = told.get("do_lower_case", True)
    made.normalizer = normalizers.BertNormalizer(
        lowercase=lower,
        strip_accents=told.get("strip_accents"),
        handle_chinese_chars=told.get("tokenize_chinese_chars", True),
    )
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    made.decoder = decoders.WordPiece(prefix="##")
    made.add_special_tokens(list(SPECIAL))
    return made.to_str(pretty=True).encode()
