/* How Port and RPort get at the queue pairs that pyverbs has made in Python. */
#include "native.h"

int fd_py_verbs(PyObject *object, void *out) {
    fd_verbs_t *v = out;
    unsigned long long address, peer, max_message;
    unsigned int qp_num, lkey, rkey, depth;
    if (!PyTuple_Check(object)) return FD_PY_FAIL(PyExc_TypeError, "verbs are a tuple of seven integers");
    if (!PyArg_ParseTuple(object, "KIIIKKI;verbs are a tuple of seven integers", &address, &qp_num, &lkey, &rkey, &peer,
                          &max_message, &depth))
        return 0;
    const char *error = fd_verbs_error(address, qp_num);
    if (!error && (max_message < FD_INLINE_BYTES || max_message > UINT32_MAX || depth < 4))
        error = "its limits are invalid";
    if (error) return FD_PY_FAIL(PyExc_ValueError, "not a queue pair that can be posted to: %s", error);
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
