/* The CPython module fastdecode.kernels._native: attention for tests and measurements, the R-engine, and
 * the S-Part's quantised linears, row operations, attention of prompts and draws of tokens. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyMethodDef fd_attention_methods[];    /* py_attention.c */
extern PyMethodDef fd_engine_methods[];       /* py_engine.c */
extern PyMethodDef fd_roofline_methods[];     /* py_roofline.c */
int fd_engine_add_types(PyObject *module);    /* py_engine.c */
int fd_linears_add_types(PyObject *module);   /* py_linears.c */
int fd_dense16_add_types(PyObject *module);   /* py_dense16.c */
int fd_row_ops_add_types(PyObject *module);   /* py_row_ops.c */
int fd_prompt_add_types(PyObject *module);    /* py_prompt.c */
int fd_joints_add_types(PyObject *module);    /* py_joints.c */
int fd_draw_rows_add_types(PyObject *module); /* py_draw_rows.c */

static int exec_module(PyObject *module) {
    if (PyModule_AddFunctions(module, fd_attention_methods) < 0) return -1;
    if (PyModule_AddFunctions(module, fd_engine_methods) < 0) return -1;
    if (PyModule_AddFunctions(module, fd_roofline_methods) < 0) return -1;
    if (fd_linears_add_types(module) < 0) return -1;
    if (fd_dense16_add_types(module) < 0) return -1;
    if (fd_row_ops_add_types(module) < 0) return -1;
    if (fd_prompt_add_types(module) < 0) return -1;
    if (fd_joints_add_types(module) < 0) return -1;
    if (fd_draw_rows_add_types(module) < 0) return -1;
    return fd_engine_add_types(module);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, exec_module}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "fastdecode.kernels._native",
    .m_doc = "C attention over KV pages, the R-engine, and the S-Part's products, row operations and draws.",
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
