"""Training data: JSON lines or plain text in, batches of token ids out, in a reproducible order.

A line is ``{"input": ..., "target": ...}``, of which only the target is learnt, ``{"messages":
[...]}``, of which the assistant's text is learnt, or ``{"text": ...}``. Texts are joined, each with
an end token, and cut into windows of the context. A pair's target follows its input as in
``eecore.generate``: the input is encoded as a prompt is, and so are messages.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from eecore.errors import RequestError, TrainingError
from eecore.files.texts import JsonLine, has_json_lines, json_lines, read_text
from eecore.lab.training.chats import Piece, chat_pieces
from eecore.lab.training.early_exit_loss import Targets
from eecore.models import Tokenizer
from eecore.values import is_whole

# Batches whose sequences are sorted by length together.
BUCKET_BATCHES = 64


@dataclass(frozen=True, eq=False)
class TokenData:
    """Sequences of token ids, of which the tokens after the prompt are learnt, or some of them.

    Attributes:
        tokens: int32 [num_tokens], all sequences'; neighbouring windows of a text share a token.
        starts: int64 [n], where each sequence starts in ``tokens``.
        ends: int64 [n], where it ends.
        prompt_lens: int64 [n], tokens of the prompt, 1 or more; a model with an encoder reads them
            in the encoder.
        learnt: bool [num_tokens], the tokens that are learnt; the first one of a sequence never is.
        for_decoders: whether the data only suits a model without an encoder: texts, conversations.
    """

    tokens: Tensor
    starts: Tensor
    ends: Tensor
    prompt_lens: Tensor
    learnt: Tensor
    for_decoders: bool = False

    def __len__(self) -> int:
        return len(self.starts)

    def sequence(self, index: int) -> tuple[Tensor, int]:
        """The token ids of one sequence, and the length of its prompt."""
        start, end = int(self.starts[index]), int(self.ends[index])
        return self.tokens[start:end].long(), int(self.prompt_lens[index])

    def learnt_of(self, index: int) -> Tensor:
        """bool [length - 1], whether each token of one sequence but its first is learnt."""
        return self.learnt[int(self.starts[index]) + 1 : int(self.ends[index])]

    @property
    def lengths(self) -> Tensor:
        """int64 [n], tokens of each sequence."""
        return self.ends - self.starts

    @property
    def num_learnt(self) -> Tensor:
        """int64 [n], tokens of each sequence that are learnt."""
        sums = self.learnt.cumsum(0)
        return sums[self.ends - 1] - sums[self.starts]

    def rows(self, packing: int | None = None) -> list[list[int]]:
        """The sequences of each row of a batch: one, or with packing as many as fit.

        Args:
            packing: positions of a row; None puts each sequence into its own row.

        Raises:
            TrainingError: a sequence is longer.
        """
        if packing is None:
            return [[index] for index in range(len(self))]
        return _packed((self.lengths - 1).tolist(), packing)

    def digest(self) -> str:
        """A hash of the data: equal data has an equal hash."""
        digest = hashlib.sha256()
        for tensor in (self.tokens, self.starts, self.ends, self.prompt_lens, self.learnt):
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences side by side, padded.

    Attributes:
        inputs: for :meth:`ExitModel.states`, each [batch, length].
        targets: the positions that are learnt.
    """

    inputs: dict[str, Tensor]
    targets: Targets


# Reading


def read_data(
    paths: Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    context: int,
    eos_token_id: int,
    truncate_inputs: bool = False,
    train_on_input: bool = False,
) -> TokenData:
    """Read files of pairs and conversations, or of texts; ``.jsonl`` and ``.ndjson`` are JSON
    lines.

    Args:
        paths: read in order. A file that is not JSON lines is one text.
        tokenizer: the model's; conversations use its chat template.
        context: tokens of a sequence, at most, its end included.
        eos_token_id: ends each target and each text.
        truncate_inputs: cut inputs that leave no room for their target, and conversations that are
            too long, at their end; otherwise they are refused.
        train_on_input: learn inputs and all messages too, not only targets and the assistant's
            messages.

    Raises:
        TrainingError: a line is malformed or too long; the message names file and line.
        ModelError: there are conversations, and the chat template is missing or fails.
    """
    if not is_whole(context, 2):
        raise TrainingError(f"context: expected 2 tokens or more, got {context!r}")
    sequences: list[list[Piece]] = []
    text: list[int] = []
    for path in map(Path, paths):
        for where, record in _records(path):
            if isinstance(record, str):
                text += [*tokenizer.encode(record), eos_token_id]
            elif isinstance(record, _Chat):
                pieces = _chat(record, tokenizer, eos_token_id, train_on_input, where)
                sequences.append(_cut_to(pieces, context, truncate_inputs, where))
            else:
                given = tokenizer.encode(record[0])
                learnt = [*tokenizer.encode(record[1], add_special_tokens=False), eos_token_id]
                given, learnt = _fitted(given, learnt, context, truncate_inputs, where)
                sequences.append([(given, train_on_input), (learnt, True)])
            if sequences and text:
                raise TrainingError(
                    f"{where}: expected either pairs and conversations or texts, got both"
                )
    names = ", ".join(map(str, paths))
    if sequences:
        return from_pieces(sequences)
    if len(text) < 2:
        raise TrainingError(f"{names}: expected some text or pairs, got none")
    return from_text(text, context)


