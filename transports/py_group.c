/* The type StepGroup of fastdecode.transports._native: one step of a mini-batch over all links that have rows in it. */
#include "py_group.h"

/* More bytes than this are copied without the GIL. */
#define GIL_BYTES (256u << 10)

static uint32_t n_attend(const member_t *m) { return m->attend_to - m->attend_from; }
static uint32_t n_append(const member_t *m) { return m->append_to - m->append_from; }

/* ---- life ---- */

static void group_dealloc(GroupObject *self) {
    for (size_t i = 0; self->members && i < self->n; i++) {
        PyBuffer_Release(&self->members[i].table);
        PyBuffer_Release(&self->members[i].columns);
        Py_XDECREF(self->members[i].port);
    }
    PyBuffer_Release(&self->q);
    PyBuffer_Release(&self->kv);
    PyBuffer_Release(&self->o);
    PyMem_Free(self->members);
    PyMem_Free(self->awaited);
    PyMem_Free(self->member_of);
    fd_py_free(self);
}

static size_t n_bytes(const uint32_t range[2]) { return range[1] - range[0]; }

/* Why a member with columns cannot take part in any step, or NULL. */
static const char *columns_error(const member_t *m) {
    const fd_layout_t *y = &m->port->port.layout;
    if ((size_t)m->columns.len != m->port->port.geometry.n_layers * sizeof(columns_t))
        return "the columns are eight 32-bit numbers for each layer";
    const columns_t *layers = m->columns.buf;
    for (uint32_t i = 0; i < m->port->port.geometry.n_layers; i++) {
        const columns_t *c = &layers[i];
        if (c->q[0] > c->q[1] || c->k[0] > c->k[1] || c->v[0] > c->v[1] || c->o[0] > c->o[1])
            return "a range of columns ends before it begins";
        if (n_bytes(c->q) > y->q_row_bytes || n_bytes(c->k) + n_bytes(c->v) > y->kv_row_bytes ||
            n_bytes(c->o) > y->o_row_bytes)
            return "a member has more columns than its slot's rows";
    }
    return NULL;
}

static bool take_member(GroupObject *self, member_t *m, PyObject *tuple) {
    PyObject *port, *columns = Py_None;
    if (!PyArg_ParseTuple(tuple,
                          "O!y*IIII|O;a member is (port, table, attend_from, attend_to, append_from, append_to, "
                          "columns)",
                          fd_py_port_type, &port, &m->table, &m->attend_from, &m->attend_to, &m->append_from,
                          &m->append_to, &columns))
        return false;
    m->port = (PortObject *)Py_NewRef(port);
    if (columns != Py_None && PyObject_GetBuffer(columns, &m->columns, PyBUF_SIMPLE)) return false;
    const fd_layout_t *y = &m->port->port.layout;
    const char *wrong = NULL;
    if (self->slot >= m->port->port.geometry.n_slots) wrong = "the slot is beyond the region";
    else if ((size_t)m->table.len % sizeof(fd_row_t)) wrong = "a row table consists of 24-byte entries";
    else if (m->attend_to < m->attend_from || m->append_to < m->append_from)
        wrong = "a range of rows ends before it begins";
    else if (n_attend(m) + (uint64_t)n_append(m) > m->port->port.geometry.max_rows)
        wrong = "a member has more rows than its slot";
    else if (m->columns.obj) wrong = columns_error(m);
    if (wrong) return FD_PY_FAIL(PyExc_ValueError, "%s", wrong);
    self->local &= fd_py_port_is_local(m->port);
    self->bytes_per_layer += n_attend(m) * y->q_row_bytes + (n_attend(m) + n_append(m)) * y->kv_row_bytes;
    return true;
}

