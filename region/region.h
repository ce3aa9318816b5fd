/* The activation region: the memory through which an S-node sends Q, K and V rows and receives O rows.
 *
 * Each link has one region, with the same layout at both ends. A carrier (carrier.h) only makes the bytes written at
 * one end appear at the other end, the word that announces them last. A shared-memory link maps one memfd at both ends
 * and moves nothing.
 *
 *   region   [ header page ][ slot 0 ][ slot 1 ] ...   one slot for each mini-batch in flight
 *   slot     [ words, headers ][ row table ][ Q rows ][ KV rows ][ O rows ]
 *
 * A step is armed once, and then its layers are rung:
 *
 *   S side                                               R side
 *   writes `arm` and the row table, rings `arm_bell`     checks both, takes pages, plans the step, writes `report` (the
 *                                                        verdict), rings `armed_bell`
 *   writes the layer's rows, layer_request = layer + 1   appends, attends, writes the O rows, layer_reply = layer + 1
 *
 * The steps of a slot are numbered 1, 2, 3, ...; a bell shows the number of the last step that was armed or judged. The
 * two layer words start each step at 0, so that a device can ring them from a list of commands that never changes. Each
 * side resets the word that it reads: the R side layer_request before it answers ARM, the S side layer_reply before it
 * asks for the first layer. The R side serves the next layer whenever layer_request >= that layer + 1. A step that is
 * armed while another is unfinished replaces it.
 *
 * `report` is written twice: with the verdict on ARM, and with the step's totals before the reply of the last layer. A
 * step that cannot go on gets a report and then FD_POISON in layer_reply, which opens every gate that compares with >=.
 * When a link dies, the S side itself writes FD_POISON there; a late reply may overwrite it, so a watchdog writes it
 * again (fd_port_poison) until the step has been disarmed. The rows of a poisoned step are not used.
 *
 * Rows are ordered by table entry. Entries that attend come first, so there are `n_attend_rows` Q and O rows and
 * `n_rows` KV rows:
 *
 *   Q row    n_q_heads * head_size elements of the activation dtype       (row i of Q belongs to row i of KV)
 *            then, of a layer with an indexer, index_heads * index_size of the index queries and index_heads of their
 *            weights; a row has room for a multiple of FD_HEAD_SIZE_UNIT weights
 *   KV row   n_kv_heads * head_size elements of K, then n_kv_heads * v_size of V, unless V is a part of K (v_in_k)
 *            then, of a layer with an indexer, index_size elements of the index key
 *   O row    n_q_heads * v_size elements
 *
 * In a link that keeps a part of the tokens (kernels/engine/parts.h), O rows are those of the part, and n_q_heads fp32
 * log-sum-exps of its scores follow a layer's O heads. Each entry's rows are sent to all parts.
 *
 * A layer may have fewer or smaller heads than the geometry (kernels/engine/layers.h). Its elements stand at the start
 * of its rows, which are as long as those of every other layer.
 *
 * Each word has a cache line of its own and is written with release and read with acquire. Everything is little-endian.
 *
 * Code that reads memory which a peer can write treats it as hostile: it copies the header and the table, checks the
 * copy and uses the copy.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdbool.h>
#include <string.h>

#include "formats.h"

/* Version of this layout, the control messages and the hand-shake together. Both ends must have the same one. */
#define FD_PROTOCOL_VERSION 15
#define FD_REGION_MAGIC 0x4e474552u /* "REGN" */
#define FD_LINE 64u
#define FD_REGION_PAGE 4096u

/* Limits of a geometry. They bound everything that is allocated from a peer's numbers. */
#define FD_MAX_SLOTS 16
#define FD_MAX_ROWS 65536
#define FD_MAX_LAYERS 1024
#define FD_MAX_HEADS 1024
#define FD_MAX_HEAD_SIZE 576 /* that of DeepSeek-V2 and V3, absorbed */
#define FD_HEAD_SIZE_UNIT 8  /* every head size is a multiple of it */
#define FD_MAX_INDEX_TOPK 4096
#define FD_MAX_SELECTED 67108864 /* tokens that the rows of a call select, all together */
/* Query heads x head size x index_topk. A thread attends to all selected tokens of a row before another link's call can
 * have it; DeepSeek-V3.2 has 151 million, a few milliseconds. */
