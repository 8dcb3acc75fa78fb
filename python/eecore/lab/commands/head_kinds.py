"""The kinds of draft heads that ``eecore train-exits`` trains: their options and their plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from eecore.cli.failures import UsageError
from eecore.cli.options import option

if TYPE_CHECKING:
    from eecore.config import ModelConfig
    from eecore.lab.training.harness import TrainingRun
    from eecore.lab.training.head_run import DraftTrainee
    from eecore.lab.training.head_states import HeadStates, StatesSettings
    from eecore.models import LlamaModel

STRETCH, ANCHORS = 32, 16
TIMED_STEPS = 1000
"""Steps of the run whose speed converts --minutes to steps."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """The parts that both kinds of heads have."""

    PANEL: ClassVar[str] = "Head"
    kind: Literal["recurrent", "block"] = option(
        "recurrent",
        "A recurrent head drafts token by token; one that drafts a block does so in one pass, and "
        "has keys and values of its own.",
    )
    taps: str | None = option(
        None,
        "Layers whose states are read; the last is the number of layers.",
        show_default="a third, two thirds and all of the layers",
    )
    vocabulary: int = option(8192, "Tokens that can be drafted.", min=1)
    intermediate_size: int | None = option(
        None, "Size of an MLP.", min=1, max=1 << 16, show_default="the model's"
    )


@dataclass(frozen=True, kw_only=True)
class Recurrent:
    """The parts of a recurrent head, and the weights that it starts from."""

    PANEL: ClassVar[str] = "Recurrent head"
    blocks: int | None = option(None, "MLPs, one after the other.", min=1, max=16, show_default="1")
    attend: int | None = option(
        None,
        "Key heads of the model that the head attends to: those that attend most to what "
        "followed the same token.",
        min=0,
        max=64,
        show_default="4",
    )
    drafts: int | None = option(
        None, "Drafts of each row in training.", min=1, max=8, show_default="3"
    )
    begin: Path | None = option(None, "A head of this model to start from.")
    keep_vocabulary: bool = option(
        False, "Keep the vocabulary of the head of --begin, instead of choosing one."
    )


@dataclass(frozen=True, kw_only=True)
class Block:
    """The parts of a head that drafts a block."""

    PANEL: ClassVar[str] = "Block head"
    layers: int | None = option(None, "The head's layers.", min=1, max=16, show_default="1")
    block_size: int | None = option(
        None,
        "Drafts of a block: the text's last token, and masks.",
        min=2,
        max=64,
        show_default="7",
    )
    rank: int | None = option(
        None,
        "Rank of the table that corrects a draft by the token before it.",
        min=1,
        max=1024,
        show_default="64",
    )


KINDS = {Recurrent: "recurrent", Block: "block"}
"""The kind that options are of."""


class Plan(NamedTuple):
    """How a head of a kind is trained and written."""

    states: StatesSettings
    trainee: Callable[[HeadStates, float], DraftTrainee]
    """A head that learns from a share of the texts."""
    save: Callable[[Path, DraftTrainee, TrainingRun, list[tuple[int, float]]], list[float]]
    settings: Mapping[str, object]
    """Settings whose values are not the options'."""


def refuse_others(options: Recurrent | Block, kind: str) -> None:
    """Refuse options of the other kind.

    Raises:
        UsageError: one was given.
    """
    for each in fields(options):
        value = getattr(options, each.name)
        if value is not None and value is not False:
            flag, other = each.name.replace("_", "-"), KINDS[type(options)]
            raise UsageError(f"--{flag}: expected --kind {other} with it, got --kind {kind}")


