/* RankReduction, for the types that sum within their own calls. Include Python.h first. */
#pragma once

#include "decoder/reduction.h"

/* The fd_reduction_t of a RankReduction; NULL with an exception for another object. */
fd_reduction_t *fd_py_reduction(PyObject *o);

/* Raises RankError for a broken reduction; returns NULL. */
PyObject *fd_py_raise_broken(const fd_reduction_t *r);
