"""The settings of a server, and the state that its requests share."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace

from eecore.config import SamplingParams
from eecore.errors import ExitError, GuideError, RequestError
from eecore.exit_text import MODES, Policies, usual_exit
from eecore.files.hub import name_of
from eecore.generation import Model
from eecore.guide import Guide
from eecore.serving.admission import Admission
from eecore.serving.answering import Service
from eecore.serving.depth import Depths, recommended
from eecore.serving.metrics import Metrics
from eecore.serving.protocol import MAX_CHOICES
from eecore.serving.served import ServedModel
from eecore.serving.tool_calls import TOOL_PARSERS, tool_format
from eecore.values import shown

GENERATION_CONFIGS = ("auto", "none")
# The form in which browsers write it: no path, and no slash at the end.
ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+")


@dataclass(frozen=True)
class ServerSettings:
    """The settings of a server.

    Args:
        name: what requests call the model; None for its directory's name.
        exit: the policy of requests that name none; None for the one that suits the device.
        allow_exit: modes and policies that requests may choose; None for all.
        aliases: policies that are listed as models; None for those that suit the model.
        max_waiting: sequences that may wait while others run.
        max_body: bytes of the largest body.
        timeout: seconds for a request; None for no limit.
        max_num_seqs: sequences that run at once; None for the model's default.
        tool_parser: the model's format of tool calls; auto: the one that its chat template uses,
            or else hermes.
        generation_config: the source of sampling settings that requests leave out; auto: the
            model's own files, or the usual settings of answers; none: greedy.
        cors_origins: sites whose pages may send requests from a browser; "*": all of them.
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
        """Check the policies as far as possible without the model.

        Raises:
            ExitError: a policy is malformed; the message names the first.
        """
        allowed = [each for each in self.allow_exit or () if each not in MODES]
        usual = [self.exit] if self.exit else []
        for name, said in (("exit", usual), ("allow-exit", allowed), ("alias", self.aliases or ())):
            for each in said:
                try:
                    policies.of(each)
                except RequestError as error:
                    raise ExitError(f"--{name} {each}: {error}") from None


def service_of(model: Model, settings: ServerSettings) -> Service:
    """The state that the requests to a server share.

    Raises:
        ExitError: a policy of the settings that the model cannot run.
    """
    source = model.network.source
    directory = None if source is None else source.directory
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
    for said in (usual, *aliases):  # the check of a real request
        engine.prepare([0], exit=policies.of(said), sampling=SamplingParams(max_tokens=1))
    # compiling for guides begins now: it takes a second, in which no Python runs
    with suppress(GuideError):
        guide = Guide.choice(["a"])
        engine.prepare([0], sampling=SamplingParams(max_tokens=1, guide=guide))
    admission = Admission(limits.max_num_seqs, settings.max_waiting)
    name = settings.name or ("model" if directory is None else name_of(directory))
    max_choices = min(MAX_CHOICES, admission.capacity)
    calls = tool_format(settings.tool_parser, _tools_template(model))
    if calls is not None and model.tokenizer is not None:
        calls = calls.of(model.tokenizer)
    samples_as_model = settings.generation_config == "auto"
    served = ServedModel(model, name, depths, engine, max_choices, calls, samples_as_model)
    labelled = map(policies.of, (usual, *aliases))
    metrics = Metrics(engine.engine, name, labelled)
    return Service(served, admission, metrics, settings.max_body, settings.timeout)


def _tools_template(model: Model) -> str | None:
    """The chat template of conversations with tools."""
    if model.tokenizer is None:
        return None
    return model.tokenizer.named_templates.get("tool_use", model.tokenizer.chat_template)
