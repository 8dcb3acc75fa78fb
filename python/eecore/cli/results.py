"""What ``eecore generate`` prints: streamed text, text by prompt, JSON lines; statistics."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from eecore.cli.depth import DepthPainter, has_colours, is_lossless, legend_of, said_depths
from eecore.cli.process import say, says_all
from eecore.cli.prompts import Prompt
from eecore.output import Saved

if TYPE_CHECKING:
    from eecore.exits import Exit
    from eecore.generation import Model
    from eecore.output import Output, StepOutput


class Results:
    """Prints outputs in the order of the prompts, each as soon as all earlier ones are done.

    Args:
        policy: the exit policy, to show the depth of each token; None: depths are not shown.
    """

    def __init__(self, prompts: list[Prompt], model: Model, policy: Exit | None) -> None:
        from eecore.models.text.thinking import Thinking

        self.prompts, self.model, self.policy = prompts, model, policy
        self.console = Console()
        thinking = None if has_colours(self.console) else Thinking.of(model.tokenizer)
        self._markers = ("", "") if thinking is None else thinking.markers
        """The markers around a thought, where there are no colours."""
        self._waiting: dict[int, Output] = {}
        self._next = 0

    def step(self, index: int, step: StepOutput) -> None:
        """Take a step of the prompt at ``index``."""
        if step.output is not None:
            self.done(index, step.output)

    def done(self, index: int, output: Output) -> None:
        """Take the output of the prompt at ``index``."""
        self._waiting[index] = output
        while self._next in self._waiting:
            self.write(self._next, self._waiting.pop(self._next))
            self._next += 1

    def write(self, index: int, output: Output) -> None:
        """Print one output."""
        raise NotImplementedError

    def show(self, text: str | Text, end: str = "\n") -> None:
        """Print text and the end of its line."""
        if isinstance(text, Text):
            self.console.print(text, end=end, soft_wrap=True)  # rich breaks no lines
        elif text or end:
            print(text, end=end, flush=True)

    @property
    def has_paint(self) -> bool:
        """Whether tokens have the colours of their depths."""
        can = self.model.tokenizer is not None and has_colours(self.console)
        return self.policy is not None and can

    def explain(self) -> None:
        """Print what the colours mean, where colours are shown."""
        if self.policy is not None and self.has_paint:
            self.show(legend_of(self.policy, self.model.config.num_layers))

    def painter(self, prompt_ids: list[int]) -> DepthPainter | None:
        """The painter of the answer to a prompt; None where no colours are shown."""
        if self.policy is None or not self.has_paint:
            return None
        verified = is_lossless(self.policy)
        return DepthPainter(self.model, prompt_ids, self.policy.lowest_exit, verified=verified)

    def show_parts(
        self, thought: str, text: str, painter: DepthPainter | None, *, before: str = ""
    ) -> None:
        """Print more of a thought, and more of the answer after it.

        The thought is dim; without colours it stands between its markers.

        Args:
            before: the thought so far, while the answer has no text.
        """
        opens, closes = self._markers
        if thought:
            if not before and opens:
                self.show(opens)
            if not before and painter is not None:
                painter.skip(thought + text)
            dim = Text(thought) if painter is None else painter.paint(thought)
            dim.stylize("dim")
            self.show(thought if opens else dim, end="")
        if text and (before or thought):
            self.show(f"\n{closes}\n" if closes else "\n")
            if painter is not None:
                painter.skip(text)
        self.show(text if painter is None else painter.paint(text), end="")

    def depths(self, layers: list[int]) -> str | None:
        """The depths of an answer's tokens in words; None where colours or nothing show them."""
        if self.policy is None or self.has_paint:
            return None
        return f"[{said_depths(self.policy, layers, self.model.config.num_layers)}]"


class JsonLines(Results):
    """Prints a line with one JSON object for each prompt."""

    def write(self, index: int, output: Output) -> None:
        record: dict[str, Any] = {"index": index, "prompt": self.prompts[index]}
        for name in ("text", "token_ids", "finish_reason", "exit_layers", "confidences"):
            record[name] = getattr(output, name)
        for name in ("thought", "logprobs", "top_logprobs", "error"):
            if getattr(output, name) is not None:
                record[name] = getattr(output, name)
        record["stats"] = stats_dict(output)
        # JSON has no NaN: null stands for it.
        finite = json.loads(json.dumps(record), parse_constant=lambda _: None)
        self.show(json.dumps(finite, ensure_ascii=not says_all(sys.stdout)))


