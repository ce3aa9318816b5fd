/* REQUIRE(condition): prints the condition and aborts if it does not hold. */
#pragma once

#include <stdio.h>
#include <stdlib.h>

#define REQUIRE(condition)                                                                                             \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition);                              \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)
