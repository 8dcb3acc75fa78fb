"""The pass of prompts: chunks of prompts, and replays of preempted requests.

The pass runs before the programs of an iteration and shares no call with them, so that a prompt
that arrives changes nothing for requests that decode. Beside such requests a long chunk of a looped
model runs one loop in a pass, so that they wait for one loop at most. On a GPU the layers' work of
most passes is a captured program of its own, which runs all loops.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isnan

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eecore.decoding.chunk_pass import ChunkKind, ChunkPass, ChunkRows, chunk_kind
from eecore.decoding.control import OnHost
from eecore.decoding.head_drafts import HeadKeys
from eecore.decoding.heads import GREEDY, LOGITS, Heads, HeadWork, head_fields
from eecore.decoding.memory import Array, TwinMemory, page_table, slots_of
from eecore.decoding.prompt_logprobs import Scored, prompt_logprobs
from eecore.decoding.sampling import (
    DRAWS_TOKEN,
    NO_TOKEN,
    add_logprobs,
    head_sizes,
    needs_logits,
    sampling_fields,
    sampling_rows,
    write_sampling,
)
from eecore.decoding.step import tapped_layers
from eecore.errors import NotFiniteError
from eecore.models import (
    MIN_QUERIES,
    AttentionBatch,
    Chunks,
    CrossBatch,
    KVCache,
    LlamaModel,
    Network,
    T5Model,
)
from eecore.planning.draft_state import route_of
from eecore.planning.row import Outcome
from eecore.scheduling.scheduler import Work
from eecore.scheduling.sequence import Counters, Sequence
from eecore.scheduling.states import MAX_UNCERTAIN

Int64Array = npt.NDArray[np.int64]
RunChunk = Callable[[ChunkKind, Array, ChunkRows], ChunkPass]
"""Runs a program for tokens and their rows, and returns it with its results."""


def encode(model: Network, kv: KVCache, sequences: list[Sequence]) -> None:
    """Run the encoder on the inputs of sequences, and write the keys and values to their pages.

    Args:
        sequences: one or more, each with an input and pages for it.
    """
    assert isinstance(model, T5Model)
    lengths = [len(sequence.given_ids) for sequence in sequences]
    tokens = [token for sequence in sequences for token in sequence.given_ids]
    slots = [
        slot
        for sequence, length in zip(sequences, lengths, strict=True)
        for slot in slots_of(sequence.input_pages, 0, length, kv.page_size)
    ]
    model.encode(
        torch.tensor(tokens, device=model.device),
        lengths,
        kv,
        torch.tensor(slots, device=model.device),
    )


@dataclass(frozen=True)
class Chunk:
    """One sequence's part of the pass: positions ``first..stop-1``."""

    sequence: Sequence
    first: int
    stop: int
    depths: list[int]
    """Number of layers that each position runs through; in a replay, as many as at first."""
    pages: list[int]
    """The sequence's own list of pages. A sequence that has lost its pages begins anew."""
    loops: int = 0
    """Loops of a looped model that earlier passes have run."""
    states: Tensor | None = None
    """The residual stream after these loops, [stop - first, hidden_size]; None at first."""

    @property
    def emits(self) -> bool:
        """Whether the last row gives a token: not in a replay or an unfinished prompt, nor where
        the request wants none.
        """
        sequence = self.sequence
        ends = not sequence.output_ids and self.stop == sequence.num_prompt_tokens
        return ends and sequence.tokens_left > 0


