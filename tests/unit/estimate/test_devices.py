"""Files of users with devices and nodes: what they extend, and what is refused."""

from pathlib import Path

import pytest

from megatfm.errors import UsageError
from megatfm.estimate.devices import Cluster, load_cluster
from tests.support.forked_commands import run_command

LINK = '{ name = "a", bandwidth = 1e9, efficiency = 1.0, latency = 1e-5 }'


def load(folder: Path, text: str, **options: int) -> Cluster:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return load_cluster("x", 8, hardware=path, **options)


def test_a_section_has_the_keys_of_those_that_it_extends(tmp_path: Path) -> None:
    text = """
    [device.y]
    extends = "a100"
    memory_gib = 60.0
    [device.x]
    extends = "y"
    name = "X"
    [node.n]
    extends = "dgx-a100"
    gpus = 4
    """
    cluster, plain = load(tmp_path, text), load_cluster("a100", 8)
    assert (cluster.device.key, cluster.device.name, cluster.device.memory_gib) == ("x", "X", 60.0)
    assert cluster.device.flops == plain.device.flops
    assert cluster.node == plain.node
    four = load(tmp_path, text + '[default_node]\nx = "n"\n')
    assert (four.node.gpus, four.node.within) == (4, plain.node.within)
    with_byte_order_mark = load(tmp_path, "\ufeff" + text)
    assert with_byte_order_mark == cluster


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[device.x]\nextends = "h100"\nmemmory_gib = 3', r"\[device.x\] memmory_gib: unknown key \(did you mean"),
        ('[device.x]\nname = "X"', r"\[device.x\] lacks memory_gib, flops.*: give them, or extends = \"h100\""),
        ('[device.x]\nextends = "h1000"', r"\[device.x\] extends = 'h1000': unknown \(did you mean 'h100'"),
        ('[device.x]\nextends = "x"', r"'x' extends itself \(x → x\)"),
        ('[device.x]\nextends = "h100"\nmemory_gib = -4', r"\[device.x\] memory_gib = -4: .*greater than 0"),
        ('[device.x]\nextends = "h100"\nmatmul_efficiency = 60', r"matmul_efficiency = 60: .*less than or equal to 1"),
        ('[device.x]\nextends = "h100"\ntile = 128', r"\[device.x\] tile = 128: .*tuple"),
        ('[device.x]\nextends = "h100"\nmemory_gib = inf', r"memory_gib = inf: .*finite"),
        ('[device.x]\nextends = "h100"\nproducts = { fp32 = [] }', r"products.fp32 = \[\]: .*at least 1"),
        ('[device.x]\nextends = "h100"\nproducts = { fp32 = [[8, 8, 1e-6]] }', r"lacks products.fp32.0.3"),
        ('[device.x]\nextends = "h100"\nmoves = [[4096, -1.0]]', r"moves.0.1 = -1.0: .*greater than 0"),
        ('[device.x]\nextends = "h100"\nflops = 3e14', r"\[device.x\] flops = 3.*: .*dictionary"),
        ('[device.x]\nextends = "h100"\nflops = { bfloat16 = 3e14 }', r"flops.*'bfloat16': .*bf16|fp16"),
        ('device = "x"', r"'device' is not a table \[device.NAME\]"),
        ('[device]\nx = "h100"', r"'device' is not a table \[device.NAME\]"),
        ('[gpu.x]\nname = "X"', "no table 'gpu': there are default_node, device, node"),
        ('[device.x]\nextends = "h100"\n[node.n]\ngpus = 8\n[default_node]\nx = "n"', "n\\] lacks within, between"),
        (f'[device.x]\nextends = "h100"\n[node.n]\ngpus = 0\nwithin = {LINK}\nbetween = {LINK}\ndisk_bandwidth = 1e9\n'
         'source = "s"\n[default_node]\nx = "n"', r"\[node.n\] gpus = 0: .*greater than 0"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_by_key_and_reason(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(tmp_path, text)


def test_a_table_of_an_earlier_calibration_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    path.write_text('[device.here]\nextends = "cpu"\noperators = { gelu = 1.5 }\n')
    with pytest.raises(UsageError, match=r"operators\.gelu = 1\.5: .*measure the machine anew: --calibrate FILE"):
        load_cluster("here", 1, hardware=path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "0"], "--gpus 0: choose 1 or more"),
        (["--gpus", str(10**18)], f"--gpus {10**18}: no cluster has more than 16,777,216"),  # ran for hours
        (["--gpus-per-node", "0"], "--gpus-per-node 0: choose 1 or more"),
        (["--gpus-per-node", "-3"], "--gpus-per-node -3: choose 1 or more"),
        (["--gpus", "7"], "is not a multiple of train.micro_batch = 8 × 7 data ranks: the nearest that is one is 504"),
        (["--search", "--write", "old.toml"], "--write old.toml: the file exists: give another name"),
        (["--search", "--write", "new.toml"], "--write new.toml: the file new.sbatch exists: give another name"),
        (["--write", "older.toml"], "--write older.toml: the file older.config.toml exists: give another name"),
        (["--rank", "3"], "--rank 3: an estimate covers all ranks: add --traced, or leave --rank out"),
        (["--traced", "--rank", "-1"], "--rank -1: there are ranks 0 to 7"),
        (["--traced", "--rank", "2", "--gpus", "2"], "--rank 2: there are ranks 0 to 1"),
        (["--html", "no/page.html"], "--html no/page.html: there is no folder no"),
        (["--calibrate", "old.toml"], "--calibrate old.toml: the file exists: give another name, or use it"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_before_it_is_computed(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("old.toml", "new.sbatch", "older.config.toml"):
        (tmp_path / name).touch()
    assert run_command("estimate", "gpt2-124m", *words) == 2
    output, errors = capsys.readouterr()
    assert not output
    assert message in errors
