"""Warm-ups: positions are a function of the step, and shorter rows are what packing at that length gives."""

from typing import Any

import numpy as np
import pytest

from megatfm.data.dataset import PackedDataset
from megatfm.data.loader import DataLoader, split_rows
from megatfm.data.order import BatchSchedule, BatchStage, choose_interleave
from megatfm.data.sequences import PAD_DOCUMENT_ID
from megatfm.errors import UsageError

WARMUP = BatchSchedule(12, (BatchStage(3, 4, 4), BatchStage(2, 8, 2)))
N_STEPS = 9


@pytest.fixture
def rows(memory_corpus: Any, causal: Any) -> PackedDataset:
    return PackedDataset(memory_corpus([[5, 40, 9, 17]] * 7), causal, sequence_length=16, seed=3, streams=4)


def test_positions_are_a_function_of_the_step(rows: PackedDataset) -> None:
    assert [WARMUP.position(step) for step in range(8)] == [0, 4, 8, 12, 20, 28, 40, 52]
    assert [WARMUP.stage(step)[1:] for step in range(7)] == [(4, 4)] * 3 + [(8, 2)] * 2 + [(12, 1)] * 2
    assert WARMUP.batches == [4, 8, 12]
    tokens = 0
    with DataLoader(rows, global_batch=WARMUP, micro_batch=4) as loader:
        for step in range(N_STEPS):
            assert loader.position == WARMUP.position(step)
            next(loader)
            tokens += loader.step_tokens
            assert tokens == 16 * loader.position


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_step_has_its_length_and_nothing_is_lost(rows: PackedDataset, ranks: int) -> None:
    shares = []
    for rank in range(ranks):
        with DataLoader(rows, global_batch=WARMUP, micro_batch=1, data_rank=rank, data_ranks=ranks) as loader:
            shares.append([next(loader) for _ in range(N_STEPS)])
    keys: list[int] = []
    for step in range(N_STEPS):
        stage = WARMUP.stage(step)
        batches = [batch for share in shares for batch in share[step]]
        assert len(batches) == stage.global_batch
        assert all(
            batch["tokens"].shape == (stage.splits_per_row, 16 // stage.splits_per_row) for batch in batches
        )
        read = np.concatenate([batch["tokens"].reshape(-1) for batch in batches])
        first = WARMUP.position(step)
        expected = [rows.read_row(first + i)["tokens"] for i in range(stage.global_batch)]
        np.testing.assert_array_equal(read, np.concatenate(expected))
        keys += [key for batch in batches for key in batch["keys"].tolist()]
    assert len(set(keys)) == len(keys)
    assert min(keys) >= 0


def test_a_resume_within_the_warmup_goes_on(rows: PackedDataset) -> None:
    with DataLoader(rows, global_batch=WARMUP, micro_batch=4) as loader:
        full = [next(loader) for _ in range(N_STEPS)]
        assert loader.state_dict()["warmup"] == "[(3, 4, 4), (2, 8, 2)]"
    for step in (1, 3, 4, 6):
        start = {"position": WARMUP.position(step), "step": step}
        with DataLoader(rows, global_batch=WARMUP, micro_batch=4, **start) as loader:
            for one, other in zip(full[step:], loader, strict=False):
                np.testing.assert_equal(one, other)


@pytest.mark.parametrize("as_one_document", [False, True])
def test_cut_rows_are_those_of_packing_at_that_length(
    memory_corpus: Any, causal_type: Any, as_one_document: bool
) -> None:
    def row(length: int, position: int) -> dict[str, np.ndarray]:
        packed = PackedDataset(
            memory_corpus([[5, 40, 0, 9, 17, 3]]),
            causal_type(),
            sequence_length=length,
            seed=3,
            shuffle=False,
            attend_across_documents=as_one_document,
        )
        return packed.read_row(position)

    for position in range(5):
        full = {name: field[None] for name, field in row(16, position).items()}
        cut = split_rows(full, 4)
        for part in range(4):
            expected = row(4, 4 * position + part)
            if (cut["documents"][part] == PAD_DOCUMENT_ID).all():
                continue  # padding at the end of a block; packing at this length has no such row
            for name, field in cut.items():
                np.testing.assert_array_equal(
                    field[part], expected[name], err_msg=f"{name} {position} {part}"
                )


def test_whole_sequences_are_not_cut(memory_corpus: Any, causal_type: Any) -> None:
    class Whole(causal_type):  # type: ignore[misc]
        max_tokens = 15

    rows = PackedDataset(memory_corpus([[5, 9]]), Whole(), sequence_length=16, seed=0)
    with pytest.raises(UsageError, match=r"data\.rampup: this objective's sequences are whole"):
        DataLoader(rows, global_batch=WARMUP, micro_batch=4)
    with DataLoader(rows, global_batch=BatchSchedule(4, (BatchStage(2, 2),)), micro_batch=2) as loader:
        assert [len(next(loader)) for _ in range(4)] == [1, 1, 2, 2]


def test_a_batch_of_a_stage_that_does_not_divide_is_named(rows: PackedDataset) -> None:
    with pytest.raises(UsageError, match="global batch 4 is not a multiple of"):
        DataLoader(rows, global_batch=WARMUP, micro_batch=4, data_ranks=2)


@pytest.mark.parametrize(
    ("batch", "streams", "turn"),
    [(1, 64, 1), (16, 64, 1), (6, 66, 1), (96, 96, 1), (512, 256, 2), (4096, 256, 16), (1030, 206, 5)],
)
def test_streams_fit_the_batch(batch: int, streams: int, turn: int) -> None:
    assert choose_interleave(batch) == (streams, turn)
    assert choose_interleave(batch, 10) == (10, batch // 10 if batch % 10 == 0 else 1)
