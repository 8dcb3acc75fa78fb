"""Requests of wild types and values: refused in a sentence, or served; neighbours never notice."""

from __future__ import annotations

import itertools
import logging
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

import eecore
from eecore import (
    ConfidentExit,
    DraftAndVerify,
    EecoreError,
    Engine,
    EngineConfig,
    ExitClassifier,
    FixedExit,
    Full,
    Guide,
    SamplingParams,
    SelfSpeculative,
)
from eecore.exits import Exit
from tiny_models import scale_layers, write_model
from tripwire import nothing_done_again
from workloads import Request, check_books, serve

CONFIG = EngineConfig(kv_cache_tokens=192, page_size=4, max_num_seqs=4, max_prefill_chunk=16)
NEIGHBOURS = [
    Request([1, 2, 3], Full(), SamplingParams(max_tokens=5, ignore_eos=True)),
    Request([9, 8], SelfSpeculative(1, 3), SamplingParams(5, 0.8, ignore_eos=True, seed=7)),
]
MODEL: list[eecore.Model] = []
ENGINE: list[Engine] = []
EXPECTED: list[list[int]] = []


class Hostile:
    """An object that raises at every access."""

    def __init__(self, error: type[Exception]) -> None:
        self._error = error

    def _fail(self, *_: object) -> Any:
        raise self._error("never")

    __index__ = __int__ = __float__ = __len__ = __iter__ = __repr__ = __eq__ = __hash__ = _fail
    __bool__ = __lt__ = __le__ = __str__ = __getitem__ = _fail


class Sly(int):
    """An int whose value changes when it is read again."""

    def __int__(self) -> int:
        return 10**30

    __index__ = __int__


class SlyText(str):
    """A subclass of str with a text form of its own."""

    def __str__(self) -> str:
        return "other"

    def __hash__(self) -> int:
        raise TypeError("never")


def prepare() -> None:
    """Make a tiny model and the neighbours' undisturbed outputs."""
    logging.getLogger("eecore").addHandler(logging.NullHandler())
    torch.set_num_threads(1)
    directory = write_model(Path(tempfile.mkdtemp()), num_hidden_layers=3, seed=8)
    MODEL.append(eecore.load(scale_layers(directory, {1: 0.3, 2: 0.3}), kv_cache_tokens=128))
    ENGINE.append(MODEL[0].engine(CONFIG))
    EXPECTED.extend(output.token_ids for output in serve(ENGINE[0], NEIGHBOURS))


# Values


def number(random: Random) -> Any:
    """A number around one of the limits, of any numeric type."""
    edges = (0, 1, 2, 3, 64, 127, 128, 320, 321, 1024, 2**31, 2**32, 2**53, 2**63, 2**64)
    whole = random.choice((*edges, 10**20, 10**30, 10**400, 10**5000, random.getrandbits(70)))
    whole = (whole + random.choice((-1, 0, 0, 1))) * random.choice((1, 1, 1, -1))
    real = random.choice(
        (0.0, -0.0, 0.5, 1.0, 1e-10, 1e-40, 5e-324, 1e10, 1e40, 1.7e308, math.inf, -math.inf)
    )
    real = random.choice((real, math.nan, math.nextafter(real, random.choice((-9e9, 9e9)))))
    small = random.randrange(-3, 120)
    makers: tuple[Callable[[], Any], ...] = (
        lambda: whole,
        lambda: real,
        lambda: small,
        lambda: random.random(),
        lambda: random.random() < 0.5,
        lambda: np.bool_(small > 9),
        lambda: np.int8(small),
        lambda: np.uint64(abs(whole) % 2**64),
        lambda: np.int64(small),
        lambda: np.float16(random.random()),
        lambda: np.float32(random.random()),
        lambda: np.float64(real),
        lambda: np.array(small),
        lambda: torch.tensor(small),
        lambda: torch.tensor(random.random()),
        lambda: torch.tensor(True),
        lambda: Fraction(small, 7),
        lambda: Fraction(abs(whole) + 1, 3),
        lambda: Decimal(small),
        lambda: complex(small, 0),
        lambda: Sly(small),
    )
    return random.choice(makers)()


def text(random: Random) -> Any:
    """An unusual string."""
    pieces = ("a", "e", "", "\0", "\ud800", "\U0001f600", "é", "\n", " ", "</s>", "<|im_start|>")
    made = "".join(random.choice(pieces) for _ in range(random.randrange(6)))
    return random.choice((made, made, SlyText(made), made.encode("utf8", "replace"), made * 999))


def anything(random: Random, depth: int = 0) -> Any:
    """A value of any type."""
    makers: list[Callable[[], Any]] = [
        lambda: number(random),
        lambda: number(random),
        lambda: text(random),
        lambda: None,
        lambda: Hostile(random.choice((TypeError, OSError, OverflowError, KeyError, EOFError))),
        lambda: object(),
        lambda: itertools.count(),
        lambda: itertools.repeat("a"),
        lambda: range(random.choice((0, 3, 2000))),
        lambda: np.arange(random.randrange(5)),
        lambda: torch.arange(random.randrange(5)),
        lambda: int,
        lambda: Exit(),
        lambda: SamplingParams,
    ]
    if depth < 2:
        items = [anything(random, depth + 1) for _ in range(random.randrange(4))]
        simple = [number(random) for _ in range(random.randrange(4))]
        makers += [
            lambda: items,
            lambda: tuple(items),
            lambda: iter(items),
            lambda: simple,
            lambda: {str(i): item for i, item in enumerate(items)},
            lambda: dict.fromkeys(range(len(simple)), 0.5),
        ]
    return random.choice(makers)()


