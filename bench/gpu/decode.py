"""Decoding end to end on a GPU: every way to decode, forced exits, self-speculation, transformers.

python -m bench gpu-decode [--model 8b|1b|135m] [--batch 1 8 32] [--json FILE]

Random weights in the shape of Llama-3.2-1B, Llama-3-8B or SmolLM2-135M, bfloat16: depth and
acceptance rate are forced, the work is real. A program is ``captured`` as one graph, or runs call
by call (``calls``), with the host reading its flags; a way that fails is listed with the reason.
The table has the engine's wall clock and the GPU's own time of the program, launched again and
again on one state: if it is much less than the wall clock, the host is the limit. ``prompts`` times
the first token, ``kernels`` each kernel of a program, by torch's profiler. bench/gpu.sh runs it.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import eecore
from bench.gpu.kept import Kept, Row, about, parser
from bench.gpu.timing import elapsed, read_rate
from bench.harness.results import Report
from bench.harness.rows import Columns, table_of
from eecore import ops
from eecore.config import ModelConfig, RopeConfig
from eecore.decoding.capture import CallByCall, run_program_on
from eecore.models import LlamaModel, LlamaWeights
from eecore.models.weights import NewWeights

MODELS: dict[str, dict[str, Any]] = {
    "1b": {"num_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_q_heads": 32},
    "8b": {"num_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_q_heads": 32},
    "135m": {"num_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_q_heads": 9},
    "tiny": {"num_layers": 8, "hidden_size": 64, "intermediate_size": 96, "num_q_heads": 4},
}
HEADS = {
    "1b": (8, 64, 128256),
    "8b": (8, 128, 128256),
    "135m": (3, 64, 49152),
    "tiny": (2, 16, 512),
}
PROMPT, ACCEPTANCE, NUM_DRAFTS = 128, 0.75, 8
FIRST_TOKENS = (128, 512, 2048)
NAMES = ("model", "batch", "mode", "way")
PARTS = ("modes", "speculation", "prompts", "transformers", "kernels")
LAUNCHES = 50
"""Runs of a program to measure its own time."""
NEVER = 1.0 - 2.0**-24
"""A threshold that no row passes."""


def model_config(name: str) -> ModelConfig:
    """The config of a model; the small model's embeddings are tied, as in Llama-3.2-1B."""
    num_kv_heads, head_dim, vocab_size = HEADS[name]
    return ModelConfig(
        architecture="LlamaForCausalLM",
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        rms_norm_eps=1e-5,
        max_position=4096,
        ropes=(RopeConfig(theta=500000.0, rotary_dim=head_dim),),
        tie_word_embeddings=name != "8b",
        **MODELS[name],
    )


def random_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> LlamaModel:
    """A model with seeded random weights, made on the device."""
    weights = LlamaWeights.empty(config, NewWeights(device, dtype))
    generator = torch.Generator(device).manual_seed(0)
    for field in dataclasses.fields(weights):
        values = getattr(weights, field.name)
        if isinstance(values, ops.Matrix):
            weight = values.weight
            weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
        elif values is not None:
            values.fill_(1.0)
    return LlamaModel(config, weights)


def scale_deep_layers(model: LlamaModel, first: int, factor: float, whole: LlamaWeights) -> None:
    """Scale what the layers from ``first`` on add to the residual stream by ``factor``."""
    for name in ("o", "down"):
        own, original = getattr(model.weights, name).weight, getattr(whole, name).weight
        torch.mul(original[first:], factor, out=own[first:])


