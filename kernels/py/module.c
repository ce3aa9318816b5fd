/* The CPython module fastdecode.kernels._native: the R-engine, and the S-Part's quantised linears, row operations,
 * attention of prompts and draws of tokens. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "decoder/reduction.h"
#include "engine/engine.h"
#include "linears/quantise.h"
#include "py_object.h"

extern PyMethodDef fd_engine_methods[];        /* py_engine.c */
extern PyMethodDef fd_roofline_methods[];      /* py_roofline.c */
extern PyMethodDef fd_parallel_methods[];      /* py_parallel.c */
extern PyMethodDef fd_quantise_methods[];      /* py_quantise.c */
bool fd_reduction_add_names(PyObject *module); /* py_reduction.c */

PyTypeObject *fd_py_engine_link_type, *fd_py_linear_type, *fd_py_dense16_type, *fd_py_prompt_type,
    *fd_py_reduction_type, *fd_py_experts_type, *fd_py_delta_type, *fd_py_head_products_type;

static const struct {
    PyType_Spec *spec;
    PyTypeObject **kept;
} types[] = {
    {&fd_py_engine_spec, NULL},
    {&fd_py_engine_link_spec, &fd_py_engine_link_type},
    {&fd_py_lists_spec, NULL},
    {&fd_py_linear_spec, &fd_py_linear_type},
    {&fd_py_dense16_spec, &fd_py_dense16_type},
    {&fd_py_row_ops_spec, NULL},
    {&fd_py_delta_spec, &fd_py_delta_type},
    {&fd_py_prompt_spec, &fd_py_prompt_type},
    {&fd_py_joints_spec, NULL},
    {&fd_py_experts_spec, &fd_py_experts_type},
    {&fd_py_head_products_spec, &fd_py_head_products_type},
    {&fd_py_reduction_spec, &fd_py_reduction_type},
    {&fd_py_draw_rows_spec, NULL},
};

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
    PyMethodDef *const methods[] = {isa_methods, fd_engine_methods, fd_roofline_methods, fd_parallel_methods,
                                    fd_quantise_methods};
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++)
        if (PyModule_AddFunctions(module, methods[i]) < 0) return -1;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (!fd_py_add_type(module, types[i].spec, types[i].kept)) return -1;
    if (PyModule_AddIntConstant(module, "MAX_THREADS", FD_MAX_THREADS) < 0) return -1;
    if (PyModule_AddIntConstant(module, "MAX_RANKS", FD_MOST_RANKS) < 0) return -1;
    if (PyModule_AddIntConstant(module, "QUANTISE_COLUMNS", FD_QUANTISE_MOST_COLUMNS) < 0) return -1;
    return fd_reduction_add_names(module) ? 0 : -1;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, exec_module}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "fastdecode.kernels._native",
    .m_doc = "The R-engine, and the S-Part's products, row operations and draws.",
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
