"""Stored configs of earlier versions: renamed keys, values and what was computed before a key came."""

from pathlib import Path
from typing import Any

import pytest

from megatfm.config import Config, key_migrations, load_config, to_toml
from megatfm.config.key_migrations import find_renamed_keys, migrate, migrate_prep
from megatfm.config.prep import PrepConfig
from megatfm.errors import UsageError

RENAMED = (
    ("schedule", "lr_schedule"),
    ("parallel.schedule", "parallel.pp_schedule"),
    ("optimizer[soap].every", "optimizer.precondition_frequency"),
    ("model.block", "model.layer_type"),
    ("model.attention[latent].kv_rank", "model.attention.kv_lora_rank"),
    ("train.cuda_graphs", "engine.graphs.enabled"),
    ("data.mixture.*.weight", "data.mixture.*.share"),
    ("data.warmup.steps", "data.warmup.n_steps"),
)


def test_keys_move_to_their_new_names_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_migrations, "BLOCK_KINDS", ("model.block.*", "model.layer_type.*"))
    stored: dict[str, Any] = {
        "schedule": {"name": "cosine"},
        "parallel": {"schedule": "1f1b", "tp": 2},
        "optimizer": {"name": "soap", "every": 7},
        "model": {
            "attention": {"name": "latent", "kv_rank": 4},
            "block": {"wide": {"attention": {"name": "latent", "kv_rank": 8}}, "other": {"attention": {"kv_rank": 3}}},
        },
        "train": {"cuda_graphs": True, "steps": 5},
        "data": {"mixture": {"a": {"weight": 1.0}, "b": {"weight": 2.0}}, "warmup": [{"steps": 3}, {"steps": 4}]},
    }  # fmt: skip
    before = repr(stored)
    expected = {
        "lr_schedule": {"name": "cosine"},
        "parallel": {"pp_schedule": "1f1b", "tp": 2},
        "optimizer": {"name": "soap", "precondition_frequency": 7},
        "model": {
            "attention": {"name": "latent", "kv_lora_rank": 4},
            "layer_type": {
                "wide": {"attention": {"name": "latent", "kv_lora_rank": 8}},
                "other": {"attention": {"kv_rank": 3}},
            },
        },
        "train": {"steps": 5},
        "engine": {"graphs": {"enabled": True}},
        "data": {"mixture": {"a": {"share": 1.0}, "b": {"share": 2.0}}, "warmup": [{"n_steps": 3}, {"n_steps": 4}]},
    }  # fmt: skip
    assert migrate(stored, RENAMED, (), ()) == expected
    assert repr(stored) == before
    assert migrate(expected, RENAMED, (), ()) == expected
    other = {"optimizer": {"name": "adamw", "every": 7}}
    assert migrate(other, RENAMED, (), ()) == other


def test_values_and_what_was_computed_before_a_key_came() -> None:
    values = (("parallel.cp_method", "heads", "ulysses"), ("model.ffn.kind", 1, "one"))
    before = (("optimizer[muon].dtype", "bf16"),)
    stored = {
        "parallel": {"context": "heads"},
        "model": {"ffn": {"kind": 1}, "block": {"a": {"ffn": {"kind": 1}}}},
    }
    for name, more in (("muon", {"dtype": "bf16"}), ("adamw", {})):
        migrated = migrate(
            {**stored, "optimizer": {"name": name}},
            (("parallel.context", "parallel.cp_method"),),
            values,
            before,
        )
        assert migrated["parallel"] == {"cp_method": "ulysses"}
        assert migrated["model"] == {"ffn": {"kind": "one"}, "block": {"a": {"ffn": {"kind": "one"}}}}
        assert migrated["optimizer"] == {"name": name, **more}
    assert (
        migrate({"optimizer": {"name": "muon", "dtype": "fp32"}}, (), (), before)["optimizer"]["dtype"]
        == "fp32"
    )


@pytest.mark.parametrize("odd", [None, 3, [], {"optimizer": 3}, {"data": {"warmup": [1]}}])
def test_what_is_no_config_stays_as_it_is(odd: Any) -> None:
    assert migrate(odd, RENAMED, (), ()) == odd


