"""Plain PyTorch oracles: one function per op, and the semantics of the runtime, restated simply."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from itertools import takewhile
from typing import Any, TypeVar

import gguf
import numpy as np
import torch
from torch import Tensor

from eecore import ops
from packed_blocks import block_sizes

Rows = TypeVar("Rows", ops.ActiveRows, ops.DraftRound)


def accept_mask(
    confidence: Tensor, thresholds: Tensor, layer: int, status: Tensor, exit_layer: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """New (status, exit_layer, survivors); see eecore.ops.accept_mask."""
    accepted = (confidence >= thresholds) & (thresholds < 1)
    new_exit_layer = torch.where(accepted & ~status, layer, exit_layer)
    new_status = status | accepted
    survivors = (~new_status).nonzero().flatten().to(torch.int32)
    return new_status, new_exit_layer, survivors


def begin_round(
    given: ops.DraftRound,
    active: ops.ActiveRows,
    page_size: int,
    ended: ops.EndedRound | None = None,
    sources: Tensor | None = None,
    ahead: ops.DraftedAhead | None = None,
    own_key: bool = True,
) -> tuple[ops.DraftRound, ops.ActiveRows]:
    """A round and its active rows at its start, row by row; see eecore.ops.begin_round."""
    made, rows = _copied(given), _copied(active)
    num_steps = given.tokens.shape[1] - 1
    for row in range(len(given.start)):
        token, position, left = (
            int(tensor[row]) for tensor in (given.token_ids, given.start, given.tokens_left)
        )
        source = -1 if sources is None else int(sources[row])
        if ended is not None and source >= 0:
            token, position, left = (int(tensor[source]) for tensor in ended)
        most = max(min(int(given.max_drafts[row]), left - 1, num_steps), -1)
        made.first_position[row], made.left[row], made.most[row] = position, left, most
        drafts: list[int] | None = None
        if given.drafts is not None and given.num_given is not None and given.num_given[row] >= 0:
            drafts = given.drafts[row, : int(given.num_given[row])].tolist()
        if ahead is not None and source >= 0 and drafts is None:
            its = ahead.tokens[source, 1 : int(ahead.num_drafted[source]) + 1].tolist()
            pairs = zip(its, ahead.probabilities[source].tolist(), strict=False)
            least = float(given.thresholds[row])
            drafts = [token for token, _ in takewhile(lambda p, least=least: p[1] >= least, pairs)]
        done = most <= 0 or drafts is not None
        made.tokens[row, 0], made.num_drafted[row], made.done[row] = token, 0, done
        if drafts is not None:
            count = max(min(len(drafts), most), 0)
            made.num_drafted[row] = count
            made.tokens[row, 1 : count + 1] = torch.tensor(drafts[:count], dtype=torch.int64)
        made.round_slots[row] = -1
        for k in range(most + 1):
            page, offset = divmod(position + k, page_size)
            made.round_slots[row, k] = int(given.page_table[row, page]) * page_size + offset
        assert rows.token_ids is not None
        rows.row[row], rows.token_ids[row], rows.positions[row] = row, max(token, 0), position
        rows.slot_mapping[row] = -1 if made.done[row] else made.round_slots[row, 0]
        rows.seq_lens[row] = 1 if made.done[row] else max(position + own_key, 1)
    made.all_done.fill_(bool(made.done.all()))
    return made, rows


def append_drafts(
    hidden: Tensor | None,
    token: Tensor,
    confidence: Tensor,
    step: int,
    given: ops.DraftRound,
    active: ops.ActiveRows,
    own_key: bool = True,
) -> tuple[ops.DraftRound, ops.ActiveRows]:
    """A round and its active rows after one more step; see eecore.ops.append_drafts."""
    made, rows = _copied(given), _copied(active)
    assert rows.token_ids is not None
    for i, row in enumerate(active.row.tolist()):
        if given.done[row]:
            continue
        if made.states is not None and hidden is not None:
            made.states[row, step] = hidden[i]
        made.tokens[row, step + 1], made.confidences[row, step] = token[i], confidence[i]
        made.num_drafted[row] = step + 1
        goes_on = (
            float(confidence[i]) >= float(given.thresholds[row])
            and int(token[i]) not in given.stop_tokens[row].tolist()
            and step + 1 < int(given.most[row])
        )
        made.done[row] = not goes_on
        rows.token_ids[i] = max(int(token[i]), 0)
        rows.positions[i] += 1
        rows.slot_mapping[i] = given.round_slots[row, step + 1] if goes_on else -1
        if own_key or not goes_on:
            rows.seq_lens[i] = int(rows.positions[i]) + 1 if goes_on else 1
    made.all_done.fill_(bool(made.done[active.row.long()].all()))
    return made, rows


def begin_verification(given: ops.DraftRound, max_tokens: int) -> ops.Verification:
    """The verification of a round, row by row; see eecore.ops.begin_verification."""
    last, ragged = [], []
    lengths, starts = [], [0]
    for row, most in enumerate(given.most.tolist()):
        drafted, position = int(given.num_drafted[row]), int(given.first_position[row])
        if most < 0:
            last.append((0, 0, -1, 1))
            lengths.append(0)
        else:
            tokens = given.tokens[row].clamp(min=0).tolist()
            slots = given.round_slots[row].tolist()
            ragged += [(tokens[k], position + k, slots[k], row) for k in range(drafted + 1)]
            last.append((*ragged[-1][:3], position + drafted + 1))
            lengths.append(position + drafted + 1)
        starts.append(len(ragged))
    padding = [(0, 0, -1, 0)] * (max_tokens - len(ragged))
    whole, half, device = torch.int64, torch.int32, given.most.device
    dtypes = (whole, whole, whole, half)
    columns = [
        torch.tensor([row[column] for row in rows], dtype=dtype, device=device)
        for rows in (last, ragged + padding)
        for column, dtype in enumerate(dtypes)
    ]
    counts = (
        torch.tensor(values, dtype=half, device=device)
        for values in (lengths, starts, [len(ragged)])
    )
    return ops.Verification(*columns, *counts)


def gather_states(states: Tensor, last: Tensor, verification: ops.Verification) -> Tensor:
    """States of the ragged rows, then zeros; see eecore.ops.gather_states."""
    out = states.new_zeros(len(verification.token_ids), states.shape[2])
    bounds = verification.query_start_loc.tolist()
    for row, (begin, end) in enumerate(itertools.pairwise(bounds)):
        if begin < end:
            out[begin : end - 1] = states[row, : end - 1 - begin]
            out[end - 1] = last[row]
    return out


def accept_round(
    given: ops.DraftRound,
    verification: ops.Verification,
    target: Tensor,
    *,
    sampled: Tensor | None = None,
    draft_probs: Tensor | None = None,
    target_probs: Tensor | None = None,
    uniform: Tensor | None = None,
) -> tuple[ops.EndedRound, Tensor, Tensor]:
    """Where each row goes on, num_accepted and last_row; see eecore.ops.accept_round."""
    ended = ops.EndedRound(
        given.tokens[:, 0].clone(), given.first_position.clone(), given.left.clone()
    )
    num_accepted, last_row = torch.zeros_like(given.most), torch.zeros_like(given.most)
    num_steps = given.tokens.shape[1] - 1
    starts = verification.query_start_loc.tolist()
    for row in (given.most >= 0).nonzero().flatten().tolist():
        drafted, begin = int(given.num_drafted[row]), starts[row]
        drafts, rows = given.tokens[row, 1 : drafted + 1], slice(begin, begin + drafted + 1)
        start_loc = torch.tensor([0, drafted])
        if sampled is not None and bool(sampled[row]):
            assert draft_probs is not None
            assert target_probs is not None
            assert uniform is not None
            (accepted,), (token,) = speculative_accept(
                drafts,
                start_loc,
                draft_probs=draft_probs[row * num_steps :][:drafted],
                target_probs=target_probs[rows],
                uniform=torch.cat((uniform[rows, 0][:-1], uniform[rows, 1][-1:])),
            )
            if accepted < drafted:  # what it is drawn with is its own position's
                at = slice(accepted, accepted + 1)
                _, (token,) = speculative_accept(
                    drafts[at],
                    torch.tensor([0, 1]),
                    draft_probs=draft_probs[row * num_steps :][at],
                    target_probs=target_probs[rows][accepted : accepted + 2],
                    uniform=uniform[begin + accepted],
                )
            else:
                token = int(target[begin + drafted])
        else:
            (accepted,), (token,) = speculative_accept(
                drafts, start_loc, target_tokens=target[rows]
            )
        num_accepted[row], last_row[row] = accepted, begin + accepted
        ended.next_token[row] = token
        ended.next_position[row] += accepted + 1
        ended.next_left[row] -= accepted + 1
    return ended, num_accepted, last_row


def _copied(rows: Rows) -> Rows:
    """A named tuple of copies."""
    return type(rows)(*(None if tensor is None else tensor.clone() for tensor in rows))


def philox(key: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of a key of 64 bits (Salmon et al. 2011)."""
    mask = 2**32 - 1
    k0, k1 = key & mask, key >> 32
    c0, c1, c2, c3 = counter
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & mask, (a >> 32) ^ c3 ^ k1, a & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def random_words(seed: int, position: int, purpose: int) -> tuple[int, int, int, int]:
    """The random words of a request at a position."""
    low, high = position % 2**64 % 2**32, position % 2**64 >> 32
    return philox(seed % 2**64, (low, high, purpose, 0))


