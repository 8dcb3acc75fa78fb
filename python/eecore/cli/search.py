"""``eecore search``: which sublayers a draft of this model can leave out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eecore.cli.files import check_out
from eecore.cli.loading import ModelPath, check_path, spinner
from eecore.cli.options import LoadOptions, takes_options
from eecore.cli.process import INTERRUPTED
from eecore.files.texts import read_text

if TYPE_CHECKING:
    from eecore.calibration.skip_search import SkipStep

# A token is hardly ever longer: the rest of a long file does not go to the tokenizer.
MAX_CHARACTERS_PER_TOKEN = 32


@takes_options
def search(
    model: ModelPath,
    text: Annotated[
        Path, typer.Option(help="Text like what the model will write, a few hundred words.")
    ],
    out: Annotated[Path, typer.Option(help="Where to write the result, as JSON.")],
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text to use.")] = 256,
    max_skipped: Annotated[
        int | None,
        typer.Option(min=1, help="Sublayers to leave out at most.", show_default="half of them"),
    ] = None,
    *,
    loading: LoadOptions,
) -> int:
    """Search the sublayers to skip for --exit draft-verify --skips FILE.

    Each line of output is for one more sublayer left out. Ctrl-C keeps the result so far.
    """
    directory = check_path(model)
    content = read_text(text)[: max_tokens * MAX_CHARACTERS_PER_TOKEN]
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
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    if steps:
        found = SkipSearch(tuple(steps))
        found.save(out)
        print(f"best: {describe(found.best)}; wrote {out}")
    return code


def describe(step: SkipStep) -> str:
    """A set of skipped sublayers and its figures, in one line."""
    skipped = len(step.skip_attention) + len(step.skip_mlp)
    return (
        f"{skipped:3} skipped, agreement {step.agreement:.2f}, draft cost {step.draft_cost:.2f}, "
        f"predicted speed-up {step.predicted_speedup:.2f} with {step.num_drafts} drafts"
    )
