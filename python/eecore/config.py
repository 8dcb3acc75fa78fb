"""Settings as frozen dataclasses; an unknown or contradictory setting is a ValueError."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, get_args

from eecore.errors import ModelError, RequestError
from eecore.guide import Guide
from eecore.thought_stop import ThoughtStop
from eecore.values import (
    FLAG,
    MIN_POSITIVE,
    Rule,
    check_fields,
    choice,
    instance,
    instances,
    is_whole,
    real,
    shown,
    texts,
    weights,
    whole,
    wholes,
)

KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "fp8")
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")

# Limits of what a file may claim before its tensors are read; no model comes near them.
MAX_LAYERS = 4096
MAX_TAPS = 8
MAX_LOOPS = 64
MAX_HIDDEN = 1 << 20
MAX_INNER = 1 << 22
MAX_HEADS = 1 << 14
MAX_HEAD_DIM = 1 << 10
MAX_DELTA_DIM = 256
MAX_VOCAB = 1 << 30
MAX_POSITIONS = 2**31 - 1
MAX_STRETCH = 1e30
MAX_END_TOKENS = 1024
NUM_BUCKETS = (4, 128)
MAX_DISTANCE = 1 << 30

Positive = Annotated[float, real(MIN_POSITIVE, MAX_STRETCH, expected="a positive number")]
Layers = Annotated[int, whole(1, MAX_LAYERS)]
Hidden = Annotated[int, whole(1, MAX_HIDDEN)]
Inner = Annotated[int, whole(1, MAX_INNER)]
Heads = Annotated[int, whole(1, MAX_HEADS)]
HeadDim = Annotated[int, whole(1, MAX_HEAD_DIM)]
Positions = Annotated[int, whole(1, MAX_POSITIONS)]
Vocabulary = Annotated[int, whole(2, MAX_VOCAB)]
Epsilon = Annotated[float, real(0.0, 1.0)]
AtLeastOne = Annotated[int, whole(1)]
EndTokens = Annotated[tuple[int, ...], wholes(0, MAX_VOCAB, most=MAX_END_TOKENS)]
Activation = Literal["relu", "gelu_tanh", "silu"]
"""The activation of an MLP; all but relu need a gate."""
QKNorm = Literal["none", "head", "projection"]
"""Whether queries and keys are normed, and over which dimensions."""
OwnSampling = tuple[tuple[str, int | float], ...]
"""Fields of :class:`SamplingParams` and their values, from a model's files."""


