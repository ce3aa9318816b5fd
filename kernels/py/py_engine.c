/* REngine: the R-engine for Python; py_engine_link.c has its links. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "py_engine.h"
#include "region/py_geometry.h"
#include "py_layers.h"

/* Chooses the planes of a page. */
static bool get_planes(const fd_geometry_t *g, unsigned kv_dtype, layer_args_t *a, fd_planes_t *planes) {
    fd_layer_t layers[FD_MAX_LAYERS];
    fd_error_t error;
    if (kv_dtype >= FD_KV_DTYPES) PyErr_Format(PyExc_ValueError, "unknown KV-cache dtype %u", kv_dtype);
    else if (get_layers(a, g, layers)) {
        if (fd_layers_check(g, layers, kv_dtype, &error) != FD_OK) engine_error(&error, PyExc_ValueError);
        else *planes = fd_page_planes(g, layers, kv_dtype);
    }
    return !PyErr_Occurred();
}

/* The planes for the arguments (geometry, kv_dtype, *, windows, segments, kv_layers, selections, heads). */
static bool parse_planes(PyObject *args, PyObject *kwargs, fd_planes_t *planes) {
    static char *names[] = {"geometry", "kv_dtype", "windows", "segments", "kv_layers", "selections", "heads", NULL};
    fd_geometry_t g;
    unsigned kv_dtype;
    layer_args_t a = {0};
    return PyArg_ParseTupleAndKeywords(args, kwargs, "O&I|$OOOOO", names, fd_py_geometry, &g, &kv_dtype, &a.windows,
                                       &a.segments, &a.kv_layers, &a.selections, &a.heads) &&
           get_planes(&g, kv_dtype, &a, planes);
}

static PyObject *py_page_bytes(PyObject *module, PyObject *args, PyObject *kwargs) {
    fd_planes_t planes;
    if (!parse_planes(args, kwargs, &planes)) return NULL;
    return PyLong_FromSize_t(planes.n_planes * planes.plane_bytes);
}

static PyObject *py_page_sections(PyObject *module, PyObject *args, PyObject *kwargs) {
    fd_planes_t planes;
    if (!parse_planes(args, kwargs, &planes)) return NULL;
    return Py_BuildValue("(III)", planes.n_sections - planes.n_limited, planes.n_limited, planes.reach);
}

/* ---- REngine ---- */

static bool choose_huge(const char *name, fd_huge_t *huge) {
    static const char *names[FD_HUGE_MODES] = {"madvise", "hugetlb", "off"};
    for (int i = 0; i < FD_HUGE_MODES; i++)
        if (!strcmp(name, names[i])) return *huge = (fd_huge_t)i, true;
    return FD_PY_FAIL(PyExc_ValueError, "huge_pages is '%s', not madvise, hugetlb or off", name);
}

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"threads",    "kv_bytes", "isa",          "cpus", "spin_us",
                            "huge_pages", "prefault", "step_spin_us", "gpu",  NULL};
    fd_engine_config_t config = {.spin_us = 100, .gpu = -1};
    const char *isa = NULL, *huge = "madvise";
    PyObject *cpus = Py_None;
    int prefault = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "IK|zOIspIi", names, &config.threads, FD_UINT64(config.kv_bytes),
                                     &isa, &cpus, &config.spin_us, &huge, &prefault, &config.step_spin_us, &config.gpu))
        return NULL;
    if (!fd_py_choose_isa(isa, &config.isa) || !choose_huge(huge, &config.huge)) return NULL;
    if (config.threads < 1 || config.threads > FD_MAX_THREADS)
        return PyErr_Format(PyExc_ValueError, "%u threads are not within 1..%d", config.threads, FD_MAX_THREADS);
    int pins[FD_MAX_THREADS];
    if (cpus != Py_None && !fd_py_ints(cpus, "cpus", config.threads, INT_MAX, pins, sizeof *pins)) return NULL;
    engine_object_t *self = (engine_object_t *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->has_gpu = config.gpu >= 0;
    self->threads = config.threads;
    config.cpus = cpus == Py_None ? NULL : pins;
    config.prefault = prefault;
    self->head.isa = fd_isa_name(config.isa);
    self->pid = getpid();
    fd_error_t error;
    self->engine = fd_engine_new(&config, &error);
    if (self->engine) return (PyObject *)self;
    Py_DECREF(self);
    return engine_error(&error, PyExc_RuntimeError);
}

static void stop_engine(engine_object_t *self) {
    fd_engine_t *engine = self->engine;
    self->engine = NULL;
    if (!engine || self->pid != getpid()) return;
    FD_WITHOUT_GIL(fd_engine_free(engine));
}

