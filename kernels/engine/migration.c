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
        const size_t bytes = fd_min(plane_bytes - from, end - at);
        pieces[(*n_pieces)++] = (struct iovec){fd_kv_plane(kv, plane, page) + from, bytes};
        at += bytes;
    }
    pthread_mutex_unlock(&link->mutex);
    return status;
}

/* Room for the bytes of pages in a GPU's memory on their way to or from a socket. NULL without memory. */
static uint8_t *bounce(const fd_link_t *link, fd_error_t *error) {
    uint8_t *memory = malloc(MOST_BYTES);
    if (!memory) FD_FAIL(FD_INTERNAL, "no memory for pages on their way");
    fd_cuda_use(link->engine->cuda);
    return memory;
}

/* Reads pieces of a GPU's memory to `to`, which becomes the only piece. */
static fd_status_t read_pieces(const fd_cuda_t *cuda, struct iovec *pieces, size_t *n_pieces, uint8_t *to,
                               fd_error_t *error) {
    uint8_t *at = to;
    for (size_t i = 0; i < *n_pieces; at += pieces[i++].iov_len)
        if (FD_CUDA(cuda, MemcpyDtoH, at, (fd_device_ptr_t)pieces[i].iov_base, pieces[i].iov_len) != FD_OK)
            return error->status;
    pieces[0] = (struct iovec){to, (size_t)(at - to)};
    *n_pieces = 1;
    return FD_OK;
}

/* Writes `bytes` bytes to the first pieces of a GPU's memory. */
static fd_status_t write_pieces(const fd_cuda_t *cuda, const struct iovec *pieces, const uint8_t *from, size_t bytes,
                                fd_error_t *error) {
    for (size_t i = 0; bytes; i++) {
        const size_t n = fd_min(bytes, pieces[i].iov_len);
        if (FD_CUDA(cuda, MemcpyHtoD, (fd_device_ptr_t)pieces[i].iov_base, from, n) != FD_OK) return error->status;
        from += n, bytes -= n;
    }
    return FD_OK;
}

static size_t bytes_of(const struct iovec *pieces, size_t n_pieces) {
    size_t bytes = 0;
    for (size_t i = 0; i < n_pieces; i++) bytes += pieces[i].iov_len;
    return bytes;
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
    const fd_cuda_t *cuda = link->engine->cuda;
    uint8_t *memory = cuda ? bounce(link, error) : NULL;
    if (cuda && (!memory || read_pieces(cuda, pieces, &message.msg_iovlen, memory, error) != FD_OK)) {
        free(memory);
        return error->status;
    }
    const ssize_t moved = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    const fd_status_t status = count_moved(moved, done, error);
    free(memory);
    return status;
}

fd_status_t fd_link_receive_pages(fd_link_t *link, int fd, const fd_page_range_t *range, uint64_t *done,
                                  fd_error_t *error) {
    struct iovec pieces[MOST_PIECES];
    struct msghdr message = {.msg_iov = pieces};
    if (next_pieces(link, range, pieces, &message.msg_iovlen, error) != FD_OK) return error->status;
    const fd_cuda_t *cuda = link->engine->cuda;
    uint8_t *memory = cuda ? bounce(link, error) : NULL;
    if (cuda && !memory) return error->status;
    struct iovec bounced = {memory, bytes_of(pieces, message.msg_iovlen)};
    if (cuda) message.msg_iov = &bounced, message.msg_iovlen = 1;
    ssize_t moved = recvmsg(fd, &message, MSG_DONTWAIT);
    if (moved == 0) moved = -1, errno = ECONNRESET;
    fd_status_t status = count_moved(moved, done, error);
    if (cuda && status == FD_OK) status = write_pieces(cuda, pieces, memory, *done, error);
    free(memory);
    return status;
}

fd_status_t fd_link_fault_in(fd_link_t *link, const fd_page_range_t *range, uint64_t *done, fd_error_t *error) {
    struct iovec pieces[MOST_PIECES];
    size_t n;
    *done = 0;
    if (next_pieces(link, range, pieces, &n, error) != FD_OK) return error->status;
    *done = bytes_of(pieces, n);
    for (size_t i = 0; i < n && !link->engine->cuda; i++)
        fd_memory_fault_in(pieces[i].iov_base, pieces[i].iov_len); /* if it fails, the bytes fault when they come */
    return FD_OK;
}

static fd_status_t copy_on_gpu(const fd_cuda_t *cuda, const struct iovec *from, const struct iovec *to, size_t n,
                               fd_error_t *error) {
    fd_cuda_use(cuda);
    for (size_t i = 0; i < n; i++)
        if (FD_CUDA(cuda, MemcpyDtoDAsync, (fd_device_ptr_t)to[i].iov_base, (fd_device_ptr_t)from[i].iov_base,
                    from[i].iov_len, cuda->control) != FD_OK)
            return error->status;
    return FD_CUDA(cuda, StreamSynchronize, cuda->control);
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
    const size_t n = fd_min(n_sources, n_targets);
    *done = bytes_of(sources, n);
    if (from->engine->cuda) return copy_on_gpu(from->engine->cuda, sources, targets, n, error);
    for (size_t i = 0; i < n; i++) memcpy(targets[i].iov_base, sources[i].iov_base, sources[i].iov_len);
    return FD_OK;
}
