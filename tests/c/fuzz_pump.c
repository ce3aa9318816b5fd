/* Sends bytes to both ends of a TCP link's data connection: calls to a pump with an R-engine behind it, replies to the
 * pump of an S-node's port.
 *
 * A well-formed call must be answered and a well-formed reply must arrive, whatever pieces the bytes come in. After any
 * other bytes the link must end, give a reason and free everything. fuzz.h says what an input is.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <sys/socket.h>

#include "engine.h"
#include "fuzz.h"
#include "port.h"

#define PATIENCE_NS 20000000000u

static char err[256];
static const fd_geometry_t geometry = {2, 6, 2, 4, 2, 8, FD_ACT_FP32, 0};
static fd_engine_t *engine;
static uint64_t n_answered, n_refused, n_cut_off, n_replies, n_bad_replies;

typedef struct {
    fd_side_t side;
    fd_layout_t y;
    int sock; /* the peer's end */
    uint8_t *region;
    fd_port_t port; /* the R side uses only `down` */
    fd_pump_t *pump;
    fd_notify_t notify;
    fd_link_t *link;
} end_t;

enum {
    MAX_BODY = 6 * (sizeof(fd_row_t) + 4 * 8 * 4 + 2 * 2 * 8 * 4)
}; /* bytes of the longest message that the geometry allows */

typedef struct {
    fd_frame_t frame;
    union {
        fd_call_t call;
        fd_reply_t reply;
        uint8_t bytes[sizeof(fd_reply_t) + MAX_BODY]; /* the rows follow the call or the reply */
    };
} message_t;

static size_t message_bytes(const message_t *m) { return sizeof m->frame + m->frame.length; }

static void open_end(end_t *e, fd_side_t side) {
    int pair[2];
    *e = (end_t){.side = side, .y = fd_region_layout(&geometry)};
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    e->sock = pair[0];
    e->region = new_region(&geometry);
    REQUIRE(fd_port_init(&e->port, e->region, &geometry, 20) == 0);
    e->pump = fd_pump_new(side, e->region, &geometry, &e->port.down);
    REQUIRE(e->pump);
    if (side == FD_SIDE_R) {
        const fd_layer_t layers[2] = {{.window = 0, .kv_layer = 0}, {.window = 70, .kv_layer = 1}};
        fd_lease_t lease = {FD_KV_FP16, 8, 4, 0.3f, layers, 0};
        e->notify = (fd_notify_t){fd_pump_send, e->pump, fd_pump_poll};
        e->link = fd_engine_add_link(engine, e->region, &geometry, &lease, &e->notify, err, sizeof err);
        REQUIRE(e->link);
    } else {
        e->port.pump = e->pump;
    }
    REQUIRE(fd_pump_start(e->pump, pair[1], e->link ? fd_link_eventfd(e->link) : -1) == 0);
}

static void close_end(end_t *e) {
    close(e->sock);
    if (e->link) fd_engine_remove_link(engine, e->link);
    fd_pump_stop(e->pump);
    fd_pump_free(e->pump);
    fd_down_close_fd(&e->port.down);
    pthread_mutex_destroy(&e->port.down.lock);
    free(e->region);
}

/* Waits until `fd` is readable, also across signals, such as libFuzzer's clock. */
static void await(int fd) {
    struct pollfd readable = {.fd = fd, .events = POLLIN};
    uint64_t start = fd_now_ns();
    while (poll(&readable, 1, 1000) <= 0) REQUIRE(fd_now_ns() - start < PATIENCE_NS);
}

/* Sends the data in pieces, as a network may. False if the other end has closed the connection. */
static bool send_pieces(end_t *e, input_t *in, const void *data, size_t n) {
    for (const uint8_t *at = data; n;) {
        size_t piece = take(in, 1) % 4 ? n : 1 + take(in, 1) % n;
        ssize_t sent = send(e->sock, at, piece, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0) return false;
        if (piece < n && take(in, 1) % 2) sched_yield();
        at += sent;
        n -= (size_t)sent;
    }
    return true;
}

/* Receives `n` bytes. False if the connection ends before. */
static bool receive_all(end_t *e, void *data, size_t n) {
    for (uint8_t *at = data; n;) {
        await(e->sock);
        ssize_t got = recv(e->sock, at, n, MSG_DONTWAIT);
        if (got <= 0) return false;
        at += got;
        n -= (size_t)got;
    }
    return true;
}

