/* Runs joints whose products and row operations only look at their addresses: what stands in the scratch begins with a
 * cache line, wherever the scratch is. */

#include "decoder/joint.h"
#include "cpu/parallel.h"
#include "require.h"

enum { LINE = 64, ROWS = 3, HEADS = 3, HEAD_SIZE = 10, HIDDEN = 30, INNER = 50, QKV = 4 * HEADS * HEAD_SIZE };
enum { V_WIDTH = 8, STATE = 2 * 3 + 2 * V_WIDTH + 4 }; /* of the rule */

static uint16_t o[ROWS * HIDDEN];
static uint8_t memory[4096];
static const uint8_t *begin, *end; /* of the scratch */
static int products, mixtures;

static bool is_line(const void *numbers, size_t bytes) {
    const uint8_t *at = numbers;
    return (uintptr_t)at % LINE == 0 && at >= begin && at + bytes <= end;
}

static fd_status_t multiply(const void *ops, const fd_linear_task_t *task, size_t n, size_t stride, unsigned threads) {
    (void)ops, (void)threads;
    REQUIRE(n == 1 && (task->x == o || is_line(task->x, task->rows * 2)));
    REQUIRE(is_line(task->y, task->rows * stride * 2));
    products++;
    return FD_OK;
}

size_t fd_experts_scratch(const fd_experts_t *e, size_t rows) {
    (void)e, (void)rows;
    return LINE;
}
fd_status_t fd_experts_run(const fd_experts_t *e, const fd_expert_rows_t *r, void *scratch, unsigned threads) {
    (void)e, (void)threads;
    REQUIRE(r->x == r->router_x && is_line(r->x, r->rows * HIDDEN * 2) && is_line(r->out, r->rows * HIDDEN * 2));
    REQUIRE(is_line(scratch, LINE));
    mixtures++;
    return FD_OK;
}
fd_loop_kind_t fd_loops_compute(fd_loop_kind_t kind) { return kind; }
fd_status_t fd_reduction_sum(fd_reduction_t *r, void *y, size_t n, uint32_t dtype, unsigned threads) {
    (void)r, (void)y, (void)n, (void)dtype, (void)threads;
    return FD_OK;
}
void fd_norm_rows(const fd_row_ops_t *ops, const fd_norm_rows_t *rows, size_t n, unsigned threads) {
    (void)ops, (void)rows, (void)n, (void)threads;
}
void fd_gate_rows(const fd_row_ops_t *ops, const fd_gate_rows_t *rows, size_t n, unsigned threads) {
    (void)ops, (void)rows, (void)n, (void)threads;
}
void fd_sigmoid_rows(const fd_row_ops_t *ops, const fd_sigmoid_rows_t *rows, size_t n, unsigned threads) {
    (void)ops, (void)n, (void)threads;
    REQUIRE(rows->x == o && is_line(rows->out, ROWS * HEADS * HEAD_SIZE * 2));
}
void fd_router_rows(const fd_row_ops_t *ops, const fd_router_rows_t *rows, unsigned threads) {
    (void)ops, (void)threads;
    REQUIRE(is_line(rows->out, ROWS * sizeof(float)));
}
fd_status_t fd_delta_rows(const fd_delta_ops_t *ops, const fd_delta_t *d, const fd_delta_rows_t *r, unsigned threads) {
    (void)ops, (void)threads;
    REQUIRE(is_line(r->y, ROWS * r->y_stride * 2) && is_line(r->out, ROWS * V_WIDTH * 2));
    REQUIRE(r->n == ROWS && is_line(r->scratch, fd_delta_scratch(d, ROWS) * sizeof(float)));
    return FD_OK;
}
fd_status_t fd_latent_project(const fd_latent_t *l, const fd_latent_rows_t *r, const void *x, unsigned threads) {
    (void)l, (void)r, (void)x, (void)threads;
    return FD_INTERNAL; /* no layer is latent */
}
fd_status_t fd_latent_outputs(const fd_latent_t *l, const fd_latent_rows_t *r, unsigned threads) {
    (void)l, (void)r, (void)threads;
    return FD_INTERNAL;
}
void fd_rope_rows(const fd_row_ops_t *ops, const fd_rope_rows_t *rows, size_t n, unsigned threads) {
    (void)ops, (void)rows, (void)n, (void)threads;
}

static fd_products_t one(size_t ins, size_t outs) { return (fd_products_t){{{ins, outs, multiply, NULL, NULL}}, 1}; }

static void norm_row(const fd_norm_rows_t *rows, size_t row, size_t n) { (void)rows, (void)row, (void)n; }

int main(void) {
    const size_t width = HEADS * HEAD_SIZE;
    const fd_row_ops_t ops = {.norm = norm_row};
    const fd_experts_t experts = {0};
    const fd_feed_forward_t mlp = {.norm = &width,
                                   /* which nothing reads */ .inner = INNER,
                                   .up = one(HIDDEN, 2 * INNER),
                                   .down = one(INNER, HIDDEN)};
    fd_feed_forward_t shared = mlp;
    shared.experts = &experts, shared.shared_gate = &width;
    const fd_joint_layer_t layer = {.q_heads = HEADS,
                                    .kv_heads = HEADS,
                                    .head_size = HEAD_SIZE,
                                    .attention_norm = &width,
                                    .qkv = one(HIDDEN, QKV),
                                    .o = one(width, HIDDEN),
                                    .feed_forward = mlp};
    fd_joint_layer_t with_experts = layer;
    with_experts.feed_forward = shared, with_experts.n_states = 1;
    const fd_joint_layer_t layers[] = {layer, with_experts};
    const fd_delta_t rule = {.k_heads = 1, .v_heads = 2, .k_size = 3, .v_size = V_WIDTH / 2};
    const fd_state_block_t state = {
        .norm = &width, .inputs = one(HIDDEN, STATE), .out = one(V_WIDTH, HIDDEN), .rule = &rule, .feed_forward = mlp};
    const fd_state_block_t states[] = {state, state};
    const fd_joints_t joints = {.ops = &ops,
                                .number_bytes = 2,
                                .hidden = HIDDEN,
                                .widest = QKV,
                                .output_gate = true,
                                .n_layers = 2,
                                .n_states = 2,
                                .layers = layers,
                                .states = states};
    const fd_states_t slots[2] = {0};
    const fd_joint_rows_t rows = {
        .o = o, .o_stride = HEADS * HEAD_SIZE, .rows = ROWS, .states = slots, .n_singles = ROWS};
    const size_t bytes = fd_joint_scratch(&joints, &rows);
    REQUIRE(bytes + LINE <= sizeof memory);
    for (size_t offset = 0; offset < LINE; offset++) {
        begin = memory + offset, end = begin + bytes;
        for (size_t layer = 0; layer <= 2; layer++)
            REQUIRE(fd_joint_run(&joints, layer, &rows, memory + offset, 1) == FD_OK);
    }
    /* QKV, O and MLP of two layers, and four products of each block with a state. */
    REQUIRE(products == (2 * 4 + 2 * 4) * LINE && mixtures == LINE);
    return 0;
}
