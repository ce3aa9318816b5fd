/* The vectors that every CPU of the architecture has. */
#include "draw_rows_loops.h"

FD_DRAW_ROWS(base)
