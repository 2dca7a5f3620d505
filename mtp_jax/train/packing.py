"""Samples packed into rows of one length: the trainer's batches, each a function of seed and step."""

import dataclasses

import numpy as np

from mtp_jax.errors import InvalidValueError
from mtp_jax.train.corpus import Corpus


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Rows of whole samples. All arrays are [B, S]; S here is the tokens of a row."""

    tokens: np.ndarray  # int32; 0 in padding
    segments: np.ndarray  # int32: 1, 2, ... for the samples of a row, 0 in padding
    positions: np.ndarray  # int32: from 0 on in each segment
    loss_mask: np.ndarray  # bool: the target itself wrote this token
    greedy: np.ndarray  # bool: its sample was written at temperature 0

    @property
    def num_tokens(self) -> int:
        """Tokens that are no padding."""
        return int(np.count_nonzero(self.segments))


class Packer:
    """Packs a corpus once, and hands out its rows in another order each epoch.

    Samples are whole; what is longer than a row is cut at the row's end. Segments of a row do not see each
    other, so which samples share one does not matter, and the packing can be the same in all epochs.

    Args:
      rows: B, of a batch.
      length: tokens of a row.
      seed: of the order.

    Raises:
      InvalidValueError: no sample has a completion within `length` tokens.
    """

    def __init__(self, corpus: Corpus, rows: int, length: int, seed: int, *, whole: bool = False):
        for name, value in (("rows", rows), ("--sequence-length", length)):
            if value < 1:
                raise InvalidValueError(name, value, "an integer of at least 1")
        self._corpus, self.rows, self.length, self._seed, self._whole = corpus, rows, length, seed, whole
        usable = np.flatnonzero((corpus.prompt_lengths < length) & (corpus.prompt_lengths < corpus.lengths))
        if not len(usable):
            legal = "rows in which at least one prompt and a token after it have room"
            raise InvalidValueError("--sequence-length", length, legal)
        usable = np.random.default_rng([seed, 0]).permutation(usable)
        sizes = np.minimum(corpus.lengths[usable], length)
        packed, self._starts = _pack(sizes, length)
        self._samples, self._sizes = usable[packed], sizes[packed]
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    @property
    def num_rows(self) -> int:
        """Rows that hold the corpus once."""
        return len(self._starts) - 1

    @property
    def steps_per_epoch(self) -> int:
        """Batches that hold the corpus once; the rows that fill no batch wait for another epoch.

        Where epochs are `whole`, these are a last batch with empty rows.
        """
        return max(1, -(-self.num_rows // self.rows) if self._whole else self.num_rows // self.rows)

    @property
    def fill(self) -> float:
        """Share of the rows that is no padding."""
        return float(self._sizes.sum() / (self.num_rows * self.length))

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0 over all epochs."""
        epoch, within = divmod(step, self.steps_per_epoch)
        chosen = self._epoch(epoch)[within * self.rows : (within + 1) * self.rows]
        first, last = self._starts[chosen], self._starts[chosen + 1]
        counts = last - first  # samples of each row
        row = np.repeat(np.arange(len(chosen)), counts)
        number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        which = np.repeat(first, counts) + number
        sizes, samples = self._sizes[which], self._samples[which]
        ends = np.cumsum(sizes)  # of each sample, over all rows
        row_start = np.concatenate([[0], ends])[np.cumsum(counts) - counts]
        position = np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)
        # Where each token goes in the flat batch, and where it comes from.
        to = np.arange(ends[-1]) + np.repeat(row * self.length - row_start[row], sizes)
        source = np.repeat(self._corpus.offsets[samples], sizes) + position
        written = position >= np.repeat(self._corpus.prompt_lengths[samples], sizes)
        return Batch(
            tokens=self._placed(to, self._corpus.tokens[source], np.int32),
            segments=self._placed(to, np.repeat(number + 1, sizes), np.int32),
            positions=self._placed(to, position, np.int32),
            loss_mask=self._placed(to, written, np.bool_),
            greedy=self._placed(to, np.repeat(self._corpus.temperatures[samples] == 0, sizes), np.bool_),
        )

    def _placed(self, to: np.ndarray, values: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
        """[B, S] with `values` at the flat places `to` and zeros elsewhere."""
        flat = np.zeros(self.rows * self.length, dtype)
        flat[to] = values
        return flat.reshape(self.rows, self.length)

    def _epoch(self, epoch: int) -> np.ndarray:
        """The rows in the order of an epoch; that of the last one is kept."""
        if self._order[0] != epoch:
            rng = np.random.default_rng([self._seed, 1, epoch])
            self._order = (epoch, rng.permutation(self.num_rows))
        return self._order[1]


def _pack(sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Fills row after row, always with the largest sample that still fits.

    Args:
      sizes: tokens of each sample, at most `length`.

    Returns:
      Samples in the order of the rows, and where each row begins among them (the last is the end).
    """
    by_size: list[list[int]] = [[] for _ in range(length + 1)]
    for index, size in enumerate(sizes.tolist()):
        by_size[size].append(index)
    # nearest[s]: the largest size up to s of which samples may be left; found again by halving the path.
    nearest = list(range(length + 1))
    packed: list[int] = []
    starts = []
    while (largest := _largest(nearest, by_size, length)) > 0:
        starts.append(len(packed))
        room = length
        while largest > 0:
            packed.append(by_size[largest].pop())
            room -= largest
            largest = _largest(nearest, by_size, room)
    return np.array(packed, np.int64), np.array([*starts, len(packed)], np.int64)


def _largest(nearest: list[int], by_size: list[list[int]], room: int) -> int:
    """The largest size up to `room` of which a sample is left; 0 for none."""
    while room > 0 and not by_size[room]:
        if nearest[room] == room:
            nearest[room] = room - 1
        nearest[room] = nearest[nearest[room]]
        room = nearest[room]
    return room