def from_pairs(pairs: Iterable[tuple[list[int], list[int]]]) -> TokenData:
    """A sequence for each pair: the given tokens, then the learnt ones."""
    return from_pieces([(given, False), (learnt, True)] for given, learnt in pairs)


def from_pieces(sequences: Iterable[Sequence[Piece]]) -> TokenData:
    """A sequence for each list of pieces (tokens, and whether they are learnt); its first token
    never is.
    """
    tokens: list[int] = []
    learnt: list[bool] = []
    starts, ends, prompt_lens = [], [], []
    are_pairs = True
    for pieces in sequences:
        starts.append(len(tokens))
        for ids, is_learnt in pieces:
            tokens += ids
            learnt += [is_learnt] * len(ids)
        ends.append(len(tokens))
        learnt[starts[-1]] = False
        prompt_lens.append(learnt.index(True, starts[-1]) - starts[-1])
        are_pairs &= [is_learnt for _, is_learnt in pieces] == [False, True]
    return TokenData(
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(starts),
        torch.tensor(ends),
        torch.tensor(prompt_lens),
        torch.tensor(learnt),
        for_decoders=not are_pairs,
    )


def from_text(tokens: Sequence[int], context: int) -> TokenData:
    """Windows of ``context`` tokens to predict; each starts with the last token of the previous
    one.

    The last window may be shorter.
    """
    starts = torch.arange(0, len(tokens) - 1, context)
    ends = (starts + context + 1).clamp(max=len(tokens))
    windows = torch.tensor(tokens, dtype=torch.int32)
    every = torch.ones(len(windows), dtype=torch.bool)
    return TokenData(windows, starts, ends, torch.ones_like(starts), every, for_decoders=True)


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


class _Chat(NamedTuple):
    """The messages of a line, and further variables of the chat template."""

    messages: list[dict[str, object]]
    variables: dict[str, object]


def _chat(
    chat: _Chat, tokenizer: Tokenizer, eos_token_id: int, train_on_input: bool, where: str
) -> list[Piece]:
    messages, variables = chat
    try:
        return chat_pieces(
            tokenizer, messages, eos_token_id, train_on_input=train_on_input, **variables
        )
    except RequestError as error:
        raise TrainingError(f"{where}: {error}") from None


def _cut_to(pieces: list[Piece], context: int, truncate: bool, where: str) -> list[Piece]:
    """A conversation cut to the context, in which something is learnt."""
    ends = list(accumulate(len(ids) for ids, _ in pieces))
    if ends[-1] > context and not truncate:
        raise TrainingError(
            f"{where}: expected at most context={context} tokens, got {ends[-1]} "
            "(truncate_inputs cuts conversations at their end)"
        )
    begins = [0, *ends[:-1]]
    kept = [
        (ids[: context - begin], learnt)
        for begin, (ids, learnt) in zip(begins, pieces, strict=True)
        if begin < context
    ]
    num_learnt = sum(len(ids) for ids, learnt in kept if learnt)
    if num_learnt - kept[0][1] < 1:  # the first token is never learnt
        raise TrainingError(
            f"{where}: expected an answer within context={context} tokens, got none there"
        )
    return kept


def _records(path: Path) -> Iterator[tuple[str, str | tuple[str, str] | _Chat]]:
    """The place of each record, and its text, pair or conversation."""
    if has_json_lines(path):
        for line in json_lines(path, TrainingError):
            yield line.where, _record(line)
        return
    content = read_text(path, TrainingError)
    if content.strip():
        yield str(path), content


