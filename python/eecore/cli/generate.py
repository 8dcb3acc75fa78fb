"""``eecore generate``: prompts in, text or JSON lines out."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from eecore.cli.prompts import Prompt, read_prompts
from eecore.cli.results import JsonLines, Results, StreamedText, TextByPrompt, print_stats
from eecore.console.exit_options import (
    EXIT_HELP,
    PANEL,
    USUAL_EXIT,
    CalibrationFile,
    ClassifierFile,
    DecayTau,
    DraftHeadDirectory,
    ExitOptions,
    ExitPoints,
    Measure,
    MinExitLayer,
    SkipsFile,
)
from eecore.console.failures import FAILED, UsageError
from eecore.console.loading import (
    Debug,
    Device,
    Dtype,
    KVCacheDtype,
    KVCacheTokens,
    OptionalModel,
    Threads,
    Weights,
    check_path,
    load,
    model_and_prompt,
)
from eecore.console.signals import INTERRUPTED, SIGNALS
from eecore.console.streams import say

if TYPE_CHECKING:
    from eecore.config import SamplingParams
    from eecore.exits import Exit
    from eecore.generation import Model
    from eecore.output import Output

SAMPLING = "Sampling"
OUTPUT = "Output"
MACHINE = "Machine"


def generate(
    model: OptionalModel = None,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - or none: all of stdin is one.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help="Prompts, one a line; .jsonl: strings, token ids or objects with a prompt; "
            "-: lines of stdin.",
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put prompts into the model's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system message.")] = None,
    exit: Annotated[
        str | None, typer.Option(help=EXIT_HELP, show_default=USUAL_EXIT, rich_help_panel=PANEL)
    ] = None,
    measure: Measure = None,
    batch_mode: Annotated[
        str | None,
        typer.Option(
            help="confident: each prompt exits on its own, or all together: each | all.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    decay_tau: DecayTau = None,
    exit_points: ExitPoints = None,
    min_exit_layer: MinExitLayer = None,
    classifier: ClassifierFile = None,
    calibration: CalibrationFile = None,
    draft_threshold: Annotated[
        float | None,
        typer.Option(
            help="speculative: end a draft at a token less sure than this.", rich_help_panel=PANEL
        ),
    ] = None,
    exits: DraftHeadDirectory = None,
    skips: SkipsFile = None,
    skip_attention: Annotated[
        str | None,
        typer.Option(
            help="draft-verify: layers (from 0) whose attention the draft leaves out.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    skip_mlp: Annotated[
        str | None,
        typer.Option(
            help="draft-verify: layers (from 0) whose MLP the draft leaves out.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="Most new tokens.", rich_help_panel=SAMPLING)
    ] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="0: greedy.", rich_help_panel=SAMPLING)
    ] = 0.0,
    top_k: Annotated[int, typer.Option(help="0: all tokens.", rich_help_panel=SAMPLING)] = 0,
    top_p: Annotated[float, typer.Option(rich_help_panel=SAMPLING)] = 1.0,
    min_p: Annotated[float, typer.Option(rich_help_panel=SAMPLING)] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(rich_help_panel=SAMPLING)] = 1.0,
    presence_penalty: Annotated[float, typer.Option(rich_help_panel=SAMPLING)] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(rich_help_panel=SAMPLING)] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same text.", rich_help_panel=SAMPLING)
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End before this string; may be repeated.", rich_help_panel=SAMPLING),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Go on past the end token.", rich_help_panel=SAMPLING),
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="With --json: log-probabilities, and of so many other tokens.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object a prompt.", rich_help_panel=OUTPUT)
    ] = False,
    depth: Annotated[
        bool,
        typer.Option(
            "--depth", help="Colour each token by its exit layer.", rich_help_panel=OUTPUT
        ),
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="A table on stderr at the end.", rich_help_panel=OUTPUT)
    ] = False,
    device: Device = None,
    dtype: Dtype = None,
    weights: Weights = None,
    threads: Threads = None,
    kv_cache_tokens: KVCacheTokens = None,
    kv_cache_dtype: KVCacheDtype = None,
    debug: Debug = False,
) -> int:
    """Continue prompts: text as it comes, or JSON lines."""
    options = ExitOptions(
        exit=exit,
        measure=measure,
        batch_mode=batch_mode,
        decay_tau=decay_tau,
        exit_points=exit_points,
        min_exit_layer=min_exit_layer,
        classifier=classifier,
        calibration=calibration,
        draft_threshold=draft_threshold,
        skips=skips,
        skip_attention=skip_attention,
        skip_mlp=skip_mlp,
    )
    if system is not None and not chat:
        raise UsageError("--system: goes with --chat")
    if json and depth:
        raise UsageError("--depth: goes with text, not with --json (which has exit_layers)")
    if logprobs is not None and not json:
        raise UsageError("--logprobs: goes with --json")
    model, prompt = model_and_prompt(model, prompt, has_file=file is not None)
    directory = check_path(model)
    prompts = read_prompts(prompt, file)

    from eecore.config import SamplingParams
    from eecore.exit_text import parse_exit, usual_exit

    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        logprobs=logprobs,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    if not debug:  # an error of a prompt is reported in a line
        logging.getLogger("eecore").addHandler(logging.NullHandler())
    said = None if exit is None else options.policy(directory)
    loaded = load(
        model,
        threads=threads,
        policy=said,
        device=device,
        dtype=dtype,
        weights=weights,
        kv_cache_tokens=kv_cache_tokens,
        kv_cache_dtype=kv_cache_dtype,
        exits=False if exits == "none" else exits,
    )
    policy = said or parse_exit(usual_exit(loaded.network.device))
    asked = [_chat_ids(loaded, text, system) for text in prompts] if chat else prompts
    results, progress = _results(loaded, prompts, json, lowest_exit(policy) if depth else None)
    code, outputs = _run(loaded, asked, policy, sampling, results, progress, stats)
    if not chat and not stop and _says_nothing_unasked(loaded, prompts, outputs):
        say("note: the model ended at once; it has a template for conversations: --chat")
    return code


def lowest_exit(policy: Exit) -> int:
    """The lowest layer after which a token can leave, where the colours begin; 0 where no layer
    drafts it.
    """
    from eecore import exits

    if isinstance(policy, (exits.SelfSpeculative, exits.FixedExit)):
        return policy.exit_layer
    if isinstance(policy, exits.ConfidentExit):
        return max(policy.min_exit_layer, min(policy.exit_points or (1,)))
    return 0 if isinstance(policy, (exits.PromptLookup, exits.HeadDrafts, exits.Auto)) else 1


def _chat_ids(model: Model, prompt: Prompt, system: str | None) -> Prompt:
    """The prompt as the user's message of a conversation, in tokens."""
    if isinstance(prompt, list):
        raise UsageError("--chat: expected text prompts, got token ids")
    if model.tokenizer is None:
        raise UsageError("--chat: expected a model with a tokenizer")
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return model.tokenizer.encode_chat(messages)


