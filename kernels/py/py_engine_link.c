/* REngineLink: one link of an R-engine, for Python. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sched.h>

#include <stdlib.h>
#include <unistd.h>

#include "py_engine.h"

/* Runs a statement without the GIL while the object keeps its link. */
#define WITH_LINK(self, ...)                                                                                           \
    do {                                                                                                               \
        (self)->users++;                                                                                               \
        FD_WITHOUT_GIL(__VA_ARGS__);                                                                                   \
        (self)->users--;                                                                                               \
    } while (0)

/* Removes the link from the engine. The engine does not touch the region after that. */
static void remove_link(link_object_t *self) {
    fd_link_t *link = self->link;
    self->link = NULL;
    while (self->users) {
        FD_WITHOUT_GIL(sched_yield());
    }
    if (link && self->owner->pid == getpid()) {
        FD_WITHOUT_GIL(fd_engine_remove_link(self->owner->engine, link));
    }
    if (link) self->owner->n_links--;
    if (link || !self->owner) PyBuffer_Release(&self->region); /* does nothing to a view that was never filled */
}

static void link_dealloc(link_object_t *self) {
    remove_link(self);
    Py_XDECREF(self->carrier);
    Py_XDECREF(self->owner);
    fd_py_free(self);
}

static PyObject *link_close(link_object_t *self, PyObject *unused) {
    remove_link(self);
    Py_RETURN_NONE;
}

static PyObject *link_retire(link_object_t *self, PyObject *kept) {
    fd_link_t *link = self->link;
    if (!link || self->retired) return closed_error("the link");
    Py_ssize_t n;
    uint32_t *indexes = fd_py_new_ints(kept, "sequence indexes", UINT32_MAX, &n);
    if (!indexes) return NULL;
    self->retired = true;
    /* This waits for a call in progress. */
    WITH_LINK(self, fd_engine_retire_link(self->owner->engine, link, indexes, (uint32_t)n));
    PyMem_Free(indexes);
    PyBuffer_Release(&self->region);
    Py_RETURN_NONE;
}

static PyObject *link_shrink(link_object_t *self, PyObject *unused) {
    fd_link_t *link = self->link;
    if (!link) return closed_error("the link");
    if (!self->retired) return PyErr_Format(PyExc_RuntimeError, "the link is not retired");
    WITH_LINK(self, fd_link_shrink(link));
    Py_RETURN_NONE;
}

/* A change of the lease; `n` are the method's numbers, in order. */
typedef fd_status_t change_fn(fd_link_t *link, const unsigned n[5], fd_error_t *error);

static PyObject *change(link_object_t *self, PyObject *args, const char *format, change_fn *make) {
    unsigned n[5];
    fd_error_t error;
    if (!PyArg_ParseTuple(args, format, &n[0], &n[1], &n[2], &n[3], &n[4])) return NULL;
    fd_link_t *link = self->link;
    if (!link) return closed_error("the link");
    fd_status_t status;
    WITH_LINK(self, status = make(link, n, &error)); /* this waits for the link's mutex, which planning a step holds */
    if (status != FD_OK) return engine_error(&error, PyExc_MemoryError);
    Py_RETURN_NONE;
}

/* A method that calls fd_link_<name>. `format` has a unit for each of its numbers, which `...` names in order. */
#define LINK_CHANGE(name, format, ...)                                                                                 \
    static fd_status_t do_##name(fd_link_t *link, const unsigned n[5], fd_error_t *error) {                            \
        return fd_link_##name(link, __VA_ARGS__, error);                                                               \
    }                                                                                                                  \
    static PyObject *link_##name(link_object_t *self, PyObject *args) {                                                \
        return change(self, args, format ":" #name, do_##name);                                                        \
    }
LINK_CHANGE(free, "II", n[0], n[1])
LINK_CHANGE(trim, "III", n[0], n[1], n[2])
LINK_CHANGE(fork, "IIIII", n[0], n[1], n[2], n[3], n[4])
LINK_CHANGE(grow, "I", n[0])
LINK_CHANGE(receive, "III", n[0], n[1], n[2])

