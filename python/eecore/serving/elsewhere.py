"""The names that settings have in requests to other servers.

A limit, a stop string, a number of choices or a guide is honoured under other names. What else
would change an answer is refused, with the name of eecore's field where it has one, unless its
value asks for nothing. What is about users, queues, bills and speed has no effect. All else is
unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

WITHOUT_EFFECT = frozenset(
    # OpenAI's; max_tool_calls limits tools that a server itself has.
    "access_programs max_tool_calls prediction prompt_cache_key prompt_cache_options "
    "prompt_cache_retention safety_identifier service_tier store "
    # Tokenizers add no spaces between special tokens.
    "spaces_between_special_tokens "
    "cache_control cache_prompt guided_decoding_backend id_slot keep_alive priority request_id "
    "return_progress rid timings_per_token use_cache".split()
)
SAME = (
    "max_tokens max_completion_tokens max_output_tokens max_new_tokens max_tokens_to_sample "
    "n_predict num_predict",
    "stop stop_sequences stop_sequence stop_strings stop_words stopping_strings",
    "n candidate_count n_cmpl num_generations num_return_sequences",
    "echo return_full_text",
    "guided_json json_schema",
    "guided_regex regex",
    "guided_grammar grammar",
    "continue_final_message continue_",
    "enable_thinking think",
    "thinking_budget thinking_token_budget thinking_budget_tokens reasoning_budget_tokens "
    "reasoning_budget max_thinking_tokens",
)
"""Names with one meaning. The first one that an endpoint has is its field."""
INSTEAD = {
    "max_tokens": r"max_(\w+_)?(len(gth)?|time|tokens)(_\w+)?|t_max_\w+|(n|num)_tokens|"
    r"(num_)?tokens_to_generate|token_limit",
    "fields of the body": r"(sampl\w+|inference|gen(erat\w+)?|decoding|model)_(params|parameters|"
    "config|kwargs|args|options|settings)|parameters|options|extra_body",
    "exit": r"early_exit\w*|exit_\w+",
    "temperature": "temp|do_sample|greedy",
    "top_k": "k",
    "top_p": "p",
    "seed": r"(random|sampl\w+)_seed",
    "repetition_penalty": r"repeat_penalty|rep_pen|encoder_repetition_penalty",
    "logit_bias": r"((begin_)?suppress|bad|bann?ed|allowed|forced?)_\w+|custom_token_bans|"
    "token_ban_ranges|sequence_bias",
    "ignore_eos": "ban_eos_token|bypass_eos",
    "stop or stop_token_ids": "eos_token(_ids?)?|end_id|stop_regex|stop_at",
    "logprobs and top_logprobs": r"n_probs|top_n_tokens|(return_|response_|output_)?log_?probs?\w*|"
    r"top_logprobs\w+|output_(scores|logits)|(decoder_input_)?details",
    "response_format (text.format in /v1/responses)": r"(\w+_)?schema|response_mime_type|format|"
    "output_(format|config)|structural_tag|guided_whitespace_pattern",
    "guided_grammar": r"ebnf|grammar_\w+",
    "tools and tool_choice": "functions?|function_call",
    "messages": r"system(_\w+)?|preamble|chat_history",
    "chat_template_kwargs": r"think|(enable_)?thinking(_\w+)?|reasoning_(?!format)\w+",
    "reasoning_effort": "reasoning",
    "reasoning_format": "separate_reasoning",
    "the model's own chat template": r"(\w+_)?template(_\w+)?|character|mode|preset",
    "stream_options": "include_usage|continuous_usage_stats",
    "add_special_tokens": "add_bos_token|add_special",
}
"""What eecore has in the place of settings that mean something else or something like it."""
NOT_SUPPORTED = re.compile(
    r"audio|background\w*|best_of|cache_salt|contexts?|contents?|context_\w+|\w+_context_size|"
    r"conversation|detokenize|documents|early_stopping|images?|include_stop_\w+|memory|mm_\w+|"
    r"m\w+_io_kwargs|min_\w+|modalities|moderations?|n(um)?_ctx|no_stop_\w+|parse_tool_calls|"
    r"pattern|prompt_embeds|raw|repetition_\w+|return_(?!progress)\w+|safe(ty)?_(?!id)\w+|"
    r"session_params|stream_reasoning|suffix|token_\w+|top_\w+|\w+_transfer_params|trim_stop|"
    r"truncat\w+|typ_p|value|vllm_xargs|web_search\w*|"
    # Words of names that are about an answer, wherever they come from.
    r"(\w+_)?(adapters?|alpha|beams?|biase?s?|bos|cfg|cutoff|decay|draft|dry|dynamic|dynatemp|eos|"
    r"guid(ance|ed)|json|length|logits?|lora|look(up|ahead)|mirostat|n?sigma|negative|ngrams?|nl|"
    r"penal(ty|ties|ize)|probs?|processors?|regex|rep|repeat|sampl(e|ers?|ing)|skew|smoothing|"
    r"speculative|steering|stop|temp|temperature|tfs|tokens|typical|watermark(ing)?|xtc)(_\w+)?"
)
"""Settings that change an answer, and that eecore has nothing like."""
NOTHING: tuple[Any, ...] = (False, "", [], {})
"""Values that ask for nothing; 0 is one of them, since Python has it equal to False."""
OFF: dict[str, tuple[Any, ...]] = {
    name: values
    for names, values in (
        ("do_sample enable_thinking think thinking web_search web_search_options", ()),
        ("skip_special_tokens detokenize trim_stop parse_tool_calls include_reasoning", (True,)),
        ("separate_reasoning stream_reasoning", (True,)),
        ("reasoning_format", ("auto", "deepseek", "none")),
        ("add_bos_token add_special", (True,)),
        ("repeat_penalty rep_pen encoder_repetition_penalty length_penalty best_of", (1,)),
        ("num_beams num_beam_groups beam_width typical typical_p tfs tfs_z", (1,)),
        ("guidance_scale cfg_scale", (1,)),
        ("rep_pen_slope dynatemp_exponent smoothing_curve", (0, 1)),
        ("top_n_sigma nsigma repeat_last_n max_length", (0, -1)),
        ("n num_return_sequences num_generations candidate_count n_cmpl", (0, 1)),
        ("function_call", ("none", "auto")),
        ("functions", ([],)),
        ("modalities", (["text"], [])),
        ("truncation", ("disabled",)),
    )
    for name in names.split()
}
"""Values that ask for nothing, where they are other ones."""
SWITCHES = frozenset(
    "dry_multiplier xtc_probability mirostat mirostat_mode dynatemp_range smoothing_factor rep_pen "
    "repeat_penalty".split()
)
"""Settings that, where they ask for nothing, switch off those that begin with the same word."""
CLOSE = 0.88
"""The similarity from which a name is taken for a misspelt one."""
MAX_MISSPELT = 40
"""Characters of such a name."""

_MEANINGS = {name: row.split() for row in SAME for name in row.split()}
_INSTEAD = [(ours, re.compile(pattern)) for ours, pattern in INSTEAD.items()]


def plain(name: str) -> str:
    """A name in eecore's spelling: words in lower case with underscores between them."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[\s.:-]+", "_", name).lower()


