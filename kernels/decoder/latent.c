#include "latent.h"

#include <string.h>

size_t fd_latent_widest(const fd_latent_t *l) {
    const size_t wide = l->rank > l->v_size ? l->rank : l->v_size, q_size = l->k_size + l->rope_size;
    const size_t of_heads = l->heads * (wide > q_size ? wide : q_size), inputs = fd_latent_inputs(l);
    return inputs > of_heads ? inputs : of_heads;
}

/* Where rows of heads stand: head h of row r begins r * row + h * head numbers behind `at`. */
typedef struct {
    uint8_t *at;
    size_t row, head;
} heads_t;

typedef struct {
    heads_t to, from;
    size_t heads, row_bytes, number_bytes; /* row_bytes: of a row of a head */
} copy_t;

static void copy_rows(void *data, size_t first, size_t n) {
    const copy_t *c = data;
    for (size_t row = first; row < first + n; row++)
        for (size_t head = 0; head < c->heads; head++)
            memcpy(c->to.at + (row * c->to.row + head * c->to.head) * c->number_bytes,
                   c->from.at + (row * c->from.row + head * c->from.head) * c->number_bytes, c->row_bytes);
}

/* Copies `n` numbers of each row of each head. */
static void copy_heads(const fd_latent_t *l, const fd_latent_rows_t *r, heads_t to, heads_t from, size_t n,
                       unsigned threads) {
    copy_t copy = {to, from, l->heads, n * r->number_bytes, r->number_bytes};
    fd_parallel(copy_rows, &copy, r->rows, 0, fd_worth_threads(r->rows * l->heads * n, threads));
}

/* The numbers behind an address. */
static uint8_t *behind(const fd_latent_rows_t *r, const void *at, size_t numbers) {
    return (uint8_t *)at + numbers * r->number_bytes;
}

/* Normalises rows of `width` numbers from `from` to `to`, which stand strides apart. */
static void norm_rows(const fd_latent_t *l, const fd_latent_rows_t *r, const void *from, size_t from_row, void *to,
                      size_t to_row, const void *weight, size_t width) {
    for (size_t row = 0; row < r->rows; row++) {
        const fd_norm_rows_t o = {.x = behind(r, from, row * from_row),
                                  .out = behind(r, to, row * to_row),
                                  .weight = weight,
                                  .eps = l->eps,
                                  .width = width};
        r->ops->norm(&o, 0, 1);
    }
}

fd_status_t fd_latent_project(const fd_latent_t *l, const fd_latent_rows_t *r, const void *x, unsigned threads) {
    const size_t q_size = l->k_size + l->rope_size, width = fd_latent_inputs(l), row_size = l->rank + l->rope_size;
    const size_t first = width - row_size, pairs = l->rope_size / 2;
    if (fd_products_multiply(&l->inputs, x, r->a, r->rows, r->number_bytes, threads) != FD_OK) return FD_INTERNAL;
    norm_rows(l, r, behind(r, r->a, first), width, r->kv, r->kv_stride, l->kv_norm, l->rank);
    const fd_turn_rows_t k = {.x = behind(r, r->a, first + l->rank),
                              .out = behind(r, r->kv, l->rank),
                              .x_row = width,
                              .out_row = r->kv_stride,
                              .heads = 1,
                              .pairs = pairs,
                              .cos = r->angles.cos,
                              .sin = r->angles.sin,
                              .interleaved = l->interleaved};
    fd_turn_rows(r->ops, &k, r->rows, threads);
    heads_t q = {r->a, width, q_size};
    if (l->q_rank) {
        norm_rows(l, r, r->a, width, r->b, l->q_rank, l->q_norm, l->q_rank);
        if (fd_products_multiply(&l->q, r->b, r->c, r->rows, r->number_bytes, threads) != FD_OK) return FD_INTERNAL;
        q = (heads_t){r->c, l->heads * q_size, q_size};
    }
    copy_heads(l, r, (heads_t){r->b, l->k_size, r->rows * l->k_size}, q, l->k_size, threads);
    const fd_turn_rows_t turned = {.x = behind(r, q.at, l->k_size),
                                   .out = behind(r, r->q, l->rank),
                                   .x_row = q.row,
                                   .x_head = q.head,
                                   .out_row = r->q_stride,
                                   .out_head = row_size,
                                   .heads = l->heads,
                                   .pairs = pairs,
                                   .cos = r->angles.q_cos,
                                   .sin = r->angles.q_sin,
                                   .interleaved = l->interleaved};
    fd_turn_rows(r->ops, &turned, r->rows, threads);
    if (fd_head_products(l->k, r->b, r->a, r->rows, r->number_bytes, threads) != FD_OK) return FD_INTERNAL;
    copy_heads(l, r, (heads_t){r->q, r->q_stride, row_size}, (heads_t){r->a, l->rank, r->rows * l->rank}, l->rank,
               threads);
    return FD_OK;
}

fd_status_t fd_latent_outputs(const fd_latent_t *l, const fd_latent_rows_t *r, unsigned threads) {
    const heads_t o = {(uint8_t *)r->o, r->o_stride, l->rank}, by_head = {r->b, l->rank, r->rows * l->rank};
    copy_heads(l, r, by_head, o, l->rank, threads);
    if (fd_head_products(l->v, r->b, r->a, r->rows, r->number_bytes, threads) != FD_OK) return FD_INTERNAL;
    copy_heads(l, r, (heads_t){r->b, l->heads * l->v_size, l->v_size}, (heads_t){r->a, l->v_size, r->rows * l->v_size},
               l->v_size, threads);
    return FD_OK;
}
