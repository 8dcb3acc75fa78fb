"""``eecore generate``: prompts in, text or JSON lines out."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import Console
from rich.progress import Progress

from eecore.cli.exit_options import ExitOptions
from eecore.cli.failures import FAILED, UsageError
from eecore.cli.loading import OptionalModel, model_and_prompt, path_before_prompt, spinner
from eecore.cli.options import EngineOptions, option, takes_options
from eecore.cli.process import INTERRUPTED, say
from eecore.cli.prompts import Prompt, read_prompts
from eecore.cli.results import JsonLines, Results, StreamedText, TextByPrompt, print_stats
from eecore.config import ANSWERS, OWN, SamplingParams
from eecore.exit_text import parse_exit, usual_exit
from eecore.exits import Auto, Full
from eecore.values import help_of

if TYPE_CHECKING:
    from eecore import Engine, Model, StepOutput
    from eecore.exits import Exit
    from eecore.output import Output


def _sampling(name: str, *flags: str, **details: Any) -> Any:
    """A field of SamplingParams as an option; None where it is not given."""
    usual = None
    if name in OWN:
        usual = f"the model's, or {getattr(SamplingParams, name):g}"
        usual += f"; for answers {ANSWERS[name]:g}" if name in ANSWERS else ""
    return option(
        None,
        f"{help_of(SamplingParams, name)}.",
        *flags,
        **{"show_default": usual or False, **details},
    )


@dataclass(frozen=True)
class SamplingOptions:
    """The options that are fields of SamplingParams; None where not given."""

    PANEL: ClassVar[str] = "Sampling"

    max_tokens: int | None = _sampling(
        "max_tokens",
        "--max-tokens",
        "-n",
        show_default=f"what the context holds; {SamplingParams.max_tokens} without a chat template",
    )
    temperature: float | None = _sampling("temperature", "--temperature", "-t")
    top_k: int | None = _sampling("top_k")
    top_p: float | None = _sampling("top_p")
    min_p: float | None = _sampling("min_p")
    repetition_penalty: float | None = _sampling("repetition_penalty")
    presence_penalty: float | None = _sampling("presence_penalty")
    frequency_penalty: float | None = _sampling("frequency_penalty")
    seed: int | None = _sampling("seed")
    stop: list[str] | None = option(None, "End before this string; may be repeated.")
    thinking_budget: int | None = _sampling("thinking_budget")
    think: str | None = _sampling("think")
    ignore_eos: bool = option(False, f"{help_of(SamplingParams, 'ignore_eos')}.")

    @property
    def given(self) -> dict[str, Any]:
        """The settings that are given."""
        each = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in each.items() if value is not None}

    def check(self) -> None:
        """Raise a RequestError for a setting that no model accepts."""
        SamplingParams(**self.given)

    def params(self, model: Model, policy: Exit, answers: list[int] | None) -> SamplingParams:
        """The settings for a prompt: the given ones, then the model's own, then the defaults for
        answers (:meth:`SamplingParams.of_answer`); texts are continued greedily.

        Args:
            answers: the prompt's tokens where it asks for an answer, which may fill the context;
                None for a text that is continued.
        """
        if answers is None:
            params = SamplingParams.of(model, **self.given)
        else:
            params = SamplingParams.of_answer(model, policy, **self.given)
        if self.max_tokens is not None or answers is None:
            return params
        room = model.engine_config.room(model.config, len(answers))
        return replace(params, max_tokens=max(1, room))


@dataclass(frozen=True)
class OutputOptions:
    """What is printed."""

    PANEL: ClassVar[str] = "Output"

    json: bool = option(False, "One JSON object a prompt.")
    logprobs: int | None = option(
        None, "With --json: log-probabilities of tokens, and of this many top ones."
    )
    depth: bool = option(
        False, "Colour each token by how it was made, after a line that explains the colours."
    )
    stats: bool = option(False, "Statistics of the work done and saved, on stderr at the end.")


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
    raw: Annotated[
        bool, typer.Option("--raw", help="Prompts as they are, not in the model's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    *,
    depths: ExitOptions,
    sampling: SamplingOptions,
    printed: OutputOptions,
    engine: EngineOptions,
) -> int:
    """Answer prompts: streamed text, or JSON lines.

    Prompts go into the chat template of a model that has one; --raw continues them as they are.
    """
    if system is not None and raw:
        raise UsageError("--system: goes with a chat template, not with --raw")
    if printed.json and printed.depth:
        raise UsageError("--depth: goes with text, not with --json (which has exit_layers)")
    if printed.logprobs is not None and not printed.json:
        raise UsageError("--logprobs: goes with --json")
    model, prompt = model_and_prompt(model, prompt, has_file=file is not None)
    directory = path_before_prompt(model, prompt if file is None else str(file))
    prompts = read_prompts(prompt, file)
    sampling.check()
    SamplingParams(logprobs=printed.logprobs)
    if not engine.debug:  # an error in a prompt is reported in one line
        logging.getLogger("eecore").addHandler(logging.NullHandler())
    said = None if depths.exit is None else depths.policy(directory)
    loaded = engine.load(directory, said)
    policy = said or parse_exit(usual_exit(loaded.network.device))
    answers = [None if raw else _in_template(loaded, text, system) for text in prompts]
    asked = [text if ids is None else ids for text, ids in zip(prompts, answers, strict=True)]
    params = [
        replace(sampling.params(loaded, policy, ids), logprobs=printed.logprobs) for ids in answers
    ]
    shown = policy if printed.depth else None
    results: Results
    if len(prompts) == 1 and not printed.json:
        results = StreamedText(prompts, loaded, shown, asked[0])
    else:
        results = (JsonLines if printed.json else TextByPrompt)(prompts, loaded, shown)
    results.explain()
    code, outputs = _run(loaded, asked, policy, params, results, printed.stats)
    if sampling.max_tokens is None and not printed.json:
        _say_what_was_cut(outputs, are_answers=None not in answers)
    return code


def _in_template(model: Model, prompt: Prompt, system: str | None) -> list[int] | None:
    """The prompt as the user's message, in tokens; None without a chat template."""
    tokenizer = model.tokenizer
    if tokenizer is None or tokenizer.chat_template is None or isinstance(prompt, list):
        if system is not None:
            got = "token ids" if isinstance(prompt, list) else "none"
            raise UsageError(f"--system: expected a prompt for a chat template, got {got}")
        return None
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return tokenizer.encode_chat(messages)


