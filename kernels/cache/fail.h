/* How a function of the KV-cache and the R-engine reports an error to its caller. */
#ifndef FD_FAIL_H
#define FD_FAIL_H

#include <stdio.h>

/* Writes a sentence into the caller's `err`, a buffer of `err_len` bytes, and evaluates to `status`. */
#define FD_FAIL(status, ...) (snprintf(err, err_len, __VA_ARGS__), (status))

#endif
