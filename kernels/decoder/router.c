#include "router.h"

#include <math.h>

#include "cpu/parallel.h"

typedef struct {
    const fd_router_t *r;
    float *scores; /* [rows][n] */
    float *wanted; /* [rows][n]: by which experts are chosen */
    float *shares;
    uint32_t *chosen;
} run_t;

/* Finds the indices of the k largest of n numbers, by falling size. Of equal numbers the first comes first. */
static void largest(const float *x, size_t n, size_t k, uint32_t *index) {
    size_t found = 0;
    for (size_t i = 0; i < n; i++) {
        if (found == k && !(x[i] > x[index[k - 1]])) continue;
        size_t to = found < k ? found++ : k - 1;
        for (; to > 0 && x[i] > x[index[to - 1]]; to--) index[to] = index[to - 1];
        index[to] = (uint32_t)i;
    }
}

static void score(const fd_router_t *r, float *x) {
    float most = -INFINITY, sum = 0.0f;
    for (size_t i = 0; i < r->n; i++) {
        x[i] *= r->output_scale;
        if (x[i] > most) most = x[i];
    }
    for (size_t i = 0; i < r->n; i++) {
        x[i] = r->sigmoid ? fd_sigmoid(x[i]) : expf(x[i] - most);
        sum += x[i];
    }
    for (size_t i = 0; i < r->n && !r->sigmoid; i++) x[i] /= sum;
}

/* Makes the numbers of those experts lower than any score that are in none of the best groups. */
static void limit_to_groups(const fd_router_t *r, float *wanted) {
    const size_t size = r->n / r->groups;
    float sums[FD_MOST_GROUPS];
    uint32_t best[FD_MOST_GROUPS];
    for (size_t group = 0; group < r->groups; group++) {
        sums[group] = 0.0f;
        largest(wanted + group * size, size, r->group_best, best);
        for (size_t i = 0; i < r->group_best; i++) sums[group] += wanted[group * size + best[i]];
    }
    largest(sums, r->groups, r->used_groups, best);
    bool used[FD_MOST_GROUPS] = {false};
    for (size_t i = 0; i < r->used_groups; i++) used[best[i]] = true;
    for (size_t i = 0; i < r->n; i++)
        if (!used[i / size]) wanted[i] = -INFINITY;
}

static void choose_rows(void *data, size_t first, size_t n) {
    const run_t *run = data;
    const fd_router_t *r = run->r;
    for (size_t row = first; row < first + n; row++) {
        float *scores = run->scores + row * r->n, *wanted = run->wanted + row * r->n;
        float *shares = run->shares + row * r->used, sum = 0.0f;
        uint32_t *chosen = run->chosen + row * r->used;
        score(r, scores);
        for (size_t i = 0; i < r->n; i++) wanted[i] = scores[i] + (r->correction ? r->correction[i] : 0.0f);
        if (r->groups > 1) limit_to_groups(r, wanted);
        largest(wanted, r->n, r->used, chosen);
        for (size_t i = 0; i < r->used; i++) sum += shares[i] = scores[chosen[i]];
        const float divisor = r->least_sum > 0.0f ? fmaxf(sum, r->least_sum) : 1.0f;
        for (size_t i = 0; i < r->used; i++) {
            shares[i] = shares[i] / divisor * r->scale;
            if (r->expert_scale) shares[i] *= r->expert_scale[chosen[i]];
        }
    }
}

size_t fd_router_scratch(const fd_router_t *r, size_t rows) { return 2 * rows * r->n; }

void fd_router_run(const fd_router_t *r, const void *x, size_t rows, float *scratch, uint32_t *chosen, float *shares,
                   unsigned threads) {
    run_t run = {r, scratch, scratch + rows * r->n, shares, chosen};
    const fd_router_rows_t o = {x, r->weight, r->bias, run.scores, r->n, r->width, rows, r->single};
    fd_router_rows(r->ops, &o, threads);
    fd_parallel(choose_rows, &run, rows, 0, fd_worth_threads(rows * r->n * 8, threads));
}