def _say_what_was_cut(outputs: list[Output], *, are_answers: bool) -> None:
    """Report texts that a default limit cut before the model ended them."""
    if cut := sum(output.finish_reason == "length" for output in outputs):
        usual = f"after {SamplingParams.max_tokens} tokens"
        where = "at the end of the context" if are_answers else usual
        what = "the text was" if len(outputs) == 1 else f"{cut} of {len(outputs)} texts were"
        say(f"note: {what} cut {where} (--max-tokens)")


def _steps(engine: Engine, count: int) -> Iterator[StepOutput]:
    """All steps of an engine, with progress on stderr where that is a terminal: how many of the
    prompts are done where stdout does not show it, else that the first is being read.
    """
    steps = engine.run()
    if count == 1 or sys.stdout.isatty():
        with spinner("reading the prompt"):
            first = next(steps, None)
        if first is not None:
            yield first
            yield from steps
        return
    console = Console(stderr=True)
    with Progress(
        console=console, transient=True, redirect_stdout=False, disable=not console.is_interactive
    ) as bar:
        task = bar.add_task("generating", total=count)
        for step in steps:
            yield step
            bar.advance(task, step.output is not None)


def _run(
    model: Model,
    prompts: list[Prompt],
    policy: Exit,
    samplings: list[SamplingParams],
    results: Results,
    stats: bool,
) -> tuple[int, list[Output]]:
    """Serve the prompts; on Ctrl-C the outputs so far are printed, marked as cancelled.

    Returns:
        The exit code, and the output of each prompt, in any order.
    """
    engine = model.engine()
    if stats and not isinstance(policy, (Auto, Full)):
        model.measure_full_depth(len(prompts), engine)
    order = {
        engine.add_request(prompt, exit=policy, sampling=sampling): index
        for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    }
    outputs: list[Output] = []
    started = time.perf_counter()
    code = 0
    try:
        for step in _steps(engine, len(prompts)):
            index = order[step.request_id]
            results.step(index, step)
            if step.output is not None:
                outputs.append(step.output)
                if step.output.error is not None:
                    say(f"error: prompt {index + 1}: {step.output.error}")
                    code = FAILED
    except KeyboardInterrupt:
        code = INTERRUPTED
        left = [engine.cancel(request_id) for request_id in order]
        left += [step.output for step in engine.run()]  # an interrupted step ends all requests
        for output in sorted(filter(None, left), key=lambda each: order[each.request_id]):
            cancelled = replace(output, finish_reason="cancelled", error=None)
            results.done(order[output.request_id], cancelled)
            outputs.append(cancelled)
    if stats and outputs:
        print_stats(outputs, time.perf_counter() - started)
    if code == INTERRUPTED:
        print("interrupted", file=sys.stderr)
    return code, outputs
