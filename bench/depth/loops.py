"""Looped models: full depth, and exits in which each row is in a loop of its own.

python -m bench loops                     random weights in the shapes of Ouro and Nanbeige
python -m bench loops --model DIRECTORY   and a looped intent model with its gate

Random models exit by a random classifier, which stops some rows after each loop but
the last; sampled tokens, all modes of a batch in turns. *In step* are the same exits with all
rows in the same loop; without the benchmark, requests run in the way that is found to be faster.
*Of what loops allow* is the speed-up over that by the mean number of loops; *over in step*
compares these shares, since the texts that are timed differ in their loops. Nanbeige's full depth
is also timed beside llama.cpp, on the same file. The intent model is made by
scripts/intents/train_intents.py ``--loops``, its gate by ``eecore train --loss gate``; exact match
is over whole parses. Writes bench/results/loops.json and its tables in bench/results.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from unittest import mock

import torch

import eecore
from bench.decode import gguf
from bench.decode.random_files import NANBEIGE, OURO, make_random_gguf
from bench.harness import peers
from bench.harness.command import parser, say
from bench.harness.decoding import Decoding
from bench.harness.machine import in_words, machine
from bench.harness.results import Figures, Report
from bench.harness.rows import Row, table_of
from bench.harness.turns import batches_of
from bench.harness.utterances import DATA, LONGEST_PARSE, utterances
from eecore import ConfidentExit, ExitClassifier, Full, SelfSpeculative
from eecore.calibration.exit_scores import Scored, forced_states
from eecore.decoding import iterate
from eecore.exits import Exit
from eecore.models import LlamaModel

SHAPES = {"Ouro-1.4B": OURO, "Nanbeige4.2-3B": NANBEIGE}
FORMATS = {"Q4_K": "Q4_K", "int8": "Q8_0"}
THRESHOLDS = (0.9, 0.6, 0.3)
STEPS = 8  # timed steps of each batch at full depth
DRAFTS = (1, 2, 3)
ACCEPTED = (0.6, 0.7, 0.8, 0.9)
GROUPS = 4  # timed batches of the intent model


@dataclass(frozen=True)
class Mode:
    """A policy, and whether its rows are kept in the same loop."""

    name: str
    policy: Exit
    in_step: bool = False


@contextmanager
def kept_to(mode: Mode) -> Iterator[None]:
    """A context in which rows run in the mode's way, whichever is faster."""
    in_step = mock.patch.object(iterate, "goes_by_loops", return_value=False)
    with in_step if mode.in_step else mock.patch.object(iterate.Race, "learn"):
        yield


def coin(model: eecore.Model) -> ConfidentExit:
    """An exit after about every other loop, by the sign of a random sum of the state."""
    assert isinstance(model.network, LlamaModel)
    draw = torch.Generator().manual_seed(1)
    ends = model.config.exit_layers[:-1]
    states = []
    for tokens in torch.randint(3, model.config.vocab_size, (16, 8), generator=draw).tolist():
        states += [s for _, s in forced_states(model.network, Scored(tokens), ends)]
    weight = torch.randn(2, model.config.hidden_size, generator=draw)
    stay, leave = (torch.cat(states).float() @ weight.T).unbind(1)
    bias = torch.stack([(leave - stay).median(), torch.tensor(0.0)])
    return ConfidentExit(0.5, "classifier", classifier=ExitClassifier(weight, bias))


