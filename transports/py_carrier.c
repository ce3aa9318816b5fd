/* The R side of a TCP or RDMA link for Python: the types Pump and Poster of fastdecode.transports._native. */
#include "native.h"

#include <structmember.h>

/* The functions in which the two types differ. */
typedef struct {
    const char *arguments; /* format of the constructor's arguments; it names the type */
    void *(*make)(uint8_t *region, const fd_geometry_t *g, fd_link_state_t *link); /* NULL if out of memory */
    void (*stop)(void *carrier);
    void (*free)(void *carrier);
    const fd_carrier_ops_t *carrier;
} carrier_ops_t;

typedef struct {
    PyObject_HEAD
    const carrier_ops_t *ops;
    Py_buffer region;
    fd_link_state_t link;
    void *carrier;         /* fd_pump_t or fd_poster_t */
    fd_carrier_t contract; /* what the capsule points to */
    bool open;             /* the object holds the region; changes under the GIL */
} CarrierObject;

/* ---- what both types do ---- */

static PyObject *carrier_new(PyTypeObject *type, PyObject *args, PyObject *kwargs, const carrier_ops_t *ops) {
    static char *names[] = {"region", "geometry", NULL};
    PyObject *region;
    fd_geometry_t g;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ops->arguments, names, &region, fd_py_geometry, &g)) return NULL;
    CarrierObject *self = (CarrierObject *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->ops = ops;
    if (fd_py_region(region, &g, &self->region)) goto fail;
    if (fd_link_state_init(&self->link)) {
        PyErr_SetFromErrno(PyExc_OSError);
        PyBuffer_Release(&self->region);
        goto fail;
    }
    self->carrier = ops->make(self->region.buf, &g, &self->link);
    if (!self->carrier) {
        PyErr_NoMemory();
        fd_link_state_close_fd(&self->link);
        PyBuffer_Release(&self->region);
        goto fail;
    }
    self->open = true;
    self->contract = (fd_carrier_t){ops->carrier, self->carrier};
    return (PyObject *)self;
fail:
    Py_DECREF(self);
    return NULL;
}

static void carrier_stop(CarrierObject *self) {
    fd_link_mark_down(&self->link, "the link was closed");
    Py_BEGIN_ALLOW_THREADS
    self->ops->stop(self->carrier);
    Py_END_ALLOW_THREADS
    if (!self->open) return; /* another thread has closed the object meanwhile */
    self->open = false;
    fd_link_state_close_fd(&self->link);
    PyBuffer_Release(&self->region);
}

static void carrier_dealloc(CarrierObject *self) {
    if (self->open) carrier_stop(self);
    if (self->carrier) self->ops->free(self->carrier);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyObject *carrier_close(CarrierObject *self, PyObject *unused) {
    if (self->open) carrier_stop(self);
    Py_RETURN_NONE;
}

static PyObject *carrier_get_reason(CarrierObject *self, void *closure) { return fd_py_down_reason(&self->link); }

static void capsule_free(PyObject *capsule) { Py_DECREF((PyObject *)PyCapsule_GetContext(capsule)); }

/* The capsule keeps the object alive: an R-engine thread may use the carrier until its link is closed. */
static PyObject *carrier_get_capsule(CarrierObject *self, void *closure) {
    PyObject *capsule = PyCapsule_New(&self->contract, FD_CARRIER_CAPSULE, capsule_free);
    if (!capsule) return NULL;
    Py_INCREF(self);
    PyCapsule_SetContext(capsule, self);
    return capsule;
}

static PyMemberDef carrier_members[] = {
    {"down_fd", T_INT, offsetof(CarrierObject, link.fd), READONLY, NULL},
    {0},
};

static PyGetSetDef carrier_getset[] = {
    {"reason", (getter)carrier_get_reason, NULL, NULL, NULL},
    {"carrier", (getter)carrier_get_capsule, NULL, NULL, NULL},
    {0},
};

#define CARRIER_SLOTS(doc, new, methods)                                                                               \
    {                                                                                                                  \
        {Py_tp_doc, doc},                                                                                              \
        {Py_tp_new, new},                                                                                              \
        {Py_tp_dealloc, carrier_dealloc},                                                                              \
        {Py_tp_methods, methods},                                                                                      \
        {Py_tp_members, carrier_members},                                                                              \
        {Py_tp_getset, carrier_getset},                                                                                \
        {0, NULL},                                                                                                     \
    }

/* ---- Pump: TCP ---- */

static void *make_pump(uint8_t *region, const fd_geometry_t *g, fd_link_state_t *link) {
    return fd_pump_new(FD_SIDE_R, region, g, link);
}

static void stop_pump(void *pump) { fd_pump_stop(pump); }
static void free_pump(void *pump) { fd_pump_free(pump); }

static PyObject *pump_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static const carrier_ops_t ops = {"OO&:Pump", make_pump, stop_pump, free_pump, &fd_pump_ops};
    return carrier_new(type, args, kwargs, &ops);
}

