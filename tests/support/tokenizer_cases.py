"""Texts and options that tokenizers are tried with."""

# What one or another tokenizer treats in a special way: marks of spaces and of unknown characters, names of reserved
# pieces, what Unicode's normal forms change, what has no width, what takes several bytes.
ODD_TEXTS = [
    *("\ue009", "\ue020", "\u2581", "\u2585", "\u2047", "\ufffd", "Ġ", "Ċ", "##", "\ufeff", "\u200b", "\u00a0"),
    *("\t", "\0", "\r", " ", "  ", "   ", "\n", "\n\n", "\u3000", "\u2028", "\x85"),
    *("<s>", "</s>", "<unk>", "<mask>", "<0x41>", "[MASK]", "[UNK]", "<|endoftext|>", "<extra_0>", "<extra_id_0>"),
    *("ﬁ", "１２", "e\u0301", "é", "İ", "ß", "한국어", "中文 字", "🗼", "\U0001f469\u200d\U0001f680", "don't", "I'LL"),
]  # fmt: skip
OWN_KINDS = ("sentencepiece", "sentencepiece-unigram", "byte-bpe", "llama3", "wordpiece")
LOSSLESS_KINDS = OWN_KINDS[:-1]
T5_PIECES = {"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
LLAMA2_PIECES = {
    "model_type": "bpe", "vocab_size": 700, "byte_fallback": True, "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False, "split_digits": True,
}  # fmt: skip
