/* Sends bytes to both ends of a TCP link's data connection: calls to a pump with an R-engine behind it, replies to the
 * pump of an S-node's port.
 *
 * A well-formed call must be answered and a well-formed reply must arrive, whatever pieces the bytes come in. After any
 * other bytes the link must end, give a reason and free everything. fuzz.h says what an input is.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <sys/socket.h>

#include "engine/engine.h"
#include "fuzz.h"
#include "transports/port.h"
#include "transports/tcp_pump.h"

#define PATIENCE_NS 20000000000u

static fd_error_t error;
static const fd_geometry_t geometry = {2, 6, 2, 4, 2, 8, FD_ACT_FP32, 16, 0, 0, 0, 0};
static fd_engine_t *engine;
static uint64_t n_answered, n_refused, n_cut_off, n_replies, n_bad_replies;

typedef struct {
    fd_side_t side;
    fd_layout_t y;
    int sock; /* the peer's end */
    uint8_t *region;
    fd_port_t port; /* the R side uses only `link` */
    fd_pump_t *pump;
    fd_carrier_t carrier;
    fd_link_t *link;
} end_t;

enum {
    MAX_BODY = 6 * (sizeof(fd_row_t) + 4 * 16 * 4 + 2 * (8 + 16) * 4)
}; /* bytes of the longest message that the geometry allows */

