"""Modules open to all: small files whole or not at all, keyed random numbers, parts by name."""

import errno
import os
import re
import secrets
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatfm import cli, registry, rng
from megatfm.checkpoint import file_io
from megatfm.config import ModelConfig, find_config, load_config
from megatfm.errors import UsageError
from megatfm.files import atomic_write, is_copied_record, temporary_path
from megatfm.layers.norm import NORMS
from megatfm.models import build
from megatfm.registry import Registry, did_you_mean, import_plugins
from tests.support.workers import start_fork_server


def test_text_and_bytes_take_the_place_of_what_was_there(tmp_path: Path) -> None:
    for content, expected in (("ä", "ä".encode()), (b"\0", b"\0")):
        atomic_write(tmp_path / "a", content)
        assert (tmp_path / "a").read_bytes() == expected
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failing_disk_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    atomic_write(tmp_path / "a", "old")

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os if call == "fsync" else Path, call, fails)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'a'}'$"):
        atomic_write(tmp_path / "a", "new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_file_and_name_are_forced_to_the_disk_in_that_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, sync = list[bool](), os.fsync

    def noted(descriptor: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        assert (tmp_path / "a").exists() == synced[-1]
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    atomic_write(tmp_path / "a", "new")
    assert synced == [False, True]


def test_a_record_is_copied_if_its_folder_still_exists_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, copy, link = (tmp_path / name for name in ("run", "copy", "link"))
    run.mkdir()
    copy.mkdir()
    link.symlink_to(run)
    record = {"run": str(run)}
    is_copied = [is_copied_record(record, folder) for folder in (run, link, copy)]
    assert is_copied == [False, False, True]
    assert not any(is_copied_record({"run": origin}, copy) for origin in (None, 3, "a\0b", str(tmp_path / "gone")))
    monkeypatch.setattr(Path, "samefile", lambda *_: False)  # mounted twice, as two devices
    assert not is_copied_record(record, link)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_file_systems_need_not_sync_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    sync = os.fsync

    def refuses(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuses)
    atomic_write(tmp_path / "a", "new")
    file_io.sync_folder(tmp_path)
    assert (tmp_path / "a").read_text() == "new"


def test_no_two_drafts_have_one_name(tmp_path: Path) -> None:
    """Two containers may have the same host name, and in them two processes the same number."""
    assert len({temporary_path(tmp_path / "a") for _ in range(20)}) == 20


def test_a_link_is_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda _: "0" * 8)
    (tmp_path / "precious").write_text("precious")
    for place in (temporary_path(tmp_path / "a"), tmp_path / "a"):
        place.symlink_to(tmp_path / "precious")
        atomic_write(tmp_path / "a", "new")
        assert (tmp_path / "precious").read_text() == "precious"
        assert (tmp_path / "a").read_text() == "new"
        (tmp_path / "a").unlink()


def write_often(path: Path, letter: str) -> None:
    for _ in range(50):
        atomic_write(path, letter * 1000)


def test_several_processes_may_write_the_same_file(tmp_path: Path) -> None:
    context = start_fork_server()
    writers = [context.Process(target=write_often, args=(tmp_path / "a", letter)) for letter in "xyz"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert (tmp_path / "a").read_text() in {letter * 1000 for letter in "xyz"}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


# --------------------------------------------------------------------------------------- keyed random numbers


KEYS: list[tuple[int | str, ...]] = [(), (0,), ("0",), (0, 0), ("a", "b"), ("ab",), (1, "a"), ("a", 1), (-1,)]

GOLDEN_RAW = [7090668857677833275, 16952868447171799082, 14557845250218945068]
GOLDEN_UNIFORM = [0.6082992721846883, 0.9290624199488501]
GOLDEN_PERMUTATION = [5, 0, 4, 2, 3, 7, 1, 6]


def test_generator_keeps_its_golden_values() -> None:
    """The order of every run so far hangs on these: they are never to change."""
    assert rng.random_uint64(3, 0, "order", 1).tolist() == GOLDEN_RAW
    assert rng.uniform(2, 7, "a").tolist() == GOLDEN_UNIFORM
    assert rng.permutation(8, 1, "p").tolist() == GOLDEN_PERMUTATION


def test_a_number_of_any_type_is_its_value() -> None:
    assert rng.random_uint64(1, np.int64(3), "x") == rng.random_uint64(1, 3, "x")
    with pytest.raises(TypeError):
        rng.random_uint64(1, 1.5)  # type: ignore[arg-type]


def test_a_longer_draw_begins_with_the_shorter_one() -> None:
    assert rng.random_uint64(100, 5)[:7].tolist() == rng.random_uint64(7, 5).tolist()


def test_every_key_has_its_own_numbers() -> None:
    drawn = np.concatenate([rng.random_uint64(50, *key) for key in KEYS])
    assert len(set(drawn.tolist())) == len(drawn)
    x = np.stack([rng.uniform(4000, *key) for key in KEYS])
    correlations = np.corrcoef(x)[np.triu_indices(len(KEYS), 1)]
    assert np.abs(correlations).max() < 5 / np.sqrt(4000)  # five standard deviations


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_uniform_draws_pass_a_chi_squared_test(key: tuple[int | str, ...]) -> None:
    x = rng.uniform(20_000, *key)
    assert x.min() >= 0
    assert x.max() < 1
    counts, _ = np.histogram(x, bins=64, range=(0, 1))
    chi2 = float(((counts - 20_000 / 64) ** 2 / (20_000 / 64)).sum())
    assert 25 < chi2 < 120, "63 degrees of freedom: outside this once in a million"
    assert np.all(x * 2**53 == np.floor(x * 2**53))
    assert np.any(x * 2**52 != np.floor(x * 2**52)), "the last bit is never set"


@pytest.mark.parametrize(("count", "n"), [(0, 5), (1, 1), (3, 5), (5, 5), (6, 1000), (40, 2**16)])
def test_a_sample_is_the_start_of_a_permutation(count: int, n: int) -> None:
    """Two orders are those of an earlier version, as numbers."""
    assert rng.sample(6, 1000, 0, "shots", 7) == [14, 478, 236, 392, 5, 587]
    assert rng.sample(5, 5, 3, "shots", 2) == [3, 0, 1, 2, 4]
    for seed in range(4):
        assert rng.sample(count, n, seed, "p") == rng.permutation(n, seed, "p").tolist()[:count]
    with pytest.raises(ValueError, match="6 of 5 numbers"):
        rng.sample(6, 5, 1)


def test_a_sample_of_tied_numbers_keeps_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "random_uint64", lambda *_: np.array([5, 3, 3, 5, 3, 1], np.uint64))
    assert [rng.sample(count, 6, "p") for count in (2, 3, 5)] == [[5, 1], [5, 1, 2], [5, 1, 2, 4, 0]]


def test_samples_of_many_are_uniform_at_a_bounded_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten ranges at each of three places, within five deviations; no number is drawn for each of 2^40 elements."""
    monkeypatch.setattr(rng, "random_uint64", lambda *_: pytest.fail("drew a number for each element"))
    n, counts = 2**40 + 7, np.zeros((3, 10))
    for seed in range(2000):
        numbers = rng.sample(3, n, seed, "p")
        assert len(set(numbers)) == 3
        counts[np.arange(3), [10 * number // n for number in numbers]] += 1
    assert abs(counts - 200).max() < 5 * (2000 * 0.1 * 0.9) ** 0.5
    many = rng.sample(60_000, rng.MAX_RANKED + 1, "p")  # most numbers, so that repeats are drawn
    assert len(set(many)) == 60_000
    assert 0 <= min(many) <= max(many) <= rng.MAX_RANKED


def test_permutations_are_uniform() -> None:
    counts = np.zeros((6, 6), int)
    for seed in range(3000):
        permutation = rng.permutation(6, seed, "p")
        assert sorted(permutation.tolist()) == list(range(6))
        counts[np.arange(6), permutation] += 1
    assert np.abs(counts - 500).max() < 5 * np.sqrt(500)
    assert rng.permutation(0, 1).tolist() == []
    assert rng.permutation(1, 1).tolist() == [0]


def test_hashes_keep_their_golden_values() -> None:
    """Masks, plans of packing and dropout hang on these: they are never to change."""
    rows = rng.hash_rows((1, "a"), np.arange(2), np.array([5, 5]))
    assert rows.tolist() == [2514947007226666148, 15164154967367666321]
    keys = rng.chunk_keys(3, np.array([0, 0, 1]), np.array([0, 1, 0])).tolist()
    assert keys == [6198772376103169062, 15343448976193684557, 12554490214519274839]
    assert rng.row_keys(3, np.array([0, 1])).tolist() == [163100055346747955, 5506878964348894781]
    assert rng.ChunkKey(3, 9, 0, 1).without_epoch.tolist() == rng.chunk_keys(3, np.array([0]), np.array([1])).tolist()


def test_hashes_are_uniform_and_differ() -> None:
    samples, chunks = np.arange(300).repeat(300), np.tile(np.arange(300), 300)
    keys = rng.chunk_keys(0, samples, chunks)
    assert len(set(keys.tolist())) == len(keys)
    assert not set(keys.tolist()) & set(rng.chunk_keys(1, samples, chunks).tolist())
    bits = (keys[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(0) - 0.5).max() < 5 * 0.5 / np.sqrt(len(keys))
    correlations = np.corrcoef(bits.T.astype(float))[np.triu_indices(64, 1)]
    assert np.abs(correlations).max() < 6 / np.sqrt(len(keys))
    counts, _ = np.histogram(rng.to_unit_interval(keys), bins=64, range=(0, 1))
    chi2 = float(((counts - len(keys) / 64) ** 2 / (len(keys) / 64)).sum())
    assert 25 < chi2 < 120, "63 degrees of freedom: outside this once in a million"
    rows = rng.row_keys(0, np.arange(1000))
    assert rows.dtype == np.int64
    assert (rows >= 0).all()


# ---------------------------------------------------------------------------------------------- parts by name


def test_a_part_is_found_by_its_name() -> None:
    colours = Registry[int]("colour")
    assert colours.register("red")(1) == 1
    colours.register("blue")(2)
    assert (colours.get("red"), colours.names()) == (1, ["blue", "red"])
    colours.register("red")(1)  # the same part again: a plugin that is imported twice
    twice = r"^colour 'red' is registered twice, by \S+test_files.py:\d+ and \S+test_files.py:\d+: give one of them"
    with pytest.raises(UsageError, match=twice):
        colours.register("red")(3)
    assert colours.get("red") == 1
    with pytest.raises(UsageError, match=r"^unknown colour 'rad' \(did you mean 'red'\?\); there are: blue, red$"):
        colours.get("rad")
    with pytest.raises(UsageError, match=r"^unknown colour 'x'; there are: blue, red$"):
        colours.get("x")


def test_the_nearest_word() -> None:
    assert did_you_mean("stesp", ["steps", "seed"]) == " (did you mean 'steps'?)"
    assert did_you_mean("Layer-Norm", ["rms_norm", "layer_norm"]) == " (did you mean 'layer_norm'?)"
    assert did_you_mean("llama", ["llama3-70b", "llama3-8b"]) == " (did you mean 'llama3-8b'?)"
    assert did_you_mean("gelu_new", ["geglu", "gelu"]) == " (did you mean 'gelu'?)"
    assert did_you_mean("lr_max", ["lr", "eps"]) == "", "two letters are no beginning"
    assert did_you_mean("zzz", ["steps", "seed"]) == did_you_mean("", []) == ""


PLUGIN = """
from torch import nn
from megatfm.layers.norm import NORMS
from megatfm.layers.initialisation import Constant

@NORMS.register("plain_layer_norm")
class PlainLayerNorm(nn.LayerNorm):
    def __init__(self, d_model, eps):
        super().__init__(d_model, eps, bias=False)
        self.initial = {"weight": Constant(1.0)}
"""


def test_a_plugin_s_norm_is_used_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "found_parts").mkdir()
    (tmp_path / "found_parts" / "__init__.py").write_text(PLUGIN, encoding="utf-8")
    words = ['plugins=["found_parts"]', "model.norm.name=plain_layer_norm", "model.vocab_size=11"]
    config = load_config("quickstart", words)
    with torch.device("meta"), pytest.raises(UsageError, match=r"unknown norm 'plain_layer_norm' .*; there are: "):
        build(config.model)
    import_plugins(config.plugins)
    model = build(config.model)
    for norm in (model.decoder.layers["0"].attn_residual.norm, model.decoder.norm):
        assert type(norm).__name__ == "PlainLayerNorm"
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    assert model(torch.arange(5)[None]).logits.shape == (1, 5, 11)


@pytest.mark.parametrize("place", ["beside the config", "current directory"])
@pytest.mark.parametrize("kind", ["file", "package"])
def test_plugins_need_no_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, kind: str) -> None:
    name = f"found_{kind}_{place.replace(' ', '_')}"
    configs, elsewhere = tmp_path / "configs", tmp_path / "elsewhere"
    for folder in (configs, elsewhere):
        folder.mkdir()
    home = configs if place == "beside the config" else elsewhere
    monkeypatch.chdir(elsewhere)
    file = home / name / "__init__.py" if kind == "package" else home / f"{name}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(PLUGIN.replace("plain_layer_norm", name))
    (configs / "mine.toml").write_text(find_config("quickstart")[0].read_text())
    before = list(sys.path)
    config = load_config(configs / "mine.toml", [f"plugins={name}", f"model.norm.name={name}"])
    import_plugins(config.plugins)
    assert name in NORMS.names()
    assert sys.path == [*before, str(home)], "it comes last, and hides nothing"


def test_a_plugin_of_the_current_directory_is_found_for_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint's config is read from its state: there is no file of it beside which to look."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "found_for_a_run.py").write_text(PLUGIN.replace("plain_layer_norm", "found_for_a_run"))
    import_plugins(["found_for_a_run"])
    assert "found_for_a_run" in NORMS.names()


@pytest.mark.parametrize(("code", "why"), [
    ("x = 1\n1 / 0", r"broken_plugin.py:2 with ZeroDivisionError: division by zero"),
    ("def f(:", r"broken_plugin.py:1 with SyntaxError"),
    ("\nimport nothing_of_that_name", r"broken_plugin.py:2 with ModuleNotFoundError: .*nothing_of_that_name"),
    ("raise SystemExit(0)", r"broken_plugin.py:1 with SystemExit: 0"),
    ("from megatfm.errors import UsageError\nraise UsageError('mine')", "^mine$"),
])  # fmt: skip
def test_a_failing_plugin_s_line_is_named(code: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_plugin.py").write_text(code)
    with pytest.raises(UsageError, match=why):
        import_plugins(["broken_plugin"])


@pytest.mark.parametrize(("words", "changed", "why"), [
    ("super().__init__(d_model, eps, bias=False)", "super().__init__(d_model.eps)",
     r"^plugins: this arose in a plugin .* at \S+found_NUMBER.py:9, in __init__: mend it there$"),
    ("def __init__(self, d_model, eps)", "def __init__(self, d_model)",
     r"^plugins: in use are norm 'found_NUMBER' \(\S+found_NUMBER.py:6\): compare what they take and return"),
])  # fmt: skip
def test_a_plugin_s_part_that_fails_is_named(
    words: str, changed: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the traceback: the line in the plugin, or, where megatfm's own code fails, where its parts are."""
    name = f"found_{len(changed)}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_places_of_used_parts", {})  # without those of modules of other tests
    (tmp_path / f"{name}.py").write_text(PLUGIN.replace("plain_layer_norm", name).replace(words, changed))
    with pytest.raises((AttributeError, TypeError)) as failed:
        cli.main(["describe", "quickstart", f"plugins={name}", f"model.norm.name={name}", "model.vocab_size=11"])
    assert re.match(why.replace("found_NUMBER", name), failed.value.__notes__[-1])


