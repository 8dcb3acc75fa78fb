"""Repositories of the Hugging Face hub, fetched into the hub's cache.

An id is ``org/name``, optionally with ``@revision`` and ``:file.gguf``. Where a file or directory
has that name, it is a path. Only files that eecore reads are fetched, and never a pickle. Progress
bars, the cache and its variables (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN, HF_ENDPOINT) are those of
huggingface_hub, which is imported when there is something to fetch.
"""

from __future__ import annotations

import errno
import glob
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eecore.errors import ModelError, ModelNotFoundError
from eecore.files.readable import contents_of, is_file, kind_of, path_of, shown_path
from eecore.values import shown

ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)((?:[@:][^@:]+)*)", re.ASCII)
MAX_LETTERS = 96
"""Letters that the hub allows in ``org/name``."""
FILE_SUFFIXES = (".gguf", ".json", ".jsonl", ".safetensors", ".txt")
"""Suffixes of file names, which no repository is expected to have."""
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
    "model.safetensors-*-of-*.safetensors",  # Qwen3.5
)
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*.jinja",
    "chat_template*.json",
    "additional_chat_templates/*.jinja",
    *WEIGHT_FILES,
    "exits.json",
    "exits/head.json",
    "exits/head.safetensors",
    "calibration*.json",
    "measures/*.safetensors",
)
OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "tekken.json")
"""Fetched where there is no tokenizer.json, so that a warning can name the tokenizer's format."""
HEAD_FILES = ("head.json", "head.safetensors", "exits/head.json", "exits/head.safetensors")
PUBLISHED_HEAD_FILES = ("config.json", *WEIGHT_FILES)
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")
MAX_LISTED = 20
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Repository:
    """The parts of a repository's id."""

    said: str
    name: str
    revision: str | None = None
    file: str | None = None

    @classmethod
    def of(cls, said: str | os.PathLike[str]) -> Repository | None:
        """The repository that a text names; None where it is a path, or no id."""
        match = ID.fullmatch(said) if isinstance(said, str) else None
        if match is None or len(match[1]) > MAX_LETTERS or kind_of(Path(match[0])) != "nothing":
            return None
        parts = re.findall(r"[@:][^@:]+", match[2])
        marks = {part[0]: part[1:] for part in parts}
        if len(marks) < len(parts) or (match[0] == match[1] and match[1].endswith(FILE_SUFFIXES)):
            return None
        return cls(match[0], match[1], marks.get("@"), marks.get(":"))


def fetch_model(path: str | os.PathLike[str]) -> Path:
    """The directory or GGUF file of a model: a path unchanged, or a repository's fetched files.

    Raises:
        ModelError: the text is no path, or the repository cannot be fetched, or has no model that
            eecore reads.
    """
    repository = Repository.of(path)
    if repository is None:
        return path_of(path, ModelError)
    if repository.file is not None:
        return _gguf(repository, repository.file)
    directory = _snapshot("model", repository, MODEL_FILES)
    weights = ("model.safetensors", "model.safetensors.index.json")
    if not is_file(directory / "config.json") or not any(is_file(directory / w) for w in weights):
        if is_file(directory / "adapter_config.json"):
            raise ModelError(
                f"model: expected a whole model, got {repository.said}, which has an adapter "
                "(adapter_config.json): merge it into its model first"
            )
        raise ModelNotFoundError(_no_model(repository))
    if not is_file(directory / "tokenizer.json"):
        _snapshot("model", repository, OTHER_TOKENIZERS)
    return directory


def is_at_hand(name: str) -> bool:
    """Whether the hub's cache has the config, weights and tokenizer of a repository."""
    from huggingface_hub import try_to_load_from_cache

    files = ("config.json", "model.safetensors", "tokenizer.json")
    return all(isinstance(try_to_load_from_cache(name, file), str) for file in files)


def fetch_head(path: str | os.PathLike[str]) -> Path:
    """The directory of a draft head: a path unchanged, or a repository's fetched files.

    A directory or repository has the head's files, or a folder ``exits`` with them.

    Raises:
        ModelError: as :func:`fetch_model`; what is there is no draft head.
    """
    repository = Repository.of(path)
    if repository is None:
        directory = path_of(path, ModelError)
        if (found := _head_in(directory)) is not None:
            return found
        raise ModelNotFoundError(
            "exits: expected a directory with head.json, which eecore train-exits makes (published "
            f"heads are for draft_head), got {shown_path(directory)}, {contents_of(directory)}"
        )
    if repository.file is not None:
        raise ModelError(f"exits: expected org/name or org/name@revision, got {repository.said}")
    directory = _snapshot("exits", repository, HEAD_FILES)
    if (found := _head_in(directory)) is not None:
        return found
    raise ModelNotFoundError(
        f"exits: expected a repository with head.json or exits/head.json, got {repository.said}, "
        "which has neither"
    )


def _head_in(directory: Path) -> Path | None:
    """The directory with a draft head's files: a directory, or its folder ``exits``."""
    folders = (directory, directory / "exits")
    return next((folder for folder in folders if is_file(folder / "head.json")), None)


def fetch_draft_head(path: str | os.PathLike[str]) -> Path:
    """The directory of a draft head of any kind, or the GGUF file that has one: a path as it is, an
    id once its files are here.

    Raises:
        ModelError: as :func:`fetch_model`.
    """
    repository = Repository.of(path)
    if repository is None:
        return path_of(path, ModelError)
    if repository.file is not None:
        return _gguf(repository, repository.file)
    directory = _snapshot("draft_head", repository, (*HEAD_FILES, *PUBLISHED_HEAD_FILES))
    found = _head_in(directory)
    if found is not None:
        return found
    weights = ("model.safetensors", "model.safetensors.index.json")
    if is_file(directory / "config.json") and any(is_file(directory / w) for w in weights):
        return directory
    raise ModelNotFoundError(
        "draft_head: expected a repository with head.json, or with config.json and "
        f"model.safetensors, got {repository.said}, which has neither; a pickle is not opened"
    )


