/* What the extension modules share. Include Python.h first. */
#pragma once

#include <stdbool.h>

/* Sets an exception and is false. */
#define FD_PY_FAIL(exception, ...) (PyErr_Format(exception, __VA_ARGS__) != NULL)

/* Defines `spec`, the PyType_Spec of the type `type_name`, whose objects are the C struct `object`; its slots follow.
 */
#define FD_PY_TYPE(spec, type_name, object, ...)                                                                       \
    FD_PY_TYPE_WITH(Py_TPFLAGS_IMMUTABLETYPE, spec, type_name, object, __VA_ARGS__)
#define FD_PY_TYPE_WITH(type_flags, spec, type_name, object, ...)                                                      \
    static PyType_Slot spec##_slots[] = {__VA_ARGS__, {0, NULL}};                                                      \
    PyType_Spec spec = {                                                                                               \
        .name = type_name,                                                                                             \
        .basicsize = sizeof(object),                                                                                   \
        .flags = Py_TPFLAGS_DEFAULT | (type_flags),                                                                    \
        .slots = spec##_slots,                                                                                         \
    }

/* The function and the flags of a method that takes keyword arguments, for a PyMethodDef. */
#define FD_PY_KEYWORDS(function) (PyCFunction)(void (*)(void))(function), METH_VARARGS | METH_KEYWORDS

/* Runs a statement while other threads may run Python. */
#define FD_WITHOUT_GIL(...)                                                                                            \
    do {                                                                                                               \
        Py_BEGIN_ALLOW_THREADS                                                                                         \
        __VA_ARGS__;                                                                                                   \
        Py_END_ALLOW_THREADS                                                                                           \
    } while (0)

/* Adds a type to the module under its name, and keeps it in *kept for tests of objects, if `kept` is not NULL. False
 * with an exception. */
static inline bool fd_py_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **kept) {
    PyTypeObject *type = (PyTypeObject *)PyType_FromSpec(spec);
    const bool added = type && PyModule_AddType(module, type) == 0;
    if (added && kept) *kept = (PyTypeObject *)Py_NewRef(type);
    Py_XDECREF(type);
    return added;
}

/* Frees an object of such a type: the end of its Py_tp_dealloc. */
static inline void fd_py_free(void *object) {
    PyTypeObject *type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}
