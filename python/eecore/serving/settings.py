"""How a server is set up: from a model and settings to what its requests share."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from eecore.config import SamplingParams
from eecore.errors import ExitError, GuideError, RequestError
from eecore.exit_text import usual_exit
from eecore.guide import Guide
from eecore.hub import name_of
from eecore.serving.admission import Admission
from eecore.serving.answering import Service
from eecore.serving.depth import MODES, Depths, Policies, recommended
from eecore.serving.metrics import Metrics
from eecore.serving.protocol import MAX_CHOICES
from eecore.serving.served import Servable, ServedModel
from eecore.serving.tool_calls import TOOL_PARSERS, tool_format
from eecore.serving.tracing import tracing_of_environment
from eecore.values import shown

__all__ = ["ServerSettings", "service_of"]

GENERATION_CONFIGS = ("auto", "none")
# As browsers write it: no path, and no slash at the end.
ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+")


@dataclass(frozen=True)
class ServerSettings:
    """Of a server.

    Args:
        name: what requests call the model; None for its directory's.
        exit: the policy of requests that say nothing; None for the one that suits the device.
        allow_exit: modes and policies that requests may choose; None for all.
        aliases: policies that are listed as models; None for those that suit the model.
        max_waiting: sequences that may wait beside those that run.
        max_body: bytes of a request.
        timeout: seconds for a request; None for no limit.
        max_num_seqs: sequences that run at once; None for the model's.
        tool_parser: how the model writes calls of tools; auto: as its chat template does.
        generation_config: where sampling settings come from that requests leave out; auto: the
            model's own files; none: greedy.
        cors_origins: sites whose pages may ask from a browser; "*": all of them.
    """

    name: str | None = None
    exit: str | None = None
    allow_exit: tuple[str, ...] | None = None
    aliases: tuple[str, ...] | None = None
    max_waiting: int = 256
    max_body: int = 4 << 20
    timeout: float | None = 600.0
    max_num_seqs: int | None = None
    tool_parser: str = "auto"
    generation_config: str = "auto"
    cors_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.tool_parser not in TOOL_PARSERS:
            expected = ", ".join(TOOL_PARSERS)
            raise RequestError(f"tool_parser: expected {expected}, got {shown(self.tool_parser)}")
        if self.generation_config not in GENERATION_CONFIGS:
            expected, got = ", ".join(GENERATION_CONFIGS), shown(self.generation_config)
            raise RequestError(f"generation_config: expected {expected}, got {got}")
        for origin in self.cors_origins:
            if not ORIGIN.fullmatch(origin):
                raise RequestError(
                    "cors_origins: expected * or the origin of a site, such as https://example.org "
                    f"or http://localhost:3000, got {shown(origin)}"
                )

    def check(self, policies: Policies) -> None:
        """Check the policies as far as they can be without the model.

        Raises:
            ExitError: names the first that is none.
        """
        allowed = [each for each in self.allow_exit or () if each not in MODES]
        usual = [self.exit] if self.exit else []
        for name, said in (("exit", usual), ("allow-exit", allowed), ("alias", self.aliases or ())):
            for each in said:
                try:
                    policies.of(each)
                except RequestError as error:
                    raise ExitError(f"--{name} {each}: {error}") from None


def service_of(model: Servable, settings: ServerSettings) -> Service:
    """What the requests to a server share.

    Raises:
        ExitError: a policy of the settings that the model cannot run.
    """
    source = model.network.source
    directory = source.directory if source is not None else Path()
    policies = Policies(directory)
    config = model.config
    aliases = settings.aliases
    if aliases is None:
        agreement = None if source is None else source.exit_agreement(config.exit_layers)
        head = model.network.draft_head
        vocabulary = None if head is None else head.vocabulary_sha256
        aliases = recommended(policies, config.exit_layers, source, agreement, vocabulary)
    usual = settings.exit or usual_exit(model.network.device)
    depths = Depths(policies, usual, settings.allow_exit, aliases)
    if settings.allow_exit is not None:
        aliases = tuple(said for said in aliases if depths.allows(said, policies.of(said)))
        depths = replace(depths, aliases=aliases)
    limits = model.engine_config
    if settings.max_num_seqs is not None:
        limits = replace(limits, max_num_seqs=settings.max_num_seqs)
    engine = model.async_engine(None if limits == model.engine_config else limits)
    for said in (usual, *aliases):  # as a request that may be served
        engine.prepare([0], exit=policies.of(said), sampling=SamplingParams(max_tokens=1))
    with suppress(GuideError):  # what guides need takes a second, in which no Python runs
        guide = Guide.choice(["a"])
        engine.prepare([0], sampling=SamplingParams(max_tokens=1, guide=guide))
    admission = Admission(limits.max_num_seqs, settings.max_waiting)
    name = settings.name or name_of(directory) or "model"
    most_choices = min(MAX_CHOICES, admission.capacity)
    calls = tool_format(settings.tool_parser, _tools_template(model))
    sampling = SamplingParams.of(model) if settings.generation_config == "auto" else None
    served = ServedModel(
        model, name, depths, engine, most_choices, calls, sampling or SamplingParams()
    )
    labelled = map(policies.of, (usual, *aliases))
    metrics = Metrics(engine.engine, name, labelled, lambda: engine.num_restarts)
    bounds = (settings.max_body, settings.timeout)
    return Service(served, admission, metrics, *bounds, tracing_of_environment())


def _tools_template(model: Servable) -> str | None:
    """The chat template of conversations with tools."""
    if model.tokenizer is None:
        return None
    return model.tokenizer.named_templates.get("tool_use", model.tokenizer.chat_template)
