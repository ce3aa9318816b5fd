/* The function wait_any of fastdecode.transports._native: waiting for any of several groups and descriptors. */
#include "py_group.h"

enum { WAITS_MAX = 2 * FD_MAX_SLOTS };

typedef struct {
    fd_awaited_t *awaited; /* room for the members of all groups */
    PortObject **ports;    /* of each awaited slot: NULL if it was not entered */
    size_t ends[WAITS_MAX], group_of[WAITS_MAX], n_groups;
    struct pollfd fds[WAITS_MAX + 1];
    size_t fd_of[WAITS_MAX + 1], n_fds;
    size_t n;
} any_t;

/* Lists the members of a group that are awaited, and holds their ports open. */
static void list_group(any_t *any, GroupObject *group, size_t index) {
    for (size_t i = 0; i < group->n; i++) {
        const member_t *m = &group->members[i];
        if (m->failed) continue;
        const bool open = fd_py_port_enter(m->port);
        any->ports[any->n] = open ? m->port : NULL;
        any->awaited[any->n++] = (fd_awaited_t){
            .port = &m->port->port, .slot = group->slot, .result = open ? FD_PORT_PENDING : FD_PORT_DOWN, .peek = true};
    }
    any->group_of[any->n_groups] = index;
    any->ends[any->n_groups++] = any->n;
}

/* Sorts the waits by kind. The index of one that is over already, -1, or -2 with an exception. */
static long list_waits(any_t *any, PyObject **waits, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (waits[i] == Py_None) return (long)i;
        if (Py_IS_TYPE(waits[i], fd_py_group_type)) {
            list_group(any, (GroupObject *)waits[i], i);
            continue;
        }
        const int fd = (int)PyLong_AsLong(waits[i]);
        if (fd == -1 && PyErr_Occurred()) return -2;
        any->fd_of[any->n_fds] = i;
        any->fds[any->n_fds++] = (struct pollfd){.fd = fd, .events = POLLIN};
    }
    return -1;
}

static long wait_for_any(any_t *any, size_t n, int wake_fd, uint64_t timeout_ns) {
    any->fd_of[any->n_fds] = n; /* the last descriptor stands for no wait */
    any->fds[any->n_fds++] = (struct pollfd){.fd = wake_fd, .events = POLLIN};
    const fd_waits_t waits = {any->awaited, any->n, any->ends, any->n_groups, any->fds, any->n_fds};
    long over;
    FD_WITHOUT_GIL(over = fd_port_await_any(&waits, timeout_ns));
    if (over < 0) return -1;
    const size_t index = (size_t)over < any->n_groups ? any->group_of[over] : any->fd_of[(size_t)over - any->n_groups];
    return index < n ? (long)index : -1;
}

PyObject *fd_py_wait_any(PyObject *module, PyObject *args) {
    PyObject *list, *result = NULL;
    int wake_fd;
    uint64_t timeout_ns;
    if (!PyArg_ParseTuple(args, "OiO&:wait_any", &list, &wake_fd, fd_py_timeout, &timeout_ns)) return NULL;
    PyObject *waits = PySequence_Fast(list, "waits are a sequence");
    if (!waits) return NULL;
    const size_t n = (size_t)PySequence_Fast_GET_SIZE(waits);
    size_t members = 1;
    for (size_t i = 0; i < n; i++) {
        PyObject *wait = PySequence_Fast_GET_ITEM(waits, (Py_ssize_t)i);
        if (Py_IS_TYPE(wait, fd_py_group_type)) members += ((GroupObject *)wait)->n;
    }
    any_t any = {0};
    any.awaited = PyMem_Calloc(members, sizeof *any.awaited);
    any.ports = PyMem_Calloc(members, sizeof(PortObject *));
    if (!any.awaited || !any.ports) PyErr_NoMemory();
    else if (n > WAITS_MAX) PyErr_Format(PyExc_ValueError, "%zu waits are more than %d", n, WAITS_MAX);
    else {
        long over = list_waits(&any, PySequence_Fast_ITEMS(waits), n);
        if (over == -1) over = wait_for_any(&any, n, wake_fd, timeout_ns);
        if (over >= -1) result = over < 0 ? Py_NewRef(Py_None) : PyLong_FromLong(over);
    }
    for (size_t i = 0; i < any.n; i++)
        if (any.ports[i]) fd_py_port_leave(any.ports[i]);
    PyMem_Free(any.awaited);
    PyMem_Free(any.ports);
    Py_DECREF(waits);
    return result;
}
