"""The training data of a draft head: the states of a frozen model over its own answers.

A directory holds them, text by text, in plain files that grow: ``states.bin`` bfloat16 [n,
num_taps, hidden_size] and ``rows.bin`` int32 [n, 3]: for each row the text's number, the token that
follows in the text, and the model's own greedy next token. Rows begin with the last token of a
text's prompt.
Where a head attends to keys of the model there are three more: ``keys.bin`` bfloat16 [m,
num_attended, 2, head_dim], for every position of every text, the prompt's too, ``positions.bin``
int32 [n], and ``queries.bin`` bfloat16 [., num_attended, queries], for the first rows: the model's
own queries to the same keys, not rotated, from which a head's queries start. A killed run loses the
texts that it was working on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from eecore.calibration.exit_scores import whole_sequences
from eecore.errors import TrainingError
from eecore.files.json_fields import JsonFields
from eecore.files.readable import is_file, shown_path
from eecore.files.whole import write_text
from eecore.lab.answers.writing import Answer
from eecore.lab.training.draft_head import HeadSizes
from eecore.lab.training.head_keys import Attended, TextKeys, is_last, key_begins, keys_at
from eecore.models import KVCache, LlamaModel

FORMAT = "eecore head states 1"
SETTINGS_FILE = "states.json"
PAGE_SIZE = 16
TOKENS_AT_ONCE = 512
MAX_QUERIES = 50_000
"""Rows whose queries are kept."""


@dataclass(frozen=True)
class StatesSettings:
    """The settings of a directory of states.

    Attributes:
        model: the model's digest.
        weights: the format that its weights are stored in.
        hidden_size: the model's.
        taps: the layers after which states are taken, ascending; the last is the number of layers.
        attended: the key heads whose keys and values are kept, too.
        head_dim: the key heads'; 0 without any.
        queries: features of the queries to one key head; 0 without any.
    """

    model: str
    weights: str
    hidden_size: int
    taps: tuple[int, ...]
    attended: Attended = ()
    head_dim: int = 0
    queries: int = 0

    def sizes(self, intermediate_size: int, num_blocks: int = 1) -> HeadSizes:
        """The sizes of a head that learns from these states."""
        return HeadSizes(
            self.hidden_size,
            len(self.taps),
            intermediate_size,
            num_blocks,
            len(self.attended),
            self.queries,
        )


class MappedStates:
    """bfloat16 [n, num_taps, hidden_size] in a file, of which only the indexed rows are read.

    Args:
        stored: the file's tensor.
        rows: int64 [n], the rows of it that these are; None: all.
    """

    def __init__(self, stored: Tensor, rows: Tensor | None = None) -> None:
        self._stored, self._rows = stored, rows

    def __len__(self) -> int:
        return len(self._stored if self._rows is None else self._rows)

    def __getitem__(self, index: Tensor) -> Tensor:
        """bfloat16 [len(index), num_taps, hidden_size] for int64 indices."""
        return self._stored.index_select(0, self._places(index))

    def last(self, index: Tensor) -> Tensor:
        """The last tap's states only: [len(index), hidden_size]."""
        return self._stored[:, -1].index_select(0, self._places(index))

    def part(self, index: Tensor) -> MappedStates:
        """Some rows, by int64 indices; nothing is read."""
        return MappedStates(self._stored, self._places(index))

    def _places(self, index: Tensor) -> Tensor:
        return index if self._rows is None else self._rows[index]


@dataclass(frozen=True, eq=False)
class HeadStates:
    """All states, mapped from disk; rows of a text follow one another."""

    settings: StatesSettings
    states: MappedStates
    """Each row's states, at the position before its token."""
    text: Tensor
    """int64 [n], the text's index."""
    token: Tensor
    """int64 [n], the text's token that follows the state."""
    greedy: Tensor
    """int64 [n], the model's own most probable token."""
    keys: Tensor | None = None
    """Keys and values, bfloat16 [m, num_attended, 2, head_dim], mapped."""
    key_begins: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 [n], where the keys of the row's text begin among all of them."""
    positions: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 [n], the states' positions, where there are keys."""
    queries: Tensor | None = None
    """The model's own queries of the first rows, bfloat16 [., num_attended, queries]; None in a
    part of the rows.
    """

    def __len__(self) -> int:
        return len(self.token)

    def seen(self, rows: Tensor, cos_sin: Tensor, scale: float | None = None) -> TextKeys | None:
        """The keys and values that drafts after rows, int64 [n], attend to; None where there are no
        keys.
        """
        if self.keys is None:
            return None
        begins, positions = self.key_begins[rows], self.positions[rows]
        return TextKeys.of(self.keys, begins, positions, cos_sin, scale)

    def part(self, rows: Tensor) -> HeadStates:
        """Some rows, by bool [n]; nothing is read."""
        index = rows.nonzero()[:, 0]
        return HeadStates(
            self.settings,
            self.states.part(index),
            self.text[index],
            self.token[index],
            self.greedy[index],
            self.keys,
            self.key_begins if self.keys is None else self.key_begins[index],
            self.positions if self.keys is None else self.positions[index],
        )

    @cached_property
    def ends(self) -> Tensor:
        """int64 [n], for each row the first row after its text."""
        return ends_of(self.text)

    @cached_property
    def starts(self) -> Tensor:
        """int64, the rows that a draft can start from: all but each text's last."""
        rows = torch.arange(len(self))
        return rows[rows + 1 < self.ends]


