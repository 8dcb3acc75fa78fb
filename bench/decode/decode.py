"""Full-depth decoding, end to end, in eecore and in other engines for CPUs, on the same weights.

python -m bench decode             everything, with the peers of python -m bench peers
python -m bench decode --quick     a tiny model and eecore alone; writes nothing

Every engine runs in a process of its own, all in turns: a round runs each engine once, and ratios
are taken within a round, so that a busy machine slows all alike. A run generates 64 greedy tokens
after a prompt of one token, so that each pass is a decoding step and there is no prefill. Writes
bench/results/decode.json and the tables in bench/results.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.decode.engines import convert
from bench.decode.models import make_random_llama
from bench.decode.session import ENGINES, Session, measure, result_of
from bench.decode.tables import full, short
from bench.harness import peers
from bench.harness.command import parser
from bench.harness.places import MODELS as MADE
from bench.harness.results import Figures, Report
from bench.harness.smollm2 import get_smollm2

CASE = ("model", "threads", "batch", "engine", "bits")
REPORTS = (
    Report(
        "decode",
        {"decode": short, "decode in full": full},
        {
            "rows": CASE,
            "ratios": CASE,
            "ceilings": ("model", "threads"),
            "agreement": ("model", "engine"),
        },
        ("left_out",),
    ),
)
MODELS = {
    "random": lambda: make_random_llama(MADE / "random-llama-56m"),
    "smollm2": get_smollm2,
}


def run_quick() -> Figures:
    """A run of a few seconds, to check that the script works."""
    session = Session(tokens=4, rounds=1, available={"eecore"})
    with tempfile.TemporaryDirectory() as scratch:
        tiny = {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 256}
        directory = make_random_llama(Path(scratch) / "tiny", **tiny, **heads)
        measure(session, directory, 1)
    return result_of(session)


def run_all(arguments: argparse.Namespace) -> Figures:
    """Install the peers and measure every model on every number of threads."""
    made = peers.prepare([name for name in arguments.engines if name != "eecore"])
    available = {"eecore"} | {name for name, peer in made.items() if peer.available}
    session = Session(arguments.tokens, arguments.rounds, available & set(arguments.engines))
    session.left_out += [
        {"engine": peer.wanted, "reason": peer.reason}
        for peer in made.values()
        if peer.name in arguments.engines and not peer.available
    ]
    for name in arguments.models:
        directory = MODELS[name]()
        convert(directory, session.available)
        for threads in arguments.threads:
            measure(session, directory, threads)
    return result_of(session)


def main(words: Sequence[str]) -> None:
    made = parser("decode", __doc__, rounds=3)
    made.add_argument("--tokens", type=int, default=64)
    made.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    made.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    made.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    made.add_argument("--quick", action="store_true", help="a tiny model, eecore alone, no files")
    arguments = made.parse_args(words)
    arguments.dry_run |= arguments.quick
    REPORTS[0].finish(run_quick() if arguments.quick else run_all(arguments), arguments)
