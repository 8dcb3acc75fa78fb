"""``eecore search``: which sublayers a draft of this model can leave out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eecore.console.files import check_out
from eecore.console.loading import ModelPath, check_path, spinner
from eecore.console.options import LoadOptions, takes_options
from eecore.console.signals import INTERRUPTED, SIGNALS
from eecore.textfiles import read_text

if TYPE_CHECKING:
    from eecore.calibration.skip_search import SkipStep

# A token is hardly ever longer than this: more of a long file need not go to the tokenizer.
MOST_CHARACTERS_A_TOKEN = 32


@takes_options
def search(
    model: ModelPath,
    text: Annotated[
        Path, typer.Option(help="Text like that which the model will write, a few hundred words.")
    ],
    out: Annotated[Path, typer.Option(help="Where to write what was found, as JSON.")],
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text to look at.")] = 256,
    max_skipped: Annotated[
        int | None,
        typer.Option(min=1, help="Most sublayers to leave out.", show_default="half of them"),
    ] = None,
    *,
    loading: LoadOptions,
) -> int:
    """Search the sublayers to skip for --exit draft-verify --skips FILE.

    Each line is one more sublayer left out. Ctrl-C keeps what was found so far.
    """
    directory = check_path(model)
    content = read_text(text)[: max_tokens * MOST_CHARACTERS_A_TOKEN]
    check_out("--out", out)
    loaded = loading.load(directory, kv_cache_tokens=16)

    from eecore import SkipSearch, search_skipped_sublayers

    steps: list[SkipStep] = []
    code = 0
    try:
        with spinner("measuring each sublayer, then leaving out one after the other"):

            def show(step: SkipStep) -> None:
                steps.append(step)
                print(describe(step), file=sys.stderr, flush=True)

            search_skipped_sublayers(
                loaded, [content], max_tokens=max_tokens, max_skipped=max_skipped, progress=show
            )
    except KeyboardInterrupt:
        SIGNALS.arrived()
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    if steps:
        found = SkipSearch(tuple(steps))
        found.save(out)
        print(f"best: {describe(found.best)}; wrote {out}")
    return code


def describe(step: SkipStep) -> str:
    """One set, in a line."""
    skipped = len(step.skip_attention) + len(step.skip_mlp)
    return (
        f"{skipped:3} skipped, agreement {step.agreement:.2f}, draft cost {step.draft_cost:.2f}, "
        f"predicted speed-up {step.predicted_speedup:.2f} with {step.num_drafts} drafts"
    )
