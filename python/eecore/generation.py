"""The main functions: load a model, generate, stream."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import torch

from eecore.config import AnyModelConfig, EngineConfig, SamplingParams
from eecore.engine.async_engine import AsyncEngine
from eecore.engine.callers import Client
from eecore.engine.engine import Engine, RunProgram
from eecore.engine.free_memory import free_memory
from eecore.engine.worker import Worker
from eecore.errors import ModelError, RequestError
from eecore.exits import Auto, Exit
from eecore.files.builtin import model_directory
from eecore.models import (
    LlamaModel,
    Network,
    Tokenizer,
    bytes_of_state,
    bytes_per_token,
    cache_dtype,
    find_draft_head,
    find_head,
    load_model,
    read_config,
)
from eecore.output import Output, StepOutput
from eecore.values import shown

Prompt = str | list[int]

PASSES = 6
"""Passes of full depth that are measured; the first is not counted."""


@dataclass(eq=False)
class Model:
    """A loaded model: its weights, its tokenizer, and the engine that :func:`generate` runs."""

    network: Network
    tokenizer: Tokenizer | None
    engine_config: EngineConfig
    run_program: RunProgram | None = field(default=None, repr=False)
    """Runs decoding programs; the one that suits the device when None."""
    _shared: dict[int, Worker] = field(default_factory=dict, repr=False)  # by process
    _locks: dict[int, threading.Lock] = field(default_factory=dict, repr=False)

    @property
    def config(self) -> AnyModelConfig:
        return self.network.config

    def engine(self, config: EngineConfig | None = None) -> Engine:
        """A new engine over this model, with a KV cache of its own."""
        config = config or self.engine_config
        return Engine(self.network, self.tokenizer, config, run=self.run_program)

    def without_prefix_cache(self) -> Model:
        """The same weights with an engine that computes every prompt, for measurements."""
        if not self.engine_config.prefix_cache:
            return self
        config = replace(self.engine_config, prefix_cache=False)
        return Model(self.network, self.tokenizer, config, self.run_program)

    def measure_full_depth(self, num_requests: int = 1, engine: Engine | None = None) -> None:
        """Run some passes of full depth, unless their time is known, so that the statistics of
        later requests can be compared with full depth.

        Args:
            num_requests: requests of a batch; no more than the engine runs together.
            engine: an engine of this model, without requests; that of :func:`generate` when None.

        Raises:
            RequestError: these passes do not fit into the model's context.
        """
        runs = self.shared_engine().engine if engine is None else engine
        prompts = [[0]] * min(num_requests, runs.config.max_num_seqs)
        if runs.knows_full_depth(len(prompts)):
            return
        # this policy times each of its passes
        plain = Auto(lookup=False, head=False, exit_layers=())
        sampling = SamplingParams(max_tokens=PASSES + 1, ignore_eos=True)
        if engine is None:
            generate(self, list(prompts), exit=plain, sampling=sampling)
            return
        for prompt in prompts:
            engine.add_request(prompt, exit=plain, sampling=sampling)
        for _ in engine.run():
            pass

    def shared_engine(self) -> Worker:
        """The engine that serves :func:`generate`, :func:`stream` and :meth:`async_engine`.

        There is one for each process; a forked child makes its own when it needs it.
        """
        process = os.getpid()
        if process not in self._shared:
            # A lock of this process, since a thread of the parent may have held another.
            with self._locks.setdefault(process, threading.Lock()):
                if process not in self._shared:
                    self._shared = {process: Worker(self.engine())}
        return self._shared[process]

    def async_engine(self, config: EngineConfig | None = None) -> AsyncEngine:
        """Streams for asyncio, from the engine that also serves :func:`generate`; with ``config``
        from an engine and KV cache of their own.
        """
        return AsyncEngine(self.shared_engine() if config is None else self.engine(config))


def load(
    path: str | Path | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    weights: str | None = None,
    kv_cache_tokens: int | None = None,
    kv_cache_dtype: str | None = None,
    engine: EngineConfig | None = None,
    prefix_cache: bool | None = None,
    exits: str | Path | Literal[False] | None = None,
    draft_head: str | Path | None = None,
) -> Model:
    """Load a model directory in Hugging Face layout, a GGUF file, or a repository of the hub.

    Args:
        path: holds config.json, safetensors weights and, for text prompts, tokenizer.json. A GGUF
            file of a supported family runs as it is: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K,
            Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4, F16, BF16 and F32, mixed as the file mixes
            them; so do directories of GPTQ (``gptq``, ``gptq_v2``), AWQ (``gemm``) and
            compressed-tensors (4 and 8 bits, weights only). A string that names nothing on disk and
            looks like a repository's id is one: ``org/name``, ``org/name@revision``,
            ``org/name:file.gguf``, whose files are fetched into the hub's cache. None: the model
            that ships with eecore, which turns a request to a smart home into a parse.
        device: ``cpu`` or ``cuda``; cuda where there is one when None.
        dtype: float32, bfloat16 or (CUDA) float16; chosen from the checkpoint and the device when
            None.
        weights: ``int8`` and ``int4`` quantise the linear layers' weights as they are read, to 8.5
            bits a number, or to 5 except for those of keys, values and the LM head, see
            :func:`eecore.ops.quantise_weight`; so fewer bytes are read for each token. On a GPU
            ``int8`` has a scale for each row. States keep ``dtype``; every exit mode works with it.
            Quantised models have their own.
        kv_cache_tokens: positions in the KV cache; None: ``engine``'s, or without one as many as
            fit into a quarter of the memory that the machine, its container and ``ulimit`` leave,
            at most 65536, and on a GPU into 80 % of its free memory. It is a limit: on a CPU memory
            is taken as pages are first used.
        kv_cache_dtype: ``fp8`` stores keys and values in a byte each (e4m3), so that a cache has
            room for twice the tokens of bfloat16 in the same memory, four times those of float32;
            ``auto`` stores them in ``dtype``, but in bfloat16 on a CPU where states are float32 and
            weights have 8 bits or fewer; ``float32`` and ``bfloat16`` are for a model in float32.
            None: ``engine``'s, which is ``auto`` by default. Every exit mode works with it, and the
            modes that keep the output of :class:`eecore.Full` keep that of the same cache. Not for
            models with an encoder.
        engine: batching limits.
        prefix_cache: whether prompts that begin alike share the keys and values of the beginning;
            None: ``engine``'s, which is to share by default. It changes no output.
        exits: the directory of a draft head that ``eecore train-exits`` made for the model, or a
            repository of the hub with one (``org/name``), for :class:`eecore.HeadDrafts` and
            :class:`eecore.Auto`; False: none. None: the one in ``exits`` in the model's directory,
            in ``NAME.exits`` beside a file ``NAME.gguf``, or one that ships with eecore for this
            model, perhaps trained with the model in another precision.
        draft_head: a draft head of any kind, in place of ``exits``: the directory or repository of
            a head in safetensors that others publish, of a kind that ``eecore.heads`` reads, of a
            model itself whose checkpoint has such a head (a GGUF file, too), or of a head that
            ``eecore train-exits`` made.

    Raises:
        ModelError: a directory or file is missing, corrupt, or of an unsupported architecture, or a
            repository cannot be fetched.
    """
    directory = model_directory(path)
    load_head = None
    if draft_head is not None:
        if exits not in (None, False):
            raise ModelError(f"exits: expected None beside draft_head, got {shown(exits)}")
        load_head = find_draft_head(draft_head, read_config(directory))
    _, network, tokenizer = load_model(directory, device=device, dtype=dtype, weights=weights)
    if load_head is None:
        network.draft_head = find_head(network, directory, exits)
    else:
        assert isinstance(network, LlamaModel)
        network.draft_head = load_head(network)
    given = {
        "kv_cache_tokens": kv_cache_tokens,
        "prefix_cache": prefix_cache,
        "kv_cache_dtype": kv_cache_dtype,
    }
    limits = engine_limits(network, engine, **given)
    return Model(network, tokenizer, limits)


def engine_limits(network: Network, engine: EngineConfig | None, **given: Any) -> EngineConfig:
    """The limits of a model's engine, from the arguments of :func:`load`.

    Args:
        engine: limits where no argument is given; None: the defaults.
        given: fields of :class:`EngineConfig`; None where not given.
    """
    limits = {f.name: getattr(engine, f.name) for f in fields(EngineConfig)} if engine else {}
    limits |= {name: value for name, value in given.items() if value is not None}
    config = EngineConfig(**limits)
    dtype = cache_dtype(network, config.kv_cache_dtype)
    per_token = bytes_per_token(network, dtype)
    if engine is None and given.get("kv_cache_tokens") is None:
        states = config.max_num_seqs * bytes_of_state(network)
        return replace(config, kv_cache_tokens=_default_kv_cache_tokens(network, per_token, states))
    return config


def _default_kv_cache_tokens(network: Network, per_token: int, states: int) -> int:
    """A part of the free memory; ``states``: bytes of the states of all texts that run, beside
    which those of beginnings take as much as the tokens, and no more than these."""
    on_gpu = network.device.type == "cuda"
    free = int(0.8 * torch.cuda.mem_get_info(network.device)[0]) if on_gpu else free_memory() // 4
    rest = free - states
    tokens = max(rest // 2, rest - states) // per_token
    return max(1, tokens) if on_gpu else max(256, min(65536, tokens))


def generate(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    *,
    exit: Exit | str | Sequence[Exit | str] | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    **sampling_fields: Any,
) -> list[Output]:
    """Generate for all prompts, batched; one output for each prompt, in order.

    Calls may overlap, from any thread and inside of a loop over :func:`stream`: all calls for one
    model share its engine and KV cache, and their requests share the batch.

    A request that fails while it runs does not affect others: its output has ``finish_reason``
    "error", the error, and what it had generated by then.

    Args:
        model: from :func:`load`.
        prompts: strings or lists of token ids; a single prompt counts as a list of one.
        exit: an exit policy, or one for each prompt, also as text: ``"auto"``,
            ``"speculative:3,6"``; when None, :class:`eecore.Auto` on a CPU and :class:`eecore.Full`
            on a GPU.
        sampling: :class:`eecore.SamplingParams`, or one for each prompt.
        **sampling_fields: fields of SamplingParams, instead of ``sampling``: ``max_tokens=128``,
            ``temperature=0.8``, ...

    Raises:
        RequestError: the model is not loaded, or a prompt or setting cannot be served; nothing has
            run then.
        ExitError: the model cannot run an exit policy.
    """
    worker, requests = _prepared(model, prompts, exit, sampling, sampling_fields)
    client = Client(worker, whole=True)
    try:
        names = client.open(requests)
        outputs = {step.request_id: step.output for step in client}
    finally:
        client.close()
    return [output for name in names if (output := outputs[name]) is not None]


def stream(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    *,
    exit: Exit | str | Sequence[Exit | str] | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    order: list[str] | None = None,
    **sampling_fields: Any,
) -> Generator[StepOutput, None, None]:
    """Like :func:`generate`, yielding what each engine step adds.

    Closing or dropping the iterator early, or an exception such as KeyboardInterrupt, cancels what
    is unfinished. A request whose steps are not read goes on for some steps, and is then put on
    hold.

    Args:
        order: gets the request ids, in the order of the prompts.
    """
    worker, requests = _prepared(model, prompts, exit, sampling, sampling_fields)
    client = Client(worker)
    try:
        names = client.open(requests)
        if order is not None:
            order += names
        yield from client
    finally:
        client.close()


def _prepared(
    model: Model, prompts: Any, exit: Any, sampling: Any, sampling_fields: dict[str, Any]
) -> tuple[Worker, list[Any]]:
    """The worker of a model, and a checked request for each prompt."""
    if not isinstance(model, Model):
        raise RequestError(f"model: expected one that eecore.load has loaded, got {model!r}")
    many = _as_list(prompts)
    exits = _per_prompt("exit", exit, (Exit, str), len(many))
    samplings = _per_prompt(
        "sampling", _sampling(sampling, sampling_fields), SamplingParams, len(many)
    )
    worker = model.shared_engine()
    prepare = worker.engine.prepare
    given = zip(many, exits, samplings, strict=True)
    return worker, [prepare(p, exit=e, sampling=s) for p, e, s in given]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise RequestError(f"prompts: expected a string or a list, got {prompts!r}")
    many = list(prompts)
    if many and all(isinstance(item, (int, SupportsIndex)) for item in many):
        return [many]
    for item in many:
        if not isinstance(item, (str, list, tuple)):
            raise RequestError(f"prompts: expected strings or lists of token ids, got {item!r}")
    return many


def _per_prompt(name: str, given: Any, kind: type | tuple[type, ...], count: int) -> list[Any]:
    if given is None or isinstance(given, kind):
        return [given] * count
    each = list(given) if isinstance(given, (list, tuple)) else [given]
    for item in each:
        if not isinstance(item, kind):
            first = kind[0] if isinstance(kind, tuple) else kind
            raise RequestError(f"{name}: expected {first.__name__} objects, got {item!r}")
    if len(each) != count:
        raise RequestError(f"{name}: expected one, or one per prompt ({count}), got {len(each)}")
    return each


def _sampling(sampling: Any, sampling_fields: dict[str, Any]) -> Any:
    if not sampling_fields:
        return sampling
    known = {f.name for f in fields(SamplingParams)}
    unknown = sorted(set(sampling_fields) - known)
    if unknown:
        raise RequestError(f"unknown setting {unknown[0]!r}: expected one of {sorted(known)}")
    if sampling is not None:
        raise RequestError("expected either sampling= or single sampling fields, got both")
    return SamplingParams(**sampling_fields)
