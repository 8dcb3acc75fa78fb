"""The tests of ``pytest -m quick``: some of every floor, for use during work.

The emulator is left out, since it may have to be compiled first.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CASES_OF_AN_OP = 1
"""Cases of every test of ops, on each of these kernels."""
CAPABILITIES = ("cpu-portable", "cpu-avx512_bf16")
OF_OPS = ("ops",)

# All tests of these files of a folder are quick.
WHOLE = {
    ".": "exit_text exits files hostile_files house quick values",
    "calibration": "examples",
    "cli": "options",
    "decoding": "confident_exit cut_vocabulary penalties sampling speculation",
    "heads": "head_files",
    "lab/training": "calm chats data draft_head early_exit_loss layer_dropout recipe",
    "models": "checkpoint gguf_file llama tokenizer tokenizer_files",
    "planning": "auto guide lookup",
    "scheduling": "pages scheduler",
    "serving": "cached_prompts depth endpoints metrics models refusals scored_prompts streams",
}
# Prefixes of the quick tests of these files.
SOME = {
    "cli/test_cli.py": ("test_generate", "test_every_exit_mode", "test_json", "test_wrong_usage"),
    "cli/test_cli_streams.py": ("test_arguments_of_all_kinds",),
    "decoding/test_head_drafts.py": ("test_greedy", "test_all_policies"),
    "models/test_recurrent_head.py": ("test_a_bad_pack",),
    "engine/test_faults.py": ("test_generate_gives", "test_all_that_fail"),
    "engine/test_async_engine.py": ("test_concurrent", "test_closing_the", "test_a_refused"),
    "engine/test_engine.py": ("test_st", "test_bad", "test_requests"),
    "engine/test_worker.py": ("test_overlapping",),
    "calibration/test_calibration.py": ("test_p_values", "test_every_threshold", "test_bad_sett"),
    "lab/evaluation/test_evaluate.py": ("test_scores_are",),
    "fuzz/test_fuzzing.py": ("test_figures", "test_mutations"),
    "integrations/test_layer_drafts.py": ("test_drafts_are", "test_rejected_drafts"),
    "integrations/test_transformers.py": ("test_answers_are", "test_the_weights_are_shared"),
    "integrations/test_vllm.py": ("test_drafts_of_a_batch", "test_settings"),
    "models/test_gguf_load.py": ("test_weights_are_those",),
    "models/test_t5.py": ("test_logits_agree", "test_confident"),
    "scheduling/test_prefix_cache.py": ("test_a_prompt_begins", "test_no_output_of"),
    "serving/test_server.py": ("test_openais_client", "test_a_port"),
    "lab/training/test_run.py": ("test_a_model_learns",),
}
QUICK = SOME | {
    (Path(folder) / f"test_{name}.py").as_posix(): ("test_",)
    for folder, names in WHOLE.items()
    for name in names.split()
}
"""The prefixes of the names of a file's quick tests."""


def has_quick(path: Path) -> bool:
    """Whether some tests of a file are quick."""
    return path.is_relative_to(TESTS) and (
        path.parent.name in OF_OPS or path.relative_to(TESTS).as_posix() in QUICK
    )


def mark(items: list[pytest.Item]) -> None:
    """Mark the quick tests."""
    of_ops: dict[tuple[Path, str, str], list[pytest.Item]] = {}
    for item in items:
        if not has_quick(item.path) or not isinstance(item, pytest.Function):
            continue
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        backend = str(parameters.get("device", ""))
        name = item.originalname
        if item.path.parent.name not in OF_OPS:
            begins = QUICK[item.path.relative_to(TESTS).as_posix()]
            if name.startswith(begins) and backend != "emulated":
                item.add_marker("quick")
        elif backend in ("", *CAPABILITIES):
            of_ops.setdefault((item.path, name, backend), []).append(item)
    for cases in of_ops.values():
        for place in range(CASES_OF_AN_OP):  # spread: the first are often empty
            cases[len(cases) * (place + 1) // (CASES_OF_AN_OP + 1)].add_marker("quick")
