/* The functions of Python's objects, for other objects in C. Include Python.h first. */
#pragma once

#include <stdbool.h>

#include "decoder/head_products.h"
#include "decoder/joint.h"
#include "decoder/prompt_chunks.h"

/* Each function returns true, or false if `o` is not of its type or has no product of rows in the activation dtype
 * `act`. The product is valid as long as `o`. */
bool fd_py_quantised_product(PyObject *o, uint32_t act, fd_product_t *product); /* py_linears.c */
bool fd_py_dense16_product(PyObject *o, uint32_t act, fd_product_t *product);   /* py_dense16.c */

/* The fd_experts_t of an ExpertOps, valid as long as `o`; NULL with an exception for another object. In py_experts.c.
 */
const fd_experts_t *fd_py_experts(PyObject *o);

/* The fd_head_products_t of a HeadProducts, valid as long as `o`; NULL with an exception for another object or another
 * activation dtype. In py_head_products.c. */
const fd_head_products_t *fd_py_head_products(PyObject *o, uint32_t act);

/* The fd_delta_t of a DeltaRows and its functions, valid as long as `o`; NULL with an exception for another object or
 * another activation dtype. In py_delta.c. */
const fd_delta_t *fd_py_delta(PyObject *o, uint32_t act, const fd_delta_ops_t **ops);

/* Reads a tuple of linears whose outputs stand side by side: `outs` in all, of `ins` inputs. Returns false with an
 * exception. In py_products.c. */
bool fd_py_products(PyObject *parts, uint32_t act, size_t ins, size_t outs, fd_products_t *products);

/* Reads the prompts' chunks of a step of `rows` rows, (PromptAttention, scale, chunks) as _native.pyi has it, for the
 * model `j` and the activation dtype `act`. Returns memory to be freed with PyMem_Free, or NULL with an exception. In
 * py_prompt.c. */
fd_prompt_chunks_t *fd_py_prompt_chunks(PyObject *o, uint32_t act, const fd_joints_t *j, size_t rows);
