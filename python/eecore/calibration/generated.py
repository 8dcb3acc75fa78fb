"""Outputs for a measurement, in which a failed request is an error."""

from __future__ import annotations

from typing import Any

from eecore.generation import Model, generate
from eecore.output import Output


def generated(model: Model, prompts: Any, **settings: Any) -> list[Output]:
    """The outputs of :func:`eecore.generate`.

    Raises:
        RuntimeError: a request failed while it ran.
    """
    outputs = generate(model, prompts, **settings)
    for output in outputs:
        if output.error is not None:
            raise RuntimeError(f"a prompt of {len(output.prompt_token_ids)} tokens: {output.error}")
    return outputs
