/* fd_quantise of an ISA, written with its vec_* primitives. The including file names the ISA: FD_QUANTISE(isa).
 *
 * A vector holds one input of LANES rows, so that nothing is summed across a vector, and a row's results do not depend
 * on the other rows.
 */
#pragma once

#include <math.h>

#include "cpu/act_simd.h"
#include "linear.h"
#include "quantise.h"

enum { GROUP = FD_LINEAR_BLOCK };
enum { SHARES = 2, ROUNDS = 4 }; /* of a group's range, and of fitting from each */
#define LEAST_SCALE 1e-30f

FD_INLINE vec_t clamp(vec_t x, float low, float high) { return vec_min(vec_max(x, vec_set1(low)), vec_set1(high)); }

/* The number of 4 bits that is nearest to x, and its code. */
FD_INLINE vec_t nearest(vec_t x, const bool levels, vec_t *code) {
    if (!levels) return *code = vec_round(clamp(x, 0.0f, 15.0f));
    /* The numbers between the outermost two are odd; those two are 3 away from the next ones, not 2. */
    const vec_t inner = vec_round(clamp(vec_mul(vec_sub(x, vec_set1(1.0f)), vec_set1(0.5f)), 1.0f, 14.0f));
    const vec_t odd = vec_fma(inner, vec_set1(2.0f), vec_set1(1.0f));
    const vec_t outer = vec_round(clamp(vec_mul(vec_sub(x, odd), vec_set1(1.0f / 3.0f)), -1.0f, 1.0f));
    *code = vec_add(inner, outer);
    return vec_fma(outer, vec_set1(3.0f), odd);
}

/* The scales and minimums of a group of LANES rows. */
typedef struct {
    vec_t scale, min;
} fit_t;

/* The number that is nearest to an input under a fit. */
FD_INLINE vec_t number_of(vec_t x, const fit_t *fit, vec_t inverse, const bool levels, vec_t *code) {
    return nearest(vec_mul(vec_sub(x, fit->min), inverse), levels, code);
}
FD_INLINE vec_t inverse_of(vec_t scale) { return vec_div(vec_set1(1.0f), vec_max(scale, vec_set1(LEAST_SCALE))); }

/* Keeps the fits of the lanes whose errors are smaller than the best before. */
FD_INLINE void keep_better(const fit_t *fit, vec_t error, float *best, float *scales, float *mins) {
    float errors[LANES], own_scales[LANES], own_mins[LANES];
    vec_store(errors, error), vec_store(own_scales, fit->scale), vec_store(own_mins, fit->min);
    for (int lane = 0; lane < LANES; lane++) {
        const bool better = errors[lane] < best[lane];
        best[lane] = better ? errors[lane] : best[lane];
        scales[lane] = better ? own_scales[lane] : scales[lane];
        mins[lane] = better ? own_mins[lane] : mins[lane];
    }
}

FD_SHARED fit_t fit_group(const float *x, const bool levels) {
    static const float shares[SHARES] = {1.0f, 0.9f};
    const float most = levels ? FD_LINEAR_MOST_IN_TABLE : 15.0f;
    vec_t least = vec_load(x), largest = least, mean = vec_zero();
    for (int i = 0; i < GROUP; i++) {
        const vec_t v = vec_load(x + i * LANES);
        least = vec_min(v, least), largest = vec_max(v, largest), mean = vec_add(mean, v);
    }
    mean = vec_mul(mean, vec_set1(1.0f / GROUP));
    float best[LANES], scales[LANES] = {0}, mins[LANES];
    vec_store(best, vec_set1(INFINITY));
    vec_store(mins, mean); /* an infinity or NaN shows, as no error is smaller than infinity */
    for (int share = 0; share < SHARES; share++) {
        fit_t fit = {.scale = vec_mul(vec_sub(largest, least), vec_set1(shares[share] / most))};
        fit.min = vec_mul(vec_sub(vec_add(largest, least), vec_mul(fit.scale, vec_set1(most))), vec_set1(0.5f));
        for (int round = 0; round < ROUNDS; round++) {
            const vec_t inverse = inverse_of(fit.scale);
            vec_t error = vec_zero(), sum = vec_zero(), squares = vec_zero(), products = vec_zero();
            for (int i = 0; i < GROUP; i++) {
                const vec_t v = vec_load(x + i * LANES);
                vec_t code;
                const vec_t number = number_of(v, &fit, inverse, levels, &code);
                const vec_t off = vec_sub(vec_fma(number, fit.scale, fit.min), v);
                error = vec_fma(off, off, error);
                sum = vec_add(sum, number);
                squares = vec_fma(number, number, squares);
                products = vec_fma(number, vec_sub(v, mean), products);
            }
            keep_better(&fit, error, best, scales, mins);
            /* Least squares. The sums are exact integers: a spread is 0 or at least 31 / 32. */
            const vec_t number_mean = vec_mul(sum, vec_set1(1.0f / GROUP));
            const vec_t spread = vec_sub(squares, vec_mul(sum, number_mean));
            fit.scale = vec_div(products, vec_max(spread, vec_set1(0.5f)));
            fit.min = vec_sub(mean, vec_mul(fit.scale, number_mean));
        }
    }
    return (fit_t){vec_load(scales), vec_load(mins)};
}