def name_of(path: Path) -> str:
    """The name of a model at a path: ``org/name`` for a directory in the hub's cache, otherwise the
    directory's, or the file's without its suffix.
    """
    path = Path(os.path.abspath(path))
    kind, *name = path.parent.parent.name.split("--")
    if path.parent.name == "snapshots" and kind == "models" and name:
        return "/".join(name)
    return path.stem if path.suffix == ".gguf" else path.name


def _gguf(repository: Repository, file: str) -> Path:
    """A GGUF file of a repository with all its parts, and its draft head and exits file."""
    if not file.endswith(".gguf") or not set(file.split("/")).isdisjoint(("", ".", "..")):
        raise ModelError(_no_model(repository))
    stem, part = glob.escape(file.removesuffix(".gguf")), PART.fullmatch(file)
    parts = f"{glob.escape(part[1])}-*-of-{part[2]}.gguf" if part else f"{stem}.gguf"
    beside = (f"{stem}.exits.json", f"{stem}.exits/head.json", f"{stem}.exits/head.safetensors")
    found = _snapshot("model", repository, (parts, *beside)) / file
    if not is_file(found):
        raise ModelNotFoundError(_no_model(repository))
    return found


def _snapshot(what: str, repository: Repository, patterns: tuple[str, ...]) -> Path:
    """The directory in the hub's cache with the matching files; files that are there are not
    fetched.

    The hub's threads end with their files, which may take minutes, unless their bar stops them.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    hub_bar: Any = tqdm

    class Bar(hub_bar):  # type: ignore[misc]
        """The hub's progress bar, which is silent where stderr is no terminal."""

        is_interrupted = False

        def __init__(self, *values: Any, **settings: Any) -> None:
            super().__init__(*values, **{"disable": None, **settings})

        def update(self, n: float | None = 1) -> Any:
            if Bar.is_interrupted:
                raise KeyboardInterrupt
            return super().update(n)

    with ThreadPoolExecutor(1) as thread:
        fetching = thread.submit(
            snapshot_download,
            repository.name,
            revision=repository.revision,
            allow_patterns=list(patterns),
            library_name="eecore",
            tqdm_class=Bar,
        )
        try:
            return Path(fetching.result())
        except Exception as error:  # of the hub, of HTTP or of the disk
            raise _failure(what, repository, error) from error
        except BaseException:
            Bar.is_interrupted = True
            raise


def _failure(what: str, repository: Repository, error: Exception) -> ModelError:
    """The error of a fetch, with advice, in one sentence."""
    from huggingface_hub import constants, errors

    said, where = repository.said, f"{constants.ENDPOINT}/{repository.name}"
    if isinstance(error, errors.GatedRepoError):
        return ModelError(
            f"{what}: expected a repository that you may read, got {said}, which asks for more: "
            f"accept its licence at {where}, then set HF_TOKEN to a token of yours (or run hf auth "
            "login)"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFoundError(
            f"{what}: expected a branch, tag or commit of {where}, got {shown(repository.revision)}"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFoundError(
            f"{what}: expected a path, or a repository of {constants.ENDPOINT}, got {said}, which "
            "is neither: look at its spelling; a private one needs HF_TOKEN (or hf auth login)"
        )
    if constants.HF_HUB_OFFLINE and not isinstance(error, errors.HFValidationError):
        return ModelNotFoundError(
            f"{what}: expected a path, or a repository in the cache ({constants.HF_HUB_CACHE}), "
            f"got {said}, which is neither: HF_HUB_OFFLINE is set; unset it to fetch the repository"
        )
    is_full = isinstance(error, OSError) and error.errno in NO_ROOM
    if is_full or "No space left on device" in str(error):  # the latter from hf_xet
        return ModelError(
            f"{what}: expected room for {said} in {constants.HF_HUB_CACHE}, got a full disk: "
            "what is there stays, and HF_HOME names another place"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return ModelNotFoundError(
            f"{what}: expected a path, or a repository of {constants.ENDPOINT}, got {said} and no "
            "answer from there: look at the network and try again (what has come is kept)"
        )
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    return ModelError(f"{what}: expected to fetch {said} from {constants.ENDPOINT}, got: {reason}")


def _no_model(repository: Repository) -> str:
    """The error that says what a repository has in place of a model."""
    from huggingface_hub import HfApi

    try:
        files = HfApi().list_repo_files(repository.name, revision=repository.revision)
    except Exception as error:
        return str(_failure("model", repository, error))
    name = repository.name
    at = "" if repository.revision is None else f"@{repository.revision}"
    ggufs = sorted(file for file in files if file.endswith(".gguf"))
    if ggufs:
        listed = " ".join(f"{name}{at}:{file}" for file in ggufs[:MAX_LISTED])
        more = f" and {len(ggufs) - MAX_LISTED} more" if len(ggufs) > MAX_LISTED else ""
        return f"model: expected one of {listed}{more}, got {repository.said}"
    if repository.file is not None:
        return f"model: expected a GGUF file of {name}, got {repository.file}; it has none"
    pickles = [file for file in files if file.endswith(PICKLES)]
    hint = f"; it has {pickles[0]}, and eecore reads no pickles" if pickles else ""
    return (
        "model: expected a repository with config.json and model.safetensors (or its shards and "
        f"index), got {repository.said}, which lacks one of them{hint}"
    )