static bool receive_message(end_t *e, message_t *m) {
    if (!receive_all(e, &m->frame, sizeof m->frame)) return false;
    REQUIRE(m->frame.magic == FD_FRAME_MAGIC && m->frame.slot < geometry.n_slots && m->frame.length <= sizeof m->bytes);
    return receive_all(e, m->bytes, m->frame.length);
}

/* Changes a field or a byte of a message's frame head, call or reply, one to three times. */
static void mutate(message_t *m, input_t *in, fd_side_t side) {
    size_t head = side == FD_SIDE_R ? sizeof m->call : sizeof m->reply;
    uint32_t *counts[] = {&m->call.flags, &m->call.layer, &m->call.n_entries, &m->call.n_rows, &m->call.n_attend_rows};
    for (uint32_t n = 1 + take(in, 1) % 3; n; n--) {
        switch (take(in, 1) % 6) {
        case 0: m->frame.slot = edgy(in, geometry.n_slots); break;
        case 1: m->frame.length = edgy(in, MAX_BODY) | (take(in, 1) ? 0 : (uint64_t)take(in, 4) << 32); break;
        case 2: m->call.number += edgy(in, 2); break; /* also the number of a reply, which is in the same place */
        case 3: ((uint8_t *)&m->frame)[take(in, 2) % (sizeof m->frame + head)] ^= (uint8_t)take(in, 1); break;
        default:
            if (side == FD_SIDE_R) *counts[take(in, 1) % 5] = edgy(in, geometry.max_rows);
            else if (take(in, 1) % 2) m->reply.status = edgy(in, FD_INTERNAL);
            else m->reply.n_attend_rows = edgy(in, geometry.max_rows);
        }
    }
}

/* The peer ends its side of the connection. Whatever it has sent, the link must end and give a reason. */
static void expect_the_end(end_t *e) {
    message_t m;
    shutdown(e->sock, SHUT_WR);
    while (receive_message(e, &m)) {
    } /* answers to the valid calls before */
    await(e->port.down.fd);
    REQUIRE(fd_is_down(&e->port.down) && e->port.down.reason[0]);
    n_cut_off++;
}

/* ---- a hostile S-node ---- */

static void hostile_calls(input_t *in) {
    end_t e;
    uint64_t number[FD_MAX_SLOTS] = {0};
    uint32_t length[4] = {0}; /* cached tokens of each sequence, as far as we know */
    bool open = true;
    open_end(&e, FD_SIDE_R);
    while (open && in->at < in->end) {
        message_t m = {0};
        uint32_t slot = take(in, 1) % geometry.n_slots, s = take(in, 1) % 4, rows = 1 + take(in, 1) % geometry.max_rows;
        uint32_t attend = take(in, 1) % 4 ? rows : 0;
        fd_row_t row = {s, 1, length[s], rows, attend ? FD_ROW_ATTEND : 0, 0};
        if (take(in, 1) % 8 == 0) ((uint8_t *)&row)[take(in, 1) % sizeof row] ^= (uint8_t)take(in, 1);
        uint8_t *body = (uint8_t *)(&m.call + 1);
        memcpy(body, &row, sizeof row);
        m.call = (fd_call_t){.number = number[slot] + 1,
                             .flags = FD_CALL_NEW_STEP,
                             .n_entries = 1,
                             .n_rows = rows,
                             .n_attend_rows = attend};
        m.frame = (fd_frame_t){FD_FRAME_MAGIC, slot,
                               sizeof m.call + sizeof row + attend * e.y.q_row_bytes + rows * e.y.kv_row_bytes};
        size_t n = message_bytes(&m);
        for (uint32_t i = take(in, 1) % 8; i; i--)
            body[sizeof row + take(in, 2) % (MAX_BODY - sizeof row)] = (uint8_t)take(in, 1);
        uint32_t what = take(in, 1) % 16;
        if (what == 0) {
            mutate(&m, in, FD_SIDE_R);
            open = false;
        } else if (what == 1) { /* cut short */
            n = take(in, 2) % n;
            open = false;
        } else if (what == 2) { /* arbitrary bytes */
            for (n = 0; n < sizeof m / 2 && in->at < in->end; n++) ((uint8_t *)&m)[n] = (uint8_t)take(in, 1);
            open = false;
        }
        if (!send_pieces(&e, in, &m, n) || !open) break;
        message_t r;
        REQUIRE(receive_message(&e, &r));
        REQUIRE(r.frame.slot == slot && r.reply.number == ++number[slot] && r.reply.status <= FD_OUT_OF_PAGES);
        bool served = r.reply.status == FD_OK;
        REQUIRE(r.frame.length == sizeof r.reply + (served ? attend * e.y.q_row_bytes : 0));
        if (served) {
            REQUIRE(row.seq_index < 4);
            length[row.seq_index] = row.pos + row.n_rows;
            n_answered++;
        } else {
            n_refused++;
        }
    }
    expect_the_end(&e);
    close_end(&e);
}

