"""What a draft head learns from: the states of a frozen model over the answers that it wrote.

A directory holds them, text by text, in plain files that grow: ``states.bin`` bfloat16 [n,
num_taps, hidden_size] and ``rows.bin`` int32 [n, 3], of each row the text's number, the token that
follows in the text, and the model's own greedy next token. A run that is killed loses the texts
that it was at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eecore.errors import TrainingError
from eecore.files import write_text
from eecore.json_fields import JsonFields
from eecore.models import AttentionBatch, KVCache, LlamaModel
from eecore.readable import is_file, shown_path

__all__ = [
    "HeadStates",
    "MappedStates",
    "StatesSettings",
    "WrittenText",
    "collect_states",
    "ends_of",
    "open_states",
]

FORMAT = "eecore head states 1"
SETTINGS_FILE, STATES_FILE, ROWS_FILE = "states.json", "states.bin", "rows.bin"
PAGE_SIZE = 16
TOKENS_AT_ONCE = 512
ROW_NUMBERS = 3
APART = 40 << 32
"""Between the numbers of texts in two directories; of any, more than there are."""


@dataclass(frozen=True)
class StatesSettings:
    """Whose states they are.

    Attributes:
        model: the model's digest.
        weights: what its weights are stored in.
        hidden_size: of the model.
        taps: after how many layers states are taken, ascending; the last is all of them.
    """

    model: str
    weights: str
    hidden_size: int
    taps: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return len(self.taps) * self.hidden_size * torch.bfloat16.itemsize


@dataclass(frozen=True)
class WrittenText:
    """A prompt and the model's answer to it, in tokens, and a number of its own."""

    index: int
    prompt: Sequence[int]
    answer: Sequence[int]


class MappedStates:
    """bfloat16 [n, num_taps, hidden_size] in several files, of which what is asked for is read.

    Args:
        parts: one after the other.
        rows: int64 [n], which of all of them it is; None: all.
    """

    def __init__(self, parts: Sequence[Tensor], rows: Tensor | None = None) -> None:
        self._parts = list(parts)
        self._ends = torch.tensor([len(part) for part in parts]).cumsum(0)
        self._rows = rows

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._rows is None else len(self._rows)

    def __getitem__(self, index: Tensor) -> Tensor:
        """bfloat16 [len(index), num_taps, hidden_size] of int64 indices."""
        return self._read(self._parts, index)

    def last(self, index: Tensor) -> Tensor:
        """The last tap's alone: [len(index), hidden_size]."""
        return self._read([part[:, -1] for part in self._parts], index)

    def _read(self, parts: Sequence[Tensor], index: Tensor) -> Tensor:
        rows = index if self._rows is None else self._rows[index]
        if len(parts) == 1:
            return parts[0].index_select(0, rows)
        found = torch.empty((len(rows), *parts[0].shape[1:]), dtype=parts[0].dtype)
        which = torch.searchsorted(self._ends, rows, right=True)
        for place in torch.unique(which).tolist():
            mine = (which == place).nonzero()[:, 0]
            begin = int(self._ends[place]) - len(parts[place])
            found[mine] = parts[place].index_select(0, rows[mine] - begin)
        return found

    def part(self, index: Tensor) -> MappedStates:
        """Some rows, int64 of them; nothing is read."""
        return MappedStates(self._parts, index if self._rows is None else self._rows[index])


@dataclass(frozen=True, eq=False)
class HeadStates:
    """All states, mapped from disk; the rows of a text follow one another."""

    settings: StatesSettings
    states: MappedStates
    """Each row's, at the position before its token."""
    text: Tensor
    """int64 [n], the text's index."""
    token: Tensor
    """int64 [n], the token of the text that follows the state."""
    greedy: Tensor
    """int64 [n], the model's own most probable one."""

    def __len__(self) -> int:
        return len(self.token)

    @cached_property
    def ends(self) -> Tensor:
        """int64 [n], of each row the first one behind its text."""
        return ends_of(self.text)


def ends_of(text: Tensor) -> Tensor:
    """int64 [n], of each row the first one behind its text, int64 [n] of these."""
    count = len(text)
    rows = torch.arange(1, count + 1)
    last = torch.ones_like(text, dtype=torch.bool)
    last[:-1] = text[1:] != text[:-1]
    far = torch.where(last, rows, count)
    return far.flip(0).cummin(0).values.flip(0)


