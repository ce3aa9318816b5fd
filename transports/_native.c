/* The extension module fastdecode.transports._native. */
#include "py_port.h"

PyTypeObject *fd_py_port_type, *fd_py_group_type;

static PyMethodDef functions[] = {
    {"verbs_fds", fd_py_verbs_fds, METH_VARARGS, NULL},
    {"wait_any", fd_py_wait_any, METH_VARARGS, NULL},
    {0},
};

static int module_exec(PyObject *module) {
    const bool added = fd_py_add_type(module, &fd_py_port_spec, &fd_py_port_type) &&
                       fd_py_add_type(module, &fd_py_r_port_spec, NULL) &&
                       fd_py_add_type(module, &fd_py_group_spec, &fd_py_group_type) &&
                       fd_py_add_type(module, &fd_py_proxy_spec, NULL);
    return added ? 0 : -1;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,  .m_name = "_native",     .m_doc = "The links' data path in C; see _native.pyi.",
    .m_methods = functions, .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module_def); }
