"""Training under fire: a hundred kills at seeded moments, then a run whose ranks are killed every ~20 seconds.

    PYTHONPATH=. python benchmarks/soak.py                              # 100 kills, then 30 minutes
    PYTHONPATH=. python benchmarks/soak.py --kills 12 --minutes 3

The first part compares every curve and every stored bit with runs that nobody killed
(`tests/support/kill_series.py`). The second counts effective training: the seconds of steps that are part of the final
record (each step once), over the wall time less what processes take from their start to their first step. No step
before the last save may be lost.
"""

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import common
import torch

from megatfm import data_prep
from megatfm.config import load_section
from megatfm.config.prep import PrepConfig
from tests.support import kill_series, killed_ranks
from tests.support.rank_processes import free_port

EVERY = 5
PREP = """
out = "{out}"
[read]
folder = "{texts}"
[split]
validation = 0.2
[tokenizer]
vocab_size = 512
"""


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--between", type=float, default=20.0, help="seconds between kills, on average")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=common.make_output_file, help="where to write the result as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.empty(1, device="meta").to(torch.float64)  # slow the first time
    with tempfile.TemporaryDirectory(prefix="megatfm-soak-") as name:
        folder = Path(name)
        corpus = prepare(folder)
        with contextlib.redirect_stdout(sys.stderr):
            kills = kill_series.run_series(corpus, folder / "kills", kill_series.divide_kills(args.kills), args.seed)
        print("kills:", json.dumps(kills), flush=True)
        fire = train_with_kills(corpus, folder / "fire", args.minutes * 60, args.between, args.ranks, args.seed)
        print("under fire:", json.dumps(fire))
    facts = {
        "date": common.today(),
        "machine": common.describe_system(),
        "torch": torch.__version__,
        "command": f"benchmarks/soak.py --kills {args.kills} --minutes {args.minutes} --between {args.between}",
        "kills": kills,
        "under fire": fire,
    }
    common.write_json(args.out, facts)


def prepare(folder: Path) -> Path:
    """Prepare a small corpus of the standard library's sources in a child process, since prep may start threads."""
    corpus = folder / "corpus"

    def make() -> None:
        texts = folder / "texts"
        texts.mkdir()
        for file in sorted(Path(json.__file__).parents[1].glob("*.py")):
            (texts / file.name).write_bytes(file.read_bytes())
        config = folder / "prep.toml"
        config.write_text(PREP.format(out=corpus, texts=texts))
        data_prep.run(load_section(PrepConfig, config))
        os._exit(0)

    pid = killed_ranks.fork_process(make)
    assert os.waitpid(pid, 0)[1] == 0, "the corpus could not be made"
    return corpus


def train_with_kills(
    corpus: Path, folder: Path, seconds: float, between: float, world: int, seed: int
) -> dict[str, Any]:
    """Train for `seconds`; at random intervals kill one rank, end the others, and restart all."""
    folder.mkdir()
    config = folder / "kill_series.toml"
    config.write_text(kill_series.CONFIG.replace("CORPUS", str(corpus)))
    run, draw = folder / "run", random.Random(seed)
    words = [
        "train", str(config), f"run_dir={run}", f"parallel.dp_shard={world}", "train.steps=100000000",
        "model.d_model=128", "model.ffn.d_ff=512", "model.n_layers=4", "data.sequence_length=64",
        f"checkpoint.every={EVERY}", "checkpoint.keep=2", "log.every=1000",
    ]  # fmt: skip
    begin, starting, starts, lost = time.monotonic(), 0.0, 0, Counter[str]()
    while time.monotonic() < begin + seconds:
        start = time.time()
        pids = start_ranks(words, world, folder)
        starts += 1
        while (last := read_last_step(run))["time"] < start and time.time() < start + kill_series.PATIENCE_SECONDS:
            time.sleep(0.01)
        assert last["time"] > start, (folder / "said-0").read_text()
        starting += last["time"] - last["step_seconds"] - start
        due = min(time.monotonic() + draw.uniform(0.5, 1.5) * between, begin + seconds)
        time.sleep(max(0.0, due - time.monotonic()))
        reached = read_last_step(run)["step"]
        os.kill(draw.choice(pids), signal.SIGKILL)
        for pid in pids:  # as a launcher does, once one has ended
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        saved = max(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))
        lost["steps done again"] += max(0, reached - saved)
        lost["most at once"] = max(lost["most at once"], reached - saved)
        # One interval that was begun, and one whose save was still being written.
        assert reached - saved <= 3 * EVERY, f"at step {reached}, but the newest checkpoint is of {saved}"
    wall = time.monotonic() - begin
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[:-1]]
    numbers = [line["step"] for line in lines]
    assert numbers == list(range(1, len(numbers) + 1)), "every step once"
    useful = sum(line["step_seconds"] for line in lines if line["step"] <= saved)
    return {
        "seconds": round(wall, 1),
        "starting seconds": round(starting, 1),
        "kills": starts,
        "ranks": world,
        "steps": saved,
        **lost,
        "effective": round(useful / (wall - starting), 4),
    }


def start_ranks(words: list[str], world: int, folder: Path) -> list[int]:
    """Fork all ranks of a run."""
    port = free_port()
    pids = []
    for rank in range(world):
        variables = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        output = folder / f"said-{rank}"
        pids.append(killed_ranks.fork_process(lambda: killed_ranks.run_rank(words, variables, output)))  # noqa: B023
    return pids


def read_last_step(run: Path) -> dict[str, Any]:
    """Return the last complete line of metrics.jsonl."""
    path = run / "metrics.jsonl"
    if path.exists():
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            for line in reversed(file.read().split(b"\n")[:-1]):
                with contextlib.suppress(ValueError):
                    return dict(json.loads(line))
    return {"step": 0, "time": 0.0}


if __name__ == "__main__":
    main()