@dataclasses.dataclass
class Bench:
    """One model at one batch size."""

    model: LlamaModel
    batch: int
    tokens: int
    rounds: int

    def engine(self, way: str, prompt: int = PROMPT) -> eecore.Engine:
        """An engine that runs programs ``captured`` or call by call."""
        config = eecore.EngineConfig(
            kv_cache_tokens=self.batch * (prompt + self.tokens + NUM_DRAFTS + 32),
            max_num_seqs=self.batch,
            max_batch_tokens=self.batch * max(prompt, PROMPT),
        )
        run = run_program_on(self.model.device) if way == "captured" else CallByCall()
        return eecore.Engine(self.model, None, config, run=run)

    def ask(self, engine: eecore.Engine, policy: Any, tokens: int, prompt: int = PROMPT) -> None:
        """Add the requests of a batch."""
        generator = torch.Generator().manual_seed(1)
        sampling = eecore.SamplingParams(max_tokens=tokens, ignore_eos=True)
        for _ in range(self.batch):
            ids = torch.randint(self.model.config.vocab_size, (prompt,), generator=generator)
            engine.add_request(ids.tolist(), exit=policy, sampling=sampling)

    def run(self, engine: eecore.Engine, policy: Any) -> tuple[float, list[eecore.Output]]:
        """Seconds from the last request's first token to the last token, and the outputs."""
        self.ask(engine, policy, self.tokens)
        outputs = [step.output for step in engine.step() if step.output is not None]
        self.wait()
        begin = time.perf_counter()
        outputs += [step.output for step in engine.run() if step.output is not None]
        self.wait()
        return time.perf_counter() - begin, outputs

    def host_syncs(self, engine: eecore.Engine, policy: Any) -> int:
        """Waits of the host in one decoding iteration, without the wait for its tokens."""
        self.ask(engine, policy, 4, 3)
        engine.step()
        engine.step()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            engine.step()
            torch.cuda.set_sync_debug_mode("default")
        list(engine.run())
        return sum("synchroniz" in str(warning.message) for warning in caught)

    @contextmanager
    def program(self, engine: eecore.Engine, policy: Any) -> Iterator[Callable[[], None]]:
        """A function that launches an engine's program on the state halfway through its requests.

        The tokens mean nothing; on the CPU, where a run changes its inputs, nor do the times.
        """
        self.ask(engine, policy, self.tokens)
        for _ in range(max(2, self.tokens // 2)):
            engine.step()
        iterations = engine.iterations
        program = next(reversed(iterations._programs.values()))

        @torch.inference_mode()
        def launch() -> None:
            program.send()
            iterations.run(program)

        try:
            for _ in range(3):
                launch()
            self.wait()
            yield launch
        finally:
            self.wait()
            list(engine.run())

    def first_token(self, length: int, way: str) -> Row:
        """Seconds from a prompt of ``length`` tokens to its first token, the median over rounds
        after one that captures.
        """
        engine, times = self.engine(way, length), []
        for _ in range(self.rounds + 1):
            self.ask(engine, eecore.Full(), 1, length)
            self.wait()
            begin = time.perf_counter()
            list(engine.run())
            self.wait()
            times.append(time.perf_counter() - begin)
        return {"seconds_to_first_token": statistics.median(times[1:])} | captures_of(engine)

    def kernels(self, policy: Any) -> Row:
        """The kernels of one run by name, with their number and the microseconds of each."""
        engine = self.engine("captured")
        self.run(engine, policy)
        on_gpu, launches = self.model.device.type == "cuda", 5
        activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
        with self.program(engine, policy) as launch, profile(activities=[activity]) as profiler:
            for _ in range(launches):
                launch()
            self.wait()
        found = []
        for event in profiler.key_averages():
            total = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            if total > 0:
                each = {"kernel": event.key[:160], "count": event.count / launches}
                found.append({**each, "us": total / event.count})
        return {"kernels": sorted(found, key=lambda each: -each["count"] * each["us"])}

    def wait(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()

    def measure(self, way: str, policy: Any) -> Row:
        """The figures of a mode: medians over rounds, after a round that captures."""
        engine, device = self.engine(way), self.model.device
        self.run(engine, policy)
        runs = [self.run(engine, policy) for _ in range(self.rounds)]
        outputs = runs[0][1]
        seconds = statistics.median(each for each, _ in runs)
        made = sum(len(output.token_ids) - 1 for output in outputs)
        drafted = sum(output.stats.drafted for output in outputs)
        row: Row = {"seconds": seconds, "tokens_per_s": made / seconds}
        row["mean_exit_layer"] = statistics.mean(o.stats.mean_exit_layer for o in outputs)
        if drafted:
            row["acceptance"] = sum(output.stats.accepted for output in outputs) / drafted
        else:
            row["seconds_per_iteration"] = seconds / (self.tokens - 1)
        if way == "captured":
            with self.program(engine, policy) as launch:
                spent = elapsed(device, lambda: [launch() for _ in range(LAUNCHES)])
            row["gpu_seconds"] = spent / LAUNCHES
        if device.type == "cuda":
            row["host_syncs_per_iteration"] = self.host_syncs(engine, policy)
        return row | captures_of(engine)


def captures_of(engine: eecore.Engine) -> Row:
    """The number of an engine's captures, their seconds and bytes; empty where there are none."""
    held = engine.captures
    if not held:
        return {}
    return {
        "captures": len(held),
        "capture_seconds": sum(capture.seconds for capture in held),
        "capture_bytes": sum(capture.num_bytes for capture in held),
    }


def weight_bytes(config: ModelConfig, itemsize: int) -> tuple[float, float, float]:
    """Bytes of a layer, of its K/V projections, and of the head."""
    hidden, inner = config.hidden_size, config.intermediate_size
    kv = 2 * config.kv_size * hidden
    layer = hidden * (2 * config.q_size) + kv + 3 * hidden * inner
    return layer * itemsize, kv * itemsize, config.vocab_size * hidden * itemsize


def mode_rows(bench: Bench, kept: Kept, place: Row) -> None:
    """Measure every mode in every way, with its share of the bandwidth limit."""
    config, device = bench.model.config, bench.model.device
    num_layers, half = config.num_layers, config.num_layers // 2
    layer, kv, head = weight_bytes(config, bench.model.dtype.itemsize)
    full = num_layers * layer + head
    forced, never = (eecore.ConfidentExit(t, exit_points=(half,)) for t in (0.0, NEVER))
    modes: dict[str, tuple[Any, float]] = {
        "full": (eecore.Full(), full),
        "fixed exit L/2": (eecore.FixedExit(half), half * layer + head),
        "confident exit L/2": (forced, half * (layer + kv) + head),
        "a check that no row passes": (never, full + head),
    }
    several = device.type == "cuda" and bench.batch == 1
    for way in ("captured", "calls") if several else ("captured",):
        for mode, (policy, num_bytes) in modes.items():
            base = kept.find(**place, mode="full", way=way)

            def measured(
                way: str = way, policy: Any = policy, num_bytes: float = num_bytes, base: Any = base
            ) -> Row:
                row = bench.measure(way, policy)
                spent = row["seconds_per_iteration"]
                if base is None:
                    row["of_bandwidth"] = full / spent / read_rate(device)
                elif "error" not in base:
                    speed_up = base["seconds_per_iteration"] / spent
                    row["speed_up"], row["of_ideal"] = speed_up, speed_up / (full / num_bytes)
                    if policy is never:
                        own = base["seconds_per_iteration"] + head / read_rate(device)
                        row["check_microseconds_beyond_bytes"] = (spent - own) * 1e6
                return row

            kept.measure({**place, "mode": mode, "way": way}, measured)


def prompt_rows(bench: Bench, kept: Kept, place: Row) -> None:
    """Measure the time to the first token: with chunks captured by size, and call by call."""
    ways = ("captured", "calls") if bench.model.device.type == "cuda" else ("captured",)
    for length, way in itertools.product(FIRST_TOKENS, ways):
        case = {**place, "mode": f"first token of {length}", "way": way}
        kept.measure(case, lambda length=length, way=way: bench.first_token(length, way))


def kernel_rows(bench: Bench, kept: Kept, place: Row) -> None:
    """Measure each kernel of full depth, and of a check that no row passes."""
    half = bench.model.config.num_layers // 2
    never = eecore.ConfidentExit(NEVER, exit_points=(half,))
    for mode, policy in {"full": eecore.Full(), "a check that no row passes": never}.items():
        case = {**place, "mode": mode, "way": "kernels"}
        kept.measure(case, lambda policy=policy: bench.kernels(policy))


def speculative_rows(bench: Bench, kept: Kept, place: Row) -> None:
    """Measure self-speculation with L/4 layers at an acceptance rate of about ACCEPTANCE.

    The deeper layers' contributions to the residual stream are scaled down until the rate is met.
    """
    model, mode = bench.model, f"self-speculation L/4, d={NUM_DRAFTS}"
    exit_layer = model.config.num_layers // 4
    policy = eecore.SelfSpeculative(exit_layer, NUM_DRAFTS)
    layer, _, head = weight_bytes(model.config, model.dtype.itemsize)

    def measured() -> Row:
        o, down = (ops.Matrix(m.weight.clone()) for m in (model.weights.o, model.weights.down))
        whole = dataclasses.replace(model.weights, o=o, down=down)
        low, high = 0.0, 1.0
        for _ in range(7):
            factor = (low + high) / 2
            scale_deep_layers(model, exit_layer, factor, whole)
            outputs = bench.run(bench.engine("captured"), policy)[1]
            drafted = sum(output.stats.drafted for output in outputs)
            accepted = sum(output.stats.accepted for output in outputs) / max(drafted, 1)
            low, high = (factor, high) if accepted > ACCEPTANCE else (low, factor)
        try:
            full = bench.measure("captured", eecore.Full())
            kept.add({**place, "mode": "full, deep layers scaled", "way": "captured", **full})
            row = bench.measure("captured", policy)
        finally:
            scale_deep_layers(model, exit_layer, 1.0, whole)
        row["speed_up"] = row["tokens_per_s"] / full["tokens_per_s"]
        whole_bytes = model.config.num_layers * layer + head
        rounds = whole_bytes + NUM_DRAFTS * (exit_layer * layer + head)
        made = 1 + NUM_DRAFTS * row["acceptance"]
        row["of_ideal"] = row["speed_up"] / (made * whole_bytes / rounds)
        return row

    kept.measure({**place, "mode": mode, "way": "captured"}, measured)


def transformers_rows(bench: Bench, kept: Kept, place: Row) -> None:
    """Measure transformers' generate on a model of the same shape, also with early exit."""
    config = bench.model.config

    def measured(**options: Any) -> Row:
        from transformers import LlamaConfig, LlamaForCausalLM

        settings = LlamaConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_q_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position,
            tie_word_embeddings=config.tie_word_embeddings,
        )
        with torch.device(bench.model.device):
            peer = LlamaForCausalLM(settings).to(bench.model.dtype).eval()
        shape = bench.batch, PROMPT
        prompts = torch.randint(config.vocab_size, shape, device=bench.model.device)

        def seconds(tokens: int) -> float:
            begin = time.perf_counter()
            lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
            peer.generate(prompts, do_sample=False, **lengths, **options)
            bench.wait()
            return time.perf_counter() - begin

        seconds(8)
        spent = seconds(bench.tokens) - seconds(1)
        return {"seconds": spent, "tokens_per_s": bench.batch * (bench.tokens - 1) / spent}

    modes: dict[str, Row] = {"transformers generate": {}}
    if bench.batch == 1:  # transformers drafts only for a single sequence
        early = {"assistant_early_exit": config.num_layers // 4}
        modes["transformers assistant_early_exit"] = early
    for mode, options in modes.items():
        kept.measure(
            {**place, "mode": mode, "way": ""}, lambda options=options: measured(**options)
        )


# The tables


def note(row: Row) -> str:
    """The note of a row: all its further figures."""
    if "error" in row:
        return str(row["error"])
    said: list[tuple[str, Callable[[Any], str]]] = [
        ("seconds_to_first_token", lambda x: f"{x * 1e3:.2f} ms to the first token"),
        ("of_bandwidth", lambda x: f"{x:.0%} of the weight-bandwidth limit"),
        ("speed_up", lambda x: f"{x:.2f}x full"),
        ("acceptance", lambda x: f"{x:.0%} accepted"),
        ("check_microseconds_beyond_bytes", lambda x: f"check {x:.0f} us beyond its bytes"),
        ("host_syncs_per_iteration", lambda x: f"{x} host syncs"),
        ("capture_seconds", lambda x: f"captured in {x:.2f} s"),
        ("capture_bytes", lambda x: f"{x / 2**20:.0f} MiB"),
    ]
    return ", ".join(text(row[key]) for key, text in said if key in row)


def milliseconds(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row[name] * 1e3:.3f}" if name in row else ""


def table(result: dict[str, Any]) -> str:
    """The tables as Markdown."""
    place: Columns = (("model", "{model}"), ("batch", "{batch}"), ("mode", "{mode}"))
    columns: Columns = (
        *place,
        ("way", "{way}"),
        ("tokens/s", "{tokens_per_s:.0f}"),
        ("ms/iteration", milliseconds("seconds_per_iteration")),
        ("GPU ms", milliseconds("gpu_seconds")),
        ("of ideal", "{of_ideal:.2f}"),
        ("note", note),
    )
    about = (
        f"{result['device']}, torch {result['torch']}, a sum reads "
        f"{result['read'] / 1e9:.0f} GB/s in this run; prompts of {PROMPT} tokens, "
        f"{result['tokens']} generated. Ideal: the time to read the mode's weights. GPU: the "
        "program alone, launched again and again. `bench/gpu.sh`"
    )
    parts = [about, table_of(columns, (r for r in result["rows"] if "kernels" not in r))]
    kernels = [
        {**row, **each, "all": each["count"] * each["us"]}
        for row in result["rows"]
        for each in row.get("kernels", ())[:10]
    ]
    if kernels:
        named = ("kernel", lambda row: row["kernel"].replace("|", "/")[:80])
        times = (("a step", "{count:g}"), ("us each", "{us:.2f}"), ("us in all", "{all:.1f}"))
        parts.append(table_of([*place, named, *times], kernels))
    if result["not_run"]:
        parts.append(f"No time was left for {', '.join(dict.fromkeys(result['not_run']))}.")
    return "\n\n".join(parts)


def short(result: dict[str, Any]) -> str:
    """The table of captured programs: full depth, half of the layers, self-speculation."""
    found: dict[tuple[str, int], Row] = {}
    for row in result["rows"]:
        if row["way"] == "captured":
            own = found.setdefault((row["model"], row["batch"]), {})
            own[row["mode"].split(" L")[0]] = row
    columns: Columns = (
        ("model", "{full[model]}"),
        ("batch", "{full[batch]}"),
        ("full depth, ms", lambda row: f"{row['full']['seconds_per_iteration'] * 1e3:.2f}"),
        ("of the weight-bandwidth limit", "{full[of_bandwidth]:.0%}"),
        ("half of the layers", "{fixed exit[speed_up]:.2f}x"),
        ("confident exit there", "{confident exit[speed_up]:.2f}x"),
        ("self-speculation", "{self-speculation[speed_up]:.2f}x"),
    )
    about = (
        f"{result['device']}, torch {result['torch']}; shapes of SmolLM2-135M and Llama-3.2-1B, "
        "random weights in bfloat16, the engine's wall clock; speed-ups over full depth. "
        "`bench/gpu.sh`"
    )
    rows = [row for row in found.values() if "full" in row]
    return f"{table_of(columns, rows)}\n\n{about}"


REPORTS = (
    Report("gpu-nvidia-h100-80gb-hbm3-decode", {"gpu_decode in short": short, "gpu_decode": table}),
)


# The command


def main(words: Sequence[str]) -> int:
    made = parser("gpu-decode", __doc__, rounds=3)
    made.add_argument("--model", nargs="+", choices=list(MODELS), default=["8b", "1b", "135m"])
    made.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    made.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    made.add_argument("--tokens", type=int, default=65, help="generated a request")
    arguments = made.parse_args(words)
    if arguments.device == "cuda" and eecore.ops.missing_cuda_ops():
        print("gpu-decode: expected a GPU and a build with CUDA", file=sys.stderr)
        return 2
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    common = about(device, tokens=arguments.tokens)
    kept = Kept(arguments.json, common, NAMES, arguments.seconds)
    kept.figures["read"] = read_rate(device)
    for name, batch in itertools.product(arguments.model, arguments.batch):
        if batch == arguments.batch[0]:
            model = random_model(model_config(name), device, dtype)
        parts = {"modes": mode_rows, "speculation": speculative_rows, "kernels": kernel_rows}
        if batch == 1:
            parts["prompts"] = prompt_rows
        if name in ("1b", "tiny") and (batch == 1 or not on_gpu):  # shows the speed of the host
            parts["transformers"] = transformers_rows
        bench = Bench(model, batch, arguments.tokens, arguments.rounds)
        for part, rows in parts.items():
            if part in arguments.only:
                rows(bench, kept, {"model": name, "batch": batch})
    return kept.close(table)
