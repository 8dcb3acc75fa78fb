"""Models of transformers on eecore's engine: transformers' calls and tokens, weights held once."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

import eecore
from eecore import ModelError, RequestError
from eecore.integrations.transformers_generate import EarlyExitOutput
from tiny_models import random_prompts, write_byte_tokenizer, write_model
from tiny_t5 import write_t5

FAMILIES = ("llama", "llama_tied", "mistral", "qwen2", "qwen3")
LOSSLESS = ("full", "speculative:2,3", "lookup:4", "auto")
EARLY: Any = eecore.generate_for_transformers


def loaded(directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llama(directory: Path) -> PreTrainedModel:
    return loaded(directory)


def batch(*lengths: int, pad: int = 0) -> dict[str, Any]:
    """A batch of prompts padded on the left, greedy, with end tokens that occur."""
    prompts = random_prompts(*lengths, seed=5)
    longest = max(lengths)
    rows = [[pad] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {
        "input_ids": torch.tensor(rows),
        "attention_mask": torch.tensor(mask),
        "max_new_tokens": 16,
        "do_sample": False,
        "pad_token_id": pad,
        "eos_token_id": list(range(30)),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_transformers_own(tmp_path: Path, family: str) -> None:
    model = loaded(write_model(tmp_path, family))
    for lengths in ((9,), (5, 17, 1)):
        given = batch(*lengths)
        expected = model.generate(**given)
        for exit in LOSSLESS:
            got = model.generate(**given, custom_generate=EARLY, exit=exit)
            assert torch.equal(got, expected), (lengths, exit)
    # The model shares its weights, and is unchanged.
    assert torch.equal(model.generate(**given), expected)


@pytest.mark.parametrize("family", ["t5", "flan_t5", "mt5"])
def test_answers_of_encoder_decoders(tmp_path: Path, family: str) -> None:
    model = AutoModelForSeq2SeqLM.from_pretrained(
        write_t5(tmp_path, family), dtype=torch.float32
    ).eval()
    given = batch(7, 12, 1, pad=256)
    # They are padded on the right.
    order = [[*row[mask == 1], *row[mask == 0]] for row, mask in _rows(given)]
    given["input_ids"] = torch.tensor(order)
    given["attention_mask"] = given["attention_mask"].flip(1)
    expected = model.generate(**given)
    for exit in ("full", "speculative:2,3"):
        assert torch.equal(model.generate(**given, custom_generate=EARLY, exit=exit), expected)


def _rows(given: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(given["input_ids"], given["attention_mask"], strict=True))


# Weights


def test_the_weights_are_shared(directory: Path) -> None:
    model = loaded(directory)
    names = dict(model.named_parameters())
    before = {name: p.detach().clone() for name, p in names.items()}
    ours = eecore.from_transformers(model)
    weights = ours.network.weights
    assert all(torch.equal(p, before[name]) for name, p in names.items())
    own = weights.qkv.weight
    begin, end = own.data_ptr(), own.data_ptr() + own.numel() * own.element_size()
    for layer in range(4):
        for part in ("q", "k", "v"):
            at = names[f"model.layers.{layer}.self_attn.{part}_proj.weight"].data_ptr()
            assert begin <= at < end
    assert names["model.embed_tokens.weight"].data_ptr() == weights.embed_tokens.weight.data_ptr()


def test_what_is_trained_or_merged_is_seen(directory: Path) -> None:
    model = loaded(directory)
    given = batch(9)
    before = model.generate(**given, custom_generate=EARLY, exit="full")
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.down_proj.weight").mul_(-3.0)
    changed = model.generate(**given, custom_generate=EARLY, exit="full")
    assert not torch.equal(changed, before)
    assert torch.equal(changed, model.generate(**given))

    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["v_proj", "o_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    with pytest.raises(ModelError, match=r"got an adapter \(.*merge_and_unload"):
        eecore.from_transformers(adapted.base_model.model)
    merged = adapted.merge_and_unload()
    expected = merged.generate(**given)
    assert torch.equal(merged.generate(**given, custom_generate=EARLY, exit="full"), expected)
    assert not torch.equal(expected, changed)


# Arguments


def test_sampling_follows_torchs_seed(llama: PreTrainedModel) -> None:
    given = {**batch(9, 3), "do_sample": True, "temperature": 1.5, "top_k": 40, "top_p": 0.9}
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(llama.generate(**given, custom_generate=EARLY, min_p=0.01))
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_repetition_counts_the_prompt(llama: PreTrainedModel) -> None:
    plain = {**batch(9, 9), "eos_token_id": None}
    given = {**plain, "repetition_penalty": 1.7}
    expected = llama.generate(**given)
    assert not torch.equal(expected, llama.generate(**plain))
    assert torch.equal(llama.generate(**given, custom_generate=EARLY, exit="full"), expected)


def test_the_dictionary_tells_what_the_exits_promise(llama: PreTrainedModel) -> None:
    given = {**batch(9, 3), "return_dict_in_generate": True}
    got = llama.generate(**given, custom_generate=EARLY, exit="confident:0.2")
    assert isinstance(got, EarlyExitOutput)
    assert got.sequences is not None
    assert got.exit_layers is not None
    assert got.contracts == ["confident exit (softmax, threshold 0.2): uncalibrated"] * 2
    lengths = (got.sequences[:, 9:] != 0).sum(1).tolist()
    assert [len(layers) for layers in got.exit_layers] == lengths
    assert {1, 4} <= {layer for layers in got.exit_layers for layer in layers}
    same = llama.generate(**given, custom_generate=EARLY, exit="speculative:2,3")
    assert "lossless" in same.contracts[0]


def test_a_streamer_gets_what_it_gets_from_transformers(
    llama: PreTrainedModel, tmp_path: Path
) -> None:
    write_byte_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    given = {**batch(9), "eos_token_id": None}
    texts = []
    for more in ({}, {"custom_generate": EARLY, "exit": "speculative:2,3"}):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=120.0)
        thread = threading.Thread(
            target=llama.generate, kwargs={**given, **more, "streamer": streamer}
        )
        thread.start()
        texts.append("".join(streamer))
        thread.join()
    assert texts[0] == texts[1] != ""


def test_texts_that_end_an_answer(directory: Path, tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    model = loaded(directory)
    given = {**batch(9), "eos_token_id": None}
    whole = tokenizer.decode(model.generate(**given)[0, 9:])
    with pytest.raises(RequestError, match="stop: expected a model with a tokenizer"):
        model.generate(**given, custom_generate=EARLY, stop=whole[3])
    ours = eecore.from_transformers(model, tokenizer)
    ended = model.generate(**given, custom_generate=EARLY, stop=whole[3])[0, 9:]
    assert len(ended) < 16
    assert whole[3] not in tokenizer.decode(ended[:-1])
    assert eecore.generate(ours, "some text", max_tokens=3)[0].text is not None
    tokenizer.split_special_tokens = True
    splitting = eecore.from_transformers(model, tokenizer).tokenizer
    assert splitting is not None
    assert splitting.encode("<s>") == tokenizer("<s>").input_ids
    assert splitting.encode("<s>") != ours.tokenizer.encode("<s>")


def test_stopping_criteria_end_a_sequence(directory: Path) -> None:
    model = loaded(directory)
    # An end token is set: without one transformers does not pad ended sequences.
    given = {**batch(9, 4), "eos_token_id": 1, "pad_token_id": 0}
    whole = model.generate(**given)[0, 9:].tolist()
    given["stopping_criteria"] = StoppingCriteriaList([lambda ids, _: ids[:, -1] == whole[4]])
    expected = model.generate(**given)
    assert (expected[0, 9:] == 0).any()
    for exit in ("full", "speculative:2,3"):
        torch.testing.assert_close(
            model.generate(**given, custom_generate=EARLY, exit=exit), expected
        )
    given["stopping_criteria"] = StoppingCriteriaList([lambda ids, _: ids.shape[1] >= 11])
    got = model.generate(**given, custom_generate=EARLY, return_dict_in_generate=True)
    assert got.sequences.shape[1] == 11
    assert [len(layers) for layers in got.exit_layers] == [2, 2]
    assert got.outputs is None
    assert not eecore.from_transformers(model).engine().has_unfinished


def filled_cache() -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.zeros(2, 2, 1, 64), torch.zeros(2, 2, 1, 64), 0)
    return cache


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"num_beams": 2}, "num_beams: expected none with eecore, got 2"),
        ({"bad_words_ids": [[3]]}, "bad_words_ids"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
        ({"min_new_tokens": 4}, "min_length"),
        ({"output_scores": True}, "output_scores"),
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"assistant_early_exit": 2}, "assistant_early_exit"),
        ({"renormalize_logits": True}, "renormalize_logits"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"penalty_alpha": 0.6}, "penalty_alpha"),
        (
            {"logits_processor": LogitsProcessorList([lambda _ids, scores: scores])},
            "logits_processor: expected none, got function",
        ),
        (
            {"stopping_criteria": StoppingCriteriaList([lambda *_: torch.ones(3) > 0])},
            r"stopping_criteria: expected a bool for one sequence, got \[3\] from <lambda>",
        ),
        ({"inputs_embeds": torch.randn(2, 5, 64), "input_ids": None}, "inputs_embeds"),
        ({"past_key_values": filled_cache()}, "expected none, got a cache that is filled"),
    ],
)
def test_what_is_not_honoured_is_an_error(
    llama: PreTrainedModel, setting: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llama.generate(**{**batch(5, 3), **setting}, custom_generate=EARLY)


def test_holes_in_a_prompt(llama: PreTrainedModel) -> None:
    given = batch(6)
    given["attention_mask"] = torch.tensor([[1, 1, 0, 1, 1, 1]])
    with pytest.raises(RequestError, match=r"attention_mask: expected padding only at an end"):
        llama.generate(**given, custom_generate=EARLY)


# Models


def test_models_that_cannot_be_adopted(directory: Path) -> None:
    model = loaded(directory)
    with pytest.raises(ModelError, match="expected a PreTrainedModel that generates, got 'no'"):
        eecore.from_transformers("no")  # type: ignore[arg-type]
    strange = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=64))
    with pytest.raises(ModelError, match="supported are LlamaForCausalLM"):
        eecore.from_transformers(strange)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
    with pytest.raises(ModelError, match="expected weights in memory, got the meta device"):
        eecore.from_transformers(empty)
    mixed = loaded(directory)
    mixed.model.layers[2].mlp.bfloat16()
    with pytest.raises(ModelError, match=r"layers\.2\.mlp\..*expected torch.float32 on cpu"):
        eecore.from_transformers(mixed)
    with pytest.raises(ModelError, match="expected float32 or bfloat16 on the CPU"):
        eecore.from_transformers(loaded(directory, torch.float16))
    quantised = loaded(directory)
    quantised.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ModelError, match="expected weights in floats, got a quantised model"):
        eecore.from_transformers(quantised)
    with pytest.raises(ModelError, match="tokenizer: expected a fast one of transformers"):
        eecore.from_transformers(model, object())  # type: ignore[arg-type]