def recurrent_plan(
    network: LlamaModel,
    weights: str,
    head: Head,
    recurrent: Recurrent,
    of_run: dict[str, Any],
) -> Plan:
    """A recurrent head's plan.

    Args:
        weights: the format that its weights are stored in.
        of_run: settings of the run's config.

    Raises:
        ModelError: the head to start from is not whole.
        TrainingError: it does not match.
    """
    from eecore.lab.training.head_keys import choose_attended
    from eecore.lab.training.head_pack import save_head
    from eecore.lab.training.head_run import HeadConfig, HeadTrainee
    from eecore.lab.training.head_states import StatesSettings
    from eecore.lab.training.trained_head import read_head
    from eecore.models import network_digest

    model = network.config
    inner = head.intermediate_size or model.intermediate_size
    attend = 4 if recurrent.attend is None else recurrent.attend
    attended = choose_attended(network, attend) if attend else ()
    states = StatesSettings(
        model=network_digest(network),
        weights=weights,
        hidden_size=model.hidden_size,
        taps=taps_of(head.taps, model),
        attended=attended,
        head_dim=model.head_dim if attended else 0,
        queries=model.q_size // model.num_kv_heads if attended else 0,
    )
    config = HeadConfig(
        steps=TIMED_STEPS,
        intermediate_size=inner,
        vocabulary_size=head.vocabulary,
        **_given(num_blocks=recurrent.blocks, num_drafts=recurrent.drafts),
        **of_run,
        stretch=STRETCH,
        keep_vocabulary=recurrent.keep_vocabulary,
    )
    beginning = None
    if recurrent.begin is not None:
        sizes = states.sizes(inner, config.num_blocks)
        kept = head.vocabulary if recurrent.keep_vocabulary else None
        beginning = read_head(recurrent.begin, states.model, states.taps, sizes, kept, attended)
        config = replace(config, begins_with=beginning.sha256)

    def trainee(data: HeadStates, share: float) -> DraftTrainee:
        return HeadTrainee(network, data, config, share=share, beginning=beginning)

    def save(out: Path, trained: Any, *facts: Any) -> list[float]:
        return save_head(out, network, trained, *facts)

    shown = {"blocks": config.num_blocks, "attend": attend, "drafts": config.num_drafts}
    shown |= {"intermediate_size": inner, "batch_size": config.batch_size}
    return Plan(states, trainee, save, shown)


def block_plan(
    network: LlamaModel, weights: str, head: Head, block: Block, of_run: dict[str, Any]
) -> Plan:
    """The plan of a head that drafts a block; arguments as for :func:`recurrent_plan`."""
    from eecore.lab.training.block_pack import save_block_head
    from eecore.lab.training.block_run import BlockConfig, BlockTrainee
    from eecore.lab.training.head_states import StatesSettings
    from eecore.models import network_digest

    model = network.config
    states = StatesSettings(
        model=network_digest(network),
        weights=weights,
        hidden_size=model.hidden_size,
        taps=taps_of(head.taps, model),
        with_prompts=True,
    )
    config = BlockConfig(
        steps=TIMED_STEPS,
        intermediate_size=head.intermediate_size or model.intermediate_size,
        vocabulary_size=head.vocabulary,
        **_given(num_layers=block.layers, block_size=block.block_size, markov_rank=block.rank),
        **of_run,
        anchors=ANCHORS,
    )

    def trainee(data: HeadStates, share: float) -> DraftTrainee:
        return BlockTrainee(network, data, config, share=share)

    def save(out: Path, trained: Any, *facts: Any) -> list[float]:
        return save_block_head(out, network, trained, *facts)

    shown = {"layers": config.num_layers, "block_size": config.block_size}
    shown |= {"rank": config.markov_rank, "batch_size": config.batch_size}
    return Plan(states, trainee, save, {**shown, "intermediate_size": config.intermediate_size})


def _given(**settings: int | None) -> dict[str, Any]:
    """The settings that were given; the others have the config's defaults."""
    return {name: value for name, value in settings.items() if value is not None}


def taps_of(given: str | None, config: ModelConfig) -> tuple[int, ...]:
    """The layers whose states are taken, ascending; the last is the number of layers."""
    layers = config.num_layers
    if given is None:
        return tuple(sorted({max(1, layers // 3), max(1, 2 * layers // 3), layers}))
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdecimal() and len(part) < 6 for part in parts):
        raise UsageError(f"--taps: expected layers such as 10,20,30, got {given}")
    taps = [int(part) for part in parts]
    ascending = all(a < b for a, b in pairwise(taps))
    if not ascending or not taps[0] >= 1 or taps[-1] != layers:
        raise UsageError(
            f"--taps: expected ascending layers of 1..{layers}, the last {layers}, got {given}"
        )
    return tuple(taps)