/* Why a member's rows are not in the step's row buffers, or NULL. */
static const char *rows_error(const GroupObject *self, const member_t *m) {
    const fd_layout_t *y = &m->port->port.layout;
    const uint64_t last = fd_max(m->append_to, m->attend_to);
    if (m->attend_to * self->q_row_bytes > (size_t)self->q.len ||
        m->attend_to * self->o_row_bytes > (size_t)self->o.len || last * self->kv_row_bytes > (size_t)self->kv.len)
        return "a member's rows are beyond the step's buffers";
    if (!m->columns.obj) {
        const bool same = self->q_row_bytes == y->q_row_bytes && self->kv_row_bytes == y->kv_row_bytes &&
                          self->o_row_bytes == y->o_row_bytes;
        return same ? NULL : "a member's rows differ in size from those of the step's buffers";
    }
    const columns_t *layers = m->columns.buf;
    for (uint32_t i = 0; i < m->port->port.geometry.n_layers; i++) {
        const columns_t *c = &layers[i];
        if (c->q[1] > self->q_row_bytes || c->k[1] > self->kv_row_bytes || c->v[1] > self->kv_row_bytes ||
            c->o[1] > self->o_row_bytes)
            return "a member's columns are beyond the step's rows";
    }
    return NULL;
}

/* Takes a buffer of rows, and the bytes of one. */
static bool take_buffer(PyObject *rows, int flags, Py_buffer *buffer, size_t *row_bytes) {
    if (PyObject_GetBuffer(rows, buffer, flags | PyBUF_ND)) return false;
    if (buffer->ndim != 2)
        return FD_PY_FAIL(PyExc_ValueError, "a step's buffers have two dimensions, rows and their columns");
    *row_bytes = (size_t)(buffer->shape[1] * buffer->itemsize);
    return true;
}

/* Takes the step's row buffers, or none of them, and checks that they hold every member's rows. */
static bool take_rows(GroupObject *self, PyObject *q, PyObject *kv, PyObject *o) {
    const char *wrong = NULL;
    if (q == Py_None && kv == Py_None && o == Py_None) {
        self->bytes_per_layer = 0;
        for (size_t i = 0; i < self->n; i++)
            if (self->members[i].columns.obj) wrong = "a member with columns needs the step's buffers";
    } else {
        if (!take_buffer(q, PyBUF_SIMPLE, &self->q, &self->q_row_bytes) ||
            !take_buffer(kv, PyBUF_SIMPLE, &self->kv, &self->kv_row_bytes) ||
            !take_buffer(o, PyBUF_WRITABLE, &self->o, &self->o_row_bytes))
            return false;
        for (size_t i = 0; i < self->n && !wrong; i++) wrong = rows_error(self, &self->members[i]);
    }
    return !wrong || FD_PY_FAIL(PyExc_ValueError, "%s", wrong);
}

static PyObject *group_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"slot", "members", "q", "kv", "o", NULL};
    unsigned int slot;
    PyObject *list, *q = Py_None, *kv = Py_None, *o = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "IO|OOO:StepGroup", names, &slot, &list, &q, &kv, &o)) return NULL;
    PyObject *members = PySequence_Fast(list, "members are a sequence");
    if (!members) return NULL;
    GroupObject *self = (GroupObject *)type->tp_alloc(type, 0);
    if (!self) goto fail;
    const size_t n = (size_t)PySequence_Fast_GET_SIZE(members);
    self->slot = slot;
    self->local = true;
    self->members = PyMem_Calloc(n ? n : 1, sizeof *self->members);
    self->awaited = PyMem_Calloc(n ? n : 1, sizeof *self->awaited);
    self->member_of = PyMem_Calloc(n ? n : 1, sizeof *self->member_of);
    if (!self->members || !self->awaited || !self->member_of) {
        PyErr_NoMemory();
        goto fail;
    }
    for (size_t i = 0; i < n; i++) {
        self->n = i + 1;
        if (!take_member(self, &self->members[i], PySequence_Fast_GET_ITEM(members, (Py_ssize_t)i))) goto fail;
    }
    if (!take_rows(self, q, kv, o)) goto fail;
    Py_DECREF(members);
    return (PyObject *)self;
fail:
    Py_XDECREF(self);
    Py_DECREF(members);
    return NULL;
}

/* ---- failures: a list of (member, status, message), status -1 for a link that is down; None if there are none ---- */

static int add_failure(GroupObject *self, PyObject **failures, size_t i, long status, PyObject *message) {
    const member_t *m = &self->members[i];
    self->members[i].failed = true;
    if (self->o.buf) /* the rows of an earlier step must not pass for its result */
        memset((uint8_t *)self->o.buf + m->attend_from * self->o_row_bytes, 0, n_attend(m) * self->o_row_bytes);
    if (!*failures) *failures = PyList_New(0);
    PyObject *failure = *failures && message ? Py_BuildValue("nlO", (Py_ssize_t)i, status, message) : NULL;
    const int rc = failure ? PyList_Append(*failures, failure) : -1;
    Py_XDECREF(failure);
    Py_XDECREF(message);
    return rc;
}

