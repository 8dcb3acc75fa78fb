"""Training data: JSON lines or plain text in, batches of token ids out, in an order of its own.

A line is ``{"input": ..., "target": ...}``, of which the target alone is learnt, or ``{"text":
...}``. Texts are packed: joined, each ended, and cut into windows of the context. A pair's target
follows its input as ``eecore.generate`` would see it: the input is encoded as a prompt is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eecore.errors import TrainingError
from eecore.lab.training.early_exit_loss import Targets
from eecore.models import Tokenizer
from eecore.textfiles import JsonLine, has_json_lines, json_lines, read_text
from eecore.values import is_whole

__all__ = ["Batch", "BatchOrder", "TokenData", "collate", "read_data"]

# How many batches' worth of sequences are sorted by length together.
BUCKET_BATCHES = 64


@dataclass(frozen=True, eq=False)
class TokenData:
    """Sequences of token ids; those after the prompt are learnt.

    Attributes:
        tokens: int32 [num_tokens], all sequences'; neighbouring windows of a text share a token.
        starts: int64 [n], where each sequence starts in ``tokens``.
        ends: int64 [n], where it ends.
        prompt_lens: int64 [n], how many of its tokens are given, 1 or more; a decoder with an
            encoder gets these in the encoder.
        is_text: whether these are windows of texts, which an encoder has no use for.
    """

    tokens: Tensor
    starts: Tensor
    ends: Tensor
    prompt_lens: Tensor
    is_text: bool = False

    def __len__(self) -> int:
        return len(self.starts)

    def sequence(self, index: int) -> tuple[Tensor, int]:
        """The token ids of one sequence, and how many of them are the prompt."""
        start, end = int(self.starts[index]), int(self.ends[index])
        return self.tokens[start:end].long(), int(self.prompt_lens[index])

    @property
    def lengths(self) -> Tensor:
        """int64 [n]"""
        return self.ends - self.starts

    def digest(self) -> str:
        """A hash of everything: the same data gives the same one."""
        digest = hashlib.sha256()
        for tensor in (self.tokens, self.starts, self.ends, self.prompt_lens):
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences side by side.

    Attributes:
        inputs: what :meth:`ExitModel.states` takes, each [batch, length].
        targets: the positions that are learnt.
        num_tokens: tokens read, padding aside.
    """

    inputs: dict[str, Tensor]
    targets: Targets
    num_tokens: int

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        if device.type == "cpu":
            return self
        inputs = {name: tensor.to(device) for name, tensor in self.inputs.items()}
        targets = Targets(self.targets.positions.to(device), self.targets.tokens.to(device))
        return Batch(inputs, targets, self.num_tokens)


# Reading


def read_data(
    paths: Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    context: int,
    eos_token_id: int,
    truncate_inputs: bool = False,
) -> TokenData:
    """Read files of pairs, or files of texts; ``.jsonl`` and ``.ndjson`` are JSON lines.

    Args:
        paths: read in order. A file that is not JSON lines is one text.
        tokenizer: the model's.
        context: most tokens of a sequence, its end included.
        eos_token_id: ends each target and each text.
        truncate_inputs: cut an input, at its end, that leaves no room for its target; refused
            otherwise.

    Raises:
        TrainingError: names the file and the line that is malformed or too long.
    """
    if not is_whole(context, 2):
        raise TrainingError(f"context: expected 2 tokens or more, got {context!r}")
    pairs: list[tuple[list[int], list[int]]] = []
    text: list[int] = []
    for path in map(Path, paths):
        for where, record in _records(path):
            if isinstance(record, str):
                text += [*tokenizer.encode(record), eos_token_id]
            else:
                given = tokenizer.encode(record[0])
                learnt = [*tokenizer.encode(record[1], add_special_tokens=False), eos_token_id]
                pairs.append(_fitted(given, learnt, context, truncate_inputs, where))
            if pairs and text:
                raise TrainingError(f"{where}: expected pairs alone or texts alone, got both")
    names = ", ".join(map(str, paths))
    if pairs:
        return from_pairs(pairs)
    if len(text) < 2:
        raise TrainingError(f"{names}: expected some text or pairs, got none")
    return from_text(text, context)


def from_pairs(pairs: Iterable[tuple[list[int], list[int]]]) -> TokenData:
    """Each pair a sequence: the given tokens, then the learnt ones."""
    tokens: list[int] = []
    starts, ends, prompt_lens = [], [], []
    for given, learnt in pairs:
        starts.append(len(tokens))
        tokens += given
        tokens += learnt
        ends.append(len(tokens))
        prompt_lens.append(len(given))
    return TokenData(
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(starts),
        torch.tensor(ends),
        torch.tensor(prompt_lens),
    )


