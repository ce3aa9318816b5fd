#include "planes.h"

#include "attention.h"
#include "region.h"

static size_t store_bytes(const fd_store_t *s) { return s->n_kv_heads * s->chunk_bytes; }

/* Whether a layer before layer `i` is as large. */
static bool is_repeated(const fd_store_t *stores, uint32_t i) {
    for (uint32_t j = 0; j < i; j++)
        if (store_bytes(&stores[j]) == store_bytes(&stores[i])) return true;
    return false;
}

/* Puts each layer into the first plane that has room for it. Returns the number of planes. */
static uint32_t place(fd_store_t *stores, uint32_t n, size_t plane_bytes) {
    size_t used[FD_MAX_LAYERS];
    uint32_t n_planes = 0;
    for (uint32_t i = 0; i < n; i++) {
        const size_t bytes = store_bytes(&stores[i]);
        uint32_t plane = 0;
        while (plane < n_planes && used[plane] + bytes > plane_bytes) plane++;
        if (plane == n_planes) used[n_planes++] = 0;
        stores[i].plane = plane;
        stores[i].offset = used[plane];
        used[plane] += bytes;
    }
    return n_planes;
}

fd_planes_t fd_planes_of(const fd_heads_t *layers, uint32_t n, fd_kv_dtype_t dtype, fd_store_t *stores) {
    size_t largest = 0;
    fd_planes_t best = {0, 0};
    for (uint32_t i = 0; i < n; i++) {
        const fd_heads_t *h = &layers[i];
        stores[i] =
            (fd_store_t){.n_kv_heads = h->n_kv_heads, .chunk_bytes = fd_kv_chunk_bytes(dtype, h->head_size, h->v_size)};
        if (store_bytes(&stores[i]) > largest) largest = store_bytes(&stores[i]);
    }
    /* Planes of a whole number of layers of some size, just large enough for the largest layer. */
    for (uint32_t i = 0; i < n; i++) {
        if (is_repeated(stores, i)) continue;
        const size_t plane_bytes = fd_round_up(largest, store_bytes(&stores[i]));
        const uint32_t n_planes = place(stores, n, plane_bytes);
        if (!best.n_planes || n_planes * plane_bytes < best.n_planes * best.plane_bytes)
            best = (fd_planes_t){n_planes, plane_bytes};
    }
    place(stores, n, best.plane_bytes);
    return best;
}
