#!/usr/bin/env python3
"""Plant one fault at a time into the kernels of the operators, and show which ones their tests catch.

    .venv/bin/python scripts/mutants.py                             # all; results are kept, so it may be interrupted
    .venv/bin/python scripts/mutants.py --operator sequence_conv --limit 3

Works on a copy of the files, in build/mutants. CUDA kernels are tested in the CPU emulation. Barriers are not among the
faults: tests/plugins/test_cuda_races.py leaves out each of them. A result is taken again from results.json as long as
neither the native sources nor the tests that decide it change. Exit status 1 if a fault survives, does not compile or
does not apply any more.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from effexport.plugins.ops import OPS

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "mutants"
TREE = FOLDER / "tree"
RESULTS = FOLDER / "results.json"
LIBRARY = FOLDER / "library"
TIMEOUT_S = 1200
COMPILER_ERROR = re.compile(r"\.(?:cu|cc|h):\d+:\d+: error: .*")
CUDA_FILES = {"kernel_cuda.cu", "scratch.h", "tensor_cores.h", "features.h", "attention_slices.h", "split_halves.h"}
CUDA_FILES |= {"attention.h", "chunk.h", "tile.h", "token_by_token.h"}
# Shared code, and an operator whose tests should catch its faults.
TESTED_BY = {
    "native/attention.h": "masked_attention",
    "native/attention_slices.h": "masked_attention",
    "native/tile.h": "masked_attention",
    "native/linear_vectors.h": "quantized_linear",
    "native/simd.h": "quantized_linear",
    "native/split_halves.h": "iterative_pinv",
    "native/online_softmax.h": "masked_attention",
    "native/online_softmax_vectors.h": "masked_attention",
}


@dataclass(frozen=True)
class Mutant:
    """A fault: `new` in place of `old`, which is in the file once. file: below plugins/."""

    file: str
    old: str
    new: str

    @property
    def operator(self) -> str:
        return TESTED_BY.get(self.file, self.file.split("/")[0])

    @property
    def on_cuda(self) -> bool:
        return self.file.split("/")[1] in CUDA_FILES

    @property
    def tests(self) -> tuple[str, ...]:
        """The files that should catch it."""
        names = (f"cuda_{self.operator}",) * self.on_cuda + (self.operator, "contract")
        # with every instruction set
        names += ("cpu_kernels",) * (self.operator.endswith("_linear") or self.operator == "masked_attention")
        return tuple(path for name in names if (ROOT / (path := f"tests/plugins/test_{name}.py")).is_file())

    @property
    def selection(self) -> str:
        """The tests of these files that are of the operator, for pytest's -k."""
        if self.operator == "native":
            return "wrong_shape or infers_the_shapes"
        name = next(op.onnx_name for op in OPS.values() if op.torch_name == self.operator)
        coarse = "bfloat16_attention" if self.operator == "masked_attention" else "linear_layers"
        return f"test_{self.operator} or test_cuda or ({name} and {'' if self.on_cuda else 'not '}cuda) or {coarse}"


def mutants_of(file: str, *faults: tuple[str, str]) -> tuple[Mutant, ...]:
    return tuple(Mutant(file, old, new) for old, new in faults)


