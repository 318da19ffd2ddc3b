"""A SentencePiece model as a tokenizer.json, for programs that read files of the tokenizers library alone."""

from collections.abc import Mapping
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers

from megatfm.tokenizers.base import SPACE_MARK
from megatfm.tokenizers.sentence_piece import BPE, UNIGRAM, SentencePieceTokenizer, read_settings


def make_tokenizer_json(model: bytes) -> bytes | None:
    """Return a tokenizer.json that gives the ids of a SentencePiece model; None if the library can't express it.

    model: content of the `.model`. The result names its hash, by which `load` takes the model itself. Text that spells
    a special token or a byte's piece, or contains U+2581, becomes that token, byte or a space.
    """
    settings, tokenizer = read_settings(model), SentencePieceTokenizer(model)
    reserved = [tokenizer.id_to_piece(token) for token in sorted(tokenizer.special.reserved)]
    if (
        settings["model_type"] not in (BPE, UNIGRAM)
        or settings["treat_whitespace_as_suffix"]
        or not settings["escape_whitespaces"]
        or not set(settings["user_defined_symbols"]) <= set(reserved)
    ):
        return None
    library = tokenizers.Tokenizer(_make_model(model, settings["model_type"]))
    library.normalizer = normalizers.Sequence(_list_normalizers(settings))
    prefix = [decoders.Strip(content=" ", left=1)] * settings["add_dummy_prefix"]
    library.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *prefix]
    )
    library.add_special_tokens([tokenizers.AddedToken(piece, normalized=False) for piece in reserved])
    content = library.to_str(pretty=True)
    kind = '  "model": {\n    "type": "' + type(library.model).__name__ + '",\n'
    assert kind in content
    return content.replace(kind, f'{kind}    "blake3": "{tokenizer.hash}",\n', 1).encode()


def _make_model(model: bytes, model_type: int) -> models.Model:
    """Return the pieces as a model of the library. BPE merges what makes the piece of the highest score first."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [(processor.id_to_piece(token), processor.get_score(token)) for token in range(processor.vocab_size())]
    unknown, has_bytes = processor.unk_id(), processor.is_byte(processor.piece_to_id("<0x00>"))
    if model_type == UNIGRAM:
        return models.Unigram(pieces, unknown, has_bytes)
    is_fixed = [
        any(getattr(processor, f"is_{kind}")(token) for kind in ("control", "unknown", "unused", "byte"))
        for token in range(len(pieces))
    ]
    ranks = {piece: (-score, token) for token, (piece, score) in enumerate(pieces) if not is_fixed[token]}
    merges = sorted(
        (rank, piece[:end], piece[end:])
        for piece, rank in ranks.items()
        for end in range(1, len(piece))
        if piece[:end] in ranks and piece[end:] in ranks
    )
    return models.BPE(
        vocab={piece: token for token, (piece, _) in enumerate(pieces)},
        merges=[(left, right) for _, left, right in merges],
        unk_token=pieces[unknown][0],
        fuse_unk=True,
        byte_fallback=has_bytes,
    )


def _list_normalizers(settings: Mapping[str, Any]) -> list[normalizers.Normalizer]:
    """Return what SentencePiece does to a text, in its order."""
    steps: list[normalizers.Normalizer] = []
    if settings["precompiled_charsmap"]:
        steps.append(normalizers.Precompiled(settings["precompiled_charsmap"]))
    if settings["remove_extra_whitespaces"]:
        ends, runs = tokenizers.Regex(r"\A +| +\z"), tokenizers.Regex(" {2,}")
        steps += [normalizers.Replace(ends, ""), normalizers.Replace(runs, " ")]
    if settings["add_dummy_prefix"]:
        steps.append(normalizers.Prepend(SPACE_MARK))
    return [*steps, normalizers.Replace(" ", SPACE_MARK)]
