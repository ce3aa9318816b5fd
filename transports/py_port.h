/* The object of both ends of a link, which py_port.c and py_group.c share. */
#pragma once

#include "native.h"

typedef struct {
    PyObject_HEAD
    fd_side_t side;
    bool open;           /* the object holds the region; changes under the GIL */
    uint32_t inside;     /* number of threads in a method that uses the region without the GIL */
    fd_pump_t *pump;     /* TCP; else NULL */
    fd_poster_t *poster; /* RDMA; else NULL */
    fd_shm_s_t shm;
    PyObject *stand_in; /* the capsule of shm.stand_in; else NULL */
    fd_port_t port;     /* at the R side only its region, link and carrier */
    Py_buffer region;
} PortObject;

extern PyTypeObject *fd_py_port_type, *fd_py_group_type; /* set when the module is loaded */

/* A method that uses the region without the GIL calls enter before and leave afterwards, so that closing the port can
 * wait for it. False if the port is closed. */
bool fd_py_port_enter(PortObject *self);
void fd_py_port_leave(PortObject *self);

/* True if sending makes no system call that moves rows, so that it need not release the GIL. */
bool fd_py_port_is_local(const PortObject *self);

/* The function wait_any of _native.pyi. */
PyObject *fd_py_wait_any(PyObject *module, PyObject *args);