def same(name: str, fields: Iterable[str]) -> list[str]:
    """The fields of an endpoint that mean the same as a plain name, the preferred one first."""
    return [field for field in _MEANINGS.get(name, ()) if field in fields]


def asks_for_nothing(name: str, value: Any, given: Mapping[str, Any]) -> bool:
    """Whether a setting has a value, or a switch in the request, with which it has no effect.

    Args:
        name: its plain name.
        given: all fields of the request that the endpoint does not have, by plain names.
    """
    word = name.partition("_")[0]
    switches = [other for other in SWITCHES & given.keys() if other.partition("_")[0] == word]
    settings = [(name, value), *((other, given[other]) for other in switches)]
    return any(each in OFF.get(known, NOTHING) for known, each in settings)


@lru_cache(1024)
def meaning(name: str, fields: frozenset[str]) -> tuple[str | None, bool]:
    """What an endpoint with these fields has in the place of a plain name, None for nothing; and
    whether the name is known at all.
    """
    for ours, pattern in _INSTEAD if name not in fields else ():
        if pattern.fullmatch(name):
            return next(iter(same(ours, fields)), ours), True
    if 3 < len(name) <= MAX_MISSPELT:
        near = get_close_matches(name, [*fields, *_MEANINGS], 1, CLOSE)
        for each in near:
            fit = [each] if each in fields else same(each, fields)
            if fit:
                return fit[0], True
    return None, name in _MEANINGS or NOT_SUPPORTED.fullmatch(name) is not None
