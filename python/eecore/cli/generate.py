"""``eecore generate``: prompts in, text or JSON lines out."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from eecore.cli.prompts import Prompt, read_prompts
from eecore.cli.results import JsonLines, Results, StreamedText, TextByPrompt, print_stats
from eecore.config import SamplingParams
from eecore.console.exit_options import ExitOptions
from eecore.console.failures import FAILED, UsageError
from eecore.console.loading import OptionalModel, check_path, model_and_prompt
from eecore.console.options import EngineOptions, option, takes_options
from eecore.console.prompt_bar import with_prompt_bar
from eecore.console.signals import INTERRUPTED, SIGNALS
from eecore.console.streams import say
from eecore.exit_text import parse_exit, usual_exit
from eecore.values import help_of

if TYPE_CHECKING:
    from eecore.exits import Exit
    from eecore.generation import Model
    from eecore.output import Output


def _sampling(name: str, *flags: str, **details: Any) -> Any:
    """A field of SamplingParams as an option."""
    default = getattr(SamplingParams, name)
    return option(default, f"{help_of(SamplingParams, name)}.", *flags, **details)


@dataclass(frozen=True)
class SamplingOptions:
    """The options that are fields of SamplingParams."""

    PANEL: ClassVar = "Sampling"

    max_tokens: int = _sampling("max_tokens", "--max-tokens", "-n")
    temperature: float = _sampling("temperature", "--temperature", "-t")
    top_k: int = _sampling("top_k")
    top_p: float = _sampling("top_p")
    min_p: float = _sampling("min_p")
    repetition_penalty: float = _sampling("repetition_penalty")
    presence_penalty: float = _sampling("presence_penalty")
    frequency_penalty: float = _sampling("frequency_penalty")
    seed: int | None = _sampling("seed")
    stop: list[str] | None = option(None, "End before this string; may be repeated.")
    ignore_eos: bool = _sampling("ignore_eos")
    logprobs: int | None = option(
        None, "With --json: log-probabilities, and of so many other tokens."
    )

    @property
    def params(self) -> SamplingParams:
        """The settings, checked."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return SamplingParams(**given | {"stop": tuple(self.stop or ())})


@dataclass(frozen=True)
class OutputOptions:
    """What is printed."""

    PANEL: ClassVar = "Output"

    json: bool = option(False, "One JSON object a prompt.")
    depth: bool = option(False, "Colour each token by its exit layer.")
    stats: bool = option(False, "A table on stderr at the end.")


@takes_options
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
    *,
    depths: ExitOptions,
    sampling: SamplingOptions,
    printed: OutputOptions,
    engine: EngineOptions,
) -> int:
    """Continue prompts: text as it comes, or JSON lines."""
    if system is not None and not chat:
        raise UsageError("--system: goes with --chat")
    if printed.json and printed.depth:
        raise UsageError("--depth: goes with text, not with --json (which has exit_layers)")
    if sampling.logprobs is not None and not printed.json:
        raise UsageError("--logprobs: goes with --json")
    model, prompt = model_and_prompt(model, prompt, has_file=file is not None)
    directory = check_path(model)
    prompts = read_prompts(prompt, file)
    params = sampling.params
    if not engine.debug:  # an error of a prompt is reported in a line
        logging.getLogger("eecore").addHandler(logging.NullHandler())
    said = None if depths.exit is None else depths.policy(directory)
    loaded = engine.load(directory, said)
    policy = said or parse_exit(usual_exit(loaded.network.device))
    asked = [_chat_ids(loaded, text, system) for text in prompts] if chat else prompts
    lowest = policy.lowest_exit if printed.depth else None
    # On one terminal bar and text share a console, which keeps the bar below the text.
    console, has_bar = Console(stderr=not sys.stdout.isatty()), False
    results: Results
    if len(prompts) == 1 and not printed.json:
        results = StreamedText(prompts, loaded, lowest, asked[0])
    else:
        has_bar = len(prompts) > 1 and sys.stderr.isatty()
        kind = JsonLines if printed.json else TextByPrompt
        results = kind(prompts, loaded, lowest, console if has_bar and not console.stderr else None)
    bar = _Bar(console, len(prompts)) if has_bar else None
    code, outputs = _run(loaded, asked, policy, params, results, bar, printed.stats)
    if not chat and not sampling.stop and _says_nothing_unasked(loaded, prompts, outputs):
        say("note: the model ended at once; it has a template for conversations: --chat")
    return code


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


class _Bar(Progress):
    """How many prompts are done, and how fast, below the text."""

    def __init__(self, console: Console, total: int) -> None:
        super().__init__(
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
        self._task = self.add_task("generating", total=total, speed="")

    def show(self, done: int, speed: float) -> None:
        self.update(self._task, completed=done, speed=f"{speed:.0f} tokens/s")


def _run(
    model: Model,
    prompts: list[Prompt],
    policy: Exit,
    sampling: SamplingParams,
    results: Results,
    bar: _Bar | None,
    stats: bool,
) -> tuple[int, list[Output]]:
    """Serve the prompts; on Ctrl-C what there is goes out, marked as cancelled.

    Returns:
        The exit code, and the output of each prompt, in any order.
    """
    engine = model.engine()
    order = {
        engine.add_request(prompt, exit=policy, sampling=sampling): index
        for index, prompt in enumerate(prompts)
    }
    outputs: list[Output] = []
    started = time.perf_counter()
    code = num_tokens = 0
    with bar or nullcontext():
        try:
            for step in engine.run() if bar else with_prompt_bar(engine):
                index = order[step.request_id]
                num_tokens += len(step.token_ids)
                results.step(index, step)
                if step.output is not None:
                    outputs.append(step.output)
                    if step.output.error is not None:
                        say(f"error: prompt {index + 1}: {step.output.error}")
                        code = FAILED
                if bar is not None:
                    bar.show(len(outputs), num_tokens / (time.perf_counter() - started))
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