/* Bytes of pages of a sequence that go over a descriptor, or to a sequence of the link `to`. */
typedef struct {
    int fd;
    fd_link_t *to;
    fd_page_range_t range, target;
} migration_t;
typedef enum { SEND, RECEIVE, FAULT_IN, COPY } move_t;

static fd_status_t move(move_t kind, fd_link_t *link, const migration_t *t, uint64_t *done, fd_error_t *error) {
    switch (kind) {
    case SEND: return fd_link_send_pages(link, t->fd, &t->range, done, error);
    case RECEIVE: return fd_link_receive_pages(link, t->fd, &t->range, done, error);
    case FAULT_IN: return fd_link_fault_in(link, &t->range, done, error);
    case COPY: return fd_link_copy_pages(link, &t->range, t->to, &t->target, done, error);
    }
    __builtin_unreachable();
}

/* Moves what `t` says, whose `to` is that of the object `to`, or NULL. */
static PyObject *migrate(link_object_t *self, link_object_t *to, migration_t *t, move_t kind) {
    fd_link_t *link = self->link;
    t->to = to ? to->link : NULL;
    if (!link || (to && !t->to)) return closed_error("the link");
    uint64_t done;
    fd_error_t error;
    fd_status_t status;
    if (to) to->users++;
    WITH_LINK(self, status = move(kind, link, t, &done, &error));
    if (to) to->users--;
    if (status == FD_OK) return PyLong_FromUnsignedLongLong(done);
    if (status != FD_LINK_CLOSED) return engine_error(&error, PyExc_MemoryError);
    errno = error.number;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *migrate_over(link_object_t *self, PyObject *args, move_t kind) {
    migration_t t;
    fd_page_range_t *r = &t.range;
    if (!PyArg_ParseTuple(args, "iIIIIK", &t.fd, &r->seq_index, &r->tag, &r->first, &r->n, FD_UINT64(r->offset)))
        return NULL;
    return migrate(self, NULL, &t, kind);
}

static PyObject *link_send_pages(link_object_t *self, PyObject *args) { return migrate_over(self, args, SEND); }

static PyObject *link_receive_pages(link_object_t *self, PyObject *args) { return migrate_over(self, args, RECEIVE); }

static PyObject *link_fault_in(link_object_t *self, PyObject *args) {
    migration_t t;
    fd_page_range_t *r = &t.range;
    if (!PyArg_ParseTuple(args, "IIIIK", &r->seq_index, &r->tag, &r->first, &r->n, FD_UINT64(r->offset))) return NULL;
    return migrate(self, NULL, &t, FAULT_IN);
}

static PyObject *link_copy_pages(link_object_t *self, PyObject *args) {
    link_object_t *to;
    migration_t t;
    fd_page_range_t *r = &t.range, *target = &t.target;
    if (!PyArg_ParseTuple(args, "O!IIIIIIK", Py_TYPE(self), &to, &r->seq_index, &r->tag, &target->seq_index,
                          &target->tag, &r->first, &r->n, FD_UINT64(r->offset)))
        return NULL;
    target->first = r->first, target->n = r->n, target->offset = r->offset;
    return migrate(self, to, &t, COPY);
}

static PyObject *link_length(link_object_t *self, PyObject *args) {
    unsigned seq_index, tag;
    uint32_t length;
    fd_error_t error;
    if (!PyArg_ParseTuple(args, "II", &seq_index, &tag)) return NULL;
    if (!self->link) return closed_error("the link");
    if (fd_link_length(self->link, seq_index, tag, &length, &error) != FD_OK)
        return engine_error(&error, PyExc_MemoryError);
    return PyLong_FromUnsignedLong(length);
}

static PyObject *link_pages(link_object_t *self, PyObject *args) {
    unsigned seq_index, tag, n;
    uint32_t *pages;
    fd_error_t error;
    if (!PyArg_ParseTuple(args, "II", &seq_index, &tag)) return NULL;
    if (!self->link) return closed_error("the link");
    if (fd_link_pages(self->link, seq_index, tag, &pages, &n, &error) != FD_OK)
        return engine_error(&error, PyExc_MemoryError);
    PyObject *list = PyList_New(n);
    for (unsigned i = 0; list && i < n; i++) {
        PyObject *page = PyLong_FromUnsignedLong(pages[i]);
        if (page) PyList_SET_ITEM(list, i, page);
        else Py_CLEAR(list);
    }
    free(pages);
    return list;
}

static PyObject *link_stats(link_object_t *self, PyObject *unused) {
    fd_link_stats_t s;
    fd_link_t *link = self->link;
    if (!link) return closed_error("the link");
    WITH_LINK(self, fd_link_stats(link, &s));
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:I,s:I,s:I}", "calls", s.calls, "refused", s.refused, "rows", s.rows,
                         "kv_bytes", s.kv_bytes, "busy_ns", s.busy_ns, "pages_total", s.pages_total, "pages_used",
                         s.pages_used, "seqs", s.seqs);
}