def _says_nothing_unasked(model: Model, prompts: list[Prompt], outputs: list[Output]) -> bool:
    """Whether every text ended with its first token, of a model that has a chat template."""
    tokenizer = model.tokenizer
    if tokenizer is None or tokenizer.chat_template is None or isinstance(prompts[0], list):
        return False
    return bool(outputs) and all(
        output.finish_reason == "stop" and len(output.token_ids) <= 1 and not output.text
        for output in outputs
    )


def _report(index: int, output: Output) -> int:
    """Say on stderr why a prompt failed, if it did; the exit code that this makes."""
    if output.error is None:
        return 0
    say(f"error: prompt {index + 1}: {output.error}")
    return FAILED


def _results(
    model: Model, prompts: list[Prompt], json: bool, lowest: int | None
) -> tuple[Results, Progress | None]:
    """Where outputs go, and for many prompts on a terminal a progress bar."""
    if len(prompts) == 1:
        return (JsonLines(prompts) if json else StreamedText(prompts, model, lowest)), None
    # On one terminal bar and text share a console, which keeps the bar below the text.
    console = Console(stderr=not sys.stdout.isatty())
    progress = None
    if sys.stderr.isatty():
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[speed]}"),
            console=console,
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
        )
    shared = console if progress is not None and sys.stdout.isatty() else None
    if json:
        return JsonLines(prompts, shared), progress
    return TextByPrompt(prompts, shared, model, lowest), progress


def _run(
    model: Model,
    prompts: list[Prompt],
    policy: Exit,
    sampling: SamplingParams,
    results: Results,
    progress: Progress | None,
    stats: bool,
) -> tuple[int, list[Output]]:
    """Serve the prompts; on Ctrl-C what there is goes out, marked as cancelled.

    Returns:
        The exit code, and what came of each prompt, in any order.
    """
    engine = model.engine()
    order = {
        engine.add_request(prompt, exit=policy, sampling=sampling): index
        for index, prompt in enumerate(prompts)
    }
    if isinstance(results, StreamedText):
        first = prompts[0]
        known = model.tokenizer is not None and isinstance(first, str)
        results.begin(model.tokenizer.encode(first) if known else first)  # type: ignore
    outputs: list[Output] = []
    started = time.perf_counter()
    bar: Any = progress or nullcontext()
    code = 0
    with bar:
        task = progress.add_task("generating", total=len(prompts), speed="") if progress else None
        num_tokens = 0
        try:
            for step in engine.run():
                num_tokens += len(step.token_ids)
                results.step(order[step.request_id], step)
                if step.output is not None:
                    outputs.append(step.output)
                    code = max(code, _report(order[step.request_id], step.output))
                if progress is not None and task is not None:
                    speed = f"{num_tokens / (time.perf_counter() - started):.0f} tokens/s"
                    progress.update(task, completed=len(outputs), speed=speed)
        except KeyboardInterrupt:
            SIGNALS.arrived()
            code = INTERRUPTED
            left = [engine.cancel(request_id) for request_id in order]
            left += [step.output for step in engine.run()]  # a step that was interrupted ends all
            for output in sorted(filter(None, left), key=lambda each: order[each.request_id]):
                cancelled = replace(output, finish_reason="cancelled", error=None)
                results.done(order[output.request_id], cancelled)
                outputs.append(cancelled)
    if stats and outputs:
        print_stats(outputs, time.perf_counter() - started)
    if code == INTERRUPTED:
        print("interrupted", file=sys.stderr)
    return code, outputs