static PyObject *pump_start(CarrierObject *self, PyObject *args) {
    int data_fd, wake_fd;
    if (!PyArg_ParseTuple(args, "ii:start", &data_fd, &wake_fd)) return NULL;
    if (fd_pump_start(self->carrier, data_fd, wake_fd)) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyMethodDef pump_methods[] = {
    {"start", (PyCFunction)pump_start, METH_VARARGS, NULL},
    {"close", (PyCFunction)carrier_close, METH_NOARGS, NULL},
    {0},
};

static PyType_Slot pump_slots[] =
    CARRIER_SLOTS("The R side of a TCP link's data path; see _native.pyi.", pump_new, pump_methods);

PyType_Spec fd_py_pump_spec = {
    .name = "fastdecode.transports._native.Pump",
    .basicsize = sizeof(CarrierObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = pump_slots,
};

/* ---- Poster: RDMA ---- */

static void *make_poster(uint8_t *region, const fd_geometry_t *g, fd_link_state_t *link) {
    return fd_poster_new(FD_SIDE_R, region, g, link);
}

static void stop_poster(void *poster) { fd_poster_stop(poster); }
static void free_poster(void *poster) { fd_poster_free(poster); }

static PyObject *poster_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static const carrier_ops_t ops = {"OO&:Poster", make_poster, stop_poster, free_poster, &fd_poster_ops};
    return carrier_new(type, args, kwargs, &ops);
}

static PyObject *poster_start(CarrierObject *self, PyObject *args) {
    fd_verbs_t verbs;
    if (!PyArg_ParseTuple(args, "O&:start", fd_py_verbs, &verbs)) return NULL;
    if (fd_poster_start(self->carrier, &verbs)) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *poster_reap(CarrierObject *self, PyObject *unused) {
    if (self->open) fd_poster_reap(self->carrier);
    Py_RETURN_NONE;
}

static PyObject *poster_kill(CarrierObject *self, PyObject *arg) {
    const char *reason = PyUnicode_AsUTF8(arg);
    if (!reason) return NULL;
    if (self->open) fd_link_mark_down(&self->link, reason);
    Py_RETURN_NONE;
}

static PyMethodDef poster_methods[] = {
    {"start", (PyCFunction)poster_start, METH_VARARGS, NULL},
    {"reap", (PyCFunction)poster_reap, METH_NOARGS, NULL},
    {"kill", (PyCFunction)poster_kill, METH_O, NULL},
    {"close", (PyCFunction)carrier_close, METH_NOARGS, NULL},
    {0},
};

static PyType_Slot poster_slots[] =
    CARRIER_SLOTS("The R side of an RDMA link's data path; see _native.pyi.", poster_new, poster_methods);

PyType_Spec fd_py_poster_spec = {
    .name = "fastdecode.transports._native.Poster",
    .basicsize = sizeof(CarrierObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = poster_slots,
};
