"""What a policy means to decoding, as data: the one place that asks which class a policy has."""

from __future__ import annotations

from dataclasses import dataclass
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

__all__ = ["GAPS", "GIVEN", "Check", "DraftPath", "Route", "make_route"]

GAPS = ("softmax", "cut")
"""The measures that the head gives at the last layer anyway."""


@dataclass(frozen=True)
class Check:
    """What is measured of a state at an exit point."""

    measure: Measure
    classifier: ExitClassifier | None = None


@dataclass(frozen=True)
class DraftPath:
    """Which part of the model drafts, and up to which layer it is the full model."""

    num_layers: int
    """Layers that the draft goes through."""
    shared_layers: int
    """Layers whose work verification reuses."""
    skip_attention: frozenset[int] = frozenset()
    skip_mlp: frozenset[int] = frozenset()
    stops_on: Literal["gap", "probability"] = "gap"
    """What of a drafted token is compared with the threshold below which a draft ends: the gap of
    the two largest probabilities, or the token's own probability (Zhang et al. 2023)."""
    is_given: bool = False
    """Drafts come with a round, and no layer makes them."""

    @property
    def layers_run(self) -> int:
        """Layer executions of one drafted token."""
        return self.num_layers - len(self.skip_attention & self.skip_mlp)


GIVEN = DraftPath(0, 0, is_given=True)
"""The path of drafts that come with a round: looked up, or made by a draft head before."""


@dataclass(frozen=True, eq=False)
class Route:
    """How a request decodes.

    Attributes:
        depth: layers of a row that does not leave early, prompts included.
        points: exit points, ascending.
        check: what is measured there; None where a row leaves without being measured.
        together: rows leave when all rows with ``together`` are accepted, none before.
        records: layers after which the check is made and no row leaves by it.
        fills: skipped layers get keys and values: from the exit state, unless it shares.
        shares: those of skipped loops are copies of the last loop that ran.
        path: how it drafts; None for a request that does not speculate.
        draft_threshold: a draft ends with a token that is below it; None never ends one.
        adaptive: the threshold follows the acceptance rate.
        ahead: drafts that a draft head makes at the end of a round, for the next one.
        ngrams: sizes of the longest and the shortest n-gram by which drafts are looked up.
        auto: each round's drafts are chosen; this is its route at full depth.
    """

    policy: Exit
    depth: int
    points: tuple[int, ...] = ()
    check: Check | None = None
    records: tuple[int, ...] = ()
    together: bool = False
    fills: bool = False
    shares: bool = False
    path: DraftPath | None = None
    draft_threshold: float | None = None
    adaptive: bool = False
    ahead: int = 0
    ngrams: tuple[int, int] | None = None
    auto: Auto | None = None

    @property
    def fills_head(self) -> bool:
        """Whether each row runs all layers, in one pass: a draft head with layers of its own gets
        keys of every position then.
        """
        by_layers = self.path is not None and not self.path.is_given
        return not (self.points or by_layers or isinstance(self.policy, FixedExit))

    @property
    def decays(self) -> bool:
        """Whether the thresholds change from token to token."""
        return isinstance(self.policy, ConfidentExit) and self.policy.decay_tau != 0.0

    def thresholds(self, t: int, max_tokens: int) -> list[float]:
        """Of each exit point, for token ``t`` of at most ``max_tokens``."""
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
            fills=True,
            shares=policy.fill == "last",
        )
    if isinstance(policy, SelfSpeculative):
        return Route(
            policy,
            num_layers,
            path=DraftPath(policy.exit_layer, policy.exit_layer if policy.reuse else 0),
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
            path=DraftPath(
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
    """The exit layers at which a measure is taken though no row leaves by it."""
    if measure == "gate":  # whose confidence is made of all loops so far
        last = max(points, default=0)
        return tuple(layer for layer in exit_layers if layer < last and layer not in points)
    return () if measure in GAPS else (exit_layers[-1],)
