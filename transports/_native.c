/* The extension module fastdecode.transports._native: Port, the S side's data path. */
#include "native.h"

#include <structmember.h>

static PyObject *down_error(fd_down_t *down) {
    char reason[256];
    fd_down_reason(down, reason);
    PyErr_SetString(PyExc_ConnectionError, reason);
    return NULL;
}

PyObject *fd_py_down_reason(fd_down_t *down) {
    char reason[256];
    if (!fd_is_down(down)) Py_RETURN_NONE;
    fd_down_reason(down, reason);
    return PyUnicode_DecodeUTF8(reason, (Py_ssize_t)strlen(reason), "replace");
}

/* ---- Port: the S side ---- */

typedef struct {
    PyObject_HEAD
    Py_buffer region;
    fd_port_t port;
    bool open;       /* the object holds the region; changes under the GIL */
    uint32_t inside; /* number of threads in a method that uses the region */
} PortObject;

static PyObject *port_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"region", "geometry", "spin_us", "wake_fd", "data_fd", "verbs", NULL};
    PyObject *region;
    fd_geometry_t g;
    unsigned int spin_us;
    int wake_fd = -1, data_fd = -1;
    fd_verbs_t verbs = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO&I|$iiO&:Port", names, &region, fd_py_geometry, &g, &spin_us,
                                     &wake_fd, &data_fd, fd_py_verbs, &verbs))
        return NULL;
    if ((wake_fd >= 0) + (data_fd >= 0) + (verbs.qp != NULL) != 1) {
        PyErr_SetString(PyExc_TypeError,
                        "a port needs exactly one of wake_fd (shared memory), data_fd (TCP) and verbs (RDMA)");
        return NULL;
    }
    PortObject *self = (PortObject *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    if (fd_py_region(region, &g, &self->region)) goto fail;
    if (fd_port_init(&self->port, self->region.buf, &g, spin_us)) {
        PyErr_SetFromErrno(PyExc_OSError);
        PyBuffer_Release(&self->region);
        goto fail;
    }
    self->open = true;
    self->port.wake_fd = wake_fd;
    if (data_fd >= 0) {
        self->port.pump = fd_pump_new(FD_SIDE_S, self->region.buf, &g, &self->port.down);
        if (!self->port.pump) {
            PyErr_NoMemory();
            goto fail;
        }
        if (fd_pump_start(self->port.pump, data_fd, -1)) {
            PyErr_SetFromErrno(PyExc_OSError);
            goto fail;
        }
    }
    if (verbs.qp) {
        self->port.poster = fd_poster_new(FD_SIDE_S, self->region.buf, &g, &self->port.down);
        if (!self->port.poster || fd_poster_start(self->port.poster, &verbs)) {
            PyErr_SetFromErrno(PyExc_OSError);
            goto fail;
        }
    }
    return (PyObject *)self;
fail:
    Py_DECREF(self);
    return NULL;
}

/* Takes the port down, joins its threads, waits until no thread is inside a method and releases the region. */
static void port_stop(PortObject *self) {
    fd_port_kill(&self->port, "the link was closed");
    Py_BEGIN_ALLOW_THREADS
    if (self->port.pump) fd_pump_stop(self->port.pump);
    if (self->port.poster) fd_poster_stop(self->port.poster);
    while (__atomic_load_n(&self->inside, __ATOMIC_ACQUIRE)) usleep(1000);
    Py_END_ALLOW_THREADS
    if (!self->open) return; /* another thread has closed the port meanwhile */
    self->open = false;
    fd_down_close_fd(&self->port.down);
    PyBuffer_Release(&self->region);
}

