/* The objects REngine and REngineLink, which py_engine.c and py_engine_link.c share. Include Python.h first. */
#pragma once

#include "engine/engine.h"
#include "py_object.h"

typedef struct {
    fd_py_kernels_t head;
    fd_engine_t *engine;
    uint32_t threads, n_links;
    bool has_gpu;
    pid_t pid; /* of the process that started the threads: a child forked from it has the object only */
} engine_object_t;

typedef struct {
    PyObject_HEAD
    fd_link_t *link;
    engine_object_t *owner;
    PyObject *carrier;
    Py_buffer region;
    /* Threads that use `link` without the GIL; changed with the GIL. Each copies `link` while it holds the GIL, because
     * remove_link sets it to NULL before it waits for them. */
    uint32_t users;
    bool retired; /* the engine does not serve the link any more */
} link_object_t;

/* Raises RuntimeError. */
static inline PyObject *closed_error(const char *what) {
    return PyErr_Format(PyExc_RuntimeError, "%s is closed", what);
}

/* Raises the exception for an error of the R-engine: `exception` unless the arguments were wrong. */
static inline PyObject *engine_error(const fd_error_t *error, PyObject *exception) {
    const bool wrong = error->status == FD_BAD_CALL || error->status == FD_BAD_SEQUENCE;
    PyErr_SetString(wrong ? PyExc_ValueError : exception, error->text);
    return NULL;
}
