/* The products of Python's objects, for other objects in C. Include Python.h first. */
#ifndef FD_PY_PRODUCTS_H
#define FD_PY_PRODUCTS_H

#include "joint.h"

/* Each function returns 1, or 0 if `o` is not of its type or has no product of rows in the activation dtype `act`. The
 * product is valid as long as `o`. */
int fd_py_quantised_product(PyObject *o, uint32_t act, fd_product_t *product); /* py_linears.c */
int fd_py_dense16_product(PyObject *o, uint32_t act, fd_product_t *product);   /* py_dense16.c */

#endif
