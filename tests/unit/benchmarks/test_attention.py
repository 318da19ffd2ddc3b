"""What measures attention patterns: each part at a size that means nothing, in two calls that add to one result."""

import json
from pathlib import Path

from tests.support.forked_commands import ForkedCommand

ROOT = Path(__file__).parents[3]


def test_calls_add_to_the_result_of_the_day(tmp_path: Path) -> None:
    for words in (
        ["--parts", "speed", "flat", "packed", "linformer", "--dtypes", "float32", "--lengths", "128", "256"],
        ["--parts", "speed", "memory", "--dtypes", "bfloat16", "--lengths", "128", "--only", "window"],
    ):
        words += ["--rounds", "1", "--out", tmp_path]
        script = ForkedCommand(words, tmp_path / "said", ROOT, program="benchmarks/attention.py")
        assert script.wait(120) == 0, script.output
    (path,) = tmp_path.glob("*-attention.json")
    result = json.loads(path.read_text(encoding="utf-8"))
    of_windows = {"dense", "window 512", "window 512, documents of 1000", "window 512, dense mask"}
    assert set(result["speed"]["bfloat16"]["128"]) == of_windows
    assert set(result["speed"]["float32"]) == {"128", "256"}
    assert set(result["speed"]["float32"]["256"]) > of_windows
    assert result["flat"]["float32"]["bigbird"]["128"]["of_the_shortest"] == 1
    assert result["packed"]["float32"]["256"]["full, documents of 32"] > 0
    assert set(result["linformer"]["float32"]["128"]) == {"unfused / linformer 128", "fused / linformer 128"}
    assert set(result["memory"]) == of_windows - {"dense"}
