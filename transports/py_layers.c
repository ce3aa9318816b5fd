/* StepGroup.run_layers: the layers of a step one after another, without Python in between. */
#include "region/spart_layers.h"
#include "py_group.h"

/* When the S-Part began to wait for a layer's replies, and when all of them had come, in seconds of CLOCK_MONOTONIC. */
typedef struct {
    double asked, replied;
} times_t;

static double seconds_now(void) { return (double)fd_now_ns() * 1e-9; }

/* Asks the first `n` awaited for a layer and waits for them. Returns the caller's mistake or NULL. `error`: of
 * layers->compute_meanwhile. */
static const char *exchange(GroupObject *self, size_t n, uint32_t layer, uint64_t timeout_ns,
                            const fd_spart_layers_t *layers, times_t *times, int *error) {
    const char *misuse = fd_py_group_ring(self, n, layer);
    if (!misuse && layers->compute_meanwhile) *error = layers->compute_meanwhile(layers->self, layer);
    times->asked = seconds_now();
    if (misuse) return misuse;
    for (size_t k = 0; k < n; k++)
        if (self->awaited[k].result == FD_PORT_OK) self->awaited[k].result = FD_PORT_PENDING;
    fd_port_await(self->awaited, n, timeout_ns);
    if (self->o.buf) fd_py_group_gather(self, n);
    times->replied = seconds_now();
    return NULL;
}

static bool any_failed(const GroupObject *self, size_t n) {
    for (size_t k = 0; k < n; k++)
        if (self->awaited[k].result != FD_PORT_OK) return true;
    return false;
}

static void make_pending(GroupObject *self, size_t n) {
    for (size_t k = 0; k < n; k++) self->awaited[k].result = FD_PORT_PENDING;
}

PyObject *fd_py_group_run_layers(GroupObject *self, PyObject *args) {
    PyObject *capsule;
    unsigned from, to;
    uint64_t timeout_ns;
    if (!PyArg_ParseTuple(args, "OIIO&:run_layers", &capsule, &from, &to, fd_py_timeout, &timeout_ns)) return NULL;
    const fd_spart_layers_t *layers = PyCapsule_GetPointer(capsule, FD_SPART_LAYERS_CAPSULE);
    if (!layers) return NULL;
    if (from >= to || to > FD_MAX_LAYERS) return PyErr_Format(PyExc_ValueError, "no layers from %u to %u", from, to);
    PyObject *times = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)((to - from) * sizeof(times_t)));
    size_t n;
    if (!times || !fd_py_group_begin(self, &n)) {
        Py_XDECREF(times);
        return NULL;
    }
    times_t *time = (times_t *)PyBytes_AS_STRING(times);
    const char *misuse = NULL;
    int error = 0;
    bool failed = false;
    uint32_t layer = from;
    PyThreadState *state = fd_py_group_leave_python(self, n);
    while (layer < to && !failed && !error) {
        if (layer > from) make_pending(self, n);
        misuse = exchange(self, n, layer, timeout_ns, layers, time++, &error);
        failed = misuse || any_failed(self, n);
        layer++;
        if (!failed && !error) error = layers->compute_rows(layers->self, layer);
    }
    fd_py_group_return_to_python(self, n, state);
    PyObject *failures = fd_py_group_end(self, n, misuse);
    if (failures && error) {
        Py_CLEAR(failures);
        layers->raise(layers->self);
    }
    if (!failures || _PyBytes_Resize(&times, (Py_ssize_t)((layer - from) * sizeof(times_t)))) {
        Py_XDECREF(times);
        Py_XDECREF(failures);
        return NULL;
    }
    return Py_BuildValue("NN", failures, times);
}