#define FD_MAX_SELECTED_WORK (1ull << 29)

/* Limits of a lease. */
#define FD_MAX_PAGES (1u << 25) /* a token's position always fits 32 bits */
#define FD_MAX_SEQS (1u << 20)
#define FD_MAX_SECTIONS 16u /* into which the layers of a link are divided, see kernels/cache/planes.h */

/* Limit on the attention of a call. Calls of several links take turns in slices, so a long one holds up no other link;
 * the limit bounds how long it holds up its own link, and what is lost when the link ends. The unit is query heads x
 * head size x (attending row, cached token) pairs; each is one multiply-add of QK^T and one of PV. The limit is about
 * 10 s of one AVX-512 core, or five decode steps over 1 TiB of an 8B model's cache. */
#define FD_MAX_CALL_WORK (1ull << 39)

/* What both ends agree on at HELLO. It alone determines the layout of the region. */
typedef struct {
    uint32_t n_slots;  /* mini-batches in flight */
    uint32_t max_rows; /* most rows of a call, attending or not; also most entries of a row table */
    uint32_t n_layers;
    uint32_t n_q_heads;  /* this and the sizes below: the most that any layer has */
    uint32_t n_kv_heads; /* divides n_q_heads */
    uint32_t head_size;  /* of Q and K: a multiple of FD_HEAD_SIZE_UNIT, at most FD_MAX_HEAD_SIZE */
    uint32_t act_dtype;  /* fd_act_dtype_t */
    uint32_t v_size;     /* of V and O: likewise */
    uint32_t v_in_k;     /* 1: V of a head is the first v_size elements of its K, as in latent attention */
    /* Trained sparse attention, 0 without it: the heads of an indexer, their size, and the most tokens that a row
     * attends to in a layer that selects tokens. */
    uint32_t index_heads, index_size, index_topk;
} fd_geometry_t;

/* First page of a region. The R side writes it before the S side sees it; only `engine_asleep` changes later. */
typedef struct {
    uint32_t magic;
    uint32_t version;
    fd_geometry_t geometry;
    uint8_t pad[FD_LINE - 56];
    /* 1 while the R-engine sleeps: after it has rung, the S side must wake the R-engine (eventfd). */
    uint32_t engine_asleep __attribute__((aligned(64)));
} fd_region_header_t;

/* What ARM announces: the sizes of a step. The numbers of rows hold for all of its layers. */
typedef struct {
    uint64_t number;    /* of the step; equals the arm bell */
    uint32_t n_entries; /* of the row table */
    uint32_t n_rows;
    uint32_t n_attend_rows; /* <= n_rows */
    uint32_t n_layers;      /* the step runs the first ones of the link: 1 to the geometry's n_layers */
    uint32_t reserved[10];  /* 0 */
} fd_arm_t;

enum {                     /* fd_row_t.flags */
       FD_ROW_ATTEND = 1u, /* the rows attend; without it their K and V are only appended (prefill) */
       FD_ROW_TRIM = 2u,   /* the sequence may have more than `pos` tokens, which are dropped first; `pos` is not 0 */
       FD_ROW_SLIDE = 4u,  /* no row before `pos` will come: pages that no later row sees are given back first */
       /* The other tokens of the sequence lie elsewhere. `n_rows` is twice the number of queries, which attend to the
        * `pos` tokens that are cached and append none. Row 2j of the entry is query j and its O row, without sinks; in
        * O row 2j + 1 stands the log-sum-exp of its scores, fp32 for each query head. Attends, and has no other flag.
        */
       FD_ROW_PARTIAL = 8u,
};

/* An entry of the row table: one sequence's part of a step. */
typedef struct {
    uint32_t seq_index; /* of the sequence in this link's lease, below the lease's max_seqs */
    uint32_t tag;       /* how often the S-node has given out this index; the entry with pos 0 sets it */
    uint32_t pos;       /* number of tokens already cached, which is the position of the first new row */
    uint32_t n_rows;    /* new tokens, >= 1; row j attends to positions [0, pos + j] within the window */
    uint32_t flags;     /* FD_ROW_* */
    uint32_t reserved;  /* 0 */
} fd_row_t;