static int add_result(GroupObject *self, PyObject **failures, size_t i, const fd_awaited_t *a) {
    const fd_report_t *report = &a->port->reports[a->slot];
    if (a->result == FD_PORT_REFUSED)
        return add_failure(self, failures, i, (long)report->status, fd_py_text(report->message));
    return a->result == FD_PORT_DOWN ? add_failure(self, failures, i, -1, fd_py_down_reason(&a->port->link)) : 0;
}

/* ---- calls ---- */

bool fd_py_group_begin(GroupObject *self, size_t *n) {
    if (self->busy) return FD_PY_FAIL(PyExc_RuntimeError, "another thread uses this group");
    self->busy = true;
    *n = 0;
    for (size_t i = 0; i < self->n; i++) {
        const member_t *m = &self->members[i];
        if (m->failed) continue;
        self->member_of[*n] = i;
        self->awaited[(*n)++] = (fd_awaited_t){
            .port = &m->port->port, .slot = self->slot, .result = m->port->open ? FD_PORT_PENDING : FD_PORT_DOWN};
    }
    return true;
}

PyThreadState *fd_py_group_leave_python(GroupObject *self, size_t n) {
    for (size_t k = 0; k < n; k++) self->awaited[k].open = fd_py_port_enter(self->members[self->member_of[k]].port);
    return PyEval_SaveThread();
}

void fd_py_group_return_to_python(GroupObject *self, size_t n, PyThreadState *state) {
    for (size_t k = 0; k < n; k++)
        if (self->awaited[k].open) fd_py_port_leave(self->members[self->member_of[k]].port);
    PyEval_RestoreThread(state);
}

PyObject *fd_py_group_end(GroupObject *self, size_t n, const char *misuse) {
    PyObject *failures = NULL;
    int rc = 0;
    for (size_t k = 0; k < n && !rc; k++)
        if (self->awaited[k].result > FD_PORT_PENDING)
            rc = add_result(self, &failures, self->member_of[k], &self->awaited[k]);
    self->busy = false;
    if (misuse) PyErr_Format(PyExc_ValueError, "%s", misuse);
    if (misuse || rc) Py_CLEAR(failures);
    if (misuse || rc) return NULL;
    return failures ? failures : Py_NewRef(Py_None);
}

/* True if the slot may send; else its result says that its link is down. */
static bool may_send(fd_awaited_t *a) {
    if (a->result == FD_PORT_PENDING && fd_link_is_down(&a->port->link)) a->result = FD_PORT_DOWN;
    return a->result == FD_PORT_PENDING;
}

static PyObject *group_arm(GroupObject *self, PyObject *args) {
    size_t n;
    const char *misuse = NULL;
    unsigned int n_layers = 0;
    if (!PyArg_ParseTuple(args, "|I:arm", &n_layers)) return NULL;
    if (!fd_py_group_begin(self, &n)) return NULL;
    PyThreadState *state = fd_py_group_leave_python(self, n);
    for (size_t k = 0; k < n && !misuse; k++) {
        const Py_buffer *table = &self->members[self->member_of[k]].table;
        fd_awaited_t *a = &self->awaited[k];
        if (may_send(a))
            misuse = fd_port_arm(a->port, a->slot, table->buf, (size_t)table->len / sizeof(fd_row_t),
                                 n_layers ? n_layers : a->port->geometry.n_layers);
    }
    fd_py_group_return_to_python(self, n, state);
    return fd_py_group_end(self, n, misuse);
}

/* Copies `bytes` bytes of each of `n` rows. */
static void copy_columns(uint8_t *to, size_t to_row, const uint8_t *from, size_t from_row, size_t n, size_t bytes) {
    for (size_t i = 0; i < n; i++) memcpy(to + i * to_row, from + i * from_row, bytes);
}

/* Copies the K and V columns of the step's rows [from, to) to rows of a slot that begin at `row`. */
static void scatter_kv(const GroupObject *self, const columns_t *c, uint8_t *row, size_t row_bytes, uint32_t from,
                       uint32_t to) {
    const uint8_t *kv = (const uint8_t *)self->kv.buf + from * self->kv_row_bytes;
    copy_columns(row, row_bytes, kv + c->k[0], self->kv_row_bytes, to - from, n_bytes(c->k));
    copy_columns(row + n_bytes(c->k), row_bytes, kv + c->v[0], self->kv_row_bytes, to - from, n_bytes(c->v));
}

