/* How functions of the KV-cache and the R-engine report errors. A function that can fail returns FD_OK or the kind of
 * error; one that makes something returns NULL. The kind and a sentence are then in *error.
 *
 * FD_BAD_CALL and FD_BAD_SEQUENCE: the arguments are wrong. FD_OUT_OF_PAGES and FD_INTERNAL: memory is short.
 * FD_LINK_CLOSED: a socket has failed. A function whose name ends in _error only checks: it returns why not, or NULL.
 */
#pragma once

#include <stdio.h>

#include "region/region.h"

typedef struct {
    fd_status_t status;
    int number; /* errno of a socket */
    char text[sizeof((fd_report_t *)0)->message];
} fd_error_t;

/* Reports an error to the caller, whose fd_error_t is at `error`; evaluates to `kind`. */
#define FD_FAIL(kind, ...) (snprintf(error->text, sizeof error->text, __VA_ARGS__), error->status = (kind))