# Requests


@dataclass(frozen=True)
class Maker:
    """Makes parts of requests, of which chance spoils a share."""

    random: Random
    wildness: float

    def some(self, *good: Any) -> Any:
        """A good value, or any value."""
        wild = self.random.random() < self.wildness
        return anything(self.random) if wild else self.random.choice(good)

    def sampling(self) -> Any:
        """SamplingParams, or something in their place."""
        fields: dict[str, tuple[Any, ...]] = {
            "max_tokens": (1, 3, np.int8(4)),
            "temperature": (0.0, 1e-10, 0.7, 1e10, Fraction(1, 2)),
            "top_k": (0, 1, 5, 400, 2**31 - 1),
            "top_p": (1.0, 0.9, 1e-300, 0.5),
            "min_p": (0.0, 0.1, 1.0),
            "repetition_penalty": (1.0, 0.01, 100.0, 1.3),
            "presence_penalty": (0.0, -2.0, Fraction(1, 3)),
            "frequency_penalty": (0.0, 2, -0.5),
            "logit_bias": (None, {}, {3: -100, np.int64(9): 4.5}, ((319, 100.0),)),
            "guide": (
                None,
                Guide.json_object(),
                Guide.regex("[a-c]+:(no|yes)"),
                Guide.choice(["a"]),
            ),
            "seed": (None, 0, 2**64 - 1, np.uint64(2**63)),
            "logprobs": (None, 0, 3, 320),
            "prompt_logprobs": (None, 0, 3, 320),
            "stop": ((), "e", ["never", "x"]),
            "stop_token_ids": ((), 7, (2**31 - 1, 5), range(9)),
            "ignore_eos": (True, False),
        }
        chosen = self.random.sample(list(fields), self.random.randrange(1, 6))
        made = {name: self.some(*fields[name]) for name in chosen}
        return self.some(SamplingParams(**{"max_tokens": 3, **made}))

    def policy(self) -> Any:
        """An exit policy, or something in its place."""
        makers: tuple[Callable[[], Any], ...] = (
            lambda: self.some(None, Full()),
            lambda: FixedExit(self._layer()),
            lambda: SelfSpeculative(self._layer(), self.some(1, 4, np.int8(99), 10**9)),
            lambda: SelfSpeculative(
                1, draft_threshold=self._share(), reuse=self.some(True, np.bool_(0))
            ),
            lambda: DraftAndVerify(
                self._layers(), self._layers(), self.some(3), self.some(True, False)
            ),
            lambda: DraftAndVerify({1}, initial_threshold=self._share()),
            lambda: ConfidentExit(
                self._share(), self.some("softmax", "state"), self.some("each", "all")
            ),
            lambda: ConfidentExit(
                decay_tau=self._share(),
                exit_points=self._layers(),
                min_exit_layer=self._layer(),
            ),
            lambda: ConfidentExit(thresholds=self.some({1: 0.5}, {np.int8(2): Fraction(1, 2)})),
            lambda: ConfidentExit(measure="classifier", classifier=self._classifier()),
            lambda: ConfidentExit(calibration=self.some(None), classifier=self.some(None)),
        )
        return self.random.choice(makers)()

    def prompt(self) -> Any:
        """Tokens, text, or something in their place."""
        count = self.random.choice((1, 1, 3, 8, 20))
        ids = [self.some(self.random.randrange(320), np.uint16(7)) for _ in range(count)]
        return self.some(ids, tuple(ids), "some text", "\U0001f600", " ")

    def _layer(self) -> Any:
        return self.some(1, 2, np.int8(2))

    def _layers(self) -> Any:
        return self.some((1,), [1, 2], {2}, np.arange(1, 3))

    def _share(self) -> Any:
        return self.some(0.3, 0.9, 0, 1, Fraction(1, 3), np.float16(0.5))

    def _classifier(self) -> ExitClassifier:
        shapes = ((2, 64), (3, 64), (2,), (), (2, 0), (2, 8))
        wild = self.random.random() < self.wildness
        weight = torch.full(self.random.choice(shapes) if wild else (2, 64), 0.1)
        return ExitClassifier(self.some(weight, weight.bfloat16()), self.some(None))


@nothing_done_again()
def one(random: Random) -> bool:
    """Try a request among two neighbours."""
    engine = ENGINE[0]
    names = [
        engine.add_request(request.prompt, exit=request.exit, sampling=request.sampling)
        for request in NEIGHBOURS
    ]
    wild, refusal = None, ""
    make = Maker(random, random.choice((0.0, 0.02, 0.1, 0.4)))
    try:
        wild = engine.add_request(
            make.prompt(),
            exit=make.policy(),
            sampling=make.sampling(),
            request_id=make.some(None, "wild"),
        )
    except EecoreError as error:
        refusal = str(error)
    outputs = {step.request_id: step.output for step in engine.run() if step.output is not None}
    check_books(engine)
    assert engine.pages.num_free == engine.pages.num_pages
    for name, expected in zip(names, EXPECTED, strict=True):
        assert outputs[name].token_ids == expected
    if wild is None:
        assert 0 < len(refusal) < 5000
        return False
    output = outputs[wild]
    assert output.error is None, output
    assert type(wild) is str
    assert {type(token) for token in (*output.prompt_token_ids, *output.token_ids)} == {int}
    numbers = [*output.confidences, *(output.logprobs or ())]
    numbers += [entry.logprob for entry in output.prompt_logprobs or () if entry is not None]
    assert all(map(math.isfinite, numbers)), output
    return True
