"""llama.cpp from xllamacpp's wheel, called through the C functions of its library.

python -m bench.decode.llama_wheel ENGINE FILE.gguf BITS THREADS

Answers as :mod:`bench.decode.worker` does; also answers {"window": [ids], "after": n} with {"nats":
mean} of the window's tokens after position n. The wheel is compiled for AVX2 and nothing newer.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

from bench.harness.answers import answering, version_of

TOKENS = 8192
"""Capacity of the cache in tokens, for all sequences together."""


class Settings(ctypes.Structure):
    """llama_context_params: its first fields, and space for the rest, which keep their defaults."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max")),
        ("others", ctypes.c_uint8 * 496),
    )


class ModelSettings(ctypes.Structure):
    """llama_model_params with its defaults."""

    _fields_ = (("all", ctypes.c_uint8 * 512),)


class Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


def library() -> ctypes.CDLL:
    """The functions of llama.cpp, which the wheel's one library exports."""
    found = importlib.util.find_spec("xllamacpp")
    assert found is not None
    assert found.submodule_search_locations
    (file,) = Path(found.submodule_search_locations[0]).glob("xllamacpp*.so")
    made = ctypes.CDLL(str(file))
    made.llama_model_default_params.restype = ModelSettings
    made.llama_model_load_from_file.argtypes = (ctypes.c_char_p, ModelSettings)
    made.llama_context_default_params.restype = Settings
    made.llama_init_from_model.argtypes = (ctypes.c_void_p, Settings)
    made.llama_batch_init.restype = Batch
    made.llama_decode.argtypes = (ctypes.c_void_p, Batch)
    made.llama_get_logits.restype = ctypes.POINTER(ctypes.c_float)
    for name in ("model_load_from_file", "init_from_model", "get_memory", "model_get_vocab"):
        getattr(made, f"llama_{name}").restype = ctypes.c_void_p
    return made


class Model:
    """A GGUF file and a cache."""

    def __init__(self, file: str, threads: int) -> None:
        self.calls = library()
        self.log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(
            lambda level, text, data: None  # noqa: ARG005 (llama.cpp's own)
        )
        self.calls.llama_log_set(self.log, None)
        self.calls.llama_backend_init()
        model = self.calls.llama_model_load_from_file(
            file.encode(), self.calls.llama_model_default_params()
        )
        settings = self.calls.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = TOKENS, 8
        vocabulary = self.calls.llama_model_get_vocab(ctypes.c_void_p(model))
        self.vocab_size = self.calls.llama_vocab_n_tokens(ctypes.c_void_p(vocabulary))
        self.context = ctypes.c_void_p(
            self.calls.llama_init_from_model(ctypes.c_void_p(model), settings)
        )
        self.calls.llama_set_n_threads(self.context, threads, threads)
        self.memory = ctypes.c_void_p(self.calls.llama_get_memory(self.context))
        self.batch = self.calls.llama_batch_init(settings.n_batch, 0, 1)

    def clear(self) -> None:
        """Forget all sequences."""
        self.calls.llama_memory_clear(self.memory, ctypes.c_bool(True))

    def logits(self, rows: list[tuple[int, int, int]], wanted: int) -> Any:
        """Logits [wanted, vocab_size] of the last rows; a row is (token, position, sequence)."""
        import numpy

        for i, (token, position, sequence) in enumerate(rows):
            self.batch.token[i], self.batch.pos[i] = token, position
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, sequence
            self.batch.logits[i] = i >= len(rows) - wanted
        self.batch.n_tokens = len(rows)
        if code := self.calls.llama_decode(self.context, self.batch):
            raise RuntimeError(f"llama_decode: expected 0, got {code}")
        made = self.calls.llama_get_logits(self.context)
        return numpy.ctypeslib.as_array(made, (wanted, self.vocab_size))

    def generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Greedy tokens after prompts of equal length, one step of all sequences at a time."""
        self.clear()
        rows = [
            (t, at, i) for at in range(len(prompts[0])) for i, t in enumerate(column(prompts, at))
        ]
        made: list[list[int]] = [[] for _ in prompts]
        for step in range(count):
            best = self.logits(rows, len(prompts)).argmax(-1).tolist()
            for tokens, token in zip(made, best, strict=True):
                tokens.append(token)
            rows = [(token, len(prompts[0]) + step, i) for i, token in enumerate(best)]
        return made

    def nats(self, window: list[int], begin: int) -> float:
        """Mean nats of the tokens after position ``begin``, each given all tokens before it."""
        import numpy

        self.clear()
        rows = [(token, at, 0) for at, token in enumerate(window[:-1])]
        logits = self.logits(rows, len(rows) - begin)
        logits -= logits.max(-1, keepdims=True)
        own = logits[numpy.arange(len(logits)), window[begin + 1 :]]
        sums = numpy.exp(logits).sum(-1, dtype=numpy.float64)
        return float((numpy.log(sums) - own).mean())


def column(prompts: list[list[int]], place: int) -> list[int]:
    return [prompt[place] for prompt in prompts]


def main() -> None:
    answer = answering()
    _, file, _, threads = sys.argv[1:]
    model = Model(file, int(threads))
    answer({"version": version_of("xllamacpp")})
    for line in sys.stdin:
        asked = json.loads(line)
        if "window" in asked:
            answer({"nats": model.nats(asked["window"], asked["after"])})
            continue
        started = time.perf_counter()
        tokens = model.generate(asked["prompts"], asked["tokens"])
        answer({"seconds": time.perf_counter() - started, "tokens": tokens})


if __name__ == "__main__":
    main()