/* Copies a member's rows of a layer from the step's buffers to its slot. */
static void scatter(const GroupObject *self, const member_t *m, uint32_t layer) {
    const fd_layout_t *y = &m->port->port.layout;
    uint8_t *slot = (uint8_t *)fd_port_slot(&m->port->port, self->slot);
    const uint8_t *q = (const uint8_t *)self->q.buf + m->attend_from * self->q_row_bytes, *kv = self->kv.buf;
    if (m->columns.obj) {
        const columns_t *c = (const columns_t *)m->columns.buf + layer;
        copy_columns(slot + y->q, y->q_row_bytes, q + c->q[0], self->q_row_bytes, n_attend(m), n_bytes(c->q));
        scatter_kv(self, c, slot + y->kv, y->kv_row_bytes, m->attend_from, m->attend_to);
        scatter_kv(self, c, slot + y->kv + n_attend(m) * y->kv_row_bytes, y->kv_row_bytes, m->append_from,
                   m->append_to);
        return;
    }
    memcpy(slot + y->q, q, n_attend(m) * self->q_row_bytes);
    memcpy(slot + y->kv, kv + m->attend_from * self->kv_row_bytes, n_attend(m) * self->kv_row_bytes);
    memcpy(slot + y->kv + n_attend(m) * self->kv_row_bytes, kv + m->append_from * self->kv_row_bytes,
           n_append(m) * self->kv_row_bytes);
}

void fd_py_group_gather(const GroupObject *self, size_t n) {
    for (size_t k = 0; k < n; k++) {
        const member_t *m = &self->members[self->member_of[k]];
        const fd_port_t *port = &m->port->port;
        const uint32_t asked = port->slots[self->slot].asked;
        if (self->awaited[k].result != FD_PORT_OK || !asked) continue;
        uint8_t *o = (uint8_t *)self->o.buf + m->attend_from * self->o_row_bytes;
        const uint8_t *from = (const uint8_t *)fd_port_slot(port, self->slot) + port->layout.o;
        if (m->columns.obj) {
            const columns_t *c = (const columns_t *)m->columns.buf + asked - 1;
            copy_columns(o + c->o[0], self->o_row_bytes, from, port->layout.o_row_bytes, n_attend(m), n_bytes(c->o));
        } else {
            memcpy(o, from, n_attend(m) * self->o_row_bytes);
        }
    }
}

/* Over shared memory a send is a fence, which waits for the cache lines of the rows; the sends come last, so that the
 * first one waits for the lines of all links at once. Over a wire, a link's rows travel while the next are copied. */
const char *fd_py_group_ring(GroupObject *self, size_t n, uint32_t layer) {
    const char *misuse = NULL;
    for (size_t k = 0; k < n && !misuse; k++) {
        fd_awaited_t *a = &self->awaited[k];
        if (!may_send(a)) continue;
        if (self->q.buf && a->port->slots[a->slot].phase == FD_SLOT_ARMED && layer < a->port->geometry.n_layers)
            scatter(self, &self->members[self->member_of[k]], layer);
        misuse = fd_port_ask(a->port, a->slot, layer);
        if (!misuse) a->result = FD_PORT_OK;
        if (!self->local && a->result == FD_PORT_OK) fd_port_send(a->port, a->slot);
    }
    for (size_t k = 0; self->local && k < n; k++)
        if (self->awaited[k].result == FD_PORT_OK) fd_port_send(self->awaited[k].port, self->slot);
    return misuse;
}

/* Puts `rows` in the place of the step's `kv`, which the caller puts back. */
static bool take_other_kv(GroupObject *self, PyObject *rows, Py_buffer *kept) {
    Py_buffer given;
    size_t row_bytes = 0;
    if (!take_buffer(rows, PyBUF_SIMPLE, &given, &row_bytes)) return false;
    if (!self->kv.buf || row_bytes != self->kv_row_bytes || given.len != self->kv.len) {
        PyBuffer_Release(&given);
        return FD_PY_FAIL(PyExc_ValueError, "the rows differ in size from the step's buffer");
    }
    *kept = self->kv;
    self->kv = given;
    return true;
}

