// sample_tokens: the vocabulary lies in slices, a block for each slice of a row, and a short
// sequence of kernels goes through it; what they know of a row and its slices lies in the
// workspace.
//
//   measure  largest logits and sums of exp of each slice; logits as requests change them
//   weigh    the numbers of the raw distribution, greedy tokens, scaled logits; how many keys have
//            each first digit, and what they weigh
//   sift     filters' bounds to a digit: the sums of what stays for sure, and the keys left open
//   draw     a block for each row: the bounds among open keys, then the slice and the token that
//            the random number hits
//   probs    where distributions are asked for
//   top      where the most probable tokens are: of each slice, then of the row
//
// Which rows draw, and with what filters, is known on the device alone: kernels return at once for
// rows that have no need of them.
#pragma once

#include "eecore/sample_draw.cuh"
#include "eecore/sample_measure.cuh"
#include "eecore/sample_sift.cuh"
#include "eecore/sample_top.cuh"
#include "eecore/sample_weigh.cuh"
