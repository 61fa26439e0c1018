"""Batches that know nothing of the layout.

Sample k of a run is the same whatever the layout, the batch size or where the run was stopped: only the seed and k
decide it. So the position in the data is one number, the count of samples consumed, and every rank can make the whole
global batch and cut its own rows (`crosscut.parallel.batch.local_batch`).

Within an epoch no sample comes twice and none is left out; each epoch has its own order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from crosscut.train.corpus import Corpus

IGNORE = -100  # a label that is no token of the loss: fills up the last validation batch


def generator(*key: object) -> torch.Generator:
    """A CPU generator keyed by `key`, by a digest: the same in every process, unlike Python's hash()."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


class Data(Protocol):
    """What the loop asks for. `tokens_per_sample` is 1 for data that is no text."""

    tokens_per_sample: int

    def batch(self, position: int, count: int) -> tuple[Tensor, Tensor | None]:
        """Samples `position` to `position + count` of the run: inputs (count, ...) and labels (count, ...) or None."""

    def validation(self, num_batches: int, count: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """At most `num_batches` batches of `count` samples, always the same ones."""


class TextData:
    """Byte sequences: inputs (count, seq_len) int64 and the byte after each as labels.

    Training sample i covers bytes [i * seq_len, (i + 1) * seq_len] of the training text. Raises ValueError if a side is
    shorter than one sequence.
    """

    def __init__(self, corpus: Corpus, seq_len: int, seed: int) -> None:
        corpus.require(seq_len)
        self.seq_len, self.seed = seq_len, seed
        self.tokens_per_sample = seq_len
        self.train = _as_tensor(corpus.read("train"))
        self.val = _as_tensor(corpus.read("val"))
        self.num_samples = (self.train.numel() - 1) // seq_len
        self.num_val_samples = (self.val.numel() - 1) // seq_len
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def order(self, position: int, count: int) -> Tensor:
        """Which training samples come at `position` to `position + count`; (count,) int64."""
        parts = []
        while count:
            epoch, start = divmod(position, self.num_samples)
            if epoch != self._epoch:
                shuffle = generator(self.seed, "epoch", epoch)
                self._epoch, self._order = epoch, torch.randperm(self.num_samples, generator=shuffle)
            parts.append(self._order[start : start + count])
            position, count = position + len(parts[-1]), count - len(parts[-1])
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def batch(self, position: int, count: int) -> tuple[Tensor, Tensor]:
        """Samples `position` to `position + count` of the run, over as many epochs as that takes."""
        return self._cut(self.train, self.order(position, count))

    def validation(self, num_batches: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """`num_batches * count` sequences spread evenly over the validation text, or all where it has fewer.

        Which they are does not depend on how they are cut into batches; rows beyond the last are labelled IGNORE.
        """
        chosen = self.validation_order(num_batches * count)
        for batch in chosen.split(count):
            inputs, labels = self._cut(self.val, batch)
            if missing := count - len(batch):
                inputs = torch.cat((inputs, inputs.new_zeros(missing, self.seq_len)))
                labels = torch.cat((labels, labels.new_full((missing, self.seq_len), IGNORE)))
            yield inputs, labels

    def validation_order(self, wanted: int) -> Tensor:
        """Which validation sequences `wanted` of them are; (min(wanted, all),) int64."""
        total = min(wanted, self.num_val_samples)
        return torch.arange(total) * self.num_val_samples // max(total, 1)

    def baselines(self, num_sequences: int) -> dict[str, float]:
        """Validation loss, in nats a byte, of counting bytes and of counting pairs of bytes in the training text.

        On exactly the labels that `validation` gives for that many sequences. A pair never seen falls back on the
        counts of its second byte, a byte never seen on 1/256 (one count's weight each).
        """
        counts = torch.bincount(self.train, minlength=256).double()
        unigram = (counts + 1 / 256) / (counts.sum() + 1)
        pairs = (
            torch.bincount(self.train[:-1].long() * 256 + self.train[1:], minlength=256 * 256).double().view(256, 256)
        )
        bigram = (pairs + unigram) / (pairs.sum(1, keepdim=True) + 1)
        inputs, labels = self._cut(self.val, self.validation_order(num_sequences))
        return {
            "unigram": float(-unigram[labels].log().mean()),
            "bigram": float(-bigram[inputs, labels].log().mean()),
        }

    def _cut(self, text: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        windows = text[samples[:, None] * self.seq_len + torch.arange(self.seq_len + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class FloatData:
    """Random rows (count, dim) fp32 for the deep MLP, whose loss needs no labels. Row k depends on (seed, k) alone."""

    tokens_per_sample = 1

    def __init__(self, dim: int, seed: int) -> None:
        self.dim, self.seed = dim, seed

    def _rows(self, side: str, start: int, count: int) -> Tensor:
        return torch.stack(
            [torch.randn(self.dim, generator=generator(self.seed, side, start + i)) for i in range(count)]
        )

    def batch(self, position: int, count: int) -> tuple[Tensor, None]:
        """Rows `position` to `position + count` of the run."""
        return self._rows("train", position, count), None

    def validation(self, num_batches: int, count: int) -> Iterator[tuple[Tensor, None]]:
        """Rows that training never sees."""
        for i in range(num_batches):
            yield self._rows("val", i * count, count), None


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