static void port_dealloc(PortObject *self) {
    if (self->open) port_stop(self);
    if (self->port.pump) fd_pump_free(self->port.pump);
    if (self->port.poster) fd_poster_free(self->port.poster);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

/* A method calls port_enter before it uses the region and port_leave afterwards, so that port_stop can wait for it. */
static int port_enter(PortObject *self) {
    if (!self->open) {
        down_error(&self->port.down);
        return -1;
    }
    __atomic_add_fetch(&self->inside, 1, __ATOMIC_ACQUIRE);
    return 0;
}

static void port_leave(PortObject *self) { __atomic_sub_fetch(&self->inside, 1, __ATOMIC_RELEASE); }

static PyObject *port_write_table(PortObject *self, PyObject *args) {
    unsigned int slot;
    Py_buffer rows;
    if (!PyArg_ParseTuple(args, "Iy*:write_table", &slot, &rows)) return NULL;
    if (port_enter(self)) {
        PyBuffer_Release(&rows);
        return NULL;
    }
    const fd_port_t *port = &self->port;
    /* The first check, because a call that the end of the link left unanswered keeps its slot in flight for ever. */
    if (fd_is_down(&port->down)) {
        port_leave(self);
        PyBuffer_Release(&rows);
        return down_error(&self->port.down);
    }
    const char *error = NULL;
    if (slot >= port->geometry.n_slots) error = "the slot is beyond the region";
    else if ((size_t)rows.len % sizeof(fd_row_t)) error = "a row table consists of 24-byte entries";
    else if ((size_t)rows.len / sizeof(fd_row_t) > port->geometry.max_rows)
        error = "the row table is longer than the slot allows";
    else if (port->slots[slot].in_flight) error = "the slot's last call has not been waited for";
    else
        memcpy((uint8_t *)fd_slot_at(port->region, &port->layout, slot) + port->layout.table, rows.buf,
               (size_t)rows.len);
    port_leave(self);
    PyBuffer_Release(&rows);
    if (error) return PyErr_Format(PyExc_ValueError, "%s", error);
    Py_RETURN_NONE;
}

static PyObject *port_post(PortObject *self, PyObject *args) {
    unsigned int slot;
    int new_step;
    fd_call_t call = {0};
    if (!PyArg_ParseTuple(args, "IIIIIp:post", &slot, &call.layer, &call.n_entries, &call.n_rows, &call.n_attend_rows,
                          &new_step))
        return NULL;
    call.flags = new_step ? FD_CALL_NEW_STEP : 0;
    const char *misuse;
    fd_port_result_t result;
    if (port_enter(self)) return NULL;
    if (self->port.pump || self->port.poster) {
        Py_BEGIN_ALLOW_THREADS
        result = fd_port_post(&self->port, slot, &call, &misuse);
        Py_END_ALLOW_THREADS
    } else {
        result = fd_port_post(&self->port, slot, &call, &misuse);
    }
    port_leave(self);
    if (result == FD_PORT_DOWN) return down_error(&self->port.down);
    if (result == FD_PORT_MISUSE) return PyErr_Format(PyExc_ValueError, "%s", misuse);
    Py_RETURN_NONE;
}

static PyObject *port_wait(PortObject *self, PyObject *args) {
    unsigned int slot;
    double timeout;
    if (!PyArg_ParseTuple(args, "Id:wait", &slot, &timeout)) return NULL;
    if (!(timeout >= 0)) return PyErr_Format(PyExc_ValueError, "the timeout must not be negative");
    uint64_t timeout_ns = timeout < 1e9 ? (uint64_t)(timeout * 1e9) : 1000000000000000000u;
    fd_reply_t reply;
    const char *misuse;
    fd_port_result_t result;
    if (port_enter(self)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    result = fd_port_wait(&self->port, slot, timeout_ns, &reply, &misuse);
    port_leave(self);
    Py_END_ALLOW_THREADS
    if (result == FD_PORT_DOWN) return down_error(&self->port.down);
    if (result == FD_PORT_MISUSE) return PyErr_Format(PyExc_ValueError, "%s", misuse);
    PyObject *message = PyUnicode_DecodeUTF8(reply.message, (Py_ssize_t)strlen(reply.message), "replace");
    if (!message) return NULL;
    return Py_BuildValue("IKKN", reply.status, (unsigned long long)reply.busy_ns, (unsigned long long)reply.kv_bytes,
                         message);
}

static PyObject *port_reap(PortObject *self, PyObject *unused) {
    if (self->open && self->port.poster) fd_poster_reap(self->port.poster);
    Py_RETURN_NONE;
}

static PyObject *port_kill(PortObject *self, PyObject *arg) {
    const char *reason = PyUnicode_AsUTF8(arg);
    if (!reason) return NULL;
    if (self->open) fd_port_kill(&self->port, reason);
    Py_RETURN_NONE;
}

static PyObject *port_close(PortObject *self, PyObject *unused) {
    if (self->open) port_stop(self);
    Py_RETURN_NONE;
}

static PyObject *port_get_reason(PortObject *self, void *closure) { return fd_py_down_reason(&self->port.down); }

static PyMethodDef port_methods[] = {
    {"write_table", (PyCFunction)port_write_table, METH_VARARGS, NULL},
    {"post", (PyCFunction)port_post, METH_VARARGS, NULL},
    {"wait", (PyCFunction)port_wait, METH_VARARGS, NULL},
    {"reap", (PyCFunction)port_reap, METH_NOARGS, NULL},
    {"kill", (PyCFunction)port_kill, METH_O, NULL},
    {"close", (PyCFunction)port_close, METH_NOARGS, NULL},
    {0},
};

static PyMemberDef port_members[] = {
    {"down_fd", T_INT, offsetof(PortObject, port.down.fd), READONLY, NULL},
    {0},
};

static PyGetSetDef port_getset[] = {
    {"reason", (getter)port_get_reason, NULL, NULL, NULL},
    {0},
};

static PyType_Slot port_slots[] = {
    {Py_tp_doc, "The S side of a link's data path; see _native.pyi."},
    {Py_tp_new, port_new},
    {Py_tp_dealloc, port_dealloc},
    {Py_tp_methods, port_methods},
    {Py_tp_members, port_members},
    {Py_tp_getset, port_getset},
    {0, NULL},
};

static PyType_Spec port_spec = {
    .name = "fastdecode.transports._native.Port",
    .basicsize = sizeof(PortObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = port_slots,
};

/* ---- module ---- */

static PyMethodDef functions[] = {
    {"verbs_fds", fd_py_verbs_fds, METH_VARARGS, NULL},
    {0},
};

static int add_type(PyObject *module, PyType_Spec *spec) {
    PyObject *type = PyType_FromSpec(spec);
    if (!type) return -1;
    int rc = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return rc;
}

static int module_exec(PyObject *module) {
    return add_type(module, &port_spec) || add_type(module, &fd_py_pump_spec) || add_type(module, &fd_py_poster_spec)
               ? -1
               : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,  .m_name = "_native",     .m_doc = "The links' data path in C; see _native.pyi.",
    .m_methods = functions, .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module_def); }
