/* Half vectors (docs/adding-an-isa.md) of an ISA with 4 or 8 lanes: there are none, because head sizes are multiples
 * of 8, but the templates need these names. */
#pragma once

FD_INLINE vec_t vec_load_half(const float *p) { return vec_load(p); }
FD_INLINE void vec_store_half(float *p, vec_t x) { vec_store(p, x); }
FD_INLINE void vec_store_fp16_half(void *p, vec_t x) { vec_store_fp16(p, x); }
FD_INLINE void vec_store_bf16_half(void *p, vec_t x) { vec_store_bf16(p, x); }
FD_INLINE void vec_store_u8_half(void *p, vec_t x, int zero) { vec_store_u8(p, x, zero); }
FD_INLINE void vec_store_int_half(void *p, vec_t x, int zero) { vec_store_int(p, x, zero); }
