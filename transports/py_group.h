/* The StepGroup object, which py_group.c, py_layers.c and py_wait_any.c share. */
#pragma once

#include "py_port.h"

/* The columns of the step's rows that a layer exchanges with one member, as byte ranges [from, to) of a row. In the
 * member's slot each of q, k and o begins its row, and v follows k. */
typedef struct {
    uint32_t q[2], k[2], v[2], o[2];
} columns_t;

typedef struct {
    PortObject *port;
    uint32_t attend_from, attend_to, append_from, append_to; /* the link's rows among the step's rows */
    bool failed;                                             /* it takes no part in the step any more */
    Py_buffer columns; /* a columns_t for each layer; without bytes: the member's rows are the step's whole rows */
    Py_buffer table;
} member_t;

typedef struct {
    PyObject_HEAD
    uint32_t slot;
    size_t n;
    member_t *members;
    fd_awaited_t *awaited;                         /* [n] */
    size_t *member_of;                             /* [n] the member of each awaited slot */
    Py_buffer q, kv, o;                            /* without bytes: the rows are in the slots */
    size_t q_row_bytes, kv_row_bytes, o_row_bytes; /* of a row of these buffers */
    size_t bytes_per_layer;
    bool local; /* no member's carrier makes system calls that move rows */
    bool busy;  /* a thread is in a method */
} GroupObject;

/* Lists the members that take part in `awaited`. False with an exception if another thread uses the group. */
bool fd_py_group_begin(GroupObject *self, size_t *n);

/* Lets other threads run Python, and holds the ports of the first `n` awaited open meanwhile. */
PyThreadState *fd_py_group_leave_python(GroupObject *self, size_t n);
void fd_py_group_return_to_python(GroupObject *self, size_t n, PyThreadState *state);

/* Returns the failures among the first `n` awaited, or None. With `misuse` it raises ValueError. */
PyObject *fd_py_group_end(GroupObject *self, size_t n, const char *misuse);

/* Copies the rows of the first `n` awaited to their slots and asks for the layer. Returns the caller's mistake or
 * NULL. */
const char *fd_py_group_ring(GroupObject *self, size_t n, uint32_t layer);

/* Copies O rows to the step's buffer, from each of the first `n` awaited slots that has answered a layer. */
void fd_py_group_gather(const GroupObject *self, size_t n);

/* The method run_layers of _native.pyi. */
PyObject *fd_py_group_run_layers(GroupObject *self, PyObject *args);
