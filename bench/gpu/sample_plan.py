"""The launches of sample_tokens on CUDA: csrc/cuda/sample_tokens.cu in short."""

from __future__ import annotations

from bench.gpu.calls import Call, Known, ceil_div, nbytes
from bench.gpu.devices import Device
from bench.gpu.launches import KernelLaunch

CHUNK = 2048  # logits
MAX_SLICES = 128  # of a row
DIGIT_BYTES = 1024 * (4 + 8)
"""Bytes of a row's counts and masses by the first digit of keys."""
NUMBERS_BYTES = 32  # of a slice
SIFTED_BYTES = 24  # of a slice


def slices_of(vocab_size: int) -> int:
    chunks = ceil_div(vocab_size, CHUNK)
    return ceil_div(vocab_size, CHUNK * ceil_div(chunks, MAX_SLICES))


def sample_tokens(call: Call, _: Device, __: Known) -> list[KernelLaunch]:
    """The kernels if every row samples, with filters that count digits and keep few keys."""
    logits = call["logits"]
    num_rows, vocab_size = logits.shape
    slices = slices_of(vocab_size)
    of_slices, of_rows = (num_rows * slices, 1), (num_rows, 1)
    text = call.bytes_of("seen", "generated", "bias_ids", "bias", "round_tokens")
    rows = call.bytes_of("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    out = call.bytes_of("token", "confidence", "logprob", "logsumexp")
    numbers, digits = num_rows * slices * NUMBERS_BYTES, num_rows * DIGIT_BYTES
    values = num_rows * vocab_size * 4
    sifted = num_rows * slices * SIFTED_BYTES
    launches = [
        KernelLaunch(
            "sample_measure_kernel",
            of_slices,
            {"logits": nbytes(logits), "allowed": call.bytes_of("allowed"), "text": text},
            repeats={"text": (slices - 1) * text},
            writes=call.bytes_of("uniform"),
            workspace=numbers + digits,
        ),
        KernelLaunch(
            "sample_weigh_kernel",
            (num_rows * (slices + 1), 1),
            {"rows": rows},
            repeats={"logits": nbytes(logits), "numbers": (slices - 1) * numbers},
            writes=out,
            workspace=numbers + digits + values,
        ),
        KernelLaunch(
            "sample_sift_kernel",
            of_slices,
            {"rows": rows},
            repeats={"digits": (slices - 1) * digits},
            workspace=digits + values + sifted,
        ),
        KernelLaunch(
            "sample_draw_kernel",
            of_rows,
            {"rows": rows},
            writes=out,
            workspace=sifted + values / slices,
        ),
    ]
    if call["probs"] is not None:
        launches.append(
            KernelLaunch("sample_probs_kernel", of_slices, writes=values, workspace=values)
        )
    if call["top_ids"] is not None and call["top_ids"].shape[1] > 0:
        top = num_rows * slices * call["top_ids"].shape[1] * 8
        repeats = {"logits": nbytes(logits)}
        launches += [
            KernelLaunch("sample_top_slices_kernel", of_slices, repeats=repeats, workspace=top),
            KernelLaunch(
                "sample_top_kernel",
                of_rows,
                writes=call.bytes_of("top_ids", "top_logprobs"),
                workspace=top,
            ),
        ]
    return launches