def filtered_weights(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """Weights [vocab_size] that tokens are drawn with, float64, not normalised; see eecore.ops."""
    scaled = (logits - logits.max()) / max(temperature, 1e-30)
    if 0 < top_k < logits.numel():
        scaled = scaled.masked_fill(scaled < scaled.topk(top_k).values[-1], -math.inf)
    weights = scaled.double().exp()
    if top_p < 1:
        order = scaled.sort(descending=True, stable=True).indices
        before = weights[order].cumsum(0) - weights[order]
        dropped = before >= top_p * (1 - 1e-6) * weights.sum()
        dropped[0] = False
        weights[order[dropped]] = 0.0
    weights[weights < min(min_p, 1.0)] = 0.0
    return weights


def sample_tokens(
    logits: Tensor,
    rows: ops.SamplingRows,
    given: ops.SampledRows,
    *,
    purpose: int,
    positions: Tensor,
    index: Tensor | None = None,
    row: Tensor | None = None,
    kind: Tensor | None = None,
    wanted: int = 0,
    round_tokens: Tensor | None = None,
    first_position: Tensor | None = None,
    as_probability: bool = False,
    probs_by_step: int = 0,
) -> ops.SampledRows:
    """New outputs, row by row; see eecore.ops.sample_tokens."""
    out = ops.SampledRows(*(None if t is None else t.clone() for t in given))
    vocab_size = logits.shape[1]
    for j in range(logits.shape[0]):
        w = j if index is None else int(index[j])
        r = w if row is None else int(row[w])
        if kind is not None and int(kind[r]) != wanted:
            continue
        position, seed = int(positions[w]) + 1, int(rows.seed[r])
        raw = logits[j].float()
        step = 0 if first_position is None else position - 1 - int(first_position[r])
        if rows.allowed is not None and 0 <= step < rows.allowed.shape[1]:
            bits = rows.allowed[r, step, :, None] >> torch.arange(32, dtype=torch.int32) & 1
            raw = raw.masked_fill(bits.flatten()[:vocab_size] == 0, -math.inf)
        logprobs = raw.double().log_softmax(0)
        known = math.isfinite(float(raw.max()))  # NaN is the largest of all
        penalised = raw.clone()
        for i in range(0 if rows.bias_ids is None else rows.bias_ids.shape[1]):
            assert rows.bias_ids is not None
            assert rows.bias is not None
            if 0 <= (biased := int(rows.bias_ids[r, i])) < vocab_size:
                penalised[biased] += rows.bias[r, i]
        seen = {int(token) for token in rows.seen[r] if 0 <= int(token) < vocab_size}
        generated = [] if rows.generated is None else rows.generated[r].tolist()
        if round_tokens is not None:
            drafts = [int(token) for token in round_tokens[r, 1 : max(step, 0) + 1]]
            seen |= set(drafts)
            generated += drafts
        penalty = rows.repetition_penalty[r]
        for token in seen:
            x = penalised[token]
            penalised[token] = x / penalty if x > 0 else x * penalty
        for token, count in Counter(t for t in generated if 0 <= t < vocab_size).items():
            if rows.frequency_penalty is not None:
                penalised[token] -= rows.frequency_penalty[r] * count
            if rows.presence_penalty is not None:
                penalised[token] -= rows.presence_penalty[r]

        token, weights = -1, torch.zeros(vocab_size, dtype=torch.float64)
        if known and float(rows.temperature[r]) == 0:
            token = int(penalised.argmax())
            weights[token] = 1.0
        elif known:
            filters = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
            weights = filtered_weights(penalised, *(of[r].item() for of in filters))
            first, second, *_ = random_words(seed, position, purpose)
            u = ((first << 32 | second) >> 11) * 2.0**-53
            cumulative = weights.cumsum(0)
            token = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
        probs = weights / weights.sum() if token >= 0 else weights
        out.token[w] = token
        out.logprob[w] = logprobs[token] if token >= 0 else math.nan
        out.logsumexp[w] = raw.double().logsumexp(0) if known else math.nan
        largest = [*logprobs.exp().topk(min(2, vocab_size)).values.tolist(), 0.0]
        out.confidence[w] = largest[0] - largest[1] if known else math.nan
        if as_probability and token >= 0:
            sampled = float(rows.temperature[r]) > 0
            out.confidence[w] = probs[token] if sampled else logprobs[token].exp()
        if out.probs is not None:
            out.probs[r * probs_by_step + step if probs_by_step else w] = probs
        if out.uniform is not None:
            words = random_words(seed, position, 2)
            out.uniform[w] = torch.tensor([(word >> 8) * 2.0**-24 for word in words[:2]])
        if out.top_ids is not None and out.top_logprobs is not None:
            out.top_ids[w], out.top_logprobs[w] = -1, -math.inf
            count = min(out.top_ids.shape[1], vocab_size) if known else 0
            order = raw.sort(descending=True, stable=True).indices[:count]
            out.top_ids[w, :count], out.top_logprobs[w, :count] = order, logprobs[order].float()
    return out


def draw(weights: Tensor, u: float) -> int:
    """The first token whose cumulative weight exceeds u times the total; never one of weight 0."""
    cumulative = weights.cumsum(dim=0)
    above = (cumulative > u * cumulative[-1]) & (weights > 0)
    return int(above.nonzero()[0] if above.any() else weights.nonzero()[-1])


def speculative_accept(
    draft_tokens: Tensor,
    draft_start_loc: Tensor,
    *,
    target_tokens: Tensor | None = None,
    draft_probs: Tensor | None = None,
    target_probs: Tensor | None = None,
    uniform: Tensor | None = None,
) -> tuple[list[int], list[int]]:
    """(num_accepted, next_token) of each sequence; see eecore.ops.speculative_accept."""
    num_accepted, next_token = [], []
    bounds = draft_start_loc.tolist()
    for seq, (begin, end) in enumerate(itertools.pairwise(bounds)):
        drafts = draft_tokens[begin:end].tolist()
        n = 0
        if target_tokens is not None:
            targets = target_tokens[begin + seq : end + seq + 1].tolist()
            while n < len(drafts) and drafts[n] == targets[n]:
                n += 1
            token = targets[n]
        else:
            assert draft_probs is not None
            assert target_probs is not None
            assert uniform is not None
            q = draft_probs[begin:end].double()
            p = target_probs[begin + seq : end + seq + 1].double()
            u = uniform[begin + seq : end + seq + 1].tolist()
            while n < len(drafts) and u[n] * q[n, drafts[n]] < p[n, drafts[n]]:
                n += 1
            residual = (p[n] - q[n]).clamp(min=0) if n < len(drafts) else p[n]
            token = draw(residual if residual.sum() > 0 else p[n], u[-1])
        num_accepted.append(n)
        next_token.append(token)
    return num_accepted, next_token


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm weight * T(x / rms(x)) in dtype T of a model, products rounded to T; in float64."""
    wide = x.double()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight.double() * scaled.to(x.dtype).double()).to(x.dtype)


def pack_weight(blocks: Tensor, format: str) -> Tensor:
    """The numbers of a file's blocks by the format's own package, in float32."""
    kind = gguf.GGMLQuantizationType[format]
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(blocks.contiguous().numpy(), kind))


def in_8_bits(x: Tensor, columns: int) -> Tensor:
    """Round x [..., n]: whole numbers times 1/127 of the largest of each so many columns."""
    blocks = x.float().unflatten(-1, (-1, columns))
    largest = blocks.abs().amax(-1, keepdim=True)
    to_q = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0)
    return ((blocks * to_q).round().double() * (largest / 127).double()).flatten(-2)


def linear(x: Tensor, weight: Tensor, scale: Tensor | None, table: Tensor | None = None) -> Tensor:
    """x @ weight.T in float64; with a scale, x is in 16 bits and the weight int8 rows times scale.

    With a table x is in 8 bits, with a scale for each block of the row's format.
    """
    if table is not None:
        rows = ops.unpack_weight(weight, table).double()
        formats = [ops.BLOCK_FORMATS[code] for code in (table >> 4 & 15).tolist()]
        sizes = torch.tensor([block_sizes(format)[0] for format in formats])
        result = torch.empty(*x.shape[:-1], len(rows), dtype=torch.float64)
        for columns in sizes.unique().tolist():
            result[..., sizes == columns] = in_8_bits(x, columns) @ rows[sizes == columns].T
        return result
    if scale is None:
        return x.double() @ weight.double().T
    largest = x.float().abs().amax(-1, keepdim=True)
    to_q = torch.where(largest > 0, torch.full_like(largest, 32767) / largest, 0)
    whole = (x.float() * to_q).round().double()
    return (whole @ weight.double().T) * (largest.double() / 32767) * scale.double()


def exit_confidence_softmax(
    hidden: Tensor,
    norm_weight: Tensor | None,
    lm_head: Tensor,
    eps: float,
    *,
    lm_head_scale: Tensor | None = None,
    lm_head_table: Tensor | None = None,
    multiplier: float = 1.0,
    soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(gap of the two largest probabilities, log-sum-exp, logits), all float64."""
    x = hidden if norm_weight is None else rms_norm(hidden, norm_weight, eps)
    logits = soft_capped(linear(x, lm_head, lm_head_scale, lm_head_table) * multiplier, soft_cap)
    top = logits.softmax(-1).topk(2, dim=-1).values
    return top[:, 0] - top[:, 1], logits.logsumexp(-1), logits


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap); x as it is where the cap is 0."""
    return cap * torch.tanh(x / cap) if cap else x


def rotary(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotary embedding of x: float64 [num_tokens, num_heads, head_dim] in its first rotary_dim."""
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin.double()[positions, None].split_with_sizes((half, half), dim=-1)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def kv_fill(
    hidden: Tensor,
    exit_layer: Tensor,
    norm_weight: Tensor | None,
    kv: ops.Matrix,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_norm_weight: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    eps: float = 1e-6,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    layer_ropes: Tensor | None = None,
    loop_slots: int = 0,
    layer_numbers: Tensor | None = None,
) -> None:
    """Write what the layers from each row's exit layer on would have written."""
    num_layers, num_pages, page_size, num_kv_heads, head_dim = k_cache.shape
    num_loops = num_pages * page_size // loop_slots if loop_slots else 1
    for loop, layer in itertools.product(range(num_loops), range(num_layers)):
        slots = torch.where(slot_mapping < 0, -1, slot_mapping + loop * loop_slots)
        slots[slots >= num_pages * page_size] = -1
        number = layer if layer_numbers is None else int(layer_numbers[layer])
        needed = exit_layer <= num_layers * loop + (0 if loop_slots else number)
        rows = (needed & (slots >= 0)).nonzero().flatten()
        x = hidden[rows]
        if norm_weight is not None:
            x = rms_norm(x, norm_weight[layer], eps)
        matrix = kv.unbind()[layer]
        projected = linear(x, matrix.weight, matrix.scale, matrix.table)
        if kv.bias is not None:
            projected = projected + kv.bias[layer].double()
        projected = projected.to(hidden.dtype).view(len(rows), 2, num_kv_heads, head_dim)
        k, v = projected[:, 0].double(), projected[:, 1]
        if k_norm_weight is not None:
            k = norm_heads(k, k_norm_weight[layer], eps)
        if positions is not None and cos_sin is not None:
            table = cos_sin if layer_ropes is None else cos_sin[layer_ropes[layer, 1]]
            k = rotary(k, positions[rows], table)
        page, offset = slots[rows] // page_size, slots[rows] % page_size
        scales = (None if each is None else each[layer] for each in (key_scales, value_scales))
        for cache, x, scale in zip((k_cache, v_cache), (k, v), scales, strict=True):
            cache[layer, page, offset] = stored(x, cache.dtype, scale).to(cache.dtype)