static void engine_dealloc(engine_object_t *self) {
    stop_engine(self);
    fd_py_free(self);
}

static PyObject *engine_close(engine_object_t *self, PyObject *unused) {
    if (self->n_links)
        return PyErr_Format(PyExc_RuntimeError, "the R-engine still serves %u links; close them first", self->n_links);
    stop_engine(self);
    Py_RETURN_NONE;
}

/* Reads the kernels of each layer, tuples (append, attend, warps, shared_bytes, queries, at_once), to
 * kernels[n_layers]. */
static bool get_gpu_kernels(PyObject *o, uint32_t n_layers, fd_gpu_kernels_t *kernels) {
    PyObject *seq = fd_py_sequence(o, "gpu_kernels", n_layers);
    for (uint32_t i = 0; seq && i < n_layers; i++) {
        fd_gpu_kernels_t *k = &kernels[i];
        PyObject *of_layer = PySequence_Fast_GET_ITEM(seq, i);
        if (!PyTuple_Check(of_layer)) PyErr_SetString(PyExc_TypeError, "a layer's kernels are a tuple");
        else if (PyArg_ParseTuple(of_layer, "KKIIII", FD_ADDRESS(k->append), FD_ADDRESS(k->attend), &k->warps,
                                  &k->shared_bytes, &k->queries, &k->at_once) &&
                 (!k->warps || !k->queries || !k->at_once))
            PyErr_SetString(PyExc_ValueError, "a kernel has no warps, no queries or no blocks");
        if (PyErr_Occurred()) break;
    }
    Py_XDECREF(seq);
    return !PyErr_Occurred();
}

static PyObject *engine_add_link(engine_object_t *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"region",        "geometry",   "kv_dtype", "n_pages",     "max_seqs",
                            "softmax_scale", "windows",    "carrier",  "max_pages",   "segments",
                            "kv_layers",     "selections", "softcaps", "sinks",       "slopes",
                            "heads",         "part",       "hadamard", "gpu_kernels", NULL};
    PyObject *region, *carrier = Py_None, *gpu_kernels = Py_None;
    layer_args_t a = {0};
    fd_geometry_t g;
    fd_lease_t lease = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO&IIIfO|OI$OOOOOOO(II)IO", names, &region, fd_py_geometry, &g,
                                     &lease.kv_dtype, &lease.n_pages, &lease.max_seqs, &lease.softmax_scale, &a.windows,
                                     &carrier, &lease.max_pages, &a.segments, &a.kv_layers, &a.selections, &a.softcaps,
                                     &a.sinks, &a.slopes, &a.heads, &lease.part.index, &lease.part.n, &a.hadamard,
                                     &gpu_kernels))
        return NULL;
    if (!self->engine) return closed_error("the R-engine");
    if (is_given(gpu_kernels) != self->has_gpu)
        return PyErr_Format(PyExc_ValueError, "gpu_kernels are for an R-engine with a GPU, and are needed there");
    fd_gpu_kernels_t kernels[FD_MAX_LAYERS];
    if (self->has_gpu && !get_gpu_kernels(gpu_kernels, g.n_layers, kernels)) return NULL;
    lease.gpu_kernels = self->has_gpu ? kernels : NULL;
    const fd_carrier_t *target = NULL;
    if (carrier != Py_None && !(target = PyCapsule_GetPointer(carrier, FD_CARRIER_CAPSULE))) return NULL;
    fd_layer_t layers[FD_MAX_LAYERS];
    lease.layers = layers;
    link_object_t *link = NULL;
    if (get_layers(&a, &g, layers)) link = (link_object_t *)fd_py_engine_link_type->tp_alloc(fd_py_engine_link_type, 0);
    fd_error_t error;
    if (link && fd_py_region(region, &g, &link->region) == 0) {
        link->link = fd_engine_add_link(self->engine, link->region.buf, &g, &lease, target, &error);
        if (!link->link) engine_error(&error, PyExc_MemoryError);
    }
    release_layer_args(&a); /* the engine has copied the layers */
    if (!link || !link->link) {
        Py_XDECREF(link);
        return NULL;
    }
    link->owner = (engine_object_t *)Py_NewRef(self);
    link->carrier = Py_NewRef(carrier);
    self->n_links++;
    return (PyObject *)link;
}