def _record(line: JsonLine) -> str | tuple[str, str] | _Chat:
    given, learnt, text, messages, tools = line.fields(
        "input", "target", "text", "messages", "tools"
    )
    there = [value is not None for value in (given, learnt, text, messages)]
    if there == [False, False, True, False] and isinstance(text, str) and text:
        return text
    is_pair = there == [True, True, False, False]
    if is_pair and isinstance(given, str) and isinstance(learnt, str) and given and learnt:
        return given, learnt
    if there == [False, False, False, True] and isinstance(messages, list) and messages:
        return _Chat(messages, {} if tools is None else {"tools": tools})
    raise TrainingError(
        f'{line.where}: expected {{"input": text, "target": text}}, {{"messages": [...]}} or '
        f'{{"text": text}}, none empty, got {line.shown}'
    )


# Batches


class BatchOrder:
    """The sequences in the batch of a step, which depend on the seed and the step only.

    Each epoch shuffles all sequences, sorts them by length within buckets, cuts these into batches
    and shuffles the batches; so a batch has little padding, and each sequence is used once an
    epoch.
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
        """int64 [batch_size], or fewer in one batch of an epoch: the sequences of a step."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._shuffled(epoch)
        return self._batches[position]

    def _shuffled(self, epoch: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        order, size = torch.randperm(len(self._lengths), generator=generator), self._batch_size
        batches = [
            batch
            for bucket in torch.split(order, size * BUCKET_BATCHES)
            for batch in torch.split(bucket[self._lengths[bucket].argsort(stable=True)], size)
        ]
        shuffle = torch.randperm(len(batches), generator=generator)
        return [batches[index] for index in shuffle.tolist()]


def _packed(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of sequences by index, the longest first, each put where it leaves the least room."""
    rows: list[list[int]] = []
    with_room: dict[int, list[list[int]]] = defaultdict(list)
    rooms: list[int] = []  # ascending, each once
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        if length > capacity:
            raise TrainingError(
                f"packing: expected sequences of at most {capacity} positions, got {length}"
            )
        place = bisect_left(rooms, length)
        if place == len(rooms):
            room = capacity
            rows.append(row := [])
        else:
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del rooms[place]
        row.append(index)
        if not with_room[room - length]:
            insort(rooms, room - length)
        with_room[room - length].append(row)
    return rows


def collate(
    data: TokenData, rows: Iterable[int | Sequence[int]], *, decoder_start: int | None = None
) -> Batch:
    """A batch of sequences, padded on the right with token 0.

    Args:
        rows: the sequences; several in one row are packed: ``inputs`` then has ``position_ids``,
            which begin at 0 with each sequence, and attention does not cross sequences.
        decoder_start: the token that starts the decoder of a model with an encoder; the prompt then
            goes into the encoder. None for a decoder alone.
    """
    packed = [list(row) if isinstance(row, Sequence) else [int(row)] for row in rows]
    if decoder_start is not None:
        return _with_encoder(data, [index for row in packed for index in row], decoder_start)
    read, places, firsts, learnt = [], [], [], []
    for row in packed:
        sequences = [data.sequence(index)[0] for index in row]
        masks = [data.learnt_of(index) for index in row]
        read.append(torch.cat([tokens[:-1] for tokens in sequences]))
        places.append(torch.cat([torch.arange(len(mask)) for mask in masks]))
        firsts.append(torch.cat(masks).nonzero().squeeze(1))
        learnt += [tokens[1:][mask] for tokens, mask in zip(sequences, masks, strict=True)]
    inputs = {"input_ids": _padded(read)}
    if any(len(row) > 1 for row in packed):
        inputs["position_ids"] = _padded(places)
    return Batch(inputs, _targets(firsts, learnt, inputs["input_ids"]))


def _with_encoder(data: TokenData, indices: list[int], decoder_start: int) -> Batch:
    start = torch.tensor([decoder_start])
    sequences = [data.sequence(index) for index in indices]
    given = [tokens[:prompt_len] for tokens, prompt_len in sequences]
    learnt = [tokens[prompt_len:] for tokens, prompt_len in sequences]
    read = _padded([torch.cat([start, tokens[:-1]]) for tokens in learnt])
    inputs = {
        "input_ids": _padded(given),
        "attention_mask": _padded([torch.ones_like(tokens) for tokens in given]),
        "decoder_input_ids": read,
    }
    targets = _targets([torch.arange(len(tokens)) for tokens in learnt], learnt, read)
    return Batch(inputs, targets)


def _targets(places: list[Tensor], learnt: list[Tensor], read: Tensor) -> Targets:
    """The tokens that are learnt, at their places in the rows that are read."""
    width = read.shape[1]
    positions = [row * width + place for row, place in enumerate(places)]
    return Targets(torch.cat(positions), torch.cat(learnt))


def _padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
