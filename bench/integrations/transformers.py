"""``model.generate`` of transformers alone, and on eecore's engine: the same object, one run.

python -m bench transformers                 the model that ships, batch 1 and 8
python -m bench transformers --count 64 --rounds 5

Held-out utterances, greedy, prompts included; all modes take turns, and lossless modes must give
transformers' own tokens. Writes bench/results/transformers.json and its table in bench/results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

import eecore
from bench.harness.command import parser, say
from bench.harness.machine import in_words, machine
from bench.harness.results import Figures, Report
from bench.harness.rows import Row, table_of
from bench.harness.turns import TimedCall, batches_of, rows_beside, take_turns, timed
from bench.harness.utterances import LONGEST_PARSE, utterances

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALONE = "transformers"
EARLY_EXITS = (2, 3)
Arguments = dict[str, Any]


def modes(batch: int) -> dict[str, Arguments]:
    """Arguments of ``generate`` by mode; transformers drafts only for a single sequence."""
    where = eecore.default_model()
    calibrated = eecore.ConfidentExit.calibrated(where / "calibration-softmax.json")
    found: dict[str, Arguments] = {ALONE: {}}
    for layer in EARLY_EXITS if batch == 1 else ():
        found[f"transformers, assistant_early_exit={layer}"] = {"assistant_early_exit": layer}
    exits = {name: name for name in ("full", "auto", "speculative:3,6")}
    for name, exit in {**exits, "calibrated softmax": calibrated}.items():
        own = {"custom_generate": eecore.generate_for_transformers, "exit": exit}
        found[f"eecore, {name}"] = own
    return found


def prepared(count: int) -> tuple[PreTrainedModel, list[list[int]], int]:
    """The model that ships, which transformers and eecore share, utterances, and a padding id."""
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        eecore.default_model(), dtype=torch.float32
    ).eval()
    ours = eecore.from_transformers(model)
    tokenizer = eecore.load(device="cpu").tokenizer
    assert tokenizer is not None
    prompts = [tokenizer.encode(record["input"]) for record in utterances(count)]
    return model, prompts, min(ours.config.eos_token_ids)


def groups_of(prompts: list[list[int]], batch: int, pad: int) -> list[Arguments]:
    """Batches of prompts, padded on the left, with attention masks."""
    found = []
    for group in batches_of(prompts, batch):
        longest = max(map(len, group))
        rows = [[pad] * (longest - len(each)) + each for each in group]
        mask = [[0] * (longest - len(each)) + [1] * len(each) for each in group]
        found.append({"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)})
    return found


def measure(
    model: PreTrainedModel, groups: list[Arguments], batch: int, rounds: int, pad: int
) -> list[Row]:
    """Tokens a second of each mode, and its speed-up over transformers alone: medians of rounds."""

    def texts(arguments: Arguments) -> list[list[int]]:
        found = []
        for group in groups:
            given = {**group, **arguments, "pad_token_id": pad, "do_sample": False}
            made = model.generate(**given, max_new_tokens=LONGEST_PARSE)
            found += [_without(row, pad) for row in made[:, group["input_ids"].shape[1] :]]
        return found

    def turn_of(arguments: Arguments) -> Callable[[], TimedCall]:
        return lambda: timed(lambda: texts(arguments))

    turns = take_turns({name: turn_of(each) for name, each in modes(batch).items()}, rounds)
    rows = rows_beside(turns, ALONE)
    for row in rows:
        if row["same"] < row["of"] and "calibrated" not in row["mode"]:
            raise SystemExit(
                f"{row['mode']}: expected the tokens of transformers, got different ones"
            )
    return rows


def _without(row: torch.Tensor, pad: int) -> list[int]:
    tokens: list[int] = row.tolist()
    while tokens and tokens[-1] == pad:
        tokens.pop()
    return tokens


def markdown(result: Figures) -> str:
    columns = [
        ("batch", "{batch}"),
        ("`model.generate`", "{mode}"),
        ("tokens/s", "{tokens_per_s:.0f}"),
        ("speed-up", "{speedup:.2f}x"),
    ]
    about = (
        f"The intent model in {result['dtype']}, {result['count']} held-out utterances, prompts "
        f"included, medians of {result['rounds']} turns; 1 thread, {in_words(result)}, "
        f"transformers {result['transformers']}. `python -m bench transformers`"
    )
    return f"{table_of(columns, result['rows'], text_columns=2)}\n\n{about}"


REPORTS = (Report("transformers", {"transformers": markdown}, {"rows": ("batch", "mode")}),)


def main(words: Sequence[str]) -> None:
    made = parser("transformers", __doc__, batches=(1, 8), rounds=3)
    made.add_argument("--count", type=int, default=32, help="utterances")
    arguments = made.parse_args(words)
    model, prompts, pad = prepared(arguments.count)
    rows = []
    for batch in arguments.batches:
        groups = groups_of(prompts, batch, pad)
        for row in measure(model, groups, batch, arguments.rounds, pad):
            rows.append({"batch": batch, **row})
            say(rows[-1])
    result = {
        **machine(),
        "transformers": version("transformers"),
        "dtype": "float32",
        "count": arguments.count,
        "rounds": arguments.rounds,
        "rows": rows,
    }
    REPORTS[0].finish(result, arguments)
