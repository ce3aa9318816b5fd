/* fd_draw_ops_t in loops that a compiler turns into vector instructions of the including file's target:
 * FD_DRAW_ROWS(isa).
 */
#pragma once

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/compiler.h"
#include "cpu/half.h"
#include "draw_rows.h"

enum {
    SUM_LANES = 16,
    CUTS = 7,            /* of a search's bounds in one pass over the row */
    FEW = 2048,          /* numbers that a search copies, and goes on with alone */
    PASSES_OVER_ALL = 4, /* after which a search for a nucleus does that: bounds are then 2^-8 of their number wide */
};

/* Vectors of the compiler; a target with shorter ones takes several. */
typedef float lanes_t __attribute__((vector_size(SUM_LANES * 4)));
typedef int32_t lane_bits_t __attribute__((vector_size(SUM_LANES * 4)));

/* An integer that is in the order of the float: -NaN < -inf < ... < inf < NaN. */
FD_INLINE int32_t key_of(float x) {
    const int32_t bits = (int32_t)fd_float_bits(x);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

FD_INLINE float float_of_key(int32_t key) { return fd_bits_float((uint32_t)(key ^ ((key >> 31) & 0x7fffffff))); }

#define KEY_OF_INFINITY 0x7f800000
#define KEY_OF_MINUS_INFINITY (-0x7f800001)

/* e^y for y <= 0; 0 for NaN and below -87, -infinity included. e^y = 2^n e^r with |r| <= ln(2) / 2; the Taylor
 * polynomial of degree 7 is within 5e-9 of e^r, so the result is within 2 units in the last place. */
FD_INLINE float exp_of_negative(float y) {
    const float round = 0x1.8p+23f; /* adding it to a float within 2^22 rounds that to an integer */
    const float shifted = y * 0x1.715476p+0f + round;
    const float n = shifted - round;
    const float r = (y - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f; /* ln 2 in two parts */
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const float power = fd_bits_float((fd_float_bits(shifted) - fd_float_bits(round) + 127) << 23);
    return y >= -87.0f ? p * power : 0.0f;
}

/* The row's logits as fp32: in place, or in `room` if they must be converted or will be changed. */
FD_INLINE const float *load_row(const fd_draw_t *o, size_t row, bool changed, float *room) {
    const size_t n = o->vocab;
    if (o->dtype == FD_ACT_FP32) {
        const float *x = (const float *)o->logits + row * n;
        return changed ? memcpy(room, x, n * sizeof *x) : x;
    }
    const uint16_t *halves = (const uint16_t *)o->logits + row * n;
    for (size_t i = 0; i < n; i++) room[i] = fd_bits_float((uint32_t)halves[i] << 16);
    return room;
}

FD_INLINE void apply_mask(float *x, size_t n, const uint32_t *mask) {
    for (size_t word = 0; word * 32 < n; word++) {
        const uint32_t allowed = mask[word];
        if (allowed == UINT32_MAX) continue;
        const size_t count = n - word * 32 < 32 ? n - word * 32 : 32;
        float *part = x + word * 32;
        for (size_t i = 0; i < count; i++) part[i] = allowed >> i & 1 ? part[i] : -INFINITY;
    }
}

FD_INLINE void apply_rules(const fd_draw_t *o, const fd_draw_row_t *r, float *x) {
    for (uint32_t i = r->bias_start; i < r->bias_stop; i++) x[o->biased[i]] += o->bias[i];
    for (uint32_t i = r->seen_start; i < r->seen_stop; i++) {
        const float old = x[o->seen[i]];
        x[o->seen[i]] = (old > 0.0f ? old / r->repetition : old * r->repetition) - o->penalty[i];
    }
}

/* The first logit that is `best`. */
FD_INLINE size_t index_of(const float *x, size_t n, float best) {
    enum { STRIDE = 64 };
    size_t i = 0;
    for (; i + STRIDE <= n; i += STRIDE) {
        int found = 0;
        for (size_t j = 0; j < STRIDE; j++) found |= x[i + j] == best;
        if (found) break;
    }
    for (; i < n; i++)
        if (x[i] == best) return i;
    return 0;
}

FD_INLINE void key_range(const float *x, size_t n, int32_t *least, int32_t *most) {
    int32_t low = INT32_MAX, high = INT32_MIN;
    for (size_t i = 0; i < n; i++) {
        const int32_t key = key_of(x[i]);
        low = key < low ? key : low;
        high = key > high ? key : high;
    }
    *least = low, *most = high;
}

/* The keys, from `start` to `stop` - 1, among which a search will find the one it looks for. */
typedef struct {
    int64_t start, stop;
} bounds_t;

/* Keys that cut the bounds into equal parts: of their numbers if `by_value`, else of the keys themselves. */
FD_INLINE void cut(bounds_t b, bool by_value, int32_t *cuts) {
    const double low = float_of_key((int32_t)b.start), width = float_of_key((int32_t)(b.stop - 1)) - low;
    for (int i = 0; i < CUTS; i++) {
        const int64_t key = b.start + (b.stop - b.start) * (i + 1) / (CUTS + 1);
        cuts[i] = by_value ? key_of((float)(low + width * (i + 1) / (CUTS + 1))) : (int32_t)key;
    }
}

/* How many of n numbers have a key of cuts[i] or more. */
FD_INLINE void count_from(const float *x, size_t n, const int32_t *cuts, size_t *counts) {
    const int32_t k0 = cuts[0], k1 = cuts[1], k2 = cuts[2], k3 = cuts[3], k4 = cuts[4], k5 = cuts[5], k6 = cuts[6];
    uint32_t n0 = 0, n1 = 0, n2 = 0, n3 = 0, n4 = 0, n5 = 0, n6 = 0;
    for (size_t i = 0; i < n; i++) {
        const int32_t key = key_of(x[i]);
        n0 += key >= k0, n1 += key >= k1, n2 += key >= k2, n3 += key >= k3, n4 += key >= k4, n5 += key >= k5;
        n6 += key >= k6;
    }
    counts[0] = n0, counts[1] = n1, counts[2] = n2, counts[3] = n3, counts[4] = n4, counts[5] = n5, counts[6] = n6;
}

/* Copies the numbers within bounds to `room`, which may be longer by a stride than they are; returns how many. */
FD_INLINE size_t collect(const float *x, size_t n, bounds_t b, float *room) {
    enum { STRIDE = 64 };
    const int32_t first = (int32_t)b.start, last = (int32_t)(b.stop - 1);
    size_t kept = 0;
    for (size_t i = 0; i < n; i += STRIDE) {
        const size_t count = n - i < STRIDE ? n - i : STRIDE;
        int found = 0;
        for (size_t j = 0; j < count; j++) {
            const int32_t key = key_of(x[i + j]);
            found |= (key >= first) & (key <= last);
        }
        for (size_t j = 0; found && j < count; j++) {
            const int32_t key = key_of(x[i + j]);
            room[kept] = x[i + j];
            kept += (key >= first) & (key <= last);
        }
    }
    return kept;
}

/* The logit than which k - 1 logits are larger, unless some are equal; 1 <= k <= n. `least` and `most` are the keys of
 * the smallest logit and of the largest. `room` holds n numbers. */
FD_INLINE float kth_largest(const float *x, size_t n, size_t k, int32_t least, int32_t most, float *room) {
    bounds_t b = {least, (int64_t)most + 1};
    size_t within = n, above = 0; /* how many numbers are within the bounds, and above them */
    for (int pass = 0; b.stop - b.start > 1; pass++) {
        int32_t cuts[CUTS];
        size_t counts[CUTS];
        cut(b, pass < 4 && least > KEY_OF_MINUS_INFINITY, cuts);
        count_from(x, n, cuts, counts);
        size_t reached = above + within;
        for (int i = 0; i < CUTS; i++) {
            if (counts[i] >= k && cuts[i] > b.start) b.start = cuts[i], reached = counts[i];
            if (counts[i] < k && cuts[i] < b.stop) b.stop = cuts[i], above = counts[i];
        }
        within = reached - above;
        if (n > FEW && within <= FEW) {
            n = collect(x, n, b, room);
            x = room, k -= above, above = 0;
        }
    }
    return float_of_key((int32_t)b.start);
}

/* The sum of the weights of a span that are `least` or more. */
FD_INLINE float span_sum(const float *w, float least) {
    lanes_t sum = {0};
    for (size_t i = 0; i < FD_SPAN; i += SUM_LANES) {
        lanes_t part;
        memcpy(&part, w + i, sizeof part);
        sum += (lanes_t)((part >= least) & (lane_bits_t)part);
    }
    float lanes[SUM_LANES];
    memcpy(lanes, &sum, sizeof lanes);
    for (size_t half = SUM_LANES / 2; half; half /= 2)
        for (size_t j = 0; j < half; j++) lanes[j] += lanes[j + half];
    return lanes[0];
}

/* w = e^((x - best) / temperature) where x >= floor and w >= least, else 0. `sums` receives each span's sum. */
FD_INLINE void weigh(const float *x, size_t n, float best, float temperature, float floor, float least, float *w,
                     float *sums) {
    for (size_t span = 0; span * FD_SPAN < n; span++) {
        const size_t start = span * FD_SPAN;
        float last[FD_SPAN];
        const float *from = x + start;
        if (n - start < FD_SPAN) {
            for (size_t i = 0; i < FD_SPAN; i++) last[i] = start + i < n ? from[i] : -INFINITY;
            from = last;
        }
        float *to = w + start;
        for (size_t i = 0; i < FD_SPAN; i++) {
            const float e = exp_of_negative((from[i] - best) / temperature);
            to[i] = from[i] >= floor && e >= least ? e : 0.0f;
        }
        sums[span] = span_sum(to, 0.0f);
    }
}

/* The smallest weight of the nucleus: the likeliest tokens up to and including the one with which their share reaches
 * `mass`. `w` are n weights from 0 to 1, n a multiple of FD_SPAN, and `room` holds as many. */
FD_INLINE float nucleus_floor(const float *w, size_t n, const float *sums, float mass, float *room) {
    bounds_t b = {0, (int64_t)fd_float_bits(1.0f) + 1};
    double wanted = 0.0, above = 0.0; /* the sum of the weights above the bounds */
    for (size_t span = 0; span * FD_SPAN < n; span++) wanted += sums[span];
    wanted *= mass;
    for (int pass = 0; b.stop - b.start > 1; pass++) {
        int32_t cuts[CUTS];
        double reached[CUTS] = {0};
        cut(b, false, cuts);
        for (size_t i = 0; i < n; i += FD_SPAN)
            for (int j = 0; j < CUTS; j++) reached[j] += span_sum(w + i, fd_bits_float((uint32_t)cuts[j]));
        for (int j = 0; j < CUTS; j++) {
            if (reached[j] >= wanted) {
                if (cuts[j] > b.start) b.start = cuts[j];
            } else if (cuts[j] < b.stop) {
                b.stop = cuts[j], above = reached[j];
            }
        }
        if (pass == PASSES_OVER_ALL) { /* few weights are within the bounds now */
            n = collect(w, n, b, room);
            for (; n % FD_SPAN; n++) room[n] = 0.0f;
            w = room, wanted -= above, above = 0.0;
        }
    }
    return fd_bits_float((uint32_t)b.start);
}

/* An exponential variable from the number `counter` of splitmix64's outputs; draws.py says how. */
FD_INLINE double arrival(uint64_t key, uint64_t counter) {
    uint64_t z = key + (counter + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    return -log1p(-(((double)(z >> 12) + 0.5) * 0x1p-52));
}

/* The winner of a race among n weights, with the random numbers from `counter` on. */
FD_INLINE size_t race(const float *weights, size_t n, uint64_t key, uint64_t counter) {
    size_t winner = 0;
    double best = 0.0;
    for (size_t i = 0; i < n; i++) {
        if (weights[i] <= 0.0f) continue;
        const double score = weights[i] / arrival(key, counter + i);
        if (score > best) best = score, winner = i;
    }
    return winner;
}

/* Draws one row that is not greedy from its logits x, whose keys are from `least` to `most`. */
FD_INLINE size_t draw_one(const fd_draw_t *o, const fd_draw_row_t *r, const float *x, int32_t least, int32_t most,
                          float *w, float *sums, float *room) {
    const size_t n = o->vocab, spans = (n + FD_SPAN - 1) / FD_SPAN;
    const bool cut = r->top_p < 1.0f;
    const float floor = r->top_k && r->top_k < n ? kth_largest(x, n, r->top_k, least, most, room) : -INFINITY;
    weigh(x, n, float_of_key(most), r->temperature, floor, cut ? 0.0f : r->min_p, w, sums);
    if (cut) {
        float smallest = nucleus_floor(w, spans * FD_SPAN, sums, r->top_p, room);
        smallest = smallest > r->min_p ? smallest : r->min_p;
        for (size_t span = 0; span < spans; span++) {
            float *part = w + span * FD_SPAN;
            for (size_t i = 0; i < FD_SPAN; i++) part[i] = part[i] >= smallest ? part[i] : 0.0f;
            sums[span] = span_sum(part, 0.0f);
        }
    }
    const size_t span = race(sums, spans, r->key, 0);
    const size_t token = span * FD_SPAN + race(w + span * FD_SPAN, FD_SPAN, r->key, spans);
    return token < n ? token : n - 1;
}

FD_INLINE fd_status_t draw_rows(const fd_draw_t *o, size_t row, size_t n) {
    const size_t spans = (o->vocab + FD_SPAN - 1) / FD_SPAN, padded = spans * FD_SPAN;
    float *scratch = aligned_alloc(64, (3 * padded + spans + SUM_LANES) / SUM_LANES * SUM_LANES * sizeof *scratch);
    if (!scratch) return FD_INTERNAL;
    float *own = scratch + padded, *room = own + padded, *sums = room + padded;
    for (size_t i = row; i < row + n; i++) {
        const fd_draw_row_t *r = &o->rows[i];
        const bool ruled = r->bias_start < r->bias_stop || r->seen_start < r->seen_stop;
        const bool masked = r->mask != FD_NO_MASK;
        const float *x = load_row(o, i, ruled || masked, scratch);
        if (masked) apply_mask(scratch, o->vocab, o->masks + (size_t)r->mask * o->mask_words);
        int32_t least, most;
        key_range(x, o->vocab, &least, &most);
        const bool nothing = most == KEY_OF_MINUS_INFINITY;
        const bool finite = !nothing && most < KEY_OF_INFINITY && least >= KEY_OF_MINUS_INFINITY;
        o->flags[i] = finite ? FD_ROW_FINITE : nothing ? FD_ROW_NOTHING : 0;
        if (finite && ruled) {
            apply_rules(o, r, scratch);
            key_range(x, o->vocab, &least, &most);
        }
        const float best = float_of_key(most);
        float *w = o->weights ? o->weights + i * padded : own;
        if (!finite) o->tokens[i] = 0;
        else if (r->temperature > 0.0f) o->tokens[i] = (int32_t)draw_one(o, r, x, least, most, w, sums, room);
        else o->tokens[i] = (int32_t)index_of(x, o->vocab, best);
    }
    free(scratch);
    return FD_OK;
}

#define FD_DRAW_ROWS(isa) const fd_draw_ops_t fd_draw_ops_##isa = {#isa, draw_rows};