/* ---- a hostile R-node ---- */

static void hostile_replies(input_t *in) {
    end_t e;
    open_end(&e, FD_SIDE_S);
    while (in->at < in->end) {
        uint32_t slot = take(in, 1) % geometry.n_slots, rows = 1 + take(in, 1) % geometry.max_rows;
        const char *misuse;
        fd_call_t call = {.flags = FD_CALL_NEW_STEP, .n_entries = 1, .n_rows = rows, .n_attend_rows = rows};
        REQUIRE(fd_port_post(&e.port, slot, &call, &misuse) == FD_PORT_OK);
        message_t m, r = {0};
        REQUIRE(receive_message(&e, &m) && m.frame.slot == slot && !memcmp(&m.call, &call, sizeof call));
        REQUIRE(m.frame.length == sizeof call + sizeof(fd_row_t) + rows * (e.y.q_row_bytes + e.y.kv_row_bytes));
        uint32_t status = take(in, 1) % 4 ? FD_OK : take(in, 1) % (FD_INTERNAL + 1),
                 o_rows = status == FD_OK ? rows : 0;
        r.reply = (fd_reply_t){.number = call.number, .status = status, .n_attend_rows = o_rows};
        memset(r.reply.message, take(in, 1), sizeof r.reply.message);
        r.frame = (fd_frame_t){FD_FRAME_MAGIC, slot, sizeof r.reply + o_rows * e.y.q_row_bytes};
        memset((uint8_t *)(&r.reply + 1), take(in, 1), o_rows * e.y.q_row_bytes);
        message_t right = r;
        size_t n = message_bytes(&r);
        uint32_t what = take(in, 1) % 8;
        if (what == 0) mutate(&r, in, FD_SIDE_S);
        else if (what == 1) n = take(in, 2) % n;
        else if (what == 2)
            for (n = 0; n < sizeof r / 2 && in->at < in->end; n++) ((uint8_t *)&r)[n] = (uint8_t)take(in, 1);
        send_pieces(&e, in, &r, n);
        fd_reply_t reply;
        if (what > 2) {
            REQUIRE(fd_port_wait(&e.port, slot, PATIENCE_NS, &reply, &misuse) == FD_PORT_OK && reply.status == status);
            REQUIRE(!memcmp(e.region + e.y.slot0 + slot * e.y.slot_bytes + e.y.o, &right.reply + 1,
                            o_rows * e.y.q_row_bytes));
            n_replies++;
            continue;
        }
        /* A mutated reply may still be valid, for example with another status. The port then returns it; otherwise the
         * connection has ended. */
        shutdown(e.sock, SHUT_WR);
        if (fd_port_wait(&e.port, slot, PATIENCE_NS, &reply, &misuse) == FD_PORT_OK) {
            REQUIRE(what == 0 && reply.number == call.number && reply.status <= FD_INTERNAL &&
                    memchr(reply.message, 0, sizeof reply.message));
        } else {
            REQUIRE(fd_is_down(&e.port.down) && !strstr(e.port.down.reason, "no reply"));
            n_bad_replies++;
        }
        break;
    }
    expect_the_end(&e);
    close_end(&e);
}

static void fuzz_one(const uint8_t *data, size_t size) {
    if (!engine) {
        fd_engine_config_t config = {1, NULL, FD_ISA_SCALAR, 20, 16 << 20, FD_HUGE_MADVISE, false, 0};
        engine = fd_engine_new(&config, err, sizeof err);
        REQUIRE(engine);
    }
    input_t in = {data, data + size};
    while (in.at < in.end) { /* several links, because each ends early */
        if (take(&in, 1) % 2) hostile_calls(&in);
        else hostile_replies(&in);
    }
}

static void fuzz_end(void) {
    if (engine) {
        REQUIRE(fd_engine_kv_free(engine) == 16 << 20);
        fd_engine_free(engine);
    }
    printf("%llu calls answered\n%llu calls refused\n%llu links cut off\n%llu replies taken\n%llu replies refused\n",
           (unsigned long long)n_answered, (unsigned long long)n_refused, (unsigned long long)n_cut_off,
           (unsigned long long)n_replies, (unsigned long long)n_bad_replies);
}
