"""Exit policies: how many layers each token gets, and what the output then promises.

Layer counts follow one convention everywhere: exit layer E means that the first E layers have run,
so E runs from 1 to the model's number of layers.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from eecore.calibration_file import (
    MEASURES,
    TEXT_PARTS,
    Calibration,
    Measure,
    Source,
    TextPart,
)
from eecore.errors import ExitError, RequestError
from eecore.files.readable import path_of
from eecore.values import (
    FLAG,
    INT32_MAX,
    Rule,
    check_fields,
    choice,
    instance,
    real,
    rules_of,
    shown,
    weights,
    whole,
    wholes,
)

if TYPE_CHECKING:  # the command line lists the modes before torch is imported
    import torch
    from torch import Tensor

    from eecore.config import AnyModelConfig

__all__ = [
    "MEASURES",
    "Auto",
    "ConfidentExit",
    "DraftAndVerify",
    "Exit",
    "ExitClassifier",
    "FixedExit",
    "Full",
    "HeadDrafts",
    "Measure",
    "PromptLookup",
    "SelfSpeculative",
    "layer",
    "layers",
]

BatchMode = Literal["each", "all"]
USUAL_THRESHOLD = 0.9
MAX_LISTED_LAYERS = 65536
MAX_NGRAM = 64


@dataclass(frozen=True)
class LayerRule(Rule):
    """The rule of a field of layers, which also depends on the model.

    Attributes:
        first: the lowest allowed layer.
        spare: the number of the model's last layers that are not allowed.
        exits: whether they are exit layers: in a looped model the ends of loops.
    """

    first: int = 1
    spare: int = 0
    exits: bool = True

    def check(self, name: str, value: Any, exit_layers: range) -> None:
        """Raise :class:`eecore.ExitError` for a layer that the model does not have.

        Args:
            exit_layers: of the model, the last one full depth.
        """
        num_layers = exit_layers[-1]
        allowed = range(self.first, num_layers - self.spare + 1)
        expected = f"{self.first}..{allowed.stop - 1}"
        if self.exits and exit_layers.step > 1:
            allowed = exit_layers[: len(exit_layers) - self.spare]
            expected = f"ends of loops, {', '.join(map(str, allowed))},"
        for each in (value,) if isinstance(value, int) else value or ():
            if each not in allowed:
                raise ExitError(
                    f"{name}: expected {expected} for a model of {num_layers} layers, "
                    f"got {shown(each)}"
                )


def layer(first: int = 1, spare: int = 0, *, exits: bool = True) -> LayerRule:
    """The rule of a number of layers; the upper limit depends on the model."""
    own = whole(-INT32_MAX).own
    return LayerRule(own, "a layer", int, first=first, spare=spare, exits=exits)


def layers(first: int = 1, spare: int = 0, kind: Any = tuple) -> LayerRule:
    """The rule of several layers; the upper limit depends on the model."""
    expected = f"at most {MAX_LISTED_LAYERS} layers"
    own = wholes(-INT32_MAX, most=MAX_LISTED_LAYERS, kind=kind).own
    return LayerRule(own, expected, first=first, spare=spare, exits=first > 0)


Drafts = Annotated[int, whole(1)]


@dataclass(frozen=True)
class Exit:
    """The base of every exit policy. Fields are checked by their rules."""

    samples_as_full: ClassVar[bool] = False
    """Whether sampled text is that of :class:`Full` with the same seed."""

    def __post_init__(self) -> None:
        check_fields(self, ExitError, f"{type(self).__name__}.")

    @property
    def contract(self) -> str:
        """The promise of an output under this policy."""
        raise NotImplementedError

    @property
    def max_drafts(self) -> int:
        """Most tokens drafted a round; 0 for a policy that does not speculate."""
        return int(getattr(self, "num_drafts", 0))

    @property
    def follows_thoughts(self) -> bool:
        """Whether the policy depends on the end of a thought."""
        return False

    @property
    def needs_head(self) -> bool:
        """Whether the policy needs a model with a draft head."""
        return False

    @property
    def needs_vocabulary(self) -> bool:
        """Whether the draft head has to be of the kind that ``eecore train-exits`` makes, with rows
        of the model's own LM head.
        """
        return False

    @property
    def lowest_exit(self) -> int:
        """The lowest layer that a token can come from; 0 where no layer drafts it."""
        return int(getattr(self, "exit_layer", 1))

    def wants_training(self, exit_layers: range) -> bool:  # noqa: ARG002
        """Whether its text is good only on a model that was trained for early exit."""
        return False

    def check(self, config: AnyModelConfig) -> None:
        """Raise :class:`eecore.ExitError` when a model of this config cannot run the policy."""
        for name, rule in rules_of(type(self)).items():
            if isinstance(rule, LayerRule):
                what = f"{type(self).__name__}.{name}"
                rule.check(what, getattr(self, name), config.exit_layers)

    def settled(self, config: AnyModelConfig) -> Exit:  # noqa: ARG002
        """The policy with what a model's config says in place of what the policy leaves to it."""
        return self

    def check_request(
        self, source: Source | None, vocabulary: str | None, temperature: float
    ) -> None:
        """Raise an error where the policy's promise does not hold for a request.

        Args:
            source: the model's identity.
            vocabulary: SHA-256 of the tokens that the model's draft head knows; None without a
                head.
            temperature: the request's.

        Raises:
            ExitError: the promise was made for another model.
            RequestError: the promise was made for other sampling.
        """