def from_text(tokens: Sequence[int], context: int) -> TokenData:
    """Windows of ``context`` tokens to predict; each starts with the last token of the one before.

    What is left at the end is a shorter window.
    """
    starts = torch.arange(0, len(tokens) - 1, context)
    ends = (starts + context + 1).clamp(max=len(tokens))
    return TokenData(
        torch.tensor(tokens, dtype=torch.int32), starts, ends, torch.ones_like(starts), is_text=True
    )


def _fitted(
    given: list[int], learnt: list[int], context: int, truncate: bool, where: str
) -> tuple[list[int], list[int]]:
    if not given:
        raise TrainingError(f"{where}: expected an input of one token or more, got none")
    room = context - len(learnt)
    if room < 1:
        raise TrainingError(
            f"{where}: expected a target of at most {context - 1} tokens, its end included, for "
            f"context={context}, got {len(learnt)}"
        )
    if len(given) > room and not truncate:
        raise TrainingError(
            f"{where}: expected at most context={context} tokens, got {len(given)} of input and "
            f"{len(learnt)} of target (truncate_inputs cuts inputs)"
        )
    return given[:room], learnt


def _records(path: Path) -> Iterator[tuple[str, str | tuple[str, str]]]:
    """Where it stands, and a text or a pair."""
    if has_json_lines(path):
        for line in json_lines(path, TrainingError):
            yield line.where, _record(line)
        return
    content = read_text(path, TrainingError)
    if content.strip():
        yield str(path), content


def _record(line: JsonLine) -> str | tuple[str, str]:
    given, learnt, text = line.fields("input", "target", "text")
    if isinstance(text, str) and text and given is None and learnt is None:
        return text
    if isinstance(given, str) and isinstance(learnt, str) and given and learnt and text is None:
        return given, learnt
    raise TrainingError(
        f'{line.where}: expected {{"input": text, "target": text}} or {{"text": text}}, none '
        f"empty, got {line.shown}"
    )


# Batches


class BatchOrder:
    """Which sequences make up the batch of a step: a function of the seed and the step alone.

    Each epoch shuffles all sequences, sorts them by length within buckets, cuts these into batches
    and shuffles the batches; so a batch has little padding, and each sequence comes once an epoch.
    """

    def __init__(self, lengths: Tensor, batch_size: int, seed: int) -> None:
        if not len(lengths):
            raise TrainingError("data: expected at least one sequence, got none")
        self._lengths = lengths
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = -1
        self._batches: list[Tensor] = []

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self._lengths) // self._batch_size)

    def indices(self, step: int) -> Tensor:
        """int64 [batch_size, or fewer in one batch of an epoch]"""
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._shuffled(epoch)
        return self._batches[position]

    def _shuffled(self, epoch: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        order = torch.randperm(len(self._lengths), generator=generator)
        batches = [
            batch
            for bucket in _cut(order, self._batch_size * BUCKET_BATCHES)
            for batch in _cut(bucket[self._lengths[bucket].argsort(stable=True)], self._batch_size)
        ]
        shuffle = torch.randperm(len(batches), generator=generator)
        return [batches[index] for index in shuffle.tolist()]


def _cut(indices: Tensor, size: int) -> list[Tensor]:
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def collate(data: TokenData, indices: Iterable[int], *, decoder_start: int | None = None) -> Batch:
    """Sequences side by side, padded on the right with token 0.

    Args:
        data: the sequences.
        indices: which of them.
        decoder_start: the token that starts a decoder which has an encoder; the prompt then goes
            into the encoder. None for a decoder alone.
    """
    sequences = [data.sequence(int(index)) for index in indices]
    num_tokens = sum(len(tokens) for tokens, _ in sequences)
    if decoder_start is None:
        read = [tokens[:-1] for tokens, _ in sequences]
        learnt = [tokens[prompt_len:] for tokens, prompt_len in sequences]
        inputs = {"input_ids": _padded(read)}
        firsts = [prompt_len - 1 for _, prompt_len in sequences]
    else:
        start = torch.tensor([decoder_start])
        given = [tokens[:prompt_len] for tokens, prompt_len in sequences]
        learnt = [tokens[prompt_len:] for tokens, prompt_len in sequences]
        read = [torch.cat([start, tokens[:-1]]) for tokens in learnt]
        inputs = {
            "input_ids": _padded(given),
            "attention_mask": _padded([torch.ones_like(tokens) for tokens in given]),
            "decoder_input_ids": _padded(read),
        }
        firsts = [0] * len(sequences)
    width = max(len(tokens) for tokens in read)
    positions = [
        row * width + first + torch.arange(len(tokens))
        for row, (first, tokens) in enumerate(zip(firsts, learnt, strict=True))
    ]
    return Batch(inputs, Targets(torch.cat(positions), torch.cat(learnt)), num_tokens)


def _padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