/* The scale of a group with 8 bits. */
FD_INLINE vec_t scale_of_8_bits(const float *x, const bool hadamard) {
    vec_t most = vec_zero(), sum = vec_zero(), of_four = vec_zero();
    for (int i = 0; i < GROUP; i++) {
        const vec_t v = vec_load(x + i * LANES);
        most = vec_max(vec_abs(v), most);
        sum = vec_add(sum, v);
    }
    /* Inputs 8i, 8i + 1, 8i + 4 and 8i + 5, and the 4 others of 8; see FD_LINEAR_MOST_OF_FOUR. */
    for (int i = 0; hadamard && i < GROUP; i += i % 4 == 2 ? 6 : 2) {
        static const int steps[4] = {0, 1, 4, 5};
        vec_t positive = vec_zero(), negative = vec_zero();
        for (int j = 0; j < 4; j++) {
            const vec_t v = vec_load(x + (i + steps[j]) * LANES);
            positive = vec_add(positive, vec_max(v, vec_zero()));
            negative = vec_sub(negative, vec_min(v, vec_zero()));
        }
        of_four = vec_max(of_four, vec_max(positive, negative));
    }
    /* Rounding adds up to 1/2 to each of the four. An infinity or NaN shows by the sum. */
    const vec_t scale =
        vec_max(vec_mul(most, vec_set1(1.0f / 127)), vec_mul(of_four, vec_set1(1.0f / (FD_LINEAR_MOST_OF_FOUR - 2))));
    return vec_fma(sum, vec_zero(), scale);
}

/* Multiplies a group by H / FD_LINEAR_BLOCK. */
FD_INLINE void transform(float *x) {
    for (int half = 1; half < GROUP; half *= 2)
        for (int i = 0; i < GROUP; i++) {
            if (i & half) continue;
            const vec_t a = vec_load(x + i * LANES), b = vec_load(x + (i + half) * LANES);
            vec_store(x + i * LANES, vec_add(a, b));
            vec_store(x + (i + half) * LANES, vec_sub(a, b));
        }
    for (int i = 0; i < GROUP; i++) vec_store(x + i * LANES, vec_mul(vec_load(x + i * LANES), vec_set1(1.0f / GROUP)));
}

/* Rounds a group to 4 bits, whose columns begin with `first` of x, and lets the columns after each take up its error.
 */
FD_INLINE void compensate(const fd_quantise_t *o, float *x, size_t first, const fit_t *fit, const bool levels,
                          float *errors, uint8_t *codes) {
    const vec_t inverse = inverse_of(fit->scale);
    for (size_t c = first; c < first + GROUP; c++) {
        const float *factor = o->factor + c * o->columns;
        const vec_t v = vec_load(x + c * LANES);
        vec_t code;
        const vec_t number = number_of(v, fit, inverse, levels, &code);
        const vec_t off = vec_sub(v, vec_fma(number, fit->scale, fit->min));
        const vec_t error = vec_div(off, vec_set1(factor[c])), negated = vec_sub(vec_zero(), error);
        vec_store(errors + c * LANES, error);
        vec_store_u8(codes + (c - first) * LANES, code, 0);
        for (size_t later = c + 1; later < o->columns; later++)
            vec_store(x + later * LANES, vec_fma(vec_set1(factor[later]), negated, vec_load(x + later * LANES)));
    }
}

/* Loads columns `first` to first + n - 1 of the rows from `row` on to x [n][LANES]. Columns behind the last are 0, and
 * rows behind it are the last again. */
