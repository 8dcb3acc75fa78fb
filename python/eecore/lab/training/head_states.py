"""What a draft head learns from: the states of a frozen model over the answers that it wrote.

A directory holds them, text by text, in plain files that grow: ``states.bin`` bfloat16 [n,
num_taps, hidden_size] and ``rows.bin`` int32 [n, 3], of each row the text's number, the token that
follows in the text, and the model's own greedy next token. Where a head is to attend to keys of the
model, these are there, too (:mod:`eecore.lab.training.head_keys`). A run that is killed loses the
texts that it was at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eecore.errors import TrainingError
from eecore.files import write_text
from eecore.json_fields import JsonFields
from eecore.lab.training.head_keys import (
    MOST_QUERIES,
    Attended,
    KeysFiles,
    TextKeys,
    key_begins,
    keys_at,
)
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
        attended: whose keys and values are kept, too.
        head_dim: of these; 0 without any.
        queries: features of the queries to one key head; 0 without any.
    """

    model: str
    weights: str
    hidden_size: int
    taps: tuple[int, ...]
    attended: Attended = ()
    head_dim: int = 0
    queries: int = 0

    def keys_in(self, directory: Path) -> KeysFiles | None:
        """Of a directory of states; None where nothing is attended to."""
        if not self.attended:
            return None
        return KeysFiles(directory, self.attended, self.head_dim, self.queries)

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
    keys: tuple[Tensor, ...] = ()
    """Of each directory, bfloat16 [m, num_attended, 2, head_dim], mapped."""
    key_begins: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 [n], where the keys of the row's text begin among all of them."""
    positions: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 [n], of the states, where there are keys."""
    queries: tuple[tuple[int, Tensor], ...] = ()
    """Of each directory its first row, and the model's own queries of it and of rows behind it,
    bfloat16 [., num_attended, queries]; of parts of the rows there are none."""

    def __len__(self) -> int:
        return len(self.token)

    def seen(self, rows: Tensor, cos_sin: Tensor) -> TextKeys | None:
        """What drafts behind rows, int64 of them, attend to; None where there are no keys."""
        if not self.keys:
            return None
        return TextKeys.of(self.keys, self.key_begins[rows], self.positions[rows], cos_sin)

    def part(self, rows: Tensor) -> HeadStates:
        """Some of the rows, bool [n]; nothing is read."""
        index = rows.nonzero()[:, 0]
        return HeadStates(
            self.settings,
            self.states.part(index),
            self.text[index],
            self.token[index],
            self.greedy[index],
            self.keys,
            self.key_begins[index] if self.keys else self.key_begins,
            self.positions[index] if self.keys else self.positions,
        )

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
        progress: called with the number of rows that are there, and of those that are wanted, at
            the beginning and after each stretch of texts.
        should_stop: asked between stretches of texts.

    Returns:
        Whether all texts are there; False when it was told to stop.
    """
    done = _open_files(directory, settings)
    missing = [text for text in texts if text.index not in done]
    wanted = sum(len(text.answer) for text in texts)
    count = sum(len(text.answer) for text in texts if text.index in done)
    files, written = settings.keys_in(directory), len(_rows(directory))
    if progress is not None:
        progress(count, wanted)
    with (
        (directory / STATES_FILE).open("ab") as states_file,
        (directory / ROWS_FILE).open("ab") as rows_file,
    ):
        for stretch in _stretches(missing):
            states, greedy, read = _states_of(
                network, stretch, settings, with_queries=written < MOST_QUERIES
            )
            rows = [
                (text.index, token, 0) for text in stretch for token in text.answer
            ]  # the last number comes from the model
            numbers = np.array(rows, dtype="<i4")
            numbers[:, 2] = greedy.cpu().numpy()
            if files is not None and read is not None:
                wanted_queries = MOST_QUERIES - written
                queries = None if read.queries is None else read.queries[:wanted_queries]
                files.append(read.keys, read.positions, queries)
            written += len(rows)
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
    mapped, numbers, keys, begins, positions, queries = [], [], [], [], [], []
    num_rows = num_keys = 0
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
        files = settings.keys_in(directory)
        if files is not None:
            where = torch.from_numpy(files.positions().astype(np.int64))
            own_keys, own_queries = files.map()
            keys.append(own_keys)
            begins.append(key_begins(rows[:, 0], where) + num_keys)
            positions.append(where)
            queries.append((num_rows, own_queries))
            num_keys += len(own_keys)
        num_rows += len(rows)
    text, token, greedy = torch.cat(numbers).unbind(1)
    found = HeadStates(settings, MappedStates(mapped), text.clone(), token.clone(), greedy.clone())
    if not keys:
        return found
    return replace(
        found,
        keys=tuple(keys),
        key_begins=torch.cat(begins),
        positions=torch.cat(positions),
        queries=tuple(queries),
    )


