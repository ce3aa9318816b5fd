#include "planes.h"

#include "attention/attention.h"
#include "region/region.h"

static size_t store_bytes(const fd_store_t *s) { return s->n_kv_heads * s->chunk_bytes + s->index_bytes; }

/* Whether a layer before layer `i` is as large. */
static bool is_repeated(const fd_store_t *stores, uint32_t i) {
    for (uint32_t j = 0; j < i; j++)
        if (store_bytes(&stores[j]) == store_bytes(&stores[i])) return true;
    return false;
}

/* Puts each layer of limited reach, or each of the others, into the first plane that has room for it. Returns the
 * number of planes. */
static uint32_t lay_out(const fd_stored_t *layers, fd_store_t *stores, uint32_t n, bool limited, size_t plane_bytes) {
    size_t used[FD_MAX_LAYERS];
    uint32_t n_planes = 0;
    for (uint32_t i = 0; i < n; i++) {
        if ((layers[i].reach > 0) != limited) continue;
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

static uint32_t divided(uint32_t n, uint32_t by) { return (n + by - 1) / by; }

/* Divides `limited` and `full` planes into sections of equally many planes, so that few planes stay empty. A section
 * costs as much as an empty plane, because each has a page list of its own in every sequence. */
static fd_planes_t divide(uint32_t limited, uint32_t full, size_t plane_bytes) {
    fd_planes_t best = {0};
    if (!limited || !full)
        return (fd_planes_t){
            .n_planes = limited + full, .plane_bytes = plane_bytes, .n_sections = 1, .n_limited = limited > 0};
    for (uint32_t n = fd_max(limited, full); n; n--) {
        const uint32_t n_limited = divided(limited, n), n_sections = n_limited + divided(full, n);
        if (n_sections > FD_MAX_SECTIONS) break;
        if (best.n_planes && (n + 1) * n_sections > (best.n_planes + 1) * best.n_sections) continue;
        best =
            (fd_planes_t){.n_planes = n, .plane_bytes = plane_bytes, .n_sections = n_sections, .n_limited = n_limited};
    }
    return best;
}

static size_t block_bytes(const fd_planes_t *p) { return p->n_sections * p->n_planes * p->plane_bytes; }

fd_planes_t fd_planes_of(const fd_stored_t *layers, uint32_t n, fd_kv_dtype_t dtype, fd_store_t *stores) {
    size_t largest = 0;
    fd_planes_t best = {0};
    for (uint32_t i = 0; i < n; i++) {
        const fd_heads_t *h = &layers[i].heads;
        const uint32_t index = layers[i].index_size;
        stores[i] = (fd_store_t){
            .n_kv_heads = h->n_kv_heads,
            .chunk_bytes = fd_kv_chunk_bytes(dtype, h->head_size, h->v_size, h->v_in_k),
            .index_bytes = index ? fd_kv_chunk_bytes(fd_index_dtype(dtype), index, index, true) : 0,
        };
        largest = fd_max(largest, store_bytes(&stores[i]));
        best.reach = fd_max(best.reach, layers[i].reach);
    }
    /* Planes of a whole number of layers of some size, just large enough for the largest layer. */
    for (uint32_t i = 0; i < n; i++) {
        if (is_repeated(stores, i)) continue;
        const size_t plane_bytes = fd_round_up(largest, store_bytes(&stores[i]));
        const uint32_t limited = lay_out(layers, stores, n, true, plane_bytes),
                       full = lay_out(layers, stores, n, false, plane_bytes), reach = best.reach;
        const fd_planes_t planes = divide(limited, full, plane_bytes);
        if (!best.n_planes || block_bytes(&planes) < block_bytes(&best)) best = planes;
        best.reach = reach;
    }
    lay_out(layers, stores, n, true, best.plane_bytes);
    lay_out(layers, stores, n, false, best.plane_bytes);
    for (uint32_t i = 0; i < n; i++) {
        stores[i].section = stores[i].plane / best.n_planes + (layers[i].reach ? 0 : best.n_limited);
        stores[i].plane %= best.n_planes;
    }
    return best;
}
