/* The tile registers of AMX (Intel SDM vol. 1, ch. 18). ISA files include this within their target. */
#pragma once

#include <stdint.h>

enum { FD_AMX_TILES = 8, FD_AMX_ROWS = 16, FD_AMX_ROW_BYTES = 64 };

/* What LDTILECFG reads: the bytes of a row and the rows of each tile. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} fd_amx_config_t;

/* _tile_loadconfig tells gcc 12 that it reads 8 bytes, so gcc may drop what was stored in the others. */
FD_INLINE void fd_amx_configure(const fd_amx_config_t *config) {
    __asm__ volatile("" : : "m"(*config));
    _tile_loadconfig(config);
}
