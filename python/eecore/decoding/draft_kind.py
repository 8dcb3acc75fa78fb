"""The key of a program of rounds: what it calls, and the fields and sizes of its memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eecore.decoding.head_drafts import head_drafting_fields, head_results
from eecore.decoding.heads import head_fields
from eecore.decoding.memory import Field, cross_fields, power_of_two
from eecore.decoding.step import Sizes, sizes_for
from eecore.models import DraftHead
from eecore.planning.heads import max_ahead
from eecore.planning.route import DraftPath
from eecore.planning.row import Row

# Programs are made for at least this many drafts, if requests can have so many, also near the end
# of a text.
MIN_STEPS = 16


@dataclass(frozen=True)
class DraftKind:
    """The key of a program: its calls, and the sizes of its memory."""

    path: DraftPath
    num_steps: int
    """Maximum number of drafts of a row."""
    samples: bool
    """Whether some rows draw their drafts at random."""
    num_stops: int
    """Maximum number of tokens that end a row's text."""
    most_ahead: int
    """Maximum number of drafts that a draft head makes for the next round; 0 where none does."""
    taps: tuple[int, ...]
    """Layers after which a draft head takes the states of verified rows; () where none does."""
    sizes: Sizes

    @property
    def drafts_ahead(self) -> bool:
        """Whether a draft head drafts for the next round."""
        return self.most_ahead > 0


def draft_kind(
    rows: list[Row],
    *,
    page_size: int,
    ahead: bool,
    head: DraftHead | None = None,
) -> DraftKind:
    """The program that these rows need, sizes rounded up."""
    sequences = [row.sequence for row in rows]
    path = rows[0].route.path
    assert path is not None
    steps = power_of_two(max(MIN_STEPS, *(row.work.max_drafts for row in rows)))
    # No more than the requests can ever have.
    longest = max(sequence.sampling.max_tokens - 1 for sequence in sequences)
    steps = min(steps, max(s.max_drafts for s in sequences), power_of_two(max(1, longest)))
    drafts_ahead = any(row.ahead > 0 for row in rows)
    has_keys = head is not None and head.keys is not None
    takes = path.is_given and (drafts_ahead or has_keys)
    return DraftKind(
        path,
        steps,
        not path.is_given and any(s.sampling.temperature > 0.0 for s in sequences),
        power_of_two(max(1, *(len(sequence.stop_ids) for sequence in sequences))),
        max_ahead(head) if drafts_ahead else 0,
        head.taps if takes and head is not None else (),
        sizes_for(rows, steps + 1, page_size=page_size, ahead=ahead),
    )


def given_fields(kind: DraftKind) -> dict[str, Field]:
    """Fields that the host writes for a round."""
    sizes = kind.sizes
    row, drafts = (sizes.num_rows,), (sizes.num_rows, kind.num_steps)
    ahead = kind.most_ahead
    return {
        "start": (torch.int64, row),
        "tokens_left": (torch.int64, row),
        "max_drafts": (torch.int64, row),
        **({"num_given": (torch.int64, row)} if kind.path.is_given else {}),
        **(head_drafting_fields(sizes.num_rows, ahead) if ahead else {}),
        "page_table": (torch.int32, (sizes.num_rows, sizes.num_columns)),
        "thresholds": (torch.float32, row),
        "stop_tokens": (torch.int64, (sizes.num_rows, kind.num_stops)),
        "sampled": (torch.bool, row),
        **({"drafts": (torch.int64, drafts)} if kind.path.is_given else {}),
        **cross_fields(sizes.num_rows, sizes.num_input_pages),
    }


def result_fields(kind: DraftKind) -> dict[str, Field]:
    """Result fields of a round."""
    rows, steps, ahead = kind.sizes.num_rows, kind.num_steps, kind.most_ahead
    return {
        "num_drafted": (torch.int64, (rows,)),
        "num_accepted": (torch.int64, (rows,)),
        "next_token": (torch.int64, (rows,)),
        "tokens": (torch.int64, (rows, steps + 1)),  # the first, then the drafts
        "draft_confidences": (torch.float32, (rows, steps)),
        "query_start_loc": (torch.int32, (rows + 1,)),
        **(head_results(rows, ahead) if ahead else {}),
        # Tokens and confidences of the full model, at every verified position.
        **head_fields(rows * (steps + 1), kind.sizes.heads),
    }