/* X(constant, value) for the status of a report. */
#define FD_STATUSES(X)                                                                                                 \
    X(FD_OK, 0)                                                                                                        \
    X(FD_BAD_CALL, 1)     /* step header or layer out of order or out of bounds */                                     \
    X(FD_BAD_TABLE, 2)    /* row table inconsistent or outside the lease */                                            \
    X(FD_BAD_SEQUENCE, 3) /* tag or position does not match what is cached */                                          \
    X(FD_OUT_OF_PAGES, 4)                                                                                              \
    X(FD_LINK_CLOSED, 5)                                                                                               \
    X(FD_INTERNAL, 6)

#define FD_STATUS_CONSTANT(constant, value) constant = value,
typedef enum { FD_STATUSES(FD_STATUS_CONSTANT) } fd_status_t;

/* The R side's verdict on ARM, and the totals of a step that has ended. */
typedef struct {
    uint64_t number;   /* of the step */
    uint32_t status;   /* fd_status_t */
    uint32_t n_layers; /* layers served so far */
    uint64_t busy_ns;  /* time that the R-engine worked on its layers */
    uint64_t kv_bytes; /* bytes of KV-cache that it read */
    char message[224]; /* UTF-8, NUL-terminated; empty if FD_OK */
} fd_report_t;

#define FD_POISON 0x7fffffffu /* in layer_reply: the step has failed */

/* The head of a slot. The S side writes the first three parts, the R side the others, and the S side `waiting`. */
typedef struct {
    uint64_t arm_bell __attribute__((aligned(64)));
    fd_arm_t arm __attribute__((aligned(64)));
    uint32_t layer_request __attribute__((aligned(64)));
    uint64_t armed_bell __attribute__((aligned(64)));
    uint32_t layer_reply __attribute__((aligned(64)));
    fd_report_t report __attribute__((aligned(64)));
    /* Number of threads asleep on layer_reply or on the low half of armed_bell (futexes). */
    uint32_t waiting __attribute__((aligned(64)));
} fd_slot_t;

_Static_assert(sizeof(fd_geometry_t) == 48, "geometry is 48 bytes on the wire");
_Static_assert(sizeof(fd_arm_t) == 64, "a step's header is one cache line");
_Static_assert(sizeof(fd_row_t) == 24, "a row table entry is 24 bytes on the wire");
_Static_assert(sizeof(fd_report_t) == 256, "a report is four cache lines");
_Static_assert(sizeof(fd_slot_t) == 640, "slot head");

/* Byte offsets. `table`, `q`, `kv` and `o` count from the start of the slot. */
typedef struct {
    size_t slot0, slot_bytes, region_bytes;
    size_t table, q, kv, o;
    size_t q_row_bytes, kv_row_bytes, o_row_bytes;
} fd_layout_t;

/* Copies from memory that the peer may be writing. The barrier keeps the compiler from reading that memory again. */
static inline void fd_copy_out(void *dst, const void *src, size_t n) {
    memcpy(dst, src, n);
    __asm__ __volatile__("" : : "r"(dst) : "memory");
}

