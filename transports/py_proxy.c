/* The type Proxy of fastdecode.transports._native: carries the words of slots that a device drives. */
#include "proxy.h"
#include "py_port.h"

typedef struct {
    PyObject_HEAD
    fd_proxy_t *proxy;
} ProxyObject;

static PyObject *proxy_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"spin_us", NULL};
    unsigned int spin_us = 50;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|I:Proxy", names, &spin_us)) return NULL;
    ProxyObject *self = (ProxyObject *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->proxy = fd_proxy_new(spin_us);
    if (self->proxy) return (PyObject *)self;
    PyErr_SetFromErrno(PyExc_OSError);
    Py_DECREF(self);
    return NULL;
}

static void proxy_dealloc(ProxyObject *self) {
    fd_proxy_t *proxy = self->proxy;
    if (proxy) {
        FD_WITHOUT_GIL(fd_proxy_free(proxy));
    }
    fd_py_free(self);
}

static PyObject *proxy_begin(ProxyObject *self, PyObject *args) {
    PortObject *port;
    unsigned int slot;
    uint64_t timeout_ns;
    if (!PyArg_ParseTuple(args, "O!IO&:begin", fd_py_port_type, &port, &slot, fd_py_timeout, &timeout_ns)) return NULL;
    if (fd_link_is_down(&port->port.link) || !fd_py_port_enter(port)) return fd_py_down_error(&port->port.link);
    const char *misuse;
    FD_WITHOUT_GIL(misuse = fd_proxy_begin(self->proxy, &port->port, slot, timeout_ns));
    if (!misuse) Py_RETURN_NONE; /* the port stays entered, and so open, until `end` */
    fd_py_port_leave(port);
    return PyErr_Format(PyExc_ValueError, "%s", misuse);
}

static PyObject *proxy_end(ProxyObject *self, PyObject *args) {
    PortObject *port;
    unsigned int slot;
    if (!PyArg_ParseTuple(args, "O!I:end", fd_py_port_type, &port, &slot)) return NULL;
    if (slot >= port->port.geometry.n_slots) return PyErr_Format(PyExc_ValueError, "the slot is beyond the region");
    fd_report_t report;
    fd_port_result_t result;
    FD_WITHOUT_GIL(result = fd_proxy_end(self->proxy, &port->port, slot, &report));
    if (result == FD_PORT_MISUSE) return PyErr_Format(PyExc_ValueError, "no device drives this slot");
    fd_py_port_leave(port);
    if (result == FD_PORT_DOWN) return fd_py_down_error(&port->port.link);
    if (result != FD_PORT_REFUSED) return PyBool_FromLong(result == FD_PORT_OK);
    PyObject *message = fd_py_text(report.message);
    return message ? Py_BuildValue("IN", report.status, message) : NULL;
}

static bool take_mini_batch(PyObject *arg, uint32_t *index) {
    const unsigned long value = PyLong_AsUnsignedLong(arg);
    if (PyErr_Occurred()) return false;
    *index = (uint32_t)value;
    return value < FD_MAX_SLOTS ||
           FD_PY_FAIL(PyExc_ValueError, "there is no mini-batch %lu: there are at most %d", value, FD_MAX_SLOTS);
}

static PyObject *proxy_expect(ProxyObject *self, PyObject *arg) {
    uint32_t index;
    if (!take_mini_batch(arg, &index)) return NULL;
    FD_WITHOUT_GIL(fd_proxy_expect(self->proxy, index));
    Py_RETURN_NONE;
}

static PyObject *proxy_done(ProxyObject *self, PyObject *arg) {
    uint32_t index;
    if (!take_mini_batch(arg, &index)) return NULL;
    return PyBool_FromLong(fd_proxy_done(self->proxy, index));
}

static PyObject *proxy_done_fd(ProxyObject *self, PyObject *arg) {
    uint32_t index;
    if (!take_mini_batch(arg, &index)) return NULL;
    return PyLong_FromLong(fd_proxy_done_fd(self->proxy, index));
}

static int proxy_buffer(PyObject *self, Py_buffer *view, int flags) {
    return PyBuffer_FillInfo(view, self, fd_proxy_page(((ProxyObject *)self)->proxy), FD_PROXY_PAGE, 0, flags);
}

static PyMethodDef proxy_methods[] = {
    {"expect", (PyCFunction)proxy_expect, METH_O, NULL},   {"done", (PyCFunction)proxy_done, METH_O, NULL},
    {"done_fd", (PyCFunction)proxy_done_fd, METH_O, NULL}, {"begin", (PyCFunction)proxy_begin, METH_VARARGS, NULL},
    {"end", (PyCFunction)proxy_end, METH_VARARGS, NULL},   {0},
};

FD_PY_TYPE(fd_py_proxy_spec, "fastdecode.transports._native.Proxy", ProxyObject,
           {Py_tp_doc, "Carries the layer words of slots that a device drives; see _native.pyi."},
           {Py_tp_new, proxy_new}, {Py_tp_dealloc, proxy_dealloc}, {Py_tp_methods, proxy_methods},
           {Py_bf_getbuffer, proxy_buffer});
