"""What ``pytest -m quick`` runs: something of every floor, for while one is at work on it.

The emulator is left out, since it may have to be compiled first.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ALL = ("test_",)
LOSSLESS = ("test_greedy_output_is_that_of_full",)
CASES_OF_AN_OP = 2
"""Of every test of an op, on each of these kernels."""
CAPABILITIES = ("cpu-portable", "cpu-avx2", "cpu-avx512_bf16")
SLOW_OF_AN_OP = ("opcheck", "compiles")

# Files, and how the names of their quick tests begin.
QUICK = {
    "across_ops/test_tape.py": ("test_a_replay",),
    "cli/test_cli.py": ("test_generate", "test_every_exit_mode", "test_wrong_usage"),
    "decoding/test_auto.py": LOSSLESS,
    "decoding/test_confident_exit.py": ("test_algorithm_1", "test_work_is_really_saved"),
    "decoding/test_guide.py": ("test_lossless_modes",),
    "decoding/test_head_drafts.py": LOSSLESS,
    "decoding/test_lookup.py": LOSSLESS,
    "decoding/test_sampling.py": ALL,
    "decoding/test_speculation.py": (*LOSSLESS, "test_full_is", "test_counters"),
    "engine/test_async_engine.py": ("test_concurrent", "test_closing_a", "test_a_refused"),
    "engine/test_engine.py": (
        "test_modes_in_one_batch",
        "test_preemption",
        "test_stop_strings",
        "test_streamed_pieces",
        "test_bad_requests",
        "test_stats",
    ),
    "evaluation/test_calibration.py": ("test_p_values", "test_every_threshold", "test_bad_sett"),
    "evaluation/test_exit_map.py": ("test_a_written_text",),
    "evaluation/test_layerskip.py": ("test_scores_are",),
    "fuzz/test_fuzzing.py": ("test_figures", "test_mutations"),
    "integrations/test_layer_drafts.py": ("test_drafts_are", "test_what_was_refused"),
    "integrations/test_transformers.py": ("test_answers_are", "test_the_weights_are_shared"),
    "integrations/test_vllm.py": ("test_drafts_of_a_batch", "test_settings"),
    "models/test_checkpoint.py": ("test_shards", "test_a_missing", "test_a_tensor_of"),
    "models/test_gguf_load.py": ("test_weights_are_those", "test_truncated"),
    "models/test_llama.py": ("test_logits_agree_with_transformers", "test_rows_are_the_same"),
    "models/test_t5.py": ("test_logits_agree", "test_confident", "test_self_spec"),
    "models/test_tokenizer.py": ("test_a_stream",),
    "scheduling/test_pages.py": ALL,
    "scheduling/test_prefix_cache.py": ("test_a_prompt_begins", "test_no_output_depends"),
    "scheduling/test_scheduler.py": ALL,
    "serving/test_endpoints.py": ("test_a_completion", "test_a_chat", "test_streams", "test_refus"),
    "serving/test_refusals.py": ALL,
    "serving/test_wire.py": ALL,
    "training/test_early_exit_loss.py": ALL,
    "training/test_recipe.py": ALL,
    "training/test_run.py": ("test_a_model_learns",),
    "test_exit_text.py": ALL,
    "test_exits.py": ALL,
    "test_files.py": ALL,
    "test_house.py": ALL,
    "test_quick.py": ALL,
}


def has_quick(path: Path) -> bool:
    """Whether some tests of a file are quick."""
    return path.is_relative_to(TESTS) and (
        path.parent == TESTS / "ops" or path.relative_to(TESTS).as_posix() in QUICK
    )


def mark(items: list[pytest.Item]) -> None:
    """Give the quick ones their marker."""
    of_ops: dict[tuple[Path, str, str], list[pytest.Item]] = {}
    for item in items:
        if not has_quick(item.path) or not isinstance(item, pytest.Function):
            continue
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        backend = str(parameters.get("device", ""))
        name = item.originalname
        if item.path.parent != TESTS / "ops":
            begins = QUICK[item.path.relative_to(TESTS).as_posix()]
            if name.startswith(begins) and backend != "emulated":
                item.add_marker("quick")
        elif backend in ("", *CAPABILITIES) and not any(word in name for word in SLOW_OF_AN_OP):
            of_ops.setdefault((item.path, name, backend), []).append(item)
    for cases in of_ops.values():
        for place in range(CASES_OF_AN_OP):  # spread: the first are often empty
            cases[len(cases) * (place + 1) // (CASES_OF_AN_OP + 1)].add_marker("quick")