typedef struct {
    fd_frame_t frame;
    union {
        fd_arm_t arm; /* followed by the table */
        fd_report_t report;
        uint8_t bytes[sizeof(fd_report_t) + MAX_BODY];
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
    e->pump = fd_pump_new(side, e->region, &geometry, &e->port.link);
    REQUIRE(e->pump);
    if (side == FD_SIDE_R) {
        const fd_heads_t heads = fd_geometry_heads(&geometry);
        const fd_layer_t layers[2] = {{.heads = heads, .window = 0, .kv_layer = 0},
                                      {.heads = heads, .window = 70, .kv_layer = 1}};
        fd_lease_t lease = {FD_KV_FP16, 8, 4, 0.3f, layers, 0, {0, 1}, NULL};
        e->carrier = (fd_carrier_t){&fd_pump_ops, e->pump};
        e->link = fd_engine_add_link(engine, e->region, &geometry, &lease, &e->carrier, &error);
        REQUIRE(e->link);
    } else {
        e->port.carrier = (fd_carrier_t){&fd_pump_ops, e->pump};
    }
    REQUIRE(fd_pump_start(e->pump, pair[1], e->link ? fd_link_eventfd(e->link) : -1) == 0);
}

static void close_end(end_t *e) {
    close(e->sock);
    if (e->link) fd_engine_remove_link(engine, e->link);
    fd_pump_stop(e->pump);
    fd_pump_free(e->pump);
    fd_link_state_close_fd(&e->port.link);
    pthread_mutex_destroy(&e->port.link.lock);
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

/* Changes a field or a byte of a message's frame head, step header or report, one to three times. */
static void mutate(message_t *m, input_t *in, fd_side_t side) {
    const size_t head = side == FD_SIDE_R ? sizeof m->arm : sizeof m->report;
    uint32_t *counts[] = {&m->arm.n_entries, &m->arm.n_rows, &m->arm.n_attend_rows, &m->arm.n_layers};
    for (uint32_t n = 1 + take(in, 1) % 3; n; n--) {
        switch (take(in, 1) % 8) {
        case 0: m->frame.slot = (uint16_t)edgy(in, geometry.n_slots); break;
        case 1: m->frame.length = edgy(in, MAX_BODY) | (take(in, 1) ? 0 : (uint64_t)take(in, 4) << 32); break;
        case 2: m->arm.number += edgy(in, 2); break; /* also the number of a report, which is in the same place */
        case 3: ((uint8_t *)&m->frame)[take(in, 2) % (sizeof m->frame + head)] ^= (uint8_t)take(in, 1); break;
        case 4: m->frame.word = edgy(in, geometry.n_layers); break;
        case 5: m->frame.kind = (uint16_t)edgy(in, FD_REPLY); break;
        default:
            if (side == FD_SIDE_R) *counts[take(in, 1) % 4] = edgy(in, geometry.max_rows);
            else m->report.status = edgy(in, FD_INTERNAL);
        }
    }
}

/* The peer ends its side of the connection. Whatever it has sent, the link must end and give a reason. */
static void expect_the_end(end_t *e) {
    message_t m;
    shutdown(e->sock, SHUT_WR);
    while (receive_message(e, &m)) {
    } /* answers to the valid calls before */
    await(e->port.link.fd);
    REQUIRE(fd_link_is_down(&e->port.link) && e->port.link.reason[0]);
    n_cut_off++;
}

/* ---- a hostile S-node ---- */

/* The step of a slot, as far as the hostile peer knows. */
typedef struct {
    uint64_t number;
    bool armed;
    uint32_t asked, rows, attend, layers;
} step_t;

static void hostile_steps(input_t *in) {
    end_t e;
    step_t steps[FD_MAX_SLOTS] = {0};
    uint32_t length[4] = {0}; /* cached tokens of each sequence, as far as we know */
    bool open = true;
    open_end(&e, FD_SIDE_R);
    while (open && in->at < in->end) {
        message_t m = {0};
        const uint32_t slot = take(in, 1) % geometry.n_slots, s = take(in, 1) % 4;
        step_t *step = &steps[slot];
        fd_row_t row = {0};
        const bool arms = !step->armed || take(in, 1) % 8 == 0;
        if (arms) {
            const uint32_t rows = 1 + take(in, 1) % geometry.max_rows, attend = take(in, 1) % 4 ? rows : 0;
            row = (fd_row_t){s, 1, length[s], rows, attend ? FD_ROW_ATTEND : 0, 0};
            if (take(in, 1) % 8 == 0) ((uint8_t *)&row)[take(in, 1) % sizeof row] ^= (uint8_t)take(in, 1);
            m.arm = (fd_arm_t){.number = step->number + 1,
                               .n_entries = 1,
                               .n_rows = rows,
                               .n_attend_rows = attend,
                               .n_layers = 1 + take(in, 1) % geometry.n_layers};
            memcpy(&m.arm + 1, &row, sizeof row);
            m.frame = (fd_frame_t){FD_FRAME_MAGIC, FD_ARM, (uint16_t)slot, 0, 0, sizeof m.arm + sizeof row};
        } else {
            for (uint32_t i = take(in, 1) % 8; i; i--) m.bytes[take(in, 2) % MAX_BODY] = (uint8_t)take(in, 1);
            m.frame =
                (fd_frame_t){FD_FRAME_MAGIC,  FD_LAYER, (uint16_t)slot,
                             step->asked + 1, 0,        step->attend * e.y.q_row_bytes + step->rows * e.y.kv_row_bytes};
        }
        size_t n = message_bytes(&m);
        const uint32_t what = take(in, 1) % 16;
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
        REQUIRE(receive_message(&e, &r) && r.frame.slot == slot);
        if (arms) {
            REQUIRE(r.frame.kind == FD_VERDICT && !r.frame.word && r.frame.length == sizeof r.report);
            REQUIRE(r.report.number == ++step->number && r.report.status <= FD_OUT_OF_PAGES);
            step->armed = r.report.status == FD_OK;
            step->asked = 0;
            step->rows = m.arm.n_rows;
            step->attend = m.arm.n_attend_rows;
            step->layers = m.arm.n_layers;
            if (step->armed) {
                REQUIRE(row.seq_index < 4);
                length[row.seq_index] = row.pos + row.n_rows;
            } else {
                n_refused++;
            }
        } else {
            REQUIRE(r.frame.kind == FD_REPLY && r.frame.word == ++step->asked);
            step->armed = step->asked < step->layers;
            REQUIRE(r.frame.length == step->attend * e.y.o_row_bytes + (step->armed ? 0 : sizeof(fd_report_t)));
            n_answered++;
        }
    }
    expect_the_end(&e);
    close_end(&e);
}

/* ---- a hostile R-node ---- */

static void hostile_replies(input_t *in) {
    end_t e;
    uint64_t number[FD_MAX_SLOTS] = {0};
    uint32_t asked[FD_MAX_SLOTS] = {0}, rows[FD_MAX_SLOTS] = {0}, layers[FD_MAX_SLOTS] = {0};
    open_end(&e, FD_SIDE_S);
    while (in->at < in->end) {
        const uint32_t slot = take(in, 1) % geometry.n_slots;
        const bool arms = !rows[slot] || take(in, 1) % 8 == 0;
        message_t m, r = {0};
        if (arms) {
            rows[slot] = 1 + take(in, 1) % geometry.max_rows;
            asked[slot] = 0;
            number[slot]++;
            const fd_row_t row = {1, 2, 3, rows[slot], FD_ROW_ATTEND, 0};
            layers[slot] = 1 + take(in, 1) % geometry.n_layers;
            REQUIRE(!fd_port_arm(&e.port, slot, &row, 1, layers[slot]));
            REQUIRE(receive_message(&e, &m) && m.frame.kind == FD_ARM && m.frame.slot == slot);
            REQUIRE(m.frame.length == sizeof m.arm + sizeof row && !memcmp(&m.arm + 1, &row, sizeof row));
        } else {
            REQUIRE(!fd_port_ask(&e.port, slot, asked[slot]++));
            fd_port_send(&e.port, slot);
            REQUIRE(receive_message(&e, &m) && m.frame.kind == FD_LAYER && m.frame.slot == slot);
            REQUIRE(m.frame.word == asked[slot] && m.frame.length == rows[slot] * (e.y.q_row_bytes + e.y.kv_row_bytes));
        }
        const uint32_t status = take(in, 1) % 4 ? FD_OK : 1 + take(in, 1) % FD_INTERNAL;
        const uint32_t word = status == FD_OK ? asked[slot] : FD_POISON;
        const bool last = !arms && (status != FD_OK || word == layers[slot]);
        const size_t o_bytes = arms || status != FD_OK ? 0 : rows[slot] * e.y.o_row_bytes;
        fd_report_t report = {.number = number[slot], .status = status, .n_layers = asked[slot]};
        memset(report.message, take(in, 1), sizeof report.message);
        memset(r.bytes, take(in, 1), o_bytes);
        if (arms || last) memcpy(r.bytes + o_bytes, &report, sizeof report);
        r.frame = (fd_frame_t){FD_FRAME_MAGIC,
                               arms ? FD_VERDICT : FD_REPLY,
                               (uint16_t)slot,
                               arms ? 0 : word,
                               0,
                               o_bytes + (arms || last ? sizeof report : 0)};
        const message_t right = r;
        size_t n = message_bytes(&r);
        const uint32_t what = take(in, 1) % 8;
        if (what == 0) mutate(&r, in, FD_SIDE_S);
        else if (what == 1) n = take(in, 2) % n;
        else if (what == 2)
            for (n = 0; n < sizeof r / 2 && in->at < in->end; n++) ((uint8_t *)&r)[n] = (uint8_t)take(in, 1);
        send_pieces(&e, in, &r, n);
        fd_awaited_t a = {.port = &e.port, .slot = slot, .result = FD_PORT_PENDING};
        /* A mutated answer may still be valid, for example with another status. The port then takes it; otherwise the
         * connection has ended. */
        if (what <= 2) shutdown(e.sock, SHUT_WR);
        fd_port_await(&a, 1, PATIENCE_NS);
        if (what <= 2) {
            REQUIRE(a.result == FD_PORT_DOWN || what == 0);
            REQUIRE(a.result != FD_PORT_DOWN || !strstr(e.port.link.reason, "has not come"));
            n_bad_replies += a.result == FD_PORT_DOWN;
            break;
        }
        REQUIRE(a.result == (status == FD_OK ? FD_PORT_OK : FD_PORT_REFUSED));
        const fd_report_t *taken = &e.port.reports[slot];
        REQUIRE(status == FD_OK || (taken->status == status && memchr(taken->message, 0, sizeof taken->message)));
        REQUIRE(!memcmp(e.region + e.y.slot0 + slot * e.y.slot_bytes + e.y.o, right.bytes, o_bytes));
        n_replies++;
        fd_report_t totals;
        if (last || status != FD_OK) {
            REQUIRE(fd_port_disarm(&e.port, slot, &totals) == (status == FD_OK));
            rows[slot] = 0;
        }
    }
    expect_the_end(&e);
    close_end(&e);
}

static void fuzz_one(const uint8_t *data, size_t size) {
    if (!engine) {
        fd_engine_config_t config = {1, NULL, FD_ISA_SCALAR, 20, 16 << 20, FD_HUGE_MADVISE, false, 0, -1};
        engine = fd_engine_new(&config, &error);
        REQUIRE(engine);
    }
    input_t in = {data, data + size};
    while (in.at < in.end) { /* several links, because each ends early */
        if (take(&in, 1) % 2) hostile_steps(&in);
        else hostile_replies(&in);
    }
}

static void fuzz_end(void) {
    if (engine) {
        REQUIRE(fd_engine_kv_free(engine) == 16 << 20);
        fd_engine_free(engine);
    }
    printf("%llu layers answered\n%llu steps refused\n%llu links cut off\n%llu replies taken\n%llu replies refused\n",
           (unsigned long long)n_answered, (unsigned long long)n_refused, (unsigned long long)n_cut_off,
           (unsigned long long)n_replies, (unsigned long long)n_bad_replies);
}
