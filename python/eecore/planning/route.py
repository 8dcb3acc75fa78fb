"""Policies as data for decoding: in the runtime the one module that asks for a policy's class."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from eecore.exits import (
    Auto,
    ConfidentExit,
    DraftAndVerify,
    Exit,
    ExitClassifier,
    FixedExit,
    HeadDrafts,
    Measure,
    PromptLookup,
    SelfSpeculative,
)

GAPS = ("softmax", "cut")
"""Measures that the head computes at the last layer for every row."""


@dataclass(frozen=True)
class Check:
    """A measurement of the states at an exit point."""

    measure: Measure
    classifier: ExitClassifier | None = None


@dataclass(frozen=True)
class DraftPath:
    """The part of the model that drafts, and the layers at its start that verification shares."""

    num_layers: int
    """Number of layers that a draft runs through."""
    shared_layers: int
    """Number of first layers whose results verification reuses."""
    skip_attention: frozenset[int] = frozenset()
    skip_mlp: frozenset[int] = frozenset()
    stops_on: Literal["gap", "probability"] = "gap"
    """The number that is compared with the threshold below which a draft ends: the gap between the
    two largest probabilities, or the drafted token's own probability (Zhang et al. 2023).
    """
    is_given: bool = False
    """Whether drafts are given to a round, so that no layer makes them."""

    @property
    def layers_run(self) -> int:
        """Layer executions of one drafted token."""
        return self.num_layers - len(self.skip_attention & self.skip_mlp)


draft_path = lru_cache(maxsize=256)(DraftPath)  # programs are quicker to find by the same object

GIVEN = draft_path(0, 0, is_given=True)
"""The path of drafts that are given to a round: looked up, or made by a draft head before it."""


@dataclass(frozen=True, eq=False)
class Route:
    """How a request decodes.

    Attributes:
        policy: the policy that the route was made from.
        depth: layers that a row runs through unless it exits early, also for prompts.
        points: exit points, ascending.
        check: the measurement at the exit points; None where rows exit without one.
        records: layers after which the check is made only for the record.
        together: rows exit once all rows with ``together`` are accepted, none before.
        in_thought: rows exit in a thought alone.
        fills: skipped layers get keys and values, from the exit state.
        path: how the request drafts; None for a request that does not speculate.
        draft_threshold: a draft ends with a token below this threshold; None: no threshold.
        adaptive: the threshold follows the acceptance rate.
        ahead: drafts that a draft head makes at the end of a round, for the next one.
        ngrams: lengths of the longest and the shortest n-gram by which drafts are looked up.
        auto: the policy whose drafts are chosen for each round; the route is then that of full
            depth.
    """

    policy: Exit
    depth: int
    points: tuple[int, ...] = ()
    check: Check | None = None
    records: tuple[int, ...] = ()
    together: bool = False
    in_thought: bool = False
    fills: bool = False
    path: DraftPath | None = None
    draft_threshold: float | None = None
    adaptive: bool = False
    ahead: int = 0
    ngrams: tuple[int, int] | None = None
    auto: Auto | None = None

    @property
    def fills_head(self) -> bool:
        """Whether every position runs through all layers in one pass, which gives a draft head with
        layers of its own keys for all of them.
        """
        by_layers = self.path is not None and not self.path.is_given
        return not (self.points or by_layers or isinstance(self.policy, FixedExit))

    @property
    def changes(self) -> bool:
        """Whether the thresholds change from token to token."""
        decays = isinstance(self.policy, ConfidentExit) and self.policy.decay_tau != 0.0
        return decays or self.in_thought

    def thresholds(self, t: int, max_tokens: int) -> list[float]:
        """The threshold of each exit point for token ``t`` of at most ``max_tokens``."""
        assert isinstance(self.policy, ConfidentExit)
        return [self.policy.threshold_at(point, t, max_tokens) for point in self.points]


def make_route(policy: Exit, exit_layers: range, sampled: bool) -> Route:
    """The route of a policy on a model with these exit layers, the last one full depth."""
    num_layers = exit_layers[-1]
    if isinstance(policy, FixedExit):
        return Route(policy, policy.exit_layer)
    if isinstance(policy, ConfidentExit):
        points = tuple(sorted(policy.points(exit_layers)))
        return Route(
            policy,
            num_layers,
            points=points,
            check=Check(policy.measure, policy.classifier),
            records=_records(policy.measure, points, exit_layers),
            together=policy.batch == "all",
            in_thought=policy.follows_thoughts,
            fills=True,
        )
    if isinstance(policy, SelfSpeculative):
        return Route(
            policy,
            num_layers,
            path=draft_path(policy.exit_layer, policy.exit_layer if policy.reuse else 0),
            draft_threshold=policy.draft_threshold,
        )
    if isinstance(policy, PromptLookup):
        return Route(policy, num_layers, path=GIVEN, ngrams=policy.ngrams)
    if isinstance(policy, HeadDrafts):
        return Route(
            policy,
            num_layers,
            path=GIVEN,
            draft_threshold=policy.threshold,
            ahead=policy.num_drafts,
        )
    if isinstance(policy, Auto):
        return Route(policy, num_layers, ngrams=policy.ngrams, auto=policy)
    if isinstance(policy, DraftAndVerify):
        first = policy.initial_threshold
        if first is None:
            first = 0.5 if sampled else 0.8
        return Route(
            policy,
            num_layers,
            path=draft_path(
                num_layers,
                policy.first_skipped,
                policy.skip_attention,
                policy.skip_mlp,
                stops_on="probability",
            ),
            draft_threshold=first if policy.adaptive else None,
            adaptive=policy.adaptive,
        )
    return Route(policy, num_layers)


def _records(measure: Measure, points: tuple[int, ...], exit_layers: range) -> tuple[int, ...]:
    """The exit layers after which a measure is taken only for the record."""
    if measure == "gate":  # its confidence adds up over all loops so far
        last = max(points, default=0)
        return tuple(layer for layer in exit_layers if layer < last and layer not in points)
    return () if measure in GAPS else (exit_layers[-1],)
