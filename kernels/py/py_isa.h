/* The choice of an ISA for Python's objects. Include Python.h first. */
#ifndef FD_PY_ISA_H
#define FD_PY_ISA_H

#include <stdlib.h>
#include <string.h>

#include "attention/attention.h"

static void raise_no_isa(const char *what, const char *name) {
    char has[64] = "";
    for (int i = 0; i < FD_ISAS; i++)
        if (fd_isa_supported((fd_isa_t)i)) {
            if (*has) strcat(has, ", ");
            strcat(has, fd_isa_name((fd_isa_t)i));
        }
    PyErr_Format(PyExc_ValueError, "%s '%s' cannot be used; this machine has %s", what, name, has);
}

/* Picks the ISA called `name`, else the one in FASTDECODE_ISA, else the best. 1, or 0 with an exception set. */
static int fd_py_choose_isa(const char *name, fd_isa_t *isa) {
    const char *what = "isa";
    if (!name) {
        what = "FASTDECODE_ISA";
        name = getenv(what);
        if (name && !*name) name = NULL;
    }
    *isa = fd_isa_best();
    if (!name) return 1;
    if (fd_isa_from_name(name, isa) == 0 && fd_isa_supported(*isa)) return 1;
    raise_no_isa(what, name);
    return 0;
}

#endif
