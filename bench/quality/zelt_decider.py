"""zelt's learned decider, in a process that answers on stdout.

python -m bench.quality.zelt_decider FILE

It reads zelt's file of trajectories, prints a line of JSON with its version, and answers each line
{"calibrate": [numbers of questions], "test": [...], "bounds": [...], "delta": d} with {"ends":
[[...], ...]}: for each bound the tokens at which it ends each thought of ``test``, null where it
does not. Two thirds of ``calibrate`` train the decider, as in its own pipeline, and the rest finds
its threshold. It runs with the interpreter of the peer's environment.
"""

from __future__ import annotations

import json
import math
import sys

import numpy
from zelt.decider import StopDecider, choose_tau, load_rows, simulate

from bench.harness.answers import answering, version_of


def main(path: str) -> None:
    answer = answering()
    rows = load_rows(path)
    fine = [0.99, 0.995, 0.999]
    grid = numpy.unique(numpy.concatenate([numpy.arange(0.5, 0.99, 0.01), fine]))  # its own
    answer({"version": version_of("zelt-ai")})
    for line in sys.stdin:
        asked = json.loads(line)
        own, test = ([rows[i] for i in asked[name]] for name in ("calibrate", "test"))
        trained = 2 * len(own) // 3
        decider = StopDecider("logreg").fit(own[:trained])
        scores, test_scores = (
            [decider.score(row["probes"]).tolist() for row in part]
            for part in (own[trained:], test)
        )
        ends = []
        for bound in asked["bounds"]:
            tau, _ = choose_tau(own[trained:], scores, grid, bound, asked["delta"])
            found = simulate(test, test_scores, math.inf if tau is None else tau)
            ends.append([each["tokens"] if each["stopped"] else None for each in found])
        answer({"ends": ends})


if __name__ == "__main__":
    main(*sys.argv[1:])