@dataclass(frozen=True)
class Full(Exit):
    """Every layer for every token."""

    samples_as_full = True

    @property
    def contract(self) -> str:
        return "full: every layer"


@dataclass(frozen=True)
class FixedExit(Exit):
    """The model cut at ``exit_layer``: every token comes from ``head(h[E])`` (LayerSkip §4.2).

    Layers after the first ``exit_layer`` are never run, not for the prompt either, and their keys
    and values are not filled.

    Args:
        exit_layer: layers that run, 1..num_layers.
    """

    exit_layer: Annotated[int, layer()]

    @property
    def contract(self) -> str:
        return f"fixed exit after layer {self.exit_layer}: no promise about quality"

    def wants_training(self, exit_layers: range) -> bool:
        return self.exit_layer < exit_layers[-1]


CLASSIFIER_TENSORS = ("weight1", "bias1", "weight2", "bias2")


@dataclass(frozen=True, eq=False)
class ExitClassifier:
    """The classifier M of the classifier measure: one linear layer to two classes, or one ReLU
    layer before it.

    Attributes:
        weight1: float32 [2, hidden_size], or [inner_size, hidden_size] with ``weight2``.
        bias1: float32 [2] or [inner_size].
        weight2: float32 [2, inner_size] or None.
        bias2: float32 [2] or None.
    """

    weight1: Tensor
    bias1: Tensor | None = None
    weight2: Tensor | None = None
    bias2: Tensor | None = None
    _moved: dict[torch.device, ExitClassifier] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        from torch import Tensor

        for name, tensor in zip(CLASSIFIER_TENSORS, self.tensors, strict=True):
            if tensor is None and name != "weight1":
                continue
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                raise ExitError(
                    f"ExitClassifier.{name}: expected a tensor of floats, got {shown(tensor)}"
                )
        if self.weight1.dim() == 0 or 0 in self.weight1.shape:
            raise ExitError(
                "ExitClassifier.weight1: expected [2 or inner_size, hidden_size], "
                f"got {list(self.weight1.shape)}"
            )
        inner = self.weight1.shape[0]
        rows = 2 if self.weight2 is None else inner
        for name, tensor, expected in (
            ("weight1", self.weight1, [rows, self.weight1.shape[-1]]),
            ("bias1", self.bias1, [rows]),
            ("weight2", self.weight2, [2, inner]),
            ("bias2", self.bias2, None if self.weight2 is None else [2]),
        ):
            if tensor is not None and list(tensor.shape) != expected:
                raise ExitError(
                    f"ExitClassifier.{name}: expected {expected or 'none without weight2'}, "
                    f"got {list(tensor.shape)}"
                )

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.weight1, self.bias1, self.weight2, self.bias2

    def on(self, device: torch.device) -> ExitClassifier:
        """The classifier with contiguous float32 weights on ``device``, moved once."""
        if device not in self._moved:
            moved = [t if t is None else t.to(device).float().contiguous() for t in self.tensors]
            assert moved[0] is not None
            self._moved[device] = ExitClassifier(moved[0], *moved[1:])
        return self._moved[device]

    @functools.cached_property
    def sha256(self) -> str:
        """The digest of the weights in float32: classifiers of equal numbers are equal."""
        digest = hashlib.sha256()
        for tensor in self.tensors:
            digest.update(b"none" if tensor is None else str(list(tensor.shape)).encode())
            if tensor is not None:
                digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    @staticmethod
    def load(path: str | Path) -> ExitClassifier:
        """Read ``weight1``, ``bias1``, ``weight2``, ``bias2`` from a safetensors file.

        Raises:
            ExitError: the file cannot be read, or is not a classifier.
        """
        from eecore.files.tensors import TensorFile

        with TensorFile(path_of(path, ExitError), ExitError) as file:
            if "weight1" not in file.names:
                raise ExitError(
                    f"{path}: expected a tensor weight1, got {shown(sorted(file.names))}"
                )
            names = [name for name in CLASSIFIER_TENSORS if name in file.names]
            for name in names:
                if file.stored_dtype(name) not in ("F32", "BF16", "F16", "F64"):
                    raise file.wrong(name, "a tensor of floats", file.stored_dtype(name))
                if not 1 <= len(file.shape(name)) <= 2 or 0 in file.shape(name):
                    raise file.wrong(name, "one or two dimensions", shown(list(file.shape(name))))
            loaded = {name: file.tensor(name).float() for name in names}
        for name, tensor in loaded.items():
            if not tensor.isfinite().all():
                raise ExitError(f"{path}: {name}: expected finite numbers, got others among them")
        try:
            return ExitClassifier(**loaded)
        except ExitError as error:
            raise ExitError(f"{path}: {error}") from None