@pytest.mark.parametrize(("words", "changed", "why"), [
    ('{"weight"', '{"wieght"', r"norm: PlainLayerNorm has no parameter or buffer 'wieght', which its `initial` names"),
    ("Constant(1.0)", "1.0", r"norm.weight: 1.0 in `initial` of PlainLayerNorm is no distribution: use one of "),
])  # fmt: skip
def test_initial_values_of_a_plugin_are_checked(
    words: str, changed: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"found_initial_{len(changed)}"
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{name}.py").write_text(PLUGIN.replace("plain_layer_norm", name).replace(words, changed))
    import_plugins([name])
    config = load_config("quickstart", [f"plugins={name}", f"model.norm.name={name}", "model.vocab_size=11"])
    with torch.device("meta"), pytest.raises(UsageError, match=why):
        build(config.model)


def test_a_name_that_megatfm_has_names_the_plugin_s_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "found_taken.py").write_text(PLUGIN.replace("plain_layer_norm", "rms_norm"))
    with pytest.raises(
        UsageError, match=r"^norm 'rms_norm' is registered twice, by megatfm itself and \S+taken.py:6: "
    ):
        import_plugins(["found_taken"])


@pytest.mark.parametrize("name", ["no_such_parts", "no/such", ".relative", "", "n" * 300])
def test_a_missing_plugin(name: str) -> None:
    with pytest.raises(UsageError, match=rf"^plugins: can't import '{name}' .*beside the config .*PYTHONPATH$"):
        import_plugins([name])


@pytest.mark.parametrize(("field", "kind"), [
    ("norm.name", "norm"), ("ffn.activation", "activation"), ("position.name", "position"),
    ("norm.placement", "norm placement"),
])  # fmt: skip
def test_an_unknown_part_is_named(field: str, kind: str) -> None:
    sizes = {"vocab_size": 7, "d_model": 8, "n_layers": 1, "attention.n_heads": 2, "ffn.d_ff": 8}
    config = ModelConfig.from_dotted({**sizes, field: "nothing"})
    with pytest.raises(UsageError, match=rf"^unknown {kind} 'nothing'; there are: \w+"):
        build(config)