def to_float8(x: Tensor, scales: Tensor | None = None) -> Tensor:
    """Keys or values [..., num_kv_heads, head_dim] as a cache in float8 holds them."""
    if scales is not None:
        x = x.float() * (1.0 / scales[:, None])
    return x.float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def stored(x: Tensor, dtype: torch.dtype, scales: Tensor | None) -> Tensor:
    """Keys or values as a cache of the dtype stores them, in float64; not rounded to floats."""
    return (to_float8(x, scales) if dtype == torch.float8_e4m3fn else x).double()


def _scaled(x: Tensor, scales: Tensor | None) -> Tensor:
    """The values of [..., num_kv_heads, head_dim] of a cache times their scales, in float64."""
    return x.double() if scales is None else x.double() * scales.double()[:, None]


def norm_and_rotate(
    x: Tensor, weight: Tensor | None, positions: Tensor | None, cos_sin: Tensor | None, eps: float
) -> Tensor:
    """Head norm and rotary embedding in float64, each where it is asked for."""
    x = x.double()
    if weight is not None:
        x = norm_heads(x, weight, eps)
    if positions is not None and cos_sin is not None:
        x = rotary(x, positions, cos_sin)
    return x


def norm_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of heads, float64 [num_tokens, num_heads, head_dim], or of all of a token's at once,
    as the weight has it."""
    heads = x if len(weight) == x.shape[-1] else x.flatten(1)
    heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * weight.double()
    return heads.view(x.shape)


def append_kv(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    q_cos_sin: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """New (q, k_cache, v_cache) in float64; see eecore.ops.append_kv."""
    if q is not None:
        table = cos_sin if q_cos_sin is None else q_cos_sin
        q = norm_and_rotate(q, q_norm_weight, positions, table, eps)
    k = norm_and_rotate(k, k_norm_weight, positions, cos_sin, eps)
    new_k, new_v = k_cache.double(), v_cache.double()
    written = slot_mapping >= 0
    page = slot_mapping[written] // k_cache.shape[1]
    offset = slot_mapping[written] % k_cache.shape[1]
    new_k[page, offset] = stored(k[written], k_cache.dtype, key_scales)
    new_v[page, offset] = stored(v[written], v_cache.dtype, value_scales)
    return q, new_k, new_v


def position_bucket(
    relative: Tensor, num_buckets: int, max_distance: int, bidirectional: bool
) -> Tensor:
    """T5's bucket of each relative position (key - query), its logarithm in float32."""
    num_sided = num_buckets // 2 if bidirectional else num_buckets
    max_exact = num_sided // 2
    distance = relative.abs() if bidirectional else (-relative).clamp(min=0)
    log = (distance.clamp(min=1).float() / max_exact).log()
    steps = log / math.log(max_distance / max_exact) * (num_sided - max_exact)
    far = (max_exact + steps.long()).clamp(max=num_sided - 1)
    bucket = torch.where(distance < max_exact, distance, far)
    return bucket + num_sided * (relative > 0) if bidirectional else bucket


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
    soft_cap: float = 0.0,
    causal: bool = True,
    sliding_window: int = 0,
    position_bias: Tensor | None = None,
    max_distance: int = 128,
    bidirectional: bool = False,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """Attention sequence by sequence in float64; see eecore.ops.paged_attention."""
    page_size = k_cache.shape[1]
    group_size = q.shape[1] // k_cache.shape[2]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    bounds = query_start_loc.tolist()
    for seq, (begin, end) in enumerate(itertools.pairwise(bounds)):
        length = int(seq_lens[seq])
        positions = length - (end - begin) + torch.arange(end - begin, device=q.device)
        keys = torch.arange(length, device=q.device)
        seen = torch.ones(end - begin, length, dtype=torch.bool, device=q.device)
        if causal:
            seen &= keys <= positions[:, None]
        if sliding_window:
            seen &= keys - positions[:, None] > -sliding_window
        used = seen.any(0).nonzero().flatten()
        rows = seen.any(1).nonzero().flatten()
        pages = page_table[seq, used // page_size].long()
        k, v = (
            _scaled(cache[pages, used % page_size], scales).repeat_interleave(group_size, dim=1)
            for cache, scales in ((k_cache, key_scales), (v_cache, value_scales))
        )
        scores = torch.einsum("qhd,khd->hqk", q[begin:end][rows].double(), k) * scale
        scores = soft_capped(scores, soft_cap)
        if position_bias is not None:
            relative = used - positions[rows, None]
            num_buckets = position_bias.shape[0]
            bucket = position_bucket(relative.cpu(), num_buckets, max_distance, bidirectional)
            scores = scores + position_bias.double()[bucket.to(q.device)].permute(2, 0, 1)
        unseen = ~seen[rows][:, used]
        scores = scores.masked_fill(unseen, -torch.inf)
        shut_out = (scores == -torch.inf).all(-1, keepdim=True)
        weights = scores.softmax(-1).masked_fill(shut_out, 0.0)
        out[begin:end][rows] = _weighted_values(weights, v, unseen)
    return out


def _weighted_values(weights: Tensor, v: Tensor, unseen: Tensor) -> Tensor:
    """weights [heads, queries, keys] times v [keys, heads, head_dim], but for unseen keys."""
    if v.isfinite().all():
        return torch.einsum("hqk,khd->qhd", weights, v)
    products = weights.permute(1, 2, 0)[..., None] * v  # [queries, keys, heads, head_dim]
    return products.masked_fill(unseen[..., None, None], 0.0).sum(1)


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    *,
    weight_scale: Tensor | None = None,
    weight_table: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    bias: Tensor | None = None,
    activation: str | None = None,
    multiplier: float = 1.0,
    soft_cap: float = 0.0,
    residual: Tensor | None = None,
) -> Tensor:
    """Norm, linear layer with activation, residual, rounded to x's dtype each; see eecore.ops."""
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    projected = linear(x, weight, weight_scale, weight_table)
    if bias is not None:
        projected = projected + bias.double()
    projected = projected.to(x.dtype)
    if activation == "relu":
        projected = projected.relu()
    projected = (projected.double() * multiplier).to(x.dtype)
    projected = soft_capped(projected.double(), soft_cap).to(x.dtype)
    return projected if residual is None else projected + residual