@dataclass(frozen=True)
class _Read:
    """What is kept of a stretch beside the states."""

    keys: Tensor
    positions: list[int]
    queries: Tensor | None


@torch.inference_mode()
def _states_of(
    network: LlamaModel,
    texts: Sequence[WrittenText],
    settings: StatesSettings,
    *,
    with_queries: bool,
) -> tuple[Tensor, Tensor, _Read | None]:
    """bfloat16 [n, num_taps, hidden_size] and int64 [n], of all answers one after the other."""
    lengths = [len(text.prompt) + len(text.answer) - 1 for text in texts]
    counts = [-(-length // PAGE_SIZE) for length in lengths]
    kv = KVCache.allocate(
        network.config, sum(counts), PAGE_SIZE, device=network.device, dtype=network.dtype
    )
    batch = _batch(lengths, counts, network.device)
    tokens = [t for text in texts for t in (*text.prompt, *text.answer)[:-1]]
    starts = np.cumsum([0, *lengths[:-1]])
    places = [
        (start + position, position)
        for start, length, text in zip(starts.tolist(), lengths, texts, strict=True)
        for position in range(len(text.prompt) - 1, length)
    ]
    rows = torch.tensor([row for row, _ in places], device=network.device)
    hidden = network.embed(torch.tensor(tokens, device=network.device))
    asking = {layer for layer, _ in settings.attended} if with_queries else set()
    begin, tapped, queries = 0, [], dict[int, Tensor]()
    for end in sorted({0, *settings.taps, *asking}):
        if end:
            hidden = network.layers(begin, end, hidden, kv, batch)
        begin = end
        if end in asking:
            queries[end] = network.queries(end, hidden.index_select(0, rows))
        if end in settings.taps:
            tapped.append(hidden.index_select(0, rows))
    greedy = network.confidence(tapped[-1]).token.long()
    read = None
    if settings.attended:
        width = settings.queries
        own = [
            queries[layer].flatten(1)[:, head * width : (head + 1) * width]
            for layer, head in (settings.attended if with_queries else ())
        ]
        read = _Read(
            keys_at(kv, settings.attended, batch.slot_mapping),
            [position for _, position in places],
            torch.stack(own, 1) if with_queries else None,
        )
    return torch.stack(tapped, 1).bfloat16(), greedy, read


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
    files = settings.keys_in(directory)
    if files is not None:
        count = files.whole(count, _rows(directory)[:, 0])
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
    for name in ("model", "weights", "hidden_size", "taps"):
        expected = getattr(settings, name)
        got: object = fields.integers(name) if name == "taps" else None
        if name == "hidden_size":
            got = fields.integer(name)
        elif name != "taps":
            got = fields.text(name)
        if got != expected:
            raise fields.wrong(name, f"{expected!r}, as this run has", got)
    attended = fields.values.get("attended", [])
    if attended != [list(pair) for pair in settings.attended]:
        expected = f"{[list(pair) for pair in settings.attended]}, as this run has"
        raise fields.wrong("attended", expected, attended)
