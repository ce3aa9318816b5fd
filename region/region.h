/* The activation region: the memory in which an S-node's Q, K, V rows become an R-node's O rows.
 *
 * One region a link, the same layout at both ends. A transport only makes bytes written at one end appear
 * at the other, doorbell last; a shared-memory link maps one memfd twice and moves nothing.
 *
 *   region   [ header page ][ slot 0 ][ slot 1 ] ... one slot a mini-batch in flight
 *   slot     [ request bell | call | reply bell | waiting | reply ][ row table ][ Q rows ][ KV rows ][ O rows ]
 *
 * A call attends one layer of one step. Its row table is sent once a step, with the call that carries
 * FD_CALL_NEW_STEP; the calls for the other layers refer to it. Rows are ordered entry by entry; entries that attend
 * come first, so Q and O hold `n_attend_rows` rows and KV holds `n_rows`:
 *
 *   Q row    n_q_heads  * head_size elements of the activation dtype       (row i of Q belongs to row i of KV)
 *   KV row   K: n_kv_heads * head_size elements, then V: the same
 *   O row    n_q_heads  * head_size elements
 *
 * Doorbells are 64-bit sequence numbers, each on a cache line of its own, written with release and read with
 * acquire. A slot's calls are numbered 1, 2, 3...; the reply to call k rings k. The S side owns the request half until
 * it rings, the R side from then until it rings back. Everything is little-endian.
 *
 * Whoever reads a region that a peer can write must treat it as hostile: copy header and table out first,
 * check the copy, use the copy.
 */
#ifndef FD_REGION_H
#define FD_REGION_H

#include <stddef.h>
#include <stdint.h>
#include <stdbool.h>

#define FD_PROTOCOL_VERSION 1u
#define FD_REGION_MAGIC 0x4e474552u /* "REGN" */
#define FD_LINE 64u
#define FD_REGION_PAGE 4096u

/* Upper bounds a geometry must respect; everything that is allocated from a peer's numbers is bounded by them. */
#define FD_MAX_SLOTS 16u
#define FD_MAX_ROWS 65536u
#define FD_MAX_LAYERS 1024u
#define FD_MAX_HEADS 1024u
#define FD_MAX_HEAD_SIZE 256u

/* An R-engine serves one call at a time, so what one may ask for bounds how long an S-node can keep the others waiting.
 * Its attention: query heads x head size x (attending row, cached token) pairs, each a multiply-add of QK^T and one of
 * PV. That is some 10 s of one AVX-512 core, and five decode steps over 1 TiB of an 8B model's cache. */
#define FD_MAX_CALL_WORK (1ull << 39)

typedef enum { FD_ACT_FP32 = 0, FD_ACT_FP16 = 1, FD_ACT_BF16 = 2 } fd_act_dtype_t;

/* What both ends agree on at HELLO; a region's layout follows from it alone. */
typedef struct {
    uint32_t n_slots;  /* mini-batches in flight */
    uint32_t max_rows; /* rows one call may carry, attending or not; also the most entries of a row table */
    uint32_t n_layers;
    uint32_t n_q_heads;
    uint32_t n_kv_heads; /* divides n_q_heads */
    uint32_t head_size;  /* a multiple of 8, at most FD_MAX_HEAD_SIZE */
    uint32_t act_dtype;  /* fd_act_dtype_t */
    uint32_t reserved;   /* 0 */
} fd_geometry_t;

/* First page of a region. Written by the R side before the S side sees it, except `engine_asleep`. */
typedef struct {
    uint32_t magic;
    uint32_t version;
    fd_geometry_t geometry;
    /* 1 where bells come over a wire that wakes nobody: the R-engine, which looks at this when it takes the link up,
     * then never sleeps long. */
    uint32_t no_wakeup;
    uint8_t pad[FD_LINE - 44];
    /* 1 while the R-engine sleeps and must be woken (eventfd) after a request bell is rung. */
    uint32_t engine_asleep __attribute__((aligned(64)));
} fd_region_header_t;

enum { FD_CALL_NEW_STEP = 1u };

typedef struct {
    uint64_t seq;   /* equals the request bell */
    uint32_t flags; /* FD_CALL_* */
    uint32_t layer;
    uint32_t n_entries; /* of the row table; constant within a step, as are the two below */
    uint32_t n_rows;
    uint32_t n_attend_rows; /* <= n_rows */
    uint32_t reserved[9];   /* 0 */
} fd_call_t;

enum { FD_ROW_ATTEND = 1u }; /* without it the rows' K and V are appended and nothing is read (prefill) */

/* One sequence's share of a step. */
typedef struct {
    uint32_t seq;    /* index of the sequence in this link's lease, < lease max_seqs */
    uint32_t tag;    /* the S-node's generation of that index; fixed by the entry with pos 0 */
    uint32_t pos;    /* tokens already cached == position of the first new row */
    uint32_t n_rows; /* new tokens, >= 1; row j attends to positions [0, pos + j] within the window */
    uint32_t flags;  /* FD_ROW_* */
    uint32_t reserved;
} fd_row_t;

