// sample_tokens: the vocabulary is cut into slices, with a block for each slice of a row, and a
// short sequence of kernels processes it. The workspace holds what the kernels find out about a row
// and its slices.
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
// Which rows draw, and with which filters, is known only on the device: kernels return at once for
// rows that do not need them.
#pragma once

#include "eecore/sample_draw.cuh"
#include "eecore/sample_measure.cuh"
#include "eecore/sample_sift.cuh"
#include "eecore/sample_top.cuh"
#include "eecore/sample_weigh.cuh"
