/* The CPython module fastdecode.kernels._native: the R-engine, and the S-Part's quantised linears, row operations,
 * attention of prompts and draws of tokens. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

#include "cpu/isa.h"

extern PyMethodDef fd_engine_methods[];        /* py_engine.c */
extern PyMethodDef fd_roofline_methods[];      /* py_roofline.c */
extern PyMethodDef fd_parallel_methods[];      /* py_parallel.c */
bool fd_engine_add_types(PyObject *module);    /* py_engine.c */
bool fd_linears_add_types(PyObject *module);   /* py_linears.c */
bool fd_dense16_add_types(PyObject *module);   /* py_dense16.c */
bool fd_row_ops_add_types(PyObject *module);   /* py_row_ops.c */
bool fd_delta_add_types(PyObject *module);     /* py_delta.c */
bool fd_prompt_add_types(PyObject *module);    /* py_prompt.c */
bool fd_joints_add_types(PyObject *module);    /* py_joints.c */
bool fd_reduction_add_types(PyObject *module); /* py_reduction.c */
bool fd_draw_rows_add_types(PyObject *module); /* py_draw_rows.c */
bool fd_lists_add_types(PyObject *module);     /* py_page_lists.c */

static PyObject *isa_best(PyObject *self, PyObject *unused) { return PyUnicode_FromString(fd_isa_name(fd_isa_best())); }

static PyObject *isa_supported(PyObject *self, PyObject *unused) {
    PyObject *names = PyList_New(0);
    for (int i = 0; names && i < FD_ISAS; i++) {
        if (!fd_isa_supported((fd_isa_t)i)) continue;
        PyObject *name = PyUnicode_FromString(fd_isa_name((fd_isa_t)i));
        if (!name || PyList_Append(names, name)) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static PyMethodDef isa_methods[] = {
    {"isa_best", isa_best, METH_NOARGS, "isa_best() -> str: the best ISA that this CPU and OS support."},
    {"isa_supported", isa_supported, METH_NOARGS, "isa_supported() -> list[str], slowest first."},
    {NULL, NULL, 0, NULL},
};

static int exec_module(PyObject *module) {
    PyMethodDef *const methods[] = {isa_methods, fd_engine_methods, fd_roofline_methods, fd_parallel_methods};
    bool (*const add_types[])(PyObject *) = {
        fd_linears_add_types, fd_dense16_add_types,   fd_row_ops_add_types, fd_delta_add_types, fd_prompt_add_types,
        fd_joints_add_types,  fd_draw_rows_add_types, fd_engine_add_types,  fd_lists_add_types, fd_reduction_add_types,
    };
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++)
        if (PyModule_AddFunctions(module, methods[i]) < 0) return -1;
    for (size_t i = 0; i < sizeof add_types / sizeof *add_types; i++)
        if (!add_types[i](module)) return -1;
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, exec_module}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "fastdecode.kernels._native",
    .m_doc = "The R-engine, and the S-Part's products, row operations and draws.",
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