def begins_of(text: Tensor) -> Tensor:
    """For each row of texts, int64 [n], the first row of its text: int64 [n]."""
    starts_text = is_last(text).roll(1)  # the first row follows the last text's end
    return torch.where(starts_text, torch.arange(len(text)), 0).cummax(0).values


def ends_of(text: Tensor) -> Tensor:
    """For each row of texts, int64 [n], the first row after its text: int64 [n]."""
    far = torch.where(is_last(text), torch.arange(1, len(text) + 1), len(text))
    return far.flip(0).cummin(0).values.flip(0)


@dataclass(frozen=True)
class GrowingFile:
    """Entries of one dtype and shape in a file, one after the other."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def _entry_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.path.stat().st_size // self._entry_bytes if is_file(self.path) else 0

    def append(self, values: Tensor) -> None:
        """Add entries, [n, *shape]."""
        content = values.cpu().to(self.dtype).contiguous().view(torch.uint8)
        with self.path.open("ab") as file:
            file.write(content.numpy().tobytes())

    def cut(self, count: int) -> None:
        """Keep the first ``count`` entries; a missing file is created empty."""
        with self.path.open("ab") as file:
            file.truncate(count * self._entry_bytes)

    def map(self) -> Tensor:
        """The entries [n, *shape], mapped: only what is used is read."""
        count = len(self)
        if not count:
            return torch.empty(0, *self.shape, dtype=self.dtype)
        size = count * math.prod(self.shape)
        mapped = torch.from_file(str(self.path), shared=False, size=size, dtype=self.dtype)
        return mapped.view(count, *self.shape)


class StatesDirectory:
    """The files of a directory; entries of unfinished texts are cut off.

    Raises:
        TrainingError: the files have other settings.
    """

    def __init__(self, directory: Path, settings: StatesSettings) -> None:
        path = directory / SETTINGS_FILE
        if is_file(path):
            _check_settings(path, settings)
        attended, short = len(settings.attended), torch.bfloat16

        def file(name: str, dtype: torch.dtype, *shape: int) -> GrowingFile:
            return GrowingFile(directory / f"{name}.bin", dtype, shape)

        self.states = file("states", short, len(settings.taps), settings.hidden_size)
        self.rows = file("rows", torch.int32, 3)
        self.keys = file("keys", short, attended, 2, settings.head_dim)
        self.positions = file("positions", torch.int32)
        self.queries = file("queries", short, attended, settings.queries)
        count = min(len(self.states), len(self.rows)) if is_file(path) else 0
        if attended:
            count = min(count, len(self.positions))
            self.positions.cut(count)
            text, positions = self.rows.map()[:count, 0], self.positions.map()
            self.keys.cut(int((positions[is_last(text)] + 1).sum()))
            self.queries.cut(min(count, MAX_QUERIES))
        self.states.cut(count)
        self.rows.cut(count)
        if not is_file(path):
            write_text(path, json.dumps({"format": FORMAT, **asdict(settings)}) + "\n")


def collect_states(
    network: LlamaModel,
    texts: Sequence[Answer],
    directory: Path,
    settings: StatesSettings,
    *,
    progress: Callable[[int, int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> bool:
    """Write the states of texts into a directory; texts that it has already are left out.

    Args:
        network: the model as eecore runs it.
        texts: each gives states from the last token of the prompt on.
        directory: the files'; files with other settings are refused.
        progress: called with the number of rows, and the number wanted, at the beginning and after
            each group of texts.
        should_stop: called between groups of texts; True stops.

    Returns:
        True: all texts are there; False: stopped.
    """
    files = StatesDirectory(directory, settings)
    done = set(files.rows.map()[:, 0].tolist())
    missing = [text for text in texts if text.index not in done]
    wanted = sum(len(text.answer) for text in texts)
    count = wanted - sum(len(text.answer) for text in missing)
    if progress is not None:
        progress(count, wanted)
    for stretch in _stretches(missing):
        count += _add(network, stretch, settings, files)
        if progress is not None:
            progress(count, wanted)
        if should_stop is not None and should_stop():
            return False
    return True


def open_states(directory: Path, settings: StatesSettings) -> HeadStates:
    """The states in a directory.

    Raises:
        TrainingError: the directory has none, or has other settings.
    """
    files = StatesDirectory(directory, settings)
    text, token, greedy = (column.clone() for column in files.rows.map().long().unbind(1))
    if not len(text):
        raise TrainingError(f"{shown_path(directory)}: expected states, got none")
    found = HeadStates(settings, MappedStates(files.states.map()), text, token, greedy)
    if not settings.attended:
        return found
    positions = files.positions.map().long()
    return replace(
        found,
        keys=files.keys.map(),
        key_begins=key_begins(text, positions),
        positions=positions,
        queries=files.queries.map(),
    )


@torch.inference_mode()
def _add(
    network: LlamaModel,
    texts: Sequence[Answer],
    settings: StatesSettings,
    files: StatesDirectory,
) -> int:
    """Append the rows of all texts, one after the other; returns the number of answers' tokens."""
    lengths = [len(text.prompt) + len(text.answer) - 1 for text in texts]
    batch = whole_sequences(lengths, PAGE_SIZE, network.device)
    num_pages = sum(-(-length // PAGE_SIZE) for length in lengths)
    kv = KVCache.allocate(
        network.config, num_pages, PAGE_SIZE, device=network.device, dtype=network.dtype
    )
    tokens = [t for text in texts for t in (*text.prompt, *text.answer)[:-1]]
    starts = [0, *accumulate(lengths)]
    begins = [len(text.prompt) - 1 for text in texts]
    positions = [range(*ends) for ends in zip(begins, lengths, strict=True)]
    places = [start + p for start, own in zip(starts, positions, strict=False) for p in own]
    rows = torch.tensor(places, device=network.device)
    hidden = network.embed(torch.tensor(tokens, device=network.device))
    room = MAX_QUERIES - len(files.rows)
    asking = {layer for layer, _ in settings.attended} if room > 0 else set()
    begin, tapped, queries = 0, [], dict[int, Tensor]()
    for end in sorted({0, *settings.taps, *asking}):
        if end:
            hidden = network.layers(begin, end, hidden, kv, batch)
        begin = end
        if end in asking:
            queries[end] = network.queries(end, hidden.index_select(0, rows)).flatten(1)
        if end in settings.taps:
            tapped.append(hidden.index_select(0, rows))
    numbers = torch.tensor([(text.index, token, 0) for text in texts for token in text.answer])
    numbers[:, 2] = network.confidence(tapped[-1]).token.cpu()
    # The rows are written last: an entry without a row does not count.
    if settings.attended:
        files.keys.append(keys_at(kv, settings.attended, batch.slot_mapping))
        files.positions.append(torch.tensor([p for own in positions for p in own]))
    if asking:
        width = settings.queries
        own = [
            queries[layer][:, head * width : (head + 1) * width]
            for layer, head in settings.attended
        ]
        files.queries.append(torch.stack(own, 1)[:room])
    files.states.append(torch.stack(tapped, 1))
    files.rows.append(numbers)
    return len(numbers)


def _stretches(texts: Sequence[Answer]) -> Iterator[list[Answer]]:
    """Texts in their order, in groups of a bounded number of tokens, at least one each."""
    stretch: list[Answer] = []
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


def _check_settings(path: Path, settings: StatesSettings) -> None:
    fields = JsonFields.read(path, TrainingError)
    if fields.text("format") != FORMAT:
        raise fields.wrong("format", repr(FORMAT), fields.text("format"))
    for name in ("model", "weights", "hidden_size", "taps", "attended"):
        expected = json.loads(json.dumps(getattr(settings, name)))
        got = fields.values.get(name)
        if got != expected:
            raise fields.wrong(name, f"{expected!r}, as this run has", got)
