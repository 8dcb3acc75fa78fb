"""The faults that ``tests/mutations.py`` plants, one at a time, and the tests run for each.

Every fault is one that such code suffers, and that a test can find: what behaves the same is no
fault. The old text occurs exactly once in its file, which ``tests/test_mutants.py`` checks, so that
a fault does not get lost as the code changes. It holds no comment, for these change more often.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MUTANTS", "Mutant"]


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Args:
        name: what tables and ``--only`` call it.
        file: the file that it is planted in, from the root of the repository.
        old: the text that it replaces.
        new: the text in its place.
        tests: arguments of pytest: files or folders, and perhaps ``-k``.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str

    @property
    def is_emulated(self) -> bool:
        """Whether the fault is in a CUDA kernel, which the emulator runs."""
        return self.file.startswith(("include/", "csrc/cuda/"))

    @property
    def is_compiled(self) -> bool:
        return self.file.startswith(("include/", "csrc/"))


CPU_KERNELS = (
    Mutant(
        "attention-page-edge",
        "csrc/cpu/paged_attention.cpp",
        "min_of(end, j + params.page_size - offset);",
        "min_of(end, j + params.page_size - offset + 1);",
        "tests/ops/test_paged_attention.py -k cpu",
    ),
    Mutant(
        "attention-group-head",
        "csrc/cpu/paged_attention.cpp",
        "(tile.first_row + row) % tile.group_size);",
        "row % tile.group_size);",
        "tests/ops/test_paged_attention.py -k cpu",
    ),
    Mutant(
        "attention-split-not-rescaled",
        "csrc/cpu/paged_attention.cpp",
        "exp_at_most_one(broadcast(*total_maximum - base));",
        "broadcast(*total_maximum == -kInfinity ? 0.0f : 1.0f);",
        "tests/ops/test_paged_attention.py -k cpu",
    ),
    Mutant(
        "attention-panel-sums-in-another-order",
        "csrc/cpu/attention_rows.h",
        "return (place & 4) << 1 | (place & 8) >> 1 | (place & 1) << 1 | (place & 2) >> 1;",
        "return place;",
        "tests/ops/test_paged_attention.py -k 'cpu and company'",
    ),
    Mutant(
        "attention-value-scale-dropped",
        "csrc/cpu/paged_attention.cpp",
        "scale != nullptr ? *scale * M::kUnit : M::kUnit;",
        "M::kUnit;",
        "tests/across_ops/test_float8_caches.py -k cpu",
    ),
    Mutant(
        "rotary-tail-not-masked",
        "csrc/cpu/head_row.h",
        "store_partial(row + half + i, fma(y, cosine, x * sine), n);",
        "store(row + half + i, fma(y, cosine, x * sine));",
        "tests/ops/test_append_kv.py tests/ops/test_kv_fill.py -k cpu",
    ),
    Mutant(
        "kv-fill-layer-off-by-one",
        "csrc/cpu/kv_fill.cpp",
        "const int64_t needed = rows.counts[layer];",
        "const int64_t needed = rows.counts[layer > 0 ? layer - 1 : 0];",
        "tests/ops/test_kv_fill.py -k cpu",
    ),
    Mutant(
        "kv-fill-projection-not-rounded",
        "csrc/cpu/kv_fill.cpp",
        "    load_row(rounded, n, values);\n",
        "",
        "tests/ops/test_kv_fill.py -k cpu",
    ),
    Mutant(
        "softmax-second-of-earlier-tiles-lost",
        "csrc/cpu/exit_confidence_softmax.cpp",
        "partial->second = later.second > before ? later.second : before;",
        "partial->second = later.second;",
        "tests/ops/test_exit_confidence_softmax.py -k cpu",
    ),
    Mutant(
        "softmax-tail-of-vocabulary-not-masked",
        "csrc/cpu/exit_confidence_softmax.cpp",
        "for (int64_t i = n; i < whole; ++i) logits[i] = -kInfinity;",
        "for (int64_t i = n; i < whole; ++i) logits[i] = 0.0f;",
        "tests/ops/test_exit_confidence_softmax.py -k cpu",
    ),
    Mutant(
        "mlp-nan-becomes-zero",
        "csrc/cpu/exit_confidence_mlp.cpp",
        "x = x < 0.0f ? 0.0f : x;",
        "x = x > 0.0f ? x : 0.0f;",
        "tests/ops/test_exit_confidence_mlp.py -k cpu",
    ),
    Mutant(
        "accept-mask-status-not-sticky",
        "csrc/cpu/accept_mask.cpp",
        "    if (confident && !params.status[row]) {\n      params.status[row] = 1;",
        "    params.status[row] = confident;\n    if (confident) {",
        "tests/ops/test_accept_mask.py -k cpu",
    ),
    Mutant(
        "exit-rows-threshold-of-one-exits",
        "csrc/cpu/exit_rows.cpp",
        "if (threshold < 1.0f && confidence >= threshold)",
        "if (confidence >= threshold)",
        "tests/ops/test_exit_rows.py -k cpu",
    ),
    Mutant(
        "draft-of-no-probability-accepted",
        "csrc/cpu/accept_drafts.h",
        "static_cast<double>(q[at]) <\n",
        "static_cast<double>(q[at]) <=\n",
        "tests/ops/test_speculative_accept.py tests/ops/test_accept_round.py -k cpu",
    ),
    Mutant(
        "bonus-token-of-wrong-row",
        "csrc/cpu/accept_round.cpp",
        "    token = targets[accepted];\n",
        "    token = targets[num_drafts];\n",
        "tests/ops/test_accept_round.py -k cpu",
    ),
    Mutant(
        "acceptance-draws-with-the-token-purpose",
        "csrc/cpu/sample_tokens.cpp",
        "random_words(seed, position, kAcceptancePurpose);",
        "random_words(seed, position, params.purpose);",
        "tests/ops/test_sample_tokens.py -k cpu",
    ),
    Mutant(
        "presence-penalty-of-the-prompt",
        "csrc/cpu/sample_tokens.cpp",
        "visit_known(seen[i], false);",
        "visit_known(seen[i], true);",
        "tests/ops/test_sample_tokens.py -k cpu",
    ),
    Mutant(
        "top-k-drops-the-last",
        "csrc/cpu/logits_filters.h",
        "return key_of(value) <= last; });",
        "return key_of(value) < last; });",
        "tests/ops/test_sample_tokens.py -k cpu",
    ),
    Mutant(
        "k-quants-minimum-of-wrong-byte",
        "csrc/cpu/pack_weight.cpp",
        "(packed[i + 4] >> 4) | (packed[i] >> 6 << 4)",
        "(packed[i + 4] >> 4) | (packed[i - 4] >> 6 << 4)",
        "tests/ops/test_pack_weight.py tests/ops/test_unpack_weight.py -k cpu",
    ),
    Mutant(
        "round-slots-within-the-first-page",
        "csrc/cpu/begin_round.cpp",
        "pages[page] * size + at % size : -1;",
        "pages[page] * size + position % size + k : -1;",
        "tests/ops/test_begin_round.py -k cpu",
    ),
    Mutant(
        "compaction-leaves-lengths",
        "csrc/cpu/compact_rows.cpp",
        "  move_element(params.seq_lens, from, to);\n",
        "",
        "tests/ops/test_compact_rows.py -k cpu",
    ),
    Mutant(
        "keys-scaled-as-in-the-first-layer",
        "csrc/cpu/decoder_layers.cpp",
        "  append.cache_format = layer_format(params, layer);\n",
        "",
        "tests/across_ops/test_float8_caches.py -k cpu",
    ),
    Mutant(
        "multiplier-forgotten-beside-a-residual",
        "csrc/cpu/add_normed.cpp",
        "given : load_lanes(residual + i, lanes) + given,",
        "given : load_lanes(residual + i, lanes) + load_lanes(normed + i, lanes),",
        "tests/ops/test_add_normed.py -k cpu",
    ),
    Mutant(
        "row-without-a-check-is-picked",
        "csrc/cpu/select_rows.cpp",
        "params.thresholds[r] < __builtin_inff()",
        "params.thresholds[r] <= __builtin_inff()",
        "tests/ops/test_select_rows.py -k cpu",
    ),
    Mutant(
        "token-of-the-cut-vocabulary",
        "csrc/cpu/place_head.cpp",
        "is_cut ? params.vocabulary[token] : token;",
        "is_cut ? params.vocabulary[j] : token;",
        "tests/ops/test_place_head.py -k cpu",
    ),
    Mutant(
        "largest-of-all-vectors-but-one",
        "csrc/cpu/quantise_weight.cpp",
        "for (int i = 1; i < kVecs; ++i) most = max(most, block.v[i]);",
        "for (int i = 1; i < kVecs - 1; ++i) most = max(most, block.v[i]);",
        "tests/ops/test_quantise_weight.py -k cpu",
    ),
    Mutant(
        "row-of-the-range-unpacked-again",
        "csrc/cpu/unpack_weight.cpp",
        "row_place(params.table[row]);",
        "row_place(params.table[begin]);",
        "tests/ops/test_unpack_weight.py -k cpu",
    ),
    Mutant(
        "scale-of-the-first-token",
        "csrc/cpu/embed_tokens.cpp",
        "const float scale = params.scale[token];",
        "const float scale = params.scale[0];",
        "tests/ops/test_embed_tokens.py -k cpu",
    ),
    Mutant(
        "last-state-among-those-kept",
        "csrc/cpu/gather_states.cpp",
        "k + 1 < count ?",
        "k < count ?",
        "tests/ops/test_gather_states.py -k cpu",
    ),
    Mutant(
        "bias-of-the-gate-for-both-halves",
        "csrc/cpu/skinny_gated_linear.cpp",
        "gate_bias ? gate_bias + params.inner_size : nullptr;",
        "gate_bias;",
        "tests/ops/test_skinny_products.py -k 'cpu and gated'",
    ),
    Mutant(
        "residual-with-the-stride-of-the-output",
        "csrc/cpu/skinny_linear.cpp",
        "residual + token * params.residual_stride + row",
        "residual + token * params.out_stride + row",
        "tests/across_ops/test_random_calls.py -k 'cpu and skinny_linear'",
    ),
    Mutant(
        "last-draft-left-out-of-the-ragged-rows",
        "csrc/cpu/begin_verification.cpp",
        "has_round && k <= last;",
        "has_round && k < last;",
        "tests/ops/test_begin_verification.py -k cpu",
    ),
)

CUDA_KERNELS = (
    Mutant(
        "verification-counts-without-barrier",
        "include/eecore/begin_verification.cuh",
        "count_of_warp[warp] = inclusive;\n    __syncthreads();",
        "count_of_warp[warp] = inclusive;",
        "tests/ops/test_begin_verification.py -k emulated",
    ),
    Mutant(
        "survivors-counted-without-barrier",
        "include/eecore/accept_rows.cuh",
        "survivors_per_warp[warp] = __popc(votes);\n    __syncthreads();",
        "survivors_per_warp[warp] = __popc(votes);",
        "tests/ops/test_accept_mask.py -k emulated",
    ),
    Mutant(
        "attention-merge-without-fence",
        "include/eecore/paged_attention.cuh",
        "    __threadfence();\n    is_last[0] =",
        "    is_last[0] =",
        "tests/emulator/test_attention_merge.py tests/emulator/test_races.py",
    ),
    Mutant(
        "attention-ring-filled-too-early",
        "include/eecore/paged_attention.cuh",
        "    least_stages = 1;\n    __syncthreads();",
        "    least_stages = 1;",
        "tests/emulator/test_wide_attention.py",
    ),
    Mutant(
        "one-draft-too-many",
        "include/eecore/append_drafts.cuh",
        "&& step + 1 < params.most[row];",
        "&& step < params.most[row];",
        "tests/ops/test_append_drafts.py -k emulated",
    ),
    Mutant(
        "round-without-its-own-key",
        "include/eecore/begin_round.cuh",
        "max(position + params.own_key, int64_t{1})",
        "max(position, int64_t{1})",
        "tests/ops/test_begin_round.py -k emulated",
    ),
    Mutant(
        "accepted-drafts-of-later-warps",
        "include/eecore/accept_drafts.cuh",
        "return first + __ffs(static_cast<int>(refused)) - 1;",
        "return __ffs(static_cast<int>(refused)) - 1;",
        "tests/ops/test_speculative_accept.py tests/ops/test_accept_round.py -k emulated",
    ),
    Mutant(
        "round-leaves-a-token-too-many",
        "include/eecore/accept_round.cuh",
        "params.next_left[row] = params.left[row] - emitted;",
        "params.next_left[row] = params.left[row] - accepted;",
        "tests/ops/test_accept_round.py -k emulated",
    ),
    Mutant(
        "target-distributions-of-wrong-rows",
        "include/eecore/speculative_accept.cuh",
        "params.target_probs + (first + seq) * vocab_size;",
        "params.target_probs + first * vocab_size;",
        "tests/ops/test_speculative_accept.py -k emulated",
    ),
    Mutant(
        "head-norm-of-half-the-lanes",
        "include/eecore/append_kv.cuh",
        "for (int distance = at.num_lanes / 2; distance > 0; distance /= 2) {",
        "for (int distance = at.num_lanes / 2; distance > 1; distance /= 2) {",
        "tests/ops/test_append_kv.py -k emulated",
    ),
    Mutant(
        "embedding-of-the-first-source-missed",
        "include/eecore/embed_tokens.cuh",
        "return source < 0 ? params.token_ids[row]",
        "return source <= 0 ? params.token_ids[row]",
        "tests/ops/test_embed_tokens.py -k emulated",
    ),
    Mutant(
        "state-after-the-last-row",
        "include/eecore/gather_states.cuh",
        "if (token >= *params.num_tokens) {",
        "if (token > *params.num_tokens) {",
        "tests/ops/test_gather_states.py -k emulated",
    ),
    Mutant(
        "sampling-sum-not-rescaled",
        "include/eecore/sample_measure.cuh",
        "  numbers.sum *= expf(before - base);\n",
        "",
        "tests/ops/test_sample_tokens.py -k emulated",
    ),
    Mutant(
        "carry-of-masses-lost",
        "include/eecore/sample_rows.cuh",
        "  if (before + of_low < before) ++of_high;\n",
        "",
        "tests/ops/test_sample_tokens.py -k emulated",
    ),
    Mutant(
        "cosine-tail-of-the-row-not-masked",
        "include/eecore/exit_confidence_cosine.cuh",
        "load_pack(hidden + first, n - first, hidden_aligned)",
        "load_pack(hidden + first, int64_t{kSize}, hidden_aligned)",
        "tests/ops/test_exit_confidence_cosine.py -k emulated",
    ),
    Mutant(
        "kv-fill-order-written-by-all-layers",
        "include/eecore/kv_fill.cuh",
        "(other_layer == exit_layer && other < row)",
        "(other_layer == exit_layer && other <= row)",
        "tests/ops/test_kv_fill.py -k emulated",
    ),
    Mutant(
        "states-of-the-last-row-not-copied",
        "csrc/cuda/append_drafts.cu",
        "static_cast<unsigned>(1 + num_states)",
        "static_cast<unsigned>(num_states > 0 ? num_states : 1)",
        "tests/ops/test_append_drafts.py -k emulated",
    ),
)

CHECKS = (
    Mutant(
        "overlap-with-an-earlier-output",
        "csrc/check.cpp",
        "if (!is_written && !other.is_written) continue;",
        "if (!is_written) continue;",
        "tests/across_ops/test_op_refusals.py",
    ),
    Mutant(
        "padded-rows-taken-for-contiguous",
        "csrc/check.cpp",
        "tensor.size(i) != 1 && tensor.stride(i) != expected_stride",
        "tensor.size(i) != 1 && tensor.stride(i) < expected_stride",
        "tests/across_ops/test_op_refusals.py",
    ),
    Mutant(
        "larger-tensors-than-bound",
        "csrc/check.cpp",
        "ok = size == binding->size;",
        "ok = size >= binding->size;",
        "tests/across_ops/test_op_refusals.py",
    ),
    Mutant(
        "query-heads-not-in-groups",
        "csrc/ops/paged_attention.cpp",
        "check.require(num_kv_heads > 0 && num_q_heads % num_kv_heads == 0,",
        "check.require(num_kv_heads > 0,",
        "tests/across_ops/test_refused_values.py",
    ),
    Mutant(
        "slot-after-the-cache",
        "csrc/ops/kv_fill.cpp",
        'check["num_pages"] * params.page_size);',
        'check["num_pages"] * params.page_size + 1);',
        "tests/across_ops/test_refused_values.py",
    ),
    Mutant(
        "fewer-outputs-than-rows",
        "csrc/ops/sample_tokens.cpp",
        'check.require(index.has_value() || check["num_rows"] <= num_outputs,',
        "check.require(index.has_value() || num_outputs >= 0,",
        "tests/across_ops/test_refused_values.py",
    ),
    Mutant(
        "packed-rows-after-the-bytes",
        "csrc/packed_check.cpp",
        "check.require(end <= num_bytes, table_name,",
        "check.require(place.offset <= num_bytes, table_name,",
        "tests/across_ops/test_refused_values.py",
    ),
)

SCHEDULING = (
    Mutant(
        "page-freed-under-another-owner",
        "python/eecore/scheduling/pages.py",
        "            if owners[page] > count:\n",
        "            if owners[page] > count + 1:\n",
        "tests/scheduling/test_pages.py tests/scheduling/test_prefix_cache.py",
    ),
    Mutant(
        "shared-page-has-one-owner",
        "python/eecore/scheduling/pages.py",
        "self._owners[page] = self._owners.get(page, 0) + 1",
        "self._owners[page] = 1",
        "tests/scheduling/test_pages.py tests/scheduling/test_prefix_cache.py",
    ),
    Mutant(
        "approximate-pages-shared",
        "python/eecore/scheduling/pages.py",
        "takewhile(self.is_exact, sequence.pages)",
        "sequence.pages",
        "tests/scheduling/test_pages.py tests/scheduling/test_prefix_cache.py",
    ),
    Mutant(
        "oldest-kept-page-survives",
        "python/eecore/scheduling/pages.py",
        "self._kept.update(dict.fromkeys(reversed(kept)))",
        "self._kept.update(dict.fromkeys(kept))",
        "tests/scheduling/test_pages.py tests/scheduling/test_prefix_cache.py",
    ),
    Mutant(
        "page-key-without-the-pages-before",
        "python/eecore/scheduling/prefix_cache.py",
        'sha256((keys[-1] if keys else b"") + tokens)',
        "sha256(tokens)",
        "tests/scheduling/test_prefix_cache.py",
    ),
    Mutant(
        "half-full-page-published",
        "python/eecore/scheduling/prefix_cache.py",
        "count = min(sequence.num_computed, sequence.num_tokens) // self._page_size",
        "count = -(-min(sequence.num_computed, sequence.num_tokens) // self._page_size)",
        "tests/scheduling/test_prefix_cache.py",
    ),
    Mutant(
        "pages-leak-at-the-end",
        "python/eecore/scheduling/scheduler.py",
        "        del self.requests[sequence.request_id]\n        self.pages.release(sequence)\n",
        "        del self.requests[sequence.request_id]\n",
        "tests/scheduling/test_scheduler.py",
    ),
    Mutant(
        "oldest-preempted",
        "python/eecore/scheduling/scheduler.py",
        "youngest = self.running[-1]",
        "youngest = self.running[0]",
        "tests/scheduling/test_scheduler.py",
    ),
    Mutant(
        "crop-gives-back-a-page-in-use",
        "python/eecore/scheduling/scheduler.py",
        "keep = -(-sequence.num_computed // self.pages.page_size)",
        "keep = sequence.num_computed // self.pages.page_size",
        "tests/scheduling/test_scheduler.py",
    ),
    Mutant(
        "drafts-not-in-the-budget",
        "python/eecore/scheduling/scheduler.py",
        "budget -= 1 + drafts",
        "budget -= 1",
        "tests/scheduling/test_scheduler.py",
    ),
    Mutant(
        "whole-prompt-from-the-cache",
        "python/eecore/scheduling/sequence.py",
        "most, known = self.prefill_target - 1, len(self.prompt_logprobs)",
        "most, known = self.prefill_target, len(self.prompt_logprobs)",
        "tests/scheduling/test_prefix_cache.py",
    ),
    Mutant(
        "preemption-loses-sampled-tokens",
        "python/eecore/scheduling/sequence.py",
        "return self.num_tokens - 1 if self.output_ids else len(self.prompt_ids)",
        "return len(self.prompt_ids)",
        "tests/scheduling/test_scheduler.py tests/engine/test_engine.py",
    ),
    Mutant(
        "end-of-sequence-missed",
        "python/eecore/scheduling/sequence.py",
        "if not self.sampling.ignore_eos:",
        "if self.sampling.ignore_eos:",
        "tests/engine/test_engine.py",
    ),
)

DECODING = (
    Mutant(
        "verification-draws-as-drafts-do",
        "python/eecore/decoding/draft_step.py",
        "self._work(DRAWS_TOKEN, checked.positions, verify_draws)",
        "self._work(DRAWS_DRAFT, checked.positions, verify_draws)",
        "tests/planning/test_lookup.py tests/decoding/test_lossless_sampling.py",
    ),
    Mutant(
        "repetition-penalty-without-the-prompt",
        "python/eecore/decoding/sampling.py",
        "return {*sequence.prompt_ids, *sequence.output_ids}",
        "return {*sequence.output_ids}",
        "tests/decoding/test_penalties.py tests/decoding/test_sampling.py",
    ),
    Mutant(
        "frequency-penalty-of-the-prompt",
        "python/eecore/decoding/sampling.py",
        "(s.output_ids if s.sampling.counts_tokens else [] for s in sequences)",
        "([*s.prompt_ids, *s.output_ids] if s.sampling.counts_tokens else [] for s in sequences)",
        "tests/decoding/test_penalties.py tests/decoding/test_sampling.py",
    ),
    Mutant(
        "bias-of-the-row-before",
        "python/eecore/decoding/sampling.py",
        'zip(host.arrays["bias"], settings, strict=False)',
        'zip(host.arrays["bias"], settings[-1:] + settings[:-1], strict=False)',
        "tests/decoding/test_penalties.py tests/decoding/test_sampling.py",
    ),
    Mutant(
        "accepted-token-not-computed",
        "python/eecore/decoding/draft_outcomes.py",
        "sequence.num_computed + good,",
        "sequence.num_computed + accepted,",
        "tests/decoding/test_speculation.py",
    ),
    Mutant(
        "drafts-counted-at-full-depth",
        "python/eecore/decoding/draft_outcomes.py",
        "[path.num_layers] * accepted + [num_layers] * (good - accepted)",
        "[num_layers] * good",
        "tests/decoding/test_speculation.py",
    ),
    Mutant(
        "emitted-tokens-counted-as-accepted",
        "python/eecore/decoding/draft_outcomes.py",
        "drafted=drafted, accepted=accepted)",
        "drafted=drafted, accepted=good)",
        "tests/decoding/test_speculation.py",
    ),
    Mutant(
        "threshold-of-the-next-token",
        "python/eecore/decoding/exit_step.py",
        "t = len(sequence.output_ids) + row.pending",
        "t = len(sequence.output_ids) + row.pending + 1",
        "tests/decoding/test_confident_exit.py",
    ),
    Mutant(
        "replay-at-full-depth",
        "python/eecore/decoding/exit_step.py",
        "[confidence],\n                [exit_layer],",
        "[confidence],\n                [len(self._kv.layers)],",
        "tests/decoding/test_confident_exit.py tests/engine/test_engine.py",
    ),
    Mutant(
        "row-goes-on-over-old-pages",
        "python/eecore/decoding/memory.py",
        "if own != written[i]:",
        "if len(own) != len(written[i]):",
        "tests/decoding/test_programs.py tests/engine/test_engine.py",
    ),
    Mutant(
        "replay-takes-gaps-for-neighbours",
        "python/eecore/decoding/prefill.py",
        "(sequence[1:] != sequence[:-1]) | (positions[1:] != positions[:-1] + 1)",
        "sequence[1:] != sequence[:-1]",
        "tests/decoding/test_confident_exit.py tests/engine/test_engine.py",
    ),
    Mutant(
        "replayed-exits-not-filled",
        "python/eecore/decoding/prefill.py",
        "            self._fill(exiting, final, end)\n",
        "",
        "tests/decoding/test_confident_exit.py tests/engine/test_engine.py",
    ),
    Mutant(
        "batch-all-exits-one-by-one",
        "python/eecore/planning/route.py",
        'together=policy.batch == "all",',
        'together=policy.batch == "each",',
        "tests/decoding/test_confident_exit.py",
    ),
    Mutant(
        "guide-mask-of-the-draft-before",
        "python/eecore/planning/guided.py",
        "                masks[row] = self._mask(matcher)\n",
        "                masks[row] = masks[row - 1]\n",
        "tests/planning/test_guide.py",
    ),
    Mutant(
        "lookup-compares-a-token-too-late",
        "python/eecore/planning/ngrams.py",
        "tokens[place - 1 - length] == tokens[-1 - length]",
        "tokens[place - length] == tokens[-1 - length]",
        "tests/planning/test_lookup.py",
    ),
    Mutant(
        "draft-stop-moves-the-wrong-way",
        "python/eecore/planning/draft_stop.py",
        "easy = 0.0 if drafted == num_drafts else -0.01",
        "easy = 0.0 if drafted == num_drafts else 0.01",
        "tests/decoding/test_speculation.py",
    ),
    Mutant(
        "prompt-scored-by-its-own-token",
        "python/eecore/decoding/prompt_logprobs.py",
        "sequence.prompt_ids[begin + 1 : stop + 1]",
        "sequence.prompt_ids[begin:stop]",
        "tests/decoding/test_prompt_logprobs.py",
    ),
)

ENGINE = (
    Mutant(
        "stop-string-across-tokens-missed",
        "python/eecore/engine/text.py",
        "search_from = max(0, len(before.text) - self._longest + 1)",
        "search_from = len(before.text)",
        "tests/engine/test_engine.py",
    ),
    Mutant(
        "beginning-of-a-stop-string-shown",
        "python/eecore/engine/text.py",
        "range(min(len(stop) - 1, len(text)), longest, -1)",
        "range(min(len(stop) - 2, len(text)), longest, -1)",
        "tests/engine/test_engine.py",
    ),
    Mutant(
        "tokens-after-the-end-kept",
        "python/eecore/engine/commit.py",
        "outcome.keep(added)",
        "outcome.keep(added + 1)",
        "tests/engine/test_engine.py tests/decoding/test_speculation.py",
    ),
    Mutant(
        "early-exits-count-as-exact",
        "python/eecore/engine/commit.py",
        "or lacks_keys or depth < self._num_layers:",
        "or lacks_keys:",
        "tests/scheduling/test_prefix_cache.py tests/engine/test_engine.py",
    ),
    Mutant(
        "pages-of-rejected-drafts-kept",
        "python/eecore/engine/commit.py",
        "if surplus > 0 and output is None and sequence.max_drafts and sequence not in going_on:",
        "if False:",
        "tests/engine/test_engine.py tests/decoding/test_speculation.py",
    ),
    Mutant(
        "token-after-the-vocabulary-taken",
        "python/eecore/engine/intake.py",
        "not 0 <= number < vocab_size:",
        "not 0 <= number <= vocab_size:",
        "tests/engine/test_engine.py",
    ),
    Mutant(
        "pages-of-a-failure-stay-shared",
        "python/eecore/engine/commit.py",
        "pages.forget(sequence.pages)",
        "pages.publish(sequence)",
        "tests/engine/test_faults.py tests/scheduling/test_prefix_cache.py",
    ),
    Mutant(
        "outcomes-of-halves-swapped",
        "python/eecore/engine/faults.py",
        "[*_in_halves(run, works[:middle]), *_in_halves(run, works[middle:])]",
        "[*_in_halves(run, works[middle:]), *_in_halves(run, works[:middle])]",
        "tests/engine/test_faults.py",
    ),
    Mutant(
        "request-larger-than-the-cache",
        "python/eecore/engine/intake.py",
        "pages = -(-total // self._limits.page_size)",
        "pages = total // self._limits.page_size",
        "tests/engine/test_engine.py",
    ),
    Mutant(
        "last-position-of-the-context-refused",
        "python/eecore/engine/intake.py",
        "if total > config.max_position:",
        "if total >= config.max_position:",
        "tests/engine/test_engine.py tests/decoding/test_prompt_logprobs.py",
    ),
    Mutant(
        "closed-stream-goes-on-in-the-engine",
        "python/eecore/engine/worker.py",
        "                    self.engine.cancel(name)\n",
        "                    pass\n",
        "tests/engine/test_worker.py tests/engine/test_async_engine.py",
    ),
)

SERVER = (
    Mutant(
        "prompt-counted-once-a-choice",
        "python/eecore/serving/asking.py",
        "for choice in self.choices[::per_prompt])",
        "for choice in self.choices)",
        "tests/serving/test_endpoints.py",
    ),
    Mutant(
        "choices-of-one-seed",
        "python/eecore/serving/asking.py",
        "seed=(sampling.seed + index) % SEEDS)",
        "seed=sampling.seed % SEEDS)",
        "tests/serving/test_endpoints.py",
    ),
    Mutant(
        "last-chunk-lost",
        "python/eecore/serving/answering.py",
        "text += shape.end([outputs[index] for index in sorted(outputs)])",
        "text = shape.end([outputs[index] for index in sorted(outputs)])",
        "tests/serving/test_endpoints.py tests/serving/test_streams.py",
    ),
    Mutant(
        "steps-that-wait-lost",
        "python/eecore/serving/answering.py",
        "                    steps.append((0, more))\n",
        "                    pass\n",
        "tests/serving/test_streams.py",
    ),
    Mutant(
        "full-queue-says-no-time",
        "python/eecore/serving/admission.py",
        "                retry_after=admission.retry_after,\n",
        "",
        "tests/serving/test_refusals.py tests/serving/test_server.py",
    ),
    Mutant(
        "seats-leak",
        "python/eecore/serving/admission.py",
        "self.taken -= seats.count",
        "self.taken -= 1",
        "tests/serving/test_endpoints.py",
    ),
    Mutant(
        "exit-errors-without-their-code",
        "python/eecore/serving/refusals.py",
        "if isinstance(error, ExitError):",
        "if type(error) is Exception:",
        "tests/serving/test_refusals.py tests/serving/test_depth.py",
    ),
    Mutant(
        "failed-request-blamed-on-the-client",
        "python/eecore/serving/refusals.py",
        'return ApiError(500, str(error), code="request_failed")',
        'return ApiError(400, str(error), code="request_failed")',
        "tests/serving/test_refusals.py tests/serving/test_server.py",
    ),
    Mutant(
        "tool-calls-though-cut-off",
        "python/eecore/serving/shapes.py",
        '"tool_calls" if has_calls and output.finish_reason == "stop" else output.finish_reason',
        '"tool_calls" if has_calls else output.finish_reason',
        "tests/serving/test_tool_calls.py",
    ),
    Mutant(
        "any-site-has-a-browser-ask",
        "python/eecore/serving/bodies.py",
        "(is_of_browser or kind not in UNSAID)",
        "kind not in UNSAID",
        "tests/serving/test_refusals.py",
    ),
    Mutant(
        "cut-off-response-is-complete",
        "python/eecore/serving/response_shape.py",
        'ended = "incomplete" if is_cut else "completed"',
        'ended = "completed"',
        "tests/serving/test_responses.py",
    ),
    Mutant(
        "message-goes-on-after-a-call",
        "python/eecore/serving/response_shape.py",
        '        closed = self._closed("completed")\n',
        "        closed = []\n",
        "tests/serving/test_responses.py",
    ),
    Mutant(
        "stop-token-in-the-text",
        "python/eecore/engine/commit.py",
        '                reason = "stop"\n            else:\n                num_text += 1\n',
        '                reason = "stop"\n                num_text += 1\n            else:\n'
        "                num_text += 1\n",
        "tests/engine/test_engine.py tests/serving/test_server.py",
    ),
)

READERS = (
    Mutant(
        "gguf-key-rows-not-reordered",
        "python/eecore/models/readers/gguf_checkpoint.py",
        '{"q_proj": self.config.num_q_heads, "k_proj": self.config.num_kv_heads}',
        '{"q_proj": self.config.num_q_heads}',
        "tests/models/test_gguf_convert.py tests/models/test_gguf_load.py -k 'not real'",
    ),
    Mutant(
        "gguf-tensors-not-aligned",
        "python/eecore/models/readers/gguf_file.py",
        "begin = -(-cursor.at // alignment) * alignment",
        "begin = cursor.at // alignment * alignment",
        "tests/models/test_gguf_file.py",
    ),
    Mutant(
        "gguf-tensors-overlap",
        "python/eecore/models/readers/gguf_file.py",
        "not reached <= start <= end - tensor.num_bytes",
        "not start <= end - tensor.num_bytes",
        "tests/models/test_gguf_file.py",
    ),
    Mutant(
        "sentencepiece-worst-merge-first",
        "python/eecore/models/readers/gguf_tokenizer.py",
        "(right, left, -np.array(scores)[made])",
        "(right, left, np.array(scores)[made])",
        "tests/models/test_gguf_convert.py -k 'not real'",
    ),
    Mutant(
        "other-default-of-rope-theta",
        "python/eecore/models/readers/families.py",
        "theta: float = 10000.0",
        "theta: float = 1000000.0",
        "tests/models/test_checkpoint.py tests/models/test_llama.py -k 'not real'",
    ),
    Mutant(
        "end-tokens-of-generation-config-missed",
        "python/eecore/models/readers/config_json.py",
        'given = generation.token_ids("eos_token_id") or fields.token_ids("eos_token_id")',
        'given = fields.token_ids("eos_token_id")',
        "tests/models/test_checkpoint.py",
    ),
    Mutant(
        "yarn-without-its-temperature",
        "python/eecore/models/readers/rope_fields.py",
        "return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0",
        "return 1.0",
        "tests/models/test_checkpoint.py tests/models/test_llama.py -k 'not real'",
    ),
    Mutant(
        "long-factors-in-short-texts",
        "python/eecore/models/rope.py",
        "divisors = rope.long_factors if is_long else rope.short_factors",
        "divisors = rope.long_factors",
        "tests/models/test_families.py -k longrope",
    ),
    Mutant(
        "whole-matrices-quantised-with-one-care",
        "python/eecore/models/weights.py",
        "part = replace(view, table=view.table[some], care=care, cares=())",
        "part = replace(view, table=view.table[some], cares=())",
        "tests/models/test_families.py -k fewer_bits",
    ),
    Mutant(
        "llama3-frequencies-blended-backwards",
        "python/eecore/models/rope.py",
        "blended = (1 - kept_share) * kept / rope.factor + kept_share * kept",
        "blended = kept_share * kept / rope.factor + (1 - kept_share) * kept",
        "tests/models/test_llama.py -k 'not real'",
    ),
    Mutant(
        "gptq-zero-points-off-by-one",
        "python/eecore/models/readers/gptq.py",
        "if self.zeros_less_one:",
        "if not self.zeros_less_one:",
        "tests/models/test_quantised_load.py",
    ),
    Mutant(
        "awq-outputs-in-another-order",
        "python/eecore/models/readers/awq.py",
        "PLACES = (0, 4, 1, 5, 2, 6, 3, 7)",
        "PLACES = (0, 2, 4, 6, 1, 3, 5, 7)",
        "tests/models/test_quantised_load.py",
    ),
    Mutant(
        "half-a-character-shown",
        "python/eecore/models/text/tokenizer.py",
        "if text.endswith(REPLACEMENT) and not whole:",
        "if text == REPLACEMENT and not whole:",
        "tests/models/test_tokenizer.py -k 'not real'",
    ),
    Mutant(
        "trained-head-taken-for-tied",
        "python/eecore/models/readers/checkpoint.py",
        "return config if tied else replace(config, tie_word_embeddings=False)",
        "return config",
        "tests/models/test_checkpoint.py",
    ),
    Mutant(
        "template-blocks-keep-their-newlines",
        "python/eecore/template_process.py",
        "trim_blocks=True,",
        "trim_blocks=False,",
        "tests/models/test_chat_template.py",
    ),
    Mutant(
        "template-json-in-ascii",
        "python/eecore/template_process.py",
        "ensure_ascii: bool = False,",
        "ensure_ascii: bool = True,",
        "tests/models/test_chat_template.py",
    ),
)

TRAINING = (
    Mutant(
        "pieces-of-a-batch-weigh-alike",
        "python/eecore/lab/training/early_exit_loss.py",
        "return total / (len(self.tokens) if self.count is None else self.count)",
        "return total / max(1, len(self.tokens))",
        "tests/lab/training/test_packing.py",
    ),
    Mutant(
        "exits-weigh-alike",
        "python/eecore/lab/training/early_exit_loss.py",
        "total = total + weights[layer] * loss",
        "total = total + loss",
        "tests/lab/training/test_early_exit_loss.py",
    ),
    Mutant(
        "the-first-step-learns-nothing",
        "python/eecore/lab/training/recipe.py",
        "return self.learning_rate * (step + 1) / self.warmup_steps",
        "return self.learning_rate * step / self.warmup_steps",
        "tests/lab/training/test_recipe.py",
    ),
    Mutant(
        "packed-texts-see-each-other",
        "python/eecore/lab/training/data.py",
        "if any(len(row) > 1 for row in packed):",
        "if False:",
        "tests/lab/training/test_packing.py",
    ),
    Mutant(
        "a-piece-drops-layers-of-its-own",
        "python/eecore/lab/training/layer_dropout.py",
        "else kept_of_step[self._rows]",
        "else kept_of_step[: len(hidden)]",
        "tests/lab/training/test_packing.py",
    ),
    Mutant(
        "gradients-of-processes-stay-means",
        "python/eecore/lab/training/trainer.py",
        "loss * (self.args.gradient_accumulation_steps * self.args.world_size)",
        "loss * self.args.gradient_accumulation_steps",
        "tests/lab/training/test_processes.py",
    ),
)

HEADS = (
    Mutant(
        "first-embedding-kept",
        "python/eecore/heads/mtp.py",
        "embedded.index_fill_(0, positions.starts, 0.0)",
        "embedded.index_fill_(0, positions.starts, 1.0)",
        "tests/heads/test_drafts.py -k mtp",
    ),
    Mutant(
        "draft-tokens-without-their-rows",
        "python/eecore/heads/files.py",
        'tokens = torch.arange(size) + files.tensor("d2t").long()',
        'tokens = files.tensor("d2t").long()',
        "tests/heads",
    ),
    Mutant(
        "residual-of-another-layer",
        "python/eecore/heads/eagle.py",
        "if self.settings.norm_before_residual:",
        "if not self.settings.norm_before_residual:",
        "tests/heads/test_drafts.py",
    ),
    Mutant(
        "states-a-layer-early",
        "python/eecore/heads/block_file.py",
        "return tuple(layer + kind.after for layer in named)",
        "return tuple(layer or kind.after for layer in named)",
        "tests/heads/test_drafts.py",
    ),
    Mutant(
        "keys-of-a-head-in-float8",
        "python/eecore/models/network.py",
        "return network.dtype if dtype == torch.float8_e4m3fn else dtype",
        "return dtype",
        "tests/heads/test_drafts.py",
    ),
    Mutant(
        "pages-without-a-heads-keys-are-shared",
        "python/eecore/engine/commit.py",
        "lacks_keys = self._keyed and not draft.route.fills_head",
        "lacks_keys = False",
        "tests/heads/test_drafts.py",
    ),
    Mutant(
        "a-block-past-its-slots",
        "python/eecore/heads/block_drafts.py",
        "slots -= 1  # for its block, which begins after the last verified position",
        "slots -= 0  # for its block, which begins after the last verified position",
        "tests/heads/test_drafts.py tests/decoding/test_head_drafts.py",
    ),
)

MUTANTS = (
    *SCHEDULING,
    *DECODING,
    *ENGINE,
    *SERVER,
    *READERS,
    *CHECKS,
    *CPU_KERNELS,
    *CUDA_KERNELS,
    *TRAINING,
    *HEADS,
)
