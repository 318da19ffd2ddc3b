"""Golden files: losses of a small model on keyed text and images, names and shapes of parameters."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatfm import rng
from megatfm.config import Config, load_config
from megatfm.data.packed_rows import pack_in_memory
from megatfm.data.sequences import PackingConfig
from megatfm.layers.moe.moe import MoE
from megatfm.objectives import Objective, SpecialTokens, build_objective
from megatfm.optim.lr_schedules import compute_schedule_factor
from megatfm.parallel import distributed
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine
from tests.support.images import encode_image
from tests.support.workers import Workers

FOLDER = Path(__file__).parents[1] / "golden"
Curves = dict[str, list[float]]
"""Term → its value in each step."""
TOLERANCE = 1e-8
"""Relative, in float64: a thousand times the spread over instruction sets and threads."""
RATE_EFFECT = 1e-3
"""Relative: another learning rate moves every term by more, somewhere in the first RATE_STEPS."""
RATE_STEPS = {"electra-small": 20, "quickstart-moe": 8}
"""Others than 4: what ELECTRA's generator replaces, and how experts are balanced, change slowly."""
FLOAT32_STEPS = 4
"""Steps in which float32's own rounding has not grown yet."""

RESERVED, TOPICS, WORDS = 24, 4, 16
"""Ids below RESERVED are no text; each topic has a vocabulary of WORDS of its own."""
VOCABULARY = RESERVED + TOPICS * WORDS
SPECIAL = SpecialTokens(
    bos=1, eos=2, pad=0, vocab_size=VOCABULARY, mask=3, cls=4, sep=5, sentinels=range(RESERVED - 1, 7, -1),
    word_starts=np.ones(VOCABULARY, bool),
)  # fmt: skip


@cache
def draw_next_words() -> NDArray[np.int64]:
    """The word that follows each word."""
    return rng.permutation(WORDS, "golden", "follows")


def make_document(number: int, length: int) -> NDArray[np.int64]:
    """A text on one topic, in which each token follows from the one before, seven times in eight."""
    follows = draw_next_words()
    noise = rng.random_uint64(length + 1, "golden", "document", number)
    words = (noise[1:] % np.uint64(WORDS)).astype(np.int64)
    expected = noise[1:] >> np.uint64(61) != 0
    for place in range(1, length):
        if expected[place]:
            words[place] = follows[words[place - 1]]
    return RESERVED + int(noise[0] % np.uint64(TOPICS)) * WORDS + words


