"""Draft heads that others publish: a class for each kind, and readers of its files.

:mod:`eecore.models.readers.draft_heads` imports this package when such a head is opened, and this
package the reader of its kind.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from eecore.config import AnyModelConfig, ModelConfig
from eecore.errors import CheckpointError, ModelError, ModelNotFoundError, UnsupportedModelError
from eecore.files.hub import PICKLES, name_of
from eecore.files.readable import is_file, kind_of, shown_path
from eecore.heads.published import PublishedSettings
from eecore.models.draft_head import DraftHead
from eecore.models.llama import LlamaModel
from eecore.models.readers.checkpoint import Checkpoint, StoredTensors
from eecore.models.readers.config_fields import ConfigFields
from eecore.models.readers.draft_heads import drafting_config
from eecore.models.readers.gguf_checkpoint import GGUFCheckpoint
from eecore.values import shown

KINDS = {
    "eagle3": "eagle_file",
    "dflash": "block_file",
    "dspark": "block_file",
    "mimo": "mtp_file",
    "qwen3_5": "mtp_file",
}
"""The modules that read heads, a :class:`Reader` each, by the heads' ``speculators_model_type``, or
what stands for it."""
ARCHITECTURES = {
    "DFlashDraftModel": "dflash",
    "DSparkDraftModel": "dspark",
    "Qwen3DSparkModel": "dspark",
    "MiMoForCausalLM": "mimo",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
}
"""Kinds by the first architecture of files without a ``speculators_model_type``."""
UNREAD = {
    "PEagleDraftModel": "P-EAGLE",
    "peagle": "P-EAGLE",
    "DominoDraftModel": "Domino",
    "domino": "Domino",
}
"""Kinds of heads that are not read although their files look like those of other kinds, by
architecture, speculators_model_type or projector_type."""
PUBLIC = "RedHatAI/*-speculator.eagle3, AngelSlim/*_eagle3, lmsys/SGLang-EAGLE3-*"
"""Repositories of heads in safetensors, which an error about a pickle recommends."""


class Reader(Protocol):
    """A module that reads the heads of one kind."""

    def read_settings(self, fields: ConfigFields, model: ModelConfig) -> PublishedSettings:
        """Read ``config.json``, and check it against the config of the model."""

    def load(self, files: StoredTensors, fields: ConfigFields, network: LlamaModel) -> DraftHead:
        """Read the head of these files; a ModelError before its tensors are read."""


@dataclass(frozen=True)
class FoundHead:
    """The head in a directory or a GGUF file, before its tensors are read."""

    directory: Path
    file: GGUFCheckpoint | None
    reader: Reader
    fields: ConfigFields
    settings: PublishedSettings

    def load(self, network: LlamaModel) -> DraftHead:
        """The head; a ModelError if it is not whole."""
        verifier, source = self.settings.verifier, network.source
        if source is not None and names_another(verifier, source.directory):
            warnings.warn(
                f"{shown_path(self.directory)}: expected a head for {name_of(source.directory)}, "
                f"got one for {verifier}: few of its drafts may be accepted, the output is the "
                "same",
                stacklevel=4,
            )
        if self.file is not None:
            return self.reader.load(self.file, self.fields, network)
        with Checkpoint(self.directory, drafts=True) as files:
            return self.reader.load(files, self.fields, network)


def find(directory: Path, model: ModelConfig) -> FoundHead:
    """The head in a directory or a GGUF file, checked against the config of a model.

    Raises:
        ModelError: there is no head, it is not read, or it is for another model.
    """
    file = GGUFCheckpoint(directory, drafts=True) if is_file(directory) else None
    fields = _fields(directory, file)
    kind = _kind(fields)
    pickles = [] if file else sorted(p.name for p in directory.iterdir() if p.suffix in PICKLES)
    if pickles and not list(directory.glob("*.safetensors")):
        raise ModelError(
            f"{shown_path(directory)}: expected model.safetensors, got {pickles[0]}, a pickle, "
            f"which eecore does not open: heads in safetensors are {PUBLIC}"
        )
    reader = cast(Reader, import_module(f"{__name__}.{KINDS[kind]}"))
    return FoundHead(directory, file, reader, fields, reader.read_settings(fields, model))


def published_facts(directory: Path, config: AnyModelConfig) -> dict[str, Any]:
    """Facts about a published head for a model: kind, taps, tokens, bytes, verifier.

    Raises:
        ModelError: as for :func:`eecore.models.find_draft_head`.
    """
    settings = find(directory, drafting_config(config)).settings
    files = [directory] if is_file(directory) else directory.glob("*.safetensors")
    return {
        "path": str(directory),
        "kind": settings.kind,
        "taps": list(settings.taps),
        "vocabulary_size": settings.draft_vocab_size,
        "bytes_on_disk": sum(file.stat().st_size for file in files),
        "verifier": settings.verifier or None,
    }


def names_another(verifier: str | None, path: Path) -> bool:
    """Whether the model that a head names is not the model at a path."""
    if not verifier:
        return False
    return verifier.split("/")[-1].lower() != name_of(path).split("/")[-1].lower()


def _fields(directory: Path, file: GGUFCheckpoint | None) -> ConfigFields:
    """The ``config.json`` of a head."""
    if file is not None:
        return ConfigFields(file.values, shown_path(directory), CheckpointError)
    if (found := kind_of(directory)) != "a directory":
        raise ModelNotFoundError(
            f"{shown_path(directory)}: expected the directory of a draft head (head.json, or "
            f"config.json and safetensors) or a GGUF file with one, got {found}"
        )
    return ConfigFields.read(directory / "config.json", CheckpointError, ModelNotFoundError)


def _kind(fields: ConfigFields) -> str:
    """The kind of head that a ``config.json`` describes."""
    names: tuple[str, ...] = fields.texts("architectures", ())
    kind: Any = fields.text("speculators_model_type", None)
    block = fields.inner("dflash_config")
    projector = "" if block is None else block.text("projector_type", "")
    for name in (kind, projector, *names):
        if name in UNREAD:
            raise UnsupportedModelError(
                f"{fields.where}: supported draft heads are EAGLE-3, DFlash, DSpark, the MTP "
                f"layers of MiMo and Qwen3.5 and those that eecore train-exits made, got "
                f"{UNREAD[name]}"
            )
    if kind is None and ("draft_vocab_size" in fields or "eagle_config" in fields):
        kind = "eagle3"
    if kind is None and any(name.endswith("Eagle3") for name in names):
        kind = "eagle3"
    if kind is None and names:
        kind = ARCHITECTURES.get(names[0])
    if kind in KINDS:
        return str(kind)
    if kind is None:
        raise fields.error(
            f"{fields.where}: expected the config of a draft head ({', '.join(KINDS)}), got one of "
            f"{shown(list(names))}"
        )
    raise UnsupportedModelError(
        f"{fields.where}: speculators_model_type: supported are {', '.join(KINDS)}, got "
        f"{shown(kind)}"
    )
