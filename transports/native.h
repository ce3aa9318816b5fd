/* Declarations that the files of fastdecode.transports._native share. */
#ifndef FD_NATIVE_H
#define FD_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "port.h"

/* The reason why the link is down, or None if it is not down. */
PyObject *fd_py_down_reason(fd_down_t *down);

/* O& converter to an fd_geometry_t: (n_slots, max_rows, n_layers, n_q_heads, n_kv_heads, head_size, act_dtype), all
 * integers. */
int fd_py_geometry(PyObject *object, void *out);

/* Takes a writable buffer that has exactly the size of the geometry's region. Returns 0, or -1 with an exception. */
int fd_py_region(PyObject *object, const fd_geometry_t *g, Py_buffer *view);

/* O& converter to an fd_verbs_t: (address of the struct ibv_qp, its number, lkey, rkey, address of the peer's region,
 * most bytes of a message, depth of the send queue), all integers. */
int fd_py_verbs(PyObject *object, void *out);

/* The function verbs_fds of _native.pyi. */
PyObject *fd_py_verbs_fds(PyObject *module, PyObject *args);

extern PyType_Spec fd_py_pump_spec, fd_py_poster_spec;

#endif
