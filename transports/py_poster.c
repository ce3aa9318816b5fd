/* The R side of an RDMA link for Python, and what Port needs of verbs. */
#include "native.h"

#include <structmember.h>

int fd_py_verbs(PyObject *object, void *out) {
    fd_verbs_t *v = out;
    unsigned long long address, peer, max_message;
    unsigned int qp_num, lkey, rkey, depth;
    if (!PyTuple_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "verbs are a tuple of seven integers");
        return 0;
    }
    if (!PyArg_ParseTuple(object, "KIIIKKI;verbs are a tuple of seven integers", &address, &qp_num, &lkey, &rkey, &peer,
                          &max_message, &depth))
        return 0;
    const char *error = fd_verbs_error(address, qp_num);
    if (!error && (max_message < FD_INLINE_BYTES || max_message > UINT32_MAX || depth < 4))
        error = "its limits make no sense";
    if (error) {
        PyErr_Format(PyExc_ValueError, "not a queue pair that can be posted to: %s", error);
        return 0;
    }
    *v = (fd_verbs_t){(fd_ibv_qp_t *)(uintptr_t)address, lkey, rkey, peer, max_message, depth};
    return 1;
}

PyObject *fd_py_verbs_fds(PyObject *module, PyObject *args) {
    unsigned long long address;
    unsigned int qp_num;
    if (!PyArg_ParseTuple(args, "KI:verbs_fds", &address, &qp_num)) return NULL;
    const char *error = fd_verbs_error(address, qp_num);
    if (error) return PyErr_Format(PyExc_ValueError, "not a queue pair that can be posted to: %s", error);
    const fd_ibv_qp_t *qp = (const fd_ibv_qp_t *)(uintptr_t)address;
    return Py_BuildValue("ii", qp->send_cq->channel->fd, qp->context->async_fd);
}

typedef struct {
    PyObject_HEAD
    Py_buffer region;
    fd_down_t down;
    fd_poster_t *poster;
    fd_notify_t notify;
    bool open; /* the region is held; changes under the GIL */
} PosterObject;

static PyObject *poster_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"region", "geometry", NULL};
    PyObject *region;
    fd_geometry_t g;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO&:Poster", names, &region, fd_py_geometry, &g)) return NULL;
    PosterObject *self = (PosterObject *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    if (fd_py_region(region, &g, &self->region)) goto fail;
    if (fd_down_init(&self->down)) {
        PyErr_SetFromErrno(PyExc_OSError);
        PyBuffer_Release(&self->region);
        goto fail;
    }
    self->poster = fd_poster_new(FD_SIDE_R, self->region.buf, &g, &self->down);
    if (!self->poster) {
        PyErr_NoMemory();
        fd_down_close_fd(&self->down);
        PyBuffer_Release(&self->region);
        goto fail;
    }
    self->open = true;
    self->notify = (fd_notify_t){.fn = fd_poster_send, .ctx = self->poster};
    return (PyObject *)self;
fail:
    Py_DECREF(self);
    return NULL;
}

static void stop(PosterObject *self) {
    fd_down_set(&self->down, "the link was closed");
    Py_BEGIN_ALLOW_THREADS fd_poster_stop(self->poster);
    Py_END_ALLOW_THREADS if (!self->open) return; /* another thread was here meanwhile */
    self->open = false;
    fd_down_close_fd(&self->down);
    PyBuffer_Release(&self->region);
}

static void poster_dealloc(PosterObject *self) {
    if (self->open) stop(self);
    if (self->poster) fd_poster_free(self->poster);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyObject *poster_start(PosterObject *self, PyObject *args) {
    fd_verbs_t verbs;
    if (!PyArg_ParseTuple(args, "O&:start", fd_py_verbs, &verbs)) return NULL;
    if (fd_poster_start(self->poster, &verbs)) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *poster_reap(PosterObject *self, PyObject *unused) {
    if (self->open) fd_poster_reap(self->poster);
    Py_RETURN_NONE;
}

static PyObject *poster_kill(PosterObject *self, PyObject *arg) {
    const char *reason = PyUnicode_AsUTF8(arg);
    if (!reason) return NULL;
    if (self->open) fd_down_set(&self->down, reason);
    Py_RETURN_NONE;
}

static PyObject *poster_close(PosterObject *self, PyObject *unused) {
    if (self->open) stop(self);
    Py_RETURN_NONE;
}

static PyObject *poster_get_reason(PosterObject *self, void *closure) { return fd_py_down_reason(&self->down); }

static PyObject *poster_get_notify(PosterObject *self, void *closure) {
    return fd_py_notify((PyObject *)self, &self->notify);
}

static PyMethodDef poster_methods[] = {
    {"start", (PyCFunction)poster_start, METH_VARARGS, NULL},
    {"reap", (PyCFunction)poster_reap, METH_NOARGS, NULL},
    {"kill", (PyCFunction)poster_kill, METH_O, NULL},
    {"close", (PyCFunction)poster_close, METH_NOARGS, NULL},
    {0},
};

static PyMemberDef poster_members[] = {
    {"down_fd", T_INT, offsetof(PosterObject, down.fd), READONLY, NULL},
    {0},
};

static PyGetSetDef poster_getset[] = {
    {"reason", (getter)poster_get_reason, NULL, NULL, NULL},
    {"notify", (getter)poster_get_notify, NULL, NULL, NULL},
    {0},
};

static PyType_Slot poster_slots[] = {
    {Py_tp_doc, "The R side of an RDMA link's data path; see _native.pyi."},
    {Py_tp_new, poster_new},
    {Py_tp_dealloc, poster_dealloc},
    {Py_tp_methods, poster_methods},
    {Py_tp_members, poster_members},
    {Py_tp_getset, poster_getset},
    {0, NULL},
};

PyType_Spec fd_py_poster_spec = {
    .name = "fastdecode.transports._native.Poster",
    .basicsize = sizeof(PosterObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = poster_slots,
};
