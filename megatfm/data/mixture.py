"""Mixtures of several corpora, with weights that hold exactly in every block and may change during training."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from math import gcd
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from megatfm.corpus.byte_cache import ByteCache, count_bytes
from megatfm.data.dataset import SizedRowDataset, check_same_fields
from megatfm.data.order import interleave
from megatfm.data.sequences import Fields
from megatfm.errors import UsageError
from megatfm.rng import random_uint64, to_unit_interval

Ints = NDArray[np.int64]

MAX_POINTS = 2**31
"""Largest block × streams; products of two such numbers fit int64."""


class Phase(NamedTuple):
    """Source weights from a position on; the position is rounded up to a full turn of all streams."""

    position: int
    weights: Mapping[str, float]


class _Block(NamedTuple):
    """The slots of a stream in one block: a slot is one row's place."""

    sources: Ints
    """Source of each slot [block]."""
    before: Ints
    """Number of earlier slots of the same source in the block [block]."""


class _PhaseState(NamedTuple):
    first_turn: int
    """Turn in which the phase begins. In a turn, every stream has one row."""
    quotas: Ints
    """Slots of each source in a block [n_sources]."""
    consumed: Ints
    """Rows that each stream took from each source before the phase [streams, n_sources]."""


class Mixture:
    """An endless order of rows, each from one of several sources: a pure function of the position.

    Position p belongs to stream p mod `streams`. In each run of `block` rows of a stream, every source has its quota:
    weight · block, rounded by largest remainders. Across streams, the order is quasi-random: the rows of a block of all
    streams are points on a circle, visited in steps of about the golden ratio, and each source owns an arc. Any stretch
    of rows then has its share of each source up to a row or two (64 independent draws would be off by three). Each
    block begins at a random point.

    A stream of the mixture reads the same stream of each source, so reads stay local, and each source's rows are read
    in its own order, once per epoch. The rows that a stream has read before a position follow from the quotas, so no
    state is kept.

    Raises a UsageError if rows of the sources differ in length, or a weight is too small for the block.
    """

    def __init__(
        self,
        sources: Mapping[str, SizedRowDataset],
        phases: Sequence[Phase],
        *,
        seed: int,
        streams: int,
        turn: int = 1,
        block: int = 1024,
    ) -> None:
        """turn: consecutive rows per stream; the sources must have a turn of 1."""
        self.turn = turn
        self.sources = dict(sources)
        self.seed, self.streams, self.block = int(seed), streams, block
        self.phases = tuple(phases)
        self._rows = list(self.sources.values())
        self.row_tokens, self.can_split_rows = self._rows[0].row_tokens, self._rows[0].can_split_rows
        self._check_row_lengths()
        if not 0 < block * streams <= MAX_POINTS:
            raise UsageError(
                f"data.mixture_block_rows = {block}: with {streams} streams that is more than {MAX_POINTS:,} rows: "
                f"choose at most {MAX_POINTS // streams}"
            )
        self._step = _choose_golden_step(block, streams)
        self._blocks: ByteCache[tuple[int, int, int], _Block] = ByteCache(2**26, count_bytes)
        self._phase_states: list[_PhaseState] = []
        for phase in self.phases:
            self._add_phase(phase)

    @property
    def warnings(self) -> list[str]:
        """Notes for the log: warnings of the sources, and the effective weight of each source."""
        lines = [note for rows in self._rows for note in rows.warnings]
        for state in self._phase_states:
            shares = ", ".join(
                f"{name} {100 * quota / self.block:.2f} %"
                for name, quota in zip(self.sources, state.quotas.tolist(), strict=True)
            )
            lines.append(f"mixture from row {state.first_turn * self.streams:,} on: {shares}")
        return lines

    def order_config(self) -> dict[str, str | int | bool]:
        """Return the settings that determine the order, for a checkpoint to compare."""
        rows = self._rows[0].order_config()
        of_sources = {
            f"{key} of {name}": source.order_config()[key]
            for name, source in self.sources.items()
            for key in ("fingerprint", "rows_per_epoch", "quarantine")
            if key in source.order_config()
        }
        shared = {key: rows[key] for key in rows if key not in ("fingerprint", "rows_per_epoch", "quarantine", "seed")}
        phases = json.dumps([[phase.position, dict(phase.weights)] for phase in self.phases])
        return (
            shared
            | of_sources
            | {"seed": self.seed, "mixture": phases, "mixture_block": self.block, "turn": self.turn}
            | {"mixture_step": self._step}
        )

    def epoch(self, position: int) -> str:
        consumed = self.count_consumed_rows(position)
        return ", ".join(f"{name} {n / len(self.sources[name]):.3f}" for name, n in consumed.items())

    def find_source(self, position: int) -> tuple[str, int]:
        """Return the source's name of the row at a global position, and the row's position in that source's order."""
        ((phase, stream, block, slot),) = self._find_slots(np.array([position]))
        state, slots = self._phase_states[phase], self._get_slots(phase, stream, block)
        source = int(slots.sources[slot])
        # Rows of this source that the stream took before: in earlier phases, full blocks, and this block.
        n_before = state.consumed[stream, source] + block * state.quotas[source] + slots.before[slot]
        return list(self.sources)[source], int(n_before) * self.streams + stream

    def find_source_indices(self, positions: Ints) -> Ints:
        """Return the index in `sources` of the source of the row at each global position [n]."""
        slots = self._find_slots(positions)
        return np.array([self._get_slots(*address).sources[slot] for *address, slot in slots], np.int64)

    def _find_slots(self, positions: Ints) -> list[tuple[int, int, int, int]]:
        """Return phase, stream, block and slot of the row at each global position [n]."""
        turns, streams = np.divmod(interleave(positions, self.streams, self.turn), self.streams)
        phases = self._find_phases(turns)
        first_turns = np.array([state.first_turn for state in self._phase_states])
        blocks, slots = np.divmod(turns - first_turns[phases], self.block)
        return list(zip(phases.tolist(), streams.tolist(), blocks.tolist(), slots.tolist(), strict=True))

    def read_row(self, position: int) -> Fields:
        """Return the row at a global position."""
        return {name: values[0] for name, values in self.read_rows([position]).items()}

    def read_rows(self, positions: Sequence[int | None]) -> Fields:
        """Return the rows at global positions (see `RowDataset.read_rows`)."""
        padding = next(iter(self.sources)), None
        addresses = [padding if position is None else self.find_source(position) for position in positions]
        batch: Fields = {}
        for name, source in self.sources.items():
            indices = [index for index, (source_name, _) in enumerate(addresses) if source_name == name]
            fields = source.read_rows([addresses[index][1] for index in indices]) if indices else {}
            if len(indices) == len(addresses):
                return fields
            if not indices:
                continue
            if not batch:
                batch = {
                    field: np.empty((len(addresses), *values.shape[1:]), values.dtype)
                    for field, values in fields.items()
                }
            check_same_fields(f"data.mixture.{name}", fields, batch)
            for field, values in fields.items():
                batch[field][indices] = values
        return batch

    def _check_row_lengths(self) -> None:
        """Raise a UsageError for sources whose rows have other lengths; fields are compared when rows are joined."""
        for name, source in self.sources.items():
            if (source.row_tokens, source.can_split_rows) != (self.row_tokens, self.can_split_rows):
                first = next(iter(self.sources))
                raise UsageError(
                    f"data.mixture.{name}: its rows have {source.row_tokens} tokens"
                    f"{'' if source.can_split_rows else ', whole'}, those of {first} {self.row_tokens}"
                    f"{'' if self.can_split_rows else ', whole'}: give all sources the same objective and row lengths"
                )

    def count_consumed_rows(self, position: int) -> dict[str, int]:
        """Count the rows of each source before a position; the last round of streams may be incomplete."""
        turns, n_streams_ahead = divmod(int(position), self.streams)
        phase, counts = int(self._find_phases(turns)), np.zeros(len(self._rows), np.int64)
        for stream in range(self.streams):
            counts += self._count_consumed(phase, stream, turns + (stream < n_streams_ahead))
        return dict(zip(self.sources, counts.tolist(), strict=True))

    def _count_consumed(self, phase: int, stream: int, turn: int) -> Ints:
        """Count the rows [n_sources] that a stream took before a turn of a phase (or the first turn after it)."""
        state = self._phase_states[phase]
        blocks, slots = divmod(turn - state.first_turn, self.block)
        begun_block = self._get_slots(phase, stream, blocks).sources[:slots]
        in_begun_block = np.bincount(begun_block, minlength=len(self._rows))
        return state.consumed[stream] + blocks * state.quotas + in_begun_block

    def _find_phases(self, turns: int | Ints) -> Ints:
        """Return the index of the phase of each turn."""
        first_turns = [state.first_turn for state in self._phase_states]
        return np.asarray(np.searchsorted(first_turns, turns, side="right") - 1)

    def _get_slots(self, phase: int, stream: int, block: int) -> _Block:
        return self._blocks.get((phase, stream, block), partial(self._assign_slots, phase, stream, block))

    def _assign_slots(self, phase: int, stream: int, block: int) -> _Block:
        """Visit the stream's points on the circle; the source on whose arc a point lies has the slot."""
        quotas, n_points = self._phase_states[phase].quotas, self.block * self.streams
        (start,) = to_unit_interval(random_uint64(1, self.seed, "mixture", phase, block)) * n_points
        visits = np.arange(self.block) * self.streams + stream
        points = (int(start) + visits * self._step) % n_points
        arc_ends = np.cumsum(quotas) * self.streams
        sources = np.searchsorted(arc_ends, points, side="right")
        n_before = np.empty(self.block, np.int64)
        n_before[np.argsort(sources, kind="stable")] = _number_occurrences(quotas)
        return _Block(sources, n_before)

    def _add_phase(self, phase: Phase) -> None:
        first_turn = -(-phase.position // self.streams)
        consumed = np.zeros((self.streams, len(self._rows)), np.int64)
        if previous := len(self._phase_states):
            for stream in range(self.streams):
                consumed[stream] = self._count_consumed(previous - 1, stream, first_turn)
        quotas = compute_quotas(phase.weights, list(self.sources), self.block)
        self._phase_states.append(_PhaseState(first_turn, quotas, consumed))


def compute_quotas(weights: Mapping[str, float], names: Sequence[str], block: int) -> Ints:
    """Divide `block` slots by weight [n_sources]: round down, and give the remaining ones to the largest remainders."""
    exact_quotas = np.array([weights[name] for name in names], np.float64)
    if not exact_quotas.sum() > 0:
        raise UsageError("data.mixture: all weights are 0: give at least one source a weight")
    exact_quotas *= block / exact_quotas.sum()
    quotas = np.floor(exact_quotas).astype(np.int64)
    by_remainder = np.argsort(quotas - exact_quotas, kind="stable")
    quotas[by_remainder[: block - int(quotas.sum())]] += 1
    for name, quota, share in zip(names, quotas.tolist(), (exact_quotas / block).tolist(), strict=True):
        if share > 0 and not quota:
            raise UsageError(
                f"data.mixture.{name}: its share of {share:.2g} comes to no row in a block of {block}: choose a larger "
                f"weight, or data.mixture_block_rows = {int(np.ceil(1 / share))}"
            )
    return quotas


def _choose_golden_step(block: int, streams: int) -> int:
    """Return a step that meets all block·streams points of a circle, evenly at any time, as do the steps of one stream.

    Both are the more even, the smaller the terms of the continued fraction of step and circle are; those of the golden
    ratio are 1 (Niederreiter 1978, "Quasi-Monte Carlo methods and pseudo-random numbers", section 3).
    """
    points = block * streams
    golden = round(points * (5**0.5 - 1) / 2)
    candidates = (step for offset in range(points) for step in (golden - offset, golden + offset))
    coprime = islice((step for step in candidates if 0 < step < points and gcd(step, points) == 1), 256)
    return min(
        coprime,
        key=lambda step: max(
            *_expand_continued_fraction(step, points), *_expand_continued_fraction(step % block, block)
        ),
        default=1,
    )


def _expand_continued_fraction(numerator: int, denominator: int) -> list[int]:
    """Return the partial quotients of the continued fraction of a number between 0 and 1."""
    terms = []
    while numerator:
        terms.append(denominator // numerator)
        numerator, denominator = denominator % numerator, numerator
    return terms or [0]


def changes_past_rows(saved: object, current: object, position: int) -> bool:
    """Return whether two mixtures ("mixture" of `order_config`) have other weights before a position; False unless both
    are mixtures. Sources whose weight is 0 don't count."""

    def list_past_weights(mixture: str) -> list[Any]:
        phases = json.loads(mixture)
        return [[begin, [item for item in weights.items() if item[1]]] for begin, weights in phases if begin < position]

    if not (isinstance(saved, str) and isinstance(current, str)):
        return False
    return list_past_weights(saved) != list_past_weights(current)


def list_sources(rows: SizedRowDataset | Mixture) -> Mapping[str, SizedRowDataset]:
    """Return the sources of a mixture by name; a single corpus as the source ""."""
    return rows.sources if isinstance(rows, Mixture) else {"": rows}


class EpochCounter:
    """Tells when a corpus, or a source of a mixture, begins to be read again.

    position: number of rows that were read before.
    """

    def __init__(self, rows: SizedRowDataset | Mixture, position: int) -> None:
        self._rows = rows
        self._lengths = {name: len(source) for name, source in list_sources(rows).items()}
        self._epochs: dict[str, int] = {}
        self._next_check = position
        self.advance(position)

    def advance(self, position: int) -> dict[str, int]:
        """Return the sources that have begun another epoch since the last call → its number, from 2 on.

        position: number of rows that are read now. A single corpus is the source "".
        """
        if position < self._next_check:
            return {}
        counts = self._rows.count_consumed_rows(position) if isinstance(self._rows, Mixture) else {"": position}
        epochs = {name: max(0, count - 1) // self._lengths[name] + 1 for name, count in counts.items()}
        begun = {name: epoch for name, epoch in epochs.items() if epoch > self._epochs.get(name, epoch)}
        self._epochs = epochs
        # Counting takes a while in a mixture. No source begins an epoch before as many rows as it has left are read.
        self._next_check = position + min(
            epochs[name] * length + 1 - counts[name] for name, length in self._lengths.items()
        )
        return begun


def make_source_seed(seed: int, name: str) -> int:
    """Return a seed for each source, so that equal sample numbers of two sources don't draw alike."""
    return int.from_bytes(blake3(f"{seed} {name}".encode()).digest()[:7], "little")


def _number_occurrences(quotas: Ints) -> Ints:
    """Number the slots of each source 0, 1, … [block]."""
    return np.arange(int(quotas.sum())) - np.repeat(np.cumsum(quotas) - quotas, quotas)
