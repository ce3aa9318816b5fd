/* The types Port and RPort of fastdecode.transports._native: the data path at the S side and at the R side of a link.
 */
#include "py_port.h"

#include <structmember.h>

PyObject *fd_py_text(const char *text) { return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace"); }

PyObject *fd_py_down_error(fd_link_state_t *link) {
    char reason[256];
    fd_link_down_reason(link, reason);
    return PyErr_Format(PyExc_ConnectionError, "%s", reason);
}

PyObject *fd_py_down_reason(fd_link_state_t *link) {
    char reason[256];
    fd_link_down_reason(link, reason);
    return fd_py_text(reason);
}

/* ---- life ---- */

/* An open port without a carrier. NULL with an exception. */
static PortObject *make(PyTypeObject *type, PyObject *region, const fd_geometry_t *g, fd_side_t side,
                        uint32_t spin_us) {
    PortObject *self = (PortObject *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->side = side;
    if (fd_py_region(region, g, &self->region)) goto fail;
    if (fd_port_init(&self->port, self->region.buf, g, spin_us)) {
        PyErr_SetFromErrno(PyExc_OSError);
        PyBuffer_Release(&self->region);
        goto fail;
    }
    self->open = true;
    return self;
fail:
    Py_DECREF(self);
    return NULL;
}

/* Gives the port a pump or a poster, which `start` starts. False with MemoryError. */
static bool make_carrier(PortObject *self, bool rdma) {
    fd_port_t *port = &self->port;
    if (rdma) self->poster = fd_poster_new(self->side, port->region, &port->geometry, &port->link);
    else self->pump = fd_pump_new(self->side, port->region, &port->geometry, &port->link);
    port->carrier = rdma ? (fd_carrier_t){&fd_poster_ops, self->poster} : (fd_carrier_t){&fd_pump_ops, self->pump};
    if (!port->carrier.self) PyErr_NoMemory();
    return port->carrier.self != NULL;
}

/* False with OSError. */
static bool start(PortObject *self, int data_fd, int wake_fd, const fd_verbs_t *verbs) {
    const int failed = self->pump ? fd_pump_start(self->pump, data_fd, wake_fd) : fd_poster_start(self->poster, verbs);
    if (failed) PyErr_SetFromErrno(PyExc_OSError);
    return !failed;
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
    if ((wake_fd >= 0) + (data_fd >= 0) + (verbs.qp != NULL) + loopback != 1)
        return PyErr_Format(
            PyExc_TypeError,
            "a port needs exactly one of wake_fd (shared memory), data_fd (TCP), verbs (RDMA) and loopback");
    const fd_stand_in_t *engine = NULL;
    if (stand_in != Py_None && !(engine = PyCapsule_GetPointer(stand_in, FD_STAND_IN_CAPSULE))) return NULL;
    if (engine && wake_fd < 0) return PyErr_Format(PyExc_TypeError, "stand_in is for shared memory: it needs wake_fd");
    PortObject *self = make(type, region, &g, FD_SIDE_S, spin_us);
    if (!self) return NULL;
    self->shm = (fd_shm_s_t){self->region.buf, wake_fd, engine};
    self->stand_in = engine ? Py_NewRef(stand_in) : NULL;
    if (loopback) self->port.carrier = (fd_carrier_t){&fd_loopback_ops, &self->port};
    else self->port.carrier = (fd_carrier_t){engine ? &fd_shm_s_ops_standing_in : &fd_shm_s_ops, &self->shm};
    const bool wire = data_fd >= 0 || verbs.qp;
    if (!wire || (make_carrier(self, verbs.qp != NULL) && start(self, data_fd, -1, &verbs))) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static PyObject *r_port_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"region", "geometry", "rdma", NULL};
    PyObject *region;
    fd_geometry_t g;
    int rdma = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO&|$p:RPort", names, &region, fd_py_geometry, &g, &rdma))
        return NULL;
    PortObject *self = make(type, region, &g, FD_SIDE_R, 0);
    if (self && !make_carrier(self, rdma)) Py_CLEAR(self);
    return (PyObject *)self;
}

static PyObject *r_port_start(PortObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"data_fd", "wake_fd", "verbs", NULL};
    int data_fd = -1, wake_fd = -1;
    fd_verbs_t verbs = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$iiO&:start", names, &data_fd, &wake_fd, fd_py_verbs, &verbs))
        return NULL;
    if ((data_fd >= 0) != (self->pump != NULL) || (verbs.qp != NULL) != (self->poster != NULL))
        return PyErr_Format(PyExc_TypeError, "a port starts with data_fd and wake_fd (TCP) or with verbs (RDMA)");
    if (!start(self, data_fd, wake_fd, &verbs)) return NULL;
    Py_RETURN_NONE;
}