static PyObject *engine_pages_within(engine_object_t *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"geometry", "kv_dtype",  "bytes",      "grows", "windows",
                            "segments", "kv_layers", "selections", "heads", NULL};
    fd_geometry_t g;
    unsigned kv_dtype;
    unsigned long long bytes;
    int grows;
    layer_args_t a = {0};
    fd_planes_t planes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&IKp|$OOOOO", names, fd_py_geometry, &g, &kv_dtype, &bytes, &grows,
                                     &a.windows, &a.segments, &a.kv_layers, &a.selections, &a.heads) ||
        !get_planes(&g, kv_dtype, &a, &planes))
        return NULL;
    if (!self->engine) return closed_error("the R-engine");
    return PyLong_FromUnsignedLongLong(fd_engine_pages_within(self->engine, planes, bytes, grows));
}

static PyObject *engine_get_kv_free(engine_object_t *self, void *unused) {
    if (!self->engine) return closed_error("the R-engine");
    return PyLong_FromUnsignedLongLong(fd_engine_kv_free(self->engine));
}

static PyObject *engine_get_eventfd(engine_object_t *self, void *unused) {
    if (!self->engine) return closed_error("the R-engine");
    return PyLong_FromLong(fd_engine_eventfd(self->engine));
}

static void stand_in_free(PyObject *capsule) {
    fd_stand_in_t *stand_in = PyCapsule_GetPointer(capsule, FD_STAND_IN_CAPSULE);
    fd_engine_end_stand_in(stand_in);
    PyMem_Free(stand_in);
}

static PyObject *engine_get_stand_in(engine_object_t *self, void *unused) {
    if (!self->engine) return closed_error("the R-engine");
    fd_stand_in_t *stand_in = PyMem_Malloc(sizeof *stand_in);
    if (!stand_in) return PyErr_NoMemory();
    fd_engine_begin_stand_in(self->engine, stand_in);
    PyObject *capsule = PyCapsule_New(stand_in, FD_STAND_IN_CAPSULE, stand_in_free);
    if (!capsule) {
        fd_engine_end_stand_in(stand_in);
        PyMem_Free(stand_in);
    }
    return capsule;
}

static PyMemberDef engine_members[] = {
    {"isa", T_STRING, offsetof(engine_object_t, head.isa), READONLY, "name of the instruction set in use"},
    {"threads", T_UINT, offsetof(engine_object_t, threads), READONLY, "number of threads"},
    {0},
};

static PyGetSetDef engine_getset[] = {
    {"kv_free", (getter)engine_get_kv_free, NULL, "bytes of the budget that no lease has", NULL},
    {"eventfd", (getter)engine_get_eventfd, NULL, "eventfd that wakes the engine, for callers in this process", NULL},
    {"stand_in", (getter)engine_get_stand_in, NULL, "capsule of stand_in.h for Ports of this process", NULL},
    {0},
};

static PyMethodDef engine_methods[] = {
    {"add_link", FD_PY_KEYWORDS(engine_add_link), "Grant a lease and serve the calls in a region."},
    {"pages_within", FD_PY_KEYWORDS(engine_pages_within), "The most pages that a lease of `bytes` may have."},
    {"close", (PyCFunction)engine_close, METH_NOARGS, "Join the threads. All links must be closed."},
    {0},
};

/* ---- module ---- */

FD_PY_TYPE(fd_py_engine_spec, "fastdecode.kernels._native.REngine", engine_object_t,
           {Py_tp_doc, "The R-engine: threads that serve the calls of all links without entering Python."},
           {Py_tp_new, engine_new}, {Py_tp_dealloc, engine_dealloc}, {Py_tp_methods, engine_methods},
           {Py_tp_members, engine_members}, {Py_tp_getset, engine_getset});

static PyObject *py_gpu_splits(PyObject *module, PyObject *args) {
    unsigned long long pairs;
    unsigned rounds, at_once;
    if (!PyArg_ParseTuple(args, "KII", &pairs, &rounds, &at_once)) return NULL;
    if (!at_once) return PyErr_Format(PyExc_ValueError, "a GPU runs at least one block at once");
    return PyLong_FromUnsignedLong(fd_gpu_splits(pairs, rounds, at_once));
}

static PyObject *py_bind_memory(PyObject *module, PyObject *args) {
    unsigned node;
    if (!PyArg_ParseTuple(args, "I", &node)) return NULL;
    errno = fd_memory_bind(node);
    if (errno) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

PyMethodDef fd_engine_methods[] = {
    {"bind_memory", py_bind_memory, METH_VARARGS,
     "Allocate only from a NUMA node, in this thread and the threads that it starts."},
    {"gpu_splits", py_gpu_splits, METH_VARARGS, "Into how many blocks a GPU cuts the work of a row and KV head."},
    {"page_bytes", FD_PY_KEYWORDS(py_page_bytes), "Bytes of a page."},
    {"page_sections", FD_PY_KEYWORDS(py_page_sections),
     "Pages of a block, for the layers that see all tokens and for those of limited reach, and their reach."},
    {0},
};
