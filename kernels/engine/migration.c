/* Pages of a sequence on their way from one R-node to another: the bytes of both ends. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "engine_state.h"
#include "cache/error.h"
#include "cache/memory.h"

enum {
    MOST_PIECES = 64,     /* of a call, each a plane of a page */
    MOST_BYTES = 1 << 20, /* of a call, so that the caller's thread soon does other work */
};

/* Looks up the memory of the next bytes of a range: *n_pieces pieces. */
static fd_status_t next_pieces(fd_link_t *link, const fd_page_range_t *r, struct iovec *pieces, size_t *n_pieces,
                               fd_error_t *error) {
    const fd_kvcache_t *kv = &link->kv;
    const size_t plane_bytes = kv->planes.plane_bytes;
    const uint64_t page_bytes = (uint64_t)kv->planes.n_planes * plane_bytes;
    const uint64_t first = (uint64_t)r->first * kv->planes.n_sections, n = (uint64_t)r->n * kv->planes.n_sections;
    *n_pieces = 0;
    if (r->offset / page_bytes >= n) return FD_FAIL(FD_BAD_SEQUENCE, "no bytes are left of %u blocks", r->n);
    const uint32_t *pages;
    uint32_t n_pages;
    pthread_mutex_lock(&link->mutex);
    fd_status_t status = fd_kvcache_pages(&link->kv, r->seq_index, r->tag, &pages, &n_pages, error);
    if (status == FD_OK && (first > n_pages || n > n_pages - first))
        status = FD_FAIL(FD_BAD_SEQUENCE, "sequence %u has %u blocks, not %u from block %u on", r->seq_index,
                         n_pages / kv->planes.n_sections, r->n, r->first);
    uint64_t at = r->offset, end = at + MOST_BYTES;
    while (status == FD_OK && *n_pieces < MOST_PIECES && at < end && at / page_bytes < n) {
        const uint32_t page = pages[first + at / page_bytes], plane = (uint32_t)(at % page_bytes / plane_bytes);
        if (page == FD_NO_PAGE) {
            status = FD_FAIL(FD_BAD_SEQUENCE, "sequence %u has given back pages and cannot be moved", r->seq_index);
            break;
        }
        const size_t from = at % plane_bytes;
        size_t bytes = plane_bytes - from;
        if (bytes > end - at) bytes = end - at;
        pieces[(*n_pieces)++] = (struct iovec){fd_kv_plane(kv, plane, page) + from, bytes};
        at += bytes;
    }
    pthread_mutex_unlock(&link->mutex);
    return status;
}

/* The outcome of sendmsg or recvmsg. */
static fd_status_t count_moved(ssize_t moved, uint64_t *done, fd_error_t *error) {
    *done = moved > 0 ? (uint64_t)moved : 0;
    if (moved >= 0 || errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return FD_OK;
    error->number = errno;
    return FD_FAIL(FD_LINK_CLOSED, "the socket has failed");
}

fd_status_t fd_link_send_pages(fd_link_t *link, int fd, const fd_page_range_t *range, uint64_t *done,
                               fd_error_t *error) {
    struct iovec pieces[MOST_PIECES];
    struct msghdr message = {.msg_iov = pieces};
    if (next_pieces(link, range, pieces, &message.msg_iovlen, error) != FD_OK) return error->status;
    return count_moved(sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL), done, error);
}

fd_status_t fd_link_receive_pages(fd_link_t *link, int fd, const fd_page_range_t *range, uint64_t *done,
                                  fd_error_t *error) {
    struct iovec pieces[MOST_PIECES];
    struct msghdr message = {.msg_iov = pieces};
    if (next_pieces(link, range, pieces, &message.msg_iovlen, error) != FD_OK) return error->status;
    ssize_t moved = recvmsg(fd, &message, MSG_DONTWAIT);
    if (moved == 0) moved = -1, errno = ECONNRESET;
    return count_moved(moved, done, error);
}

fd_status_t fd_link_fault_in(fd_link_t *link, const fd_page_range_t *range, uint64_t *done, fd_error_t *error) {
    struct iovec pieces[MOST_PIECES];
    size_t n;
    *done = 0;
    if (next_pieces(link, range, pieces, &n, error) != FD_OK) return error->status;
    for (size_t i = 0; i < n; i++) {
        fd_memory_fault_in(pieces[i].iov_base, pieces[i].iov_len); /* if it fails, the bytes fault when they come */
        *done += pieces[i].iov_len;
    }
    return FD_OK;
}

fd_status_t fd_link_copy_pages(fd_link_t *from, const fd_page_range_t *source, fd_link_t *to,
                               const fd_page_range_t *target, uint64_t *done, fd_error_t *error) {
    const fd_planes_t *here = &from->kv.planes, *there = &to->kv.planes;
    if (here->n_planes != there->n_planes || here->plane_bytes != there->plane_bytes ||
        here->n_sections != there->n_sections)
        return FD_FAIL(FD_BAD_SEQUENCE, "the pages of the two links differ");
    struct iovec sources[MOST_PIECES], targets[MOST_PIECES];
    size_t n_sources, n_targets;
    *done = 0;
    if (next_pieces(from, source, sources, &n_sources, error) != FD_OK ||
        next_pieces(to, target, targets, &n_targets, error) != FD_OK)
        return error->status;
    /* Both ranges begin at the same byte of a page and have the same planes, so their pieces are of equal lengths. */
    for (size_t i = 0; i < n_sources && i < n_targets; i++) {
        memcpy(targets[i].iov_base, sources[i].iov_base, sources[i].iov_len);
        *done += sources[i].iov_len;
    }
    return FD_OK;
}

fd_status_t fd_link_receive(fd_link_t *link, uint32_t seq_index, uint32_t tag, uint32_t length, fd_error_t *error) {
    pthread_mutex_lock(&link->mutex);
    const fd_status_t status = fd_kvcache_receive(&link->kv, seq_index, tag, length, error);
    pthread_mutex_unlock(&link->mutex);
    return status;
}