def _by_layer(given: Any) -> dict[int, float] | None:
    pairs = weights(0.0, 1.0, most=MAX_LISTED_LAYERS).own(given)
    return None if pairs is None else dict(pairs)


THRESHOLDS = Rule(_by_layer, "a threshold, 0..1, for each of some layers", is_plain=False)


@dataclass(frozen=True)
class ConfidentExit(Exit):
    """Exit once the model is confident: per token, measured after each exit point.

    Args:
        threshold: lambda: a token is accepted when its confidence is at least lambda; 1 never
            exits. None: 0.9, under ``gate`` what the model's checkpoint says.
        measure: how confidence is measured. ``softmax``: the gap of the two largest probabilities.
            ``state``: the cosine of the states of two consecutive layers. ``classifier``: M of
            ``classifier`` (early-exit framework §2.1; CALM §3). ``cut``: the gap of ``softmax``
            over the tokens that the model's draft head knows, a fraction of the work where a
            vocabulary is large. ``gate``: in a looped model (Ouro), the probability with which its
            exit gate exits after this loop or an earlier one, ``1 - prod_i (1 - lambda_i)``; after
            the last loop it is 1. Under every measure an exit's token is chosen by the whole LM
            head.
        batch: whether each row exits when it is accepted, or all rows together. ``all``: at the
            first exit point at which every row is accepted (early-exit framework, Algorithm 1).
        decay_tau: tau of CALM's decaying threshold, 4 in its summaries; 0 switches it off. It is
            ``clip(0.9 * lambda + 0.1 * exp(-tau * t / N), 0, 1)`` (CALM eq. 5).
        exit_points: exit layers at which confidence is measured. None: all of them.
        min_exit_layer: the earliest exit.
        thresholds: lambda of single exit points, which replaces ``threshold`` there.
        classifier: for the ``classifier`` measure.
        part: whether tokens may exit in all of a text, or in the ``thought`` before an answer
            alone.
        calibration: the calibration that the threshold is from; :meth:`calibrated` sets it.
    """

    threshold: Annotated[float | None, real(0.0, 1.0)] = None
    measure: Annotated[Measure, choice(*MEASURES)] = "softmax"
    batch: Annotated[BatchMode, choice("each", "all")] = "each"
    decay_tau: Annotated[float, real(0.0, sys.float_info.max, expected="0 or more")] = 0.0
    exit_points: Annotated[tuple[int, ...] | None, layers()] = None
    min_exit_layer: Annotated[int, layer(exits=False)] = 1
    thresholds: Annotated[Mapping[int, float], THRESHOLDS] = field(default_factory=dict)
    classifier: Annotated[ExitClassifier | None, instance(ExitClassifier)] = None
    part: Annotated[TextPart, choice(*TEXT_PARTS)] = "all"
    calibration: Annotated[Calibration | None, instance(Calibration)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exit_points == ():
            raise ExitError("ConfidentExit.exit_points: expected some layers, or None, got ()")
        strangers = sorted(set(self.thresholds) - set(self.exit_points or self.thresholds))
        if strangers:
            raise ExitError(
                f"ConfidentExit.thresholds: expected layers of exit_points={self.exit_points}, "
                f"got {strangers[0]}"
            )
        if (self.measure == "classifier") != (self.classifier is not None):
            raise ExitError(
                "ConfidentExit.classifier: expected one with measure='classifier', none without, "
                f"got measure={self.measure!r} and classifier={self.classifier!r}"
            )
        if self.threshold is None and self.measure != "gate":
            object.__setattr__(self, "threshold", USUAL_THRESHOLD)
        if self.calibration is not None:
            self.calibration.check_fits(self)

    @staticmethod
    def calibrated(
        calibration: Calibration | str | Path, classifier: ExitClassifier | None = None
    ) -> ConfidentExit:
        """The policy of a calibration, with its guarantee (CALM §4).

        The engine refuses the policy for another model, dtype or sampled output.

        Args:
            calibration: the result of :func:`eecore.calibrate`, or the file that ``eecore
                calibrate`` wrote.
            classifier: the classifier of the calibration, for the ``classifier`` measure.

        Raises:
            ExitError: the file cannot be used, or the classifier is another one.
        """
        if not isinstance(calibration, Calibration):
            calibration = Calibration.load(calibration)
        calibration.check_classifier(None if classifier is None else classifier.sha256)
        return ConfidentExit(**calibration.settings, classifier=classifier, calibration=calibration)

    @property
    def follows_thoughts(self) -> bool:
        return self.part == "thought"

    @property
    def needs_head(self) -> bool:
        return self.measure == "cut"

    @property
    def needs_vocabulary(self) -> bool:
        return self.needs_head

    @property
    def lowest_exit(self) -> int:
        return max(self.min_exit_layer, min(self.exit_points or (1,)))

    @property
    def contract(self) -> str:
        promise = "uncalibrated" if self.calibration is None else self.calibration.promise
        threshold = "of the model" if self.threshold is None else f"{self.threshold:g}"
        where = "" if self.part == "all" else " in thoughts"
        return f"confident exit{where} ({self.measure}, threshold {threshold}): {promise}"

    def wants_training(self, exit_layers: range) -> bool:
        is_gate = self.measure == "gate"  # which is trained with the exits
        return self.calibration is None and not is_gate and bool(self.points(exit_layers))

    def check(self, config: AnyModelConfig) -> None:
        super().check(config)
        layer().check("ConfidentExit.thresholds", self.thresholds, config.exit_layers)
        hidden_size = config.hidden_size
        if self.classifier is not None and self.classifier.weight1.shape[-1] != hidden_size:
            raise ExitError(
                f"ConfidentExit.classifier: expected weight1 [*, hidden_size={hidden_size}], got "
                f"{list(self.classifier.weight1.shape)}"
            )
        if self.measure == "gate" and (config.gate_threshold is None or config.num_loops == 1):
            raise ExitError(
                "ConfidentExit.measure: expected a model with several loops and an exit gate "
                f"(Ouro) for 'gate', got {config.architecture} of {config.num_loops} loop(s)"
            )

    def settled(self, config: AnyModelConfig) -> ConfidentExit:
        if self.threshold is not None:
            return self
        return replace(self, threshold=config.gate_threshold)

    def check_request(
        self, source: Source | None, vocabulary: str | None, temperature: float
    ) -> None:
        if self.calibration is None:
            return
        self.calibration.check_model(source)
        if self.needs_head:
            self.calibration.check_vocabulary(vocabulary)
        if temperature > 0.0:
            raise RequestError(
                "temperature: expected 0 with a calibrated exit, whose guarantee is for greedy "
                f"output, got {temperature:g}"
            )

    def points(self, exit_layers: range) -> frozenset[int]:
        """The exit layers at which confidence is measured, and tokens may exit.

        Nothing is measured at the last layer, nor for a threshold of 1.
        """
        chosen = exit_layers if self.exit_points is None else self.exit_points
        return frozenset(
            e for e in chosen if self.min_exit_layer <= e < exit_layers[-1] and self._base(e) < 1.0
        )

    def _base(self, exit_layer: int) -> float:
        """The threshold at an exit point before it decays; 1 where only the model knows it."""
        threshold = 1.0 if self.threshold is None else self.threshold
        return self.thresholds.get(exit_layer, threshold)

    def threshold_at(self, exit_layer: int, t: int, max_tokens: int) -> float:
        """lambda'(t) at an exit point, for token ``t`` of at most ``max_tokens`` (CALM eq. 5).

        A base threshold of 1 stays 1: tokens never exit early.
        """
        base = self._base(exit_layer)
        if base >= 1.0 or self.decay_tau == 0.0:
            return base
        decay = math.exp(-self.decay_tau * t / max_tokens)
        return min(max(0.9 * base + 0.1 * decay, 0.0), 1.0)


@dataclass(frozen=True)
class SelfSpeculative(Exit):
    """Draft with the first ``exit_layer`` layers, verify with the rest (LayerSkip §4.3).

    Lossless: greedy output has the same tokens as :class:`Full`, sampled output exactly its
    distribution.

    Args:
        exit_layer: layers of the draft, 1..num_layers-1.
        num_drafts: most tokens drafted a round, up to 64.
        draft_threshold: stop a round's draft after a token whose top-2 probability gap is below it.
        reuse: whether verification reuses keys, values and exit states of the draft. False runs
            drafted positions through every layer again: the same tokens, to measure what the reuse
            saves (LayerSkip §4.3.3, Table 7).
    """

    exit_layer: Annotated[int, layer(spare=1)]
    num_drafts: Drafts = 6
    draft_threshold: Annotated[float | None, real(0.0, 1.0)] = None
    reuse: Annotated[bool, FLAG] = True

    @property
    def contract(self) -> str:
        return (
            f"self-speculation (exit layer {self.exit_layer}, {self.num_drafts} drafts): lossless"
        )


@dataclass(frozen=True)
class DraftAndVerify(Exit):
    """Draft with some attention and MLP sublayers skipped, verify with all (Zhang et al. 2023).

    Lossless like :class:`SelfSpeculative`, and needs no training:
    ``eecore.search_skipped_sublayers`` finds the sets for a model.

    Args:
        skip_attention: layers (from 0) whose attention the draft skips.
        skip_mlp: layers (from 0) whose MLP the draft skips.
        num_drafts: most tokens drafted a round.
        adaptive: stop a round's draft after a token whose probability is below a threshold that
            follows the acceptance rate of the rounds before the last one; False always drafts
            ``num_drafts``.
        initial_threshold: where the threshold starts; None is 0.8 for greedy requests and 0.5 for
            sampled ones.
    """

    skip_attention: Annotated[frozenset[int], layers(0, 1, frozenset)] = frozenset()
    skip_mlp: Annotated[frozenset[int], layers(0, 1, frozenset)] = frozenset()
    num_drafts: Drafts = 8
    adaptive: Annotated[bool, FLAG] = True
    initial_threshold: Annotated[float | None, real(0.0, 1.0)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.skip_attention and not self.skip_mlp:
            raise ExitError("DraftAndVerify: expected at least one sublayer to skip, got none")

    @property
    def contract(self) -> str:
        skipped = len(self.skip_attention) + len(self.skip_mlp)
        return f"draft and verify ({skipped} sublayers skipped): lossless"

    @property
    def first_skipped(self) -> int:
        """The number of first layers that draft and verification run alike."""
        return min(self.skip_attention | self.skip_mlp)


@dataclass(frozen=True)
class PromptLookup(Exit):
    """Draft what followed the last tokens where they occurred before, in prompt or output.

    Lossless: greedy output has the same tokens as :class:`Full`, and so has sampled output of the
    same seed. It needs no training and no layer to draft; it pays where an answer repeats its
    prompt: summaries, code, rewriting. (Saxena 2023; Yang et al. 2023.)

    Args:
        num_drafts: most tokens drafted a round, up to 64.
        max_ngram: how many of the last tokens are looked for at most; the longest n-gram that
            occurred before counts, at its latest place.
        min_ngram: how many have to be found at least.
    """

    samples_as_full = True

    num_drafts: Drafts = 8
    max_ngram: Annotated[int, whole(1, MAX_NGRAM)] = 8
    min_ngram: Annotated[int, whole(1, MAX_NGRAM)] = 2
    lowest_exit = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_ngram > self.max_ngram:
            raise ExitError(
                f"PromptLookup.min_ngram: expected 1..max_ngram={self.max_ngram}, "
                f"got {self.min_ngram}"
            )

    @property
    def ngrams(self) -> tuple[int, int]:
        """The lengths of the longest and the shortest n-gram that is looked for."""
        return self.max_ngram, self.min_ngram

    @property
    def contract(self) -> str:
        return f"prompt lookup ({self.num_drafts} drafts): lossless"


@dataclass(frozen=True)
class HeadDrafts(Exit):
    """Draft with a small head after the last layer, verify with all layers.

    The head was trained for the model, by ``eecore train-exits`` or by others; the model's weights
    are unchanged. At the end of each round it drafts for the next one, from the states of
    that round. Lossless: greedy output has the same tokens as :class:`Full`, and so has sampled
    output of the same seed. (Medusa, Cai et al. 2024; EAGLE, Li et al. 2024; recurrent drafter,
    Zhang et al. 2024.)

    Args:
        num_drafts: most tokens drafted a round, up to 8, or up to the block of a head that drafts a
            block.
        threshold: a round's drafts end before one whose probability, as the head computes it, is
            lower.
    """

    samples_as_full = True

    num_drafts: Drafts = 4
    threshold: Annotated[float, real(0.0, 1.0)] = 0.3
    needs_head = True
    lowest_exit = 0

    @property
    def contract(self) -> str:
        return f"draft head ({self.num_drafts} drafts): lossless"


@dataclass(frozen=True)
class Auto(Exit):
    """The fastest way, round by round, that keeps the text of :class:`Full`.

    A round runs at full depth, verifies drafts that were looked up as by :class:`PromptLookup` or
    made by the model's draft head as by :class:`HeadDrafts`, or drafts with the first layers as
    :class:`SelfSpeculative` does. The choice follows from measured times of passes and from the
    acceptance of earlier drafts. In a batch there are fewer drafts, as more rows make verification
    dearer, and tokens of a request that is ahead of full depth count less, unless more requests
    wait for a place in the batch. Greedy output has the same tokens as :class:`Full`; so has
    sampled output of the same seed, for which no layer drafts.

    Args:
        num_drafts: most tokens drafted a round, up to 64.
        exit_layers: layers that may draft; (): none. None: the most promising ones, for a model
            whose ``exits.json`` says how often its exits agree with the last layer.
        lookup: whether drafts are looked up.
        head: whether the model's draft head drafts, if it has one.
    """

    samples_as_full = True

    num_drafts: Drafts = 10
    exit_layers: Annotated[tuple[int, ...] | None, layers(spare=1)] = None
    lookup: Annotated[bool, FLAG] = True
    head: Annotated[bool, FLAG] = True
    lowest_exit = 0

    @property
    def ngrams(self) -> tuple[int, int] | None:
        """The lengths of the longest and the shortest n-gram that is looked for."""
        return PromptLookup().ngrams if self.lookup else None

    @property
    def contract(self) -> str:
        return f"auto (at most {self.num_drafts} drafts): lossless"
