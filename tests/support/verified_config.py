"""A small config for `verify`."""

VERIFIED_CONFIG = {
    "name": "small",
    "model": {
        "vocab_size": 512,
        "d_model": 64,
        "n_layers": 6,
        "attention": {"n_heads": 8, "n_kv_heads": 4},
        "ffn": {"d_ff": 128},
    },
    "data": {"train": "nowhere/train", "tokenizer": "nowhere/tokenizer.model", "sequence_length": 64},
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "train": {"steps": 5, "global_batch": 8, "micro_batch": 4},
}