class TextByPrompt(Results):
    """Prints each text under a line with the beginning of its prompt."""

    def write(self, index: int, output: Output) -> None:
        prompt = self.prompts[index]
        words = " ".join(prompt.split()) if isinstance(prompt, str) else f"{len(prompt)} token ids"
        words = words if len(words) <= 60 else words[:57] + "..."
        lead = "\n" if index else ""
        self.show(f"{lead}==> {index + 1}/{len(self.prompts)}: {words}")
        painter = self.painter(output.prompt_token_ids)
        if output.text is None:
            self.show(" ".join(map(str, output.token_ids)))
        else:
            if painter is not None:
                painter.add(output.token_ids, output.exit_layers, "")
            self.show_parts(output.thought or "", output.text, painter)
            self.show("")
            if said := self.depths(output.exit_layers):
                self.show(said)


class StreamedText(Results):
    """Prints the text of a single prompt as it is generated.

    Args:
        policy: the exit policy, to show the depth of each token; None: depths are not shown.
        asked: the prompt as the model gets it, in its chat template if it has one.
    """

    def __init__(
        self, prompts: list[Prompt], model: Model, policy: Exit | None, asked: Prompt
    ) -> None:
        super().__init__(prompts, model, policy)
        if model.tokenizer is not None and isinstance(asked, str):
            asked = model.tokenizer.encode(asked)
        self.text = self.thought = ""
        self._painter = None if isinstance(asked, str) else self.painter(asked)
        self._layers: list[int] = []

    def step(self, index: int, step: StepOutput) -> None:
        self._layers += step.exit_layers
        if self._painter is not None:
            self._painter.add(step.token_ids, step.exit_layers, "")
        if self.model.tokenizer is None:
            self._put("", "".join(f"{token} " for token in step.token_ids))
        else:
            self._put(step.thought, step.text)
        super().step(index, step)

    def write(self, index: int, output: Output) -> None:  # noqa: ARG002
        if output.text is not None:  # the rest, held back until the end
            thought = output.thought or ""
            self._put(thought[len(self.thought) :], output.text[len(self.text) :])
        self.end()

    def end(self) -> None:
        """End the line, also after a text that was interrupted."""
        if not (self.text or self.thought).endswith("\n"):
            print(flush=True)
        if said := self.depths(self._layers):
            print(said, file=sys.stderr)

    def _put(self, thought: str, text: str) -> None:
        before = "" if self.text else self.thought
        self.thought, self.text = self.thought + thought, self.text + text
        self.show_parts(thought, text, self._painter, before=before)


def stats_dict(output: Output) -> dict[str, Any]:
    """A request's statistics and the figures derived from them."""
    stats = output.stats
    return {
        "speedup": Saved.of([stats]).speedup,
        **asdict(stats),
        "draft_acceptance": stats.draft_acceptance,
        "tokens_per_s": stats.tokens_per_s,
        "inner_token_latency_s": stats.inner_token_latency_s,
    }


def saved(outputs: list[Output], seconds: float) -> tuple[str, str]:
    """The speed of answers, as a multiple of full depth's where that is known, and the layers that
    ran.
    """
    stats = [output.stats for output in outputs]
    took = Saved.of(stats, seconds)
    speed, num_layers = f"{took.tokens_per_s:.1f} tokens/s", took.num_layers
    if took.speedup is not None:
        text = "the same text" if took.is_lossless else "a text of its own"
        speed = f"{took.speedup:.1f}x full depth's, {text}: {speed} beside "
        speed += f"{took.full_depth_tokens_per_s:.1f}"
    if took.layers_run is None:
        return speed, "the prompt alone"
    if not took.is_lossless:
        return speed, f"{took.layers_run:.1f} of {num_layers} layers run a token"
    drafted = sum(each.drafted for each in stats)
    if not drafted:
        return speed, f"all {num_layers} layers for each token"
    tokens = sum(max(each.generated_tokens - 1, 0) for each in stats)
    passes = sum(each.full_passes for each in stats)
    accepted = sum(each.accepted for each in stats)
    return speed, (
        f"{passes} pass{'es' * (passes != 1)} of all {num_layers} layers for {tokens} tokens, as "
        f"{accepted} of {drafted} drafts were accepted"
    )


def print_stats(outputs: list[Output], seconds: float) -> None:
    """Print a table of statistics of all requests together, on stderr."""
    tokens = sum(len(output.token_ids) for output in outputs)
    first = max(output.stats.time_to_first_token_s for output in outputs)
    speed, work = saved(outputs, seconds)
    for name, value in (
        ("speed", speed),
        ("work", work),
        ("mode", outputs[0].stats.contract),
        ("tokens", f"{tokens} new, {sum(o.stats.prompt_tokens for o in outputs)} of prompts"),
        ("first token", f"after {first:.2f} s"),
        ("ended by", ", ".join(sorted({output.finish_reason for output in outputs}))),
    ):
        say(f"{name:<13}{value}")