static inline size_t fd_round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }
static inline size_t fd_min(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t fd_max(size_t a, size_t b) { return a > b ? a : b; }

#define FD_TEXT_OF(value) #value
#define FD_TEXT(macro) FD_TEXT_OF(macro) /* the macro's value as a string literal */

/* NULL if the head size is valid, else a readable reason. */
static inline const char *fd_head_size_error(uint64_t head_size) {
    if (head_size >= FD_HEAD_SIZE_UNIT && head_size <= FD_MAX_HEAD_SIZE && head_size % FD_HEAD_SIZE_UNIT == 0)
        return NULL;
    return "head size is not a multiple of " FD_TEXT(FD_HEAD_SIZE_UNIT) " within " FD_TEXT(
        FD_HEAD_SIZE_UNIT) ".." FD_TEXT(FD_MAX_HEAD_SIZE);
}

/* NULL if a geometry may have these numbers of an indexer, else a readable reason. */
static inline const char *fd_index_error(const fd_geometry_t *g) {
    if (!g->index_heads && !g->index_size && !g->index_topk) return NULL;
    if (g->index_heads < 1 || g->index_heads > FD_MAX_HEADS)
        return "number of index heads is not within 1.." FD_TEXT(FD_MAX_HEADS);
    if (fd_head_size_error(g->index_size)) return fd_head_size_error(g->index_size);
    if (g->index_topk < 1 || g->index_topk > FD_MAX_INDEX_TOPK)
        return "number of tokens that an indexer selects is not within 1.." FD_TEXT(FD_MAX_INDEX_TOPK);
    if ((uint64_t)g->max_rows * g->index_topk > FD_MAX_SELECTED)
        return "the rows of a call select more than " FD_TEXT(FD_MAX_SELECTED) " tokens";
    if ((uint64_t)g->n_q_heads * g->head_size * g->index_topk > FD_MAX_SELECTED_WORK)
        return "query heads x head size x selected tokens exceed 2^29";
    if (!g->v_in_k || g->n_kv_heads != 1) return "only latent attention, with one KV head, can have an indexer";
    return NULL;
}

/* NULL if the geometry is valid, else a readable reason. */
static inline const char *fd_geometry_error(const fd_geometry_t *g) {
    if (g->n_slots < 1 || g->n_slots > FD_MAX_SLOTS) return "number of slots is not within 1.." FD_TEXT(FD_MAX_SLOTS);
    if (g->max_rows < 1 || g->max_rows > FD_MAX_ROWS) return "rows per call are not within 1.." FD_TEXT(FD_MAX_ROWS);
    if (g->n_layers < 1 || g->n_layers > FD_MAX_LAYERS)
        return "number of layers is not within 1.." FD_TEXT(FD_MAX_LAYERS);
    if (g->n_q_heads < 1 || g->n_q_heads > FD_MAX_HEADS)
        return "number of query heads is not within 1.." FD_TEXT(FD_MAX_HEADS);
    if (g->n_kv_heads < 1 || g->n_kv_heads > g->n_q_heads) return "number of KV heads is not within 1..query heads";
    if (g->n_q_heads % g->n_kv_heads) return "query heads are not a multiple of KV heads";
    if (fd_head_size_error(g->head_size)) return fd_head_size_error(g->head_size);
    if (fd_head_size_error(g->v_size)) return fd_head_size_error(g->v_size);
    if (g->act_dtype >= FD_ACT_DTYPES) return "unknown activation dtype";
    if (g->v_in_k > 1) return "whether V is a part of K is not 0 or 1";
    return fd_index_error(g);
}

/* The geometry must be valid: the limits that fd_geometry_error checks keep every product within 64 bits. */
static inline fd_layout_t fd_region_layout(const fd_geometry_t *g) {
    fd_layout_t y;
    size_t elem = fd_act_bytes(g->act_dtype);
    const size_t index_q = g->index_heads * g->index_size + fd_round_up(g->index_heads, FD_HEAD_SIZE_UNIT);
    y.q_row_bytes = ((size_t)g->n_q_heads * g->head_size + index_q) * elem;
    y.kv_row_bytes = ((size_t)g->n_kv_heads * (g->head_size + (g->v_in_k ? 0 : g->v_size)) + g->index_size) * elem;
    y.o_row_bytes = (size_t)g->n_q_heads * g->v_size * elem;
    y.table = sizeof(fd_slot_t);
    y.q = fd_round_up(y.table + (size_t)g->max_rows * sizeof(fd_row_t), FD_REGION_PAGE);
    y.kv = fd_round_up(y.q + g->max_rows * y.q_row_bytes, FD_REGION_PAGE);
    y.o = fd_round_up(y.kv + g->max_rows * y.kv_row_bytes, FD_REGION_PAGE);
    y.slot_bytes = fd_round_up(y.o + g->max_rows * y.o_row_bytes, FD_REGION_PAGE);
    y.slot0 = FD_REGION_PAGE;
    y.region_bytes = y.slot0 + g->n_slots * y.slot_bytes;
    return y;
}

/* Checks a copied step header against the geometry. NULL if the rows that it announces fit in the slot. */
static inline const char *fd_arm_error(const fd_geometry_t *g, const fd_arm_t *a) {
    if (a->n_rows < 1 || a->n_rows > g->max_rows) return "rows outside the slot";
    if (a->n_attend_rows > a->n_rows) return "more attending rows than rows";
    if (a->n_entries < 1 || a->n_entries > a->n_rows) return "row table longer than the rows";
    if (a->n_layers < 1 || a->n_layers > g->n_layers) return "layers beyond the model";
    for (int i = 0; i < 10; i++)
        if (a->reserved[i]) return "reserved field is not zero";
    return NULL;
}