static PyObject *group_ring(GroupObject *self, PyObject *args) {
    unsigned long layer;
    PyObject *rows = Py_None;
    if (!PyArg_ParseTuple(args, "k|O:ring", &layer, &rows)) return NULL;
    size_t n;
    const char *misuse;
    if (!fd_py_group_begin(self, &n)) return NULL;
    Py_buffer kept;
    if (rows != Py_None && !take_other_kv(self, rows, &kept)) {
        self->busy = false;
        return NULL;
    }
    const uint32_t index = fd_min(layer, FD_MAX_LAYERS);
    if (self->local && self->bytes_per_layer <= GIL_BYTES) {
        misuse = fd_py_group_ring(self, n, index);
    } else {
        PyThreadState *state = fd_py_group_leave_python(self, n);
        misuse = fd_py_group_ring(self, n, index);
        fd_py_group_return_to_python(self, n, state);
    }
    if (rows != Py_None) {
        PyBuffer_Release(&self->kv);
        self->kv = kept;
    }
    return fd_py_group_end(self, n, misuse);
}

/* True if the slot has sent something that is not answered. */
static bool awaits(const fd_awaited_t *a) {
    const fd_slot_phase_t phase = a->port->slots[a->slot].phase;
    return phase == FD_SLOT_ARMING || phase == FD_SLOT_ASKED;
}

static PyObject *group_wait(GroupObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"timeout", "rows", NULL};
    uint64_t timeout_ns;
    int rows = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|p:wait", names, fd_py_timeout, &timeout_ns, &rows)) return NULL;
    size_t n, pending = 0;
    if (!fd_py_group_begin(self, &n)) return NULL;
    for (size_t k = 0; k < n; k++) {
        fd_awaited_t *a = &self->awaited[k];
        if (a->result != FD_PORT_PENDING) continue;
        if (!awaits(a)) a->result = fd_link_is_down(&a->port->link) ? FD_PORT_DOWN : FD_PORT_OK;
        else fd_port_look(a);
        pending += a->result == FD_PORT_PENDING;
    }
    const bool copy = rows && self->o.buf;
    if (pending || (copy && self->bytes_per_layer > GIL_BYTES)) {
        PyThreadState *state = fd_py_group_leave_python(self, n);
        fd_port_await(self->awaited, n, timeout_ns);
        if (copy) fd_py_group_gather(self, n);
        fd_py_group_return_to_python(self, n, state);
    } else if (copy) {
        fd_py_group_gather(self, n);
    }
    return fd_py_group_end(self, n, NULL);
}

static PyObject *group_disarm(GroupObject *self, PyObject *unused) {
    size_t n;
    if (!fd_py_group_begin(self, &n)) return NULL;
    PyObject *totals = PyList_New(0);
    for (size_t k = 0; totals && k < n; k++) {
        fd_report_t report;
        fd_awaited_t *a = &self->awaited[k];
        if (a->result != FD_PORT_PENDING || !fd_port_disarm(a->port, a->slot, &report)) continue;
        PyObject *total = Py_BuildValue("nKK", (Py_ssize_t)self->member_of[k], (unsigned long long)report.busy_ns,
                                        (unsigned long long)report.kv_bytes);
        if (!total || PyList_Append(totals, total)) Py_CLEAR(totals);
        Py_XDECREF(total);
    }
    self->busy = false;
    return totals;
}

static PyMethodDef group_methods[] = {
    {"arm", (PyCFunction)group_arm, METH_VARARGS, NULL},
    {"ring", (PyCFunction)group_ring, METH_VARARGS, NULL},
    {"wait", FD_PY_KEYWORDS(group_wait), NULL},
    {"disarm", (PyCFunction)group_disarm, METH_NOARGS, NULL},
    {"run_layers", (PyCFunction)fd_py_group_run_layers, METH_VARARGS, NULL},
    {0},
};

FD_PY_TYPE(fd_py_group_spec, "fastdecode.transports._native.StepGroup", GroupObject,
           {Py_tp_doc, "One step of a mini-batch over all links that have rows in it; see _native.pyi."},
           {Py_tp_new, group_new}, {Py_tp_dealloc, group_dealloc}, {Py_tp_methods, group_methods});