def timed(
    model: eecore.Model,
    groups: Sequence[list[list[int]]],
    modes: Sequence[Mode],
    rounds: int,
    temperature: float = 0.0,
    right: Mapping[int, float] = MappingProxyType({}),
) -> list[Row]:
    """A row for each mode, which take turns; the first one is full depth. ``right``: exact match
    by the policy's id.
    """
    config = model.config
    runs = []
    for mode in modes:
        # A step of rows in different loops is one loop, others are all loops of a token.
        steps = STEPS * (1 if mode.in_step or mode is modes[0] else config.num_loops)
        runs.append(Decoding(model, groups, mode.policy, steps, temperature))
    for _ in range(rounds):
        for mode, run in zip(modes, runs, strict=True):
            with kept_to(mode):
                run.round()
    rows, full = [], runs[0].token_ms
    for mode, run in zip(modes, runs, strict=True):
        layers = [layer for step in run.exits for layer in step]
        loops = sum(layers) / len(layers) / config.exit_layers.step
        speed_up = full / run.token_ms
        row = {"mode": mode.name, "batch": len(groups[0]), "loops": loops, "speed_up": speed_up}
        row["tokens_per_s"] = 1e3 * len(groups[0]) / run.token_ms
        row["exact"] = right.get(id(mode.policy))
        row["allowed"] = speed_up * loops / config.num_loops
        rows.append(row)
    in_step = {id(m.policy): r["allowed"] for m, r in zip(modes, rows, strict=True) if m.in_step}
    for mode, row in zip(modes, rows, strict=True):
        row["over_step"] = row["allowed"] / in_step.get(id(mode.policy), 1.0)
    return rows