def collect_states(
    network: LlamaModel,
    texts: Sequence[WrittenText],
    directory: Path,
    settings: StatesSettings,
    *,
    progress: Callable[[int, int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> bool:
    """Go on with the states of texts, or begin them; those that are there are left out.

    Args:
        network: the model as eecore runs it.
        texts: to take the states of, from the last token of the prompt on.
        directory: of the files; those of other settings are refused.
        settings: of the files.
        progress: called with the number of rows that are there, and of those that are wanted.
        should_stop: asked between stretches of texts.

    Returns:
        Whether all texts are there; False when it was told to stop.
    """
    done = _open_files(directory, settings)
    missing = [text for text in texts if text.index not in done]
    wanted = sum(len(text.answer) for text in texts)
    count = sum(len(text.answer) for text in texts if text.index in done)
    with (
        (directory / STATES_FILE).open("ab") as states_file,
        (directory / ROWS_FILE).open("ab") as rows_file,
    ):
        for stretch in _stretches(missing):
            states, greedy = _states_of(network, stretch, settings.taps)
            rows = [
                (text.index, token, 0) for text in stretch for token in text.answer
            ]  # the last number comes from the model
            numbers = np.array(rows, dtype="<i4")
            numbers[:, 2] = greedy.cpu().numpy()
            states_file.write(states.cpu().view(torch.int16).numpy().astype("<i2").tobytes())
            states_file.flush()
            rows_file.write(numbers.tobytes())
            rows_file.flush()
            count += len(rows)
            if progress is not None:
                progress(count, wanted)
            if should_stop is not None and should_stop():
                return False
    return True


def open_states(directories: Sequence[Path], settings: StatesSettings) -> HeadStates:
    """The states of directories, one after the other; their texts are numbered apart.

    Raises:
        TrainingError: there are none, or of other settings.
    """
    mapped, numbers = [], []
    for place, directory in enumerate(directories):
        _open_files(directory, settings)
        rows = torch.from_numpy(_rows(directory).astype(np.int64))
        if not len(rows):
            raise TrainingError(f"{shown_path(directory)}: expected states, got none")
        shape = (len(rows), len(settings.taps), settings.hidden_size)
        path, size = str(directory / STATES_FILE), int(np.prod(shape))
        states = torch.from_file(path, shared=False, size=size, dtype=torch.bfloat16)
        mapped.append(states.view(shape))
        rows[:, 0] += place * APART
        numbers.append(rows)
    text, token, greedy = torch.cat(numbers).unbind(1)
    return HeadStates(settings, MappedStates(mapped), text.clone(), token.clone(), greedy.clone())


@torch.inference_mode()
def _states_of(
    network: LlamaModel, texts: Sequence[WrittenText], taps: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """bfloat16 [n, num_taps, hidden_size] and int64 [n], of all answers one after the other."""
    lengths = [len(text.prompt) + len(text.answer) - 1 for text in texts]
    counts = [-(-length // PAGE_SIZE) for length in lengths]
    kv = KVCache.allocate(
        network.config, sum(counts), PAGE_SIZE, device=network.device, dtype=network.dtype
    )
    batch = _batch(lengths, counts, network.device)
    tokens = [t for text in texts for t in (*text.prompt, *text.answer)[:-1]]
    starts = np.cumsum([0, *lengths[:-1]])
    rows = torch.tensor(
        [
            start + position
            for start, length, text in zip(starts.tolist(), lengths, texts, strict=True)
            for position in range(len(text.prompt) - 1, length)
        ],
        device=network.device,
    )
    hidden = network.embed(torch.tensor(tokens, device=network.device))
    begin, tapped = 0, []
    for tap in taps:
        hidden = network.layers(begin, tap, hidden, kv, batch)
        begin = tap
        tapped.append(hidden.index_select(0, rows))
    greedy = network.confidence(tapped[-1]).token.long()
    return torch.stack(tapped, 1).bfloat16(), greedy


def _batch(lengths: Sequence[int], counts: Sequence[int], device: torch.device) -> AttentionBatch:
    """Whole texts of these lengths, each in pages of its own, ``counts`` of them."""
    first = np.cumsum([0, *counts[:-1]])
    table = first[:, None] + np.arange(max(counts))[None]
    table = np.minimum(table, (first + np.array(counts) - 1)[:, None])
    positions = np.concatenate([np.arange(length) for length in lengths])
    slots = np.repeat(first * PAGE_SIZE, lengths) + positions
    ends = np.cumsum([0, *lengths])

    def tensor(values: object, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(np.asarray(values), dtype=dtype, device=device)

    return AttentionBatch(
        positions=tensor(positions, torch.int64),
        slot_mapping=tensor(slots, torch.int64),
        page_table=tensor(table, torch.int32),
        seq_lens=tensor(lengths, torch.int32),
        query_start_loc=tensor(ends, torch.int32),
    )


def _stretches(texts: Sequence[WrittenText]) -> Iterator[list[WrittenText]]:
    """Texts in their order, as many at once as have at most so many tokens, one at least."""
    stretch: list[WrittenText] = []
    tokens = 0
    for text in texts:
        length = len(text.prompt) + len(text.answer)
        if stretch and tokens + length > TOKENS_AT_ONCE:
            yield stretch
            stretch, tokens = [], 0
        stretch.append(text)
        tokens += length
    if stretch:
        yield stretch


def _open_files(directory: Path, settings: StatesSettings) -> set[int]:
    """The texts that are there; the files begin to exist, and lose what was not finished."""
    path = directory / SETTINGS_FILE
    if is_file(path):
        _check_settings(path, settings)
    else:
        for name in (STATES_FILE, ROWS_FILE):
            write_text(directory / name, "")
        write_text(path, json.dumps({"format": FORMAT, **asdict(settings)}) + "\n")
    row_bytes = ROW_NUMBERS * 4
    sizes = [(directory / name).stat().st_size for name in (STATES_FILE, ROWS_FILE)]
    count = min(sizes[0] // settings.row_bytes, sizes[1] // row_bytes)
    # A stretch is in the rows when it is in the states: what the rows lack is none.
    for name, size in ((STATES_FILE, settings.row_bytes), (ROWS_FILE, row_bytes)):
        with (directory / name).open("r+b") as file:
            file.truncate(count * size)
    return set(np.unique(_rows(directory)[:, 0]).tolist())


def _rows(directory: Path) -> np.ndarray:
    return np.fromfile(directory / ROWS_FILE, dtype="<i4").reshape(-1, ROW_NUMBERS)


def _check_settings(path: Path, settings: StatesSettings) -> None:
    fields = JsonFields.read(path, TrainingError)
    if fields.text("format") != FORMAT:
        raise fields.wrong("format", repr(FORMAT), fields.text("format"))
    for name, expected in asdict(settings).items():
        got = fields.integers(name) if name == "taps" else None
        if name == "hidden_size":
            got = fields.integer(name)
        elif name != "taps":
            got = fields.text(name)
        if got != expected:
            raise fields.wrong(name, f"{expected!r}, as this run has", got)