static void kill_port(PortObject *self, const char *reason) {
    fd_link_stop(&self->port.link, self->side, self->port.region, &self->port.geometry, reason);
}

/* Takes the port down, joins its threads, waits until no thread is inside a method and releases the region. */
static void port_stop(PortObject *self) {
    kill_port(self, "the link was closed");
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
    fd_py_free(self);
}

/* ---- methods ---- */

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
    if (!(timeout >= 0)) return FD_PY_FAIL(PyExc_ValueError, "the timeout must not be negative");
    *(uint64_t *)out = timeout < 1e9 ? (uint64_t)(timeout * 1e9) : 1000000000000000000u;
    return 1;
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
    if (self->open) kill_port(self, reason);
    Py_RETURN_NONE;
}

static PyObject *port_close(PortObject *self, PyObject *unused) {
    if (self->open) port_stop(self);
    Py_RETURN_NONE;
}

static PyObject *port_get_reason(PortObject *self, void *closure) {
    fd_link_state_t *link = &self->port.link;
    return fd_link_is_down(link) ? fd_py_down_reason(link) : Py_NewRef(Py_None);
}

static void capsule_free(PyObject *capsule) { Py_DECREF((PyObject *)PyCapsule_GetContext(capsule)); }

/* The capsule keeps the object alive: an R-engine thread may use the carrier until its link is closed. */
static PyObject *port_get_carrier(PortObject *self, void *closure) {
    PyObject *capsule = PyCapsule_New(&self->port.carrier, FD_CARRIER_CAPSULE, capsule_free);
    if (capsule) PyCapsule_SetContext(capsule, Py_NewRef(self));
    return capsule;
}

static PyMethodDef port_methods[] = {
    {"reap", (PyCFunction)port_reap, METH_NOARGS, NULL},
    {"probe", (PyCFunction)port_probe, METH_NOARGS, NULL},
    {"kill", (PyCFunction)port_kill, METH_O, NULL},
    {"close", (PyCFunction)port_close, METH_NOARGS, NULL},
    {0},
};

static PyMethodDef r_port_methods[] = {
    {"start", FD_PY_KEYWORDS(r_port_start), NULL},
    {"reap", (PyCFunction)port_reap, METH_NOARGS, NULL},
    {"kill", (PyCFunction)port_kill, METH_O, NULL},
    {"close", (PyCFunction)port_close, METH_NOARGS, NULL},
    {0},
};

static PyMemberDef port_members[] = {
    {"down_fd", T_INT, offsetof(PortObject, port.link.fd), READONLY, NULL},
    {0},
};

static PyGetSetDef port_getset[] = {
    {"reason", (getter)port_get_reason, NULL, NULL, NULL},
    {"carrier", (getter)port_get_carrier, NULL, NULL, NULL},
    {0},
};

FD_PY_TYPE(fd_py_port_spec, "fastdecode.transports._native.Port", PortObject,
           {Py_tp_doc, "The S side of a link's data path; see _native.pyi."}, {Py_tp_new, port_new},
           {Py_tp_dealloc, port_dealloc}, {Py_tp_methods, port_methods}, {Py_tp_members, port_members},
           {Py_tp_getset, port_getset});
FD_PY_TYPE(fd_py_r_port_spec, "fastdecode.transports._native.RPort", PortObject,
           {Py_tp_doc, "The R side of a TCP or RDMA link's data path; see _native.pyi."}, {Py_tp_new, r_port_new},
           {Py_tp_dealloc, port_dealloc}, {Py_tp_methods, r_port_methods}, {Py_tp_members, port_members},
           {Py_tp_getset, port_getset});