class Prefill:
    """One pass over the chunks of some sequences, rows sorted by sequence, then by position.

    Args:
        works: the chunks, one of each sequence.
        begun: chunks that earlier passes have begun, which go on here; the pass adds its own until
            they have ended.
        run_chunk: runs the layers as a program of rounded sizes, where that pays; None: they are
            always called one by one.
    """

    def __init__(
        self,
        model: Network,
        kv: KVCache,
        works: list[Work],
        begun: dict[Sequence, Chunk],
        run_chunk: RunChunk | None = None,
    ) -> None:
        self._model, self._kv, self._run_chunk = model, kv, run_chunk
        self._exit_layers, self._begun = model.config.exit_layers, begun
        self._stack = model.config.num_layers // model.config.num_loops
        self._chunks = [begun.get(work.sequence) or self._chunk(work) for work in works]
        chunks = self._chunks
        sequences = [chunk.sequence for chunk in chunks]
        counts = [chunk.stop - chunk.first for chunk in chunks]

        def whole(values: list[list[int]]) -> Int64Array:
            return np.fromiter(itertools.chain.from_iterable(values), dtype=np.int64)

        self._tokens = whole([c.sequence.tokens(c.first, c.stop) for c in chunks])
        self._positions = whole([list(range(c.first, c.stop)) for c in chunks])
        self._slots = whole(
            [slots_of(c.sequence.pages, c.first, c.stop, kv.page_size) for c in chunks]
        )
        self._depths = whole([chunk.depths for chunk in chunks])
        self._sequence = np.repeat(np.arange(len(chunks)), counts)
        self._ends = np.cumsum(counts)
        loops = np.repeat([chunk.loops for chunk in chunks], counts)
        self._reached = np.minimum(loops * self._stack, self._depths)  # layers that each row ran
        self._page_table = page_table([sequence.pages for sequence in sequences])
        self._states: Array | None = None
        if sequences[0].state:
            self._states = np.array([self._state(chunk) for chunk in chunks], dtype=np.int32)
        self._keys: HeadKeys | None = None
        self._taps: tuple[int, ...] = ()
        self._tapped: dict[int, Tensor] = {}
        self._deep = np.flatnonzero(self._depths == self._exit_layers[-1])
        if model.draft_head is not None and kv.of_head is not None and len(self._deep):
            self._keys = HeadKeys(model, kv, len(self._deep))
            self._taps = model.draft_head.taps
        self._cross: tuple[Array, Array] | None = None
        if sequences[0].input_ids is not None:
            self._cross = (
                page_table([sequence.input_pages for sequence in sequences]),
                np.array([len(s.input_ids or ()) for s in sequences], dtype=np.int32),
            )

    def _chunk(self, work: Work) -> Chunk:
        sequence = work.sequence
        first, stop = sequence.num_computed, sequence.num_computed + work.num_tokens
        if sequence.state and self._kv.state_reaches(sequence.state) > first:
            first = 0  # the chunk has run already, and another request made that pass fail
        route, prompt = route_of(sequence, self._exit_layers), sequence.num_prompt_tokens
        depths = [route.depth] * (stop - first)
        if route.fills:
            for position in range(max(first, prompt), stop):
                depths[position - first] = sequence.kv_exit_layers[position - prompt]
        if sequence.state:
            # A state sums up the positions in their order, so that all have to exit alike.
            depths = [*itertools.takewhile(depths[0].__eq__, depths)]
        return Chunk(sequence, first, first + len(depths), depths, sequence.pages)

    def _state(self, chunk: Chunk) -> tuple[int, int]:
        """The state of a chunk's sequence. What a prompt has up to the last whole page is certain,
        so that another text may go on there, if the rows after it can be kept."""
        number, certain = chunk.sequence.state_at
        if chunk.sequence.parent is None:
            rest = chunk.stop % self._kv.page_size
            certain = chunk.stop - (rest if rest <= MAX_UNCERTAIN else 0)
        return number, certain

    def run(self, most: int | None = None) -> list[Outcome]:
        """Run the pass, and return one outcome per work, in order.

        Args:
            most: positions of a looped model that may run a loop, if others wait: where the chunks
                have more than that to run, they run one loop. Nothing is computed yet for those
                that then have further loops to run. None: all loops run.
        """
        hidden = self._layers(most)
        emitting, outcomes, goes_on = list[int](), list[Outcome](), self._reached < self._depths
        for i, (chunk, end) in enumerate(zip(self._chunks, self._ends, strict=True)):
            rows = slice(end - len(chunk.depths), end)
            if goes_on[rows].any():
                self._begun[chunk.sequence] = replace(
                    chunk, loops=chunk.loops + 1, states=hidden[rows]
                )
                outcomes.append(Outcome(chunk.sequence, chunk.first))
                continue
            self._begun.pop(chunk.sequence, None)
            counters = Counters(prompt_layers_run=sum(chunk.depths))
            outcomes.append(Outcome(chunk.sequence, chunk.stop, counters=counters))
            if chunk.emits:
                emitting.append(i)
        if emitting:
            last = self._tensor(self._ends[emitting] - 1)
            self._add_tokens(outcomes, emitting, hidden.index_select(0, last))
        if self._keys is not None:
            self._fill_head(self._keys, outcomes)
        self._score_prompts(hidden, outcomes)
        return outcomes

    def _score_prompts(self, hidden: Tensor, outcomes: list[Outcome]) -> None:
        """Add log-probabilities of prompts, for requests that ask for them."""
        scored = {
            i: part
            for i, (chunk, end) in enumerate(zip(self._chunks, self._ends, strict=True))
            if chunk.sequence not in self._begun
            and (part := Scored.of(chunk.sequence, chunk.first, chunk.stop, int(end)))
        }
        found = prompt_logprobs(self._model, hidden, list(scored.values()))
        for i, entries in zip(scored, found, strict=True):
            if entries is None:
                outcomes[i].error = NotFiniteError(NO_TOKEN)
            else:
                outcomes[i].prompt_logprobs = entries

    def _layers(self, most: int | None) -> Tensor:
        """Run the layers; [num_rows, hidden_size]: each row's state when it exits, or so far."""
        model, kv, depths, reached = self._model, self._kv, self._depths, self._reached
        every = np.arange(len(depths))
        if self._run_chunk is not None and not reached.any() and depths.min() == depths.max():
            rows = self._rows(every)
            kind = chunk_kind(model.config, rows, int(depths[0]), self._taps)
            if kind is not None:
                return self._by_program(self._run_chunk(kind, self._tokens, rows))
        states = model.embed(self._tensor(self._tokens))
        for chunk, end in zip(self._chunks, self._ends, strict=True):
            if chunk.states is not None:
                states[end - len(chunk.depths) : end] = chunk.states
        left = (depths - reached).sum() // self._stack  # positions that have a loop to run
        one_loop = kv.num_loops > 1 and most is not None and left > most
        while len(active := np.flatnonzero(reached < depths)):
            index = None if len(active) == len(every) else self._tensor(active)
            hidden = states if index is None else states[index]
            batch = self._batch(self._rows(active))
            if kv.num_loops > 1:
                assert isinstance(model, LlamaModel)
                hidden = model.next_loop(hidden, kv, batch)
                reached[active] += self._stack
            else:
                begin, end = int(reached[active[0]]), int(depths[active].min())
                taps = tuple(tap for tap in self._taps if begin < tap <= end)
                hidden, tapped = tapped_layers(model, begin, end, taps, hidden, kv, batch)
                for tap, state in zip(taps, tapped, strict=True):
                    self._tapped[tap] = self._of_deep(state, active)
                reached[active] = end
            states = hidden if index is None else states.index_copy(0, index, hidden)
            # In the layers above, later positions attend to keys of positions that exited early.
            self._fill(active[reached[active] == depths[active]], states)
            if one_loop:
                break
        return states

    def _by_program(self, program: ChunkPass) -> Tensor:
        """The rows' states after a program has run them, all to the same depth."""
        every = np.arange(len(self._tokens))
        hidden, *tapped = (each[: len(every)] for each in (program.hidden, *program.tapped))
        self._tapped = dict(zip(self._taps, tapped, strict=True))
        self._reached[:] = program.kind.depth
        self._fill(every, hidden)
        return hidden

    def _of_deep(self, state: Tensor, active: Int64Array) -> Tensor:
        """The states of the rows that run through all layers."""
        if len(active) == len(self._deep):
            return state
        return state[self._tensor(np.searchsorted(active, self._deep))]

    def _fill_head(self, keys: HeadKeys, outcomes: list[Outcome]) -> None:
        """Write the keys of a draft head's own layers, at positions that all layers ran for.

        Args:
            keys: writes the keys of the head.
            outcomes: the outcomes, with the first tokens of the chunks that give one.
        """
        following: list[int] = []
        for chunk, outcome in zip(self._chunks, outcomes, strict=True):
            tokens = chunk.sequence.tokens(chunk.first + 1, chunk.stop + 1)
            if len(tokens) < chunk.stop - chunk.first:
                tokens = [*tokens, *(outcome.token_ids or [-1])]
            following += tokens
        deep = self._deep
        starts = np.flatnonzero(self._positions[deep] == 0)
        keys.fill(
            [self._tapped[tap] for tap in self._taps],
            self._tensor(np.array(following, dtype=np.int64)[deep]),
            self._batch(self._rows(deep)),
            self._tensor(starts) if len(starts) else None,
        )

    def _fill(self, exiting: Int64Array, states: Tensor) -> None:
        """Fill the skipped layers' keys and values, for requests whose policy fills them."""
        index = exiting[self._reached[exiting] < self._exit_layers[-1]]
        if len(index):
            routes = [route_of(chunk.sequence, self._exit_layers) for chunk in self._chunks]
            fills = np.array([route.fills for route in routes])
            index = index[fills[self._sequence[index]]]
        if not len(index):
            return
        ends, slots = self._tensor(self._reached[index].astype(np.int32)), self._slots[index]
        positions = self._tensor(self._positions[index])
        exited, texts = states[self._tensor(index)], None
        if self._states is not None:
            batch = self._batch(self._rows(index))
            assert batch.states is not None
            texts = batch.states, batch.seq_lens, batch.query_start_loc
        self._model.fill_kv(exited, ends, self._kv, positions, self._tensor(slots), texts)

    def _rows(self, index: Int64Array) -> ChunkRows:
        """The rows ``index``, ascending: one ragged entry per run of consecutive positions. Slots
        and pages are those of the loop that a row runs next.
        """
        positions, sequence = self._positions[index], self._sequence[index]
        breaks = (sequence[1:] != sequence[:-1]) | (positions[1:] != positions[:-1] + 1)
        starts = np.concatenate(([0], np.flatnonzero(breaks) + 1, [len(index)]))
        owners = sequence[starts[:-1]]
        ahead = self._reached[index] // self._stack * self._kv.loop_slots
        pages_ahead = (ahead[starts[:-1]] // self._kv.page_size).astype(np.int32)
        return ChunkRows(
            positions,
            self._slots[index] + ahead,
            self._page_table[owners] + pages_ahead[:, None],
            (positions[starts[1:] - 1] + 1).astype(np.int32),
            starts.astype(np.int32),
            None if self._cross is None else (self._cross[0][owners], self._cross[1][owners]),
            None if self._states is None else self._states[owners],
        )

    def _batch(self, rows: ChunkRows) -> AttentionBatch:
        """The rows on the device, with the chunks' lengths where these are long."""
        queries, chunks = np.diff(rows.starts), None
        if len(queries) and queries.min() >= MIN_QUERIES:
            chunks = Chunks(tuple(queries.tolist()), tuple(rows.lens.tolist()))
        return AttentionBatch(
            positions=self._tensor(rows.positions),
            slot_mapping=self._tensor(rows.slots),
            page_table=self._tensor(rows.page_table),
            seq_lens=self._tensor(rows.lens),
            query_start_loc=self._tensor(rows.starts),
            cross=None if rows.cross is None else CrossBatch(*map(self._tensor, rows.cross)),
            chunks=chunks,
            states=None if rows.states is None else self._tensor(rows.states),
        )

    def _add_tokens(self, outcomes: list[Outcome], emitting: list[int], hidden: Tensor) -> None:
        """Add the first tokens after whole prompts to their outcomes.

        Args:
            outcomes: the outcomes of all chunks.
            emitting: the chunks that end a prompt.
            hidden: [num_emitting, hidden_size], the states of their last rows.
        """
        sequences = [self._chunks[i].sequence for i in emitting]
        sizes, count = head_sizes(sequences), len(sequences)
        device = self._model.device
        kinds = [LOGITS if needs_logits(s) else GREEDY for s in sequences]
        results = TwinMemory(device, head_fields(count, sizes))
        work = None
        if sizes.logits:
            given = TwinMemory(device, sampling_fields(count, sizes))
            side = given.host()
            write_sampling(side, sequences)
            given.send(side)
            positions = self._tensor(self._positions[self._ends[emitting] - 1])
            work = HeadWork(sampling_rows(given.device), positions, DRAWS_TOKEN)
        Heads(self._model, sizes).run(
            hidden,
            torch.tensor(kinds, dtype=torch.int32, device=device),
            results.device,
            OnHost(),
            work,
        )
        got = results.fetch().wait().cells
        for k, i in enumerate(emitting):
            outcome, token = outcomes[i], got["token"][k]
            if token < 0 or isnan(got["logprob"][k]):
                outcome.error = NotFiniteError(NO_TOKEN)
                continue
            outcome.token_ids.append(token)
            outcome.exit_layers.append(self._chunks[i].depths[-1])
            outcome.confidences.append(got["gap"][k])
            if outcome.sequence.sampling.logprobs is not None:
                add_logprobs(outcome, got, k)

    def _tensor(self, array: Array) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.to(self._model.device)