def make_batch(config: Config, objective: Objective, step: int) -> dict[str, torch.Tensor]:
    """A global batch: packed rows of documents that no other step has, or of an image each."""
    lengths = tuple(n for n in (config.data.sequence_length, config.data.target_length) if n)
    rows: list[dict[str, NDArray[Any]]] = []
    first = step * 10_000
    for number in range(config.train.global_batch):
        start = first + 10 * number
        if objective.needs_files:
            how = PackingConfig(objective, lengths[: len(objective.field_prefixes)], seed=0)
            files = make_image_files(start)
            caption = make_caption(int(files["cls"]), start) if objective.reads_text else np.zeros(0, np.uint16)
            rows.append(pack_in_memory([caption], how, first=start, members=[files]).build_row(0))
            continue
        documents = [make_document(start + i, lengths[0] // 2 - 4) for i in range(4)]
        across = config.data.attend_across_documents
        how = PackingConfig(objective, lengths[: len(objective.field_prefixes)], seed=0, attend_across_documents=across)
        packed = pack_in_memory(documents, how, first=start)
        rows.append(packed.build_row(0))
    fields = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
    positions = step * config.train.global_batch + np.arange(config.train.global_batch)
    return fields | {"keys": torch.from_numpy(rng.row_keys(0, positions))}


def train_curves(
    values: dict[str, Any], lr_factor: float = 1.0, steps: int | None = None, precision: str = "fp64"
) -> Curves:
    """The whole loss, and each of its terms, step by step; of ELECTRA also the share of tokens that were replaced, of a
    mixture of experts the load of the busiest one by the mean.

    values: a config, dumped. steps: only the first ones. Runs inside a process group.
    """
    config = Config.model_validate(values)
    engine: Any = build_engine(config, build_mesh(config.parallel, 1, "cpu"), torch.device("cpu"), precision)
    lengths = tuple(n for n in (config.data.sequence_length, config.data.target_length) if n)
    objective = build_objective(config.objective, config.model, SPECIAL, lengths, config.data.images)
    mixtures = [module for module in engine.model.modules() if isinstance(module, MoE)]
    actual: Curves = {}
    if config.model.family == "electra":
        replaced = actual.setdefault("replaced", [])
        engine.model.discriminator.register_forward_pre_hook(
            lambda module, args, fields: replaced.append(compute_replaced_share(fields["replaced"])), with_kwargs=True
        )
    batches = _select_batches(json.dumps(values, default=str))
    for step in range(1, 1 + (steps or config.train.steps)):
        if step not in batches:
            batches[step] = make_batch(config, objective, step)
        stats = engine.forward_backward([dict(batches[step])], objective)
        for term, value in {"loss": stats.loss, **stats.terms}.items():
            actual.setdefault(term, []).append(value)
        if mixtures:
            loads = [mixture.observed["load"].double() for mixture in mixtures]
            actual.setdefault("busiest", []).append(max(float(load.max() / load.mean()) for load in loads))
        rate = config.optimizer.lr * lr_factor * compute_schedule_factor(config.lr_schedule, step, config.train.steps)
        engine.step(rate, config.optimizer.max_grad_norm)
    return actual


@cache
def _select_batches(values: str) -> dict[int, dict[str, torch.Tensor]]:
    """Step → batch of a config: runs at another rate or in another precision have the same batches."""
    return {}


def compute_replaced_share(replaced: torch.Tensor) -> float:
    """Share of replaced tokens among those that count."""
    return float((replaced == 1).sum() / (replaced >= 0).sum())


def get_curve_file(preset: str) -> Path:
    """File of a preset's golden curve."""
    return FOLDER / f"curve-{preset}.json"


def read_golden_curves(preset: str) -> Curves:
    """The golden curve of a preset."""
    parsed: Curves = json.loads(get_curve_file(preset).read_text())
    return parsed


RUNS: dict[tuple[str, int], Curves] = {}


def compute_curves(workers: Workers, config: dict[str, Any], steps: int) -> Curves:
    """Its curves of so many steps, computed once in a process."""
    key = json.dumps(config, default=str), steps
    if key not in RUNS:
        (RUNS[key],) = workers.run(train_curves, 1, config, 1.0, steps, timeout=500)
    return RUNS[key]


def assert_golden(preset: str, actual: Curves, steps: int) -> None:
    """Assert that curves begin with so many of the golden steps."""
    assert actual.keys() == read_golden_curves(preset).keys()
    for term, values in read_golden_curves(preset).items():
        assert len(values) >= steps
        assert actual[term][:steps] == pytest.approx(values[:steps], rel=TOLERANCE), term


def assert_rate_shows(workers: Workers, preset: str, config: dict[str, Any]) -> None:
    """Assert that a learning rate ten per cent higher soon shows in every term of the loss."""
    steps = RATE_STEPS.get(preset, 4)
    (other,) = workers.run(train_curves, 1, config, 1.1, steps, timeout=500)
    for term, values in read_golden_curves(preset).items():
        if term != "busiest":  # a load of experts is a count of tokens
            assert other[term] != pytest.approx(values[:steps], rel=RATE_EFFECT), term


def assert_float32_agrees(workers: Workers, preset: str, config: dict[str, Any]) -> None:
    """Assert that the first steps in float32, as users train, are the golden ones."""
    (result,) = workers.run(train_curves, 1, config, 1.0, FLOAT32_STEPS, "fp32", timeout=500)
    for term, values in read_golden_curves(preset).items():
        assert result[term] == pytest.approx(values[:FLOAT32_STEPS], rel=1e-5), term


def write_golden_curves(models: dict[str, tuple[dict[str, Any], int]]) -> None:
    """Accept a change: preset → its config, and how many steps are golden."""
    with distributed.distributed_session(device="cpu"):
        for preset, (config, steps) in models.items():
            actual = train_curves(config, steps=steps)
            get_curve_file(preset).write_text(json.dumps(actual, indent=1) + "\n")
            for term, values in actual.items():
                print(preset, term, *(f"{value:.3f}" for value in values[::10]), f"{values[-1]:.3f}")


MOE_PRESET, MOE_STEPS, MOE_GOLDEN_STEPS = "quickstart-moe", 60, 24
SMALL_MOE = {
    "model.vocab_size": VOCABULARY, "model.d_model": 32, "model.n_layers": 2, "model.attention.n_heads": 2,
    "model.ffn.d_ff": 32, "data.sequence_length": 32, "optimizer.lr": 1e-2, "lr_schedule.warmup_steps": 5,
    "train.steps": MOE_STEPS, "train.global_batch": 32,
}  # fmt: skip
MOE_BIAS = f"{MOE_PRESET}-deepseek-v3"
MOE_ROUTERS = {MOE_PRESET: {}, MOE_BIAS: {"model.ffn.router": '{name = "deepseek_v3", bias_update_rate = 0.01}'}}


def preset_config(preset: str, changes: dict[str, Any]) -> dict[str, Any]:
    """A preset, made small."""
    return load_config(preset, [f"{key}={value}" for key, value in changes.items()]).model_dump()


def moe_curve_config(name: str) -> dict[str, Any]:
    """The preset of experts, made small, with one of MOE_ROUTERS."""
    return preset_config(MOE_PRESET, SMALL_MOE | MOE_ROUTERS[name])


CLASSES, SIDE = 10, 8


def make_image_files(number: int) -> dict[str, bytes]:
    """A grey image of 8 × 8 pixels as PNG, and its class. Half of each pixel is the class's pattern, half noise."""
    noise = rng.random_uint64(1 + SIDE**2, "golden", "image", number)
    label = int(noise[0] % np.uint64(CLASSES))
    pattern = rng.random_uint64(SIDE**2, "golden", "pattern", label) % np.uint64(128)
    pixels = (pattern + noise[1:] % np.uint64(128)).astype(np.uint8).reshape(SIDE, SIDE)
    return {"png": encode_image(pixels), "cls": b"%d" % label}


def make_caption(label: int, number: int) -> NDArray[np.int64]:
    """The word of an image's class among up to four other words."""
    noise = rng.random_uint64(6, "golden", "caption", number)
    words = CLASSES + (noise[2:] % np.uint64(WORDS)).astype(np.int64)
    words = words[: int(noise[0] % np.uint64(5))]
    return RESERVED + np.insert(words, int(noise[1] % np.uint64(len(words) + 1)), label)