typedef enum {
    FD_OK = 0,
    FD_BAD_CALL = 1,     /* header out of order or out of bounds */
    FD_BAD_TABLE = 2,    /* row table outside the lease or inconsistent */
    FD_BAD_SEQUENCE = 3, /* tag or position do not match what is cached */
    FD_OUT_OF_PAGES = 4,
    FD_LINK_CLOSED = 5,
    FD_INTERNAL = 6,
} fd_status_t;

typedef struct {
    uint64_t seq;
    uint32_t status;        /* fd_status_t */
    uint32_t n_attend_rows; /* O rows that follow; 0 unless FD_OK */
    uint64_t busy_ns;       /* time the R-engine worked on this call */
    uint64_t kv_bytes;      /* KV-cache bytes it read */
    char message[224];      /* UTF-8, NUL-terminated; empty when FD_OK */
} fd_reply_t;

/* Head of a slot. */
typedef struct {
    uint64_t request_bell __attribute__((aligned(64)));
    fd_call_t call __attribute__((aligned(64)));
    uint64_t reply_bell __attribute__((aligned(64)));
    uint32_t reply_waiting __attribute__((aligned(64))); /* waiters asleep on the low half of reply_bell (futex) */
    fd_reply_t reply __attribute__((aligned(64)));
} fd_slot_t;

_Static_assert(sizeof(fd_geometry_t) == 32, "geometry is 32 bytes on the wire");
_Static_assert(sizeof(fd_call_t) == 64, "a call header is one cache line");
_Static_assert(sizeof(fd_row_t) == 24, "a row table entry is 24 bytes on the wire");
_Static_assert(sizeof(fd_reply_t) == 256, "a reply header is four cache lines");
_Static_assert(sizeof(fd_slot_t) == 512, "slot head");

/* Byte offsets. `table`, `q`, `kv`, `o` count from the start of their slot. */
typedef struct {
    size_t slot0, slot_bytes, region_bytes;
    size_t table, q, kv, o;
    size_t q_row_bytes, kv_row_bytes; /* an O row is as long as a Q row */
} fd_layout_t;

static inline size_t fd_act_bytes(uint32_t act_dtype) { return act_dtype == FD_ACT_FP32 ? 4 : 2; }

static inline size_t fd_round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

/* Returns NULL if the geometry is sane, else a readable reason. */
static inline const char *fd_geometry_error(const fd_geometry_t *g) {
    if (g->n_slots < 1 || g->n_slots > FD_MAX_SLOTS) return "number of slots is not within 1..16";
    if (g->max_rows < 1 || g->max_rows > FD_MAX_ROWS) return "rows per call are not within 1..65536";
    if (g->n_layers < 1 || g->n_layers > FD_MAX_LAYERS) return "number of layers is not within 1..1024";
    if (g->n_q_heads < 1 || g->n_q_heads > FD_MAX_HEADS) return "number of query heads is not within 1..1024";
    if (g->n_kv_heads < 1 || g->n_kv_heads > g->n_q_heads) return "number of KV heads is not within 1..query heads";
    if (g->n_q_heads % g->n_kv_heads) return "query heads are not a multiple of KV heads";
    if (g->head_size < 8 || g->head_size > FD_MAX_HEAD_SIZE || g->head_size % 8)
        return "head size is not a multiple of 8 within 8..256";
    if (g->act_dtype > FD_ACT_BF16) return "unknown activation dtype";
    if (g->reserved) return "reserved field is not zero";
    return NULL;
}

/* Only for a geometry that fd_geometry_error accepts (its bounds keep every product within 64 bits). */
static inline fd_layout_t fd_region_layout(const fd_geometry_t *g) {
    fd_layout_t y;
    size_t elem = fd_act_bytes(g->act_dtype);
    y.q_row_bytes = (size_t)g->n_q_heads * g->head_size * elem;
    y.kv_row_bytes = 2 * (size_t)g->n_kv_heads * g->head_size * elem;
    y.table = sizeof(fd_slot_t);
    y.q = fd_round_up(y.table + (size_t)g->max_rows * sizeof(fd_row_t), FD_REGION_PAGE);
    y.kv = fd_round_up(y.q + g->max_rows * y.q_row_bytes, FD_REGION_PAGE);
    y.o = fd_round_up(y.kv + g->max_rows * y.kv_row_bytes, FD_REGION_PAGE);
    y.slot_bytes = fd_round_up(y.o + g->max_rows * y.q_row_bytes, FD_REGION_PAGE);
    y.slot0 = FD_REGION_PAGE;
    y.region_bytes = y.slot0 + g->n_slots * y.slot_bytes;
    return y;
}

/* Checks a (copied) call header against the geometry. NULL if its byte counts stay inside the slot. */
static inline const char *fd_call_error(const fd_geometry_t *g, const fd_call_t *c) {
    if (c->flags & ~FD_CALL_NEW_STEP) return "unknown call flag";
    if (c->layer >= g->n_layers) return "layer beyond the model";
    if (c->n_rows < 1 || c->n_rows > g->max_rows) return "rows outside the slot";
    if (c->n_attend_rows > c->n_rows) return "more attending rows than rows";
    if (c->n_entries < 1 || c->n_entries > c->n_rows) return "row table longer than the rows";
    for (int i = 0; i < 9; i++)
        if (c->reserved[i]) return "reserved field is not zero";
    return NULL;
}

#endif
