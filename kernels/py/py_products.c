#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "py_object.h"
#include "py_products.h"

bool fd_py_products(PyObject *parts, uint32_t act, size_t ins, size_t outs, fd_products_t *products) {
    if (!PyTuple_Check(parts) || PyTuple_GET_SIZE(parts) < 1 || PyTuple_GET_SIZE(parts) > FD_MOST_PARTS)
        return FD_PY_FAIL(PyExc_ValueError, "a product is a tuple of one to four linears");
    size_t total = 0;
    products->n = (uint32_t)PyTuple_GET_SIZE(parts);
    for (uint32_t i = 0; i < products->n; i++) {
        PyObject *part = PyTuple_GET_ITEM(parts, i);
        fd_product_t *product = &products->parts[i];
        const bool dense = products->n == 1 && fd_py_dense16_product(part, act, product);
        if (!dense && !fd_py_quantised_product(part, act, product))
            return FD_PY_FAIL(PyExc_ValueError, "a linear has no product for these rows");
        if (product->ins != ins)
            return FD_PY_FAIL(PyExc_ValueError, "a linear has %zu inputs, not %zu", product->ins, ins);
        total += product->outs;
    }
    return total == outs || FD_PY_FAIL(PyExc_ValueError, "linears have %zu outputs, not %zu", total, outs);
}