@dataclass(frozen=True)
class RopeConfig:
    """A rotary embedding: its frequencies, and how they are stretched for long contexts.

    ``type`` is "default", "linear", "llama3", "yarn" or "longrope". A field whose docstring names
    types has no effect for other types.
    """

    type: Annotated[str, choice(*ROPE_TYPES)] = "default"
    theta: Positive = 10000.0
    rotary_dim: Annotated[int, whole(2, MAX_HEAD_DIM)] = 0
    """Leading dimensions of a head that are rotated; even."""
    factor: Positive = 1.0
    """linear, llama3, yarn: context length over the original one."""
    original_max_position: int = 0
    """llama3, yarn, longrope, query_scale_beta: the context length of the first training."""
    low_freq_factor: Positive = 1.0
    """llama3: wavelengths above original_max_position / low_freq_factor are stretched."""
    high_freq_factor: Positive = 4.0
    """llama3: wavelengths below original_max_position / high_freq_factor stay."""
    beta_fast: Positive = 32.0
    """yarn: dimensions with more rotations than this over the original context stay."""
    beta_slow: Positive = 1.0
    """yarn: dimensions with fewer rotations than this are stretched by factor."""
    truncate: Annotated[bool, FLAG] = True
    """yarn: round the correction range to whole dimensions."""
    attention_factor: Positive = 1.0
    """Factor of cosines and sines; 1 except for yarn and longrope."""
    short_factors: tuple[float, ...] = ()
    """longrope: [rotary_dim / 2], divisors of the frequencies for a model whose texts are no longer
    than the original context.
    """
    long_factors: tuple[float, ...] = ()
    """longrope: [rotary_dim / 2], divisors for longer texts."""
    frequencies: tuple[float, ...] = ()
    """[rotary_dim / 2], where they differ from the type's."""
    query_scale_beta: Annotated[float, real(0.0, MAX_STRETCH)] = 0.0
    """Queries are scaled by 1 + beta * log(1 + floor(position / original_max_position))."""

    def __post_init__(self) -> None:
        check_fields(self, ModelError, "rope.")
        needs_original = self.type in ("llama3", "yarn", "longrope") or self.query_scale_beta > 0
        positions = whole(int(needs_original), MAX_POSITIONS)
        check_fields(self, ModelError, "rope.", {"original_max_position": positions})
        for name, ok, expected in (
            ("rotary_dim", self.rotary_dim % 2 == 0, "an even size"),
            (
                "frequencies",
                len(self.frequencies) in (0, self.rotary_dim // 2),
                f"none or {self.rotary_dim // 2}",
            ),
            *(
                (
                    name,
                    len(getattr(self, name)) == (self.type == "longrope") * (self.rotary_dim // 2),
                    f"{self.rotary_dim // 2} numbers for longrope, else none",
                )
                for name in ("short_factors", "long_factors")
            ),
            ("factor", self.type == "default" or self.factor >= 1, "at least 1"),
            ("theta", self.type != "yarn" or self.theta > 1, "more than 1 for yarn"),
            (
                "low_freq_factor",
                self.type != "llama3" or self.low_freq_factor < self.high_freq_factor,
                f"less than high_freq_factor={self.high_freq_factor}",
            ),
            (
                "beta_slow",
                self.type != "yarn" or self.beta_slow <= self.beta_fast,
                f"at most beta_fast={self.beta_fast}",
            ),
        ):
            if not ok:
                raise ModelError(f"rope.{name}: expected {expected}, got {getattr(self, name)}")


@dataclass(frozen=True)
class DeltaConfig:
    """Layers with a gated delta rule in place of attention. (Yang et al. 2024, "Gated Delta
    Networks"; Qwen3.5.)"""

    layers: Annotated[tuple[int, ...], wholes(0, MAX_LAYERS, most=MAX_LAYERS)]
    """Their numbers from 0, ascending; at least one."""
    num_key_heads: Heads
    """Heads of queries and keys."""
    num_value_heads: Heads
    """A multiple of num_key_heads: as many value heads, side by side, share a key head."""
    key_dim: Annotated[int, whole(1, MAX_DELTA_DIM)]
    value_dim: Annotated[int, whole(1, MAX_DELTA_DIM)]
    taps: Annotated[int, whole(1, MAX_TAPS)]
    """Positions that the convolution over queries, keys and values sees, the row's own included."""
    tiled_heads: Annotated[bool, FLAG] = False
    """Whether value head v belongs to key head ``v % num_key_heads`` instead, as in GGUF files."""

    def __post_init__(self) -> None:
        check_fields(self, ModelError, "delta.")
        if not self.layers or sorted(set(self.layers)) != list(self.layers):
            raise ModelError(f"delta.layers: expected ascending numbers, got {shown(self.layers)}")
        if self.num_value_heads % self.num_key_heads:
            raise ModelError(
                f"delta.num_value_heads: expected a multiple of num_key_heads="
                f"{self.num_key_heads}, got {self.num_value_heads}"
            )

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Features of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one decoder; the defaults of the switches are Llama's."""

    architecture: str
    """The name in config.json: "LlamaForCausalLM", "Qwen2ForCausalLM", ..."""
    num_layers: Layers
    """Layers that a token runs through at full depth: those of all loops."""
    hidden_size: Hidden
    intermediate_size: Inner
    num_q_heads: Heads
    num_kv_heads: Heads
    head_dim: HeadDim
    vocab_size: Vocabulary
    rms_norm_eps: Epsilon
    max_position: Positions
    """Positions that the rotary embedding reaches; no sequence may be longer."""
    ropes: Annotated[tuple[RopeConfig, ...], instances(RopeConfig, most=MAX_LAYERS)]
    """The rotary embeddings that layers use; all have the same rotary_dim."""
    layer_ropes: tuple[int | None, ...] = ()
    """The index in ropes of the rotary embedding of each layer of the stack; None: the layer has
    none. Empty: 0 for all layers.
    """
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """A bias on the q, k and v projections."""
    output_bias: bool = False
    """A bias on attention's output projection."""
    attention_gate: bool = False
    """Whether the output of each query head is multiplied by the sigmoid of a gate, whose rows come
    after those of the head's queries in the projection of the queries."""
    mlp_bias: bool = False
    qk_norm: Annotated[QKNorm, choice(*get_args(QKNorm))] = "none"
    """An RMS norm before the rotary embedding: over each query and key head ("head"), or over all
    query heads at once and over all key heads at once ("projection").
    """
    pre_norm: Annotated[bool, FLAG] = True
    """An RMS norm of each sublayer's input."""
    post_norm: Annotated[bool, FLAG] = False
    """An RMS norm of each sublayer's output, before it is added to the residual stream."""
    norm_offset: Annotated[float, real(-1.0, 1.0)] = 0.0
    """Added to each norm weight of the checkpoint when it is loaded."""
    activation: Annotated[Activation, choice(*get_args(Activation))] = "silu"
    """The activation of the MLP's gate."""
    embedding_multiplier: Positive = 1.0
    """Factor of the embeddings, rounded to the model's dtype."""
    residual_multiplier: Positive = 1.0
    """Factor of a sublayer's output before it is added to the residual stream."""
    attention_scale: Annotated[float | None, real(MIN_POSITIVE, MAX_STRETCH)] = None
    """Factor of the attention scores; None: head_dim**-0.5."""
    logits_divisor: Positive = 1.0
    """Divides the logits."""
    attention_soft_cap: Annotated[float | None, real(MIN_POSITIVE, MAX_STRETCH)] = None
    """Scaled attention scores s become cap * tanh(s / cap); None: no cap."""
    logits_soft_cap: Annotated[float | None, real(MIN_POSITIVE, MAX_STRETCH)] = None
    """Logits become cap * tanh(logit / cap), after the divisor; None: no cap."""
    layer_windows: Annotated[tuple[int, ...], wholes(0, MAX_POSITIONS, most=MAX_LAYERS)] = ()
    """Keys that a query sees in each layer of the stack, itself included; 0 for all. Empty: 0 for
    all layers.
    """
    conv_layers: Annotated[tuple[int, ...], wholes(0, MAX_LAYERS, most=MAX_LAYERS)] = ()
    """Layers, from 0, whose first sublayer is a gated short convolution in place of attention."""
    conv_taps: Annotated[int, whole(0, MAX_TAPS)] = 0
    """Positions that a convolution sees, the row's own included; 0 without convolutions."""
    delta: Annotated[DeltaConfig | None, instance(DeltaConfig)] = None
    """The layers with a gated delta rule in place of attention; None: there are none."""
    num_loops: Annotated[int, whole(1, MAX_LOOPS)] = 1
    """How many times the stack of layers runs. A looped model has keys and values of each loop, the
    final norm at the end of each, and exits only there.
    """
    gate_threshold: Annotated[float | None, real(0.0, 1.0)] = None
    """The cumulative probability of a looped model's exit gate at which its checkpoint exits; 1
    never exits. None: there is no gate.
    """
    bos_token_id: int | None = None
    eos_token_ids: EndTokens = ()
    dtype: str | None = None
    """The checkpoint's dtype: "float32", "bfloat16" or "float16"."""
    sampling: OwnSampling = ()
    """The model's own sampling settings, for :meth:`SamplingParams.of`."""

    def __post_init__(self) -> None:
        check_fields(self, ModelError)
        if self.num_q_heads % self.num_kv_heads:
            raise ModelError(
                f"num_kv_heads: expected a divisor of num_q_heads={self.num_q_heads}, "
                f"got {self.num_kv_heads}"
            )
        if self.num_layers % self.num_loops:
            raise ModelError(
                f"num_loops: expected a divisor of num_layers={self.num_layers}, "
                f"got {self.num_loops}"
            )
        if not self.layer_ropes:
            object.__setattr__(self, "layer_ropes", (0,) * self.stack_size)
        if not self.layer_windows:
            object.__setattr__(self, "layer_windows", (0,) * self.stack_size)
        if len(self.layer_windows) != self.stack_size:
            raise ModelError(
                f"layer_windows: expected {self.stack_size} sizes, 0 for none, "
                f"got {len(self.layer_windows)}"
            )
        self._check_ropes()
        self._check_other_layers()
        if not (self.pre_norm or self.post_norm):
            raise ModelError("pre_norm, post_norm: expected one or both, got neither")
        if self.activation == "relu":
            raise ModelError("activation: expected that of a gate, gelu_tanh or silu, got relu")

    def _check_other_layers(self) -> None:
        """Check the layers that have something else instead of attention."""
        layers = self.conv_layers
        if sorted(set(layers)) != list(layers) or (layers and layers[-1] >= self.num_layers):
            raise ModelError(
                f"conv_layers: expected ascending numbers below num_layers={self.num_layers}, got "
                f"{shown(layers)}"
            )
        if bool(layers) != bool(self.conv_taps):
            expected = f"1 to {MAX_TAPS} with conv_layers, else 0"
            raise ModelError(f"conv_taps: expected {expected}, got {self.conv_taps}")
        if layers and self.num_loops > 1:
            raise ModelError(f"num_loops: expected 1 with conv_layers, got {self.num_loops}")
        if self.delta is None:
            return
        if self.delta.layers[-1] >= self.num_layers or set(self.delta.layers) & set(layers):
            raise ModelError(
                f"delta.layers: expected numbers below num_layers={self.num_layers} that are not "
                f"in conv_layers, got {shown(self.delta.layers)}"
            )
        if self.num_loops > 1:
            raise ModelError(f"num_loops: expected 1 with delta.layers, got {self.num_loops}")

    def _check_ropes(self) -> None:
        dims = [rope.rotary_dim for rope in self.ropes]
        if len(set(dims)) != 1:
            raise ModelError(f"ropes: expected one or more of one rotary_dim, got {dims}")
        if dims[0] > self.head_dim:
            raise ModelError(
                f"rotary_dim: expected at most head_dim={self.head_dim}, got {dims[0]}"
            )
        if dims[0] < self.head_dim and any(rope.query_scale_beta for rope in self.ropes):
            raise ModelError(
                f"rope.query_scale_beta: expected 0 unless rotary_dim is head_dim={self.head_dim}, "
                f"got rotary_dim={dims[0]}"
            )
        places = range(len(self.ropes))
        good = isinstance(self.layer_ropes, tuple) and all(
            place is None or (is_whole(place, 0) and place in places) for place in self.layer_ropes
        )
        if not good or len(self.layer_ropes) != self.stack_size:
            raise ModelError(
                f"layer_ropes: expected {self.stack_size} places below {len(self.ropes)}, or None, "
                f"got {shown(self.layer_ropes)}"
            )

    @property
    def stack_size(self) -> int:
        """Layers with weights of their own, all of which a loop runs."""
        return self.num_layers // self.num_loops

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers of the stack that have keys and values."""
        others = {*self.conv_layers, *(self.delta.layers if self.delta else ())}
        return tuple(layer for layer in range(self.stack_size) if layer not in others)

    @property
    def exit_layers(self) -> range:
        """The exit layers, ascending, the last one full depth: each layer, or the ends of loops."""
        step = 1 if self.num_loops == 1 else self.stack_size
        return range(step, self.num_layers + 1, step)

    def first_layers(self, num_layers: int) -> ModelConfig:
        """The config of a model that ends after ``num_layers`` layers, those of whole loops."""
        if num_layers not in self.exit_layers:
            listed = ", ".join(map(str, self.exit_layers))
            raise ModelError(f"num_layers: expected one of {listed}, got {num_layers}")
        num_loops = num_layers // self.stack_size if self.num_loops > 1 else 1
        conv_layers = tuple(layer for layer in self.conv_layers if layer < num_layers)
        delta = self.delta
        if delta is not None:
            kept = tuple(layer for layer in delta.layers if layer < num_layers)
            delta = replace(delta, layers=kept) if kept else None
        return replace(
            self,
            delta=delta,
            num_layers=num_layers,
            conv_layers=conv_layers,
            conv_taps=self.conv_taps if conv_layers else 0,
            num_loops=num_loops,
            layer_windows=self.layer_windows[: num_layers // num_loops],
            layer_ropes=self.layer_ropes[: num_layers // num_loops],
        )

    @property
    def sliding_window(self) -> int:
        """The widest window of any layer; 0 when a layer sees every key."""
        return 0 if 0 in self.layer_windows else max(self.layer_windows)

    @property
    def q_size(self) -> int:
        return self.num_q_heads * self.head_dim

    @property
    def projected_q_size(self) -> int:
        """Rows of the projection of queries, with those of their gates."""
        return self.q_size * (1 + self.attention_gate)

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """The numbers of weights of a layer's query norm and key norm; 0: no norm."""
        of_norm = {"none": (0, 0), "head": (self.head_dim,) * 2}
        return of_norm.get(self.qk_norm, (self.q_size, self.kv_size))

    @property
    def num_parameters(self) -> int:
        """Weights and biases, each counted once."""
        qkv_size = self.projected_q_size + 2 * self.kv_size
        hidden, inner = self.hidden_size, self.intermediate_size
        attention = hidden * (qkv_size + self.q_size) + sum(self.qk_norm_sizes)
        attention += qkv_size * self.attention_bias + hidden * self.output_bias
        layer = 3 * hidden * inner + 2 * hidden * (self.pre_norm + self.post_norm)
        layer += (2 * inner + hidden) * self.mlp_bias
        convolutions = len(self.conv_layers) * hidden * (4 * hidden + self.conv_taps)
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        gate = 0 if self.gate_threshold is None else hidden + 1
        layers = self.stack_size * layer + len(self.attention_layers) * attention + convolutions
        if (delta := self.delta) is not None:
            projected = delta.conv_size + 2 * delta.value_size + 2 * delta.num_value_heads
            others = delta.conv_size * delta.taps + 2 * delta.num_value_heads + delta.value_dim
            layers += len(delta.layers) * (hidden * projected + others)
        return layers + embeddings + hidden + gate


@dataclass(frozen=True)
class T5Config:
    """Sizes and switches of a T5: an encoder, and a decoder whose layers are the exit layers."""

    architecture: str
    """The name in config.json: "T5ForConditionalGeneration" or "MT5ForConditionalGeneration"."""
    num_layers: Layers
    """Layers of the decoder."""
    num_encoder_layers: Layers
    hidden_size: Hidden
    intermediate_size: Inner
    num_heads: Heads
    head_dim: HeadDim
    vocab_size: Vocabulary
    rms_norm_eps: Epsilon
    activation: Annotated[Activation, choice(*get_args(Activation))]
    decoder_start_token_id: int
    max_input: Positions = 512
    """Tokens that the encoder was made for; longer inputs are refused unless the engine allows
    them, since relative positions know no limit.
    """
    num_buckets: Annotated[int, whole(*NUM_BUCKETS)] = 32
    """Buckets of relative positions."""
    max_distance: int = 128
    """The distance from which on relative positions share one bucket."""
    tie_word_embeddings: bool = True
    scale_outputs: bool = True
    """Whether states are scaled by hidden_size**-0.5 before the LM head, as the first T5 does."""
    eos_token_ids: EndTokens = ()
    dtype: str | None = None
    """The checkpoint's dtype: "float32", "bfloat16" or "float16"."""
    sampling: OwnSampling = ()
    """The model's own sampling settings, for :meth:`SamplingParams.of`."""

    def __post_init__(self) -> None:
        check_fields(self, ModelError)
        start = whole(0, self.vocab_size - 1)
        distance = whole(self.num_buckets // 2 + 1, MAX_DISTANCE)
        rules = {"decoder_start_token_id": start, "max_distance": distance}
        check_fields(self, ModelError, rules=rules)
        if self.num_buckets % 4:
            raise ModelError(f"num_buckets: expected a multiple of 4, got {self.num_buckets}")

    num_loops = 1
    conv_layers: ClassVar[tuple[int, ...]] = ()
    delta = None
    gate_threshold = None

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers of the decoder, all of which have keys and values."""
        return tuple(range(self.num_layers))

    @property
    def exit_layers(self) -> range:
        """The exit layers, ascending: each layer of the decoder."""
        return range(1, self.num_layers + 1)

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.activation != "relu"

    @property
    def num_q_heads(self) -> int:
        return self.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.q_size

    @property
    def max_position(self) -> int:
        """The longest text: relative positions know no limit."""
        return 2**31 - 1

    @property
    def output_scale(self) -> float:
        """The factor of states before the LM head."""
        return float(self.hidden_size**-0.5) if self.scale_outputs else 1.0

    @property
    def num_parameters(self) -> int:
        """Weights, each counted once."""
        hidden, attention = self.hidden_size, 4 * self.hidden_size * self.q_size
        mlp = hidden * self.intermediate_size * (3 if self.is_gated else 2)
        encoder = self.num_encoder_layers * (attention + mlp + 2 * hidden)
        decoder = self.num_layers * (2 * attention + mlp + 3 * hidden)
        biases = 2 * self.num_buckets * self.num_heads
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return encoder + decoder + biases + embeddings + 2 * hidden


AnyModelConfig = ModelConfig | T5Config


_SOME_TOKENS = {"max_tokens": whole(1)}
ANSWERS = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1}
"""How a chat model answers where neither its files nor the caller say. SmolLM2-135M-Instruct, asked
for summaries of ten long pages, ended 8 in a loop greedily, 4 of 10 with llama.cpp's settings, none
with these or ollama's. Of four simple questions it answered 3 right greedily; with eight seeds
each, 25 of 32 with these and 18 with ollama's.
"""
OWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""The settings that a model may come with."""
CHOOSING = (*OWN, "presence_penalty", "frequency_penalty")
"""The settings that say how tokens are chosen."""


THINK = Rule(
    lambda value: value if value == "calibrated" or isinstance(value, ThoughtStop) else None,
    "a ThoughtStop, or calibrated",
)


@dataclass(frozen=True)
class SamplingParams:
    """The sampling of a request, and when it stops.

    ``SamplingParams()``, the default of :func:`eecore.generate`, is greedy and ends after 128
    tokens, for every model. :meth:`of` starts from the settings in the model's own files, as the
    command line and the server do; :meth:`of_answer` adds the settings that they use for chats.

    Logits are changed in vLLM's order: logit bias, repetition penalty, frequency penalty, presence
    penalty. Then come temperature and the filters, in transformers' order: top-k, top-p, min-p.
    Numbers may be numpy's or fractions; they are stored as Python's own. A bool is no number.

    Args:
        max_tokens: most tokens to generate (N of the decaying threshold). 0 only scores a prompt,
            with ``prompt_logprobs``.
        temperature: divides the logits; 0 is greedy.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose mass reaches top_p.
        min_p: drop tokens less probable than min_p times the most probable one.
        repetition_penalty: divides the logits of seen tokens; 1 switches it off.
        seed: start of the request's random numbers: the same seed gives the same text. None draws
            one.
        logprobs: how many of the most probable tokens to report with their log-probabilities, in
            addition to the emitted token's own; None reports nothing, 0 only the emitted token's.
            At most the model's vocabulary.
        prompt_logprobs: the same for each token of the prompt but the first, at the depth at which
            the prompt runs: all layers, or with :class:`eecore.FixedExit` the cut model's. The
            whole prompt is then computed, whatever the prefix cache has of it. Not for models with
            an encoder.
        stop: strings that end the text; the text stops before them.
        stop_token_ids: tokens that end the request, in addition to the model's own. Ids outside the
            vocabulary have no effect.
        ignore_eos: go on past the model's end-of-sequence tokens.
        presence_penalty: subtracted from the logits of tokens that were generated; the prompt
            does not count.
        frequency_penalty: subtracted from a token's logit for each time that it was generated.
        logit_bias: numbers to add to logits, by token id. Stored as pairs by ascending id.
        ends_repetition: end a text, with ``finish_reason`` "length", whose last 512 tokens have at
            most 128 different sequences of 4 tokens. It is looked at whenever it has a multiple of
            64 tokens.
        thinking_budget: tokens of the thought after which it is closed, at the next end of a
            sentence or line, at most 32 tokens later; 0 closes it at once. ``max_tokens`` has room
            for the answer all the same: a thought that leaves less than 16 tokens is closed sooner.
        think: when a thought ends because its answer stands: a ThoughtStop, or ``calibrated`` for
            that of the calibration beside the model; None: where the model or the budget ends it.
        guide: the form that the text must have; None for any text. Confidence and log-probabilities
            are over the allowed tokens. A thought before the answer is free.
    """

    # Temperatures and repetition penalties beyond these ranges overflow float32: logits become
    # infinite, or all equal. The ranges of penalties and biases are OpenAI's.
    max_tokens: Annotated[int, whole()] = 128
    temperature: Annotated[float, real(1e-10, 1e10, or_zero=True)] = 0.0
    top_k: Annotated[int, whole()] = 0
    top_p: Annotated[float, real(MIN_POSITIVE, 1.0, expected="above 0, at most 1")] = 1.0
    min_p: Annotated[float, real(0.0, 1.0)] = 0.0
    repetition_penalty: Annotated[float, real(0.01, 100.0)] = 1.0
    seed: Annotated[int | None, whole(0, 2**64 - 1)] = None
    logprobs: Annotated[int | None, whole()] = None
    stop: Annotated[tuple[str, ...], texts(most=64, longest=4096)] = ()
    stop_token_ids: Annotated[tuple[int, ...], wholes(most=1024)] = ()
    ignore_eos: Annotated[bool, FLAG] = False
    presence_penalty: Annotated[float, real(-2.0, 2.0)] = 0.0
    frequency_penalty: Annotated[float, real(-2.0, 2.0)] = 0.0
    logit_bias: Annotated[
        Mapping[int, float] | tuple[tuple[int, float], ...] | None,
        weights(-100.0, 100.0, most=1024),
    ] = None
    guide: Annotated[Guide | None, instance(Guide)] = None
    prompt_logprobs: Annotated[int | None, whole()] = None
    ends_repetition: Annotated[bool, FLAG] = False
    thinking_budget: Annotated[int | None, whole()] = None
    think: Annotated[ThoughtStop | Literal["calibrated"] | None, THINK] = None

    def __post_init__(self) -> None:
        if self.prompt_logprobs is None:
            check_fields(self, RequestError, rules=_SOME_TOKENS)
        check_fields(self, RequestError)

    @classmethod
    def of(cls, model: Any, **fields: Any) -> SamplingParams:
        """The sampling settings of a model, replaced by those given here.

        A model's own come from its generation_config.json (``do_sample``, ``temperature``,
        ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``) or from the ``general.sampling``
        keys of its GGUF file. Other fields have the defaults of ``SamplingParams()``.

        Args:
            model: from :func:`eecore.load`.
            **fields: fields of this class, which replace the model's.

        Raises:
            RequestError: ``model`` is no model, or a value is wrong.
        """
        return cls(**{**_own_sampling(model), **fields})

    @classmethod
    def of_answer(cls, model: Any, exit: Any, **fields: Any) -> SamplingParams:
        """The sampling settings of a chat model's answers: :meth:`of`, but sampled where neither
        the model nor the caller says how tokens are chosen.

        Then they are temperature 0.7, ``top_k`` 20, ``top_p`` 0.8 and ``repetition_penalty`` 1.1:
        greedily a small model repeats itself in long answers. The caller says it by a temperature,
        0 too, or by a value that is not its default in ``top_k``, ``top_p``, ``min_p`` or a
        penalty; a default is kept and the rest stays. Greedy all the same are models that were
        trained for early exit, and exit policies whose sampled text is not that of
        :class:`eecore.Full` with the same seed (``exit.samples_as_full``): what they promise is
        about greedy text.

        Args:
            model: from :func:`eecore.load`.
            exit: the policy of the request.
            **fields: fields of this class, which win over all else.

        Raises:
            RequestError: for what is no model, or a value that cannot be.
        """
        usual = _own_sampling(model)
        source = model.network.source
        is_trained = source is not None and source.is_trained_to_exit
        if exit.samples_as_full and not _chooses(fields):
            usual = usual_of_answers(usual, is_trained)
        return cls(**{**usual, **fields})

    def with_seed(self, seed: int) -> SamplingParams:
        """The same settings with a seed, without checking them again."""
        made = object.__new__(SamplingParams)
        vars(made).update(vars(self), seed=seed)
        return made

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """Token ids, ascending, with the numbers to add to their logits."""
        return self.logit_bias if isinstance(self.logit_bias, tuple) else ()

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty counts generated tokens."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def usual_of_answers(own: Mapping[str, Any], is_trained_to_exit: bool) -> dict[str, Any]:
    """The sampling settings of answers whose caller says nothing: the model's own, else
    :data:`ANSWERS`; none, which is greedy, for a model that was trained for early exit.
    """
    return dict(own or ({} if is_trained_to_exit else ANSWERS))


def _own_sampling(model: Any) -> dict[str, Any]:
    """The sampling settings that a model comes with."""
    own = getattr(getattr(model, "config", None), "sampling", None)
    if own is None:
        raise RequestError(f"model: expected one of eecore.load, got {shown(model)}")
    return dict(own)


def _chooses(fields: Mapping[str, Any]) -> bool:
    """Whether settings say how tokens are chosen: a temperature, or more than a default."""
    return "temperature" in fields or any(
        name in fields and fields[name] != getattr(SamplingParams, name) for name in CHOOSING
    )


@dataclass(frozen=True)
class EngineConfig:
    """The limits of an engine: batching and memory.

    Args:
        kv_cache_tokens: positions in the KV cache, over all requests; rounded up to whole pages.
        page_size: positions a page.
        kv_cache_dtype: what keys and values are stored in: "auto", the model's dtype, but bfloat16
            on a CPU where states are float32 and weights have 8 bits or fewer; "fp8", a byte each
            (e4m3), whatever the model's dtype; "bfloat16", only for a model in float32 on a CPU;
            "float32", for a model in float32.
        max_num_seqs: most requests that run at once.
        max_batch_tokens: most rows in one iteration.
        max_prefill_chunk: most prompt tokens of one request in one iteration.
        max_input_tokens: most tokens of an encoder's input, which is encoded in one iteration; None
            for the length that the model was made for.
        prefix_cache: requests whose prompts begin alike share the pages of the beginning, and pages
            keep their content until others need them. No output depends on it, bit for bit: on a
            GPU, where a prompt's rounding depends on its number of rows, nothing is shared, nor is
            it by models with an encoder.
    """

    kv_cache_tokens: AtLeastOne = 16384
    page_size: AtLeastOne = 16
    max_num_seqs: AtLeastOne = 64
    max_batch_tokens: AtLeastOne = 1024
    max_prefill_chunk: AtLeastOne = 512
    max_input_tokens: Annotated[int | None, whole(1)] = None
    prefix_cache: Annotated[bool, FLAG] = True
    kv_cache_dtype: Annotated[str, choice(*KV_CACHE_DTYPES)] = "auto"

    def __post_init__(self) -> None:
        check_fields(self, RequestError)

    @property
    def num_pages(self) -> int:
        return -(-self.kv_cache_tokens // self.page_size)

    def room(self, model: AnyModelConfig, prompt_tokens: int) -> int:
        """Tokens that can follow a prompt; 0 or less: it is too long itself."""
        if not isinstance(model, T5Config):
            return min(model.max_position, self.num_pages * self.page_size) - prompt_tokens
        if prompt_tokens > (self.max_input_tokens or model.max_input):
            return 0
        # The prompt is the encoder's, in pages of its own.
        return (self.num_pages - -(-prompt_tokens // self.page_size)) * self.page_size - 1
