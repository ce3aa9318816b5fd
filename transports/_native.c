/* The extension module fastdecode.transports._native. */
#include "py_port.h"

PyTypeObject *fd_py_port_type, *fd_py_group_type;

static PyMethodDef functions[] = {
    {"verbs_fds", fd_py_verbs_fds, METH_VARARGS, NULL},
    {"wait_any", fd_py_wait_any, METH_VARARGS, NULL},
    {0},
};

static int module_exec(PyObject *module) {
    PyType_Spec *const specs[] = {&fd_py_port_spec, &fd_py_r_port_spec, &fd_py_group_spec, &fd_py_proxy_spec};
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        PyObject *type = PyType_FromSpec(specs[i]);
        if (!type || PyModule_AddType(module, (PyTypeObject *)type)) {
            Py_XDECREF(type);
            return -1;
        }
        if (specs[i] == &fd_py_port_spec) fd_py_port_type = (PyTypeObject *)Py_NewRef(type);
        if (specs[i] == &fd_py_group_spec) fd_py_group_type = (PyTypeObject *)Py_NewRef(type);
        Py_DECREF(type);
    }
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,  .m_name = "_native",     .m_doc = "The links' data path in C; see _native.pyi.",
    .m_methods = functions, .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module_def); }
