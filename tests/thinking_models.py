"""Small random models with markers of thoughts, and chat templates as such models have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

import eecore
from eecore import ThoughtStop
from eecore.calibration_file import ThoughtCalibration
from tiny_models import write_model

OPENS, CLOSES, CALLS = 260, 261, 262
"""The tokens <think>, </think> and <tool_call>."""
# Thoughts are a field or part of the content; those before the last question are left out.
_HISTORY = """
{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content, thought = m.content or '', m.reasoning_content or '' %}
    {%- if not thought and '</think>' in content %}
        {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if thought and loop.index0 > ns.last %}
        {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- content }}
    {%- for call in m.tool_calls or [] %}
        {{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"""
HYBRID = f"""{_HISTORY}
    {{%- if enable_thinking is defined and enable_thinking is false %}}
        {{{{- '<think>\\n\\n</think>\\n\\n' }}}}
    {{%- endif %}}
{{%- endif %}}"""
"""The model opens its thoughts, unless it is told not to."""
ALWAYS = f"{_HISTORY}{{{{- '<think>\\n' }}}}{{%- endif %}}"
"""The template opens them."""
WORDS = """
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if thinking %}{{- 'Write Here is my thought process: and Here is my response:' }}{%- endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""The markers are words."""
QUESTION = [{"role": "user", "content": "Why?"}]


def write_thinking_model(
    directory: Path, template: str = HYBRID, *, markers: bool = True, **settings: Any
) -> Path:
    """Write a random model of bytes.

    Args:
        markers: whether its tokenizer has the tokens <think>, </think>, <tool_call> and
            </tool_call>, as Qwen's has.
    """
    write_model(directory, **settings)
    path = directory / "tokenizer.json"
    if markers:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
        assert tokenizer.token_to_id("</think>") == CLOSES
        tokenizer.save(str(path))
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return directory


def calibrated(model: eecore.Model, stop: ThoughtStop, **fields: Any) -> ThoughtCalibration:
    """A calibration of a model."""
    source, tokenizer = model.network.source, model.tokenizer
    assert source is not None
    assert tokenizer is not None
    of_model = {"model_sha256": source.sha256, "dtype": source.dtype, "weights": source.weights}
    return ThoughtCalibration(
        stop=stop,
        max_loss=0.02,
        confidence=0.9,
        loss="different",
        num_questions=600,
        thinking_budget=None,
        saved=0.5,
        tokenizer_sha256=tokenizer.sha256,
        **{**of_model, **fields},  # type: ignore[arg-type]
    )
