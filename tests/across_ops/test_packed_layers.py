"""Packed weights of mixed formats in decoder layers give what single ops give."""

from __future__ import annotations

import pytest
import test_decoder_layers
import torch

from cases import DTYPES, DecoderLayersCase
from eecore import ops
from packed_blocks import packed_layers

SMALL = DecoderLayersCase((2, 1), (9, 20), hidden_size=256, inner_size=512, bias=True, qk_norm=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decoder_layers_of_mixed_formats(dtype: torch.dtype, device: torch.device) -> None:
    one_by_one = test_decoder_layers.random_call(SMALL, dtype, device)
    weights: ops.DecoderWeights = one_by_one["weights"]
    layers, hidden = SMALL.num_layers, SMALL.hidden_size
    q, kv = SMALL.num_q_heads * SMALL.head_dim, SMALL.num_kv_heads * SMALL.head_dim
    kinds = ops.BLOCK_FORMATS * layers

    def packed(name: str, columns: int, *rows: int) -> ops.Matrix:
        parts = [[(kinds[i + j], count) for j, count in enumerate(rows)] for i in range(layers)]
        matrix = packed_layers(parts, columns, size=columns**-0.5)
        return matrix._replace(bias=getattr(weights, name).bias)

    one_by_one["weights"] = weights._replace(
        qkv=packed("qkv", hidden, q, kv, kv),
        o=packed("o", q, hidden),
        gate_up=packed("gate_up", hidden, SMALL.inner_size, SMALL.inner_size),
        down=packed("down", SMALL.inner_size, hidden),
    )
    at_once = test_decoder_layers.with_own_caches(one_by_one)
    got = ops.decoder_layers(**at_once)
    assert torch.equal(got, test_decoder_layers.compose(one_by_one))
    test_decoder_layers.assert_same(at_once, one_by_one)


def test_cross_attention_and_a_plain_mlp(device: torch.device) -> None:
    case = DecoderLayersCase(
        (2, 1), (9, 20), cross_lens=(20, 3), activation="relu", hidden_size=64, inner_size=96
    )
    one_by_one = test_decoder_layers.random_call(case, torch.float32, device)
    weights, cross = one_by_one["weights"], one_by_one["cross"]
    q_size, layers = case.num_q_heads * case.head_dim, case.num_layers

    def packed(columns: int, rows: int) -> ops.Matrix:
        return packed_layers([[("Q4_1", rows)]] * layers, columns, size=columns**-0.5)

    one_by_one["weights"] = weights._replace(gate_up=packed(64, 96), down=packed(96, 64))
    one_by_one["cross"] = cross._replace(q=packed(64, q_size), o=packed(q_size, 64))
    at_once = test_decoder_layers.with_own_caches(one_by_one)
    assert torch.equal(ops.decoder_layers(**at_once), test_decoder_layers.compose(one_by_one))
