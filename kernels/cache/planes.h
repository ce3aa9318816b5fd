/* Where the layers of a page lie.
 *
 * The arena of a cache consists of planes. In every plane each page has `plane_bytes` bytes, and the pages follow each
 * other. A layer that stores K and V has its chunks, one for each KV head, at a fixed offset in the pages of one plane.
 * A chunk of index keys (attention/attention.h) follows them in a layer with an indexer.
 * A model whose layers are alike has a plane for each of them. Where layers differ, several small ones share a plane.
 *
 * The layers are divided into sections, and a page holds the layers of one section. All layers of a section are of
 * limited reach, or none is, so that the pages of windowed layers can be given back.
 */
#pragma once

#include <stdbool.h>

#include "region/formats.h"

/* The heads of a layer. Sizes count elements. */
typedef struct {
    uint32_t n_q_heads, n_kv_heads;
    uint32_t head_size; /* of Q and K */
    uint32_t v_size;    /* of V and O */
    bool v_in_k;        /* V is the first v_size elements of K, and is not stored */
} fd_heads_t;

/* A layer that stores K and V. */
typedef struct {
    fd_heads_t heads;
    uint32_t reach;      /* most tokens that a token sees in the layers that attend to this K and V; 0: all */
    uint32_t index_size; /* elements of the index key that the layer stores for each token; 0: none */
} fd_stored_t;

/* The place of a layer's K and V in a page. */
typedef struct {
    uint32_t section, plane, n_kv_heads;
    size_t offset; /* of the first KV head's chunk within the plane's part of the page */
    size_t chunk_bytes;
    size_t index_bytes; /* of the chunk of index keys, which follows those of the KV heads; 0: none */
} fd_store_t;

typedef struct {
    uint32_t n_planes;
    size_t plane_bytes; /* of one page; a multiple of 64 */
    /* Sections [0, n_limited) hold layers of limited reach, the others layers that see all tokens. */
    uint32_t n_sections, n_limited;
    uint32_t reach; /* the largest of the limited ones; 0: n_limited is 0 */
} fd_planes_t;

/* The format of index keys in a cache of this format: they are not stored in 4 bits. */
static inline fd_kv_dtype_t fd_index_dtype(fd_kv_dtype_t dtype) { return dtype == FD_KV_INT4 ? FD_KV_INT8 : dtype; }

/* Chooses the planes of `n` layers so that the pages take little more memory than the layers. Fills in stores[n]. Takes
 * time in proportion to n * n for each size that the layers have. */
fd_planes_t fd_planes_of(const fd_stored_t *layers, uint32_t n, fd_kv_dtype_t dtype, fd_store_t *stores);