def drafted(model: eecore.Model, batch: int, rounds: int) -> list[Row]:
    """The speed-up of drafts by the first loop if a draft is accepted with some probability: a
    round takes as long whatever is accepted."""
    first = model.config.exit_layers[0]
    policies = [Full(), *(SelfSpeculative(first, count) for count in DRAFTS)]
    prompts = [[3 + row] for row in range(batch)]
    runs = [Decoding(model, [prompts], policy, STEPS // 2) for policy in policies]
    for _ in range(rounds):
        for run in runs:
            run.round()
    full, *others = (run.step_ms for run in runs)
    rows = []
    for count, round_ms in zip(DRAFTS, others, strict=True):
        row: Row = {"batch": batch, "drafts": count, "round": round_ms / full}
        for accepted in ACCEPTED:
            tokens = sum(accepted**draft for draft in range(count + 1))
            row[f"at_{accepted:.0%}"] = tokens * full / round_ms
        rows.append(row)
    return rows


def of_shape(
    name: str, weights: str, threads: Sequence[int], batches: Sequence[int], rounds: int
) -> tuple[list[Row], list[Row]]:
    """The rows of a random model, beside llama.cpp where it knows the family, and of drafts."""
    rows, drafts = [], []
    with tempfile.TemporaryDirectory() as scratch:
        file = make_random_gguf(Path(scratch) / "looped.gguf", SHAPES[name], FORMATS[weights])
        model = eecore.load(file, device="cpu", kv_cache_tokens=256, prefix_cache=False)
        exits = coin(model)
        modes = [Mode("full depth", Full()), Mode("exits", exits)]
        modes.append(Mode("exits, in step", exits, in_step=True))
        for count in threads:
            torch.set_num_threads(count)
            for batch in batches:
                prompts = [[3 + row] for row in range(batch)]
                own = {"model": f"{name}'s shape", "weights": weights, "threads": count}
                for row in timed(model, [prompts], modes, rounds, temperature=1.0):
                    rows.append({**own, **row})
                    say(rows[-1])
                for row in drafted(model, batch, rounds) if batch in (1, 8) else ():
                    drafts.append({**own, **row})
                    say(drafts[-1])
        del model
        if weights == "Q4_K" and name.startswith("Nanbeige"):
            beside = gguf.rows_of(file, 1, [b for b in batches if b <= 8], 8, rounds)
            ratios = {("full depth", 1, row["batch"]): row["ratio"] for row in beside}
            for row in rows:
                row["peer"] = ratios.get((row["mode"], row["threads"], row["batch"]))
    return rows, drafts


def of_intent(
    directory: Path, data: Path, count: int, batches: Sequence[int], rounds: int
) -> list[Row]:
    """The rows of a trained model on one thread, with exact match."""
    records = utterances(count, data)
    model = eecore.load(
        directory, device="cpu", prefix_cache=False, dtype="float32", kv_cache_tokens=16384
    )
    assert model.tokenizer is not None
    modes = [Mode("full depth", Full())]
    for threshold in THRESHOLDS:
        policy = ConfidentExit(threshold, "gate")
        name = f"gate {threshold:g}"
        modes += [Mode(name, policy), Mode(f"{name}, in step", policy, in_step=True)]
    texts = [record["input"] for record in records]
    right = {}
    for mode in modes:
        if mode.in_step:
            continue  # the same texts
        outputs = eecore.generate(model, texts, exit=mode.policy, max_tokens=LONGEST_PARSE)
        same = (out.text == r["target"] for out, r in zip(outputs, records, strict=True))
        right[id(mode.policy)] = sum(same) / len(records)
    prompts = [model.tokenizer.encode(text) for text in texts]
    rows = []
    torch.set_num_threads(1)
    for batch in batches:
        groups = batches_of(prompts[: batch * GROUPS], batch)
        for row in timed(model, groups, modes, rounds, right=right):
            own = {"model": "intent", "weights": "float32", "threads": 1}
            rows.append({**own, **row})
            say(rows[-1])
    return rows


def table(figures: Figures) -> str:
    """A line for each mode at each batch size."""
    columns = [
        ("model", "{model}"),
        ("weights", "{weights}"),
        ("threads", "{threads}"),
        ("batch", "{batch}"),
        ("mode", "{mode}"),
        ("loops a token", "{loops:.2f}"),
        ("tokens/s", "{tokens_per_s:.1f}"),
        ("over full depth", "{speed_up:.2f}x"),
        ("of what loops allow", "{allowed:.0%}"),
        ("over in step", "{over_step:.2f}x"),
        ("beside llama.cpp", "{peer:.2f}x"),
        ("exact match", "{exact:.1%}"),
    ]
    about = (
        f"llama.cpp: {figures['llama_cpp']}. {figures['rounds']} rounds, {in_words(figures)}. "
        "`python -m bench loops`"
    )
    return f"{table_of(columns, figures['rows'])}\n\n{about}"


def drafts_table(figures: Figures) -> str:
    """A line for each number of drafts."""
    own = [(name, f"{{{name}}}") for name in ("model", "weights", "threads", "batch", "drafts")]
    columns = [*own, ("a round takes", "{round:.2f} steps")]
    columns += [
        (f"{accepted:.0%} accepted", f"{{at_{accepted:.0%}:.2f}}x") for accepted in ACCEPTED
    ]
    return table_of(columns, figures["drafts"])


CASE = ("model", "weights", "threads", "batch")
REPORTS = (
    Report(
        "loops",
        {"loops": table, "loop drafts": drafts_table},
        {"rows": (*CASE, "mode"), "drafts": (*CASE, "drafts")},
    ),
)


def main(words: Sequence[str]) -> None:
    made = parser("loops", __doc__, batches=(1, 4, 8, 32), rounds=2)
    made.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="N")
    made.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    made.add_argument("--weights", nargs="+", choices=FORMATS, default=list(FORMATS))
    made.add_argument("--model", type=Path, help="a directory")
    made.add_argument("--data", type=Path, default=DATA, help="made where it is missing")
    made.add_argument("--count", type=int, default=300, help="utterances")
    arguments = made.parse_args(words)
    batches, rounds = arguments.batches, arguments.rounds
    rows, drafts = list[Row](), list[Row]()
    if arguments.model is not None:
        rows += of_intent(arguments.model, arguments.data, arguments.count, batches, rounds)
    for name in arguments.shapes:
        for weights in arguments.weights:
            found = of_shape(name, weights, arguments.threads, batches, rounds)
            rows += found[0]
            drafts += found[1]
    result = {**machine(), "llama_cpp": peers.LLAMA_CPP, "rounds": rounds}
    result |= {"rows": rows, "drafts": drafts}
    REPORTS[0].finish(result, arguments)
