"""Decoding end to end on a GPU: every way to decode, forced exits, self-speculation, transformers.

python -m bench gpu-decode [--model 8b|1b|135m] [--batch 1 8 32] [--json FILE]

Random weights in the shape of Llama-3.2-1B, Llama-3-8B or SmolLM2-135M, bfloat16: depth and
acceptance rate are forced, the work is real. A program is ``captured`` as one graph, or runs call
by call (``calls``), with the host reading its flags; a way that fails is listed with the reason.
The table has the engine's wall clock and the GPU's own time of the program, launched again and
again on one state: if it is much less than the wall clock, the host is the limit. ``prompts`` times
the first token. bench/gpu.sh runs it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import eecore
from bench.gpu.kept import Kept, about
from bench.gpu.timing import elapsed, read_rate
from bench.harness.results import Report
from eecore import ops
from eecore.config import ModelConfig, RopeConfig
from eecore.decoding.capture import CallByCall, RunProgram, run_program_on
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
COLUMNS = ("model", "batch", "mode", "way", "tokens/s", "ms/iteration", "GPU ms", "of ideal")
COLUMNS += ("note",)
NAMES = ("model", "batch", "mode", "way")
PARTS = ("modes", "speculation", "prompts", "transformers")
BUSY = 0.9
"""The share of the wall clock above which the GPU is the limit, not the host."""
LAUNCHES = 50
"""Runs of a program to measure its own time."""


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

    def engine(self, way: str) -> eecore.Engine:
        per_request = PROMPT + self.tokens + NUM_DRAFTS + 32
        config = eecore.EngineConfig(
            kv_cache_tokens=self.batch * per_request,
            max_num_seqs=self.batch,
            max_batch_tokens=self.batch * PROMPT,
        )
        return eecore.Engine(self.model, None, config, run=self.run_by(way))

    def run_by(self, way: str) -> RunProgram:
        """The way to run programs: ``captured`` or call by call."""
        return run_program_on(self.model.device) if way == "captured" else CallByCall()

    def run(self, engine: eecore.Engine, policy: Any) -> tuple[float, list[eecore.Output]]:
        """Seconds from the last request's first token to the last token, and the outputs."""
        generator = torch.Generator().manual_seed(1)
        vocab_size = self.model.config.vocab_size
        sampling = eecore.SamplingParams(max_tokens=self.tokens, ignore_eos=True)
        for _ in range(self.batch):
            prompt = torch.randint(vocab_size, (PROMPT,), generator=generator).tolist()
            engine.add_request(prompt, exit=policy, sampling=sampling)
        outputs = [step.output for step in engine.step() if step.output is not None]
        self._wait()
        begin = time.perf_counter()
        outputs += [step.output for step in engine.run() if step.output is not None]
        self._wait()
        return time.perf_counter() - begin, outputs

    def host_syncs(self, engine: eecore.Engine, policy: Any) -> int:
        """Waits of the host in one decoding iteration, without the wait for its tokens."""
        sampling = eecore.SamplingParams(max_tokens=4, ignore_eos=True)
        for _ in range(self.batch):
            engine.add_request([1, 2, 3], exit=policy, sampling=sampling)
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
    def program(self, engine: eecore.Engine, policy: Any) -> Iterator[Callable[[], float]]:
        """A function that launches an engine's program on the state halfway through its requests.

        Each call returns the seconds that the launch took the host. The tokens mean nothing; on
        the CPU, where a run changes its inputs, the times mean nothing either.
        """
        generator = torch.Generator().manual_seed(1)
        sampling = eecore.SamplingParams(max_tokens=self.tokens, ignore_eos=True)
        for _ in range(self.batch):
            prompt = torch.randint(self.model.config.vocab_size, (PROMPT,), generator=generator)
            engine.add_request(prompt.tolist(), exit=policy, sampling=sampling)
        for _ in range(max(2, self.tokens // 2)):
            engine.step()
        iterations = engine.iterations
        program = next(reversed(iterations._programs.values()))

        @torch.inference_mode()
        def launch() -> float:
            begin = time.perf_counter()
            program.send()
            iterations.run(program)
            return time.perf_counter() - begin

        try:
            yield launch
        finally:
            self._wait()
            list(engine.run())

    def program_times(self, engine: eecore.Engine, policy: Any) -> dict[str, Any]:
        """The program's own seconds a run, without the engine, and the host's seconds a launch.

        The time of a run is between two events on the GPU.
        """
        try:
            with self.program(engine, policy) as launch:
                for _ in range(3):
                    launch()
                self._wait()
                launches: list[float] = []
                run = elapsed(
                    self.model.device,
                    lambda: launches.extend(launch() for _ in range(LAUNCHES)),
                )
        except Exception as error:
            return {"program_error": f"{type(error).__name__}: {error}".replace("\n", " ")[:200]}
        return {
            "gpu_seconds": run / LAUNCHES,
            "launch_seconds": statistics.median(launches),
        }

    def first_token(self, length: int, way: str) -> dict[str, Any]:
        """Seconds from a prompt of ``length`` tokens to its first token, the median over rounds
        after one that captures.
        """
        config = eecore.EngineConfig(
            kv_cache_tokens=self.batch * (length + 32),
            max_num_seqs=self.batch,
            max_batch_tokens=max(self.batch * length, 2048),
        )
        engine = eecore.Engine(self.model, None, config, run=self.run_by(way))
        generator = torch.Generator().manual_seed(1)
        sampling = eecore.SamplingParams(max_tokens=1, ignore_eos=True)
        times = []
        for _ in range(self.rounds + 1):
            for _ in range(self.batch):
                prompt = torch.randint(self.model.config.vocab_size, (length,), generator=generator)
                engine.add_request(prompt.tolist(), exit=eecore.Full(), sampling=sampling)
            self._wait()
            begin = time.perf_counter()
            list(engine.run())
            self._wait()
            times.append(time.perf_counter() - begin)
        return {"seconds_to_first_token": statistics.median(times[1:])} | captures_of(engine)

    def _wait(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()

    def measure(self, mode: str, way: str, policy: Any) -> dict[str, Any]:
        """A row: medians over rounds, after a round that captures."""
        row: dict[str, Any] = {"batch": self.batch, "mode": mode, "way": way}
        try:
            engine = self.engine(way)
            self.run(engine, policy)
            runs = [self.run(engine, policy) for _ in range(self.rounds)]
        except Exception as error:  # a way that this GPU or torch does not support
            return row | {"error": f"{type(error).__name__}: {error}".replace("\n", " ")[:200]}
        outputs = runs[0][1]
        seconds = statistics.median(each for each, _ in runs)
        made = sum(len(output.token_ids) - 1 for output in outputs)
        drafted = sum(output.stats.drafted for output in outputs)
        row |= {"seconds": seconds, "tokens_per_s": made / seconds}
        row["mean_exit_layer"] = statistics.mean(o.stats.mean_exit_layer for o in outputs)
        if drafted:
            row["acceptance"] = sum(output.stats.accepted for output in outputs) / drafted
        else:
            row["seconds_per_iteration"] = seconds / (self.tokens - 1)
        if way == "captured":
            row |= self.program_times(engine, policy)
            row |= limit_of(row)
        if self.model.device.type == "cuda":
            row["host_syncs_per_iteration"] = self.host_syncs(engine, policy)
        return row | captures_of(engine)


def captures_of(engine: eecore.Engine) -> dict[str, Any]:
    """The number of an engine's captures, their seconds and bytes; empty where there are none."""
    held = engine.captures
    if not held:
        return {}
    return {
        "captures": len(held),
        "capture_seconds": sum(capture.seconds for capture in held),
        "capture_bytes": sum(capture.num_bytes for capture in held),
    }


def limit_of(row: dict[str, Any]) -> dict[str, Any]:
    """The limit of an iteration, "GPU" or "host", with the GPU's share of the wall clock."""
    if "seconds_per_iteration" not in row or "gpu_seconds" not in row:
        return {}
    share = row["gpu_seconds"] / row["seconds_per_iteration"]
    return {"of_wall": share, "limit": "GPU" if share >= BUSY else "host"}


def weight_bytes(config: ModelConfig, itemsize: int) -> tuple[float, float, float]:
    """Bytes of a layer, of its K/V projections, and of the head."""
    hidden, inner = config.hidden_size, config.intermediate_size
    kv = 2 * config.kv_size * hidden
    layer = hidden * (2 * config.q_size) + kv + 3 * hidden * inner
    return layer * itemsize, kv * itemsize, config.vocab_size * hidden * itemsize


def mode_rows(bench: Bench, kept: Kept, model: str, ways: Sequence[str]) -> None:
    """Measure every mode in every way, with its share of the bandwidth limit."""
    config = bench.model.config
    num_layers, half = config.num_layers, config.num_layers // 2
    layer, kv, head = weight_bytes(config, bench.model.dtype.itemsize)
    full = num_layers * layer + head
    forced = eecore.ConfidentExit(0.0, exit_points=(half,))
    never = eecore.ConfidentExit(1.0 - 2.0**-24, exit_points=(half,))
    modes: dict[str, tuple[Any, float]] = {
        "full": (eecore.Full(), full),
        "fixed exit L/2": (eecore.FixedExit(half), half * layer + head),
        "confident exit L/2": (forced, half * (layer + kv) + head),
        "a check that no row passes": (never, full + head),
    }
    for way in ways:
        for mode, (policy, num_bytes) in modes.items():
            case = {"model": model, "batch": bench.batch, "mode": mode, "way": way}
            if kept.find(**case) is not None:
                continue
            row = bench.measure(mode, way, policy)
            base = kept.find(**case | {"mode": "full"})
            if "error" not in row:
                spent = row["seconds_per_iteration"]
                if mode == "full":
                    row["of_bandwidth"] = full / spent / read_rate(bench.model.device)
                elif base is not None and "error" not in base:
                    speed_up = base["seconds_per_iteration"] / spent
                    row["speed_up"], row["of_ideal"] = speed_up, speed_up / (full / num_bytes)
                    if mode.startswith("a check"):
                        own = head / read_rate(bench.model.device)
                        extra = spent - base["seconds_per_iteration"] - own
                        row["check_microseconds_beyond_bytes"] = extra * 1e6
            kept.add({"model": model, **row})


def prompt_rows(bench: Bench, kept: Kept, model: str) -> None:
    """Measure the time to the first token, one prompt at a time.

    On a GPU with chunks captured by size, and call by call: with the model's ``prompt_attention``,
    if it has one, and with eecore's own attention.
    """
    best = bench.model.prompt_attention
    ways = [("captured", best)]
    if bench.model.device.type == "cuda":
        others = {"eecore": None} if best is None else {best.name: best, "eecore": None}
        ways += [(f"calls, attention by {name}", each) for name, each in others.items()]
    for length, (way, attention) in itertools.product(FIRST_TOKENS, ways):
        mode = f"first token of {length}"
        case = {"model": model, "batch": bench.batch, "mode": mode, "way": way}
        if kept.find(**case) is not None:
            continue
        bench.model.prompt_attention = attention
        try:
            row = bench.first_token(length, way)
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}".replace("\n", " ")[:200]}
        bench.model.prompt_attention = best
        kept.add(case | row)


def speculative_rows(bench: Bench, kept: Kept, name: str) -> None:
    """Measure self-speculation with L/4 layers at an acceptance rate of about ACCEPTANCE.

    The deeper layers' contributions to the residual stream are scaled down until the rate is met.
    """
    model, way, mode = bench.model, "captured", f"self-speculation L/4, d={NUM_DRAFTS}"
    if kept.find(model=name, batch=bench.batch, mode=mode, way=way) is not None:
        return
    exit_layer = model.config.num_layers // 4
    policy = eecore.SelfSpeculative(exit_layer, NUM_DRAFTS)
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
    full = bench.measure("full, deep layers scaled", way, eecore.Full())
    row = bench.measure(mode, way, policy)
    if "error" not in row and "error" not in full:
        row["speed_up"] = row["tokens_per_s"] / full["tokens_per_s"]
        layer, _, head = weight_bytes(model.config, model.dtype.itemsize)
        whole_bytes = model.config.num_layers * layer + head
        draft_bytes = exit_layer * layer + head
        rounds = whole_bytes + NUM_DRAFTS * draft_bytes
        made = 1 + NUM_DRAFTS * row["acceptance"]
        row["of_ideal"] = row["speed_up"] / (made * whole_bytes / rounds)
    kept.add({"model": name, **full})
    kept.add({"model": name, **row})
    scale_deep_layers(model, exit_layer, 1.0, whole)


def transformers_rows(bench: Bench, kept: Kept, model: str) -> None:
    """Measure transformers' generate on a model of the same shape, also with early exit."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        print("gpu-decode: transformers is not installed: it is left out", file=sys.stderr)
        return

    config = bench.model.config
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

    def seconds(tokens: int, **options: Any) -> float:
        begin = time.perf_counter()
        peer.generate(
            prompts, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **options
        )
        bench._wait()
        return time.perf_counter() - begin

    modes: dict[str, dict[str, Any]] = {"transformers generate": {}}
    if bench.batch == 1:  # transformers drafts only for a single sequence
        modes["transformers assistant_early_exit"] = {
            "assistant_early_exit": config.num_layers // 4
        }
    for mode, options in modes.items():
        row: dict[str, Any] = {"model": model, "batch": bench.batch, "mode": mode, "way": ""}
        if kept.find(**row) is not None:
            continue
        try:
            seconds(8, **options)
            whole, first = seconds(bench.tokens, **options), seconds(1)
            made = bench.batch * (bench.tokens - 1)
            row |= {"seconds": whole - first, "tokens_per_s": made / (whole - first)}
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
        kept.add(row)


def note(row: dict[str, Any]) -> str:
    """The note of a row: all its further figures."""
    if "error" in row:
        return str(row["error"])
    said: list[tuple[str, Callable[[Any], str]]] = [
        ("limit", lambda x: f"the {x} is the limit"),
        ("of_wall", lambda x: f"the GPU at work {min(x, 1.0):.0%} of the time"),
        ("seconds_to_first_token", lambda x: f"{x * 1e3:.2f} ms to the first token"),
        ("of_bandwidth", lambda x: f"{x:.0%} of the weight-bandwidth limit"),
        ("program_error", lambda x: f"its program alone failed: {x}"),
        ("speed_up", lambda x: f"{x:.2f}x full"),
        ("acceptance", lambda x: f"{x:.0%} accepted"),
        ("check_microseconds_beyond_bytes", lambda x: f"check {x:.0f} us beyond its bytes"),
        ("host_syncs_per_iteration", lambda x: f"{x} host syncs"),
        ("capture_seconds", lambda x: f"captured in {x:.2f} s"),
        ("capture_bytes", lambda x: f"{x / 2**20:.0f} MiB"),
    ]
    return ", ".join(text(row[key]) for key, text in said if key in row)


def table(result: dict[str, Any]) -> str:
    """The table as Markdown."""
    lines = [
        f"{result['device']}, torch {result['torch']}, a sum reads "
        f"{result['read'] / 1e9:.0f} GB/s in this run; prompts of {PROMPT} tokens, "
        f"{result['tokens']} generated. Ideal: the time to read the mode's weights. GPU: the "
        "program alone, launched again and again. "
        "`bench/gpu.sh`",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---|---:|---|---|---:|---:|---:|---:|---|",
    ]
    for row in result["rows"]:
        cells = [
            row["model"],
            str(row["batch"]),
            row["mode"],
            row["way"],
            f"{row['tokens_per_s']:.0f}" if "tokens_per_s" in row else "",
            f"{row['seconds_per_iteration'] * 1e3:.3f}" if "seconds_per_iteration" in row else "",
            f"{row['gpu_seconds'] * 1e3:.3f}" if "gpu_seconds" in row else "",
            f"{row['of_ideal']:.2f}" if "of_ideal" in row else "",
            note(row),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if result["not_run"]:
        lines += ["", f"No time was left for {', '.join(dict.fromkeys(result['not_run']))}."]
    return "\n".join(lines)


def short(result: dict[str, Any]) -> str:
    """The table of captured programs: full depth, half of the layers, self-speculation."""
    rows = {
        (row["model"], row["batch"], row["mode"]): row
        for row in result["rows"]
        if row["way"] == "captured"
    }
    lines = [
        "| model | batch | full depth, ms | of the weight-bandwidth limit | half of the layers | "
        "confident exit there | self-speculation |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for model, batch in dict.fromkeys(key[:2] for key in rows if key[2] == "full"):
        full = rows[model, batch, "full"]
        cells = [f"{full['seconds_per_iteration'] * 1e3:.2f}", f"{full['of_bandwidth']:.0%}"]
        for mode in ("fixed exit", "confident exit", "self-speculation"):
            speed_ups = [
                f"{row['speed_up']:.2f}x"
                for key, row in rows.items()
                if key[:2] == (model, batch) and key[2].startswith(mode) and "speed_up" in row
            ]
            cells.append(", ".join(speed_ups))
        lines.append(f"| {model} | {batch} | {' | '.join(cells)} |")
    lines += [
        "",
        f"{result['device']}, torch {result['torch']}; shapes of SmolLM2-135M and Llama-3.2-1B, "
        "random weights in bfloat16, the engine's wall clock; speed-ups over full depth. "
        "`bench/gpu.sh`",
    ]
    return "\n".join(lines)


REPORTS = (
    Report(
        "gpu-nvidia-h100-80gb-hbm3-decode",
        {"gpu_decode in short": short, "gpu_decode": table},
        {"rows": ("model", "batch", "mode", "way")},
        ("read", "not_run"),
        ("torch",),
    ),
)


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench gpu-decode",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=["8b", "1b", "135m"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tokens", type=int, default=65, help="generated a request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=150, help="no part starts after this time")
    parser.add_argument("--json", type=Path, help="the file for the rows")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    arguments = parse_arguments(words)
    if arguments.device == "cuda" and eecore.ops.missing_cuda_ops():
        print("gpu-decode: expected a GPU and a build with CUDA", file=sys.stderr)
        return 2
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    begin = time.monotonic()
    kept = Kept(arguments.json, about(device, tokens=arguments.tokens), NAMES, table)
    kept.note(read=read_rate(device))
    for name in arguments.model:
        model = random_model(model_config(name), device, dtype)
        for batch in arguments.batch:
            bench = Bench(model, batch, arguments.tokens, arguments.rounds)
            for part, run in parts_of(bench, kept, name, arguments.only):
                if time.monotonic() - begin > arguments.seconds:
                    kept.skip(f"{name} batch {batch} {part}")
                    continue
                run()
                said = f"{time.monotonic() - begin:6.1f} s  {name} batch {batch} {part}"
                print(said, file=sys.stderr, flush=True)
        del model, bench
    return kept.close()


def parts_of(
    bench: Bench, kept: Kept, model: str, only: Sequence[str]
) -> list[tuple[str, Callable[[], None]]]:
    """The measurements of one model at one batch size, by part."""
    on_gpu, batch = bench.model.device.type == "cuda", bench.batch
    ways = ["captured", "calls"] if on_gpu and batch == 1 else ["captured"]
    parts: list[tuple[str, Callable[[], None]]] = [
        ("modes", lambda: mode_rows(bench, kept, model, ways)),
        ("speculation", lambda: speculative_rows(bench, kept, model)),
    ]
    if batch == 1:
        parts.append(("prompts", lambda: prompt_rows(bench, kept, model)))
    if model in ("1b", "tiny") and (batch == 1 or not on_gpu):  # shows the speed of the host
        parts.append(("transformers", lambda: transformers_rows(bench, kept, model)))
    return [(name, run) for name, run in parts if name in only]


Case = tuple[dict[str, Any], Callable[[Bench], dict[str, Any]]]
"""The fields that identify a case of a program, and what measures its other fields."""


def measure_programs(
    name: str,
    doc: str | None,
    words: Sequence[str],
    cases: Callable[[LlamaModel], Iterator[Case]],
    table: Callable[[dict[str, Any]], str],
    *,
    batches: Sequence[int],
    seconds: float,
) -> int:
    """A benchmark's command: each case of each model at each batch size; returns the exit code."""
    parser = argparse.ArgumentParser(
        f"python -m bench {name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=["135m", "1b"])
    parser.add_argument("--batch", nargs="+", type=int, default=list(batches))
    parser.add_argument("--tokens", type=int, default=33)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="no case starts after this time"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    if arguments.device == "cuda" and eecore.ops.missing_cuda_ops():
        print(f"{name}: expected a GPU and a build with CUDA", file=sys.stderr)
        return 2
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    begin = time.monotonic()
    kept = Kept(arguments.json, about(device, tokens=arguments.tokens), NAMES[:3], table)
    for model_name in arguments.model:
        model = random_model(model_config(model_name), device, dtype)
        for batch, (own, measure) in itertools.product(arguments.batch, cases(model)):
            case: dict[str, Any] = {"model": model_name, "batch": batch, **own}
            if kept.find(**case) is not None:
                continue
            if time.monotonic() - begin > arguments.seconds:
                kept.skip(", ".join(map(str, case.values())))
                continue
            try:
                kept.add(case | measure(Bench(model, batch, arguments.tokens, 1)))
            except Exception as error:
                text = f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
                kept.add(case | {"error": text})
    return kept.close()