static PyObject *link_get_prefault(link_object_t *self, void *unused) {
    fd_prefault_t p;
    if (!self->link) return closed_error("the link");
    fd_link_prefault(self->link, &p);
    return Py_BuildValue("KKi", p.bytes, p.total, p.error);
}

static PyObject *link_get_eventfd(link_object_t *self, void *unused) {
    if (!self->link) return closed_error("the link");
    return PyLong_FromLong(fd_link_eventfd(self->link));
}

static PyGetSetDef link_getset[] = {
    {"eventfd", (getter)link_get_eventfd, NULL, "eventfd that wakes the engine, for a peer", NULL},
    {"prefault", (getter)link_get_prefault, NULL,
     "Bytes faulted in so far, bytes to fault in, and the errno that stopped it or 0.", NULL},
    {0},
};

static PyMethodDef link_methods[] = {
    {"free", (PyCFunction)link_free, METH_VARARGS, "Free a sequence's pages."},
    {"trim", (PyCFunction)link_trim, METH_VARARGS, "Keep only the first tokens of a sequence."},
    {"fork", (PyCFunction)link_fork, METH_VARARGS, "Let an empty sequence share the first tokens of another."},
    {"grow", (PyCFunction)link_grow, METH_VARARGS, "Let the lease have more pages."},
    {"receive", (PyCFunction)link_receive, METH_VARARGS, "Let an empty sequence wait for its pages."},
    {"fault_in", (PyCFunction)link_fault_in, METH_VARARGS, "Let the OS find memory for pages to be received."},
    {"send_pages", (PyCFunction)link_send_pages, METH_VARARGS, "Send pages of a sequence over a socket."},
    {"receive_pages", (PyCFunction)link_receive_pages, METH_VARARGS, "Receive what send_pages sends."},
    {"copy_pages", (PyCFunction)link_copy_pages, METH_VARARGS, "Copy pages of a sequence to another link."},
    {"pages", (PyCFunction)link_pages, METH_VARARGS, "The numbers of a sequence's pages, in order."},
    {"length", (PyCFunction)link_length, METH_VARARGS, "The tokens of a sequence."},
    {"stats", (PyCFunction)link_stats, METH_NOARGS, "The counters of fd_link_stats_t, by name."},
    {"retire", (PyCFunction)link_retire, METH_O, "Remove the link from the engine and keep some of its sequences."},
    {"shrink", (PyCFunction)link_shrink, METH_NOARGS, "Give the memory of a retired link's free pages back."},
    {"close", (PyCFunction)link_close, METH_NOARGS, "Remove the link from the engine and free its lease."},
    {0},
};

FD_PY_TYPE_WITH(Py_TPFLAGS_DISALLOW_INSTANTIATION, fd_py_engine_link_spec, "fastdecode.kernels._native.REngineLink",
                link_object_t, {Py_tp_doc, "One link of an REngine, and its lease of the KV-cache."},
                {Py_tp_dealloc, link_dealloc}, {Py_tp_methods, link_methods}, {Py_tp_getset, link_getset});
