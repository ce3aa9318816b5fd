/* The type Port of fastdecode.transports._native: the S side's data path. */
#include "py_port.h"

#include <structmember.h>

PyObject *fd_py_text(const char *text) { return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace"); }

PyObject *fd_py_down_error(fd_link_state_t *link) {
    char reason[256];
    fd_link_down_reason(link, reason);
    PyErr_SetString(PyExc_ConnectionError, reason);
    return NULL;
}

PyObject *fd_py_down_reason(fd_link_state_t *link) {
    char reason[256];
    if (!fd_link_is_down(link)) Py_RETURN_NONE;
    fd_link_down_reason(link, reason);
    return fd_py_text(reason);
}

static PyObject *port_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"region", "geometry", "spin_us",  "wake_fd", "data_fd",
                            "verbs",  "loopback", "stand_in", NULL};
    PyObject *region, *stand_in = Py_None;
    fd_geometry_t g;
    unsigned int spin_us;
    int wake_fd = -1, data_fd = -1, loopback = 0;
    fd_verbs_t verbs = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO&I|$iiO&pO:Port", names, &region, fd_py_geometry, &g, &spin_us,
                                     &wake_fd, &data_fd, fd_py_verbs, &verbs, &loopback, &stand_in))
        return NULL;
    if ((wake_fd >= 0) + (data_fd >= 0) + (verbs.qp != NULL) + loopback != 1) {
        PyErr_SetString(
            PyExc_TypeError,
            "a port needs exactly one of wake_fd (shared memory), data_fd (TCP), verbs (RDMA) and loopback");
        return NULL;
    }
    const fd_stand_in_t *engine = NULL;
    if (stand_in != Py_None && !(engine = PyCapsule_GetPointer(stand_in, FD_STAND_IN_CAPSULE))) return NULL;
    if (engine && wake_fd < 0) {
        PyErr_SetString(PyExc_TypeError, "stand_in is for shared memory: it needs wake_fd");
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
    self->shm = (fd_shm_s_t){self->region.buf, wake_fd, engine};
    self->stand_in = engine ? Py_NewRef(stand_in) : NULL;
    if (loopback) self->port.carrier = (fd_carrier_t){&fd_loopback_ops, &self->port};
    else self->port.carrier = (fd_carrier_t){engine ? &fd_shm_s_ops_standing_in : &fd_shm_s_ops, &self->shm};
    if (data_fd >= 0) {
        self->pump = fd_pump_new(FD_SIDE_S, self->region.buf, &g, &self->port.link);
        if (!self->pump) {
            PyErr_NoMemory();
            goto fail;
        }
        self->port.carrier = (fd_carrier_t){&fd_pump_ops, self->pump};
        if (fd_pump_start(self->pump, data_fd, -1)) {
            PyErr_SetFromErrno(PyExc_OSError);
            goto fail;
        }
    }
    if (verbs.qp) {
        self->poster = fd_poster_new(FD_SIDE_S, self->region.buf, &g, &self->port.link);
        self->port.carrier = (fd_carrier_t){&fd_poster_ops, self->poster};
        if (!self->poster || fd_poster_start(self->poster, &verbs)) {
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
    if (self->pump) fd_pump_stop(self->pump);
    if (self->poster) fd_poster_stop(self->poster);
    while (__atomic_load_n(&self->inside, __ATOMIC_ACQUIRE)) usleep(1000);
    Py_END_ALLOW_THREADS
    if (!self->open) return; /* another thread has closed the port meanwhile */
    self->open = false;
    fd_link_state_close_fd(&self->port.link);
    PyBuffer_Release(&self->region);
}

static void port_dealloc(PortObject *self) {
    if (self->open) port_stop(self);
    if (self->pump) fd_pump_free(self->pump);
    if (self->poster) fd_poster_free(self->poster);
    Py_XDECREF(self->stand_in);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

bool fd_py_port_enter(PortObject *self) {
    if (!self->open) return false;
    __atomic_add_fetch(&self->inside, 1, __ATOMIC_ACQUIRE);
    return true;
}

void fd_py_port_leave(PortObject *self) { __atomic_sub_fetch(&self->inside, 1, __ATOMIC_RELEASE); }

bool fd_py_port_is_local(const PortObject *self) { return !self->pump && !self->poster; }

int fd_py_timeout(PyObject *object, void *out) {
    const double timeout = PyFloat_AsDouble(object);
    if (PyErr_Occurred()) return 0;
    if (!(timeout >= 0)) {
        PyErr_SetString(PyExc_ValueError, "the timeout must not be negative");
        return 0;
    }
    *(uint64_t *)out = timeout < 1e9 ? (uint64_t)(timeout * 1e9) : 1000000000000000000u;
    return 1;
}

static PyObject *port_poison(PortObject *self, PyObject *unused) {
    if (!fd_py_port_enter(self)) Py_RETURN_NONE;
    fd_port_poison(&self->port);
    fd_py_port_leave(self);
    Py_RETURN_NONE;
}

static PyObject *port_reap(PortObject *self, PyObject *unused) {
    if (self->open && self->poster) fd_poster_reap(self->poster);
    Py_RETURN_NONE;
}

static PyObject *port_probe(PortObject *self, PyObject *unused) {
    if (self->open && self->poster) fd_poster_probe(self->poster);
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

static PyObject *port_get_reason(PortObject *self, void *closure) { return fd_py_down_reason(&self->port.link); }

static PyMethodDef port_methods[] = {
    {"poison", (PyCFunction)port_poison, METH_NOARGS, NULL}, {"reap", (PyCFunction)port_reap, METH_NOARGS, NULL},
    {"probe", (PyCFunction)port_probe, METH_NOARGS, NULL},   {"kill", (PyCFunction)port_kill, METH_O, NULL},
    {"close", (PyCFunction)port_close, METH_NOARGS, NULL},   {0},
};

static PyMemberDef port_members[] = {
    {"down_fd", T_INT, offsetof(PortObject, port.link.fd), READONLY, NULL},
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

PyType_Spec fd_py_port_spec = {
    .name = "fastdecode.transports._native.Port",
    .basicsize = sizeof(PortObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = port_slots,
};