MUTANTS = (
    *mutants_of(
        "native/ort_op.h",
        ("size = size < 0 ? shape[axis] : size", "size = shape[axis]"),
        ("expected = dims[axis].fixed;", "expected = dims[axis].fixed < 0 ? -1 : shape[axis];"),
        ("bool fits = shape.size() == rank;", "bool fits = shape.size() >= rank;"),
        ("std::max(fixed_size(word), inferred_attribute(context, word.c_str()))", "fixed_size(word)"),
        ('own_symbols[from] == nullptr ? "" : own_symbols[from]', '""'),
    ),
    *mutants_of(
        "segment_means/kernel_cuda.cu",
        ("token < last; token += kRows * kAtOnce", "token < last; token += kRows"),
        ("token + i * kRows < last && is_set", "is_set"),
        ("if (tile::lane() == 0) lengths[tile::warp()]", "if (threadIdx.x == 0) lengths[tile::warp()]"),
        ("count == 0 ? 0.0f : sum / static_cast<float>(count)", "sum / static_cast<float>(count)"),
    ),
    *mutants_of(
        "segment_means/kernel_cpu.cc",
        ("(kept_length(keep, p.seq) + p.segments - 1)", "(p.seq + p.segments - 1)"),
        ("if (group / p.heads != sample) {", "if (sample < 0) {"),
    ),
    *mutants_of(
        "segment_means/vectors.h",
        ("if (!r.keep[i]) continue;", ""),
        ("for (; channel < r.channels; ++channel) {", "for (; channel + 1 < r.channels; ++channel) {"),
    ),
    *mutants_of(
        "sequence_conv/kernel_cuda.cu",
        ("token - shift + taps - 1)", "token - shift + taps - 3)"),
        ("from >= seq || !is_set(kept + from)", "from >= seq || (taps == 0 && !is_set(kept + from))"),
        ("Tap before = own[first - 8];", "Tap before = own[first];"),
        ("taps[kOwn + r - i]", "taps[kOwn + r - i - 1]"),
        ("before = after;", "before = here;"),
        ("(group % heads) * taps", "(group / heads) * taps"),
    ),
    *mutants_of("sequence_conv/kernel_cpu.cc", ("token >= p.seq || !keep[token]", "token >= p.seq")),
    *mutants_of(
        "sequence_conv/vectors.h",
        ("case 1: return panel<1>(s, channel);", "case 1: return;"),
        ("for (; token < s.tokens; ++token) tile<1", "for (; token + 1 < s.tokens; ++token) tile<1"),
        ("for (int i = r + 1; i < kRows; ++i) {", "for (int i = r + 1; i < kRows - 1; ++i) {"),
    ),
    *mutants_of("sequence_conv/ort.cc", ("taps % 2 != 1", "taps < 0"), ("heads 1 taps 1", "heads seq taps 1")),
    *mutants_of(
        "native/split_halves.h",
        ("multiply_add<Half>(products, left.low, high);", ""),
        ("scales[i].inverse * second.values[2 * i + 1]", "scales[0].inverse * second.values[2 * i + 1]"),
    ),
    *mutants_of(
        "native/attention.h",
        ("largest_in_row(highest[i]) * factor", "largest_in_row(highest[i])"),
        ("fmaf(sums.values[i], factor, -highest", "fmaf(sums.values[i], 1.0f, -highest"),
        ("const Stage<T> stage(tile % 2);\n    load_keys", "const Stage<T> stage(0);\n    load_keys"),
        ("if (tile + 2 <= last) source.prepare(tile + 2);\n    if (active)", "if (active)"),
        ("softmax.total[i] *= change;", ""),
        ("most > kHighestFused", "most > INFINITY"),
        ("if (slices > 1) load_queries(source, 0);", ""),
        ("multiply_add<T>(softmax.context[f][j], rows[f]", "multiply_add<T>(softmax.context[f][j], rows[0]"),
    ),
    *mutants_of(
        "native/attention_slices.h",
        ("highest = fmaxf(highest, first[slice * stride]);", "highest = first[slice * stride];"),
        ("distance < tile::kWarpSize; distance *= 2", "distance < tile::kWarpSize / 2; distance *= 2"),
        ("total += factor * partial[1];", "total += partial[1];"),
        ("context += factor * partial", "context += partial"),
        ("return total == 0 ? 0.0f : context / total;", "return context / total;"),
    ),
    *mutants_of(
        "banded_attention/kernel_cuda.cu",
        ("int place = found;", "int place = 0;"),
        ("if (warp < tile::warp()) place", "if (warp <= tile::warp()) place"),
        ("((1u << lane) - 1)", "((2u << lane) - 1)"),
        ("token - token % s.block", "token"),
        ("const int until = s.causal ? token : s.n - 1;", "const int until = s.n - 1;"),
        ("s.left + s.block - 1;", "s.left;"),
        ("keys.elsewhere != nullptr && is_set(", "keys.elsewhere == nullptr && is_set("),
        ("token >= last.first && token", "token >= first.first && token"),
        ("by_all = token <= first.until;", "by_all = true;"),
        ("visible = place < keys.global_count;", "visible = true;"),
        ("visible = is_set(keys.keep + token) && visible;", ""),
        ("seen.bias[kQueries - 1 + i - row]", "seen.bias[kQueries - 1 + i]"),
        ("max(1, min(min(cut.slice", "max(0, min(min(cut.slice"),
        ("slice = job.part / cut.tiles;", "slice = job.part / cut.slices;"),
        ("static_cast<std::int64_t>(slice) * cut.count", "static_cast<std::int64_t>(slice) * kQueries"),
        ("whole && factor >= 0", "whole"),
        ("s.causal ? rows[count - 1] : s.n - 1;", "s.causal ? rows[0] : s.n - 1;"),
        ("const int place = first + i / 2,", "const int place = first + i / 4 * 2,"),
        ("if (last - first == count) continue;", "if (last > first) continue;"),
        ("s.causal ? last : globals.before", "s.causal || s.with_globals ? last : globals.before"),
        ("job.group % s.heads) * s.offsets", "job.group / s.heads) * s.offsets"),
        ("softmax.total[i] == 0 ? 0.0f : 1.0f", "1.0f"),
        ("return s.with_globals &&", "return s.offsets < 0 &&"),
    ),
    *mutants_of(
        "banded_attention/kernel_cpu.cc",
        ("keep_[key] && !is_global(key)", "keep_[key]"),
        ("(p_.causal ? std::upper_bound", "(p_.block == 0 ? std::upper_bound"),
        ("p_.causal ? tokens[i] + 1 : p_.seq", "p_.seq"),
        ("if (keep[offset + token]) keys.push_back(token);", "keys.push_back(token);"),
        ("group % p.heads * p.offsets()", "group / p.heads * p.offsets()"),
        ("rows_.sum[row] == 0.0f && !sees_a_key()", "false"),
        ("bias, key - first_query);", "bias, key);"),
        ("std::fill(rows_.begin, rows_.begin + count, 0);", ""),
        ("if (count < p.seq) add_units", "if (count == 0) add_units"),
        ("std::min(p.right + p.block, p.seq) - 1", "std::min(p.right, p.seq)"),
    ),
    *mutants_of(
        "masked_attention/kernel_cuda.cu",
        ("row % s.n * std::int64_t{kStatistics + s.e}", "row * std::int64_t{kStatistics + s.e}"),
        ("key < key_count ? attention::kLowest : -INFINITY", "attention::kLowest"),
        ("const bool visible = key < key_count &&", "const bool visible ="),
        ("factor >= 0 && seen.all[0]", "factor >= 0 && seen.all[1]"),
        ("if (factor >= 0 && seen", "if (seen"),
        ("logit == INFINITY ? product * factor : logit", "fminf(product * factor, logit)"),
        ("job.group / s.heads) * s.m", "job.group % s.heads) * s.m"),
    ),
    *mutants_of(
        "native/tile.h",
        ("from.exists && first + i < columns", "from.exists && first < columns"),
        ("if (bytes == kChunkBytes) {", "if (bytes >= 8) {"),
    ),
    *mutants_of(
        "masked_attention/kernel_cpu.cc",
        ("if (visible == 0 && sees_) continue;", "if (visible == 0) continue;"),
        ("for (std::int64_t s = 1; s < parts; ++s) top", "for (std::int64_t s = 2; s < parts; ++s) top"),
        ("sum += factor * from[1];", "sum += from[1];"),
        ("visible == keys ? nullptr", "visible > 0 ? nullptr"),
    ),
    *mutants_of("native/online_softmax.h", ("std::fill(context_, context_ + rows_ * value_stride_, 0.0f);", "")),
    *mutants_of(
        "native/online_softmax_vectors.h",
        ("t.sum[row + i] * factors[i] +", "t.sum[row + i] +"),
        ("store(out, load(out) * factors[row + i] + sum);", "store(out, load(out) + sum);"),
        ("sight.end[i] >= to &&", ""),
        ("((column < begin) | (column >= end)) ? beyond : x", "x"),
        # pairs: of numbers that are none of bfloat16, with an end that is not zeros, without their scale or their rest
        ("if ((bits[lane] & 0xffff) != 0) return false;", ""),
        ("std::fill(halves + count, halves + 2 * words, BFloat16{});", ""),
        ("load(logits + j) * t.scale", "load(logits + j)"),
        ("(load(one + c) + load(other + c))", "(load(one + c) - load(other + c))"),
        ("j < seen ? load(weights + j)", "j <= seen ? load(weights + j)"),
        ("row < count && c < width ?", "c < width ?"),
    ),
    *mutants_of(
        "masked_attention/kernel_cpu.cc",
        # values that are no numbers of bfloat16
        ("pairs.pair_rows != nullptr &&", "false &&"),
        ("sees_ ? keep_ : nullptr", "nullptr"),
    ),
    *mutants_of("masked_attention/ort.cc", ("batch heads m e", "batch heads e e")),
    *mutants_of(
        "iterative_pinv/tensor_cores.h",
        ("row < m && first_column + column < m", "row < m"),
        ("* right.scale(k, own.half);", "* right.scale(own.row, own.half);"),
        ("+ i % 2 - i / 2 * 8;", "+ i % 2;"),
        ("own.half * kColumns + j * tile::kColumns;", "j * tile::kColumns;"),
        ("left.scale(own.row, k / kColumns)", "left.scale(own.row, own.half)"),
        ("tile::load_left(left.low(), own.row, k,", "tile::load_left(left.low(), own.row, 0,"),
    ),
    *mutants_of(
        "iterative_pinv/scratch.h",
        ("product = {z, x, p, 0.0f, 0.25f, -1}", "product = {x, z, p, 0.0f, 0.25f, -1}"),
        ("if (quad * kQuad + i < m) narrow", "narrow"),
    ),
    *mutants_of(
        "iterative_pinv/vectors.h",
        ("for (std::int64_t k = kSumBlock; k < m; k", "for (std::int64_t k = kSumBlock; k + kSumBlock <= m; k"),
        ("constexpr std::int64_t kSumBlock = 64;", "constexpr std::int64_t kSumBlock = 1 << 20;"),
        ("sum *= 0.25;", "sum = __builtin_convertvector(__builtin_convertvector(sum * 0.25, HalfFloats), Doubles);"),
    ),
    *mutants_of("iterative_pinv/kernel_cpu.cc", ("to_float(scale[i])", "to_float(scale[0])")),
    *mutants_of(
        "lsh_hash/kernel_cuda.cu",
        ("if (projection > highest) {", "if (projection >= highest) {"),
        ("bucket += (highest >= -lowest ?", "bucket += (highest > -lowest ?"),
        ("fmaf(left[i], right[j], sums[j][i])", "left[i] * right[j] + sums[j][i]"),
        ("kept ? search.bucket : hidden", "kept || hidden > 0 ? search.bucket : hidden"),
        ("- channel) + kUnroll - 1) / kUnroll", "- channel)) / kUnroll"),
        ("stride *= 2 * place;", "stride *= place;"),
    ),
    *mutants_of(
        "lsh_hash/vectors.h",
        ("at_highest[v] = projection > highest[v]", "at_highest[v] = projection >= highest[v]"),
        ("highest[v] >= -lowest[v] ?", "highest[v] > -lowest[v] ?"),
        ("stride *= 2 * place;", "stride *= place;"),
    ),
    *mutants_of(
        "lsh_hash/kernel_cpu.cc",
        ("if (head != packed)", "if (packed < 0)"),
        ("t < tokens && keep[t] ?", "t < tokens ?"),
    ),
    *mutants_of(
        "lsh_sort/kernel_cuda.cu",
        ("(digits.passes - pass) % 2 == 1 ? order", "pass % 2 == 0 ? order"),
        ("min(start + segment, size)", "(start + segment)"),
        ("if (lane >= distance) sum += earlier;", "if (lane > distance) sum += earlier;"),
        ("position < begin ? shared.places", "position <= begin ? shared.places"),
        ("other < part.number ? earlier", "other <= part.number ? earlier"),
        ("ptx::wait_for_prerequisites();", ""),
        ("min(max(bucket, 0), num_buckets - 1)", "max(bucket, 0)"),
        ("bit < radix; bit *= 2", "2 * bit < radix; bit *= 2"),
        ("peers[i] &= one ? ones : ~ones;", "peers[i] &= ones;"),
        ("if (peers[0] == 0) break;", "if (peers[1] == 0) break;"),
        ("counters[digit] + static_cast<unsigned>(__popc(peers[i] & lanes_before))", "counters[digit]"),
    ),
    *mutants_of(
        "lsh_sort/kernel_cpu.cc",
        ("for (; t < n; ++t) ++counters", "for (; t + 1 < n; ++t) ++counters"),
        ("std::stable_sort(", "std::sort("),
        ("n == 0 || highest < static_cast", "n == 0 || highest <= static_cast"),
    ),
    *mutants_of(
        "linear_attention/kernel_cuda.cu",
        ("sums[place] = sum;", "sums[place] = {sum.x + value.x, sum.y + value.y, sum.z + value.z, sum.w + value.w};"),
        ("sums_column() + i % 2 <= row + i / 2 * 8 ? weight", "sums_column() + i % 2 < row + i / 2 * 8 ? weight"),
        ("if (block > 0) change<T>(rows, exponents, next);", ""),
        ("if (block > 0) change<T>(rows, last.of_rows(), own.of_rows());", ""),
        ("if (block > 0) change<T>(weights, last.of_weights(), own.of_weights());", ""),
        ("eps * power_of_two(exponents.upper)", "eps"),
        ("change<T>(state, {exponent, exponent}, {next, next});", ""),
        # causal: sums that are lost at the end of a slice, kept twice, scaled wrongly, of padding, or of too few tiles
        ("before.add(state, 1.0f);", ""),
        ("state = {};", ""),
        ("slice_end += sizes.slice;", ""),
        ("sums.add(before, power_of_two(of_state));", "sums.add(before, 1.0f);"),
        ("kept_rows<T>(keep + first, count)", "kept_rows<T>(keep, count)"),
        ("if (kOneBlock && first + kSide < item.end)", "if (kOneBlock && first + 2 * kSide < item.end)"),
        ("if (kOneBlock) load(0);", ""),
        ("slice.shared.a, to, first, item.end - first", "slice.shared.a, to, first, kSide"),
    ),
    *mutants_of("linear_attention/kernel_cuda.cu", ("slice * apart);", "0 * apart);"), ("1 : int32(slices)", "1 : 1")),
    *mutants_of(
        "linear_attention/features.h",
        ("add(total, other.total, factor);", ""),
        ("max(-kMostExponent - own,", "max(-kMostExponent - 0 * own,"),
        ("first + i < columns ? chunk", "first + i <= columns ? chunk"),
        ("largest > 0.0f ? scale_exponent(largest) : 0", "scale_exponent(fmaxf(largest, 0.0f))"),
        ("return x < 0.0f ? 0.0f : x * scale;", "return x * scale;"),
    ),
    *mutants_of(
        "linear_attention/kernel_cpu.cc",
        ("before += std::exchange(*own, before);", "*own = before += *own;"),
        ("for (std::int64_t slice = 1; slice < slices", "for (std::int64_t slice = 1; slice + 1 < slices"),
    ),
    *mutants_of(
        "linear_attention/vectors.h",
        ("i >= rows || (keep != nullptr && keep[i] == 0)", "i >= rows"),
        ("if (relu) return x < zero ? zero : x;", "if (relu) return x;"),
        ("for (std::int64_t j = row + 1; j <", "for (std::int64_t j = row + 2; j <"),
    ),
    *mutants_of(
        "linear_recurrence/chunk.h",
        # decay after the write, beta of the value alone, chunks that end too early, decays of tokens that do not exist
        ("solved[i] = kept * keys[i];", "solved[i] = keys[i];"),
        ("column[i] = shared.beta()[i] * own;", "column[i] = own + (shared.beta()[i] - 1.0f) * column[i];"),
        ("first < tokens.count; first += kTokens", "first + 1 < tokens.count; first += kTokens"),
        ("expf(widen(tokens.decay[at])) : 1.0f;", "expf(widen(tokens.decay[at])) : 0.5f;"),
        ("j < token || (of_query && j == token)", "j < token"),
        ("int later = j + 1; later <= token", "int later = j; later <= token"),
        ("if (token > j) key[c] *= shared.erased", "if (token >= j) key[c] *= shared.erased"),
        ("shared.key.row(i)[column] = after * keys[i];", "shared.key.row(i)[column] = after * alphas[i] * keys[i];"),
        ("tile::load_rights_transposed(factor.low(), 0", "tile::load_rights_transposed(factor.high(), 0"),
        ("written[side].values[i] *= shared.key.scales", "written[side].values[i] *= shared.erased.scales"),
        ("shared.total()[State<kKeys>::channel(j + side, i)]", "shared.total()[0]"),
    ),
    *mutants_of(
        "linear_recurrence/kernel_cuda.cu",
        # a state that begins anew in every slice, or as the unit matrix, and slices that are composed without it
        ("slices + item.slice) * size + column", "slices) * size + column"),
        ("if (!of_values) state.set_unit(column);", "state.set_unit(column);"),
        ("moved[side].values[j] + map", "map"),
        ("item.slice == slices - 1 && head % group == 0", "item.slice == 0 && head % group == 0"),
        ("head = item.owner % s.heads;", "head = item.owner / group % s.heads;"),
    ),
    *mutants_of(
        "linear_recurrence/token_by_token.h",
        ("const float now = alpha * own[d * width];", "const float now = own[d * width];"),
        ("if (channels > 1) alpha = expf(widen(logs[d]));", ""),
        (
            "widen(beta[at]) * (widen(value[at * width + column]) - held)",
            "widen(beta[at]) * widen(value[at * width + column]) - held",
        ),
        ("own[d * width] = past[first + d * width];", "own[d * width] = 0.0f;"),
        ("row * s.heads + kv_head * group + head", "row * s.heads + kv_head + head * s.kv_heads"),
    ),
    *mutants_of(
        "causal_conv/kernel_cuda.cu",
        ("return past[--left * stride];", "return past[(--left + 1) * stride];"),
        ("if (is_set(keep + --token)) return x[token * stride];", "return x[--token * stride];"),
        (
            "filter[i] = used ? widen(weight[i - (kFew - taps)])",
            "filter[i] = used ? widen(weight[taps - 1 - (i - (kFew - taps))])",
        ),
        ("if (i >= kFew - taps) sum = fmaf(filter[i], seen[i], sum);", "sum = fmaf(filter[i], seen[i], sum);"),
        ("      before.token = token;\n", ""),
        ("    own.token = s.seq;\n", ""),
        ("silu != 0 ? sum / (1.0f + expf(-sum)) : sum", "silu != 0 ? 1.0f / (1.0f + expf(-sum)) : sum"),
    ),
    *mutants_of(
        "causal_conv/vectors.h",
        ("if (keep[--token]) rows", "if (--token >= 0) rows"),
        ("past + (taps - 1 - missing + i) * stride", "past + i * stride"),
        ("if (!u.keep[token]) {\n      std::fill_n(to, u.channels, T{});", "if (!u.keep[token]) {"),
        (
            "std::rotate(w.order, w.order + 1, w.order + u.taps);",
            "std::rotate(w.order, w.order + u.taps - 1, w.order + u.taps);",
        ),
        ("Floats sum = load(bias + c);", "Floats sum{};"),
        ("if (last < call.seq) return;", "if (first > 0) return;"),
        ("u.find_before(call.seq, w.before);", "u.find_before(last - 1, w.before);"),
    ),
    *mutants_of(
        "linear_recurrence/vectors.h",
        # decay after the write, beta of the value alone, a block that begins as if its first key were new
        (
            "load(rows + r * kLanes) * (kPerChannel ? alpha[d] : decay) + key[d] * written[r]",
            "(load(rows + r * kLanes) + key[d] * written[r]) * (kPerChannel ? alpha[d] : decay)",
        ),
        ("written[r] = load(value + r * kLanes);", "written[r] = load(value + r * kLanes) * b.beta[t];"),
        ("      written[r] *= b.beta[t];\n", ""),
        ("if (kDelta) held.add_product(b.erased.row(0), state, b.key_dim);", ""),
        ("b.erased.row(std::min(t + 1, b.tokens - 1))", "b.erased.row(t)"),
        ("kPerChannel ? held.registers[r] : alpha[0] * held.registers[r]", "held.registers[r]"),
        ("std::copy(from, from + used, to);", "if (call.seq == 0) std::copy(from, from + used, to);"),
        ("other.write(to + head * kColumns, b.scale);", "other.write(to + head * kColumns, 1.0f);"),
        ("exponentials(w.alpha, tokens * channels);", "exponentials(w.alpha, tokens);"),
        ("(row * call.heads + kv_head * group) * key_dim", "(row * call.heads + kv_head) * key_dim"),
    ),
    *mutants_of(
        "aft_simple_attention/kernel_cuda.cu",
        ("n = fmaf(scale, other.n, n);", "n += other.n;"),
        ("part.rows && is_set(keep + i * kRows)", "part.rows && keep != nullptr"),
        ("place < kRows * kWidth;", "place < (kRows - 1) * kWidth;"),
        ("const float scale = exponential(maximum - highest);", "const float scale = 1.0f;"),
        ("load<kAligned>(k + i * step, count, -INFINITY,", "load<kAligned>(k + i * step, count, 0.0f,"),
        ("x * tile::kLog2E", "x * 1.4424f"),
        ("int i = 1; i < kAtOnce; ++i) highest", "int i = 2; i < kAtOnce; ++i) highest"),
        ("visible != 0; visible >>= kAtOnce", "visible >> kAtOnce != 0; visible >>= kAtOnce"),
        ("if (count > 0) bits", "if (count > tile::Chunk<T>::kCount) bits"),
        ("if (c < count) elements", "if (c + 1 < count) elements"),
        ("tile::chunks_are_aligned(k, channels) && tile::chunks_are_aligned(v, channels)", "channels > 0"),
        ("c < part.count ? contexts", "c + 1 < part.count ? contexts"),
        ("sums.d == 0.0f ? 0.0f : sums.n / sums.d", "sums.n / sums.d"),
        ("part.head / heads_per_sample * seq", "part.head % heads_per_sample * seq"),
    ),
    *mutants_of(
        "aft_simple_attention/vectors.h",
        ("visible += keep[row];", "++visible;"),
        ("scale * partial.read(group, 1) + n", "partial.read(group, 1) + n"),
        ("n += scale * partial(slice)", "n += partial(slice)"),
        ("for (; done < visible; ++done)", "for (; done + 1 < visible; ++done)"),
    ),
    *mutants_of(
        "aft_window_attention/kernel_cuda.cu",
        ("token - (first + query) + windows.reach();", "token - (first + query) + windows.reach() - 1;"),
        ("other = 1; other < kWarps; ++other", "other = 2; other < kWarps; ++other"),
        ("i < part; ++i", "i + 1 < part; ++i"),
        ("i < tile::warp(); ++i", "i <= tile::warp(); ++i"),
        ("i > part; --i", "i >= part; --i"),
        ("int i = kWarps - 1; i > tile::warp(); --i", "int i = kWarps - 2; i > tile::warp(); --i"),
        ("(tile::warp() + 1) * each, all_runs)", "tile::warp() * each + 1, all_runs)"),
        (
            "parts_of(block * kBlock + reach(), queries_of(causal))",
            "parts_of(block * kBlock + reach() + 1, queries_of(causal))",
        ),
        ("(block * kBlock - reach()) / queries_of(causal)", "(block * kBlock - reach() - 1) / queries_of(causal)"),
        ("const float share = ptx::exp2_approx(-largest_bias[query]);", "const float share = 1.0f;"),
        ("others.n *= scale;", ""),
        ("lowest = fminf(lowest, row[tap] * kLog2E);", ""),
        ("range = fmaxf(range, highest - lowest);", "range = highest - lowest;"),
        ("range = fmaxf(range, ranges[warp]);", "range = fminf(range, ranges[warp]);"),
        ("most = fmaxf(most, largest[other * kChannels + lane]);", ""),
        ("halves ? scale.inverse : factor;", "halves ? scale.inverse : 1.0f;"),
        ("factors[kChannels + lane] = factor /", "factors[kChannels + lane] = 1 /"),
        ("tile::load_left(half_weights, row, kBlock + k)", "tile::load_left(half_weights, row, k)"),
        ("most < INFINITY", "most <= INFINITY"),
        ("most >= kLeastOfHalves", "most >= 0.0f"),
        ("if (!kCausal) all.add(sums_of(x.others", "if (kCausal) all.add(sums_of(x.others"),
        ("sums_of(x.others, rows, units + unit, lane)", "sums_of(x.others, rows, unit, lane)"),
        ("all.d == 0.0f ? all.n : all.n / all.d", "all.n / all.d"),
    ),
    *mutants_of(
        "aft_window_attention/vectors.h",
        ("store(space.rest + c, load(space.rest + c) * scale);", ""),
        ("load(close + c) + share * load(other + c)", "load(close + c) + load(other + c)"),
        ("if (raises(token)) last = std::max(token, first + 1);", "if (raises(token)) last = token + 1;"),
        ("for (; block > s.last_block(unit); --block)", "for (; block >= s.last_block(unit) + 2; --block)"),
    ),
    *mutants_of("native/simd.h", ("exponential(a < 0.0f ? a : -a)", "exponential(-a)")),
    *mutants_of(
        "native/linear_vectors.h",
        # a share beyond its end, the residual and the scale of another row, and steps of one row
        ("z > end ? end : z", "z"),
        ("call.residual_of_rows ? row * outputs : 0", "call.residual_of_rows ? 0 : 0"),
        ("workspace.known + i, row, column", "workspace.known, row, column"),
        ("? weight + (i + part) * outputs + first :", "? weight + i * outputs + first :"),
    ),
    *mutants_of(
        "packed_linear/vectors.h",
        # numbers cut off in the place of rounded, and pairs of one row
        (
            "floats_of_bits(bfloat16_bits(read(x, i, inputs)) << 16)",
            "floats_of_bits(bits_of_all(read(x, i, inputs)) & ~0xffff)",
        ),
        (
            "read_half_words(rows[0]) | read_half_words(rows[1]) << 16",
            "read_half_words(rows[0]) | read_half_words(rows[0]) << 16",
        ),
        ("if (inputs % 2 == 1) rounded[inputs] = {};", ""),
    ),
    *mutants_of(
        "quantized_linear/vectors.h",
        # the last numbers of a row for the largest, a scale of 0, a scale that is rounded twice, and codes by it
        ("own > magnitudes ? own : magnitudes", "own"),
        ("found < kSmallestMaximum ? kSmallestMaximum : found", "found"),
        ("{largest / kLargestCode, excess}", "{1.0f / factor, excess}"),
        ("part_of_row(x, i, inputs) * factor", "part_of_row(x, i, inputs) / (largest / kLargestCode)"),
        ("excess += kWeightZero * total[lane]", "excess = kWeightZero * total[lane]"),
        ("reinterpret_cast<Unsigned>(sums) - row.excess", "reinterpret_cast<Unsigned>(sums)"),
        ("std::numeric_limits<float>::quiet_NaN(), 0}", "largest / kLargestCode, 1u}"),
    ),
    *mutants_of("quantized_linear/ort.cc", ("multiply_cpu, kMostInputs", "multiply_cpu, 2 * kMostInputs")),
    *mutants_of(
        "lsh_attention/kernel_cuda.cu",
        ("min(after, s.chunks() - 1 - in_round)", "min(after, s.chunks() - in_round)"),
        ("return query == key.token ? kSelfScore : score;", "return score;"),
        ("static_cast<int>(place % s.padded) >= kept", "static_cast<int>(place % s.padded) > kept"),
        ("round = 1; round < rounds; ++round) highest", "round = 1; round < rounds - 1; ++round) highest"),
        ("i = whole * 16 + static_cast", "i = whole * 16 + 1 + static_cast"),
        ("kWarps = 4 / kFragments;", "kWarps = 2;"),
    ),
    *mutants_of(
        "lsh_attention/kernel_cpu.cc",
        ("const float highest = *std::max_element(lse, lse + rounds);", "const float highest = lse[0];"),
    ),
    *mutants_of(
        "lsh_attention/vectors.h", ("x = at == own ? self_logit : x;", ""), ("if (causal) unseen |= at > own;", "")
    ),
)


