/* The CPython module fastdecode.region._native: the constants of region.h and formats.h, and the layout of a region. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

#include "py_geometry.h"

static PyObject *region_layout(PyObject *module, PyObject *args) {
    fd_geometry_t g;
    if (!PyArg_ParseTuple(args, "O&:region_layout", fd_py_geometry, &g)) return NULL;
    const fd_layout_t y = fd_region_layout(&g);
    return Py_BuildValue("nnnnnnnnnn", (Py_ssize_t)y.slot0, (Py_ssize_t)y.slot_bytes, (Py_ssize_t)y.region_bytes,
                         (Py_ssize_t)y.table, (Py_ssize_t)y.q, (Py_ssize_t)y.kv, (Py_ssize_t)y.o,
                         (Py_ssize_t)y.q_row_bytes, (Py_ssize_t)y.kv_row_bytes, (Py_ssize_t)y.o_row_bytes);
}

static PyObject *init_region_header(PyObject *module, PyObject *args) {
    PyObject *region;
    fd_geometry_t g;
    Py_buffer view;
    if (!PyArg_ParseTuple(args, "OO&:init_region_header", &region, fd_py_geometry, &g) ||
        fd_py_region(region, &g, &view))
        return NULL;
    *(fd_region_header_t *)view.buf =
        (fd_region_header_t){.magic = FD_REGION_MAGIC, .version = FD_PROTOCOL_VERSION, .geometry = g};
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

static PyObject *check_region_header(PyObject *module, PyObject *args) {
    PyObject *region;
    fd_geometry_t g;
    Py_buffer view;
    if (!PyArg_ParseTuple(args, "OO&:check_region_header", &region, fd_py_geometry, &g) ||
        fd_py_region(region, &g, &view))
        return NULL;
    const fd_region_header_t header = *(const fd_region_header_t *)view.buf;
    PyBuffer_Release(&view);
    if (header.magic != FD_REGION_MAGIC)
        return PyErr_Format(PyExc_ValueError, "the region does not begin with its magic number");
    if (header.version != FD_PROTOCOL_VERSION)
        return PyErr_Format(PyExc_ValueError, "the region has version %u, this end %u", header.version,
                            FD_PROTOCOL_VERSION);
    if (memcmp(&header.geometry, &g, sizeof g))
        return PyErr_Format(PyExc_ValueError, "the region was laid out for another geometry");
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"region_layout", region_layout, METH_VARARGS,
     "region_layout(geometry) -> the fields of fastdecode.region.geometry.RegionLayout, in order"},
    {"init_region_header", init_region_header, METH_VARARGS,
     "init_region_header(region, geometry): write the first page of a region"},
    {"check_region_header", check_region_header, METH_VARARGS,
     "check_region_header(region, geometry): raise ValueError if the first page is not the one for this geometry"},
    {0},
};

/* ---- constants ---- */

static const struct {
    const char *name;
    long long value;
} integers[] = {
    {"PROTOCOL_VERSION", FD_PROTOCOL_VERSION},
    {"REGION_PAGE", FD_REGION_PAGE},
    {"PAGE_TOKENS", FD_PAGE_TOKENS},
    {"MAX_SLOTS", FD_MAX_SLOTS},
    {"MAX_ROWS", FD_MAX_ROWS},
    {"MAX_LAYERS", FD_MAX_LAYERS},
    {"MAX_HEADS", FD_MAX_HEADS},
    {"MAX_HEAD_SIZE", FD_MAX_HEAD_SIZE},
    {"MAX_INDEX_TOPK", FD_MAX_INDEX_TOPK},
    {"HEAD_SIZE_UNIT", FD_HEAD_SIZE_UNIT},
    {"MAX_PAGES", FD_MAX_PAGES},
    {"MAX_SEQS", FD_MAX_SEQS},
    {"MAX_SECTIONS", FD_MAX_SECTIONS},
    {"POISON", FD_POISON},
    {"ROW_ATTEND", FD_ROW_ATTEND},
    {"ROW_TRIM", FD_ROW_TRIM},
    {"ROW_SLIDE", FD_ROW_SLIDE},
    {"ROW_PARTIAL", FD_ROW_PARTIAL},
    {"ARM_BYTES", sizeof(fd_arm_t)},
    {"ROW_BYTES", sizeof(fd_row_t)},
    {"REPORT_BYTES", sizeof(fd_report_t)},
    {"SLOT_BYTES", sizeof(fd_slot_t)},
    {"REQUEST_OFFSET", offsetof(fd_slot_t, layer_request)},
    {"REPLY_OFFSET", offsetof(fd_slot_t, layer_reply)},
};

#define ROW_FIELD(name) {#name, offsetof(fd_row_t, name)}
static const struct {
    const char *name;
    size_t offset;
} row_fields[] = {ROW_FIELD(seq_index), ROW_FIELD(tag),   ROW_FIELD(pos),
                  ROW_FIELD(n_rows),    ROW_FIELD(flags), ROW_FIELD(reserved)};
enum { N_ROW_FIELDS = sizeof row_fields / sizeof *row_fields };
_Static_assert(N_ROW_FIELDS * sizeof(uint32_t) == sizeof(fd_row_t),
               "every field of fd_row_t is a uint32_t listed here");

/* Adds `object` to the module and drops the caller's reference to it. 0, or -1 with an exception set. */
static int add(PyObject *module, const char *name, PyObject *object) {
    const int outcome = object ? PyModule_AddObjectRef(module, name, object) : -1;
    Py_XDECREF(object);
    return outcome;
}

static PyObject *tuple_of_names(const char *const *names, Py_ssize_t n) {
    PyObject *tuple = PyTuple_New(n);
    for (Py_ssize_t i = 0; tuple && i < n; i++) {
        PyObject *name = PyUnicode_FromString(names[i]);
        if (name) PyTuple_SET_ITEM(tuple, i, name);
        else Py_CLEAR(tuple);
    }
    return tuple;
}

static PyObject *tuple_of_row_fields(void) {
    PyObject *tuple = PyTuple_New(N_ROW_FIELDS);
    for (Py_ssize_t i = 0; tuple && i < N_ROW_FIELDS; i++) {
        PyObject *field = Py_BuildValue("sn", row_fields[i].name, (Py_ssize_t)row_fields[i].offset);
        if (field) PyTuple_SET_ITEM(tuple, i, field);
        else Py_CLEAR(tuple);
    }
    return tuple;
}

#define STATUS_FORMAT(constant, value) "s:i"
#define STATUS_VALUE(constant, value) , &#constant[sizeof "FD_" - 1], constant

static int exec_module(PyObject *module) {
    for (size_t i = 0; i < sizeof integers / sizeof *integers; i++)
        if (add(module, integers[i].name, PyLong_FromLongLong(integers[i].value))) return -1;
    if (add(module, "ACT_DTYPES", tuple_of_names(fd_act_dtype_names, FD_ACT_DTYPES))) return -1;
    if (add(module, "KV_DTYPES", tuple_of_names(fd_kv_dtype_names, FD_KV_DTYPES))) return -1;
    if (add(module, "ROW_FIELDS", tuple_of_row_fields())) return -1;
    return add(module, "STATUSES", Py_BuildValue("{" FD_STATUSES(STATUS_FORMAT) "}" FD_STATUSES(STATUS_VALUE)));
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, exec_module}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "fastdecode.region._native",
    .m_doc = "The constants of region.h and formats.h, and the layout of an activation region.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
