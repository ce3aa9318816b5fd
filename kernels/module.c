/* The CPython module over the kernels: each py_*.c brings its functions. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyMethodDef fd_attention_methods[];

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_native", .m_size = -1};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *m = PyModule_Create(&module);
    if (m && PyModule_AddFunctions(m, fd_attention_methods) < 0) Py_CLEAR(m);
    return m;
}