FD_INLINE void load_columns(const fd_quantise_t *o, size_t row, size_t rows, size_t first, size_t n, float *x) {
    float part[FD_QUANTISE_MOST_COLUMNS];
    const size_t there = o->columns - first < n ? o->columns - first : n;
    for (size_t lane = 0; lane < LANES; lane++) {
        const size_t at = (row + (lane < rows ? lane : rows - 1)) * o->stride + first;
        size_t i = 0;
        for (; i + LANES <= there; i += LANES) vec_store(part + i, load(o->dtype, o->x, at + i));
        for (; i < there; i++) part[i] = load_one(o->dtype, o->x, at + i);
        for (; i < n; i++) part[i] = 0.0f;
        for (i = 0; i < n; i++) x[i * LANES + lane] = part[i];
    }
}

/* Rounds a group x [GROUP][LANES], each number to the nearest. */
FD_INLINE void round_group(const fd_quantise_t *o, float *x, fit_t *fit, const bool levels, uint8_t *codes) {
    if (o->hadamard) transform(x);
    if (o->bits == 4) *fit = fit_group(x, levels);
    else fit->scale = scale_of_8_bits(x, o->hadamard);
    const vec_t inverse = inverse_of(fit->scale);
    for (int i = 0; i < GROUP; i++) {
        vec_t v = vec_load(x + i * LANES), code;
        if (o->bits == 4) number_of(v, fit, inverse, levels, &code);
        else code = vec_round(clamp(vec_mul(v, inverse), -127.0f, 127.0f));
        vec_store_u8(codes + i * LANES, code, o->bits == 4 ? 0 : 128);
    }
}

/* Stores what a group of up to LANES rows was rounded to; `group` is its place in the matrix. */
FD_INLINE void store_group(const fd_quantise_t *o, size_t row, size_t rows, size_t group, const fit_t *fit,
                           const uint8_t *codes) {
    float scales[LANES], mins[LANES];
    vec_store(scales, fit->scale), vec_store(mins, fit->min);
    const size_t first = group * GROUP, n = o->q_stride - first < GROUP ? o->q_stride - first : GROUP;
    for (size_t lane = 0; lane < rows; lane++) {
        const size_t at = (row + lane) * o->scales_stride + group;
        o->scales[at] = scales[lane];
        if (o->mins) o->mins[at] = mins[lane];
        uint8_t *q = o->q + (row + lane) * o->q_stride + first;
        for (size_t i = 0; i < n; i++) q[i] = codes[i * LANES + lane];
    }
}

/* Rounds up to LANES rows. */
FD_INLINE void quantise_lanes(const fd_quantise_t *o, size_t row, size_t rows, const bool levels) {
    _Alignas(64) float x[FD_QUANTISE_MOST_COLUMNS * LANES], errors[FD_QUANTISE_MOST_COLUMNS * LANES];
    uint8_t codes[GROUP * LANES];
    fit_t fit = {vec_zero(), vec_zero()};
    if (!o->factor) {
        for (size_t c = 0; c < o->columns; c += GROUP) {
            load_columns(o, row, rows, c, GROUP, x);
            round_group(o, x, &fit, levels, codes);
            store_group(o, row, rows, c / GROUP, &fit, codes);
        }
        return;
    }
    load_columns(o, row, rows, 0, o->columns, x);
    for (size_t c = 0; c < o->columns; c += GROUP) {
        fit = fit_group(x + c * LANES, levels);
        compensate(o, x, c, &fit, levels, errors, codes);
        store_group(o, row, rows, (size_t)o->groups[c / GROUP], &fit, codes);
    }
    for (size_t lane = 0; lane < rows; lane++)
        for (size_t c = 0; c < o->columns; c++) o->errors[(row + lane) * o->columns + c] = errors[c * LANES + lane];
}

#define FD_QUANTISE(isa)                                                                                               \
    void fd_quantise_rows_##isa(const fd_quantise_t *o, size_t first, size_t n);                                       \
    void fd_quantise_rows_##isa(const fd_quantise_t *o, size_t first, size_t n) {                                      \
        for (size_t row = first; row < first + n; row += LANES) {                                                      \
            const size_t left = first + n - row, rows = left < LANES ? left : LANES;                                   \
            if (o->levels) quantise_lanes(o, row, rows, true);                                                         \
            else quantise_lanes(o, row, rows, false);                                                                  \
        }                                                                                                              \
    }
