"""An engine with one T5 at full depth, in a process of its own, which answers on stdout.

python -m bench.calm.worker transformers|ctranslate2 DIRECTORY BITS THREADS

It answers as bench/decode/worker.py does, with up to n greedy tokens for each prompt, the model's
end token included. The prompts of a request run together, padded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bench.decode.worker import DTYPES, Generate, serve


def transformers(directory: str, bits: str, threads: int) -> Generate:
    import torch
    from transformers import AutoModelForSeq2SeqLM

    torch.set_num_threads(threads)
    network = AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=DTYPES[bits]).eval()
    config = json.loads((Path(directory) / "config.json").read_text())
    start, end, pad = (config[f"{name}_token_id"] for name in ("decoder_start", "eos", "pad"))
    settings = network.generation_config
    settings.decoder_start_token_id, settings.eos_token_id, settings.pad_token_id = start, end, pad

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([prompt + [pad] * (longest - len(prompt)) for prompt in prompts])
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        mask = (torch.arange(longest) < lengths[:, None]).long()
        with torch.inference_mode():
            made = network.generate(
                ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, num_beams=1
            )
        return [until(row[1:], end) for row in made.tolist()]  # the first is the start token

    return generate


def until(tokens: list[int], end: int) -> list[int]:
    """The tokens up to and including the end token; all tokens if it is missing."""
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def ctranslate2(directory: str, bits: str, threads: int) -> Generate:
    import ctranslate2

    translator = ctranslate2.Translator(
        directory,
        device="cpu",
        compute_type=DTYPES[bits],
        inter_threads=1,
        intra_threads=threads,
    )

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        results = translator.translate_batch(
            [[str(token) for token in prompt] for prompt in prompts],
            beam_size=1,
            max_decoding_length=tokens,
            max_input_length=0,
            return_end_token=True,
        )
        return [[int(token) for token in result.hypotheses[0]] for result in results]

    return generate


ENGINES = {"transformers": transformers, "ctranslate2": ctranslate2}


def main() -> None:
    engine, directory, bits, threads = sys.argv[1:]
    serve(engine, lambda: ENGINES[engine](directory, bits, int(threads)))


if __name__ == "__main__":
    main()