def test_no_old_name_is_a_key_of_today() -> None:
    """Else a config that this version stores would be translated, too."""
    for kind, renamed in (
        (Config, key_migrations.RENAMED_KEYS),
        (PrepConfig, key_migrations.RENAMED_PREP_KEYS),
    ):
        schema = kind.model_json_schema()
        for old, new in renamed:
            assert not has_key(schema, old), f"{old} → {new}"
    schema = Config.model_json_schema()
    assert has_key(schema, "optimizer.max_grad_norm")
    assert has_key(schema, "optimizer[soap].precondition_frequency")
    assert not has_key(schema, "optimizer[adamw].precondition_frequency")
    assert has_key(schema, "data.mixture.*.weight")


def has_key(schema: dict[str, Any], path: str) -> bool:
    """Whether a JSON schema of configs knows a key."""

    def options(node: Any) -> list[dict[str, Any]]:
        if "$ref" in node:
            return options(schema["$defs"][node["$ref"].rpartition("/")[2]])
        nodes = [node]
        for key in ("anyOf", "oneOf", "allOf"):
            nodes += [option for item in node.get(key, ()) for option in options(item)]
        return nodes + (options(node["items"]) if "items" in node else [])

    nodes = options(schema)
    for part in path.split("."):
        key, _, variant = part.partition("[")
        actual = [
            node.get("additionalProperties") if key == "*" else node.get("properties", {}).get(key)
            for node in nodes
        ]
        nodes = [option for item in actual if isinstance(item, dict) for option in options(item)]
        if variant:
            names = [node.get("properties", {}).get("name", {}) for node in nodes]
            nodes = [
                n for n, name in zip(nodes, names, strict=True) if name.get("const") == variant.rstrip("]")
            ]
    return bool(nodes)


def test_stored_keys_are_translated_and_a_user_s_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal has the new name."""
    monkeypatch.setattr(key_migrations, "RENAMED_KEYS", (("optimizer.max_norm", "optimizer.max_grad_norm"),))
    text = to_toml(load_config("quickstart")).replace("\nmax_grad_norm = ", "\nmax_norm = ")
    (tmp_path / "checkpoints").mkdir()
    for path in (tmp_path / "config.toml", tmp_path / "mine.toml"):
        path.write_text(text)
    assert load_config(tmp_path).optimizer == load_config("quickstart").optimizer
    expected = r"mine\.toml: .*: optimizer\.max_norm is optimizer\.max_grad_norm now: write"
    with pytest.raises(UsageError, match=expected):
        load_config(tmp_path / "mine.toml")
    with pytest.raises(UsageError, match=r"optimizer\.max_norm is optimizer\.max_grad_norm now"):
        load_config("quickstart", ["optimizer.max_norm=2"])
    assert find_renamed_keys({"optimizer": {"max_grad_norm": 1}}) == []


def test_prep_json_is_translated_by_its_own_table() -> None:
    renamed = (("steps[near].words", "steps.shingle"), ("split.by", "split.key"))
    stored = {
        "version": 3,
        "split": {"by": "source"},
        "steps": [{"name": "near", "words": 5}, {"name": "c4", "words": 1}],
    }
    assert migrate_prep(stored, renamed) == {
        "version": 3, "split": {"key": "source"}, "steps": [{"name": "near", "shingle": 5}, {"name": "c4", "words": 1}],
    }  # fmt: skip


@pytest.mark.parametrize("name", ["latent", "mla"])
def test_a_stored_width_of_latent_attention_is_that_without_position(name: str) -> None:
    """Both names of the attention, as earlier versions stored them; other attentions keep `head_dim`."""
    migrated = migrate({"model": {"attention": {"name": name, "head_dim": 24}}})
    assert migrated == {"model": {"attention": {"name": "mla", "qk_nope_head_dim": 24}}}
    stored = {"model": {"attention": {"name": "gqa", "head_dim": 24}}}
    assert migrate(stored) == stored
