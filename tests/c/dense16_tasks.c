/* Products of an ISA that multiplies all outputs at once: every task with rows is computed once, small ones side by
 * side, large ones one after another by all threads, and a failure is told. */
#include "cpu/parallel.h"
#include "linears/dense16.h"
#include "require.h"

enum { MOST_TASKS = 70, THREADS = 4 };

static int computed[MOST_TASKS];
static unsigned least = THREADS, most; /* threads of a product */
static const fd_linear_task_t *failing;

static fd_status_t multiply_all(const fd_dense16_t *l, const void *x, size_t rows, void *y, unsigned threads) {
    (void)l;
    REQUIRE(rows == 3 && *(const int *)x == 7);
    __atomic_fetch_add((int *)y, 1, __ATOMIC_RELAXED);
    if (threads < least) least = threads;
    if (threads > most) most = threads;
    return failing && y == failing->y ? FD_INTERNAL : FD_OK;
}

static const fd_dense16_ops_t ops = {.isa = "test", .panel = 32, .multiply_all = multiply_all};

/* Multiplies rows with `n` matrices of outs x ins, and checks that each product gets `threads` threads. */
static void multiply(size_t n, size_t outs, size_t ins, unsigned threads) {
    const fd_dense16_t linear = {outs, ins, NULL, NULL};
    const int x = 7;
    fd_linear_task_t tasks[MOST_TASKS + 1];
    for (size_t i = 0; i < n; i++) computed[i] = 0, tasks[i] = (fd_linear_task_t){&linear, &x, &computed[i], 3};
    tasks[n] = (fd_linear_task_t){&linear, &x, NULL, 0}; /* an expert without rows */
    least = THREADS, most = 0;
    REQUIRE(fd_dense16_multiply(&ops, tasks, n + 1, THREADS) == FD_OK);
    for (size_t i = 0; i < n; i++) REQUIRE(computed[i] == 1);
    REQUIRE(least == threads && most == threads);
    failing = &tasks[n / 2];
    REQUIRE(fd_dense16_multiply(&ops, tasks, n + 1, THREADS) == FD_INTERNAL);
    failing = NULL;
}

int main(void) {
    multiply(1, 4096, 1024, THREADS);
    multiply(3, 4096, 1024, THREADS);
    multiply(5, 4096, 1024, THREADS);
    multiply(8, 4096, 1024, 1);
    multiply(16, 128, 512, 1);
    multiply(MOST_TASKS, 128, 512, 1);
    multiply(1, 128, 64, 1);
    return 0;
}