def copy_tree() -> None:
    """Make the copy equal to the tracked files; what is equal keeps its time, for the sake of incremental builds."""
    listed = subprocess.run(
        ["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, TREE / name
        if not source.is_file():
            target.unlink(missing_ok=True)
        elif not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    # before the installed package on the path, as one tree
    for link, to in (("path/effexport", "exporter"), ("exporter/models", "models"), ("exporter/plugins", "plugins")):
        (TREE / link).parent.mkdir(exist_ok=True)
        if not (TREE / link).is_symlink():
            (TREE / link).symlink_to(TREE / to)


def build_library() -> str:
    """Compile what has changed into the library of CPU kernels; returns a compiler's error, or an empty text."""
    from effexport.plugins.building.build import find_headers

    if not (LIBRARY / "CMakeCache.txt").exists():
        include = find_headers(lambda stage: None).folder
        configure = ["cmake", "-S", str(TREE / "plugins"), "-B", str(LIBRARY), f"-DEFFEXPORT_ORT_INCLUDE_DIR={include}"]
        subprocess.run(configure, check=True, capture_output=True)
    build = ["cmake", "--build", str(LIBRARY), "--parallel", str(os.cpu_count() or 1)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else last_line(done.stdout + done.stderr)


def last_line(text: str) -> str:
    errors = COMPILER_ERROR.findall(text)
    return errors[0] if errors else (text.strip().splitlines() or [""])[-1]


def tested(mutant: Mutant) -> tuple[str, str]:
    """Run the tests of a mutant on the copy as it is: "caught", "survives" or "error", and a line that says more."""
    if problem := build_library():
        return "error", problem
    environment = os.environ | {
        "PYTHONPATH": str(TREE / "path"),
        "EFFEXPORT_LIBRARY": str(next(LIBRARY.glob("libeffexport_ort.*"))),
        "EFFEXPORT_REQUIRE": "torch,onnx,ort,native",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-n0", "-m", "not soak", "--no-header"]
    command += ["-k", mutant.selection, *mutant.tests]
    try:
        done = subprocess.run(command, cwd=TREE, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "caught", f"no end within {TIMEOUT_S} s"
    if error := COMPILER_ERROR.search(done.stdout):
        return "error", error[0]
    failed = re.search(r"^FAILED \S*?::(.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode == 0:
        return "survives", last_line(done.stdout)
    if failed or done.returncode < 0:  # a signal
        return "caught", failed[1] if failed else f"signal {-done.returncode}"
    return "error", last_line(done.stdout + done.stderr)


def plant(mutant: Mutant) -> tuple[str, str]:
    """As `tested`, with the mutant in the copy."""
    path = TREE / "plugins" / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        return "error", f"its text is there {text.count(mutant.old)} times; expected once"
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        return tested(mutant)
    finally:
        path.write_text(text, encoding="utf-8")


def key_of(mutant: Mutant) -> str:
    """A digest of the mutant and of what decides its result."""
    folders = (ROOT / "plugins" / mutant.operator, ROOT / "plugins" / "native", ROOT / "tests" / "plugins" / "native")
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in {".h", ".cc", ".cu"}]
    digest = hashlib.sha256(repr(mutant).encode())
    others = ("plugins/contract.py", f"plugins/{mutant.operator}/contract.py", "tests/support/implementations.py")
    for path in [*files, *(ROOT / name for name in (*others, *mutant.tests) if (ROOT / name).is_file())]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    operators = sorted({mutant.operator for mutant in MUTANTS})
    parser.add_argument("--operator", action="append", choices=operators, help="only this one; repeatable")
    parser.add_argument("--limit", type=int, metavar="N", help="at most so many that have no result yet")
    args = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if not args.operator or mutant.operator in args.operator]
    FOLDER.mkdir(parents=True, exist_ok=True)
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    todo = [mutant for mutant in chosen if key_of(mutant) not in results][: args.limit]
    copy_tree()
    healthy = set()
    for mutant in todo:
        if mutant.selection not in healthy:
            verdict, why = tested(mutant)
            if verdict != "survives":
                sys.exit(f"{', '.join(mutant.tests)} fail without a fault: {why}")
            healthy.add(mutant.selection)
        results[key_of(mutant)] = plant(mutant)
        RESULTS.write_text(json.dumps(results, indent=1), encoding="utf-8")
        print(line(mutant, *results[key_of(mutant)]), flush=True)
    known = [(mutant, *results[key_of(mutant)]) for mutant in chosen if key_of(mutant) in results]
    print("\n".join(line(*row) for row in known if row[0] not in todo))
    counts = {verdict: sum(row[1] == verdict for row in known) for verdict in ("caught", "survives", "error")}
    print(f"{len(known)} of {len(chosen)} mutants: {counts}")
    return int(counts["caught"] < len(known))


def line(mutant: Mutant, verdict: str, why: str) -> str:
    return f"{verdict:8} {mutant.file}: {mutant.old} -> {mutant.new or '(nothing)'}  [{why}]"


if __name__ == "__main__":
    sys.exit(main())
