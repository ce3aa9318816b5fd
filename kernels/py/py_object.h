/* What the objects of this module share. Include Python.h first.
 *
 * A function here that can fail returns true, or false with an exception set; a function that makes an object returns
 * NULL then.
 */
#pragma once

#include <stddef.h>
#include <structmember.h>

#include "cpu/isa.h"
#include "region/py_types.h"

/* A uint64_t as the unit K of a format writes it, and a pointer: Python gives the address as an integer, 0 for NULL. */
#define FD_UINT64(number) ((unsigned long long *)&(number))
#define FD_ADDRESS(pointer) FD_UINT64(pointer)
_Static_assert(sizeof(void *) == sizeof(unsigned long long), "the unit K fills a pointer");
/* The pointers of an fd_angles_t, a tuple "(KKKK)" in Python. */
#define FD_ANGLES(a) FD_ADDRESS((a).cos), FD_ADDRESS((a).sin), FD_ADDRESS((a).q_cos), FD_ADDRESS((a).q_sin)

/* Picks the ISA called `name`, else the one in FASTDECODE_ISA, else the best. */
bool fd_py_choose_isa(const char *name, fd_isa_t *isa);

/* Takes the buffer of the argument `name`, C-contiguous and with the further `flags`. The caller releases the view. */
bool fd_py_view(PyObject *o, const char *name, int flags, Py_buffer *view);
/* The same for a buffer that must have `size` bytes. */
bool fd_py_bytes(PyObject *o, const char *name, int flags, size_t size, Py_buffer *view);

/* The `n` objects of `o` as a list or tuple, NULL if there are not as many. */
PyObject *fd_py_sequence(PyObject *o, const char *what, Py_ssize_t n);
/* Writes the `n` integers of the sequence `o`, 0 to `max`, to 32-bit fields that begin `stride` bytes apart. */
bool fd_py_ints(PyObject *o, const char *what, Py_ssize_t n, long long max, void *fields, size_t stride);
/* A new array of all the integers of `o`, of 32 bits each and *n in number. The caller frees it with PyMem_Free. */
void *fd_py_new_ints(PyObject *o, const char *what, long long max, Py_ssize_t *n);

/* The head of an object that runs the kernels of one ISA, and its attribute. */
typedef struct {
    PyObject_HEAD
    const char *isa;
} fd_py_kernels_t;
extern PyMemberDef fd_py_isa_member[];

/* The types whose objects are told from others, and the specs of all types, which module.c adds to the module. */
extern PyTypeObject *fd_py_engine_link_type, *fd_py_linear_type, *fd_py_dense16_type, *fd_py_prompt_type,
    *fd_py_reduction_type, *fd_py_experts_type, *fd_py_delta_type, *fd_py_head_products_type;
extern PyType_Spec fd_py_engine_spec, fd_py_engine_link_spec, fd_py_lists_spec, fd_py_linear_spec, fd_py_dense16_spec,
    fd_py_row_ops_spec, fd_py_delta_spec, fd_py_prompt_spec, fd_py_joints_spec, fd_py_experts_spec,
    fd_py_head_products_spec, fd_py_reduction_spec, fd_py_draw_rows_spec;
