/* HeadProducts: fd_head_products_t for Python. It keeps the objects of the products. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "py_object.h"
#include "py_products.h"

typedef struct {
    PyObject_HEAD
    fd_head_products_t heads;
    fd_product_t *each;
    uint32_t act_dtype;
    PyObject *products; /* as they were given */
} head_products_t;

static bool alike(const fd_product_t *a, const fd_product_t *b) {
    return a->ins == b->ins && a->outs == b->outs && a->multiply == b->multiply && a->ops == b->ops;
}

static PyObject *head_products_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keys[] = {"act_dtype", "products", NULL};
    unsigned act;
    PyObject *products;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "IO!", keys, &act, &PyTuple_Type, &products)) return NULL;
    const size_t n = (size_t)PyTuple_GET_SIZE(products);
    if (!n || act >= FD_ACT_DTYPES) return PyErr_Format(PyExc_ValueError, "no such heads");
    head_products_t *self = (head_products_t *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->act_dtype = act;
    self->products = Py_NewRef(products);
    self->each = PyMem_Calloc(n, sizeof *self->each);
    if (!self->each) PyErr_NoMemory();
    for (size_t i = 0; self->each && !PyErr_Occurred() && i < n; i++) {
        PyObject *o = PyTuple_GET_ITEM(products, i);
        fd_product_t *product = &self->each[i];
        if ((!fd_py_dense16_product(o, act, product) && !fd_py_quantised_product(o, act, product)) ||
            !alike(product, self->each))
            PyErr_SetString(PyExc_ValueError, "the heads' matrices are not alike, or have no product for these rows");
    }
    if (!PyErr_Occurred()) {
        self->heads = (fd_head_products_t){n, self->each[0].ins, self->each[0].outs, self->each};
        return (PyObject *)self;
    }
    Py_DECREF(self);
    return NULL;
}

static void head_products_dealloc(head_products_t *self) {
    PyMem_Free(self->each);
    Py_XDECREF(self->products);
    fd_py_free(self);
}

const fd_head_products_t *fd_py_head_products(PyObject *o, uint32_t act) {
    if (Py_IS_TYPE(o, fd_py_head_products_type) && ((head_products_t *)o)->act_dtype == act)
        return &((head_products_t *)o)->heads;
    PyErr_SetString(PyExc_TypeError, "not HeadProducts of the activation dtype");
    return NULL;
}

static PyObject *run(head_products_t *self, PyObject *args) {
    const void *x;
    void *y;
    size_t rows;
    unsigned threads;
    fd_status_t status;
    if (!PyArg_ParseTuple(args, "KKnI", FD_ADDRESS(x), FD_ADDRESS(y), &rows, &threads)) return NULL;
    const size_t bytes = fd_act_bytes(self->act_dtype);
    FD_WITHOUT_GIL(status = fd_head_products(&self->heads, x, y, rows, bytes, threads ? threads : 1));
    if (status != FD_OK) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)run, METH_VARARGS, "The products of the heads' rows (fd_head_products)."},
    {NULL, NULL, 0, NULL},
};
FD_PY_TYPE(fd_py_head_products_spec, "fastdecode.kernels._native.HeadProducts", head_products_t,
           {Py_tp_doc, "Products of each head's rows with a matrix of that head (head_products.h)."},
           {Py_tp_new, head_products_new}, {Py_tp_dealloc, head_products_dealloc}, {Py_tp_methods, methods});
