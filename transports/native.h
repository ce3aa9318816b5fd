/* Declarations that the files of fastdecode.transports._native share. */
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "port.h"
#include "region/py_geometry.h"
#include "region/py_types.h"
#include "rdma_poster.h"
#include "tcp_pump.h"

/* `text` as a str; bytes that are no UTF-8 are replaced. */
PyObject *fd_py_text(const char *text);

/* Raises ConnectionError with the reason why the link is down. */
PyObject *fd_py_down_error(fd_link_state_t *link);

/* O& converter: seconds, a float that is not negative, to nanoseconds (uint64_t). */
int fd_py_timeout(PyObject *object, void *out);

/* The reason why the link is down, as a str. */
PyObject *fd_py_down_reason(fd_link_state_t *link);

/* O& converter to an fd_verbs_t: (address of the struct ibv_qp, its number, lkey, rkey, address of the peer's region,
 * most bytes of a message, depth of the send queue), all integers. */
int fd_py_verbs(PyObject *object, void *out);

/* The function verbs_fds of _native.pyi. */
PyObject *fd_py_verbs_fds(PyObject *module, PyObject *args);

extern PyType_Spec fd_py_port_spec, fd_py_r_port_spec, fd_py_group_spec, fd_py_proxy_spec;