def add_normed(
    x: Tensor, norm_weight: Tensor, residual: Tensor | None, eps: float, multiplier: float
) -> Tensor:
    """Norm, its multiple and the sum, rounded to x's dtype each; see eecore.ops.add_normed."""
    given = rms_norm(x, norm_weight, eps).double() * multiplier
    return given.to(x.dtype) if residual is None else residual + given.to(x.dtype)


def skinny_gated_linear(
    x: Tensor,
    weight: Tensor,
    *,
    weight_scale: Tensor | None = None,
    weight_table: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    bias: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """activation(gate) * up, each rounded to x's dtype; see eecore.ops.skinny_gated_linear."""
    projected = skinny_linear(
        x,
        weight,
        weight_scale=weight_scale,
        weight_table=weight_table,
        norm_weight=norm_weight,
        eps=eps,
        bias=bias,
    )
    gate, up = projected.chunk(2, dim=-1)
    return activate_gate(gate, activation) * up


def activate_gate(gate: Tensor, activation: str) -> Tensor:
    """The activation of a gate in float64, rounded to the gate's dtype."""
    wide = gate.double()
    if activation == "silu":
        return torch.nn.functional.silu(wide).to(gate.dtype)
    tanh = torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))
    return (0.5 * wide * (1 + tanh)).to(gate.dtype)


