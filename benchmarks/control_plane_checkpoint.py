"""Plan, metadata and load plan of a checkpoint of Llama 3 70B with AdamW at N simulated ranks, by the real classes.

    python benchmarks/control_plane_checkpoint.py --ranks 64 256 1024 --out benchmarks/results

Tensor parallelism over 8 ranks, ZeRO 3 over the others, once with 8 replicas (HSDP). One process takes the part of each
rank in turn: tensors have shapes and no memory, files are not written. Seconds of CPU; bytes as they are sent.
"""

import json
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import common
import torch

from megatfm.checkpoint import writer
from megatfm.checkpoint.file_format import FileEntry
from megatfm.checkpoint.metadata import encode_metadata, parse_metadata, run_lengths
from megatfm.checkpoint.planner import WritePlan, group_shards, hash_group, merge_plans
from megatfm.checkpoint.reader import Reader
from megatfm.checkpoint.sharded_tensor import ShardedTensor
from megatfm.config import load_config
from megatfm.parallel.parallelize import match_styles
from megatfm.train.build import build_model

T = TypeVar("T")
Shapes = dict[str, tuple[tuple[int, ...], int | None]]
"""Name → global shape, and the dim that tensor parallelism shards."""
TP = 8


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument("--replicas", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--out", type=common.make_output_folder)
    args = parser.parse_args()
    shapes = load_shapes(args.layers)
    rows = []
    for replicas in args.replicas:
        for ranks in args.ranks:
            rows.append(measure(shapes, ranks, replicas))
            print(json.dumps(rows[-1]), flush=True)
    result = {
        "system": common.describe_system(),
        "cpu": common.get_cpu_name(),
        "layers": args.layers,
        "rows": rows,
    }
    common.write_json(common.make_dated_path(args.out, "control-plane-checkpoint.json"), result)


def load_shapes(layers: int) -> Shapes:
    config = load_config("llama3-70b", [f"model.n_layers={layers}"])
    with torch.device("meta"):
        model = build_model(config)
    return {
        f"{path}.{key}": (tuple(tensor.shape), style.shard_dim(key, tensor.dim()))
        for path, style in match_styles(model).items()
        for key, tensor in model.get_submodule(path).named_parameters(recurse=False)
    }


def iter_shards(shapes: Shapes, rank: int, tp: int, shards: int) -> Iterator[tuple[str, ShardedTensor]]:
    """Yield weights, moments and step counts of a rank; ranks `tp · shards` apart are replicas."""
    zero = torch.zeros(())
    part, shard = rank % tp, rank // tp % shards
    for name, (shape, dim) in shapes.items():
        offsets, sizes = [0] * len(shape), list(shape)
        if dim is not None:
            sizes[dim] //= tp
            offsets[dim] = part * sizes[dim]
        per_rank = -(-sizes[0] // shards)
        first = min(per_rank * shard, sizes[0])
        offsets[0] += first
        sizes[0] = min(per_rank, sizes[0] - first)
        block = ShardedTensor(zero.expand(sizes), shape, tuple(offsets))
        yield f"model.{name}", block
        yield f"optimizer.{name}.exp_avg", block
        yield f"optimizer.{name}.exp_avg_sq", block
        yield f"optimizer.{name}.step", ShardedTensor.from_tensor(zero)
    for kind, size in (("python", 627), ("numpy", 627), ("torch", 5056), ("cuda", 16)):
        yield f"rng.{rank}.{kind}", ShardedTensor.from_tensor(zero.expand(size))


def time_work(work: Callable[[], T]) -> tuple[float, T]:
    start = time.process_time()
    result = work()
    return round(time.process_time() - start, 3), result


def measure(shapes: Shapes, ranks: int, replicas: int) -> dict[str, Any]:
    shards = ranks // TP // replicas
    describe_s, (groups, cuts) = time_work(lambda: group_shards(dict(iter_shards(shapes, 0, TP, shards))))
    gathered = len(pickle.dumps([(hash_group(group), its_cuts) for group, its_cuts in zip(groups, cuts, strict=True)]))
    by_digest: dict[bytes, Any] = {}
    described = []
    for rank in range(ranks):
        groups, cuts = group_shards(dict(iter_shards(shapes, rank, TP, shards)))
        shared = [by_digest.setdefault(hash_group(group), group) for group in groups]
        described.append(list(zip(shared, cuts, strict=True)))
    names = len(pickle.dumps(list(by_digest.values())))
    merge_s, plan = time_work(lambda: merge_plans(described))
    message = pickle.dumps(plan)
    receive_s, plan = time_work(lambda: pickle.loads(message))
    items_s, _ = time_work(lambda: WritePlan(plan, ranks - 1).items)
    results = [write_result(plan, rank) for rank in range(ranks)]
    loads = [sum(item.nbytes for item in WritePlan(plan, rank).items) for rank in range(0, ranks, 7)]
    reported = len(pickle.dumps((results[-1], None)))
    state: dict[str, Any] = {"step": 1}
    build_s, content = time_work(lambda: writer.build_metadata(1, state, plan, results))
    encode_s, raw = time_work(lambda: encode_metadata(content))
    parse_s, content = time_work(lambda: parse_metadata(Path("step-00000001"), raw))
    elsewhere = dict(iter_shards(shapes, ranks // 3, TP // 2, ranks // 4 // replicas))
    reader_s, reader = time_work(lambda: Reader(Path("step-00000001"), content, elsewhere))
    return {
        "ranks": ranks,
        "replicas": replicas,
        "tensors": 4 * (len(shapes) + ranks),
        "groups": len(plan),
        "pieces": sum(len(group.pieces) * len(group.names) for group in plan),
        "describe_s": describe_s,
        "gathered_kib": round(gathered * ranks / 2**10, 1),
        "names_kib": round(names / 2**10, 1),
        "merge_s": merge_s,
        "plan_kib": round(len(message) / 2**10, 1),
        "receive_s": receive_s,
        "items_s": items_s,
        "fullest_to_mean": round(max(loads) / (sum(loads) / len(loads)), 4),
        "reported_kib": round(reported * ranks / 2**10, 1),
        "build_s": build_s,
        "encode_s": encode_s,
        "metadata_mib": round(len(raw) / 2**20, 2),
        "parse_s": parse_s,
        "reader_s": reader_s,
        "files_of_reader": len(reader.files),
    }


def write_result(plan: Any, rank: int) -> writer.WriteResult:
    """Return a rank's report of its files, which are not written."""
    files: dict[str, FileEntry] = {}
    numbers: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, items in enumerate(writer._split_into_files(WritePlan(plan, rank).items)):
        files[f"rank-{rank:05d}-{number:03d}.safetensors"] = FileEntry(bytes=2**40, blake3="0" * 64)
        for item in items:
            numbers[item.group, item.piece].append(number)
    return writer.WriteResult(files, {piece: run_lengths(indices) for piece, indices in numbers.items()})


if __name__ == "__main__":
    main()
