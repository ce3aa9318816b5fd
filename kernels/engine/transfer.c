/* Pages of a sequence on their way from one R-node to another: the bytes of both ends. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "engine_state.h"
#include "cache/fail.h"
#include "cache/memory.h"

enum {
    MOST_PIECES = 64,     /* of a call, each a plane of a page */
    MOST_BYTES = 1 << 20, /* of a call, so that the caller's thread soon does other work */
};

typedef struct {
    uint32_t seq_index, tag, first, n;
    uint64_t offset;
} range_t;

/* Looks up the memory of the next bytes of a range. Returns the number of pieces, or a negative fd_status_t. */
static int64_t next_pieces(fd_link_t *link, const range_t *r, struct iovec *pieces, char *err, size_t err_len) {
    const fd_kvcache_t *kv = &link->kv;
    const size_t plane_bytes = kv->planes.plane_bytes;
    const uint64_t page_bytes = (uint64_t)kv->planes.n_planes * plane_bytes;
    const uint64_t first = (uint64_t)r->first * kv->planes.n_sections, n = (uint64_t)r->n * kv->planes.n_sections;
    if (r->offset / page_bytes >= n) return -(int64_t)FD_FAIL(FD_BAD_SEQUENCE, "no bytes are left of %u blocks", r->n);
    const uint32_t *pages;
    uint32_t n_pages;
    int64_t n_pieces = 0;
    pthread_mutex_lock(&link->mutex);
    fd_status_t status = fd_kvcache_pages(&link->kv, r->seq_index, r->tag, &pages, &n_pages, err, err_len);
    if (status == FD_OK && (first > n_pages || n > n_pages - first))
        status = FD_FAIL(FD_BAD_SEQUENCE, "sequence %u has %u blocks, not %u from block %u on", r->seq_index,
                         n_pages / kv->planes.n_sections, r->n, r->first);
    uint64_t at = r->offset, end = at + MOST_BYTES;
    while (status == FD_OK && n_pieces < MOST_PIECES && at < end && at / page_bytes < n) {
        const uint32_t page = pages[first + at / page_bytes], plane = (uint32_t)(at % page_bytes / plane_bytes);
        if (page == FD_NO_PAGE) {
            status = FD_FAIL(FD_BAD_SEQUENCE, "sequence %u has given back pages and cannot be moved", r->seq_index);
            break;
        }
        const size_t from = at % plane_bytes;
        size_t bytes = plane_bytes - from;
        if (bytes > end - at) bytes = end - at;
        pieces[n_pieces++] = (struct iovec){fd_kv_plane(kv, plane, page) + from, bytes};
        at += bytes;
    }
    pthread_mutex_unlock(&link->mutex);
    return status == FD_OK ? n_pieces : -(int64_t)status;
}

static int64_t outcome(ssize_t moved, int *error) {
    if (moved >= 0) return moved;
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return 0;
    *error = errno;
    return INT64_MIN;
}

int64_t fd_link_send_pages(fd_link_t *link, int fd, uint32_t seq_index, uint32_t tag, uint32_t first, uint32_t n,
                           uint64_t offset, int *error, char *err, size_t err_len) {
    struct iovec pieces[MOST_PIECES];
    const range_t range = {seq_index, tag, first, n, offset};
    const int64_t n_pieces = next_pieces(link, &range, pieces, err, err_len);
    if (n_pieces < 0) return n_pieces;
    const struct msghdr message = {.msg_iov = pieces, .msg_iovlen = (size_t)n_pieces};
    return outcome(sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL), error);
}

int64_t fd_link_receive_pages(fd_link_t *link, int fd, uint32_t seq_index, uint32_t tag, uint32_t first, uint32_t n,
                              uint64_t offset, int *error, char *err, size_t err_len) {
    struct iovec pieces[MOST_PIECES];
    const range_t range = {seq_index, tag, first, n, offset};
    const int64_t n_pieces = next_pieces(link, &range, pieces, err, err_len);
    if (n_pieces < 0) return n_pieces;
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = (size_t)n_pieces};
    const ssize_t moved = recvmsg(fd, &message, MSG_DONTWAIT);
    if (moved == 0) {
        *error = ECONNRESET;
        return INT64_MIN;
    }
    return outcome(moved, error);
}

int64_t fd_link_fault_in(fd_link_t *link, uint32_t seq_index, uint32_t tag, uint32_t first, uint32_t n, uint64_t offset,
                         char *err, size_t err_len) {
    struct iovec pieces[MOST_PIECES];
    const range_t range = {seq_index, tag, first, n, offset};
    const int64_t n_pieces = next_pieces(link, &range, pieces, err, err_len);
    if (n_pieces < 0) return n_pieces;
    int64_t bytes = 0;
    for (int64_t i = 0; i < n_pieces; i++) {
        fd_memory_fault_in(pieces[i].iov_base, pieces[i].iov_len); /* if it fails, the bytes fault when they come */
        bytes += (int64_t)pieces[i].iov_len;
    }
    return bytes;
}

int64_t fd_link_copy_pages(fd_link_t *from, uint32_t seq_index, uint32_t tag, fd_link_t *to, uint32_t to_index,
                           uint32_t to_tag, uint32_t first, uint32_t n, uint64_t offset, char *err, size_t err_len) {
    const fd_planes_t *here = &from->kv.planes, *there = &to->kv.planes;
    if (here->n_planes != there->n_planes || here->plane_bytes != there->plane_bytes ||
        here->n_sections != there->n_sections)
        return -(int64_t)FD_FAIL(FD_BAD_SEQUENCE, "the pages of the two links differ");
    struct iovec sources[MOST_PIECES], targets[MOST_PIECES];
    const range_t source = {seq_index, tag, first, n, offset}, target = {to_index, to_tag, first, n, offset};
    const int64_t n_sources = next_pieces(from, &source, sources, err, err_len);
    if (n_sources < 0) return n_sources;
    const int64_t n_targets = next_pieces(to, &target, targets, err, err_len);
    if (n_targets < 0) return n_targets;
    int64_t copied = 0;
    /* Both ranges begin at the same byte of a page and have the same planes, so their pieces are of equal lengths. */
    for (int64_t i = 0; i < n_sources && i < n_targets; i++) {
        memcpy(targets[i].iov_base, sources[i].iov_base, sources[i].iov_len);
        copied += (int64_t)sources[i].iov_len;
    }
    return copied;
}

int fd_link_receive(fd_link_t *link, uint32_t seq_index, uint32_t tag, uint32_t length, char *err, size_t err_len) {
    pthread_mutex_lock(&link->mutex);
    const fd_status_t status = fd_kvcache_receive(&link->kv, seq_index, tag, length, err, err_len);
    pthread_mutex_unlock(&link->mutex);
    return -(int)status;
}