def _of_matrix(matrix: ops.Matrix) -> dict[str, Any]:
    """One layer's matrix, as arguments of skinny_linear."""
    return {
        "weight": matrix.weight,
        "bias": matrix.bias,
        "weight_scale": matrix.scale,
        "weight_table": matrix.table,
    }


def decoder_layers(
    hidden: Tensor,
    weights: ops.DecoderWeights,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    page_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    begin_layer: int,
    end_layer: int,
    scale: float,
    eps: float = 1e-6,
    sliding_window: Tensor | None = None,
    skip_attention: Tensor | None = None,
    skip_mlp: Tensor | None = None,
    cross: ops.CrossAttention | None = None,
    position_bias: Tensor | None = None,
    max_distance: int = 128,
    activation: str = "silu",
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    layer_ropes: Tensor | None = None,
    residual_multiplier: float = 1.0,
    soft_cap: float = 0.0,
    causal: bool = True,
) -> Tensor:
    """The residual stream after the layers; keys and values are written in place."""
    dtype = hidden.dtype
    num_kv_heads, head_dim = k_cache.shape[-2:]
    layers = weights.unbind()

    def onto(hidden: Tensor, x: Tensor, matrix: ops.Matrix, norm: Tensor | None) -> Tensor:
        if norm is not None:
            given = skinny_linear(x, **_of_matrix(matrix))
            return add_normed(given, norm, hidden, eps, residual_multiplier)
        multiplied = {"multiplier": residual_multiplier, "residual": hidden}
        return skinny_linear(x, **_of_matrix(matrix), **multiplied)

    for layer in range(begin_layer, end_layer):
        w = layers[layer]
        scales = {
            name: None if each is None else each[layer]
            for name, each in (("key_scales", key_scales), ("value_scales", value_scales))
        }
        if skip_attention is None or not skip_attention[layer]:
            qkv = skinny_linear(
                hidden, norm_weight=w.attention_norm, eps=eps, **_of_matrix(w.qkv)
            ).unflatten(1, (-1, head_dim))
            num_q_heads = qkv.shape[1] - 2 * num_kv_heads
            q, k, v = qkv.split((num_q_heads, num_kv_heads, num_kv_heads), dim=1)
            rotated, new_k, new_v = append_kv(
                q,
                k,
                v,
                k_cache[layer],
                v_cache[layer],
                slot_mapping,
                positions,
                cos_sin if layer_ropes is None else cos_sin[layer_ropes[layer, 1]],
                w.q_norm,
                w.k_norm,
                eps,
                q_cos_sin=None if layer_ropes is None else cos_sin[layer_ropes[layer, 0]],
                **scales,
            )
            assert rotated is not None
            k_cache[layer], v_cache[layer] = (new.to(k_cache.dtype) for new in (new_k, new_v))
            attended = paged_attention(
                rotated.to(dtype),
                k_cache[layer],
                v_cache[layer],
                page_table,
                seq_lens,
                query_start_loc,
                scale=scale,
                soft_cap=soft_cap,
                causal=causal,
                sliding_window=0 if sliding_window is None else int(sliding_window[layer]),
                position_bias=position_bias,
                max_distance=max_distance,
                **scales,
            )
            attended = attended.to(dtype).flatten(1)
            hidden = onto(hidden, attended, w.o, w.attention_post_norm)
            if cross is not None:
                cross_q, cross_o = cross.q.unbind()[layer], cross.o.unbind()[layer]
                q = skinny_linear(
                    hidden, norm_weight=cross.norm[layer], eps=eps, **_of_matrix(cross_q)
                )
                attended = paged_attention(
                    q.unflatten(1, (-1, head_dim)),
                    k_cache[layer],
                    v_cache[layer],
                    cross.page_table,
                    cross.seq_lens,
                    query_start_loc,
                    scale=scale,
                    causal=False,
                    **scales,
                )
                attended = attended.to(dtype).flatten(1)
                hidden = onto(hidden, attended, cross_o, None)
        if skip_mlp is None or not skip_mlp[layer]:
            into_inner = skinny_linear if activation == "relu" else skinny_gated_linear
            inner = into_inner(
                hidden,
                norm_weight=w.mlp_norm,
                eps=eps,
                activation=activation,
                **_of_matrix(w.gate_up),
            )
            hidden = onto(hidden, inner, w.down, w.mlp_post_norm)
    return hidden
